"""A figure of how LSPs change: their states from store to store, and how well the matched ones correlate."""

from pathlib import Path

import numpy as np

from mlsm.evaluation.inspection.tracking.matching import BEFORE
from mlsm.evaluation.plots import new_figure, save_figure

COLORS = {
    "kept": "#0072B2",
    "drifted": "#56B4E9",
    "split": "#009E73",
    "merged": "#E69F00",
    "vanished": "#D55E00",
    "rare": "#BBBBBB",
}
HEADER = ("panel", "step", "series", "x", "value")


def draw_tracking(summary: dict, records: list[dict], directory: Path) -> list[Path]:
    """Write tracking.svg, .png and .csv into a directory; returns their paths.

    summary, records  as track.py makes them
    """
    figure, (left, right) = new_figure(width=1.6, columns=2)
    steps = range(len(summary["steps"]))
    names = [f"{step} to {step + 1}" for step in steps]
    rows: list[tuple] = []
    below = np.zeros(len(names))
    for state in BEFORE:
        shares = np.array([step["counts"][state] / sum(step["counts"].values()) for step in summary["steps"]])
        left.bar(names, shares, 0.6, bottom=below, color=COLORS[state], label=state)
        below += shares
        rows += [("states", name, state, "", f"{share:.6g}") for name, share in zip(names, shares, strict=True)]
    left.set_ylim(0, 1)
    left.set_xlabel("stores")
    left.set_ylabel("share of the older store's LSPs")
    left.legend(loc="lower left", fontsize=8, frameon=True)
    for step, name in zip(steps, names, strict=True):
        own = [record for record in records if record["from"] == step and record["nearest"] is not None]
        largest = sorted((r["nearest_correlation"] for r in own if r["lsp"] is not None), reverse=True)
        places = (np.arange(len(largest)) + 1) / max(1, len(largest))
        right.plot(places, largest, linewidth=2, label=name)
        points = zip(places, largest, strict=True)
        rows += [("correlations", name, "nearest", f"{x:.6g}", f"{r:.6g}") for x, r in points]
    for threshold in ("kept_from", "matched_from"):
        right.axhline(summary["thresholds"][threshold], color="0.45", linestyle="--", linewidth=1)
    chance = max(step["chance"]["largest"] for step in summary["steps"])
    right.axhline(chance, color="0.45", linestyle=":", linewidth=1)
    rows.append(("correlations", "", "chance", "", f"{chance:.6g}"))
    right.set_xlim(0, 1)
    right.set_ylim(min(0, *right.get_ylim()), 1.02)
    right.set_xlabel("share of the older store's LSPs that fire")
    right.set_ylabel("correlation with the nearest LSP")
    right.set_title("dashed: thresholds; dotted: the largest by chance", fontsize=9)
    right.legend(loc="upper right", fontsize=8)
    return save_figure(figure, directory / "tracking", HEADER, rows)
