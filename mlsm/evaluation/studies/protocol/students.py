"""How well a study's students have learned their own targets, and at what cost.

    rows = write_students(study, parts, Path("runs/studies/study-layers/students.csv"))

A student's held-out loss is compared with that of a constant prediction. It is read from the runs, without any
evaluation. A student whose run is no longer here keeps its row of the file. Not handled here: which student is better
(compare).
"""

import csv
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

from mlsm.common import disk
from mlsm.common.errors import FlopsError, MlsmError
from mlsm.common.json_checks import Number, find_problem, object_of
from mlsm.evaluation.plots import save_table
from mlsm.evaluation.studies.flops.stores import store_flops
from mlsm.evaluation.studies.protocol.description import NEEDED, Study
from mlsm.evaluation.studies.protocol.parts import Made, Part
from shards.reader import Store
from student.config import StudentConfig
from student.runs.identity import read_or_none

_OF_RUN = {"held_out_loss": Number | None, "baseline_loss": Number | None, "improvement": Number | None}
_OF_RUN |= {"tokens_per_second": Number, "flops": Number}
_RESULT = object_of(_OF_RUN)
COLUMNS = ("arm", "seed", "layer", "k", "mass_kept", *_OF_RUN, "encoding_flops")


def write_students(study: Study, parts: Iterable[Part], file: Path, hidden: Collection[str] = ()) -> list[dict]:
    """Write a table of the trained students.

    hidden   names of withheld arms; their rows are written to a file of their own, withheld-<name>
    Returns  its rows by COLUMNS: mass_kept (mean probability of a coded token that top-n kept), held_out_loss and
             baseline_loss (of the objective), improvement (fraction by which the loss is below that of the constant
             prediction), flops of the training, and encoding_flops of the student's own store; None if unknown, or if
             not defined for the objective
    """
    apart = file.with_name(f"withheld-{file.name}")
    found = {(row["arm"], row["seed"]): row for row in _read(study, {part.name: part for part in parts})}
    found = _kept(apart) | _kept(file) | found
    planned = [(arm.name, seed) for arm in study.arms.values() for seed in arm.seeds]
    rows = [found[name] for name in planned if name in found]
    shown = [row for row in rows if row["arm"] not in hidden]
    files = ((file, shown), (apart, [row for row in rows if row["arm"] in hidden]))
    for place, chosen in files:
        if chosen:
            save_table(place, COLUMNS, [[row[name] for name in COLUMNS] for row in chosen])
    for place, chosen in files:
        if rows and not chosen:  # they are in the other file, which is written by now
            with suppress(OSError):
                disk.unlink(place)
    return shown


def _kept(file: Path) -> dict[tuple[str, int], dict]:
    """The rows that an earlier call has written, by arm and seed; none if the file is not readable."""
    kept = {}
    with suppress(OSError, ValueError, KeyError, TypeError), file.open(newline="", encoding="utf-8") as stream:
        for line in csv.DictReader(stream):
            row = {"arm": line["arm"]} | {name: _number(line[name]) for name in COLUMNS[1:]}
            kept[line["arm"], int(line["seed"])] = row
    return kept


def _number(text: str) -> float | None:
    return None if not text else int(text) if text.isdecimal() else float(text)


def _read(study: Study, by_name: dict[str, Part]) -> Iterator[dict]:
    of_store = cache(_of_store)
    for arm in study.arms.values():
        for seed in arm.seeds:
            values = by_name[f"train-student/{arm.student(seed)}"].values
            found = read_or_none(Path(values["run_dir"]) / "result.json", lambda it: find_problem(it, _RESULT) is None)
            if found is None:
                continue
            row = dict.fromkeys(COLUMNS) | {"arm": arm.name, "seed": seed} | {name: found[name] for name in _OF_RUN}
            if values.get("objective", StudentConfig.objective) in NEEDED:  # others learn only words
                row |= {"layer": arm.layer, "k": arm.k} | of_store(values["store"])
            yield row


def _of_store(made: Made) -> dict:
    found: dict = {}
    with suppress(MlsmError, OSError):  # it may be deleted once its students are trained
        store = Store.open(made.find())
        found["mass_kept"] = store.report().get("mass_kept")
        with suppress(FlopsError):
            found["encoding_flops"] = store_flops(store)
    return found
