"""The hypotheses, and what an effect lets us say: one sentence with its uncertainty, never more than its interval.

    for test in examine_hypotheses(arms, study): test.conclusion.sentence
    conclude(effect, planned=5).sentence

Left out: the figures of an effect (effects.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from mlsm.evaluation.comparison.arms import Arm, Arms
from mlsm.evaluation.comparison.config import StudyFacts
from mlsm.evaluation.comparison.effects import Effect, adjust, find_effect, judge_hypothesis, learned_tasks
from mlsm.evaluation.comparison.identity import Differences, differences
from mlsm.evaluation.comparison.models import tasks_of
from mlsm.evaluation.comparison.significance import LEVEL, POWER, Interval
from mlsm.evaluation.records import METRICS

Verdict = Literal["for", "against", "undecided", "too few", "equal", "missing"]
FEWEST_PAIRS = 3  # of two, the interval rests on one difference between them
VERDICTS: dict[Verdict, str] = {
    "for": "supported",
    "against": "contradicted",
    "undecided": "undecided",
    "too few": "too few pairs",
    "equal": "no variation",
    "missing": "no records",
}
EXPLORATORY: dict[Verdict, str] = {"for": "higher", "against": "lower"}  # where there was no hypothesis


@dataclass(frozen=True)
class Conclusion:
    """A verdict on a hypothesis, the sentence that says it, and sentences that a reader must know beside it.

    caveat  a word that belongs to the verdict: "so far" before all planned pairs are there, "exploratory" where nobody
            planned the test
    """

    verdict: Verdict
    sentence: str
    beside: tuple[str, ...] = ()
    caveat: str = ""

    @property
    def label(self) -> str:
        """The verdict in two or three words, which claim no more than the sentence."""
        words = VERDICTS | (EXPLORATORY if self.caveat == "exploratory" else {})
        return ", ".join(filter(None, (words[self.verdict], self.caveat)))


class Test(NamedTuple):
    """A hypothesis: its role ("primary", "secondary" or "not planned"), what the records say of it, and p by Holm's
    method, None where it is not one of several."""

    role: str
    effect: Effect
    conclusion: Conclusion
    holm: float | None


def choose_tasks(found: Arms, study: StudyFacts | None) -> tuple[StudyFacts | None, list[str]]:
    """The study with the tasks that its `learned_by` has learned, and sentences that say which they are."""
    if study is None or study.learned_by is None:
        return study, []
    rule = "above the untrained student by more than two standard errors"
    arm, unknown = found.at(study.learned_by), f"Whether {study.learned_by} is {rule} is not known yet"
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


def examine_hypotheses(found: Arms, study: StudyFacts | None) -> list[Test]:
    """The tests of all hypotheses, the primary one first; without a study of one pair, or of none."""
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
    """mlsm against mlm where there is one arm of each, else the two arms that there are."""
    by_objective = {name: [arm for arm in arms if arm.facts["objective"] == name] for name in ("mlsm", "mlm")}
    if all(len(group) == 1 for group in by_objective.values()):
        return by_objective["mlsm"][0].name, by_objective["mlm"][0].name
    return (arms[0].name, arms[1].name) if len(arms) == 2 else None


def _beyond(found: Arms, effect: Effect) -> Differences | None:
    """In what the models of an effect's first pair differ."""
    arms = [arm for name in (effect.better, effect.than) if (arm := found.at(name)) is not None]
    if effect.lacks:
        return None
    return differences([arm.by_seed.get(effect.seeds[0]) or arm.models[0] for arm in arms])


