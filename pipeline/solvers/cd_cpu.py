"""Non-negative LASSO by coordinate descent on a working set of atoms, on all CPU cores (Numba).

For every row h of H, over a >= 0, minimises 1/2 ||h - a D||^2 + lam * sum(a) (problem.py). In rounds:

1. an approximate gradient of all K atoms, D (h - a D), is kept: it starts as one matmul for 256 tokens, in bfloat16
   where that is fast, and changes by rows of a Gram matrix of 16-bit integers (prepared.py);
2. the few atoms that violate lam the most join the working set, whose part of the Gram matrix is copied out so that
   it stays in cache;
3. coordinate descent and conjugate gradients solve the working set (working_set.py);
4. the rows of the atoms whose coefficients moved are taken off the gradient.

When no approximate gradient violates the KKT conditions by more than the tolerance, the certificate is taken: the
residual h - a D in float32 and, from it, the gradients of the working set and of every atom whose approximate one comes
within its error bound of a violation. The bound is a strict one, so no other atom can violate anything, and the
certificate holds over all atoms, in float32. If it finds a violation, the rounds go on.

If a working set has more atoms than they span dimensions, rounding can give its Gram matrix negative eigenvalues. The
problem of a round then has no minimum, and codes grow without end if lam is tiny or rows are far longer than 1. A round
that misses its tolerance is therefore undone, and the token continues with a Gram matrix in float32. The solver keeps
the code with the smallest violation. It returns to that code if a later one is worse than the empty code, and ends with
it if no round improves the token any more.

Tasks are independent: equal input gives equal bits, whatever the number of threads (NUMBA_NUM_THREADS; default all
cores). They are Python threads around kernels that release the GIL, so there is no threading layer to choose and memory
beyond the result is a few MB a thread (4 m^2 bytes more for a working set of m atoms: 64 MB for a code of thousands of
non-zeros) and 2 K^2 bytes. The loops that run along vectors are in vectors.py. Left out: GPU (cd_cuda.py), float64,
warm starts (docs/log.md).

Working sets after celer (Massias et al. 2018).

Shapes: N tokens, n tokens of a task, d hidden width, K atoms, m atoms of a working set.
"""

from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np

from pipeline.solvers import onednn
from pipeline.solvers.parallel import inlined, kernel, one_blas_thread, run_in_threads, thread_count
from pipeline.solvers.prepared import DIRECTIONS, PreparedAtoms, aligned_zeros, correlate_atoms, prepare
from pipeline.solvers.problem import Array, Codes, join_codes, numpy_rows
from pipeline.solvers.vectors import (
    LANES,
    MULTIPLIED_ROWS,
    SUBTRACTED_ROWS,
    block_maxima,
    dot,
    lanes_above,
    largest,
    lowest_bit,
    prefetch_row,
    row_products,
    subtract_rows,
    widen,
)
from pipeline.solvers.working_set import make_working_set, minimise, round_up, violation

TASK_ROWS = 256  # tokens of one matmul; 1.5 to 3 MB of correlations at K = 3072
BLOCK = 32  # atoms that share one maximum when violators are looked for
FIRST_JOINING, JOINING = 2, 8  # blocks whose worst atoms join the working set: in the first round, and later at least
FIRST_CAPACITY = 128  # atoms of a working set before its memory grows
MAX_ROUNDS = 100
PATIENCE = 10  # certificates without a smaller violation before a token is given up: float32 ends there
EXACT_AFTER = 1  # certificates that do not halve the violation: then rounded Gram entries are not good enough
LOWEST = np.float32(-3e38)  # kernels know no infinity
INNER = 0.1  # a round solves its working set to this share of the worst violation


def solve(hidden_Nd: Array, atoms_Kd: Array, gram_KK: Array | PreparedAtoms | None, lam: float, tol: float) -> Codes:
    """Sparse-code N tokens; arguments as in `nonneg_lasso`, already checked."""
    if isinstance(gram_KK, PreparedAtoms):
        prepared = gram_KK
    else:
        with one_blas_thread():  # how a product is cut up for threads changes how its sums round
            prepared = prepare(atoms_Kd, gram_KK)
    starts = range(0, len(hidden_Nd), TASK_ROWS)
    parts: list[Any] = [None] * len(starts)
    threads = min(thread_count(), len(starts))

    @onednn.one_thread()
    def work(tasks):
        buffers = _Buffers(min(TASK_ROWS, len(hidden_Nd)), prepared)
        for i, start in tasks:
            hidden_nd = numpy_rows(hidden_Nd, slice(start, start + TASK_ROWS), np.float32)
            parts[i] = buffers.solve(hidden_nd, np.float32(lam), np.float32(tol))

    with nullcontext() if onednn.is_exact() else one_blas_thread():
        run_in_threads(work, enumerate(starts), threads)
    return join_codes(parts)


