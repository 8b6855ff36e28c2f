"""Non-negative LASSO by coordinate descent on a working set of atoms, on all CPU cores (Numba).

For every row h of H, over a >= 0, minimises 1/2 ||h - a D||^2 + lam * sum(a) (problem.py). In rounds:

1. the gradient of all K atoms, D (h - a D), is kept: it starts as one matmul for a task of 256 tokens;
2. the few atoms that violate lam the most join the working set, whose part of the Gram matrix is copied
   out so that it stays in cache;
3. coordinate descent on the working set finds the support, conjugate gradients on the support finish it:
   32 correlated atoms need about 90 sweeps of the former, or 20 and 45 much cheaper steps of the latter;
4. the gradient of all atoms is brought up to date from the Gram rows whose coefficients moved.

It ends when no atom violates the KKT conditions by more than the tolerance, so the last gradient is the
certificate, over all atoms, in float32. Tasks are independent: equal input gives equal bits, whatever the
number of threads (NUMBA_NUM_THREADS; default all cores). They are Python threads around kernels that release
the GIL, so there is no threading layer to choose and memory beyond the result is a few MB a thread.
Left out: GPU (cd_cuda.py), warm starts, float64.

Working sets after celer (Massias et al. 2018); alternating a projected method that finds the support with
conjugate gradients that stop at the boundary after GPCG (More and Toraldo 1991).

Shapes: N tokens, n tokens of a task, d hidden width, K atoms, m atoms of a working set.
"""

from typing import NamedTuple

import numpy as np

from pipeline.solvers.parallel import inlined, kernel, one_blas_thread, run_in_threads, thread_count
from pipeline.solvers.problem import join_codes

TASK_ROWS = 256                 # tokens of one matmul; about 3 MB of correlations at K = 3072
BLOCK = 32                      # atoms that share one maximum when violators are looked for
JOINING = 8                     # blocks whose worst atoms join the working set in a round, at least
FIRST_CAPACITY = 128            # atoms of a working set before its memory grows
MAX_ROUNDS = 100
MAX_SWEEPS = 100                # in one round
SWEEPS_BEFORE_CG = 2
MAX_CG_STEPS = 60
LOWEST = np.float32(-3e38)      # kernels know no infinity
INNER = 0.1                     # a round solves its working set to this share of the worst violation


def solve(hidden_Nd, atoms_Kd, gram_KK, lam, tol):
    """Sparse-code N tokens; arguments as in `nonneg_lasso`, already checked. Returns Codes."""
    starts = range(0, len(hidden_Nd), TASK_ROWS)
    parts, todo = [None] * len(starts), iter(enumerate(starts))
    threads = min(thread_count(), len(starts))

    def work():
        buffers = _Buffers(min(TASK_ROWS, len(hidden_Nd)), len(atoms_Kd))
        for i, start in todo:                   # shared between the threads: each task is taken once
            hidden_nd = np.asarray(hidden_Nd[start:start + TASK_ROWS], np.float32)
            parts[i] = buffers.solve(hidden_nd, atoms_Kd, gram_KK, np.float32(lam), np.float32(tol))

    with one_blas_thread():
        run_in_threads(work, threads)
    return join_codes(parts)


class _Buffers:
    """What one thread needs to solve tasks, kept from one to the next."""

    def __init__(self, rows, num_atoms):
        self.values_nK = np.empty((rows, num_atoms), np.float32)    # correlations, overwritten by codes
        self.indices_nK = np.empty((rows, num_atoms), np.int32)
        self.counts_n, self.kkt_n = np.empty(rows, np.int64), np.empty(rows, np.float32)
        self.working = _working_set(FIRST_CAPACITY)

    def solve(self, hidden_nd, atoms_Kd, gram_KK, lam, tol):
        """Returns counts, indices, values and kkt of the task's tokens."""
        rows = len(hidden_nd)
        values_nK, counts_n, kkt_n = self.values_nK[:rows], self.counts_n[:rows], self.kkt_n[:rows]
        np.matmul(hidden_nd, atoms_Kd.T, out=values_nK)
        done = 0
        while (done := _solve_rows(values_nK, self.indices_nK, counts_n, kkt_n, gram_KK, lam, tol,
                                   self.working, done)) < rows:
            self.working = _working_set(2 * len(self.working.atoms))
        indices, values = np.empty(counts_n.sum(), np.int32), np.empty(counts_n.sum(), np.float32)
        _pack(self.indices_nK, values_nK, counts_n, indices, values)
        return counts_n.copy(), indices, values, kkt_n.copy()


