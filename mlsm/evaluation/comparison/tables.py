"""Tables of a comparison: CSV files on single models, and the page's tables, which are also written as LaTeX.

    files = write_csv(result, directory)                 # models.csv, tasks.csv, significance.csv ...
    write_tables(tables_of(result, directory), directory)    # report-scores.csv, report-scores.tex ...

A table of the page is written as CSV (exact) and as LaTeX (booktabs, as shown). Seconds are for an idle machine
(curves.py). Not handled here: figures (figures.py), the page (page.py).
"""

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, permutations
from pathlib import Path
from statistics import fmean
from typing import Any

from mlsm.common.durable import appearing_whole
from mlsm.common.text import printable
from mlsm.evaluation.comparison.arms import Arm, is_probe
from mlsm.evaluation.comparison.conclusion import (
    Test,
    between,
    claimable,
    conclude_contrasts,
    exploratory_contrasts,
    p_value,
    points,
)
from mlsm.evaluation.comparison.config import Spent
from mlsm.evaluation.comparison.curves import Course, Point
from mlsm.evaluation.comparison.effects import LEVELS, ArmScores, BlimpPair, Matrices, ScoreTest, WinRate
from mlsm.evaluation.comparison.identity import Differences, groups, text
from mlsm.evaluation.comparison.models import TITLES
from mlsm.evaluation.comparison.result import Comparison, Summary
from mlsm.evaluation.comparison.significance import Interval
from mlsm.evaluation.plots import save_table

TABLES = (  # of the page; their files are report-<name>.csv and .tex
    *("composite-hypotheses", "composite-explored", "composites", "gate"),
    *("hypotheses", "scores", "wins", "checkpoints", "settings", "same", "measures", "costs", "parts"),
)

# -- of single models, only CSV ---------------------------------------------------------------------------

_MODEL_COLUMNS = (
    "model",
    "weights",
    "objective",
    "encoder",
    "teacher",
    "layer",
    "k",
    "lambda",
    "kappa",
    "step",
    "fraction",
    "mass_kept",
    "intruder_auc",
    "average",
    "common_average",
    "n",
)
Content = tuple[Sequence[str], Iterable[Sequence[Any]]]  # header and rows


def write_csv(result: Comparison, directory: Path) -> list[Path]:
    """Write the CSV files of single models. Returns their paths."""
    differ_in = {}  # (model, against), both ways -> the settings in which they differ
    for pair in result.pairs:
        said = ", ".join([*pair.differ_in, *["unknown settings"] * pair.unknown])
        differ_in[pair.model, pair.against] = differ_in[pair.against, pair.model] = said
    contents: dict[str, Content] = {
        "models": _models(result.summaries),
        "tasks": (
            ("model", "task", "metric", "mean", "sd", "seeds", "failed"),
            [(summary.label, *figure) for summary in result.summaries for figure in summary.figures],
        ),
        "significance": _significance(result, differ_in),
        "win-rates": _pairs(WinRate, result.win_rates, differ_in),
        "blimp": _pairs(BlimpPair, result.blimp, differ_in),
        "frozen": (("model", "task", "metric", "value", "n"), result.frozen),
        "differences": _differences(result),
        "left-out": (
            ("model", "against", "why", "task", "seed"),
            [(*found[:3], *training) for found in result.left_out for training in found.trainings],
        ),
    }
    return [save_table(directory / f"{name}.csv", header, rows) for name, (header, rows) in contents.items()]


def _models(summaries: Sequence[Summary]) -> Content:
    blimp = ("average", "paradigms", "ties")
    header = (*_MODEL_COLUMNS, "failed", "pretraining_flops", "teacher_flops", "blimp", "blimp_paradigms", "blimp_ties")
    rows = []
    for summary in summaries:
        fields, flops = summary.fields, summary.model.facts["flops"]
        known = [getattr(summary.blimp, name, None) for name in blimp]
        named = [fields[name] for name in _MODEL_COLUMNS]
        rows.append([*named, len(summary.model.failed), flops["pretraining"], flops["teacher"], *known])
    return header, rows