class _Scratch(NamedTuple):
    """Vectors that belong to one token at a time."""

    grad_K: np.ndarray  # approximate gradient; LOWEST for atoms of the working set and beyond the last atom
    rounded_K: np.ndarray  # correlations as they came from the product
    block_max: np.ndarray  # the largest entry of grad_K in every block
    blocks: np.ndarray
    listed: np.ndarray  # int32: atoms that the certificate looks at
    products: np.ndarray  # of these with the residual
    residual_d: np.ndarray  # h - a D


class _Buffers:
    """What one thread needs to solve tasks, kept from one to the next."""

    def __init__(self, rows, prepared):
        self.prepared, num_atoms = prepared, len(prepared.view.square_K)
        self.hidden_nd = aligned_zeros(rows, prepared.view.atoms_Kd.shape[1])
        grad_K, rounded_K, products = (aligned_zeros(1, num_atoms + MULTIPLIED_ROWS)[0] for _ in range(3))
        block_max, blocks = (aligned_zeros(1, -(-num_atoms // BLOCK))[0] for _ in range(2))
        grad_K = grad_K[: round_up(num_atoms)]
        grad_K[:] = LOWEST
        listed, residual_d = (
            np.zeros(num_atoms + DIRECTIONS, np.int32),
            aligned_zeros(1, self.hidden_nd.shape[1])[0],
        )
        self.scratch = _Scratch(grad_K, rounded_K, block_max, blocks, listed, products, residual_d)
        self.indices_nK, self.values_nK = np.empty((rows, num_atoms), np.int32), np.empty((rows, num_atoms), np.float32)
        self.counts_n, self.kkt_n = np.empty(rows, np.int64), np.empty(rows, np.float32)
        self.working = make_working_set(FIRST_CAPACITY)

    def solve(self, hidden_nd, lam, tol):
        """Counts, indices, values and kkt of the task's tokens."""
        rows, width = hidden_nd.shape
        self.hidden_nd[:rows, :width] = hidden_nd
        found = correlate_atoms(self.prepared, hidden_nd)
        counts_n, kkt_n = self.counts_n[:rows], self.kkt_n[:rows]
        codes = self.indices_nK, self.values_nK, counts_n, kkt_n
        done = 0
        while (
            done := _solve_rows(
                codes, self.hidden_nd, found, self.prepared.view, lam, tol, self.scratch, self.working, done
            )
        ) < rows:
            self.working = make_working_set(2 * len(self.working.atoms))
        indices, values = np.empty(counts_n.sum(), np.int32), np.empty(counts_n.sum(), np.float32)
        _pack(self.indices_nK, self.values_nK, counts_n, indices, values)
        return counts_n.copy(), indices, values, kkt_n.copy()


# -- kernels, from the outer loop inwards ------------------------------------------------------------------


@kernel
def _solve_rows(codes, hidden_nd, found, view, lam, tol, scratch, working, done):
    """Solve the tokens from number `done` on.

    Of a token: `size` atoms are in its working set; `worst` is the largest approximate violation outside of it; `moved`
    says how far coefficients have moved in all, by which rounded Gram rows made its gradient wrong; `least` is the
    smallest violation that a certificate found, that of `best`, a code of the first `best_size` atoms; `waited` and
    `slow` count the certificates that found none smaller, or hardly; `exact` says that the working set's Gram matrix is
    computed in float32; `astray` says that the last round failed, and that a certificate must follow; `ends` says that
    the token is given up, with its best code.

    Returns how many are done: all of them, unless the next one's working set overflows.
    """
    indices_nK, values_nK, counts_n, kkt_n = codes
    grad_K, block_max = scratch.grad_K, scratch.block_max
    atoms, gram, code, excess, steps, before, best, direction, image, residual, rows = working
    for n in range(done, len(counts_n)):
        _start(scratch, found, view, n)
        block_maxima(grad_K, block_max)
        worst = largest(block_max) - lam
        size, moved, waited, slow, least, exact = 0, np.float32(0), 0, 0, -LOWEST, view.has_small
        best_size, astray, ends = 0, False, False
        for turn in range(MAX_ROUNDS + 2):
            if worst <= tol or astray or turn >= MAX_ROUNDS:
                error = found.margin_n[n] + view.scale * moved
                working_violation, kkt = _certify(
                    scratch, working, hidden_nd[n], view, size, lam, error, found.relative
                )
                kkt_n[n] = kkt
                astray = _is_worse_than_empty(code, scratch.residual_d, hidden_nd[n], size, lam)
                better = kkt < least and not astray
                slow += kkt > np.float32(0.5) * least
                waited = 0 if better else waited + 1
                enough = kkt <= tol and not astray and (working_violation <= np.float32(0.5) * tol or waited > 0)
                if better:
                    least, best_size = kkt, size
                    for i in range(size):
                        best[i] = code[i]
                if enough or ends:
                    break
                ends = waited >= PATIENCE or turn >= MAX_ROUNDS
                if ends and better:
                    break
                if ends or astray:
                    astray = True
                    for i in range(size):
                        code[i] = best[i] if i < best_size else np.float32(0)
                if (astray or slow >= EXACT_AFTER) and not exact:
                    exact = True  # to the end: a rounded row among exact ones would stop it again
                    _compute_gram(working, view.atoms_Kd, 0, size)
                block_maxima(grad_K, block_max)
                worst = largest(block_max) - lam
            if not astray:
                joining = max(min(FIRST_JOINING + size // 2, JOINING), size // 4)
                threshold = _nth_largest(block_max, scratch.blocks, joining, lam + tol)
                old_size, size = size, _join(atoms, size, grad_K, view, block_max, threshold)
                if size < 0:
                    return n
                _copy_gram(gram, atoms, steps, view, old_size, size)
                if exact:
                    _compute_gram(working, view.atoms_Kd, old_size, size)
                _load_excess(working, hidden_nd[n], view, old_size, size, lam)
                inner_tol = max(np.float32(0.3) * tol, np.float32(INNER) * worst)
                astray = not minimise(gram, code, excess, steps, direction, image, residual, size, inner_tol)
                if astray and not exact:
                    exact = True
                    _compute_gram(working, view.atoms_Kd, 0, size)
                    for i in range(size):
                        code[i] = before[i]
            count, change = _list_moved(code, before, atoms, image, rows, size, view.scale)
            moved += change
            subtract_rows(grad_K, image, view.gram_KK, rows, count)
            block_maxima(grad_K, block_max)
            worst = largest(block_max) - lam
        counts_n[n] = _write_code(code, atoms, size, indices_nK[n], values_nK[n])
    return len(counts_n)


@inlined
def _start(scratch, found, view, n):
    """The gradient of all atoms at a code of zeros: their correlations with the token."""
    grad_K, rounded_K = scratch.grad_K, scratch.rounded_K
    widen(rounded_K, found.rounded_nK, n)
    for j in range(len(view.square_K)):
        grad_K[j] = rounded_K[j]
    if found.relative > 0:
        for r in range(DIRECTIONS):
            scratch.listed[r] = r
        subtract_rows(grad_K, found.along_nr[n], view.main_rK, scratch.listed, DIRECTIONS)


@inlined
def _is_worse_than_empty(code, residual_d, hidden_d, size, lam):
    """Whether the objective of a code whose residual is given exceeds that of the empty code, beyond rounding."""
    objective, width = np.float32(0), len(residual_d)
    for i in range(size):
        objective += lam * code[i]
    objective += np.float32(0.5) * dot(residual_d, residual_d, width)
    return objective > np.float32(0.500001) * dot(hidden_d, hidden_d, width)


@inlined
def _certify(scratch, working, hidden_d, view, size, lam, error, relative):
    """Compute gradients in float32, into excess for the working set, into grad_K for others that may reach lam.

    error, relative  the others' approximate gradient is within error + relative * abs(rounded_K)
    Returns the largest KKT violation of the working set, which rounding of the Gram matrix adds to, and of all atoms
    """
    atoms, gram, code, excess, steps, before, best, direction, image, residual, rows = working
    grad_K, listed, products, residual_d = scratch.grad_K, scratch.listed, scratch.products, scratch.residual_d
    count = 0
    for i in range(size):
        if code[i] > 0:
            image[count], rows[count] = code[i], atoms[i]
            count += 1
    for d in range(len(residual_d)):
        residual_d[d] = hidden_d[d]
    subtract_rows(residual_d, image, view.atoms_Kd, rows, _fill_up(image, rows, count, SUBTRACTED_ROWS))
    row_products(excess, residual_d, view.atoms_Kd, atoms, _fill_up(excess, atoms, size, MULTIPLIED_ROWS))
    for i in range(size):
        excess[i] -= lam
    working_violation = kkt = violation(code, excess, size)
    count = 0
    for place in range(0, len(grad_K), LANES):
        bits = lanes_above(grad_K, relative, scratch.rounded_K, place, lam + kkt - error)
        while bits:
            atom = place + lowest_bit(bits)
            bits &= bits - 1
            if atom < len(view.square_K):  # what is not a number may look above the cut beyond the last atom
                listed[count] = atom
                count += 1
    row_products(products, residual_d, view.atoms_Kd, listed, _fill_up(products, listed, count, MULTIPLIED_ROWS))
    for i in range(count):
        grad_K[listed[i]] = products[i]
        kkt = max(kkt, products[i] - lam)
    return working_violation, kkt


@inlined
def _fill_up(weights, rows, count, multiple):
    """Fill a list of rows up with weights of zero, to a multiple of the rows taken at once. Returns its length."""
    while count % multiple:
        weights[count], rows[count] = 0, rows[count - 1]
        count += 1
    return count


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
def _join(atoms, size, grad_K, view, block_max, threshold):
    """Append the atoms whose gradient reaches the threshold. Returns the new size, -1 if they do not fit."""
    for b in range(len(block_max)):
        if block_max[b] < threshold:
            continue
        for j in range(b, len(grad_K), len(block_max)):
            if j < len(view.square_K) and grad_K[j] >= threshold and view.square_K[j] > 0:
                if size == len(view.square_K):  # only where numbers are not finite does an atom join twice
                    return size
                if size == len(atoms):
                    return -1
                prefetch_row(view.atoms_Kd, j)
                grad_K[j] = LOWEST
                atoms[size] = j
                size += 1
    return size


@inlined
def _copy_gram(gram, atoms, steps, view, old_size, size):
    """Fill in the working set's Gram matrix for the atoms that joined."""
    for i in range(old_size, size):
        gram[i, i] = view.square_K[atoms[i]]
        steps[i] = 1 / gram[i, i]
        for j in range(i):
            entry = view.scale * view.gram_KK[atoms[j], atoms[i]]  # rows of earlier atoms are in cache
            gram[i, j] = gram[j, i] = entry


@inlined
def _compute_gram(working, atoms_Kd, old_size, size):
    """The part of the working set's Gram matrix that belongs to some of its atoms, in float32.

    Small atoms need it, and tokens whose atoms are nearly dependent.
    """
    gram, count = working.gram, _fill_up(working.image, working.atoms, size, MULTIPLIED_ROWS)
    for i in range(old_size, size):
        row_products(gram[i], atoms_Kd[working.atoms[i]], atoms_Kd, working.atoms, count)
        for j in range(old_size):
            gram[j, i] = gram[i, j]


@inlined
def _load_excess(working, hidden_d, view, old_size, size, lam):
    """Give the atoms that joined a coefficient of zero and their excess, in float32 but for the Gram matrix."""
    atoms, gram, code, excess, steps, before, best, direction, image, residual, rows = working
    for i in range(old_size, size):
        code[i] = before[i] = 0
        rows[i - old_size] = atoms[i]
    count = _fill_up(image, rows, size - old_size, MULTIPLIED_ROWS)
    row_products(image, hidden_d, view.atoms_Kd, rows, count)
    for i in range(size, round_up(size)):
        excess[i] = code[i] = 0
    for i in range(old_size, size):
        excess[i] = image[i - old_size] - dot(gram[i], code, round_up(size)) - lam


@inlined
def _list_moved(code, before, atoms, change, rows, size, scale):
    """List the atoms that changed in this round, and for subtract_rows by how much of the Gram matrix's integers.

    Returns the length of the list, and how much changed in all."""
    count, moved = 0, np.float32(0)
    for i in range(size):
        step = code[i] - before[i]
        if step != 0:
            change[count], rows[count], before[i] = step * scale, atoms[i], code[i]
            moved += abs(step)
            count += 1
    return _fill_up(change, rows, count, SUBTRACTED_ROWS), moved


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


@kernel
def _pack(indices_nK, values_nK, counts_n, indices, values):
    entry = 0
    for n in range(len(counts_n)):
        for i in range(counts_n[n]):
            indices[entry], values[entry] = indices_nK[n, i], values_nK[n, i]
            entry += 1
