"""Statistics of paired differences: p values, intervals, and the smallest difference that could be detected.

    d = round(x_i - x_j, 9),    scipy.stats.wilcoxon(d, zero_method="wilcox", correction=False,
                                                     alternative="greater", method="asymptotic")

is the test of the MLSM paper (section 4.2; figures 3, 5, 8). Differences are rounded, so that 0.3 and 0.1 + 0.2 are a
tie. For independent observations, the mean difference gets Student's interval. If two factors are sampled, such as
tasks and pre-training seeds, a bootstrap resamples both (Owen 2007).

Not handled here: what is compared with what (effects.py), words (conclusion.py).

Shapes: S rows of a table (pre-training seeds, paradigms), T columns (tasks), R resamples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, stdev

import numpy as np

SIGNIFICANT = 0.01  # the paper's level
LEVEL = 0.05  # level of our own tests; intervals are at 95 %
POWER = 0.8
RESAMPLES = 10_000


def wilcoxon(differences: Sequence[float], alternative: str = "greater") -> float | None:
    """p value of the signed-rank test on paired differences, None if all of them are zero or there are none.

    differences  x_i - x_j, of scores in [-1, 1]; rounded to 9 decimals here
    alternative  "greater": x_i is larger; or "two-sided"
    """
    from scipy import stats

    rounded = _round(differences)
    if not any(rounded):
        return None
    test = stats.wilcoxon(rounded, zero_method="wilcox", correction=False, alternative=alternative, method="asymptotic")
    return float(test.pvalue)


def count_wins(differences: Sequence[float]) -> tuple[int, int, int]:
    """(wins, losses, ties) of paired differences."""
    rounded = _round(differences)
    return sum(d > 0 for d in rounded), sum(d < 0 for d in rounded), sum(d == 0 for d in rounded)


def _round(differences):
    return [round(d, 9) for d in differences]


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down adjustment (Scandinavian Journal of Statistics 6, 1979) of p values, in their order.

    The i-th smallest of m is multiplied by m - i + 1, is at least its predecessor and at most 1. None stays None and is
    not counted in m.
    """
    adjusted, largest = list(p_values), 0.0
    tested = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    for rank, (p, place) in enumerate(tested):
        largest = max(largest, min(1.0, p * (len(tested) - rank)))
        adjusted[place] = largest
    return adjusted


@dataclass(frozen=True)
class Interval:
    """A mean and its uncertainty.

    low, high   95 % interval (Student), p of the two-sided test that the mean is 0, and detectable, the smallest true
                mean that as many observations with this variance detect with a power of 80 %. None with fewer than two
                observations, or if all are equal, since the variance is then unknown
    """

    n: int
    mean: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    detectable: float | None = None


def interval(values: Sequence[float]) -> Interval:
    """Student's interval of the mean of one or more values; rounded to 9 decimals, as scores are elsewhere."""
    from scipy import stats

    values = _round(values)
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
        return float(stats.nct.sf(critical, n - 1, shift)) - POWER  # the other tail is below 0.00001 here

    return error * float(optimize.brentq(missing_power, 0, 3 * critical))


def bootstrap(differences_ST: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """95 % percentile interval of the mean of a table whose rows and columns are resampled, each with replacement.

    In a table with one column only rows are resampled (Efron 1979). The seed is fixed, so equal tables have equal
    intervals. None with fewer than two rows.
    """
    d_ST = np.asarray(differences_ST, np.float64)
    rows, columns = d_ST.shape
    if rows < 2:
        return None
    drawn_RS, drawn_RT = _resample(rows, columns)
    means_R = ((drawn_RS @ d_ST) * drawn_RT).sum(axis=1) / (rows * columns)
    low, high = np.quantile(means_R, (LEVEL / 2, 1 - LEVEL / 2))
    return float(low), float(high)


@lru_cache(maxsize=2)  # many pairs of models have tables of one shape, and drawing takes most of the time
def _resample(rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """How often each resample draws each row, (R, S), and each column, (R, T)."""
    generator = np.random.default_rng(0)
    drawn_RS = generator.multinomial(rows, np.full(rows, 1 / rows), RESAMPLES)
    return drawn_RS, generator.multinomial(columns, np.full(columns, 1 / columns), RESAMPLES)
