"""The LSPs of vectors as a directory of static pages: of images with the patches on which each is heaviest, of other
vectors with the numbers of their rows.

    write(view, Path("lsps"))       # then open lsps/index.html

    index.html, style.css, view.json, lsp/<number>.html    as of pages.py
    pictures/<number>.jpg                                  of the images that a page shows

Left out: what is shown (vectors.py).
"""

from pathlib import Path

from mlsm.common.disk import read_below
from mlsm.common.errors import InspectionError, PlaceError, describe
from mlsm.common.invocation import program
from mlsm.common.text import printable
from mlsm.evaluation.inspection.lsps.pages import lsp_pages, publish, templates
from mlsm.evaluation.inspection.lsps.vectors import VectorView
from pipeline.images import PICTURES

PATCHES = 8  # of an LSP in the list


def write(view: VectorView, directory: Path) -> dict:
    """Write the pages of a VectorView; they appear together. Returns what was written."""
    facts, k = view.facts(), view.sample.k
    pictures = [f"{PICTURES}/{number}.jpg" for number in range(facts["images"] or 0)]

    def fill(new):
        found, shown = templates(), set()
        rows = [view.row(lsp, PATCHES) for lsp in range(k) if view.entries.counts[lsp]]
        name = printable(view.file.name)
        index = found.get_template("vectors.html").render(name=name, facts=facts, rows=rows, grid=view.grid)
        (new / "index.html").write_text(index, encoding="utf-8")
        shared = {
            "k": k,
            "coded": facts["coded"],
            "counted": view.counted_together,
            "grid": view.grid,
            "of_images": bool(view.names),
            "npmi": lambda other: f"{other['npmi']:.2f} · {other['support']:,}",
            "cosine": lambda other: f"{other['cosine']:.2f}",
        }
        (new / "lsp").mkdir()
        for lsp in range(k):
            figures = view.lsp(lsp)
            tenths = [vector for tenth in figures["quantiles"] for vector in tenth["samples"]]
            heaviest = max((vector["weight"] for vector in figures["top"]), default=1.0)
            page = found.get_template("vector_lsp.html").render(**shared, **figures, heaviest=heaviest)
            (new / "lsp" / f"{lsp}.html").write_text(page, encoding="utf-8")
            shown |= {vector.get("image") for vector in [*figures["top"], *figures["heaviest_images"], *tenths]}
            view.progress("pages", lsp + 1, k, unit="LSPs")
        if pictures:
            (new / PICTURES).mkdir()
            for image in sorted(shown):
                picture = f"{PICTURES}/{image}.jpg"
                (new / picture).write_bytes(_read_picture(view.file.parent, picture))

    return {"html": str(directory), **facts, **publish(directory, lsp_pages(k) + pictures, fill)}


def _read_picture(directory, name):
    """The bytes of a picture beside the vectors; what a link leads to might not be for others."""
    try:
        return read_below(directory, directory / name)
    except (OSError, PlaceError) as error:
        raise InspectionError(
            f"{directory / name} cannot be shown ({describe(error)}). Encode again:  {program()} encode-images"
        ) from None
