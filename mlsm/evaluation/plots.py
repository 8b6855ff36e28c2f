"""Save figures in one style as SVG and PNG, with their data as CSV; equal data give identical bytes.

    figure, axes = new_figure(width=1.0)
    axes.plot(layers, f1)
    files = save_figure(figure, directory / "layers", header, rows)

Drawn without a display or global state: pyplot is not imported. The figures themselves are drawn elsewhere.
"""

import csv
import io
import logging
import textwrap
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlsm.common.durable import appearing_whole, make_directories
from mlsm.common.extras import name_extras
from mlsm.common.text import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)
SIZE = (6.4, 4.0)  # inches, for a figure of one text column
DOTS_PER_INCH = 150
CHARACTERS_PER_INCH = 15  # of a caption
STYLE = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text is not converted to paths: searchable, small
    "svg.hashsalt": "mlsm",  # otherwise ids are random
}


def new_figure(width: float = 1.0, rows: int = 1, columns: int = 1) -> "tuple[Figure, Any]":
    """A figure `width` text columns wide and its axes, one or an array of (rows, columns).

    Raises  ImportError, which says what to install
    """
    with name_extras("a figure"):
        import matplotlib.figure
    with matplotlib.rc_context(STYLE):
        figure = matplotlib.figure.Figure(figsize=(SIZE[0] * width, SIZE[1] * rows), layout="constrained")
        return figure, figure.subplots(rows, columns)


def drawn(draw: Callable[..., list], *arguments: object) -> list:
    """Call `draw(*arguments)` and return the files of the figures that it wrote.

    Without matplotlib the list is empty and a message is logged, so a command never fails because of a figure.
    """
    try:
        with name_extras("a figure"):  # now, before `draw` imports parts of it
            import matplotlib.figure  # noqa: F401
    except ImportError as error:
        logger.info("no figure: %s", error)
        return []
    return draw(*arguments)


def label(name: str) -> str:
    """Escape a name, so that matplotlib shows it literally: not as mathematics, and not hidden in a legend."""
    text = printable(name, keep="").replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def write_caption(figure: "Figure", text: str) -> None:
    """Write a caption below a figure and reserve space for it."""
    wrapped = "\n".join(textwrap.wrap(label(text), int(figure.get_size_inches()[0] * CHARACTERS_PER_INCH)))
    figure.supxlabel(wrapped, x=0.01, ha="left", fontsize=8, color="0.3")


def save_figure(
    figure: "Figure", stem: Path | str, header: Sequence[str], rows: Iterable[Sequence], png: bool = True
) -> list[Path]:
    """Write <stem>.svg, .png and .csv, each whole or not at all. Returns their paths.

    header, rows  what was drawn, for the CSV
    png           whether to also write the PNG
    """
    import matplotlib

    stem = Path(stem)
    make_directories(stem.parent)
    metadata = {"svg": {"Date": None}} | ({"png": {"Software": None}} if png else {})
    paths = [stem.with_name(f"{stem.name}.{suffix}") for suffix in (*metadata, "csv")]
    with matplotlib.rc_context(STYLE):
        for path, (suffix, facts) in zip(paths, metadata.items(), strict=False):
            with appearing_whole(path) as file:
                figure.savefig(file, format=suffix, dpi=DOTS_PER_INCH, metadata=facts)
    save_table(paths[-1], header, rows)
    return paths


def save_table(path: Path, header: Sequence[str], rows: Iterable[Sequence]) -> Path:
    """Write a CSV file, whole or not at all. Returns its path."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([[as_text(cell) for cell in row] for row in [header, *rows]])
    with appearing_whole(path) as file:
        file.write(text.getvalue().encode())
    return path


def as_text(cell: object) -> object:
    """A cell of a CSV file. Text that a spreadsheet would take for a formula gets an apostrophe in front."""
    if not isinstance(cell, str):
        return cell
    cell = cell.replace("\r\n", "\n").replace("\r", "\n")  # csv does not quote a carriage return, which ends a row
    if not cell.startswith(("=", "+", "-", "@", "\t", "\n")):
        return cell
    with suppress(ValueError):
        float(cell)
        return cell
    return f"'{cell}"
