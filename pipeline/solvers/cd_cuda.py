"""Non-negative LASSO on a GPU: working sets as in cd_cpu.py, for thousands of tokens at once.

For every row h of H, over a >= 0, minimises 1/2 ||h - a D||^2 + lam * sum(a) (problem.py). A chunk of tokens
goes through rounds together; the kernels give each token to one block of threads:

1. the gradient of all K atoms, D (h - a D), comes from one matrix product on tensor cores (cuda_products.py);
2. `select` finds the worst KKT violation, and lets the worst violators join the token's working set;
3. `minimise_...` solves the problem over the working set by coordinate descent and conjugate gradients;
4. `subtract` forms the residual h - a D anew, in float32.

The gradient that finds no violation above the tolerance is the certificate, over all atoms. Rounds begin with products
of float16, whose error is bounded for every token; the certificate includes the bound. Tokens for which that is too
coarse go on with products of nearly the precision of float32. A round lists the tokens that are not finished on the
GPU; the host asks which are left only after the rounds of ROUNDS. A token whose working set overflows waits, and goes
on with a larger one. Arrays never visit the host. Everything runs on torch's current stream. Equal input gives equal
bits on equal hardware and libraries.

The kernels passed cuda_checks.py of tests/pipeline/solvers on an H200. Without a GPU it runs in Numba's CUDA simulator
(NUMBA_ENABLE_CUDASIM=1), where tensors are on the CPU. The kernels are also compiled for sm_80, 90 and 100, searched
for races, and, as blocks of one thread, run on a CPU at real sizes: instruction_budget.py, races.py, kernels_on_cpu.py.
Left out: float64, warm starts, tolerances below the precision of the products (5e-5), several GPUs in one call.

Shapes: N tokens, n tokens of a chunk, m places of those that are active, d hidden width, K atoms, W atoms of a working
set at most (its capacity); d and K are filled up with zeros to multiples of eight.
"""

import contextlib
from typing import Any

import numpy as np
import torch

from pipeline.solvers import cuda_kernels as kernels
from pipeline.solvers import cuda_large, cuda_working_set
from pipeline.solvers.cuda_block import SIMULATED
from pipeline.solvers.cuda_kernels import OVERFLOWED, WAITING, WORKING
from pipeline.solvers.cuda_launch import Argument, launcher
from pipeline.solvers.cuda_products import PreparedOnGpu, correlate_in_float16, correlate_precisely, prepare
from pipeline.solvers.problem import Codes

CHUNK = 1 << 15  # tokens: launches and the last rounds of a chunk cost little in so many
GRADIENT_BYTES = 1 << 29  # of a chunk, (n, K) float32, at most
GRAM_BYTES = 1 << 30  # of the working sets of a chunk that are in main memory, (n, W, W) float32
ROUNDS = (1, 1, 1, 1, 0.5, 0.25, 0.125)  # how much of a chunk takes part in each round before the host asks
FAR = np.float32(20)  # violations, in units of the tolerance, from which no round gets below it
MAX_HALF_ROUNDS, MAX_ROUNDS = 30, 100  # with products of float16; with more precise ones
DEVICE = "cpu" if SIMULATED else "cuda"  # of rows that are on no GPU yet
GRID = 128  # launches are multiples of it: Numba warns of less, and keeps a launch


def solve(
    hidden_Nd: torch.Tensor, atoms_Kd: torch.Tensor, gram_KK: torch.Tensor | PreparedOnGpu, lam: float, tol: float
) -> Codes:
    """Sparse-code N tokens; arguments as in `nonneg_lasso`, already checked, as tensors on one device.

    gram_KK  for many calls with the same atoms: prepare(atoms_Kd, gram_KK)
    Returns Codes of tensors on that device.
    """
    with torch.no_grad(), _device(hidden_Nd):
        prepared = gram_KK if isinstance(gram_KK, PreparedOnGpu) else prepare(atoms_Kd, gram_KK)
        problem = _Problem(prepared, lam, tol)
        capacity = cuda_working_set.SMALL if prepared.fits_float16 else 2 * cuda_working_set.MEDIUM
        rows = min(max(1, len(hidden_Nd)), _rows_at_once(prepared, capacity))
        tokens, parts = _Tokens(rows, capacity, problem), []
        for chunk_nd in hidden_Nd.detach().split(rows):
            tokens.load(chunk_nd)
            parts.append(_merge(list(_solve_tokens(tokens))))
        counts, indices, values, kkt = (torch.cat(members) for members in zip(*parts, strict=True))
        return Codes(torch.nn.functional.pad(counts.cumsum(0), (1, 0)), indices, values, kkt)


