"""Find the bytes of a split's member groups in the shards, as the split's records list them.

    blocks = Blocks(files, BlockTable(records))
    mapping, raw = blocks.map(unit, group)

Shards are memory-mapped; those of a store behind a URL are fetched when they are first mapped (remote.py).
Mapping.is_unchanged tells whether a mapped file is still as it was.
Not handled here: hashes and columns of the mapped blocks (windows.py).

Shapes: B blocks, U units.
"""

import hashlib
import mmap
import os
import resource
from array import array
from collections.abc import Iterable
from contextlib import suppress
from functools import cache, lru_cache
from io import FileIO
from pathlib import Path

import numpy as np

from mlsm.common import disk
from mlsm.common.errors import ShardError, StoreError
from shards.files import StoreFiles
from shards.manifest import UnitRecord

Group = tuple[str, int, int, bytes]  # name, offset in the shard, length, SHA-256
KEPT = 128  # shards or blocks that stay mapped: those of two shuffle windows
_MOST_OPEN = 1 << 16  # files; a limit beyond that slows programs down that go through all numbers


class BlockTable:
    """The part of the records that a reader needs: shards by unit, and member groups by block.

    ids, files               lists (U) of unit ids and shard names
    sizes, tokens            int64 (U), bytes of the shard and real tokens
    first_block              int64 (U + 1)
    unit, offset, length, windows, block_tokens   int64 (B)
    sha256                   uint8 (B, 32)
    sums                     list of (offset, length, sha256), the `__stats__` group of every unit
    digest                   hexadecimal SHA-256 over the hashes of the shards
    coded_tokens             number of tokens with a row, over all units
    """

    def __init__(self, records: Iterable[UnitRecord]):
        self.ids: list[str] = []
        self.files: list[str] = []
        self.sums: list[tuple[int, int, bytes]] = []
        self.coded_tokens = 0
        sizes, tokens, first_block = array("q"), array("q"), array("q", [0])
        blocks, digests, digest = array("q"), bytearray(), hashlib.sha256()
        for record in records:
            self.ids.append(record.unit)
            self.files.append(record.file)
            sizes.append(record.bytes)
            digest.update(bytes.fromhex(record.sha256))
            tokens.append(record.tokens)
            self.coded_tokens += record.statistics.get("coded_tokens", 0)
            for block in record.blocks:
                blocks.extend((block["offset"], block["length"], block["windows"], block["tokens"]))
                digests += bytes.fromhex(block["sha256"])
            first_block.append(len(blocks) // 4)
            sums = record.groups[-1]
            self.sums.append((sums["offset"], sums["length"], bytes.fromhex(sums["sha256"])))
        self.sizes, self.tokens, self.first_block = (np.array(a, np.int64) for a in (sizes, tokens, first_block))
        self.offset, self.length, self.windows, self.block_tokens = np.array(blocks, np.int64).reshape(-1, 4).T.copy()
        self.sha256 = np.frombuffer(bytes(digests), np.uint8).reshape(-1, 32)
        self.digest = digest.hexdigest()
        self.unit = np.repeat(np.arange(len(self.ids)), np.diff(self.first_block))

    def __len__(self):
        return len(self.unit)

    def group(self, number: int) -> Group:
        """The member group of a block."""
        name = f"{number - self.first_block[self.unit[number]]:06d}"
        return name, int(self.offset[number]), int(self.length[number]), self.sha256[number].tobytes()


class Mapping:
    """A mapped file and its identity: device, inode, size, time of the last change.

    raw  uint8 array, a view of the mapping
    """

    def __init__(self, file: FileIO, path: str | Path):
        status = os.fstat(file.fileno())
        self._path, self._identity = str(path), _identity(status)
        self.key = hash(self._identity) or 1  # 0 means no file
        size = status.st_size
        self.raw = np.frombuffer(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) if size else b"", np.uint8)

    def is_unchanged(self) -> bool:
        """Whether the file is unchanged since it was mapped. It stays mapped even if its name is removed or reused."""
        try:
            now = _identity(os.stat(self._path))
        except OSError:
            return True
        return now == self._identity or now[:2] != self._identity[:2]


def _identity(status):
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@cache  # once per process
def _allow_more_open_files():
    """Raise this process's limit of open files, often 1,024, as far as it may: each mapping keeps its file open, and
    several readers, each with `KEPT` mappings or more, may be in use.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_OPEN if hard == resource.RLIM_INFINITY else min(hard, _MOST_OPEN)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # some systems have a lower limit of their own
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Blocks:
    """The bytes of the member groups in a BlockTable, mapped from the shards of a store. Units are given by number,
    groups as `BlockTable.group` returns them.

    files  StoreFiles; it opens shards and knows the advice about damaged ones
    """

    def __init__(self, files: StoreFiles, table: BlockTable):
        _allow_more_open_files()
        self._files, self._table = files, table
        self._shard = lru_cache(maxsize=KEPT)(self._map_shard)

    def map(self, unit: int, group: Group) -> tuple[Mapping, np.ndarray]:
        """The Mapping of the shard that holds a group, and the group's bytes, a uint8 view of it.

        Raises  ShardError when the file is missing or cannot be read, StoreError when the unit has been encoded again
                since its record was read, RemoteError when it cannot be fetched
        """
        _, offset, length, _ = group
        mapping = self._shard(unit)
        return mapping, mapping.raw[offset : offset + length]

    def discard(self, unit: int) -> str:
        """Remove a damaged shard if it can be fetched again. Returns the advice for an error message."""
        return self._files.discard(self._table.files[unit])

    def _map_shard(self, unit):
        path, size = self._files.units / self._table.files[unit], self._table.sizes[unit]
        try:
            with self._files.open_shard(self._table.ids[unit], self._table.files[unit]) as file:
                mapping = Mapping(file, path)
        except FileNotFoundError:
            if not self._files.target_file.exists():
                raise StoreError(
                    f"{self._files.path} is no longer there. It may have been moved, or its disk unmounted."
                ) from None
            self._refuse_replaced(unit)
            raise ShardError(f"{path} is missing although its record exists. " + self._files.repair_hint()) from None
        except OSError as error:
            if disk.is_of_the_machine(error):
                raise
            raise ShardError(f"{path} cannot be read: {error.strerror}. " + self._files.read_hint(error)) from None
        if len(mapping.raw) != size:
            raise ShardError(f"{path}: {len(mapping.raw)} bytes, the record says {size}. " + self.discard(unit))
        return mapping

    def _refuse_replaced(self, unit):
        """Raise StoreError if, since we read its record, the unit was encoded again and its old shard removed."""
        record = self._files.record(self._table.ids[unit])
        if record is not None and record.file != self._table.files[unit]:
            raise StoreError(
                f"{self._files.path}: unit {record.unit} was encoded again since the store was opened, and its old "
                "shard was removed. Open the store again, or restart the command."
            )
