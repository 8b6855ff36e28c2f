"""Φ, NPMI and answers against hand-computed numbers and the slow diagnostic."""

from math import log
from pathlib import Path

import numpy as np
import pytest
import torch
from data import data_path
from scipy import sparse
from tiny_senses import all_instances, slow_diagnostic, write_miniature, write_part

from mlsm.common.progress import silent
from mlsm.evaluation.studies.word_senses.choose_layer import diagnose_layer
from mlsm.evaluation.studies.word_senses.config import ChooseLayerConfig
from mlsm.evaluation.studies.word_senses.data import WsdData
from mlsm.evaluation.studies.word_senses.sense_scores import Questions, answer, normalise, npmi, sense_sums
from pipeline.solvers import nonneg_lasso


def test_sums_of_codes_by_synset():
    codes = sparse.csr_array(np.array([[1, 0, 2], [0, 0, 0], [0, 3, 1]], np.float32))
    phi = sense_sums(codes, np.array([0, 0, 1, 2, 2]), np.array([0, 2, 0, 2, 2]), 3)
    assert phi.toarray().tolist() == [[1, 0, 2], [0, 0, 0], [1, 6, 4]]  # a synset twice counts twice
    rows = normalise(codes).toarray()
    assert rows == pytest.approx(np.array([[1 / 3, 0, 2 / 3], [0, 0, 0], [0, 0.75, 0.25]]))


def test_npmi_by_hand():
    phi = sparse.csr_array(np.array([[4.0, 0, 0], [1, 1, 0], [0, 0, 2]]))  # N 8; rows 4, 2, 2; columns 5, 1, 2
    expected = {
        (0, 0): log(8 * 4 / (4 * 5)) / log(2),
        (1, 0): log(8 * 1 / (2 * 5)) / log(8),
        (1, 1): log(8 * 1 / (2 * 1)) / log(8),
        (2, 2): 1.0,  # only ever together
    }
    found = npmi(phi).todok()
    assert dict(found.items()) == pytest.approx(expected) and found[1, 0] < 0
    assert npmi(sparse.csr_array(np.array([[0.0, 7.0]]))).toarray().tolist() == [[0, 1]]  # one cell holds everything


def test_the_three_rules_by_hand():
    values = sparse.csr_array(np.array([[0.5, -0.4, 0], [0, 0.3, 0], [0, 0, 0.2]]))
    codes = sparse.csr_array(np.array([[1.0, 1, 0], [0, 0, 1], [0, 0, 0], [1, 1, 0]], np.float32))
    # unseen, rows 0 and 1  |  rows 0 and 1: nothing in common  |  an empty code  |  no candidate
    questions = Questions(np.array([0, 3, 5, 7, 7]), np.array([-1, 0, 1, 0, 1, 0, 1]), np.ones(7, bool))
    found = answer(values, questions, codes)
    assert [found[rule].chosen_Q[0] for rule in ("npmi0", "nppmi", "npmi-1")] == [
        2,  # 0, 0.1, 0.3
        1,  # 0, 0.5, 0.3
        1,  # -2, 0.1, 0.3 - 1
    ]
    for answers in found.values():
        assert answers.chosen_Q[1:].tolist() == [0, 0, 0]
        assert answers.backed_off_Q.tolist() == [False, True, True, True]
    assert questions.are_right(found["npmi0"].chosen_Q).tolist() == [True, True, True, False]


class StandIn:
    """Word vectors from nowhere, in parts of an order of their own."""

    device = torch.device("cpu")

    def __init__(self, hidden_Nd, seed=0):
        self.hidden_Nd = hidden_Nd.astype(np.float16)
        self.word_of_row = np.random.default_rng(seed).permutation(len(hidden_Nd))

    def layer(self, layer):
        yield from np.array_split(self.hidden_Nd[self.word_of_row], 3)

    def codes(self, atoms_Kd, config, sizes):
        """Dense codes as `slow_diagnostic` wants them."""
        codes_NK = nonneg_lasso(self.hidden_Nd, atoms_Kd, config.lam, tol=config.tolerance).dense(len(atoms_Kd))
        names, ends = zip(*sizes, strict=True)
        return dict(zip(names, np.split(codes_NK, np.cumsum(ends)[:-1]), strict=True)).get


def sizes(root):
    training, tests = all_instances(root)
    return [("training", len(training)), *((name, len(words)) for name, words in tests.items())]


def unit_vectors(seed, count, width):
    """Vectors in a few bunches: words that have something in common."""
    generator = np.random.default_rng(seed)
    centres = generator.normal(size=(max(3, count // 8), width))
    vectors = centres[generator.integers(len(centres), size=count)] + 0.7 * generator.normal(size=(count, width))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def check_against_the_slow_one(root, width, k, seed):
    config = ChooseLayerConfig(lam=0.1, data_dir=root)
    counts = sizes(root)
    total = sum(count for _, count in counts)
    vectors = StandIn(unit_vectors(seed, total, width))
    vectors.hidden_Nd[total // 2] = vectors.hidden_Nd[-1] = 0  # words without subtokens
    atoms_Kd = unit_vectors(seed + 1, k, width)
    found = diagnose_layer(vectors, 1, atoms_Kd, WsdData.read(root, silent), config.lam, config.tolerance)
    expected = slow_diagnostic(root, vectors.codes(atoms_Kd, config, counts))
    assert list(found.scores) == list(expected)
    for variant, scores in expected.items():
        assert found.scores[variant] == pytest.approx(scores, abs=1e-12), variant
    return expected


@pytest.mark.parametrize("seed", range(4))
def test_a_miniature_against_the_slow_diagnostic(tmp_path, seed):
    check_against_the_slow_one(write_miniature(tmp_path / "wsd"), 8, 12, seed)


def test_real_words_against_the_slow_diagnostic(tmp_path):
    root = write_part(Path(data_path("wsd")), tmp_path / "wsd", training=250, test=12)
    expected = check_against_the_slow_one(root, 24, 40, 5)
    assert len({tuple(scores.values()) for scores in expected.values()}) > 3  # the variants do differ
