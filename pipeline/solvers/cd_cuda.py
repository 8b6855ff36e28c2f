"""Non-negative LASSO on a GPU: the rounds of cd_cpu.py, for thousands of tokens at once (Numba CUDA kernels).

For every row h of H, over a >= 0, minimises 1/2 ||h - a D||^2 + lam * sum(a) (problem.py). A chunk of tokens
goes through rounds together; one block of LANES threads, a warp on a GPU, works on each token:

1. the gradient of all K atoms, D (h - a D), comes from one matrix product on tensor cores (`_correlate`);
2. `_select` finds the worst KKT violation, and lets the worst violators join the token's working set;
3. `_minimise_...` copies their part of the Gram matrix and solves the problem over the working set by
   coordinate descent and conjugate gradients, as cd_cpu.py does;
4. `_subtract` forms the residual h - a D anew, in float32.

The gradient that finds no violation above the tolerance is the certificate, over all atoms. Tokens that are
done leave the chunk once the host has looked, which it first does after UNASKED_ROUNDS. Arrays never visit the
host; equal input gives equal bits on equal hardware and libraries. Everything runs on torch's current stream.

Simulator-tested; no GPU has run it yet. (Numba's CUDA simulator, NUMBA_ENABLE_CUDASIM=1, where tensors are on
the CPU. The kernels are also compiled to PTX for sm_90 in development, without a GPU.)
Left out: float64, warm starts, tolerances below the precision of `_correlate` (5e-5), several GPUs in one call.

Shapes: N tokens, n tokens of a chunk, m of them not finished, d hidden width, K atoms, W atoms of a working
set at most (its capacity).
"""

import contextlib

import numpy as np
import torch
from numba import config

from pipeline.solvers.problem import Codes

try:
    from numba import cuda, float32
except ImportError as error:
    raise ImportError('sparse coding on a GPU needs numba-cuda: pip install "mlsm[gpu]"') from error

SIMULATED = bool(config.ENABLE_CUDASIM)
LANES = 4 if SIMULATED else 32          # threads of a block: one warp, so that a block is in step by nature
GRADIENT_BYTES = 48 << 20               # of a chunk, (n, K) float32: about what an H200's L2 cache holds
GRAM_BYTES = 1 << 30                    # of the working sets of a chunk, (n, W, W) float32, at most
SHARED_BYTES = 40 << 10                 # shared memory for the vectors of a working set; beyond: global memory
VECTORS = 5                             # how many there are
FIRST_CAPACITY = 128                    # atoms of a working set before its memory grows
FIRST_JOINING, JOINING = 32, 16         # atoms that join a working set in its first and in later rounds
BISECTIONS = 12                         # to find the threshold that lets about so many join
UNASKED_ROUNDS = 3                      # rounds before the host asks which tokens are finished
MAX_ROUNDS = 100
MAX_SWEEPS = 100                        # in one round
SWEEPS_BEFORE_CG = 2
MAX_CG_STEPS = 60
INNER = np.float32(0.1)                 # a round solves its working set to this share of the worst violation
LOWEST = np.float32(-3e38)              # fast math knows no infinity
ZERO, ONE, HALF = np.float32(0), np.float32(1), np.float32(0.5)     # a plain literal would mean float64
WORKING, FINISHED, OVERFLOWED = 0, 1, 2     # status of a token


def solve(hidden_Nd, atoms_Kd, gram_KK, lam, tol):
    """Sparse-code N tokens; arguments as in `nonneg_lasso`, already checked, as tensors on one device.

    Returns Codes of tensors on that device.
    """
    with _device(hidden_Nd), _no_rounded_sums():
        problem = _Problem(atoms_Kd, gram_KK, lam, tol)
        count, capacity = len(hidden_Nd), min(FIRST_CAPACITY, problem.num_atoms)
        rows = min(max(1, count), _rows_at_once(problem.num_atoms, capacity))
        tokens, parts = _Tokens(rows, capacity, problem), []
        for chunk_nd in hidden_Nd.detach().split(rows):
            tokens.load(chunk_nd)
            parts.append(_merge(list(_solve_tokens(tokens)), len(chunk_nd)))
        counts, indices, values, kkt = (torch.cat(members) for members in zip(*parts, strict=True))
        return Codes(torch.nn.functional.pad(counts.cumsum(0), (1, 0)), indices, values, kkt)


