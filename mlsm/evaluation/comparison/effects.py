"""The comparisons: single models pair by pair, models on BLiMP, and arms over their pre-training seeds.

Single models: is one better than another? The main result is the MLSM paper's test over all fine-tuning scores:
one-sided, "model i is better than model j". Scores are not independent, because four tasks give two scores per training
run. So the report also shows tests over training runs and over tasks, two-sided tests, and Holm's adjustment for the
number of comparisons.

BLiMP: one observation is one paradigm. Two models are compared on the paradigms that both were scored on, by the same
test and by a bootstrap interval of the mean difference over paradigms. The thousand sentence pairs of a paradigm are
variations of a few templates, not independent observations. Paradigms of one phenomenon are not quite independent
either.

Arms. Fine-tuning scores vary with the seed of fine-tuning, and more with the seed of pre-training. A claim about an
objective is about future pre-training runs, so one pre-training run is one observation. For seed s and task t,

    d_st = mean over metrics and fine-tuning seeds of (x_better - x_than),    d_s = mean over tasks of d_st

The report shows the mean of d_s with Student's interval (n - 1 degrees of freedom) and the p value of the two-sided t
test. It also shows a bootstrap over tasks x seeds, which answers a wider question: about other tasks as well. The
paper's signed-rank test over up to 70 scores is also reported, on scores averaged over the pre-training seeds. It
treats scores as independent, but those of one pre-training run are correlated.

Not handled here: the statistics themselves (significance.py), words (conclusion.py).

Shapes: M models; matrices are (M, M) lists of rows, with None on the diagonal and where nothing can be said. S pairs of
pre-training runs, T tasks.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, combinations, permutations
from statistics import fmean, stdev
from typing import NamedTuple

from mlsm.evaluation.comparison.arms import Arm, Arms, Seed
from mlsm.evaluation.comparison.models import (
    SEEDS,
    SUITE,
    Model,
    Training,
    blimp_average,
    common_paradigms,
    find_mixture,
    match_trainings,
    mean_score,
    score_of_task,
    scored_alike,
    tasks_of,
)
from mlsm.evaluation.comparison.significance import (
    Interval,
    bootstrap,
    count_wins,
    holm,
    interval,
    wilcoxon,
)
from mlsm.evaluation.records import METRICS

ERRORS = 2  # an arm has learned a task if it is this many standard errors above the floor
Matrix = list[list]  # rows of numbers, None if nothing can be said


class Level(NamedTuple):
    """The unit that counts as one observation. `full` is the number of observations in the paper."""

    name: str
    meaning: str
    full: int


LEVELS = (
    Level("scores", "all scores (task, metric, seed)", SEEDS * len(SUITE)),
    Level("trainings", "trainings (task, seed): mean over the metrics", SEEDS * len(METRICS)),
    Level("tasks", "tasks: mean over metrics and seeds", len(METRICS)),
)


# -- model against model ----------------------------------------------------------------------------------


class Matrices(NamedTuple):
    """Each row's model against each column's, (M, M): wins and losses, one-sided and two-sided p. Each p is also
    adjusted by Holm: over all ordered pairs if one-sided, over all unordered pairs if two-sided.
    """

    n: Matrix
    wins: Matrix
    losses: Matrix
    ties: Matrix
    p: Matrix
    holm: Matrix
    two_sided: Matrix
    two_sided_holm: Matrix


class LeftOut(NamedTuple):
    """Fine-tuning runs (task, seed) that two models both have but that are not comparable, and why."""

    model: str
    against: str
    why: str
    trainings: list[Training]


def score_differences(model: Model, other: Model, pairs: Sequence[Training], level: str) -> list[float]:
    """x_model - x_other for every observation at a level, in the order of the pairs.

    pairs  (task, seed) of comparable runs, from `match_trainings`
    """
    mine, theirs = model.scores, other.scores
    by_training = {
        (task, seed): [mine[task, metric, seed] - theirs[task, metric, seed] for metric in METRICS[task]]
        for task, seed in pairs
    }
    if level == "scores":
        return [difference for metrics in by_training.values() for difference in metrics]
    if level == "trainings":
        return [fmean(metrics) for metrics in by_training.values()]
    tasks = dict.fromkeys(task for task, _ in pairs)
    return [fmean(fmean(metrics) for (of, _), metrics in by_training.items() if of == task) for task in tasks]


def matrices(models: Sequence[Model]) -> tuple[dict[str, Matrices], list[LeftOut]]:
    """Compare every model with every other: matrices by level, and the runs that were excluded."""
    pairs, left_out = {}, []
    for i, model in enumerate(models):
        for j, other in enumerate(models[:i]):
            pairs[j, i], reasons = match_trainings(other, model)
            left_out += [LeftOut(other.label, model.label, why, trainings) for why, trainings in reasons.items()]
    return {level.name: _matrices_at(models, pairs, level.name) for level in LEVELS}, left_out


def _matrices_at(models: Sequence[Model], pairs: Mapping[tuple[int, int], list[Training]], level: str) -> Matrices:
    cells = Matrices(*([[None] * len(models) for _ in models] for _ in Matrices._fields))
    for (i, j), trainings in pairs.items():
        d = score_differences(models[i], models[j], trainings, level)
        wins, losses, ties = count_wins(d)
        two_sided = wilcoxon(d, "two-sided")
        for row, column, sign, won, lost in ((i, j, 1, wins, losses), (j, i, -1, losses, wins)):
            values = {"n": len(d), "wins": won, "losses": lost, "ties": ties, "two_sided": two_sided}
            for name, value in (values | {"p": wilcoxon([sign * x for x in d])}).items():
                getattr(cells, name)[row][column] = value
    ordered = [*pairs, *((j, i) for i, j in pairs)]
    for (i, j), p in zip(ordered, holm([cells.p[i][j] for i, j in ordered]), strict=True):
        cells.holm[i][j] = p
    for (i, j), p in zip(pairs, holm([cells.two_sided[i][j] for i, j in pairs]), strict=True):
        cells.two_sided_holm[i][j] = cells.two_sided_holm[j][i] = p
    return cells


class WinRate(NamedTuple):
    """How often a model scores higher than another model of the same step.

    step  None: unknown, taken as finished
    task  one, or "all"
    rate  fraction of `n` scores won; a tie counts half
    """

    model: str
    against: str
    step: int | None
    task: str
    n: int
    wins: int
    losses: int
    ties: int
    rate: float


def win_rates(models: Sequence[Model]) -> list[WinRate]:
    """Win rates by task and over all tasks, for every ordered pair of models of the same step with paired scores."""
    rates = []
    for model, other in permutations(models, 2):
        if model.facts["step"] != other.facts["step"]:
            continue
        pairs, _ = match_trainings(model, other)
        groups = {task: [pair for pair in pairs if pair[0] == task] for task, _ in pairs} | {"all": pairs}
        for task, group in groups.items():
            if group:
                wins, losses, ties = count_wins(score_differences(model, other, group, "scores"))
                n, step = wins + losses + ties, model.facts["step"]
                rate = (wins + ties / 2) / n
                rates.append(WinRate(model.label, other.label, step, task, n, wins, losses, ties, rate))
    return rates


class BlimpPair(NamedTuple):
    """Two models on the paradigms that both were scored on, the better one first.

    difference  difference of the mean accuracies, a fraction
    low, high   its 95 % bootstrap interval over paradigms; None with one paradigm
    p, holm     Wilcoxon's, two-sided (None if nothing differs); adjusted over all pairs
    """

    model: str
    against: str
    paradigms: int
    wins: int
    losses: int
    ties: int
    difference: float
    low: float | None
    high: float | None
    p: float | None
    holm: float | None = None


def compare_on_blimp(models: Iterable[Model]) -> list[BlimpPair]:
    """Every two models with BLiMP records of the same data and settings."""
    rows = [_compare_on_blimp(model, other) for model, other in combinations(scored_alike(models)[0], 2)]
    return [row._replace(holm=p) for row, p in zip(rows, holm([row.p for row in rows]), strict=True)]


def _compare_on_blimp(model: Model, other: Model) -> BlimpPair:
    paradigms = common_paradigms([model, other])
    mine, theirs = model.accuracies, other.accuracies
    d = [mine[name] - theirs[name] for name in paradigms]
    if sum(d) < 0:
        model, other, d = other, model, [-x for x in d]
    low, high = bootstrap([[x] for x in d]) or (None, None)
    return BlimpPair(model.label, other.label, len(d), *count_wins(d), fmean(d), low, high, wilcoxon(d, "two-sided"))


# -- arm against arm --------------------------------------------------------------------------------------


class ScoreTest(NamedTuple):
    """The paper's test over (task, metric, fine-tuning seed), each score the mean over the pre-training seeds.

    tasks         the tasks that every pair has; there may be more than in an effect's `tasks`
    p, two_sided  None if nothing differs
    """

    tasks: tuple[str, ...]
    n: int
    wins: int
    losses: int
    ties: int
    p: float | None
    two_sided: float | None


@dataclass(frozen=True)
class Effect:
    """The evidence in the records for the hypothesis that the arm `better` scores higher than the arm `than`.

    tasks           the T tasks whose mean is compared
    seeds           the S seeds of the paired pre-training runs
    differences_ST  differences of their scores, fractions
    scores          the paper's test; None if there is no pair
    lacks           why there is no pair, as a clause; empty if there is one
    failed          (number of compared fine-tuning runs that diverged or collapsed, number of all); their scores are
                    included
    incomplete      seeds that both arms have but that lack tasks; they are excluded
    unplanned       seeds that both arms have but that were not planned; also excluded, because adding seeds until the
                    result is significant proves nothing
    unpaired        seeds that only one arm has; only planned ones if seeds were planned
    mixture         why the pairs were not all fine-tuned in one way; empty if they were
    dropped         tasks that some pairs have but not all, if no tasks were planned; not in `tasks`
    """

    better: str
    than: str
    tasks: tuple[str, ...] = ()
    seeds: tuple[Seed, ...] = ()
    differences_ST: tuple[tuple[float, ...], ...] = ()
    scores: ScoreTest | None = None
    lacks: str = ""
    failed: tuple[int, int] = (0, 0)
    incomplete: tuple[Seed, ...] = ()
    unplanned: tuple[Seed, ...] = ()
    unpaired: tuple[Seed, ...] = ()
    dropped: tuple[str, ...] = ()
    mixture: str = ""

    @cached_property
    def mean(self) -> Interval:
        """Mean and interval of the differences, averaged over tasks. There must be at least one pair."""
        return interval([fmean(row) for row in self.differences_ST])

    @cached_property
    def resampled(self) -> tuple[float, float] | None:
        """The bootstrap's interval over tasks x seeds."""
        return bootstrap(self.differences_ST)

    def of_task(self, task: str) -> Interval:
        """Mean and interval of the differences on one task."""
        return interval([row[self.tasks.index(task)] for row in self.differences_ST])


