"""One step of dictionary learning: against plain NumPy, whatever the threads, and the same in torch."""

import numba
import numpy as np
from planted import planted, unit_rows

from pipeline.dictionary import DictionarySettings, LearningSchedule, learn_dictionary
from pipeline.dictionary.cpu import CpuLearner
from pipeline.solvers import nonneg_lasso
from pipeline.solvers.parallel import thread_count


def test_atom_update_is_one_atom_after_the_other():
    """Algorithm 2 of the paper, against its plain form; the groups are an implementation detail."""
    rng = np.random.default_rng(0)
    learner = CpuLearner(unit_rows(rng.normal(size=(150, 20))), 0.05, 1.0)
    codes = np.abs(rng.normal(size=(400, 150))) * (rng.random((400, 150)) < 0.1)
    codes[:, 7] = 0  # an atom without a use stays as it is
    learner.code_code_KK[:] = codes.T @ codes
    learner.code_hidden_Kd[:] = codes.T @ unit_rows(rng.normal(size=(400, 20)))
    expected = learner.atoms_Kd.astype(float)
    for j in range(150):
        if codes[:, j].any():
            step = learner.code_hidden_Kd[j] - learner.code_code_KK[j] @ expected
            new = expected[j] + step / learner.code_code_KK[j, j]
            expected[j] = new / max(1, np.linalg.norm(new))
    learner._update_atoms()
    np.testing.assert_allclose(learner.atoms_Kd, expected, atol=1e-4)


def test_sums_against_their_dense_formula():
    hidden, _ = planted(300)
    learner = CpuLearner(unit_rows(np.random.default_rng(0).normal(size=(50, 24))), 0.05, 1.0)
    codes = nonneg_lasso(hidden, learner.atoms_Kd, 0.05)
    learner._accumulate(hidden, codes, np.float32(0))
    learner._accumulate(hidden, codes, np.float32(0.25))
    dense = codes.dense(50)
    np.testing.assert_allclose(learner.code_code_KK, 1.25 * dense.T @ dense, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(learner.code_hidden_Kd, 1.25 * dense.T @ hidden, rtol=1e-4, atol=1e-5)


def test_gram_matrix_in_blocks_is_the_product():
    atoms = unit_rows(np.random.default_rng(0).normal(size=(300, 20)))
    np.testing.assert_allclose(CpuLearner(atoms, 0.05, 1.0).gram_KK, atoms @ atoms.T, atol=1e-6)


def test_thread_count_does_not_change_the_atoms(tmp_path, monkeypatch):
    hidden, _ = planted(width=130)
    np.save(tmp_path / "hidden.npy", hidden)
    settings, schedule = DictionarySettings(300, 0.05, seed=0), LearningSchedule(epochs=1, batch=512)
    prints = set()
    for threads in (1, 2, 3):
        monkeypatch.setattr(numba.config, "NUMBA_NUM_THREADS", threads)
        monkeypatch.setenv("NUMBA_NUM_THREADS", str(threads))  # of more than there are cores
        assert thread_count() == threads
        prints.add(learn_dictionary(tmp_path / "hidden.npy", settings, schedule).fingerprint)
    assert len(prints) == 1


def copied(state):
    return {name: array.copy() for name, array in state.items()}


def test_torch_learner_equals_the_numba_learner(monkeypatch):
    from pipeline.dictionary import cpu as learner_cpu
    from pipeline.dictionary import torch as learner_torch
    from pipeline.dictionary.torch import TorchLearner

    for module in (learner_cpu, learner_torch):  # else codes may differ by their tolerance
        monkeypatch.setattr(module, "KKT_TOLERANCE", 1e-5)
    hidden, _ = planted(2000)
    atoms = unit_rows(np.random.default_rng(1).normal(size=(150, 24)))
    atoms[7] = 0  # never used, then replaced
    numba = CpuLearner(atoms, 0.05, 4.0)
    for start in range(0, 1500, 500):  # step by step: codes of many steps drift apart by rounding
        torch = TorchLearner(numba.atoms(), 0.05, 4.0, "cpu")
        torch.restore(copied(numba.state()))
        for learner in (numba, torch):
            learner.step(hidden[start : start + 500])
        assert_equal_learners(torch, numba)
    assert (numba.uses_K == 0).sum() == (torch.uses_K == 0).sum() >= 1
    for learner in (numba, torch):
        learner.replace_unused(hidden[1500:])
        assert (np.linalg.norm(learner.atoms(), axis=1) > 0.5).all() and not learner.uses_K.any()
    np.testing.assert_allclose(torch.atoms()[7], numba.atoms()[7], atol=1e-6)
    assert_equal_learners(torch, numba)


def assert_equal_learners(torch, numba):
    for name, array in numba.state().items():
        np.testing.assert_allclose(torch.state()[name], array, atol=1e-3, err_msg=name)
    for learner in (numba, torch):  # what the next minibatch is coded with belongs to the atoms
        atoms = learner.atoms()
        np.testing.assert_allclose(np.asarray(learner.gram_KK), atoms @ atoms.T, atol=1e-5)


def test_torch_update_is_one_atom_after_the_other():
    from pipeline.dictionary.torch import TorchLearner

    rng = np.random.default_rng(0)
    learner = CpuLearner(unit_rows(rng.normal(size=(150, 20))), 0.05, 1.0)
    codes = (np.abs(rng.normal(size=(400, 150))) * (rng.random((400, 150)) < 0.1)).astype(np.float32)
    codes[:, 7] = 0
    learner.code_code_KK[:] = codes.T @ codes
    learner.code_hidden_Kd[:] = codes.T @ unit_rows(rng.normal(size=(400, 20)))
    other = TorchLearner(learner.atoms(), 0.05, 1.0, "cpu")
    other.restore(copied(learner.state()))
    learner._update_atoms()
    other._update_atoms()
    np.testing.assert_allclose(other.atoms(), learner.atoms(), atol=1e-5)