def _rows_at_once(num_atoms, capacity):
    return max(1, min(GRADIENT_BYTES // (4 * num_atoms), GRAM_BYTES // (4 * capacity ** 2)))


def _solve_tokens(tokens):
    """Solve them, and those whose working set overflows with twice the capacity: yields parts for `_merge`."""
    tokens.solve()
    yield tokens.codes()
    overflowed = (tokens.status_n[:tokens.count] == OVERFLOWED).nonzero()[:, 0]
    capacity = min(2 * tokens.capacity, tokens.problem.num_atoms)
    for rows in overflowed.split(_rows_at_once(tokens.problem.num_atoms, capacity)) if len(overflowed) else ():
        yield from _solve_tokens(tokens.grown(rows, capacity))


def _merge(parts, count):
    """Counts, indices, values and kkt of a chunk, from parts that each hold those of some of its tokens."""
    rows_n, counts_n, kkt_n, indices, values = parts[0]
    if len(parts) == 1:
        return counts_n, indices, values, kkt_n
    counts_n, kkt_n = counts_n.clone(), kkt_n.clone()
    for rows, counts, kkt, _, _ in parts[1:]:
        counts_n[rows], kkt_n[rows] = counts, kkt
    starts_n = counts_n.cumsum(0) - counts_n
    total = sum(len(part[4]) for part in parts)
    all_indices, all_values = indices.new_empty(total), values.new_empty(total)
    for rows, counts, _, indices, values in parts:
        shift = starts_n[rows] - (counts.cumsum(0) - counts)
        places = shift.repeat_interleave(counts, output_size=len(values))
        places += torch.arange(len(values), device=places.device)
        all_indices[places], all_values[places] = indices, values
    return counts_n, all_indices, all_values, kkt_n


class _Problem:
    """What is the same for all tokens."""

    def __init__(self, atoms_Kd, gram_KK, lam, tol):
        self.atoms_Kd, self.gram_KK = (t.detach().to(torch.float32).contiguous() for t in (atoms_Kd, gram_KK))
        self.num_atoms, self.width = self.atoms_Kd.shape
        self.lam, self.tol = np.float32(lam), np.float32(tol)
        self.tensor_cores = _has_bfloat16(self.atoms_Kd.device)
        self.operand = self.atoms_Kd.T
        if self.tensor_cores:
            high_Kd, low_Kd = _halves(self.atoms_Kd)
            self.operand = torch.cat([high_Kd, low_Kd, high_Kd], 1).T
        self.atoms, self.gram = _array(self.atoms_Kd), _array(self.gram_KK)
        self.stream = 0 if SIMULATED else cuda.external_stream(torch.cuda.current_stream().cuda_stream)

    def launch(self, kernel, blocks, *arguments, shared_bytes=0):
        """One block for every token. Numba warns of grids below 128, so there the rest return at once."""
        kernel[blocks if SIMULATED else max(blocks, 128), LANES, self.stream, shared_bytes](*arguments)


def _correlate(problem, residual_md, out_mK):
    """out = residual @ atoms.T, on tensor cores with nearly the precision of float32.

    With each operand cut in two bfloat16 parts of 8 bits, x = high + low to within 2^-16 |x|, three products of
    parts add up to the whole but for low @ low: side by side they are one product of inner dimension 3 d, summed
    in float32. So of r . d_j at most 3 * 2^-16 ||r|| ||d_j|| <= 4.6e-5 is lost, for vectors no longer than 1, and
    about 1e-6 where signs are mixed; the sums round off as little. The default tolerance is 1e-3.
    """
    if problem.tensor_cores:
        high_md, low_md = _halves(residual_md)
        joined_me = torch.cat([high_md, high_md, low_md], 1)
        torch.mm(joined_me, problem.operand, out_dtype=torch.float32, out=out_mK)
    else:       # before bfloat16 (and TF32, of the same generation) this is plain float32; so is the simulator
        torch.mm(residual_md, problem.operand, out=out_mK)


def _halves(array):
    high = array.to(torch.bfloat16)
    return high, (array - high).to(torch.bfloat16)      # the difference is exact in float32


class _Tokens:
    """Working sets of some tokens, with memory for W atoms each, and what a round needs."""

    def __init__(self, count, capacity, problem):
        self.count, self.capacity, self.problem = count, capacity, problem
        device = problem.atoms_Kd.device
        self.rows_n = torch.arange(count, device=device)            # which tokens of the chunk

        def memory(*shape, dtype=torch.float32):
            return torch.zeros(shape, dtype=dtype, device=device)

        self.hidden_nd, self.residual_nd = memory(2, count, problem.width)
        self.gradient_nK = memory(count, problem.num_atoms)
        self.atoms_nW = memory(count, capacity, dtype=torch.int32)  # which atoms may be active
        self.code_nW, self.excess_nW = memory(2, count, capacity)   # excess: gradient minus lam
        self.gram_nWW = memory(count, capacity, capacity)           # Gram matrix of the working set
        self.size_n, self.filled_n, self.status_n = memory(3, count, dtype=torch.int32)
        self.kkt_n = memory(count)
        self.shared_bytes = 4 * VECTORS * capacity
        self.vectors_nV = memory(count if self.shared_bytes > SHARED_BYTES else 1, VECTORS * capacity)
        names = ("hidden_nd", "residual_nd", "gradient_nK", "atoms_nW", "code_nW", "excess_nW", "gram_nWW", "size_n",
                 "filled_n", "status_n", "kkt_n", "vectors_nV")
        self.arrays = {name: _array(getattr(self, name)) for name in names}     # made once: that takes a while

    def load(self, hidden_nd):
        """Start with tokens that have no code yet, at most as many as there is memory for."""
        self.count = len(hidden_nd)
        self.hidden_nd[:self.count] = hidden_nd
        for state in (self.code_nW, self.size_n, self.filled_n, self.status_n):
            state.zero_()

    def grown(self, rows, capacity):
        """Some of these tokens as they are, with memory for larger working sets."""
        new = _Tokens(len(rows), capacity, self.problem)
        new.rows_n = self.rows_n[rows]
        for name in ("hidden_nd", "size_n", "filled_n"):
            getattr(new, name).copy_(getattr(self, name)[rows])
        for name in ("atoms_nW", "code_nW"):
            getattr(new, name)[:, :self.capacity] = getattr(self, name)[rows]
        new.gram_nWW[:, :self.capacity, :self.capacity] = self.gram_nWW[rows]
        return new

    def solve(self):
        """Rounds until every token is finished or has overflowed its working set."""
        active_m = torch.arange(self.count, device=self.status_n.device)
        self._launch(_subtract, active_m, "hidden_nd", self.problem.atoms, "atoms_nW", "code_nW", "size_n",
                     "residual_nd")
        for round_number in range(MAX_ROUNDS + 1):
            m = len(active_m)
            _correlate(self.problem, self.residual_nd[:m], self.gradient_nK[:m])
            self._launch(_select, active_m, "gradient_nK", self.problem.gram, "atoms_nW", "code_nW", "excess_nW",
                         "size_n", "kkt_n", "status_n", self.problem.lam, self.problem.tol)
            if round_number >= UNASKED_ROUNDS:
                active_m = (self.status_n[:self.count] == WORKING).nonzero()[:, 0]
            if len(active_m) == 0 or round_number == MAX_ROUNDS:
                return
            self._minimise(active_m)
            self._launch(_subtract, active_m, "hidden_nd", self.problem.atoms, "atoms_nW", "code_nW", "size_n",
                         "residual_nd")

    def _minimise(self, active_m):
        arguments = ("atoms_nW", "code_nW", "excess_nW", "gram_nWW", "size_n", "filled_n", "kkt_n", "status_n",
                     self.problem.tol)
        if self.shared_bytes > SHARED_BYTES:
            self._launch(_minimise_in_global, active_m, "vectors_nV", self.problem.gram, *arguments)
        else:
            self._launch(_minimise_in_shared, active_m, self.problem.gram, *arguments,
                         shared_bytes=self.shared_bytes)

    def _launch(self, kernel, per_block, *arguments, shared_bytes=0):
        """Run a kernel with a block for every element of `per_block`; a string names one of our arrays."""
        if len(per_block):
            arguments = [self.arrays[a] if isinstance(a, str) else a for a in arguments]
            self.problem.launch(kernel, len(per_block), _array(per_block), *arguments, shared_bytes=shared_bytes)

    def codes(self):
        """Row numbers, counts, kkt, indices, values; tokens that have overflowed count nothing yet."""
        count, status_n = self.count, self.status_n[:self.count]
        counts_n = (self.code_nW[:count] > 0).sum(1) * (status_n != OVERFLOWED)
        ends_n = counts_n.cumsum(0)
        total = int(ends_n[-1]) if count else 0
        indices = torch.empty(max(total, 1), dtype=torch.int32, device=ends_n.device)  # numba takes no empty array
        values = torch.empty(max(total, 1), dtype=torch.float32, device=ends_n.device)
        self._launch(_pack, ends_n - counts_n, "status_n", "atoms_nW", "code_nW", "size_n", _array(indices),
                     _array(values))
        return self.rows_n[:count], counts_n, self.kkt_n[:count].clone(), indices[:total], values[:total]


# -- between torch and Numba -------------------------------------------------------------------------------


def _array(tensor):
    """The same memory as an array that a kernel takes; torch's stream orders all work, so nothing waits."""
    return tensor.numpy() if SIMULATED else cuda.as_cuda_array(tensor, sync=False)


def _device(tensor):
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def _has_bfloat16(device):
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


@contextlib.contextmanager
def _no_rounded_sums():
    """Forbid cuBLAS to add up the parts of a split sum in bfloat16."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before


# -- kernels, from the outer loop inwards; a block is LANES threads, and works on one token -----------------
#
# All threads of a block take the same branches: conditions depend on values that all of them read, or on
# reductions, which return the same bits to all. An element i of a token's vectors belongs to thread i % LANES,
# which alone writes it; `_wait` stands between a write and a read by another thread, and between that read and
# the next write. A block is one warp, so `_wait` costs little, and orders its shared and global memory.

if SIMULATED:
    _kernel, _inlined = cuda.jit, cuda.jit(device=True)
else:
    _kernel = cuda.jit(fastmath=True, launch_bounds=LANES)
    _inlined = cuda.jit(device=True, fastmath=True, forceinline=True)


@_kernel
def _select(active_m, gradient_mK, gram_KK, atoms_nW, code_nW, excess_nW, size_n, kkt_n, status_n, lam, tol):
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
        joining = _join(atoms_nW[token], size, grad_K, gram_KK, threshold, wanted)
    _wait()
    if cuda.threadIdx.x == 0:
        kkt_n[token] = kkt
        if kkt <= tol:
            status_n[token] = FINISHED
        elif size + joining > atoms_nW.shape[1]:
            status_n[token] = OVERFLOWED        # those that joined are forgotten
        else:
            size_n[token] = size + joining


@_inlined
def _take_members(grad_K, atoms, code, excess, size, lam):
    """Move the working set's gradient out, so that grad_K is left with the other atoms. Returns the violation."""
    violation = ZERO
    for i in range(cuda.threadIdx.x, size, LANES):
        over = grad_K[atoms[i]] - lam
        grad_K[atoms[i]] = LOWEST
        excess[i] = over
        violation = max(violation, abs(over) if code[i] > ZERO else over)
    _wait()
    return _max(violation)


@_inlined
def _largest(grad_K):
    largest = LOWEST
    for j in range(cuda.threadIdx.x, len(grad_K), LANES):
        largest = max(largest, grad_K[j])
    return _max(largest)


@_inlined
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


@_inlined
def _count(grad_K, threshold):
    """How many atoms reach the threshold; exact in float32, which the warp can add."""
    count = ZERO
    for j in range(cuda.threadIdx.x, len(grad_K), LANES):
        if grad_K[j] >= threshold:
            count += ONE
    return _sum(count)


@_inlined
def _join(atoms, size, grad_K, gram_KK, threshold, wanted):
    """Append the first `wanted` atoms that reach the threshold. Returns how many, even if they do not fit."""
    joined = 0
    for first in range(0, len(grad_K), LANES):
        j = first + cuda.threadIdx.x
        joins = j < len(grad_K) and grad_K[j] >= threshold and gram_KK[j, j] > ZERO
        before, together = _places(joins)
        place = size + joined + before
        if joins and joined + before < wanted and place < len(atoms):
            atoms[place] = j
        joined += together
        if joined >= wanted:
            return wanted
    return joined


@_kernel
def _minimise_in_shared(active_m, gram_KK, atoms_nW, code_nW, excess_nW, gram_nWW, size_n, filled_n, kkt_n,
                        status_n, tol):
    """Minimise over the working set, with its vectors in shared memory."""
    if cuda.blockIdx.x < len(active_m):
        _minimise_token(cuda.shared.array(0, float32), active_m[cuda.blockIdx.x], gram_KK, atoms_nW, code_nW,
                        excess_nW, gram_nWW, size_n, filled_n, kkt_n, status_n, tol)


@_kernel
def _minimise_in_global(active_m, vectors_nV, gram_KK, atoms_nW, code_nW, excess_nW, gram_nWW, size_n, filled_n,
                        kkt_n, status_n, tol):
    """The same for working sets that are too large for shared memory."""
    if cuda.blockIdx.x < len(active_m):
        token = active_m[cuda.blockIdx.x]
        _minimise_token(vectors_nV[token], token, gram_KK, atoms_nW, code_nW, excess_nW, gram_nWW, size_n, filled_n,
                        kkt_n, status_n, tol)


@_inlined
def _minimise_token(vectors, token, gram_KK, atoms_nW, code_nW, excess_nW, gram_nWW, size_n, filled_n, kkt_n,
                    status_n, tol):
    size, atoms, gram = size_n[token], atoms_nW[token], gram_nWW[token]
    if status_n[token] != WORKING:
        return
    width = len(atoms)
    code, excess, steps = vectors[:width], vectors[width:2 * width], vectors[2 * width:3 * width]
    direction, image = vectors[3 * width:4 * width], vectors[4 * width:5 * width]
    _copy_gram(gram, gram_KK, atoms, filled_n[token], size)
    for i in range(cuda.threadIdx.x, size, LANES):
        code[i], excess[i] = code_nW[token, i], excess_nW[token, i]
        steps[i] = ONE / gram_KK[atoms[i], atoms[i]]    # not 1: rounding moves atoms off the unit sphere
    _wait()
    _minimise(gram, code, excess, steps, direction, image, size, max(np.float32(0.3) * tol, INNER * kkt_n[token]))
    for i in range(cuda.threadIdx.x, size, LANES):
        code_nW[token, i] = code[i]
    if cuda.threadIdx.x == 0:
        filled_n[token] = size


@_inlined
def _copy_gram(gram, gram_KK, atoms, filled, size):
    """Fill in the working set's Gram matrix for the atoms that joined."""
    for i in range(filled, size):
        for j in range(cuda.threadIdx.x, i + 1, LANES):
            value = gram_KK[atoms[i], atoms[j]]
            gram[i, j] = value
            gram[j, i] = value


@_inlined
def _minimise(gram, code, excess, steps, direction, image, size, tol):
    """Solve the problem over the working set to a KKT violation of tol, or as near as MAX_SWEEPS come."""
    for sweep in range(MAX_SWEEPS):
        _descend(gram, code, excess, steps, size)
        if _violation(code, excess, size) <= tol:
            break
        if (sweep + 1) % SWEEPS_BEFORE_CG == 0:
            _conjugate_gradients(gram, code, excess, direction, image, size, HALF * tol)
            _wait()


@_inlined
def _descend(gram, code, excess, steps, size):
    """One sweep of coordinate descent: one atom after the other, whose row the threads share."""
    for i in range(size):
        old, over = code[i], excess[i]
        if old == ZERO and over <= ZERO:
            continue
        new = max(old + over * steps[i], ZERO)
        change = new - old
        _wait()
        for j in range(cuda.threadIdx.x, size, LANES):
            excess[j] -= change * gram[i, j]
        if cuda.threadIdx.x == i % LANES:
            code[i] = new
        _wait()


@_inlined
def _violation(code, excess, size):
    """KKT violation of the working set."""
    worst = ZERO
    for i in range(cuda.threadIdx.x, size, LANES):
        worst = max(worst, abs(excess[i]) if code[i] > ZERO else excess[i])
    return _max(worst)


@_inlined
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
        _move(code, excess, direction, image, step, size)
        if step == longest:
            _clear(direction, size)
        squared = _turn(code, excess, direction, size, squared)


@_inlined
def _turn(code, excess, direction, size, squared_before):
    """Next conjugate direction, zero off the support. Returns the squared norm of the support's excess."""
    squared = ZERO
    for i in range(cuda.threadIdx.x, size, LANES):
        squared += excess[i] * excess[i] if code[i] > ZERO else ZERO
    squared = _sum(squared)
    beta = squared / squared_before
    for i in range(cuda.threadIdx.x, size, LANES):
        direction[i] = (excess[i] if code[i] > ZERO else ZERO) + beta * direction[i]
    return squared


@_inlined
def _multiply(image, gram, direction, size):
    """image = direction @ gram."""
    _wait()
    for j in range(cuda.threadIdx.x, size, LANES):
        total = ZERO
        for i in range(size):
            total += direction[i] * gram[i, j]
        image[j] = total
    _wait()


@_inlined
def _clear(vector, size):
    for i in range(cuda.threadIdx.x, size, LANES):
        vector[i] = ZERO


@_inlined
def _dot(left, right, size):
    total = ZERO
    for i in range(cuda.threadIdx.x, size, LANES):
        total += left[i] * right[i]
    return _sum(total)


@_inlined
def _longest_step(code, direction, size):
    """The step that brings the first coefficient to zero."""
    nearest = LOWEST
    for i in range(cuda.threadIdx.x, size, LANES):
        if direction[i] < ZERO:
            nearest = max(nearest, code[i] / direction[i])
    return -_max(nearest)


@_inlined
def _move(code, excess, direction, image, step, size):
    for i in range(cuda.threadIdx.x, size, LANES):
        new = code[i] + step * direction[i]
        code[i] = new if new > np.float32(1e-6) * code[i] else ZERO     # rounding: one that is blocked must leave
        excess[i] -= step * image[i]


@_kernel
def _subtract(active_m, hidden_nd, atoms_Kd, atoms_nW, code_nW, size_n, residual_nd):
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


@_kernel
def _pack(starts_n, status_n, atoms_nW, code_nW, size_n, indices, values):
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


# -- what the threads of a block do together: in shared memory in the simulator, in registers on a GPU ------

if SIMULATED:
    @_inlined
    def _wait():
        cuda.syncthreads()

    @_inlined
    def _gather(value):
        """What every thread has, for all of them."""
        values = cuda.shared.array(LANES, float32)
        cuda.syncthreads()
        values[cuda.threadIdx.x] = value
        cuda.syncthreads()
        return values

    @_inlined
    def _sum(value):
        values, total = _gather(value), ZERO
        for lane in range(LANES):
            total += values[lane]
        return total

    @_inlined
    def _max(value):
        values, largest = _gather(value), LOWEST
        for lane in range(LANES):
            largest = max(largest, values[lane])
        return largest

    @_inlined
    def _places(flag):
        """How many threads before this one have the flag, and how many in all."""
        values, before, together = _gather(ONE if flag else ZERO), 0, 0
        for lane in range(LANES):
            before += int(values[lane]) if lane < cuda.threadIdx.x else 0
            together += int(values[lane])
        return before, together
else:
    WARP = 0xffffffff

    @_inlined
    def _wait():
        cuda.syncthreads()

    @_inlined
    def _sum(value):
        for distance in (16, 8, 4, 2, 1):
            value += cuda.shfl_xor_sync(WARP, value, distance)
        return value

    @_inlined
    def _max(value):
        for distance in (16, 8, 4, 2, 1):
            value = max(value, cuda.shfl_xor_sync(WARP, value, distance))
        return value

    @_inlined
    def _places(flag):
        """How many threads before this one have the flag, and how many in all."""
        votes = cuda.ballot_sync(WARP, flag) & WARP
        return cuda.popc(votes & ((1 << cuda.threadIdx.x) - 1)), cuda.popc(votes)
