"""What a Dask worker does for a job: one task at a time, on what it keeps from task to task.

    client.register_plugin(Work.of(job), name)
    client.submit(perform, name, encode, argument)

The plugin carries settings, tokenizer and the scan's findings to every worker, once, also to those that join later.
Teacher and coder are loaded at the first task that needs them. What we log or warn of during a task comes back with its
result. Left out: which tasks there are, and what follows from a worker's death (distributed.py).
"""

import logging
import os
import socket
import threading
import uuid
import warnings
from contextlib import contextmanager

import numpy as np
from distributed import WorkerPlugin, get_worker

from common.disk import discard_all
from common.durable import appearing_whole
from common.errors import EncodeError
from common.progress import silent
from pipeline import encode as encoding
from pipeline import plan as planning
from pipeline.job import Job, check_same_teacher, load_teacher
from pipeline.learn import rows_of_batch, sample_dtype

PART = ".part-"  # begins the names of the files in which a sample's parts come
OURS = ("pipeline", "shards")  # loggers whose lines are passed on
_one_task = threading.Lock()  # in a process: its directory, its loggers and its coders serve one at a time


class Dismissed(Exception):
    """Ends a task whose driver has gone."""


def perform(name, task, argument):
    """Run task(work, *argument) for the Work of that name in this process. Returns its notes and its result."""
    return get_worker().plugins[name].perform(task, argument)


class Work(WorkerPlugin):
    """A job as a worker knows it.

    directory  the driver's working directory, from which relative paths are seen
    is_ours    whether the driver started this process and nobody else uses it
    """

    def __init__(self, config, tokenizer, planned, directory, is_ours):
        self._config, self._tokenizer, self._planned = config, tokenizer, planned
        self._directory, self._is_ours = directory, is_ours

    @classmethod
    def of(cls, job):
        return cls(job.config, job.tokenizer, job.planned, os.getcwd(), job.config.scheduler is None)

    def setup(self, worker):
        self._stopped = threading.Event()
        self._job, self._coder, self._read = None, (None, None), (None, None)

    def teardown(self, worker):
        """End the task in flight at its next window. A process of ours may be killed before: nothing shall stay."""
        self._stopped.set()
        if self._is_ours:
            discard_all()

    def perform(self, task, argument):
        """The notes and the result of a task; an error carries its notes as `worker_notes`."""
        with _one_task, _notes() as notes:
            try:
                self._go_to_directory()
                return notes, task(self, *argument)
            except Exception as error:
                error.worker_notes = notes
                raise

    def _go_to_directory(self):
        try:
            os.chdir(self._directory)  # each time: the process may serve other commands as well
        except OSError as error:
            raise EncodeError(
                f"a worker on {socket.gethostname()} does not see {self._directory} ({error.strerror}). Workers "
                "need the driver's files under the same names."
            ) from None

    @property
    def job(self):
        if self._job is None:
            self._job = Job(self._config, self._tokenizer, silent, self._planned)
        return self._job

    def unit(self, number):
        return self.job.plan.units[number]

    def windows(self, unit):
        for window in self.job.windows(unit):
            if self._stopped.is_set():
                raise Dismissed
            yield window

    def all_windows(self, unit):
        """List of a unit's windows; that of the unit asked for last is kept."""
        if self._read[0] != unit.id:
            self._read = unit.id, list(self.windows(unit))
        return self._read[1]

    def stores_and_coder(self, stores, make_coder):
        """OpenStores at the paths and what codes for them, kept for the next task."""
        if self._coder[0] != (stores, make_coder):
            opened = [encoding.OpenStore(self.job, path) for path in stores]
            self._coder = (stores, make_coder), (opened, make_coder(self.job, opened))
        return self._coder[1]


# -- tasks -------------------------------------------------------------------------------------------------


def encode(work, number, outputs, failed, stores, make_coder):
    """Encode what some stores lack of a unit. Arguments and result as `encode.encode_unit`."""
    unit = work.unit(number)
    opened, coder = work.stores_and_coder(stores, make_coder)
    return encoding.encode_unit(work.job, opened, unit, outputs, coder, work.windows, failed)


def count_windows(work, number):
    """How many windows a unit has."""
    return len(work.all_windows(work.unit(number)))


def code_in_vain(work, number, first, stop, output, stores, make_coder):
    """Code a range of a unit's windows and keep nothing. Only whether this process survives it counts."""
    _, coder = work.stores_and_coder(stores, make_coder)
    try:
        encoding.code_in_vain(coder, work.all_windows(work.unit(number))[first:stop], output)
    except Exception:
        logging.getLogger(__name__).debug("raises, and so does not kill", exc_info=True)


def candidates(work, number, seed, bound):
    """Windows of a unit for the sample, as `plan.candidates`."""
    unit = work.unit(number)
    return list(planning.candidates(unit, work.windows(unit), seed, bound))


def hidden_rows(work, batches, layers, place, expected):
    """Write the hidden states of some batches, as the sample holds them, to a new file in `place` for every layer.

    expected  fingerprint and precision of the driver's teacher
    Returns   list of the files' names
    """
    teacher = load_teacher(work.job)
    check_same_teacher(teacher, *expected)
    rows = [rows_of_batch(work.job, teacher, layers, windows) for windows in batches]
    dtype = sample_dtype(work.job, teacher).base
    return [_write_part(place, [of_layer[i] for of_layer in rows], dtype) for i in range(len(layers))]


def hidden_rows_in_vain(work, windows, layers):
    """The same of some windows, and keep nothing. Only whether this process survives it counts."""
    try:
        rows_of_batch(work.job, load_teacher(work.job), layers, windows)
    except Exception:
        logging.getLogger(__name__).debug("raises, and so does not kill", exc_info=True)


def _write_part(place, rows, dtype):
    name = f"{PART}{uuid.uuid4().hex}.npy"
    with appearing_whole(place / name) as file:
        np.save(file, np.concatenate(rows).astype(dtype))
    return name


# -- notes -------------------------------------------------------------------------------------------------


@contextmanager
def _notes():
    """A list of what is logged and warned of in the block: (logger's name, level, text) or (None, category, text)."""
    notes, handler = [], logging.Handler(logging.INFO)
    handler.emit = lambda record: notes.append((record.name, record.levelno, record.getMessage()))
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
