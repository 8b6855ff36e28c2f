"""Test the hypotheses and state each result in one sentence that claims no more than its interval allows.

    for test in examine_hypotheses(arms, study): test.conclusion.sentence
    conclude(effect, planned=5).sentence
    for contrast, conclusion in conclude_contrasts(composite): conclusion.sentence

Not handled here: the numbers of an effect (effects.py), and of a contrast of composites
(mlsm/evaluation/studies/protocol/composite.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from mlsm.evaluation.comparison.arms import Arm, Arms
from mlsm.evaluation.comparison.config import StudyFacts
from mlsm.evaluation.comparison.effects import Effect, adjust, find_effect, judge_hypothesis, learned_tasks
from mlsm.evaluation.comparison.identity import Differences, differences
from mlsm.evaluation.comparison.models import tasks_of
from mlsm.evaluation.comparison.significance import LEVEL, POWER, Interval
from mlsm.evaluation.records import METRICS

Verdict = Literal["for", "against", "undecided", "too few", "equal", "missing", "equivalent", "withheld"]
FEWEST_PAIRS = 3  # with two pairs, the interval depends on a single difference
VERDICTS: dict[Verdict, str] = {
    "for": "supported",
    "against": "contradicted",
    "undecided": "inconclusive",
    "too few": "too few pairs",
    "equal": "no variation",
    "missing": "no pairs",
    "equivalent": "equivalent",
    "withheld": "withheld",
}
EXPLORATORY: dict[Verdict, str] = {"for": "higher", "against": "lower"}  # if there was no hypothesis
NO_INTERVAL = "All pairs differ by as much, so no interval can be computed."
NOT_PLANNED = "No hypothesis was written down before the scores were seen, so this is exploratory."
ON_COMPOSITE = "The hypotheses of this study are about the composite, so this is exploratory."


@dataclass(frozen=True)
class Conclusion:
    """A verdict on a hypothesis, the sentence that states it, and further sentences that a reader must know.

    caveat  a qualification of the verdict: "so far" before all planned pairs are available, "exploratory" if the test
            was not planned
    """

    verdict: Verdict
    sentence: str
    beside: tuple[str, ...] = ()
    caveat: str = ""

    @property
    def label(self) -> str:
        """The verdict in two or three words that claim no more than the sentence."""
        words = VERDICTS | (EXPLORATORY if self.caveat == "exploratory" else {})
        return ", ".join(filter(None, (words[self.verdict], self.caveat)))


class Test(NamedTuple):
    """A hypothesis: its role ("primary", "secondary" or "not planned"), what the records say about it, and p adjusted
    by Holm's method (None if it is not one of several)."""

    role: str
    effect: Effect
    conclusion: Conclusion
    holm: float | None


def choose_tasks(found: Arms, study: StudyFacts | None) -> tuple[StudyFacts | None, list[str]]:
    """Restrict a study to the tasks that its arm `learned_by` has learned. Returns the study, and sentences on the
    tasks.
    """
    if study is None or study.learned_by is None:
        return study, []
    rule = "above the untrained student by more than two standard errors"
    arm, unknown = found.at(study.learned_by), f"It is not yet known in which tasks {study.learned_by} is {rule}"
    floor = None if arm is None else found.floor_of(arm)
    if arm is None or floor is None:
        return study, [f"{unknown}, so all tasks are included for now."]
    effect = find_effect(arm, floor.at(), study.tasks, study.seeds)
    if lacks := effect.lacks or ("it has one pre-training seed" if len(effect.seeds) == 1 else ""):
        return study, [f"{unknown} ({lacks}), so all tasks are included for now."]
    learned = learned_tasks(effect)
    others = [task for task in effect.tasks if task not in learned]
    if not learned:
        return study, [f"{study.learned_by} is {rule} in no task. All tasks are included, but their mean says little."]
    said = [f"The means are over the tasks in which {study.learned_by} is {rule}: {', '.join(learned)}."]
    if others:
        said.append(f"Shown, but part of no mean: {', '.join(others)}.")
    known = {task for model in arm.models for task in tasks_of(model) if not study.tasks or task in study.tasks}
    if unjudged := [task for task in METRICS if task in known and task not in effect.tasks]:
        said.append(f"Also in no mean, because records of some seeds are missing: {', '.join(unjudged)}.")
    return replace(study, tasks=learned), said


