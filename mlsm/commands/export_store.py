"""Export a store as Parquet files with a dataset card, for load_dataset, pandas and DuckDB."""

from mlsm.commands._newest import stores
from mlsm.common.progress import Progress, silent
from mlsm.results import Report
from mlsm.terminal.tables import quantity, size, table
from shards.config import ExportStoreConfig as Settings
from shards.config import store_of

DOWNLOADS = False
newest = stores


def run(settings: Settings, progress: Progress = silent) -> Report:
    """Write a store as Parquet files with a dataset card: datasets.load_dataset(exported["output"]) reads them."""
    from shards.export import export

    return Report.of(export(store_of(settings), settings.output, progress))


def show(report: dict, settings: Settings) -> str:
    """Show the files that export-store made, and the line of Python that reads them."""
    rows = [("directory", report["output"]), ("store", report["store"]), ("size", size(report["bytes"]))]
    for split, counts in report["splits"].items():
        lacking = f", {counts['quarantined']:,} with quarantined documents" if counts["quarantined"] else ""
        rows.append((split, f"{quantity(counts['windows'], 'window')} in {quantity(counts['files'], 'file')}{lacking}"))
    state = "was finished already" if report["finished_before"] else "is finished"
    lines = ["", f"The export {state}.", table(rows), "\nTo read it in Python:"]
    return "\n".join([*lines, f"  datasets.load_dataset({report['output']!r})"])
