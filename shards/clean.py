"""Remove the files that killed processes left behind, and nothing else.

    report = clean("runs", dry_run=True)

Three kinds are recognised. The form of the name is never enough:

    temporaries     .<name>.<pid>.<12 hex digits>.tmp: files, and directories that were being filled or replaced. Six of
                    the digits are a checksum of the rest of the name (mlsm/common/disk.py)
    work places     directories marked by a file `lock` (mlsm/common/workplaces.py), with the work that an interrupted
                    command would continue from: removing one loses that work
    unrecorded      units/<unit>-<12 hex digits>.tar of a store, when no record names it and the digits are those of
                    its SHA-256

Another process, here or on another machine that shares the file system, may be writing. So these stay:

    - everything that changed within the last hour, unless --all is given (the inode's time counts too, so a copy that
      keeps old file times is new);
    - a shard that appeared within the last minute, even with --all: its record may be about to follow;
    - a temporary whose process is running on this machine, even with --all. A process that started after the last write
      does not count: it was only given the same number;
    - a work place whose lock is held, or which holds a file that is not part of the work;
    - shards of a unit whose record cannot be read.

Not handled here: damaged units (verify.py).
"""

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mlsm.common import disk
from mlsm.common.disk import file_sha256, writer_of_temporary
from mlsm.common.errors import RequestError, ShardError
from mlsm.common.invocation import program
from mlsm.common.workplaces import is_part, lock_if_free, read_mark
from shards.files import StoreFiles
from shards.manifest import shard_name, unit_of_shard

SAFE_SECONDS = 3600
COMMIT_SECONDS = 60  # a shard's record follows it within this time, on any disk
CLOCK_SECONDS = 60  # by so much two clocks that set a file's times may differ

_PLACE_KIND, _SHARD_KIND = "interrupted command, whose work is lost", "shard without a record"
NO_WORKPLACE_BESIDE = ("target.json", "log.jsonl")  # files of a store or run, in which `lock` may be another program's


@dataclass(frozen=True)
class LeftOver:
    """A path of one of the three kinds. `in_use` is the reason why it must stay even with --all, or None."""

    path: Path
    kind: str
    in_use: str | None


def clean(path: str | Path, dry_run: bool = False, everything: bool = False) -> dict:
    """Remove left-overs under a directory.

    dry_run     list only
    everything  also those that changed within SAFE_SECONDS
    Returns     dict that JSON can hold: path, dry_run, bytes freed (or to be freed), and lists removed and kept, each
                entry with path, kind, bytes and, when kept, the reason
    Raises      RequestError when there is no such directory, and for `/` and the home directory
    """
    path = Path(path)
    if not path.is_dir():
        raise RequestError(f"no such directory to clean: {path}. Name one with outputs of this package, such as runs")
    if path.resolve() in (Path("/"), Path(os.path.expanduser("~")).resolve()):
        raise RequestError(
            f"{path} holds more than outputs of this package, and left-overs of other programs could look alike. Name"
            " a directory of outputs, such as runs"
        )
    disk.follow_no_links_below(path)
    removed, kept, freed = [], [], 0
    for found in sorted(left_overs(path), key=lambda found: found.path):
        size, changed = _size_and_change(found.path)
        entry = {"path": str(found.path), "kind": found.kind, "bytes": size}
        reason = found.in_use or _too_young(found, changed, everything)
        if reason:
            kept.append(entry | {"reason": reason})
        elif dry_run or _remove(found):
            removed.append(entry)
            freed += size
    return {"path": str(path), "dry_run": dry_run, "bytes": freed, "removed": removed, "kept": kept}


def left_overs(path: Path) -> Iterator[LeftOver]:
    """Everything of the three kinds under a directory, links not followed."""
    for directory, names, files in os.walk(path):
        here = Path(directory)
        for name in list(names):
            if found := _recognise(here / name):
                names.remove(name)  # its content is removed with it
                yield found
        yield from filter(None, (_recognise(here / name) for name in files))
        if here.name == "units" and (here.parent / "target.json").is_file():
            yield from _unrecorded_shards(StoreFiles(here.parent), files)