def _pairs(kind: type[WinRate] | type[BlimpPair], found: Sequence[Any], differ_in: Mapping[Any, str]) -> Content:
    """Rows of two models, with the settings in which they differ after their names."""
    columns = kind._fields
    return (*columns[:2], "differ_in", *columns[2:]), [
        (*row[:2], differ_in[row.model, row.against], *row[2:]) for row in found
    ]


def _significance(result: Comparison, differ_in: Mapping[tuple[str, str], str]) -> Content:
    rows = []
    for level in LEVELS:
        cells = result.significance[level.name]
        for (i, name), (j, other) in permutations(enumerate(result.compared), 2):
            of_two = [matrix[i][j] for matrix in cells]
            rows.append([level.name, level.full, name, other, differ_in[name, other], *of_two])
    return ("level", "of", "model", "against", "differ_in", *Matrices._fields), rows


def _differences(result: Comparison) -> Content:
    rows = [
        (name, value, label)
        for name, values in result.differences.settings.items()
        for value, labels in values.items()
        for label in labels
    ]
    rows += [("settings of pre-training", "not all recorded", label) for label in result.differences.unknown]
    return ("setting", "value", "model"), rows


# -- of the page ------------------------------------------------------------------------------------------

MOST_ARMS = 12  # in a matrix on the page
Cell = str | tuple[str, str]  # text, and small text below it
_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "_": r"\_", "%": r"\%",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$", "−": "$-$", "×": r"$\times$",
    "κ": r"$\kappa$", "λ": r"$\lambda$", "–": "--", "|": r"\textbar{}", '"': "''",
}  # fmt: skip


@dataclass(frozen=True)
class Table:
    """One table of the page.

    columns       shown heads; the first column holds names
    rows          shown cells
    data          header and unrounded rows of the CSV
    """

    title: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    data: tuple[Sequence[str], Sequence[Sequence[Any]]]


def write_tables(tables: Mapping[str, Table], directory: Path) -> list[Path]:
    """Write the CSV and the LaTeX of every table, by name."""
    written = []
    for name, table in tables.items():
        written.append(save_table(directory / f"report-{name}.csv", *table.data))
        written.append(directory / f"report-{name}.tex")
        with appearing_whole(written[-1]) as file:
            file.write(latex(table).encode())
    return written


def latex(table: Table) -> str:
    """A table for a paper that loads booktabs."""
    aligned = "l" + "r" * (len(table.columns) - 1)
    # {}: the line before takes a [ or * at the start of a row as its own argument
    lines = ["{}" + " & ".join(escape_latex(cell) for cell in row) + r" \\" for row in (table.columns, *table.rows)]
    body = "\n".join(lines[1:])
    return (
        f"% {printable(table.title, keep='')}. {printable(table.caption, keep='')}\n"
        f"\\begin{{tabular}}{{{aligned}}}\n\\toprule\n{lines[0]}\n\\midrule\n{body}\n\\bottomrule\n\\end{{tabular}}\n"
    )


def escape_latex(cell: Cell) -> str:
    """A cell as LaTeX text on one line; the small part is in brackets."""
    text = cell if isinstance(cell, str) else f"{cell[0]} [{cell[1]}]"
    return "".join(_LATEX.get(character, character) for character in printable(text, keep=""))


def tables_of(result: Comparison, directory: Path) -> dict[str, Table]:
    """The page's tables by name, except those without rows.

    directory  the paths of logs are relative to it
    """
    arms, study = result.arms.arms, result.study
    found = [
        *(tables_of_composite(result.composite) if result.composite else [None] * 4),
        table_of_hypotheses(result.tests),
        table_of_scores(result.scores, result.tasks),
        table_of_wins(result),
        table_of_checkpoints(result),
        table_of_settings(arms, result.arms_differ),
        table_of_same_settings(arms, result.courses),
        table_of_measures(result),
        table_of_costs(arms, result.courses, study.accounts if study else {}, directory),
        table_of_parts(study.parts if study else ()),
    ]
    return {name: table for name, table in zip(TABLES, found, strict=True) if table is not None and table.rows}


