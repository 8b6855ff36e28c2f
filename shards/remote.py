"""A store behind a URL: its small files, fetched at need into a cache on this machine.

    store = Store.open("https://host/stores/lsp-...")      # s3://, gs://, hf://, memory:// as well
    store = Store.open(url, remote=Remote(cache_gb=50))

The cache of one store is a directory like the store itself, of what was asked for so far:

    <cache>/stores/<12 digits of the target>-<8 of the URL>/
        plans/<plan>.json, units/<unit>.json, tokenizer/, dictionary/
        groups/, lock               the blocks that were fetched: cache.py

target.json is fetched whenever the store is opened. Plans and records carry checksums, and a bad answer is never kept.
The tokenizer's files have no checksum in the store. Their JSON must parse, all that the server lists must be there (or
a vocabulary, where it lists nothing), and no web page is taken for a file; before they are used, all of them together
are compared with the fingerprint in the target (copies.py). Nothing is fsynced, because readers check what they find.
Left out: blocks (cache.py), repeating what failed (source.py), writing to a remote store.
"""

import errno
import hashlib
import io
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from common import disk
from common.durable import make_directories, publish_directory
from common.errors import RefusedError, RemoteError, RequestError, ShardError, StoreError
from shards.blocks import BlockStore, BlockTable
from shards.cache import CachedBlocks, GroupCache, keep
from shards.checked_json import parse_json
from shards.manifest import (
    TARGET_FIELDS,
    Plan,
    PlannedUnit,
    StoreFiles,
    UnitRecord,
    describe_no_store,
    fingerprint,
    fits_checksum,
    read_json,
)
from shards.source import Remote, RemoteFile, Request, Source, copy_again

_PLAN = re.compile(r"([0-9a-f]{32})\.json")
_NAME = re.compile(r"\w[\w.-]*")  # what a server names becomes a path of the cache
_SMALL_FILES = 128  # asked for in one go: what memory holds, and a dead server delays
_SMALL, _WIDEST, _MOST_ATOMS = 64 << 20, 4 * 8192, 1 << 30  # bytes: of atoms, of one atom, of atoms whatever k says
_UNLISTED = {  # where a server lists no directories
    "tokenizer": (
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "vocab.txt",
        "vocab.json",
        "merges.txt",
        "added_tokens.json",
    ),
    "dictionary": ("atoms.npy", "dictionary.json", "center.npy"),
    "codebook": ("centroids.npy",),
}
_ESSENTIAL = {  # sets of names, of which one must be there
    "tokenizer": ({"tokenizer.json"}, {"vocab.txt"}, {"vocab.json"}),
    "dictionary": ({"atoms.npy", "dictionary.json"},),
    "codebook": ({"centroids.npy"},),
}
_PAGE = re.compile(rb"\s*<(!doctype|html|\?xml)", re.IGNORECASE)  # how some servers say that there is no file


class Answer:
    """What a URL answered, with those methods of a path that the readers of small files use.

    raw  the bytes; None where there is no such file
    """

    def __init__(self, url: str | PurePosixPath, raw: bytes | None):
        self._url, self._raw = str(url), raw
        self.stem, self.parent = PurePosixPath(url).stem, PurePosixPath(url).parent

    def __str__(self):
        return self._url

    def is_file(self) -> bool:
        return self._raw is not None

    def is_symlink(self) -> bool:
        return False

    def read_text(self, encoding: str) -> str:
        if self._raw is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such file", self._url)
        return self._raw.decode(encoding)


