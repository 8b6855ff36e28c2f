"""The report's tables: each is shown on the page, and written as CSV (exact) and as LaTeX (booktabs, as shown).

    table = table_of_scores(found, tasks)
    write_tables([table], directory)

Left out: costs (costs.py), figures (drawings.py), the page (page.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from mlsm.common.durable import appearing_whole
from mlsm.common.text import printable
from mlsm.evaluation.comparison.drawing import TITLES
from mlsm.evaluation.comparison.identity import differences
from mlsm.evaluation.comparison.models import blimp_average, common_paradigms
from mlsm.evaluation.comparison.report.arms import Arm, Found
from mlsm.evaluation.comparison.report.conclusion import Conclusion, p_value, points
from mlsm.evaluation.comparison.report.curves import arm_average, mean_score, score_of_task, tasks_of
from mlsm.evaluation.comparison.report.effects import Effect, blimp_effect, find_effect, interval
from mlsm.evaluation.plots import save_table
from mlsm.evaluation.records import METRICS

MOST_ARMS = 12  # in a matrix on the page
Cell = str | tuple[str, str]  # what is shown, and what stands small below it
_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "_": r"\_", "%": r"\%",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$", "−": "$-$", "×": r"$\times$",
    "κ": r"$\kappa$", "λ": r"$\lambda$", "–": "--",
}  # fmt: skip


@dataclass(frozen=True)
class Table:
    """One table of the page.

    stem          of its files
    columns       shown heads; the first column holds names
    rows          shown cells
    data          header and rows of the CSV, exact
    """

    stem: str
    title: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    data: tuple[Sequence[str], Sequence[Sequence[Any]]]


def write_tables(tables: Sequence[Table], directory: Path) -> list[Path]:
    """Write every table's CSV and LaTeX."""
    written = []
    for table in tables:
        written.append(save_table(directory / f"{table.stem}.csv", *table.data))
        written.append(directory / f"{table.stem}.tex")
        with appearing_whole(written[-1]) as file:
            file.write(latex(table).encode())
    return written


def latex(table: Table) -> str:
    """A table for a paper that loads booktabs."""
    aligned = "l" + "r" * (len(table.columns) - 1)
    lines = [" & ".join(escape_latex(cell) for cell in row) + r" \\" for row in (table.columns, *table.rows)]
    body = "\n".join(lines[1:])
    return (
        f"% {printable(table.title, keep='')}. {printable(table.caption, keep='')}\n"
        f"\\begin{{tabular}}{{{aligned}}}\n\\toprule\n{lines[0]}\n\\midrule\n{body}\n\\bottomrule\n\\end{{tabular}}\n"
    )


def escape_latex(cell: Cell) -> str:
    """A cell as LaTeX text on one line; what stands small is in brackets."""
    text = cell if isinstance(cell, str) else f"{cell[0]} [{cell[1]}]"
    return "".join(_LATEX.get(character, character) for character in printable(text, keep=""))


# -- hypotheses -------------------------------------------------------------------------------------------


def table_of_hypotheses(tests: Sequence[tuple[str, Effect, Conclusion, float | None]]) -> Table:
    """Every hypothesis with its test: (role, effect, conclusion, p by Holm's method)."""
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
        mean, scores = effect.mean, effect.scores or {}
        low, high = effect.resampled or (None, None)
        rows.append([
            name, role, ", ".join(TITLES[task] for task in effect.tasks),
            (points(mean.mean), _between(mean.low, mean.high)), str(mean.n), _p(mean.p), _p(holm),
            _between(low, high), "–" if mean.detectable is None else points(mean.detectable, sign=False),
            (f"p {p_value(scores['p'])}" if scores["p"] is not None else "–", f"won {_won(scores)}"), verdict,
        ])  # fmt: skip
        data.append([
            effect.better, effect.than, role, conclusion.verdict, mean.n, " ".join(effect.tasks), mean.mean, mean.low,
            mean.high, mean.p, holm, low, high, mean.detectable, " ".join(scores["tasks"]),
            *(scores[key] for key in ("n", "wins", "losses", "ties", "p")),
        ])  # fmt: skip
    caption = (
        "Differences are of the mean score over the named tasks, in percentage points, paired by pre-training seed, "
        "with 95 % intervals below. "
        "Interval and p: Student's, two-sided. Tasks × seeds: 95 % bootstrap interval, both drawn again; from few "
        "seeds it is too narrow. Detectable: the smallest true difference that as many pairs of this spread find with "
        "a power of 80 %. Scores: the paper's one-sided signed-rank test over all tasks that both models have, which "
        "can be more than the tasks of the difference. It counts correlated scores, since the fine-tunings of one "
        "pre-training and the metrics of one task go together; it says nothing of another pre-training."
    )
    return Table("report-hypotheses", "Hypotheses", caption, columns, rows, (header, data))


