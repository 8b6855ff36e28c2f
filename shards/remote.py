"""A store behind a URL: its files are fetched into a cache on this machine as needed. The cache is a store itself.

    store = Store.open("https://host/stores/lsp-...")      # s3://, gs://, hf://, memory:// as well
    store = Store.open(url, remote=Remote(cache_gb=50))

    <cache>/stores/<12 digits of the target>-<8 of the URL>/
        plans/<plan>.json, units/<unit>.json, units/<unit>-<hash>.tar, tokenizer/, dictionary/
        lock                        only one process of the machine fetches shards at a time

fsspec handles the protocols: http and https with aiohttp; s3, gs, hf and others with the packages that it names if they
are not installed. Credentials and endpoints are set in fsspec's configuration. A file is downloaded under a temporary
name, checked and renamed: small files are checked by their checksums, a shard by length and SHA-256 from its record. A
download must not be longer than the record says, must start within a time limit and keep up a minimum speed. Failed
downloads are retried a few times. target.json is fetched whenever the store is opened. The files of tokenizer,
dictionary and codebook have no checksum of their own: before use, all of them together are compared with the
fingerprint in the target (copies.py). Nothing is fsynced, because readers check what they find.

User and password in a URL are used and never shown. `RemoteFiles.path` is the URL without them; this process adds them
again when that URL is used. Not supported: writing to a remote store.
"""

import errno
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from io import FileIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote, unquote

import fsspec

from mlsm.common import disk, locks
from mlsm.common.durable import make_directories, publish_directory
from mlsm.common.errors import (
    AnswerError,
    BlockError,
    MlsmError,
    PlaceError,
    RefusedError,
    RemoteError,
    RequestError,
    ShardError,
    StoreError,
    WriteError,
    WrongAnswerError,
)
from mlsm.common.invocation import program
from mlsm.common.json_checks import parse_json
from mlsm.common.machine import cache_directory
from mlsm.common.text import redacted, secrets_of, without_credentials
from shards.copies import CODEBOOK_FILES, DICTIONARY_FILES, TOKENIZER_FILES, write_files
from shards.files import StoreFiles, describe_no_store, read_command
from shards.manifest import Plan, PlannedUnit, UnitRecord, fingerprint, parse_target

TEMPORARY = "mlsm-fetch-"  # the beginning of the names of temporary directories outside of the cache
_AT_ONCE = 16  # small files to fetch in parallel
# most bytes of a small file, a plan (some 300 for each file of the corpus), one atom, all atoms
_SMALL, _LARGEST_PLAN, _WIDEST, _MOST_ATOMS = 64 << 20, 1 << 30, 4 * 8192, 1 << 30
_PLAN = re.compile(r"([0-9a-f]{32})\.json")
_CACHED_STORE = re.compile(r"[0-9a-f]{12}-[0-9a-f]{8}")  # a store's directory in the cache
_NAME = re.compile(r"\w[\w.-]*")  # names from a server become paths in the cache
_PAGE = re.compile(rb"\s*<(!doctype|html|\?xml)", re.IGNORECASE)  # some servers send a page if there is no file
_LINK = re.compile(r"""href=["']?[^"'?#>\s]*?([^"'?#>\s/]+)["'?#>\s]""", re.IGNORECASE)
_SPACE_IN_USER = re.compile(r"://(?:[^/?#]*|[^/?#]*:(?!\d*(?:[/?#]|$)).*)\s.*@", re.DOTALL)
_TAKES_NO_PASSWORD = re.compile(r"(?:^|::)(s3a?|gs|gcs|hf|az|abfss?|adl)://")
_UNLISTED = {"tokenizer": TOKENIZER_FILES, "dictionary": DICTIONARY_FILES, "codebook": CODEBOOK_FILES}
_ESSENTIAL = {  # sets of names; one of each must exist
    "tokenizer": ({"tokenizer.json"}, {"vocab.txt"}, {"vocab.json"}),
    "dictionary": ({"atoms.npy", "dictionary.json"},),
    "codebook": (set(CODEBOOK_FILES),),
}
_ABSENT = {404, 410}  # a server's answers if there is no file
_MAY_PASS = {408, 425, 429}  # client errors worth a retry: time-outs, too many requests
_OF_THE_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
_LOOK_AT_LOCK = 0.02  # seconds between two attempts to get the lock
_origins: dict[str, str] = {}  # scheme and host without credentials -> the same with them


