"""Seconds of a whole pre-training run: encode once and train E epochs, against stock training and the official way.

    python -m benchmarks.whole_run [--quick]

Real text (English Wikipedia), MiniLM cut after layer 5 as teacher, a student BERT of 6 x 256 with batches of 32 windows
of 128 tokens, k = 768, all in one process on a CPU. Timed, one after the other:

    encode      `encode_lsp` as a user calls it: reading text, learning the dictionary, teacher, solver, shards
    mlsm        the steps of one epoch of `train_student` from that store; its start, checkpoints and export are counted
                once for ours, and not for the others
    stock_mlm   one epoch of stock masked-LM training of the same encoder on the same windows: transformers' own
                modules with logits at every position, as transformers does it, or at masked ones only, with torch's own
                products or oneDNN's, whichever is fastest here
    official    the official way online: teacher and 100 FISTA steps of the masked positions at every step, likewise
                with torch's own products or oneDNN's

A run of E epochs takes encode + begin and end + E x mlsm, E x stock_mlm or E x official: one epoch is measured and
multiplied. Stock and official batches are read from the same store, with the same order and masks. The official
way's epoch, which has the dictionary for nothing, is the median of some steps, multiplied. Ours is timed from its
first, slow steps on, and reads ahead in a thread; the others begin warm. `--quick` takes a quarter of the text, of
which the dictionary, a fixed cost, is a larger part, times fewer steps, and multiplies the stock rival's median step
too. Only time is compared, not what the students have learned by then (docs/results.md).

Prints readable lines, then one of JSON.
"""

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import transformers

from benchmarks.data import conditions, data_file, minilm_directory, report
from benchmarks.official_step import cut_model, official_step
from benchmarks.student_step import sparse_step, stock_step
from pipeline.commands import encode_lsp
from pipeline.config import EncodeConfig
from pipeline.dictionary import Dictionary
from shards.reader import Store
from student.config import StudentConfig
from student.train import train

TEXT = "text/wiki_en_2014/wiki_en_2014_small.txt.xz"
TOKENS, LAYER, K = 500_000, 5, 768
EPOCHS = (1, 4, 10)
RACE_STEPS, WARM_UP, OFFICIAL_STEPS, QUICK_STEPS = 6, 2, 8, 4
CONFIG = StudentConfig(encoder="bert-6x256", batch_windows=32, micro_batch=32, lr=5e-4, device="cpu", eval_every=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as directory:
        begun = time.perf_counter()
        store = encode(Path(directory), TOKENS // 4 if quick else TOKENS)
        seconds = {"encode": time.perf_counter() - begun}
        steps = len(store.split("train")) // CONFIG.batch_windows
        config = replace(CONFIG, max_steps=steps, store=str(store.path), run_dir=Path(directory) / "student")
        begun = time.perf_counter()
        seconds["mlsm"] = train(config)["seconds"]
        seconds["mlsm_begin_and_end"] = time.perf_counter() - begun - seconds["mlsm"]
        seconds["stock_mlm"], fastest = train_stock(config, store, quick)
        seconds["official"], kind = train_officially(config, store, QUICK_STEPS if quick else OFFICIAL_STEPS)
    result = {"benchmark": "whole_run", "quick": quick, **figures(seconds), "best_stock_mlm": fastest}
    result |= {"best_official": kind, "steps": steps, "k": K}
    result |= {"tokens": steps * CONFIG.batch_windows * store.max_length, **conditions()}
    report(result)


def figures(seconds: dict) -> dict:
    """Seconds of one epoch of each, and the ratios of whole runs."""
    found: dict = {"seconds": seconds}
    for epochs in EPOCHS:
        ours = seconds["encode"] + seconds["mlsm_begin_and_end"] + epochs * seconds["mlsm"]
        found[f"mlsm_vs_stock_mlm_run_at_{epochs}"] = ours / (epochs * seconds["stock_mlm"])
        found[f"vs_official_run_at_{epochs}"] = ours / (epochs * seconds["official"])
    gained = seconds["stock_mlm"] - seconds["mlsm"]
    once = seconds["encode"] + seconds["mlsm_begin_and_end"]
    return found | {"break_even_epochs": once / gained if gained > 0 else None}


def encode(directory: Path, tokens: int) -> Store:
    config = EncodeConfig(
        corpus=(str(data_file(TEXT)),),
        teacher=str(minilm_directory()),
        layer=(LAYER,),
        k=(K,),
        max_tokens=tokens,
        device="cpu",
        output=directory,
    )
    (report,) = encode_lsp(config)
    return Store.open(report["store"])


def train_stock(config: StudentConfig, store, quick: bool) -> tuple[float, str]:
    """Seconds of an epoch of the fastest kind of stock training, measured or by its median step; and which that is."""
    steps = {
        f"{name}{'_onednn' * onednn}": make(store, config, onednn, ready=False)
        for name, make in (("stock_mlm", stock_step), ("stock_mlm_masked", sparse_step))
        for onednn in (False, True)
    }
    race = {name: sum(sorted(timed(step, range(RACE_STEPS)))[: RACE_STEPS // 2]) for name, step in steps.items()}
    fastest = min(race, key=lambda name: race[name])
    if quick:
        return float(np.median(timed(steps[fastest], range(QUICK_STEPS)))) * config.max_steps, fastest
    return sum(timed(steps[fastest], range(config.max_steps))), fastest


def train_officially(config: StudentConfig, store, steps: int) -> tuple[float, str]:
    """Seconds of an epoch with teacher and solver online, by the median step of the faster kind, and which that is."""
    teacher = cut_model(minilm_directory(), LAYER)
    atoms_Kd = torch.from_numpy(Dictionary.load(store.files.dictionary).atoms_Kd)
    medians = {}
    for name in ("official", "official_onednn"):
        step = official_step(store, config, teacher, atoms_Kd, onednn=name == "official_onednn", ready=False)
        timed(step, range(WARM_UP))
        medians[name] = float(np.median(timed(step, range(WARM_UP, WARM_UP + steps))))
    fastest = min(medians, key=lambda name: medians[name])
    return medians[fastest] * config.max_steps, fastest


def timed(step, numbers) -> list[float]:
    """Seconds of every step."""
    seconds = []
    for number in numbers:
        begun = time.perf_counter()
        step(number)
        seconds.append(time.perf_counter() - begun)
    return seconds


if __name__ == "__main__":
    main()