# -- composites -------------------------------------------------------------------------------------------


def tables_of_composite(composite: Mapping[str, Any]) -> list[Table]:
    """The planned contrasts of a study, the exploratory ones that may be shown, its arms' composites, and the gate of
    the measures.
    """
    tested = [(contrast, said.label) for contrast, said in conclude_contrasts(composite)]
    explored = [(one, "") for one in exploratory_contrasts(composite) if "withheld" not in one]
    measures = [row["measure"] for row in composite["gate"]]
    caption = (
        "First arm minus second, in points of the composite, with 95 % intervals paired by pre-training seed below "
        "(Student's t). Unpaired: the interval of Welch's test. By measure: in its own points. "
    )
    on_tests = (
        "P is two-sided; secondary hypotheses are also adjusted by Holm's method, in which those without a result yet "
        "count as p = 1. Withheld: not all planned seeds are scored."
    )
    on_others = (
        "None of these was planned as a test, so there are no p values, and an interval that excludes 0 is not "
        "evidence by itself."
    )
    planned = _table_of_contrasts(tested, measures)
    others = _table_of_contrasts(explored, measures, without=("role", "p", "p (Holm)", "verdict"))
    return [
        Table("Hypotheses on the composite", caption + on_tests, *planned),
        Table("Exploratory contrasts of the composite", caption + on_others, *others),
        table_of_composites(composite, measures),
        _table_of_gate(composite),
    ]


def _table_of_contrasts(
    contrasts: Sequence[tuple[Mapping[str, Any], str]], measures: Sequence[str], without: Collection[str] = ()
) -> tuple[Sequence[str], Sequence[Sequence[Cell]], tuple[Sequence[str], Sequence[Sequence[Any]]]]:
    """Columns, rows and data of contrasts with the labels of their conclusions.

    without  the columns that are left off
    """
    columns = ["contrast", "role", "seeds", "difference", "unpaired", "p", "p (Holm)", *_short(measures), "verdict"]
    header = ["contrast", "role", "seeds", "difference", "low", "high", "unpaired_low", "unpaired_high", "p"]
    header += ["p (Holm)", *measures, "verdict"]
    rows: list[list[Cell]] = []
    data: list[list[Any]] = []
    for one, verdict in contrasts:
        name, role = " − ".join(one["pair"]), one["role"]
        if "withheld" in one:
            rows.append([name, role, "–", "withheld", *["–"] * (len(columns) - 5), verdict])
            data.append([name, role, *[""] * (len(header) - 3), f"withheld: {one['withheld']}"])
            continue
        seeds, by_measure = len(one["seeds"]), [one["measures"][measure] for measure in measures]
        paired, unpaired = one.get("paired", {}), one.get("unpaired", {})  # none with one seed
        difference, p, holm = points(one["difference"] / 100), paired.get("p"), paired.get("p_adjusted")
        rows.append([
            name, role, str(seeds), (difference, between(paired)) if paired else difference,
            between(unpaired) if unpaired else "–", _p(p), _p(holm), *(points(value / 100) for value in by_measure),
            verdict,
        ])  # fmt: skip
        data.append([
            name, role, seeds, one["difference"], paired.get("low"), paired.get("high"), unpaired.get("low"),
            unpaired.get("high"), p, holm, *by_measure, verdict,
        ])  # fmt: skip
    shown, kept = ([place for place, name in enumerate(of) if name not in without] for of in (columns, header))
    of_data = [[row[place] for place in kept] for row in data]
    return (
        [columns[place] for place in shown],
        [[row[place] for place in shown] for row in rows],
        ([header[place] for place in kept], of_data),
    )