@dataclass(frozen=True)
class Remote:
    """How remote stores are read."""

    cache: Path | None = None
    """Directory of downloaded files; unset: $MLSM_CACHE, else mlsm in the user's cache."""
    cache_gb: float | None = None
    """Gigabytes of shards that the cache keeps; unset: $MLSM_CACHE_GB, else no limit."""
    attempts: int = 5
    """How often a request is tried."""
    delay: float = 0.5
    """Seconds before the second attempt; each further pause is twice as long."""
    timeout: float = 30.0
    """An attempt fails after so many seconds without a connection or a byte."""
    rate: float = 64e3
    """Minimum bytes per second of a download, after its first `timeout` seconds."""

    @property
    def directory(self) -> Path:
        """Where the cache is."""
        return Path(self.cache).expanduser() if self.cache else cache_directory()

    @property
    def budget(self) -> int | None:
        """Bytes of shards that the cache may hold; None: any number. ValueError when MLSM_CACHE_GB is no size."""
        name, given = "cache_gb", str(self.cache_gb)
        if self.cache_gb is None:
            name, given = "MLSM_CACHE_GB", os.environ.get("MLSM_CACHE_GB") or "inf"
        try:
            limit = float(given)
        except ValueError:
            limit = math.nan
        if not limit >= 0:
            raise ValueError(f"{name} must be a number of gigabytes, at least 0, found {given!r}")
        return None if limit == math.inf else int(limit * 1e9)


