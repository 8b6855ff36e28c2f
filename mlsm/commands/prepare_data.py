"""Prepare published evaluation data for the evaluations: blimp | wsd | glue | wic | conll."""

from pathlib import Path

from mlsm.common.invocation import program
from mlsm.common.progress import Progress, silent
from mlsm.common.text import shell_quote
from mlsm.evaluation.preparation.config import PrepareDataConfig as Settings
from mlsm.results import Report

DOWNLOADS = False


def run(settings: Settings, progress: Progress = silent) -> Report:
    """Put evaluation data as published into the layout that evaluations read: dataset="wic", from_="downloads"."""
    from mlsm.evaluation.preparation.prepare import prepare_data

    return Report.of(prepare_data(settings, progress))


def show(report: dict, settings: Settings) -> str:
    """Show what was prepared, its counts next to the published ones, what is missing, and which commands read it."""
    lines = [""]
    for part in report["parts"]:
        counts = ", ".join(f"{count:,} {name}" for name, count in part["counts"].items())
        expected = ", ".join(f"{count:,} {name}" for name, count in part["expected"].items())
        found = part["counts"].items()  # a test set may be lacking
        verdict = "as published" if found <= part["expected"].items() else f"{expected} are published"
        there = "; was there already" if part["finished_before"] else ""
        lines.append(f"  {part['directory']}: {counts}; {verdict}{there}")
    if report["missing"]:
        lines.append("\nMissing:")
        for part in report["missing"]:
            lacks = ", ".join(part["lacks"][:3]) + (" and more" if len(part["lacks"]) > 3 else "")
            lines.append(f"  {part['directory']} lacks {lacks}; published at {part['published']}")
        if report["dataset"] == "glue":
            lines.append(
                "  finetune downloads these from the Hub (needs the package datasets); or omit them with --tasks."
            )
    output = Path(report["output"])
    command = {
        "blimp": f"evaluate-blimp MODEL --data-dir {shell_quote(str(output / 'blimp'))}",
        "wsd": f"choose-layer --data-dir {shell_quote(str(output / 'wsd'))}",
    }.get(report["dataset"], f"finetune MODEL --data-dir {shell_quote(str(output))}")
    return "\n".join([*lines, f"\nNext:  {program()} {command}"])
