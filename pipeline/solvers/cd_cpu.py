"""Non-negative LASSO by coordinate descent on a working set of atoms, on all CPU cores (Numba).

For every row h of H, over a >= 0, minimises 1/2 ||h - a D||^2 + lam * sum(a) (problem.py). In rounds:

1. the gradient of all K atoms, D (h - a D), is kept: it starts as one matmul (onednn.py) for 256 tokens;
2. the few atoms that violate lam the most join the working set, whose part of the Gram matrix is copied
   out so that it stays in cache;
3. coordinate descent on the working set finds the support, conjugate gradients on the support finish it:
   32 correlated atoms need about 90 sweeps of the former, or 20 and 45 much cheaper steps of the latter;
4. the gradient of all atoms is brought up to date from the Gram rows whose coefficients moved.

It ends when no atom violates the KKT conditions by more than the tolerance, so the last gradient is the
certificate, over all atoms, in float32. Tasks are independent: equal input gives equal bits, whatever the
number of threads (NUMBA_NUM_THREADS; default all cores). They are Python threads around kernels that release
the GIL, so there is no threading layer to choose and memory beyond the result is a few MB a thread (4 m^2 bytes more
for a working set of m atoms: 64 MB for a code of thousands of non-zeros). The loops
that run along vectors are in vectors.py. Left out: GPU (cd_cuda.py), float64, warm starts (docs/log.md).

Working sets after celer (Massias et al. 2018); alternating a projected method that finds the support with
conjugate gradients that stop at the boundary after GPCG (More and Toraldo 1991).

Shapes: N tokens, n tokens of a task, d hidden width, K atoms, m atoms of a working set.
"""

from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from pipeline.solvers import onednn
from pipeline.solvers.parallel import inlined, kernel, one_blas_thread, run_in_threads, thread_count
from pipeline.solvers.problem import Array, Codes, join_codes, numpy_rows
from pipeline.solvers.vectors import (
    LANES,
    SUBTRACTED_ROWS,
    add_scaled,
    block_maxima,
    combine,
    dot,
    largest,
    residual_on_support,
    step_to_zero,
    subtract_rows,
)

TASK_ROWS = 256  # tokens of one matmul; about 3 MB of correlations at K = 3072
BLOCK = 32  # atoms that share one maximum when violators are looked for
JOINING = 8  # blocks whose worst atoms join the working set in a round, at least
FIRST_CAPACITY = 128  # atoms of a working set before its memory grows
MAX_ROUNDS = 100
PATIENCE = 10  # rounds without a smaller violation before a token is given up: float32 ends there
MAX_SWEEPS = 100  # in one round
SWEEPS_BEFORE_CG = 2
MAX_CG_STEPS = 60
LOWEST = np.float32(-3e38)  # kernels know no infinity
INNER = 0.1  # a round solves its working set to this share of the worst violation


def solve(hidden_Nd: Array, atoms_Kd: Array, gram_KK: Array | None, lam: float, tol: float) -> Codes:
    """Sparse-code N tokens; arguments as in `nonneg_lasso`, already checked."""
    atoms_Kd = numpy_rows(atoms_Kd, slice(None), np.float32)
    gram_KK = atoms_Kd @ atoms_Kd.T if gram_KK is None else numpy_rows(gram_KK, slice(None), np.float32)
    starts = range(0, len(hidden_Nd), TASK_ROWS)
    parts: list[Any] = [None] * len(starts)
    threads = min(thread_count(), len(starts))
    weight_Kd, square_K = torch.from_numpy(atoms_Kd), gram_KK.diagonal().copy()

    @onednn.one_thread()
    def work(tasks):
        buffers = _Buffers(min(TASK_ROWS, len(hidden_Nd)), len(atoms_Kd))
        for i, start in tasks:
            hidden_nd = numpy_rows(hidden_Nd, slice(start, start + TASK_ROWS), np.float32)
            correlation_nK = onednn.product(torch.from_numpy(hidden_nd), weight_Kd).numpy()
            parts[i] = buffers.solve(correlation_nK, gram_KK, square_K, np.float32(lam), np.float32(tol))

    with nullcontext() if onednn.is_exact() else one_blas_thread():
        run_in_threads(work, enumerate(starts), threads)
    return join_codes(parts)


