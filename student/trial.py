"""The child process in which ways to train are tried on a GPU: proof.py runs it and judges what it reports.

    python -m student.trial DIRECTORY       # reads task.json there, writes report.jsonl

Every way to train starts from the same weights and reads the same batches. Dropout is off, because a compiled student
draws its random numbers in another order. A few batches alternate, so that a compiled student meets several shapes. Not
tried: masks by weight.
"""

import importlib
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mlsm.common import proofs
from mlsm.common.device import choose_device, own_randomness
from shards.reader import Store
from student import proof
from student.batches import Loader, pin
from student.config import ResolvedConfig
from student.encoders.mask_later import mask_later_of
from student.masks.masking import build_masking
from student.resolve import training_windows
from student.task import TrainingTask
from student.train import Stepper

BATCHES, STEPS, TIMED = 3, 9, 3  # the last steps are timed: by then all shapes are compiled


def main(directory: Path) -> None:
    """Try the ways to train that the task allows, and report each one when it ends."""
    task = json.loads((directory / proofs.TASK).read_text())
    config = find(task["class"])(**task["config"])
    store, device = Store.open(task["store"]), choose_device(config.device)
    asked, found = (task["dtype"], task["compile"]), {}

    def attempt(dtype: str, compiled: bool) -> None:
        way = proof.name_of(dtype, compiled)
        proofs.report(directory, way, {})
        try:
            one: Any = replace(config, dtype=dtype, compile=compiled)
            with own_randomness(device):
                found[way] = take_steps(one, find(task["prepare"])(one, store), store, task["marginals"])
        except Exception as error:  # any error of a compiler, a driver or a library is a result
            found[way] = proofs.failure(error)
        proofs.report(directory, way, found[way])

    attempt("float32", False)
    if asked[0] != "float32":
        attempt("bfloat16", False)
    if asked[1] is None:
        attempt(proof.decide_arithmetic(found, None, *asked).dtype, True)


def find(place: str) -> Any:
    """The object that module:name refers to."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def take_steps(config: ResolvedConfig, task: TrainingTask, store: Store, marginals: str | None) -> dict:
    """Losses of a few steps, seconds of the first and of later ones, and the GPU memory that they took."""
    device = choose_device(config.device)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
        torch.cuda.reset_peak_memory_stats(device)
    stepper = Stepper(config, task.build().to(device), task.objective)
    windows = training_windows(store)
    task.objective.prepare(windows, Path(marginals) if marginals else None)
    loader = Loader(
        windows,
        build_masking(config, store),
        task.objective.read_targets,
        micro_batch=config.micro_batch,
        documents_apart=config.documents_apart,
        segments=task.segments,
        mask_later=mask_later_of(stepper.model.encoder.config) > 0,
        few_shapes=config.compile,
    )
    batches = [loader.step(config.seed, number, config.batch_windows) for number in range(BATCHES)]
    batches = [pin(batch) for batch in batches] if on_gpu else batches
    losses, seconds = [], []
    for step in range(STEPS):
        begun = time.perf_counter()
        losses.append(stepper.update(step, batches[step % BATCHES])[0])  # waits for the GPU
        seconds.append(time.perf_counter() - begun)
    facts = {"losses": losses, "first_seconds": seconds[0], "seconds": statistics.median(seconds[-TIMED:])}
    return facts | ({"memory_bytes": torch.cuda.max_memory_allocated(device)} if on_gpu else {})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
