"""All LSPs of a store as a directory of static pages that opens from disk: no server, nothing loaded from elsewhere.

    write(view, Path("lsps"))       # then open lsps/index.html

    index.html, style.css, view.js   the list, sorted and searched in the browser
    data/lsps.js, data/words.js      a line for every LSP; the most frequent words with their LSPs, loaded when searched
    lsp/<number>.html                one page an LSP, complete without JavaScript: any number of them stays light
    view.json                        marks the directory as such a view, and holds the SHA-256 of each of its files

A later view replaces what an earlier one wrote and nobody has changed since; all other files in the directory belong to
its user and stay. Text of corpora may hold anything: pages escape all of it (Jinja2's autoescape), data files are ASCII
JSON, the script sets textContent only. Left out: what is shown (view.py).
"""

import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from mlsm.common.disk import file_sha256, read_file
from mlsm.common.durable import publish_directory, refuse_what_is_in_the_way
from mlsm.common.errors import InspectionError
from mlsm.common.text import printable
from mlsm.evaluation.inspection.lsps import words
from mlsm.evaluation.inspection.lsps.labels import shorten
from mlsm.evaluation.inspection.lsps.view import StoreView

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).parent / "templates"
MARK = {"made_by": "mlsm show-lsp", "format": 2}
MOST_WORDS = 20_000
LEAST_COUNT = 3  # occurrences of a word that is listed
WORD_LSPS = 8
FIXED = {"index.html", "style.css", "view.js", "view.json", "data/lsps.js", "data/words.js"}
# Only files of these names can be ours, whatever view.json says.
_PAGE = re.compile("|".join([*map(re.escape, sorted(FIXED)), r"lsp/\d+\.html", r"pictures/\d+\.jpg"]))
_FOLDERS = {"data", "lsp", "pictures"}


def check_replaceable(directory: Path, names: Collection[str] = ()) -> None:
    """Raise InspectionError if a view at the path would replace anything that show-lsp has not written; `names` are
    those of its pages and pictures.

    That is a directory that is neither empty nor a view of ours, or a file of the user's, or changed by them, that has
    the name of a page.
    """
    if not os.path.lexists(directory) or (directory.is_dir() and not any(directory.iterdir())):
        return
    if not directory.is_dir() or _read_hashes(directory) is None:
        raise InspectionError(f"--html {directory} exists and is no view of show-lsp. Give another directory.")
    if taken := _foreign(directory) & {*FIXED, *_FOLDERS, *names}:
        raise InspectionError(
            f"--html {directory}: {printable(min(taken), keep='')} is not as show-lsp wrote it, so it is kept. Nothing"
            f" was changed. Move it elsewhere, or give another directory."
        )


def is_view(directory: Path) -> bool:
    """Whether a directory holds pages that show-lsp wrote."""
    return _read_hashes(directory) is not None