class _Buffers:
    """What one thread needs to solve tasks, kept from one to the next."""

    def __init__(self, rows, num_atoms):
        self.indices_nK = np.empty((rows, num_atoms), np.int32)
        self.counts_n, self.kkt_n = np.empty(rows, np.int64), np.empty(rows, np.float32)
        self.working = _working_set(FIRST_CAPACITY)

    def solve(self, values_nK, gram_KK, square_K, lam, tol):
        """Counts, indices, values and kkt of the task's tokens; their correlations are overwritten."""
        rows = len(values_nK)
        counts_n, kkt_n = self.counts_n[:rows], self.kkt_n[:rows]
        done = 0
        while (
            done := _solve_rows(
                values_nK, self.indices_nK, counts_n, kkt_n, gram_KK, square_K, lam, tol, self.working, done
            )
        ) < rows:
            self.working = _working_set(2 * len(self.working.atoms))
        indices, values = np.empty(counts_n.sum(), np.int32), np.empty(counts_n.sum(), np.float32)
        _pack(self.indices_nK, values_nK, counts_n, indices, values)
        return counts_n.copy(), indices, values, kkt_n.copy()


# -- kernels, from the outer loop inwards ------------------------------------------------------------------


class _WorkingSet(NamedTuple):
    """Atoms that may be active and vectors over them, zero from the set's size to a multiple of 16."""

    atoms: np.ndarray  # int32: which atoms
    gram: np.ndarray  # (capacity, capacity): their Gram matrix
    code: np.ndarray  # their coefficients
    excess: np.ndarray  # correlation with the residual, minus lam
    steps: np.ndarray  # 1 / squared norm; not 1: rounding moves atoms off the unit sphere
    before: np.ndarray  # coefficients at the start of the round
    direction: np.ndarray  # of conjugate gradients
    image: np.ndarray  # gram @ direction
    residual: np.ndarray  # excess on the support
    rows: np.ndarray  # int32: atoms that moved in this round


def _working_set(capacity):
    atoms, rows = np.zeros((2, capacity), np.int32)
    gram = np.zeros((capacity, capacity), np.float32)
    code, excess, steps, before, direction, image, residual = np.zeros((7, capacity), np.float32)
    return _WorkingSet(atoms, gram, code, excess, steps, before, direction, image, residual, rows)


