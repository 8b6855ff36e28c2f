"""Measures against scipy's and hand-written formulas, and by what must hold of any similarity."""

import itertools
import math

import numpy as np
import pytest
from scipy.spatial.distance import cdist, jensenshannon

from mlsm.evaluation.similarity.measures import (
    best_pairs,
    cosine,
    greedy_f1,
    jensen_shannon,
    matched_similarity,
    overlap,
)


def rows(count, seed, k=12):
    """Sparse distributions, the last of them empty."""
    draw = np.random.default_rng(seed)
    found = draw.random((count, k)) * (draw.random((count, k)) < 0.4)
    found[:, 0] += 0.1
    found /= found.sum(1, keepdims=True)
    found[-1] = 0
    return found.astype(np.float32)


def test_each_pair_of_rows_has_the_value_of_its_definition():
    p_NK, q_MK = rows(5, 0), rows(4, 1)
    for n, m in itertools.product(range(5), range(4)):
        p, q = p_NK[n].astype(float), q_MK[m].astype(float)
        is_empty = n == 4 or m == 3
        expected = 0 if is_empty else 1 - jensenshannon(p, q, base=2) ** 2
        assert jensen_shannon(p_NK, q_MK)[n, m] == pytest.approx(expected, abs=1e-6)
        most = np.maximum(p, q).sum()
        assert overlap(p_NK, q_MK)[n, m] == pytest.approx(np.minimum(p, q).sum() / most if most else 0, abs=1e-6)
        norms = np.linalg.norm(p) * np.linalg.norm(q)
        assert cosine(p_NK, q_MK)[n, m] == pytest.approx(p @ q / norms if norms else 0, abs=1e-6)


@pytest.mark.parametrize("measure", [cosine, jensen_shannon, overlap])
def test_a_row_is_most_like_itself_and_the_order_does_not_matter(measure):
    p_NK = rows(6, 2)[:-1]
    found = measure(p_NK, p_NK)
    assert np.diag(found) == pytest.approx(np.ones(5)) and found.max() <= 1 + 1e-9 and found.min() >= 0
    assert found == pytest.approx(found.T)
    apart = np.eye(3, dtype=np.float32)
    assert measure(apart, apart) == pytest.approx(np.eye(3))


def test_rows_that_are_equal_but_for_the_last_bit_are_the_same():
    """As those of one text that is read twice, beside other texts: scipy's distance of some of them is not a number."""
    p_NK = np.random.default_rng(0).dirichlet(np.ones(4), 300).astype(np.float32)
    q_NK = p_NK.copy()
    q_NK[:, 0] = np.nextafter(q_NK[:, 0], np.float32(1))
    assert np.isnan(cdist(p_NK.astype(float), q_NK.astype(float), "jensenshannon")).any()
    found = jensen_shannon(p_NK, q_NK)
    assert np.diag(found) == pytest.approx(np.ones(300)) and matched_similarity(found) == pytest.approx(1)


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4), (1, 3)])
def test_matching_is_the_best_of_all_one_to_one_pairs(shape):
    similarity = np.random.default_rng(3).random(shape)
    small, large = sorted(shape)
    wide = similarity if shape[0] <= shape[1] else similarity.T
    best = max(sum(wide[i, j] for i, j in enumerate(chosen)) for chosen in itertools.permutations(range(large), small))
    assert matched_similarity(similarity) == pytest.approx(2 * best / (small + large))
    assert len(set(best_pairs(similarity)[0])) == len(set(best_pairs(similarity)[1])) == small


def test_bertscore_is_its_definition():
    similarity = np.random.default_rng(4).random((3, 4))
    recall = sum(max(row) for row in similarity) / 3
    precision = sum(max(column) for column in similarity.T) / 4
    assert greedy_f1(similarity) == pytest.approx(2 / (1 / recall + 1 / precision))
    assert greedy_f1(np.zeros((2, 2))) == 0 and math.isclose(greedy_f1(np.ones((2, 3))), 1)
