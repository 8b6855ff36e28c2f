"""The cache of a remote store's blocks on this machine, shared by all processes that read the store.

    <cache>/stores/<12 digits of the target>-<8 of the URL>/
        groups/<shard>/<block>      a block's bytes of the shard, or __stats__: what readers map
        lock                        one process of the machine fetches at a time, many things at once; a process that
                                    keeps nothing for the time limit of an attempt is waited for no longer
    <cache>/stores/fetched          grows by a byte for every _GRAIN that a process fetches, until one of them looks
                                    at the size of the whole cache

Blocks are fetched, not shards: an epoch's order takes single blocks from everywhere, so with whole shards the first
batch would wait for gigabytes, and a cache smaller than the store would fetch each shard again and again. From a
server that knows no ranges the whole shard comes, and all its blocks are kept. Whatever is fetched is compared with the
length and SHA-256 of the record before it gets its final name; a bad answer is never kept.

A block that is mapped carries a shared lock. When the cache has reached its limit, the least recently used of the other
blocks are removed; so the cache may exceed its limit by what readers have mapped. Nothing is fsynced: readers check the
hash of what they find.
Left out: small files (remote.py), repeating what failed (source.py).
"""

import hashlib
import os
import time
from collections.abc import Iterable
from contextlib import contextmanager, suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from common import locks
from common.durable import replace_bytes
from common.errors import RemoteError, ShardError, WholeError
from shards.blocks import BlockTable, Group, Mapping
from shards.source import copy_again

if TYPE_CHECKING:
    from shards.remote import RemoteFiles

_RANGES, _SHARDS = 16, 2  # asked for in one go: what memory holds, and a dead server delays
_SCAN_AFTER = 1 / 20  # of the limit is fetched between two looks at the cache's size
_GRAIN = 1 << 16  # bytes fetched that a byte of `fetched` stands for
_LOOK_AT_LOCK = 0.02  # seconds between two tries to get it


class CachedBlocks:
    """A BlockStore on the cache of a store behind a URL: the blocks of a batch are fetched together.

    cache  GroupCache
    table  BlockTable
    """

    def __init__(self, cache: "GroupCache", table: BlockTable):
        self._cache, self._table = cache, table

    def prepare(self, blocks: np.ndarray) -> None:
        blocks = np.unique(blocks)
        numbered = zip(self._table.unit[blocks].tolist(), blocks.tolist(), strict=True)
        self._cache.fetch_groups([self._name(unit, self._table.group(number)[0]) for unit, number in numbered])

    def prepare_sums(self, units: Iterable[int]) -> None:
        self._cache.fetch_groups([self._name(unit, "__stats__") for unit in units])

    def map(self, unit: int, group: Group) -> tuple[Mapping, np.ndarray]:
        with self._cache.open_group(*self._name(unit, group[0])) as file:
            mapping = Mapping(file, file.name)
        return mapping, mapping.raw

    def discard(self, unit: int, group: Group) -> str:
        return self._cache.discard_group(self._table.files[unit], group[0])

    def _name(self, unit, group):
        return self._table.ids[unit], self._table.files[unit], group


