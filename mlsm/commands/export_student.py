"""Export a checkpoint of a run as files that transformers loads; push it to the Hub."""

from mlsm.commands._newest import runs
from mlsm.common.progress import Progress, silent
from mlsm.results import Exported
from mlsm.terminal.tables import table
from mlsm.terminal.training import how_to_load
from student.runs.config import ExportConfig as Settings

WORKS_ON = "run"
newest = runs


def run(settings: Settings, progress: Progress = silent) -> Exported:
    """Export a checkpoint of a run as files that transformers loads; with push_to_hub also to the Hub."""
    from student.runs.export_run import export_run

    return Exported.of(export_run(settings, progress))


def show(report: dict, settings: Settings) -> str:
    """Show what export-student wrote and pushed, or would."""
    verb = "would be" if report["dry_run"] else "is"
    rows = [("run", report["run"]), ("checkpoint", f"step {report['step']:,}"), ("export", report["export"])]
    lines = [f"\nThe checkpoint {verb} exported.", table(rows)]
    if not report["dry_run"]:
        lines.append(how_to_load(report["export"]))
    if "revisions" in report:
        lines.append(f"\nTo {report['address'] or report['repository']} {verb} pushed:")
        lines.append(
            table(
                [
                    (
                        row["branch"],
                        f"{len(row['files'])} files, {sum(row['files'].values()):,} bytes of {row['directory']}",
                    )
                    for row in report["revisions"]
                ]
            )
        )
    return "\n".join(lines)
