"""Which LSPs depend on the position in the window, and which on words.

    found = position_profiles(sample)       # found.profile_KB[7], found.nats_K[7], found.positional_K[7]
    word_nats_K = word_information(sample, found, vocabulary=len(tokenizer))

The profile of an LSP is its mean weight in each of BINS parts of the window, which hold about equally many sampled
tokens. Its position information is the divergence KL(share of its mass in each part || share of the tokens), in nats: 0
where it is as heavy everywhere, 0.1 where its weight swings by some 60 % around its mean, ln BINS where all of it is in
one part. An LSP with few tokens has some by chance, and so has one whose tokens come in runs. So the same is taken with
the parts of each window turned round by a random number of tokens, ROTATIONS times: runs stay together, but nothing
stays where it was. What is reported is the excess over the mean of these, and an LSP is called positional where that is
at least POSITIONAL_NATS and DEVIATIONS standard deviations of the rotated ones.

The word information of an LSP is its own part of the gain of word types (ids of the vocabulary), cross-fitted
(gains.py): nats per token by which a prediction that knows the word predicts this LSP better. What its positions
explain is taken off, mean weight times position information: so LSPs of common words are listed before those of rare
ones, and LSPs that depend on the position, or fire evenly, come last. Not handled here: context beyond the word, which
no table of this size holds.

Shapes: N sampled tokens, E entries, K LSPs, B parts of a window.
"""

from typing import NamedTuple

import numpy as np

from mlsm.common.gains import cross_fitted_gain, mass_by_group
from mlsm.evaluation.inspection.lsps.sample import Sample

BINS = 16
ROTATIONS = 8
POSITIONAL_NATS = 0.1
DEVIATIONS = 4
MOST_TOKENS = 500_000  # that word types are counted over
SEED = 0


class PositionProfiles(NamedTuple):
    """How every LSP depends on positions.

    profile_KB    mean weight in each part, over that in all: 1 if it is as heavy as everywhere
    nats_K        position information above that of the rotated windows, at least 0
    positional_K  bool
    starts_B      first position of each part
    """

    profile_KB: np.ndarray
    nats_K: np.ndarray
    positional_K: np.ndarray
    starts_B: np.ndarray


def position_profiles(sample: Sample) -> PositionProfiles:
    """PositionProfiles of the LSPs of a sample."""
    bin_N, starts_B = _bins(sample.position_N)
    token_E = np.repeat(np.arange(len(sample)), np.diff(sample.indptr))
    profile_KB, nats_K = _information(sample, bin_N, token_E, len(starts_B))
    rng = np.random.default_rng(SEED)
    null_RK = np.stack(
        [
            _information(sample, bin_N[_rotate(sample.window_N, rng)], token_E, len(starts_B))[1]
            for _ in range(ROTATIONS)
        ]
    )
    above_K = nats_K - null_RK.mean(0)
    positional_K = above_K >= np.maximum(POSITIONAL_NATS, DEVIATIONS * null_RK.std(0, ddof=1))
    return PositionProfiles(profile_KB, np.maximum(above_K, 0), positional_K, starts_B)


def _bins(position_N):
    """The part of the window that each token is in, and the parts' first positions."""
    tokens_P = np.bincount(position_N)
    before_P = np.cumsum(tokens_P) - tokens_P
    part_P = np.minimum(before_P * BINS // max(1, len(position_N)), BINS - 1)
    _, part_P = np.unique(part_P, return_inverse=True)  # none is empty
    return part_P[position_N], np.unique(part_P, return_index=True)[1]


def _rotate(window_N, rng):
    """For every token, another token of its window: each window is rotated by a random number of tokens."""
    firsts = np.flatnonzero(np.concatenate(([True], window_N[1:] != window_N[:-1])))
    lengths = np.diff([*firsts, len(window_N)])
    shifts = (rng.random(len(firsts)) * lengths).astype(np.int64)
    first_N, length_N, shift_N = (np.repeat(of_window, lengths) for of_window in (firsts, lengths, shifts))
    return first_N + (np.arange(len(window_N)) - first_N + shift_N) % length_N


def _information(sample, bin_N, token_E, bins):
    """Profile and position information of every LSP."""
    coded_N = np.diff(sample.indptr) > 0
    cells = sample.lsps_E.astype(np.int64) * bins + bin_N[token_E]
    mass_KB = np.bincount(cells, sample.weights_E, sample.k * bins).reshape(sample.k, bins)
    share_B = np.bincount(bin_N[coded_N], minlength=bins) / max(1, coded_N.sum())
    share_KB = mass_KB / np.maximum(mass_KB.sum(1, keepdims=True), 1e-30)
    profile_KB = share_KB / np.maximum(share_B, 1e-30)
    return profile_KB, (share_KB * np.log(np.maximum(profile_KB, 1e-30))).sum(1)


def word_information(sample: Sample, profiles: PositionProfiles, vocabulary: int) -> np.ndarray:
    """The information that the word type gives about each LSP beyond its positions, in nats per token: float64 (K), >=
    0.

    vocabulary  number of ids
    """
    tokens = np.arange(len(sample))
    if len(tokens) > MOST_TOKENS:
        tokens = np.sort(np.random.default_rng(SEED).choice(tokens, MOST_TOKENS, replace=False))
    halves = []
    for half in (0, 1):
        chosen = tokens[sample.window_N[tokens] % 2 == half]
        halves.append(mass_by_group(sample.ids_N[chosen], *sample.rows(chosen), vocabulary, sample.k))
    gain_K, _ = cross_fitted_gain(*halves)
    return np.maximum(gain_K - (halves[0] + halves[1]).mean_K * profiles.nats_K, 0)
