"""The explicit vector loops against NumPy, at sizes that do and do not fill vectors."""

import subprocess
import sys

import numba
import numpy as np
import pytest
import torch
from data import ROOT

from pipeline.solvers import onednn, vectors
from pipeline.solvers.parallel import OPTIONS


def compiled(function, *kinds):
    """A function that Python can call, from one that only compiled code can."""
    names = [f"x{i}" for i in range(len(kinds))]
    source = f"lambda {', '.join(names)}: function({', '.join(names)})"
    return numba.njit(**OPTIONS)(eval(source, {"function": function}))


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(("count", "width"), [(0, 16), (2, 16), (34, 48), (64, 128)])
def test_combine(count, width):
    out, weights, rows = numbers(130), numbers(128), numbers(128, 128)
    untouched = out[width:].copy()
    compiled(vectors.combine, *range(5))(out, weights, rows, count, width)
    np.testing.assert_allclose(out[:width], weights[:count] @ rows[:count, :width], atol=1e-4)
    np.testing.assert_array_equal(out[width:], untouched)


@pytest.mark.parametrize("columns", [16, 48, 3072])
@pytest.mark.parametrize("count", [0, 8, 24])
@pytest.mark.parametrize("dtype", [np.float32, np.int16])
def test_subtract_rows(columns, count, dtype):
    out, weights = numbers(columns + 3), numbers(24)
    matrix = (100 * numbers(40, columns)).astype(dtype)
    rows = np.random.default_rng(1).integers(40, size=24).astype(np.int32)
    rows[0] = 39
    expected = out.copy()
    expected[:columns] -= weights[:count] @ matrix[rows[:count]]
    compiled(vectors.subtract_rows, *range(5))(out, weights, matrix, rows, count)
    np.testing.assert_allclose(out, expected, atol=1e-2 if count else 0)


@pytest.mark.parametrize(("count", "width"), [(0, 16), (4, 16), (12, 48)])
def test_row_products(count, width):
    out, vector, matrix = numbers(16), numbers(width), numbers(40, width)
    rows = np.random.default_rng(1).integers(40, size=16).astype(np.int32)
    expected = out.copy()
    expected[:count] = matrix[rows[:count]] @ vector
    compiled(vectors.row_products, *range(5))(out, vector, matrix, rows, count)
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_lanes_above_and_their_bits():
    grad, sizes, factor, cut = numbers(48), numbers(48, seed=1), np.float32(0.5), np.float32(0.3)
    bits = compiled(vectors.lanes_above, *range(5))(grad, factor, sizes, 16, cut)
    expected = np.flatnonzero((grad + factor * np.abs(sizes))[16:32] > cut)
    assert 0 < len(expected) < 16 and bits == sum(1 << lane for lane in expected.tolist())
    assert compiled(vectors.lowest_bit, 0)(bits) == expected[0]


@pytest.mark.parametrize("columns", [5, 16, 37])
def test_widen(columns):
    matrix, out = torch.from_numpy(numbers(3, columns)), numbers(columns + 2)
    for values in (matrix, matrix.bfloat16()):
        expected = out.copy()
        expected[:columns] = values[1].float()
        stored = values.view(torch.int16) if values.dtype == torch.bfloat16 else values
        compiled(vectors.widen, *range(3))(out, stored.numpy(), 1)
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(("atoms", "blocks"), [(16, 16), (48, 16), (3072, 96), (112, 32)])
def test_block_maxima_and_largest(atoms, blocks):
    grad, maxima = numbers(atoms) - 10, np.empty(blocks, np.float32)
    compiled(vectors.block_maxima, *range(2))(grad, maxima)
    padded = np.full(-(-atoms // blocks) * blocks, -np.inf, np.float32)
    padded[:atoms] = grad
    np.testing.assert_array_equal(maxima, padded.reshape(-1, blocks).max(0))
    assert compiled(vectors.largest, 0)(maxima) == grad.max()


@pytest.mark.parametrize("width", [16, 48])
def test_vectors_of_conjugate_gradients(width):
    first, second, third = numbers(64), numbers(64, seed=1), numbers(64, seed=2)
    half = np.float32(0.5)
    np.testing.assert_allclose(
        compiled(vectors.dot, *range(3))(first, second, width), first[:width] @ second[:width], rtol=1e-4
    )
    out = first.copy()
    compiled(vectors.add_scaled, *range(5))(out, out, half, second, width)
    np.testing.assert_allclose(out[:width], first[:width] + half * second[:width], rtol=1e-5, atol=1e-6)
    out = first.copy()
    compiled(vectors.add_scaled, *range(5))(out, second, half, out, width)
    np.testing.assert_allclose(out[:width], second[:width] + half * first[:width], rtol=1e-5, atol=1e-6)
    out = first.copy()
    squared = compiled(vectors.residual_on_support, *range(4))(out, second, third, width)
    expected = np.where(third > 0, second, 0)[:width]
    np.testing.assert_array_equal(out[:width], expected)
    np.testing.assert_allclose(squared, expected @ expected, rtol=1e-5)


def test_step_to_zero():
    code, direction = np.array([2, 1, 0, 3] + [0] * 12, np.float32), np.array([-1, 5, 0, -6] + [0] * 12, np.float32)
    step = compiled(vectors.step_to_zero, *range(3))
    assert step(code, direction, 16) == 0.5
    assert step(code, np.abs(direction), 16) > 1e29


@pytest.mark.parametrize("works", [True, False])
def test_onednn_products_and_the_way_without(monkeypatch, works):
    if not works:
        monkeypatch.setattr(onednn, "available", lambda: False)
    rows, weight, bias = (torch.from_numpy(numbers(*shape)) for shape in ((5, 7), (11, 7), (11,)))
    np.testing.assert_allclose(onednn.linear(rows, weight, bias), rows @ weight.T + bias, atol=1e-5)
    np.testing.assert_allclose(onednn.product(rows, weight), rows @ weight.T, atol=1e-5)


def test_the_solvers_products_never_round_the_factors(monkeypatch):
    monkeypatch.setattr(onednn, "linear", lambda *_: pytest.fail("oneDNN may round"))
    torch.set_float32_matmul_precision("medium")
    try:
        rows, weight = torch.full((2, 3), 1 + 2.0**-20), torch.ones(4, 3)
        assert (onednn.product(rows, weight) == 3 * (1 + 2.0**-20)).all()
    finally:
        torch.set_float32_matmul_precision("highest")


THREADS_OF_A_WORKER = """
import threading, torch
from threadpoolctl import ThreadpoolController
from pipeline.solvers import onednn
torch.set_num_threads(2)
found = []
def work():
    with onednn.one_thread():
        onednn.product(torch.ones(64, 64), torch.ones(64, 64)); torch.ones(200, 200) @ torch.ones(200, 200)
        found.extend(lib.num_threads for lib in ThreadpoolController().lib_controllers if lib.user_api == "openmp")
worker = threading.Thread(target=work); worker.start(); worker.join()
print(set(found), torch.get_num_threads())
"""


def test_one_thread_holds_in_a_new_thread_and_nowhere_else():
    run = subprocess.run([sys.executable, "-c", THREADS_OF_A_WORKER], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout.strip() == "{1} 2", run.stdout + run.stderr