@kernel
def _solve_rows(values_nK, indices_nK, counts_n, kkt_n, gram_KK, square_K, lam, tol, working, done):
    """Solve the tokens from number `done` on: correlations in values_nK are overwritten by codes.

    Returns how many are done: all of them, unless the next one's working set overflows.
    """
    atoms, gram, code, excess, steps, before, direction, image, residual, rows = working
    num_atoms = values_nK.shape[1]
    grad_K, member_K = np.full(_round_up(num_atoms), LOWEST), np.zeros(num_atoms, np.uint8)
    block_max = np.empty(_round_up((num_atoms + BLOCK - 1) // BLOCK), np.float32)
    scratch = np.empty(len(block_max), np.float32)
    for n in range(done, len(counts_n)):
        for j in range(num_atoms):
            grad_K[j] = values_nK[n, j]
        size = 0
        block_maxima(grad_K, block_max)
        worst = largest(block_max) - lam
        kkt = max(worst, np.float32(0))
        least, waited = kkt, 0
        for _ in range(MAX_ROUNDS):
            if kkt <= tol or waited == PATIENCE:
                break
            threshold = _nth_largest(block_max, scratch, max(JOINING, size // 4), lam + tol)
            old_size, size = size, _join(atoms, size, grad_K, square_K, member_K, block_max, threshold)
            if size < 0:
                return n
            _copy_gram(gram, atoms, code, steps, gram_KK, square_K, old_size, size)
            _load_excess(code, excess, before, atoms, size, grad_K, lam)
            inner_tol = max(np.float32(0.3) * tol, np.float32(INNER) * worst)
            _minimise(gram, code, excess, steps, direction, image, residual, size, inner_tol)
            count = _list_moved(code, before, atoms, image, rows, size)
            subtract_rows(grad_K, image, gram_KK, rows, count)
            block_maxima(grad_K, block_max)
            worst = largest(block_max) - lam
            kkt = max(worst, _support_violation(code, atoms, size, grad_K, lam))
            waited = 0 if kkt < least else waited + 1
            least = min(least, kkt)
        kkt_n[n] = kkt
        for i in range(size):
            member_K[atoms[i]] = 0
        counts_n[n] = _write_code(code, atoms, size, indices_nK[n], values_nK[n])
    return len(counts_n)


@inlined
def _nth_largest(block_max, scratch, n, floor):
    """The n-th largest block maximum (equal ones count once), or floor if that is larger."""
    for b in range(len(scratch)):
        scratch[b] = block_max[b]
    nth = floor
    for _ in range(n):
        nth = largest(scratch)
        if nth <= floor:
            return floor
        for b in range(len(scratch)):
            scratch[b] = LOWEST if scratch[b] == nth else scratch[b]
    return nth


@inlined
def _join(atoms, size, grad_K, square_K, member_K, block_max, threshold):
    """Append the atoms whose gradient reaches the threshold. Returns the new size, -1 if they do not fit."""
    for b in range(len(block_max)):
        if block_max[b] < threshold:
            continue
        for j in range(b, len(grad_K), len(block_max)):
            if grad_K[j] >= threshold and member_K[j] == 0 and square_K[j] > 0:
                if size == len(atoms):
                    return -1
                member_K[j] = 1
                atoms[size] = j
                size += 1
    return size


@inlined
def _copy_gram(gram, atoms, code, steps, gram_KK, square_K, old_size, size):
    """Fill in the working set's Gram matrix for the atoms that joined, with zero coefficients."""
    for i in range(old_size, size):
        code[i] = 0
        steps[i] = 1 / square_K[atoms[i]]
        for j in range(i + 1):
            entry = gram_KK[atoms[j], atoms[i]]  # rows of earlier atoms were read before, and are in cache
            gram[i, j] = gram[j, i] = entry


@inlined
def _load_excess(code, excess, before, atoms, size, grad_K, lam):
    for i in range(size):
        excess[i] = grad_K[atoms[i]] - lam
        before[i] = code[i]
    for i in range(size, _round_up(size)):
        excess[i] = code[i] = 0


@inlined
def _round_up(size):
    """Loops over a working set run to a multiple of 16: no scalar remainder."""
    return (size + LANES - 1) // LANES * LANES


@inlined
def _list_moved(code, before, atoms, change, rows, size):
    """List the atoms that changed in this round, filled up for subtract_rows. Returns the length."""
    count = 0
    for i in range(size):
        if code[i] != before[i]:
            change[count] = code[i] - before[i]
            rows[count] = atoms[i]
            count += 1
    while count % SUBTRACTED_ROWS:  # of which capacities are multiples
        change[count], rows[count] = 0, rows[count - 1]
        count += 1
    return count


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
def _minimise(gram, code, excess, steps, direction, image, residual, size, tol):
    """Solve the problem over the working set to a KKT violation of tol, or as near as MAX_SWEEPS come."""
    for sweep in range(MAX_SWEEPS):
        _descend(gram, code, excess, steps, size)
        if _violation(code, excess, size) <= tol:
            break
        if (sweep + 1) % SWEEPS_BEFORE_CG == 0:
            _conjugate_gradients(gram, code, excess, direction, image, residual, size, np.float32(0.5) * tol)


@inlined
def _descend(gram, code, excess, steps, size):
    """One sweep of coordinate descent."""
    for i in range(size):
        if code[i] == 0 and excess[i] <= 0:
            continue
        new = max(code[i] + excess[i] * steps[i], np.float32(0))
        change = new - code[i]
        code[i] = new
        add_scaled(excess, excess, -change, gram[i], _round_up(size))


@inlined
def _violation(code, excess, size):
    """KKT violation of the working set."""
    worst = np.float32(0)
    for i in range(size):
        worst = max(worst, abs(excess[i]) if code[i] > 0 else excess[i])
    return worst


@inlined
def _conjugate_gradients(gram, code, excess, direction, image, residual, size, tol):
    """Minimise over the support; a coefficient that reaches zero leaves it, and directions start afresh."""
    width, beta = _round_up(size), np.float32(0)
    _clear(direction, size)
    squared = residual_on_support(residual, excess, code, width)
    for _ in range(MAX_CG_STEPS):
        if squared <= tol * tol:
            break
        add_scaled(direction, residual, beta, direction, width)
        combine(image, direction, gram, (size + 1) // 2 * 2, width)
        curvature = dot(direction, image, width)
        if curvature <= np.float32(1e-12) * squared:
            break
        step = squared / curvature  # exact: a direction is the residual plus what is orthogonal to it
        bound = step_to_zero(code, direction, width)
        add_scaled(code, code, min(step, bound), direction, width)
        add_scaled(excess, excess, -min(step, bound), image, width)
        before = squared
        if bound <= step:
            _leave_support(code, direction, bound, size)
        squared = residual_on_support(residual, excess, code, width)
        beta = squared / before
        if bound <= step:
            beta = np.float32(0)
            _clear(direction, size)


@inlined
def _leave_support(code, direction, bound, size):
    """Set the coefficients to zero that a step of `bound` brought there, up to rounding."""
    for i in range(size):
        if direction[i] < 0 and code[i] <= np.float32(-1e-6) * bound * direction[i]:
            code[i] = 0


@inlined
def _clear(vector, size):
    for i in range(_round_up(size)):
        vector[i] = 0


@kernel
def _pack(indices_nK, values_nK, counts_n, indices, values):
    entry = 0
    for n in range(len(counts_n)):
        for i in range(counts_n[n]):
            indices[entry], values[entry] = indices_nK[n, i], values_nK[n, i]
            entry += 1
