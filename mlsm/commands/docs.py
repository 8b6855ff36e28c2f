"""Print the documentation as installed: all pages by name, or one in full."""

import shutil
import sys
from io import StringIO

from mlsm.common.invocation import program
from mlsm.common.progress import Progress, silent
from mlsm.evaluation.inspection.pages import DocsConfig as Settings
from mlsm.evaluation.inspection.pages import text_of
from mlsm.results import Report
from mlsm.terminal.tables import table

WIDEST = 120  # columns

DOWNLOADS = False


def run(settings: Settings, progress: Progress = silent) -> Report:
    """Find a page of the documentation: docs(page="corpora")["file"]; all of them: docs()["pages"]."""
    from mlsm.evaluation.inspection.pages import list_or_read

    return Report.of(list_or_read(settings))


def show(report: dict, settings: Settings) -> str:
    """Show a page, or all by name and title."""
    if "pages" in report:
        rows = [(entry["page"], entry["title"]) for entry in report["pages"]]
        return (
            f"{table(rows)}\n\nTo read one:  {program()} docs PAGE. To see where the files are:  {program()} docs "
            "--json"
        )
    text = text_of(report["page"])
    if report["file"].endswith(".ipynb"):
        text += f"\nThis is a notebook. Open it in Jupyter, or copy it:  {report['file']}\n"
    if not sys.stdout.isatty():
        return text.rstrip("\n")
    from rich.console import Console
    from rich.markdown import Markdown

    stream = StringIO()
    width = min(shutil.get_terminal_size().columns, WIDEST)
    Console(file=stream, width=width, color_system=None).print(Markdown(text, hyperlinks=False))  # addresses as text
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())
