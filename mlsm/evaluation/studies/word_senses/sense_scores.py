"""Disambiguate words by their codes: Φ, normalised pointwise mutual information, the best candidate sense.

    phi = sense_sums(codes, words, synsets, count)             # synsets x LSPs
    answers = answer(npmi(phi), questions, query_codes)        # {"npmi0": Answers, "nppmi": ..., "npmi-1": ...}

Section 4.2.1 of the MLSM paper: Φ sums the codes of a synset's annotated words; NPMI after Bouma 2009 (Normalized
(pointwise) mutual information in collocation extraction); a word's sense is the candidate whose row of Φ has the
largest product with the word's code. There are three rules for the cells of the NPMI matrix:

    npmi0   a cell of Φ that is zero stays zero (the headline; the paper leaves it open)
    nppmi   negative values also become zero
    npmi-1  a cell of Φ that is zero becomes -1, Bouma's limit for pairs that never occur together

All matrices are sparse (CSR of scipy). Not handled here: codes and text (choose_layer.py).

Shapes: S synsets, K LSPs, Q questions, C candidates of all questions, concatenated.
"""

from typing import NamedTuple

import numpy as np
from scipy import sparse

from pipeline.solvers.parallel import kernel

RULES = ("npmi0", "nppmi", "npmi-1")


class Questions(NamedTuple):
    """Words to disambiguate, with their candidates in WordNet's order.

    starts_Q  int64 (Q + 1): question q has candidates starts[q] to starts[q + 1]
    rows_C    int64: the candidate's row of Φ, -1 for a synset without training examples
    right_C   bool: whether the candidate is among the gold senses
    """

    starts_Q: np.ndarray
    rows_C: np.ndarray
    right_C: np.ndarray

    def first_sense_Q(self) -> np.ndarray:
        """Whether the first candidate is correct."""
        return self.are_right(np.zeros(len(self.starts_Q) - 1, np.int64))

    def are_right(self, chosen_Q: np.ndarray) -> np.ndarray:
        """Whether the chosen candidates, counted within each question, are correct; False for a word without
        candidates.
        """
        found = np.diff(self.starts_Q) > 0
        right_Q = np.zeros(len(found), bool)
        right_Q[found] = self.right_C[(self.starts_Q[:-1] + chosen_Q)[found]]
        return right_Q


class Answers(NamedTuple):
    """chosen_Q: numbers of candidates; backed_off_Q: whether the first was chosen because none had evidence."""

    chosen_Q: np.ndarray
    backed_off_Q: np.ndarray


def sense_sums(codes: sparse.csr_array, words: np.ndarray, synsets: np.ndarray, count: int) -> sparse.csr_array:
    """Φ: for every pair of a word and one of its synsets, the word's code is added to the synset's row.

    codes    CSR (words, K);  words, synsets  int arrays of the pairs;  count  S
    Returns  CSR (S, K) float64
    """
    shape = count, codes.shape[0]
    return (sparse.csr_array((np.ones(len(words)), (synsets, words)), shape) @ codes.astype(np.float64)).tocsr()


def normalise(codes: sparse.csr_array) -> sparse.csr_array:
    """The codes with rows that sum to 1; empty ones stay empty."""
    sums = np.asarray(codes.sum(1, dtype=np.float64)).ravel()
    scale = np.divide(1.0, sums, out=np.zeros_like(sums), where=sums > 0)
    return sparse.csr_array(
        (codes.data * np.repeat(scale, np.diff(codes.indptr)), codes.indices, codes.indptr), codes.shape
    )


def npmi(phi: sparse.csr_array) -> sparse.csr_array:
    """NPMI of the cells of Φ that are above zero: ln(N Φ_ij / (r_i c_j)) / -ln(Φ_ij / N); CSR (S, K)."""
    total, rows_S, columns_K = phi.sum(), np.asarray(phi.sum(1)).ravel(), np.asarray(phi.sum(0)).ravel()
    rows = np.repeat(rows_S, np.diff(phi.indptr))
    share = phi.data / total
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.log(phi.data * total / (rows * columns_K[phi.indices])) / -np.log(share)
    values[share >= 1] = 1.0  # all mass is in one cell: the limit for pairs that only occur together
    return sparse.csr_array((values, phi.indices, phi.indptr), phi.shape)


def answer(npmi_SK: sparse.csr_array, questions: Questions, codes: sparse.csr_array) -> dict[str, Answers]:
    """Answer with the three rules: choose the candidate whose row has the largest product with the code; ties go to the
    first.

    codes    CSR (Q, K) codes of the questions' words
    Returns  dict of rule to Answers
    """
    chosen, backed_off = np.zeros((2, len(RULES), codes.shape[0]), np.int64)
    _answer(
        npmi_SK.indptr,
        npmi_SK.indices,
        npmi_SK.data,
        codes.indptr,
        codes.indices,
        codes.data.astype(np.float64),
        np.zeros(codes.shape[1]),
        questions.starts_Q,
        questions.rows_C,
        chosen,
        backed_off,
    )
    return {rule: Answers(chosen[i], backed_off[i].astype(bool)) for i, rule in enumerate(RULES)}


@kernel
def _answer(indptr, indices, values, query_indptr, query_indices, query_values, code_K, starts_Q, rows_C, chosen, none):
    best, known = np.empty(3), np.empty(3, np.int64)
    for question in range(len(starts_Q) - 1):
        mass = 0.0
        for entry in range(query_indptr[question], query_indptr[question + 1]):
            code_K[query_indices[entry]] = query_values[entry]
            mass += query_values[entry]
        best[:], known[:] = -1e300, 0
        for candidate in range(starts_Q[question], starts_Q[question + 1]):
            plain, positive, met = 0.0, 0.0, 0.0
            row = rows_C[candidate]
            if row >= 0:
                for entry in range(indptr[row], indptr[row + 1]):
                    weight = code_K[indices[entry]]
                    if weight > 0:
                        product = weight * values[entry]
                        plain += product
                        positive += max(product, 0.0)
                        met += weight
            scores = (plain, positive, plain - (mass - met))
            known[0] |= met > 0
            known[1] |= positive > 0
            known[2] |= met > 0
            for rule in range(3):
                if scores[rule] > best[rule]:
                    best[rule] = scores[rule]
                    chosen[rule, question] = candidate - starts_Q[question]
        for rule in range(3):
            none[rule, question] = known[rule] == 0
        for entry in range(query_indptr[question], query_indptr[question + 1]):
            code_K[query_indices[entry]] = 0.0
