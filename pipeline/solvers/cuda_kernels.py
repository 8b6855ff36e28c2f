"""The kernels of cd_cuda.py that read the gradient and form the residual (Numba CUDA), from the outer loop inwards.

A block is LANES threads, on a GPU one warp, and works on one token. All its threads take the same branches:
conditions depend on values that all of them read, or on reductions, which return the same bits to all. Element
i of a vector over the working set belongs to thread i % LANES, which alone writes it. `wait` stands between a
write and a read by another thread, and between that read and the next write; it orders shared and global memory
within the block. Left out: the problem over a working set (cuda_working_set.py), what the threads of a block do
together (cuda_block.py).

A list of active tokens may end in places that hold -1: their blocks do nothing.

Shapes: n tokens of a chunk, m places of the active ones, d hidden width, K atoms, W atoms of a working set at most;
d and K are multiples of eight, filled up with zeros.
"""

import math

import numpy as np

from pipeline.solvers.cuda_block import (
    LANES,
    LOWEST,
    ONE,
    ZERO,
    block_any,
    block_max,
    block_places,
    block_sum,
    cuda,
    float32,
    index,
    inlined,
    kernel,
    wait,
)
from pipeline.solvers.cuda_memory import Eight, get, get_eight, put, put_eight, round_eight

FIRST_JOINING, JOINING = 64, 32  # atoms that join a working set at most, in its first and in later rounds
LEAST_ROOM = 8  # for atoms that want to join; with less, the working set has overflowed
PARTS = 128 // LANES  # of a gradient, for each thread: atoms of which the largest gradient is kept
BISECTIONS = 10  # to find the threshold that lets about so many join
HALF, QUARTER = np.float32(0.5), np.float32(0.25)
TAKEN = np.float32(-6e4)  # in place of the gradient of a member; float16 holds it
LARGEST = np.float32(1e6)  # squared norm of a residual up to which products of float16 cannot overflow
WORKING, FINISHED, OVERFLOWED, WAITING = 0, 1, 2, 3  # status of a token; one that waits needs a more precise gradient


