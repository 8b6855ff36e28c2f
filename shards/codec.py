"""Convert blocks of windows into packed columns of bytes, and back.

Blocks are packed from the sparse coder's rows. They are unpacked row by row, so that a trainer decodes only the masked
15 % of the tokens. The layout is in schema.py. Not handled here: tar and files.

Shapes: W windows, L window length, T tokens, M chosen tokens, E entries.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from mlsm.common.errors import ShardError
from shards.members import decode_block
from shards.schema import (
    LSP_OCTAVES,
    MAX_ENTRIES,
    NO_TAIL,
    TAIL_STEPS_PER_OCTAVE,
    HiddenLayout,
    ShardMeta,
    ids_dtype,
)

Columns = Mapping[str, np.ndarray]  # of a block, by name
Tokens = np.ndarray | slice
_NO_ROWS = np.zeros(0, np.float32)
_PART_ROWS = 2048  # rows per part, so that entries and results fit into a core's cache
_PART_PAIRS = 32_768


@dataclass(frozen=True)
class SparseRows:
    """Sparse distributions in CSR form.

    indptr   int64 (M + 1)
    indices  int32 (E), strictly increasing in a row
    weights  float32 (E), each row that has entries sums to 1
    tail     float32 (M), mass that was dropped before the row was renormalised
    """

    indptr: np.ndarray
    indices: np.ndarray
    weights: np.ndarray
    tail: np.ndarray


def pad_rows(
    counts_M: np.ndarray,
    values_E: np.ndarray,
    width: int | None = None,
    fill: int = 0,
    dtype: npt.DTypeLike | None = None,
) -> np.ndarray:
    """Consecutive rows of different lengths as one array (M, N, ...), padded after each row.

    counts_M  lengths of the rows; their sum is E
    width     N, at least the longest row's length, which is the default
    dtype     of the result; by default that of the values
    """
    width = int(counts_M.max(initial=0)) if width is None else width
    padded_MN = np.full((len(counts_M), width, *values_E.shape[1:]), fill, dtype or values_E.dtype)
    padded_MN[np.arange(width) < counts_M[:, None]] = values_E
    return padded_MN


@dataclass(frozen=True)
class HiddenRows:
    """Hidden states as they are stored.

    rows_Md  float32; zeros if a token has none
    coded_M  bool, whether a token has one
    """

    rows_Md: np.ndarray
    coded_M: np.ndarray


@dataclass(frozen=True)
class Windows:
    """Token windows, padded.

    ids        int32 (W, L)
    lengths    int32 (W), tokens of each window, special tokens included
    documents  int32 (W, L), ordinal of the token's document inside its window, -1 at padding
    """

    ids: np.ndarray
    lengths: np.ndarray
    documents: np.ndarray


def pack_indices(indices: np.ndarray, bits: int) -> np.ndarray:
    """Atom indices (E) to the stored column: 12 bits each, little-endian, or plain uint16 or uint32."""
    if bits != 12:
        return indices.astype(np.uint16 if bits == 16 else np.uint32)
    packed, whole = np.zeros((3 * len(indices) + 1) // 2, np.uint8), len(indices) // 2
    for first in range(0, whole, _PART_PAIRS):
        pairs_P = indices[2 * first : 2 * min(first + _PART_PAIRS, whole)].astype("<u2").view("<u4")
        pairs_P = pairs_P & 0xFFF | (pairs_P & 0xFFF0000) >> 4  # 24 bits, stored as 16 and 8
        np.ndarray(len(pairs_P), "<u2", packed, 3 * first, (3,))[:] = pairs_P
        packed[3 * first + 2 : 3 * (first + len(pairs_P)) : 3] = pairs_P >> 16
    if len(indices) % 2:
        packed[-2:] = indices[-1] & 0xFF, indices[-1] >> 8
    return packed


def row_parts(nnz: np.ndarray) -> Iterator[tuple[slice, slice]]:
    """Slices of rows with nnz entries, and of their entries, small enough for arithmetic in a core's cache. On whole
    blocks, fetching temporaries from memory takes longer than the arithmetic."""
    ends = np.concatenate(([0], np.cumsum(nnz, dtype=np.int64)))
    for first in range(0, len(nnz), _PART_ROWS):
        last = min(first + _PART_ROWS, len(nnz))
        yield slice(first, last), slice(int(ends[first]), int(ends[last]))


def unpack_indices(column: np.ndarray, entries: np.ndarray, bits: int) -> np.ndarray:
    """Atom indices (int32) at the given entry numbers, in any order."""
    if bits != 12:
        return column[entries].astype(np.int32)
    return _from_twelve_bits(_word_at(column, entries), entries)


def _word_at(column, entries):
    """The two bytes (uint16) that hold each 12-bit entry."""
    first = 3 * entries
    first >>= 1
    words = column[1:][first].astype(np.uint16)
    words <<= 8
    words |= column[first]
    return words


def _from_twelve_bits(words, entries):
    return ((words >> ((entries & 1) << 2).astype(np.uint16)) & 0xFFF).astype(np.int32)


def encode_weights(weights: np.ndarray, nnz: np.ndarray, octaves: int) -> np.ndarray:
    """Weights (E, > 0) of rows with nnz entries to 8-bit logarithmic codes below each row's maximum."""
    codes = np.empty(len(weights), np.uint8)
    for rows, entries in row_parts(nnz):
        filled = nnz[rows][nnz[rows] > 0].astype(np.int64)
        if not len(filled):
            continue
        starts = np.cumsum(filled) - filled
        ratios = weights[entries] / np.repeat(np.maximum.reduceat(weights[entries], starts), filled)
        codes[entries] = _encode_ratios(ratios, octaves)
    return codes