class Server:
    """The files below one URL. Downloads are whole, checked by the caller, and retried after temporary errors."""

    def __init__(self, url: str, options: Remote):
        _refuse_what_would_be_shown(url)
        self.url, self._address = _without_and_with_credentials(url.rstrip("/"))
        self.options = options
        self._is_stopped = False
        if re.match("(https?|hf)://", self.url) and "?" in self.url:
            advice = "A user and password may be in the address or in ~/.netrc."
            raise StoreError(
                f"{redacted(self.url)} has a query, but a store's files are asked for without one. Pass the address "
                f"without it. {advice if self._is_http else f'Credentials come from {_places(self.url)}.'}"
            )
        with self._usable():  # refuses an unknown protocol at once
            fsspec.get_filesystem_class(re.split("::|://", self.url)[0])

    def fetch(
        self,
        name: str,
        place: Path,
        most: int,
        check: Callable[[Path], object],
        alive: Callable[[], object] = lambda: None,
    ) -> bool:
        """Download a file to a path, where it appears whole and checked or not at all. Returns whether the file exists.

        most    the most bytes that the file may have
        check   called with the path of the downloaded file; raises ShardError if it is not as expected
        alive   called whenever a part has arrived
        Raises  RemoteError if an error lasts, WriteError if the file cannot be written here, and the errors of `check`
        """

        def arrived():
            self._refuse_if_stopped()
            alive()

        def attempt(filesystem, path):
            limits, temporary = _Limits(most, self.options, arrived), disk.temporary_name(place.parent, place.name)
            try:
                with _writing(place):
                    make_directories(place.parent)  # the cache may be removed at any time
                    disk.create(temporary).close()
                with _writing(place, _OF_THE_DISK):  # others may be of the network
                    filesystem.get_file(path, str(temporary), callback=limits, **self._time(filesystem, most))
                if _is_compressed(temporary):
                    raise RemoteError(
                        f"{self.url}/{name}: the server sends it compressed (Content-Encoding: gzip). Store it "
                        "there uncompressed, without that header, as files are read byte for byte."
                    )
                check(temporary)
                with _writing(place):
                    disk.rename(temporary, place)
            except FileNotFoundError:
                if place.parent.is_dir():
                    raise
                raise _removed(place) from None
            finally:
                disk.discard(temporary)
            return True

        return self._repeat(name, attempt) or False

    def fetch_all(self, names: Sequence[str], directory: Path, check: Callable[[str, Path], object]) -> list[str]:
        """Download small files below a directory. Returns the names of missing files; raises as `fetch`."""
        if odd := [name for name in names if not all(_NAME.fullmatch(part) for part in name.split("/"))]:
            raise RemoteError(f"{self.url} is damaged: it names {odd[0]}, which is outside its own directories")

        server = copy(self)  # to stop these requests and no others

        def fetch(name):
            is_plan = name.startswith("plans/") and name.endswith(".json")
            most = server._plan_limit(name) if is_plan else _SMALL
            return server.fetch(name, directory / name, most, lambda path: check(f"{self.url}/{name}", path))

        if len(names) < 2:
            return [name for name in names if not fetch(name)]
        pool = ThreadPoolExecutor(min(_AT_ONCE, len(names)))
        try:
            return [name for name, there in zip(names, pool.map(fetch, names), strict=True) if not there]
        finally:
            server.stop()  # after an error or Ctrl-C the threads end soon
            pool.shutdown(cancel_futures=True)

    def stop(self) -> None:
        """End the requests of other threads, at the next part that arrives or before the next attempt, by an error."""
        self._is_stopped = True

    def _refuse_if_stopped(self):
        if self._is_stopped:
            raise StoreError(f"{redacted(self.url)}: the request was stopped.")

    def read(self, name: str, most: int, check: Callable[[bytes], object] = lambda raw: None) -> bytes | None:
        """The bytes of a file; None if there is none. Raises the errors of `fetch`."""
        with TemporaryDirectory(prefix=TEMPORARY) as directory:
            place = Path(directory) / "file"
            return place.read_bytes() if self.fetch(name, place, most, lambda path: check(path.read_bytes())) else None

    def names(self, directory: str) -> list[str]:
        """Names of the files in a directory; empty if it does not exist, cannot be listed, or is not accessible."""
        with suppress(RefusedError):
            if self._is_http:  # not fsspec's listing, which reads a page of any size
                page = self.read(f"{directory}/", _SMALL) or b""
                return list(dict.fromkeys(_LINK.findall(page.decode(errors="replace"))))
            return [path.rpartition("/")[2] for path in self._repeat(f"{directory}/", _list) or ()]
        return []

    def _plan_limit(self, name):
        """The most bytes to fetch of a plan: those that it has, if they may be right."""
        with suppress(FileNotFoundError):
            return min(max(self.size(name) or 0, _SMALL), _LARGEST_PLAN)
        return _SMALL

    def size(self, name: str) -> int | None:
        """How many bytes a file has; None if the protocol does not tell. Raises FileNotFoundError."""
        information = self._repeat(name, self._information)
        if information is None:
            raise FileNotFoundError(f"{self.url}/{name}")
        return information.get("size")

    def changed(self, name: str) -> datetime | None:
        """When a file was written; None if the protocol does not say."""
        return self._repeat(name, self._time_of_change)

    def _information(self, filesystem, path):
        """fsspec's `info`. Over http that calls every failure a missing file; here only the server can say so."""
        try:
            return filesystem.info(path, **self._time(filesystem))
        except FileNotFoundError as error:
            cause = error.__cause__
            if self._is_http and cause is not None and getattr(cause, "status", None) not in _ABSENT:
                raise cause from None
            raise

    def _time_of_change(self, filesystem, path):
        try:
            return filesystem.modified(path)
        except NotImplementedError:  # http
            date = self._information(filesystem, path).get("Last-Modified")
            return date and parsedate_to_datetime(date)

    @property
    def _is_http(self):
        return re.match("https?://", self.url) is not None

    def _open(self):
        """The file system of this process and thread, and the store's root in it."""
        options: dict[str, Any] = {}
        with self._usable():
            if self._is_http:
                from aiohttp import ClientTimeout

                each = ClientTimeout(None, sock_connect=self.options.timeout, sock_read=self.options.timeout)
                options = {"timeout": each, "auto_decompress": False, "trust_env": True}
                options |= {"headers": {"Accept-Encoding": "identity"}}  # compressed answers could have any size
                options = {"client_kwargs": options}
            return fsspec.core.url_to_fs(self._address, **options)

    @contextmanager
    def _usable(self):
        """Raise StoreError if this machine cannot use the protocol or the address."""
        try:
            yield
        except ImportError as error:
            need = (
                'http and https need aiohttp. Run:  pip install "mlsm-pretrain[remote]"'
                if self._is_http
                else self._hide(error)
            )
            raise StoreError(f"{redacted(self.url)} cannot be read: {need}") from None
        except ValueError as error:
            raise StoreError(f"{redacted(self.url)} cannot be read: {self._hide(error)}") from None

    def _time(self, filesystem, most=_SMALL):
        """The time limit of a whole call, as options for it, for clients that can be interrupted.

        most  size limit in bytes of the file; small files may be shorter
        """
        limit = 4 * self.options.timeout + (most / self.options.rate if most != _SMALL else 0)
        return {"timeout": limit} if filesystem.async_impl else {}

    def _repeat(self, name, call):
        """The result of call(file system, path) for one file, tried several times; None if there is no such file."""
        began, fault = time.monotonic(), None
        for number in range(self.options.attempts):
            if number:
                time.sleep(self.options.delay * 2 ** (number - 1))
            self._refuse_if_stopped()
            try:
                filesystem, root = self._open()  # some protocols connect here
                return call(filesystem, f"{root}/{name}")
            except FileNotFoundError:
                return None
            except (StoreError, PlaceError):
                raise
            except Exception as error:
                if disk.is_of_the_machine(error):
                    raise
                fault = error.with_traceback(None)
                if not _may_pass(error):
                    raise RefusedError(self._describe(name, fault, number + 1, began)) from None
        kind = WrongAnswerError if isinstance(fault, ShardError | AnswerError) else RemoteError
        raise kind(self._describe(name, fault, self.options.attempts, began))

    def _describe(self, name, fault, attempts, began):
        """The error message for a failed request."""
        times = f"asked {attempts} times in {time.monotonic() - began:.1f} s" if attempts > 1 else "asked once"
        if isinstance(fault, ShardError):
            problem = str(fault).removeprefix(f"{self.url}/{name}").lstrip(": ")
            advice = f"Nothing of it was kept. The remote copy is damaged: {_copy_again()}"
        else:
            problem = f"{type(fault).__name__}: {' '.join(self._hide(fault).split()) or 'no answer'}"
            is_refusal = getattr(fault, "status", None) in (401, 403) or isinstance(fault, PermissionError)
            rights = "the access rights"
            if is_refusal or type(fault).__name__ == "NoCredentialsError":  # the latter is of s3fs
                rights += f" (credentials come from {_places(self.url)}, see {program()} docs remote)"
            advice = f"Files fetched before are kept: check the address, {rights} and the network, and run the same "
            advice += "command again."
        return f"{redacted(self.url)}/{name}: {problem}; {times}. {advice}"

    def _hide(self, fault):
        """The text of a library's error without credentials, also where it names them without the scheme."""
        text = redacted(fault)
        for secret in secrets_of(self._address):
            plain = unquote(secret)
            for form in (secret, plain, quote(plain), quote(plain, safe="")):
                text = re.sub(rf"(?<!\w){re.escape(form)}(?!\w)", "***", text)
        return text


