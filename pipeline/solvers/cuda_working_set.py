"""The problem over a token's working set in a multiprocessor's own memory (Numba CUDA).

The working set's part of the Gram matrix is copied to shared memory, its coefficients stay in registers: element i of a
vector is number i // LANES of thread i % LANES. In turns, sweeps of coordinate descent find the support and conjugate
gradients finish it, until the KKT violation over the working set is small. What is left of the working set is the
support: others that violate lam join again (cuda_kernels.select). Rules for threads as in cuda_kernels.py. Left out:
working sets of more than MEDIUM atoms (cuda_large.py).

Shapes: n tokens of a chunk, m places of the active ones, K atoms, W atoms of a working set at most.
"""

import numpy as np
from numba import int32

from pipeline.solvers.cuda_block import (
    LANES,
    ONE,
    ZERO,
    block_first,
    block_max,
    block_places,
    block_sum,
    block_value,
    cuda,
    float32,
    index,
    inlined,
    kernel,
    wait,
)
from pipeline.solvers.cuda_kernels import HALF, WORKING
from pipeline.solvers.cuda_memory import get, get_four, put

SMALL, MEDIUM = 64, 96  # atoms of a working set, at most, for the two kernels
EACH_SMALL, EACH_MEDIUM = SMALL // LANES, MEDIUM // LANES  # of them, for each thread
MAX_TURNS = 20  # of sweeps and conjugate gradients, in one round
SWEEPS = 2  # in each turn
MAX_STEPS = 60  # of conjugate gradients, in each turn
INNER, LEAST = np.float32(0.02), np.float32(0.3)  # a round solves to these shares of the worst violation, of tol
NEVER = np.float32(-1e30)  # a step of conjugate gradients that no coefficient limits, its sign turned


@kernel
def minimise_small(
    active_m: np.ndarray,
    gram_KK: np.ndarray,
    atoms_nW: np.ndarray,
    code_nW: np.ndarray,
    excess_nW: np.ndarray,
    size_n: np.ndarray,
    kkt_n: np.ndarray,
    status_n: np.ndarray,
    tol: float,
) -> None:
    """Minimise over the working set of every active token, of SMALL atoms at most."""
    if cuda.blockIdx.x < len(active_m) and active_m[cuda.blockIdx.x] >= 0:
        vectors, own = cuda.local.array((5, EACH_SMALL), float32), cuda.local.array(EACH_SMALL, int32)
        token = index(active_m[cuda.blockIdx.x])
        if status_n[token] == WORKING:
            limit = max(LEAST * tol, INNER * kkt_n[token])
            _minimise_token(
                vectors, own, gram_KK, atoms_nW[token], code_nW[token], excess_nW[token], size_n, token, limit
            )


@kernel
def minimise_medium(
    active_m: np.ndarray,
    gram_KK: np.ndarray,
    atoms_nW: np.ndarray,
    code_nW: np.ndarray,
    excess_nW: np.ndarray,
    size_n: np.ndarray,
    kkt_n: np.ndarray,
    status_n: np.ndarray,
    tol: float,
) -> None:
    """The same for MEDIUM atoms at most."""
    if cuda.blockIdx.x < len(active_m) and active_m[cuda.blockIdx.x] >= 0:
        vectors, own = cuda.local.array((5, EACH_MEDIUM), float32), cuda.local.array(EACH_MEDIUM, int32)
        token = index(active_m[cuda.blockIdx.x])
        if status_n[token] == WORKING:
            limit = max(LEAST * tol, INNER * kkt_n[token])
            _minimise_token(
                vectors, own, gram_KK, atoms_nW[token], code_nW[token], excess_nW[token], size_n, token, limit
            )


@inlined
def _minimise_token(vectors, own, gram_KK, atoms, code_W, excess_W, size_n, token, limit):
    code, excess, steps, direction, image = vectors[0], vectors[1], vectors[2], vectors[3], vectors[4]
    size, stride, lane = size_n[token], LANES * len(code) + 1, cuda.threadIdx.x
    shared = cuda.shared.array(0, float32, 16)  # the Gram matrix, and a direction that is read 16 bytes at a time
    whole = size + (-size & 3)  # a multiple of four; zeros fill up the Gram matrix
    _copy_gram(shared, gram_KK, atoms, own, size, whole, stride)
    for q in range(len(code)):
        i = index(q * LANES + lane)
        code[q] = excess[q] = steps[q] = ZERO
        if i < size:
            code[q], excess[q] = code_W[i], excess_W[i]
    wait()
    for q in range(len(code)):
        i = q * LANES + lane
        if i < size:
            steps[q] = ONE / shared[index(i * stride + i)]  # not 1: rounding moves atoms off the unit sphere
    for _ in range(MAX_TURNS):
        for _ in range(SWEEPS):
            _descend(shared, code, excess, steps, stride, HALF * limit)
        if _violation(code, excess) <= limit:
            break
        _conjugate_gradients(shared, code, excess, direction, image, whole, stride, limit)
        if _violation(code, excess) <= limit:
            break
    _keep_support(atoms, code_W, code, size_n, token, size)


