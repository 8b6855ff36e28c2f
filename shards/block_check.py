"""Check that a block is well formed: its columns, and their packed rows (increasing atoms below k, a row per token).

Not handled here: hashes (shard_file.py), which blocks are looked at (verify.py).

Shapes: E entries, P pairs of entries.
"""

from collections.abc import Mapping

import numpy as np

from mlsm.common.errors import ShardError
from shards import codec
from shards.members import check_columns
from shards.schema import ShardMeta, index_bits

_PAIRS = 65_536  # pairs per part: 256 KB


def check_block(columns: Mapping[str, np.ndarray], group: Mapping, meta: ShardMeta) -> None:
    """Raise ShardError unless the columns of a block are well formed and as long as its record says.

    columns  name to array, as ShardFile.columns gives them
    group    the block's entry in the record: windows, tokens
    """
    check_columns(columns, group["windows"], group["tokens"], meta)
    if meta.k:
        _check_rows(columns, meta)
    if meta.hidden and meta.hidden.quantise == "int8" and columns["hidden"].min(initial=0) == -128:
        raise ShardError("a hidden state has the code -128; codes lie between -127 and 127")


def _check_rows(columns, meta):
    atoms, bits = columns["atoms"], index_bits(meta.k)
    ends = np.cumsum(columns["nnz"], dtype=np.int64)  # a row's first entry need not exceed the previous row's last
    entries = int(ends[-1]) if len(ends) else 0
    ends = ends[ends.searchsorted(1) : ends.searchsorted(entries)]
    parts = _unpack_12(atoms, entries) if bits == 12 else [atoms] if entries else []
    rising, largest = _find_rising(parts, entries)
    rising[ends - 1] = True
    if entries and (largest >= meta.k or not rising.all()):
        raise ShardError(f"atoms are not increasing below k = {meta.k}")


def _find_rising(parts, entries):
    """Whether each entry exceeds the one before it, bool (E - 1), and the largest; the entries are passed in parts."""
    rising, largest, place, before = np.empty(max(0, entries - 1), bool), 0, 0, None
    for part in parts:
        if place:
            rising[place - 1] = part[0] > before
        np.greater(part[1:], part[:-1], out=rising[place : place + len(part) - 1])
        place, before, largest = place + len(part), part[-1], max(largest, int(part.max()))
    return rising, largest


def _unpack_12(packed, entries):
    """12-bit indices (E) as parts of uint16, in order, each small enough for the cache. The next part overwrites it.

    Three bytes hold a pair: one unaligned 32-bit load, whose two 12-bit fields move into its 16-bit halves. That
    is six times as fast as the gathers of codec.unpack_indices, and lets this check keep up with the hash.
    """
    pairs = max(0, (len(packed) - 1) // 3)  # the load of a last whole pair would leave the array
    low, high = np.empty((2, min(_PAIRS, pairs)), "<u4")
    for first in range(0, pairs, _PAIRS):
        low_P, high_P = low[: pairs - first], high[: pairs - first]
        low_P[:] = np.ndarray(len(low_P), "<u4", packed, 3 * first, (3,))
        np.bitwise_and(low_P, 0xFFF000, out=high_P)
        low_P &= 0xFFF
        high_P <<= 4
        low_P |= high_P
        yield low_P.view("<u2")
    if entries > 2 * pairs:
        rest = np.append(packed[3 * pairs :], np.uint8(0))
        yield codec.unpack_indices(rest, np.arange(entries - 2 * pairs), 12)