def _rows_at_once(prepared, capacity):
    rows = min(CHUNK, GRADIENT_BYTES // (4 * len(prepared.atoms_Kd)))
    return max(1, min(rows, GRAM_BYTES // (4 * capacity**2)) if capacity > cuda_working_set.MEDIUM else rows)


def _solve_tokens(tokens):
    """Solve them, and those whose working set overflows with a larger one: yields parts for `_merge`."""
    tokens.solve()
    yield tokens.codes()
    overflowed = (tokens.status_n[: tokens.count] == OVERFLOWED).nonzero()[:, 0]
    larger = cuda_working_set.MEDIUM if tokens.capacity < cuda_working_set.MEDIUM else 2 * tokens.capacity
    for rows in overflowed.split(_rows_at_once(tokens.problem.prepared, larger)) if len(overflowed) else ():
        yield from _solve_tokens(tokens.grow(rows, larger))


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

    def __init__(self, prepared, lam, tol):
        self.prepared, self.lam, self.tol = prepared, np.float32(lam), np.float32(tol)
        names = ("atoms_Kd", "half_atoms_Kd", "gram_KK", "half_gram_KK", "square_K")
        self.arrays = {name: Argument.of(getattr(prepared, name)) for name in names}
        self._launch = launcher(*_current_stream())

    def launch(self, kernel, blocks, *arguments, shared_bytes=0):
        """Run a kernel with a block for every token; on a GPU there may be more, which return at once."""
        blocks = blocks if SIMULATED else -(-blocks // GRID) * GRID
        self._launch(kernel, blocks, *arguments, shared_bytes=shared_bytes)


class _Tokens:
    """Working sets of some tokens, with memory for W atoms each, and what a round needs."""

    def __init__(self, count, capacity, problem):
        self.count, self.capacity, self.problem = count, capacity, problem
        prepared, device = problem.prepared, problem.prepared.atoms_Kd.device
        num_atoms, width = prepared.atoms_Kd.shape
        self.rows_n = torch.arange(count, device=device)  # which tokens of the chunk

        def memory(*shape, dtype=torch.float32):
            return torch.zeros(shape, dtype=dtype, device=device)

        self.hidden_nd = memory(count, width)
        self.residual_nd = torch.empty(count, width, device=device)  # these two are written before they are read
        self.gradient_nK = torch.empty(count, num_atoms, device=device)
        # the same memory for products of float16
        self.half_residual_nd = self.residual_nd.view(torch.float16).view(-1)[: count * width].view(count, width)
        self.half_gradient_nK = (
            self.gradient_nK.view(torch.float16).view(-1)[: count * num_atoms].view(count, num_atoms)
        )
        self.atoms_nW = memory(count, capacity, dtype=torch.int32)  # which atoms may be active
        self.code_nW, self.excess_nW = memory(2, count, capacity)  # excess: gradient minus lam
        self.size_n, self.filled_n, self.status_n = memory(3, count, dtype=torch.int32)
        self.kkt_n, self.error_n = memory(2, count)  # the gradient's error, at most
        large = capacity > cuda_working_set.MEDIUM
        self.gram_nWW = torch.empty((count, capacity, capacity) if large else (1, 1, 1), device=device)
        self.vectors_nV = torch.empty((count, cuda_large.VECTORS * capacity) if large else (1, 1), device=device)
        self.arrays = problem.arrays | {
            name: Argument.of(tensor)
            for name, tensor in vars(self).items()
            if isinstance(tensor, torch.Tensor) and name != "rows_n"
        }

    def load(self, hidden_nd):
        """Start with tokens that have no code yet, at most as many as there is memory for."""
        self.count = len(hidden_nd)
        self.hidden_nd[: self.count, : hidden_nd.shape[1]] = hidden_nd
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
        if self.capacity > cuda_working_set.MEDIUM:
            new.gram_nWW[:, : self.capacity, : self.capacity] = self.gram_nWW[rows]
        return new

    def solve(self):
        """Rounds until every token is finished or has overflowed its working set."""
        if self.count == 0:
            return
        active_m = self._solve_in_float16() if self.problem.prepared.fits_float16 else self._working()
        for round_number in range(MAX_ROUNDS + 1):
            if len(active_m) == 0:
                return
            self._correlate(active_m, precise=True)
            active_m = self._working()
            if round_number < MAX_ROUNDS:
                self._minimise(active_m)

    def _solve_in_float16(self):
        """Rounds with products of float16. Returns the tokens for which these are too coarse.

        In the rounds of ROUNDS nothing depends on what the tokens are, and the host asks for nothing.
        """
        active_m = torch.arange(self.count, device=self.status_n.device)
        for round_number in range(MAX_HALF_ROUNDS):
            if round_number > 0:
                if round_number >= len(ROUNDS):
                    active_m = self._working()
                elif ROUNDS[round_number] < 1:
                    active_m = self._list(max(1, int(ROUNDS[round_number] * self.count)))
                if len(active_m) == 0:
                    break
                self._minimise(active_m)
            self._correlate(active_m, precise=False)
        self.status_n.masked_fill_(self.status_n == WAITING, WORKING)
        return self._working()

    def _working(self):
        return (self.status_n[: self.count] == WORKING).nonzero()[:, 0]

    def _list(self, places):
        """The first tokens, at most so many, that are not finished; -1 fills up the list."""
        working_n = self.status_n[: self.count] == WORKING
        places_n = torch.where(working_n, working_n.cumsum(0) - 1, places).clamp_(max=places)
        listed = torch.full((places + 1,), -1, device=working_n.device)  # the last place takes all that are not listed
        return listed.scatter_(0, places_n, torch.arange(self.count, device=working_n.device))[:places]

    def _correlate(self, active_m, precise):
        """Residuals and gradients, and with these the certificates or the atoms that join."""
        m, prepared, (lam, tol) = len(active_m), self.problem.prepared, (self.problem.lam, self.problem.tol)
        half = "" if precise else "half_"
        names = ("hidden_nd", "atoms_Kd", "half_atoms_Kd", "atoms_nW", "code_nW", "size_n", half + "residual_nd")
        far, errors = np.float32(1e30) if precise else FAR * tol, prepared.errors(lam + tol, precise)
        self._launch(kernels.subtract, active_m, *names, "kkt_n", "error_n", "status_n", far, *errors)
        if precise:
            correlate_precisely(prepared, self.residual_nd[:m], self.gradient_nK[:m])
        else:
            correlate_in_float16(prepared, self.half_residual_nd[:m], self.half_gradient_nK[:m])
        names = ("atoms_nW", "code_nW", "excess_nW", "size_n", "kkt_n", "error_n", "status_n")
        self._launch(kernels.select, active_m, half + "gradient_nK", "square_K", *names, lam, tol)

    def _minimise(self, active_m):
        outcome = ("kkt_n", "status_n", self.problem.tol)
        if self.capacity <= cuda_working_set.MEDIUM:
            names = ("half_gram_KK", "atoms_nW", "code_nW", "excess_nW", "size_n")
            small = self.capacity <= cuda_working_set.SMALL
            kernel = cuda_working_set.minimise_small if small else cuda_working_set.minimise_medium
            self._launch(kernel, active_m, *names, *outcome, shared_bytes=4 * self.capacity * (self.capacity + 2))
        else:
            vectors = ("vectors_nV", "gram_KK", "atoms_nW", "code_nW", "excess_nW", "gram_nWW", "size_n", "filled_n")
            self._launch(cuda_large.minimise_large, active_m, *vectors, *outcome)

    def _launch(self, kernel, per_block, *arguments, shared_bytes=0):
        """Run a kernel with a block for every element of `per_block`; a string names one of our arrays."""
        if len(per_block):
            arrays = [self.arrays[a] if isinstance(a, str) else a for a in arguments]
            self.problem.launch(kernel, len(per_block), Argument.of(per_block), *arrays, shared_bytes=shared_bytes)

    def codes(self):
        """Row numbers, counts, kkt, indices, values; tokens that have overflowed count nothing yet."""
        count, status_n = self.count, self.status_n[: self.count]
        counts_n = (self.code_nW[:count] > 0).sum(1) * (status_n != OVERFLOWED)
        ends_n = counts_n.cumsum(0)
        total = int(ends_n[-1]) if count else 0
        indices = torch.empty(max(total, 1), dtype=torch.int32, device=ends_n.device)  # numba takes no empty array
        values = torch.empty(max(total, 1), dtype=torch.float32, device=ends_n.device)
        names = ("status_n", "atoms_nW", "code_nW", "size_n")
        self._launch(kernels.pack, ends_n - counts_n, *names, Argument.of(indices), Argument.of(values))
        return self.rows_n[:count], counts_n, self.kkt_n[:count].clone(), indices[:total], values[:total]


# -- between torch and Numba -------------------------------------------------------------------------------


def _current_stream():
    """The number of torch's current device, and the handle of its current stream there."""
    if SIMULATED:
        return 0, 0
    return torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream


def _device(tensor) -> Any:
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
