"""Working directories, which hold the intermediate files of long work until it is done.

    with workplace(directory, files=("sample.npy", "part-*.npz")) as place:     # removed at the end

A working directory remains after an interruption, so that the same command can resume. Its file `lock` is locked while
a process works there. The file's first line is MARK; the other lines are patterns of the names of the work's files.
With these, `clean` (shards/clean.py) recognises an abandoned working directory and removes only the work's own files.
What the files contain, and how work resumes, is decided elsewhere (for example in pipeline/dictionary/checkpoint.py).
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
_ATTEMPTS = 2  # to lock a directory that another process may remove at that moment
_LONGEST_MARK = 4096  # bytes; another program's file of that name may have any size
logger = logging.getLogger(__name__)


@contextmanager
def workplace(directory: Path, files: Sequence[str]) -> Iterator[Path]:
    """A directory for intermediate files: removed if the block succeeds or leaves it empty, else kept.

    First, temporary files of a killed process are removed, if the lock shows that no other process is writing them.

    files   fnmatch patterns of the names of the work's files
    Raises  ValueError if another process works in it (on this machine, or on any machine if the file system shares
            locks)
    """
    try:
        with _locked(directory) as (lock, is_locked):
            with suppress(OSError):  # without a mark, only `clean` does not recognise it
                if os.fstat(lock.fileno()).st_nlink == 1:  # else it may be a hard link to another file
                    lock.truncate(0)
                    lock.write("\n".join((MARK, *files, "")).encode())
            if is_locked:
                disk.remove_leftovers(directory)  # maybe gigabytes
            try:
                yield directory
            except BaseException:
                if os.listdir(directory) == [LOCK]:
                    _empty(directory)
                raise
            _empty(directory)
    finally:
        _remove_if_empty(directory)


def discard(directory: Path) -> None:
    """Remove a working directory that is no longer needed, unless another process may be working in it."""
    if directory.is_dir():
        with suppress(OSError, ValueError):  # PlaceError is one
            with _locked(directory) as (_, is_locked):
                if is_locked:
                    _empty(directory)
            _remove_if_empty(directory)


def _empty(directory: Path) -> None:
    """Remove everything in a working directory while its lock is held. Without its file, which goes last, the lock
    excludes no other process.
    """
    with suppress(OSError):
        for name in os.listdir(directory):
            if name != LOCK:
                disk.remove(directory / name)
        disk.unlink(directory / LOCK)


def _remove_if_empty(directory: Path) -> None:
    """Remove a working directory in which no other process has started. Call it after the lock was closed: NFS does not
    remove the directory of an open file.
    """
    with suppress(OSError, PlaceError):
        disk.rmdir(directory)


def read_mark(directory: Path) -> list[str] | None:
    """The patterns in the lock file of a working directory; None if the directory is not marked as one."""
    try:
        with disk.open_to_read(directory / LOCK) as file:
            first, *files = file.read(_LONGEST_MARK).decode().splitlines() or [""]
    except (OSError, UnicodeDecodeError):
        return None
    return files if first == MARK else None


def is_part(name: str, files: Sequence[str]) -> bool:
    """Whether a file in a working directory is its lock, or its name matches one of the patterns `files`."""
    return name == LOCK or any(fnmatchcase(name, pattern) for pattern in files)


@contextmanager
def lock_if_free(directory: Path) -> Iterator[bool]:
    """Lock another process's working directory if it is free. Gives whether it was.

    A directory without a file `lock` counts as free. On a file system without locks, it counts as in use.
    """
    try:
        lock = disk.append(directory / LOCK, make=False)
    except PermissionError:  # another user's; on many file systems a lock can be held on a readable file
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
def _locked(directory: Path) -> Iterator[tuple[FileIO, bool]]:
    """Make a directory and hold its lock. Gives the open lock file, and whether the file system has locks."""
    for attempt in range(1, _ATTEMPTS + 1):
        make_directories(directory)
        try:
            lock = disk.append(directory / LOCK)
        except FileNotFoundError:  # the process that finished there has just removed the directory
            if attempt == _ATTEMPTS:
                raise
            continue
        with lock:
            is_locked = _lock(lock, directory)
            if attempt < _ATTEMPTS and not _is_at(lock, directory / LOCK):
                continue  # removed after it was opened, so no other process sees this lock
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
