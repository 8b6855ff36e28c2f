"""The problem's definition against answers found by hand and by scikit-learn."""

import numpy as np
import pytest

from pipeline.solvers.problem import Codes, duality_gap, join_codes, kkt_violation, objective


def test_one_atom_by_hand():
    hidden, atoms, lam = np.array([[0.6, 0.8]]), np.array([[1.0, 0.0]]), 0.1
    optimum = np.array([[0.5]])  # 0.6 - lam
    assert objective(hidden, atoms, optimum, lam) == pytest.approx(0.5 * (0.01 + 0.64) + 0.05)
    assert kkt_violation(hidden, atoms, optimum, lam) == pytest.approx(0)
    assert duality_gap(hidden, atoms, optimum, lam) == pytest.approx(0)
    nothing = np.zeros((1, 1))
    assert kkt_violation(hidden, atoms, nothing, lam) == pytest.approx(0.5)
    too_much = np.array([[0.7]])  # d . r = -0.1
    assert kkt_violation(hidden, atoms, too_much, lam) == pytest.approx(0.2)


def test_negative_correlations_violate_nothing():
    """The condition is one-sided: a >= 0 cannot use an atom that points away."""
    hidden, atoms = np.array([[1.0, 0.0]]), np.array([[-1.0, 0.0]])
    assert kkt_violation(hidden, atoms, np.zeros((1, 1)), 0.1) == 0
    assert duality_gap(hidden, atoms, np.zeros((1, 1)), 0.1) == pytest.approx(0)


def test_the_gap_bounds_the_suboptimality():
    rng = np.random.default_rng(0)
    hidden, atoms = rng.normal(size=(600, 20)), rng.normal(size=(50, 20))
    hidden /= np.linalg.norm(hidden, axis=1, keepdims=True)
    atoms /= np.linalg.norm(atoms, axis=1, keepdims=True)
    lasso = pytest.importorskip("sklearn.linear_model").Lasso
    fit = lasso(alpha=0.05 / 20, positive=True, fit_intercept=False, tol=1e-12, max_iter=100_000)
    optimum = fit.fit(atoms.T, hidden.T).coef_
    assert kkt_violation(hidden, atoms, optimum, 0.05).max() < 1e-5
    worse = optimum * rng.uniform(0.5, 1.5, optimum.shape)
    above = objective(hidden, atoms, worse, 0.05) - objective(hidden, atoms, optimum, 0.05)
    assert (duality_gap(hidden, atoms, worse, 0.05) >= above - 1e-12).all()


def test_codes_become_dense_rows():
    values, kkt = np.array([1, 2, 3], np.float32), np.zeros(2, np.float32)
    first = np.array([2, 0]), np.array([0, 4], np.int32), values[:2], kkt
    second = np.array([1]), np.array([3], np.int32), values[2:], kkt[:1]
    codes = join_codes([first, second])
    expected = np.array([[1, 0, 0, 0, 2], [0] * 5, [0, 0, 0, 3, 0]])
    assert len(codes) == 3 and codes.indptr.dtype == np.int64
    assert (codes.dense(5) == expected).all()
    assert (codes.dense(5, 1, 3) == expected[1:3]).all()
    nothing = join_codes([])
    assert isinstance(nothing, Codes) and len(nothing) == 0 and nothing.dense(5).shape == (0, 5)
