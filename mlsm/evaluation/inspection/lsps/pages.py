"""All LSPs as one page that opens from disk: no server, nothing loaded from elsewhere.

    publish_pages(Path("lsps"), {"kind": "text", ...})      # then open lsps/index.html

    index.html, style.css, view.js   the page, the same for every view: a list that is sorted and searched, and an
                                     address for each LSP, index.html#lsp-17
    data.js                          what it shows
    pictures/<number>.jpg            of images
    view.json                        marks the directory as such a view, and holds the SHA-256 of each of its files

A later view replaces files that an earlier one wrote and that have not changed since; all other files in the directory
belong to its user and stay. Text of corpora may hold anything: data.js is ASCII JSON, and view.js sets text only. Not
handled here: what is shown (text_pages.py, vector_pages.py).
"""

import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Collection, Iterable
from functools import lru_cache
from pathlib import Path

from mlsm.common.disk import file_sha256, read_file
from mlsm.common.durable import publish_directory, refuse_what_is_in_the_way
from mlsm.common.errors import InspectionError
from mlsm.common.text import printable
from pipeline.images import PICTURES

STATIC = Path(__file__).parent / "static"
MARK = {"made_by": "mlsm show-lsp", "format": 3}
PAGE = ("index.html", "style.css", "view.js")
FIXED = {*PAGE, "data.js", "view.json"}
# Only files of these names can be ours, whatever view.json says.
_OURS = re.compile("|".join([*map(re.escape, sorted(FIXED)), rf"{PICTURES}/\d+\.jpg"]))


def refuse_foreign_pages(directory: Path, pictures: Collection[str] = ()) -> None:
    """Raise InspectionError if a view at the path would replace anything that show-lsp has not written.

    That is a directory that is neither empty nor a view of show-lsp, or a file of the user's, or changed by them, with
    the name of a file of the view.
    pictures  their names, below the directory
    """
    if not os.path.lexists(directory) or (directory.is_dir() and not any(directory.iterdir())):
        return
    if not directory.is_dir() or (_read_mark(directory) or {}).get("format") != MARK["format"]:
        raise InspectionError(
            f"--html {directory} exists and was not written by this version of show-lsp. Choose another directory."
        )
    if taken := _foreign(directory) & {*FIXED, PICTURES, *pictures}:
        raise InspectionError(
            f"--html {directory}: {printable(min(taken), keep='')} was not written by show-lsp or has changed since, "
            "so it is kept. Nothing was changed. Move it elsewhere, or choose another directory."
        )


def is_view(directory: Path) -> bool:
    """Whether a directory holds pages that show-lsp wrote."""
    return _read_mark(directory) is not None


def _read_mark(directory):
    """The content of view.json; None without a view."""
    try:
        mark = json.loads(read_file(directory / "view.json"))
        return mark if mark["made_by"] == MARK["made_by"] and isinstance(mark["files"], dict) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _foreign(directory):
    """Names of entries that show-lsp did not write or that have changed since: files, links and other directories."""
    written = (_read_mark(directory) or {"files": {}})["files"]
    found = set()
    for path in directory.rglob("*"):
        name, mode = path.relative_to(directory).as_posix(), path.lstat().st_mode
        if stat.S_ISDIR(mode):
            ours = name == PICTURES
        else:
            ours = stat.S_ISREG(mode) and _OURS.fullmatch(name) is not None
            ours = ours and (name == "view.json" or written.get(name) == file_sha256(path))
        if not ours:
            found.add(name)
    return found


@refuse_what_is_in_the_way()
def publish_pages(
    directory: Path,
    make: Callable[[], dict],
    pictures: Collection[str] = (),
    copy: Callable[[Path], object] | None = None,
) -> dict[str, int]:
    """Let a view appear as a whole.

    make      returns what data.js holds
    pictures  names that the pictures of the view may have, below the directory
    copy      called as copy(new) when `make` has returned, writes pictures into the new directory
    Returns   {"files", "bytes"}
    Raises    InspectionError as of `refuse_foreign_pages`, before anything is made
    """
    refuse_foreign_pages(directory, pictures)
    written = {}

    def fill(new):
        for name in PAGE:
            shutil.copyfile(STATIC / name, new / name)
        data = json.dumps(make(), separators=(",", ":"), allow_nan=False)
        (new / "data.js").write_text(f"window.LSPS = {data};\n", encoding="ascii")
        if copy is not None:
            copy(new)
        files = [path for path in sorted(new.rglob("*")) if path.is_file()]
        digests = {path.relative_to(new).as_posix(): file_sha256(path) for path in files}
        (new / "view.json").write_text(json.dumps(MARK | {"files": digests}, indent=1), encoding="utf-8")
        written["files"] = len(files) + 1
        written["bytes"] = sum(path.stat().st_size for path in [*files, new / "view.json"])

    place = directory.resolve()  # a link stays one, and `.` has a name
    publish_directory(place, fill, carry=lambda old, new: _carry(old, new, pictures))
    return written


def _carry(old, new, pictures):
    """Link the files of others from the older view into the new one; they are in both until the older one goes."""
    refuse_foreign_pages(old, pictures)  # they may have come while the data were made
    for name in sorted(_foreign(old)):
        if (old / name).is_dir() and not (old / name).is_symlink():
            (new / name).mkdir(parents=True)
            continue
        (new / name).parent.mkdir(exist_ok=True)  # `pictures`, of which this view may have none
        try:
            os.link(old / name, new / name, follow_symlinks=False)
        except OSError:  # a file system without links
            shutil.copy2(old / name, new / name, follow_symlinks=False)


def pack(numbers: Iterable[int]) -> str:
    """Whole numbers from 0 on as ASCII text in which small ones are short: below 57 one character, below 1,938 two.

    The last digit of a number, in base 57, is a character from "#" to "[", those before it, in base 34, from "]" to
    "~". So none is a quotation mark or a backslash, which JSON would escape.
    """
    return "".join(map(_digits, numbers))


@lru_cache(1 << 16)
def _digits(number):
    assert number >= 0
    high, low = divmod(int(number), 57)
    digits = chr(35 + low)
    while high > 0:
        high, low = divmod(high, 34)
        digits = chr(93 + low) + digits
    return digits
