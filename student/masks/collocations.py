"""Collocations of a store's text by pointwise mutual information: n-grams that are masked as one.

    counts = count_ngrams(windows)
    found = collocations(counts, windows.token_counts(), least_count=10, coverage=0.5)

As in PMI-Masking (Levine et al. 2021, section 3; github.com/AI21Labs/pmi-masking), the score of an n-gram of 2 to 5
tokens is the lowest PMI over all ways to split it:

    PMI_n(w1 ... wn) = min over segmentations s of log p(w1 ... wn) / product of p(part) over the parts of s

where p is the count divided by the number of tokens. The score is high for "according to" and low for "of the". Each
length is ranked separately, since PMI_n grows with n: half of the list are bigrams, a quarter trigrams, an eighth each
4- and 5-grams. Two things differ from the paper: the n-grams are of tokens, not words, and the list's length follows
from the share of the text that it should cover instead of being 800,000.

Memory is bounded by lossy counting (Manku and Motwani 2002): the table holds at most ENTRIES n-grams. When it is full,
the rarest are dropped. So counts are too low by at most `undercount`, the sum of the counts at which n-grams were
dropped; it stays 0 up to several million tokens of text. Not handled here: p squared in the numerator, as in the
published lists, which favours frequent n-grams; n-grams across documents or special tokens.

Shapes: E n-grams, C candidates of one length, V vocabulary.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mlsm.common.progress import silent
from shards.windows import WindowReader
from student.masks.masking import begins_run, maskable_positions
from student.masks.table import LONGEST, ngram_keys

ENTRIES = 8_000_000  # about 0.3 GB, and 1.2 GB while they are merged with those of further text
TOKENS_AT_ONCE = 500_000
SHARES = {2: 1 / 2, 3: 1 / 4, 4: 1 / 8, 5: 1 / 8}  # share of each length in the list


class NgramCounts(NamedTuple):
    """How often n-grams of 2 to LONGEST tokens occur, in the order of their keys."""

    keys_E: np.ndarray
    """uint64, sorted; `ngram_keys`"""
    ids_E5: np.ndarray
    """int32, -1 after shorter n-grams"""
    counts_E: np.ndarray
    """int64, at most `undercount` too low"""
    undercount: int = 0


def count_ngrams(windows: WindowReader, progress: Callable[..., None] = silent, entries: int = ENTRIES) -> NgramCounts:
    """Count the n-grams of a split, none across documents or special tokens, in one pass.

    entries  most n-grams that are kept at any time
    """
    special_ids = windows.store.special_ids["all"]
    counts = NgramCounts(np.zeros(0, np.uint64), np.zeros((0, LONGEST), np.int32), np.zeros(0, np.int64))
    step = max(1, TOKENS_AT_ONCE // windows.store.max_length)
    for start in range(0, len(windows), step):
        read = windows.read(np.arange(start, min(start + step, len(windows))))
        maskable_WL = maskable_positions(read.ids, read.lengths, special_ids)
        runs_WL = np.cumsum(begins_run(maskable_WL, read.documents), axis=1) * maskable_WL
        parts = [counts, *(_of_length(length, read.ids, runs_WL) for length in SHARES)]
        counts = _merge(parts, counts.undercount)
        if len(counts.keys_E) > entries:
            floor = int(np.partition(counts.counts_E, -entries - 1)[-entries - 1])
            kept_E = counts.counts_E > floor
            kept = counts.keys_E[kept_E], counts.ids_E5[kept_E], counts.counts_E[kept_E]
            counts = NgramCounts(*kept, counts.undercount + floor)
        progress("n-grams", min(start + step, len(windows)), len(windows), unit="windows")
    return counts


def collocations(counts: NgramCounts, token_counts_V: np.ndarray, *, least_count: int, coverage: float) -> np.ndarray:
    """The n-grams of highest PMI_n, int32 (collocations, 5), -1 after shorter ones; the highest first.

    token_counts_V  how often each token occurs
    least_count     n-grams that occur less often are excluded
    coverage        upper bound on the share of tokens inside collocations; overlapping occurrences count twice
    """
    tokens = max(1, int(token_counts_V.sum()))
    ranks, rows = [], []
    for length, share in SHARES.items():
        is_candidate_E = (counts.ids_E5 >= 0).sum(axis=1) == length
        candidates = np.flatnonzero(is_candidate_E & (counts.counts_E >= least_count))
        pmi_C = _pmi(counts, candidates, length, token_counts_V, tokens)
        candidates, pmi_C = candidates[pmi_C > 0], pmi_C[pmi_C > 0]
        order = np.lexsort((counts.keys_E[candidates], -pmi_C))
        rows.append(candidates[order])
        ranks.append((np.arange(len(order)) + 1) / share)  # sorting by it mixes the lengths in these shares
    rows_E = np.concatenate(rows)[np.argsort(np.concatenate(ranks), kind="stable")]
    covered_E = np.cumsum(counts.counts_E[rows_E] * (counts.ids_E5[rows_E] >= 0).sum(axis=1))
    return counts.ids_E5[rows_E[covered_E <= coverage * tokens]]


def _pmi(counts, candidates, length, token_counts_V, tokens):
    """PMI_n of some n-grams of one length, float64 (C); the best segmentation grows part by part."""
    ids_CN = counts.ids_E5[candidates, :length]

    def log_p(start, stop):
        if stop - start == 1:
            found_C = token_counts_V[ids_CN[:, start]]
        else:  # the table holds every part of an n-gram that it holds
            found_C = counts.counts_E[counts.keys_E.searchsorted(ngram_keys(list(ids_CN[:, start:stop].T)))]
        return np.log(found_C / tokens)

    best = [np.zeros(len(candidates))]  # log p of the likeliest segmentation of the first 0, 1, ... tokens
    for stop in range(1, length + 1):
        starts = range(1 if stop == length else 0, stop)  # the unsplit n-gram is not a segmentation
        best.append(np.max([best[start] + log_p(start, stop) for start in starts], axis=0))
    return log_p(0, length) - best[length]


def _of_length(length, ids_WL, runs_WL):
    """NgramCounts of the n-grams of one length in some windows, unsorted, each counted once for every occurrence."""
    starts = max(0, ids_WL.shape[1] - length + 1)
    together_WS = (runs_WL[:, :starts] > 0) & (runs_WL[:, :starts] == runs_WL[:, length - 1 :])
    columns = [ids_WL[:, ahead : ahead + starts][together_WS] for ahead in range(length)]
    ids_E5 = np.full((len(columns[0]), LONGEST), -1, np.int32)
    ids_E5[:, :length] = np.stack(columns, axis=1)
    return NgramCounts(ngram_keys(columns), ids_E5, np.ones(len(ids_E5), np.int64))


def _merge(parts, undercount):
    """Sum several NgramCounts into one."""
    keys_E, ids_E5, counts_E = (np.concatenate(columns) for columns in list(zip(*parts, strict=True))[:3])
    order = np.argsort(keys_E, kind="stable")
    keys_E = keys_E[order]
    firsts = np.flatnonzero(np.concatenate(([True], keys_E[1:] != keys_E[:-1])))[: len(keys_E)]
    sums_E = np.add.reduceat(counts_E[order], firsts) if len(firsts) else counts_E
    return NgramCounts(keys_E[firsts], ids_E5[order[firsts]], sums_E, undercount)