def judge_hypothesis(
    found: Arms, hypothesis: tuple[str, str], planned_tasks: Collection[str] = (), planned_seeds: Collection[int] = ()
) -> Effect:
    """The effect for a hypothesis (better, than); for the other arguments see `find_effect`."""
    better, than = (found.at(name) for name in hypothesis)
    named = zip(hypothesis, (better, than), strict=True)
    absent = [
        f"{name} (only of unfinished checkpoints)" if (known := found.arm(name)) and known.fractions else name
        for name, arm in named
        if arm is None or not arm.models
    ]
    if better is None or than is None or absent:
        return Effect(*hypothesis, lacks=f"there are no records of fine-tunings of {' and of '.join(absent)}")
    return find_effect(better, than, planned_tasks, planned_seeds)


def find_effect(better: Arm, than: Arm, planned_tasks: Collection[str], planned_seeds: Collection[int] = ()) -> Effect:
    """Pair two arms by pre-training seed; each has one model per seed.

    planned_tasks  the tasks whose mean is tested; a seed without all of them is excluded. Empty: the tasks that are
                   common to all pairs that have any
    planned_seeds  the seeds that are tested; empty: all
    """
    found, unplanned = {}, []
    mine, theirs = better.by_seed, than.by_seed
    common: list[tuple[Seed, Seed]] = [(seed, seed) for seed in mine if seed in theirs and seed is not None]
    if not common and len(mine) == len(theirs) == 1:  # arms with one model each are paired whatever their seeds
        common = list(zip(mine, theirs, strict=True))
    for seed, other_seed in common:
        if planned_seeds and seed not in planned_seeds:
            unplanned.append(seed)
            continue
        model, other = mine[seed], theirs[other_seed]
        found[seed] = model, other, match_trainings(model, other)[0]
    if not found:
        which = "planned " if unplanned else ""
        return Effect(better.name, than.name, lacks=f"they have no {which}pre-training seed in common")
    matched_tasks = {seed: {task for task, _ in matched} for seed, (*_, matched) in found.items()}
    some = [tasks for tasks in matched_tasks.values() if tasks]  # a seed without any is left out
    tasks = set(planned_tasks) or (set.intersection(*some) if some else set())
    whole = {seed: pair for seed, pair in found.items() if tasks and tasks <= matched_tasks[seed]}
    effect = Effect(
        better.name,
        than.name,
        incomplete=tuple(seed for seed in found if seed not in whole),
        unplanned=tuple(unplanned),
        unpaired=tuple(
            seed
            for seed in (*mine, *theirs)
            if seed not in chain(*common) and seed is not None and (not planned_seeds or seed in planned_seeds)
        ),
        dropped=tuple(task for task in METRICS if not planned_tasks and task in set().union(*some) - tasks),
    )
    if not whole:
        if some and not tasks:
            return replace(effect, lacks="their pairs of pre-trainings have no task in common")
        which = f"of all the planned tasks ({', '.join(planned_tasks)})" if planned_tasks else "of a task"
        return replace(effect, lacks=f"no pair of their pre-trainings has fine-tunings {which} that agree")
    pairs = [
        (model, other, [training for training in matched if training[0] in tasks])
        for model, other, matched in whole.values()
    ]
    rows = tuple(tuple(score_differences(*pair, "tasks")) for pair in pairs)
    tunings = [
        training in of_one
        for model, other, trainings in pairs
        for of_one in (model.failed, other.failed)
        for training in trainings
    ]
    return replace(
        effect,
        tasks=tuple(dict.fromkeys(task for task, _ in pairs[0][2])),
        seeds=tuple(whole),
        differences_ST=rows,
        scores=_test_scores(whole.values()),
        failed=(sum(tunings), len(tunings)),
        mixture=find_mixture(model.trainings[training] for model, _, trainings in pairs for training in trainings),
    )