def _won(scores):
    """How many scores of the paper's test were won, and in how many tasks they are."""
    tasks = len(scores["tasks"])
    return f"{scores['wins']} of {scores['n']} in {tasks} task{'s' * (tasks != 1)}"


def _p(p):
    return "–" if p is None else p_value(p).removeprefix("= ")


def _between(low, high):
    return "–" if low is None else f"{points(low)} to {points(high)}"


# -- scores -----------------------------------------------------------------------------------------------


def table_of_scores(found: Found, tasks: Sequence[str]) -> Table:
    """The finished models of every arm between floor and ceiling: scores with intervals over pre-training seeds.

    tasks  whose mean is tested
    """
    arms = [arm for arm in (found.floor, *found.arms, found.ceiling) if arm is not None]
    having = {task for arm in arms for model in arm.at().models.values() for task in tasks_of(model)}
    shown = [task for task in METRICS if task in having]
    blimps = [model for arm in arms for model in arm.scored_on_blimp().values()]
    paradigms = common_paradigms(blimps) if blimps else []
    columns = [
        "model",
        "seeds",
        *["mean"] * bool(tasks),
        *(TITLES[task] for task in shown),
        *["BLiMP"] * bool(paradigms),
    ]
    rows: list[list[Cell]] = []
    data: list[list[Any]] = []
    for arm in arms:
        models = arm.at().models
        scored = arm.scored_on_blimp() if paradigms else {}
        measured: dict[str, list[float]] = {}
        if tasks:
            measured["mean"] = [mean_score(model, tasks) for model in models.values() if tasks_of(model) >= set(tasks)]
        for task in shown:
            measured[task] = [score_of_task(model, task) for model in models.values() if task in tasks_of(model)]
        if paradigms:
            measured["blimp"] = [blimp_average(model, paradigms) for model in scored.values()]
        rows.append([arm.name, str(len(models or scored)), *(_score(values) for values in measured.values())])
        for name, values in measured.items():
            if values:
                of = interval(values)
                data.append([arm.name, name, of.n, of.mean, of.low, of.high])
    caption = (
        f"Per cent, with 95 % intervals (t) over pre-training seeds, where there are two or more; each score is the "
        f"mean over metrics and fine-tuning seeds. Mean: of {', '.join(TITLES[task] for task in tasks) or 'no task'}. "
        f"Intervals of single arms say little about a difference, as arms share seeds: the test is paired."
    )
    if paradigms:
        caption += (
            " BLiMP: of the student's words where it predicts words, else of a linear probe that was trained on it: "
            "the first by name; the files at the end of the page say which."
        )
    header = ("model", "score", "seeds", "mean", "low", "high")
    return Table("report-scores", "Scores", caption, columns, rows, (header, data))


def _score(values) -> Cell:
    if not values:
        return "–"
    found = interval(values)
    shown = f"{100 * found.mean:.1f}".replace("-", "−")
    if found.low is None or found.high is None:
        return shown
    return shown, f"{100 * found.low:.1f}–{100 * found.high:.1f}".replace("-", "−")


# -- every arm against every other ------------------------------------------------------------------------