class RemoteFiles(StoreFiles):
    """The files of a store behind a URL, fetched into the cache when needed.

    path    the URL; the other paths are the cache's
    Raises  StoreError when there is no store, RemoteError when it cannot be read
    """

    def __init__(self, url: str, options: Remote | None = None):
        self.options = options or Remote()
        self.server = Server(url, self.options)
        self._target = self._fetch_target()
        directory = f"{self._target['target'][:12]}-{fingerprint(self.server.url)[:8]}"
        super().__init__(self.options.directory.absolute() / "stores" / directory)
        self.path = self.server.url
        disk.follow_no_links_below(self.options.directory)  # the cache may be inside an --output, or behind links in it
        for path in (self.units, self.plans):
            with _writing(path, is_new=True):
                make_directories(path)
        self._lock_seen = 0, 0.0  # when the lock's holder last received something: its time (ns), our time (s)

    # -- small files ---------------------------------------------------------------------------------------

    def target(self) -> dict:
        return self._target

    def _fetch_target(self):
        url, targets = f"{self.server.url}/target.json", []

        def check(raw):
            if raw and not raw.lstrip().startswith(b"{"):
                raise StoreError(
                    f"{url} is not a target.json: {self.server.url} answers with something else ({raw[:30]!r}...). "
                    "Is this the address of a store?"
                )
            targets.append(parse_target(raw, url))

        if self.server.read("target.json", _SMALL, check) is None:
            hidden = " that you may read (hf auth login)" if self.server.url.startswith("hf://") else ""
            raise RequestError(describe_no_store(self.server.url, f"it has no target.json{hidden}"))
        return targets[-1]

    def record(self, unit_id: str) -> UnitRecord | None:
        """The commit record of a unit, or None when there is none; a damaged record in the cache is fetched again."""
        with suppress(ShardError):
            if record := super().record(unit_id):
                return record
        self._fetch_small([f"units/{unit_id}.json"], self._parse_record)
        return super().record(unit_id)

    def missing_units(self, plan: Plan) -> list[PlannedUnit]:
        kept = {path.stem for path in self.units.glob("*.json")}
        wanted = [f"units/{unit.id}.json" for unit in plan.units if unit.id not in kept]
        absent = set(self._fetch_small(wanted, self._parse_record))
        return [unit for unit in plan.units if f"units/{unit.id}.json" in absent]

    def load_plan(self, plan_id: str) -> Plan:
        path = self.plans / f"{plan_id}.json"
        with suppress(ShardError, FileNotFoundError):
            return self._read(path, Plan.parse)
        if self._fetch_small([f"plans/{plan_id}.json"], Plan.parse):
            raise StoreError(f"{self.path} has no plan {plan_id}; it lists {', '.join(self.listed_plans()) or 'none'}")
        return self._read(path, Plan.parse)

    def command(self, plan_id: str) -> dict:
        """See StoreFiles.command; also {} if the server does not answer, as the command is only informative."""
        path = self.plans / f"{plan_id}.yaml"
        try:
            return read_command(path)
        except ShardError:
            with suppress(OSError):
                path.unlink()  # the server's may be whole
        except FileNotFoundError:
            pass
        with suppress(RemoteError, WriteError):  # the latter: a cache that others filled may be read-only
            self._fetch_small([f"plans/{plan_id}.yaml"], _refuse_page)
        return super().command(plan_id)

    def listed_plans(self) -> list[str]:
        """Ids of the plans that the server lists."""
        return sorted({match[1] for name in self.server.names("plans") if (match := _PLAN.fullmatch(name))})

    def newest_plan(self) -> Plan:
        """The newest plan all of whose units exist.

        Raises  StoreError when the server lists no plan, does not say which is the newest, or none is finished
        """
        return self._first_finished(self.load_plan(plan) for plan in self._newest_first(self.listed_plans()))

    def _newest_first(self, listed):
        if len(listed) == 1:
            return listed
        times: dict[str, Any] = {plan: self.server.changed(f"plans/{plan}.json") for plan in listed}
        if listed and None not in times.values() and len(set(times.values())) == len(times):
            return sorted(listed, key=times.__getitem__, reverse=True)
        if listed:
            problem = f"does not say which of its plans is the newest: {', '.join(listed)}"
        else:
            problem = "lists no plans; over http this requires a server that lists directories"
        raise StoreError(f"{self.path} {problem}. Pass the address of a plan: {self.path}/plans/<plan>.json")

    def copy_small_files(self, plan_id: str | None) -> None:
        """For a verification, fetch plans (all listed ones, or one) and their units' records, damaged or not.

        Raises  StoreError when the server lists no plan
        """
        listed = [plan_id] if plan_id else self.listed_plans()
        if self._fetch_small([f"plans/{plan}.json" for plan in listed or self._newest_first(listed)], None):
            raise StoreError(f"{self.path} has no plan {plan_id}")
        with suppress(RefusedError):  # an answer of 403 counts as no file
            self._fetch_small([f"plans/{path.stem}.yaml" for path in self.plans.glob("*.json")], _refuse_page)
        for path in self.plans.glob("*.json"):
            with suppress(ShardError):
                self._fetch_small([f"units/{unit.id}.json" for unit in self._read(path, Plan.parse).units], None)

    def _fetch_small(self, names, parse):
        """Fetch small files into the cache. Returns the names of missing files.

        parse   called with bytes and URL; raises ShardError when they are damaged. None keeps them as they are
        """

        def check(url, path):
            if parse:
                parse(path.read_bytes(), url)

        return self.server.fetch_all(names, self.units.parent, check)

    @property
    def tokenizer(self) -> Path:
        """The cache's copy of the tokenizer, fetched when it is first asked for."""
        return self._fetch_directory("tokenizer")

    @property
    def dictionary(self) -> Path:
        """The same for the dictionary. The directory does not exist if the store has no dictionary."""
        return self._fetch_directory("dictionary")

    @property
    def codebook(self) -> Path:
        """The same for the codebook of product-quantised hidden states."""
        return self._fetch_directory("codebook")

    def _fetch_directory(self, name):
        """The path of the cache's copy of a directory, which appears whole. If the store has no such directory, the
        path is returned all the same.

        Raises  RemoteError when a listed or an essential file cannot be fetched
        """
        path = self.units.parent / name
        if _is_complete(name, (file.name for file in path.glob("*"))):
            return path
        listed = [entry for entry in self.server.names(name) if entry in _UNLISTED[name]]  # a page has other links too
        is_listed = _is_complete(name, listed)
        found: dict[str, bytes] = {}
        for entry in listed if is_listed else _UNLISTED[name]:
            if not is_listed and entry.endswith(".txt") and "tokenizer.json" in found:
                continue  # it has the same vocabulary, and plain text cannot be checked
            try:
                raw = self._fetch_part(f"{name}/{entry}")
            except RefusedError:  # some buckets answer so if there is no file
                if is_listed:
                    raise
                continue
            if raw is not None and (is_listed or not _PAGE.match(raw)):
                found[entry] = raw
        if found and not _is_complete(name, found) or is_listed and len(found) < len(listed):
            lost = next(entry for entry in (listed if is_listed else _UNLISTED[name]) if entry not in found)
            raise RemoteError(
                f"{self.path}/{name}: {lost} is not there, but other files are. Run the same command again; if that "
                f"does not help, {_copy_again()}"
            )
        if found:
            publish_directory(path, lambda directory: write_files(directory, found), replace=path.is_dir())
        return path

    def _fetch_part(self, name):
        """The bytes of a file of such a directory, which may be a web page instead; None if it does not exist."""

        def check(raw):
            if name.endswith(".json") and not _PAGE.match(raw):
                parse_json(raw, name)

        most = max(_SMALL, min(_MOST_ATOMS, self.target()["k"] * _WIDEST)) if name.endswith(".npy") else _SMALL
        return self.server.read(name, most, check)

    # -- shards --------------------------------------------------------------------------------------------

    def open_shard(self, unit_id: str, file: str) -> FileIO:
        """The cache's copy of a shard as an open file. It is fetched if it is missing or shorter than its record says.

        Raises  RemoteError when it cannot be fetched, WriteError when the cache cannot hold it
        """
        record, path = self.record(unit_id), self.units / file
        if record is None or record.file != file:
            raise self._changed(unit_id)
        for fetched in range(self.options.attempts + 1):
            with suppress(FileNotFoundError):
                opened = disk.open_to_read(path)
                status = os.fstat(opened.fileno())
                if status.st_size == record.bytes:
                    with suppress(OSError):  # the time of use only: the cache may be another user's, or read-only
                        os.utime(opened.fileno(), ns=(time.time_ns(), status.st_mtime_ns))  # readers watch the mtime
                    return opened
                opened.close()
                with _writing(path):
                    path.unlink(missing_ok=True)
            if fetched < self.options.attempts:
                self._fetch_shard(record, path)
        raise RemoteError(f"{path} is removed again and again. Use a larger MLSM_CACHE_GB.")

    def _fetch_shard(self, record, path):
        def check(temporary):
            if (size := temporary.stat().st_size) != record.bytes:
                raise ShardError(f"{size:,} bytes, the record says {record.bytes:,}")
            if disk.file_sha256(temporary) != record.sha256:
                raise ShardError("it does not match the hash in its record")

        with self._alone() as alive:
            if path.exists():  # another process has fetched it meanwhile
                return
            self._make_room(record.bytes)
            if not self.server.fetch(f"units/{record.file}", path, record.bytes, check, alive):
                raise self._changed(record.unit)

    def _changed(self, unit_id):
        there = {path.name for path in self.units.iterdir()}
        for file in self.units.glob("*.json"):
            with suppress(OSError, MlsmError):  # a read-only cache; a damaged record is reported where it is read
                record = self.record(file.stem)
                if record is not None and record.file not in there:
                    self.record_file(file.stem).unlink(missing_ok=True)  # others may have changed, too
        return RemoteError(
            f"{self.path}: the shard of unit {unit_id} is missing, or no longer the one named by the record in the "
            "cache. Records without a shard in the cache are removed, if it can be written to: run the same command "
            f"again; if the shard is still missing then, {_copy_again()}"
        )

    def _make_room(self, size):
        """Remove shards of any store, the least recently used first, until a shard of this size fits into the cache.

        Shards that a reader maps stay readable, and use disk space until the reader ends.
        """
        if self.options.budget is None:
            return
        kept = []  # (time of last use, bytes, path)
        for path in self.units.parent.parent.glob("*/units/*.tar"):
            store = path.parent.parent
            if not _CACHED_STORE.fullmatch(store.name) or (store / "target.json").exists():
                continue  # a store of the user, whose output directory is also MLSM_CACHE
            with suppress(FileNotFoundError):
                status = path.stat()
                kept.append((status.st_atime_ns, status.st_size, path))
        excess = sum(size for _, size, _ in kept) + size - self.options.budget
        for _, length, path in sorted(kept):
            if excess <= 0:
                return
            with _writing(path), suppress(FileNotFoundError):
                disk.unlink(path)
            excess -= length

    @contextmanager
    def _alone(self) -> Iterator[Callable[[], None]]:
        """Hold the fetch lock: other processes and threads of this machine wait, as they may want the same shard.

        Yields a function to call whenever bytes arrive: waiting processes treat a holder without progress as dead.
        """
        lock = self.units.parent / "lock"
        with _writing(lock):
            make_directories(lock.parent)
            file = disk.append(lock)
        with file:
            held = self._wait_for_lock(file)
            try:
                yield lambda: os.utime(file.fileno()) if held else None
            finally:
                with suppress(OSError):
                    locks.release(file)  # explicitly: a forked worker may keep the file open

    def _wait_for_lock(self, file):
        """Whether the lock was obtained. It is not if its holder has received nothing for the time limit of one
        attempt (it was stopped, or its server stalls), or if the file system has no locks. Then two processes may fetch
        the same shard, which does no harm.
        """
        while True:
            try:
                if locks.acquire(file):
                    os.utime(file.fileno())
                    return True
            except OSError:
                return False
            received = os.fstat(file.fileno()).st_mtime_ns
            if received != self._lock_seen[0]:
                self._lock_seen = received, time.monotonic()
            if time.monotonic() - self._lock_seen[1] > self.options.timeout:
                return False
            time.sleep(_LOOK_AT_LOCK)

    # -- differences from a store in a directory -----------------------------------------------------------

    def is_encoded_here(self) -> bool:
        return False

    def repair_hint(self) -> str:
        return f"{self.path} is damaged: {_copy_again()}"

    def discard(self, file: str) -> str:
        path = self.units / file
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            return (
                f"Its copy in the cache ({path}) has changed since it was fetched, and cannot be removed "
                f"({error.strerror}): remove it, or set MLSM_CACHE to another directory."
            )
        return (
            f"Its copy in the cache ({path}) has changed since it was fetched, so it is removed: run the same command "
            "again to fetch it again. If this happens often, the disk is failing: set MLSM_CACHE to another one."
        )

    def restore_hint(self) -> str:
        return (
            f"Remove its copy in the cache ({self.units.parent}) and try again; if that does not help, copy the store "
            "there again."
        )

    def finish_hint(self) -> str:
        return "Copy the whole store there, with the units before the plan."