def learned_tasks(effect: Effect) -> tuple[str, ...]:
    """The tasks on which an arm is above the floor by more than two standard errors of the paired difference.

    effect  of the arm against the floor, with at least two pairs, since one pair does not show the variance
    """
    columns = zip(effect.tasks, zip(*effect.differences_ST, strict=True), strict=True)
    return tuple(task for task, d_S in columns if fmean(d_S) > ERRORS * stdev(d_S) / len(d_S) ** 0.5)


def _test_scores(pairs: Collection[tuple[Model, Model, list[Training]]]) -> ScoreTest:
    """The paper's test on some pairs of models with their comparable fine-tuning runs."""
    common = sorted(set.intersection(*(set(trainings) for *_, trainings in pairs)))
    by_pair = [score_differences(model, other, common, "scores") for model, other, _ in pairs]
    d = [fmean(of_score) for of_score in zip(*by_pair, strict=True)]
    tasks = tuple(dict.fromkeys(task for task, _ in common))
    return ScoreTest(tasks, len(d), *count_wins(d), wilcoxon(d), wilcoxon(d, "two-sided"))


def adjust(effects: Sequence[Effect]) -> list[float | None]:
    """Holm's p of hypotheses that are tested together; hypotheses that cannot be tested yet are counted too."""
    p_values = [None if effect.lacks else effect.mean.p for effect in effects]
    adjusted = holm([1.0 if p is None else p for p in p_values])
    return [None if p is None else of_all for p, of_all in zip(p_values, adjusted, strict=True)]


