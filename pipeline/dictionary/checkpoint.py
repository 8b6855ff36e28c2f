"""The state of an interrupted dictionary learning, one file in its working directory (mlsm/common/workplaces.py).

    checkpoint = Checkpoint(directory, request)
    state = checkpoint.load() or {...}
    checkpoint.save_if_due(make_state)      # at most once in SECONDS_BETWEEN

The state appears whole or not at all. If it cannot be written, learning continues. It belongs to a request (settings
and identity of the vectors), and another request never continues from it. A state that is damaged or belongs to another
request is ignored with a note in the log, and learning starts from scratch.
"""

import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from mlsm.common import disk
from mlsm.common.arrays import read_npz
from mlsm.common.durable import appearing_whole, make_directories

FORMAT = 1
SECONDS_BETWEEN = 60  # between two saves; a save at k = 3072, d = 768 is 66 MB and took 0.2 to 0.7 s
State = tuple[dict[str, Any], dict]  # arrays by name, and facts that JSON can hold
FILE = "learning.npz"
logger = logging.getLogger(__name__)


class Checkpoint:
    """Saves and loads dicts of arrays and of one JSON value each, for one request."""

    def __init__(self, directory: str | Path, request: dict):
        """request  JSON value that must be equal for learning to continue"""
        self.path = Path(directory) / FILE
        self.request = json.dumps({"format": FORMAT, **request}, sort_keys=True)
        self._saved = time.monotonic()

    def load(self) -> State | None:
        """The state that was saved last for this request, as (arrays by name, facts); None to start from scratch.

        Raises  OSError if the file cannot be read now: it may be whole
        """
        try:
            found = read_npz(self.path)
            request, facts = str(found.pop("request")), json.loads(str(found.pop("facts")))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError) as error:
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
        """Replace the file, which appears whole. If that fails, only log a note, as learning does not need the file."""
        self._saved = time.monotonic()
        try:
            make_directories(self.path.parent)
            with appearing_whole(self.path) as file:
                np.savez(file, request=np.array(self.request), facts=np.array(json.dumps(facts)), **arrays)
        except OSError as error:
            logger.info(
                "the checkpoint %s could not be written (%s): learning continues; an interruption costs what "
                "came since the one before",
                self.path,
                error.strerror or error,
            )


def forget(directory: Path) -> None:
    """Remove the state in a working directory, if there is one."""
    with suppress(FileNotFoundError):
        disk.unlink(directory / FILE)