class VerifiedFiles(RemoteFiles):
    """The same for a verification: a shard is downloaded when it is opened, unchecked, and removed when closed."""

    def stop(self) -> None:
        self.server.stop()

    def restore_hint(self) -> str:
        return "Copy the store there again."

    def open_shard(self, unit_id: str, file: str) -> FileIO:
        record, place = self.record(unit_id), disk.temporary_name(self.units, file)
        try:
            if record is None or not self.server.fetch(f"units/{file}", place, record.bytes, lambda path: None):
                raise FileNotFoundError(f"{self.path}/units/{file}")
            return disk.open_to_read(place)
        finally:
            disk.discard(place)

    def stated_size(self, record: UnitRecord) -> int | None:
        try:
            return self.server.size(f"units/{record.file}")
        except FileNotFoundError:
            raise BlockError("the shard is missing") from None


def gopen(url: str, mode: str = "rb", bufsize: int = -1, **options: object) -> FileIO:
    """A shard as an open file for plain WebDataset, downloaded and checked against its record; nothing is cached.

    from webdataset.gopen import gopen_schemes; gopen_schemes["s3"] = gopen lets WebDataset(store.urls()) read s3://.
    Raises  RemoteError when it cannot be read, FileNotFoundError when there is none
    """
    parent, _, file = url.rpartition("/")
    unit = file.removesuffix(".tar").rpartition("-")[0]
    server, records = Server(parent, Remote()), []

    def keep(raw):
        records.append(UnitRecord.parse(raw, f"{server.url}/{unit}.json"))
        if records[-1].file != file:
            raise ShardError(f"the record names the shard {records[-1].file}")

    def check(path):
        if disk.file_sha256(path) != records[-1].sha256:
            raise ShardError("it does not match the hash in its record")

    with TemporaryDirectory(prefix=TEMPORARY) as directory:
        place = Path(directory) / "shard"
        is_there = server.read(f"{unit}.json", _SMALL, keep) is not None
        if not is_there or not server.fetch(file, place, records[-1].bytes, check):
            raise FileNotFoundError(f"{server.url}/{file}, or its record {unit}.json")
        return disk.open_to_read(place)


