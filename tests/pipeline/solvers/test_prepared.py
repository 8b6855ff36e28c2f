"""What the solver on a CPU reads in few bits: within its error bounds, and without a trace in the codes."""

import warnings

import numpy as np
import pytest
import torch
from lasso import assert_equal_bits, check_certificate, problem, real_data, rounding_products, sklearn_codes, unit_rows

from pipeline.solvers import ConvergenceWarning, cd_cpu, nonneg_lasso, onednn, prepare, prepared
from pipeline.solvers.prepared import correlate_atoms
from pipeline.solvers.problem import objective


@pytest.fixture
def bfloat16(request, monkeypatch):
    """Whether correlations are products of bfloat16, which are imitated where the processor has none."""
    wanted = getattr(request, "param", True)
    if wanted and not onednn.multiplies_bfloat16():
        matmul = torch.Tensor.__matmul__  # this one never rounds more
        monkeypatch.setattr(
            prepared, "multiply", lambda rows, weight: matmul(rows.float(), weight.float().T).bfloat16()
        )
    monkeypatch.setattr(onednn, "multiplies_bfloat16", lambda: wanted)
    return wanted


both_products = pytest.mark.parametrize("bfloat16", [True, False], indirect=True)


def approximate(prepared, hidden_nd):
    """Correlations as the solver first has them, and their error bound, both float64 (n, K)."""
    found = correlate_atoms(prepared, hidden_nd)
    rounded_nK = found.rounded_nK
    if rounded_nK.dtype == np.int16:
        rounded_nK = (rounded_nK.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    approximate_nK = rounded_nK.astype(float)
    if found.relative:
        approximate_nK -= found.along_nr.astype(float) @ prepared.view.main_rK[:, : rounded_nK.shape[1]]
    return approximate_nK, found.margin_n[:, None] + float(found.relative) * np.abs(rounded_nK)


@both_products
@pytest.mark.parametrize("data", [(200, 384, 0), (50, 16, 40), (20, 3, 5), (7, 1, 2), (30, 400, 90)])
def test_correlations_are_within_their_bounds(data, bfloat16):
    tokens, width, atoms = data
    hidden_nd, atoms_Kd = problem(tokens, width, atoms) if atoms else real_data(slice(tokens))
    hidden_nd = hidden_nd * np.float32(3)  # of any norm
    approximate_nK, bound_nK = approximate(prepare(atoms_Kd), hidden_nd)
    error_nK = np.abs(approximate_nK - hidden_nd.astype(float) @ atoms_Kd.T.astype(float))
    assert (error_nK <= bound_nK).all()
    assert bound_nK.max() < (0.06 if bfloat16 else 3e-4)


@pytest.mark.usefixtures("bfloat16")
def test_main_directions_make_the_bounds_small_on_real_data(monkeypatch):
    hidden_nd, atoms_Kd = real_data(slice(200))
    _, bound_nK = approximate(prepare(atoms_Kd), hidden_nd)
    monkeypatch.setattr("pipeline.solvers.prepared._main_directions", lambda atoms_Kd: np.zeros((0, 384), np.float32))
    _, without_nK = approximate(prepare(atoms_Kd), hidden_nd)
    assert bound_nK.mean() < 0.75 * without_nK.mean()


def test_gram_entries_are_within_half_a_unit():
    for factor in (1, 0.01, 30):
        atoms_Kd = problem(1, 24, 50)[1] * np.float32(factor)
        view = prepare(atoms_Kd).view
        entries_KK = view.gram_KK[:, :50] * float(view.scale)
        assert np.abs(entries_KK - atoms_Kd.astype(float) @ atoms_Kd.T.astype(float)).max() <= 0.501 * view.scale
        assert not view.gram_KK[:, 50:].any()


@both_products
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("tol", [1e-3, 1e-4, 5e-6])
def test_codes_are_certified_whatever_the_product(tol):
    hidden_Nd, atoms_Kd = real_data(slice(300))
    with warnings.catch_warnings(action="error", category=ConvergenceWarning):
        codes = nonneg_lasso(hidden_Nd, atoms_Kd, 0.05, tol=tol)
    check_certificate(hidden_Nd, atoms_Kd, codes, 0.05, tol=tol)


@both_products
def test_nothing_is_rounded_more_where_torch_may_round_float32(bfloat16):
    """By torch.set_float32_matmul_precision: the bounds know nothing of it."""
    hidden_nd, atoms_Kd = real_data(slice(200))
    with rounding_products():
        assert (torch.ones(1, 1) * (1 + 2.0**-12) @ torch.ones(1, 1)).item() == 1  # it does round
        approximate_nK, bound_nK = approximate(prepare(atoms_Kd), hidden_nd)
        codes = nonneg_lasso(hidden_nd, atoms_Kd, 0.05)
    assert (np.abs(approximate_nK - hidden_nd.astype(float) @ atoms_Kd.T.astype(float)) <= bound_nK).all()
    check_certificate(hidden_nd, atoms_Kd, codes, 0.05)


def test_a_certificate_finds_what_the_approximation_hides(monkeypatch):
    """Correlations that lack the best atoms, within a bound that says so."""
    hidden_Nd, atoms_Kd = problem(40, 16, 60)

    def hide(prepared, hidden_nd):
        found = correlate_atoms(prepared, hidden_nd)
        rounded_nK = (hidden_nd @ atoms_Kd.T).astype(np.float32)
        rounded_nK[:, ::2] -= 0.4
        along_nr = np.zeros_like(found.along_nr)
        return found._replace(rounded_nK=rounded_nK, along_nr=along_nr, margin_n=found.margin_n + np.float32(0.4))

    monkeypatch.setattr(cd_cpu, "correlate_atoms", hide)
    check_certificate(hidden_Nd, atoms_Kd, nonneg_lasso(hidden_Nd, atoms_Kd, 0.05), 0.05)


def test_nearly_dependent_atoms_are_solved_to_a_small_tolerance():
    """Their Gram matrix in 16 bits is not good enough: it is computed in float32."""
    rng = np.random.default_rng(0)
    hidden_Nd, atoms_Kd = problem(40, 16, 30)
    near = [unit_rows(atoms_Kd + 1e-4 * rng.normal(size=atoms_Kd.shape)) for _ in range(3)]
    atoms_Kd = np.concatenate([atoms_Kd, *near, 0.02 * atoms_Kd[:5]])
    with warnings.catch_warnings(action="error", category=ConvergenceWarning):
        codes = nonneg_lasso(hidden_Nd, atoms_Kd, 0.01, tol=5e-6)
    check_certificate(hidden_Nd, atoms_Kd, codes, 0.01, tol=5e-6)


@pytest.mark.parametrize("copies", [1, 3])
def test_a_rounded_gram_matrix_is_refined_where_it_stops_the_descent(copies):
    """No atom is short here, so the Gram matrix begins in 16 bits: with those alone, tokens stop at 2e-5."""
    rng = np.random.default_rng(0)
    hidden_Nd, atoms_Kd = problem(60, 16, 30)
    near = [unit_rows(atoms_Kd + 1e-4 * rng.normal(size=atoms_Kd.shape)) for _ in range(copies)]
    atoms_Kd = np.concatenate([atoms_Kd, *near])
    assert not prepare(atoms_Kd).view.has_small
    with warnings.catch_warnings(action="error", category=ConvergenceWarning):
        codes = nonneg_lasso(hidden_Nd, atoms_Kd, 0.01, tol=5e-6)
    check_certificate(hidden_Nd, atoms_Kd, codes, 0.01, tol=5e-6)
    expected = objective(hidden_Nd[:5], atoms_Kd, sklearn_codes(hidden_Nd[:5], atoms_Kd, 0.01), 0.01)
    np.testing.assert_allclose(objective(hidden_Nd, atoms_Kd, codes, 0.01)[:5], expected, rtol=1e-4)


@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("bfloat16", [False], indirect=True)
def test_a_certificate_finds_what_coarse_gram_rows_hide():
    """A long atom makes the integers of all others coarse: gradients drift by up to 0.01, far above the tolerance."""
    hidden_Nd, atoms_Kd = problem(200, 16, 300)
    atoms_Kd[0] *= 30
    codes = nonneg_lasso(hidden_Nd, atoms_Kd, 0.05, tol=1e-4)
    gradient_NK = (hidden_Nd - codes.dense(300) @ atoms_Kd.astype(float)) @ atoms_Kd.astype(float).T
    assert gradient_NK.max() <= 0.05 + 1.01e-4 and codes.kkt.max() <= 1e-4


def test_prepared_atoms_give_the_same_bits_and_fit_only_themselves():
    hidden_Nd, atoms_Kd = problem(300, 16, 40)
    prepared = prepare(atoms_Kd, atoms_Kd @ atoms_Kd.T)
    expected = nonneg_lasso(hidden_Nd, atoms_Kd, 0.05)
    assert_equal_bits(nonneg_lasso(hidden_Nd, atoms_Kd, 0.05, gram_KK=prepared), expected)
    with pytest.raises(ValueError, match="prepared for other atoms"):
        nonneg_lasso(hidden_Nd, atoms_Kd[:30], 0.05, gram_KK=prepared)
    with pytest.raises(ValueError, match="where a GPU codes"):
        nonneg_lasso(hidden_Nd, atoms_Kd, 0.05, gram_KK=prepared, backend="cuda")


def test_small_atoms_among_large_ones_are_coded_exactly():
    rng = np.random.default_rng(3)
    atoms = rng.normal(size=(60, 16))
    atoms *= np.where(np.arange(60) % 2, 0.005, 1.0)[:, None] / np.linalg.norm(atoms, axis=1, keepdims=True)
    hidden = rng.normal(size=(200, 16))
    hidden /= np.linalg.norm(hidden, axis=1, keepdims=True)
    atoms, hidden = atoms.astype(np.float32), hidden.astype(np.float32)
    codes = nonneg_lasso(hidden, atoms, 0.001, tol=1e-3)
    assert codes.indices.max() < 60 and np.isfinite(codes.values).all()
    gradient = (hidden - codes.dense(60) @ atoms.astype(np.float64)) @ atoms.T.astype(np.float64) - 0.001
    dense = codes.dense(60)
    assert gradient.max() < 1.1e-3 and np.abs(gradient[dense > 0]).max() < 1.1e-3


def test_prepared_atoms_belong_to_their_matrix_as_it_is():
    atoms = np.eye(20, dtype=np.float32)
    prepared = prepare(atoms)
    with pytest.raises(ValueError, match="prepared for other atoms"):
        nonneg_lasso(atoms[:3], atoms[::-1].copy(), 0.05, gram_KK=prepared)
    atoms[0, 0] = 0.5
    with pytest.raises(ValueError, match="prepared for other atoms"):
        nonneg_lasso(atoms[:3], atoms, 0.05, gram_KK=prepared)


def test_a_gram_matrix_that_is_not_finite_is_refused():
    atoms = np.eye(20, dtype=np.float32)
    with pytest.raises(ValueError, match="not finite"):
        prepare(atoms, np.full((20, 20), np.nan, np.float32))
