"""The page of a comparison, report.html: question, conclusion, curves, tables, costs and sources.

    page = write_page(result, tables_of(result, directory), draw_page_figures(result, directory), directory)

The page opens from disk and needs no network, no script and no other file: figures and styles are embedded. It contains
no date and no machine name, so equal records produce identical bytes. Names may contain anything: Jinja2 escapes all of
them. Not handled here: sentences (conclusion.py), tables (tables.py) and figures (figures.py).
"""

import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

from mlsm.common.durable import replace_bytes
from mlsm.common.text import printable
from mlsm.evaluation.comparison.conclusion import Conclusion, conclude_contrasts, exploratory_contrasts
from mlsm.evaluation.comparison.figures import PageFigure
from mlsm.evaluation.comparison.result import Comparison
from mlsm.evaluation.comparison.tables import Table

TEMPLATES = Path(__file__).parent / "templates"
PAGE = "report.html"
_SVG = "http://www.w3.org/2000/svg"
_LINK = "{http://www.w3.org/1999/xlink}href"


def write_page(
    result: Comparison, tables: Mapping[str, Table], figures: Mapping[str, Sequence[PageFigure]], directory: Path
) -> Path:
    """Write the page. Returns its path.

    tables, figures  written to the same directory, by name
    """
    content = _render(
        study=result.study,
        withheld=result.withheld,
        on_composite=_conclusions_on_composite(result),
        tests=result.tests,
        several_arms=len(result.arms.arms) > 1,
        tables=tables,
        figures=figures,
        unknown=result.arms_differ.unknown,
        notes=_notes(result),
        lsp_pages=_lsp_pages(directory),
        sources=_sources(result),
        others=[*result.tables, *(file for figure in result.figures for file in figure.files)],
        link=lambda path: _link(path, directory),
    )
    replace_bytes(directory / PAGE, content.encode("utf-8", errors="backslashreplace"))
    return directory / PAGE


def _conclusions_on_composite(result: Comparison) -> list[Conclusion]:
    """The conclusions on a study's composite, the primary one first; empty if it has no composite."""
    if result.composite is None:
        return []
    found = [said for _, said in conclude_contrasts(result.composite)]
    if found:
        return found
    anchors = result.composite["anchors"]
    ends = {"an untrained student": anchors["untrained_seeds"], "the teacher": anchors["teacher"]}
    missing = " and ".join(name for name, scored in ends.items() if not scored)
    return [Conclusion("withheld", f"There is no composite yet: {missing} must be scored first.")]


def _notes(result: Comparison) -> list[tuple[str, list[str]]]:
    """Notes for the reader about the records: (title, sentences), without empty ones."""
    arms, study = result.arms, result.study
    failed = [
        f"{model.label}: {task}, seed {seed}: {why}"
        for model in result.models
        for (task, seed), why in model.failed.items()
    ]
    constant = [
        f"{model.label}: {task}: {record['collapsed']}"
        for model in result.models
        for (task, _), record in model.frozen.items()
        if record["collapsed"]
    ]
    left_out = [
        f"{found.model} and {found.against}: {len(found.trainings)} fine-tuning runs are not paired: {found.why}"
        for found in result.left_out
    ]
    exploratory = ["No hypothesis was written down in advance, so everything here is exploratory."]
    if study is not None:
        tested = "Hypotheses" if study.composite is None else "Hypotheses on the composite"
        exploratory = [*study.exploratory, f'Every p value and interval outside the table "{tested}".']
    missing = [
        f"There are no records of {what}, so it is not shown."
        for what, end in (
            ("a lower bound (an untrained encoder)", arms.floors),
            ("an upper bound (the teacher)", arms.ceiling),
        )
        if not end and not result.withheld
    ]
    has_frozen = bool(result.frozen) and result.composite is None
    elsewhere = "Scores of frozen encoders are not on this page but in frozen.csv."
    notes = {
        "Tasks of the mean": list(result.notes_on_tasks),
        "Exploratory": exploratory,
        "Not scored yet": _missing_scores(result),
        "Not run": [*(study.not_run if study else ()), *missing],
        "Failed fine-tuning runs, which are included": failed,
        "Frozen scores that say little": constant,
        "Not paired": left_out,
        "Notes": [*[elsewhere] * has_frozen, *result.notes],
    }
    return [(title, sentences) for title, sentences in notes.items() if sentences]


def _missing_scores(result: Comparison) -> list[str]:
    """Sentences on arms without a composite, and on exploratory contrasts that wait for seeds."""
    if result.composite is None:
        return []
    arms = [name for name, arm in result.composite["arms"].items() if arm is not None and not arm["seeds"]]
    waiting = [
        f"{' − '.join(one['pair'])} ({one['withheld']})"
        for one in exploratory_contrasts(result.composite)
        if "withheld" in one
    ]
    lists = (("Arms without a scored student", arms), ("Exploratory contrasts that wait for seeds", waiting))
    return [f"{title}: {'; '.join(names)}." for title, names in lists if names]


def _lsp_pages(directory: Path) -> list[Path]:
    """Views of show-lsp next to the report's directory."""
    places = [path.parent for path in sorted(directory.absolute().parent.glob("*/view.json"))]
    if not places:
        return []
    from mlsm.evaluation.inspection.lsps.pages import is_view  # here, because it imports the code that reads stores

    return [place / "index.html" for place in places if is_view(place)]


def _sources(result: Comparison) -> list[tuple[str, list]]:
    """(name, files) of every arm: its records and the logs of its runs."""
    sources = []
    for arm in result.arms.with_ends():
        records = [
            record["file"]
            for model in arm.models
            for record in (*model.trainings.values(), *model.frozen.values(), *model.blimps.values())
        ]
        logs = [course.log for course in result.courses if course.arm == arm.name]
        sources.append((arm.name, [*sorted(records), *logs]))
    return sources


def _link(path: Path | str, directory: Path) -> dict[str, str]:
    """Address and link text of a file, both relative to the report's directory."""
    relative = os.path.relpath(path, directory)
    return {"href": quote(os.fsencode(relative)), "text": printable(relative, keep="")}


def _render(**content: Any) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    pages = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    sheets = (files("mlsm.evaluation.inspection.lsps") / "static" / "style.css", TEMPLATES / "report.css")
    return pages.get_template("report.html").render(
        **content,
        style=Markup("\n".join(sheet.read_text(encoding="utf-8") for sheet in sheets)),
        inline=lambda figure: Markup(inline_svg(figure.files[0], figure.title)),  # ElementTree has escaped it
        shown=lambda text: printable(text, keep=""),
    )


def inline_svg(path: Path, title: str) -> str:
    """An SVG file as an element of a page: with a label, without metadata, and with ids unique to this figure."""
    for prefix, name in (("", _SVG), ("xlink", "http://www.w3.org/1999/xlink")):
        ElementTree.register_namespace(prefix, name)
    root = ElementTree.fromstring(path.read_bytes())
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                parent.remove(child)
        for name, value in parent.attrib.items():
            parent.attrib[name] = _scope(name, value, path.stem)
    root.attrib |= {"role": "img", "aria-label": title}
    return ElementTree.tostring(root, encoding="unicode")


def _scope(name, value, stem):
    if name == "id":
        return f"{stem}-{value}"
    if name == _LINK:
        return value.replace("#", f"#{stem}-", 1)
    return value.replace("url(#", f"url(#{stem}-")
