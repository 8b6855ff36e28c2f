"""Read the tar members of a block as arrays. Only the columns of our format are accepted.

    columns = group_columns(raw, "000000")       # name to array, views of `raw`
    check_columns(columns, windows, tokens, meta)

A shard may come from anywhere, and a correct hash does not make it harmless. A member is refused unless it is one of
the format's columns and a plain one-dimensional array of that column's type. Nothing is unpickled, and the header of an
array is not evaluated: it must equal the header that NumPy's writer gives it. Not handled here: the
hash of the bytes (windows.py, shard_file.py), the values of packed rows (codec.py, block_check.py).
"""

import io
import re
import tarfile
from collections.abc import Mapping
from math import prod
from pathlib import Path

import numpy as np

from mlsm.common.errors import ShardError, describe
from shards.schema import HiddenLayout, ShardMeta, ids_dtype, index_bits

WINDOW_COLUMNS = {"ids": ("<u2", "<u4"), "lengths": ("<u2",), "run_starts": ("<u4",), "run_records": ("<u4",)}
ROW_COLUMNS = {
    "nnz": ("|u1",),
    "atoms": ("|u1", "<u2", "<u4"),
    "weights": ("|u1",),
    "tail": ("|u1",),
    "layout": ("|u1",),
}
HIDDEN_COLUMNS = {"hidden": ("|i1", "|u1"), "scales": ("<f4",), "coded": ("|u1",)}
SUM_COLUMNS = {"token_counts": ("<u4",), "mass": ("<f8",), "hidden_sum": ("<f8",), "hidden_squares": ("<f8",)}
_BLOCK_COLUMNS = WINDOW_COLUMNS | ROW_COLUMNS | HIDDEN_COLUMNS
_MAGIC = b"\x93NUMPY\x01\x00"
_HEADER = re.compile(
    rb"\{'descr': '([<|][iuf][1248])', 'fortran_order': False, 'shape': \((0|[1-9]\d{0,15}),\), \} *\n"
)
_BLOCK = 512  # bytes of a tar header; members are padded to a multiple of it


