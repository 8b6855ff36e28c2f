"""The report's figures: curves against four costs, differences by task; each one an SVG file with its numbers as CSV.

A figure stands alone in its file and is part of the page as well, so it has no colours of its own for paper and ink:
black and white become the page's (report.css). Left out: what is drawn (curves.py, effects.py), the page (page.py).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from mlsm.common.text import printable
from mlsm.evaluation.comparison.drawing import TITLES, style
from mlsm.evaluation.comparison.report.arms import Arm, Seed
from mlsm.evaluation.comparison.report.curves import AXES, Course, Score, arm_average
from mlsm.evaluation.comparison.report.effects import Effect
from mlsm.evaluation.plots import new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STEMS = tuple(f"report-{what}-by-{axis}" for what in ("held-out-loss", "scores") for axis in AXES)
EFFECT_STEM = "report-differences"
_WIDTH = 0.8  # text columns
_ENDS = {"floor": (0, (1, 2)), "ceiling": (0, (5, 3))}  # dashes
_GREY = "#808080"  # is read on white and on black
Line = tuple[str, Seed, int, float, float]  # arm, seed, step, x, y


@dataclass(frozen=True)
class Drawn:
    """A figure of the page. `files`: SVG, CSV."""

    title: str
    caption: str
    files: list[Path]


def draw_losses(courses: Sequence[Course], arms: Sequence[Arm], directory: Path) -> list[Drawn]:
    """Held-out loss of the runs, as a share of a constant prediction's, against every cost that the logs tell."""
    lines = {
        axis: [
            (course.arm, course.seed, point.steps, x, point.share)
            for course in courses
            for point in course.points
            if point.share is not None and (x := getattr(point, axis)) is not None
        ]
        for axis in AXES
    }
    words = "held-out loss / that of a constant prediction"
    caption = (
        "Objectives have losses of their own, so each is divided by that of a constant prediction (1: nothing was "
        "learned). Only lines of one objective and one target compare. Thin: single pre-trainings."
    )
    return _draw_all("held-out-loss", "Held-out loss", words, caption, lines, arms, [], directory)


def draw_scores(
    scores: Sequence[Score], arms: Sequence[Arm], ends: Sequence[Arm], tasks: Sequence[str], directory: Path
) -> list[Drawn]:
    """Mean scores of checkpoints against every cost; the floor and the ceiling as lines across."""
    lines = {
        axis: [
            (score.arm, score.seed, score.spent.steps, x, score.value)
            for score in scores
            if (x := getattr(score.spent, axis)) is not None
        ]
        for axis in AXES
    }
    levels = [(end.name, level) for end in ends if (level := arm_average(end, tasks)) is not None]
    caption = f"Mean of {', '.join(TITLES[task] for task in tasks)}. Thin: single pre-trainings."
    return _draw_all("scores", "Fine-tuning", "mean fine-tuning score", caption, lines, arms, levels, directory)


def _draw_all(what, title, words, caption, lines_by_axis, arms, levels, directory):
    from matplotlib.ticker import EngFormatter, MaxNLocator

    drawn = []
    for axis, lines in lines_by_axis.items():
        if len({step for _, _, step, _, _ in lines}) < 2:
            continue
        figure, axes = new_figure(width=_WIDTH)
        rows = [*_draw_lines(axes, lines, [arm.name for arm in arms]), *_draw_levels(axes, levels)]
        axes.set(xlabel=AXES[axis], ylabel=words)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        figure.legend(loc="outside lower center", ncols=2, fontsize=8)
        header = ("arm", "pre-training seed", "step", axis, what)
        files = save_figure(figure, directory / f"report-{what}-by-{axis}", header, rows, png=False)
        drawn.append(Drawn(f"{title} by {axis}", caption, files))
    return drawn


def _draw_lines(axes: "Axes", lines: Sequence[Line], names: Sequence[str]) -> Iterable[Sequence]:
    """Draw every arm's mean, where all of its runs have a point, and these thinly. Returns the rows of the CSV."""
    rows: list[Sequence] = []
    for place, name in enumerate(names):
        look = style(place)
        by_seed: dict[Seed, list[Line]] = {}
        for line in sorted((line for line in lines if line[0] == name), key=lambda line: line[2]):
            by_seed.setdefault(line[1], []).append(line)
        shown = _mean_of(list(by_seed.values())) if len(by_seed) > 1 else next(iter(by_seed.values()), [])
        for course in by_seed.values() if len(by_seed) > 1 else ():
            axes.plot([x for *_, x, _ in course], [y for *_, y in course], color=look["color"], alpha=0.35, linewidth=1)
            rows += course
        if shown:
            axes.plot([x for *_, x, _ in shown], [y for *_, y in shown], label=label(name), **look)
        rows += shown
    return rows


def _mean_of(courses):
    """The mean line of some runs, over the steps that all of them have."""
    by_step = [{line[2]: line for line in course} for course in courses]
    common = [step for step in by_step[0] if all(step in points for points in by_step)]
    means = []
    for step in common:
        there = [points[step] for points in by_step]
        means.append((there[0][0], "mean", step, fmean(x for *_, x, _ in there), fmean(y for *_, y in there)))
    return means


def _draw_levels(axes: "Axes", levels: Sequence[tuple[str, float]]) -> Iterable[Sequence]:
    for name, level in levels:
        axes.axhline(level, color=_GREY, linewidth=1.2, linestyle=_ENDS[name], label=name)
    return [(name, "mean", "", "", level) for name, level in levels]


def draw_effect(effect: Effect, directory: Path) -> list[Drawn]:
    """The difference of two arms by task and over all, with 95 % intervals and the single pairs."""
    from matplotlib.ticker import MaxNLocator

    rows: list[Sequence] = []
    figure, axes = new_figure(width=_WIDTH)
    figure.set_figheight(1.3 + 0.32 * (len(effect.tasks) + 1))
    entries = [("mean of tasks", effect.mean, [fmean(row) for row in effect.differences_ST])]
    entries += [
        (TITLES[task], effect.of_task(task), [row[place] for row in effect.differences_ST])
        for place, task in enumerate(effect.tasks)
    ]
    for place, (name, found, singles) in enumerate(entries):
        look = style(0 if place == 0 else 1) | {"marker": "o"}
        below = [place + 0.25] * len(singles)
        axes.plot([100 * value for value in singles], below, ".", color=_GREY, alpha=0.6, markersize=5)
        if found.low is not None and found.high is not None:
            axes.plot([100 * found.low, 100 * found.high], [place, place], color=look["color"], linewidth=2)
        axes.plot([100 * found.mean], [place], **look)
        rows.append((name, "mean", found.mean, found.low, found.high))
        rows += [(name, seed, value, "", "") for seed, value in zip(effect.seeds, singles, strict=True)]
    axes.axvline(0, color="k", linewidth=0.8)
    axes.set_yticks(range(len(entries)), [name for name, *_ in entries])
    axes.set_ylim(len(entries) - 0.4, -0.6)  # the first on top
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.set_xlabel(f"{label(effect.better)} less {label(effect.than)}, percentage points")
    header = ("task", "pre-training seed", "difference", "low", "high")
    files = save_figure(figure, directory / EFFECT_STEM, header, rows, png=False)
    caption = (
        f"{effect.better} less {effect.than}, paired by pre-training seed: mean with its 95 % interval (t), and the "
        f"single pairs in grey below it. Intervals of single tasks are exploratory."
    )
    return [Drawn("Differences by task", caption, files)]


def label(name: str) -> str:
    """A name as matplotlib shows it word for word: no mathematics, not hidden from a legend."""
    text = printable(name, keep="").replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text
