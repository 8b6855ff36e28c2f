"""Statistics of single LSPs in a sample: the tokens where one is heaviest, its quantiles, and what it fires with.

Not handled here: the atoms' own neighbours and searches by profile (neighbours.py), words (words.py), text
(contexts.py).

Shapes: N sampled tokens, n tokens that have an LSP, K LSPs.
"""

from functools import cached_property

import numpy as np
from scipy.sparse import csr_array

from mlsm.evaluation.inspection.lsps.sample import SEED, Entries, Sample, by_lsp
from pipeline.solvers.parallel import kernel

TOP_CONTEXTS = 20
QUANTILES = 10
OF_A_QUANTILE = 3
SAME_CONTEXT = 4  # tokens to either side that make two contexts one
COUNTED_TOGETHER = 200_000  # tokens of the sample in which pairs of LSPs are counted
LEAST_SUPPORT = 10  # tokens with both LSPs, below which NPMI is chance
_NO_TOKEN = -1
NEIGHBOURS = 8  # nearest atoms, co-firing LSPs


class SampleView:
    """What the views of a store and of vectors share: a sample by LSP, and how often LSPs fire, alone and together."""

    sample: Sample

    @cached_property
    def entries(self) -> Entries:
        """The sample by LSP."""
        return by_lsp(self.sample)

    @cached_property
    def densities(self) -> np.ndarray:
        """Share of the coded tokens or vectors that have each LSP, float64 (K)."""
        return self.entries.counts / max(1, self.sample.coded)

    @cached_property
    def _together(self) -> "FiringTogether":
        return FiringTogether(self.sample)

    @property
    def counted_together(self) -> int:
        """Coded tokens or vectors in which pairs of LSPs were counted."""
        return self._together.tokens

    def co_firing(self, lsp: int) -> list[dict]:
        """The LSPs that fire together with one: number, NPMI and support, as of `co_firing`."""
        together = self._together
        found = co_firing(together.count(lsp), together.own_K, together.tokens, lsp, NEIGHBOURS)
        return [{"lsp": other, "npmi": npmi, "support": support} for other, npmi, support in found]


def top_tokens(sample: Sample, tokens: np.ndarray, count: int = TOP_CONTEXTS) -> np.ndarray:
    """The tokens on which an LSP is heaviest, one per document, and no two with the same words around them.

    If fewer than `count` documents have it, further tokens come from the same documents, one per window.

    tokens   those that have it, heaviest first
    Returns  token numbers, int64, at most `count`, heaviest first. Words are the same when the token and SAME_CONTEXT
             tokens to either side are: boilerplate is shown once
    """
    found = np.full(count, _NO_TOKEN)
    known = _fill_distinct(tokens, sample.document_N, sample.ids_N, found, 0)
    if known < count:
        _fill_distinct(tokens, sample.window_N, sample.ids_N, found, known)
    return tokens[np.isin(tokens, found)]


@kernel
def _fill_distinct(tokens, group_N, ids_N, found, count):
    """Fill `found`, which has `count` tokens, with the first that share neither group nor context with one in it.

    Returns  how many it has then
    """
    for token in tokens:
        if count == len(found):
            break
        fresh = True
        for other in found[:count]:
            if group_N[other] == group_N[token] or _same_context(ids_N, token, other):
                fresh = False
                break
        if fresh:
            found[count] = token
            count += 1
    return count


def first_of_each(document_n: np.ndarray, window_n: np.ndarray, count: int, evenly: bool) -> np.ndarray:
    """Choose which tokens to show: the first of each document and, up to `count`, further ones, at most one per window.

    document_n, window_n  of the tokens, in the order of the text or of their merit
    evenly                the further ones are spread over all tokens; otherwise they are the first
    Returns               places of the tokens, int64, in their order
    """
    _, places = np.unique(document_n, return_index=True)
    if len(places) < count:
        _, others = np.unique(window_n, return_index=True)
        others = np.sort(others[~np.isin(window_n[others], window_n[places])])
        wanted = min(count - len(places), len(others))
        chosen = np.arange(wanted) * (len(others) if evenly else wanted) // max(1, wanted)
        places = np.append(places, others[chosen])
    return np.sort(places)


