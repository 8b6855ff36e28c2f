"""Compute the composite score of a study's students and test the hypotheses with it.

    result = compose(study, directory)      # also what the terminal, the report and docs/answer.py show

For a student, over the measures in the recipe,

    composite = mean of 100 * (score - untrained) / (teacher - untrained),

where `score` is that of its frozen encoder, `untrained` is the mean score of the untrained students (step 0 of one
arm), and `teacher` is the teacher's. So random weights reach 0, and the teacher reaches 100.

A hypothesis is tested over seeds: paired by seed (two-sided t test of the differences) and, since paired runs may have
little in common, also unpaired (Welch's test). P values of secondary hypotheses are adjusted by Holm's method. Two arms
are equivalent within a margin if the 90 % interval of their paired difference lies inside it, which is two one-sided
tests at 5 % (Schuirmann 1987). Results of the primary arms are withheld until all of their planned seeds are scored.
Not handled here: the measures (mlsm/evaluation/tasks/frozen), sentences and the report (mlsm/evaluation/comparison).
"""

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import NamedTuple

from mlsm.common.errors import StudyError
from mlsm.evaluation import records
from mlsm.evaluation.comparison.identity import differences
from mlsm.evaluation.comparison.models import find_disagreements, largest_alike
from mlsm.evaluation.comparison.significance import LEVEL, holm
from mlsm.evaluation.studies.protocol.costs import name_in_records
from mlsm.evaluation.studies.protocol.description import Study

ABOVE_ERRORS, ABOVE_POINTS = 5.0, 3.0  # standard errors and points by which the teacher is above trained students
LEARNED_ERRORS = 2.0  # standard errors by which trained students are above untrained ones
RULE = (
    f"A measure passes if the teacher is at least {ABOVE_ERRORS:g} standard errors and {ABOVE_POINTS:g} points above "
    f"the trained students, and these at least {LEARNED_ERRORS:g} standard errors above the untrained ones"
)
Scores = dict[str, float]  # measure -> score, in points


class Scored(NamedTuple):
    """The scores of a study."""

    students: dict[str, dict[int, Scores]]
    """arm -> seed -> scores of the finished student"""
    untrained: dict[int, Scores]
    """seed -> scores at step 0 of the lower anchor"""
    teacher: Scores | None
    facts: dict[str, dict[int, dict]]
    """arm -> seed -> a record of the finished student, which says how it was pre-trained"""


def compose(study: Study, directory: Path) -> dict:
    """Compute composites and test hypotheses, except those that are withheld.

    directory  of the study
    Returns    arms (name -> seeds, planned: how many, composite, deviation, measures: means in points; None for an arm
               that is withheld), anchors (untrained, teacher: measure -> points; untrained_seeds, untrained_planned:
               how many), gate (of `gate`), rule (of the gate, in words), margin (of equivalence, or None), part (of
               the recipe's composite), withheld (whether the primary contrast is), contrasts (of `_contrast`, or pair,
               role and `withheld`: how many seeds are scored; role is "primary", "secondary" or, if it was not planned
               as a test, "not planned")
    Raises     StudyError if two models have the same student's name, or if the lower anchor is not below the upper one
    """
    assert study.composite is not None
    scored = read_scores(study, directory)
    lower = study.arms[study.composite.untrained]
    # Scores are relative to the anchors, so they are final only if both anchors are scored as planned.
    has_anchors = scored.untrained.keys() >= set(lower.seeds)
    is_open = has_anchors and all(scored.students[name].keys() >= set(study.seeds) for name in study.primary)
    hidden = () if is_open else study.primary
    found: dict = {
        "arms": {},
        "contrasts": [],
        "withheld": True,
        "rule": RULE,
        "margin": study.composite.margin,
        "part": study.composite.part,
    }
    found |= {"anchors": anchors_of(scored), "gate": gate(study, scored, hidden)}
    found["anchors"]["untrained_planned"] = len(lower.seeds)
    if scored.teacher is None or not scored.untrained:
        return found
    ends = ends_of(found["anchors"])
    values = {
        arm: {seed: composite_of(scores, ends) for seed, scores in by_seed.items()}
        for arm, by_seed in scored.students.items()
    }
    for name, by_seed in values.items():
        summary = _summary(by_seed, scored.students[name]) | {"planned": len(study.arms[name].seeds)}
        found["arms"][name] = None if name in hidden else summary
    contrasts: list[dict] = []
    named = [("primary" if study.planned else "not planned", study.primary)]
    named += [("secondary", pair) for pair in study.secondary] + [("not planned", pair) for pair in study.explored]
    for role, pair in named:
        seeds = study.seeds_of(pair)
        is_hidden = any(name in hidden for name in pair)
        if is_hidden or not has_anchors or not all(values[name].keys() >= set(seeds) for name in pair):
            planned = dict.fromkeys(pair, seeds) | (dict.fromkeys(study.primary, study.seeds) if is_hidden else {})
            counts = [f"{len(values[arm].keys() & set(of))} of {len(of)} of {arm}" for arm, of in planned.items()]
            if not has_anchors:
                counts.append(f"{len(scored.untrained)} of {len(lower.seeds)} untrained students")
            contrasts.append({"pair": pair, "role": role, "withheld": ", ".join(counts)})
            continue
        contrasts.append(_contrast(pair, seeds, values, scored) | {"role": role})
    if contrasts[0].get("paired") and study.composite.margin is not None:
        contrasts[0]["equivalence"] = _equivalence(contrasts[0], study.composite.margin)
    # A hypothesis without a p (without a result yet, or whose pairs do not vary) is counted too, with p = 1.
    secondary = [one for one in contrasts if one["role"] == "secondary"]
    adjusted = holm([one.get("paired", {}).get("p", 1.0) for one in secondary])
    for one, p in zip(secondary, adjusted, strict=True):
        if "paired" in one:
            one["paired"]["p_adjusted"] = p
    return found | {"contrasts": contrasts, "withheld": "withheld" in contrasts[0]}


