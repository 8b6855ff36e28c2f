"""The cache of a remote store's blocks on this machine, shared by all processes that read the store.

    <cache>/stores/<12 digits of the target>-<8 of the URL>/
        groups/<shard>/<block>      a block's bytes of the shard, or __stats__: what readers map
        lock                        one process of the machine fetches at a time, many things at once; a process that
                                    keeps nothing for the time limit of an attempt is waited for no longer
    <cache>/stores/fetched          its size tells how much all processes fetched since one looked at the cache's size

Blocks are fetched, not shards: an epoch's order takes single blocks from everywhere, so with whole shards the first
batch would wait for gigabytes, and a cache smaller than the store would fetch each shard again and again. From a
server that knows no ranges the whole shard comes, and all its blocks are kept. Whatever is fetched is compared with the
length and SHA-256 of the record before it gets its final name; a bad answer is never kept.

A block that is mapped carries a shared lock, and the least recently used of the others go when the cache has reached
its limit; so the limit is passed by what readers hold. Nothing is fsynced: readers check the hash of what they find.
Left out: small files (remote.py), repeating what failed (source.py).
"""

import hashlib
import os
import time
from contextlib import contextmanager, suppress
from functools import partial

import numpy as np

from common import locks
from common.durable import replace_bytes
from common.errors import RemoteError, ShardError, WholeError
from shards.blocks import Mapping
from shards.source import copy_again

_RANGES, _SHARDS = 16, 2  # asked for in one go: what memory holds, and a dead server delays
_SCAN_AFTER = 1 / 20  # of the limit is fetched between two looks at the cache's size
_GRAIN = 1 << 16  # bytes fetched that a byte of `fetched` stands for
_LOOK_AT_LOCK = 0.02  # seconds between two tries to get it


class CachedBlocks:
    """A BlockStore on the cache of a store behind a URL: the blocks of a batch are fetched together.

    cache  GroupCache
    table  BlockTable
    """

    def __init__(self, cache, table):
        self._cache, self._table = cache, table

    def prepare(self, blocks):
        blocks = np.unique(blocks)
        numbered = zip(self._table.unit[blocks].tolist(), blocks.tolist(), strict=True)
        self._cache.fetch_groups([self._name(unit, self._table.group(number)[0]) for unit, number in numbered])

    def prepare_sums(self, units):
        self._cache.fetch_groups([self._name(unit, "__stats__") for unit in units])

    def map(self, unit, group):
        with self._cache.open_group(*self._name(unit, group[0])) as file:
            mapping = Mapping(file, file.name)
        return mapping, mapping.raw

    def discard(self, unit, group):
        return self._cache.discard_group(self._table.files[unit], group[0])

    def _name(self, unit, group):
        return self._table.ids[unit], self._table.files[unit], group


