"""Pearson correlations between the LSPs of two stores over the same tokens, from sparse rows.

    first, second = Activations(sample_of_one), Activations(sample_of_the_other)
    found = correlate_lsps(first, second, least=0.3)
    found.first_P, found.second_P, found.r_P        # all pairs with r >= least

The correlated values are the stored weights: an LSP's share of its token's mass, 0 if the token does not have it. With
sums over the N tokens,

    r_ij = (sum_t x_ti y_tj / N - m_i n_j) / (s_i u_j)

with means m, n and standard deviations s, u. Only products of entries of the same token contribute to the first sum, so
no array of size N x K is needed. One block of LSPs is processed at a time, so no array of size K x K is needed either.
Besides the samples, this takes less than 100 MB at K = 12,288. Sums are in float64. An LSP on fewer than LEAST_TOKENS
tokens is not correlated, because the result would depend on a few tokens.

Shapes: N tokens, E entries, K LSPs of the first or J of the second store, B LSPs of a block, P pairs, n chosen LSPs.
"""

from collections.abc import Callable
from copy import copy
from typing import NamedTuple

import numpy as np

from mlsm.common.progress import silent
from mlsm.evaluation.inspection.lsps.sample import Sample, by_lsp
from pipeline.solvers.parallel import kernel

LEAST_TOKENS = 10
BLOCK = 256  # LSPs


class Activations:
    """The weights of a store's LSPs on sampled tokens, with their moments.

    tokens_E  int32, sampled tokens of the entries sorted by LSP
    is_rare   bool (K), whether the LSP is on fewer than LEAST_TOKENS tokens
    mean_K    float64, over all tokens;  deviation_K  float64, standard deviation, 1 for rare ones
    """

    def __init__(self, sample: Sample):
        self.sample, self.entries = sample, by_lsp(sample)
        self.tokens_E = self.entries.tokens_E
        lsp_E = np.repeat(np.arange(sample.k), self.entries.counts)
        weights_E = self.entries.weights_E.astype(np.float64)
        self.is_rare = self.entries.counts < LEAST_TOKENS
        self.mean_K = np.bincount(lsp_E, weights_E, sample.k) / len(sample)
        variance_K = np.bincount(lsp_E, weights_E**2, sample.k) / len(sample) - self.mean_K**2
        self.is_rare |= variance_K <= 1e-12 * self.mean_K**2  # the same on every token
        self.deviation_K = np.sqrt(np.where(self.is_rare, 1.0, variance_K))

    def rotate(self, shift: int) -> "Activations":
        """The same weights, each moved on by `shift` sampled tokens: a control in which tokens do not correspond."""
        rotated = copy(self)
        rotated.tokens_E = ((self.tokens_E + np.int64(shift)) % len(self.sample)).astype(np.int32)
        return rotated

    def covariances(self, lsps: np.ndarray) -> np.ndarray:
        """Covariances between some LSPs, float64 (n, n)."""
        from scipy.sparse import csc_array

        chosen = [slice(*self.entries.starts[lsp : lsp + 2]) for lsp in lsps]
        starts = np.cumsum([0, *(part.stop - part.start for part in chosen)])
        weights = np.concatenate([self.entries.weights_E[part] for part in chosen]).astype(np.float64)
        tokens = np.concatenate([self.tokens_E[part] for part in chosen])
        columns = csc_array((weights, tokens, starts), (len(self.sample), len(lsps)))
        mean_n = self.mean_K[lsps]
        return (columns.T @ columns).toarray() / len(self.sample) - np.outer(mean_n, mean_n)


class LspCorrelations(NamedTuple):
    """Pairs of LSPs that correlate, and the best partner of each LSP, however low its correlation.

    first_P, second_P  LSPs of the first and of the second store;  r_P  float64, correlations, at least `least`
    best_K, best_r_K   for each LSP of the first store, the most correlated LSP of the second (-1 for a rare LSP) and
                       the correlation;  best_J, best_r_J  the same for the second store
    """

    first_P: np.ndarray
    second_P: np.ndarray
    r_P: np.ndarray
    best_K: np.ndarray
    best_r_K: np.ndarray
    best_J: np.ndarray
    best_r_J: np.ndarray

    def reversed(self) -> "LspCorrelations":
        """The same with first and second store exchanged."""
        return LspCorrelations(
            self.second_P, self.first_P, self.r_P, self.best_J, self.best_r_J, self.best_K, self.best_r_K
        )


def correlate_lsps(
    first: Activations, second: Activations, least: float, progress: Callable[..., None] = silent
) -> LspCorrelations:
    """The correlations of two stores' LSPs. Their samples must be of the same tokens."""
    k, j, total = first.sample.k, second.sample.k, len(first.sample)
    pairs: list[tuple[np.ndarray, ...]] = []
    best_K, best_r_K = np.full(k, -1), np.full(k, -np.inf)
    best_J, best_r_J = np.full(j, -1), np.full(j, -np.inf)
    rows = second.sample
    for start in range(0, k, BLOCK):
        block = slice(start, min(start + BLOCK, k))
        r_BJ = np.zeros((block.stop - start, j))
        entries = first.entries
        _add_products(
            entries.starts, first.tokens_E, entries.weights_E, rows.indptr, rows.lsps_E, rows.weights_E, start, r_BJ
        )
        r_BJ /= total
        r_BJ -= np.outer(first.mean_K[block], second.mean_K)
        r_BJ /= first.deviation_K[block, None] * second.deviation_K
        r_BJ[first.is_rare[block]] = -np.inf
        r_BJ[:, second.is_rare] = -np.inf
        some, others = np.nonzero(r_BJ >= least)
        pairs.append((start + some, others, r_BJ[some, others]))
        best_K[block], best_r_K[block] = r_BJ.argmax(1), r_BJ.max(1)
        top_J = r_BJ.argmax(0)
        better = np.flatnonzero(r_BJ[top_J, np.arange(j)] > best_r_J)
        best_J[better], best_r_J[better] = start + top_J[better], r_BJ[top_J[better], better]
        progress("correlations", block.stop, k, unit="LSPs")
    best_K[np.isneginf(best_r_K)] = -1
    first_P, second_P, r_P = (np.concatenate(column) for column in zip(*pairs, strict=True))
    return LspCorrelations(first_P, second_P, r_P, best_K, best_r_K, best_J, best_r_J)


@kernel
def _add_products(starts, tokens_E, weights_E, indptr, lsps_E, values_E, first, sums_BJ):
    for row in range(len(sums_BJ)):
        for entry in range(starts[first + row], starts[first + row + 1]):
            token, weight = tokens_E[entry], np.float64(weights_E[entry])
            for other in range(indptr[token], indptr[token + 1]):
                sums_BJ[row, lsps_E[other]] += weight * values_E[other]
