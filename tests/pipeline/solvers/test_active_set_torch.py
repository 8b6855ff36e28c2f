"""The solver in plain torch: against scikit-learn and the CPU solver, on real, random and nasty input."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from lasso import (
    assert_equal_bits,
    check_certificate,
    nasty_problems,
    problem,
    real_data,
    rounding_products,
    sklearn_codes,
)

from pipeline import solvers
from pipeline.solvers import ConvergenceWarning, active_set_torch, cuda_products, nonneg_lasso, prepare
from pipeline.solvers.problem import kkt_violation, objective


def solve(hidden, atoms, lam=0.05, **how):
    with warnings.catch_warnings(action="error", category=ConvergenceWarning):
        return nonneg_lasso(hidden, atoms, lam, backend="torch", **how)


@pytest.mark.parametrize(("width", "atoms", "lam"), [(16, 40, 0.05), (64, 300, 0.05), (30, 20, 0.2), (8, 100, 0.01)])
def test_random_problems_against_scikit_learn(width, atoms, lam):
    hidden, atoms = problem(60, width, atoms)
    codes = solve(hidden, atoms, lam, tol=2e-6)
    check_certificate(hidden, atoms, codes, lam, tol=2e-6)
    expected = sklearn_codes(hidden, atoms, lam)
    np.testing.assert_allclose(objective(hidden, atoms, codes, lam), objective(hidden, atoms, expected, lam), rtol=1e-5)
    np.testing.assert_allclose(codes.dense(len(atoms)), expected, atol=2e-3)


@pytest.mark.parametrize("tol", [1e-3, 1e-4])
def test_real_data_against_the_solver_on_a_cpu(tol):
    hidden, atoms = real_data(slice(0, 8192, 20))
    codes = solve(hidden, atoms, tol=tol)
    check_certificate(hidden, atoms, codes, 0.05, tol=tol)
    exact = nonneg_lasso(hidden, atoms, 0.05, tol=1e-6)
    np.testing.assert_allclose(objective(hidden, atoms, codes, 0.05), objective(hidden, atoms, exact, 0.05), rtol=tol)
    assert len(codes.values) == pytest.approx(len(exact.values), rel=0.05)


@pytest.mark.promise("certified targets …")
@pytest.mark.parametrize("tol", [1e-3, 1e-4])
@settings(max_examples=150, deadline=None)
@given(nasty=nasty_problems())
def test_nasty_problems_are_solved_with_an_honest_certificate(tol, nasty):
    hidden, atoms, lam = nasty
    check_certificate(hidden, atoms, solve(hidden, atoms, lam, tol=tol), lam, tol=tol)


def test_nearly_identical_and_small_atoms():
    rng = np.random.default_rng(0)
    hidden, atoms = problem(40, 16, 30)
    near = [atoms + np.float32(1e-4) * rng.normal(size=atoms.shape).astype(np.float32) for _ in range(3)]
    atoms = np.concatenate([atoms, *near, 0.02 * atoms[:5]]) / np.float32(1.001)
    for tol in (1e-3, 1e-4):
        check_certificate(hidden, atoms, solve(hidden, atoms, 0.01, tol=tol), 0.01, tol=tol)


@pytest.mark.parametrize(("width", "atoms", "lam"), [(2, 56, 0.05), (3, 44, 0.005)])
def test_many_more_atoms_than_dimensions(width, atoms, lam):
    """Each problem has a token that the rounds of others leave above the tolerance, however many they are."""
    hidden, atoms = problem(300, width, atoms)
    check_certificate(hidden, atoms, solve(hidden, atoms, lam, tol=1e-4), lam, tol=1e-4)


def test_codes_with_more_atoms_than_the_first_working_set_holds():
    hidden, atoms = problem(6, 400, 900)
    codes = solve(hidden, atoms, 1e-3, tol=1e-5)
    assert np.diff(codes.indptr).min() > 4 * active_set_torch.FIRST_CAPACITY
    check_certificate(hidden, atoms, codes, 1e-3, tol=1e-5)


@pytest.mark.parametrize("size", [8, 12, 16, 20, 24, 30])
def test_tokens_that_need_a_larger_working_set_are_kept_when_others_are_finished(size):
    """Copies of a token need the same rounds. Of some tokens these are as many as the first working set of others."""
    rng = np.random.default_rng(1)
    atoms = problem(1, 64, 300)[1]

    def sums_of(count):
        sum_d = np.abs(rng.normal(size=count)) @ atoms[rng.choice(len(atoms), count, replace=False)]
        return (sum_d / np.linalg.norm(sum_d)).astype(np.float32)

    for _ in range(8):
        hidden = np.stack([sums_of(size)] * 3 + [sums_of(300)] * 5)
        codes = solve(hidden, atoms, 0.01, tol=1e-4)
        assert np.diff(codes.indptr)[3:].min() > active_set_torch.FIRST_CAPACITY
        check_certificate(hidden, atoms, codes, 0.01, tol=1e-4)


def test_empty_codes_no_rows_and_a_dictionary_of_one_atom():
    hidden, atoms = problem()
    codes = solve(hidden, atoms, float((hidden @ atoms.T).max()) + 1e-3)
    assert len(codes.values) == 0 and (codes.kkt == 0).all() and len(codes) == len(hidden)
    assert len(solve(hidden[:0], atoms)) == 0
    codes = solve(hidden, atoms[:1], 0.05, tol=1e-6)
    np.testing.assert_allclose(codes.dense(1)[:, 0], np.maximum(hidden @ atoms[0] - 0.05, 0), atol=1e-5)


def test_equal_input_gives_equal_bits_whatever_its_type(monkeypatch):
    hidden, atoms = problem(300, 16, 60)
    codes = solve(hidden, atoms)
    assert_equal_bits(solve(hidden, atoms), codes)
    tensors = torch.from_numpy(hidden).T.contiguous().T, torch.from_numpy(atoms)
    assert_equal_bits(solve(*tensors, gram_KK=torch.from_numpy(atoms) @ torch.from_numpy(atoms).T), codes)
    monkeypatch.setitem(active_set_torch.GRADIENT_BYTES, "cpu", 4 * 60 * 32)  # 32 tokens a chunk
    check_certificate(hidden, atoms, solve(hidden, atoms), 0.05)


@pytest.mark.parametrize(
    "rounding", [rounding_products, lambda: torch.autocast("cpu", torch.bfloat16)], ids=["precision", "autocast"]
)
def test_certificates_hold_where_torch_may_round(rounding):
    hidden, atoms = real_data(slice(100))
    with rounding():
        codes = solve(hidden, atoms, tol=1e-4)
    check_certificate(hidden, atoms, codes, 0.05, tol=1e-4)


def test_a_round_asks_the_host_once(monkeypatch):
    """On a GPU each question waits for all work before it."""
    hidden, atoms = problem(500, 64, 300)
    rounds, asked = [], []
    excess, tolist = active_set_torch._excess, torch.Tensor.tolist
    monkeypatch.setattr(active_set_torch, "_excess", lambda *given: rounds.append(1) or excess(*given))
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: asked.append(1) or tolist(tensor))
    for name in ("item", "__bool__", "__int__", "__float__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, counting(asked, getattr(torch.Tensor, name)))
    codes = active_set_torch.solve(torch.from_numpy(hidden), torch.from_numpy(atoms), None, 0.05, 1e-4)
    assert codes.kkt.max() <= 1e-4 and 4 < len(rounds) < 40
    assert len(asked) == len(rounds) + 1  # the last one for the number of non-zeros


def counting(asked, method):
    def counted(*given, **named):
        asked.append(1)
        return method(*given, **named)

    return counted


# -- how it is chosen ----------------------------------------------------------------------------------------


def test_prepared_atoms_of_a_gpu_know_their_atoms():
    hidden, atoms = (torch.from_numpy(array) for array in problem())
    gram = atoms @ atoms.T
    prepared = solvers.PreparedTensors(atoms, atoms._version, gram, cuda_products.prepare(atoms, gram))
    assert prepared.fits(atoms) and not prepared.fits(atoms.clone())
    with pytest.raises(ValueError, match="prepared for other atoms"):
        nonneg_lasso(hidden, atoms, 0.05, gram_KK=prepared)  # on a CPU
    codes = nonneg_lasso(hidden, atoms, 0.05, gram_KK=prepared, backend="torch")
    assert kkt_violation(hidden, atoms, codes, 0.05).max() <= 1.01e-3
    atoms[0, 0] += 1
    assert not prepared.fits(atoms)
    with pytest.raises(ValueError, match="prepared for other atoms"):
        nonneg_lasso(hidden, atoms, 0.05, gram_KK=prepared, backend="torch")
    with pytest.raises(ValueError, match="prepared for other atoms, .* or for a CPU"):
        nonneg_lasso(hidden, atoms, 0.05, gram_KK=prepare(atoms), backend="torch")


def test_what_a_gpu_answers_is_judged_by_one_question(monkeypatch):
    rows = torch.tensor([[1.0, 0], [np.nan, 1], [0, 1]])
    asked, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: asked.append(1) or tolist(tensor))
    kkt = torch.tensor([1e-4, 0, 5e-3])
    with pytest.warns(ConvergenceWarning, match="1 of 3 tokens have a KKT violation above 0.001, at most 0.005"):
        solvers._judge(kkt, 1e-3, torch.ones(3, dtype=torch.bool), rows)
    assert len(asked) == 1
    with pytest.raises(ValueError, match="hidden: NaN or infinity in row 1;"):
        solvers._judge(kkt, 1e-3, torch.isfinite(rows).all(1), rows)
