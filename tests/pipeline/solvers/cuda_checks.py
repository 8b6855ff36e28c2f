"""Checks of the GPU solver, for a GPU and for Numba's simulator of one; test_cd_cuda.py runs them.

    NUMBA_ENABLE_CUDASIM=1 python tests/pipeline/solvers/cuda_checks.py          every check that fits, tiny
    python tests/pipeline/solvers/cuda_checks.py                                 on a GPU, the real sizes too
    compute-sanitizer --tool racecheck python tests/pipeline/solvers/cuda_checks.py working_sets_grow few_of_real_size

Prints as its last line a JSON object: the name of each check, and null or what went wrong.
"""

import json
import os
import re
import sys
import time
import traceback
import warnings
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np
import torch
from numba import config

if config.ENABLE_CUDASIM:  # not when kernels_on_cpu.py runs this
    import lockstep

    lockstep.install()  # before kernels are made

from pipeline.solvers import (
    cd_cuda,
    cuda_block,
    cuda_kernels,
    cuda_launch,
    cuda_products,
    cuda_working_set,
    nonneg_lasso,
)
from pipeline.solvers.cuda_block import SIMULATED
from pipeline.solvers.problem import Codes, kkt_violation, objective

DEVICE = "cpu" if SIMULATED else "cuda"
ABOVE = 1.2e-3  # what a certificate may exceed the violation by, which it is a bound of; see cuda_products.py
CHECKS, GPU_CHECKS, SIMULATOR_CHECKS = {}, {}, {}


def check(function, where=CHECKS):
    where[function.__name__] = function
    return function


def unit_rows(array):
    return (array / np.maximum(np.linalg.norm(array, axis=1, keepdims=True), 1e-12)).astype(np.float32)


def problem(tokens, width, atoms, seed=0):
    rng = np.random.default_rng(seed)
    return unit_rows(rng.normal(size=(tokens, width))), unit_rows(rng.normal(size=(atoms, width)))


def solve(hidden, atoms, lam, tol=1e-3):
    """Codes as NumPy arrays; hidden and atoms are arrays or tensors."""
    hidden, atoms = (torch.as_tensor(array).to(DEVICE) for array in (hidden, atoms))
    codes = cd_cuda.solve(hidden, atoms, atoms.float() @ atoms.float().T, lam, tol)
    members = (codes.indptr, codes.indices, codes.values, codes.kkt)
    assert all(torch.is_tensor(member) and member.device == hidden.device for member in members)
    return Codes(*(member.cpu().numpy() for member in members))


def certify(hidden, atoms, codes, lam, tol=1e-3):
    """Well-formed, optimal to the tolerance, and honest about it."""
    assert codes.indptr.dtype == np.int64 and codes.indices.dtype == np.int32
    assert codes.values.dtype == codes.kkt.dtype == np.float32
    assert len(codes.indptr) == len(hidden) + 1 and len(codes.kkt) == len(hidden)
    assert len(codes.values) == len(codes.indices) == codes.indptr[-1] and (codes.values > 0).all()
    rows = np.repeat(np.arange(len(hidden)), np.diff(codes.indptr))
    assert (np.diff(rows * len(atoms) + codes.indices) > 0).all()
    true = kkt_violation(hidden, atoms, codes, lam)
    rounding = 1e-6 * (1 + codes.dense(len(atoms)).sum(1).max(initial=0))
    assert (true - codes.kkt).max(initial=0) <= rounding, (true - codes.kkt).max()
    assert (codes.kkt - true).max(initial=0) <= ABOVE, (codes.kkt - true).max()
    assert codes.kkt.max(initial=0) <= tol, codes.kkt.max()


def same_objective(hidden, atoms, codes, others, lam, rtol):
    np.testing.assert_allclose(objective(hidden, atoms, codes, lam), objective(hidden, atoms, others, lam), rtol=rtol)


def same_bits(codes, others):
    for name in ("indptr", "indices", "values", "kkt"):
        np.testing.assert_array_equal(getattr(codes, name), getattr(others, name), err_msg=name)