class _Limits(fsspec.Callback):
    """The limits of a download: fsspec calls this with its size, if known, and for every part that arrived."""

    def __init__(self, most, options, alive):
        super().__init__()
        self.most, self.options, self.alive, self.began = most, options, alive, time.monotonic()

    def set_size(self, size):
        if size is not None and size > self.most:
            raise AnswerError(f"the answer is longer than the {self.most:,} bytes that it may have")

    def relative_update(self, inc=1):
        self.value += inc
        self.set_size(self.value)
        if time.monotonic() - self.began > self.options.timeout + self.value / self.options.rate:
            raise AnswerError(f"less than {self.options.rate:,.0f} bytes per second")
        self.alive()


@contextmanager
def _writing(place, errors=None, is_new=False):
    """Add to an error of this machine's disk which setting chooses another disk.

    errors  numbers of the errors that are the disk's; None: all
    is_new  whether the directory is made now, so that it cannot have been removed
    Raises  WriteError; OSError without a number if the directory was removed meanwhile
    """
    try:
        yield
    except OSError as error:
        if disk.is_of_the_machine(error) or errors is not None and error.errno not in errors:
            raise
        if isinstance(error, FileNotFoundError) and not is_new:
            raise _removed(place) from None
        remedy = "MLSM_CACHE moves the cache of remote stores to another directory, MLSM_CACHE_GB limits its size."
        if any(part.startswith(TEMPORARY) for part in place.parts):
            remedy = "TMPDIR names another directory for temporary files."
        raise WriteError(f"{place} could not be written: {error.strerror}. {remedy}") from None