def table_of_wins(arms: Sequence[Arm], tasks: Sequence[str]) -> Table:
    """The row against the column: difference and p, paired over seeds; pairs of scores won and the paper's p."""
    arms = [arm for arm in arms if arm.at().models]
    averages = {arm.name: arm_average(arm, tasks) or 0.0 for arm in arms}
    best = sorted(averages, key=lambda name: -averages[name])[:MOST_ARMS]
    shown = [name for name in averages if name in best]
    cells: dict[tuple[str, str], Cell] = {}
    data: list[list[Any]] = []
    for one, other in combinations(arms, 2):
        for better, than in ((one, other), (other, one)):
            effect = find_effect(better.at(), than.at(), tasks)
            blimp = blimp_effect(better, than)
            if effect.lacks:
                continue
            mean, scores = effect.mean, effect.scores or {}
            t_test = f"p {p_value(mean.p)}" if mean.p is not None else f"n = {mean.n}"
            won = _won(scores) + (f", p {p_value(scores['p'])}" if scores["p"] is not None else "")
            cells[better.name, than.name] = f"{points(mean.mean)}, {t_test}", won
            data.append([
                better.name, than.name, mean.n, " ".join(effect.tasks), mean.mean, mean.low, mean.high, mean.p,
                " ".join(scores["tasks"]), *(scores[key] for key in ("n", "wins", "losses", "ties", "p", "two_sided")),
                *((blimp.n, blimp.mean, blimp.low, blimp.high) if blimp else [""] * 4),
            ])  # fmt: skip
    rows = [[name, *(cells.get((name, other), "–") for other in shown)] for name in shown]
    more = f" The {MOST_ARMS} best of {len(arms)}; the file has all." if len(shown) < len(arms) else ""
    of_mean = ", ".join(TITLES[task] for task in tasks) or "the tasks that both have"
    caption = (
        f"Row less column: difference of the means in points, with Student's p over pairs of pre-trainings (n: no p "
        f"from so few, or from equal ones). Mean: of {of_mean}. Below: scores won by the row, and p of the paper's "
        f"one-sided signed-rank test over all tasks that both models have. It counts correlated scores. No p here is "
        f"adjusted for the number of tests: all of this is exploratory.{more}"
    )
    header = ["model", "against", "pairs", "tasks", "difference", "low", "high", "p"]
    header += ["scores_tasks", "scores", "wins", "losses", "ties"]
    header += ["scores_p", "scores_two_sided", "blimp_pairs", "blimp_difference", "blimp_low", "blimp_high"]
    return Table("report-wins", "Every arm against every other", caption, ["", *shown], rows, (header, data))


def table_of_checkpoints(better: Arm, than: Arm, tasks: Sequence[str]) -> Table | None:
    """Checkpoints of one arm against the other's at the same progress, and against its finished models."""
    columns = [better.name, f"{than.name}, same progress", f"{than.name}, finished"]
    rows: list[list[Cell]] = []
    data: list[list[Any]] = []
    for fraction in better.fractions:
        row: list[Cell] = [f"{100 * fraction:.4g}%"]
        for of_other in (fraction, 1.0):
            effect = find_effect(better.at(fraction), than.at(of_other), tasks)
            row.append("–" if effect.lacks else (points(effect.mean.mean), _between(effect.mean.low, effect.mean.high)))
            if not effect.lacks:
                mean = effect.mean
                data.append([fraction, of_other, mean.n, mean.mean, mean.low, mean.high, mean.p])
        rows.append(row)
    if len(rows) < 2:
        return None
    caption = (
        f"How much higher {better.name} scores after a share of its steps, in points with 95 % intervals (t, paired by "
        f"pre-training seed). Exploratory."
    )
    header = ("progress", "progress_of_other", "pairs", "difference", "low", "high", "p")
    return Table("report-checkpoints", "Along the pre-training", caption, columns, rows, (header, data))


# -- what differs ---------------------------------------------------------------------------


@dataclass
class _Representative:
    """One model of an arm under the arm's name, as identity.differences compares them."""

    label: str
    facts: dict


def table_of_settings(arms: Sequence[Arm]) -> tuple[Table, list[str]]:
    """In which settings of pre-training the arms differ, seeds and steps apart; names of arms with unknown ones."""
    chosen = [_Representative(arm.name, arm.models[0].facts) for arm in arms]
    found = differences(chosen)
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
        "recorded). What is not listed is the same for all."
    )
    header = ("setting", "value", "arm")
    columns = ["setting", *(arm.name for arm in arms)]
    return Table(
        "report-settings", "What differs between the arms", caption, columns, rows, (header, data)
    ), found.unknown
