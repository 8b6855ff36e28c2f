"""The command `compare`: averages, tests, win rates, tables (CSV, LaTeX), figures and a page, all from records.

    result = compare(CompareConfig(results=(Path("runs/evaluations"),)), progress)

The steps: records -> models (models.py) -> arms of models (arms.py) -> comparisons (effects.py) and conclusions in
words (conclusion.py) -> the result (result.py) -> tables.py, figures.py, paper.py, page.py, and
mlsm/terminal/comparison.py. Only records and the logs of their runs are read, no models and no text.

A study withholds its records until all of its planned seeds are scored: a file `withheld.json` next to them names the
two arms of the primary hypothesis. Until then `compare` refuses these records, so that nobody stops a study early
because its result looks good; the study itself writes a page without records, only with composites that may be shown.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from mlsm.common import disk
from mlsm.common.durable import make_directories, refuse_what_is_in_the_way, replace_json
from mlsm.common.errors import ComparisonError
from mlsm.evaluation import records
from mlsm.evaluation.comparison.arms import Arm, find_arms, is_in_recipe, leave_out_others
from mlsm.evaluation.comparison.conclusion import choose_tasks, examine_hypotheses, tasks_of_the_mean
from mlsm.evaluation.comparison.config import CompareConfig, StudyFacts
from mlsm.evaluation.comparison.curves import read_checkpoints, read_courses
from mlsm.evaluation.comparison.effects import (
    compare_along_the_way,
    compare_on_blimp,
    contest_all,
    matrices,
    scores_of_arms,
    win_rates,
)
from mlsm.evaluation.comparison.figures import CONTRASTS_STEM, EFFECT_STEM, STEMS, draw_page_figures
from mlsm.evaluation.comparison.identity import differences
from mlsm.evaluation.comparison.intruders import Judgements, read_judgements
from mlsm.evaluation.comparison.models import (
    Model,
    common_figures,
    common_paradigms,
    find_mixture,
    frozen_alike,
    models_of,
    scored_alike,
)
from mlsm.evaluation.comparison.page import write_page
from mlsm.evaluation.comparison.paper import draw_paper_figures, files_of_figures
from mlsm.evaluation.comparison.result import Comparison, FrozenScore, pairs_of, summarise_model
from mlsm.evaluation.comparison.tables import TABLES, tables_of, write_csv, write_tables
from mlsm.evaluation.studies.word_senses.conclusions import read_result

DEFAULT_RESULTS = Path("runs/evaluations")
WITHHELD = "withheld.json"
_OF_THE_PAGE = {f"report-{name}{suffix}" for name in TABLES for suffix in (".csv", ".tex")} | {
    f"{stem}{suffix}" for stem in (*STEMS, EFFECT_STEM, CONTRASTS_STEM) for suffix in (".csv", ".svg")
}


def compare(settings: CompareConfig, progress: Callable[..., None], facts: StudyFacts | None = None) -> Comparison:
    """Compare the models of some records, and write tables, figures and the page.

    facts    what a study planned, for the page. If it withholds its primary hypothesis, no record is read
    Raises   RecordError, ComparisonError: records that are malformed or contradict each other
    """
    results = [path.expanduser() for path in settings.results or (DEFAULT_RESULTS,)]
    found: list[dict] = []
    if facts is None or not facts.withheld:
        for path in results:
            if any((path / "evaluations").rglob("*.json")):
                raise ComparisonError(f"{path} has more than records. Pass its records: {path / 'evaluations'}")
        refuse_withheld(results)
        progress("read records", 0, None)
        found = records.read(results)
    if facts is not None:  # equal models, as of a renamed arm, are called as the first of their records
        found.sort(key=lambda record: not is_in_recipe(record["model"], facts))
    models, notes = models_of(found)
    if facts is not None:
        models, others = leave_out_others(models, facts)
        notes += others
    judgements = read_judgements(settings.intruders)
    if settings.diagnostic is not None:
        read_result(settings.diagnostic)  # raises its errors also where its figure cannot be drawn

    # single models, every one with every other: minutes for a hundred
    tuned = [model for model in models if model.trainings]
    progress(f"test {len(tuned):,} fine-tuned models in pairs", 0, None)
    significance, left_out = matrices(tuned)
    progress("compare BLiMP scores in pairs", 0, None)
    blimp = compare_on_blimp(models)
    progress("compare settings in pairs", 0, None)
    pairs, rates = pairs_of(models), win_rates(models)
    scored, unlike = scored_alike(models)
    frozen, notes_on_frozen = frozen_alike(models)
    figures, paradigms = common_figures(tuned), common_paradigms(scored) if scored else []
    differ = differences(models)

    # arms
    arms = find_arms(models, facts)
    study, notes_on_tasks = choose_tasks(arms, facts)
    tests = examine_hypotheses(arms, study)
    tasks = tasks_of_the_mean(arms, study, tests)
    courses = read_courses(arms.arms)
    rivals = arms.both(tests[0].effect.better, tests[0].effect.than) if tests else None

    result = Comparison(
        records=len(found),
        summaries=[
            summarise_model(model, figures, paradigms if model in scored else (), judgements.aucs) for model in models
        ],
        figures_in_common=figures,
        compared=[model.label for model in tuned],
        significance=significance,
        win_rates=rates,
        frozen=[
            FrozenScore(label, task, figure["metric"], figure["value"], figure["n"])
            for task, alike in frozen.items()
            for label, record in alike.items()
            for figure in record["figures"]
        ],
        blimp=blimp,
        differences=differ,
        pairs=pairs,
        left_out=left_out,
        notes=[
            *notes,
            *arms.notes,
            *_notes_on_fine_tuning(models),
            *_notes_on_mixtures(arms.with_ends()),
            *(
                f"The BLiMP scores of {label} cannot be compared with the others: {why}"
                for label, why in unlike.items()
            ),
            *notes_on_frozen,
            *differ.on_masks,
            *_notes_on_intruders(settings, models, judgements),
        ],
        study=study,
        arms=arms,
        tasks=tasks,
        tests=tests,
        scores=scores_of_arms(arms.with_ends(), tasks),
        contests=contest_all(arms.arms, tasks),
        arms_differ=differences(arms.arms),
        rivals=rivals or (),
        along_the_way=compare_along_the_way(*rivals, tasks) if rivals else [],
        courses=courses,
        reached=read_checkpoints(arms.arms, courses, tasks),
        notes_on_tasks=notes_on_tasks,
    )
    return _write(result, settings, progress)


@refuse_what_is_in_the_way()
def _write(result: Comparison, settings: CompareConfig, progress: Callable[..., None]) -> Comparison:
    """Write all files, then remove those of an earlier comparison: until then its page has its tables. Returns the
    result with the files' names."""
    directory = settings.output
    make_directories(directory)
    result = replace(result, tables=list(map(str, write_csv(result, directory))))
    result = replace(result, figures=draw_paper_figures(result, settings, progress))
    tables = tables_of(result, directory)
    written = write_tables(tables, directory)
    figures = draw_page_figures(result, directory)
    page = write_page(result, tables, figures, directory)
    written += [Path(file) for figure in result.figures for file in figure.files]
    written += [file for of_kind in figures.values() for figure in of_kind for file in figure.files]
    for name in (_OF_THE_PAGE | files_of_figures()) - {file.name for file in written}:
        with suppress(FileNotFoundError):
            disk.unlink(directory / name)
    return replace(result, report=str(page))