@kernel
def select(
    active_m: np.ndarray,
    gradient_mK: np.ndarray,
    square_K: np.ndarray,
    atoms_nW: np.ndarray,
    code_nW: np.ndarray,
    excess_nW: np.ndarray,
    size_n: np.ndarray,
    kkt_n: np.ndarray,
    error_n: np.ndarray,
    status_n: np.ndarray,
    lam: float,
    tol: float,
) -> None:
    """Certify the token, or let the atoms that violate lam the most join its working set."""
    if cuda.blockIdx.x >= len(active_m) or active_m[cuda.blockIdx.x] < 0:
        return
    token = index(active_m[cuda.blockIdx.x])
    if status_n[token] != WORKING:
        return
    size, grad_K, atoms, excess = size_n[token], gradient_mK[cuda.blockIdx.x], atoms_nW[token], excess_nW[token]
    violation = _take_members(grad_K, atoms, code_nW[token], excess, size, lam)
    largest = cuda.local.array(PARTS, float32)
    worst = _find_largest(grad_K, largest)
    error = error_n[token]
    seen = max(violation, worst - lam)
    kkt = max(seen + error, ZERO)
    room = len(atoms) - size
    joining = 0
    if kkt > tol and (room >= LEAST_ROOM or room >= len(square_K) - size):
        wanted = min(room, max(JOINING, size // 4) if size > 0 else FIRST_JOINING)
        floor = lam + max(tol - error, QUARTER * tol)
        threshold = _threshold(largest, floor, worst, (3 * wanted) // 4)
        joining = _join(atoms, excess, size, grad_K, square_K, largest, lam, threshold, wanted)
    wait()
    if cuda.threadIdx.x == 0:
        kkt_n[token] = kkt
        size_n[token] = size + joining
        if kkt <= tol:
            status_n[token] = FINISHED
        elif seen <= error:
            status_n[token] = WAITING
        elif room < LEAST_ROOM and room < len(square_K) - size:
            status_n[token] = OVERFLOWED


@inlined
def _take_members(grad_K, atoms, code, excess, size, lam):
    """Move the working set's gradient out, so that grad_K is left with the other atoms. Returns the violation."""
    violation = LOWEST
    for i in range(cuda.threadIdx.x, size, LANES):
        place = index(i)
        over = get(grad_K, atoms[place]) - lam
        put(grad_K, atoms[place], TAKEN)
        excess[place] = over
        violation = max(violation, abs(over) if code[place] > ZERO else over)
    wait()
    return block_max(violation)


@inlined
def _find_largest(grad_K, largest):
    """The largest gradient of each of the thread's parts, and of all."""
    for part in range(PARTS):
        largest[part] = LOWEST
    for start in range(8 * cuda.threadIdx.x, len(grad_K), 8 * LANES * PARTS):
        for part in range(PARTS):
            place = start + 8 * LANES * part
            if place < len(grad_K):
                a, b, c, d, e, f, g, h = get_eight(grad_K, place)
                largest[part] = max(largest[part], max(max(max(a, b), max(c, d)), max(max(e, f), max(g, h))))
    worst = LOWEST
    for part in range(PARTS):
        worst = max(worst, largest[part])
    return block_max(worst)


@inlined
def _threshold(largest, floor, worst, wanted):
    """A threshold that about `wanted` of all threads' parts reach, by bisection; `floor` if few do."""
    low, high, middle = floor, worst, floor
    for _ in range(BISECTIONS):
        count = 0
        for part in range(PARTS):
            count += block_places(largest[part] >= middle)[1]
        if count > wanted:
            low = middle
        else:
            high = middle
            if 4 * count >= 3 * wanted or middle == floor:
                break
        middle = HALF * (low + high)
    return high


@inlined
def _join(atoms, excess, size, grad_K, square_K, largest, lam, threshold, wanted):
    """Append the first `wanted` atoms that reach the threshold. Returns how many."""
    joined = 0
    for first in range(0, len(grad_K), 8 * LANES * PARTS):
        for part in range(PARTS):
            place = first + 8 * (LANES * part + cuda.threadIdx.x)
            reaches = largest[part] >= threshold and place < len(grad_K)
            if block_any(reaches):
                place = place if reaches else 0
                bound = threshold if reaches else -LOWEST
                a, b, c, d, e, f, g, h = get_eight(grad_K, place)
                joined = _join_one(atoms, excess, size, joined, wanted, place, a, bound, square_K, lam)
                joined = _join_one(atoms, excess, size, joined, wanted, place + 1, b, bound, square_K, lam)
                joined = _join_one(atoms, excess, size, joined, wanted, place + 2, c, bound, square_K, lam)
                joined = _join_one(atoms, excess, size, joined, wanted, place + 3, d, bound, square_K, lam)
                joined = _join_one(atoms, excess, size, joined, wanted, place + 4, e, bound, square_K, lam)
                joined = _join_one(atoms, excess, size, joined, wanted, place + 5, f, bound, square_K, lam)
                joined = _join_one(atoms, excess, size, joined, wanted, place + 6, g, bound, square_K, lam)
                joined = _join_one(atoms, excess, size, joined, wanted, place + 7, h, bound, square_K, lam)
    return joined


@inlined
def _join_one(atoms, excess, size, joined, wanted, atom, gradient, bound, square_K, lam):
    """Append each thread's atom whose gradient reaches the bound, as long as fewer than `wanted` have joined."""
    if not block_any(gradient >= bound):
        return joined
    joins = gradient >= bound and square_K[index(atom)] > ZERO
    before, together = block_places(joins)
    if joins and joined + before < wanted:
        place = index(size + joined + before)
        atoms[place], excess[place] = atom, gradient - lam
    return min(joined + together, wanted)


@kernel
def subtract(
    active_m: np.ndarray,
    hidden_nd: np.ndarray,
    atoms_Kd: np.ndarray,
    half_atoms_Kd: np.ndarray,
    atoms_nW: np.ndarray,
    code_nW: np.ndarray,
    size_n: np.ndarray,
    residual_md: np.ndarray,
    kkt_n: np.ndarray,
    error_n: np.ndarray,
    status_n: np.ndarray,
    far: float,
    of_norm: float,
    of_rounding: float,
    of_sum: float,
    always: float,
) -> None:
    """residual = h - a D, in the order of active tokens, and what its products with atoms may be off by.

    That is of_norm times its norm, of_rounding times the norm of what is lost by rounding it, and `always`. Where the
    violation was above `far` when the code was computed, it will not be the last code: half the memory traffic, with
    atoms of float16, is good enough, for of_sum times the sum of the code.
    """
    if cuda.blockIdx.x >= len(active_m) or active_m[cuda.blockIdx.x] < 0:
        return
    token = index(active_m[cuda.blockIdx.x])
    hidden_d, residual_d, atoms, code = hidden_nd[token], residual_md[cuda.blockIdx.x], atoms_nW[token], code_nW[token]
    size, coarse, squared, lost, total = size_n[token], kkt_n[token] > far, ZERO, ZERO, ZERO
    for place in range(8 * cuda.threadIdx.x, len(hidden_d), 8 * LANES):
        rest = get_eight(hidden_d, place)
        if coarse:
            rest = _take_rows_off(rest, half_atoms_Kd, atoms, code, size, place)
        else:
            rest = _take_rows_off(rest, atoms_Kd, atoms, code, size, place)
        put_eight(residual_d, place, rest)
        squared += _squared_norm(rest)
        lost += _squared_norm(_take_off(rest, ONE, round_eight(residual_d, rest)))
    if coarse:
        for i in range(cuda.threadIdx.x, size, LANES):
            total += get(code, i)
    squared, lost, total = block_sum(squared), block_sum(lost), block_sum(total)
    if cuda.threadIdx.x == 0:
        error_n[token] = of_norm * math.sqrt(squared) + of_rounding * math.sqrt(lost) + of_sum * total + always
        if squared > LARGEST and status_n[token] == WORKING and of_rounding > ZERO:
            status_n[token] = WAITING


@inlined
def _take_rows_off(rest: Eight, atoms_Kd, atoms, code, size, place) -> Eight:
    """Eight columns of a residual without the members of a working set."""
    i = 0
    while i < size - 3:  # four rows are under way at once
        first = get_eight(atoms_Kd[index(get(atoms, i))], place)
        second = get_eight(atoms_Kd[index(get(atoms, i + 1))], place)
        third = get_eight(atoms_Kd[index(get(atoms, i + 2))], place)
        fourth = get_eight(atoms_Kd[index(get(atoms, i + 3))], place)
        rest = _take_off(_take_off(rest, get(code, i), first), get(code, i + 1), second)
        rest = _take_off(_take_off(rest, get(code, i + 2), third), get(code, i + 3), fourth)
        i += 4
    while i < size:
        rest = _take_off(rest, get(code, i), get_eight(atoms_Kd[index(get(atoms, i))], place))
        i += 1
    return rest


@inlined
def _take_off(rest: Eight, weight: np.float32, row: Eight) -> Eight:
    a, b, c, d, e, f, g, h = rest
    i, j, k, l, m, n, o, p = row  # noqa: E741
    return (
        a - weight * i,
        b - weight * j,
        c - weight * k,
        d - weight * l,
        e - weight * m,
        f - weight * n,
        g - weight * o,
        h - weight * p,
    )


@inlined
def _squared_norm(vector: Eight) -> np.float32:
    a, b, c, d, e, f, g, h = vector
    return a * a + b * b + c * c + d * d + e * e + f * f + g * g + h * h


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
