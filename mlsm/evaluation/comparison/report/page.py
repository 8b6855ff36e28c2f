"""The report of a comparison: report.html, which opens from disk, its figures as SVG and tables as CSV and LaTeX.

    page, said = write_report(result, models, Path("runs/comparison"))      # after compare
    page, said = write_report(result, models, directory, StudyFacts(...))   # of a study

The page needs no network, no script and no other file: figures and style are part of it. It says nothing of the time
or the machine, so equal records give equal bytes. Names may hold anything: Jinja2 escapes all of them. Left out: what
is said (conclusion.py), shown (tables.py) and drawn (drawings.py).
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

from mlsm.common import disk
from mlsm.common.durable import make_directories, replace_bytes
from mlsm.common.text import printable
from mlsm.evaluation.comparison.identity import differences
from mlsm.evaluation.comparison.models import Model
from mlsm.evaluation.comparison.report import costs, drawings, tables
from mlsm.evaluation.comparison.report.arms import Found, find_arms
from mlsm.evaluation.comparison.report.conclusion import Conclusion, conclude
from mlsm.evaluation.comparison.report.curves import read_courses, read_scores, tasks_of
from mlsm.evaluation.comparison.report.effects import Effect, adjust, examine, find_effect, learned_tasks
from mlsm.evaluation.comparison.report.facts import StudyFacts
from mlsm.evaluation.plots import drawn
from mlsm.evaluation.records import METRICS

TEMPLATES = Path(__file__).parent / "templates"
PAGE = "report.html"
_TABLES = ("hypotheses", "scores", "wins", "checkpoints", "settings", "costs", "parts")
_OURS = {f"report-{name}{suffix}" for name in _TABLES for suffix in (".csv", ".tex")} | {
    f"{stem}{suffix}" for stem in (*drawings.STEMS, drawings.EFFECT_STEM) for suffix in (".csv", ".svg")
}
_SVG = "http://www.w3.org/2000/svg"
_LINK = "{http://www.w3.org/1999/xlink}href"
_OF_THE_PAPER = (
    "Figures 3 to 10 of the MLSM paper as far as these records allow them, by their numbers there. Below each stands in"
    " what its models differ."
)
Test = tuple[str, Effect, Conclusion, float | None]  # role, effect, conclusion, p by Holm's method


def write_report(
    result: dict, models: Sequence[Model], directory: Path, study: StudyFacts | None = None
) -> tuple[Path, list[str]]:
    """Write the report of a comparison and all that belongs to it; files of an earlier one do not stay.

    result  what `compare` returns
    models  that it compared (models.models_of), with their records
    study   what was planned; without it nothing was, and all is called exploratory
    Returns the page's path, and its conclusion: the sentence on the first hypothesis and those beside it, none where
            no two arms are compared
    """
    found = find_arms(models, study)
    study, on_tasks = _choose_tasks(found, study)
    tests = examine_hypotheses(found, study)
    tasks = _tasks_of_the_mean(found, study, tests)
    courses = read_courses(found.arms)
    settings, unknown = tables.table_of_settings(found.arms)
    shown = {
        "hypotheses": tables.table_of_hypotheses(tests),
        "scores": tables.table_of_scores(found, tasks),
        "wins": tables.table_of_wins(found.arms, tasks),
        "checkpoints": _checkpoints(found, tests, tasks),
        "settings": settings,
        "costs": costs.table_of_costs(found, courses, study.accounts if study else {}, directory),
        "parts": costs.table_of_parts(study.parts if study else ()),
    }
    shown = {name: table for name, table in shown.items() if table is not None and table.rows}
    make_directories(directory)
    for name in _OURS:
        with suppress(FileNotFoundError):
            disk.unlink(directory / name)
    tables.write_tables(list(shown.values()), directory)
    scores = read_scores(found.arms, courses, tasks)
    ends = [end for end in (found.floor, found.ceiling) if end is not None]
    first = [effect for _, effect, *_ in tests[:1] if not effect.lacks]
    figures = {
        "effect": [figure for effect in first for figure in drawn(drawings.draw_effect, effect, directory)],
        "losses": drawn(drawings.draw_losses, courses, found.arms, directory),
        "scores": drawn(drawings.draw_scores, scores, found.arms, ends, tasks, directory),
        "paper": [
            drawings.Drawn(
                f"Figure {figure['figure']}, {figure['shows']}", _OF_THE_PAPER, list(map(Path, figure["files"]))
            )
            for figure in result["figures"]
            if figure["files"]
        ],
    }
    content = _render(
        study=study,
        tests=tests,
        tables=shown,
        figures=figures,
        unknown=unknown,
        notes=_notes(result, found, study, on_tasks),
        lsp_pages=_lsp_pages(directory, study),
        sources=_sources(found, courses),
        others=[*result["tables"], *(file for figure in result["figures"] for file in figure["files"])],
        link=lambda path: _link(path, directory),
    )
    replace_bytes(directory / PAGE, content.encode("utf-8", errors="backslashreplace"))
    return directory / PAGE, [said for *_, first, _ in tests[:1] for said in (first.sentence, *first.beside)]


def _choose_tasks(found: Found, study: StudyFacts | None) -> tuple[StudyFacts | None, list[str]]:
    """The study with the tasks that its `learned_by` has learned, and sentences that say which they are."""
    if study is None or study.learned_by is None:
        return study, []
    rule = "above the untrained student by more than two standard errors"
    arm, unknown = found.contestant(study.learned_by), f"Whether {study.learned_by} is {rule} is not known yet"
    if arm is None or found.floor is None:
        return study, [f"{unknown}, so all tasks count so far."]
    effect = find_effect(arm, found.floor.at(), study.tasks, study.seeds)
    if lacks := effect.lacks or ("it has one pre-training seed" if len(effect.seeds) == 1 else ""):
        return study, [f"{unknown} ({lacks}), so all tasks count so far."]
    learned = learned_tasks(effect)
    others = [task for task in effect.tasks if task not in learned]
    if not learned:
        return study, [f"{study.learned_by} is in no task {rule}, so all count, and what they say is worth little."]
    said = [f"Counted are the tasks in which {study.learned_by} is {rule}: {', '.join(learned)}."]
    if others:
        said.append(f"Shown, but in no mean: {', '.join(others)}.")
    return replace(study, tasks=learned), said


def examine_hypotheses(found: Found, study: StudyFacts | None) -> list[Test]:
    """The tests of all hypotheses, the primary one first; without a study of one pair, or of none."""
    if study is None:
        pair = _obvious_pair(found.arms)
        if pair is None:
            return []
        effect = examine(found, pair)
        return [("not planned", effect, conclude(effect, beyond=_beyond(found, effect)), None)]
    planned = len(study.seeds)
    first = examine(found, study.primary, study.tasks, study.seeds)
    tests: list[Test] = [("primary", first, conclude(first, planned, beyond=_beyond(found, first)), None)]
    seeds = [study.seeds_of.get(hypothesis, study.seeds) for hypothesis in study.secondary]
    others = [examine(found, pair, study.tasks, of_pair) for pair, of_pair in zip(study.secondary, seeds, strict=True)]
    for effect, of_pair, p in zip(others, seeds, adjust(others), strict=True):
        said = conclude(effect, len(of_pair), p, len(others), _beyond(found, effect))
        tests.append(("secondary", effect, said, p))
    return tests


def _obvious_pair(arms):
    """mlsm against mlm where there is one arm of each, else the two arms that there are."""
    by_objective = {name: [arm for arm in arms if arm.models[0].facts["objective"] == name] for name in ("mlsm", "mlm")}
    if all(len(group) == 1 for group in by_objective.values()):
        return tuple(group[0].name for group in by_objective.values())
    return (arms[0].name, arms[1].name) if len(arms) == 2 else None


def _beyond(found, effect):
    """In what the models of an effect's first pair differ."""
    if effect.lacks:
        return None
    pair = [found.contestant(name).models for name in (effect.better, effect.than)]
    return differences([models.get(effect.seeds[0]) or next(iter(models.values())) for models in pair])


