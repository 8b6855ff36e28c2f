"""Decide from correlations whether each LSP was kept, drifted, split, merged, vanished or appeared.

    found = match_lsps(first, second, correlate_lsps(first, second, 0.3), kept_from=0.7, matching="hungarian")
    found.states[7], found.into[7], found.r_K[7]

Each LSP gets the first state that applies:

    rare       on fewer than LEAST_TOKENS of the sampled tokens in its own store: not judged
    split      an LSP is the sum of two or more LSPs of the second store whose best partner it is: each of them adds
               at least GAIN to the correlation with the sum, which reaches `kept_from`. Half of an LSP correlates with
               it at 0.71, so with matching only it would count as kept
    merged     the same the other way round: an LSP of the second store is the sum of two or more of the first
    kept       matched one to one with a correlation of at least `kept_from`
    drifted    matched one to one with a lower correlation
    vanished   none of these; an LSP of the second store without a state: appeared

An LSP that vanished may still correlate with an LSP that is matched to another one; the record names the best. Only
pairs that correlate enough take part in the matching, so LSPs without such a pair do not displace others. The problem
is solved separately for each connected component of these pairs (scipy's linear_sum_assignment), which gives exactly
the assignment with the largest sum. The largest component determines the memory: usually a few megabytes. If all LSPs
are connected, it is two dense float64 matrices, 2.4 GB for 12,288 x 12,288. Matching by mutual best
needs no such matrix.

Shapes: K LSPs of the first or J of the second store, P pairs, n parts.
"""

from typing import NamedTuple

import numpy as np

from mlsm.evaluation.inspection.tracking.correlation import Activations, LspCorrelations

GAIN = 0.05
BEFORE = ("kept", "drifted", "split", "merged", "vanished", "rare")
AFTER = ("kept", "drifted", "split", "merged", "appeared", "rare")


class Matches(NamedTuple):
    """How the LSPs changed.

    states      list (K), of BEFORE;  states_after  list (J), of AFTER, as seen from the second store
    into        list (K) of int64 arrays: LSPs of the second store, the main one first; for a merged LSP, the LSP that
                it became part of
    r_K         float64, correlation with the match, or of the whole with the sum of the parts; NaN without one
    """

    states: list[str]
    states_after: list[str]
    into: list[np.ndarray]
    r_K: np.ndarray


def match_lsps(
    first: Activations, second: Activations, pairs: LspCorrelations, kept_from: float, matching: str
) -> Matches:
    """Match the LSPs of two stores, from the pairs that correlate enough."""
    states = np.where(first.is_rare, "rare", "vanished").astype("<U8")
    states_after = np.where(second.is_rare, "rare", "appeared").astype("<U8")
    into, r_K = [np.zeros(0, np.int64) for _ in states], np.full(len(states), np.nan)
    for whole, parts, r in _sums(first, second, pairs, kept_from):
        states[whole], into[whole], r_K[whole] = "split", parts, r
        states_after[parts] = "split"
    for whole, parts, r in _sums(second, first, pairs.reversed(), kept_from):
        if states_after[whole] == "appeared" and (states[parts] == "vanished").all():
            states_after[whole] = states[parts] = "merged"
            r_K[parts] = r
            for part in parts:
                into[part] = np.array([whole])
    free = (states[pairs.first_P] == "vanished") & (states_after[pairs.second_P] == "appeared")
    if matching == "mutual-best":
        mutual = (pairs.best_K[pairs.first_P] == pairs.second_P) & (pairs.best_J[pairs.second_P] == pairs.first_P)
        pair = np.flatnonzero(free & mutual)
    else:
        pair = _assign(pairs, np.flatnonzero(free))
    kept = np.where(pairs.r_P[pair] >= kept_from, "kept", "drifted")
    states[pairs.first_P[pair]] = states_after[pairs.second_P[pair]] = kept
    r_K[pairs.first_P[pair]] = pairs.r_P[pair]
    for one, other in zip(pairs.first_P[pair], pairs.second_P[pair], strict=True):
        into[one] = np.array([other])
    return Matches(states.tolist(), states_after.tolist(), into, r_K)


def _sums(first, second, pairs, kept_from):
    """LSPs of the first store that are the sum of some of the second: (whole, parts int64 (n), their correlation)."""
    places = np.flatnonzero(pairs.best_J[pairs.second_P] == pairs.first_P)
    places = places[np.argsort(-pairs.r_P[places], kind="stable")]
    for own in _groups(places, pairs.first_P[places]):
        if len(own) < 2:
            continue
        whole, lsps, r_n = pairs.first_P[own[0]], pairs.second_P[own], pairs.r_P[own]
        covariances_nn, scale_n = second.covariances(lsps), second.deviation_K[lsps]
        chosen, best = [0], r_n[0]
        for part in range(1, len(own)):
            trial = [*chosen, part]
            r = (r_n[trial] @ scale_n[trial]) / np.sqrt(covariances_nn[np.ix_(trial, trial)].sum())
            if r >= best + GAIN:
                chosen, best = trial, r
        if len(chosen) > 1 and best >= kept_from:
            yield whole, lsps[chosen], best


def _groups(places, keys):
    """Group places by equal keys, in order: a list of arrays."""
    order = np.argsort(keys, kind="stable")
    return np.split(places[order], np.flatnonzero(np.diff(keys[order])) + 1) if len(places) else []


def _assign(pairs, places):
    """Choose from the pairs at some places the assignment with the largest sum of correlations."""
    from scipy.optimize import linear_sum_assignment
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    k, j = len(pairs.best_K), len(pairs.best_J)
    ends = (pairs.first_P[places], k + pairs.second_P[places])
    _, component = connected_components(coo_array((np.ones(len(places)), ends), (k + j, k + j)), directed=False)
    found = [np.zeros(0, np.int64)]
    for own in _groups(places, component[ends[0]]):
        _, row = np.unique(pairs.first_P[own], return_inverse=True)
        _, column = np.unique(pairs.second_P[own], return_inverse=True)
        r = np.zeros((row.max() + 1, column.max() + 1))
        r[row, column] = pairs.r_P[own]
        assigned = np.full(len(r), -1)
        rows, columns = linear_sum_assignment(r, maximize=True)
        assigned[rows] = columns
        found.append(own[assigned[row] == column])
    return np.concatenate(found)
