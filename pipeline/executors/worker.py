"""What a Dask worker does for a job: one item at a time, on what it keeps from item to item.

    client.register_plugin(Work(job), name)
    client.submit(perform, name, function, item)

The plugin carries the job to every worker, once, also to those that join later. What our code logs or warns of during a
task comes back with its result. Left out: which items there are, and what follows from a worker's death (dask.py).
"""

import hashlib
import logging
import os
import socket
import threading
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from distributed import WorkerPlugin, get_worker

from common import disk
from common.durable import appearing_whole
from common.errors import EncodeError
from pipeline.executors.base import PART, Context, Function

OTHER_VERSION = "has another version of mlsm than this command. Install the same one there, and restart the worker."
OURS = ("pipeline", "shards")  # loggers whose lines are passed on
Note: TypeAlias = tuple[str | None, Any, str]  # (logger's name, level, text) or (None, class of a warning, text)
_PACKAGES = ("common", "pipeline", "shards")  # what a worker runs
_one_task = threading.Lock()  # in a process: its directory, its loggers and its coders serve one at a time


def _digest_of_code() -> str:
    """Of the source files of the packages that a worker runs."""
    root, digest = Path(__file__).resolve().parent.parent.parent, hashlib.sha256()
    for file in sorted(file for package in _PACKAGES for file in (root / package).rglob("*.py")):
        digest.update(f"{file.relative_to(root).as_posix()} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


CODE = _digest_of_code()  # when this process imported it: a worker keeps its code when the files change


class Dismissed(Exception):
    """Ends a task whose driver has gone."""


def perform(name: str, function: Function, item: Any) -> tuple[list[Note], Any]:
    """Apply a function to an item with the Work of that name in this process. Returns its notes and its result."""
    return get_worker().plugins[name].perform(function, item)


class Work(WorkerPlugin):
    """A job as a worker knows it; made by the driver, in whose working directory relative paths begin."""

    def __init__(self, job: Any):
        self._job, self._directory, self._code = job, os.getcwd(), CODE
        self._is_ours = job.config.scheduler is None  # the driver started this process and nobody else uses it

    def setup(self, worker: Any) -> None:
        self._stopped = threading.Event()
        self._context = WorkerContext(self._job, self._stopped)

    def teardown(self, worker: Any) -> None:
        """End the task in flight at its next window.

        A process of ours may be killed before it gets there, so its temporary files are removed now.
        """
        self._stopped.set()
        if self._is_ours:
            disk.discard_all()

    def perform(self, function: Function, item: Any) -> tuple[list[Note], Any]:
        """The notes and the result of a task; an error carries its notes as `worker_notes`."""
        with _one_task, _collect_notes() as notes:
            try:
                self._go_to_directory()
                (result,) = function(self._context, iter([item]))
                return notes, result
            except Exception as error:
                vars(error)["worker_notes"] = notes
                raise

    def _go_to_directory(self):
        if self._code != CODE:  # it joined after the driver had looked at the workers
            raise EncodeError(f"a worker on {socket.gethostname()} {OTHER_VERSION}")
        try:
            os.chdir(self._directory)  # each time: the process may serve other commands as well
        except OSError as error:
            raise EncodeError(
                f"a worker on {socket.gethostname()} does not see {self._directory} ({error.strerror}). Workers "
                "need the driver's files under the same names."
            ) from None
        disk.follow_no_links_below(self._job.config.output)  # as in the driver, by its settings


class WorkerContext(Context):
    """A worker's Context: its arrays travel in files, and it stops when the driver has gone."""

    def __init__(self, job: Any, stopped: threading.Event):
        super().__init__(job)
        self._stopped = stopped

    def check_wanted(self) -> None:
        if self._stopped.is_set():
            raise Dismissed

    def pack(self, array: np.ndarray, place: Path) -> Path:
        path = place / f"{PART}{uuid.uuid4().hex}.npy"
        with appearing_whole(path) as file:
            np.save(file, array)
        return path


class _NotesHandler(logging.Handler):
    """Adds what is logged to a list of notes."""

    def __init__(self, notes: list[Note]):
        super().__init__(logging.INFO)
        self._notes = notes

    def emit(self, record):
        self._notes.append((record.name, record.levelno, record.getMessage()))


@contextmanager
def _collect_notes() -> Iterator[list[Note]]:
    """A list to which what is logged and warned of in the block is added."""
    notes: list[Note] = []
    handler = _NotesHandler(notes)
    loggers = [logging.getLogger(name) for name in OURS]
    for ours in loggers:
        ours.setLevel(logging.INFO)
        ours.propagate = False
        ours.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default", UserWarning)
            yield notes
        notes += [(None, w.category, str(w.message)) for w in caught if issubclass(w.category, UserWarning)]
    finally:
        for ours in loggers:
            ours.removeHandler(handler)
