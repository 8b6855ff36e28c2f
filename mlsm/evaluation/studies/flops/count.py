"""The command count-flops: tables, a check of the formulas, and a run's cost against the reuse of its store.

    result = count_flops(CountFlopsConfig())
    result["percent_of_mlm"]["mlsm-10"]    # 103.2

It needs only configurations. Not handled here: the counting (encoders.py, solver.py, pretraining.py), the text
(mlsm/commands/count_flops.py).
"""

import math
from collections.abc import Callable

from mlsm.common.progress import silent
from mlsm.common.settings import plain
from mlsm.evaluation.plots import drawn
from mlsm.evaluation.studies.flops.config import CountFlopsConfig
from mlsm.evaluation.studies.flops.encoders import measure_head, measure_student
from mlsm.evaluation.studies.flops.figure import draw_costs
from mlsm.evaluation.studies.flops.pretraining import (
    FISTA,
    TRAINING,
    Setting,
    dictionary_flops,
    encoding_flops,
    full_table,
    offline_flops,
    pretraining_table,
)
from mlsm.evaluation.studies.flops.solver import correlation_flops, fista_flops, solver_flops, update_flops

REUSE = (1, 2, 5, 10, 20, 50, 100)  # R: how often each encoded token is trained on, over all epochs and runs


def count_flops(settings: CountFlopsConfig, progress: Callable[..., None] = silent) -> dict:
    """Count the operations of a CountFlopsConfig, per batch and per run.

    Returns  setting; table3 (paradigm -> row -> operations), table3_as_printed, percent_of_mlm (paradigm -> per cent,
             unrounded); in_full (as table3, by pretraining_flops), with_our_solver (online MLSM at the cut layer);
             solver, encoding (one batch); dictionary; offline (R -> parts of a batch); run (operations of a run, in
             full); measured (formula against torch's counter); figure (files)
    Raises   FlopsError
    """
    setting = Setting.of(settings)
    result = _count(setting, settings)
    result["measured"] = _measure(setting, progress)
    result["figure"] = [str(path) for path in drawn(draw_costs, result, settings.output / "flops")]
    return result


def _count(setting, settings):
    columns, full = pretraining_table(setting), full_table(setting)
    run = settings.max_steps * settings.batch_windows / setting.windows
    dictionary = dictionary_flops(setting, settings.dictionary_tokens, settings.dictionary_epochs)
    cut, mlm = f"mlsm-{setting.layer}", full["mlm"]["total"]
    ours = full[cut]["total"] - full[cut][FISTA] + solver_flops(setting.masked, setting.k, setting.teacher.width)
    offline = {str(reuse): offline_flops(setting, reuse) for reuse in REUSE}
    for parts in offline.values():
        parts["percent_of_mlm"] = 100 * parts["total"] / mlm
    return {
        "setting": plain(settings)
        | {
            "windows": setting.windows,
            "vocabulary": setting.vocabulary,
            "tokens": setting.tokens,
            "masked": setting.masked,
            "attention_apart": setting.teacher.is_analytic,
        },
        "table3": columns,
        "table3_as_printed": {
            name: {row: as_printed(row, flops) for row, flops in rows.items() if " " in row}
            for name, rows in columns.items()
        },
        "percent_of_mlm": {name: rows["percent_of_mlm"] for name, rows in columns.items() if name != "mlm"},
        "in_full": full,
        "with_our_solver": {"total": ours, "percent_of_mlm": 100 * ours / mlm},
        "solver": _solver(setting),
        "encoding": encoding_flops(setting),
        "offline": offline,
        "dictionary": {"flops": dictionary, "share_of_run": dictionary / (run * columns[cut]["total"])},
        "run": {name: run * rows["total"] for name, rows in full.items()},
    }


def as_printed(row: str, flops: float) -> str:
    """A cell as printed in table 3: calflops prints forward passes with three digits, and the paper triples these."""
    passes = TRAINING if row.startswith("trained") else 1
    forward = float(f"{flops / passes:.2e}")
    return short_flops(passes * forward)


def short_flops(flops: float | None) -> str:
    """Operations with three digits, in units of 1e12 as in table 3 or in smaller units; empty for None."""
    if not flops:
        return ""
    exponent = 12 if flops >= 1e10 else 3 * int(math.log10(max(flops, 1)) // 3)
    return f"{flops / 10**exponent:.2f}e{exponent}"


def _solver(setting):
    """Operations of the solvers on one batch, at masked and at all positions; those of our solver by part."""
    k, d = setting.k, setting.teacher.width
    found = {}
    for where, tokens in (("masked", setting.masked), ("all", setting.tokens)):
        found[where] = {
            "fista_100": fista_flops(tokens, k, d),
            "coordinate_descent": solver_flops(tokens, k, d),
            "correlations": correlation_flops(tokens, k, d),
            "coordinate_updates": update_flops(tokens, k),
        }
    return found


def _measure(setting, progress):
    """Rows of `what`, `formula` (None if there is none) and `measured`: operations of a forward pass on a batch."""
    windows, length, tokens = setting.windows, setting.length, setting.tokens
    encoders = [
        (f"student {setting.student.name}", setting.student),
        (f"teacher {setting.teacher.name}", setting.teacher),
        (f"teacher, {setting.layer} layers", setting.teacher.cut(setting.layer)),
    ]
    rows = []
    progress("measure", 0, len(encoders) + 1, unit="models")
    for done, (what, encoder) in enumerate(encoders):
        formula = encoder.forward(windows, length).total if encoder.is_analytic else None
        rows.append({"what": what, "formula": formula, "measured": encoder.measure(windows, length)})
        progress("measure", done + 1, len(encoders) + 1, unit="models")
    head = setting.student.head(tokens, setting.k)
    rows.append(
        {
            "what": f"head, {setting.k:,} logits",
            "formula": head,
            "measured": measure_head(setting.student, tokens, setting.k),
        }
    )
    masked = windows * round(setting.mask_rate * (length - 2))
    computed = measure_student(setting.student, windows, length, masked, setting.k)
    rows.append({"what": "train-student: last layer and head where masked", "formula": None, "measured": computed})
    return rows
