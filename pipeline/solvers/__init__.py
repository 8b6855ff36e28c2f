"""Non-negative sparse coding: arrays in, arrays out; knows nothing of text or transformers.

    codes = nonneg_lasso(hidden_Nd, atoms_Kd, lam=0.05)

problem.py states the problem and measures solutions; cd_cpu.py, cd_cuda.py and active_set_torch.py solve it; fista.py
is the official code's solver, whose codes are not optimal. This is the one place where the input is checked. Which
solver a GPU gets is proven on it first (proof.py).

Shapes: N tokens, d hidden width, K atoms.
"""

import dataclasses
import math
import warnings
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch

from mlsm.common.invocation import program
from pipeline.solvers import cuda_products, fista
from pipeline.solvers.cuda_products import PreparedOnGpu
from pipeline.solvers.fista import STEPS
from pipeline.solvers.prepared import PreparedAtoms
from pipeline.solvers.prepared import prepare as prepare_on_cpu
from pipeline.solvers.problem import (
    LONGEST,
    ROWS_AT_ONCE,
    Array,
    Codes,
    ConvergenceWarning,
    OneArray,
    check_gram,
    duality_gap,
    join_codes,
    numpy_rows,
    some_rows,
)
from pipeline.solvers.tensors import float32_on, on_gpu, product

__all__ = [
    "BACKENDS",
    "Backend",
    "Codes",
    "ConvergenceWarning",
    "PreparedAtoms",
    "choose_backend",
    "nonneg_lasso",
    "prepare",
]

Backend: TypeAlias = Literal["auto", "cpu", "cuda", "torch", "fista"]
BACKENDS = get_args(Backend)
LARGEST_LAM = 1e30  # far above any correlation: kernels, which know no infinity, subtract it from -3e38
ROWS_TO_GPU = 1 << 16  # copied to a GPU at once, where they are not there yet


class PreparedTensors(NamedTuple):
    """Atoms and Gram matrix on a GPU, checked once for any number of calls."""

    atoms_Kd: torch.Tensor  # as they were given; float32
    version: int  # how often they had been changed
    gram_KK: torch.Tensor  # float32
    for_kernels: PreparedOnGpu

    def fits(self, atoms_Kd: Array) -> bool:
        """Whether it was made of these atoms, as they are now; asks nothing of the device."""
        return self.atoms_Kd is atoms_Kd and self.version == _version(atoms_Kd)


def prepare(atoms_Kd: Array, gram_KK: Array | None = None) -> PreparedAtoms | PreparedTensors:
    """Prepare atoms (K, d) for many calls of `nonneg_lasso`, where they lie: on a CPU or a GPU.

    gram_KK  atoms_Kd @ atoms_Kd.T, float32, computed if not given
    Raises   ValueError on NaN, infinity or norms above 1e8, and on atoms on a GPU that are not float32
    """
    _check_rows("atoms", atoms_Kd)
    if not on_gpu(atoms_Kd):
        return prepare_on_cpu(atoms_Kd, gram_KK)
    if atoms_Kd.dtype != torch.float32:
        raise ValueError(f"atoms on a GPU are prepared as float32; found {atoms_Kd.dtype}. Give atoms.float().")
    gram_KK = _gram_on(atoms_Kd.device, atoms_Kd, gram_KK)
    return PreparedTensors(atoms_Kd, _version(atoms_Kd), gram_KK, cuda_products.prepare(atoms_Kd, gram_KK))


def _version(tensor):
    return 0 if tensor.is_inference() else tensor._version  # those of inference mode cannot be changed in place outside


