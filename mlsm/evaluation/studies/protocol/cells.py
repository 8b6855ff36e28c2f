"""The commit that started each part of a study, and the state of each part.

    with at_work(directory, part.name, commit):    # StudyError if another commit started it
        part.run(progress)
    state_of(directory, part.name, finished)       # State("running", "73185cf...")

A part has a file <output>/cells/<part>. It contains the commit of this code that started the part, and it is locked
while a process works on the part. A part made by two commits would be the result of neither, so only the first commit
may continue it. A finished part is not run again. Whether a part is finished is decided from its own files (costs.py).
"""

import hashlib
import logging
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from mlsm.common import disk, locks
from mlsm.common.durable import make_directories, refuse_what_is_in_the_way
from mlsm.common.errors import StudyError
from mlsm.common.version import VERSION

logger = logging.getLogger(__name__)

PLACE = "cells"
MOST_BYTES = 200  # of the line


class State(NamedTuple):
    """The state of a part."""

    name: str
    """done, running, started (and interrupted), or missing"""
    commit: str | None
    """the commit that started it; None if unknown, as for a store that another command made"""


def this_commit() -> str:
    """The commit of this code, with `-dirty` and digits of a hash of the changes if files differ from it. Outside a
    checkout, the package's version.
    """
    root = Path(__file__).parents[4]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        tracked = subprocess.run([*command[:3], "ls-files", "--error-unmatch", __file__], capture_output=True)
        if tracked.returncode == 0:
            commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
            if not commit.endswith("-dirty"):
                return commit
            changes = subprocess.run([*command[:3], "diff", "HEAD", "--binary"], capture_output=True, check=True).stdout
            return f"{commit}-{hashlib.sha256(changes).hexdigest()[:12]}"
    except (OSError, subprocess.CalledProcessError):
        pass
    return f"version {VERSION}"


@contextmanager
def at_work(directory: Path, part: str, commit: str) -> Iterator[None]:
    """Hold the lock of a part.

    Only warns if the file system has no locks: then other processes are not kept out.

    commit  of `this_commit`
    Raises  StudyError if another commit started the part, or another process is working on it
    """
    file = _file(directory, part)
    with refuse_what_is_in_the_way():
        make_directories(file.parent)
    with disk.append(file) as lock:
        try:
            is_free = _acquire(lock)
        except OSError as error:
            is_free = True
            logger.warning("%s cannot be locked (%s); start no second process of this part", file, error)
        if not is_free:
            raise StudyError(f"{part}: another process is working on it. Wait for it to finish.")
        starter = _commit_in(file)
        if starter is None:  # new, or its process was killed here
            lock.truncate(0)
            disk.write(lock, f"{commit}\n".encode())
            disk.fsync(lock)
        elif starter != commit:
            raise StudyError(
                f"{part} was started by the code of {starter}, this is {commit}, and a part must be made by one "
                f"version. Use a checkout of that commit, or remove {file} and the files that the part has made."
            )
        try:
            yield
        finally:
            with suppress(OSError):  # a file system without locks
                locks.release(lock)


def state_of(directory: Path, part: str, finished: bool) -> State:
    """The state of a part.

    finished  whether its own files show that it is finished
    """
    file = _file(directory, part)
    try:
        commit = _commit_in(file)
        with disk.open_to_read(file) as lock:
            running = not _acquire_shared(lock)
    except FileNotFoundError:
        return State("done" if finished else "missing", None)
    return State("done" if finished else "running" if running else "started", commit)


def _acquire(lock: BinaryIO) -> bool:
    """Whether the part is free. `state_of` in another process locks it for an instant, which is waited for."""
    for _ in range(9):
        if locks.acquire(lock):
            return True
        time.sleep(0.1)
    return locks.acquire(lock)


def _acquire_shared(lock: BinaryIO) -> bool:
    """Whether the part is free; always on a file system without locks."""
    try:
        return locks.acquire(lock, shared=True)
    except OSError:
        return True


def _file(directory: Path, part: str) -> Path:
    return directory / PLACE / part


def _commit_in(file: Path) -> str | None:
    with disk.open_to_read(file) as stream:
        line = stream.read(MOST_BYTES)
    return line[:-1].decode(errors="replace") if line.endswith(b"\n") else None
