"""How easily a reader recognises an LSP by its words: the order in which LSPs are listed.

    clarity_K = clarity(by_lsp(sample), find_words(sample, vocabulary), atoms_Kd)

    clarity = (q_2 ln(q_2 / u_2) + ... + q_12 ln(q_12 / u_12))  ×  max(0, c)

q_i is the share of the LSP's squared weights that is on the tokens of word i, and u_i the word's share of all sampled
tokens. The weights are squared because most LSPs are on thousands of tokens with a small weight, which say little about
them. Words are in the order of q ln(q / u), as typical words are. The sum leaves out the first word, so an LSP that one
word explains has little. It is also small for LSPs of commas and of the most frequent words (q is close to u), and of
hundreds of words that have nothing in common (every q is small).

Only whole words count, upper and lower case together: words of a single token that have a letter and at least two
characters. (If most words of the sample have one character, as in Chinese, one is enough.) So pieces of words, numbers
and punctuation bring nothing. A word must occur LEAST_COUNT times in the sample.

c says how well an intruder among these words would be noticed. It is the mean cosine of the pairs of the twelve words,
where a word is the mean over its tokens of the hidden state that their codes reconstruct. The LSP itself is left out of
it, and the mean of all words is subtracted, so the cosine with a word chosen at random is near 0. The AUC of
`--intruders` could not order the list: it is near 1 for half of the LSPs of a good dictionary, it needs the teacher,
and its words may be pieces.

An LSP on fewer than LEAST_TOKENS sampled tokens has a clarity of 0. Not handled here: contexts, which a list cannot
show; the test of intruders itself (intruders.py).

Shapes: N sampled tokens, U distinct words of words.py, W whole words, K LSPs, B of them at once, d hidden width.
"""

import numpy as np

from mlsm.evaluation.inspection.lsps.sample import Entries
from mlsm.evaluation.inspection.lsps.words import Words

TOP = 12  # words of an LSP
LEAST_COUNT = 5  # occurrences of a word in the sample
LEAST_TOKENS = 100  # sampled tokens of an LSP
AT_ONCE = 64  # LSPs whose masses by word are in memory together


def clarity(entries: Entries, words: Words, atoms_Kd: np.ndarray) -> np.ndarray:
    """The clarity of every LSP: float64 (K), at least 0.

    atoms_Kd  of the dictionary; the identity in a store without one, which compares words by their LSPs
    """
    word_N = _whole_words(words)
    counts_W = np.bincount(word_N[word_N >= 0])
    word_N = np.where(word_N < 0, len(counts_W), word_N)  # the last group: all other tokens
    usual_W = counts_W / max(1, len(word_N))
    atoms_Kd = atoms_Kd.astype(np.float32)

    def mass(lsp, power):
        weights = entries.weights(lsp).astype(np.float64) ** power
        return np.bincount(word_N[entries.tokens(lsp)], weights, len(counts_W) + 1)

    states_Wd = np.zeros((len(counts_W), atoms_Kd.shape[1]), np.float32)
    for first in range(0, len(atoms_Kd), AT_ONCE):
        some_Bd = atoms_Kd[first : first + AT_ONCE]
        mean_BW = [mass(lsp, 1)[:-1] / counts_W for lsp in range(first, first + len(some_Bd))]
        states_Wd += np.stack(mean_BW, axis=1).astype(np.float32) @ some_Bd
    if len(states_Wd):
        states_Wd -= states_Wd.mean(0)

    found_K = np.zeros(len(atoms_Kd))
    for lsp in np.flatnonzero(entries.counts >= LEAST_TOKENS):
        squared = mass(lsp, 2)
        share_W = squared[:-1] / squared.sum()
        told_W = share_W * np.log(np.maximum(share_W, 1e-30) / usual_W)
        top_T = np.argsort(-told_W, kind="stable")[:TOP]
        top_T = top_T[told_W[top_T] > 0]
        if len(top_T) > 1:
            own_W = mass(lsp, 1)[:-1] / counts_W
            others_Td = states_Wd[top_T] - np.outer(own_W[top_T] - own_W.mean(), atoms_Kd[lsp])
            found_K[lsp] = told_W[top_T[1:]].sum() * max(0.0, _mean_cosine(others_Td))
    return found_K


def _whole_words(words):
    """The number of the whole word that each token is, upper and lower case together; -1 if it is none that counts."""
    texts = [text.casefold() for text in words.texts]
    has_letter_U = np.array([any(map(str.isalpha, text)) for text in texts], bool)
    is_short_U = np.array([len(text) < 2 for text in texts], bool)
    short = words.counts_U[has_letter_U & is_short_U].sum()
    if 2 * short < words.counts_U[has_letter_U].sum():
        has_letter_U &= ~is_short_U
    whole_U = has_letter_U & (words.tokens_U == words.counts_U)
    _, folded_U = np.unique(texts, return_inverse=True)
    counts = np.bincount(folded_U, words.counts_U * whole_U)
    number = np.cumsum(counts >= LEAST_COUNT) - 1
    number_U = np.where(whole_U & (counts >= LEAST_COUNT)[folded_U], number[folded_U], -1)
    return number_U[words.word_N]


def _mean_cosine(vectors_Td):
    """The mean cosine of the pairs of several vectors."""
    unit_Td = vectors_Td / np.maximum(np.linalg.norm(vectors_Td, axis=1, keepdims=True), 1e-12)
    count = len(unit_Td)
    return float(((unit_Td.sum(0) ** 2).sum() - (unit_Td**2).sum()) / (count * (count - 1)))
