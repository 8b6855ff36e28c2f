"""Working directories, which hold the parts of a long work until it is done.

    with workplace(directory, files=("sample.npy", "part-*.npz")) as place:     # removed at the end

A work place stays after an interruption, so that the same command can resume. Its file `lock` is locked while a process
works there, and marks the directory as a work place: the first line is MARK, the others are the patterns of the names
that the work gives to files there. By that mark `clean` (shards/clean.py) recognises a working directory that was
abandoned, and distinguishes the files of the work from other people's, whatever the work is. Not handled here: what the
files hold, and how a work continues (pipeline/dictionary/checkpoint.py, for one).
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from io import FileIO
from pathlib import Path

from mlsm.common import disk, locks
from mlsm.common.durable import make_directories
from mlsm.common.errors import PlaceError

LOCK = "lock"
MARK = "A working directory of mlsm for files with these names; files with other names are not part of its work."
_LONGEST_MARK = 4096  # bytes; somebody else's file of that name may have any size
logger = logging.getLogger(__name__)


@contextmanager
def workplace(directory: Path, files: Sequence[str]) -> Iterator[Path]:
    """A directory for the parts of one work: removed if the block ends well or leaves nothing, else kept.

    Temporaries that a killed process left there are removed first, if the lock shows that no other process writes them.

    files   patterns of the names that the work gives to files there, as fnmatch takes them
    Raises  ValueError if another process works in it (on this machine, or where the file system shares locks)
    """
    with _locked(directory) as (lock, is_locked):
        with suppress(OSError):  # without a mark it is only unknown to `clean`
            if os.fstat(lock.fileno()).st_nlink == 1:  # else it may be somebody's file under a second name
                lock.truncate(0)
                lock.write("\n".join((MARK, *files, "")).encode())
        for left in directory.glob(".*.tmp") if is_locked else ():  # by a killed process; a sample may be gigabytes
            if disk.writer_of_temporary(left.name) is not None:
                disk.remove(left)
        try:
            yield directory
        except BaseException:
            if os.listdir(directory) == [LOCK]:
                _remove(directory)
            raise
    _remove(directory)  # the lock is closed: NFS keeps an open file's directory


def discard(directory: Path) -> None:
    """Remove a working directory that is no longer needed, unless another process may be working in it."""
    if directory.is_dir():
        with suppress(OSError, ValueError):  # PlaceError is one
            with _locked(directory) as (_, is_locked):
                pass
            if is_locked:
                disk.remove(directory)


def _remove(directory):
    with suppress(OSError):
        disk.remove(directory)


def read_mark(directory: Path) -> list[str] | None:
    """The patterns that the mark of a work place lists; None if a directory has no such mark."""
    try:
        with disk.open_to_read(directory / LOCK) as file:
            first, *files = file.read(_LONGEST_MARK).decode().splitlines() or [""]
    except (OSError, UnicodeDecodeError):
        return None
    return files if first == MARK else None


def is_part(name: str, files: Sequence[str]) -> bool:
    """Whether a file in a work place is its lock, or has a name that fits one of the patterns `files`."""
    return name == LOCK or any(fnmatchcase(name, pattern) for pattern in files)


@contextmanager
def lock_if_free(directory: Path) -> Iterator[bool]:
    """Hold the lock of another process's working directory if it is free. Returns whether no one works there meanwhile.

    A place without a file `lock` counts as free, one on a file system without locks as in use.
    """
    try:
        lock = disk.append(directory / LOCK, make=False)
    except PermissionError:  # somebody else's; where a lock may be read, it can be held on many file systems
        try:
            lock = disk.open_to_read(directory / LOCK)
        except OSError:
            yield False
            return
    except (OSError, PlaceError) as error:
        yield isinstance(error, FileNotFoundError)
        return
    with lock:
        try:
            is_free = locks.acquire(lock) and _is_at(lock, directory / LOCK)
        except OSError:
            is_free = False
        yield is_free


@contextmanager
def _locked(directory: Path, attempts: int = 2) -> Iterator[tuple[FileIO, bool]]:
    """Make a directory and hold its lock; gives the open lock, and whether the file system has locks."""
    for attempt in range(1, attempts + 1):
        make_directories(directory)
        try:
            lock = disk.append(directory / LOCK)
        except FileNotFoundError:  # the process that finished there has just removed the directory
            if attempt == attempts:
                raise
            continue
        with lock:
            is_locked = _lock(lock, directory)
            if attempt < attempts and not _is_at(lock, directory / LOCK):
                continue  # removed after it was opened: a lock that nobody else sees
            yield lock, is_locked
        return


def _lock(lock: FileIO, directory: Path) -> bool:
    try:
        if not locks.acquire(lock):
            raise ValueError(
                f"another process is working in {directory}. Wait for it to finish, then run this again: it will use "
                "the results."
            )
    except OSError as error:
        logger.info(
            "no lock on %s (%s): make sure that no other process does the same work",
            directory,
            error.strerror or error,
        )
        return False
    return True


def _is_at(file: FileIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False