def row_by_row(atoms_name):
    """In place of a product: a token's bits no longer depend on how many tokens share it."""

    def correlate(prepared, residual_md, out_mK):
        for residual_d, out_K in zip(residual_md, out_mK, strict=True):
            out_K.copy_((getattr(prepared, atoms_name).float() * residual_d.float()).sum(1))

    return correlate


ROW_BY_ROW = {
    "correlate_in_float16": row_by_row("half_atoms_Kd"),
    "correlate_precisely": row_by_row("atoms_Kd"),
}


@contextmanager
def changed(module, **constants):
    before = {name: getattr(module, name) for name in constants}
    for name, value in constants.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


# -- small problems, for both ------------------------------------------------------------------------------


@check
def agrees_with_the_cpu_and_with_scikit_learn():
    from sklearn.linear_model import Lasso

    for width, count, lam in [(16, 41, 0.05), (8, 50, 0.02)]:
        hidden, atoms = problem(2, width, count)
        codes = solve(hidden, atoms, lam, tol=1e-4)
        certify(hidden, atoms, codes, lam, tol=1e-4)
        same_objective(hidden, atoms, codes, nonneg_lasso(hidden, atoms, lam, tol=1e-5), lam, 1e-4)
        lasso = Lasso(alpha=lam / width, positive=True, fit_intercept=False, tol=1e-12, max_iter=100_000)
        oracle = lasso.fit(atoms.T.astype(float), hidden.T.astype(float)).coef_
        same_objective(hidden, atoms, codes, oracle, lam, 1e-4)


@check
def arrays_of_the_host_go_there_and_back():
    hidden, atoms = problem(7, 8, 20)
    found = nonneg_lasso(hidden, atoms, 0.05, backend="cuda", gap=True)
    assert isinstance(found.values, np.ndarray) and len(found.gap) == 7
    certify(hidden, atoms, found, 0.05)
    same_objective(hidden, atoms, found, nonneg_lasso(hidden, atoms, 0.05), 0.05, rtol=1e-3)


@check
def nasty_atoms():
    """Duplicate, zero, collinear, short and opposite ones; a token that is zero and one that is an atom."""
    for seed, lam in [(0, 0.05), (1, 0.5), (2, 0.01)]:
        hidden, atoms = problem(4, 10, 37, seed)
        atoms[5], atoms[6], atoms[7], atoms[8] = atoms[4], 0, 0.3 * atoms[9], -atoms[10]
        atoms[11] = unit_rows(atoms[12:13] + 1e-4 * atoms[13:14])[0]
        hidden[0], hidden[1] = 0, atoms[4]
        codes = solve(hidden, atoms, lam)
        certify(hidden, atoms, codes, lam)
        assert codes.indptr[1] == 0 and 6 not in codes.indices
        same_objective(hidden, atoms, codes, nonneg_lasso(hidden, atoms, lam, tol=1e-5), lam, 2e-3)


@check
def more_ties_than_may_join():
    """Sixty copies of each of three atoms: the first in order join, and that is enough."""
    hidden, atoms = problem(3, 6, 3)
    once, many = solve(hidden, atoms, 0.05, tol=1e-4), solve(hidden, np.repeat(atoms, 60, axis=0), 0.05, tol=1e-4)
    certify(hidden, np.repeat(atoms, 60, axis=0), many, 0.05, tol=1e-4)
    np.testing.assert_allclose(
        objective(hidden, np.repeat(atoms, 60, axis=0), many, 0.05), objective(hidden, atoms, once, 0.05), rtol=1e-4
    )


@check
def penalty_above_every_correlation():
    hidden, atoms = problem(6, 16, 40)
    codes = solve(hidden, atoms, float((hidden @ atoms.T).max()) + 1e-2)
    assert len(codes.values) == 0 and (codes.kkt == 0).all() and (codes.indptr == 0).all() and len(codes) == 6


@check
def more_width_than_atoms():
    hidden, atoms = problem(3, 30, 7)
    certify(hidden, atoms, solve(hidden, atoms, 0.01), 0.01)
    hidden, atoms = problem(2, 5, 1)
    certify(hidden, atoms, solve(hidden, atoms, 0.01), 0.01)


