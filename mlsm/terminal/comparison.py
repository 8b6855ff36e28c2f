"""What `compare` says on a terminal: models by number, then tables whose columns are those numbers.

Wide tables are cut into blocks of columns that fit the terminal. Left out: the comparison
(mlsm/evaluation/comparison/).
"""

import shutil
from io import StringIO

from mlsm.evaluation.comparison.config import CompareConfig
from mlsm.evaluation.comparison.drawing import p_text
from mlsm.evaluation.comparison.models import PARADIGMS, SEEDS, SUITE, out_of
from mlsm.evaluation.records import METRICS

_FACTS = ("objective", "encoder", "layer", "k", "lambda", "kappa", "mass kept", "intruder AUC", "checkpoint")
_MOST_LINES = 20
_MOST_MODELS = 12  # in a matrix on a terminal
_FEWEST_PAIRS = 4  # with fewer, no p of Wilcoxon's test is below 0.05, however large the differences are


def comparison(result: dict, settings: CompareConfig) -> str:
    """Show the result of `compare`."""
    models = result["models"]
    numbers = {model["model"]: place for place, model in enumerate(models, 1)}
    tuned = [model for model in models if model["n"]]
    parts = [f"\nModels: {len(models)}, from {result['records']:,} records.", _model_table(models)]
    if tuned:
        parts += [_task_table(tuned, numbers), *_significance_tables(result, numbers)]
        parts += _win_rate_table(result["win_rates"], models, numbers)
    parts += _frozen_table(result["frozen"], numbers) + _blimp_table(result["blimp"], numbers)
    parts += _difference_lines(result["differences"], numbers)
    left_out = [_left_out(found, numbers) for found in result["left_out"]]
    parts += _list("Left out, as these do not pair (averages that contain them do not compare)", left_out)
    failed = [
        f"{model['model']}: {run['task']}, seed {run['seed']} {run['why']}"
        for model in models
        for run in model["failed"]
    ]
    parts += _list("Notes", [*failed, *result["notes"]])
    return "\n".join([*parts, *_list("Conclusion", result["conclusion"]), *_files(result, settings)])


def _files(result: dict, settings: CompareConfig) -> list[str]:
    drawn = [figure for figure in result["figures"] if not figure["lacks"]]
    lacking = [figure for figure in result["figures"] if figure["lacks"]]
    lines = [f"\nReport:   {result['report']}", f"Tables:   {settings.output}/*.csv"]
    for figure in drawn:
        lines += [f"Figure {figure['figure']}: {figure['files'][1]}  ({figure['shows']})", f"  {figure['caption']}"]
    if lacking:
        lines.append("\nFigures of the paper that these records do not allow, and what each needs:")
        lines += [f"  {figure['figure']:>2}  {figure['shows']}: {figure['lacks']}" for figure in lacking]
    return lines


def _grid(header: list, rows: list[list], fixed: int = 1) -> str:
    """Lay out a table. Where the terminal is too narrow, columns after the first `fixed` continue in a block below."""
    width = max(60, shutil.get_terminal_size((120, 24)).columns)
    text = [[str(cell) for cell in row] for row in (header, *rows)]
    sizes = [max(map(len, column)) + 2 for column in zip(*text, strict=True)]
    first = min(sum(sizes[:fixed]), width // 2)
    blocks: list[list[int]] = [[]]
    room = width - first
    for column in range(fixed, len(header)):
        if blocks[-1] and sizes[column] > room:
            blocks.append([])
            room = width - first
        blocks[-1].append(column)
        room -= sizes[column]
    return "\n".join(_render(text, [*range(fixed), *block], fixed, width) for block in blocks)


def _render(text, columns, fixed, width):
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="")
    for column in columns:
        table.add_column(text[0][column], justify="left" if column < fixed else "right", overflow="fold")
    for row in text[1:]:
        table.add_row(*(row[column] for column in columns))
    stream = StringIO()
    Console(file=stream, width=width, color_system=None, markup=False, highlight=False).print(table)
    lines = stream.getvalue().splitlines()
    return "\n".join(f"  {line}".rstrip() for line in lines)


