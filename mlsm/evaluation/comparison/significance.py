"""Is one model better than another? Wilcoxon's signed-rank test over paired fine-tuning scores.

    d = round(x_i - x_j, 9),    scipy.stats.wilcoxon(d, zero_method="wilcox", correction=False,
                                                     alternative="greater", method="asymptotic")

the test of the MLSM paper (section 4.2; figures 3, 5, 8). Rounded, since 0.3 and 0.1 + 0.2 are a tie. The headline is
one-sided, "model i is better than model j", over all scores, as the paper has it. Scores are not independent, as four
tasks give two of one training: so trainings and tasks are tested beside them, and the two-sided alternative and Holm's
adjustment for the number of comparisons stand beside the headline, not in its place.

Of BLiMP the unit is the paradigm: two models are compared on the accuracies of those that both were scored on, by the
same test and by a bootstrap interval of the mean difference over paradigms. The thousand sentence pairs of a paradigm
are variations of a few templates and no independent observations; nor, quite, are paradigms of one phenomenon.

Left out: effect sizes and other tests.

Shapes: M models; matrices are (M, M) lists of rows, with None on the diagonal and where nothing can be said.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from mlsm.evaluation.comparison.models import (
    SEEDS,
    SUITE,
    Model,
    Training,
    common_paradigms,
    match_trainings,
    scored_alike,
)
from mlsm.evaluation.records import METRICS

SIGNIFICANT = 0.01  # the paper's level
Matrix = list[list]  # rows of numbers, None where nothing can be said


@dataclass(frozen=True)
class Level:
    """What counts as one observation. `full` is their number in the paper."""

    name: str
    meaning: str
    full: int


LEVELS = (
    Level("scores", "all scores (task, metric, seed)", SEEDS * len(SUITE)),
    Level("trainings", "trainings (task, seed): mean over the metrics", SEEDS * len(METRICS)),
    Level("tasks", "tasks: mean over metrics and seeds", len(METRICS)),
)


def wilcoxon(differences: Sequence[float], alternative: str = "greater") -> float | None:
    """p value of the signed-rank test on paired differences, None where all of them are zero or there are none.

    differences  x_i - x_j, of scores in [-1, 1]; rounded to 9 decimals here
    alternative  "greater": x_i is larger; or "two-sided"
    """
    from scipy import stats

    rounded = _rounded(differences)
    if not any(rounded):
        return None
    test = stats.wilcoxon(rounded, zero_method="wilcox", correction=False, alternative=alternative, method="asymptotic")
    return float(test.pvalue)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down adjustment (Scandinavian Journal of Statistics 6, 1979) of p values, in their order.

    The i-th smallest of m is multiplied by m - i + 1, is at least its predecessor and at most 1. None stays None and
    is not counted among the m.
    """
    adjusted, largest = list(p_values), 0.0
    tested = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    for rank, (p, place) in enumerate(tested):
        largest = max(largest, min(1.0, p * (len(tested) - rank)))
        adjusted[place] = largest
    return adjusted


def differences(model: Model, other: Model, pairs: Sequence[Training], level: str) -> list[float]:
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


def count(differences: Sequence[float]) -> tuple[int, int, int]:
    """(wins, losses, ties) of paired differences."""
    rounded = _rounded(differences)
    return sum(d > 0 for d in rounded), sum(d < 0 for d in rounded), sum(d == 0 for d in rounded)


def _rounded(differences):
    return [round(d, 9) for d in differences]


def matrices(models: Sequence[Model]) -> tuple[dict[str, dict[str, Matrix]], list[dict]]:
    """Every model against every other, at every level.

    Returns  ({level: {"n", "wins", "losses", "ties": counts, "p": one-sided, "holm": p adjusted over all ordered pairs,
             "two_sided", "two_sided_holm": adjusted over all unordered pairs}}, matrices that say of row against
             column; left out: [{"model", "against", "why", "trainings": [[task, seed], ...]}])
    """
    pairs, left_out = _all_pairs(models)
    return {level.name: _matrices_at(models, pairs, level.name) for level in LEVELS}, left_out


def _all_pairs(models):
    pairs, left_out = {}, []
    for i, model in enumerate(models):
        for j, other in enumerate(models[:i]):
            pairs[j, i], reasons = match_trainings(other, model)
            for why, trainings in reasons.items():
                found = {"model": other.label, "against": model.label, "why": why, "trainings": trainings}
                left_out.append(found)
    return pairs, left_out