def group_columns(raw: np.ndarray, group: str) -> dict[str, np.ndarray]:
    """The arrays of one member group by column name, views of `raw`.

    raw     uint8 array that begins at a tar header and ends after a member's padding
    group   name of the group: `__stats__` or a block's name
    Raises  ShardError if a member does not belong to such a group
    """
    known, prefix = (SUM_COLUMNS, "__stats__/sums") if group == "__stats__" else (_BLOCK_COLUMNS, group)
    found, position = {}, 0
    while position < len(raw):
        try:
            header = tarfile.TarInfo.frombuf(raw[position : position + _BLOCK].tobytes(), "utf-8", "strict")
        except tarfile.HeaderError as error:
            raise ShardError(f"no tar header at byte {position} of the block: {error}") from None
        stem, _, column = header.name.removesuffix(".npy").rpartition(".")
        begin, end = position + _BLOCK, position + _BLOCK + header.size
        if stem != prefix or column not in known or column in found or not header.name.endswith(".npy"):
            raise ShardError(
                f"a member {header.name!r}, which is not of this format or occurs twice. Nothing of it was used"
            )
        if header.type != tarfile.REGTYPE or end > len(raw):  # isreg() also takes sparse files, which tar would expand
            raise ShardError(f"the member {header.name!r} is not a whole plain file")
        found[column] = _array(raw[begin:end], known[column], header.name)
        position = begin + -(-header.size // _BLOCK) * _BLOCK
    return found


def decode_block(sample: Mapping) -> dict:
    """Decode the columns of a plain WebDataset sample into arrays; keys such as `__key__` stay.

        wds.WebDataset(urls, shardshuffle=False).map(decode_block)

    Use this instead of WebDataset's `.decode()`, which unpickles any member that is called `.pyd` or `.pickle`.
    Raises  ShardError when a member is not a column of this format
    """
    block = {}
    for key, value in sample.items():
        if key.startswith("__"):
            block[key] = value
            continue
        column = key.removesuffix(".npy")
        if column not in _BLOCK_COLUMNS or column == key or not isinstance(value, bytes | bytearray | memoryview):
            raise ShardError(
                f"{sample.get('__url__', 'a shard')}: a member {key!r}, which is not a column of this "
                "format. Nothing of it was used."
            )
        block[key] = _array(np.frombuffer(value, np.uint8), _BLOCK_COLUMNS[column], key)
    return block


def read_array(path: str | Path, raw: bytes, dimensions: int) -> np.ndarray:
    """The float32 array of a whole `.npy` file, a view of its bytes.

    dimensions  their expected number
    Raises      ShardError if it is anything else, or if its shape does not match its bytes
    """
    file = io.BytesIO(raw[:16_384])
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, by_column, found = read(file)
    except Exception as error:  # NumPy passes the header to Python's parser, which raises many classes
        raise ShardError(f"{path} is not an array ({describe(error)})") from None
    if found != np.dtype("<f4") or len(shape) != dimensions or not all(type(n) is int and n >= 0 for n in shape):
        raise ShardError(f"{path} holds {found} of shape {shape}, expected <f4 of {dimensions} dimensions")
    if len(raw) - file.tell() != prod(shape) * found.itemsize:
        raise ShardError(
            f"{path} holds {len(raw) - file.tell():,} bytes, its shape {shape} needs {prod(shape) * found.itemsize:,}"
        )
    return np.frombuffer(raw, found, offset=file.tell()).reshape(shape, order="F" if by_column else "C")


def check_columns(columns: Mapping[str, np.ndarray], windows: int, tokens: int, meta: ShardMeta) -> None:
    """Raise ShardError unless the columns of a block fit one another, its record and the target.

    columns          name to array
    windows, tokens  as the record of the unit says
    meta             ShardMeta
    Not checked: whether the atoms of a row increase below k. Decoding the rows checks that.
    """
    expected = set(WINDOW_COLUMNS)
    if meta.k:
        expected |= ROW_COLUMNS.keys()
    if meta.hidden:
        expected |= {"hidden", meta.hidden.mark}
    if columns.keys() != expected:
        raise ShardError(f"columns {', '.join(sorted(columns))} instead of {', '.join(sorted(expected))}")
    ids, lengths, starts = columns["ids"], columns["lengths"], columns["run_starts"]
    if (len(lengths), len(ids)) != (windows, tokens) or lengths.sum(dtype=np.int64) != len(ids):
        raise ShardError(f"{len(lengths)} windows of {len(ids)} tokens, the record says {windows} of {tokens}")
    if len(ids) and (ids.dtype != ids_dtype(meta.vocab_size) or ids.max() >= meta.vocab_size):
        raise ShardError(f"token ids leave the vocabulary of {meta.vocab_size}")
    if len(lengths) and not (lengths.min() > 0 and lengths.max() <= meta.max_length):
        raise ShardError(f"a window is empty or longer than {meta.max_length} tokens")
    rising = len(starts) == len(columns["run_records"]) and bool((starts[1:] > starts[:-1]).all())
    if not rising or (len(ids) and (not len(starts) or starts[0] != 0 or starts[-1] >= len(ids))):
        raise ShardError("document runs do not increase from the first token")
    if meta.k:
        check_row_sizes(columns, meta)
    if meta.hidden:
        check_hidden_sizes(columns, meta.hidden)


def check_row_sizes(columns: Mapping[str, np.ndarray], meta: ShardMeta) -> None:
    """Raise ShardError unless there is one row for every token and as many atoms and weights as the rows have."""
    nnz, atoms, weights = columns["nnz"], columns["atoms"], columns["weights"]
    entries, bits = int(nnz.sum(dtype=np.int64)), index_bits(meta.k)
    stored = (3 * entries + 1) // 2 if bits == 12 else entries
    if len(nnz) != len(columns["ids"]) or len(columns["tail"]) != len(nnz):
        raise ShardError("a token has no row")
    if len(weights) != entries or len(atoms) != stored:
        raise ShardError(f"{len(weights)} weights and {len(atoms)} index units for {entries} entries")
    if 8 * atoms.itemsize != (8 if bits == 12 else bits):
        raise ShardError(f"atoms of {8 * atoms.itemsize} bits for k = {meta.k}")
    if columns["layout"].tolist() != [bits, meta.weight_octaves]:
        raise ShardError(f"layout {columns['layout'].tolist()} instead of {[bits, meta.weight_octaves]}")


def check_hidden_sizes(columns: Mapping[str, np.ndarray], layout: HiddenLayout) -> None:
    """Raise ShardError unless there is one row of hidden states for every token, as long as the target says."""
    hidden, marks = columns["hidden"], columns[layout.mark]
    if hidden.dtype != layout.dtype or len(hidden) != len(columns["ids"]) * layout.bytes:
        raise ShardError(
            f"hidden states of {len(hidden)} values of {hidden.dtype} for {len(columns['ids'])} tokens of "
            f"{layout.bytes} bytes in {layout.dtype}"
        )
    if len(marks) != len(columns["ids"]) or not (marks >= 0).all() or not (marks <= 1).all():
        raise ShardError(f"the column {layout.mark} is not one number from 0 to 1 for each token")


def _array(raw, dtypes, name):
    """One column as a view. It must have NumPy's exact header, an allowed type, and a length that fits its bytes."""
    head = raw[:256].tobytes()
    begin = 10 + int.from_bytes(head[8:10], "little")
    match = _HEADER.fullmatch(head[10:begin]) if head.startswith(_MAGIC) and begin <= len(head) else None
    if match is None or match[1].decode() not in dtypes:
        raise ShardError(f"the member {name!r} is not a plain array of {' or '.join(dtypes)}")
    dtype, count = np.dtype(match[1].decode()), int(match[2])
    if begin + count * dtype.itemsize != len(raw):
        raise ShardError(f"the member {name!r} has {len(raw) - begin} bytes for {count} values of {dtype.itemsize}")
    return np.frombuffer(raw, dtype, count, begin)
