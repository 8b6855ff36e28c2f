"""FISTA as the official code runs it, against plain NumPy; and how its targets differ from the exact ones."""

import numpy as np
import pytest
import torch
from data import bench_file
from lasso import problem, rounding_products

from pipeline.solvers import fista, nonneg_lasso
from pipeline.solvers.problem import kkt_violation
from pipeline.solvers.tensors import _join_tensors

LAM = 0.05


def unit_rows(array):
    return (array / np.linalg.norm(array, axis=1, keepdims=True)).astype(np.float32)


def numpy_fista(hidden_Nd, atoms_Kd, lam, steps):
    """Beck and Teboulle 2009, equations 4.1 to 4.3, in float64: each token by itself."""
    step = 1 / np.linalg.norm(atoms_Kd.astype(np.float64), 2) ** 2
    codes_NK = np.zeros((len(hidden_Nd), len(atoms_Kd)))
    for h_d, code_K in zip(hidden_Nd.astype(np.float64), codes_NK, strict=True):
        point_K, t = code_K.copy(), 1.0
        for _ in range(steps):
            before_K = code_K.copy()
            gradient_K = atoms_Kd @ (atoms_Kd.T @ point_K - h_d)
            code_K[:] = np.maximum(point_K - step * gradient_K - step * lam, 0)
            t, t_before = (1 + np.sqrt(1 + 4 * t**2)) / 2, t
            point_K = code_K + (t_before - 1) / t * (code_K - before_K)
    return codes_NK


@pytest.mark.parametrize("steps", [1, 2, 30, 100])
def test_steps_are_those_of_plain_numpy(steps):
    rng = np.random.default_rng(0)
    hidden, atoms = unit_rows(rng.normal(size=(70, 16))), unit_rows(rng.normal(size=(60, 16)))
    expected = numpy_fista(hidden, atoms, LAM, steps)
    codes = nonneg_lasso(hidden, atoms, LAM, backend="fista", steps=steps, tol=None)
    np.testing.assert_allclose(codes.dense(60), expected, atol=2e-6)
    np.testing.assert_allclose(codes.kkt, kkt_violation(hidden, atoms, expected, LAM), atol=1e-5)


def test_a_row_does_not_depend_on_the_others_of_its_product():
    rng = np.random.default_rng(1)
    hidden, atoms = unit_rows(rng.normal(size=(300, 32))), unit_rows(rng.normal(size=(90, 32)))
    whole = fista.solve(hidden, atoms, LAM, rows_at_once=128)
    fewer = fista.solve(np.delete(hidden, [3, 40, 41], axis=0), atoms, LAM, rows_at_once=128)
    kept = np.delete(whole.dense(90, dtype=np.float32), [3, 40, 41], axis=0)
    assert np.array_equal(fewer.dense(90, dtype=np.float32), kept)


def test_codes_made_on_a_device_are_joined_as_on_the_host():
    """What a GPU returns, made of CPU tensors."""
    rng = np.random.default_rng(2)
    hidden, atoms = unit_rows(rng.normal(size=(50, 16))), unit_rows(rng.normal(size=(40, 16)))
    expected = fista.solve(hidden, atoms, LAM, rows_at_once=50)
    step = 1 / np.linalg.norm(atoms.astype(np.float64), 2) ** 2
    parts = []
    for rows in torch.from_numpy(hidden).split(25):
        codes = fista.fista_steps(rows, torch.from_numpy(atoms), LAM, step, 100)
        parts.append(fista._certify(rows, torch.from_numpy(atoms), codes, LAM, len(rows)))
    found = _join_tensors(parts, torch.device("cpu"))
    assert found.indptr.dtype == torch.int64 and found.indices.dtype == torch.int32 and len(found) == 50
    assert torch.equal(found.indptr, torch.from_numpy(expected.indptr)) and len(found.kkt) == 50
    assert np.array_equal(found.indices.numpy(), expected.indices)
    np.testing.assert_allclose(found.values.numpy(), expected.values, atol=1e-6)


@pytest.mark.parametrize(
    "rounding", [rounding_products, lambda: torch.autocast("cpu", torch.bfloat16)], ids=["precision", "autocast"]
)
def test_the_violation_is_honest_where_torch_may_round(rounding):
    hidden, atoms = problem(40, 16, 60)
    with rounding():
        codes = nonneg_lasso(hidden, atoms, LAM, backend="fista", steps=300, tol=None)
    true = kkt_violation(hidden, atoms, codes, LAM)
    np.testing.assert_allclose(codes.kkt, true, atol=1e-5)
    assert true.max() > 1e-3  # the steps themselves are as rough as was allowed


@pytest.mark.parametrize("steps", [0, -3, 1.5])
def test_steps_are_a_positive_whole_number(steps):
    with pytest.raises(ValueError, match="steps must be a whole number from 1 on"):
        nonneg_lasso(np.eye(3), np.eye(3), LAM, backend="fista", steps=steps)


def test_no_tolerance_is_for_fista_alone():
    with pytest.raises(ValueError, match="tol must be a positive number"):
        nonneg_lasso(np.eye(3), np.eye(3), LAM, tol=None)


def test_the_official_targets_are_smoother_than_the_exact_ones():
    """The figures of docs/sparse-coding.md, on some of the rows that the benchmark takes."""
    from benchmarks.target_solvers import compared

    hidden = unit_rows(np.load(bench_file("hidden_test_8192x384_f16.npy"))[::64].astype(np.float32))
    figures = compared(hidden, np.load(bench_file("spams_atoms_3072x384_f32.npy")), LAM, steps=100)
    official, exact = figures["fista"], figures["cd"]
    assert 66 < official["non_zeros"] < 78 and 28 < exact["non_zeros"] < 35
    assert 3.3 < official["entropy_nats"] < 3.6 and 2.4 < exact["entropy_nats"] < 2.7
    assert 0.82 < official["top_32_mass"] < 0.88 and exact["top_32_mass"] > 0.97
    assert 0.37 < figures["total_variation"] < 0.42 and 0.65 < figures["same_top_atom"] < 0.9
    assert official["kkt"] > 0.02 and exact["kkt"] < 1e-4