@check
def small_rows():
    """One row, no rows, rows of zeros."""
    hidden, atoms = problem(1, 16, 40)
    certify(hidden, atoms, solve(hidden, atoms, 0.05), 0.05)
    none = solve(hidden[:0], atoms, 0.05)
    assert len(none) == 0 and len(none.values) == len(none.kkt) == 0 and none.indptr.tolist() == [0]
    zeros = np.zeros((3, 16), np.float32)
    certify(zeros, atoms, solve(zeros, atoms, 0.05), 0.05)


@check
def types_and_layouts():
    """Half precision gives the bits of the same numbers in float32; strides and gradients change nothing."""
    hidden, atoms = map(torch.as_tensor, problem(2, 8, 20))
    for dtype in (torch.float16, torch.bfloat16):
        same_bits(solve(hidden.to(dtype), atoms, 0.05), solve(hidden.to(dtype).float(), atoms, 0.05))
    strided = solve(hidden.repeat_interleave(2, 1)[:, ::2], atoms.T.contiguous().T, 0.05)
    same_bits(strided, solve(hidden, atoms, 0.05))
    same_bits(solve(hidden.T.contiguous().T.requires_grad_(), atoms.clone().requires_grad_(), 0.05), strided)
    with torch.inference_mode():
        same_bits(solve(hidden.clone(), atoms, 0.05), strided)


@check
def chunks_change_nothing():
    hidden, atoms = problem(3, 8, 20)
    expected = solve(hidden, atoms, 0.05)
    same_bits(solve(hidden, atoms, 0.05), expected)
    with changed(cd_cuda, CHUNK=2):
        certify(hidden, atoms, solve(hidden, atoms, 0.05), 0.05)
    with changed(cd_cuda, **ROW_BY_ROW):
        whole = solve(hidden, atoms, 0.05)
        for rows in (1, 2):
            with changed(cd_cuda, CHUNK=rows):
                same_bits(solve(hidden, atoms, 0.05), whole)


@check
def working_sets_grow():
    """Out of the first kernel, out of shared memory and on; one token at a time, when there is little memory."""
    toy = config.ENABLE_CUDASIM
    hidden, atoms = problem(2, 30, 60) if toy else problem(3, 250, 700)
    hidden[1], lam = 0, 0.002 if toy else 1e-3
    sizes = {"SMALL": 4, "MEDIUM": 8, "EACH_SMALL": 1, "EACH_MEDIUM": 2} if toy else {}  # else they are compiled in
    fewer = {"FIRST_JOINING": 4, "JOINING": 2, "LEAST_ROOM": 2} if toy else {}
    capacities, tokens = [], cd_cuda._Tokens

    def note(count, capacity, problem):
        capacities.append(capacity)
        return tokens(count, capacity, problem)

    with (
        changed(cuda_kernels, **fewer),
        changed(cuda_working_set, **sizes),
        changed(cd_cuda, **ROW_BY_ROW, _Tokens=note),
    ):
        whole = solve(hidden, atoms, lam)
        assert {cuda_working_set.SMALL, cuda_working_set.MEDIUM} < set(capacities)
        assert max(capacities) > 2 * cuda_working_set.MEDIUM
        certify(hidden, atoms, whole, lam)
        with changed(cd_cuda, GRAM_BYTES=4 * capacities[-1] ** 2):
            same_bits(solve(hidden, atoms, lam), whole)


@check
def more_precise_products():
    """A tolerance that float16 does not reach, and rows, and atoms, that it does not hold."""
    hidden, atoms = problem(2, 16, 40)
    certify(hidden, atoms, solve(hidden, atoms, 0.05, tol=1e-4), 0.05, tol=1e-4)
    long = hidden.copy()
    long[1] *= 5000
    codes = solve(long, atoms, 50.0, tol=0.5)
    true = kkt_violation(long, atoms, codes, 50.0)
    assert (true <= codes.kkt + 1e-6 * codes.dense(40).sum(1)).all() and codes.kkt.max() <= 0.5
    atoms[3] *= 1e-3
    assert not cd_cuda.prepare(*(torch.as_tensor(array) for array in (atoms, atoms @ atoms.T))).fits_float16
    certify(hidden, atoms, solve(hidden, atoms, 0.05), 0.05)


