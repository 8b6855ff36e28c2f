"""Choose the arithmetic of training on a GPU: bfloat16 and torch.compile are first tried on the run's own batches.

    choice = find_arithmetic(asked, settled, store, task, prepare, device)  # with a right dtype and compile

If `--dtype auto` or an unset `--compile` would turn something on, it is first tried in a child process (trial.py): a
few steps in plain float32, the same steps in bfloat16, and compiled. A way to train that crashes, hangs, gives another
loss or is not faster is not used, and one line says so. The result is kept in the user's cache (mlsm/common/proofs.py)
for this GPU, driver, library versions, encoder, and everything else that changes the compiled code (`key_of`). Both
settings are part of a run's identity. So a resumed run keeps the values that it started with, or ends with an error if
they no longer work. Values that the user sets are not tried.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from mlsm.common import proofs
from mlsm.common.settings import settable
from shards.manifest import fingerprint
from shards.reader import Store
from student.config import ResolvedConfig, StudentConfig
from student.resolve import training_windows
from student.task import TrainingTask

SECONDS = 300.0  # the child's time limit: compiling a large encoder takes minutes
WINDOWS = 32  # the most windows in a step of the trial
CLOSE = {"bfloat16": 2e-2, "float32": 1e-3}  # largest relative difference of a loss from float32's
TRIAL = "student.trial"
Dtype = Literal["auto", "float32", "bfloat16"]
logger = logging.getLogger(__name__)
_said: set[tuple[str, str]] = set()  # messages that this process has printed


class Arithmetic(NamedTuple):
    """The result: the arithmetic to train a student in.

    dtype, compile  settings of StudentConfig
    line            why, in a sentence
    right           names (`name_of`) of the ways that were found right
    trials          name -> what was measured of it
    keep            whether to reuse the result next time; False if the child lacked memory or time, or float32 failed
    """

    dtype: Literal["float32", "bfloat16"]
    compile: bool
    line: str
    right: tuple[str, ...]
    trials: Mapping[str, Mapping[str, Any]]
    keep: bool = True


def is_needed(asked: StudentConfig, device: torch.device) -> bool:
    """Whether dtype or compile is unset, so that a way to train that may be wrong on this device could be chosen."""
    return device.type == "cuda" and (asked.dtype == "auto" or asked.compile is None)


def name_of(dtype: str, compiled: bool) -> str:
    """The name of a way to train, for reports and messages."""
    return f"{dtype}, compiled" if compiled else dtype


def decide_arithmetic(
    trials: Mapping[str, Mapping[str, Any]],
    trouble: str | None,
    dtype: Dtype = "auto",
    compiled: bool | None = None,
    passing: bool = False,
) -> Arithmetic:
    """Choose by the measurements of a child process. Pure: the same measurements give the same choice.

    trials           name -> losses, seconds (trial.py); {} if the child did not finish it
    trouble          how the child ended, if it did not finish normally
    dtype, compiled  what was asked for; only "auto" and None are decided here
    passing          whether the child's end says nothing about the GPU (proofs.Child)
    """
    exact, asked = trials.get("float32"), ("float32" if dtype == "auto" else dtype, bool(compiled))
    if (fault := find_arithmetic_fault(exact, exact, trouble, "float32")) is not None:
        line = f"{name_of(*asked)}: nothing could be tried, because float32 itself failed: {fault}"
        return Arithmetic(*asked, line, (), trials, keep=False)
    reasons, right = [], ["float32"]

    def is_better(name: str, than: str, what: str, of_dtype: str) -> bool:
        if (fault := find_arithmetic_fault(trials.get(name), exact, trouble, of_dtype)) is not None:
            reasons.append(f"{what} cannot be used: {fault}")
            return False
        right.append(name)
        trial, usual = trials[name], trials.get(than) or trials["float32"]
        faster = trial["seconds"] < usual["seconds"]
        times = f"{_milliseconds(trial)} a step, {_milliseconds(usual)} without"
        reasons.append(f"{what} is right and faster ({times})" if faster else f"{what} is not faster ({times})")
        return faster

    chosen, used = asked
    if dtype == "auto" and is_better("bfloat16", "float32", "bfloat16", "bfloat16"):
        chosen = "bfloat16"
    if compiled is None and is_better(name_of(chosen, True), chosen, "torch.compile", chosen):
        used = True
    keep = not passing and not any(trial.get("lacks_memory") for trial in trials.values())
    return Arithmetic(chosen, used, f"{name_of(chosen, used)}: {'; '.join(reasons)}", tuple(right), trials, keep)


def find_arithmetic_fault(
    trial: Mapping[str, Any] | None, exact: Mapping[str, Any] | None, trouble: str | None, dtype: str
) -> str | None:
    """What is wrong with a way to train, by its measurements and those of float32; None if it is right."""
    if trial is None:
        return f"its turn did not come ({trouble or 'the child process did not report it'})"
    if not trial:
        return f"the child process failed while it ran ({trouble or 'it reported nothing'})"
    if "error" in trial:
        return trial["error"]
    if not np.isfinite([*trial["losses"], trial["seconds"]]).all():
        return "its loss is not a number"
    if (differs := deviation(trial, exact or trial)) > CLOSE[dtype]:
        return f"its loss differs by {differs:.2%} from that in float32; at most {CLOSE[dtype]:.1%} is allowed"
    return None


def deviation(trial: Mapping[str, Any], exact: Mapping[str, Any]) -> float:
    """The largest relative difference of a loss from float32's."""
    ours, theirs = (np.array(some["losses"], float) for some in (trial, exact))
    return float(np.max(np.abs(ours - theirs) / np.maximum(np.abs(theirs), 1e-6)))


