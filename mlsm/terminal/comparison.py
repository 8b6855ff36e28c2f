"""The output of `compare` on a terminal: a numbered list of models, then tables whose columns are those numbers.

Wide tables are cut into blocks of columns that fit the terminal. Text from records is shown on one line and cannot
control the terminal. Not handled here: the comparison (mlsm/evaluation/comparison/).
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from typing import Any

from mlsm.common.text import printable, redacted
from mlsm.evaluation.comparison.config import CompareConfig
from mlsm.evaluation.comparison.effects import LEVELS, BlimpPair, LeftOut, Matrices, Matrix, WinRate
from mlsm.evaluation.comparison.figures import p_text
from mlsm.evaluation.comparison.models import PARADIGMS, SEEDS, SUITE, out_of
from mlsm.evaluation.comparison.result import BlimpMean, Comparison, FrozenScore, Summary
from mlsm.evaluation.records import METRICS
from mlsm.terminal.tables import long_list

_FACTS = ("objective", "encoder", "layer", "k", "lambda", "kappa", "mass kept", "intruder AUC", "checkpoint")
_MOST_LINES = 20
_MOST_MODELS = 12  # in a matrix on a terminal
_MOST_COLUMNS = 24  # models in a table of scores
_FEWEST_PAIRS = 4  # with fewer, no p of Wilcoxon's test is below 0.05, however large the differences are
Numbers = Mapping[str, int]  # label of a model -> its number


def comparison(result: Comparison, settings: CompareConfig) -> str:
    """Show the result of `compare`."""
    summaries = result.summaries
    numbers = {summary.label: place for place, summary in enumerate(summaries, 1)}
    tuned = [summary for summary in summaries if summary.n]
    parts = [f"\nModels: {len(summaries)}, from {result.records:,} records.", _model_table(summaries)]
    if tuned:
        parts += [_task_table(tuned, numbers), *_significance_tables(result, numbers)]
        parts += _win_rate_table(result, numbers)
    parts += _frozen_table(result.frozen, numbers) + _blimp_table(result.blimp, numbers)
    parts += _difference_lines(result, numbers)
    left_out = [_left_out(found, numbers) for found in result.left_out]
    parts += _list("Excluded because they cannot be paired (averages that contain them cannot be compared)", left_out)
    failed = [
        f"{model.label}: {task}, seed {seed} {why}"
        for model in result.models
        for (task, seed), why in model.failed.items()
    ]
    parts += _list("Notes", [*failed, *result.notes])
    return "\n".join([*parts, *_list("Conclusion", result.conclusion), *_files(result, settings)])


def _files(result: Comparison, settings: CompareConfig) -> list[str]:
    lines = [f"Report:   {result.report}", f"Tables:   {settings.output}/*.csv"]
    for figure in result.figures:
        if figure.lacks is None:
            lines += [f"Figure {figure.figure}: {figure.files[1]}  ({figure.shows})", f"  {figure.caption}"]
    lacking = [f"  {figure.figure:>2}  {figure.shows}: {figure.lacks}" for figure in result.figures if figure.lacks]
    said = ["", *map(_one_line, lines)]
    if lacking:
        said += ["\nFigures of the paper that cannot be drawn from these records, and what each needs:"]
    return [*said, *map(_one_line, lacking)]


# -- models -----------------------------------------------------------------------------------------------


def _model_table(summaries: Sequence[Summary]) -> str:
    shown = [
        summary.fields | {"mass kept": _percent(summary.model.kept), "intruder AUC": _percent(summary.intruder_auc)}
        for summary in summaries
    ]
    facts = [name for name in _FACTS if len({str(fields[name]) for fields in shown}) > 1]
    shared = [f"{name} {value}" for name in _FACTS if name not in facts and (value := shown[0][name]) is not None]
    same = len({tuple(summary.model.figures) for summary in summaries if summary.n}) <= 1
    blimp = ["BLiMP"] * any(summary.blimp for summary in summaries)
    header = ["#", "model", *facts, "average", *([] if same else ["in common"]), f"n of {SEEDS * len(SUITE)}", *blimp]
    rows = []
    for number, (summary, fields) in enumerate(zip(summaries, shown, strict=True), 1):
        known = ["" if fields[name] is None else fields[name] for name in facts]
        averages = [_score(summary.average)] + ([] if same else [_score(summary.common_average)])
        n = f"{summary.n}{'†' if summary.model.failed else ''}" if summary.n else ""
        rows.append([number, summary.label, *known, *averages, n, *([_blimp(summary.blimp)] if blimp else [])])
    partly = any(summary.blimp and summary.blimp.paradigms != PARADIGMS for summary in summaries)
    explained = ["in common: average over the figures that all models have"] * (not same)
    explained += [f"BLiMP (n): over n of {PARADIGMS} paradigms"] * partly
    explained += [f"of all: {', '.join(shared)}"] * bool(shared)
    return "\n".join([_grid(header, rows, fixed=2), *(f"  {_one_line(line)}" for line in explained)])


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.1%}"


def _blimp(blimp: BlimpMean | None) -> str:
    if blimp is None:
        return ""
    paradigms = "" if blimp.paradigms == PARADIGMS else f" ({blimp.paradigms})"
    return f"{blimp.average:.3f}{paradigms}"


def _score(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _task_table(tuned: Sequence[Summary], numbers: Numbers) -> str:
    best = sorted(tuned, key=lambda summary: -(summary.common_average or 0.0))[:_MOST_COLUMNS]
    shown = sorted(best, key=lambda summary: numbers[summary.label])
    cells = {
        summary.label: {
            (figure.task, figure.metric): f"{figure.mean:.3f}"
            + (f" ({figure.seeds})" if figure.seeds < SEEDS else "")
            + ("†" if figure.failed else "")
            for figure in summary.figures
        }
        for summary in shown
    }
    rows = [
        [f"{task} {metric}", *(found.get((task, metric), "–") for found in cells.values())]
        for task, metric in SUITE
        if any((task, metric) in found for found in cells.values())
    ]
    header = ["mean over seeds", *(numbers[label] for label in cells)]
    explained = ["(s): fewer seeds than five; †: includes runs that diverged or collapsed"]
    if len(shown) < len(tuned):
        explained.append(f"Only the {len(shown)} models with the best averages; tasks.csv has all.")
    return "\n".join([f"\n{_grid(header, rows)}", *(f"  {line}" for line in explained)])


# -- model against model ----------------------------------------------------------------------------------


def _significance_tables(result: Comparison, numbers: Numbers) -> list[str]:
    names = result.compared
    if len(names) < 2:
        return ["\n  One fine-tuned model: nothing to test."]
    averages = {summary.label: summary.common_average or 0.0 for summary in result.summaries}
    best = sorted(range(len(names)), key=lambda i: -averages[names[i]])[:_MOST_MODELS]
    shown, parts = sorted(best), []  # rows of the matrices, in their order
    most = max((n for whole in result.significance.values() for row in whole.n for n in row if n), default=0)
    if len(shown) < len(names) and most >= _FEWEST_PAIRS:
        parts.append(f"\nMatrices of the {len(shown)} models with the best averages; significance.csv has all.")
    header = ["", *(numbers[names[i]] for i in shown)]
    for level in LEVELS:
        whole = result.significance[level.name]
        cells = Matrices(*([[rows[i][j] for j in shown] for i in shown] for rows in whole))
        counts = [n for row in cells.n for n in row if n is not None]
        number = out_of(counts, level.full)
        if max(counts, default=0) < _FEWEST_PAIRS:
            parts.append(f"\nNo p over {level.meaning}; {number}: with fewer than {_FEWEST_PAIRS} none is below 0.05")
            continue
        parts.append("\nIs the row better than the column? p of Wilcoxon's test, one-sided; * p < 0.01")
        parts.append(f"  over {level.meaning}; {number}")
        parts.append(_matrix(header, cells.p, p_text))
        if level.name == "scores":
            won = [
                [None if wins is None else f"{wins} ({ties})" for wins, ties in zip(*rows, strict=True)]
                for rows in zip(cells.wins, cells.ties, strict=True)
            ]
            parts += ["\nPairs that the row wins (ties)", _matrix(header, won, str)]
            parts += ["\np of row over column, adjusted for all of these tests (Holm)"]
            parts += [_matrix(header, cells.holm, p_text)]
            parts += ["\np, two-sided", _matrix(header, cells.two_sided, p_text)]
            parts += ["\np, two-sided, Holm-adjusted", _matrix(header, cells.two_sided_holm, p_text)]
    return parts


def _matrix(header: list, cells: Matrix, text: Callable[[Any], str]) -> str:
    rows = [["–" if value is None else text(value) for value in row] for row in cells]
    return _grid(header, [[number, *row] for number, row in zip(header[1:], rows, strict=True)])


def _win_rate_table(result: Comparison, numbers: Numbers) -> list[str]:
    """Show how often MLSM scores higher than other objectives with the same encoder and step; the CSV has all."""
    fields = {summary.label: summary.fields for summary in result.summaries}
    rows: dict[tuple[str, str], dict[str, WinRate]] = {}  # (model, other model) -> their win rates by task
    for rate in result.win_rates:
        model, other = fields[rate.model], fields[rate.against]
        is_rival = other["objective"] not in ("mlsm", None) and model["encoder"] == other["encoder"]
        if model["objective"] == "mlsm" and is_rival:
            rows.setdefault((rate.model, rate.against), {})[rate.task] = rate
    if not rows:
        return []
    tasks = [task for task in ("all", *METRICS) if any(task in row for row in rows.values())]
    lines = [
        [
            f"{numbers[model]} over {numbers[other]}",
            fields[model]["checkpoint"],
            *(f"{row[task].rate:.2f}" if task in row else "–" for task in tasks),
        ]
        for (model, other), row in list(rows.items())[:_MOST_LINES]
    ]
    more = [f"  ... and {len(rows) - _MOST_LINES:,} more in win-rates.csv"] if len(rows) > _MOST_LINES else []
    title = "\nShare of pairs that MLSM wins (a tie counts half)"
    return [title, _grid(["", "checkpoint", *tasks], lines, fixed=2), *more]


def _frozen_table(scores: Sequence[FrozenScore], numbers: Numbers) -> list[str]:
    """Scores of frozen encoders, a row per figure."""
    if not scores:
        return []
    rows: dict[str, dict[str, float]] = {}
    for score in scores:
        rows.setdefault(f"{score.task} {score.metric}", {})[score.model] = score.value
    scored = [label for label in numbers if any(label in row for row in rows.values())]
    models = scored[:_MOST_COLUMNS]
    lines = [
        [name, *(f"{100 * row[label]:.1f}" if label in row else "–" for label in models)] for name, row in rows.items()
    ]
    title = "\nFrozen encoders (penalties and layers chosen on the tuning split)"
    more = [f"  Only the first {len(models)} models; frozen.csv has all."] if len(models) < len(scored) else []
    return [title, _grid(["", *(numbers[label] for label in models)], lines), *more]


def _blimp_table(pairs: Sequence[BlimpPair], numbers: Numbers) -> list[str]:
    """Compare every two models on BLiMP, the better one first."""
    if not pairs:
        return []
    lines = [
        [
            f"{numbers[pair.model]} over {numbers[pair.against]}",
            f"{100 * pair.difference:+.1f}",
            "–" if pair.low is None or pair.high is None else f"{100 * pair.low:+.1f} to {100 * pair.high:+.1f}",
            pair.paradigms,
            f"{pair.wins} ({pair.ties})",
            *("–" if p is None else p_text(p) for p in (pair.p, pair.holm)),
        ]
        for pair in pairs[:_MOST_LINES]
    ]
    more = [f"  ... and {len(pairs) - _MOST_LINES:,} more in blimp.csv"] if len(pairs) > _MOST_LINES else []
    title = "\nBLiMP: accuracy in percentage points, two models paired by paradigm"
    header = ["", "difference", "95 % interval", "paradigms", "won (ties)", "p, two-sided", "Holm"]
    explained = "  interval: bootstrap over paradigms; p: Wilcoxon's test over paradigms, not over their sentence pairs"
    return [title, _grid(header, lines), explained, *more]


def _left_out(found: LeftOut, numbers: Numbers) -> str:
    tasks: dict[str, list[int]] = {}
    for task, seed in found.trainings:
        tasks.setdefault(task, []).append(seed)
    named = ", ".join(f"{task} {'/'.join(map(str, seeds))}" for task, seeds in tasks.items())
    return f"{numbers[found.model]} and {numbers[found.against]}: {found.why}: seeds of {named}"


def _difference_lines(result: Comparison, numbers: Numbers) -> list[str]:
    """Say in which settings of pre-training the models differ, and which pairs differ in more than one."""
    if len(numbers) < 2:
        return []

    def of(labels: Sequence[str]) -> str:
        return "/".join(str(number) for number in sorted(numbers[label] for label in labels))

    lines = [
        f"{name}: {', '.join(f'{value} ({of(labels)})' for value, labels in values.items())}"
        for name, values in result.differences.settings.items()
    ]
    if unknown := result.differences.unknown:
        lines.append(f"other settings are unknown: {of(unknown)} (they have no lineage)")
    mixed = [
        f"{numbers[pair.model]} and {numbers[pair.against]}: {', '.join(pair.differ_in)}"
        for pair in result.pairs
        if len(pair.differ_in) > 1
    ]
    return [
        *_list("What differs in the pre-training of these models (numbers of the models)", lines),
        *_list(
            "Pairs that differ in more than one setting: a difference in score cannot be attributed to one alone", mixed
        ),
    ]


# -- lines and tables -------------------------------------------------------------------------------------


def _one_line(text: object) -> str:
    return printable(redacted(text), keep="")


def _list(title: str, lines: Sequence[str]) -> list[str]:
    return long_list(title, [_one_line(line) for line in lines], _MOST_LINES)


def _grid(header: list, rows: list[list], fixed: int = 1) -> str:
    """Lay out a table. If the terminal is too narrow, columns after the first `fixed` continue in a block below."""
    width = max(60, shutil.get_terminal_size((120, 24)).columns)
    text = [[_one_line(cell) for cell in row] for row in (header, *rows)]
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


def _render(text: list[list[str]], columns: list[int], fixed: int, width: int) -> str:
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
