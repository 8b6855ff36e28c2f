"""Read one unit's shard from start to end, for tools that need all of it.

    with ShardFile(files, record) as shard:
        for group in record.groups:
            columns = shard.columns(group)       # checked against its hash

A group is read into a buffer that the next group reuses. So memory is that of the largest group (about 5 MB) for shards
of any size. Not handled here: reading chosen windows and rows by number, for training (windows.py).
"""

import hashlib
import io
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from mlsm.common import disk
from mlsm.common.errors import BlockError, ShardError
from mlsm.common.json_checks import parse_json
from shards.files import StoreFiles
from shards.manifest import Group, UnitRecord
from shards.members import check_columns, group_columns
from shards.schema import ShardMeta

_END_OF_ARCHIVE = bytes(1024)


class ShardFile:
    """An open shard of a store, together with the unit's record."""

    def __init__(self, files: StoreFiles, record: UnitRecord):
        self.files, self.record = files, record
        self._buffer = bytearray()

    def __enter__(self):
        """Raises BlockError when the file is missing or of another size."""
        try:
            self._file = self.files.open_shard(self.record.unit, self.record.file)
        except FileNotFoundError:
            raise BlockError("the shard is missing") from None
        except OSError as error:
            if disk.is_of_the_machine(error):
                raise
            raise BlockError(f"it cannot be read: {error.strerror}") from error
        size = self._file.seek(0, io.SEEK_END)
        if size != self.record.bytes:
            self._file.close()
            raise BlockError(f"the shard has {size:,} bytes, its record says {self.record.bytes:,}")
        # only now, because a stranger's record may claim any length
        self._buffer = bytearray(max((group["length"] for group in self.record.groups), default=0))
        return self

    def __exit__(self, *_):
        self._file.close()

    def raw(self, group: Mapping) -> memoryview:
        """Bytes of a group, a view that the next call overwrites. Raises BlockError when its hash differs."""
        raw = self._read(group["offset"], group["length"])
        if hashlib.sha256(raw).hexdigest() != group["sha256"]:
            raise _block_error("does not match its hash", group)
        return raw

    def columns(self, group: Mapping) -> dict[str, np.ndarray]:
        """Arrays of a group by column name, views that the next call overwrites. Raises BlockError as `raw` does."""
        raw = np.frombuffer(self.raw(group), np.uint8)
        try:
            return group_columns(raw, group["name"])
        except ShardError as error:
            raise _block_error(str(error), group) from None

    def meta(self) -> Any:
        """The content of `__meta__/meta.json`."""
        name = "__meta__/meta.json"
        return parse_json(_only_member(self.raw(self.record.groups[0]), name), name)

    def check_end(self) -> None:
        """Raise BlockError unless the last group is followed by exactly the end mark that fits the record.

        Together with the hashes of all groups, this checks every byte of the shard.
        """
        last = self.record.groups[-1]
        offset = last["offset"] + last["length"]
        raw = bytes(self._read(offset, self.record.bytes - offset))
        place: dict[str, Any] = {"block": "__end__", "offset": offset, "length": len(raw)}
        try:
            end = parse_json(_only_member(raw[: -len(_END_OF_ARCHIVE)], "__end__/end.json"), "__end__/end.json")
        except ShardError as error:
            raise BlockError(f"no end mark: {error}", **place) from None
        if not raw.endswith(_END_OF_ARCHIVE) or end != {"groups": list(self.record.groups)}:
            raise BlockError("the end mark differs from the record", **place)

    def _read(self, offset, length):
        if length > len(self._buffer):
            self._buffer = bytearray(length)
        view, done = memoryview(self._buffer)[:length], 0
        self._file.seek(offset)
        while done < length:
            got = self._file.readinto(view[done:])
            if not got:
                raise BlockError(f"the shard ends {length - done:,} bytes early", None, offset, length)
            done += got
        return view


def blocks(files: StoreFiles, record: UnitRecord) -> Iterator[tuple[Group, dict[str, np.ndarray]]]:
    """Pairs (group, columns) of a unit's blocks; the columns are views that the next pair overwrites.

    The columns fit one another, the record and the target; whether atoms increase is not checked.

    Raises  ShardError at the first damage, with the unit, the block and what to do
    """
    meta = ShardMeta.of_unit(files.target(), record.unit)
    with naming(files, record), ShardFile(files, record) as shard:
        for group in record.blocks:
            columns = shard.columns(group)
            with naming(files, record, group["name"]):
                check_columns(columns, group["windows"], group["tokens"], meta)
            yield group, columns


@contextmanager
def naming(files: StoreFiles, record: UnitRecord, block: str | None = None) -> Iterator[None]:
    """Add the shard, the block and advice to a ShardError raised inside the `with`; only once if these are nested."""
    try:
        yield
    except ShardError as error:
        if str(error).startswith(f"{record.file}: "):
            raise
        block = getattr(error, "block", block)
        where = f"block {block}: " if block else ""
        raise ShardError(f"{record.file}: {where}{error}. {files.read_hint(error.__cause__)}") from None


def _only_member(raw, name):
    """Payload of the one tar member that `raw` must be: header, payload, zeros up to a full record of 512."""
    try:
        header = tarfile.TarInfo.frombuf(bytes(raw[:512]), "utf-8", "strict")
    except tarfile.HeaderError as error:
        raise ShardError(f"no tar header ({error})") from None
    payload, rest = bytes(raw[512 : 512 + header.size]), bytes(raw[512 + header.size :])
    is_whole = len(payload) == header.size and len(rest) == -header.size % 512 and not any(rest)
    if header.name != name or header.type != tarfile.REGTYPE or not is_whole:
        raise ShardError(f"the tar member is not {name}")
    return payload


def _block_error(problem, group):
    return BlockError(problem, group["name"], group["offset"], group["length"])