@kernel
def _same_context(ids_N, first, second):
    if min(first, second) < SAME_CONTEXT or max(first, second) + SAME_CONTEXT >= len(ids_N):
        return False
    different = 0
    for offset in range(-SAME_CONTEXT, SAME_CONTEXT + 1):
        different += ids_N[first + offset] != ids_N[second + offset]
    return different == 0


def quantile_samples(
    tokens: np.ndarray, weights: np.ndarray, lsp: int, count: int = OF_A_QUANTILE
) -> list[tuple[float, float, np.ndarray]]:
    """Random tokens from the ten tenths of an LSP's weights, the heaviest tenth first.

    tokens, weights  of those that have it, heaviest first; tenths are shares of them, fewer than ten tokens give fewer
    Returns          list of (least weight, largest weight, token numbers, heaviest first); empty if all weights are
                     equal, since the first tokens are then a random sample
    """
    if not len(weights) or weights[0] == weights[-1]:
        return []
    rng, found = np.random.default_rng([SEED, lsp]), []
    for tenth in np.array_split(np.arange(len(tokens)), QUANTILES):
        if len(tenth):
            chosen = np.sort(rng.choice(tenth, min(count, len(tenth)), replace=False))
            found.append((float(weights[tenth[-1]]), float(weights[tenth[0]]), tokens[chosen]))
    return found


class FiringTogether:
    """How many tokens have two LSPs, over tokens spread over the sample. Counted for one LSP at a time, as a table of
    all pairs is large: 17 GB for 65,536 LSPs.

    own_K   int64, tokens that have each LSP
    tokens  how many tokens with a code were looked at
    """

    def __init__(self, sample: Sample):
        indptr, lsps, _ = sample.rows(sample.spread(COUNTED_TOGETHER))
        shape = len(indptr) - 1, sample.k
        self._has_NK = csr_array((np.ones(len(lsps), bool), lsps.astype(np.int32), indptr), shape)
        self._has_KN = self._has_NK.T.tocsr()
        self.own_K = np.bincount(lsps, minlength=sample.k)
        self.tokens = int((np.diff(indptr) > 0).sum())

    def count(self, lsp: int) -> np.ndarray:
        """Tokens that have an LSP and each of all, int64 (K)."""
        tokens = self._has_KN.indices[self._has_KN.indptr[lsp] : self._has_KN.indptr[lsp + 1]]
        return np.bincount(self._has_NK[tokens].indices, minlength=len(self.own_K))


def co_firing(both_K: np.ndarray, own_K: np.ndarray, total: int, lsp: int, top: int) -> list[tuple[int, float, int]]:
    """The LSPs that fire together with one more often than chance: normalised pointwise mutual information,

        ln(p_ij / (p_i p_j)) / -ln p_ij         (Bouma 2009), 1 if neither is without the other

    both_K   tokens that have the LSP and each of all;  own_K  tokens that have each;  total  tokens with a code
    Returns  list of (lsp, NPMI, support: tokens that have both), largest NPMI first; of at least LEAST_SUPPORT tokens
    """
    others = np.flatnonzero((both_K >= LEAST_SUPPORT) & (np.arange(len(both_K)) != lsp))
    share = both_K[others] / total
    information = np.log(share * total**2 / (own_K[lsp] * own_K[others].astype(np.float64)))
    npmi = information / np.maximum(-np.log(share), np.finfo(float).tiny)
    largest = np.argsort(-npmi, kind="stable")[:top]
    return [(int(others[i]), float(min(1.0, npmi[i])), int(both_K[others[i]])) for i in largest if npmi[i] > 0]
