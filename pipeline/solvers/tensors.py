"""What the solvers in plain torch share: rows as float32 tensors, products that stay float32, codes from dense ones.

Where its caller allows it (torch.set_float32_matmul_precision, torch.backends.fp32_precision, autocast), torch rounds
the factors of a float32 product to 8 or 11 bits. A KKT violation computed so may be wrong by a hundredth, and a code
would be called optimal that is not. `product` computes certificates whatever is allowed.

Shapes: N rows, n of them, d width, K atoms, E non-zeros.
"""

from collections.abc import Sequence
from typing import TypeGuard

import numpy as np
import torch

from pipeline.solvers.problem import Array, Codes, join_codes, numpy_rows


def on_gpu(array: Array) -> TypeGuard[torch.Tensor]:
    return isinstance(array, torch.Tensor) and array.is_cuda


def float32_on(device: torch.device | str, array: Array, rows: slice = slice(None)) -> torch.Tensor:
    """Some rows of an array, of any float type, as a float32 tensor on a device."""
    if isinstance(array, torch.Tensor) and array.is_cuda:
        return array[rows].detach().to(device, torch.float32)
    return torch.from_numpy(numpy_rows(array, rows, np.float32)).to(device)


def may_round(device: torch.device) -> bool:
    """Whether torch may round the factors of a float32 product on this device, outside of autocast."""
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    return backend.matmul.fp32_precision in ("bf16", "tf32")


def product(rows_nd: torch.Tensor, weight_Kd: torch.Tensor) -> torch.Tensor:
    """rows @ weight.T of float32 tensors, in float32; in float64 where torch may round float32, which is seldom."""
    with torch.autocast(rows_nd.device.type, enabled=False):
        if may_round(rows_nd.device):
            return (rows_nd.double() @ weight_Kd.double().T).float()
        return rows_nd @ weight_Kd.T


Part = Sequence[torch.Tensor]  # counts, indices, values and kkt of a run of tokens


def part_of(codes_nK: torch.Tensor, kkt_n: torch.Tensor) -> Part:
    """Dense codes of a run of tokens as a Part; waits for the device."""
    rows_E, atoms_E = codes_nK.nonzero(as_tuple=True)
    return (codes_nK > 0).sum(1), atoms_E.to(torch.int32), codes_nK[rows_E, atoms_E], kkt_n


def join_parts(parts: Sequence[Part], device: torch.device) -> Codes:
    """Codes of all tokens: tensors where the device is a GPU, else NumPy arrays."""
    if device.type == "cpu":
        return join_codes([[tensor.numpy() for tensor in part] for part in parts])
    return _join_tensors(parts, device)


def _join_tensors(parts, device):
    counts, indices, values, kkt = ([part[i] for part in parts] for i in range(4))
    none = torch.zeros(0, device=device)
    indptr = torch.cat([none.to(torch.int64), *counts]).cumsum(0)
    return Codes(
        torch.nn.functional.pad(indptr, (1, 0)),
        torch.cat([none.to(torch.int32), *indices]),
        torch.cat([none, *values]),
        torch.cat([none, *kkt]),
    )
