"""Check that a store is whole: every unit against its record, and the record against its checksum.

    report = verify("runs/stores/lsp-...", full=True)
    report["damaged"], report["missing"], report["stray"]

Without `full`, it checks target, plans, checksums of records, and sizes and end marks of shards: a few reads per unit.
With `full`, it reads every byte: each group's SHA-256 and the end mark (which replace a hash of the whole file),
meta.json against the target, and the columns of every block: atoms increasing below k, sums equal to the record's.
Units are checked in parallel threads, as hashing and NumPy release the interpreter lock. Records are read once to list
the units and again where a unit is checked: kept, those of a large store would take gigabytes.

An unfinished store is not damaged; the missing units of its plans are listed. For a store behind a URL the bytes come
from there, never from the cache. Without `full`, the sizes are those that the server states. Files that no plan names
are not looked for. tokenizer/, dictionary/ and codebook/ are compared with the fingerprints in the target. If a file
cannot be read, or something else has its name (a pipe, a socket, a directory, a dangling link), it is listed as damaged
without waiting for it, and the rest of the store is still checked.
"""

import hashlib
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np

from mlsm.common import disk
from mlsm.common.errors import BlockError, RemoteError, ShardError, StoreError, WrongAnswerError
from mlsm.common.machine import usable_cores
from mlsm.common.progress import silent
from mlsm.common.text import redacted
from shards import copies
from shards.block_check import check_block
from shards.files import StoreFiles, is_plan_file, read_command, read_small
from shards.manifest import Plan, UnitRecord, differing, shard_name, unit_of_shard
from shards.reader import is_url, plan_of
from shards.repair import repair_commands
from shards.schema import ShardMeta
from shards.shard_file import ShardFile

_UNIT_ID = re.compile(r"[0-9a-f]{32}")
_SECONDS_BETWEEN_PROGRESS = 0.2


def verify(
    path: str | Path,
    full: bool = False,
    repair: bool = False,
    threads: int | None = None,
    progress: Callable[..., None] = silent,
) -> dict:
    """Check a store, or the units of one of its plans: a directory or a URL, or its `plans/<plan>.json`.

    full      read and check every byte
    repair    implies full; remove records and shards of damaged units, and damaged plans, so that the encoding
              command makes them again
    threads   number of threads; default: one per core
    progress  called with ("verify", bytes done, bytes in all, unit="bytes")
    Returns   dict that JSON can hold: store, full, units, bytes, seconds, and lists: plans, damaged (each with unit,
              file, block, offset, length, problem, unread: whether only a read failed, so that the file may be whole),
              missing, stray, repaired, not_repaired (damaged files that stay, each with file, reason), commands (what
              encodes the damaged and missing units, without those that stay)
    Raises    StoreError when this is no store, ShardError when its target is damaged or of another format,
              RemoteError when a URL cannot be read
    """
    if repair and is_url(path):
        raise StoreError(f"{redacted(path)} cannot be repaired from here: repair the store that it was copied from.")
    path, plan_id = plan_of(path)
    with _open(path, plan_id) as files:
        return _verify(files, plan_id, full, repair, threads, progress)


@contextmanager
def _open(path: str | Path, plan_id: str | None) -> Iterator[StoreFiles]:
    """The store's files: its directory, or a fresh copy of its small files that bypasses the cache."""
    if not is_url(path):
        yield StoreFiles(path)
        return
    from shards.remote import TEMPORARY, Remote, VerifiedFiles  # only here: fsspec takes a while to import

    with TemporaryDirectory(prefix=TEMPORARY) as nowhere:
        files = VerifiedFiles(str(path), Remote(cache=Path(nowhere)))
        files.copy_small_files(plan_id)
        yield files