def blimp_effect(better: Arm, than: Arm) -> Interval | None:
    """The difference in BLiMP accuracy of two arms, paired over seeds; None if no pair was scored in the same way."""
    mine, theirs = better.on_blimp().by_seed, than.on_blimp().by_seed
    found = []
    for seed in mine.keys() & theirs.keys() - {None}:
        pair = [mine[seed], theirs[seed]]
        if len(scored_alike(pair)[0]) == 2 and (paradigms := common_paradigms(pair)):
            found.append(blimp_average(pair[0], paradigms) - blimp_average(pair[1], paradigms))
    return interval(found) if found else None


class Contest(NamedTuple):
    """One arm against another: their effect, and the difference of their BLiMP accuracies if it is known."""

    effect: Effect
    blimp: Interval | None


def contest_all(arms: Iterable[Arm], tasks: Collection[str]) -> list[Contest]:
    """Every arm with fine-tuned models against every other, in both directions, if they have pairs."""
    found = []
    for one, other in combinations([arm for arm in arms if arm.at().models], 2):
        for better, than in ((one, other), (other, one)):
            effect = find_effect(better.at(), than.at(), tasks)
            if not effect.lacks:
                found.append(Contest(effect, blimp_effect(better, than)))
    return found


class AlongTheWay(NamedTuple):
    """An arm's models after a fraction of the steps, against another arm's after the same fraction and finished."""

    fraction: float
    same: Effect
    finished: Effect


