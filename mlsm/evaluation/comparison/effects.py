"""The comparisons: single models pair by pair, models on BLiMP, and arms over their pre-training seeds.

Single models. Is one better than another, by the MLSM paper's test over their fine-tuning scores? The headline is the
paper's: one-sided, "model i is better than model j", over all scores. Scores are not independent, because four tasks
give two scores per training run. So the tests over training runs and over tasks, the two-sided alternative, and Holm's
adjustment for the number of comparisons are shown in addition to the headline.

BLiMP. The unit is the paradigm: two models are compared on the accuracies of those that both were scored on, by the
same test and by a bootstrap interval of the mean difference over paradigms. The thousand sentence pairs of a paradigm
are variations of a few templates, not independent observations. Paradigms of one phenomenon are not quite independent
either.

Arms. A fine-tuned score varies with the seed of fine-tuning, and more with the seed of pre-training. A claim about an
objective is a claim about future pre-training runs, so a pre-training run is one observation. Per seed s and task t,

    d_st = mean over metrics and fine-tuning seeds of (x_better - x_than),    d_s = mean over tasks of d_st

and the mean of d_s has Student's interval with n - 1 degrees of freedom and the p value of the two-sided t test. A
bootstrap over tasks x seeds is shown next to it; it asks a wider question, about other tasks as well. The paper's
signed-rank test over up to 70 scores is also reported, on scores averaged over the pre-training seeds. It treats
scores as independent, but those of one pre-training run are correlated.

Not handled here: the statistics themselves (significance.py), words (conclusion.py).

Shapes: M models; matrices are (M, M) lists of rows, with None on the diagonal and where nothing can be said. S pairs of
pre-trainings, T tasks.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, permutations
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

ERRORS = 2  # standard errors by which an arm that has learned a task is above the floor
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
    """Row against column, (M, M): counts, p one-sided, and two-sided; each p also adjusted by Holm over all ordered
    pairs, the two-sided ones over all unordered pairs."""

    n: Matrix
    wins: Matrix
    losses: Matrix
    ties: Matrix
    p: Matrix
    holm: Matrix
    two_sided: Matrix
    two_sided_holm: Matrix


class LeftOut(NamedTuple):
    """Trainings, (task, seed), that two models have and that are no pairs, and why."""

    model: str
    against: str
    why: str
    trainings: list[Training]


def score_differences(model: Model, other: Model, pairs: Sequence[Training], level: str) -> list[float]:
    """x_model - x_other of every observation at a level.

    pairs  (task, seed) that are pairs, from `match_trainings`
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
    """Every model against every other, by the name of the level; and what is left out of it."""
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
    """How often a model wins a score against another of the same step.

    step  None: unknown, taken as finished
    task  one, or "all"
    rate  share won of `n` scores, of which a tie is half
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
    """Task by task and over all tasks, of every ordered pair of models of one step that have pairs of scores."""
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

    difference  of the mean accuracies, a fraction
    low, high   95 % bootstrap interval of it over paradigms; None with one paradigm
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

    tasks         all that every pair has, so there can be more of them than of an effect's `tasks`
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

    tasks           T, whose mean is compared
    seeds           S, of the pairs of pre-trainings
    differences_ST  of their scores, fractions
    scores          the paper's test; None without pairs
    lacks           why there is no pair, a clause; empty if there is one
    failed          (how many of the fine-tunings that are compared diverged or collapsed, of how many); they count
    incomplete      seeds that both have but which lack tasks, and are left out
    unplanned       seeds that both have but that were not planned, excluded as well: adding seeds until the result fits
                    proves nothing
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

    @cached_property
    def mean(self) -> Interval:
        """Mean and interval of the differences in the mean over tasks. There must be a pair."""
        return interval([fmean(row) for row in self.differences_ST])

    @cached_property
    def resampled(self) -> tuple[float, float] | None:
        """The bootstrap's interval over tasks x seeds."""
        return bootstrap(self.differences_ST)

    def of_task(self, task: str) -> Interval:
        """Mean and interval of the differences in one of the tasks."""
        return interval([row[self.tasks.index(task)] for row in self.differences_ST])


def judge_hypothesis(
    found: Arms, hypothesis: tuple[str, str], planned_tasks: Collection[str] = (), planned_seeds: Collection[int] = ()
) -> Effect:
    """The effect for a hypothesis (better, than); for the other arguments see `find_effect`."""
    better, than = (found.at(name) for name in hypothesis)
    named = zip(hypothesis, (better, than), strict=True)
    absent = [name for name, arm in named if arm is None or not arm.models]
    if better is None or than is None or absent:
        return Effect(*hypothesis, lacks=f"there are no records of fine-tunings of {' and of '.join(absent)}")
    return find_effect(better, than, planned_tasks, planned_seeds)