def nonneg_lasso(
    hidden_Nd: OneArray,
    atoms_Kd: Array,
    lam: float,
    *,
    gram_KK: Array | PreparedAtoms | PreparedTensors | None = None,
    tol: float | None = 1e-3,
    gap: bool = False,
    backend: Backend = "auto",
    steps: int = STEPS,
) -> Codes[OneArray]:
    """Sparse-code N tokens: minimise 1/2 ||h - a D||^2 + lam * sum(a) over a >= 0 for every row h.

    hidden_Nd  unit-length rows: a NumPy array or torch tensor of float16, bfloat16, float32 or float64, any
               strides; computed in float32, to which other types are cast a chunk of rows at a time. Other norms are
               accepted up to 1e8; tol and lam should then grow with them
    atoms_Kd   row norms <= 1;  gram_KK = atoms_Kd @ atoms_Kd.T, float32, computed if not given; for many
               calls with the same atoms, prepare(atoms_Kd, gram_KK). What a given one in fewer bits is off by
               is not in the certificates
    lam        penalty > 0, in units of a correlation; at lam >= the largest correlation a code is empty
    tol        largest KKT violation to leave, in units of a correlation. The default of 1e-3 suits learning and
               inspection; encode-lsp's --tolerance has the default 1e-4, so pass tol=1e-4 to reproduce stored codes.
               float32 resolves violations only to about 1e-6 times (1 + the sum of the code), a GPU to 5e-5
               None, which only "fista" allows: accept what the steps reach, without a warning
    gap        also bound how far every token's objective is above its optimum, in float64: slower than coding
    backend    "cpu", "cuda": coordinate descent; "torch": Newton steps in plain torch, where hidden_Nd lies;
               "fista": `steps` steps of the official code's solver, where hidden_Nd lies; "auto": "cpu", or on a GPU
               what was proven there for such shapes (proof.py), else, with a warning, "torch"
    steps      how many "fista" takes, which has no other stopping test
    Returns    Codes, with the largest KKT violation of every token over all atoms ("cuda": an upper bound of it, which
               counts what its products may be off by): tensors if hidden_Nd is one, on the device that coded it,
               else NumPy arrays
    Raises     ValueError on shapes that do not match, lam or tol <= 0, non-finite input or norms above 1e8 (naming the
               rows), and a gram_KK that is not that of the atoms
    Warns      ConvergenceWarning with the number of tokens above tol; "cpu" returns the best code that it found for
               them, which is never worse than the empty code
    """
    hidden_Nd, atoms_Kd = (x if isinstance(x, torch.Tensor) else np.asarray(x) for x in (hidden_Nd, atoms_Kd))
    _check_arguments(hidden_Nd, atoms_Kd, gram_KK, lam, tol, backend, steps)
    if not isinstance(gram_KK, PreparedAtoms | PreparedTensors):
        _check_rows("atoms", atoms_Kd)
    usable_N, rows_Nd = None, hidden_Nd
    if on_gpu(hidden_Nd):  # nothing waits for the check: rows that fail it are coded as zeros, and refused at the end
        usable_N = _usable(hidden_Nd)
        rows_Nd = torch.where(usable_N[:, None], hidden_Nd.detach(), 0)
    else:
        _check_rows("hidden", hidden_Nd)
    codes = _solve(rows_Nd, atoms_Kd, min(lam, LARGEST_LAM), gram_KK, tol, backend, steps)
    _judge(codes.kkt, tol, usable_N, hidden_Nd)
    if gap:
        codes = dataclasses.replace(codes, gap=duality_gap(hidden_Nd, atoms_Kd, codes, lam))
    return codes.to_tensors() if isinstance(hidden_Nd, torch.Tensor) else codes


def _solve(hidden_Nd, atoms_Kd, lam, gram_KK, tol, backend, steps):
    if backend == "fista" or tol is None:  # which only "fista" allows
        return fista.solve(hidden_Nd, atoms_Kd, lam, steps=steps)
    if backend == "auto":
        device = hidden_Nd.device if on_gpu(hidden_Nd) else torch.device("cpu")
        backend = choose_backend(device, atoms_Kd.shape[1], len(atoms_Kd), lam)
    if backend == "cpu":
        from pipeline.solvers import cd_cpu

        gram_KK = gram_KK.gram_KK if isinstance(gram_KK, PreparedTensors) else gram_KK
        return cd_cpu.solve(hidden_Nd, atoms_Kd, gram_KK, lam, tol)
    if backend == "cuda":
        return _solve_with_kernels(hidden_Nd, atoms_Kd, gram_KK, lam, tol)
    from pipeline.solvers import active_set_torch

    if isinstance(gram_KK, PreparedTensors):
        gram_KK = gram_KK.gram_KK
    elif gram_KK is not None:
        device = hidden_Nd.device if on_gpu(hidden_Nd) else "cpu"
        gram_KK = _gram_on(device, float32_on(device, atoms_Kd), gram_KK)
    return active_set_torch.solve(hidden_Nd, atoms_Kd, gram_KK, lam, tol)


def _gram_on(device, atoms_Kd, gram_KK):
    """The Gram matrix of atoms on a device, computed there if it is not given, else checked."""
    if gram_KK is None:
        return product(atoms_Kd, atoms_Kd)
    gram_KK = float32_on(device, gram_KK)
    square_K, (least, most) = (atoms_Kd.detach() ** 2).sum(1), gram_KK.aminmax()
    some = some_rows(len(atoms_Kd))
    off_of_rows = (gram_KK[some] - product(atoms_Kd[some], atoms_Kd)).abs().max()
    off = torch.maximum((gram_KK.diagonal() - square_K).abs().max(), off_of_rows)
    check_gram(*torch.stack([square_K.max(), off, torch.maximum(most, -least)]).tolist())
    return gram_KK


def choose_backend(device: torch.device, width: int, atoms: int, lam: float) -> str:
    """What `backend="auto"` means for rows of a width, so many atoms and a lam: on a GPU what was proven, else "torch".

    Warns once where nothing was proven: plain torch is what cannot go wrong, and the kernels may be faster.
    """
    return "cpu" if device.type == "cpu" else _proven_backend(device, width, atoms, lam)


