"""Non-negative FISTA with a fixed number of steps, as in the official MLSM code: reference and baseline only.

Beck and Teboulle 2009, section 4, with step 1 / L, L = the largest eigenvalue of D'D, started at zero; no
stopping test, so after 100 steps real codes are still about 8 % above the optimum. Runs on any torch device.
Left out: everything that would make it fast.

Shapes: N tokens, d hidden width, K atoms.
"""

import numpy as np
import torch

from pipeline.solvers.problem import join_codes, numpy_rows

STEPS = 100


def solve(hidden_Nd, atoms_Kd, lam, *, steps=STEPS, device="cpu", rows_at_once=1024):
    """Sparse-code N tokens by `steps` FISTA steps. Returns Codes; their kkt says how good they are."""
    atoms_Kd = torch.as_tensor(np.asarray(atoms_Kd, np.float32), device=device)
    step = 1.0 / torch.linalg.eigvalsh(atoms_Kd.T @ atoms_Kd)[-1].clamp_min(1e-12).item()
    parts = []
    for start in range(0, len(hidden_Nd), rows_at_once):
        rows = slice(start, start + rows_at_once)
        hidden_nd = torch.from_numpy(numpy_rows(hidden_Nd, rows, np.float32)).to(device)
        codes_nK = fista_steps(hidden_nd, atoms_Kd, lam, step, steps)
        parts.append(_sparse(codes_nK, _kkt_violation(hidden_nd, atoms_Kd, codes_nK, lam)))
    return join_codes(parts)


def fista_steps(hidden_nd, atoms_Kd, lam, step, steps):
    """The iteration itself, on tensors: returns dense codes (n, K)."""
    codes_nK = hidden_nd.new_zeros(len(hidden_nd), len(atoms_Kd))
    point_nK, momentum = codes_nK, 1.0
    for _ in range(steps):
        correlation_nK = (hidden_nd - point_nK @ atoms_Kd) @ atoms_Kd.T
        new_nK = torch.relu(point_nK + step * (correlation_nK - lam))
        new_momentum = (1 + (1 + 4 * momentum ** 2) ** 0.5) / 2
        point_nK = new_nK + (momentum - 1) / new_momentum * (new_nK - codes_nK)
        codes_nK, momentum = new_nK, new_momentum
    return codes_nK


def _kkt_violation(hidden_nd, atoms_Kd, codes_nK, lam):
    excess_nK = (hidden_nd - codes_nK @ atoms_Kd) @ atoms_Kd.T - lam
    return torch.where(codes_nK > 0, excess_nK.abs(), excess_nK.clamp_min(0)).amax(1)


def _sparse(codes_nK, kkt_n):
    """Dense codes to what `join_codes` takes."""
    codes_nK = codes_nK.cpu().numpy()
    rows, atoms = codes_nK.nonzero()
    counts = np.bincount(rows, minlength=len(codes_nK))
    return counts, atoms.astype(np.int32), codes_nK[rows, atoms], kkt_n.cpu().numpy()