@check
def errors_are_bounded_as_promised():
    """Gradients of float16 at the paper's width: off by less than is said, and that is little."""
    for width, count, share in [(16, 41, 1.0), (768, 300, 1.0), (768, 300, 0.45)]:
        hidden, atoms = map(torch.as_tensor, problem(8 if config.ENABLE_CUDASIM else 100, width, count))
        hidden, atoms = (share * hidden).to(DEVICE), atoms.to(DEVICE)
        lasso = cd_cuda._Problem(cd_cuda.prepare(atoms, atoms @ atoms.T), 2.0, 1e-3)
        tokens = cd_cuda._Tokens(len(hidden), cuda_working_set.SMALL, lasso)
        tokens.load(hidden)
        tokens._correlate(torch.arange(len(hidden), device=DEVICE), precise=False)
        off = (tokens.half_gradient_nK[:, :count].double() - hidden.double() @ atoms.double().T).abs().amax(1)
        always = lasso.prepared.errors(2.0, precise=False)[3]
        assert (off <= tokens.error_n).all() and (tokens.error_n - always < 7e-4 * share).all()
        tokens.atoms_nW[:, :5], tokens.code_nW[:, :5] = torch.arange(5, device=DEVICE), 0.2
        tokens.size_n[:], tokens.kkt_n[:], tokens.status_n[:] = 5, 1.0, cuda_kernels.FINISHED  # far; nothing joins
        tokens._correlate(torch.arange(len(hidden), device=DEVICE), precise=False)
        exact = (hidden.double() - 0.2 * atoms[:5].double().sum(0)) @ atoms.double().T
        off = (tokens.half_gradient_nK[:, :count].double() - exact).abs().amax(1)
        assert (off <= tokens.error_n).all() and (tokens.error_n - always < 2e-3).all()


@check
def unfinished_tokens_know_it():
    """Stopped early, the certificate is that of the code that is returned."""
    hidden, atoms = problem(2, 10, 40)
    for rounds in (0, 1, 2):
        with changed(cd_cuda, MAX_ROUNDS=rounds, MAX_HALF_ROUNDS=rounds):
            codes = solve(hidden, atoms, 0.01, tol=1e-6 if SIMULATED else 1e-4)
        true = kkt_violation(hidden, atoms, codes, 0.01)
        assert (true <= codes.kkt + 1e-6).all() and (codes.kkt <= true + ABOVE).all()
        assert rounds or (codes.kkt > 0.1).all()


@check
def halves_lose_little():
    """The product of bfloat16 parts that a GPU computes, in float64: what the parts leave out."""
    for width, atoms in [(16, 40), (768, 500)]:
        left, right = map(torch.as_tensor, problem(200, width, atoms))
        (high, low), (other_high, other_low) = cuda_products.halves(left), cuda_products.halves(right)
        joined = torch.cat([high, high, low], 1).double() @ torch.cat([other_high, other_low, other_high], 1).double().T
        assert (joined - left.double() @ right.double().T).abs().max() < 1e-5


@check
def settings_of_torch_are_left_as_they_were():
    """Also where two threads are inside, and the first to come leaves first."""

    def found():
        return [getattr(torch.backends.cuda.matmul, name) for name in cuda_products.SUMS_OF_FLOAT16]

    before, first, second = found(), ExitStack(), ExitStack()
    for stack in (first, second):
        stack.enter_context(cuda_products.sums_in_float32())
    first.close()
    assert found() == [False, False] != before
    second.close()
    assert found() == before


# -- in the simulator only ---------------------------------------------------------------------------------


def simulator_check(function):
    return check(function, SIMULATOR_CHECKS)