def _encode_ratios(ratios, octaves):
    """Codes of ratios to the largest weight of a row; the array of ratios is overwritten."""
    np.log2(ratios, out=ratios)
    ratios *= -(255 / octaves)
    np.rint(ratios, out=ratios)
    return np.minimum(ratios, 255, out=ratios)


@cache
def ratio_bounds(octaves: int) -> np.ndarray:
    """The smallest float32 ratio to a row's largest weight that code 254, ..., 0 stands for: float32 (255), rising.

    A code is 255 minus the number of bounds that its ratio reaches. So every device gives the codes that
    `encode_weights` gives on this machine, without using its own logarithm.
    """
    code_C = np.arange(254, -1, -1)
    below_C = np.full(255, np.float32(1e-30).view(np.int32))  # bits of positive floats are in the order of the floats
    least_C = np.full(255, np.float32(1).view(np.int32))
    while (least_C - below_C > 1).any():
        middle_C = below_C + (least_C - below_C) // 2
        reached_C = _encode_ratios(middle_C.view(np.float32).copy(), octaves) <= code_C
        below_C, least_C = np.where(reached_C, below_C, middle_C), np.where(reached_C, middle_C, least_C)
    return least_C.view(np.float32)


def decode_weights(codes: np.ndarray, nnz: np.ndarray, octaves: int) -> np.ndarray:
    """8-bit codes of rows with nnz entries to float32 weights; every row sums to 1."""
    weights, ratios = np.empty(len(codes), np.float32), np.exp2(-octaves * np.arange(256) / 255)
    for rows, entries in row_parts(nnz):
        filled = nnz[rows][nnz[rows] > 0].astype(np.int64)
        if not len(filled):
            continue
        raw = ratios[codes[entries]]  # np.take would convert the codes: five times as slow
        sums = np.add.reduceat(raw, np.cumsum(filled) - filled)
        np.divide(raw, np.repeat(sums, filled), out=weights[entries], casting="same_kind")
    return weights


def encode_tail(tail: np.ndarray) -> np.ndarray:
    """Dropped mass in [0, 1] to one byte: 16 steps per octave, 2^-15.9 the smallest, 255 for none."""
    codes = np.full(len(tail), NO_TAIL, np.uint8)
    some = tail > 2.0 ** (-(NO_TAIL - 0.5) / TAIL_STEPS_PER_OCTAVE)
    codes[some] = np.rint(-np.log2(tail[some]) * TAIL_STEPS_PER_OCTAVE).clip(0, NO_TAIL - 1).astype(np.uint8)
    return codes


def decode_tail(codes: np.ndarray) -> np.ndarray:
    """One byte to the dropped mass, float32."""
    table = np.exp2(-np.arange(256) / TAIL_STEPS_PER_OCTAVE).astype(np.float32)
    table[NO_TAIL] = 0
    return table[codes]


