"""Non-negative sparse coding: arrays in, arrays out; knows nothing of text or transformers.

    codes = nonneg_lasso(hidden_Nd, atoms_Kd, lam=0.05)

problem.py states the problem and measures solutions; cd_cpu.py solves it; fista.py is the official code's
solver, a reference and baseline. Here the input is checked and a backend chosen, in this one place.

Shapes: N tokens, d hidden width, K atoms.
"""

import warnings

import numpy as np

from pipeline.solvers.problem import Codes, ConvergenceWarning

__all__ = ["BACKENDS", "Codes", "ConvergenceWarning", "nonneg_lasso"]

BACKENDS = ("auto", "cpu", "fista")


def nonneg_lasso(hidden_Nd, atoms_Kd, lam, *, gram_KK=None, tol=1e-3, backend="auto"):
    """Sparse-code N tokens: minimise 1/2 ||h - a D||^2 + lam * sum(a) over a >= 0 for every row h.

    hidden_Nd  unit-length rows; computed in float32, other float types are cast chunk by chunk
    atoms_Kd   row norms <= 1;  gram_KK = atoms_Kd @ atoms_Kd.T, float32, computed if not given
    lam        penalty > 0, in units of a correlation; at lam >= the largest correlation a code is empty
    tol        largest KKT violation to leave, in units of a correlation
    backend    "cpu": coordinate descent; "fista": 100 steps of the official code's solver, which ignores tol;
               "auto": the fastest one here
    Returns    Codes, with the largest KKT violation of every token over all atoms
    Raises     ValueError on shapes that do not match, lam or tol <= 0 or non-finite input (naming the rows)
    Warns      ConvergenceWarning with the number of tokens above tol
    """
    hidden_Nd = np.asarray(hidden_Nd)
    _check_arguments(hidden_Nd, atoms_Kd, gram_KK, lam, tol, backend)
    atoms_Kd = np.ascontiguousarray(atoms_Kd, np.float32)
    _check_finite("atoms", atoms_Kd)
    _check_finite("hidden", hidden_Nd)
    if backend == "fista":
        from pipeline.solvers import fista
        codes = fista.solve(hidden_Nd, atoms_Kd, lam)
    else:
        from pipeline.solvers import cd_cpu
        gram_KK = atoms_Kd @ atoms_Kd.T if gram_KK is None else np.ascontiguousarray(gram_KK, np.float32)
        codes = cd_cpu.solve(hidden_Nd, atoms_Kd, gram_KK, lam, tol)
    _warn_unconverged(codes.kkt, tol)
    return codes


def _check_arguments(hidden_Nd, atoms_Kd, gram_KK, lam, tol, backend):
    if np.ndim(hidden_Nd) != 2 or np.ndim(atoms_Kd) != 2 or hidden_Nd.shape[1] != atoms_Kd.shape[1]:
        raise ValueError("hidden and atoms must be matrices of one width, (N, d) and (K, d); found "
                         f"{np.shape(hidden_Nd)} and {np.shape(atoms_Kd)}")
    if len(atoms_Kd) == 0:
        raise ValueError("the dictionary has no atoms; expected shape (K, d) with K >= 1")
    if gram_KK is not None and np.shape(gram_KK) != (len(atoms_Kd),) * 2:
        raise ValueError(f"gram must be atoms @ atoms.T, shape {(len(atoms_Kd),) * 2}; "
                         f"found {np.shape(gram_KK)}")
    for name, value in (("lam", lam), ("tol", tol)):
        if not 0 < value < np.inf:
            raise ValueError(f"{name} must be a positive number; found {value}")
    if backend not in BACKENDS:
        raise ValueError(f"no solver backend {backend!r}; choose one of {', '.join(BACKENDS)}")


def _check_finite(name, array_Nd, rows_at_once=4096):
    for start in range(0, len(array_Nd), rows_at_once):
        finite_n = np.isfinite(array_Nd[start:start + rows_at_once]).all(1)
        if not finite_n.all():
            rows = start + np.flatnonzero(~finite_n)
            raise ValueError(f"{name}: NaN or infinity in row {', '.join(map(str, rows[:10]))}"
                             f"{' and more' if len(rows) > 10 else ''}; leave such rows out, or compute "
                             "them in float32")


def _warn_unconverged(kkt_N, tol):
    above = int((kkt_N > tol).sum())
    if above:
        warnings.warn(f"{above} of {len(kkt_N)} tokens have a KKT violation above {tol:g}, "
                      f"at most {kkt_N.max():.2g}", ConvergenceWarning, stacklevel=3)
