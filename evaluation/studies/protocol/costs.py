"""What the parts of a study will cost, from measurements of some seconds.

    for cost in costs(plan(study, directory, data), progress):
        cost.part, cost.seconds, cost.bytes

A store is measured as `--dry-run` of its command does. Of a student, a few steps are timed with the encoder, batch and
window of the recipe; trainings, probes and evaluations of it follow by their operations at that rate. So the figures
say hours from minutes, not minutes from seconds: tokens of an example are counted by their characters, and short
inputs have a lower rate than full windows. What is finished costs nothing. Left out: the diagnostic of layers, of which
only the teacher's pass over SemCor and learning the dictionaries count.
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from common.device import choose_device
from common.errors import MlsmError
from evaluation.studies.flops.encoders import Encoder, measure_student
from evaluation.studies.protocol.description import STORES
from evaluation.studies.protocol.parts import FUNCTIONS, Made, Part
from evaluation.tasks.finetuning.data import load_task
from evaluation.tasks.finetuning.tasks import TASKS
from pipeline.config import CorpusConfig
from shards.reader import Store

TIMED_STEPS = 3  # after one to warm up
CHARACTERS = 4.5  # of a token, about
WORDS = 11  # of a sentence of BLiMP, about: each is hidden once
PAIRS, PARADIGMS = 1000, 67
SEMCOR_TOKENS = 900_000
WEIGHT_BYTES = 4
STATE = 3  # a checkpoint to resume from: weights and AdamW's two moments


class Cost(NamedTuple):
    """What is left to do of a part."""

    part: str
    seconds: float
    bytes: int
    finished: bool = False


def costs(parts: list[Part], progress: Callable[..., None]) -> Iterator[Cost]:
    """The cost of every part. Raises what the measured commands raise."""
    of_stores: dict[str, dict] = {}
    for part in parts:
        if is_finished(part):
            yield Cost(part.name, 0.0, 0, True)
        elif part.verb in STORES:
            found = of_stores[part.name] = _store_cost(part, progress)
            yield Cost(part.name, found["seconds"] + found.get("learning_seconds", 0.0), found["bytes"])
        elif part.verb in ("train-student", "train-probe"):
            yield _training_cost(part, parts)
        elif part.verb == "finetune":
            yield Cost(part.name, _tuning_seconds(part, parts), 0)
        elif part.verb == "evaluate-blimp":
            yield Cost(part.name, _blimp_seconds(part, parts), 0)
        else:
            yield Cost(part.name, _diagnostic_seconds(part, of_stores), 0)


def is_finished(part: Part) -> bool:
    """Whether nothing is left to do of a part, as far as its files say: an evaluation has all its records."""
    output = Path(part.values["output"])
    if part.verb in ("train-student", "train-probe"):
        return (output / "result.json").is_file()
    if part.verb in STORES:
        return _is_whole(part, output / "stores")
    if part.verb == "choose-layer":
        return any(output.glob("diagnostics/*/result.json"))
    settings = part.settings()
    output = output / "smoke" if getattr(settings, "smoke", False) else output
    suite = "finetune" if part.verb == "finetune" else "blimp"
    wanted = len(settings.chosen_tasks()) * (1 if settings.smoke else settings.seeds) if suite == "finetune" else 1
    name = Path(settings.models[0]).name
    found: dict[Path, int] = {}
    for record in output.glob(f"evaluations/{name}-????????/{suite}/*.json"):
        found[record.parent] = found.get(record.parent, 0) + 1
    return max(found.values(), default=0) >= wanted


def _is_whole(part: Part, stores: Path) -> bool:
    wanted = math.prod(len(part.values.get(name, [0])) for name in ("layer", "k")) if part.verb == "encode-lsp" else 1
    whole = 0
    for path in stores.glob("*/target.json"):
        try:
            Store.open(path.parent)
            whole += 1
        except (MlsmError, OSError):  # unfinished or damaged: its command says which
            continue
    return whole >= wanted


def _store_cost(part: Part, progress) -> dict[str, Any]:
    if part.verb == "derive-shards":  # copies a store that may not be there yet; small beside the others
        return {"seconds": 0.0, "bytes": 0}
    if any(isinstance(value, Made) for value in part.values.values()):  # a dictionary that may not be there yet
        part = part._replace(values={k: v for k, v in part.values.items() if not isinstance(v, Made)})
        return _dry_run(part, progress) | {"learning_seconds": 0.0}
    return _dry_run(part, progress)


def _dry_run(part: Part, progress) -> dict[str, Any]:
    return FUNCTIONS[part.verb](replace(part.settings(), dry_run=True), progress)[0]


def _training_cost(part: Part, parts: list[Part]) -> Cost:
    """Of a student; of a probe, whose student is only read: a third of its operations."""
    of = part if part.verb == "train-student" else _training_of(part.values["student"], parts)
    rate, flops, parameters = _measure(of.values["encoder"], _length(of, parts), of.values.get("device", "auto"))
    steps = part.values.get("max_steps") or of.values["max_steps"] // 10
    batch = part.values.get("batch_windows") or of.values["batch_windows"]
    times = 3 if part.verb == "train-student" else 1
    kept = len(of.values.get("checkpoints", (0.1, 0.25, 0.5, 1.0))) + 1
    size = (kept + STATE) * WEIGHT_BYTES * parameters if part.verb == "train-student" else 0
    return Cost(part.name, steps * batch * times * flops / rate, size)


def _tuning_seconds(part: Part, parts: list[Part]) -> float:
    settings = part.settings()
    if settings.smoke:
        return 5.0 * len(settings.chosen_tasks())
    rate, flops, length = _of_model(part, parts)
    tokens = 0.0
    for name in settings.chosen_tasks():
        train, evaluated, size = _task_size(name, str(settings.data_dir))
        train = min(train, settings.limit_train or train)
        tokens += (3 * settings.epochs * train + evaluated) * min(size, settings.max_length)
    return settings.seeds * _checkpoints(part, parts) * tokens * flops / length / rate


def _blimp_seconds(part: Part, parts: list[Part]) -> float:
    rate, flops, length = _of_model(part, parts)
    pairs = (part.values.get("per_paradigm") or PAIRS) * (len(part.values.get("paradigms", ())) or PARADIGMS)
    return _checkpoints(part, parts) * 2 * pairs * WORDS * (WORDS + 2) * flops / length / rate


def _diagnostic_seconds(part: Part, of_stores: dict[str, dict]) -> float:
    """From the first measured store of LSPs: a pass over SemCor, and a dictionary for every layer."""
    found = next((cost for cost in of_stores.values() if "teacher_seconds" in cost), None)
    if found is None:
        return 0.0
    layers = part.values.get("layer", "all")
    count = 12 if layers == "all" else len(layers)
    coding = found["teacher_seconds"] + count * found["solver_seconds"]
    return SEMCOR_TOKENS * coding + count * found.get("learning_seconds", 0.0) / max(1, found.get("lacking", 1))


def _checkpoints(part: Part, parts: list[Part]) -> int:
    """How many models an evaluation is of: one, or every kept checkpoint of a run."""
    if part.values.get("step") != "all":
        return 1
    training = _training_of(part.values["models"][0], parts)
    return 1 if training is None else len(training.values.get("checkpoints", (0.1, 0.25, 0.5, 1.0)))


def _of_model(part: Part, parts: list[Part]) -> tuple[float, float, int]:
    """Rate (operations a second), operations of a window and its length in tokens, of the model that is evaluated."""
    model = part.values["models"][0]
    training = _training_of(model, parts)
    if training is None:
        length = part.values.get("max_length") or 128
        rate, flops, _ = _measure(model, length, part.values.get("device", "auto"))
    else:
        length = _length(training, parts)
        rate, flops, _ = _measure(training.values["encoder"], length, training.values.get("device", "auto"))
    return rate, flops, length


def _training_of(run: str, parts: list[Part]) -> Any:
    """The training of the student in a directory, or that a probe there is of; None for any other model."""
    made = {str(part.values["output"]): part for part in parts if part.verb in ("train-student", "train-probe")}
    part = made.get(run)
    return _training_of(part.values["student"], parts) if part and part.verb == "train-probe" else part


def _length(training: Part, parts: list[Part]) -> Any:
    """Window of a student's store, in tokens."""
    maker = next(part for part in parts if part.name == training.values["store"].part)
    while maker.verb == "derive-shards":
        maker = next(part for part in parts if part.name == maker.values["store"].part)
    return maker.values.get("max_length", CorpusConfig.max_length)


