"""A store behind a URL, read through a cache on this machine.

    store = Store.open("https://host/stores/lsp-...")      # s3://, gs://, hf://, memory:// as well
    store = Store.open(url, remote=Remote(cache_gb=50))

The cache of one store is a directory like the store itself, of what was asked for so far:

    <cache>/stores/<12 digits of the target>-<8 of the URL>/
        plans/<plan>.json, units/<unit>.json, tokenizer/, dictionary/
        groups/<shard>/<block>      a block's bytes of the shard, or __stats__: what readers map
        lock                        one process of the machine fetches at a time, many things at once; a process that
                                    keeps nothing for the time limit of an attempt is waited for no longer
    <cache>/stores/fetched          its size tells how much all processes fetched since one looked at the cache's size

Blocks are fetched, not shards: an epoch's order takes single blocks from everywhere, so with whole shards the first
batch would wait for gigabytes, and a cache smaller than the store would fetch each shard again and again. From a
server that knows no ranges the whole shard comes, and all its blocks are kept. Whatever is fetched is checked (its own
checksum, or length and SHA-256 of the record) before it gets its final name; a bad answer is never kept. The
tokenizer's files have no checksum in the store: their JSON must parse, what the server lists must all be there (where
it lists nothing, a vocabulary), no web page is taken for a file, and what loads them compares the whole with the
fingerprint in the target (copies.py).

target.json is fetched at every opening. A block that is mapped carries a shared lock, and the least recently used of
the others go when the cache has reached its limit; so the limit is passed by what readers hold. Nothing is fsynced:
readers check the hash of what they find. Left out: repeating what failed (source.py); writing to a remote store.
"""

import hashlib
import io
import os
import re
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import PurePosixPath

from common import locks
from common.durable import make_directories, publish_directory, replace_bytes
from common.errors import RefusedError, RemoteError, ShardError, StoreError, WholeError
from shards.checked_json import parse_json
from shards.manifest import TARGET_FIELDS, Plan, StoreFiles, UnitRecord, fingerprint, fits_checksum, read_json
from shards.source import Remote, RemoteFile, Source, copy_again

_PLAN = re.compile(r"([0-9a-f]{32})\.json")
_NAME = re.compile(r"\w[\w.-]*")  # what a server names becomes a path of the cache
_SMALL_FILES, _RANGES, _SHARDS = 128, 16, 2  # asked for in one go: what memory holds, and a dead server delays
_SMALL, _WIDEST, _MOST_ATOMS = 64 << 20, 4 * 8192, 1 << 30  # bytes: of atoms, of one atom, of atoms whatever k says
_SCAN_AFTER = 1 / 20  # of the limit is fetched between two looks at the cache's size
_GRAIN = 1 << 16  # bytes fetched that a byte of `fetched` stands for
_LOOK_AT_LOCK = 0.02  # seconds between two tries to get it
_UNLISTED = {  # where a server lists no directories
    "tokenizer": ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt", "vocab.json",
                  "merges.txt", "added_tokens.json"),
    "dictionary": ("atoms.npy", "dictionary.json", "center.npy"),
}  # fmt: skip
_ESSENTIAL = {  # sets of names, of which one must be there
    "tokenizer": ({"tokenizer.json"}, {"vocab.txt"}, {"vocab.json"}),
    "dictionary": ({"atoms.npy", "dictionary.json"},),
}
_PAGE = re.compile(rb"\s*<(!doctype|html|\?xml)", re.IGNORECASE)  # how some servers say that there is no file


class Answer:
    """What a URL answered, as the part of a path that the readers of small files use."""

    def __init__(self, url, raw):
        self._url, self._raw = url, raw
        self.stem, self.parent = PurePosixPath(url).stem, PurePosixPath(url).parent

    def __str__(self):
        return self._url

    def is_file(self):
        return self._raw is not None

    def read_text(self, encoding):
        return self._raw.decode(encoding)