class GroupCache:
    """The member groups of one remote store that were fetched to this machine, and the way to the others.

    files      RemoteFiles, whose records say what a group must be
    directory  the store's in the cache
    """

    def __init__(self, files, directory):
        self._files, self.groups, self._lock_file = files, directory / "groups", directory / "lock"
        self._ranges = None  # whether the server knows them, once it has shown that
        self._fits = False  # whether the cache kept to its limit when this process looked last
        self._lock_seen = None, 0.0  # what the lock's holder kept last: its time, and when we saw that first

    def open_group(self, unit_id, file, name):
        """The cached bytes of one member group of a shard as an open file, fetched if it is not there.

        Raises  RemoteError when it cannot be fetched
        """
        path = self._group_file(file, name)
        for _ in range(self._files.options.attempts):
            if opened := _opened(path):
                return opened
            self.fetch_groups([(unit_id, file, name)])
        raise RemoteError(f"{path} is removed again and again. Give a larger MLSM_CACHE_GB.")

    def discard_group(self, file, name):
        """Take a cached group away that is found damaged; what to do then, in words for an error."""
        path = self._group_file(file, name)
        path.unlink(missing_ok=True)
        return (
            f"Its copy in the cache ({path}) has changed since it was fetched and is removed: run the same command "
            "again, which fetches it anew. If that happens often, the disk is failing: set MLSM_CACHE to another."
        )

    def fetch_groups(self, wanted):
        """Fetch the groups that the cache lacks: (unit id, shard's name, group's name), many at once."""
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
        """Fetch the first of these groups; none when a server that knew ranges sends whole shards for so many."""
        if self._ranges is False:
            wanted = list({entry[:2]: entry for entry in wanted}.values())[:_SHARDS]  # one of a shard brings all
        else:
            wanted = wanted[: _RANGES if self._ranges else 1]
        expected = {}
        for unit_id, file, name in wanted:
            record = self._files.record(unit_id)
            group = next((group for group in record.groups if group["name"] == name), None) if record else None
            if group is None or record.file != file:
                raise self._changed(unit_id)
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

        Gives a function to call whenever something was kept; whoever waits takes a holder that does not for dead.
        """
        with open(self._lock_file, "a") as file:
            held = self._locked(file)
            try:
                yield partial(os.utime, file.fileno()) if held else lambda: None
            finally:
                with suppress(OSError):
                    locks.release(file)  # now, not when a forked worker has closed it too

    def _locked(self, file):
        """Wait for the lock. False, and two may fetch the same, both rightly: its holder has kept nothing for the time
        limit of an attempt (stopped, or its server stalls), or the file system has no locks.
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
        if budget is None or (self._fits and self._fetched_by_all() < _SCAN_AFTER * budget):
            return
        open(self._fetched_file, "wb").close()  # before the look: what comes during it counts for the next
        groups = sorted(_cached_groups(self._fetched_file.parent))
        excess = sum(size for _, size, _ in groups) - (1 - _SCAN_AFTER) * budget
        for _, size, path in groups:
            if excess > 0 and path not in needed and _removed_unless_mapped(path):
                excess -= size
        self._fits = excess <= 0

    def _fetched_by_all(self):
        """Bytes that all processes fetched since one of them looked at the cache's size, each block rounded up."""
        with suppress(FileNotFoundError):
            return self._fetched_file.stat().st_size * _GRAIN
        return 0


def keep(path, raw):
    """Write a file that appears whole, and replaces one of that name."""
    try:
        replace_bytes(path, raw, sync=False)
    except OSError as error:
        hint = "MLSM_CACHE sets another place for the cache of remote stores, MLSM_CACHE_GB a limit"
        raise OSError(error.errno, f"{error.strerror} ({hint})", str(path)) from None


def _cached_groups(stores):
    """Triples (when it was mapped last, bytes, path) of all cached groups of all stores."""
    for path in stores.glob("*/groups/*/*"):
        with suppress(FileNotFoundError):
            stat = path.stat()
            yield stat.st_atime_ns, stat.st_size, path


def _opened(path):
    """A cached group as an open file, with the lock that its mapping keeps; None when it is missing or empty."""
    try:
        file = open(path, "rb", buffering=0)  # noqa: SIM115 (the caller closes it)
    except FileNotFoundError:
        return None
    with suppress(OSError):
        locks.acquire(file, shared=True, wait=True)
        os.utime(file.fileno(), ns=(time.time_ns(), os.fstat(file.fileno()).st_mtime_ns))  # readers watch the latter
    if os.fstat(file.fileno()).st_size:
        return file
    file.close()  # a power cut may leave such
    path.unlink(missing_ok=True)
    return None


def _removed_unless_mapped(path):
    """Whether a cached group was removed: not when some process maps it. One that is gone counts as removed."""
    with suppress(FileNotFoundError), open(path, "rb") as file:
        with suppress(OSError):  # no locks here; a mapped file stays readable without its name
            if not locks.acquire(file):
                return False
        path.unlink()
    return True