def examine_hypotheses(found: Arms, study: StudyFacts | None) -> list[Test]:
    """Test all hypotheses, the primary one first. Without a study, test one obvious pair of arms, if there is one. If
    the hypotheses are about a composite, compare their arms as far as these are fine-tuned.
    """
    if study is not None and study.composite is not None:
        effects = [
            judge_hypothesis(found, pair, study.tasks, study.seeds_of.get(pair, study.seeds))
            for pair in (study.primary, *study.secondary)
        ]
        return [
            Test("not planned", effect, conclude(effect, beyond=_beyond(found, effect), unplanned=ON_COMPOSITE), None)
            for effect in effects
            if not effect.lacks
        ]
    if study is None:
        pair = _obvious_pair(found.arms)
        if pair is None:
            return []
        effect = judge_hypothesis(found, pair)
        return [Test("not planned", effect, conclude(effect, beyond=_beyond(found, effect)), None)]
    first = judge_hypothesis(found, study.primary, study.tasks, study.seeds)
    role, seeds_planned = ("primary", len(study.seeds)) if study.planned else ("not planned", None)
    tests = [Test(role, first, conclude(first, seeds_planned, beyond=_beyond(found, first)), None)]
    seeds = [study.seeds_of.get(hypothesis, study.seeds) for hypothesis in study.secondary]
    others = [
        judge_hypothesis(found, pair, study.tasks, of_pair)
        for pair, of_pair in zip(study.secondary, seeds, strict=True)
    ]
    for effect, of_pair, p in zip(others, seeds, adjust(others), strict=True):
        said = conclude(effect, len(of_pair), p, len(others), _beyond(found, effect))
        tests.append(Test("secondary", effect, said, p))
    return tests


def _obvious_pair(arms: Sequence[Arm]) -> tuple[str, str] | None:
    """mlsm against mlm if there is one arm of each; else the two arms, if there are exactly two."""
    by_objective = {name: [arm for arm in arms if arm.facts["objective"] == name] for name in ("mlsm", "mlm")}
    if all(len(group) == 1 for group in by_objective.values()):
        return by_objective["mlsm"][0].name, by_objective["mlm"][0].name
    return (arms[0].name, arms[1].name) if len(arms) == 2 else None


def _beyond(found: Arms, effect: Effect) -> Differences | None:
    """The settings in which the models of an effect's first pair differ; None without a pair."""
    arms = [arm for name in (effect.better, effect.than) if (arm := found.at(name)) is not None]
    if effect.lacks:
        return None
    return differences([arm.by_seed.get(effect.seeds[0]) or arm.models[0] for arm in arms])


def tasks_of_the_mean(found: Arms, study: StudyFacts | None, tests: Sequence[Test]) -> tuple[str, ...]:
    """The study's tasks; without a study those of the first hypothesis; else those that all finished models have."""
    if study and study.tasks:
        return tuple(study.tasks)
    if tests and not tests[0].effect.lacks:
        return tests[0].effect.tasks
    having = [tasks_of(model) for arm in found.arms for model in arm.at().models]
    return tuple(task for task in METRICS if having and all(task in tasks for tasks in having))


def conclude(
    effect: Effect,
    planned: int | None = None,
    adjusted: float | None = None,
    tests: int = 1,
    beyond: Differences | None = None,
    unplanned: str = NOT_PLANNED,
) -> Conclusion:
    """State in words what the records say about a hypothesis.

    planned   number of planned pairs of pre-training runs; with fewer the sentence says "so far". 0: their number was
              not planned; None: the test was not planned either, so there is no hypothesis
    adjusted  p adjusted for several tests; the verdict uses it. None: it uses the unadjusted p
    tests     number of tests that `adjusted` is for
    beyond    the settings in which the two arms differ
    unplanned why it is exploratory if the test was not planned
    """
    better, than = effect.better, effect.than
    if effect.lacks:
        return Conclusion("missing", f"It is not known whether {better} is better than {than}: {effect.lacks}.")
    found = effect.mean
    over = f"mean of {_tasks(effect)} over {_pairs(found.n)}"
    is_early = planned is not None and found.n < planned
    so_far, unclear = ("So far, ", "it is unclear") if is_early else ("", "It is unclear")
    caveat = "exploratory" if planned is None else "so far" if is_early else ""
    p = found.p if adjusted is None else adjusted
    is_significant = p is not None and p < LEVEL
    beside = tuple(_beside(effect, planned, beyond, unplanned, is_significant))
    if found.n < FEWEST_PAIRS:
        few = "One pair of pre-training runs is" if found.n == 1 else f"{_pairs(found.n)} are"
        sentence = (
            f"{few} too few to tell whether {better} is better than {than}: {better} {_direction(effect)} ({over}), "
            f"which does not show how much the difference varies with the seed."
        )
        return Conclusion("too few", sentence, beside, caveat)
    if p is None or found.low is None or found.high is None or found.detectable is None:
        sentence = (
            f"{so_far}{better} {_direction(effect)} in every one of {_pairs(found.n)}, to the last digit ({over}). "
            + NO_INTERVAL
        )
        return Conclusion("equal", sentence, beside, caveat)
    is_adjusted = adjusted is not None and tests > 1  # for one hypothesis Holm's p is the test's own
    of_tests = f" after Holm's adjustment for {tests} hypotheses" if is_adjusted else ""
    bounds = f"95 % interval {points(found.low)} to {points(found.high)} points"
    if is_significant:
        contrary = "" if found.mean > 0 or planned is None else ", contrary to the hypothesis"
        sentence = f"{so_far}{better} {_direction(effect)}{contrary} ({bounds}; {over}; p {p_value(p)}{of_tests})."
        return Conclusion("for" if found.mean > 0 else "against", sentence, beside, caveat)
    holds_zero = found.low <= 0 <= found.high
    why = "includes 0" if holds_zero else f"excludes 0, but p {p_value(p)}{of_tests} is not below {LEVEL}"
    power = (
        f" With {found.n} pairs and this variance, a true difference of "
        f"{points(found.detectable, sign=False)} points would be detected with {100 * POWER:.0f} % power."
    )
    sentence = (
        f"{so_far}{unclear} whether {better} is better than {than}: it {_direction(effect)}, and the {bounds} {why} "
        f"({over}).{'' if is_adjusted else power}"
    )
    return Conclusion("undecided", sentence, beside, caveat)


