"""What an interrupted dictionary learning leaves behind: a working directory with its state in one file.

    with workplace(directory) as place:     # removed at the end, kept after an interruption

    checkpoint = Checkpoint(directory, request)
    state = checkpoint.load() or {...}
    checkpoint.save_if_due(make_state)      # at most once in SECONDS_BETWEEN

The state appears whole or not at all; one that cannot be written does not end the learning. It belongs to a request
(settings and identity of the vectors): another request never goes on from it. A state that is
damaged or belongs to another request is ignored with a note in the log, and learning starts afresh.
"""

import json
import logging
import os
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from common import locks
from common.durable import appearing_whole

FORMAT = 1
SECONDS_BETWEEN = 60  # of work between two saves: one is 66 MB at k = 3072, d = 768, and took 0.2 to 0.7 s
FILE, LOCK = "learning.npz", "lock"
State = tuple[dict[str, Any], dict]  # arrays by name, and facts that JSON can hold
logger = logging.getLogger(__name__)


class Checkpoint:
    """Saves and loads dicts of arrays and of one JSON value each, for one request."""

    def __init__(self, directory: str | Path, request: dict):
        """request  what must be equal for a learning to go on: anything that JSON can hold"""
        self.path = Path(directory) / FILE
        self.request = json.dumps({"format": FORMAT, **request}, sort_keys=True)
        self._saved = time.monotonic()

    def load(self) -> State | None:
        """The state that was saved last for this request, as (arrays by name, facts); None to start afresh."""
        try:
            with np.load(self.path, allow_pickle=False) as stored:  # its zip entries carry a CRC
                found = {name: stored[name] for name in stored.files}
            request, facts = str(found.pop("request")), json.loads(str(found.pop("facts")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, NotImplementedError) as error:
            logger.info("the checkpoint %s is damaged (%s): learning starts afresh", self.path, error)
            return None
        if request != self.request:
            logger.info("the checkpoint %s is of other settings or vectors: learning starts afresh", self.path)
            return None
        return found, facts

    def save_if_due(self, make_state: Callable[[], State]) -> None:
        """Save what make_state() returns, (arrays by name, facts), if the last save is long enough ago."""
        if time.monotonic() - self._saved >= SECONDS_BETWEEN:
            self.save(*make_state())

    def save(self, arrays: dict[str, Any], facts: dict) -> None:
        """Replace the file, which appears whole. One that cannot be written is a note: learning needs none."""
        self._saved = time.monotonic()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with appearing_whole(self.path) as file:
                np.savez(file, request=np.array(self.request), facts=np.array(json.dumps(facts)), **arrays)
        except OSError as error:
            logger.info(
                "the checkpoint %s could not be written (%s): learning goes on; an interruption costs what "
                "came since the one before",
                self.path,
                error.strerror or error,
            )


def forget(directory: Path) -> None:
    """Remove the state in a working directory, if there is one."""
    (directory / FILE).unlink(missing_ok=True)


@contextmanager
def workplace(directory: Path) -> Iterator[Path]:
    """A directory for the parts of one learning: removed if the block ends well or leaves nothing, else kept.

    Temporaries that a killed process left there are removed first, where the lock says that nobody else writes them.

    Raises ValueError if another process works in it (on this machine, or where the file system shares locks).
    """
    with _locked(directory) as is_locked:
        for left in directory.glob(".*.tmp") if is_locked else ():  # by a killed process; a sample may be gigabytes
            left.unlink()
        try:
            yield directory
        except BaseException:
            if os.listdir(directory) == [LOCK]:
                shutil.rmtree(directory, ignore_errors=True)
            raise
    shutil.rmtree(directory, ignore_errors=True)  # the lock is closed: NFS keeps an open file's directory


def discard(directory: Path) -> None:
    """Remove a working directory that nobody needs any more, unless someone may be working in it."""
    if directory.is_dir():
        with suppress(OSError, ValueError):
            with _locked(directory) as is_locked:
                pass
            if is_locked:
                shutil.rmtree(directory)


@contextmanager
def _locked(directory, attempts=2):
    """Make a directory and hold its lock; gives whether the file system has locks."""
    for attempt in range(1, attempts + 1):
        directory.mkdir(parents=True, exist_ok=True)
        try:
            lock = open(directory / LOCK, "w")  # noqa: SIM115 (closed below)
        except FileNotFoundError:  # whoever finished there removed the directory just now
            if attempt == attempts:
                raise
            continue
        with lock:
            is_locked = _lock(lock, directory)
            if attempt < attempts and not _is_at(lock, directory / LOCK):
                continue  # removed after it was opened: a lock that nobody else sees
            yield is_locked
        return


def _lock(lock, directory):
    try:
        if not locks.acquire(lock):
            raise ValueError(
                f"another process is at work in {directory}. Wait for it, then run this again: "
                "it will find what that has made."
            )
    except OSError as error:
        logger.info(
            "no lock on %s (%s): see that no other process learns the same dictionary",
            directory,
            error.strerror or error,
        )
        return False
    return True


def _is_at(file, path):
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False
