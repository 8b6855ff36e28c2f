"""The figures of a comparison's page: SVG files with their numbers as CSV.

    figures = draw_page_figures(result, directory)     # name of a gallery -> figures
    figure, rows = draw_contrasts(contrasts, margin)   # also for docs/answer.py

Each figure of the page is also a file of its own. In the page, its black and white are replaced by the page's text and
background colours (report.css). Not handled here: the paper's figures (paper.py), what is drawn (curves.py,
effects.py), files (mlsm/evaluation/plots.py).
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from mlsm.evaluation.comparison.arms import Arm, Seed
from mlsm.evaluation.comparison.conclusion import claimable
from mlsm.evaluation.comparison.curves import AXES
from mlsm.evaluation.comparison.effects import Effect
from mlsm.evaluation.comparison.models import TITLES
from mlsm.evaluation.comparison.result import Comparison
from mlsm.evaluation.comparison.significance import SIGNIFICANT
from mlsm.evaluation.plots import drawn, label, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")  # Okabe and Ito
MARKERS = ("o", "X", "s", "D", "^", "v", "P", "*")
STEMS = tuple(f"report-{what}-by-{axis}" for what in ("held-out-loss", "scores") for axis in AXES)
EFFECT_STEM = "report-differences"
CONTRASTS_STEM = "report-composite-differences"
CONTRASTS_HEADER = ("contrast", "role", "seeds", "difference", "low", "high")
_WIDTH = 0.8  # width of the page's figures, in text columns
_ENDS = {"floor": (0, (1, 2)), "ceiling": (0, (5, 3))}  # dashes
_OF_THE_PAPER = (
    "Figures 3 to 10 of the MLSM paper, by their numbers there, as far as these records allow. Below each is how its "
    "models differ."
)
_GREY = "#808080"  # readable on white and on black


def style(place: int) -> dict:
    """Colour and marker of the n-th series."""
    return {"color": COLORS[place % len(COLORS)], "marker": MARKERS[place % len(MARKERS)], "markersize": 5}


def p_text(p: float) -> str:
    """A p value in a cell, starred where significant."""
    text = "<.001" if p < 0.001 else f"{p:.3f}".lstrip("0") if p < 0.9995 else "1"
    return f"{text}*" if p < SIGNIFICANT else text


Line = tuple[str, Seed, int, float, float]  # arm, seed, step, x, y


class PageFigure(NamedTuple):
    """A figure of the page. `files`: SVG, CSV."""

    title: str
    caption: str
    files: list[Path]


def draw_page_figures(result: Comparison, directory: Path) -> dict[str, list[PageFigure]]:
    """Draw the contrasts of composites, the difference of the first hypothesis, and losses and scores against every
    cost. Returns none without matplotlib. The paper's figures are drawn elsewhere (paper.py).
    """
    first = result.tests[0].effect if result.tests else None
    paper = [
        PageFigure(f"Figure {figure.figure}, {figure.shows}", _OF_THE_PAPER, list(map(Path, figure.files)))
        for figure in result.figures
        if figure.files
    ]
    return {
        "composite": drawn(_draw_composite, result.composite, directory) if result.composite else [],
        "effect": drawn(draw_effect, first, directory) if first and not first.lacks else [],
        "losses": drawn(draw_losses, result, directory),
        "scores": drawn(draw_scores, result, directory),
        "paper": paper,
    }


def draw_losses(result: Comparison, directory: Path) -> list[PageFigure]:
    """Held-out loss of the runs, relative to that of a constant prediction, against every cost in the logs."""
    lines = {
        axis: [
            (course.arm, course.seed, point.steps, x, point.share)
            for course in result.courses
            for point in course.points
            if point.share is not None and (x := getattr(point, axis)) is not None
        ]
        for axis in AXES
    }
    words = "held-out loss / that of a constant prediction"
    caption = (
        "Each objective has its own loss, so every loss is divided by that of a constant prediction (1: nothing was "
        "learned). Only lines of the same objective, target, positions, mask rate and temperature can be compared. "
        "Thin: single pre-training runs."
    )
    return _draw_curves("held-out-loss", "Held-out loss", words, caption, lines, result.arms.arms, [], directory)


def draw_scores(result: Comparison, directory: Path) -> list[PageFigure]:
    """Mean scores of checkpoints against every cost; floors and ceiling are horizontal lines."""
    lines = {
        axis: [
            (score.arm, score.seed, score.spent.steps, x, score.value)
            for score in result.reached
            if (x := getattr(score.spent, axis)) is not None
        ]
        for axis in AXES
    }
    ends = [*result.arms.floors, *([result.arms.ceiling] if result.arms.ceiling else [])]
    levels = [(end.name, level) for end in ends if (level := end.average(result.tasks)) is not None]
    caption = f"Mean of {', '.join(TITLES[task] for task in result.tasks)}. Thin: single pre-training runs."
    words = "mean fine-tuning score"
    return _draw_curves("scores", "Fine-tuning", words, caption, lines, result.arms.arms, levels, directory)


def _draw_curves(
    what: str,
    title: str,
    words: str,
    caption: str,
    lines_by_axis: Mapping[str, Sequence[Line]],
    arms: Sequence[Arm],
    levels: Sequence[tuple[str, float]],
    directory: Path,
) -> list[PageFigure]:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    figures = []
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
        figures.append(PageFigure(f"{title} by {axis}", caption, files))
    return figures


def _draw_lines(axes: "Axes", lines: Sequence[Line], names: Sequence[str]) -> Iterable[Sequence]:
    """Draw every arm's mean where all its runs have a point, and the runs as thin lines. Returns the CSV's rows."""
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
        axes.axhline(level, color=_GREY, linewidth=1.2, linestyle=_ENDS[name.partition(",")[0]], label=label(name))
    return [(name, "mean", "", "", level) for name, level in levels]


def draw_effect(effect: Effect, directory: Path) -> list[PageFigure]:
    """The difference of two arms by task and over all, with 95 % intervals and every pair."""
    from matplotlib.ticker import MaxNLocator

    rows: list[Sequence] = []
    figure, axes = new_figure(width=_WIDTH)
    figure.set_figheight(1.3 + 0.32 * (len(effect.tasks) + 1))
    entries = [("mean of tasks", effect.mean, [fmean(row) for row in effect.differences_ST])]
    entries += [
        (TITLES[task], effect.of_task(task), [row[place] for row in effect.differences_ST])
        for place, task in enumerate(effect.tasks)
    ]
    for place, (name, computed, singles) in enumerate(entries):
        found = claimable(computed)
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
    axes.set_xlabel(f"{label(effect.better)} minus {label(effect.than)}, percentage points")
    header = ("task", "pre-training seed", "difference", "low", "high")
    files = save_figure(figure, directory / EFFECT_STEM, header, rows, png=False)
    caption = (
        f"{effect.better} minus {effect.than}, paired by pre-training seed: mean with its 95 % interval (t), and "
        "single pairs in grey below. Intervals of single tasks are exploratory."
    )
    return [PageFigure("Differences by task", caption, files)]


def _draw_composite(composite: Mapping[str, Any], directory: Path) -> list[PageFigure]:
    shown = [one for one in composite["contrasts"] if "paired" in one]
    if not shown:
        return []
    figure, rows = draw_contrasts(shown, composite["margin"])
    files = save_figure(figure, directory / CONTRASTS_STEM, CONTRASTS_HEADER, rows, png=False)
    return [PageFigure("Differences of composites", explain_contrasts(composite["margin"]), files)]


def draw_contrasts(contrasts: Sequence[Mapping[str, Any]], margin: float | None) -> "tuple[Figure, list[list]]":
    """The forest plot of contrasts of composites, in their order, with paired intervals and the margin of equivalence.

    contrasts  of `compose` with an interval; `label` may replace the names of the pair
    Returns    figure, and its rows by CONTRASTS_HEADER
    """
    figure, axes = new_figure()
    if margin is not None:
        axes.axvspan(-margin, margin, color=_GREY, alpha=0.15, linewidth=0)
    axes.axvline(0, color=_GREY, linewidth=1)
    rows, names = [], []
    for place, one in enumerate(contrasts):
        low, high = one["paired"]["low"], one["paired"]["high"]
        is_planned = one["role"] != "not planned"
        color = COLORS[0] if is_planned else _GREY
        axes.plot([low, high], [place, place], color=color, linewidth=2)
        axes.plot(one["difference"], place, "o", color=color, fillstyle="full" if is_planned else "none")
        name = one.get("label") or " − ".join(one["pair"])
        names.append(label(f"{name} ({len(one['seeds'])} seeds)"))
        rows.append([name, one["role"], len(one["seeds"]), one["difference"], low, high])
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)  # the first on top
    figure.set_figheight(1.3 + 0.3 * len(names))
    axes.set_xlabel("points of the composite")
    return figure, rows


def explain_contrasts(margin: float | None) -> str:
    """The caption of the forest plot."""
    band = "" if margin is None else f" Grey band: the margin of equivalence, ±{margin:g} points."
    return f"95 % intervals, paired by seed.{band} Filled: planned. Hollow: exploratory."
