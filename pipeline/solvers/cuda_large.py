"""The problem over a token's working set where that is too large for shared memory (Numba CUDA).

As cuda_working_set.py, with the Gram matrix and, if need be, the vectors in a GPU's main memory, all in float32. So it
also takes dictionaries whose Gram matrix float16 cannot hold, and working sets of any size, at many times the cost.
Nothing leaves a working set. Rules for threads as in cuda_kernels.py.

Shapes: n tokens of a chunk, m places of the active ones, K atoms, W atoms of a working set at most.
"""

import numpy as np

from pipeline.solvers.cuda_block import LANES, LOWEST, ONE, ZERO, block_max, block_sum, cuda, inlined, kernel, wait
from pipeline.solvers.cuda_kernels import HALF, WORKING

VECTORS = 5  # over the working set
MAX_SWEEPS = 100  # in one round
SWEEPS_BEFORE_CG = 2
MAX_CG_STEPS = 60
INNER, LEAST = np.float32(0.1), np.float32(0.3)  # a round solves to these shares of the worst violation, of tol


@kernel
def minimise_large(
    active_m: np.ndarray,
    vectors_nV: np.ndarray,
    gram_KK: np.ndarray,
    atoms_nW: np.ndarray,
    code_nW: np.ndarray,
    excess_nW: np.ndarray,
    gram_nWW: np.ndarray,
    size_n: np.ndarray,
    filled_n: np.ndarray,
    kkt_n: np.ndarray,
    status_n: np.ndarray,
    tol: float,
) -> None:
    """Minimise over the working set of every active token."""
    if cuda.blockIdx.x < len(active_m) and active_m[cuda.blockIdx.x] >= 0:
        token = active_m[cuda.blockIdx.x]
        _minimise_token(
            vectors_nV[token],
            token,
            gram_KK,
            atoms_nW,
            code_nW,
            excess_nW,
            gram_nWW,
            size_n,
            filled_n,
            kkt_n,
            status_n,
            tol,
        )


@inlined
def _minimise_token(
    vectors, token, gram_KK, atoms_nW, code_nW, excess_nW, gram_nWW, size_n, filled_n, kkt_n, status_n, tol
):
    size, atoms, gram = size_n[token], atoms_nW[token], gram_nWW[token]
    if status_n[token] != WORKING:
        return
    width = len(atoms)
    code, excess, steps = vectors[:width], vectors[width : 2 * width], vectors[2 * width : 3 * width]
    direction, image = vectors[3 * width : 4 * width], vectors[4 * width : 5 * width]
    _copy_gram(gram, gram_KK, atoms, filled_n[token], size)
    for i in range(cuda.threadIdx.x, size, LANES):
        code[i], excess[i] = code_nW[token, i], excess_nW[token, i]
        steps[i] = ONE / gram_KK[atoms[i], atoms[i]]  # not 1: rounding moves atoms off the unit sphere
    wait()
    _minimise(gram, code, excess, steps, direction, image, size, max(LEAST * tol, INNER * kkt_n[token]))
    for i in range(cuda.threadIdx.x, size, LANES):
        code_nW[token, i] = code[i]
    if cuda.threadIdx.x == 0:
        filled_n[token] = size


@inlined
def _copy_gram(gram, gram_KK, atoms, filled, size):
    """Fill in the working set's Gram matrix for the atoms that joined."""
    for i in range(filled, size):
        for j in range(cuda.threadIdx.x, i + 1, LANES):
            value = gram_KK[atoms[i], atoms[j]]
            gram[i, j] = value
            gram[j, i] = value


@inlined
def _minimise(gram, code, excess, steps, direction, image, size, tol):
    """Solve the problem over the working set to a KKT violation of tol, or as near as MAX_SWEEPS come."""
    for sweep in range(MAX_SWEEPS):
        _descend(gram, code, excess, steps, size)
        if _violation(code, excess, size) <= tol:
            break
        if (sweep + 1) % SWEEPS_BEFORE_CG == 0:
            _conjugate_gradients(gram, code, excess, direction, image, size, HALF * tol)
            wait()


@inlined
def _descend(gram, code, excess, steps, size):
    """One sweep of coordinate descent: one atom after the other, whose row the threads share."""
    for i in range(size):
        old, over = code[i], excess[i]
        if old == ZERO and over <= ZERO:
            continue
        new = max(old + over * steps[i], ZERO)
        change = new - old
        wait()
        for j in range(cuda.threadIdx.x, size, LANES):
            excess[j] -= change * gram[i, j]
        if cuda.threadIdx.x == i % LANES:
            code[i] = new
        wait()


@inlined
def _violation(code, excess, size):
    """KKT violation of the working set."""
    worst = ZERO
    for i in range(cuda.threadIdx.x, size, LANES):
        worst = max(worst, abs(excess[i]) if code[i] > ZERO else excess[i])
    return block_max(worst)


@inlined
def _conjugate_gradients(gram, code, excess, direction, image, size, tol):
    """Minimise over the support; a coefficient that reaches zero leaves it, and directions start afresh."""
    _clear(direction, size)
    squared = _turn(code, excess, direction, size, ONE)
    for _ in range(MAX_CG_STEPS):
        if squared <= tol * tol:
            break
        _multiply(image, gram, direction, size)
        curvature, slope = _dot(direction, image, size), _dot(direction, excess, size)
        if slope <= ZERO or curvature <= np.float32(1e-12) * squared:
            break
        longest = _longest_step(code, direction, size)
        step = min(slope / curvature, longest)
        for i in range(cuda.threadIdx.x, size, LANES):
            new = code[i] + step * direction[i]
            code[i] = new if new > np.float32(1e-6) * code[i] else ZERO  # rounding: one that is blocked must leave
            excess[i] -= step * image[i]
        if step == longest:
            _clear(direction, size)
        squared = _turn(code, excess, direction, size, squared)


@inlined
def _turn(code, excess, direction, size, squared_before):
    """Next conjugate direction, zero off the support. Returns the squared norm of the support's excess."""
    squared = ZERO
    for i in range(cuda.threadIdx.x, size, LANES):
        squared += excess[i] * excess[i] if code[i] > ZERO else ZERO
    squared = block_sum(squared)
    beta = squared / squared_before
    for i in range(cuda.threadIdx.x, size, LANES):
        direction[i] = (excess[i] if code[i] > ZERO else ZERO) + beta * direction[i]
    return squared


@inlined
def _multiply(image, gram, direction, size):
    """image = direction @ gram."""
    wait()
    for j in range(cuda.threadIdx.x, size, LANES):
        total = ZERO
        for i in range(size):
            total += direction[i] * gram[i, j]
        image[j] = total
    wait()


@inlined
def _clear(vector, size):
    for i in range(cuda.threadIdx.x, size, LANES):
        vector[i] = ZERO


@inlined
def _dot(left, right, size):
    total = ZERO
    for i in range(cuda.threadIdx.x, size, LANES):
        total += left[i] * right[i]
    return block_sum(total)


@inlined
def _longest_step(code, direction, size):
    """The step that brings the first coefficient to zero."""
    nearest = LOWEST
    for i in range(cuda.threadIdx.x, size, LANES):
        if direction[i] < ZERO:
            nearest = max(nearest, code[i] / direction[i])
    return -block_max(nearest)
