"""What the figures of a comparison are made of: curves with their seeds, matrices with their numbers, one look.

    panel_of_matrix(axes, cells["p"], labels, P_VALUES)

Left out: which models a figure shows (sweeps.py, trajectories.py), files (mlsm/evaluation/plots.py).
"""

import math
from collections.abc import Callable, Collection, Iterable, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlsm.evaluation.comparison.identity import differences
from mlsm.evaluation.comparison.models import SEEDS, SUITE, Model, SuiteFigure, out_of
from mlsm.evaluation.comparison.significance import SIGNIFICANT, Matrix
from mlsm.evaluation.plots import new_figure, write_caption

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")  # Okabe and Ito
MARKERS = ("o", "X", "s", "D", "^", "v", "P", "*")
_COLUMNS = 3  # of the figures with a panel a task
_APART = 0.08  # of an axis: the least distance of two labels
PAPER = {"color": "0.45", "linestyle": "--", "linewidth": 1, "marker": "d", "markersize": 4}
HEADER = ("panel", "series", "x", "against", "value", "n", "source")
TITLES = {
    "cola": "CoLA",
    "conll2003": "CoNLL-2003",
    "mnli": "MNLI",
    "mrpc": "MRPC",
    "qnli": "QNLI",
    "qqp": "QQP",
    "rte": "RTE",
    "sst2": "SST-2",
    "stsb": "STS-B",
    "wic": "WiC",
}


class Lacking(ValueError):
    """The records do not allow a figure; the message says what it needs."""


@dataclass(frozen=True)
class Study:
    """What figures are drawn from.

    paper       whether the paper's numbers stand beside one's own
    diagnostic  result.json of choose-layer, for figure 4
    """

    models: list[Model]
    paper: bool
    diagnostic: Path | None


@dataclass
class Drawing:
    """A figure and, for its CSV, every number in it.

    note     whose numbers these are
    caption  whether these models differ in what the figure is about alone; it stands below the figure
    """

    figure: "Figure"
    note: str
    rows: list = field(default_factory=list)
    caption: str = ""

    def explain(self, models: list[Model], studied: Collection[str], more: str = "") -> None:
        """Write the caption.

        studied  names of the settings that the figure is about
        more     a sentence to add
        """
        self.caption = " ".join(filter(None, (differences(models).sentence(studied), more)))
        write_caption(self.figure, self.caption)

    def add(
        self,
        panel: str,
        series: str,
        x: object,
        value: object,
        n: object = "",
        against: object = "",
        source: str = "measured",
    ) -> None:
        """One number."""
        self.rows.append([panel, series, x, against, value, n, source])


def style(place: int) -> dict:
    """Colour and marker of the n-th series."""
    return {"color": COLORS[place % len(COLORS)], "marker": MARKERS[place % len(MARKERS)], "markersize": 5}


def task_panels(count: int, height: float) -> "tuple[Figure, list[Axes], list[Axes]]":
    """A figure for `count` panels in rows of three, each `height` inches high, without empty ones.

    Returns  (figure, the axes of these panels, those of them that have no other below)
    """
    rows = -(-count // _COLUMNS)
    figure, axes = new_figure(width=2, rows=rows, columns=_COLUMNS)
    figure.set_figheight(max(height * rows, 4))
    panels = list(axes.flat)
    for empty in panels[count:]:
        empty.remove()
    return figure, panels[:count], panels[max(0, count - _COLUMNS) : count]


def tick_steps(axes: "Axes") -> None:
    """Few ticks for optimiser steps, 250k for 250,000, so that they do not overlap in a small panel."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))


def tick_values(axes: "Axes", values: Iterable[float]) -> None:
    """A tick at each value, labelled unless it is so close to the label on its left that they would overlap."""
    from matplotlib.ticker import NullLocator

    values = sorted(values)
    place = math.log2 if axes.get_xscale() == "log" else float
    least, last, labels = _APART * (place(values[-1]) - place(values[0])), -math.inf, []
    for value in values:
        is_apart = place(value) - last >= least
        labels.append(f"{value:g}" if is_apart else "")
        last = place(value) if is_apart else last
    axes.set_xticks(values, labels)
    axes.xaxis.set_minor_locator(NullLocator())


def figure_title(figure: SuiteFigure) -> str:
    """(task, metric) for people."""
    task, metric = figure
    return f"{TITLES[task]} ({metric.replace('_', ' ')})"


def how_many(models: list[Model], figures: Sized) -> str:
    """How complete averages over some figures are, for an axis: n is the scores of the suite that a model has."""
    shown = "" if len(figures) == len(SUITE) else f"over {len(figures)} of {len(SUITE)} figures, "
    return shown + out_of([len(model.scores) for model in models], SEEDS * len(SUITE))


def p_text(p: float) -> str:
    """A p value in a cell, starred where significant."""
    text = "<.001" if p < 0.001 else f"{p:.3f}".lstrip("0") if p < 0.9995 else "1"
    return f"{text}*" if p < SIGNIFICANT else text


def panel_of_matrix(
    axes: "Axes", cells: Matrix, labels: list[str], text: Callable[[Any], str], largest: float, title: str
) -> None:
    """Numbers of row against column on a ground that is dark where the row is better.

    cells    (M, M) rows, None where there is none
    text     function from a number to what its cell says
    largest  number at which the ground is white (p values) or, negative, black (counts)
    """
    shades = [[_shade(value, largest) for value in row] for row in cells]
    axes.imshow(shades, cmap="Blues", vmin=0, vmax=1.15)
    size = 9 if len(cells) <= 5 else 7 if len(cells) <= 8 else 5
    for i, row in enumerate(cells):
        for j, value in enumerate(row):
            said = "–" if value is None else text(value)
            axes.text(j, i, said, ha="center", va="center", fontsize=size, color="w" if shades[i][j] > 0.6 else "k")
    axes.set_xticks(range(len(labels)), labels)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_xticks([place + 0.5 for place in range(len(labels) - 1)], minor=True)
    axes.set_yticks([place + 0.5 for place in range(len(labels) - 1)], minor=True)
    axes.grid(visible=False)
    axes.grid(visible=True, which="minor", color="w", alpha=1)
    axes.tick_params(length=0, which="both")
    axes.spines[:].set_visible(False)
    axes.set_title(title, fontsize=10)


def _shade(value, largest):
    if value is None:
        return 0.0
    return max(0.0, 1 - value / largest) if largest > 0 else value / -largest