def _removed(place):
    """The error if a directory of the cache is removed during a download. FileNotFoundError is for the server's files;
    this one is tried again.
    """
    return OSError(f"{place.parent} was removed meanwhile")


def _copy_again():
    """The advice about damage in a remote store, for an error message."""
    return (
        f"check the store that it was copied from with {program()} verify-shards <its directory> --repair, run the "
        "encoding command that it names, and copy the store again."
    )


def _is_compressed(path):
    """Whether a file begins like one of gzip, as no file of a store does."""
    with open(path, "rb") as file:
        return file.read(2) == b"\x1f\x8b"


def _list(filesystem, path):
    filesystem.invalidate_cache()
    return [entry["name"] for entry in filesystem.ls(path, detail=True) if entry["type"] != "directory"]


def _refuse_what_would_be_shown(url):
    """Raise StoreError if an address has credentials that are not recognised everywhere, or that are not used."""
    if _SPACE_IN_USER.search(url):
        raise StoreError("the address of the store has white space in its user or password. Write %20 for a space.")
    if (found := _TAKES_NO_PASSWORD.search(url)) and without_credentials(url) != url:
        raise StoreError(
            f"{redacted(url)}: {found[1]}:// takes no password in an address. Pass the address without it; credentials "
            f"come from {_places(url)}, see {program()} docs remote."
        )