def _verify(files, plan_id, full, repair, threads, progress):
    started = time.perf_counter()
    target = files.target()
    if repair:
        disk.follow_no_links_below(files.path)
    survey = _survey(files, target)
    if plan_id is not None:
        survey.keep_only(plan_id)
    damaged = survey.damaged + _check_units(files, target, survey.units, full or repair, threads, progress)
    missing = {unit.id: (unit, plan) for plan in survey.plans for unit in files.missing_units(plan)}
    repaired, kept = _remove(files, target, survey, damaged) if repair else ([], {})
    to_encode = [entry for entry in damaged if _committed(entry) not in kept]
    commands = repair_commands(files, target, survey.plans, to_encode) if files.is_encoded_here() else []
    return {
        "store": str(files.path),
        "target": target["target"],
        "full": full or repair,
        "units": len(survey.units),
        "bytes": sum(unit.bytes for unit in survey.units),
        "seconds": time.perf_counter() - started,
        "plans": [
            {"plan": plan.id, "units": len(plan.units), "missing": len(files.missing_units(plan))}
            for plan in survey.plans
        ],
        "damaged": damaged,
        "missing": [
            {
                "unit": unit.id,
                "split": unit.split,
                "source": unit.source,
                "records": [unit.start, unit.stop],
                "text": plan.text_of(unit),
            }
            for unit, plan in missing.values()
        ],
        "stray": survey.stray,
        "repaired": repaired,
        "not_repaired": [{"file": file, "reason": reason} for file, reason in kept.items()],
        "commands": commands,
    }


# -- small files ------------------------------------------------------------------------------------------


class _Unit(NamedTuple):
    """What is kept of a whole record."""

    id: str
    file: str
    bytes: int


@dataclass
class _Survey:
    """The files in the directory."""

    plans: list = field(default_factory=list)
    units: list = field(default_factory=list)
    """A `_Unit` for every whole record."""
    damaged: list = field(default_factory=list)
    stray: list = field(default_factory=list)
    seen: dict = field(default_factory=dict)
    """File name -> identity (`_identity`) of every record and plan."""
    shards: dict = field(default_factory=dict)
    """Names of the shards of every unit, whether a record names them or not."""

    def keep_only(self, plan_id):
        """Forget other plans, their units and the damage in either. What is stray depends on all plans and stays."""
        self.plans = [plan for plan in self.plans if plan.id == plan_id]
        units = {unit.id for plan in self.plans for unit in plan.units}
        self.units = [unit for unit in self.units if unit.id in units]
        these = {f"plans/{plan_id}.json", f"plans/{plan_id}.yaml"}
        self.damaged = [
            entry
            for entry in self.damaged
            if entry["unit"] in units | {None} and (entry["file"] in these or not entry["file"].startswith("plans/"))
        ]


def _survey(files, target):
    found = _Survey()
    for path in _listed(found, files.plans):
        if is_plan_file(path):
            _try(found, path, None, lambda path=path: found.plans.append(_read_plan(path, target)))
        elif is_plan_file(path.with_suffix(".json")) and path.suffix == ".yaml":
            _try(found, path, None, lambda path=path: read_command(path))
        elif path.suffix != ".yaml":
            found.stray += _stray(files, path)
    planned = {unit.id for plan in found.plans for unit in plan.units}
    listed = _listed(found, files.units)
    for path in listed:
        if unit := unit_of_shard(path.name):
            found.shards.setdefault(unit, []).append(path.name)
        if _is_record(path, planned):
            _try(found, path, path.stem, lambda path=path: found.units.append(_read_unit(path, target)))
    named = {unit.file for unit in found.units}
    unreadable = {entry["unit"] for entry in found.damaged} - {None}  # a damaged plan is of no unit
    for path in listed:
        ours = _is_record(path, planned) or unit_of_shard(path.name) in unreadable
        if path.name not in named and not ours:
            found.stray += _stray(files, path)
    for name, read in copies.READERS.items():
        getattr(files, name)  # a server that does not answer is not damage: raises RemoteError
        try:
            read(files)
        except StoreError as error:
            problem = str(error).replace(str(files.units.parent), str(files.path))  # not a temporary copy
            found.damaged.append(_damage(None, name, problem))
    return found