def _short(measures: Sequence[str]) -> list[str]:
    """Names of measures without their tasks, unless two tasks have one of the same name."""
    metrics = [measure.rpartition("/")[2] for measure in measures]
    return metrics if len(set(metrics)) == len(metrics) else list(measures)


PARTS = {"test": "the test set (dev if a task has none)", "tuning": "the tuning split"}  # of a composite


def table_of_composites(composite: Mapping[str, Any], measures: Sequence[str]) -> Table:
    """Every arm's composite and measures, then those of the untrained students and of the teacher."""
    anchors = composite["anchors"]
    rows: list[list[Cell]] = []
    data: list[list[Any]] = []
    for name, arm in composite["arms"].items():
        if arm is None:
            rows.append([name, "–", "withheld", *["–"] * len(measures)])
            data.append([name, "", "withheld", "", *[""] * len(measures)])
        elif arm["seeds"]:
            seeds, scores = len(arm["seeds"]), [arm["measures"][measure] for measure in measures]
            shown, deviation = _one_decimal(arm["composite"]), arm["deviation"]
            with_deviation = shown if deviation is None else (shown, f"± {deviation:.1f}")
            rows.append([name, f"{seeds} of {arm['planned']}", with_deviation, *map(_one_decimal, scores)])
            data.append([name, seeds, arm["composite"], deviation, *scores])
    counts = f"{anchors['untrained_seeds']} of {anchors['untrained_planned']}", "–"
    for name, composed, count in zip(("untrained", "teacher"), (0, 100), counts, strict=True):
        if anchors[name]:
            scores = [anchors[name][measure] for measure in measures]
            rows.append([name, count, str(composed), *map(_one_decimal, scores)])
            data.append([name, anchors["untrained_seeds"] if name == "untrained" else "", composed, "", *scores])
    caption = (
        "Composite: the mean over the measures of 100 · (score − untrained) / (teacher − untrained), averaged over "
        "seeds, with its standard deviation below. Measures: scores of frozen encoders in points, on "
        f"{PARTS[composite['part']]}. Seeds: scored, and planned. "
        "Both arms of the primary hypothesis are withheld until all of their planned seeds, and the "
        "untrained students, are scored."
    )
    header = ("arm", "seeds", "composite", "deviation", *measures)
    columns = ("arm", "seeds", "composite", *_short(measures))
    return Table("Composites", caption, columns, rows, (header, data))


def _one_decimal(value: float | None) -> str:
    return "–" if value is None else f"{value:z.1f}".replace("-", "−")


def _table_of_gate(composite: Mapping[str, Any]) -> Table:
    """Whether each measure separates trained students from untrained ones and from the teacher."""
    gate = composite["gate"]
    arm = gate[0]["arm"]
    verdicts = {None: "not known yet", True: "passes", False: "fails"}
    rows: list[list[Cell]] = []
    for row in gate:
        trained, error = _one_decimal(row["trained"]), row.get("standard_error")
        rows.append([
            row["measure"], _one_decimal(row["untrained"]), trained if error is None else (trained, f"± {error:.2f}"),
            str(row["seeds"]) if row["seeds"] else "–", _one_decimal(row["teacher"]), verdicts[row["stays"]],
        ])  # fmt: skip
    columns = ("measure", "untrained", f"trained, {arm}", "seeds", "teacher", "gate")
    header = ("measure", "arm", "untrained", "trained", "standard_error", "seeds", "teacher", "passes")
    names = ("measure", "arm", "untrained", "trained", "standard_error", "seeds", "teacher", "stays")
    data = [[row.get(name) for name in names] for row in gate]
    caption = (
        f"{composite['rule']}. Scores in points, with the standard error over seeds below. The recipe fixes the "
        "measures: one that fails here is still part of the composite."
    )
    return Table("Gate of the measures", caption, columns, rows, (header, data))


# -- hypotheses -------------------------------------------------------------------------------------------


