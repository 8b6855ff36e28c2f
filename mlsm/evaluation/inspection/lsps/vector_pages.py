"""The LSPs of vectors as a page that opens from disk (pages.py): of images with the patches on which each is heaviest,
of other vectors with the numbers of their rows.

    write(view, Path("lsps"))       # then open lsps/index.html

What data.js holds of them, where packed is a string of numbers (pages.pack) and a vector two of them, its row in the
file and the LSP's weight in thousandths:

    name, facts    of the vectors; counted: vectors in which pairs of LSPs were counted
    images         names of those that are shown, by number
    lsps           lists with an entry for each LSP
      tokens, weight        vectors that have it, its mean weight on them
      co_firing, nearest    as of a store (text_pages.py)
      listed, top           packed: the vectors of the list and of the page, where it is heaviest
      tenths                packed: least and largest weight in thousandths, how many vectors, the vectors
      heaviest              packed: images with most of it, each with its mean weight in thousandths
      patches               packed: of the images of top and heaviest the number, how many patches have it, of each its
                            place in the grid and the weight in thousandths

Not handled here: what is shown (vectors.py), the directory (pages.py), how it is shown (static/view.js).
"""

from itertools import chain
from pathlib import Path

from mlsm.common.disk import read_below
from mlsm.common.errors import InspectionError, PlaceError, describe
from mlsm.common.invocation import program
from mlsm.common.text import printable
from mlsm.evaluation.inspection.lsps.pages import pack, publish_pages
from mlsm.evaluation.inspection.lsps.text_pages import related
from mlsm.evaluation.inspection.lsps.vectors import VectorView
from pipeline.images import PICTURES

LISTED = 8  # vectors of an LSP in the list


def write(view: VectorView, directory: Path) -> dict:
    """Write the page of a VectorView; it appears as a whole. Returns what was written."""
    facts, shown = view.facts(), dict[int, str]()

    def copy(new):
        if shown:
            (new / PICTURES).mkdir()
        for image in sorted(shown):
            picture = f"{PICTURES}/{image}.jpg"
            (new / picture).write_bytes(_read_picture(view.file.parent, picture))

    pictures = [f"{PICTURES}/{number}.jpg" for number in range(facts["images"] or 0)]
    written = publish_pages(directory, lambda: _make_data(view, facts, shown), pictures, copy)
    return {"html": str(directory), **facts, **written}


def _make_data(view, facts, shown):
    """The content of data.js; `shown` gets the names of images on the page, by number."""
    lsps: dict[str, list] = {}
    for lsp in range(facts["k"]):
        figures = view.lsp(lsp)
        listed = view.row(lsp, LISTED)["top"]
        tenths = [vector for tenth in figures["quantiles"] for vector in tenth["samples"]]
        of_images = [*figures["top"], *figures["heaviest_images"]] if view.names else []
        shown.update({found["image"]: found["name"] for found in [*of_images, *listed, *tenths] if "image" in found})
        columns = {
            "tokens": figures["count"],
            "weight": round(figures["mean_weight"], 4),
            **related(figures),
            "listed": pack(_vectors(listed)),
            "top": pack(_vectors(figures["top"])),
            "tenths": pack(_tenths(figures["quantiles"])),
            "heaviest": pack(
                chain.from_iterable(
                    (found["image"], round(1000 * found["weight"])) for found in figures["heaviest_images"]
                )
            ),
            "patches": pack(_patches({found["image"]: found["patches"] for found in of_images}, view.grid[1])),
        }
        for name, value in columns.items():
            lsps.setdefault(name, []).append(value)
        view.progress("pages", lsp + 1, facts["k"], unit="LSPs")
    said = ("k", "lam", "sampled", "coded", "of", "images", "grid", "dead")
    return {
        "kind": "vectors",
        "name": printable(view.file.name),
        "facts": {name: facts[name] for name in said},
        "counted": view.counted_together,
        "images": shown,
        "lsps": lsps,
    }


def _vectors(vectors):
    for vector in vectors:
        yield from (vector["row"], round(1000 * vector["weight"]))


def _tenths(tenths):
    for tenth in tenths:
        yield from (round(1000 * tenth["from"]), round(1000 * tenth["to"]), len(tenth["samples"]))
        yield from _vectors(tenth["samples"])


def _patches(images, columns):
    for image, patches in images.items():
        yield from (image, len(patches))
        for row, column, weight in patches:
            yield from (row * columns + column, round(1000 * weight))


def _read_picture(directory, name):
    """The bytes of a picture next to the vectors; links are not followed, since their target may be private."""
    try:
        return read_below(directory, directory / name)
    except (OSError, PlaceError) as error:
        raise InspectionError(
            f"{directory / name} cannot be shown ({describe(error)}). Encode again:  {program()} encode-images"
        ) from None
