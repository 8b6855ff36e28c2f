"""Non-negative sparse coding: arrays in, arrays out; knows nothing of text or transformers.

    codes = nonneg_lasso(hidden_Nd, atoms_Kd, lam=0.05)

problem.py states the problem and measures solutions; cd_cpu.py and cd_cuda.py solve it; fista.py is the official
code's solver, whose codes are not optimal. This is the one place where the input is checked and a backend is chosen.

Shapes: N tokens, d hidden width, K atoms.
"""

import dataclasses
import warnings

import numpy as np
import torch

from pipeline.solvers import fista
from pipeline.solvers.fista import STEPS
from pipeline.solvers.prepared import Prepared, prepare
from pipeline.solvers.problem import ROWS_AT_ONCE, Array, Codes, ConvergenceWarning, duality_gap, join_codes, numpy_rows

__all__ = ["BACKENDS", "Codes", "ConvergenceWarning", "Prepared", "nonneg_lasso", "prepare"]

BACKENDS = ("auto", "cpu", "cuda", "fista")
ROWS_TO_GPU = 1 << 16  # copied to a GPU at once, where they are not there yet


def nonneg_lasso(
    hidden_Nd: Array,
    atoms_Kd: Array,
    lam: float,
    *,
    gram_KK: Array | Prepared | None = None,
    tol: float | None = 1e-3,
    gap: bool = False,
    backend: str = "auto",
    steps: int = STEPS,
) -> Codes:
    """Sparse-code N tokens: minimise 1/2 ||h - a D||^2 + lam * sum(a) over a >= 0 for every row h.

    hidden_Nd  unit-length rows: a NumPy array or torch tensor of float16, bfloat16, float32 or float64, any
               strides; computed in float32, to which other types are cast a chunk of rows at a time
    atoms_Kd   row norms <= 1;  gram_KK = atoms_Kd @ atoms_Kd.T, float32, computed if not given; on a CPU, for many
               calls with the same atoms, prepare(atoms_Kd, gram_KK)
    lam        penalty > 0, in units of a correlation; at lam >= the largest correlation a code is empty
    tol        largest KKT violation to leave, in units of a correlation; float32 resolves violations only
               to about 1e-6 times (1 + the sum of the code), a GPU to 5e-5
               None, which only "fista" allows: accept what the steps reach, without a warning
    gap        also bound how far every token's objective is above its optimum, in float64: slower than coding
    backend    "cpu", "cuda": coordinate descent; "fista": `steps` steps of the official code's solver, where
               hidden_Nd lies; "auto": coordinate descent where hidden_Nd lies
    steps      how many "fista" takes, which has no other stopping test
    Returns    Codes, with the largest KKT violation of every token over all atoms: tensors if hidden_Nd is one
               on a GPU and is coded there, else NumPy arrays
    Raises     ValueError on shapes that do not match, lam or tol <= 0 or non-finite input (naming the rows)
    Warns      ConvergenceWarning with the number of tokens above tol
    """
    hidden_Nd, atoms_Kd = (x if isinstance(x, torch.Tensor) else np.asarray(x) for x in (hidden_Nd, atoms_Kd))
    _check_arguments(hidden_Nd, atoms_Kd, gram_KK, lam, tol, backend, steps)
    _check_finite("atoms", atoms_Kd)
    _check_finite("hidden", hidden_Nd)
    if backend == "fista" or tol is None:  # which only "fista" allows
        codes = fista.solve(hidden_Nd, atoms_Kd, lam, steps=steps)
    elif backend == "cuda" or (backend == "auto" and _on_gpu(hidden_Nd)):
        codes = _solve_on_gpu(hidden_Nd, atoms_Kd, gram_KK, lam, tol)
    else:
        from pipeline.solvers import cd_cpu

        codes = cd_cpu.solve(hidden_Nd, atoms_Kd, gram_KK, lam, tol)
    if tol is not None:
        _warn_unconverged(codes.kkt, tol)
    if gap:
        codes = dataclasses.replace(codes, gap=duality_gap(hidden_Nd, atoms_Kd, codes, lam))
    return codes


