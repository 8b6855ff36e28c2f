"""Encode the patches of images as vectors, for visual LSPs (learn-dictionary --hidden, show-lsp --vectors)."""

from mlsm.common.invocation import program
from mlsm.common.progress import Progress, silent
from mlsm.common.text import shell_quote
from mlsm.results import Report
from mlsm.terminal.tables import table
from pipeline.images import ImagesConfig as Settings


def run(settings: Settings, progress: Progress = silent) -> Report:
    """Write the vectors of the patches of images, for learn_dictionary and show_lsp."""
    from pipeline.images import encode_images

    return Report.of(encode_images(settings, progress))


def show(report: dict, settings: Settings) -> str:
    """Show the vectors of images, and the commands that learn visual LSPs from them and show these."""
    state = "were there already" if report["finished_before"] else "are written"
    rows, columns = report["grid"]
    facts = [
        ("vectors", report["vectors"]),
        ("images", f"{report['images']:,}, {rows} × {columns} patches each"),
        ("width", report["width"]),
    ]
    learn = f"{program()} learn-dictionary --hidden {shell_quote(report['vectors'])} --k 256"
    return f"\nThe vectors {state}.\n{table(facts)}\n\nNext:\n  {learn}"
