"""How much better one arm is than another, paired over pre-training seeds, and how sure that is.

A fine-tuned score varies with the seed of the fine-tuning, and more with that of the pre-training: a claim about an
objective is one about pre-trainings to come, so the pre-training is the observation. Per seed s and task t,

    d_st = mean over metrics and fine-tuning seeds of (x_better - x_than),    d_s = mean over tasks of d_st

and the mean of d_s has Student's interval with n - 1 degrees of freedom and the p value of his two-sided test. Beside
it stands a bootstrap over tasks x seeds (both are drawn again, Owen 2007), whose question is wider: other tasks as
well. The signed-rank test of the MLSM paper over up to 70 scores is given too, on scores averaged over the
pre-training seeds; it counts scores that are correlated, as fine-tunings of one pre-training are.

Left out: words (conclusion.py), the matrices of single models (../significance.py).

Shapes: S pairs of pre-trainings, T tasks, R resamples.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, stdev
from typing import Any

import numpy as np

from mlsm.evaluation.comparison.models import blimp_average, common_paradigms, match_trainings, scored_alike
from mlsm.evaluation.comparison.report.arms import Arm, Contestant, Found, Seed
from mlsm.evaluation.comparison.significance import count, differences, holm, wilcoxon
from mlsm.evaluation.records import METRICS

LEVEL = 0.05  # of tests; intervals hold 95 %
POWER = 0.8
RESAMPLES = 10_000
ERRORS = 2  # standard errors by which an arm that has learned a task is above the floor


@dataclass(frozen=True)
class Interval:
    """A mean and what its observations say of it.

    low, high   95 % interval (Student), p of the two-sided test that the mean is 0, and detectable, the smallest true
                mean that as many observations of this spread find with a power of 80 %: None with fewer than two
                observations, or where all are equal, since nothing then shows how they vary
    """

    n: int
    mean: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    detectable: float | None = None


def interval(values: Sequence[float]) -> Interval:
    """Student's interval of the mean of some values, one at least; rounded to 9 decimals, as scores are elsewhere."""
    from scipy import stats

    values = [round(value, 9) for value in values]
    n, mean = len(values), fmean(values)
    if len(set(values)) < 2:
        return Interval(n, mean)
    error = stdev(values) / n**0.5
    reach = float(stats.t.ppf(1 - LEVEL / 2, n - 1)) * error
    p = float(2 * stats.t.sf(abs(mean) / error, n - 1))
    return Interval(n, mean, mean - reach, mean + reach, p, smallest_detectable(error, n))


def smallest_detectable(error: float, n: int) -> float:
    """The true mean difference at which the two-sided t test of n pairs rejects 0 with a power of 80 %.

    error  standard error of the mean difference
    """
    from scipy import optimize, stats

    critical = stats.t.ppf(1 - LEVEL / 2, n - 1)

    def missing_power(shift: float) -> float:
        return float(stats.nct.sf(critical, n - 1, shift)) - POWER  # the other tail holds less than 0.00001 here

    return error * float(optimize.brentq(missing_power, 0, 3 * critical))


