"""Distributions against the dense formula."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.solvers import Codes
from pipeline.targets import distributions as module
from pipeline.targets.distributions import distributions
from shards.codec import encode_weights
from shards.schema import LSP_OCTAVES


def csr(dense):
    """Codes from a dense array."""
    dense = np.asarray(dense, np.float32)
    rows, atoms = dense.nonzero()
    indptr = np.concatenate([[0], np.bincount(rows, minlength=len(dense)).cumsum()]).astype(np.int64)
    return Codes(indptr, atoms.astype(np.int32), dense[rows, atoms], np.zeros(len(dense), np.float32))


def dense_formula(codes, n):
    """Kept probabilities and tail by sorting whole rows: by weight, then by lower atom."""
    kept, tail = np.zeros(codes.shape), np.zeros(len(codes))
    for row, code in enumerate(np.asarray(codes, np.float64)):
        if code.any():
            order = np.lexsort((np.arange(len(code)), -code))
            kept[row, order[:n]] = code[order[:n]] / code.sum()
            tail[row] = code[order[n:]].sum() / code.sum()
    return kept, tail


def as_dense(rows, atoms):
    return Codes(rows.indptr, rows.indices, rows.weights, rows.tail).dense(atoms)


def as_on_a_gpu(codes):
    """The same codes as tensors."""
    return Codes(*map(torch.from_numpy, (codes.indptr, codes.indices, codes.values, codes.kkt)))


def assert_same_bits(rows, others):
    for name in ("indptr", "indices", "weights", "tail"):
        found, expected = getattr(rows, name), getattr(others, name)
        assert found.dtype == expected.dtype and np.array_equal(found, expected), name
    assert rows.truncated_tokens == others.truncated_tokens
    assert others.lsp_codes is None
    assert np.array_equal(rows.lsp_codes, encode_weights(others.weights, np.diff(others.indptr), LSP_OCTAVES))


def check(codes, n):
    rows = distributions(csr(codes), n)
    assert_same_bits(distributions(as_on_a_gpu(csr(codes)), n), rows)
    limit = 255 if n == "all" else n
    kept, tail = dense_formula(codes, limit)
    np.testing.assert_allclose(as_dense(rows, codes.shape[1]), kept, rtol=1e-6)
    np.testing.assert_allclose(rows.tail, tail, rtol=1e-5, atol=1e-7)
    assert ((rows.tail == 0) == (tail == 0)).all()
    assert rows.truncated_tokens == ((codes > 0).sum(1) > limit).sum()
    token = np.repeat(np.arange(len(codes)), np.diff(rows.indptr))
    assert (np.diff(token * codes.shape[1] + rows.indices) > 0).all()
    assert (rows.indptr.dtype, rows.indices.dtype) == (np.int64, np.int32)
    assert rows.weights.dtype == rows.tail.dtype == np.float32
    return rows


@pytest.mark.parametrize("n", [1, 2, 7, 32, 255, "all"])
def test_random_codes(n):
    rng = np.random.default_rng(0)
    codes = rng.exponential(size=(300, 90)) * (rng.random((300, 90)) < rng.random((300, 1)))
    rows = check(codes.astype(np.float32), n)
    sums = as_dense(rows, 90).sum(1) + rows.tail
    np.testing.assert_allclose(sums[codes.any(1)], 1, rtol=1e-6)


@pytest.mark.parametrize("cells", [700, 1 << 24])
def test_on_a_gpu_a_million_entries_have_the_same_bits(monkeypatch, cells):
    """Values over seven decades, as a solver leaves them; with little memory, a few tokens at a time."""
    rng = np.random.default_rng(1)
    found = rng.integers(0, 70, 30_000 if cells > 700 else 60)
    indptr = np.concatenate([[0], found.cumsum()])
    values = np.exp(rng.normal(-3, 2.5, indptr[-1])).clip(1e-6, 2).astype(np.float32)
    values[rng.random(len(values)) < 0.1] = np.float32(0.125)  # ties
    places = np.concatenate([np.sort(rng.choice(300, count, replace=False)) for count in found]).astype(np.int32)
    codes = Codes(indptr, places, values, np.zeros(len(found), np.float32))
    monkeypatch.setattr(module, "CELLS_ON_GPU", cells)
    for n in (1, 32, "all"):
        assert_same_bits(distributions(as_on_a_gpu(codes), n), distributions(codes, n))


@given(
    st.lists(st.lists(st.sampled_from([0, 0, 1, 1, 2, 1e-6, 1e6]), min_size=6, max_size=6), max_size=5),
    st.integers(1, 8),
)
def test_ties_keep_the_lower_atom(codes, n):
    check(np.array(codes, np.float32).reshape(-1, 6), n)


@pytest.mark.promise("22 no non-zero code; NaN")
def test_empty_codes_stay_empty():
    rows = check(np.array([[0, 0, 0], [0, 2, 0], [0, 0, 0]], np.float32), 2)
    assert rows.indptr.tolist() == [0, 0, 1, 1]
    assert rows.weights.tolist() == [1] and rows.tail.tolist() == [0, 0, 0]


def test_no_token():
    rows = distributions(csr(np.zeros((0, 4))), 8)
    assert len(rows) == 0 and rows.truncated_tokens == 0 and rows.indptr.tolist() == [0]
    assert_same_bits(distributions(as_on_a_gpu(csr(np.zeros((0, 4)))), 8), rows)


@pytest.mark.promise("23 more than 255 non-zeros; unsorted, out of range")
def test_all_keeps_up_to_255_and_counts_the_tokens_that_had_more():
    codes = np.zeros((3, 400), np.float32)
    codes[0, :256] = np.arange(1, 257)
    codes[1, :255] = 1
    codes[2] = 1
    rows = check(codes, "all")
    assert np.diff(rows.indptr).tolist() == [255, 255, 255]
    assert rows.truncated_tokens == 2
    assert rows.tail[0] == pytest.approx(1 / np.arange(1, 257).sum())
    assert rows.indices[:255].tolist() == list(range(1, 256))  # the smallest one goes


@pytest.mark.parametrize("n", [0, 256, -1, 2.5, "most", None])
def test_other_limits_are_refused(n):
    with pytest.raises(ValueError, match="top_n must be a whole number from 1 to 255"):
        distributions(csr(np.ones((1, 3))), n)
