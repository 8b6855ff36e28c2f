"""Problems for the solvers, and what a right answer to them is.

Shapes: N tokens, d hidden width, K atoms.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from data import bench_file
from hypothesis import strategies as st

from pipeline.solvers.problem import kkt_violation

FLOAT32 = 5e-6  # what rounding adds to a KKT violation of 1e-3


def unit_rows(array):
    norms = np.linalg.norm(array, axis=1, keepdims=True)
    return (array / np.maximum(norms, 1e-12)).astype(np.float32)


def problem(tokens=50, width=16, atoms=40, seed=0):
    rng = np.random.default_rng(seed)
    return unit_rows(rng.normal(size=(tokens, width))), unit_rows(rng.normal(size=(atoms, width)))


def check_certificate(hidden, atoms, codes, lam, tol=1e-3):
    """Well-formed, optimal to the tolerance, and honest about it."""
    assert codes.indptr.dtype == np.int64 and codes.indices.dtype == np.int32
    assert codes.values.dtype == codes.kkt.dtype == np.float32
    assert len(codes.indptr) == len(hidden) + 1 and len(codes.kkt) == len(hidden)
    assert (codes.values > 0).all()
    rows = np.repeat(np.arange(len(hidden)), np.diff(codes.indptr))
    assert (np.diff(rows * len(atoms) + codes.indices) > 0).all()
    true = kkt_violation(hidden, atoms, codes, lam)
    rounding = FLOAT32 + 1e-6 * np.array([codes.dense(len(atoms)).sum(1)]).max(initial=0)
    assert np.abs(true - codes.kkt).max(initial=0) <= rounding
    assert true.max(initial=0) <= tol + rounding


def real_data(rows):
    hidden = np.load(bench_file("hidden_test_8192x384_f16.npy"))[rows]
    return unit_rows(hidden.astype(np.float32)), np.load(bench_file("spams_atoms_3072x384_f32.npy"))


def sklearn_codes(hidden, atoms, lam):
    lasso = pytest.importorskip("sklearn.linear_model").Lasso
    model = lasso(alpha=lam / hidden.shape[1], positive=True, fit_intercept=False, tol=1e-12, max_iter=100_000)
    return model.fit(atoms.T.astype(float), hidden.T.astype(float)).coef_


@st.composite
def nasty_problems(draw):
    """Small problems with every kind of atom and row that has no business in a dictionary."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    width, atoms = draw(st.integers(1, 24)), draw(st.integers(1, 70))
    dictionary = unit_rows(rng.normal(size=(atoms, width)))
    kinds = st.sampled_from(["duplicate", "zero", "collinear", "short", "opposite"])
    for kind in draw(st.lists(kinds, max_size=8)):
        target, source = rng.integers(atoms, size=2)
        dictionary[target] = {
            "duplicate": dictionary[source],
            "zero": 0 * dictionary[source],
            "short": 0.3 * dictionary[source],
            "collinear": unit_rows(dictionary[source : source + 1] + 1e-4 * rng.normal(size=width))[0],
            "opposite": -dictionary[source],
        }[kind]
    hidden = unit_rows(rng.normal(size=(draw(st.integers(0, 5)), width)))
    if len(hidden) and draw(st.booleans()):
        hidden[rng.integers(len(hidden))] = draw(st.sampled_from([0, 1])) * dictionary[rng.integers(atoms)]
    return hidden, dictionary, draw(st.sampled_from([2.0, 0.5, 0.05, 0.005]))


def assert_equal_bits(found, expected):
    for name in ("indptr", "indices", "values", "kkt"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


@contextmanager
def rounding_products() -> Iterator[None]:
    """Let torch round the factors of float32 products to bfloat16, as its setting allows processors that gain by it."""
    matmul, addmm = torch.Tensor.__matmul__, torch.addmm

    def rounded(tensor):
        return tensor.bfloat16().float() if tensor.dtype == torch.float32 else tensor

    torch.Tensor.__matmul__ = lambda left, right: matmul(rounded(left), rounded(right))
    torch.addmm = lambda total, left, right: addmm(total, rounded(left), rounded(right))
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.Tensor.__matmul__, torch.addmm = matmul, addmm