def table_of_hypotheses(tests: Sequence[Test]) -> Table:
    """Every hypothesis with its test."""
    columns = ["hypothesis", "role", "tasks", "difference", "pairs", "p", "p (Holm)", "tasks × seeds", "detectable"]
    columns += ["scores (paper)", "verdict"]
    header = ["better", "than", "role", "verdict", "pairs", "tasks", "difference", "low", "high", "p", "holm"]
    header += ["bootstrap_low", "bootstrap_high", "detectable"]
    header += ["scores_tasks", "scores", "wins", "losses", "ties", "scores_p"]
    rows: list[list[Cell]] = []
    data: list[list[Any]] = []
    for role, effect, conclusion, holm in tests:
        name, verdict = f"{effect.better} > {effect.than}", conclusion.label
        if effect.lacks:
            rows.append([name, role, *["–"] * 8, verdict])
            data.append([effect.better, effect.than, role, conclusion.verdict, 0, *[""] * (len(header) - 5)])
            continue
        mean, scores = effect.mean, effect.scores
        assert scores is not None  # because there is a pair
        low, high = effect.resampled or (None, None)
        shown = claimable(mean)
        has_interval = shown.low is not None
        rows.append([
            name, role, ", ".join(TITLES[task] for task in effect.tasks),
            (points(mean.mean), _between(shown.low, shown.high)), str(mean.n), _p(shown.p),
            _p(holm if has_interval else None), _between(low if has_interval else None, high),
            "–" if shown.detectable is None else points(shown.detectable, sign=False),
            (f"p {p_value(scores.p)}" if scores.p is not None else "–", f"won {_won(scores)}"), verdict,
        ])  # fmt: skip
        data.append([
            effect.better, effect.than, role, conclusion.verdict, mean.n, " ".join(effect.tasks), mean.mean, mean.low,
            mean.high, mean.p, holm, low, high, mean.detectable, " ".join(scores.tasks), *scores[1:6],
        ])  # fmt: skip
    caption = (
        "Differences in mean score over the named tasks, in percentage points, paired by pre-training seed, with 95 "
        "% intervals below. Interval and p: Student's t, two-sided. Tasks × seeds: 95 % bootstrap interval over "
        "both; with few seeds it is too narrow. Detectable: the smallest true difference that this number of pairs "
        "with this variance would detect with 80 % power at 5 %, unadjusted. –: fewer than three pairs, or pairs "
        "that do not vary. "
        "Scores: the paper's one-sided signed-rank test over all "
        "tasks that both models have, which can be more than the tasks of the difference. It treats scores as "
        "independent, but those of one pre-training run or of one task are correlated; it says nothing about another "
        "pre-training run."
    )
    return Table("Hypotheses", caption, columns, rows, (header, data))


def _won(scores: ScoreTest) -> str:
    """How many scores were won in the paper's test, and from how many tasks."""
    tasks = len(scores.tasks)
    return f"{scores.wins} of {scores.n} in {tasks} task{'s' * (tasks != 1)}"


def _p(p):
    return "–" if p is None else p_value(p).removeprefix("= ")


def _between(low, high):
    return "–" if low is None else f"{points(low)} to {points(high)}"


# -- scores -----------------------------------------------------------------------------------------------


def table_of_scores(scores: Sequence[ArmScores], tasks: Sequence[str]) -> Table:
    """The finished models of every arm, with the lower and the upper bound: scores and intervals over pre-training
    seeds.

    tasks  whose mean is tested
    """
    names = list(scores[0].scores) if scores else []
    titles = {"mean": "mean", "blimp": "BLiMP"} | TITLES
    columns = ["model", "seeds", *(titles[name] for name in names)]
    rows: list[list[Cell]] = [
        [arm.arm, str(arm.n), *(_score(found, arm.n) for found in arm.scores.values())] for arm in scores if names
    ]
    data = [
        [arm.arm, name, of.n, of.mean, of.low, of.high]
        for arm in scores
        for name, of in arm.scores.items()
        if of is not None
    ]
    caption = (
        "In per cent, with 95 % intervals (t) over pre-training seeds if there are two or more. n: the number of seeds "
        "of a score that not all seeds have. Each score is the mean over metrics and fine-tuning seeds. Mean: over "
        f"{', '.join(TITLES[task] for task in tasks) or 'no task'}. Intervals of single arms say little about a "
        "difference, because arms share seeds: the test is paired."
    )
    if "blimp" in names:
        caption += (
            " BLiMP: a student that predicts words is scored itself, any other through a linear probe trained on it. "
            "If there are several probes, the first by name is shown; the files at the end of the page say which."
        )
    header = ("model", "score", "seeds", "mean", "low", "high")
    return Table("Scores", caption, columns, rows, (header, data))