def _proven_backend(device, width, atoms, lam):
    from pipeline.solvers import proof

    if (proven := proof.kept_backend(device, width, atoms, lam)) is not None:
        return proven
    warnings.warn(
        f"no solver was proven on {device} for rows of width {width}, {atoms:,} atoms and lam {lam:.1g}: coding with "
        "torch's own operations, to the same tolerance. encode-lsp and learn-dictionary prove the faster one; "
        f"so does:  {program()} doctor --gpu",
        stacklevel=4,
    )
    return "torch"


def _solve_with_kernels(hidden_Nd, atoms_Kd, gram_KK, lam, tol):
    from pipeline.solvers import cd_cuda

    if on_gpu(hidden_Nd):
        device = hidden_Nd.device
    elif isinstance(gram_KK, PreparedTensors):
        device = gram_KK.atoms_Kd.device
    elif (device := cd_cuda.DEVICE) == "cuda" and not torch.cuda.is_available():
        raise ValueError("backend 'cuda': torch finds no GPU here. Use backend 'cpu' or 'auto'")
    if isinstance(gram_KK, PreparedTensors):
        atoms_Kd, gram_KK = gram_KK.atoms_Kd, gram_KK.for_kernels
    else:
        atoms_Kd = float32_on(device, atoms_Kd)
        gram_KK = _gram_on(device, atoms_Kd, gram_KK)
        gram_KK = cuda_products.prepare(atoms_Kd, gram_KK)
    if on_gpu(hidden_Nd):
        return cd_cuda.solve(hidden_Nd, atoms_Kd, gram_KK, lam, tol)
    parts = []
    for start in range(0, len(hidden_Nd), ROWS_TO_GPU):
        rows_nd = float32_on(device, hidden_Nd, slice(start, start + ROWS_TO_GPU))
        part = cd_cuda.solve(rows_nd, atoms_Kd, gram_KK, lam, tol).to_host()
        parts.append((np.diff(part.indptr), part.indices, part.values, part.kkt))
    return join_codes(parts)


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
    if isinstance(gram_KK, PreparedAtoms | PreparedTensors):
        for_cpu = backend == "cpu" or (backend in ("auto", "fista") and not on_gpu(hidden_Nd))
        on_another = on_gpu(hidden_Nd) and on_gpu(atoms_Kd) and hidden_Nd.device != atoms_Kd.device
        if not gram_KK.fits(atoms_Kd) or isinstance(gram_KK, PreparedAtoms) != for_cpu or on_another:
            raise ValueError(
                "gram is prepared for other atoms, or for another GPU, or for a CPU where a GPU codes; give the matrix "
                "itself"
            )
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


def _usable(rows_nd):
    """Which rows of a tensor are finite in float32, and not too long."""
    return (rows_nd.float() ** 2).sum(1) <= LONGEST**2


def _check_rows(name, array_Nd):
    """Raise ValueError naming the rows that hold NaN or infinity in float32, or whose norm is above LONGEST."""
    if on_gpu(array_Nd):  # one small answer instead of all the data
        usable_N = _usable(array_Nd)
        if not usable_N.all():
            rows = (~usable_N).nonzero()[:, 0]
            _refuse(name, rows.tolist(), array_Nd[rows[:1]].isfinite().all())
        return
    rows = []
    for start in range(0, len(array_Nd), ROWS_AT_ONCE):
        rows_nd = numpy_rows(array_Nd, slice(start, start + ROWS_AT_ONCE), np.float32)
        usable_n = np.einsum("nd,nd->n", rows_nd, rows_nd) <= LONGEST**2
        if not usable_n.all():
            finite = rows or np.isfinite(rows_nd[~usable_n][0]).all()
            rows += (start + np.flatnonzero(~usable_n)).tolist()
    if rows:
        _refuse(name, rows, finite)


def _refuse(name, rows, finite):
    raise ValueError(
        f"{name}: {'a norm above 1e8' if finite else 'NaN or infinity'} in row {', '.join(map(str, rows[:10]))}"
        f"{' and more' if len(rows) > 10 else ''}; leave such rows out, or scale them "
        "to what float32 holds"
    )


def _judge(kkt_N, tol, usable_N, hidden_Nd):
    """Refuse rows that are not usable and warn of tokens above tol; of a GPU that asks one question."""
    kkt_N = torch.as_tensor(kkt_N)
    usable_N = torch.ones(0, dtype=torch.bool) if usable_N is None else usable_N
    tol = math.inf if tol is None else tol
    facts = (~usable_N).sum(), (~(kkt_N <= tol)).sum(), torch.cat([kkt_N, kkt_N.new_zeros(1)]).max()
    refused, above, worst = torch.stack([fact.to(kkt_N.device, torch.float64) for fact in facts]).tolist()
    if refused:
        _check_rows("hidden", hidden_Nd)
    if above:
        warnings.warn(
            f"{int(above)} of {len(kkt_N)} tokens have a KKT violation above {tol:g}, at most {worst:.2g}",
            ConvergenceWarning,
            stacklevel=3,
        )
