"""Estimate the cost of a study's parts from short measurements: a few seconds per student, half a minute per store.

    for cost in costs(chosen, parts, kept, progress):
        cost.part, cost.seconds, cost.bytes

A store is measured as by `--dry-run` of its command. For every kind of student a few steps are timed, on windows of the
recipe's length and, for steps on pieces of windows, on the pieces. The cost of probes and evaluations follows from
their tokens; the bundled tokenizer counts those of examples. So the estimates distinguish hours from minutes, but not
minutes from seconds: short inputs are slower per token than full windows, and every command takes a few seconds to
start. Finished parts cost nothing. For the diagnostic of layers, only the teacher's pass over SemCor and the
dictionaries are counted. Ignored: the savings of `mask_later`, and the extra cost of a higher mask rate.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mlsm.common.device import choose_device
from mlsm.common.errors import MlsmError, StudyError
from mlsm.common.wordnet import LEXNAMES
from mlsm.evaluation import records
from mlsm.evaluation.studies.flops.encoders import BASE_WIDTH, CASED_VOCABULARY, EncoderShape
from mlsm.evaluation.studies.protocol.description import STORES, TRAININGS
from mlsm.evaluation.studies.protocol.parts import FUNCTIONS, Made, Part
from mlsm.evaluation.tasks.blimp.data import choose_paradigms
from mlsm.evaluation.tasks.blimp.evaluate import task_of
from mlsm.evaluation.tasks.finetuning.batches import tokenise
from mlsm.evaluation.tasks.finetuning.config import FROZEN_EXAMPLES
from mlsm.evaluation.tasks.finetuning.data import load_task
from mlsm.evaluation.tasks.finetuning.tasks import TASKS
from pipeline.config import CorpusConfig, DictionaryConfig, EncodeHiddenConfig, TeacherConfig
from pipeline.teacher import BUNDLED, load_tokenizer
from shards.reader import Store
from student.config import StudentConfig
from student.objectives import LSP_OBJECTIVES, OVER_VOCABULARY

TIMED_STEPS = 3  # after one warm-up step
EXAMPLES = 1000  # of a task, tokenised to count their tokens
WORDS = 11  # of a BLiMP sentence, about: each word is masked once
PAIRS = 1000
SEMCOR_TOKENS = 900_000
# Of linear models on FROZEN_EXAMPLES, and for wsd a dictionary; of a 2 x 128 encoder, on two cores. Not measured here.
FITTING_SECONDS = {"conll2003": 120.0, "wsd": 60.0}
WEIGHT_BYTES = 4
STATE = 3  # size of a checkpoint in copies of the weights: weights and AdamW's two moments


class Cost(NamedTuple):
    """The remaining cost of a part."""

    part: str
    seconds: float
    bytes: int
    finished: bool = False


def costs(
    chosen: list[Part], parts: list[Part], kept: Mapping[str, Mapping], progress: Callable[..., None]
) -> Iterator[Cost]:
    """The cost of every chosen part. Raises the errors of the measured commands.

    kept  part -> seconds and bytes of earlier estimates; these parts are not measured again
    """
    of_stores: dict[str, dict] = {}
    for part in chosen:
        if is_finished(part, parts):
            yield Cost(part.name, 0.0, 0, True)
        elif part.name in kept:
            yield Cost(part.name, kept[part.name]["seconds"], kept[part.name]["bytes"])
        elif part.verb in STORES:
            found = of_stores.get(_apart_from_seed(part)) or _store_cost(part, parts, progress)
            of_stores[part.name] = of_stores[_apart_from_seed(part)] = found
            yield Cost(part.name, found["seconds"] + found.get("learning_seconds", 0.0), found["bytes"])
        elif part.verb in TRAININGS:
            yield _training_cost(part, parts)
        elif part.verb == "finetune":
            yield Cost(part.name, _tuning_seconds(part, parts), 0)
        elif part.verb == "evaluate-blimp":
            yield Cost(part.name, _blimp_seconds(part, parts), 0)
        else:
            yield Cost(part.name, _diagnostic_seconds(part, parts, of_stores, progress), 0)


def is_finished(part: Part, parts: list[Part]) -> bool:
    """Whether a part is done: its files exist, or all parts that need it are finished.

    So a study continues from its records: a scored student, and a store whose students were all scored, may be deleted.
    """
    if is_made(part, parts):
        return True
    users = [other for other in parts if part.name in other.needs]
    return bool(users) and all(is_finished(user, parts) for user in users)


def is_made(part: Part, parts: list[Part]) -> bool:
    """Whether a part's own files are complete; an evaluation must have all its records."""
    if part.verb in TRAININGS:
        return (Path(part.values["run_dir"]) / "result.json").is_file()
    output = Path(part.values["output"])
    if part.verb in STORES:
        return _is_whole(part, output / "stores")
    if part.verb == "choose-layer":
        return any(output.glob("diagnostics/*/result.json"))
    return _has_records(part, output, parts)