def _recognise(path):
    if path.is_symlink():
        return None
    if (pid := writer_of_temporary(path.name)) is not None:
        return LeftOver(path, "temporary", _writer(path, pid))
    if not path.is_dir() or any((path.parent / name).exists() for name in NO_WORKPLACE_BESIDE):
        return None
    files = read_mark(path)
    if files is None or not _holds_only(path, files):
        return None
    with lock_if_free(path) as is_free:
        return LeftOver(path, _PLACE_KIND, None if is_free else "another process is working in it")


def _holds_only(path, files):
    """Whether a work place contains only temporaries and files of the work, and no directories."""
    try:
        with os.scandir(path) as entries:
            return all(
                writer_of_temporary(entry.name) is not None
                or (is_part(entry.name, files) and not entry.is_dir(follow_symlinks=False))
                for entry in entries
            )
    except FileNotFoundError:  # its command has just removed it
        return False


def _unrecorded_shards(files, names):
    for name in names:
        if (unit := unit_of_shard(name)) is None:
            continue
        try:
            record = files.record(unit)
        except ShardError:
            yield LeftOver(files.units / name, _SHARD_KIND, f"its record is damaged: see {program()} verify-shards")
            continue
        if (record is None or record.file != name) and _fits_its_name(files.units / name, unit):
            yield LeftOver(files.units / name, _SHARD_KIND, None)


def _fits_its_name(path, unit):
    """Whether a file is the shard of this unit that its name says: its hash has the name's digits."""
    try:
        return path.name == shard_name(unit, file_sha256(path))
    except OSError:  # removed, not readable, or not a file
        return False


def _writer(path, pid):
    """The reason why a temporary may be in use: its process is running, and was when the file was last written."""
    if not _alive(pid):
        return None
    began = _began(pid)
    if began is not None and began > _size_and_change(path)[1] + CLOCK_SECONDS:
        return None  # the number now belongs to another process
    return f"process {pid} is alive and may be writing it"


def _alive(pid):
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _began(pid):
    """When a process started, in seconds since 1970; None if /proc does not tell."""
    try:
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
        (booted,) = re.findall(r"^btime (\d+)$", Path("/proc/stat").read_text(), re.MULTILINE)
        return int(booted) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def _too_young(found, changed, everything):
    age = time.time() - changed
    if found.kind == _SHARD_KIND and age < COMMIT_SECONDS:
        return "it has just appeared; its record may be about to follow"
    if everything or age >= SAFE_SECONDS:
        return None
    minutes = f"{max(0, age) / 60:.0f} minutes"
    return f"changed {minutes} ago; a process on another machine may be writing it. --all removes it"


def _size_and_change(path):
    """Bytes that removing a file or directory frees, and the time of the last change in it."""
    size, changed = 0, 0.0
    inside = [Path(place, name) for place, folders, files in os.walk(path) for name in folders + files]
    for found in [path, *inside]:  # unlike rglob, os.walk passes over directories that their writer moves meanwhile
        try:
            status = found.lstat()
        except FileNotFoundError:
            continue
        changed = max(changed, status.st_mtime, status.st_ctime)
        if not found.is_dir() and status.st_nlink == 1:  # removing one of several hard links frees nothing
            size += status.st_size
    return size, changed


def _remove(found):
    """Remove it, unless it no longer exists or is in use since it was found."""
    try:
        if found.kind == _SHARD_KIND:
            files = StoreFiles(found.path.parent.parent)
            if not any(shard.in_use is None for shard in _unrecorded_shards(files, [found.path.name])):
                return False
        if found.kind == _PLACE_KIND:
            with lock_if_free(found.path) as is_free:
                if is_free:
                    disk.remove(found.path)
                return is_free
        disk.remove(found.path)
    except FileNotFoundError:
        return False
    return True
