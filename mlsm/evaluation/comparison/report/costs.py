"""What training cost, and what a study did: tables of the report.

Seconds are those of a quiet machine (curves.py). Left out: all other tables (tables.py).
"""

import os
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

from mlsm.evaluation.comparison.report.arms import Found
from mlsm.evaluation.comparison.report.curves import Course, Point
from mlsm.evaluation.comparison.report.facts import Part
from mlsm.evaluation.comparison.report.tables import Table

WHOLE_ENCODING = (
    "Encoding is all that made the store of an arm and, where it was another, that of its dictionary: also what other "
    "arms share, and other layers and k of the same pass. "
)


def table_of_costs(
    found: Found, courses: Sequence[Course], accounts: Mapping[str, Mapping[str, float]], directory: Path
) -> Table:
    """What the training of each arm cost, by its logs and records: means over seeds.

    accounts   of a StudyFacts
    directory  what the paths of logs are relative to
    """
    further = list(dict.fromkeys(name for of_arm in accounts.values() for name in of_arm))
    names = ["steps", "tokens", "FLOPs", "teacher's FLOPs", "held-out loss", "s a step", "seconds"]
    names += [f"with {name}" for name in further]
    by_run = {(course.arm, course.seed): course for course in courses}
    rows: list[list[str]] = []
    data: list[list[Any]] = []
    for arm in found.arms:
        models = arm.at().models or {model.facts["run_seed"]: model for model in arm.models}
        known = accounts.get(arm.name)
        added = [None] * len(further) if known is None else accumulate(known.get(name, 0.0) for name in further)
        sums = [0.0, *added]
        costs = []
        for seed, model in models.items():
            course, flops = by_run.get((arm.name, seed)), model.facts["flops"]
            point = (course and course.points[-1]) or Point(
                model.facts["step"], None, flops["pretraining"], *[None] * 3
            )
            totals = [None if None in (point.seconds, more) else point.seconds + more for more in sums]
            step_seconds = course.step_seconds if course else None
            costs.append([*point[:3], flops["teacher"], point.loss, step_seconds, *totals])
            log = os.path.relpath(course.log, directory) if course else None
            data.append([arm.name, seed, model.label, *costs[-1], log])
        rows.append([arm.name, *(_amount(_mean(values)) for values in zip(*costs, strict=True))])
    caption = (
        "Means over pre-training seeds. Seconds are steps × the step time of a quiet machine (the fastest tenth of the "
        "logged steps), not a clock. Teacher's FLOPs: its forward passes over the tokens that one student read, as if "
        "they were encoded for it alone. "
        + ("The further accounts add up from left to right. " if further else "")
        + (WHOLE_ENCODING if "encoding" in further else "")
        + "Losses of different objectives or targets do not compare."
    )
    header = ("arm", "pre-training seed", "model", *names, "log")
    return Table("report-costs", "What training cost", caption, ["arm", *names], rows, (header, data))


def table_of_parts(parts: Sequence[Part]) -> Table:
    """Predicted and measured costs of a study's parts: the seeds of an arm in one row, each part in the CSV file."""
    columns = ["part", "seeds", "predicted", "measured", "disk, predicted"]
    groups: dict[str, list[Part]] = {}
    for part in parts:
        if (part.predicted_seconds, part.measured_seconds, part.bytes) != (None, None, None):
            groups.setdefault(re.sub(r"-seed\d+$", "", part.name), []).append(part)
    rows = []
    for name, found in groups.items():
        predicted = _sum([part.predicted_seconds for part in found])
        measured = _sum([part.measured_seconds for part in found])
        size = _sum([part.bytes for part in found])
        rows.append([name, str(len(found)), _duration(predicted), _duration(measured), _size(size)])
    header = ("part", "predicted_seconds", "measured_seconds", "bytes")
    data = [[part.name, part.predicted_seconds, part.measured_seconds, part.bytes] for part in parts]
    caption = (
        "What the parts of the study were expected to take, and what trainings took: steps × the step time of a quiet "
        "machine. Sums over seeds, as far as they were estimated or measured; – and not listed: none was."
    )
    return Table("report-parts", "What the study cost", caption, columns, rows, (header, data))


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _amount(value: float | None) -> str:
    if value is None:
        return "–"
    if value >= 999_999.5:
        digits, exponent = f"{value:.2e}".split("e+")
        return f"{digits}e{int(exponent)}"
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    for unit, of in (("h", 3600), ("min", 60)):
        if seconds >= 2 * of:
            return f"{_amount(seconds / of)} {unit}"
    return f"{seconds:.3g} s"


def _size(count: float | None) -> str:
    if count is None:
        return "–"
    for unit, of in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= of:
            return f"{_amount(count / of)} {unit}"
    return f"{count} bytes"