def _score(found: Interval | None, seeds: int) -> Cell:
    if found is None:
        return "–"
    below = [] if found.n == seeds else [f"n = {found.n}"]
    if found.low is not None and found.high is not None:
        below.insert(0, f"{_one_decimal(100 * found.low)} to {_one_decimal(100 * found.high)}")
    shown = _one_decimal(100 * found.mean)
    return (shown, ", ".join(below)) if below else shown


# -- every arm against every other ------------------------------------------------------------------------


def table_of_wins(result: Comparison) -> Table:
    """Row against column: difference and p, paired over seeds; below, the scores won and the paper's p."""
    averages = {arm.name: arm.average(result.tasks) or 0.0 for arm in result.arms.arms if arm.at().models}
    best = sorted(averages, key=lambda name: -averages[name])[:MOST_ARMS]
    shown = [name for name in averages if name in best]
    cells: dict[tuple[str, str], Cell] = {}
    data: list[list[Any]] = []
    for effect, blimp in result.contests:
        mean, scores = effect.mean, effect.scores
        assert scores is not None  # because there is a pair
        p = claimable(mean).p
        t_test = f"p {p_value(p)}" if p is not None else f"n = {mean.n}"
        won = _won(scores) + (f", p {p_value(scores.p)}" if scores.p is not None else "")
        cells[effect.better, effect.than] = f"{points(mean.mean)}, {t_test}", won
        data.append([
            effect.better, effect.than, mean.n, " ".join(effect.tasks), mean.mean, mean.low, mean.high, mean.p,
            " ".join(scores.tasks), *scores[1:],
            *((blimp.n, blimp.mean, blimp.low, blimp.high) if blimp else [""] * 4),
        ])  # fmt: skip
    rows = [[name, *(cells.get((name, other), "–") for other in shown)] for name in shown]
    more = f" The {MOST_ARMS} best of {len(averages)}; the file has all." if len(shown) < len(averages) else ""
    of_mean = ", ".join(TITLES[task] for task in result.tasks) or "the tasks that both have"
    caption = (
        "Row minus column: difference of the means in points, with Student's p over pairs of pre-training runs (n: "
        f"no p, because the pairs are too few or all equal). Mean: over {of_mean}. Below: scores won by the row, and "
        "p of the paper's one-sided signed-rank test over all tasks that both models have, which treats correlated "
        f"scores as independent. No p here is adjusted for the number of tests: this table is exploratory.{more}"
    )
    header = ["model", "against", "pairs", "tasks", "difference", "low", "high", "p"]
    header += ["scores_tasks", "scores", "wins", "losses", "ties"]
    header += ["scores_p", "scores_two_sided", "blimp_pairs", "blimp_difference", "blimp_low", "blimp_high"]
    return Table("Every arm against every other", caption, ["", *shown], rows, (header, data))