def find_effect(
    better: Arm, than: Arm, planned_tasks: Collection[str] = (), planned_seeds: Collection[int] = ()
) -> Effect:
    """Pair two arms, of one model per seed each, by pre-training seed.

    planned_tasks  those whose mean is tested: a seed that lacks one is left out. Empty: the tasks that all pairs have
    planned_seeds  those that are tested; empty: all
    """
    found, unplanned = {}, []
    mine, theirs = better.by_seed, than.by_seed
    common: list[tuple[Seed, Seed]] = [(seed, seed) for seed in mine if seed in theirs and seed is not None]
    if not common and len(mine) == len(theirs) == 1:  # arms of one model each are a pair whatever their seeds
        common = list(zip(mine, theirs, strict=True))
    for seed, other_seed in common:
        if planned_seeds and seed not in planned_seeds:
            unplanned.append(seed)
            continue
        model, other = mine[seed], theirs[other_seed]
        matched, _ = match_trainings(model, other)
        found[seed] = (model, other, [pair for pair in matched if not planned_tasks or pair[0] in planned_tasks])
    if not found:
        which = "planned " if unplanned else ""
        return Effect(better.name, than.name, lacks=f"they have no {which}pre-training seed in common")
    matched_tasks = {seed: {task for task, _ in matched} for seed, (*_, matched) in found.items()}
    tasks = set(planned_tasks) or set.intersection(*matched_tasks.values())
    whole = {seed: pair for seed, pair in found.items() if tasks and tasks <= matched_tasks[seed]}
    effect = Effect(
        better.name,
        than.name,
        incomplete=tuple(seed for seed in found if seed not in whole),
        unplanned=tuple(unplanned),
    )
    if not whole:
        which = f"of all the planned tasks ({', '.join(planned_tasks)})" if planned_tasks else "of a task"
        return replace(effect, lacks=f"no pair of their pre-trainings has fine-tunings {which} that agree")
    named = tuple(task for task in METRICS if task in tasks)
    rows = tuple(
        tuple(
            score_differences(model, other, [pair for pair in matched if pair[0] == task], "tasks")[0] for task in named
        )
        for model, other, matched in whole.values()
    )
    scores = _test_scores([(model, other) for model, other, _ in whole.values()])
    tunings = [
        pair in of_one
        for model, other, matched in whole.values()
        for of_one in (model.failed, other.failed)
        for pair in matched
        if pair[0] in tasks
    ]
    failed = sum(tunings), len(tunings)
    return replace(effect, tasks=named, seeds=tuple(whole), differences_ST=rows, scores=scores, failed=failed)


def learned_tasks(effect: Effect) -> tuple[str, ...]:
    """The tasks in which an arm is above the floor by more than two standard errors of their paired difference.

    effect  of the arm against the floor, with at least two pairs: one does not show how scores vary
    """
    columns = zip(effect.tasks, zip(*effect.differences_ST, strict=True), strict=True)
    return tuple(task for task, d_S in columns if fmean(d_S) > ERRORS * stdev(d_S) / len(d_S) ** 0.5)


def _test_scores(pairs: Iterable[tuple[Model, Model]]) -> ScoreTest:
    matched = [(model, other, match_trainings(model, other)[0]) for model, other in pairs]
    common = sorted(set.intersection(*(set(trainings) for *_, trainings in matched)))
    by_pair = [score_differences(model, other, common, "scores") for model, other, _ in matched]
    d = [fmean(of_score) for of_score in zip(*by_pair, strict=True)]
    tasks = {task for task, _ in common}
    named = tuple(task for task in METRICS if task in tasks)
    return ScoreTest(named, len(d), *count_wins(d), wilcoxon(d), wilcoxon(d, "two-sided"))


def adjust(effects: Sequence[Effect]) -> list[float | None]:
    """Holm's p of hypotheses that are tested together; those that cannot be tested yet count among them."""
    p_values = [None if effect.lacks else effect.mean.p for effect in effects]
    adjusted = holm([1.0 if p is None else p for p in p_values])
    return [None if p is None else of_all for p, of_all in zip(p_values, adjusted, strict=True)]


def blimp_effect(better: Arm, than: Arm) -> Interval | None:
    """The difference in BLiMP accuracy of two arms, paired over seeds; None if no pair was scored alike."""
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
    """Every arm with fine-tuned models against every other, both ways, where they have pairs."""
    found = []
    for one, other in combinations([arm for arm in arms if arm.at().models], 2):
        for better, than in ((one, other), (other, one)):
            effect = find_effect(better.at(), than.at(), tasks)
            if not effect.lacks:
                found.append(Contest(effect, blimp_effect(better, than)))
    return found


class AlongTheWay(NamedTuple):
    """Models of an arm after a share of its steps against another arm's, after the same share and finished."""

    fraction: float
    same: Effect
    finished: Effect


def compare_along_the_way(better: Arm, than: Arm, tasks: Collection[str]) -> list[AlongTheWay]:
    """The effect of every progress of an arm."""
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
    scores  "mean" (of the tasks that are tested), a task, or "blimp" -> interval over the seeds that have it, or None
    """

    arm: str
    n: int
    scores: dict[str, Interval | None]


def scores_of_arms(arms: Sequence[Arm], tasks: Collection[str]) -> list[ArmScores]:
    """The scores of all arms on what any of them has.

    tasks  whose mean is tested
    """
    having = {task for arm in arms for model in arm.at().models for task in tasks_of(model)}
    blimps = [model for arm in arms for model in arm.on_blimp().models]
    paradigms = common_paradigms(blimps) if blimps else []
    found = []
    for arm in arms:
        models, scored = arm.at().models, arm.on_blimp().models if paradigms else ()
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