def tasks_of_the_mean(found: Arms, study: StudyFacts | None, tests: Sequence[Test]) -> tuple[str, ...]:
    """The study's tasks; else those of the first hypothesis; else those that all finished models of all arms have."""
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
) -> Conclusion:
    """Word what the records say of a hypothesis.

    planned   pairs of pre-trainings that were planned; with fewer the sentence says "so far". 0: their number was not
              planned; None: neither was the test, so there is no hypothesis
    adjusted  p adjusted for several tests, which then decides; None: the plain one does
    tests     how many
    beyond    in what the two differ
    """
    better, than = effect.better, effect.than
    if effect.lacks:
        return Conclusion("missing", f"Whether {better} is better than {than} is not known: {effect.lacks}.")
    found = effect.mean
    over = f"mean of {_tasks(effect)} over {_pairs(found.n)}"
    is_early = planned is not None and found.n < planned
    so_far, whether = ("So far, ", "whether") if is_early else ("", "Whether")
    caveat = "exploratory" if planned is None else "so far" if is_early else ""
    beside = tuple(_beside(effect, planned, beyond))
    if found.n < FEWEST_PAIRS:
        sentence = (
            f"Whether {better} is better than {than} cannot be told from {_pairs(found.n)}: {better} "
            f"{_direction(effect)} ({over}), and so few do not show how much that varies with the seed."
        )
        return Conclusion("too few", sentence, beside, caveat)
    if found.p is None or found.low is None or found.high is None or found.detectable is None:
        sentence = (
            f"{so_far}{better} {_direction(effect)} in every one of {_pairs(found.n)}, to the last digit ({over}); "
            f"nothing shows how that would vary, so there is no interval."
        )
        return Conclusion("equal", sentence, beside, caveat)
    p = found.p if adjusted is None else adjusted
    of_tests = "" if adjusted is None else f" after Holm's adjustment for {tests} hypotheses"
    bounds = f"95 % interval {points(found.low)} to {points(found.high)} points"
    if p < LEVEL:
        contrary = "" if found.mean > 0 or planned is None else ", contrary to the hypothesis"
        sentence = f"{so_far}{better} {_direction(effect)}{contrary} ({bounds}; {over}; p {p_value(p)}{of_tests})."
        return Conclusion("for" if found.mean > 0 else "against", sentence, beside, caveat)
    holds_zero = found.low <= 0 <= found.high
    why = "holds 0" if holds_zero else f"leaves out 0, which{of_tests} (p {p_value(p)}) is not enough"
    sentence = (
        f"{so_far}{whether} {better} is better than {than} is undecided: it {_direction(effect)}, and "
        f"the {bounds} {why} ({over}); {found.n} pairs of this spread would find a true difference of "
        f"{points(found.detectable, sign=False)} points with a power of {100 * POWER:.0f} %."
    )
    return Conclusion("undecided", sentence, beside, caveat)


def _beside(effect, planned, beyond):
    found = effect.mean
    if planned is not None and found.n < planned:
        yield (
            f"{found.n} of the {planned} planned pairs are there. Who looks at the interval now and again when all are "
            f"there errs more often than its 5 % say."
        )
    if planned is None:
        yield "No hypothesis was written down before the scores were seen, so this is exploratory."
    failed, tunings = effect.failed
    if failed:
        yield f"Of the {tunings} fine-tunings compared, {failed} diverged or predict one class for all; they count."
    if effect.incomplete:
        seeds = ", ".join(map(str, effect.incomplete))
        yield f"Left out, as fine-tunings are missing or do not agree: pre-training seed {seeds}."
    if effect.unplanned:
        yield f"Left out, as nobody planned it: pre-training seed {', '.join(map(str, effect.unplanned))}."
    if found.low is not None and effect.resampled is not None:
        yield _compare_intervals(found, effect.resampled)
    if beyond is not None and (several := beyond.beyond({"step", "run_seed"})) and len(several) > 1:
        yield f"They differ in {', '.join(several)}: the difference in score is not due to one of these alone."
    if beyond is not None and beyond.unknown:
        yield "In what else they differ is unknown, as their records do not hold all settings of pre-training."
    if beyond is not None:
        yield from beyond.on_masks


def _compare_intervals(found: Interval, resampled: tuple[float, float]) -> str:
    low, high = resampled
    said = f"Drawn again over tasks and seeds, the 95 % interval is {points(low)} to {points(high)} points"
    is_apart = found.low is not None and found.high is not None and (found.low > 0 or found.high < 0)
    if is_apart and low <= 0 <= high:
        return f"{said}, which holds 0: the difference is shown for these tasks, not for others like them."
    return f"{said}."


def _direction(effect):
    mean, than = effect.mean.mean, effect.than
    if round(mean, 9) == 0:
        return f"scores the same as {than}"
    return f"scores {points(abs(mean), sign=False)} points {'higher' if mean > 0 else 'lower'} than {than}"


def _tasks(effect):
    return effect.tasks[0] if len(effect.tasks) == 1 else f"{len(effect.tasks)} tasks"


def _pairs(n):
    return "one pair of pre-trainings" if n == 1 else f"{n} pairs of pre-trainings"


def points(value: float, sign: bool = True) -> str:
    """A difference of fractions in percentage points: two decimals, or more where these would be zeros."""
    shown = 100 * value
    text = f"{abs(shown):.2f}"
    if float(text) == 0 and shown:
        text = f"{abs(shown):.1g}"
    return f"{'−' if shown < 0 else '+' if sign and shown else ''}{text}"


def p_value(p: float) -> str:
    """What p is, for people, as "= 0.012": never zero, and never rounded across the level."""
    if p < 0.001:
        return "< 0.001"
    text = f"{p:.3f}"
    return f"= {p:.6f}" if (float(text) < LEVEL) != (p < LEVEL) else f"= {text}"