def read_scores(study: Study, directory: Path) -> Scored:
    """The scores of all students, from their records.

    Raises  StudyError if two models have one name, or if records of one task differ in data or settings
    """
    composite = study.composite
    assert composite is not None
    by_name: dict[str, dict[tuple, Scores]] = {}
    facts_of: dict[str, dict] = {}  # name of a model -> one of its records
    by_task: dict[str, dict[str, dict]] = {measure.partition("/")[0]: {} for measure in composite.measures}
    used: set[str] = set()  # names of models
    paths = sorted((directory / "evaluations").glob("*/frozen/*.json"))
    found = records.read(paths) if paths else []
    for record, content in zip(found, records.contents_of(found), strict=True):
        measured = {f"{record['task']}/{name}": value for name, value in points_of(record, composite.part).items()}
        facts_of.setdefault(record["model"], record)
        by_name.setdefault(record["model"], {}).setdefault(content, {}).update(measured)
        if record["task"] in by_task:
            by_task[record["task"]][record["model"]] = record
    for name, by_content in by_name.items():
        if len(by_content) > 1:
            raise StudyError(
                f"{directory / 'evaluations'} has frozen records of {len(by_content)} models called {name}. Move "
                f"away the directories that the study should not read."
            )

    def whole(name: str) -> Scores | None:
        used.add(name)
        for scores in by_name.get(name, {}).values():
            if all(measure in scores for measure in composite.measures):
                return {measure: scores[measure] for measure in composite.measures}
        return None

    students: dict[str, dict[int, Scores]] = {arm: {} for arm in study.arms}
    facts: dict[str, dict[int, dict]] = {arm: {} for arm in study.arms}
    for arm in study.arms.values():
        last = f"-step-{arm.settings['max_steps']:08}"
        for seed in arm.seeds:
            for name in (arm.student(seed), arm.student(seed) + last):
                if (scores := whole(name)) is not None:
                    students[arm.name][seed], facts[arm.name][seed] = scores, facts_of[name]
                    break
    lower = study.arms[composite.untrained]
    starts = {seed: whole(f"{lower.student(seed)}-step-{0:08}") for seed in lower.seeds}
    untrained = {seed: scores for seed, scores in starts.items() if scores is not None}
    teacher = whole(name_in_records(composite.teacher))
    for task, of_model in by_task.items():
        _refuse_unlike(task, {name: record for name, record in of_model.items() if name in used})
    return Scored(students, untrained, teacher, facts)


def _refuse_unlike(task: str, measured: Mapping[str, dict]) -> None:
    """Raise StudyError if models' records of a task differ in data or settings; it names one that most differ from."""
    alike = largest_alike(measured)
    for name, record in measured.items():
        if name not in alike:
            raise StudyError(
                f"the frozen record of {task} of {name} cannot be compared with that of {alike[0]}: "
                f"{find_disagreements(measured[alike[0]], record)}. Move it away, and score that model again."
            )


def gate(study: Study, scored: Scored, hidden: Collection[str]) -> list[dict]:
    """Check that each measure separates a trained student from the teacher and from an untrained student. The students
    are those of the lower anchor's arm. A measure passes if the teacher is 5 standard errors and 3 points above the
    arm, and the arm is 2 standard errors above the untrained students. Values are in points; None if there are fewer
    than two seeds or the arm is hidden.
    """
    assert study.composite is not None
    rows = []
    arm = {} if study.composite.untrained in hidden else scored.students[study.composite.untrained]
    for measure in study.composite.measures:
        low, high = ([one[measure] for one in of.values()] for of in (scored.untrained, arm))
        row: dict = {
            "measure": measure,
            "arm": study.composite.untrained,
            "seeds": len(high),
            "untrained": _mean(low),
            "trained": _mean(high),
            "teacher": None if scored.teacher is None else scored.teacher[measure],
            "stays": None,
        }
        if len(low) > 1 and len(high) > 1 and scored.teacher is not None:
            error = stdev(high) / math.sqrt(len(high))
            learned = math.hypot(error, stdev(low) / math.sqrt(len(low)))
            above, gained = scored.teacher[measure] - fmean(high), fmean(high) - fmean(low)
            stays = above >= max(ABOVE_POINTS, ABOVE_ERRORS * error) and gained >= LEARNED_ERRORS * learned
            row |= {"standard_error": error, "stays": stays}
        rows.append(row)
    return rows