@simulator_check
def threads_in_any_order():
    """No races: the same bits, whatever the order in which a block's threads run between barriers."""
    hidden, atoms = problem(1, 12, 40)
    for constants in [{}, {"SMALL": 8, "MEDIUM": 12, "EACH_SMALL": 2, "EACH_MEDIUM": 3}]:  # the large kernel too
        with changed(cuda_kernels, FIRST_JOINING=5, JOINING=3), changed(cuda_working_set, **constants):
            lockstep.install()
            ascending = solve(hidden, atoms, 0.02)
            for order in ("descending", "shuffled"):
                lockstep.install(order)
                same_bits(solve(hidden, atoms, 0.02), ascending)
    lockstep.install()
    certify(hidden, atoms, ascending, 0.02)


@simulator_check
def a_warp_with_the_instructions_of_a_gpu():
    """Blocks of 32 threads that reduce by shuffles and votes, in two orders; more atoms than threads."""
    hidden, atoms = problem(1, 12, 70)
    expected = solve(hidden, atoms, 0.1)
    names = ("sum", "max", "places", "any", "first", "value")
    warp = {f"block_{name}": getattr(cuda_block, f"warp_{name}") for name in names}
    of_kernels = {name: warp[name] for name in warp if hasattr(cuda_kernels, name)}
    of_sets = {name: warp[name] for name in warp if hasattr(cuda_working_set, name)}
    with (
        changed(cuda_kernels, LANES=32, PARTS=4, **of_kernels),
        changed(cuda_working_set, LANES=32, SMALL=64, MEDIUM=96, EACH_SMALL=2, EACH_MEDIUM=3, **of_sets),
        changed(cuda_launch, LANES=32),
    ):
        codes = solve(hidden, atoms, 0.1)
        lockstep.install("descending")
        same_bits(solve(hidden, atoms, 0.1), codes)
    lockstep.install()
    certify(hidden, atoms, codes, 0.1)
    same_objective(hidden, atoms, codes, expected, 0.1, rtol=2e-4)


@simulator_check
def nothing_is_read_before_it_is_written():
    """NaN and absurd indices in all memory that `load` does not clear; shared memory is NaN in every check."""
    hidden, atoms = problem(2, 12, 40)
    expected, load = solve(hidden, atoms, 0.02), cd_cuda._Tokens.load

    def spoil_and_load(tokens, chunk_nd):
        for name in ("gradient_nK", "residual_nd", "excess_nW", "gram_nWW", "kkt_n", "vectors_nV"):
            getattr(tokens, name).fill_(float("nan"))
        tokens.atoms_nW.fill_(1 << 30)
        load(tokens, chunk_nd)

    with changed(cd_cuda._Tokens, load=spoil_and_load):
        same_bits(solve(hidden, atoms, 0.02), expected)


@simulator_check
def everything_that_is_named_exists():
    """Also in the checks that only a GPU runs: a removed function is noticed here."""
    modules = {name: value for name, value in globals().items() if name.startswith(("cd_cuda", "cuda_"))}
    named = re.findall(r"\b(" + "|".join(modules) + r")\.(\w+)", Path(__file__).read_text())
    named = [(module, name) for module, name in named if name != "py"]
    assert len(named) > 10 and not [pair for pair in named if not hasattr(modules[pair[0]], pair[1])]


@simulator_check
def with_the_scheduler_of_numba():
    hidden, atoms = problem(2, 6, 9)
    expected = solve(hidden, atoms, 0.05)
    with lockstep.uninstalled():
        same_bits(solve(hidden, atoms, 0.05), expected)


# -- on a GPU only -----------------------------------------------------------------------------------------


def gpu_check(function):
    return check(function, GPU_CHECKS)


@gpu_check
def real_size(tokens=6000, width=768, count=3072):
    """More than a chunk, at the paper's sizes: certificate in float64, the CPU's objective, the same bits again."""
    hidden, atoms = problem(tokens, width, count)
    rng = np.random.default_rng(1)  # sparse mixtures of atoms, so that codes are realistic
    mixture = np.where(rng.random((tokens, count)) < 0.01, rng.random((tokens, count)), 0) @ atoms
    hidden = unit_rows(unit_rows(mixture) + 0.5 * hidden)
    codes = solve(hidden, atoms, 0.05)
    certify(hidden, atoms, codes, 0.05)
    same_bits(solve(hidden, atoms, 0.05), codes)
    some = slice(0, tokens, 8)
    same_objective(hidden[some], atoms, codes.dense(count)[some], nonneg_lasso(hidden[some], atoms, 0.05), 0.05, 1e-3)
    half = solve(torch.as_tensor(hidden).bfloat16(), atoms, 0.05)
    certify(torch.as_tensor(hidden).bfloat16().float().numpy(), atoms, half, 0.05)