def _read_hashes(directory):
    """Name to SHA-256 of the files that view.json lists, None for each hash in an older view; None without a view."""
    try:
        mark = json.loads(read_file(directory / "view.json"))
        if mark["made_by"] != MARK["made_by"]:
            return None
        if "files" not in mark:  # of a version that wrote no hashes
            return dict.fromkeys(path.relative_to(directory).as_posix() for path in directory.rglob("*"))
        return {name: digest for name, digest in mark["files"].items() if isinstance(digest, str)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _foreign(directory):
    """Names of what show-lsp did not write, or what was changed since: files, links, and directories not its own."""
    written = _read_hashes(directory) or {}
    found = set()
    for path in directory.rglob("*"):
        name, mode = path.relative_to(directory).as_posix(), path.lstat().st_mode
        if stat.S_ISDIR(mode):
            ours = name in _FOLDERS
        else:
            is_page = stat.S_ISREG(mode) and _PAGE.fullmatch(name) is not None
            digest = written.get(name, "")
            ours = is_page and (name == "view.json" or digest is None or (digest != "" and digest == file_sha256(path)))
        if not ours:
            found.add(name)
    return found


def write(view: StoreView, directory: Path, edits: dict | None = None) -> dict:
    """Write the pages of a StoreView; they appear together. Returns what was written.

    edits  what editing.edit_sample found with a probe, and the probe's name: {"probe", "factor", "lsps"}
    """
    facts = view.facts() | {"probe": edits and edits["probe"]}

    def fill(new):
        shutil.copyfile(TEMPLATES / "view.js", new / "view.js")
        _write_lists(view, new / "data")
        _write_pages(view, new, facts, edits)

    return {"html": str(directory), **facts, **publish(directory, lsp_pages(facts["k"]), fill)}


def lsp_pages(k: int) -> list[str]:
    """Names of the pages of k LSPs."""
    return [f"lsp/{lsp}.html" for lsp in range(k)]


@refuse_what_is_in_the_way()
def publish(directory: Path, names: Collection[str], fill: Callable[[Path], object]) -> dict[str, int]:
    """Let a view appear as a whole: what `fill(new)` writes into a new directory, the style, and view.json.

    names    of its pages and pictures, below the directory
    Returns  {"files", "bytes"}
    Raises   InspectionError as of `check_replaceable`
    """
    check_replaceable(directory, names)
    written = {}

    def fill_and_mark(new):
        shutil.copyfile(TEMPLATES / "style.css", new / "style.css")
        fill(new)
        files = [path for path in sorted(new.rglob("*")) if path.is_file()]
        digests = {path.relative_to(new).as_posix(): file_sha256(path) for path in files}
        (new / "view.json").write_text(json.dumps(MARK | {"files": digests}, indent=1), encoding="utf-8")
        written["files"] = len(files) + 1
        written["bytes"] = sum(path.stat().st_size for path in [*files, new / "view.json"])

    place = directory.resolve()  # a link stays one, and `.` has a name
    publish_directory(place, fill_and_mark, carry=lambda old, new: _carry(old, new, names))
    return written


def _carry(old, new, names):
    """Link the files of others from the older view into the new one; they are in both until the older one goes."""
    check_replaceable(old, names)  # they may have come while the pages were written
    for name in sorted(_foreign(old)):
        if (old / name).is_dir() and not (old / name).is_symlink():
            (new / name).mkdir(parents=True)  # perhaps in a folder of views that this one does not have
            continue
        (new / name).parent.mkdir(exist_ok=True)
        try:
            os.link(old / name, new / name, follow_symlinks=False)
        except OSError:  # a file system without links
            shutil.copy2(old / name, new / name, follow_symlinks=False)


def _write_lists(view, directory):
    directory.mkdir()
    lines = [view.row(lsp) for lsp in range(view.sample.k)]
    rows = [
        [
            round(line["density"], 6),
            round(line["mean_weight"], 6),
            line["words"],
            round(line["information"], 6),
            int(line["positional"]),
            _listed_words(view, lsp),
        ]
        for lsp, line in enumerate(lines)
    ]
    labels = [shorten(label) for label in view.labels] if view.labels else None
    _write_script(directory / "lsps.js", "LSPS", {"rows": rows, "labels": labels})
    _write_script(directory / "words.js", "WORDS", _frequent_words(view))


def _listed_words(view, lsp):
    """What the page of an LSP lists, for the search: all its typical words, the lemmas of its senses."""
    label = view.label(lsp)
    senses = [lemma for sense in label["synsets"] for lemma in sense["lemmas"]] if label else []
    return list(dict.fromkeys([*(text for text, _ in view.typical(lsp)), *senses]))


def _frequent_words(view):
    """[word, occurrences, [[LSP, mean weight], ...]] of the most frequent words."""
    counts = view.words.counts_U
    numbers = range(min(MOST_WORDS, int((counts >= LEAST_COUNT).sum())))
    lsps_CT, weights_CT = words.profiles(view.sample, view.words, numbers, WORD_LSPS)
    return [
        [
            view.words.texts[number],
            int(counts[number]),
            [[int(lsp), round(float(weight), 3)] for lsp, weight in zip(*row, strict=True) if weight >= 0.0005],
        ]
        for number, *row in zip(numbers, lsps_CT, weights_CT, strict=True)
    ]


def _write_script(path, name, value):
    path.write_text(f"window.{name} = {json.dumps(value, separators=(',', ':'))};\n", encoding="ascii")


def templates() -> "Environment":
    """The templates of all pages, which escape what they are given."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _write_pages(view, directory, facts, edits):
    pages = templates()
    teacher = "/".join(Path(str(facts["teacher_name"])).parts[-2:])  # not the path to it: pages are passed on
    names = {"name": printable(Path(facts["store"]).name), "teacher": printable(teacher)}
    index = pages.get_template("index.html").render(**names, facts=facts)
    (directory / "index.html").write_text(index, encoding="utf-8", errors="backslashreplace")
    template = pages.get_template("lsp.html")
    (directory / "lsp").mkdir()
    shared = {
        "k": facts["k"],
        "coded": facts["coded"],
        "counted": view.counted_together,
        "npmi": lambda other: f"{other['npmi']:.2f} · {other['support']:,}",
        "cosine": lambda other: f"{other['cosine']:.2f}",
        "probe": edits and edits["probe"],
        "factor": edits and edits["factor"],
    }
    for lsp in range(facts["k"]):
        figures = view.lsp(lsp) | {"edits": edits["lsps"][lsp] if edits else []}
        heaviest = max([context["weight"] for context in figures["top"]], default=1.0)
        page = template.render(**shared, **figures, heaviest=heaviest)
        (directory / "lsp" / f"{lsp}.html").write_text(page, encoding="utf-8", errors="backslashreplace")
        view.progress("pages", lsp + 1, facts["k"], unit="LSPs")
