"""The child process in which a GPU's solvers are tried on some rows: proof.py runs it and judges what it reports.

    python -m pipeline.solvers.trial DIRECTORY      # reads task.npz and task.json there, writes report.jsonl

The CPU's solver comes first, as codes are compared with its codes; then plain torch, and the CUDA kernels last, since
after an error of theirs a process can do nothing more on a GPU. Violations and duality gaps are computed by problem.py,
in float64 on the CPU.

Shapes: N tokens, d hidden width, K atoms.
"""

import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mlsm.common import proofs
from mlsm.common.device import choose_device
from pipeline.solvers import Backend, nonneg_lasso, prepare
from pipeline.solvers.problem import Codes, duality_gap, kkt_violation

ROUNDS = 3  # that are timed, after one that compiles
COMPARED_AT_ONCE = 512


def code_with(backend: Backend) -> Callable[..., Codes]:
    """A function that codes rows with a backend: (hidden_Nd, atoms_Kd, gram_KK, lam, tol) -> Codes."""

    def code(hidden_Nd: Any, atoms_Kd: Any, gram_KK: Any, lam: float, tol: float) -> Codes:
        if backend == "cuda" and torch.version.hip is not None:
            raise RuntimeError("this torch is built for ROCm, and the kernels need CUDA")
        return nonneg_lasso(hidden_Nd, atoms_Kd, lam, gram_KK=gram_KK, tol=tol, backend=backend)

    return code


SOLVERS = {"cpu": code_with("cpu"), "torch": code_with("torch"), "cuda": code_with("cuda")}


def main(directory: Path) -> None:
    """Try every solver on the rows of the task, and report each as it ends."""
    warnings.simplefilter("ignore")  # of tokens above the tolerance: they are counted
    task = json.loads((directory / proofs.TASK).read_text())
    lam, tol, device = task["lam"], task["tol"], choose_device(task["device"])  # with its number
    torch.zeros(1, device=device)  # where only one process may use a GPU, this ends: nothing was tried, nothing is kept
    with np.load(directory / proofs.ARRAYS) as arrays:
        hidden_Nd, atoms_Kd = arrays["hidden_Nd"], arrays["atoms_Kd"]
    right = None
    for name, code in SOLVERS.items():
        proofs.report(directory, name, {})
        try:
            here = torch.device("cpu") if name == "cpu" else device
            codes, facts = _measure(code, hidden_Nd, atoms_Kd, lam, tol, here)
            facts |= _quality(codes, right, hidden_Nd, atoms_Kd, lam, tol)
            right = codes if name == "cpu" else right
        except Exception as error:  # of a compiler, a driver, a library: each is an answer
            facts = proofs.failure(error)
        proofs.report(directory, name, facts)


def _measure(code, hidden_Nd, atoms_Kd, lam, tol, device):
    """Codes of the rows, seconds of the first call and of later ones, and the memory of the GPU that they took."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
        hidden_Nd, atoms_Kd = (torch.from_numpy(array).to(device) for array in (hidden_Nd, atoms_Kd))
        gram_KK: Any = prepare(atoms_Kd)  # once, as when encoding
        torch.cuda.reset_peak_memory_stats(device)
    else:
        gram_KK = atoms_Kd @ atoms_Kd.T

    def once():
        begun = time.perf_counter()
        codes = code(hidden_Nd, atoms_Kd, gram_KK, lam, tol)
        if on_gpu:
            torch.cuda.synchronize(device)
        return codes, time.perf_counter() - begun

    codes, first = once()
    facts = {"first_seconds": first, "seconds": statistics.median(once()[1] for _ in range(ROUNDS))}
    if on_gpu:
        facts["memory_bytes"] = torch.cuda.max_memory_allocated(device)
    return codes.to_host(), facts


def _quality(codes, right, hidden_Nd, atoms_Kd, lam, tol):
    """How far codes are from the optimum, from what they certify and from the CPU's."""
    true_N = kkt_violation(hidden_Nd, atoms_Kd, codes, lam)
    gap_N = duality_gap(hidden_Nd, atoms_Kd, codes, lam)
    finished_N = codes.kkt <= tol
    facts = {
        "tokens": len(codes),
        "unfinished": int((~finished_N).sum()),
        "kkt": float(true_N[finished_N].max(initial=0)),
        "certificate_error": float((true_N - codes.kkt).max(initial=0)),
        "gap": float(gap_N.mean()),
        "nonzeros": len(codes.values) / len(codes),
        "weight": float(codes.values.sum(dtype=np.float64) / len(codes)),
    }
    return facts if right is None else facts | {"differs": _difference(codes, right, len(atoms_Kd))}


def _difference(codes, right, num_atoms):
    """The mean total variation between the distributions of two sets of codes."""
    total = 0.0
    for start in range(0, len(codes), COMPARED_AT_ONCE):
        stop = min(start + COMPARED_AT_ONCE, len(codes))
        shares = (some.dense(num_atoms, start, stop) for some in (codes, right))
        ours_nK, theirs_nK = (some / np.maximum(some.sum(1, keepdims=True), 1e-30) for some in shares)
        total += float(np.abs(ours_nK - theirs_nK).sum() / 2)
    return total / len(codes)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