def _is_record(path, planned):
    """Whether a file name is that of a unit's record; notes.json is not."""
    return path.suffix == ".json" and (path.stem in planned or bool(_UNIT_ID.fullmatch(path.stem)))


def _try(found, path, unit, read):
    try:
        found.seen[path.name] = _identity(path)
        _refuse_irregular(path)
        read()
    except FileNotFoundError:  # removed since it was listed
        return
    except ShardError as error:
        problem = str(error).removeprefix(f"{path}: ")
        found.damaged.append(
            _damage(unit, f"{path.parent.name}/{path.name}", problem, unread=_may_be_whole(error.__cause__))
        )


def _refuse_irregular(path):
    """Raise ShardError if a file's name belongs to something that is not a file or a link to one. Opens nothing."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        try:
            status = path.stat()
        except OSError as error:
            raise ShardError(f"a link that ends nowhere ({error.strerror})") from None
    if not stat.S_ISREG(status.st_mode):
        raise ShardError(f"{disk.kind_of_file(status)}, not a file")


def _identity(path):
    """A value that changes when a small file is written again, even with the same bytes; None if it does not exist."""
    try:
        status = path.lstat()
        raw = b"" if stat.S_ISDIR(status.st_mode) else disk.read_file(path)
        return status.st_ino, status.st_mtime_ns, hashlib.sha256(raw).digest()
    except FileNotFoundError:
        return None
    except OSError as error:
        if disk.is_of_the_machine(error):
            raise
        return status.st_ino, status.st_mtime_ns, b""


def _read_plan(path, target):
    plan, windowing = Plan.parse(read_small(path, ""), path), target["settings"].get("windowing")
    if windowing is not None and plan.windowing != windowing:
        raise ShardError(f"the plan is of another store: {differing(plan.windowing, windowing)}")
    return plan


def _read_unit(path, target):
    record = _read_record(path, target)
    return _Unit(record.unit, record.file, record.bytes)


def _read_record(path, target):
    record = UnitRecord.parse(read_small(path, ""), path)
    record.check(target, path)
    end = 0
    for group in record.groups:
        if group["offset"] != end:
            raise ShardError(f"group {group['name']} does not begin where the one before it ends")
        end += group["length"]
    if record.file != shard_name(record.unit, record.sha256):
        raise ShardError(f"the record names a shard {record.file!r}, which is not of this unit and hash")
    sums = [sum(block[name] for block in record.blocks) for name in ("windows", "tokens")]
    if sums != [record.windows, record.tokens]:
        raise ShardError(
            f"its blocks hold {sums[0]} windows of {sums[1]} tokens, not {record.windows} and {record.tokens}"
        )
    return record


def _listed(found, directory):
    """The entries of a directory. A directory that cannot be listed is recorded as damage."""
    try:
        return sorted(directory.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        if disk.is_of_the_machine(error):
            raise
        found.damaged.append(_damage(None, directory.name, f"the directory cannot be read: {error.strerror}"))
        return []


def _stray(files, path):
    """A list with the entry of a file that no reader uses; empty if it no longer exists (a writer's temporary)."""
    try:
        size = path.lstat().st_size
    except FileNotFoundError:
        return []
    if path.name.startswith(".") and path.suffix == ".tmp":
        kind = "temporary"
    elif path.suffix == ".tar":
        kind = "shard without a record"
    else:
        kind = "not of a store"
    return [{"file": str(path.relative_to(files.path)), "bytes": size, "kind": kind}]


def _may_be_whole(fault):
    """Whether a fault is a failed read that says nothing about the file: of a disk or its server, or of our rights."""
    return isinstance(fault, OSError) and not disk.is_of_the_file(fault)


def _damage(unit, file, problem, block=None, offset=0, length=0, unread=False):
    place = {"unit": unit, "file": file, "block": block, "offset": offset, "length": length}
    return place | {"problem": problem, "unread": unread}


# -- shards -----------------------------------------------------------------------------------------------


class _Count:
    """Bytes that all threads have checked."""

    def __init__(self):
        self.bytes, self._lock = 0, threading.Lock()

    def add(self, number):
        with self._lock:
            self.bytes += number


def _check_units(files, target, units, full, threads, progress):
    """Damage of all units, in their order."""
    total, count = sum(unit.bytes for unit in units), _Count()
    pool = ThreadPoolExecutor(threads or usable_cores())
    try:
        jobs = [pool.submit(_check_unit, files, target, unit.id, full, count) for unit in units]
        left = set(jobs)
        while left:
            done, left = wait(left, _SECONDS_BETWEEN_PROGRESS)
            for job in done:
                job.result()  # an error ends the check now, not after all other units
            if count.bytes:
                progress("verify", count.bytes, total, unit="bytes")
        return [entry for job in jobs for entry in job.result()]
    finally:
        files.stop()
        pool.shutdown(cancel_futures=True)


def _check_unit(files, target, unit, full, count):
    """Damage of one unit, its record included; none if the record was removed since it was listed."""
    path, records, now = files.record_file(unit), [], _Survey()
    _try(now, path, unit, lambda: records.append(_read_record(path, target)))
    for record in records:
        now.damaged += _check_shard(files, target, record, full, count)
    return now.damaged


def _check_shard(files, target, record, full, count):
    """Damage of one unit. If its record was replaced during the check, the unit is checked with the new record."""
    damaged = _damage_in(files, target, record, full, count)
    try:
        now = _read_record(files.record_file(record.unit), target) if damaged else record
    except (ShardError, FileNotFoundError):
        return damaged
    return damaged if now == record else _check_shard(files, target, now, full, count)


def _damage_in(files, target, record, full, count):
    damaged = []

    def note(check, group=None):
        try:
            check()
        except BlockError as error:
            place = {"block": error.block, "offset": error.offset, "length": error.length}
            place["unread"] = _may_be_whole(error.__cause__)
            damaged.append(_damage(record.unit, f"units/{record.file}", str(error), **place))
        except (ShardError, ValueError, KeyError) as error:
            if isinstance(error, RemoteError) and not isinstance(error, WrongAnswerError):
                raise  # a server that does not answer is not damage
            place = {"block": group["name"], "offset": group["offset"], "length": group["length"]} if group else {}
            damaged.append(_damage(record.unit, f"units/{record.file}", str(error), **place))
        except OSError as error:
            if disk.is_of_the_machine(error):
                raise
            problem, unread = f"the disk cannot read it ({error})", _may_be_whole(error)
            damaged.append(_damage(record.unit, f"units/{record.file}", problem, unread=unread))

    def check():
        if not full and (size := files.stated_size(record)) is not None:
            if size != record.bytes:
                raise BlockError(f"the shard has {size:,} bytes, its record says {record.bytes:,}")
            return
        with ShardFile(files, record) as shard:
            note(shard.check_end)
            if full:
                meta = ShardMeta.of_unit(target, record.unit)
                entries = [0]
                for group in record.groups:
                    note(lambda group=group: _check_group(shard, group, meta, record, entries), group)
                    count.add(group["length"])
                counted = "entries" if meta.k else "coded_tokens"
                if not damaged and (meta.k or meta.hidden) and entries[0] != record.statistics[counted]:
                    raise BlockError(f"{entries[0]} {counted}, the record says {record.statistics[counted]}")

    note(check)
    return damaged


def _check_group(shard, group, meta, record, entries):
    if group["name"] == "__meta__":
        if shard.meta() != meta.as_dict():
            raise ShardError("meta.json is of another target or unit")
    elif "windows" in group:
        columns = shard.columns(group)
        check_block(columns, group, meta)
        entries[0] += np.count_nonzero(columns[meta.hidden.mark]) if meta.hidden else len(columns.get("weights", ()))
    elif group["name"] == "__stats__":
        columns = shard.columns(group)
        of_hidden = {"hidden_sum", "hidden_squares"} if meta.hidden else set()
        if columns.keys() != {"token_counts"} | of_hidden | ({"mass"} if meta.k else set()):
            raise ShardError(f"sums {', '.join(sorted(columns))}, which are not those of k = {meta.k}")
        if len(columns["token_counts"]) != meta.vocab_size or columns["token_counts"].sum() != record.tokens:
            raise ShardError(f"token counts do not add up to {record.tokens}")
        if meta.k:
            mass_k = columns["mass"]
            if len(mass_k) != meta.k or not (np.isfinite(mass_k) & (mass_k >= 0)).all():
                raise ShardError(f"the sums of mass are not {meta.k} finite numbers from 0, one for each LSP")
            if mass_k.max() > record.tokens + 1:  # + 1, as these are sums of rounded probabilities
                raise ShardError(f"the sums of mass are larger than the unit's {record.tokens} tokens")
        for name in of_hidden:
            sums_d = columns[name]
            if len(sums_d) != meta.hidden.width or not (np.abs(sums_d) <= record.tokens + 1).all():
                raise ShardError(f"the sums called {name} are not {meta.hidden.width} numbers up to the unit's tokens")
    else:
        raise ShardError("not a part of a shard")


# -- repair -----------------------------------------------------------------------------------------------


def _remove(files, target, survey, damaged):
    """Remove records and shards of damaged units, and damaged plans. A record, which is the commit, goes first.

    Each is checked once more first, and stays if it is whole now or only a read failed, as such an error may pass. A
    unit that another process has encoded again since the check keeps its record and its shard. If `units` or `plans`
    is a link out of the store, the files there also stay. So does a directory, which is not ours.

    Returns  (names of removed files, {name of a file that stays: reason})
    """
    gone, kept, root = [], {}, os.path.realpath(files.path)

    def reason_to_keep(path, again):
        if not again:
            return "it was whole when it was checked again"
        if all(entry["unread"] for entry in again):
            return "only reading it failed, so it may be whole: run the same command again"
        if os.path.realpath(path.parent) != os.path.join(root, path.parent.name):
            return f"{path.parent.name} is a link out of the store"
        return None if _identity(path) == survey.seen.get(path.name) else "it was written again since it was checked"

    def keep(path, reason):
        kept[str(path.relative_to(files.path))] = reason

    def unlink(path):
        """Remove a file. Returns whether it no longer exists."""
        try:
            disk.unlink(path)
            gone.append(str(path.relative_to(files.path)))
        except FileNotFoundError:
            pass
        except OSError as error:
            keep(path, "it is a directory" if path.is_dir() else error.strerror)
            return False
        return True

    def remove(path, again, *shards):
        if not os.path.lexists(path):
            return
        if reason := reason_to_keep(path, again):
            keep(path, reason)
        elif unlink(path):
            for shard in shards:
                unlink(shard)

    for unit in sorted({entry["unit"] for entry in damaged} - {None}):
        shards = (files.units / name for name in survey.shards.get(unit, ()))
        remove(files.record_file(unit), _check_unit_again(files, target, unit), *shards)
    for entry in damaged:
        path = files.path / entry["file"]
        if path.parent == files.plans and path.suffix == ".yaml":
            keep(path, "the targets do not depend on it, and the command that made the store writes it again")
        elif path.parent == files.plans:
            again = _Survey()
            _try(again, path, None, lambda path=path: _read_plan(path, target))
            remove(path, again.damaged)
    for directory in (files.units, files.plans):
        if directory.is_dir() and not directory.is_symlink():
            disk.fsync_path(directory)
    return gone, kept


def _committed(entry):
    """The name of the record of a damaged unit, else of the damaged file itself."""
    return f"units/{entry['unit']}.json" if entry["unit"] else entry["file"]


def _check_unit_again(files, target, unit):
    return _check_unit(files, target, unit, full=True, count=_Count())
