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
    """Show what the machine has, with a mark where the user should do something."""
    if settings.gpu:
        return gpu_table(report)
    width = max(len(check["name"]) for check in report["checks"])
    lines = [""]
    for check in report["checks"]:
        lines.append(f"{'  ' if check['ok'] else '! '}{check['name']:<{width}}  {check['found']}")
        lines.append(f"  {'':<{width}}    {check['means']}")
    troubles = [check["name"] for check in report["checks"] if not check["ok"]]
    verdict = f"Worth a look: {', '.join(troubles)}." if troubles else "No problems found."
    return "\n".join([*lines, f"\n{verdict} Try next (takes minutes):  {program()} encode-lsp"])


def gpu_table(report: dict) -> str:
    """The trials on a GPU in Markdown: versions, what is used and why, and a row for each trial."""
    lines = [f"- {name}: {value}" for name, value in report["gpu"].items()]
    rows = ["", "| tried | result | deviation | time | first call | GPU memory |", "|---|---|---|---|---|---|"]
    for part, uses in (("solver", "sparse coding uses"), ("training", "training uses"), ("faiss", "faiss:")):
        if part not in report:
            continue
        lines.append(f"- {uses} {report[part]['line']}")
        for name, trial in report[part]["trials"].items():
            is_right = name == "cpu" or name in report[part]["right"]
            result = trial.get("error") or ("right" if trial and is_right else "not right, see above")
            cells = [f"{part}: {name}", result.replace("|", "/")]
            cells.append(f"{trial['differs']:.1e}" if "differs" in trial else "")
            cells.append(f"{1e3 * trial['seconds']:,.1f} ms" if "seconds" in trial else "")
            cells.append(f"{trial['first_seconds']:,.1f} s" if "first_seconds" in trial else "")
            cells.append(f"{trial['memory_bytes'] / 1e9:,.2f} GB" if "memory_bytes" in trial else "")
            rows.append(f"| {' | '.join(cells)} |")
    note = (
        "Deviations: for a solver, the mean total variation between its distributions and the CPU's; for training, "
        "the\nlargest relative deviation of a loss from that in float32. Times are for one call on 4,096 rows, or "
        "one step."
    )
    return "\n".join(["", *lines, *rows, "", note, "Something wrong? Paste this into an issue."])