@cache
def _task_size(name: str, data_dir: str) -> tuple[int, int, float]:
    """Examples to train on and to evaluate, and the mean tokens of one."""
    data = load_task(TASKS[name], data_dir)
    characters = [len(json.dumps(example)) for example in data.train[:1000]]
    return len(data.train), sum(map(len, data.evaluation.values())), sum(characters) / len(characters) / CHARACTERS


@cache
def _measure(encoder: str, length: int, device: str) -> tuple[float, float, int]:
    """Operations a second of training steps, operations of a window's forward pass, parameters: of an encoder with a
    head of its vocabulary, timed on batches of random tokens."""
    import torch

    from student.encoders import build_encoder
    from student.model import Student

    found = Encoder.find(encoder)
    place = choose_device(device)
    masked = max(1, round(0.15 * (length - 2)))
    windows = max(1, 4096 // length)
    student = Student(build_encoder(found.config, seed=0), found.vocabulary, tied=True, seed=0).to(place)
    flops = measure_student(found, windows, length, windows * masked, found.vocabulary) / windows
    input_WL = torch.randint(0, found.vocabulary, (windows, length), device=place)
    where_M = torch.arange(windows * masked, device=place) * length // masked
    seconds = []
    for _ in range(1 + TIMED_STEPS):
        started = time.perf_counter()
        with torch.autocast(place.type, torch.bfloat16, enabled=place.type == "cuda"):
            loss = torch.logsumexp(student(input_WL, None, where_M, most_masked=masked).float(), 1).mean()
        loss.backward()
        loss.item()
        seconds.append(time.perf_counter() - started)
    parameters = sum(parameter.numel() for parameter in student.parameters())
    return 3 * windows * flops / min(seconds[1:]), flops, parameters