# -- notes ------------------------------------------------------------------------------------------------


def _notes_on_fine_tuning(models: Sequence[Model]) -> list[str]:
    chosen = []
    for model in models:
        rates = Counter(record["lr_choice"]["lr"] for record in model.trainings.values() if "lr_choice" in record)
        if rates:
            counts = ", ".join(f"{lr:g} by {count}" for lr, count in sorted(rates.items()))
            tried = {tried["lr"] for r in model.trainings.values() for tried in r.get("lr_choice", {}).get("tried", ())}
            chosen.append(
                f"Learning rates chosen by the fine-tuning runs of {model.label}, out of {len(tried)}: {counts}."
            )
    return chosen


def _notes_on_mixtures(arms: Iterable[Arm]) -> list[str]:
    return [
        f"The fine-tuning runs of {arm.name} were not all made in one way ({why}), so its averages cannot be compared."
        for arm in arms
        if (why := find_mixture(record for model in arm.models for record in model.trainings.values()))
    ]


def _notes_on_intruders(settings: CompareConfig, models: Sequence[Model], judgements: Judgements) -> list[str]:
    if not settings.intruders or not models:  # none while a study withholds its records
        return []
    if not any(model.target in judgements.aucs for model in models):
        raise ComparisonError(
            "--intruders: according to their records, these models learned LSPs from none of the judged stores. "
            "Judge the stores that they learned from, or omit --intruders."
        )
    return [
        f"Intruder AUC: how often {judgements.judge} can distinguish words that do not belong to an LSP from words "
        "that do, averaged over the LSPs of the store that a model learned from; 50% by chance. It describes the "
        "store, not the model."
    ]


# -- what is withheld -------------------------------------------------------------------------------------


@refuse_what_is_in_the_way()
def keep_withheld(directory: Path, primary: tuple[str, str] | None) -> None:
    """Note next to the records that the primary hypothesis is withheld, or with None that it no longer is."""
    if primary is not None:
        make_directories(directory)
        replace_json(directory / WITHHELD, {"primary": primary})
    elif (directory / WITHHELD).exists():
        disk.unlink(directory / WITHHELD)


def refuse_withheld(results: Iterable[Path]) -> None:
    """Raise ComparisonError if records of several models belong to a study that is not finished."""
    models: dict[Path, set[str]] = {}  # below a directory with withheld records
    for path in map(Path.resolve, results):
        for place in (path, *path.parents):
            if (place / WITHHELD).exists():
                models.setdefault(place, set()).update(path.relative_to(place).parts[:1] or ("all", "of them"))
        for file in path.rglob(WITHHELD) if path.is_dir() else ():
            models[file.parent] = {"all", "of them"}
    for directory, names in models.items():
        if len(names) > 1:
            raise ComparisonError(
                f"{directory} has the records of a study that withholds its primary hypothesis until all seeds are "
                "scored. Finish the study; or, to look at single models, pass the directory of one at a time."
            )