def _tasks_of_the_mean(found, study, tests):
    """The study's tasks; else those of the first hypothesis; else those that all finished models of all arms have."""
    tested = [effect.tasks for _, effect, *_ in tests[:1] if not effect.lacks]
    if study and study.tasks or tested:
        return tuple(study.tasks) if study and study.tasks else tested[0]
    having = [tasks_of(model) for arm in found.arms for model in arm.at().models.values()]
    return tuple(task for task in METRICS if having and all(task in tasks for tasks in having))


def _checkpoints(found, tests, tasks):
    """Of the arms of the first hypothesis, where there are records of both."""
    for _, effect, *_ in tests[:1]:
        better, than = found.arm(effect.better), found.arm(effect.than)
        if better is not None and than is not None:
            return tables.table_of_checkpoints(better, than, tasks)
    return None


def _notes(result, found, study, on_tasks):
    """What a reader must know of the records: (title, sentences), none empty."""
    failed = [
        f"{model['model']}: {run['task']}, seed {run['seed']}: {run['why']}"
        for model in result["models"]
        for run in model["failed"]
    ]
    left_out = [
        f"{pair['model']} and {pair['against']}: {len(pair['trainings'])} fine-tunings are no pairs: {pair['why']}"
        for pair in result["left_out"]
    ]
    exploratory = list(study.exploratory) if study else ["No hypothesis was written down before: all is exploratory."]
    missing = [
        f"There are no records of {what}, so it is not shown."
        for what, end in (("a floor (an untrained encoder)", found.floor), ("a ceiling (the teacher)", found.ceiling))
        if end is None
    ]
    notes = {
        "Tasks of the mean": on_tasks,
        "Exploratory": [*exploratory, "Every p value and interval outside the table of hypotheses."],
        "Not run": [*(study.not_run if study else ()), *missing],
        "Fine-tunings that failed, and count": failed,
        "Left out": left_out,
        "Notes": [*result["notes"], *found.notes],
    }
    return [(title, sentences) for title, sentences in notes.items() if sentences]