def _model_table(models):
    shares = {"mass kept": "mass_kept", "intruder AUC": "intruder_auc"}
    models = [model | {shown: _percent(model[name]) for shown, name in shares.items()} for model in models]
    facts = [name for name in _FACTS if len({str(model[name]) for model in models}) > 1]
    shared = [f"{name} {value}" for name in _FACTS if name not in facts and (value := models[0][name]) is not None]
    same = (
        len(
            {tuple((figure["task"], figure["metric"]) for figure in model["figures"]) for model in models if model["n"]}
        )
        <= 1
    )
    blimp = ["BLiMP"] * any(model["blimp"] for model in models)
    header = ["#", "model", *facts, "average", *([] if same else ["in common"]), f"n of {SEEDS * len(SUITE)}", *blimp]
    rows = []
    for number, model in enumerate(models, 1):
        known = ["" if model[name] is None else model[name] for name in facts]
        averages = [_score(model["average"])] + ([] if same else [_score(model["common_average"])])
        mark = "†" if model["failed"] else ""
        n = f"{model['n']}{mark}" if model["n"] else ""
        rows.append([number, model["model"], *known, *averages, n, *([_blimp(model["blimp"])] if blimp else [])])
    partly = any(model["blimp"] and model["blimp"]["paradigms"] != PARADIGMS for model in models)
    explained = ["in common: average over the figures that all models have"] * (not same)
    explained += [f"BLiMP (n): over n of {PARADIGMS} paradigms"] * partly
    explained += [f"of all: {', '.join(shared)}"] * bool(shared)
    return "\n".join([_grid(header, rows, fixed=2), *(f"  {line}" for line in explained)])


def _percent(share):
    return None if share is None else f"{share:.1%}"


def _blimp(blimp):
    if blimp is None:
        return ""
    paradigms = "" if blimp["paradigms"] == PARADIGMS else f" ({blimp['paradigms']})"
    return f"{blimp['average']:.3f}{paradigms}"


def _score(value):
    return "" if value is None else f"{value:.4f}"


def _task_table(models, numbers):
    rows = []
    having = {(figure["task"], figure["metric"]) for model in models for figure in model["figures"]}
    for task, metric in SUITE:
        if (task, metric) in having:
            rows.append([f"{task} {metric}", *(_task_cell(model, task, metric) for model in models)])
    header = ["mean over seeds", *(numbers[model["model"]] for model in models)]
    explained = "(s): fewer seeds than five; †: with runs that diverged or collapsed, which count"
    return f"\n{_grid(header, rows)}\n  {explained}"


def _task_cell(model, task, metric):
    for figure in model["figures"]:
        if (figure["task"], figure["metric"]) == (task, metric):
            seeds = f" ({figure['seeds']})" if figure["seeds"] < SEEDS else ""
            return f"{figure['mean']:.3f}{seeds}{'†' if figure['failed'] else ''}"
    return "–"


def _significance_tables(result, numbers):
    names = result["compared"]
    if len(names) < 2:
        return ["\n  One fine-tuned model: nothing to test."]
    averages = {model["model"]: model["common_average"] or 0.0 for model in result["models"]}
    best = sorted(range(len(names)), key=lambda i: -averages[names[i]])[:_MOST_MODELS]
    shown, parts = sorted(best), []  # rows of the matrices, in their order
    most = max((n for whole in result["significance"].values() for row in whole["n"] for n in row if n), default=0)
    if len(shown) < len(names) and most >= _FEWEST_PAIRS:
        parts.append(f"\nMatrices of the {len(shown)} models with the best averages; significance.csv has all.")
    header = ["", *(numbers[names[i]] for i in shown)]
    for level, facts in result["levels"].items():
        whole = result["significance"][level]
        cells = {name: [[rows[i][j] for j in shown] for i in shown] for name, rows in whole.items()}
        counts = [n for row in cells["n"] for n in row if n is not None]
        if max(counts, default=0) < _FEWEST_PAIRS:
            number = out_of(counts, facts["full"])
            parts.append(
                f"\nNo p over {facts['meaning']}; {number}: with fewer than {_FEWEST_PAIRS} none is below 0.05"
            )
            continue
        parts.append("\nIs the row better than the column? p of Wilcoxon's test, one-sided; * p < 0.01")
        parts.append(f"  over {facts['meaning']}; {out_of(counts, facts['full'])}")
        parts.append(_matrix(header, cells["p"], p_text))
        if level == "scores":
            won = [
                [None if wins is None else f"{wins} ({ties})" for wins, ties in zip(*rows, strict=True)]
                for rows in zip(cells["wins"], cells["ties"], strict=True)
            ]
            parts += ["\nPairs that the row wins (ties)", _matrix(header, won, str)]
            parts += [
                "\np of row over column, Holm-adjusted for all of these tests",
                _matrix(header, cells["holm"], p_text),
            ]
            parts += ["\np, two-sided", _matrix(header, cells["two_sided"], p_text)]
            parts += ["\np, two-sided, Holm-adjusted", _matrix(header, cells["two_sided_holm"], p_text)]
    return parts


def _matrix(header, cells, text):
    rows = [["–" if value is None else text(value) for value in row] for row in cells]
    return _grid(header, [[number, *row] for number, row in zip(header[1:], rows, strict=True)])