def _beside(effect, planned, beyond, unplanned, is_significant):
    found = effect.mean
    if planned is not None and found.n < planned:
        yield (
            f"{found.n} of the {planned} planned pairs are available. Looking at the interval now, and again when all "
            "are, raises the error rate above 5 %."
        )
    if planned is None:
        yield unplanned
    failed, tunings = effect.failed
    if failed:
        yield (
            f"{failed} of the {tunings} fine-tuning runs compared diverged, or scored hardly better than always giving "
            "one answer; they are included."
        )
    if effect.incomplete:
        seeds = ", ".join(map(str, effect.incomplete))
        yield f"Excluded because fine-tuning runs are missing or do not match: pre-training seed {seeds}."
    if effect.unplanned:
        yield f"Excluded because it was not planned: pre-training seed {', '.join(map(str, effect.unplanned))}."
    if effect.unpaired:
        yield f"Excluded because only one arm has it: pre-training seed {', '.join(map(str, effect.unpaired))}."
    if effect.mixture:
        yield f"The pairs were fine-tuned in different ways ({effect.mixture}), so their mean mixes several questions."
    if effect.dropped:
        yield f"Not in the mean, because not all pairs have them: {', '.join(effect.dropped)}."
    if claimable(found).low is not None:
        yield _describe_bootstrap(effect.resampled, is_significant)
    if beyond is not None:
        if "run_seed" in beyond.settings:
            yield "The two have different pre-training seeds, so they are not paired by seed."
        yield from _what_else_differs(beyond)


def _what_else_differs(beyond: Differences) -> Iterator[str]:
    if len(several := beyond.beyond({"step", "run_seed"})) > 1:
        yield (
            f"The two differ in {', '.join(several)}, so the difference in score cannot be attributed to one of these "
            "alone."
        )
    if beyond.unknown:
        yield "Other differences are unknown, because their records do not contain all settings of pre-training."
    yield from beyond.on_masks


def _describe_bootstrap(bounds, is_significant):
    low, high = bounds
    said = f"The 95 % interval of a bootstrap over tasks and seeds is {points(low)} to {points(high)} points"
    if is_significant and low <= 0 <= high:
        return (
            f"{said}, which includes 0: there is evidence of a difference on these tasks, but not on other tasks like "
            "them."
        )
    return f"{said}."


def claimable(found: Interval) -> Interval:
    """The part of an interval that a page may show: only the mean if there are fewer than FEWEST_PAIRS pairs."""
    return found if found.n >= FEWEST_PAIRS else Interval(found.n, found.mean)


def _direction(effect):
    mean, than = effect.mean.mean, effect.than
    if round(mean, 9) == 0:
        return f"scores the same as {than}"
    return f"scores {points(abs(mean), sign=False)} points {'higher' if mean > 0 else 'lower'} than {than}"


def _tasks(effect):
    return effect.tasks[0] if len(effect.tasks) == 1 else f"{len(effect.tasks)} tasks"


def _pairs(n):
    return "one pair of pre-training runs" if n == 1 else f"{n} pairs of pre-training runs"


# -- contrasts of composites ------------------------------------------------------------------------------