class GroupCache:
    """The member groups of one remote store: those in the cache, and how the others get there.

    files      RemoteFiles, whose records say what a group must be
    directory  the store's in the cache
    """

    def __init__(self, files: "RemoteFiles", directory: Path):
        self._files, self.groups, self._lock_file = files, directory / "groups", directory / "lock"
        self._ranges: bool | None = None  # whether the server knows them, once it has shown that
        self._fits = False  # whether the cache kept to its limit when this process looked last
        self._lock_seen = 0, 0.0  # when the lock's holder kept something last, by its clock (ns), and by ours (s)

    def open_group(self, unit_id: str, file: str, name: str) -> FileIO:
        """The cached bytes of one member group of a shard as an open file, fetched if it is not there.

        Raises  RemoteError when it cannot be fetched
        """
        path = self._group_file(file, name)
        for _ in range(self._files.options.attempts):
            if opened := _open(path):
                return opened
            self.fetch_groups([(unit_id, file, name)])
        raise RemoteError(f"{path} is removed again and again. Give a larger MLSM_CACHE_GB.")

    def discard_group(self, file: str, name: str) -> str:
        """Remove a cached group that is damaged. Returns what to do then, in words for an error."""
        path = self._group_file(file, name)
        path.unlink(missing_ok=True)
        return (
            f"Its copy in the cache ({path}) has changed since it was fetched and is removed: run the same command "
            "again, which fetches it anew. If that happens often, the disk is failing: set MLSM_CACHE to another."
        )

    def fetch_groups(self, wanted: list[tuple[str, str, str]]) -> None:
        """Fetch those of the groups (unit id, shard's name, group's name) that the cache lacks, many at once."""
        paths = {entry: self._group_file(*entry[1:]) for entry in wanted}
        if all(path.exists() for path in paths.values()):
            return
        with self._alone() as show_progress:
            left = [entry for entry, path in paths.items() if not path.exists()]
            while left:
                self._fetch_some(left)
                show_progress()
                left = [entry for entry in left if not paths[entry].exists()]
            self._make_room(set(paths.values()))

    def _fetch_some(self, wanted):
        """Fetch the first of these groups; none, where the server turns out to send whole shards in place of ranges."""
        if self._ranges is False:
            wanted = list({entry[:2]: entry for entry in wanted}.values())[:_SHARDS]  # one of a shard brings all
        else:
            wanted = wanted[: _RANGES if self._ranges else 1]
        expected = {}
        for unit_id, file, name in wanted:
            record = self._files.record(unit_id)
            groups = {group["name"]: group for group in record.groups} if record else {}
            if record is None or record.file != file or name not in groups:
                raise self._changed(unit_id)
            group = groups[name]
            expected[f"units/{file}", group["offset"], group["offset"] + group["length"]] = (record, group)

        def accept(request, raw):
            record, group = expected[request]
            self._ranges = len(raw) != record.bytes
            if self._ranges:
                return self._keep_group(record, group, raw)
            for part in record.groups:
                self._keep_group(record, part, raw[part["offset"] : part["offset"] + part["length"]])

        try:
            longest = max(record.bytes for record, _ in expected.values())
            absent = self._files.source.read(list(expected), accept, parts_only=len(expected) > _SHARDS, whole=longest)
        except WholeError:
            self._ranges = False
            return
        for request in absent:
            raise self._changed(expected[request][0].unit)

    def _keep_group(self, record, group, raw):
        if len(raw) != group["length"]:
            raise ShardError(f"{len(raw):,} bytes, the record says {group['length']:,}")
        if hashlib.sha256(raw).hexdigest() != group["sha256"]:
            raise ShardError(f"block {group['name']} does not match the hash in its record")
        path = self._group_file(record.file, group["name"])
        path.parent.mkdir(exist_ok=True)
        keep(path, raw)
        if self._files.options.budget is not None:
            with open(self._fetched_file, "ab") as file:
                file.write(bytes(-(-len(raw) // _GRAIN)))

    def _changed(self, unit_id):
        self._files.record_file(unit_id).unlink(missing_ok=True)
        return RemoteError(
            f"{self._files.path}: the shard of unit {unit_id} is not there, or no longer the one that the record in "
            "the cache names. That record is forgotten: run the same command again; if the shard is still missing "
            f"then, {copy_again()}"
        )

    def _group_file(self, file, name):
        return self.groups / file.removesuffix(".tar") / name

    @property
    def _fetched_file(self):
        return self._files.options.directory.absolute() / "stores" / "fetched"

    @contextmanager
    def _alone(self):
        """Let the other processes and threads of this machine that want to fetch wait: they may want the same.

        Gives a function to call whenever something was kept: those who wait take a holder that keeps nothing for dead.
        """
        with open(self._lock_file, "a") as file:
            held = self._wait_for_lock(file)
            try:
                yield partial(os.utime, file.fileno()) if held else lambda: None
            finally:
                with suppress(OSError):
                    locks.release(file)  # now, not when a forked worker has closed it too

    def _wait_for_lock(self, file):
        """Whether the lock was obtained. It is not when its holder has kept nothing for the time limit of an attempt
        (it was stopped, or its server stalls), or when the file system has no locks; then two processes may fetch the
        same group, which does no harm.
        """
        while True:
            try:
                if locks.acquire(file):
                    os.utime(file.fileno())
                    return True
            except OSError:
                return False
            kept = os.fstat(file.fileno()).st_mtime_ns
            if kept != self._lock_seen[0]:
                self._lock_seen = kept, time.monotonic()
            if time.monotonic() - self._lock_seen[1] > self._files.options.timeout:
                return False
            time.sleep(_LOOK_AT_LOCK)

    def _make_room(self, needed):
        """Remove blocks that no process maps, the least recently used first, until the cache keeps to its limit."""
        budget = self._files.options.budget
        if budget is None:
            return
        with suppress(FileNotFoundError):  # how much all processes fetched since one of them looked, rounded up
            if self._fits and self._fetched_file.stat().st_size * _GRAIN < _SCAN_AFTER * budget:
                return
        open(self._fetched_file, "wb").close()  # before the look: what comes during it counts for the next
        groups = []  # of all stores: when they were mapped last, bytes, path
        for path in self._fetched_file.parent.glob("*/groups/*/*"):
            with suppress(FileNotFoundError):
                status = path.stat()
                groups.append((status.st_atime_ns, status.st_size, path))
        excess = sum(size for _, size, _ in groups) - (1 - _SCAN_AFTER) * budget
        for _, size, path in sorted(groups):
            if excess > 0 and path not in needed and _remove_unless_mapped(path):
                excess -= size
        self._fits = excess <= 0


def keep(path: Path, raw: bytes) -> None:
    """Write a file of the cache, which appears whole and replaces one of that name."""
    try:
        replace_bytes(path, raw, sync=False)
    except OSError as error:
        hint = "MLSM_CACHE sets another place for the cache of remote stores, MLSM_CACHE_GB a limit"
        raise OSError(error.errno, f"{error.strerror} ({hint})", str(path)) from None


def _open(path):
    """A cached group as an open file, locked for as long as it is mapped; None when it is missing or empty."""
    try:
        file = open(path, "rb", buffering=0)  # noqa: SIM115 (the caller closes it)
    except FileNotFoundError:
        return None
    with suppress(OSError):
        locks.acquire(file, shared=True, wait=True)
        os.utime(file.fileno(), ns=(time.time_ns(), os.fstat(file.fileno()).st_mtime_ns))  # readers watch the latter
    if os.fstat(file.fileno()).st_size:
        return file
    file.close()  # empty, as a power cut may leave it
    path.unlink(missing_ok=True)
    return None


def _remove_unless_mapped(path):
    """Remove a cached group unless some process maps it. Returns whether it is gone now."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        with suppress(OSError):  # no locks here; a mapped file stays readable without its name
            if not locks.acquire(file):
                return False
        path.unlink()
    return True