def candidates(asked: StudentConfig, settled: ResolvedConfig) -> Iterator[ResolvedConfig]:
    """All ways to train that the settings leave open."""
    for dtype in ("bfloat16", "float32") if asked.dtype == "auto" else (settled.dtype,):
        for compiled in (True, False) if asked.compile is None else (settled.compile,):
            yield replace(settled, dtype=dtype, compile=compiled)


def find_arithmetic(
    asked: StudentConfig,
    settled: ResolvedConfig,
    store: Store,
    task: TrainingTask,
    prepare: Callable[[Any, Store], TrainingTask],
    device: torch.device,
    *,
    fresh: bool = False,
    marginals: Path | None = None,
) -> Arithmetic:
    """The stored result for such a run; if there is none, or with `fresh`, the result of a new trial in a child
    process."""
    key = key_of(asked, settled, store, task, device)

    def prove() -> Arithmetic:
        task.objective.prepare(training_windows(store), marginals)  # here, as the child has a time limit
        proven = _prove(asked, settled, store, prepare, device, marginals)
        if proven.keep:
            proofs.keep(key, proven._asdict())
        return proven

    choice = proofs.known_or_proven(lambda: _recall(key), prove, fresh=fresh)
    if (key, choice.line) not in _said:
        level = logging.INFO if choice.right else logging.WARNING  # nothing could be tried
        logger.log(level, "training on %s uses %s", proofs.device_facts(device)["device"], choice.line)
    _said.add((key, choice.line))
    return choice


def key_of(
    asked: StudentConfig, settled: ResolvedConfig, store: Store, task: TrainingTask, device: torch.device
) -> str:
    """The facts that a result depends on: GPU, driver, libraries, encoder, and all that changes the compiled code."""
    what = (
        f"{settled.kind}, {store.k} LSPs, {task.objective.outputs} outputs, tied {task.objective.tied}, windows of"
        f" {store.max_length}, dtype {asked.dtype}, compile {asked.compile}"
    )
    names = ["micro_batch", "documents_apart", "short_windows", "activation_checkpointing", "optimizer"]
    names += ["positions", "mask_rate", "mask_rate_end"]  # how many rows the head and the output matrix compute
    settings = ", ".join(f"{name} {getattr(settled, name)}" for name in names)
    return proofs.key_of(device, f"student {fingerprint(task.architecture)[:12]}", what, settings)


def _prove(asked, settled, store, prepare, device, marginals):
    windows = min(WINDOWS, settled.batch_windows, settled.micro_batch)
    changed = {"batch_windows": windows, "micro_batch": windows, "dropout": 0.0, "device": str(device)}
    free = settable(settled)  # a probe's dropout, among others, is fixed
    task = {
        "class": _place_of(type(settled)),
        "prepare": _place_of(prepare),
        "config": {name: value for name, value in (settled.to_json() | changed).items() if name in free},
        "store": str(settled.stores[0]),
        "marginals": marginals and str(marginals),
        "dtype": asked.dtype,
        "compile": asked.compile,
    }
    logger.info("trying bfloat16 and torch.compile on this GPU, for %.0f minutes at most", SECONDS / 60)
    child = proofs.run_child(TRIAL, task, SECONDS)
    return decide_arithmetic(child.found, child.trouble, asked.dtype, asked.compile, child.passing)


def _place_of(thing):
    return f"{thing.__module__}:{thing.__qualname__}"


def _recall(key) -> Arithmetic | None:
    found = proofs.recall(key)
    if found is None or found.keys() != set(Arithmetic._fields) or found["dtype"] not in CLOSE:
        return None
    return Arithmetic(**found | {"right": tuple(found["right"])})


def _milliseconds(trial):
    return f"{1e3 * trial['seconds']:.3g} ms"