def compare_along_the_way(better: Arm, than: Arm, tasks: Collection[str]) -> list[AlongTheWay]:
    """Compare two arms after each fraction of the steps at which checkpoints were fine-tuned."""
    return [
        AlongTheWay(
            fraction,
            find_effect(better.at(fraction), than.at(fraction), tasks),
            find_effect(better.at(fraction), than.at(), tasks),
        )
        for fraction in better.fractions
    ]


class ArmScores(NamedTuple):
    """The scores of an arm's finished models, as fractions.

    n       its pre-training seeds
    scores  "mean" (over the tested tasks), a task, or "blimp" -> interval over the seeds that have this score, or None
    """

    arm: str
    n: int
    scores: dict[str, Interval | None]


def scores_of_arms(arms: Sequence[Arm], tasks: Collection[str]) -> list[ArmScores]:
    """The scores of all arms, on every task that any of them has.

    tasks  the tasks whose mean is tested
    """
    having = {task for arm in arms for model in arm.at().models for task in tasks_of(model)}
    alike = scored_alike(model for arm in arms for model in arm.on_blimp().models)[0]
    paradigms = common_paradigms(alike) if alike else []
    found = []
    for arm in arms:
        models, scored = arm.at().models, [model for model in arm.on_blimp().models if model in alike]
        values: dict[str, list[float]] = {}
        if tasks:
            values["mean"] = [mean_score(model, tasks) for model in models if tasks_of(model) >= set(tasks)]
        for task in METRICS:
            if task in having:
                values[task] = [score_of_task(model, task) for model in models if task in tasks_of(model)]
        if paradigms:
            values["blimp"] = [blimp_average(model, paradigms) for model in scored]
        known = {name: interval(of_name) if of_name else None for name, of_name in values.items()}
        found.append(ArmScores(arm.name, len(models or scored), known))
    return found
