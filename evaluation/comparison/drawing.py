"""What the figures of a comparison are made of: curves with their seeds, matrices with their numbers, one look.

    panel_of_matrix(axes, cells["p"], labels, P_VALUES)

Left out: which models a figure shows (sweeps.py, trajectories.py), files (evaluation/plots.py).
"""

from dataclasses import dataclass, field

from evaluation.comparison.significance import SIGNIFICANT
from evaluation.comparison.study import SEEDS, SUITE, out_of

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")    # Okabe and Ito
MARKERS = ("o", "X", "s", "D", "^", "v", "P", "*")
PAPER = {"color": "0.45", "linestyle": "--", "linewidth": 1, "marker": "d", "markersize": 4}
HEADER = ("panel", "series", "x", "against", "value", "n", "source")
TITLES = {
    "cola": "CoLA", "conll2003": "CoNLL-2003", "mnli": "MNLI", "mrpc": "MRPC", "qnli": "QNLI", "qqp": "QQP",
    "rte": "RTE", "sst2": "SST-2", "stsb": "STS-B", "wic": "WiC",
}


class Lacking(ValueError):
    """The records do not allow a figure; the message says what it needs."""


@dataclass
class Drawing:
    """A figure and, for its CSV, every number in it; `note` says whose numbers these are."""

    figure: object
    note: str
    rows: list = field(default_factory=list)

    def add(self, panel, series, x, value, n="", against="", source="measured"):
        """One number."""
        self.rows.append([panel, series, x, against, value, n, source])


def style(place):
    """Colour and marker of the n-th series."""
    return {"color": COLORS[place % len(COLORS)], "marker": MARKERS[place % len(MARKERS)], "markersize": 5}


def figure_title(figure):
    """(task, metric) for people."""
    task, metric = figure
    return f"{TITLES[task]} ({metric.replace('_', ' ')})"


def how_many(models, figures):
    """How complete averages over some figures are, for an axis: n is the scores of the suite that a model has."""
    shown = "" if len(figures) == len(SUITE) else f"over {len(figures)} of {len(SUITE)} figures, "
    return shown + out_of([len(model.scores) for model in models], SEEDS * len(SUITE))


def p_text(p):
    """A p value in a cell, starred where significant."""
    text = "<.001" if p < 0.001 else f"{p:.3f}".lstrip("0") if p < 0.9995 else "1"
    return f"{text}*" if p < SIGNIFICANT else text


def panel_of_matrix(axes, cells, labels, text, largest, title):
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
