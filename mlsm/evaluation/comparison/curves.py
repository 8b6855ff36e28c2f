"""Learning curves of runs: held-out loss and fine-tuning scores against steps, tokens, operations and seconds.

    for course in read_courses(found.arms): course.points      # of one run, from its log.jsonl

Seconds are steps x the step time on an idle machine, estimated as the mean over the fastest tenth of the logged steps.
Wall-clock time is not used, because a run may have been paused or have shared its machine. Not handled here: drawing
(figures.py).
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from mlsm.common.json_checks import is_number
from mlsm.common.json_lines import damage, read_json_lines
from mlsm.evaluation.comparison.arms import Arm, Seed, is_probe
from mlsm.evaluation.comparison.models import mean_score, tasks_of
from student.runs.identity import find_description

logger = logging.getLogger(__name__)
AXES = {  # the quantity on the x axis -> the axis label
    "steps": "optimiser steps",
    "tokens": "tokens read",
    "flops": "floating-point operations of the student's training",
    "seconds": "seconds of training on a quiet machine",
}


class Point(NamedTuple):
    """Held-out results after some steps; values missing from the log are None.

    loss   nats per token that contributes to the loss
    share  loss divided by that of a constant prediction; 1 means nothing was learned
    """

    steps: int
    tokens: float | None
    flops: float | None
    seconds: float | None
    loss: float | None
    share: float | None


@dataclass(frozen=True)
class Course:
    """One run of an arm.

    run           its name
    log           the file that these values were read from
    step_seconds  seconds per step on an idle machine; None if the log does not say
    points        held-out results, by step
    """

    arm: str
    seed: Seed
    run: str
    log: Path
    step_seconds: float | None
    points: tuple[Point, ...]

    def at(self, step: int) -> Point | None:
        """The cost up to a step, with held-out results if there are any; None after the log's end."""
        last = self.points[-1]
        if step > last.steps:
            return None
        known = next((point for point in self.points if point.steps == step), None)
        tokens, flops, seconds = (None if value is None else value * step / last.steps for value in last[1:4])
        return known or Point(step, tokens, flops, seconds, None, None)


class Reached(NamedTuple):
    """A checkpoint's mean score over some tasks, and the cost up to it."""

    arm: str
    seed: Seed
    model: str
    spent: Point
    value: float


def read_courses(arms: Sequence[Arm]) -> list[Course]:
    """The curves of all runs whose logs are where their records say: one for each arm and seed."""
    found: dict[tuple[str, Seed], Course] = {}
    for arm in arms:
        for model in arm.models:
            run = arm.name, model.facts["run_seed"]
            if run in found or is_probe(model):
                continue
            try:
                course = _read_course(*run, Path(model.facts["path"]), model.facts["identity"])
            except OSError as error:  # a record may come from another machine, and so may the path in it
                logger.warning("no curves for %s: the log of its run cannot be read: %s", model.label, error)
                continue
            if course is not None:
                found[run] = course
    return list(found.values())


def _read_course(arm: str, seed: Seed, directory: Path, identity: dict | None) -> Course | None:
    """The curve of the run that contains an export or a checkpoint; None if it is not in a run, or nothing was logged,
    or if the run there is another one (`identity` of lineage.py differs), with a warning.

    Damaged lines are skipped with a warning.
    """
    logs = (run / "log.jsonl" for run in directory.absolute().parents[:2])
    log = next((log for log in logs if log.is_file()), None)
    if log is None:
        return None
    if differing := _differing(log.parent, identity):
        logger.warning("no curves from %s: the run there is not that of the record: %s", log, ", ".join(differing))
        return None
    lines, damaged = read_json_lines(log)
    if damaged:
        logger.warning(damage(log, damaged))
    steps = [line for line in lines if "loss" in line and line["step"] > 0]
    if not steps:
        return None
    step_seconds = quiet_step_seconds(steps)
    return Course(arm, seed, log.parent.name, log, step_seconds, _points(steps, step_seconds))


def _differing(run: Path, identity: dict | None) -> list[str]:
    """What differs between a run's config.json and a record's identity, of what both of them have."""
    found = find_description(run)
    if found is None or identity is None:
        return []
    there = found["settings"] | {name: found["store"].get(name) for name in ("target", "plan")}
    recorded = identity["settings"] | {name: identity[name] for name in ("target", "plan") if name in identity}
    # A lineage may have the dropout filled in, which older runs did not note.
    return [name for name in recorded if name != "dropout" and name in there and there[name] != recorded[name]]


def quiet_step_seconds(lines: Sequence[dict]) -> float | None:
    """Seconds per average step, at the speed of the fastest tenth of the logged steps (at least one); None if not
    logged.

    A log line has the operations of all steps so far, and the operations per second of its own step. Steps may differ
    in operations: those on short windows have fewer.
    """
    names = ("flops", "flops_per_second")
    counted = [line for line in lines if all(is_number(line.get(name)) and line[name] > 0 for name in names)]
    if not counted:
        return None
    seconds = sorted(1 / line["flops_per_second"] for line in counted)  # seconds per operation
    last = max(counted, key=lambda line: line["step"])
    return fmean(seconds[: max(1, len(seconds) // 10)]) * last["flops"] / last["step"]


def _points(lines: Sequence[dict], step_seconds: float | None) -> tuple[Point, ...]:
    """The points of a curve: at the steps with a held-out loss, and at the last."""
    points = {}
    for line in lines:
        tokens, flops, share = (_number(line.get(name)) for name in ("tokens", "flops", "held_out_vs_baseline"))
        held_out = line.get("held_out")
        loss = _number(held_out.get("loss")) if isinstance(held_out, dict) else None
        if line is lines[-1] or loss is not None:
            seconds = None if step_seconds is None else line["step"] * step_seconds
            points[line["step"]] = Point(line["step"], tokens, flops, seconds, loss, share)
    return tuple(points[step] for step in sorted(points))


def _number(value: Any) -> float | None:
    return value if is_number(value) else None


def read_checkpoints(arms: Sequence[Arm], courses: Sequence[Course], tasks: Sequence[str]) -> list[Reached]:
    """The fine-tuned checkpoints that have all the tasks: their cost and mean score."""
    by_run = {(course.arm, course.seed): course for course in courses}
    scores = []
    for arm in arms if tasks else ():
        for fraction in arm.fractions:
            for seed, model in arm.at(fraction).by_seed.items():
                step, course = model.facts["step"], by_run.get((arm.name, seed))
                if step is None or not tasks_of(model) >= set(tasks):
                    continue
                flops = model.facts["flops"]["pretraining"]
                spent = (course and course.at(step)) or Point(step, None, flops, None, None, None)
                scores.append(Reached(arm.name, seed, model.label, spent, mean_score(model, tasks)))
    return scores
