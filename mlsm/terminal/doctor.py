"""What doctor says: a line of what was found, a line of what it means, for each part of the machine."""

from mlsm.common.invocation import program
from mlsm.evaluation.inspection.machine import DoctorConfig


def examination(report: dict, settings: DoctorConfig) -> str:
    """Show what the machine has, with a mark where something asks for action."""
    width = max(len(check["name"]) for check in report["checks"])
    lines = [""]
    for check in report["checks"]:
        lines.append(f"{'  ' if check['ok'] else '! '}{check['name']:<{width}}  {check['found']}")
        lines.append(f"  {'':<{width}}    {check['means']}")
    troubles = [check["name"] for check in report["checks"] if not check["ok"]]
    verdict = f"Worth a look: {', '.join(troubles)}." if troubles else "Nothing stands in the way."
    return "\n".join([*lines, f"\n{verdict} Next, in minutes:  {program()} encode-lsp"])
