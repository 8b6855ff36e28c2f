"""The sparse coding problem: objective, KKT violation and duality gap, in float64 NumPy.

For one unit-length row h of H and atoms d_j (rows of D, norm <= 1), over codes a >= 0:

    minimise  1/2 ||h - sum_j a_j d_j||^2 + lam * sum_j a_j          (MLSM paper, equation 2)

scikit-learn's `Lasso` divides the first term by d, so its alpha is lam / d. These functions are the one
definition that solvers, tests, benchmarks and dictionary learning are measured by. Left out: solving it
(cd_cpu.py, fista.py).

Shapes: N tokens, d hidden width, K atoms.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeAlias, TypeVar

import numpy as np
import torch

ROWS_AT_ONCE = 512
LONGEST = 1e8  # norm of a row or an atom: of longer ones, products of squares would not be float32 numbers
GRAM_ROUNDING = 0.01  # of the largest squared norm: a Gram matrix in bfloat16 is off by 0.004, of such atoms by 0.008
GRAM_ROWS = 32  # at least so many rows of a given Gram matrix are computed again, if it has as many
Array: TypeAlias = np.ndarray | torch.Tensor
OneArray = TypeVar("OneArray", np.ndarray, torch.Tensor)


class ConvergenceWarning(UserWarning):
    """Some codes miss the optimality tolerance; the message says how many."""


@dataclass(frozen=True)
class Codes(Generic[OneArray]):
    """Non-negative sparse codes of N tokens in CSR form, each with its certificate.

    indptr   int64 (N + 1): row n is entries indptr[n] to indptr[n + 1]
    indices  int32 (nnz), atoms, strictly increasing in each row
    values   float32 (nnz), all > 0
    kkt      float32 (N), the largest KKT violation of every token, in units of a correlation
    gap      float64 (N), duality gap, where it was asked for

    NumPy arrays, or torch tensors where they were computed (then gap is one on the CPU).
    """

    indptr: OneArray
    indices: OneArray
    values: OneArray
    kkt: OneArray
    gap: OneArray | None = None

    def __len__(self) -> int:
        return len(self.indptr) - 1

    def to_host(self) -> "Codes[np.ndarray]":
        """These codes as NumPy arrays."""
        return self._each(lambda array: array.cpu().numpy() if isinstance(array, torch.Tensor) else array)

    def to_tensors(self) -> "Codes[torch.Tensor]":
        """These codes as torch tensors; NumPy arrays share their memory with them."""
        return self._each(torch.as_tensor)

    def dense(self, num_atoms: int, start: int = 0, stop: int | None = None, dtype: type = np.float64) -> np.ndarray:
        """Rows start to stop as an array (rows, num_atoms)."""
        host = self.to_host()
        indptr = host.indptr[start : len(self) + 1 if stop is None else stop + 1]
        entries = slice(indptr[0], indptr[-1])
        codes_NK: np.ndarray = np.zeros((len(indptr) - 1, num_atoms), dtype)
        rows = np.repeat(np.arange(len(codes_NK)), np.diff(indptr))
        codes_NK[rows, host.indices[entries]] = host.values[entries]
        return codes_NK

    def _each(self, change):
        return replace(self, **{name: change(array) for name, array in vars(self).items() if array is not None})


def join_codes(parts: Sequence[Sequence[np.ndarray]]) -> Codes:
    """Codes of all tokens from a list of (counts, indices, values, kkt), one for each run of tokens."""
    counts, indices, values, kkt = ([part[i] for part in parts] for i in range(4))
    indptr = np.concatenate([np.zeros(1, np.int64), *counts]).cumsum()
    none = np.zeros(0, np.float32)
    return Codes(
        indptr,
        np.concatenate([np.zeros(0, np.int32), *indices]),
        np.concatenate([none, *values]),
        np.concatenate([none, *kkt]),
    )


def objective(hidden_Nd: Array, atoms_Kd: Array, codes: Codes | np.ndarray, lam: float) -> np.ndarray:
    """1/2 ||h - a D||^2 + lam * sum(a) of every token, float64 (N).

    codes  Codes, or an array (N, K)
    """
    return _per_token(_objective, hidden_Nd, atoms_Kd, codes, lam)


def kkt_violation(hidden_Nd: Array, atoms_Kd: Array, codes: Codes | np.ndarray, lam: float) -> np.ndarray:
    """The largest KKT violation of every token over all atoms, float64 (N).

    With r = h - a D: max(0, d_j . r - lam) where a_j = 0, |d_j . r - lam| where a_j > 0.
    """
    return _per_token(_kkt_violation, hidden_Nd, atoms_Kd, codes, lam)


def duality_gap(hidden_Nd: Array, atoms_Kd: Array, codes: Codes | np.ndarray, lam: float) -> np.ndarray:
    """Objective minus the dual objective at a feasible point: bounds the suboptimality, float64 (N).

    The dual maximises 1/2 ||h||^2 - 1/2 ||h - theta||^2 over d_j . theta <= lam, with no absolute value.
    The feasible point is the residual, scaled by lam / max_j d_j . r where that is below 1.
    """
    return _per_token(_duality_gap, hidden_Nd, atoms_Kd, codes, lam)


def numpy_rows(array_Nd: Array, rows: slice, dtype: type) -> np.ndarray:
    """Some rows of a NumPy array or torch tensor, of any float type and strides, as a contiguous array that may be
    written to.

    Copies only what is not in this form already.
    """
    chunk = array_Nd[rows]
    if isinstance(chunk, torch.Tensor):
        chunk = chunk.detach().to("cpu", torch.float64 if dtype == np.float64 else torch.float32).numpy()
    return np.require(chunk, dtype, ["C", "W"])


def check_gram(square: float, difference: float, largest: float) -> None:
    """Refuse a Gram matrix that is not that of the atoms, as far as diagonal, `some_rows` and largest entry show.

    square, difference, largest  the largest squared norm of an atom, how far the diagonal and some rows are from
                                 products of atoms, and the largest absolute entry
    """
    if not (difference <= GRAM_ROUNDING * square + 1e-30 and largest <= (1 + GRAM_ROUNDING) * square + 1e-30):
        raise ValueError(
            f"gram must be atoms @ atoms.T, whose largest entry is {square:.3g} (the largest squared norm); found "
            f"{largest:.3g}, and entries that are off by up to {difference:.3g}. Compute it from these atoms."
        )


def some_rows(atoms: int) -> slice:
    """The rows of a given Gram matrix of so many atoms that are compared with products of atoms."""
    return slice(None, None, max(1, atoms // GRAM_ROWS))


def _per_token(function, hidden_Nd, atoms_Kd, codes, lam):
    """`function` over a few hundred tokens at a time, so that memory stays bounded for any N."""
    atoms_Kd = numpy_rows(atoms_Kd, slice(None), np.float64)
    codes = codes.to_host() if isinstance(codes, Codes) else codes
    result_N = np.empty(len(hidden_Nd))
    for start in range(0, len(hidden_Nd), ROWS_AT_ONCE):
        rows = slice(start, min(start + ROWS_AT_ONCE, len(hidden_Nd)))
        hidden_nd = numpy_rows(hidden_Nd, rows, np.float64)
        codes_nK = codes.dense(len(atoms_Kd), start, rows.stop) if isinstance(codes, Codes) else codes[rows]
        result_N[rows] = function(hidden_nd, atoms_Kd, codes_nK, lam)
    return result_N


def _objective(hidden_nd, atoms_Kd, codes_nK, lam):
    residual_nd = hidden_nd - codes_nK @ atoms_Kd
    return 0.5 * (residual_nd**2).sum(1) + lam * codes_nK.sum(1)


def _kkt_violation(hidden_nd, atoms_Kd, codes_nK, lam):
    excess_nK = (hidden_nd - codes_nK @ atoms_Kd) @ atoms_Kd.T - lam
    return np.where(codes_nK > 0, np.abs(excess_nK), np.maximum(excess_nK, 0)).max(1, initial=0)


def _duality_gap(hidden_nd, atoms_Kd, codes_nK, lam):
    residual_nd = hidden_nd - codes_nK @ atoms_Kd
    largest_n = (residual_nd @ atoms_Kd.T).max(1, initial=0)
    dual_nd = residual_nd * (lam / np.maximum(largest_n, lam))[:, None]
    dual_n = 0.5 * (hidden_nd**2).sum(1) - 0.5 * ((hidden_nd - dual_nd) ** 2).sum(1)
    return _objective(hidden_nd, atoms_Kd, codes_nK, lam) - dual_n