def table_of_checkpoints(result: Comparison) -> Table | None:
    """Checkpoints of one arm of the first hypothesis against the other arm's: at the same progress, and finished."""
    if len(result.along_the_way) < 2:
        return None
    better, than = (arm.name for arm in result.rivals)
    columns = [better, f"{than}, same progress", f"{than}, finished"]
    rows: list[list[Cell]] = []
    data: list[list[Any]] = []
    for fraction, *effects in result.along_the_way:
        row: list[Cell] = [f"{100 * fraction:.4g}%"]
        for of_other, effect in zip((fraction, 1.0), effects, strict=True):
            if effect.lacks:
                row.append("–")
            else:
                mean = effect.mean
                shown = claimable(mean)
                row.append((points(mean.mean), _between(shown.low, shown.high)))
                data.append([fraction, of_other, mean.n, mean.mean, mean.low, mean.high, mean.p])
        rows.append(row)
    caption = (
        f"How much higher {better} scores after a share of its steps, in points with 95 % intervals (t, paired by "
        f"pre-training seed). Exploratory."
    )
    header = ("progress", "progress_of_other", "pairs", "difference", "low", "high", "p")
    return Table("During pre-training", caption, columns, rows, (header, data))


# -- what differs -----------------------------------------------------------------------------------------


def table_of_settings(arms: Sequence[Arm], found: Differences) -> Table:
    """The settings of pre-training in which the arms differ, except seeds and steps."""
    rows: list[list[Cell]] = []
    data: list[list[Any]] = []
    for setting, values in found.settings.items():
        if setting in ("run_seed", "step"):
            continue
        value_of = {name: value for value, names in values.items() for name in names}
        rows.append([setting, *(value_of.get(arm.name, "–") for arm in arms)])
        data += [[setting, value, name] for name, value in value_of.items()]
    caption = (
        "Every setting of pre-training in which the arms differ (–: it follows from the objective, or is not "
        "recorded). All other recorded settings are the same for all arms."
    )
    header = ("setting", "value", "arm")
    columns = ["setting", *(arm.name for arm in arms)]
    return Table("What differs between the arms", caption, columns, rows, (header, data))


SAME = (  # settings that the page shows if all students share them; the CSV file has all shared ones
    *("encoder", "layer", "hidden layer", "k", "window max_length", "batch_windows", "max_steps", "tokens"),
    *("optimizer", "lr", "mask_rate", "dropout"),
)
SPLITS = {"test": "test", "train-tenth": "a tenth of train"}  # of a fine-tuning record; else dev


def table_of_same_settings(arms: Sequence[Arm], courses: Sequence[Course]) -> Table:
    """The settings of pre-training with one value over all students that have them."""
    found: dict[str, set[str]] = {}
    for model in (model for arm in arms for model in arm.models if not is_probe(model)):
        for of_group in groups(model.facts).values():
            for name, value in of_group.items():
                found.setdefault(name, set()).add(text(value))
    found["tokens"] = {_amount(course.points[-1].tokens) for course in courses}
    shared = {name: next(iter(values)) for name, values in found.items() if len(values) == 1} if arms else {}
    caption = (
        "Settings of pre-training with one value over all students that have them. Layer and k are those of the "
        "targets. Tokens: read by each student, according to the logs. The file has all shared settings."
    )
    rows = [(name, shared[name]) for name in SAME if shared.get(name, "–") not in ("–", "not set")]
    data = [[name, value] for name, value in shared.items() if name != "step"]
    return Table("What was the same", caption, ("setting", "value"), rows, (("setting", "value"), data))