class RemoteFiles(StoreFiles):
    """The files of a store behind a URL; fetched at need, then those of the cache.

    path    the URL; the other paths are the cache's
    Raises  StoreError when there is no store, RemoteError when it cannot be read
    """

    def __init__(self, url: str, options: Remote | None = None):
        self.options = options or Remote()
        self.source = Source(url, self.options)
        self.path = self.source.url
        target = self.target_file = self._fetch_target()
        directory = f"{self.target()['target'][:12]}-{fingerprint(self.path)[:8]}"
        super().__init__(self.options.directory.absolute() / "stores" / directory)
        self.path, self.target_file = self.source.url, target
        disk.follow_no_links_below(self.options.directory)  # which may lie in an --output, or behind links in it
        self.cache = GroupCache(self, self.units.parent)
        for path in (self.units, self.plans, self.cache.groups):
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

    def record(self, unit_id: str) -> UnitRecord | None:
        """The commit record of a unit, or None when there is none; a damaged one in the cache is fetched again."""
        with suppress(ShardError):
            if record := super().record(unit_id):
                return record
        self._fetch_small([f"units/{unit_id}.json"], self._read_record)
        return super().record(unit_id)

    def missing_units(self, plan: Plan) -> list[PlannedUnit]:
        kept = {path.stem for path in self.units.glob("*.json")}
        wanted = [f"units/{unit.id}.json" for unit in plan.units if unit.id not in kept]
        absent = self._fetch_small(wanted, self._read_record)
        return [unit for unit in plan.units if f"units/{unit.id}.json" in absent]

    def _read_record(self, answer):
        record = UnitRecord.read(answer)
        if record.target != self._of_target[0]:
            raise ShardError(f"this is a record of target {record.target}")
        if not all(_NAME.fullmatch(name) for name in (record.file, *(group["name"] for group in record.groups))):
            raise ShardError("the record names files outside its own directory")

    def load_plan(self, plan_id: str) -> Plan:
        path = self.plans / f"{plan_id}.json"
        with suppress(ShardError, FileNotFoundError):
            return Plan.read(path)
        if self._fetch_small([f"plans/{plan_id}.json"], Plan.read):
            raise StoreError(f"{self.path} has no plan {plan_id}; it lists {', '.join(self.listed_plans()) or 'none'}")
        return Plan.read(path)

    def command(self, plan_id: str) -> dict:
        """As for a directory; {} also when the server cannot be asked, for nothing depends on it."""
        with suppress(RemoteError):
            if not (self.plans / f"{plan_id}.yaml").is_file():
                self._fetch_small([f"plans/{plan_id}.yaml"], None)
        return super().command(plan_id)

    def listed_plans(self) -> list[str]:
        """Ids of the plans that the server lists."""
        return sorted({match[1] for name in self.source.names("plans") if (match := _PLAN.fullmatch(name))})

    def newest_plan(self) -> Plan:
        """The newest plan all of whose units are there.

        Raises  StoreError when the server lists no plan, does not tell which is the newest, or none is finished
        """
        plans = [self.load_plan(plan) for plan in self._newest_first(self.listed_plans())]
        for plan in plans:
            if not self.missing_units(plan):
                return plan
        self.check_finished(plans[0])
        return plans[0]  # its last unit arrived after the loop had looked for it

    def _newest_first(self, listed):
        if len(listed) == 1:
            return listed
        times: dict[str, Any] = {plan: self.source.changed(f"plans/{plan}.json") for plan in listed}
        if listed and None not in times.values() and len(set(times.values())) == len(times):
            return sorted(listed, key=times.__getitem__, reverse=True)
        if listed:
            problem = f"does not tell which of its plans is the newest: {', '.join(listed)}"
        else:
            problem = "lists no plans; over http that takes a server that lists directories"
        raise StoreError(f"{self.path} {problem}. Give the address of a plan: {self.path}/plans/<plan>.json")

    def copy_small_files(self, plan_id: str | None = None) -> None:
        """Fetch plans (all that are listed, or one) and the records that they name, sound or not, for a verification.

        Raises  StoreError when the server lists no plan
        """
        listed = [plan_id] if plan_id else self.listed_plans()
        if self._fetch_small([f"plans/{plan}.json" for plan in listed or self._newest_first(listed)], None):
            raise StoreError(f"{self.path} has no plan {plan_id}")
        for path in self.plans.glob("*.json"):
            with suppress(ShardError):
                self._fetch_small([f"units/{unit.id}.json" for unit in Plan.read(path).units], None)

    def _fetch_small(self, names: list[str], read: Callable[[Answer], object] | None) -> set[str]:
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
            keep(self.units.parent / request[0], raw)

        absent: list[Request] = []
        for first in range(0, len(names), _SMALL_FILES):
            requests: list[Request] = [(name, None, None) for name in names[first : first + _SMALL_FILES]]
            absent += self.source.read(requests, accept)
        return {name for name, _, _ in absent}

    @property
    def tokenizer(self) -> Path:
        """The cache's copy of the tokenizer, fetched when it is first asked for."""
        return self._directory("tokenizer")

    @property
    def dictionary(self) -> Path:
        """The same for the dictionary; there is no such directory when the store has none."""
        return self._directory("dictionary")

    @property
    def codebook(self) -> Path:
        """The same for the codebook of product-quantised hidden states."""
        return self._directory("codebook")

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
                continue  # it would hold the same vocabulary, and whether a text is a vocabulary cannot be checked
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

    # -- what differs from a store of a directory ----------------------------------------------------------

    def no_target_error(self) -> RequestError:
        return RequestError(describe_no_store(self.path, "it has no target.json"))

    def is_encoded_here(self) -> bool:
        return False

    def repair_hint(self) -> str:
        return f"{self.path} is damaged: {copy_again()}"

    def restore_hint(self) -> str:
        return (
            f"Remove its copy in the cache ({self.units.parent}) and try again; if that does not help, copy the store "
            "there again."
        )

    def finish_hint(self) -> str:
        return "Copy the whole store there, its units before its plan."

    def open_blocks(self, table: BlockTable) -> BlockStore:
        """A BlockStore on the cache."""
        return CachedBlocks(self.cache, table)

    def open_shard(self, record: UnitRecord) -> RemoteFile:
        """A whole shard as an open file that reads the server, not the cache."""
        return RemoteFile(self.source, f"units/{record.file}", record.bytes)


def gopen(url: str, mode: str = "rb", bufsize: int = -1, **options: object) -> io.BytesIO:
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


def _complete(name, entries):
    """Whether these are enough of a tokenizer's or dictionary's files to use it."""
    return any(essential <= set(entries) for essential in _ESSENTIAL[name])


def _fill(directory, contents):
    for name, raw in contents.items():
        (directory / name).write_bytes(raw)
