"""Problems on which a solver may diverge or stop: tiny penalties, long rows, equal atoms, numbers that overflow.

The measures here are plain float64 NumPy, none of the package's own.
"""

import warnings

import numpy as np
import pytest
import torch
from lasso import problem, sklearn_codes, unit_rows

from pipeline.solvers import ConvergenceWarning, nonneg_lasso, prepare
from pipeline.solvers.cd_cpu import _is_worse_than_empty

SEEDS = {"cpu": 100, "torch": 30}


def hard_problem(seed):
    """Rows, atoms, lam and tol from the corners of what is allowed."""
    rng = np.random.default_rng(seed)
    width, count = int(rng.integers(1, 97)), int(rng.integers(1, 401))
    lam, tol, norm = 10 ** rng.uniform(-6, np.log10(0.5)), 10 ** rng.uniform(-6, -2), 10 ** rng.uniform(-3, 4)
    atoms = rng.normal(size=(count, width))
    half = count - count // 2
    kinds = {
        "random": lambda: None,
        "duplicate": lambda: atoms.__setitem__(slice(half, None), atoms[: count - half]),
        "opposite": lambda: atoms.__setitem__(slice(half, None), -atoms[: count - half]),
        "zero": lambda: atoms.__setitem__(slice(None, None, 3), 0),
        "common direction": lambda: atoms.__iadd__(3 * rng.normal(size=width)),
        "one orthant": lambda: np.maximum(atoms, 0, out=atoms),
    }
    kind = [*kinds, "nearly equal", "short"][seed % 8]
    if kind in kinds:
        kinds[kind]()
    atoms = unit_rows(atoms)
    if kind == "nearly equal":
        near = 10 ** rng.uniform(-6, -2)
        atoms[half:] = unit_rows(atoms[: count - half] + near * rng.normal(size=(count - half, width)))
    elif kind == "short":
        atoms *= 10 ** rng.uniform(-3, 0, size=(count, 1)).astype(np.float32)
    hidden = unit_rows(rng.normal(size=(6, width)))
    hidden[0] = atoms[rng.integers(count)]
    hidden[1] = unit_rows(atoms[rng.integers(count)] + 1e-4 * rng.normal(size=(1, width)))
    hidden[2] = 0
    return (hidden * norm).astype(np.float32), atoms, lam, tol


def test_penalty_and_residual_decide_whether_a_code_is_worse_than_the_empty_one():
    rng, lam, decided_by_penalty = np.random.default_rng(0), np.float32(0.1), 0
    for _ in range(200):
        hidden = rng.normal(size=16).astype(np.float32)
        residual = (hidden * rng.uniform(0.5, 1.2)).astype(np.float32)
        code = rng.uniform(0, 8, 5).astype(np.float32)
        empty, squares = 0.5 * hidden.astype(float) @ hidden, 0.5 * residual.astype(float) @ residual
        objective = squares + lam * code[:4].sum(dtype=float)  # the fifth is beyond the working set
        assert _is_worse_than_empty(code, residual, hidden, 4, lam) == (objective > empty), (objective, empty)
        decided_by_penalty += squares < empty < objective
    assert decided_by_penalty > 20


@pytest.mark.parametrize("backend", SEEDS)
def test_codes_never_lose_against_the_empty_code_and_say_what_they_violate(backend):
    for seed in range(SEEDS[backend]):
        hidden, atoms, lam, tol = hard_problem(seed)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            codes = nonneg_lasso(hidden, atoms, lam, tol=tol, backend=backend)
        dense, exact = codes.dense(len(atoms)), atoms.astype(float)
        residual = hidden.astype(float) - dense @ exact
        empty = 0.5 * (hidden.astype(float) ** 2).sum(1)
        objective = 0.5 * (residual**2).sum(1) + lam * dense.sum(1)
        assert (objective <= empty * (1 + 1e-6)).all(), (seed, objective, empty)
        excess = residual @ exact.T - lam
        violation = np.where(dense > 0, np.abs(excess), np.maximum(excess, 0)).max(1)
        longest = np.linalg.norm(exact, axis=1).max()
        rounding = 2e-6 * longest * (np.linalg.norm(hidden, axis=1) + longest * dense.sum(1)) + 1e-7 * lam
        assert (np.abs(violation - codes.kkt) <= rounding).all(), (seed, violation, codes.kkt, rounding)
        assert codes.kkt.max() <= max(tol, 20 * rounding.max()), (seed, codes.kkt, tol, rounding)
        warned = any(issubclass(warning.category, ConvergenceWarning) for warning in caught)
        assert warned == bool((codes.kkt > tol).any()), (seed, codes.kkt, tol)


def spams_objective(hidden, atoms, lam):
    spams = pytest.importorskip("spams", reason="no SPAMS: pip install spams-bin (it is in the test extras)")
    hidden, atoms = hidden.astype(float), atoms.astype(float)
    codes = spams.lasso(
        np.asfortranarray(hidden.T), D=np.asfortranarray(atoms.T), lambda1=lam, mode=2, pos=True, numThreads=1
    )
    codes = codes.T.toarray()
    return 0.5 * ((hidden - codes @ atoms) ** 2).sum(1) + lam * codes.sum(1)