def conclude_contrasts(composite: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], Conclusion]]:
    """What a study's composites say about its hypotheses, the primary one first.

    composite  of `compose`; its exploratory contrasts test nothing, so they have no conclusion
    """
    contrasts = composite["contrasts"]
    secondary = [one for one in contrasts if one["role"] == "secondary"]
    return [(one, _conclude_contrast(one, len(secondary))) for one in (*contrasts[:1], *secondary)]


def exploratory_contrasts(composite: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The contrasts of a study's composites that are not hypotheses."""
    return [one for one in composite["contrasts"][1:] if one["role"] == "not planned"]


def _conclude_contrast(found: Mapping[str, Any], tests: int) -> Conclusion:
    better, than = found["pair"]
    if "withheld" in found:
        whether = f"Whether {better} is better than {than} is withheld until all planned seeds are scored"
        return Conclusion("withheld", f"{whether}. Scored so far: {found['withheld']}.")
    difference, pairs = found["difference"], len(found["seeds"])
    how = f"{points(abs(difference) / 100, sign=False)} points {'higher' if difference > 0 else 'lower'}"
    how = how if round(difference, 7) else "the same"
    caveat, beside = ("exploratory", [NOT_PLANNED]) if found["role"] == "not planned" else ("", [])
    beside += _beside_contrast(found)
    if pairs < FEWEST_PAIRS:
        few = "One pair of pre-training runs is" if pairs == 1 else f"{_pairs(pairs)} are"
        sentence = f"{few} too few to tell whether {better} is better than {than}: on the composite it scores {how}."
        return Conclusion("too few", sentence, tuple(beside), caveat)
    if "paired" not in found:
        sentence = (
            f"{better} scores {how} {'than' if round(difference, 7) else 'as'} {than} in every one of {_pairs(pairs)}. "
            + NO_INTERVAL
        )
        return Conclusion("equal", sentence, tuple(beside), caveat)
    paired, margin = found["paired"], found.get("equivalence")
    holm = paired.get("p_adjusted")
    p = paired["p"] if holm is None else holm
    is_adjusted = holm is not None and tests > 1  # for one hypothesis Holm's p is the test's own
    of_tests = f" after Holm's adjustment for {tests} hypotheses" if is_adjusted else ""
    facts = f"95 % interval {between(paired)} points; {_pairs(pairs)}; p {p_value(p)}{of_tests}"
    verdict: Verdict = "undecided"
    if p < LEVEL:
        verdict = "for" if difference > 0 else "against"
        contrary = ", contrary to the hypothesis" if verdict == "against" and not caveat else ""
        sentence = f"On the composite, {better} scores {how} than {than}{contrary} ({facts})."
    elif margin and margin["equivalent"]:
        verdict = "equivalent"
        sentence = (
            f"{better} and {than} are equivalent within {margin['margin']:g} points of the composite: {better} scores "
            f"{how} ({facts})."
        )
    else:
        sentence = f"It is unclear whether {better} is better than {than}: on the composite it scores {how} ({facts})."
    return Conclusion(verdict, sentence, tuple(beside), caveat)


def _beside_contrast(found):
    has_interval = len(found["seeds"]) >= FEWEST_PAIRS and "paired" in found
    if has_interval and (margin := found.get("equivalence")):
        bounds = f"the 90 % interval, {between(margin)} points, is"
        within = f"within the margin of {margin['margin']:g} points"
        yield (
            f"Equivalence (two one-sided tests at 5 %): {bounds} {within}."
            if margin["equivalent"]
            else f"There is no evidence of equivalence: {bounds} not {within}."
        )
    if has_interval:
        unpaired = found["unpaired"]
        yield (
            f"The interval and p are paired by seed. Unpaired (Welch's test), the interval is {between(unpaired)} "
            f"points, p {p_value(unpaired['p'])}."
        )
    yield from _what_else_differs(Differences(**found["arms_differ"]))


def between(interval: Mapping[str, float]) -> str:
    """The bounds `low` and `high` of an interval in points."""
    return f"{points(interval['low'] / 100)} to {points(interval['high'] / 100)}"


def points(value: float, sign: bool = True) -> str:
    """A difference of fractions in percentage points: two decimals, or more if these would be zeros."""
    shown = 100 * value
    text = f"{abs(shown):.2f}"
    if float(text) == 0 and shown:
        text = f"{abs(shown):.1g}"
    return f"{'−' if shown < 0 else '+' if sign and shown else ''}{text}"


def p_value(p: float) -> str:
    """p as text, like "= 0.012": never zero, and never rounded across the level of significance."""
    if p < 0.001:
        return "< 0.001"
    text = f"{p:.3f}"
    return f"= {p:.6f}" if (float(text) < LEVEL) != (p < LEVEL) else f"= {text}"