def _lsp_pages(directory: Path, study: StudyFacts | None) -> list[Path]:
    """Views of show-lsp: the study's, and those beside the report's directory."""
    beside = sorted(directory.absolute().parent.glob("*/view.json"))
    places = [*(study.lsp_pages if study else ()), *(path.parent for path in beside)]
    if not places:
        return []
    from mlsm.evaluation.inspection.lsps.pages import is_view  # which imports what reads stores

    return list({place.absolute(): place / "index.html" for place in places if is_view(place)}.values())


def _sources(found, courses):
    """(name, files) of every arm: its records and the logs of its runs."""
    sources = []
    for arm in (found.floor, *found.arms, found.ceiling):
        if arm is not None:
            records = [record for model in arm.models for record in (*model.trainings.values(), *model.blimps.values())]
            logs = [course.log for course in courses if course.arm == arm.name]
            sources.append((arm.name, [*sorted(record["file"] for record in records if "file" in record), *logs]))
    return sources


def _link(path: Path | str, directory: Path) -> dict[str, str]:
    """Address and words of a file, both relative to the report's directory."""
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
    sheets = (files("mlsm.evaluation.inspection.lsps") / "templates" / "style.css", TEMPLATES / "report.css")
    return pages.get_template("report.html").render(
        **content,
        style=Markup("\n".join(sheet.read_text(encoding="utf-8") for sheet in sheets)),
        inline=lambda figure: Markup(inline_svg(figure.files[0], figure.title)),  # which ElementTree has escaped
        shown=lambda text: printable(text, keep=""),
    )


def inline_svg(path: Path, title: str) -> str:
    """An SVG file of ours as an element of a page: with a label, no metadata, and ids that no other figure has."""
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