@pytest.mark.parametrize(("lam", "tol", "norm"), [(1e-5, 1e-6, 1), (0.05, 1e-3, 10**3.5)])
def test_more_atoms_than_dimensions_and_a_tiny_penalty(lam, tol, norm):
    """Rounding to 16 bits gave the Gram matrix of such a working set negative eigenvalues: codes grew to 8e14."""
    hidden, atoms = problem(40, 64, 300)
    hidden = hidden * np.float32(norm)
    with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):
        codes = nonneg_lasso(hidden, atoms, lam, tol=tol)
    dense = codes.dense(300)
    objective = 0.5 * ((hidden.astype(float) - dense @ atoms.astype(float)) ** 2).sum(1) + lam * dense.sum(1)
    np.testing.assert_allclose(objective, spams_objective(hidden, atoms, lam), rtol=5e-3)
    assert (codes.kkt <= tol).mean() >= 0.9


def test_long_rows_are_coded_as_scikit_learn_does():
    hidden, atoms = problem(6, 16, 40)
    hidden = hidden * np.float32(1e4)
    dense = nonneg_lasso(hidden, atoms, 500.0, tol=1.0).dense(40)
    expected = sklearn_codes(hidden, atoms, 500.0)
    np.testing.assert_allclose(dense, expected, atol=1e-3 * expected.max())


BACKENDS = ("cpu", "torch", "fista")


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_float32_cannot_square_is_refused(backend):
    eye = np.eye(4, dtype=np.float32)
    with pytest.raises(ValueError, match=r"hidden: a norm above 1e8 in row 0, 1, 2; leave such rows out"):
        nonneg_lasso(np.eye(3, 4) * 1e20, eye, 0.05, backend=backend)
    with pytest.raises(ValueError, match=r"hidden: a norm above 1e8 in row 1;"):
        nonneg_lasso(np.diag([1, 1e9, 1, 1]), eye, 0.05, backend=backend)
    with pytest.raises(ValueError, match=r"atoms: a norm above 1e8 in row 0, 1, 2, 3;"):
        nonneg_lasso(eye, 1e20 * eye, 0.05, backend=backend)
    with pytest.raises(ValueError, match=r"atoms: a norm above 1e8 in row 0, 1, 2, 3;"):
        prepare(1e20 * eye)


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_the_gram_matrix_of_atoms_in_another_order_is_refused_and_one_in_bfloat16_is_not(backend):
    """Its diagonal and its largest entry are right: wrong codes would be certified."""
    rng = np.random.default_rng(0)
    atoms, hidden = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in rng.normal(size=(2, 300, 32)))
    gram = (atoms @ atoms.T).astype(np.float32)
    order = rng.permutation(300)
    coarse = np.round(gram / 0.04) * np.float32(0.04)
    for wrong in (gram[order][:, order], coarse):
        with pytest.raises(ValueError, match="gram must be atoms @ atoms.T.*off by"):
            nonneg_lasso(hidden, atoms, 0.05, gram_KK=wrong, backend=backend)
    for width in (8, 16, 32):
        some = torch.from_numpy(unit_rows(atoms[:, :width])).bfloat16()
        codes = nonneg_lasso(hidden[:, :width], some, 0.05, gram_KK=some @ some.T, tol=1e-2, backend=backend)
        assert codes.kkt.max() <= 1e-2


@pytest.mark.parametrize("backend", BACKENDS[:2])
@pytest.mark.parametrize("factor", [1e20, 1e-9, -1.0, np.nan])
def test_a_gram_matrix_of_other_atoms_is_refused(backend, factor):
    eye = np.eye(4, dtype=np.float32)
    for gram in (factor * eye, eye + factor * eye[::-1]):
        if factor == 1e-9 and gram[0, 0] == 1:
            continue  # within rounding
        if factor == -1.0 and gram[0, 0] == 1:
            continue  # as large as entries of unit atoms may be
        with pytest.raises(ValueError, match="gram must be atoms @ atoms.T|not finite"):
            nonneg_lasso(eye, eye, 0.05, gram_KK=gram, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_the_largest_and_the_smallest_numbers_that_are_accepted(backend):
    eye = np.eye(4, dtype=np.float32)
    for rows, atoms, lam, tol, expected in [
        (1e8, 1, 1.0, 1e3, 1e8),
        (1e8, 1e8, 1.0, 1e12, 1),
        (1, 1, 3e38, 3e38, 0),
        (1e-3, 1e-16, 0.05, 1e-3, 0),
        (1e-30, 1, 1e-35, 1e-36, 1e-30),
    ]:
        codes = nonneg_lasso(rows * eye, atoms * eye, lam, tol=tol, backend=backend)
        np.testing.assert_allclose(codes.dense(4), expected * np.eye(4), rtol=2e-3, atol=1e-40)


def test_tensors_are_refused_alike():
    with pytest.raises(ValueError, match="hidden: a norm above 1e8 in row 2"):
        nonneg_lasso(torch.diag(torch.tensor([1.0, 1, 1e30, 1])), torch.eye(4), 0.05)