# -- kernels, from the outer loop inwards ------------------------------------------------------------------


class _WorkingSet(NamedTuple):
    """Atoms that may be active and vectors over them, zero from the set's size to a multiple of 16."""

    atoms: np.ndarray           # int32: which atoms
    gram: np.ndarray            # (capacity, capacity): their Gram matrix
    code: np.ndarray            # their coefficients
    excess: np.ndarray          # correlation with the residual, minus lam
    steps: np.ndarray           # 1 / squared norm; not 1: rounding moves atoms off the unit sphere
    before: np.ndarray          # coefficients at the start of the round
    direction: np.ndarray       # of conjugate gradients
    image: np.ndarray           # gram @ direction
    rows: np.ndarray            # int32: atoms that moved in this round


def _working_set(capacity):
    integers, vectors = np.zeros((2, capacity), np.int32), np.zeros((6, capacity), np.float32)
    return _WorkingSet(integers[0], np.zeros((capacity, capacity), np.float32), *vectors, integers[1])


@kernel
def _solve_rows(values_nK, indices_nK, counts_n, kkt_n, gram_KK, lam, tol, working, done):
    """Solve the tokens from number `done` on: correlations in values_nK are overwritten by codes.

    Returns how many are done: all of them, unless the next one's working set overflows.
    """
    atoms, gram, code, excess, steps, before, direction, image, rows = working
    num_atoms = values_nK.shape[1]
    grad_K, member_K = np.empty(num_atoms, np.float32), np.zeros(num_atoms, np.uint8)
    block_max = np.empty((num_atoms + BLOCK - 1) // BLOCK, np.float32)
    scratch = np.empty(len(block_max), np.float32)
    for n in range(done, len(counts_n)):
        for j in range(num_atoms):
            grad_K[j] = values_nK[n, j]
        size = 0
        worst = _block_maxima(grad_K, block_max) - lam
        kkt = max(worst, np.float32(0))
        for _ in range(MAX_ROUNDS):
            if kkt <= tol:
                break
            threshold = _nth_largest(block_max, scratch, max(JOINING, size // 4), lam + tol)
            old_size, size = size, _join(atoms, size, grad_K, gram_KK, member_K, block_max, threshold)
            if size < 0:
                return n
            _copy_gram(gram, atoms, code, steps, gram_KK, old_size, size)
            _load_excess(code, excess, before, atoms, size, grad_K, lam)
            _minimise(gram, code, excess, steps, direction, image, size,
                      max(np.float32(0.3) * tol, np.float32(INNER) * worst))
            count = _moved(code, before, atoms, image, rows, size)
            _subtract_rows(grad_K, gram_KK, rows, image, count)
            worst = _block_maxima(grad_K, block_max) - lam
            kkt = max(worst, _support_violation(code, atoms, size, grad_K, lam))
        kkt_n[n] = kkt
        for i in range(size):
            member_K[atoms[i]] = 0
        counts_n[n] = _write_code(code, atoms, size, indices_nK[n], values_nK[n])
    return len(counts_n)


@inlined
def _block_maxima(grad_K, block_max):
    """Fill block_max with the maximum of every BLOCK atoms; returns the largest."""
    largest = LOWEST
    for b in range(len(block_max)):
        top = LOWEST
        for j in range(b * BLOCK, min(b * BLOCK + BLOCK, len(grad_K))):
            top = max(top, grad_K[j])
        block_max[b] = top
        largest = max(largest, top)
    return largest


@inlined
def _nth_largest(block_max, scratch, n, floor):
    """The n-th largest block maximum, or floor if that is larger."""
    for b in range(len(scratch)):
        scratch[b] = block_max[b]
    nth = floor
    for _ in range(n):
        best = 0
        for b in range(1, len(scratch)):
            if scratch[b] > scratch[best]:
                best = b
        nth = scratch[best]
        if nth <= floor:
            return floor
        scratch[best] = LOWEST
    return nth


@inlined
def _join(atoms, size, grad_K, gram_KK, member_K, block_max, threshold):
    """Append the atoms whose gradient reaches the threshold. Returns the new size, -1 if they do not fit."""
    for b in range(len(block_max)):
        if block_max[b] < threshold:
            continue
        for j in range(b * BLOCK, min(b * BLOCK + BLOCK, len(grad_K))):
            if grad_K[j] >= threshold and member_K[j] == 0 and gram_KK[j, j] > 0:
                if size == len(atoms):
                    return -1
                member_K[j] = 1
                atoms[size] = j
                size += 1
    return size


@inlined
def _copy_gram(gram, atoms, code, steps, gram_KK, old_size, size):
    """Fill in the working set's Gram matrix for the atoms that joined, with zero coefficients."""
    for i in range(old_size, size):
        row = gram_KK[atoms[i]]
        code[i] = 0
        steps[i] = 1 / row[atoms[i]]
        for j in range(i + 1):
            gram[i, j] = row[atoms[j]]
            gram[j, i] = row[atoms[j]]


@inlined
def _load_excess(code, excess, before, atoms, size, grad_K, lam):
    for i in range(size):
        excess[i] = grad_K[atoms[i]] - lam
        before[i] = code[i]
    for i in range(size, _padded(size)):
        excess[i] = code[i] = 0


@inlined
def _padded(size):
    """Loops over a working set run to a multiple of 16: no scalar remainder."""
    return (size + 15) // 16 * 16


@inlined
def _moved(code, before, atoms, change, rows, size):
    """List the atoms that changed in this round, filled up to a multiple of 4. Returns the length."""
    count = 0
    for i in range(size):
        if code[i] != before[i]:
            change[count] = code[i] - before[i]
            rows[count] = atoms[i]
            count += 1
    while count % 4:                # capacities are multiples of 4
        change[count], rows[count] = 0, rows[count - 1]
        count += 1
    return count


@inlined
def _subtract_rows(grad_K, gram_KK, rows, change, count):
    """grad -= change @ gram[rows], four rows at a time: grad is read and written a quarter as often."""
    for i in range(0, count, 4):
        by0, by1, by2, by3 = change[i], change[i + 1], change[i + 2], change[i + 3]
        row0, row1 = gram_KK[rows[i]], gram_KK[rows[i + 1]]
        row2, row3 = gram_KK[rows[i + 2]], gram_KK[rows[i + 3]]
        for j in range(len(grad_K)):
            grad_K[j] -= by0 * row0[j] + by1 * row1[j] + by2 * row2[j] + by3 * row3[j]


@inlined
def _support_violation(code, atoms, size, grad_K, lam):
    violation = np.float32(0)
    for i in range(size):
        if code[i] > 0:
            violation = max(violation, abs(grad_K[atoms[i]] - lam))
    return violation


@inlined
def _write_code(code, atoms, size, indices_K, values_K):
    """Write the non-zero coefficients in order of their atoms. Returns how many there are."""
    count = 0
    for i in range(size):
        if code[i] > 0:
            place = count
            while place > 0 and indices_K[place - 1] > atoms[i]:
                indices_K[place], values_K[place] = indices_K[place - 1], values_K[place - 1]
                place -= 1
            indices_K[place], values_K[place] = atoms[i], code[i]
            count += 1
    return count


@inlined
def _minimise(gram, code, excess, steps, direction, image, size, tol):
    """Solve the problem over the working set to a KKT violation of tol, or as near as MAX_SWEEPS come."""
    for sweep in range(MAX_SWEEPS):
        _descend(gram, code, excess, steps, size)
        if _violation(code, excess, size) <= tol:
            break
        if (sweep + 1) % SWEEPS_BEFORE_CG == 0:
            _conjugate_gradients(gram, code, excess, direction, image, size, np.float32(0.5) * tol)


@inlined
def _descend(gram, code, excess, steps, size):
    """One sweep of coordinate descent."""
    for i in range(size):
        if code[i] == 0 and excess[i] <= 0:
            continue
        new = max(code[i] + excess[i] * steps[i], np.float32(0))
        change = new - code[i]
        code[i] = new
        row = gram[i]
        for j in range(_padded(size)):
            excess[j] -= change * row[j]


@inlined
def _violation(code, excess, size):
    """KKT violation of the working set."""
    worst = np.float32(0)
    for i in range(size):
        worst = max(worst, abs(excess[i]) if code[i] > 0 else excess[i])
    return worst


@inlined
def _conjugate_gradients(gram, code, excess, direction, image, size, tol):
    """Minimise over the support; a coefficient that reaches zero leaves it, and directions start afresh."""
    _clear(direction, size)
    squared = _turn(code, excess, direction, size, np.float32(1))
    for _ in range(MAX_CG_STEPS):
        if squared <= tol * tol:
            break
        _multiply(image, gram, direction, size)
        curvature, slope = _dot(direction, image, size), _dot(direction, excess, size)
        if slope <= 0 or curvature <= np.float32(1e-12) * squared:
            break
        step, blocking = _longest_step(code, direction, slope / curvature, size)
        for i in range(_padded(size)):
            code[i] += step * direction[i]
            excess[i] -= step * image[i]
        if blocking >= 0:
            code[blocking] = 0
            _clear(direction, size)
        squared = _turn(code, excess, direction, size, squared)


@inlined
def _turn(code, excess, direction, size, squared_before):
    """Next conjugate direction, zero off the support. Returns the squared norm of the support's excess."""
    squared = np.float32(0)
    for i in range(size):
        squared += excess[i] * excess[i] if code[i] > 0 else np.float32(0)
    beta = squared / squared_before
    for i in range(size):
        direction[i] = (excess[i] if code[i] > 0 else np.float32(0)) + beta * direction[i]
    return squared


@inlined
def _multiply(image, gram, direction, size):
    """image = direction @ gram, four rows at a time."""
    width = _padded(size)
    _clear(image, size)
    for i in range(0, width, 4):
        by0, by1, by2, by3 = direction[i], direction[i + 1], direction[i + 2], direction[i + 3]
        row0, row1, row2, row3 = gram[i], gram[i + 1], gram[i + 2], gram[i + 3]
        for j in range(width):
            image[j] += by0 * row0[j] + by1 * row1[j] + by2 * row2[j] + by3 * row3[j]


@inlined
def _clear(vector, size):
    for i in range(_padded(size)):
        vector[i] = 0


@inlined
def _dot(left, right, size):
    total = np.float32(0)
    for i in range(size):
        total += left[i] * right[i]
    return total


@inlined
def _longest_step(code, direction, step, size):
    """`step`, or the first one that brings a coefficient to zero. Returns it and that coefficient, or -1."""
    blocking = -1
    for i in range(size):
        if code[i] + step * direction[i] < 0:
            step, blocking = -code[i] / direction[i], i
    return step, blocking


@kernel
def _pack(indices_nK, values_nK, counts_n, indices, values):
    entry = 0
    for n in range(len(counts_n)):
        for i in range(counts_n[n]):
            indices[entry], values[entry] = indices_nK[n, i], values_nK[n, i]
            entry += 1
