"""Track LSPs from one store to the next: kept, drifted, split, merged, vanished, new."""

from mlsm.common.progress import Progress, silent
from mlsm.evaluation.inspection.tracking.config import TrackConfig as Settings
from mlsm.results import Report
from mlsm.terminal.tables import columns, table


def run(settings: Settings, progress: Progress = silent) -> Report:
    """Match the LSPs of two or more stores of the same text: mlsm.track(stores=(before, after))."""
    from mlsm.evaluation.inspection.tracking.track import track

    return Report.of(track(settings, progress))


def show(result: dict, settings: Settings) -> str:
    """Show how many LSPs are kept, drift, split, merge, vanish and appear from each store to the next."""
    rows: list[tuple[str, object]] = [
        (f"store {number}", f"{store['store']}: {store['k']:,} LSPs, {store['rare']:,} too rare to judge")
        for number, store in enumerate(result["stores"])
    ]
    limits = result["thresholds"]
    rows += [
        ("tokens", f"{result['tokens']:,}, the same in every store"),
        ("kept", f"from a correlation of {limits['kept_from']:g}; matched from {limits['matched_from']:g}"),
    ]
    lines = ["", table(rows), ""]
    from mlsm.evaluation.inspection.tracking.matching import BEFORE

    header = ("stores", *BEFORE, "appeared", "median r", "by chance")
    cells = []
    for number, step in enumerate(result["steps"]):
        median, chance = step["median_correlation"], step["chance"]
        cells.append(
            (
                f"{number} to {number + 1}",
                *(f"{step['counts'][state]:,}" for state in BEFORE),
                f"{step['counts_after']['appeared']:,}",
                "–" if median is None else f"{median:.3f}",
                f"{chance['lsps']:,} (largest {chance['largest']:.3f})",
            )
        )
    lines += columns(header, cells, align=">")
    left = ", ".join(f"{count:,}" for count in result["surviving"])
    lines.append(f"\nLSPs of store 0 followed step by step to each store (merged ones share an LSP): {left}")
    return "\n".join([*lines, "\nWritten:", *(f"  {path}" for path in result["files"])])