@inlined
def _copy_gram(shared, gram_KK, atoms, own, size, whole, stride):
    """The working set's Gram matrix, each entry read once; zeros in what rows and columns are more than its size."""
    lane = cuda.threadIdx.x
    for q in range(len(own)):
        own[q] = get(atoms, q * LANES + lane)
    i = 0
    while i < size:
        gram_K = gram_KK[index(get(atoms, i))]
        for q in range(len(own)):
            j = q * LANES + lane
            value = get(gram_K, own[q]) if j <= i else ZERO
            if j <= i or j >= size:
                put(shared, i * stride + j, value)
            if j < i:
                put(shared, j * stride + i, value)
        i += 1
    while i < whole:
        for q in range(len(own)):
            put(shared, i * stride + q * LANES + lane, ZERO)
        i += 1


@inlined
def _descend(shared, code, excess, steps, stride, limit):
    """One sweep of coordinate descent: one atom after the other that violates the limit, with all threads."""
    lane = cuda.threadIdx.x
    for q in range(len(code)):
        first = 0
        while first < LANES:
            new = max(code[q] + excess[q] * steps[q], ZERO)
            change = new - code[q]
            first = block_first(change != ZERO and abs(excess[q]) > limit, first)
            if first < LANES:
                if lane == first:
                    code[q] = new
                change = block_value(change, first)
                place = (q * LANES + first) * stride + lane
                for r in range(len(code)):
                    excess[r] -= change * get(shared, place + r * LANES)
                first += 1


@inlined
def _violation(code, excess):
    """KKT violation over the working set."""
    worst = ZERO
    for q in range(len(code)):
        worst = max(worst, abs(excess[q]) if code[q] > ZERO else excess[q])
    return block_max(worst)


@inlined
def _conjugate_gradients(shared, code, excess, direction, image, whole, stride, limit):
    """Minimise over the support; a coefficient that reaches zero leaves it, and directions start afresh."""
    for q in range(len(code)):
        direction[q] = ZERO
    squared = _turn(code, excess, direction, ONE)
    for _ in range(MAX_STEPS):
        if squared <= limit * limit:
            break
        _multiply(shared, direction, image, whole, stride)
        curvature, nearest = ZERO, NEVER
        for q in range(len(code)):
            curvature += direction[q] * image[q]
            if direction[q] < ZERO:
                nearest = max(nearest, code[q] / direction[q])  # minus the step that brings it to zero
        curvature, nearest = block_sum(curvature), block_max(nearest)
        if curvature <= np.float32(1e-12) * squared:
            break
        step = min(squared / curvature, -nearest)  # a direction is the excess plus what is orthogonal to it
        for q in range(len(code)):
            new = code[q] + step * direction[q]
            code[q] = new if new > np.float32(1e-6) * code[q] else ZERO  # rounding: one that is blocked must leave
            excess[q] -= step * image[q]
            direction[q] = direction[q] if step < -nearest else ZERO
        squared = _turn(code, excess, direction, squared)


@inlined
def _turn(code, excess, direction, squared_before):
    """Next conjugate direction, zero off the support. Returns the squared norm of the support's excess."""
    squared = ZERO
    for q in range(len(code)):
        squared += excess[q] * excess[q] if code[q] > ZERO else ZERO
    squared = block_sum(squared)
    beta = squared / squared_before
    for q in range(len(code)):
        direction[q] = (excess[q] if code[q] > ZERO else ZERO) + beta * direction[q]
    return squared


@inlined
def _multiply(shared, direction, image, whole, stride):
    """image = direction @ gram."""
    lane, common = cuda.threadIdx.x, LANES * len(direction) * stride
    wait()
    for q in range(len(direction)):
        shared[index(common + q * LANES + lane)] = direction[q]
        image[q] = ZERO
    wait()
    i = 0
    while i < whole:
        first, second, third, fourth = get_four(shared, common + i)
        place = i * stride + lane
        for q in range(len(direction)):
            image[q] += first * get(shared, place + q * LANES)
            image[q] += second * get(shared, place + q * LANES + stride)
            image[q] += third * get(shared, place + q * LANES + 2 * stride)
            image[q] += fourth * get(shared, place + q * LANES + 3 * stride)
        i += 4


@inlined
def _keep_support(atoms, code_W, code, size_n, token, size):
    """Write back the atoms with a coefficient above zero, in their order."""
    kept, lane = 0, cuda.threadIdx.x
    for q in range(len(code)):
        i = q * LANES + lane
        atom = atoms[index(i)]
        wait()
        before, together = block_places(code[q] > ZERO)
        if code[q] > ZERO:
            atoms[index(kept + before)], code_W[index(kept + before)] = atom, code[q]
        kept += together
    for i in range(kept + lane, size, LANES):
        code_W[index(i)] = ZERO
    if lane == 0:
        size_n[token] = kept
