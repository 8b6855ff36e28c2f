"""All LSPs of a store as a directory of static pages that opens from disk: no server, nothing loaded from elsewhere.

    write(view, Path("lsps"))       # then open lsps/index.html

    index.html, style.css, view.js   the list, sorted and searched in the browser
    data/lsps.js, data/words.js      a line for every LSP; the most frequent words with their LSPs, loaded when searched
    lsp/<number>.html                one page an LSP, complete without JavaScript: any number of them stays light
    view.json                        says that this directory is such a view, which a later one may replace

Text of corpora may hold anything: pages escape all of it (Jinja2's autoescape), data files are ASCII JSON, the script
sets textContent only. Left out: what is shown (view.py).
"""

import json
import shutil
from pathlib import Path

from evaluation.lsps import words
from evaluation.lsps.labels import short
from evaluation.lsps.sample import InspectionError
from shards.manifest import publish_directory

TEMPLATES = Path(__file__).parent / "templates"
MARK = {"made_by": "mlsm show-lsp", "format": 1}
MOST_WORDS = 20_000
LEAST_COUNT = 3         # occurrences of a word that is listed
WORD_LSPS = 8


def check_replaceable(directory):
    """Raise InspectionError if there is something at the path that is neither empty nor a view of ours."""
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    try:
        ours = json.loads((directory / "view.json").read_text())["made_by"] == MARK["made_by"]
    except (OSError, ValueError, KeyError, TypeError):
        ours = False
    if not ours:
        raise InspectionError(f"--html {directory} exists and is no view of show-lsp. Give another directory.")


def write(view, directory):
    """Write the pages of a StoreView; they appear together. Returns what was written."""
    check_replaceable(directory)
    facts = view.facts()

    def fill(new):
        for name in ("style.css", "view.js"):
            shutil.copyfile(TEMPLATES / name, new / name)
        _write_lists(view, new / "data")
        _write_pages(view, new, facts)
        (new / "view.json").write_text(json.dumps(MARK, indent=1))

    place = directory.resolve()     # a link stays one, and `.` has a name
    publish_directory(place, fill)
    files = [path for path in place.rglob("*") if path.is_file()]
    return {"html": str(directory), **facts, "files": len(files), "bytes": sum(path.stat().st_size for path in files)}


def _write_lists(view, directory):
    directory.mkdir()
    lines = [view.row(lsp) for lsp in range(view.sample.k)]
    rows = [[round(line["density"], 6), round(line["mean_weight"], 4), line["words"]] for line in lines]
    labels = [short(label) for label in view.labels] if view.labels else None
    _write_script(directory / "lsps.js", "LSPS", {"rows": rows, "labels": labels})
    _write_script(directory / "words.js", "WORDS", _frequent_words(view))


def _frequent_words(view):
    """[word, occurrences, [[LSP, mean weight], ...]] of the most frequent words."""
    counts = view.words.counts_U
    numbers = range(min(MOST_WORDS, int((counts >= LEAST_COUNT).sum())))
    lsps_CT, weights_CT = words.profiles(view.sample, view.words, numbers, WORD_LSPS)
    return [
        [view.words.texts[number], int(counts[number]),
         [[int(lsp), round(float(weight), 3)] for lsp, weight in zip(*row, strict=True) if weight >= 0.0005]]
        for number, *row in zip(numbers, lsps_CT, weights_CT, strict=True)
    ]  # fmt: skip


def _write_script(path, name, value):
    path.write_text(f"window.{name} = {json.dumps(value, separators=(',', ':'))};\n", encoding="ascii")


def _public(teacher):
    """A teacher's name without the path that leads there: pages are passed on."""
    return "/".join(Path(str(teacher)).parts[-2:])


def _write_pages(view, directory, facts):
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    pages = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined,
                        trim_blocks=True, lstrip_blocks=True)  # fmt: skip
    names = {"name": Path(facts["store"]).name, "teacher": _public(facts["teacher_name"])}
    index = pages.get_template("index.html").render(**names, facts=facts)
    (directory / "index.html").write_text(index, encoding="utf-8")
    template = pages.get_template("lsp.html")
    (directory / "lsp").mkdir()
    shared = {"k": facts["k"], "coded": facts["coded"], "counted": view.counted_together,
              "npmi": lambda other: f"{other['npmi']:.2f} · {other['support']:,}",
              "cosine": lambda other: f"{other['cosine']:.2f}"}  # fmt: skip
    for lsp in range(facts["k"]):
        figures = view.lsp(lsp)
        heaviest = max([context["weight"] for context in figures["top"]], default=1.0)
        page = template.render(**shared, **figures, heaviest=heaviest)
        (directory / "lsp" / f"{lsp}.html").write_text(page, encoding="utf-8")
        view.progress("pages", lsp + 1, facts["k"], unit="LSPs")