def _has_records(part: Part, output: Path, parts: list[Part]) -> bool:
    settings, model = part.settings(), part.values["models"][0]
    model = Path(model).name if _run_of(model, parts) else name_in_records(model)
    suite = "blimp" if part.verb == "evaluate-blimp" else "frozen" if settings.frozen else "finetune"
    if suite == "blimp":
        wanted = {f"{task_of(settings)}.json"}
    elif suite == "frozen":
        wanted = {f"{task}.json" for task in settings.chosen_tasks()}
    else:
        seeds = range(1 if settings.smoke else settings.seeds)
        wanted = {f"{task}-seed{seed}.json" for task in settings.chosen_tasks() for seed in seeds}
        output = output / "smoke" if settings.smoke else output
    directory = records.directory_of(output, {"model": model, "weights": "", "suite": suite}).parent
    digits = "step-????????-????????" if part.values.get("step") == "all" else "????????"
    found = directory.parent.glob(f"{directory.name}{digits}/{suite}")
    return sum(wanted <= {file.name for file in place.iterdir()} for place in found) >= _checkpoints(part, parts)


def name_in_records(model: str) -> str:
    """The name that a model, which may not exist yet, has in records."""
    if model == "bundled" and not Path(model).is_dir():
        return BUNDLED.name
    path = Path(model).expanduser()
    if path.is_dir():
        return records.shown_name(path)
    return model if model.count("/") == 1 else path.name  # a Hub id, or a directory that is elsewhere


def _is_whole(part: Part, stores: Path) -> bool:
    wanted, whole = _stores_of(part), 0
    for path in stores.glob("*/target.json"):
        try:
            Store.open(path.parent)
            whole += 1
        except (MlsmError, OSError):  # unfinished or damaged; its command will report which
            continue
    return whole >= wanted


def _stores_of(part: Part) -> int:
    """How many stores a part makes; for LSPs, one for every layer and k."""
    several = {"encode-lsp": ("layer", "k"), "encode-hidden": ("layer",)}.get(part.verb, ())
    return math.prod(len(part.values.get(name, [0])) for name in several)


def _apart_from_seed(part: Part) -> str:
    """A key that is equal for stores that differ only in their dictionary's seed, so that one of them is measured."""
    return repr([part.verb, *sorted((k, str(v)) for k, v in part.values.items() if k not in ("seed", "output"))])


def _store_cost(part: Part, parts: list[Part], progress) -> dict[str, Any]:
    if part.verb == "derive-shards":  # copies a store that may not exist yet; cheap compared with others
        return {"seconds": 0.0, "bytes": 0}
    values = {name: value for name, value in part.values.items() if not _is_missing(value)}
    if "hidden" in part.values and not _is_whole_store(part.values["hidden"]):
        maker = part  # measured from text, which overestimates by a teacher's pass
        while "hidden" in maker.values:
            maker = next(other for other in parts if other.name == maker.values["hidden"].part)
        names = {field.name for field in fields(TeacherConfig)} | {"layer"}
        given = {name: value for name, value in maker.values.items() if name in names}
        values = {"layer": EncodeHiddenConfig.layer} | given | {n: v for n, v in values.items() if n != "hidden"}
    has_one = "dictionary" in part.values and "dictionary" not in values
    return _dry_run(part._replace(values=values), progress) | ({"learning_seconds": 0.0} if has_one else {})


def _is_missing(value: Any) -> bool:
    """Whether a setting names something that another part has not made yet."""
    if not isinstance(value, Made):
        return False
    try:
        value.find()
    except StudyError:
        return True
    return False


def _is_whole_store(value: Made) -> bool:
    """Whether a store that another part makes exists and is finished."""
    try:
        Store.open(value.find())
    except (MlsmError, OSError):
        return False
    return True


def _dry_run(part: Part, progress) -> dict[str, Any]:
    return FUNCTIONS[part.verb](replace(part.settings(), dry_run=True), progress)[0]


def _training_cost(part: Part, parts: list[Part]) -> Cost:
    """The cost of training a student, or a probe: a third of the operations, since its student has no backward pass."""
    of = part if part.verb == "train-student" else _training_of(part.values["student"], parts)
    speed = _speed_of(of, parts)
    steps = part.values["max_steps"]
    batch = part.values["batch_windows"]
    if part.verb == "train-probe":  # probes always read whole windows
        return Cost(part.name, steps * batch * speed.window_seconds, 0)
    seconds = steps * speed.window_seconds
    if (piece := part.values.get("short_windows")) is not None:
        share = part.values.get("short_share", StudentConfig.short_share)
        short = StudentConfig(short_windows=piece, short_share=share).short_steps(steps)
        in_pieces = _maker_of(part, parts).window / piece * _speed_of(part, parts, piece).window_seconds
        seconds += short * (in_pieces - speed.window_seconds)
    size = (_kept_checkpoints(of) + 1 + STATE) * WEIGHT_BYTES * speed.parameters
    return Cost(part.name, 3 * batch * seconds, size)


