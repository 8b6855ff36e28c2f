"""What an interrupted dictionary learning leaves: a working directory, and the state in one file in it.

    with workplace(directory) as place:     # removed at the end, kept after an interruption

    checkpoint = Checkpoint(directory, request)
    state = checkpoint.load() or {...}
    checkpoint.save(state)                  # at most once in SECONDS_BETWEEN

The state appears whole or not at all. It belongs to a request (settings and identity of the vectors): another
request never goes on from it. One that is damaged or of another request is passed over with a note, and learning
starts afresh.
"""

import fcntl
import json
import logging
import os
import shutil
import time
import zipfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np

FORMAT = 1
SECONDS_BETWEEN = 60            # of work between two saves: one is 66 MB at k = 3072, d = 768, and took 0.2 to 0.7 s
FILE = "learning.npz"
logger = logging.getLogger(__name__)


class Checkpoint:
    """Saves and loads dicts of arrays and of one JSON value each, for one request."""

    def __init__(self, directory, request):
        """request  what must be equal to go on, anything that JSON can hold"""
        self.path = Path(directory) / FILE
        self.request = json.dumps({"format": FORMAT, **request}, sort_keys=True)
        self._saved = time.monotonic()

    def load(self):
        """The state that was saved last for this request, as (arrays by name, facts); None to start afresh."""
        try:
            with np.load(self.path, allow_pickle=False) as stored:      # its zip entries carry a CRC
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

    def save_if_due(self, make_state):
        """Save what make_state() returns, (arrays by name, facts), if the last save is long enough ago."""
        if time.monotonic() - self._saved >= SECONDS_BETWEEN:
            self.save(*make_state())

    def save(self, arrays, facts):
        """Replace the file: temporary name, fsync, rename."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f".{FILE}.tmp")
        try:
            with open(temporary, "wb") as file:
                np.savez(file, request=np.array(self.request), facts=np.array(json.dumps(facts)), **arrays)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)
        finally:
            temporary.unlink(missing_ok=True)
        self._saved = time.monotonic()


@contextmanager
def workplace(directory):
    """A directory for the parts of one learning: removed if the block ends well or leaves nothing, else kept.

    Raises ValueError if another process works in it (on this machine, or where the file system shares locks).
    """
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is learning in {directory}. Wait for it, then run this again: "
                             "it will find the dictionary.") from None
        try:
            yield directory
        except BaseException:
            if os.listdir(directory) == ["lock"]:
                shutil.rmtree(directory)
            raise
        shutil.rmtree(directory)