def encode_hidden(rows_Nd: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states to int8 codes (N, d) and float32 scales (N): code x scale is within half a scale of the value."""
    rows_Nd = rows_Nd.astype(np.float32, copy=False)
    scales_N = np.abs(rows_Nd).max(1, initial=0) / np.float32(127)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes_Nd = np.rint(rows_Nd / scales_N[:, None]).clip(-127, 127)  # a tiny row's scale is inexact
    codes_Nd[scales_N == 0] = 0
    return codes_Nd.astype(np.int8), scales_N


def decode_hidden(
    layout: HiddenLayout, codes_Mb: np.ndarray, marks_M: np.ndarray, codebook: np.ndarray | None
) -> HiddenRows:
    """Stored codes (M, b) to HiddenRows.

    marks_M   the scales of int8 rows; for product-quantised rows, whether the token has one
    codebook  float32 (b, 256, d / b), the centroids of product-quantised rows
    """
    coded_M = marks_M > 0
    if layout.quantise == "int8":
        return HiddenRows(codes_Mb * marks_M[:, None].astype(np.float32), coded_M)
    assert codebook is not None, "product-quantised rows have a codebook"
    rows_Md = codebook[np.arange(layout.bytes), codes_Mb].reshape(len(codes_Mb), layout.width)
    rows_Md[~coded_M] = 0
    return HiddenRows(rows_Md, coded_M)


def gather_hidden_of_blocks(
    layout: HiddenLayout, parts: list[tuple[Columns, np.ndarray, Tokens]], codebook: np.ndarray | None
) -> HiddenRows:
    """Decode the hidden states of chosen tokens of several blocks.

    parts  list of (block, tokens, places): token positions in the block, and their rows in the result
    """
    count = sum(len(tokens) for _, tokens, _ in parts)
    codes_Mb, marks_M = np.empty((count, layout.bytes), layout.dtype), np.empty(count, np.float32)
    for block, tokens, places in parts:
        codes_Mb[places] = block["hidden"].reshape(-1, layout.bytes).take(tokens, axis=0)  # faster than by brackets
        marks_M[places] = block[layout.mark][tokens]
    return decode_hidden(layout, codes_Mb, marks_M, codebook)


def pack_block(
    meta: ShardMeta,
    ids: np.ndarray,
    lengths: np.ndarray,
    run_starts: np.ndarray,
    run_records: np.ndarray,
    nnz: np.ndarray = _NO_ROWS,
    indices: np.ndarray = _NO_ROWS,
    weights: np.ndarray = _NO_ROWS,
    tail: np.ndarray = _NO_ROWS,
    lsp_codes: np.ndarray | None = None,
    hidden: np.ndarray | None = None,
    marks: np.ndarray = _NO_ROWS,
) -> dict[str, np.ndarray]:
    """The columns of one block, name to array, in the types of the format.

    meta                   ShardMeta
    ids, lengths           the windows, end to end
    run_starts, run_records  document runs
    nnz, indices, weights, tail  rows of every token (special tokens have none), when meta.k > 0
    lsp_codes              the result of `encode_weights` at LSP_OCTAVES, if it is already computed
    hidden, marks          codes (T, b) of hidden states in the type of meta.hidden, and marks of tokens that have one:
                           their scales, or 1 if they are product-quantised; all 0 for other tokens
    Raises                 ValueError when a token has no row, or a row has more than 255 entries, or entries that are
                           not strictly increasing atoms below k with positive weight
    """
    block = {
        "ids": ids.astype(ids_dtype(meta.vocab_size)),
        "lengths": lengths.astype(np.uint16),
        "run_starts": run_starts.astype(np.uint32),
        "run_records": run_records.astype(np.uint32),
    }
    if meta.k:
        same = len(weights) if lsp_codes is None else len(lsp_codes)
        if not len(nnz) == len(tail) == len(ids) or not len(indices) == len(weights) == same == nnz.sum():
            found = f"{len(nnz)} rows, {len(tail)} tails, {len(indices)} atoms, {len(weights)} weights"
            raise ValueError(f"{found} for {len(ids)} tokens and {nnz.sum()} entries")
        _check_rows(meta, nnz, indices, weights)
        block["nnz"] = nnz.astype(np.uint8)
        block["atoms"] = pack_indices(indices, meta.index_bits)
        if lsp_codes is None or meta.weight_octaves != LSP_OCTAVES:
            lsp_codes = encode_weights(weights, nnz, meta.weight_octaves)
        block["weights"] = lsp_codes
        block["tail"] = encode_tail(tail)
        block["layout"] = np.array([meta.index_bits, meta.weight_octaves], np.uint8)
    if meta.hidden:
        shape, dtype = (len(ids), meta.hidden.bytes), meta.hidden.dtype
        if hidden is None or (hidden.shape, hidden.dtype) != (shape, dtype) or len(marks) != len(ids):
            found = "none" if hidden is None else f"{hidden.dtype} of shape {hidden.shape}, {len(marks)} marks"
            raise ValueError(f"hidden states must be {dtype} of shape {shape} with a mark for each; found {found}")
        block["hidden"] = hidden.reshape(-1)
        block[meta.hidden.mark] = marks.astype(np.float32 if meta.hidden.quantise == "int8" else np.uint8)
    return block


def _check_rows(meta, nnz, indices, weights):
    if len(nnz) and nnz.max() > MAX_ENTRIES:
        raise ValueError(f"a token has {nnz.max()} entries; the format holds {MAX_ENTRIES}")
    if len(indices) and not (_rows_increase(nnz, indices) and indices.min() >= 0 and indices.max() < meta.k):
        raise ValueError(f"atom indices must increase within a token and lie below k = {meta.k}")
    if len(weights) and not weights.min() > 0:
        raise ValueError("stored weights must be positive")


def _rows_increase(nnz, indices):
    rising = indices[1:] > indices[:-1]
    ends = np.cumsum(nnz[nnz > 0].astype(np.int64))[:-1] - 1  # a new row may start at any atom
    rising[ends] = True
    return bool(rising.all())


def gather_rows(meta: ShardMeta, block: Columns, first_entry: np.ndarray, tokens: Tokens) -> SparseRows:
    """Decode the rows of chosen tokens of one block; see `gather_rows_of_blocks`."""
    return gather_rows_of_blocks(meta, [(block, first_entry, tokens)])


def gather_rows_of_blocks(meta: ShardMeta, parts: Sequence[tuple[Columns, np.ndarray, Tokens]]) -> SparseRows:
    """Decode the rows of chosen tokens of several blocks, in the order of the parts.

    Only bytes are collected block by block. All arithmetic is done once for all blocks, because a batch takes at most
    two windows from most of its blocks, and twenty NumPy calls per block would cost more than the work itself.

    parts    (block, first_entry, tokens) of each
             first_entry  integers (T + 1), cumulative nnz of the block
             tokens       int64 (M), token positions in the block; or, in all parts, a slice of tokens that follow each
                          other, whose entries are copied instead of looked up one by one
    Returns  SparseRows
    Raises   ShardError when a decoded row is not strictly increasing or leaves [0, k)
    """
    bounds = np.concatenate(([0], np.cumsum([_count(tokens) for *_, tokens in parts], dtype=np.int64)))
    nnz, first = np.empty(bounds[-1], np.int64), np.empty(bounds[-1], np.int64)
    tail = np.empty(bounds[-1], np.uint8)
    for (block, first_entry, tokens), begin, end in zip(parts, bounds[:-1], bounds[1:], strict=True):
        nnz[begin:end] = block["nnz"][tokens]
        first[begin:end] = first_entry[tokens]
        tail[begin:end] = block["tail"][tokens]
    indptr = np.concatenate(([0], np.cumsum(nnz)))
    if parts and isinstance(parts[0][2], slice):
        indices, codes = _copy_entries(meta, parts, indptr[bounds])
    else:
        entries = np.arange(indptr[-1]) + np.repeat(first - indptr[:-1], nnz)
        indices, codes = _gather_entries(meta, parts, entries, indptr[bounds])
    if len(indices) and not (_rows_increase(nnz, indices) and indices.view(np.uint32).max() < meta.k):
        raise ShardError(f"stored atoms are not strictly increasing below k = {meta.k}")
    return SparseRows(indptr, indices, decode_weights(codes, nnz, meta.weight_octaves), decode_tail(tail))


def _count(tokens):
    return tokens.stop - tokens.start if isinstance(tokens, slice) else len(tokens)


def fidelity(
    meta: ShardMeta, given: Columns, block: Columns, first_entry: np.ndarray, tokens: np.ndarray
) -> tuple[int, float, float, float]:
    """The distance of chosen rows of a packed block from the distributions P that it was made from.

    given        columns as `pack_block` takes them: weights of a row sum to 1 - tail
    first_entry  integers (T), entry at which each token's row begins
    Returns      (rows compared, and sums over them: KL(stored || P) in nats, total variation, tail); rows without
                 entries are left out. The other divergence, KL(P || stored), is infinite wherever a tail was dropped
    """
    tokens = tokens[given["nnz"][tokens] > 0]
    stored = gather_rows(meta, block, first_entry, tokens)
    nnz = np.diff(stored.indptr)
    entries = np.arange(stored.indptr[-1]) + np.repeat(first_entry[tokens] - stored.indptr[:-1], nnz)
    exact, kept = given["weights"][entries].astype(np.float64), stored.weights.astype(np.float64)
    tail = float(given["tail"][tokens].sum(dtype=np.float64))
    return len(tokens), float((kept * np.log(kept / exact)).sum()), (np.abs(kept - exact).sum() + tail) / 2, tail


def _gather_entries(meta, parts, entries, bounds):
    """Atom indices (int32) and weight codes at entry numbers that count within each part's own block."""
    twelve = meta.index_bits == 12
    atoms = np.empty(len(entries), np.uint16 if twelve else np.int32)
    codes = np.empty(len(entries), np.uint8)
    for (block, *_), begin, end in zip(parts, bounds[:-1], bounds[1:], strict=True):
        at = entries[begin:end]
        atoms[begin:end] = _word_at(block["atoms"], at) if twelve else block["atoms"][at]
        codes[begin:end] = block["weights"][at]
    return _from_twelve_bits(atoms, entries) if twelve else atoms, codes


def _copy_entries(meta, parts, bounds):
    """The same for parts that are slices of tokens: their entries lie end to end."""
    twelve = meta.index_bits == 12
    atoms = np.empty(bounds[-1], np.uint16 if twelve else np.int32)
    codes = np.empty(bounds[-1], np.uint8)
    for (block, first_entry, tokens), begin, end in zip(parts, bounds[:-1], bounds[1:], strict=True):
        first, last = int(first_entry[tokens.start]), int(first_entry[tokens.stop])
        codes[begin:end] = block["weights"][first:last]
        if not twelve:
            atoms[begin:end] = block["atoms"][first:last]
        for parity in (0, 1) if twelve and last > first else ():  # of an entry's number: two share three bytes
            entry = first + (first & 1 ^ parity)
            words = np.ndarray((last - entry + 1) // 2, "<u2", block["atoms"], 3 * entry >> 1, (3,))
            atoms[begin + entry - first : end : 2] = words >> 4 if parity else words & 0xFFF
    return atoms.astype(np.int32, copy=False), codes


def padded_windows_of_blocks(
    parts: list[tuple[Columns, np.ndarray, np.ndarray]], max_length: int, pad_id: int
) -> Windows:
    """Chosen windows of several blocks as padded arrays, in the order of the parts.

    parts  list of (block, window_starts, windows)
           window_starts  int64 (W_block + 1), cumulative lengths
           windows        int64 (W), window numbers in the block
    """
    bounds = np.concatenate(([0], np.cumsum([len(windows) for *_, windows in parts], dtype=np.int64)))
    lengths = np.empty(bounds[-1], np.int32)
    ids, runs = np.empty((bounds[-1], max_length), np.int32), np.zeros((bounds[-1], max_length), np.int32)
    columns = np.arange(max_length)
    for (block, window_starts, windows), begin, end in zip(parts, bounds[:-1], bounds[1:], strict=True):
        lengths[begin:end] = block["lengths"][windows]
        last = len(block["ids"]) - 1  # padding of a short window must not read past the block
        tokens = np.minimum(window_starts[windows][:, None] + columns, last)
        ids[begin:end] = block["ids"][tokens]
        run_starts, starts = block["run_starts"], window_starts[windows]
        first = run_starts.searchsorted(starts, side="right")
        final = run_starts.searchsorted(starts + (lengths[begin:end] - 1), side="right")
        (mixed,) = (first < final).nonzero()  # the other windows contain one document each
        if len(mixed):
            runs[begin + mixed] = run_starts.searchsorted(tokens[mixed], side="right") - first[mixed, None]
    padding = columns >= lengths[:, None]
    ids[padding], runs[padding] = pad_id, -1
    return Windows(ids, lengths, runs)


def block_windows(samples: Iterable[dict[str, Any]]) -> Iterator[dict[str, np.ndarray]]:
    """Turn WebDataset samples, which are blocks, into one dict per window: a decoder for plain pipelines.

        wds.WebDataset(urls, shardshuffle=False).compose(block_windows)

    Do not add `.decode()`, which would unpickle foreign members. This decoder gets bytes and reads only the columns of
    our format.

    Raises  ShardError when a shard holds anything else
    Yields  dict with `ids` int32 (n,), `documents` int32 (n,) and, when the shards hold LSPs, `nnz` (n,),
            `atoms` int32 (E,), `weights` float32 (E,; every token's sum to 1) and `tail` float32 (n,).
            Index width and octaves are in each block's `layout` column. With hidden states: `hidden` float32 (n, d), or
            uint8 (n, b) codes if product-quantised (the centroids are in the store), and `coded` bool (n,).
    """
    for sample in samples:
        raw = any(isinstance(value, bytes) for key, value in sample.items() if not key.startswith("__"))
        block = decode_block(sample) if raw else sample
        _check_sizes(block)
        starts = np.concatenate(([0], np.cumsum(block["lengths.npy"].astype(np.int64))))
        runs = np.searchsorted(block["run_starts.npy"], np.arange(starts[-1]), side="right") - 1
        rows = _decode_all_rows(block)
        for begin, end in zip(starts[:-1], starts[1:], strict=True):
            window = {
                "ids": block["ids.npy"][begin:end].astype(np.int32),
                "documents": (runs[begin:end] - runs[begin]).astype(np.int32),
            }
            if rows is not None:
                lo, hi = rows.indptr[begin], rows.indptr[end]
                window |= {
                    "nnz": block["nnz.npy"][begin:end].copy(),  # torch wants arrays that can be written
                    "atoms": rows.indices[lo:hi],
                    "weights": rows.weights[lo:hi],
                    "tail": rows.tail[begin:end],
                }
            if "hidden.npy" in block:
                window |= _hidden_of_window(block, begin, end)
            yield window


def _hidden_of_window(block, begin, end):
    codes_nb = block["hidden.npy"].reshape(len(block["ids.npy"]), -1)[begin:end]
    if "coded.npy" in block:
        return {"hidden": codes_nb.copy(), "coded": block["coded.npy"][begin:end] > 0}
    scales_n = block["scales.npy"][begin:end]
    return {"hidden": codes_nb * scales_n[:, None], "coded": scales_n > 0}


def _check_sizes(block):
    """Raise ShardError unless the columns of a block have matching lengths. There is no target to compare with."""
    try:
        fit = block["lengths.npy"].sum(dtype=np.int64) == len(block["ids.npy"])
        fit &= len(block["run_starts.npy"]) == len(block["run_records.npy"])
        if "nnz.npy" in block:
            bits, _ = block["layout.npy"].tolist()
            entries = int(block["nnz.npy"].sum(dtype=np.int64))
            stored = {12: (3 * entries + 1) // 2, 16: entries, 32: entries}.get(bits)
            fit &= len(block["nnz.npy"]) == len(block["tail.npy"]) == len(block["ids.npy"])
            fit &= (len(block["atoms.npy"]), len(block["weights.npy"])) == (stored, entries)
        if "hidden.npy" in block:
            mark = block["coded.npy" if "coded.npy" in block else "scales.npy"]
            fit &= len(mark) == len(block["ids.npy"]) and len(block["hidden.npy"]) % max(1, len(mark)) == 0
    except (KeyError, ValueError) as error:
        raise ShardError(f"{block.get('__url__', 'a shard')}: a block lacks a column ({error})") from None
    if not fit:
        raise ShardError(f"{block.get('__url__', 'a shard')}: the columns of a block do not fit one another")


def _decode_all_rows(block):
    if "nnz.npy" not in block:
        return None
    bits, octaves = (int(value) for value in block["layout.npy"])
    nnz = block["nnz.npy"].astype(np.int64)
    indptr = np.concatenate(([0], np.cumsum(nnz)))
    indices = unpack_indices(block["atoms.npy"], np.arange(indptr[-1]), bits)
    if len(indices) and not _rows_increase(nnz, indices):
        raise ShardError(f"{block.get('__url__', 'a shard')}: stored atoms are not increasing within a token")
    weights = decode_weights(block["weights.npy"], nnz, octaves)
    return SparseRows(indptr, indices, weights, decode_tail(block["tail.npy"]))