def _tuning_seconds(part: Part, parts: list[Part]) -> float:
    settings = part.settings()
    if settings.frozen:
        return _checkpoints(part, parts) * _frozen_seconds(part, parts, settings)
    if settings.smoke:
        return 5.0 * len(settings.chosen_tasks())
    tokens = 0.0
    for name in settings.chosen_tasks():
        size = _task_size(name, str(settings.data_dir), settings.max_length, settings.batch)
        examples = min(size.train, settings.limit_train or size.train)
        whole = settings.epochs * examples
        most = math.inf if settings.max_steps is None else settings.max_steps * settings.batch
        passes = 3 * min(whole, most) * size.padded
        tokens += passes + size.evaluated * size.tokens
        if (rates := len(settings.rates())) > 1:
            tokens += rates * (3 * min(0.9 * whole, most) * size.padded + 0.1 * examples * size.tokens)
    return settings.seeds * _checkpoints(part, parts) * tokens * _token_seconds(part, parts, over_vocabulary=False)


def _frozen_seconds(part: Part, parts: list[Part], settings) -> float:
    """Seconds of one model's frozen measures: its passes over the texts and, for the most part, the linear models."""
    tokens = fits = 0.0
    for name in settings.chosen_tasks():
        if name == "wsd":  # it learns from all examples, whatever the limit
            tokens += SEMCOR_TOKENS
            fits += FITTING_SECONDS[name]
            continue
        size = _task_size(name, str(settings.data_dir), settings.max_length, 64)
        examples = min(size.train, settings.limit_train or FROZEN_EXAMPLES)
        tokens += (examples + size.evaluated) * size.tokens
        fits += FITTING_SECONDS.get(name, 5.0) * examples / FROZEN_EXAMPLES
    return fits + tokens * _token_seconds(part, parts, over_vocabulary=False)


def _blimp_seconds(part: Part, parts: list[Part]) -> float:
    pairs = (part.values.get("per_paradigm") or PAIRS) * len(choose_paradigms(tuple(part.values.get("tasks", ()))))
    return (
        _checkpoints(part, parts) * 2 * pairs * WORDS * (WORDS + 2) * _token_seconds(part, parts, over_vocabulary=True)
    )


def _diagnostic_seconds(part: Part, parts: list[Part], of_stores: dict[str, dict], progress) -> float:
    """Seconds of choose-layer: a pass over SemCor, and a dictionary for every layer. Both are derived from the first
    encoding of LSPs, which is measured now if it was not before. Dictionaries that already existed were not timed and
    count as 0.
    """
    maker = next((other for other in parts if other.verb == "encode-lsp"), None)
    if maker is None:
        return 0.0
    found = of_stores.get(maker.name) or _store_cost(maker, parts, progress)
    layers = part.values.get("layer", "all")
    count = 12 if layers == "all" else len(layers)
    coding = found["teacher_seconds"] + count * found["solver_seconds"] / _stores_of(maker)
    return SEMCOR_TOKENS * coding + count * found.get("learning_seconds", 0.0) / max(1, found.get("lacking", 1))


def _checkpoints(part: Part, parts: list[Part]) -> int:
    """How many models an evaluation scores: one, or every kept checkpoint of a run."""
    if part.values.get("step") != "all":
        return 1
    run = _run_of(part.values["models"][0], parts)
    return 1 if run is None else _kept_checkpoints(run)


def _kept_checkpoints(run: Part) -> int:
    """The number of kept checkpoints of a student or a probe, including the last one."""
    shares, steps = run.values.get("checkpoints", StudentConfig.checkpoints), run.values["max_steps"]
    return len(StudentConfig(checkpoints=shares, max_steps=steps).checkpoint_steps(steps))


def _token_seconds(part: Part, parts: list[Part], over_vocabulary: bool) -> float:
    """Seconds per token of a forward pass of the evaluated model, with a head over the vocabulary or for a task."""
    model, device = part.values["models"][0], part.values.get("device", "auto")
    training = _training_of(model, parts)
    if training is None:
        length = part.values.get("max_length") or CorpusConfig.max_length
        outputs = EncoderShape.find(model).config.vocab_size if over_vocabulary else 2
        return _measure(model, None, outputs, length, device).window_seconds / length
    maker = _maker_of(training, parts)
    outputs = maker.vocabulary if over_vocabulary else 2
    return (
        _measure(training.values["encoder"], maker.vocabulary, outputs, maker.window, device).window_seconds
        / maker.window
    )


