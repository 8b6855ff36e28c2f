"""How well a token's group, such as its position in the window or its word type, predicts its distribution.

    halves = [mass_by_group(group_N, indptr, columns_E, weights_E, groups, columns) for each half of the windows]
    gain_K, pseudo_count = cross_fitted_gain(*halves)
    marginals_GK = shrunk_marginals(first + second, pseudo_count)

The expected distribution in a group is the mean over its tokens, shrunk towards the mean over all tokens:

    q(j | g) = (sum of the weights of j in g + a q(j)) / (tokens of g + a)

which is the posterior mean under a Dirichlet prior around q, worth `a` tokens (the pseudo-count; Jelinek 1997, chapter
15 of Manning and Schütze). Of a few values of `a`, the one is used with which each half of the data best predicts the
other. So rare groups do not overfit, and a grouping without information has a gain of zero.

The gain of a grouping is how much better q(j | g) predicts than q(j), in nats per token: sum over tokens and entries of
weight log(q(j | g) / q(j)). Estimated and scored on the same tokens it is the empirical mutual information, which is
never negative and grows with the number of groups; cross-fitted, it is estimated on one half and scored on the other.

Not handled here: reading tokens (shards/), which groups there are.

Shapes: N tokens, E entries of their sparse rows, G groups, K columns.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import sparse

PSEUDO_COUNTS = tuple(10.0**power for power in np.arange(0, 6.5, 0.5))
NO_GAIN = 1e12  # with this pseudo-count every group has the distribution of all tokens


class GroupMass(NamedTuple):
    """Summed distributions by group."""

    mass_GK: sparse.csr_array
    """float64, sums of the weights"""
    tokens_G: np.ndarray
    """float64, number of tokens whose row is not empty"""

    def __add__(self, other):
        return GroupMass((self.mass_GK + other.mass_GK).tocsr(), self.tokens_G + other.tokens_G)

    @property
    def mean_K(self) -> np.ndarray:
        """The mean over all tokens and one added uniform token, so that no column is zero; float64."""
        columns = self.mass_GK.shape[1]
        return (np.asarray(self.mass_GK.sum(0)).ravel() + 1 / columns) / (self.tokens_G.sum() + 1)


def mass_by_group(
    group_N: np.ndarray,
    indptr: np.ndarray,
    columns_E: np.ndarray,
    weights_E: np.ndarray,
    groups: int,
    columns: int,
) -> GroupMass:
    """Sum the tokens' distributions by group.

    group_N  int, the group of each token, 0 ... groups - 1;  the rows, in CSR form, sum to one or are empty
    """
    nnz_N = np.diff(indptr)
    rows_E = np.repeat(group_N, nnz_N)
    entries = (np.asarray(weights_E, np.float64), (rows_E, np.asarray(columns_E, np.int64)))
    mass_GK = sparse.csr_array(entries, shape=(groups, columns))  # SciPy adds up the entries of one place
    return GroupMass(mass_GK, np.bincount(group_N[nnz_N > 0], minlength=groups).astype(np.float64))


def gain(known: GroupMass, scored: GroupMass, pseudo_count: float) -> np.ndarray:
    """Nats per token by which the groups' marginals, estimated on `known`, predict `scored` better than one for all.

    known, scored  GroupMass; the same one for the gain in sample
    Returns        float64 (K), the share of every column
    """
    mean_K, a = known.mean_K, pseudo_count
    prior_G = np.log(a / (known.tokens_G + a))
    ratios = known.mass_GK.copy()
    ratios.data = np.log1p(ratios.data / (a * mean_K[ratios.indices]))
    gain_K = prior_G @ scored.mass_GK + np.asarray(scored.mass_GK.multiply(ratios).sum(0)).ravel()
    return gain_K / max(scored.tokens_G.sum(), 1)


def cross_fitted_gain(
    first: GroupMass, second: GroupMass, *, pseudo_counts: Sequence[float] = (*PSEUDO_COUNTS, NO_GAIN)
) -> tuple[np.ndarray, float]:
    """The gain of a grouping with the best pseudo-count: the mean of predicting each half from the other.

    Returns  float64 (K), nats per token by column; the pseudo-count
    """
    found = [(gain(first, second, a) + gain(second, first, a)) / 2 for a in pseudo_counts]
    best = max(range(len(found)), key=lambda number: found[number].sum())
    return found[best], pseudo_counts[best]


def shrunk_marginals(mass: GroupMass, pseudo_count: float) -> np.ndarray:
    """q(j | g) of every group: dense float64 (G, K), rows sum to one. A group without tokens gets the mean of all
    tokens.
    """
    mean_K = mass.mean_K
    numerator_GK = mass.mass_GK.toarray() + pseudo_count * mean_K
    return numerator_GK / numerator_GK.sum(1, keepdims=True)