def points_of(record: Mapping, part: str) -> Scores:
    """Metric -> points on the part; on dev if the part is `test` and the task has no test set."""
    found: Scores = {}
    for one in ("dev", "test") if part == "test" else (part,):  # test replaces dev
        suffix = f"_{one}"
        found |= {
            figure["metric"].removesuffix(suffix): 100 * figure["value"]
            for figure in record["figures"]
            if figure["metric"].endswith(suffix)
        }
    if cosines := record.get("chosen", {}).get("cosine"):  # records that are older than the measure have it here
        found["cosine_last"] = 100 * cosines["layers"][-1]["tuning" if part == "tuning" else "dev"]
    return found


def anchors_of(scored: Scored) -> dict:
    return {
        "untrained": _means(scored.untrained),
        "teacher": scored.teacher,
        "untrained_seeds": len(scored.untrained),
    }


def _means(scores: Mapping[int, Scores]) -> Scores:
    """The mean of each measure over seeds; empty if there are none."""
    measures = next(iter(scores.values()), {})
    return {measure: fmean(one[measure] for one in scores.values()) for measure in measures}


def ends_of(anchors: dict) -> dict[str, tuple[float, float]]:
    """For each measure, the scores that correspond to 0 and 100 points of the composite."""
    ends = {measure: (low, anchors["teacher"][measure]) for measure, low in anchors["untrained"].items()}
    for measure, (low, high) in ends.items():
        if high <= low:
            raise StudyError(
                f"{measure}: the teacher has {high:.1f}, an untrained student {low:.1f}, so nothing lies between them."
                f" Leave it out of the composite."
            )
    return ends


def composite_of(scores: Scores, ends: dict[str, tuple[float, float]]) -> float:
    """The composite of a model, between the scores that correspond to 0 and 100 points."""
    return fmean(100 * (scores[measure] - low) / (high - low) for measure, (low, high) in ends.items())


def _summary(by_seed: dict[int, float], scores: dict[int, Scores]) -> dict:
    return {
        "seeds": sorted(by_seed),
        "composite": _mean(list(by_seed.values())),
        "deviation": stdev(by_seed.values()) if len(by_seed) > 1 else None,
        "measures": _means(scores),
    }


def _mean(values: list[float]) -> float | None:
    return fmean(values) if values else None


def _contrast(pair: tuple[str, str], seeds: tuple[int, ...], values, scored: Scored) -> dict:
    """The difference of two arms over their planned seeds, in points of the composite.

    Has `paired` and `unpaired` (each with low and high of the 95 % interval, and p; missing with one seed
    and if every pair differs by as much), `measures`, the mean difference in each measure's own points, and
    `arms_differ`, the fields of the Differences of the first pair's pre-training.
    """
    first, second = ([values[name][seed] for seed in seeds] for name in pair)
    found: dict = {"pair": pair, "seeds": seeds, "difference": fmean(first) - fmean(second)}
    found["differences"] = [one - other for one, other in zip(first, second, strict=True)]
    one, other = (scored.students[name] for name in pair)
    found["measures"] = {
        measure: fmean(one[seed][measure] - other[seed][measure] for seed in seeds) for measure in one[seeds[0]]
    }
    first_pair = [SimpleNamespace(label=name, facts=scored.facts[name][seeds[0]]) for name in pair]
    found["arms_differ"] = vars(differences(first_pair))
    if len({round(difference, 9) for difference in found["differences"]}) > 1:
        from scipy import stats

        for name, test in (
            ("paired", stats.ttest_rel(first, second)),
            ("unpaired", stats.ttest_ind(first, second, equal_var=False)),
        ):
            interval = test.confidence_interval(1 - LEVEL)
            found[name] = {"low": float(interval.low), "high": float(interval.high), "p": float(test.pvalue)}
    return found


def _equivalence(contrast: dict, margin: float) -> dict:
    """Whether the 90 % interval of the paired difference is within the margin."""
    from scipy import stats

    low, high = map(float, stats.ttest_1samp(contrast["differences"], 0).confidence_interval(1 - 2 * LEVEL))
    return {"margin": margin, "low": low, "high": high, "equivalent": -margin < low and high < margin}
