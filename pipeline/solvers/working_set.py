"""The non-negative LASSO over the few atoms of a working set: coordinate descent and conjugate gradients.

Coordinate descent finds the support, conjugate gradients on the support finish it: 32 correlated atoms need about 90
sweeps of the former, or 20 and 45 much cheaper steps of the latter. Alternating a projected method that finds the
support with conjugate gradients that stop at the boundary is after GPCG (More and Toraldo 1991). Left out: which atoms
there are (cd_cpu.py).

Shapes: m atoms of a working set.
"""

from typing import NamedTuple

import numpy as np

from pipeline.solvers.parallel import inlined
from pipeline.solvers.vectors import LANES, add_scaled, combine, dot, residual_on_support, step_to_zero

MAX_SWEEPS = 100  # in one round
SWEEPS_BEFORE_CG = 2
MAX_CG_STEPS = 60


class WorkingSet(NamedTuple):
    """Atoms that may be active and vectors over them, zero from the set's size to a multiple of 16."""

    atoms: np.ndarray  # int32: which atoms
    gram: np.ndarray  # (capacity, capacity): their Gram matrix
    code: np.ndarray  # their coefficients
    excess: np.ndarray  # correlation with the residual, minus lam
    steps: np.ndarray  # 1 / squared norm; not 1: rounding moves atoms off the unit sphere
    before: np.ndarray  # coefficients at the start of the round
    best: np.ndarray  # coefficients of the best certificate so far
    direction: np.ndarray  # of conjugate gradients
    image: np.ndarray  # gram @ direction
    residual: np.ndarray  # excess on the support
    rows: np.ndarray  # int32: atoms that moved in this round


def make_working_set(capacity: int) -> WorkingSet:
    atoms, rows = np.zeros((2, capacity), np.int32)
    gram = np.zeros((capacity, capacity), np.float32)
    code, excess, steps, before, best, direction, image, residual = np.zeros((8, capacity), np.float32)
    return WorkingSet(atoms, gram, code, excess, steps, before, best, direction, image, residual, rows)


@inlined
def round_up(size: int) -> int:
    """Loops over a working set run to a multiple of 16: no scalar remainder."""
    return (size + LANES - 1) // LANES * LANES


@inlined
def minimise(
    gram: np.ndarray,
    code: np.ndarray,
    excess: np.ndarray,
    steps: np.ndarray,
    direction: np.ndarray,
    image: np.ndarray,
    residual: np.ndarray,
    size: int,
    tol: np.float32,
) -> bool:
    """Solve the problem over the working set to a KKT violation of tol. Returns whether MAX_SWEEPS reached that."""
    for sweep in range(MAX_SWEEPS):
        _descend(gram, code, excess, steps, size)
        if violation(code, excess, size) <= tol:
            return True
        if (sweep + 1) % SWEEPS_BEFORE_CG == 0:
            _conjugate_gradients(gram, code, excess, direction, image, residual, size, np.float32(0.5) * tol)
    return False


@inlined
def _descend(gram, code, excess, steps, size):
    """One sweep of coordinate descent."""
    for i in range(size):
        if code[i] == 0 and excess[i] <= 0:
            continue
        new = max(code[i] + excess[i] * steps[i], np.float32(0))
        change = new - code[i]
        code[i] = new
        add_scaled(excess, excess, -change, gram[i], round_up(size))


@inlined
def violation(code: np.ndarray, excess: np.ndarray, size: int) -> np.float32:
    """KKT violation of the working set."""
    worst = np.float32(0)
    for i in range(size):
        worst = max(worst, abs(excess[i]) if code[i] > 0 else excess[i])
    return worst


@inlined
def _conjugate_gradients(gram, code, excess, direction, image, residual, size, tol):
    """Minimise over the support; a coefficient that reaches zero leaves it, and directions start afresh."""
    width, beta = round_up(size), np.float32(0)
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
    for i in range(round_up(size)):
        vector[i] = 0
