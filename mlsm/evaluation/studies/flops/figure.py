"""Cost of a pre-training run against R, how often each encoded token is trained on.

A run of the offline student pays 1/R of the encoding. Online paradigms run their teacher at every step, so their lines
are flat. Not handled here: the counting (pretraining.py).
"""

from pathlib import Path

from mlsm.common.durable import refuse_what_is_in_the_way
from mlsm.evaluation.plots import new_figure, save_figure

POINTS = 60
FURTHEST = 100  # R, at the right end
NAMES = {"mlm": "MLM", "kd": "KD", "naive-mlsm": "naive MLSM"}


@refuse_what_is_in_the_way()
def draw_costs(result: dict, directory: Path) -> list[Path]:
    """Write cost_per_run.svg, .png and .csv into a directory; returns their paths.

    result  result of count_flops; lines are in per cent of MLM, with all operations counted
    """
    figure, axes = new_figure()
    reuse = [FURTHEST ** (i / (POINTS - 1)) for i in range(POINTS)]
    layer, mlm = result["setting"]["layer"], result["in_full"]["mlm"]["total"]
    one = next(iter(result["offline"].values()))
    student = sum(flops for part, flops in one.items() if part.startswith("student"))
    offline = [100 * (student + sum(result["encoding"].values()) / r) / mlm for r in reuse]
    online = {name: rows["percent_of_mlm"] for name, rows in result["in_full"].items()}
    for name, percent in online.items():
        axes.axhline(percent, linestyle="--", linewidth=1, color="grey")
        axes.text(FURTHEST, percent, NAMES.get(name, f"MLSM{name[5:]}"), ha="right", va="bottom", fontsize=8)
    ours = result["with_our_solver"]["percent_of_mlm"]
    axes.axhline(ours, linestyle=":", linewidth=1, color="tab:blue")
    axes.text(FURTHEST, ours, f"MLSM{layer} online, our solver", ha="right", va="bottom", fontsize=8)
    axes.plot(reuse, offline, linewidth=2, label=f"MLSM{layer} offline: encoded once, trained on R times")
    axes.set_xscale("log")
    axes.set_xticks(ticks := [1, 10, 100], map(str, ticks))
    axes.set_ylim(min(offline) - 5, max(online.values()) + 6)
    axes.set_xlabel("R: times each encoded token is trained on (epochs x runs)")
    axes.set_ylabel("operations of a run, % of MLM")
    axes.set_title("dashed: teacher and solver at every step", fontsize=9)
    axes.legend(loc="upper left", fontsize=8)
    header = ["R", "offline", "online_our_solver", *online]
    rows = [
        [f"{r:.4g}", *(f"{value:.3f}" for value in (percent, ours, *online.values()))]
        for r, percent in zip(reuse, offline, strict=True)
    ]
    return save_figure(figure, directory / "cost_per_run", header, rows)