def _solve_on_gpu(hidden_Nd, atoms_Kd, gram_KK, lam, tol):
    from pipeline.solvers import cd_cuda

    if _on_gpu(hidden_Nd):
        device = hidden_Nd.device
    elif (device := cd_cuda.DEVICE) == "cuda" and not torch.cuda.is_available():
        raise ValueError("backend 'cuda': torch finds no GPU here. Use backend 'cpu' or 'auto'")
    atoms_Kd = _float32_on(device, atoms_Kd)
    gram_KK = atoms_Kd @ atoms_Kd.T if gram_KK is None else _float32_on(device, gram_KK)
    if _on_gpu(hidden_Nd):
        return cd_cuda.solve(hidden_Nd, atoms_Kd, gram_KK, lam, tol)
    parts = []
    for start in range(0, len(hidden_Nd), ROWS_TO_GPU):
        rows_nd = _float32_on(device, hidden_Nd[start : start + ROWS_TO_GPU])
        part = cd_cuda.solve(rows_nd, atoms_Kd, gram_KK, lam, tol).to_host()
        parts.append((np.diff(part.indptr), part.indices, part.values, part.kkt))
    return join_codes(parts)


def _float32_on(device, array):
    if not _on_gpu(array):
        array = torch.from_numpy(numpy_rows(array, slice(None), np.float32))
    return array.to(device, torch.float32)


def _on_gpu(array_Nd):
    return isinstance(array_Nd, torch.Tensor) and array_Nd.is_cuda


def _check_arguments(hidden_Nd, atoms_Kd, gram_KK, lam, tol, backend, steps):
    if np.ndim(hidden_Nd) != 2 or np.ndim(atoms_Kd) != 2 or hidden_Nd.shape[1] != atoms_Kd.shape[1]:
        raise ValueError(
            "hidden and atoms must be matrices of one width, (N, d) and (K, d); found "
            f"{tuple(np.shape(hidden_Nd))} and {tuple(np.shape(atoms_Kd))}"
        )
    if 0 in atoms_Kd.shape:
        raise ValueError(
            "the dictionary has no atoms, or its atoms have no width; expected shape (K, d) with K, d >= 1; found "
            f"{tuple(atoms_Kd.shape)}"
        )
    if isinstance(gram_KK, Prepared):
        if not gram_KK.fits(atoms_Kd) or backend == "cuda" or _on_gpu(hidden_Nd):
            raise ValueError("gram is prepared for other atoms, or for a CPU where a GPU codes; give the matrix itself")
    elif gram_KK is not None and tuple(np.shape(gram_KK)) != (len(atoms_Kd),) * 2:
        raise ValueError(
            f"gram must be atoms @ atoms.T, shape {(len(atoms_Kd),) * 2}; found {tuple(np.shape(gram_KK))}"
        )
    for name, value in (("lam", lam), ("tol", tol)):
        if value is None and name == "tol" and backend == "fista":
            continue
        if value is None or not 0 < np.float32(value) < np.inf:  # computed in float32
            raise ValueError(f"{name} must be a positive number; found {value}")
    if not (isinstance(steps, int) and steps >= 1):
        raise ValueError(f"steps must be a whole number from 1 on; found {steps!r}")
    if backend not in BACKENDS:
        raise ValueError(f"no solver backend {backend!r}; choose one of {', '.join(BACKENDS)}")


def _check_finite(name, array_Nd):
    """Raise ValueError naming the rows that hold NaN or infinity, in float32."""
    if _on_gpu(array_Nd):  # one small answer instead of all the data
        finite_N = torch.isfinite(array_Nd.float()).all(1)
        rows = [] if finite_N.all() else (~finite_N).nonzero()[:, 0].tolist()
    else:
        rows = [row for start in range(0, len(array_Nd), ROWS_AT_ONCE) for row in _not_finite(array_Nd, start)]
    if rows:
        raise ValueError(
            f"{name}: NaN or infinity in row {', '.join(map(str, rows[:10]))}"
            f"{' and more' if len(rows) > 10 else ''}; leave such rows out, or scale them "
            "to what float32 holds"
        )


def _not_finite(array_Nd, start):
    finite_n = np.isfinite(numpy_rows(array_Nd, slice(start, start + ROWS_AT_ONCE), np.float32)).all(1)
    return () if finite_n.all() else start + np.flatnonzero(~finite_n)


def _warn_unconverged(kkt_N, tol):
    above = int((~(kkt_N <= tol)).sum())
    if above:
        warnings.warn(
            f"{above} of {len(kkt_N)} tokens have a KKT violation above {tol:g}, at most {float(kkt_N.max()):.2g}",
            ConvergenceWarning,
            stacklevel=3,
        )
