"""Non-negative LASSO by Newton steps on a working set of atoms, for many tokens at once, in plain torch operations.

For GPUs on which the kernels of cd_cuda.py cannot be compiled, and a second opinion on any device. For every row h of
H, over a >= 0, minimises 1/2 ||h - a D||^2 + lam * sum(a) (problem.py). A chunk of tokens goes through rounds together:

1. the excess of all K atoms, D (h - a D) - lam, comes from one matrix product in float32;
2. a token in which no KKT violation exceeds the tolerance is finished: that was its certificate, over all atoms;
3. in the others, the atoms with the largest excess join the working set, in the place of those without a coefficient;
4. a few sweeps of coordinate descent and projected Newton steps, in turn, minimise over the working set.

A Newton step (Bertsekas 1982) solves for the atoms that may move, those with a coefficient or a positive excess, by a
Cholesky factor of their Gram matrix, made a little heavier on its diagonal so that equal atoms do no harm. Of the
points on the way, max(a + t p, 0) for some t up to 1, the one with the lowest objective is taken; a step along the
scaled gradient, which always descends, is among them. Where there are more atoms than dimensions, that point may be the
one at which some tiny coefficient is zero, and the next sweep brings another one in, for as many rounds as there are.
So a token that takes many rounds gets steps over its support alone, each without an atom more: they end at a minimum.

Nothing loops over tokens, and the host asks for one small answer a round. Working sets have the same capacity for all;
tokens that need a larger one wait until the others are finished. Equal input gives equal bits on equal hardware and
libraries. Left out: speed where kernels run (cd_cpu.py, cd_cuda.py), float64, warm starts.

Shapes: N tokens, n of those that are not finished, d hidden width, K atoms, W atoms of a working set, J that join it,
T points on the way of a Newton step.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F

from pipeline.solvers.problem import Array, Codes
from pipeline.solvers.tensors import float32_on, join_parts, on_gpu, part_of, product

JOINING = 8  # atoms that join a working set in a round, at least; a quarter of a large one
FIRST_CAPACITY = 40  # atoms of a working set; twice as many for tokens that need more, and so on
FEWEST_FREE = 4  # atoms without a coefficient, which others may replace; with fewer a full working set is too small
NEWTON_STEPS = 2  # in a round, each after a sweep of coordinate descent
PATIENCE = 12  # rounds, after which one ends with Newton steps over the support alone
SUPPORT_STEPS = 8
POINTS = 5  # on the way of a Newton step, each half as far as the one before; and as many up to the first zero
RIDGE = 3e-5  # of a diagonal entry, for each atom that may move: steps along dependent atoms are not endless then
MAX_ROUNDS = 100  # with one capacity
LOWEST = -3e38
GRADIENT_BYTES = {"cpu": 6 << 20, "cuda": 256 << 20}  # of a chunk, (n, K): a CPU's fit its cache
GRAM_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}  # of the working sets, (n, W, W); about four times as much is used


def solve(hidden_Nd: Array, atoms_Kd: Array, gram_KK: Array | None, lam: float, tol: float) -> Codes:
    """Sparse-code N tokens where they are; arguments as in `nonneg_lasso`, already checked.

    Returns Codes: tensors if hidden_Nd is one on a GPU
    """
    device: torch.device = hidden_Nd.device if on_gpu(hidden_Nd) else torch.device("cpu")
    with torch.inference_mode(), torch.autocast(device.type, enabled=False):
        atoms_Kd = float32_on(device, atoms_Kd)
        gram_KK = product(atoms_Kd, atoms_Kd) if gram_KK is None else float32_on(device, gram_KK)
        problem = _Problem(atoms_Kd, gram_KK, lam, tol)
        rows = min(GRADIENT_BYTES[device.type] // (4 * len(atoms_Kd)), _rows_at_once(device, FIRST_CAPACITY))
        starts = range(0, len(hidden_Nd), max(1, rows))
        parts = [
            _solve_chunk(problem, float32_on(device, hidden_Nd, slice(start, start + starts.step))) for start in starts
        ]
        return join_parts(parts, device)


class _Problem(NamedTuple):
    """What is the same for all tokens."""

    atoms_Kd: torch.Tensor
    gram_KK: torch.Tensor
    lam: float
    tol: float


class _Tokens(NamedTuple):
    """Tokens that are not finished, and their working sets."""

    rows_n: torch.Tensor  # int64: which of the chunk
    hidden_nd: torch.Tensor
    atoms_nW: torch.Tensor  # int64, different ones in each row
    code_nW: torch.Tensor  # their coefficients
    gram_nWW: torch.Tensor  # their Gram matrices

    def take(self, places: torch.Tensor | slice) -> "_Tokens":
        return _Tokens(*(tensor[places] for tensor in self))


def _rows_at_once(device, capacity):
    return max(1, GRAM_BYTES[device.type] // (4 * capacity**2))


def _solve_chunk(problem, hidden_nd):
    """Counts, indices, values and kkt of a chunk."""
    count, num_atoms = len(hidden_nd), len(problem.atoms_Kd)
    codes_nK, kkt_n = hidden_nd.new_zeros(count, num_atoms), hidden_nd.new_zeros(count)
    rows_n, none = torch.arange(count, device=hidden_nd.device), hidden_nd.new_zeros(count, 0)
    waiting = [_Tokens(rows_n, hidden_nd, none.long(), none, hidden_nd.new_zeros(count, 0, 0))]
    capacity = min(FIRST_CAPACITY, num_atoms)
    while waiting:
        tokens, waiting = _Tokens(*map(torch.cat, zip(*waiting, strict=True))), []
        rows = _rows_at_once(hidden_nd.device, capacity)
        for start in range(0, len(tokens.rows_n), rows):
            for found, kkt in _solve_tokens(problem, tokens.take(slice(start, start + rows)), capacity):
                if kkt is None:
                    waiting.append(found)
                else:
                    codes_nK[found.rows_n[:, None], found.atoms_nW], kkt_n[found.rows_n] = found.code_nW, kkt
        capacity = min(2 * capacity, num_atoms)
    return part_of(codes_nK, kkt_n)


def _solve_tokens(problem: _Problem, tokens: _Tokens, capacity: int) -> Iterator[tuple[_Tokens, torch.Tensor | None]]:
    """Yield the tokens in groups: as they are finished, with their KKT violations; without, where they need a larger
    capacity."""
    num_atoms = len(problem.atoms_Kd)
    for turn in range(MAX_ROUNDS + 1):
        excess_nK = _excess(problem, tokens)
        size = tokens.code_nW.shape[1]
        excess_nW = excess_nK.gather(1, tokens.atoms_nW)
        excess_nK.scatter_(1, tokens.atoms_nW, LOWEST)
        outside_nJ, joining_nJ = excess_nK.topk(min(max(JOINING, size // 4), num_atoms - size))
        inside_nW = torch.where(tokens.code_nW > 0, excess_nW.abs(), excess_nW)
        kkt_n = torch.cat([inside_nW, outside_nJ[:, :1]], 1).amax(1).clamp_min(0)
        finished_n = (kkt_n <= problem.tol) | (turn == MAX_ROUNDS)
        crowded_n = ~finished_n & ((tokens.code_nW == 0).sum(1) < FEWEST_FREE) & (size == capacity < num_atoms)
        order_n = (finished_n + 2 * crowded_n.int()).argsort(stable=True)
        working, finished, crowded = _count(~finished_n & ~crowded_n, finished_n, crowded_n)
        places = order_n[working : working + finished]
        if finished:
            yield tokens.take(places), kkt_n[places]
        if crowded:
            yield tokens.take(order_n[working + finished :]), None
        if not working:
            return
        if finished + crowded:
            places = order_n[:working]
            tokens, excess_nW = tokens.take(places), excess_nW[places]
            outside_nJ, joining_nJ = outside_nJ[places], joining_nJ[places]
        tokens, excess_nW = _join(problem, tokens, excess_nW, joining_nJ, outside_nJ, capacity)
        code_nW = tokens.code_nW.clone()
        for _ in range(NEWTON_STEPS):
            _descend(tokens.gram_nWW, code_nW, excess_nW)
            code_nW, excess_nW = _newton_step(tokens.gram_nWW, code_nW, excess_nW)
        for _ in range(SUPPORT_STEPS if turn >= PATIENCE else 0):
            code_nW, excess_nW = _newton_step(tokens.gram_nWW, code_nW, excess_nW, of_support=True)
        tokens = tokens._replace(code_nW=code_nW)


def _count(*flags):
    """How many of each are set: the one answer for which a round waits."""
    return torch.stack([flag_n.sum() for flag_n in flags]).tolist()


def _excess(problem, tokens):
    """D (h - a D) - lam, in float32 whatever torch may round: (n, K)."""
    residual_nd = tokens.hidden_nd
    if tokens.code_nW.shape[1]:
        residual_nd = residual_nd - F.embedding_bag(
            tokens.atoms_nW, problem.atoms_Kd, per_sample_weights=tokens.code_nW, mode="sum"
        )
    return product(residual_nd, problem.atoms_Kd).sub_(problem.lam)


def _join(problem, tokens, excess_nW, joining_nJ, outside_nJ, capacity):
    """Let atoms join the working sets, in new places or, where there are none, in those without a coefficient.

    outside_nJ  their excess
    Returns     the tokens, and the excess of their working sets
    """
    rows_n, hidden_nd, atoms_nW, code_nW, gram_nWW = tokens
    size = atoms_nW.shape[1]
    new = min(joining_nJ.shape[1], capacity - size)
    if new:
        joining_nJ, outside_nJ = joining_nJ[:, :new], outside_nJ[:, :new]
        atoms_nW, code_nW, excess_nW = (F.pad(tensor, (0, new)) for tensor in (atoms_nW, code_nW, excess_nW))
        gram_nWW = F.pad(gram_nWW, (0, new, 0, new))
        places_nJ = torch.arange(size, size + new, device=atoms_nW.device).expand_as(joining_nJ)
    else:
        smallest_nJ, places_nJ = code_nW.topk(joining_nJ.shape[1], largest=False)
        joins_nJ = (smallest_nJ == 0) & (outside_nJ > 0)
        joining_nJ = torch.where(joins_nJ, joining_nJ, atoms_nW.gather(1, places_nJ))
        outside_nJ = torch.where(joins_nJ, outside_nJ, excess_nW.gather(1, places_nJ))
    atoms_nW = atoms_nW.scatter(1, places_nJ, joining_nJ)
    entries_nJW = problem.gram_KK[joining_nJ[:, :, None], atoms_nW[:, None, :]]
    gram_nWW = gram_nWW.scatter(1, places_nJ[:, :, None].expand_as(entries_nJW), entries_nJW)
    columns_nWJ = entries_nJW.transpose(1, 2)
    gram_nWW = gram_nWW.scatter_(2, places_nJ[:, None, :].expand_as(columns_nWJ), columns_nWJ)
    excess_nW = excess_nW.scatter(1, places_nJ, outside_nJ)
    return _Tokens(rows_n, hidden_nd, atoms_nW, code_nW, gram_nWW), excess_nW


def _descend(gram_nWW, code_nW, excess_nW):
    """One sweep of coordinate descent over the working sets, in place."""
    steps_nW = 1 / gram_nWW.diagonal(dim1=1, dim2=2).clamp_min(1e-30)
    for place in range(code_nW.shape[1]):
        code_n = code_nW[:, place]
        change_n = torch.addcmul(code_n, excess_nW[:, place], steps_nW[:, place]).clamp_min_(0).sub_(code_n)
        code_n += change_n
        excess_nW.addcmul_(change_n[:, None], gram_nWW[:, place], value=-1)


def _newton_step(gram_nWW, code_nW, excess_nW, of_support=False):
    """Minimise over the working sets, or over the atoms with a coefficient, nearly: the new coefficients and excess."""
    square_nW = gram_nWW.diagonal(dim1=1, dim2=2)
    active_nW = code_nW > 0 if of_support else (code_nW > 0) | (excess_nW > 0)
    count_n1 = active_nW.sum(1, keepdim=True)
    # scaled so that it always descends: no eigenvalue of a matrix with a diagonal of ones exceeds their number
    gradient_nW = torch.where(active_nW, excess_nW / (count_n1 * square_nW).clamp_min(1e-30), 0.0)
    moves_nW = code_nW + gradient_nW > 0  # of the active ones alone: others have neither
    mask_nW = moves_nW.float()
    matrix_nWW = gram_nWW * mask_nW[:, :, None] * mask_nW[:, None, :]
    matrix_nWW.diagonal(dim1=1, dim2=2).add_(torch.where(moves_nW, RIDGE * count_n1 * square_nW, 1.0))
    factor_nWW, failed_n = torch.linalg.cholesky_ex(matrix_nWW)
    newton_nW = torch.cholesky_solve((excess_nW * mask_nW)[:, :, None], factor_nWW)[:, :, 0]
    newton_nW = torch.where(moves_nW & (failed_n == 0)[:, None], newton_nW, gradient_nW)
    points_nWT = (code_nW[:, :, None] + _ways(code_nW, newton_nW, gradient_nW)).clamp_min(0)
    change_nWT = points_nWT - code_nW[:, :, None]
    image_nWT = gram_nWW @ change_nWT
    objective_nT = (change_nWT * (0.5 * image_nWT - excess_nW[:, :, None])).sum(1)
    best_nW1 = objective_nT.argmin(1)[:, None, None].expand(-1, code_nW.shape[1], 1)
    return points_nWT.gather(2, best_nW1)[:, :, 0], excess_nW - image_nWT.gather(2, best_nW1)[:, :, 0]


def _ways(code_nW, newton_nW, gradient_nW):
    """Steps to choose from: along Newton's, each half as far as the one before, and evenly on a logarithmic scale up to
    where the first coefficient is zero, as it is far behind where atoms are dependent; and along the gradient."""
    falls_nW = (code_nW > 0) & (newton_nW < 0)
    nearest_n1 = torch.where(falls_nW, code_nW / -newton_nW, 1.0).amin(1, keepdim=True).clamp(1e-30, 1.0)
    steps_T = torch.arange(POINTS, device=code_nW.device)
    lengths_nT = torch.cat([(0.5**steps_T).expand(len(code_nW), -1), nearest_n1 ** ((steps_T + 1) / POINTS)], 1)
    return torch.cat([newton_nW[:, :, None] * lengths_nT[:, None, :], gradient_nW[:, :, None]], 2)
