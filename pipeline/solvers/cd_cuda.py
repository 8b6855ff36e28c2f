"""Non-negative LASSO on a GPU: the rounds of cd_cpu.py, for thousands of tokens at once.

For every row h of H, over a >= 0, minimises 1/2 ||h - a D||^2 + lam * sum(a) (problem.py). A chunk of tokens
goes through rounds together; the kernels (cuda_kernels.py) give each token to one block of threads:

1. the gradient of all K atoms, D (h - a D), comes from one matrix product on tensor cores (`_correlate`);
2. `select` finds the worst KKT violation, and lets the worst violators join the token's working set;
3. `minimise_...` copies their part of the Gram matrix and solves the problem over the working set by
   coordinate descent and conjugate gradients, as cd_cpu.py does;
4. `subtract` forms the residual h - a D anew, in float32.

The gradient that finds no violation above the tolerance is the certificate, over all atoms. Tokens that are
finished leave the chunk once the host has asked which, first after UNASKED_ROUNDS; a token whose working set
overflows waits, and goes on with twice the capacity. Arrays never visit the host. Everything runs on torch's
current stream. Equal input gives equal bits on equal hardware and libraries.

Simulator-tested; no GPU has run it yet. (In Numba's CUDA simulator, NUMBA_ENABLE_CUDASIM=1, tensors are on the
CPU. The kernels have also been compiled for sm_90 without a GPU, and, as blocks of one thread, run on a CPU at real
sizes: compile_kernels.py and kernels_on_cpu.py in tests/pipeline/solvers.)
Left out: float64, warm starts, tolerances below the precision of `_correlate` (5e-5), several GPUs in one call.

Shapes: N tokens, n tokens of a chunk, m of them active, d hidden width, K atoms, W atoms of a working set at
most (its capacity).
"""

import contextlib
import functools

import numpy as np
import torch

from pipeline.solvers import cuda_kernels as kernels
from pipeline.solvers.cuda_block import LANES, SIMULATED, cuda
from pipeline.solvers.cuda_kernels import OVERFLOWED, WORKING
from pipeline.solvers.problem import Codes

GRADIENT_BYTES = 48 << 20  # of a chunk, (n, K) float32: about what an H200's L2 cache holds
GRAM_BYTES = 1 << 30  # of the working sets of a chunk, (n, W, W) float32; again for each doubling
SHARED_BYTES = 40 << 10  # of shared memory for a working set's vectors; beyond: global memory
FIRST_CAPACITY = 128  # atoms of a working set before its memory grows
UNASKED_ROUNDS = 3  # rounds before the host asks which tokens are finished
MAX_ROUNDS = 100
DEVICE = "cpu" if SIMULATED else "cuda"  # of rows that are on no GPU yet
GRID = 128  # launches are multiples of it: Numba warns of less, and keeps a launch


def solve(hidden_Nd: torch.Tensor, atoms_Kd: torch.Tensor, gram_KK: torch.Tensor, lam: float, tol: float) -> Codes:
    """Sparse-code N tokens; arguments as in `nonneg_lasso`, already checked, as tensors on one device.

    Returns Codes of tensors on that device.
    """
    with _device(hidden_Nd):
        problem = _Problem(atoms_Kd, gram_KK, lam, tol)
        count, capacity = len(hidden_Nd), min(FIRST_CAPACITY, problem.num_atoms)
        rows = min(max(1, count), _rows_at_once(problem.num_atoms, capacity))
        tokens, parts = _Tokens(rows, capacity, problem), []
        for chunk_nd in hidden_Nd.detach().split(rows):
            tokens.load(chunk_nd)
            parts.append(_merge(list(_solve_tokens(tokens))))
        counts, indices, values, kkt = (torch.cat(members) for members in zip(*parts, strict=True))
        return Codes(torch.nn.functional.pad(counts.cumsum(0), (1, 0)), indices, values, kkt)


