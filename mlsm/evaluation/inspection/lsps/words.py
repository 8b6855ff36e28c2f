"""Words of a sample, and the LSPs of each: the mean of the distributions of its tokens over all occurrences.

    words = find_words(sample, vocabulary)
    lsps_CT, weights_CT = profiles(sample, words, numbers, top=8)

A word is a run of tokens between two that begin one (vocabulary.py), within a window and a document; runs that read the
same are the same word, however the tokenizer cut them. Tokens without a code count on average, so a profile sums to 1
at most.

Shapes: N sampled tokens, R distinct runs of tokens, U distinct words, C chosen words, T LSPs of each, K LSPs.
"""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mlsm.evaluation.inspection.lsps.sample import Entries, Sample
from mlsm.evaluation.inspection.lsps.vocabulary import Vocabulary
from pipeline.solvers.parallel import kernel
from shards.counter import hash_u64


@dataclass(frozen=True)
class Words:
    """Distinct words, the most frequent first.

    texts     list (U) of str
    counts_U  int64, occurrences
    word_N    int32, the word of every token
    """

    texts: list[str]
    counts_U: np.ndarray
    word_N: np.ndarray

    @cached_property
    def tokens_U(self) -> np.ndarray:
        """Tokens of each word, over all its occurrences."""
        return np.bincount(self.word_N, minlength=len(self.texts))

    def find(self, word: str) -> list[int]:
        """Numbers of the words that read like this one, upper and lower case alike."""
        wanted = _folded(word.strip())
        return [number for number, text in enumerate(self.texts) if _folded(text) == wanted]


def _folded(text):
    return unicodedata.normalize("NFC", text).casefold()


def find_words(sample: Sample, vocabulary: Vocabulary) -> Words:
    """The words of a sample."""
    begins_N = vocabulary.begins_word(sample.ids_N)
    begins_N[1:] |= (sample.window_N[1:] != sample.window_N[:-1]) | (sample.document_N[1:] != sample.document_N[:-1])
    starts = np.flatnonzero(begins_N)
    lengths = np.diff(np.append(starts, len(sample)))
    place_N = np.arange(len(sample)) - np.repeat(starts, lengths)
    keys = np.add.reduceat(hash_u64(sample.ids_N, place_N), starts)  # 64 bits tell runs of ids apart
    _, first_R, run = np.unique(keys, return_index=True, return_inverse=True)
    numbers: dict[str, int] = {}
    word_R = np.array(
        [
            numbers.setdefault(text, len(numbers))
            for text in (vocabulary.join(sample.ids_N[starts[i] : starts[i] + lengths[i]]) for i in first_R)
        ]
    )
    counts = np.bincount(word_R[run], minlength=len(numbers))
    order, texts = np.argsort(-counts, kind="stable"), list(numbers)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    word_N = np.repeat(rank[word_R[run]], lengths).astype(np.int32)
    return Words([texts[number] for number in order], counts[order], word_N)


def profiles(sample: Sample, words: Words, numbers: Sequence[int], top: int) -> tuple[np.ndarray, np.ndarray]:
    """The largest mean LSPs of some words.

    Returns  lsps int32 (C, T) and weights float32 (C, T), the largest first; -1 and 0 if a word has fewer
    """
    token_N = np.argsort(words.word_N, kind="stable")
    ends_U = np.cumsum(words.tokens_U)
    lsps_CT, weights_CT = np.full((len(numbers), top), -1, np.int32), np.zeros((len(numbers), top), np.float32)
    _profiles(
        sample.indptr,
        sample.lsps_E,
        sample.weights_E,
        token_N,
        ends_U,
        np.asarray(numbers),
        sample.k,
        lsps_CT,
        weights_CT,
    )
    return lsps_CT, weights_CT


@kernel
def _profiles(indptr, lsps_E, weights_E, token_N, ends_U, numbers, k, lsps_CT, weights_CT):
    sums_K, touched = np.zeros(k), np.empty(k, np.int32)
    for c in range(len(numbers)):
        number = numbers[c]
        start = ends_U[number - 1] if number else 0
        count = 0
        for place in range(start, ends_U[number]):
            for entry in range(indptr[token_N[place]], indptr[token_N[place] + 1]):
                lsp = lsps_E[entry]
                if sums_K[lsp] == 0:
                    touched[count] = lsp
                    count += 1
                sums_K[lsp] += weights_E[entry]
        for t in range(min(lsps_CT.shape[1], count)):
            best = touched[0]
            for i in range(count):
                if sums_K[touched[i]] > sums_K[best]:
                    best = touched[i]
            lsps_CT[c, t], weights_CT[c, t] = best, sums_K[best] / (ends_U[number] - start)
            sums_K[best] = 0.0
        for i in range(count):
            sums_K[touched[i]] = 0.0


def typical(entries: Entries, words: Words, lsp: int, top: int) -> list[tuple[int, float]]:
    """The words that are most typical of an LSP: pairs (word, share of the LSP's mass).

    Ordered by share * ln(share / share of the word in all tokens), their part in the Kullback-Leibler divergence of the
    LSP's words from the sample's: commas hold much of the mass of many LSPs and say nothing of them.
    """
    tokens = entries.tokens(lsp)
    if not len(tokens):
        return []
    found, where = np.unique(words.word_N[tokens], return_inverse=True)
    mass = np.bincount(where, entries.weights(lsp))
    share, usual = mass / mass.sum(), words.tokens_U[found] / words.tokens_U.sum()
    largest = np.argsort(-share * np.log(share / usual), kind="stable")[:top]
    return list(zip(found[largest].tolist(), share[largest].tolist(), strict=True))