def _matrices_at(models, pairs, level):
    names = ("n", "wins", "losses", "ties", "p", "holm", "two_sided", "two_sided_holm")
    cells = {name: [[None] * len(models) for _ in models] for name in names}
    for (i, j), trainings in pairs.items():
        d = differences(models[i], models[j], trainings, level)
        wins, losses, ties = count(d)
        two_sided = wilcoxon(d, "two-sided")
        for row, column, sign, won, lost in ((i, j, 1, wins, losses), (j, i, -1, losses, wins)):
            p = wilcoxon([sign * x for x in d])
            values = {"n": len(d), "wins": won, "losses": lost, "ties": ties, "p": p, "two_sided": two_sided}
            for name, value in values.items():
                cells[name][row][column] = value
    ordered = [*pairs, *((j, i) for i, j in pairs)]
    _adjust(cells["p"], cells["holm"], ordered)
    _adjust(cells["two_sided"], cells["two_sided_holm"], list(pairs))
    for i, j in pairs:
        cells["two_sided_holm"][j][i] = cells["two_sided_holm"][i][j]
    return cells


def _adjust(source, target, places):
    for (i, j), p in zip(places, holm([source[i][j] for i, j in places]), strict=True):
        target[i][j] = p


def win_rates(models: Sequence[Model]) -> list[dict]:
    """How often one model wins a score against another of the same step, task by task and over all tasks.

    Returns  [{"model", "against", "step", "task": a task or "all", "n", "wins", "losses", "ties", "rate": share won, of
             which a tie is half}] for every ordered pair of models of one step (None: unknown, taken as finished) that
             have pairs
    """
    rates = []
    for model in models:
        for other in models:
            if other is model or model.facts["step"] != other.facts["step"]:
                continue
            pairs, _ = match_trainings(model, other)
            tasks = dict.fromkeys(task for task, _ in pairs)
            groups = {task: [pair for pair in pairs if pair[0] == task] for task in tasks} | {"all": pairs}
            for task, group in groups.items():
                if group:
                    rates.append(_win_rate(model, other, task, group))
    return rates


def _win_rate(model, other, task, pairs):
    wins, losses, ties = count(differences(model, other, pairs, "scores"))
    n = wins + losses + ties
    return {
        "model": model.label,
        "against": other.label,
        "step": model.facts["step"],
        "task": task,
        "n": n,
        "wins": wins,
        "losses": losses,
        "ties": ties,
        "rate": (wins + ties / 2) / n,
    }


def compare_on_blimp(models: Iterable[Model]) -> list[dict]:
    """Every two models with BLiMP records of the same data and settings, on the paradigms that both were scored on.

    Returns  [{"model", "against", "paradigms": how many, "wins", "losses", "ties", "difference": of the mean
             accuracies, "low", "high": 95 % bootstrap interval of it over paradigms (None with one paradigm), "p":
             Wilcoxon's, two-sided (None where nothing differs), "holm": adjusted over all pairs}], the better one first
    """
    scored, _ = scored_alike(models)
    rows = [_compare_on_blimp(model, other) for i, model in enumerate(scored) for other in scored[i + 1 :]]
    for row, adjusted in zip(rows, holm([row["p"] for row in rows]), strict=True):
        row["holm"] = adjusted
    return rows


def _compare_on_blimp(model, other):
    paradigms = common_paradigms([model, other])
    mine, theirs = model.accuracies, other.accuracies
    d = [mine[name] - theirs[name] for name in paradigms]
    if sum(d) < 0:
        model, other, d = other, model, [-x for x in d]
    wins, losses, ties = count(d)
    low, high = bootstrap_interval(d) if len(d) > 1 else (None, None)
    return {
        "model": model.label,
        "against": other.label,
        "paradigms": len(d),
        "wins": wins,
        "losses": losses,
        "ties": ties,
        "difference": fmean(d),
        "low": low,
        "high": high,
        "p": wilcoxon(d, "two-sided"),
    }


def bootstrap_interval(differences: Sequence[float], resamples: int = 10_000) -> tuple[float, float]:
    """95 % percentile interval (Efron 1979) of the mean of differences, which are drawn again with replacement.

    The draws are those of a fixed seed, so equal differences have equal intervals.
    """
    d = np.asarray(differences, np.float64)
    drawn = np.random.default_rng(0).integers(0, len(d), (resamples, len(d)))
    low, high = np.quantile(d[drawn].mean(axis=1), (0.025, 0.975))
    return float(low), float(high)
