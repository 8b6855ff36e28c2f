"""Remove what killed processes left behind."""

from mlsm.common.progress import Progress, silent
from mlsm.results import Report
from mlsm.terminal.tables import long_list
from shards.config import CleanConfig as Settings


def run(settings: Settings, progress: Progress = silent) -> Report:
    """Remove what killed processes left behind."""
    from shards.clean import clean

    return Report.of(clean(settings.path, settings.dry_run, settings.all))


def show(report: dict, settings: Settings) -> str:
    """List what clean removed, or would remove."""
    done = "Would remove" if report["dry_run"] else "Removed"
    removed = [f"{entry['path']}  {entry['kind']}, {entry['bytes']:,} bytes" for entry in report["removed"]]
    lines = long_list(done, removed)
    lines += long_list("Kept", [f"{entry['path']}  {entry['kind']}: {entry['reason']}" for entry in report["kept"]])
    freed = f"{report['bytes']:,} bytes {'would be ' if report['dry_run'] else ''}freed under {report['path']}."
    return "\n".join([*lines, "", freed if report["removed"] else f"Nothing to remove under {report['path']}."])