def _speed_of(training: Part, parts: list[Part], length: int | None = None) -> "Speed":
    """The speed of a student on windows of this length; by default, the length of its store's windows."""
    maker = _maker_of(training, parts)
    objective = training.values.get("objective", StudentConfig.objective)
    outputs = maker.k * (objective in LSP_OBJECTIVES) + maker.vocabulary * (objective in OVER_VOCABULARY)
    outputs += len(LEXNAMES) * (objective == "supersense") + maker.width * (objective in ("regress", "recon"))
    device = training.values.get("device", "auto")
    return _measure(training.values["encoder"], maker.vocabulary, outputs, length or maker.window, device)


def _run_of(model: str, parts: list[Part]) -> Part | None:
    """The part that makes the student or the probe in a directory; None for any other model."""
    made = {str(part.values["run_dir"]): part for part in parts if part.verb in TRAININGS}
    return made.get(model)


def _training_of(model: str, parts: list[Part]) -> Any:
    """The training settings of the student in a directory, or of a probe's student; None for other models."""
    part = _run_of(model, parts)
    return _training_of(part.values["student"], parts) if part and part.verb == "train-probe" else part


class Maker(NamedTuple):
    """The properties of a student's store, from the settings of the command that makes it."""

    window: int
    vocabulary: int
    k: int
    width: int


def _maker_of(training: Part, parts: list[Part]) -> Maker:
    part = training
    while part.verb in ("train-student", "derive-shards"):
        part = next(other for other in parts if other.name == part.values["store"].part)
    k = max(part.values.get("k", DictionaryConfig.k))  # the largest of several, as the head is a small part of the cost
    while "hidden" in part.values:
        part = next(other for other in parts if other.name == part.values["hidden"].part)
    teacher = part.values.get("teacher")
    vocabulary, width = CASED_VOCABULARY, BASE_WIDTH
    if teacher:
        encoder = EncoderShape.find(teacher)
        vocabulary, width = encoder.config.vocab_size, encoder.width
    return Maker(part.values.get("max_length", CorpusConfig.max_length), vocabulary, k, width)


class Speed(NamedTuple):
    """The speed of an encoder on this machine."""

    window_seconds: float
    """seconds of a forward pass on a window; a training step takes three times that"""
    parameters: int


class TaskSize(NamedTuple):
    """Number of examples of a task, and their mean number of tokens."""

    train: int
    evaluated: int
    tokens: float
    padded: float
    """mean tokens when padded to the longest in a batch, as in training"""


@cache
def _task_size(name: str, data_dir: str, max_length: int, batch: int) -> TaskSize:
    task = TASKS[name]
    data = load_task(task, Path(data_dir))
    sample = tokenise(
        load_tokenizer(BUNDLED), data.train[:EXAMPLES], task.labels_words, max_length=max_length, takes_types=False
    )
    longest = np.maximum.reduceat(sample.lengths_N, np.arange(0, len(sample.lengths_N), batch))
    return TaskSize(len(data.train), sum(map(len, data.evaluation.values())), sample.lengths_N.mean(), longest.mean())


@cache
def _measure(encoder: str, vocabulary: int | None, outputs: int, length: int, device: str) -> Speed:
    """Time training steps of an encoder with a head of this many outputs, on batches of random tokens."""
    import torch

    from student.encoders.build import build_encoder, fit_config
    from student.encoders.model import Student
    from student.objectives.losses import sparse_cross_entropy

    hf_config = EncoderShape.find(encoder).config
    if vocabulary is not None:
        fit_config(hf_config, vocabulary, {"pad": 0, "cls": 0, "sep": 0}, length)
    place = choose_device(device)
    masked, windows = max(1, round(0.15 * (length - 2))), max(1, 4096 // length)
    student = Student(build_encoder(hf_config, seed=0), outputs, tied=False, seed=0).to(place)
    input_WL = torch.randint(0, hf_config.vocab_size, (windows, length), device=place)
    one_each_M = torch.arange(windows * masked, device=place)
    where_M, ones_M = one_each_M * length // masked, torch.ones(windows * masked, device=place)
    seconds = []
    for _ in range(1 + TIMED_STEPS):
        started = time.perf_counter()
        with torch.autocast(place.type, torch.bfloat16, enabled=place.type == "cuda"):
            logits_MK = student(input_WL, None, where_M, most_masked=masked)
        loss = sparse_cross_entropy(logits_MK, one_each_M * outputs, ones_M, ones_M)
        loss.backward()
        loss.item()
        seconds.append(time.perf_counter() - started)
    parameters = sum(parameter.numel() for parameter in student.parameters())
    return Speed(min(seconds[1:]) / 3 / windows, parameters)
