"""The matrix products of the GPU solver, and what is made of a dictionary once: how exact both are.

Gradients come from residual @ atoms.T on tensor cores, in one of two ways:

- `correlate_in_float16`: both operands and the result rounded to float16 (11 bits), summed in float32. By Cauchy and
  Schwarz it is off by at most ||r|| max ||d - d'|| + ||r - r'|| max ||d'||, where d' and r' are what rounding leaves.
  The first is known once the dictionary is, the second is summed up when a residual is rounded (cuda_kernels.subtract).
- `correlate_precisely`: each operand is cut in two bfloat16 parts of 8 bits, x = high + low to within 2^-16 |x|. Three
  products of parts add up to the whole but for low @ low: side by side they are one product of inner dimension 3 d,
  summed in float32. So at most 3 * 2^-16 ||r|| ||d_j|| <= 4.6e-5 ||r|| is lost, about 1e-6 where signs are mixed.

Left out: tensor cores without bfloat16 (before compute capability 8.0), where the precise product is plain float32.

Shapes: m tokens, d hidden width, K atoms; d and K are filled up with zeros to multiples of eight.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

HALF_ROUNDING = 2.0**-11  # of float16, of the value
SUMMING = 1e-5  # what sums of float32 on tensor cores may lose, of the norms of both vectors
SHORTEST, LONGEST = 0.1, 10.0  # norms of atoms whose Gram matrix float16 holds well
SUMS_OF_FLOAT16 = "allow_fp16_reduced_precision_reduction", "allow_fp16_accumulation"  # settings of torch
_settings = threading.Lock()
_before: list[dict[str, Any]] = []  # the settings as they were, once for each that is in `sums_in_float32`


class PreparedOnGpu(NamedTuple):
    """Atoms and Gram matrix as the kernels and the products read them: made once for any number of calls."""

    atoms_Kd: torch.Tensor  # float32
    gram_KK: torch.Tensor  # float32
    square_K: torch.Tensor  # float32, squared norms
    half_atoms_Kd: torch.Tensor  # float16
    half_gram_KK: torch.Tensor  # float16
    parts_eK: torch.Tensor  # for the precise product: bfloat16 parts, or atoms_Kd.T where it is plain float32
    norm: float  # the largest of an atom
    lost_norm: float  # the largest of what float16 takes off an atom
    fits_float16: bool  # no atom, but zeros, is so short or so long that float16 holds its Gram entries badly

    def errors(self, level: float, precise: bool) -> tuple[np.float32, ...]:
        """What gradients near `level` are off by.

        For each unit of the residual's norm, of the norm of its rounding, and of the sum of a code that was taken off
        with atoms of float16; and always.
        """
        if precise:
            of_norm = 4.6e-5 if self.parts_eK.dtype == torch.bfloat16 else 2e-6
            return np.float32(of_norm * self.norm), *np.zeros(3, np.float32)
        return (
            np.float32(self.lost_norm + SUMMING * self.norm),
            np.float32(self.norm),
            np.float32(self.lost_norm * self.norm),
            np.float32(HALF_ROUNDING * level + 2.0**-24),
        )


def prepare(atoms_Kd: torch.Tensor, gram_KK: torch.Tensor) -> PreparedOnGpu:
    """Prepare atoms (K, d) and their Gram matrix for `cd_cuda.solve`, on the device where they are."""
    with torch.no_grad():
        atoms_Kd, gram_KK = (_fill_up(tensor.detach().to(torch.float32)) for tensor in (atoms_Kd, gram_KK))
        atoms_Kd = torch.nn.functional.pad(atoms_Kd, (0, 0, 0, len(gram_KK) - len(atoms_Kd)))
        half_Kd = atoms_Kd.to(torch.float16)
        norm_K = torch.linalg.vector_norm(atoms_Kd, dim=1)
        lost_K = torch.linalg.vector_norm(atoms_Kd - half_Kd.float(), dim=1)
        short = ((norm_K > 0) & (norm_K < SHORTEST)).any()
        norm, lost, short = torch.stack([norm_K.max(), lost_K.max(), short.float()]).tolist()
        if _has_bfloat16(atoms_Kd.device):
            high_Kd, low_Kd = halves(atoms_Kd)
            parts_eK = torch.cat([high_Kd, low_Kd, high_Kd], 1).T
        else:
            parts_eK = atoms_Kd.T
        return PreparedOnGpu(
            atoms_Kd,
            gram_KK,
            gram_KK.diagonal().contiguous(),
            half_Kd,
            gram_KK.to(torch.float16),
            parts_eK,
            norm,
            lost,
            not short and norm <= LONGEST,
        )


def correlate_in_float16(prepared: PreparedOnGpu, residual_md: torch.Tensor, out_mK: torch.Tensor) -> None:
    """out = residual @ atoms.T, all in float16 but for the sums."""
    if residual_md.is_cuda:
        with sums_in_float32():
            torch.mm(residual_md, prepared.half_atoms_Kd.T, out=out_mK)
    else:
        out_mK.copy_(residual_md.float() @ prepared.half_atoms_Kd.float().T)


@contextlib.contextmanager
def sums_in_float32() -> Iterator[None]:
    """Products of float16 without partial sums of float16, which torch lets cuBLAS make by default, or if users say so.

    The settings are the process's: they hold for all threads while any is inside, and the last to leave restores them.
    """
    matmul = torch.backends.cuda.matmul
    with _settings:
        _before.append(_before[0] if _before else {name: getattr(matmul, name) for name in SUMS_OF_FLOAT16})
        for name in SUMS_OF_FLOAT16:
            setattr(matmul, name, False)
    try:
        yield
    finally:
        with _settings:
            before = _before.pop()
            for name, value in before.items() if not _before else ():
                setattr(matmul, name, value)


def correlate_precisely(prepared: PreparedOnGpu, residual_md: torch.Tensor, out_mK: torch.Tensor) -> None:
    """out = residual @ atoms.T, with nearly the precision of float32."""
    if prepared.parts_eK.dtype == torch.bfloat16:
        high_md, low_md = halves(residual_md)
        torch.mm(torch.cat([high_md, high_md, low_md], 1), prepared.parts_eK, out_dtype=torch.float32, out=out_mK)
    else:
        torch.mm(residual_md, prepared.parts_eK, out=out_mK)


def halves(array: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    high = array.to(torch.bfloat16)
    return high, (array - high).to(torch.bfloat16)  # the difference is exact in float32


def _has_bfloat16(device):
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def _fill_up(matrix):
    """With zeros, to a multiple of eight columns, and of rows where it is square."""
    columns = -matrix.shape[1] % 8
    rows = columns if matrix.shape[0] == matrix.shape[1] else 0
    return torch.nn.functional.pad(matrix, (0, columns, 0, rows)).contiguous()
