"""The kernels of cd_cuda.py (Numba CUDA), from the outer loop inwards; cd_cuda.py explains the method.

A block is LANES threads, on a GPU one warp, and works on one token. All its threads take the same branches:
conditions depend on values that all of them read, or on reductions, which return the same bits to all. Element
i of a vector over the working set belongs to thread i % LANES, which alone writes it. `wait` stands between a
write and a read by another thread, and between that read and the next write; it orders shared and global memory
within the block. Simulator-tested; no GPU has run it yet. Left out: what the threads of a block do together
(cuda_block.py).

Shapes: n tokens of a chunk, m of them active, d hidden width, K atoms, W atoms of a working set at most.
"""

import numpy as np

from pipeline.solvers.cuda_block import (
    LANES,
    LOWEST,
    ONE,
    ZERO,
    block_max,
    block_places,
    block_sum,
    cuda,
    float32,
    inlined,
    kernel,
    wait,
)

VECTORS = 5  # over the working set, in shared memory if they fit
FIRST_JOINING, JOINING = 32, 16  # atoms that join a working set in its first and in later rounds
BISECTIONS = 12  # to find the threshold that lets about so many join
MAX_SWEEPS = 100  # in one round
SWEEPS_BEFORE_CG = 2
MAX_CG_STEPS = 60
INNER = np.float32(0.1)  # a round solves its working set to this share of the worst violation
HALF = np.float32(0.5)
WORKING, FINISHED, OVERFLOWED = 0, 1, 2  # status of a token


@kernel
def select(
    active_m: np.ndarray,
    gradient_mK: np.ndarray,
    gram_KK: np.ndarray,
    atoms_nW: np.ndarray,
    code_nW: np.ndarray,
    excess_nW: np.ndarray,
    size_n: np.ndarray,
    kkt_n: np.ndarray,
    status_n: np.ndarray,
    lam: float,
    tol: float,
) -> None:
    """Certify the token, or let the atoms that violate lam the most join its working set."""
    if cuda.blockIdx.x >= len(active_m):
        return
    token = active_m[cuda.blockIdx.x]
    size = size_n[token]
    if status_n[token] == FINISHED:
        return
    grad_K = gradient_mK[cuda.blockIdx.x]
    violation = _take_members(grad_K, atoms_nW[token], code_nW[token], excess_nW[token], size, lam)
    worst = _largest(grad_K)
    kkt = max(violation, worst - lam)
    joining = 0
    if kkt > tol:
        wanted = max(JOINING, size // 4) if size > 0 else FIRST_JOINING
        threshold = _threshold(grad_K, lam + tol, worst, np.float32(wanted))
        joining = _join(atoms_nW[token], excess_nW[token], size, grad_K, gram_KK, lam, threshold, wanted)
    wait()
    if cuda.threadIdx.x == 0:
        kkt_n[token] = kkt
        if kkt <= tol:
            status_n[token] = FINISHED
        elif size + joining > atoms_nW.shape[1]:
            status_n[token] = OVERFLOWED  # those that joined are forgotten
        else:
            size_n[token] = size + joining


@inlined
def _take_members(grad_K, atoms, code, excess, size, lam):
    """Move the working set's gradient out, so that grad_K is left with the other atoms. Returns the violation."""
    violation = ZERO
    for i in range(cuda.threadIdx.x, size, LANES):
        over = grad_K[atoms[i]] - lam
        grad_K[atoms[i]] = LOWEST
        excess[i] = over
        violation = max(violation, abs(over) if code[i] > ZERO else over)
    wait()
    return block_max(violation)


@inlined
def _largest(grad_K):
    largest = LOWEST
    for j in range(cuda.threadIdx.x, len(grad_K), LANES):
        largest = max(largest, grad_K[j])
    return block_max(largest)


@inlined
def _threshold(grad_K, floor, worst, wanted):
    """A threshold that between 3/4 of `wanted` and `wanted` atoms reach, by bisection; `floor` if few do."""
    if _count(grad_K, floor) <= wanted:
        return floor
    low, high = floor, worst
    for _ in range(BISECTIONS):
        middle = HALF * (low + high)
        count = _count(grad_K, middle)
        if count > wanted:
            low = middle
        else:
            high = middle
            if count >= np.float32(0.75) * wanted:
                break
    return high


@inlined
def _count(grad_K, threshold):
    """How many atoms reach the threshold; exact in float32, which the warp can add."""
    count = ZERO
    for j in range(cuda.threadIdx.x, len(grad_K), LANES):
        if grad_K[j] >= threshold:
            count += ONE
    return block_sum(count)


@inlined
def _join(atoms, excess, size, grad_K, gram_KK, lam, threshold, wanted):
    """Append the first `wanted` atoms that reach the threshold. Returns how many, even if they do not fit."""
    joined = 0
    for first in range(0, len(grad_K), LANES):
        j = first + cuda.threadIdx.x
        joins = j < len(grad_K) and grad_K[j] >= threshold and gram_KK[j, j] > ZERO
        before, together = block_places(joins)
        place = size + joined + before
        if joins and joined + before < wanted and place < len(atoms):
            atoms[place], excess[place] = j, grad_K[j] - lam
        joined += together
        if joined >= wanted:
            return wanted
    return joined


@kernel
def minimise_in_shared(
    active_m: np.ndarray,
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
    """Minimise over the working set, with its vectors in shared memory."""
    if cuda.blockIdx.x < len(active_m):
        _minimise_token(
            cuda.shared.array(0, float32),
            active_m[cuda.blockIdx.x],
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


@kernel
def minimise_in_global(
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
    """The same for working sets that are too large for shared memory."""
    if cuda.blockIdx.x < len(active_m):
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
    _minimise(gram, code, excess, steps, direction, image, size, max(np.float32(0.3) * tol, INNER * kkt_n[token]))
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


@kernel
def subtract(
    active_m: np.ndarray,
    hidden_nd: np.ndarray,
    atoms_Kd: np.ndarray,
    atoms_nW: np.ndarray,
    code_nW: np.ndarray,
    size_n: np.ndarray,
    residual_nd: np.ndarray,
) -> None:
    """residual = h - a D, in the order of active tokens."""
    if cuda.blockIdx.x >= len(active_m):
        return
    token = active_m[cuda.blockIdx.x]
    for column in range(cuda.threadIdx.x, hidden_nd.shape[1], LANES):
        rest = hidden_nd[token, column]
        for i in range(size_n[token]):
            if code_nW[token, i] > ZERO:
                rest -= code_nW[token, i] * atoms_Kd[atoms_nW[token, i], column]
        residual_nd[cuda.blockIdx.x, column] = rest


@kernel
def pack(
    starts_n: np.ndarray,
    status_n: np.ndarray,
    atoms_nW: np.ndarray,
    code_nW: np.ndarray,
    size_n: np.ndarray,
    indices: np.ndarray,
    values: np.ndarray,
) -> None:
    """Write a token's non-zero coefficients from its start on, in order of their atoms."""
    token = cuda.blockIdx.x
    if token >= len(starts_n) or status_n[token] == OVERFLOWED:
        return
    for i in range(cuda.threadIdx.x, size_n[token], LANES):
        if code_nW[token, i] > ZERO:
            place = starts_n[token]
            for other in range(size_n[token]):
                if code_nW[token, other] > ZERO and atoms_nW[token, other] < atoms_nW[token, i]:
                    place += 1
            indices[place], values[place] = atoms_nW[token, i], code_nW[token, i]