class RemoteFiles(StoreFiles):
    """The files of a store behind a URL; fetched at need, then those of the cache.

    path    the URL; the other paths are the cache's
    Raises  StoreError when there is no store, RemoteError when it cannot be read
    """

    remote = True

    def __init__(self, url, options=None):
        self.options = options or Remote()
        self.source = Source(url, self.options)
        self.path = self.source.url
        target = self.target_file = self._fetch_target()
        directory = f"{self.target()['target'][:12]}-{fingerprint(self.path)[:8]}"
        super().__init__(self.options.directory.absolute() / "stores" / directory)
        self.path, self.target_file = self.source.url, target
        self.groups, self._lock_file = self.units.parent / "groups", self.units.parent / "lock"
        self._ranges = None  # whether the server knows them, once it has shown that
        self._fits = False  # whether the cache kept to its limit when this process looked last
        self._lock_seen = None, 0.0  # what the lock's holder kept last: its time, and when we saw that first
        for path in (self.units, self.plans, self.groups):
            make_directories(path)

    # -- small files ---------------------------------------------------------------------------------------

    def _fetch_target(self):
        url = f"{self.path}/target.json"
        found = [Answer(url, None)]

        def accept(_, raw):
            found[0] = Answer(url, raw)
            if raw and not raw.lstrip().startswith(b"{"):
                raise StoreError(
                    f"{url} is not a target.json: {self.path} answers with something else ({raw[:30]!r}...). "
                    "Is this the address of a store?"
                )
            values = read_json(found[0])
            if not isinstance(values, dict) or not fits_checksum(values, TARGET_FIELDS):
                raise ShardError("does not match its checksum")

        self.source.read([("target.json", None, None)], accept)
        return found[0]

    def record(self, unit_id):
        """The commit record of a unit, or None when there is none; a damaged one in the cache is fetched anew."""
        with suppress(ShardError):
            if record := super().record(unit_id):
                return record
        self._fetch_small([f"units/{unit_id}.json"], self._read_record)
        return super().record(unit_id)

    def missing_units(self, plan):
        kept = {path.stem for path in self.units.glob("*.json")}
        wanted = [f"units/{unit.id}.json" for unit in plan.units if unit.id not in kept]
        absent = self._fetch_small(wanted, self._read_record)
        return [unit for unit in plan.units if f"units/{unit.id}.json" in absent]

    def _read_record(self, answer):
        record = UnitRecord.read(answer)
        if record.target != self._target_id:
            raise ShardError(f"this is a record of target {record.target}")
        if not all(_NAME.fullmatch(name) for name in (record.file, *(group["name"] for group in record.groups))):
            raise ShardError("the record names files outside its own directory")

    def load_plan(self, plan_id):
        path = self.plans / f"{plan_id}.json"
        with suppress(ShardError, FileNotFoundError):
            return Plan.read(path)
        if self._fetch_small([f"plans/{plan_id}.json"], Plan.read):
            raise StoreError(f"{self.path} has no plan {plan_id}; it lists {', '.join(self.listed_plans()) or 'none'}")
        return Plan.read(path)

    def command(self, plan_id):
        """The same; the server need not have kept it."""
        with suppress(RemoteError):
            if not (self.plans / f"{plan_id}.yaml").is_file():
                self._fetch_small([f"plans/{plan_id}.yaml"], None)
        return super().command(plan_id)

    def listed_plans(self):
        """Ids of the plans that the server lists."""
        return sorted({match[1] for name in self.source.names("plans") if (match := _PLAN.fullmatch(name))})

    def newest_plan(self):
        """The newest plan all of whose units are there.

        Raises  StoreError when the server lists no plan, does not tell which is the newest, or none is finished
        """
        plans = [self.load_plan(plan) for plan in self._newest_first(self.listed_plans())]
        finished = next((plan for plan in plans if not self.missing_units(plan)), None)
        if finished is None:
            raise StoreError(
                f"{self.path} is unfinished: {len(self.missing_units(plans[0]))} of {len(plans[0].units)} units are "
                "missing. Copy the whole store there, its units before its plan."
            )
        return finished

    def _newest_first(self, listed):
        times = {plan: self.source.changed(f"plans/{plan}.json") for plan in listed} if len(listed) > 1 else {}
        if listed and None not in times.values() and len(set(times.values())) == len(times):
            return sorted(listed, key=times.get, reverse=True)
        if listed:
            problem = f"does not tell which of its plans is the newest: {', '.join(listed)}"
        else:
            problem = "lists no plans; over http that takes a server that lists directories"
        raise StoreError(f"{self.path} {problem}. Give the address of a plan: {self.path}/plans/<plan>.json")

    def copy_small_files(self, plan_id=None):
        """Fetch plans (all that are listed, or one) and the records that they name, sound or not, for a verification.

        Raises  StoreError when the server lists no plan
        """
        listed = [plan_id] if plan_id else self.listed_plans()
        if self._fetch_small([f"plans/{plan}.json" for plan in listed or self._newest_first(listed)], None):
            raise StoreError(f"{self.path} has no plan {plan_id}")
        for path in self.plans.glob("*.json"):
            with suppress(ShardError):
                self._fetch_small([f"units/{unit.id}.json" for unit in Plan.read(path).units], None)

    def _fetch_small(self, names, read):
        """Fetch small files into the cache.

        read     called with an Answer; raises ShardError when it is damaged. None keeps it as it is
        Returns  the set of names that are not there
        Raises   RemoteError when a plan's names would be paths elsewhere
        """
        if odd := [name for name in names if not all(_NAME.fullmatch(part) for part in name.split("/"))]:
            raise RemoteError(f"{self.path} is damaged: it names {odd[0]}, which is outside its own directories")

        def accept(request, raw):
            try:
                if read:
                    read(Answer(f"{self.path}/{request[0]}", raw))
            except (TypeError, KeyError, AttributeError) as error:  # JSON, but something else
                raise ShardError(f"not what its name says ({error})") from None
            _keep(self.units.parent / request[0], raw)

        absent = []
        for first in range(0, len(names), _SMALL_FILES):
            requests = [(name, None, None) for name in names[first : first + _SMALL_FILES]]
            absent += self.source.read(requests, accept)
        return {name for name, _, _ in absent}

    @property
    def tokenizer(self):
        """The cache's copy of the tokenizer, fetched when it is first asked for."""
        return self._directory("tokenizer")

    @property
    def dictionary(self):
        """The same for the dictionary; there is no such directory when the store has none."""
        return self._directory("dictionary")

    def _directory(self, name):
        """The cache's copy of a directory, which appears whole; its path also when the store has none.

        Raises  RemoteError when a listed or an essential file is not to be had
        """
        path = self.units.parent / name
        if _complete(name, (file.name for file in path.glob("*"))):
            return path
        listed = [entry for entry in self.source.names(name) if _NAME.fullmatch(entry)]
        if _complete(name, listed):
            found = {entry: self._fetch_part(f"{name}/{entry}") for entry in listed}
            lost = [entry for entry, raw in found.items() if raw is None]
        else:
            found = self._fetch_unlisted(name)
            complete = _complete(name, found) or not found
            lost = [] if complete else [entry for entry in _UNLISTED[name] if entry not in found]
        if lost:
            raise RemoteError(
                f"{self.path}/{name}: {lost[0]} is not there, but other files are. Run the same command again; if "
                f"that does not help, {copy_again()}"
            )
        if found:
            publish_directory(path, lambda directory: _fill(directory, found), replace=path.is_dir())
        return path

    def _fetch_unlisted(self, name):
        """What there is of the files that such a directory may hold: names to bytes."""
        found = {}
        for entry in _UNLISTED[name]:
            if entry.endswith(".txt") and "tokenizer.json" in found:
                continue  # holds the vocabulary too, and whether a text is one cannot be told
            with suppress(RefusedError):  # how some buckets answer where there is no file
                raw = self._fetch_part(f"{name}/{entry}")
                if raw is not None and not _PAGE.match(raw):
                    found[entry] = raw
        return found

    def _fetch_part(self, name):
        """The bytes of a file of such a directory, or a web page instead; None when it is not there."""
        found = []

        def accept(_, raw):
            if name.endswith(".json") and not _PAGE.match(raw):
                parse_json(raw, name)
            found.append(raw)

        whole = max(_SMALL, min(_MOST_ATOMS, self.target()["k"] * _WIDEST)) if name.endswith(".npy") else _SMALL
        self.source.read([(name, None, None)], accept, whole=whole)
        return found[0] if found else None

    # -- shards --------------------------------------------------------------------------------------------

    def repair_hint(self):
        return f"{self.path} is damaged: {copy_again()}"

    def open_shard(self, record):
        """A whole shard as an open file that reads the server, not the cache."""
        return RemoteFile(self.source, f"units/{record.file}", record.bytes)

    def open_group(self, unit_id, file, name):
        """The cached bytes of one member group of a shard as an open file, fetched if it is not there.

        Raises  RemoteError when it cannot be fetched
        """
        path = self._group_file(file, name)
        for _ in range(self.options.attempts):
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
            record = self.record(unit_id)
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
            absent = self.source.read(list(expected), accept, parts_only=len(expected) > _SHARDS, whole=longest)
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
        _keep(path, raw)
        if self.options.budget is not None:
            with open(self._fetched_file, "ab") as file:
                file.write(bytes(-(-len(raw) // _GRAIN)))

    def _changed(self, unit_id):
        self.record_file(unit_id).unlink(missing_ok=True)
        return RemoteError(
            f"{self.path}: the shard of unit {unit_id} is not there, or no longer the one that the record in the cache "
            "names. That record is forgotten: run the same command again; if the shard is still missing then, "
            f"{copy_again()}"
        )

    def _group_file(self, file, name):
        return self.groups / file.removesuffix(".tar") / name

    @property
    def _fetched_file(self):
        return self.options.directory.absolute() / "stores" / "fetched"

    @contextmanager
    def _alone(self):
        """Let the other processes and threads of this machine that want to fetch wait: they may want the same.

        Gives a function to call whenever something was kept; whoever waits takes a holder that does not for dead.
        """
        with open(self._lock_file, "a") as file:
            held = self._locked(file)
            try:
                yield partial(os.utime, file.fileno()) if held else _do_nothing
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
            if time.monotonic() - self._lock_seen[1] > self.options.timeout:
                return False
            time.sleep(_LOOK_AT_LOCK)

    def _make_room(self, needed):
        """Remove blocks that no process maps, the least recently used first, until the cache keeps to its limit."""
        budget = self.options.budget
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


def gopen(url, mode="rb", bufsize=-1, **_):
    """A shard as an open file for plain WebDataset, checked against its record and the hash in its name; in memory.

    from webdataset.gopen import gopen_schemes; gopen_schemes["s3"] = gopen lets WebDataset(store.urls()) read s3:// so.
    Raises  RemoteError when it cannot be read, FileNotFoundError when there is none
    """
    parent, _, name = url.rpartition("/")
    unit, _, digits = name.removesuffix(".tar").rpartition("-")
    source, found = Source(parent, Remote()), []
    lengths = []
    source.read([(f"{unit}.json", None, None)], lambda request, raw: lengths.append(_length(request[0], raw, name)))

    def accept(_, raw):
        if not hashlib.sha256(raw).hexdigest().startswith(digits):
            raise ShardError(f"its {len(raw):,} bytes do not match the hash in its name")
        found.append(raw)

    if not lengths or source.read([(name, None, None)], accept, whole=lengths[0]):
        raise FileNotFoundError(f"{source.url}/{name}, or its record {unit}.json")
    return io.BytesIO(found[0])


def _length(name, raw, shard):
    """Bytes of a shard, by its record."""
    record = UnitRecord.read(Answer(PurePosixPath("units", name), raw))
    if record.file != shard:
        raise ShardError(f"the record names the shard {record.file}")
    return record.bytes


def _keep(path, raw):
    """Write a file that appears whole, and replaces one of that name."""
    try:
        replace_bytes(path, raw, sync=False)
    except OSError as error:
        hint = "MLSM_CACHE sets another place for the cache of remote stores, MLSM_CACHE_GB a limit"
        raise OSError(error.errno, f"{error.strerror} ({hint})", str(path)) from None


def _complete(name, entries):
    """Whether these are enough of a tokenizer's or dictionary's files to use it."""
    return any(essential <= set(entries) for essential in _ESSENTIAL[name])


def _do_nothing():
    pass


def _fill(directory, contents):
    for name, raw in contents.items():
        (directory / name).write_bytes(raw)


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