def _win_rate_table(rates, models, numbers):
    """Show how often MLSM beats other pre-trainings of the same encoder and step; the CSV file has all models."""
    facts = {model["model"]: model for model in models}
    rows: dict[tuple[str, str], dict] = {}  # by model and rival, their rates by task
    for rate in rates:
        model, other = facts[rate["model"]], facts[rate["against"]]
        is_rival = other["objective"] not in ("mlsm", None) and model["encoder"] == other["encoder"]
        if model["objective"] == "mlsm" and is_rival:
            rows.setdefault((rate["model"], rate["against"]), {})[rate["task"]] = rate
    if not rows:
        return []
    tasks = [task for task in ("all", *METRICS) if any(task in row for row in rows.values())]
    lines = [
        [
            f"{numbers[model]} over {numbers[other]}",
            facts[model]["checkpoint"],
            *(f"{row[task]['rate']:.2f}" if task in row else "–" for task in tasks),
        ]
        for (model, other), row in list(rows.items())[:_MOST_LINES]
    ]
    more = [f"  ... and {len(rows) - _MOST_LINES:,} more in win-rates.csv"] if len(rows) > _MOST_LINES else []
    title = "\nShare of pairs that MLSM wins (a tie counts half)"
    return [title, _grid(["", "checkpoint", *tasks], lines, fixed=2), *more]


def _frozen_table(figures, numbers):
    """Scores of frozen encoders, a row a figure."""
    if not figures:
        return []
    rows: dict[str, dict[str, float]] = {}
    for figure in figures:
        rows.setdefault(f"{figure['task']} {figure['metric']}", {})[figure["model"]] = figure["value"]
    models = [model for model in numbers if any(model in row for row in rows.values())]
    lines = [
        [name, *(f"{100 * row[model]:.1f}" if model in row else "–" for model in models)] for name, row in rows.items()
    ]
    title = "\nFrozen encoders (penalties and layers chosen on the tuning split)"
    return [title, _grid(["", *(numbers[model] for model in models)], lines)]


def _blimp_table(rows, numbers):
    """Compare every two models on BLiMP, the better one first."""
    if not rows:
        return []
    lines = [
        [
            f"{numbers[row['model']]} over {numbers[row['against']]}",
            f"{100 * row['difference']:+.1f}",
            "–" if row["low"] is None else f"{100 * row['low']:+.1f} to {100 * row['high']:+.1f}",
            row["paradigms"],
            f"{row['wins']} ({row['ties']})",
            *("–" if row[name] is None else p_text(row[name]) for name in ("p", "holm")),
        ]
        for row in rows[:_MOST_LINES]
    ]
    more = [f"  ... and {len(rows) - _MOST_LINES:,} more in blimp.csv"] if len(rows) > _MOST_LINES else []
    title = "\nBLiMP: accuracy in percentage points, two models paired by paradigm"
    header = ["", "difference", "95 % interval", "paradigms", "won (ties)", "p, two-sided", "Holm"]
    explained = "  interval: bootstrap over paradigms; p: Wilcoxon's test over paradigms, not over their sentence pairs"
    return [title, _grid(header, lines), explained, *more]


def _left_out(found, numbers):
    tasks: dict[str, list[int]] = {}
    for task, seed in found["trainings"]:
        tasks.setdefault(task, []).append(seed)
    named = ", ".join(f"{task} {'/'.join(map(str, seeds))}" for task, seeds in tasks.items())
    return f"{numbers[found['model']]} and {numbers[found['against']]}: {found['why']}: seeds of {named}"


def _difference_lines(differences, numbers):
    """Say in which settings of pre-training the models differ, and which pairs differ in more than one."""
    if len(numbers) < 2:
        return []

    def of(labels):
        return "/".join(str(number) for number in sorted(numbers[label] for label in labels))

    lines = [
        f"{name}: {', '.join(f'{value} ({of(labels)})' for value, labels in values.items())}"
        for name, values in differences["settings"].items()
    ]
    if unknown := differences["unknown"]:
        lines.append(f"other settings are unknown: {of(unknown)} (they have no lineage)")
    several = [pair for pair in differences["pairs"] if len(pair["differ_in"]) > 1]
    mixed = [
        f"{numbers[pair['model']]} and {numbers[pair['against']]}: {', '.join(pair['differ_in'])}" for pair in several
    ]
    return [
        *_list("What differs in the pre-training of these models (numbers of the models)", lines),
        *_list("Pairs that differ in more than one setting: a difference in score is not due to one alone", mixed),
    ]


def _list(title, lines):
    if not lines:
        return []
    more = [f"  ... and {len(lines) - _MOST_LINES:,} more (--json lists all)"] if len(lines) > _MOST_LINES else []
    return [f"\n{title}:", *(f"  {line}" for line in lines[:_MOST_LINES]), *more]