@gpu_check
def few_of_real_size():
    """For compute-sanitizer, which takes a hundred times as long."""
    real_size(tokens=48)


@gpu_check
def real_data():
    """The bench data: objective within 1e-4 of the stored optimum."""
    root = Path(__file__).resolve().parents[3]
    places = [Path(os.environ.get("MLSM_DATA", "/nowhere")), root / "shared", root.parent / "shared"]
    bench = next((place / "bench" for place in places if (place / "bench" / "reference.json").is_file()), None)
    if bench is None:
        print("real_data: no bench data, nothing checked")
        return
    reference = json.loads((bench / "reference.json").read_text())
    hidden = unit_rows(np.load(bench / "hidden_test_8192x384_f16.npy").astype(np.float32))
    atoms = np.load(bench / "spams_atoms_3072x384_f32.npy")
    codes = solve(hidden, atoms, reference["lambda"])
    certify(hidden, atoms, codes, reference["lambda"])
    mean = objective(hidden, atoms, codes, reference["lambda"]).mean()
    assert abs(mean / reference["mean_objective_per_token"] - 1) <= 1e-4, mean


@gpu_check
def hundreds_of_non_zeros():
    """Working sets that outgrow the first capacity, and shared memory."""
    hidden, atoms = problem(16, 400, 900)
    codes = solve(hidden, atoms, 1e-3, tol=1e-4)
    assert np.diff(codes.indptr).min() > cuda_working_set.MEDIUM
    certify(hidden, atoms, codes, 1e-3, tol=1e-4)


@gpu_check
def another_stream():
    hidden, atoms = problem(300, 64, 500)
    expected = solve(hidden, atoms, 0.05)
    with torch.cuda.stream(torch.cuda.Stream()):
        same_bits(solve(hidden, atoms, 0.05), expected)


@gpu_check
def launches_are_those_of_numba():
    hidden, atoms = problem(300, 64, 500)
    expected = solve(hidden, atoms, 0.05)
    assert all(cuda_launch.launcher(0, 0)._compiled.values())
    with changed(cuda_launch, _find_compiled=lambda kernel, arrays: None):
        cuda_launch.launcher.cache_clear()
        same_bits(solve(hidden, atoms, 0.05), expected)
    cuda_launch.launcher.cache_clear()


@gpu_check
def products_as_exact_as_promised():
    for width, count in [(384, 3072), (768, 3072), (1024, 5000)]:
        hidden, atoms = (torch.as_tensor(array).to(DEVICE) for array in problem(1000, width, count))
        prepared = cd_cuda.prepare(atoms, atoms @ atoms.T)
        exact = hidden.double() @ atoms.double().T
        out = torch.empty(1000, len(prepared.atoms_Kd), device=DEVICE)
        cuda_products.correlate_precisely(prepared, hidden, out)
        assert (out[:, :count] - exact).abs().max() < 2e-5
        out = out.half()
        cuda_products.correlate_in_float16(prepared, hidden.half(), out)
        assert (out[:, :count] - exact).abs().max() < 7e-4


def main(names):
    checks = CHECKS | (SIMULATOR_CHECKS if config.ENABLE_CUDASIM else GPU_CHECKS)
    if config.ENABLE_CUDASIM:
        lockstep.shrink_kernels()
    warnings.simplefilter("error", ResourceWarning)
    results = {}
    for name in names or checks:
        try:
            checks[name]()
            results[name] = None
        except Exception:
            results[name] = traceback.format_exc()
        print(f"{name} {'failed' if results[name] else 'passed'} after {time.process_time():.1f} s", flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1:])