def _places(url):
    """Where credentials for an address may be, for a message."""
    own = {"http": "~/.netrc", "https": "~/.netrc", "hf": "hf auth login"}
    return f"{own.get(url.partition('://')[0], 'the usual places of the service')} or fsspec's configuration"


def _without_and_with_credentials(url):
    """An address for messages, and the same for requests, with the credentials that this process got for its host."""
    shown = without_credentials(url)
    rest = re.sub(r"^[^/]*(//[^/]*)?", "", shown)  # the path and what follows it
    origin = shown.removesuffix(rest)
    if shown != url:
        _origins[origin] = url[: len(url) - len(rest)]
    return shown, _origins.get(origin, origin) + rest


def _refuse_page(raw, url):
    """Take a web page for a file that is not there."""
    if _PAGE.match(raw):
        raise FileNotFoundError(url)


def _may_pass(fault):
    """Whether a retry may help."""
    status = getattr(fault, "status", None)
    if isinstance(status, int) and 400 <= status < 500:
        return status in _MAY_PASS
    return isinstance(fault, ShardError) or not isinstance(
        fault, PermissionError | ValueError | TypeError | LookupError
    )


def _is_complete(name, entries):
    """Whether these files suffice to use a tokenizer or dictionary."""
    present = set(entries)
    return any(essential <= present for essential in _ESSENTIAL[name])
