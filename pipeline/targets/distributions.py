"""Sparse codes to distributions over latent semantic properties (LSPs), and any distributions to columns of a block.

A code a gives P = a / sum(a). The largest n entries are kept unchanged; the mass of the others is the row's tail. A
code of zeros has no distribution: its row stays empty, and the token carries no loss (the official code uses it as a
row of zeros). Codes on a GPU are cut, divided and quantised there, and only the kept entries go to the host. The bytes
are the same, as sums and quotients are float64. Not handled here: renormalising for the loss (student/objectives/),
packing (shards/codec.py).

Shapes: N tokens, n of them at once, w the most entries of one, E entries; T tokens of a batch end to end.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from pipeline.batch import TeacherBatch, add_amounts
from pipeline.solvers.parallel import inlined, kernel
from pipeline.solvers.problem import Codes
from shards.codec import ratio_bounds
from shards.schema import LSP_OCTAVES

MOST_ENTRIES = 255  # limit of the shard format: one byte counts a token's entries
CELLS_ON_GPU = 1 << 24  # cells of a float64 table of some tokens' entries


@dataclass(frozen=True)
class Distributions:
    """Distributions of N tokens in CSR form.

    indptr            int64 (N + 1)
    indices           int32 (entries), atoms, strictly increasing in each row
    weights           float32 (entries), probabilities; a row sums to 1 - tail, an empty one to 0
    tail              float32 (N), probability of the entries that were dropped
    truncated_tokens  how many tokens had more entries than were kept
    lsp_codes         uint8 (entries), the weights as a shard stores them, where a GPU has made them
    """

    indptr: np.ndarray
    indices: np.ndarray
    weights: np.ndarray
    tail: np.ndarray
    truncated_tokens: int
    lsp_codes: np.ndarray | None = None

    def __len__(self):
        return len(self.indptr) - 1


def distributions(codes: Codes, top_n: int | Literal["all"]) -> Distributions:
    """The n most probable LSPs of every token.

    codes   solvers.Codes, on the host or on a GPU; the result is on the host
    top_n   entries to keep, 1 to 255, or "all": every non-zero, up to 255; among equal entries the lower atom is kept
    Raises  ValueError on another top_n
    """
    limit = MOST_ENTRIES if top_n == "all" else top_n
    if not isinstance(limit, int | np.integer) or not 1 <= limit <= MOST_ENTRIES:
        raise ValueError(
            f"top_n must be a whole number from 1 to {MOST_ENTRIES}, as a shard counts entries "
            f"in one byte, or 'all'; found {top_n!r}"
        )
    if isinstance(codes.indptr, torch.Tensor):
        return _fill_on_gpu(codes, limit)
    found_N = np.diff(codes.indptr)
    indptr = np.concatenate([np.zeros(1, np.int64), np.minimum(found_N, limit)]).cumsum()
    indices, weights = np.empty(indptr[-1], np.int32), np.empty(indptr[-1], np.float32)
    tail_N = np.zeros(len(found_N), np.float32)
    _fill(codes.indptr, codes.indices, codes.values, codes.values.view(np.int32), indptr, indices, weights, tail_N)
    return Distributions(indptr, indices, weights, tail_N, int((found_N > limit).sum()))


def columns_of(rows: Distributions | None, batch: TeacherBatch) -> dict[str, np.ndarray]:
    """Columns over all tokens of a batch; special tokens get no entries, and with None no token does."""
    tokens = len(batch.coded_T)
    nnz, tail = np.zeros(tokens, np.int64), np.zeros(tokens, np.float32)
    if rows is None:
        return {"nnz": nnz, "indices": np.zeros(0, np.int32), "weights": np.zeros(0, np.float32), "tail": tail}
    add_amounts(batch.block.statistics, {"truncated_tokens": int(rows.truncated_tokens)})
    nnz[batch.coded_T] = np.diff(rows.indptr)
    tail[batch.coded_T] = rows.tail
    columns = {"nnz": nnz, "indices": rows.indices, "weights": rows.weights, "tail": tail}
    return columns if rows.lsp_codes is None else columns | {"lsp_codes": rows.lsp_codes}


def _fill_on_gpu(codes, limit):
    """`_fill` for tensors."""
    found_N = codes.indptr.diff()
    width = max(1, int(found_N.max())) if len(found_N) else 1
    tail_N, bounds_C = torch.zeros(len(found_N), device=found_N.device), torch.from_numpy(ratio_bounds(LSP_OCTAVES))
    bounds_C = bounds_C.to(found_N.device)
    kept = [(codes.indices[:0], codes.values[:0], torch.zeros(0, dtype=torch.uint8, device=found_N.device))]
    for first in range(0, len(found_N), max(1, CELLS_ON_GPU // width)):
        indptr_n = codes.indptr[first : first + max(1, CELLS_ON_GPU // width) + 1]
        found_n, begin, end = indptr_n.diff(), int(indptr_n[0]), int(indptr_n[-1])
        row_E = torch.arange(len(found_n), device=found_n.device).repeat_interleave(found_n, output_size=end - begin)
        place_E = torch.arange(begin, end, device=found_n.device) - indptr_n[row_E]
        values_E, indices_E = codes.values[begin:end], codes.indices[begin:end]
        values_wn = values_E.new_zeros(width, len(found_n))
        values_wn[place_E, row_E] = values_E
        total_n = values_wn.sum(0, dtype=torch.float64)
        weights_E = (values_E.double() / total_n[row_E]).float()
        largest_n = (values_wn.amax(0).double() / total_n).float()
        codes_E = 255 - torch.bucketize(weights_E / largest_n[row_E], bounds_C, right=True).to(torch.uint8)
        if width > limit:
            largest = values_wn.sort(dim=0, descending=True, stable=True).indices[:limit]  # equal ones: first wins
            kept_wn = torch.zeros_like(values_wn, dtype=torch.bool).scatter_(0, largest, True)
            dropped_n = values_wn.masked_fill(kept_wn, 0).sum(0, dtype=torch.float64)
            tail_N[first : first + len(found_n)] = torch.where(dropped_n > 0, dropped_n / total_n, 0).float()
            kept_E = kept_wn[place_E, row_E]
            indices_E, weights_E, codes_E = indices_E[kept_E], weights_E[kept_E], codes_E[kept_E]
        kept.append((indices_E, weights_E, codes_E))
    indptr = torch.nn.functional.pad(found_N.clamp(max=limit).cumsum(0), (1, 0))
    columns = (indptr, *(torch.cat(parts) for parts in zip(*kept, strict=True)), tail_N)
    indptr, indices, weights, lsp_codes, tail = (tensor.cpu().numpy() for tensor in columns)
    return Distributions(indptr, indices, weights, tail, int((found_N > limit).sum()), lsp_codes)


@kernel
def _fill(from_indptr, from_indices, values, bits, indptr, indices, weights, tail_N):
    for n in range(len(tail_N)):
        start, stop, place = from_indptr[n], from_indptr[n + 1], indptr[n]
        total, low, high = 0.0, np.int32(0x7F800000), np.int32(0)  # infinity
        for entry in range(start, stop):
            total += values[entry]
            low, high = min(low, bits[entry]), max(high, bits[entry])
        keep = indptr[n + 1] - place
        smallest, ties = np.int32(0), 0
        if keep < stop - start:
            smallest, ties = _nth_largest(bits[start:stop], keep, low, high)
        dropped = 0.0
        for entry in range(start, stop):
            tied = bits[entry] == smallest
            if bits[entry] < smallest or (tied and ties == 0):
                dropped += values[entry]
                continue
            ties -= tied
            indices[place] = from_indices[entry]
            weights[place] = values[entry] / total
            place += 1
        tail_N[n] = dropped / total if dropped > 0 else 0.0


@inlined
def _nth_largest(bits, nth, low, high):
    """The nth largest entry, and how many entries equal to it belong to the nth largest, all in [low, high].

    The bits of positive floats, read as integers, have the same order. So bisection takes at most 31 counts, and stops
    as soon as a bound leaves exactly n.
    """
    while low < high:
        middle = low + (high - low + 1) // 2
        count = _count_from(bits, middle)
        if count == nth:
            low = _least_from(bits, middle)
            break
        if count > nth:
            low = np.int32(middle)
        else:
            high = np.int32(middle - 1)
    return low, nth - _count_from(bits, low + 1)


@inlined
def _count_from(bits, least):
    count = np.int32(0)
    least = np.int32(least)
    for entry in range(len(bits)):
        count += np.int32(bits[entry] >= least)
    return count


@inlined
def _least_from(bits, least):
    smallest = np.int32(0x7F800000)
    least = np.int32(least)
    for entry in range(len(bits)):
        if bits[entry] >= least:
            smallest = min(smallest, bits[entry])
    return np.int32(smallest)