def _rows_at_once(num_atoms, capacity):
    return max(1, min(GRADIENT_BYTES // (4 * num_atoms), GRAM_BYTES // (4 * capacity**2)))


def _solve_tokens(tokens):
    """Solve them, and those whose working set overflows with twice the capacity: yields parts for `_merge`."""
    tokens.solve()
    yield tokens.codes()
    overflowed = (tokens.status_n[: tokens.count] == OVERFLOWED).nonzero()[:, 0]
    capacity = min(2 * tokens.capacity, tokens.problem.num_atoms)
    for rows in overflowed.split(_rows_at_once(tokens.problem.num_atoms, capacity)) if len(overflowed) else ():
        yield from _solve_tokens(tokens.grow(rows, capacity))


def _merge(parts):
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
        device = self.atoms_Kd.device
        self.tensor_cores = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)  # bfloat16
        self.operand = self.atoms_Kd.T
        if self.tensor_cores:
            high_Kd, low_Kd = _halves(self.atoms_Kd)
            self.operand = torch.cat([high_Kd, low_Kd, high_Kd], 1).T
        self.atoms, self.gram = _array(self.atoms_Kd), _array(self.gram_KK)
        self.stream = 0 if SIMULATED else _stream(torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream)

    def launch(self, kernel, blocks, *arguments, shared_bytes=0):
        """Run a kernel with a block for every token; on a GPU there may be more, which return at once."""
        blocks = blocks if SIMULATED else -(-blocks // GRID) * GRID
        kernel[blocks, LANES, self.stream, shared_bytes](*arguments)


def _correlate(problem, residual_md, out_mK):
    """out = residual @ atoms.T, on tensor cores with nearly the precision of float32.

    With each operand cut in two bfloat16 parts of 8 bits, x = high + low to within 2^-16 |x|, three products of
    parts add up to the whole but for low @ low: side by side they are one product of inner dimension 3 d, summed
    in float32. So of r . d_j at most 3 * 2^-16 ||r|| ||d_j|| <= 4.6e-5 is lost, for vectors no longer than 1, and
    about 1e-6 where signs are mixed; the sums round off as little. The default tolerance is 1e-3. (cuBLAS may
    round partial sums to the type of the result, if torch allows: here that is float32.)
    """
    if problem.tensor_cores:
        high_md, low_md = _halves(residual_md)
        joined_me = torch.cat([high_md, high_md, low_md], 1)
        torch.mm(joined_me, problem.operand, out_dtype=torch.float32, out=out_mK)
    else:  # before bfloat16 (and TF32, of the same generation) this is plain float32; so is the simulator
        torch.mm(residual_md, problem.operand, out=out_mK)


def _halves(array):
    high = array.to(torch.bfloat16)
    return high, (array - high).to(torch.bfloat16)  # the difference is exact in float32


class _Tokens:
    """Working sets of some tokens, with memory for W atoms each, and what a round needs."""

    def __init__(self, count, capacity, problem):
        self.count, self.capacity, self.problem = count, capacity, problem
        device = problem.atoms_Kd.device
        self.rows_n = torch.arange(count, device=device)  # which tokens of the chunk

        def memory(*shape, dtype=torch.float32):
            return torch.zeros(shape, dtype=dtype, device=device)

        self.gram_nWW = torch.empty(count, capacity, capacity, device=device)  # written before it is read
        self.hidden_nd, self.residual_nd = memory(2, count, problem.width)
        self.gradient_nK = memory(count, problem.num_atoms)
        self.atoms_nW = memory(count, capacity, dtype=torch.int32)  # which atoms may be active
        self.code_nW, self.excess_nW = memory(2, count, capacity)  # excess: gradient minus lam
        self.size_n, self.filled_n, self.status_n = memory(3, count, dtype=torch.int32)
        self.kkt_n = memory(count)
        self.shared_bytes = 4 * kernels.VECTORS * capacity
        self.vectors_nV = memory(count if self.shared_bytes > SHARED_BYTES else 1, kernels.VECTORS * capacity)
        names = (
            "hidden_nd",
            "residual_nd",
            "gradient_nK",
            "atoms_nW",
            "code_nW",
            "excess_nW",
            "gram_nWW",
            "size_n",
            "filled_n",
            "status_n",
            "kkt_n",
            "vectors_nV",
        )
        self.arrays = {name: _array(getattr(self, name)) for name in names}  # made once: that takes a while

    def load(self, hidden_nd):
        """Start with tokens that have no code yet, at most as many as there is memory for."""
        self.count = len(hidden_nd)
        self.hidden_nd[: self.count] = hidden_nd
        for state in (self.code_nW, self.size_n, self.filled_n, self.status_n):
            state.zero_()

    def grow(self, rows, capacity):
        """Some of these tokens as they are, with memory for larger working sets."""
        new = _Tokens(len(rows), capacity, self.problem)
        new.rows_n = self.rows_n[rows]
        for name in ("hidden_nd", "size_n", "filled_n"):
            getattr(new, name).copy_(getattr(self, name)[rows])
        for name in ("atoms_nW", "code_nW"):
            getattr(new, name)[:, : self.capacity] = getattr(self, name)[rows]
        new.gram_nWW[:, : self.capacity, : self.capacity] = self.gram_nWW[rows]
        return new

    def solve(self):
        """Rounds until every token is finished or has overflowed its working set."""
        if self.count == 0:
            return
        active_m = torch.arange(self.count, device=self.status_n.device)
        self._launch(
            kernels.subtract, active_m, "hidden_nd", self.problem.atoms, "atoms_nW", "code_nW", "size_n", "residual_nd"
        )
        for round_number in range(MAX_ROUNDS + 1):
            m = len(active_m)
            _correlate(self.problem, self.residual_nd[:m], self.gradient_nK[:m])
            self._launch(
                kernels.select,
                active_m,
                "gradient_nK",
                self.problem.gram,
                "atoms_nW",
                "code_nW",
                "excess_nW",
                "size_n",
                "kkt_n",
                "status_n",
                self.problem.lam,
                self.problem.tol,
            )
            if round_number >= UNASKED_ROUNDS:
                active_m = (self.status_n[: self.count] == WORKING).nonzero()[:, 0]
            if len(active_m) == 0 or round_number == MAX_ROUNDS:
                return
            self._minimise(active_m)
            self._launch(
                kernels.subtract,
                active_m,
                "hidden_nd",
                self.problem.atoms,
                "atoms_nW",
                "code_nW",
                "size_n",
                "residual_nd",
            )

    def _minimise(self, active_m):
        arguments = (
            "atoms_nW",
            "code_nW",
            "excess_nW",
            "gram_nWW",
            "size_n",
            "filled_n",
            "kkt_n",
            "status_n",
            self.problem.tol,
        )
        if self.shared_bytes > SHARED_BYTES:
            self._launch(kernels.minimise_in_global, active_m, "vectors_nV", self.problem.gram, *arguments)
        else:
            self._launch(
                kernels.minimise_in_shared, active_m, self.problem.gram, *arguments, shared_bytes=self.shared_bytes
            )

    def _launch(self, kernel, per_block, *arguments, shared_bytes=0):
        """Run a kernel with a block for every element of `per_block`; a string names one of our arrays."""
        if len(per_block):
            arrays = [self.arrays[a] if isinstance(a, str) else a for a in arguments]
            self.problem.launch(kernel, len(per_block), _array(per_block), *arrays, shared_bytes=shared_bytes)

    def codes(self):
        """Row numbers, counts, kkt, indices, values; tokens that have overflowed count nothing yet."""
        count, status_n = self.count, self.status_n[: self.count]
        counts_n = (self.code_nW[:count] > 0).sum(1) * (status_n != OVERFLOWED)
        ends_n = counts_n.cumsum(0)
        total = int(ends_n[-1]) if count else 0
        indices = torch.empty(max(total, 1), dtype=torch.int32, device=ends_n.device)  # numba takes no empty array
        values = torch.empty(max(total, 1), dtype=torch.float32, device=ends_n.device)
        self._launch(
            kernels.pack,
            ends_n - counts_n,
            "status_n",
            "atoms_nW",
            "code_nW",
            "size_n",
            _array(indices),
            _array(values),
        )
        return self.rows_n[:count], counts_n, self.kkt_n[:count].clone(), indices[:total], values[:total]


# -- between torch and Numba -------------------------------------------------------------------------------


def _array(tensor):
    """The same memory as an array that a kernel takes; torch's stream orders all work, so nothing waits."""
    return tensor.numpy() if SIMULATED else cuda.as_cuda_array(tensor, sync=False)


@functools.cache
def _stream(device, handle):
    return cuda.external_stream(handle)


def _device(tensor):
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