def bootstrap(differences_ST: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """95 % percentile interval of the mean of a table whose rows and columns are drawn again, each with replacement.

    The draws are those of a fixed seed. None with fewer than two rows.
    """
    d_ST = np.asarray(differences_ST, np.float64)
    seeds, tasks = d_ST.shape
    if seeds < 2:
        return None
    generator = np.random.default_rng(0)
    drawn_RS = generator.multinomial(seeds, np.full(seeds, 1 / seeds), RESAMPLES)  # how often each row
    drawn_RT = generator.multinomial(tasks, np.full(tasks, 1 / tasks), RESAMPLES)
    means_R = ((drawn_RS @ d_ST) * drawn_RT).sum(axis=1) / (seeds * tasks)
    low, high = np.quantile(means_R, (LEVEL / 2, 1 - LEVEL / 2))
    return float(low), float(high)


@dataclass(frozen=True)
class Effect:
    """What the records say of "better is better than than".

    tasks           whose mean is compared
    seeds           of the pairs of pre-trainings
    differences_ST  of their scores
    scores          of the paper's test: tasks, n, wins, losses, ties, p (one-sided), two_sided; None without pairs.
                    Its tasks are all that every pair has, so there can be more of them than of `tasks`
    lacks           why there is no pair, a clause; empty where there is one
    failed          (how many of the fine-tunings that are compared diverged or collapsed, of how many); they count
    incomplete      seeds that both have but which lack tasks, and are left out
    unplanned       seeds that both have and nobody planned, left out as well: more seeds until it fits prove nothing
    """

    better: str
    than: str
    tasks: tuple[str, ...] = ()
    seeds: tuple[Seed, ...] = ()
    differences_ST: tuple[tuple[float, ...], ...] = ()
    scores: dict[str, Any] | None = None
    lacks: str = ""
    failed: tuple[int, int] = (0, 0)
    incomplete: tuple[Seed, ...] = ()
    unplanned: tuple[Seed, ...] = ()

    @cached_property
    def mean(self) -> Interval:
        """Of the mean over tasks. There must be a pair."""
        return interval([fmean(row) for row in self.differences_ST])

    @cached_property
    def resampled(self) -> tuple[float, float] | None:
        """The bootstrap's interval over tasks x seeds."""
        return bootstrap(self.differences_ST)

    def of_task(self, task: str) -> Interval:
        """Of one of the tasks."""
        return interval([row[self.tasks.index(task)] for row in self.differences_ST])


def examine(
    found: Found, hypothesis: tuple[str, str], planned_tasks: Collection[str] = (), planned_seeds: Collection[int] = ()
) -> Effect:
    """What the records say of a hypothesis (better, than); other arguments as of `find_effect`."""
    better, than = (found.contestant(name) for name in hypothesis)
    named = zip(hypothesis, (better, than), strict=True)
    absent = [name for name, contestant in named if contestant is None or not contestant.models]
    if better is None or than is None or absent:
        return Effect(*hypothesis, lacks=f"there are no records of fine-tunings of {' and of '.join(absent)}")
    return find_effect(better, than, planned_tasks, planned_seeds)


def find_effect(
    better: Contestant, than: Contestant, planned_tasks: Collection[str] = (), planned_seeds: Collection[int] = ()
) -> Effect:
    """Pair two contestants by pre-training seed.

    planned_tasks  those whose mean is tested: a seed that lacks one is left out. Empty: the tasks that all pairs have
    planned_seeds  those that are tested; empty: all
    """
    found, unplanned = {}, []
    for seed, other_seed in _pairs(better, than):
        if planned_seeds and seed not in planned_seeds:
            unplanned.append(seed)
            continue
        model, other = better.models[seed], than.models[other_seed]
        matched, _ = match_trainings(model, other)
        found[seed] = (model, other, [pair for pair in matched if not planned_tasks or pair[0] in planned_tasks])
    if not found:
        which = "planned " if unplanned else ""
        return Effect(better.name, than.name, lacks=f"they have no {which}pre-training seed in common")
    tasks_of = {seed: {task for task, _ in matched} for seed, (*_, matched) in found.items()}
    tasks = set(planned_tasks) or set.intersection(*tasks_of.values())
    whole = {seed: pair for seed, pair in found.items() if tasks and tasks <= tasks_of[seed]}
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
        tuple(_of_task(model, other, matched, task) for task in named) for model, other, matched in whole.values()
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


def _pairs(better, than):
    """(seed, seed of the other) of what is compared: equal ones, or, of arms of one model each, these two."""
    common = [(seed, seed) for seed in better.models if seed in than.models and seed is not None]
    is_single = len(better.models) == len(than.models) == 1
    return common or ([(*better.models, *than.models)] if is_single else [])


def _of_task(model, other, matched, task):
    (difference,) = differences(model, other, [pair for pair in matched if pair[0] == task], "tasks")
    return difference


def _test_scores(pairs):
    """Wilcoxon's test over (task, metric, fine-tuning seed), each score the mean over the pre-training seeds."""
    matched = [match_trainings(model, other)[0] for model, other in pairs]
    common = sorted(set.intersection(*map(set, matched)))
    by_pair = [differences(model, other, common, "scores") for model, other in pairs]
    d = [fmean(of_score) for of_score in zip(*by_pair, strict=True)]
    wins, losses, ties = count(d)
    tasks = {task for task, _ in common}
    found: dict[str, Any] = {"tasks": tuple(task for task in METRICS if task in tasks)}
    found |= {"n": len(d), "wins": wins, "losses": losses, "ties": ties}
    return found | {"p": wilcoxon(d), "two_sided": wilcoxon(d, "two-sided")}


def adjust(effects: Sequence[Effect]) -> list[float | None]:
    """Holm's p of hypotheses that are tested together; those that cannot be tested yet count among them."""
    p_values = [None if effect.lacks else effect.mean.p for effect in effects]
    adjusted = holm([1.0 if p is None else p for p in p_values])
    return [None if p is None else of_all for p, of_all in zip(p_values, adjusted, strict=True)]


def blimp_effect(better: Arm, than: Arm) -> Interval | None:
    """The difference in BLiMP accuracy of two arms, paired over seeds; None where no pair was scored alike."""
    mine, theirs = better.scored_on_blimp(), than.scored_on_blimp()
    found = []
    for seed in mine.keys() & theirs.keys() - {None}:
        pair = [mine[seed], theirs[seed]]
        if len(scored_alike(pair)[0]) == 2 and (paradigms := common_paradigms(pair)):
            found.append(blimp_average(pair[0], paradigms) - blimp_average(pair[1], paradigms))
    return interval(found) if found else None
