"""The atom nearest to each token, as a code with one entry of weight 1: clusters in the place of LSPs.

Nearest is the largest correlation, for atoms of unit length the smallest distance; of equal ones the lower atom. Rows
of zeros have none: their codes are empty, as of `nonneg_lasso`. With
the centroids of a k-means as atoms these are cluster labels, a control for what sparse codes add to them. Runs in
torch, on the device where the rows are. Left out: the centroids (dictionary/learning.py).

Shapes: N tokens, d hidden width, K atoms.
"""

import numpy as np
import torch

from pipeline.solvers.problem import Array, Codes, numpy_rows

ROWS = 1024  # of one matrix product; the last ones are filled up, because products of another shape may round otherwise


def nearest_atoms(hidden_Nd: Array, atoms_Kd: Array) -> Codes:
    """The nearest atom of each of N tokens.

    hidden_Nd, atoms_Kd  as of `nonneg_lasso`
    Returns              Codes of one entry of weight 1 a token, of none for rows of zeros; their kkt is NaN, as no
                         objective is minimised. Tensors if hidden_Nd is one on a GPU
    """
    on_gpu = isinstance(hidden_Nd, torch.Tensor) and hidden_Nd.is_cuda
    device: torch.device = hidden_Nd.device if on_gpu else torch.device("cpu")
    atoms_dK = _float32_on(device, atoms_Kd, slice(None)).T
    parts, coded = [], []
    for start in range(0, len(hidden_Nd), ROWS):
        rows_nd = _float32_on(device, hidden_Nd, slice(start, start + ROWS))
        filled_nd = torch.cat([rows_nd, rows_nd[:1].expand(ROWS - len(rows_nd), -1)])
        coded.append((rows_nd != 0).any(1))
        parts.append((filled_nd @ atoms_dK)[: len(rows_nd)].max(1).indices.to(torch.int32))
    coded_N = torch.cat([torch.zeros(0, dtype=torch.bool, device=device), *coded])
    indices = torch.cat([torch.zeros(0, dtype=torch.int32, device=device), *parts])[coded_N]
    codes = Codes(
        torch.nn.functional.pad(coded_N.cumsum(0), (1, 0)),
        indices,
        torch.ones(len(indices), device=device),
        torch.full((len(coded_N),), torch.nan, device=device),
    )
    return codes if on_gpu else codes.to_host()


def _float32_on(device, array, rows):
    if isinstance(array, torch.Tensor) and array.is_cuda:
        return array[rows].to(device, torch.float32)
    return torch.from_numpy(numpy_rows(array, rows, np.float32)).to(device)
