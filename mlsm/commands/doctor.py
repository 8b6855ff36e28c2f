"""Say what this machine has (cores, GPU, libraries, disk), and what that means for speed."""

from mlsm.common.invocation import program
from mlsm.common.progress import Progress, silent
from mlsm.evaluation.inspection.machine import DoctorConfig as Settings
from mlsm.results import Report

DOWNLOADS = False


def run(settings: Settings, progress: Progress = silent) -> Report:
    """What this machine has, and what that means for speed: doctor()["checks"]."""
    from mlsm.evaluation.inspection.machine import examine

    return Report.of(examine(settings, progress))


def show(report: dict, settings: Settings) -> str:
    """Show what the machine has, with a mark where something asks for action."""
    width = max(len(check["name"]) for check in report["checks"])
    lines = [""]
    for check in report["checks"]:
        lines.append(f"{'  ' if check['ok'] else '! '}{check['name']:<{width}}  {check['found']}")
        lines.append(f"  {'':<{width}}    {check['means']}")
    troubles = [check["name"] for check in report["checks"] if not check["ok"]]
    verdict = f"Worth a look: {', '.join(troubles)}." if troubles else "Nothing stands in the way."
    return "\n".join([*lines, f"\n{verdict} Next, in minutes:  {program()} encode-lsp"])