def table_of_measures(result: Comparison) -> Table:
    """The split, and the numbers of training and scored examples, of every measure that the page shows."""
    found: dict[tuple[str, str, str, str], set[tuple[int | None, int]]] = {}

    def add(task: str, metric: str, how: str, split: str, training: int | None, scored: int) -> None:
        found.setdefault((TITLES.get(task, task), metric, how, split), set()).add((training, scored))

    composite = result.composite or {"gate": (), "part": "test"}
    for model in result.models:
        for measure in [row["measure"] for row in composite["gate"]]:
            task, _, metric = measure.partition("/")
            if (record := model.frozen.get((task, None))) is not None:
                counts = {figure["metric"]: figure["n"] for figure in record["figures"]}
                for split in [one for one in (composite["part"], "dev") if f"{metric}_{one}" in counts][:1]:
                    add(task, metric, "frozen", split, record["data"]["n_train"], counts[f"{metric}_{split}"])
    for model in result.models:
        for (task, _), record in sorted(model.trainings.items()):
            split = SPLITS.get(record["settings"].get("split", ""), "dev")
            for figure in record["figures"]:
                add(task, figure["metric"], "fine-tuned", split, record["data"]["n_train"], figure["n"])
    for model in result.models:
        if model.blimp is not None:
            add("BLiMP", "accuracy", "no training", "test", None, sum(one["n"] for one in model.blimp["figures"]))
    columns = ("measure", "task", "encoder", "split", "training examples", "scored examples")
    rows, data = [], []
    for (task, metric, how, split), of_models in found.items():
        name = metric.replace("_", " ")
        training, scored = (sorted({n for n in of if n is not None}) for of in zip(*of_models, strict=True))
        rows.append((name, task, how, split, _range(training), _range(scored)))
        data += [(metric, task, how, split, *pair) for pair in sorted(of_models, key=str)]
    caption = (
        "How many examples each score on this page is based on. Training examples: those that the probe or the "
        "fine-tuning run could use. Scored: examples, or words if the measure counts these. A range: models differ."
    )
    header = ("measure", "task", "encoder", "split", "n_train", "n")
    return Table("What was measured", caption, columns, rows, (header, data))


def _range(counts: Sequence[int]) -> str:
    return " to ".join(f"{count:,}" for count in dict.fromkeys((counts[0], counts[-1]))) if counts else "–"


# -- costs ------------------------------------------------------------------------------------------------

WHOLE_ENCODING = (
    "Seconds of encoding are predicted, from a short measurement at the study's start. They include everything that "
    "made an arm's store, and the store of its dictionary if that is another one. "
    "Work shared with other arms, and other layers or values of k in the same pass, are counted in full. "
)


def table_of_costs(
    arms: Sequence[Arm], courses: Sequence[Course], accounts: Mapping[str, Mapping[str, float]], directory: Path
) -> Table:
    """What training each arm cost, according to its logs and records: means over seeds.

    accounts   of a StudyFacts
    directory  the paths of logs are relative to it
    """
    further = list(dict.fromkeys(name for of_arm in accounts.values() for name in of_arm))
    names = ["steps", "tokens", "FLOPs", "teacher's FLOPs", "held-out loss", "s a step", "seconds"]
    names += [f"with {name}" for name in further]
    by_run = {(course.arm, course.seed): course for course in courses}
    rows: list[list[str]] = []
    data: list[list[Any]] = []
    for arm in arms:
        models = arm.at().by_seed or {model.facts["run_seed"]: model for model in arm.models}
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
        "Means over pre-training seeds. Seconds are steps × the step time of a quiet machine (the fastest tenth of "
        "the logged steps), not wall-clock time. Teacher's FLOPs: its forward passes over the tokens that one "
        "student read, as if they had been encoded only for that student. "
        + ('Each column "with ..." adds one more cost to the column on its left. ' if further else "")
        + (WHOLE_ENCODING if "encoding" in further else "")
        + "Losses of different objectives, targets, positions, mask rates or temperatures cannot be compared."
    )
    header = ("arm", "pre-training seed", "model", *names, "log")
    return Table("What training cost", caption, ["arm", *names], rows, (header, data))


def table_of_parts(parts: Sequence[Spent]) -> Table:
    """Predicted and measured costs of a study's parts: one row per arm over its seeds; the CSV file has every part."""
    columns = ["part", "seeds", "predicted", "measured", "disk, predicted"]
    groups: dict[str, list[Spent]] = {}
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
        "Predicted time of the parts of the study, and measured time of the training runs: steps × the step time of "
        "a quiet machine. Sums over the seeds that were estimated or measured (–: none was). Parts with neither are "
        "not listed."
    )
    return Table("What the study cost", caption, columns, rows, (header, data))


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
