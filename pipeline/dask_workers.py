"""Share a job's work among Dask workers. Imported only when needed, as importing Dask takes half a second.

    with WorkerPool(job) as pool:
        for item, result in pool.map(function, items): ...

Workers are processes of this machine (--workers: a cluster that stops quickly and prints nothing) or those of a running
scheduler (--scheduler). Each item is one task. A worker keeps objects from one item to the next. A task may run twice
or die at any point, so applying a function to an item again must do no harm. Errors are raised in the driver. A task's
result includes the log lines and warnings of our code.

The file has three parts: the pool, the cluster of this machine, and the workers' side. Not handled here: what happens
when an item kills workers (encode.py, sample.py), finding the text that kills them (failures.py), clusters of several
machines (docs/clusters.md).
"""

import asyncio
import logging
import os
import signal
import socket
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from multiprocessing import resource_tracker
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import dask
import numpy as np
from distributed import Client, Nanny, Scheduler, SpecCluster, Status, WorkerPlugin, as_completed, get_worker
from distributed.comm import CommClosedError
from distributed.scheduler import KilledWorker
from distributed.utils import LoopRunner

from mlsm.common import disk
from mlsm.common.durable import appearing_whole, make_directories
from mlsm.common.errors import EncodeError, describe
from mlsm.common.extras import name_extras
from mlsm.common.machine import available_cores
from mlsm.common.progress import silent
from mlsm.common.version import VERSION, digest_of_code
from pipeline.executor import KILLED, PART, Context, Executor, Function, Results

if TYPE_CHECKING:
    from tornado.ioloop import IOLoop

SECONDS_TO_ANSWER = 10  # a scheduler must answer within this time
SECONDS_TO_STOP = 2  # time for telling workers that they are no longer needed
SECONDS_BETWEEN_LOOKS = 0.02
SECONDS_BETWEEN_COUNTS = 5  # of the workers of a scheduler
NAMED_WORKERS = 5
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS", "RAYON_NUM_THREADS")
LOGGERS = ("distributed", "distributed.client", "distributed.gc", "bokeh", "tornado", "tornado.application", "asyncio")
OTHER_VERSION = "has another version of mlsm than this command. Install the same one there, and restart the worker."
OURS = ("mlsm", "pipeline", "shards")  # loggers whose lines are passed on
Note: TypeAlias = tuple[str | None, Any, str]  # (logger's name, level, text) or (None, class of a warning, text)
# Of what a worker runs; at import, as a running worker keeps its code when files change.
CODE = digest_of_code("mlsm/common", "pipeline", "shards")
_levels_before: dict[str, int] = {}  # of LOGGERS, while an error keeps them hidden
_one_task = threading.Lock()  # per process: tasks share its directory, loggers and coders
logger = logging.getLogger(__name__)


class WorkerPool(Executor):
    """The workers of one command. They start with the first item and are stopped after the `with` block."""

    batches_at_once = 8

    def __init__(self, job: Any):
        super().__init__(job)
        self._name = f"mlsm-{uuid.uuid4().hex}"
        self._client: Any = None
        self._cluster: Any = None  # only if this process started it
        self._reports: SimpleQueue[Sequence[Any]] = SimpleQueue()

    def __enter__(self) -> Self:
        self._opened = ExitStack()
        return self

    def __exit__(self, *error: object) -> None:
        with self._opened:
            if self._client:
                with suppress(Exception):  # we may be here because the cluster was lost
                    forget = self._client._unregister_worker_plugin  # workers end their tasks and forget the job
                    self._client.sync(forget, self._name, callback_timeout=SECONDS_TO_STOP)

    def map(
        self, function: Function, items: Iterable[Any], *, trials: int = 2, report: Callable[..., None] = silent
    ) -> Results:
        """See Executor. Results come in the order in which workers finish."""
        try:
            yield from self._map_as_they_end(function, iter(items), trials, report)
        except (CancelledError, CommClosedError) as error:
            raise ConnectionError(
                "the scheduler has stopped; finished units are kept. Run the same command to resume"
            ) from error

    def _map_as_they_end(self, function, items, trials, report):
        first = list(islice(items, 1))
        if not first:
            return  # without an item no worker is started
        client = self._start()
        running, ended = {}, as_completed(loop=client.loop)

        def submit(item, trial=1):
            future = client.submit(perform, self._name, function, item, pure=False)
            running[future] = item, trial
            ended.add(future)

        def fill():
            room = 2 * sum(client.nthreads().values()) + 4
            for item in islice(items, max(0, room - len(running))):
                submit(item)

        submit(*first)
        fill()
        while running:
            future = self._next(ended, report)
            item, trial = running.pop(future)
            try:
                notes, result = future.result()
            except KilledWorker:
                if trial < trials:
                    submit(item, trial + 1)
                    continue
                result = KILLED
            except Exception as error:
                _pass_on(getattr(error, "worker_notes", ()))
                raise
            else:
                _pass_on(notes)
            yield item, result
            fill()

    def _start(self):
        """The client of the workers, which are started at the first call."""
        if self._client is None:
            self._client = self._connect()
            if self._cluster is None:
                self._wait_for_a_worker()
                _check_workers(self._client, Path(self.job.config.output))
            self._client.subscribe_topic(self._name, lambda event: self._reports.put(event[1]))
            self._client.register_plugin(Work(self.job, self._name), name=self._name)
            logger.info("workers at %s, dashboard %s", self._client.scheduler.address, self._client.dashboard_link)
        return self._client

    def _wait_for_a_worker(self):
        """Wait for the first worker if there is none yet: only workers that are there can be examined.

        Raises  EncodeError if it ends at once
        """
        if self._client.nthreads():
            return
        address = self._client.scheduler.address
        logger.warning("no worker is connected to %s yet: waiting for one", address)
        try:
            self._client.submit(int, pure=False).result()  # a cluster that adapts to its tasks starts one for this
        except KilledWorker as error:
            raise EncodeError(
                f"--scheduler {address}: the first worker ended at once. Its own log says why."
            ) from error

    def _connect(self):
        config, enter = self.job.config, self._opened.enter_context
        enter(quiet())
        loop, address = enter(event_loop()), config.scheduler
        if address is None:
            self._cluster = enter(local_cluster(config.workers, getattr(config, "device", "cpu"), loop))
            address = self._cluster.scheduler_address
        try:
            return enter(Client(address, loop=loop, set_as_default=False, timeout=SECONDS_TO_ANSWER))
        except (OSError, ValueError) as error:
            if config.scheduler is None:
                raise EncodeError(f"the workers could not be started ({error}). Run the same command again.") from error
            raise EncodeError(
                f"--scheduler {address}: no scheduler answers there ({error}). Start one with: dask scheduler"
            ) from error

    def _next(self, ended, report):
        """The next future that ends; meanwhile workers' reports are passed on. Raises ChildProcessError if no worker is
        left.
        """
        looked, alone = time.monotonic(), False
        while not ended.has_ready():
            while not self._reports.empty():
                report(*self._reports.get())
            if self._cluster and is_lost(self._cluster):
                raise ChildProcessError("no worker is left and none can be started; finished units are kept")
            if self._cluster is None and time.monotonic() > looked + SECONDS_BETWEEN_COUNTS:
                looked, was_alone = time.monotonic(), alone
                with suppress(OSError, AttributeError):  # the futures tell if the scheduler has ended
                    alone = not self._client.nthreads()
                if alone and not was_alone:
                    logger.warning("no worker is connected to the scheduler any more; waiting for one")
            time.sleep(SECONDS_BETWEEN_LOOKS)
        return next(ended)


def _check_workers(client, output):
    """Raise EncodeError naming the workers that lack our package, have another version of it, or see other files."""
    make_directories(output)
    shared, text = disk.temporary_name(output.absolute(), "seen-by-workers"), uuid.uuid4().hex
    shared.write_text(text)
    try:
        found = client.run(_examination(), str(shared), on_error="return")
    finally:
        disk.discard(shared)
    trouble = []
    for address, answer in sorted(found.items()):
        if isinstance(answer, BaseException):
            trouble.append(f"{address} cannot be examined ({describe(answer)}). Use the same version of Python there.")
            continue
        host, code, seen = answer
        who = f"{address} on {host}"
        if code is None:
            trouble.append(f"{who} does not have mlsm. Install mlsm-pretrain {VERSION} there, and restart the worker.")
        elif code != CODE:
            trouble.append(f"{who} {OTHER_VERSION}")
        elif seen != text:
            trouble.append(
                f"{who} does not see {output.absolute()}. Workers need this machine's files by the same names."
            )
    if trouble:
        more = f" And {len(trouble) - NAMED_WORKERS} more workers." if len(trouble) > NAMED_WORKERS else ""
        raise EncodeError(f"--scheduler: {' '.join(f'The worker {said}' for said in trouble[:NAMED_WORKERS])}{more}")


def _examination():
    """A function for workers that may lack our package: as an inner function it is sent whole, not by name."""

    def examine(path):
        import socket

        try:
            from pipeline import dask_workers

            code = getattr(dask_workers, "CODE", "none")
        except ImportError:  # no `pipeline`, or another package of this name
            code = None
        try:
            with open(path) as file:
                seen = file.read()
        except OSError:
            seen = None
        return socket.gethostname(), code, seen

    return examine


def _pass_on(notes):
    """Repeat a task's log lines and warnings in this process."""
    for name, kind, text in notes:
        if name is None:
            warnings.warn(text, kind, stacklevel=2)
        else:
            logging.getLogger(name).log(kind, "%s", text)


# -- the cluster of this machine ---------------------------------------------------------------------------


@contextmanager
def local_cluster(workers: int, device: str, loop: "IOLoop") -> Iterator[SpecCluster]:
    """A cluster of this many workers, until the block ends.

    device  as the settings name it; for "cpu", workers get no GPU
    loop    an event loop from `event_loop`
    """
    gpus = visible_gpus(device)
    with _environment_kept(), dask.config.set(_settings(workers)):
        with _environment_kept(), _naming_the_cause():  # keeps the driver's own; a restarted worker changes it again
            cluster = SpecCluster(
                workers={
                    number: {"cls": Nanny, "options": _NANNY | {"env": gpu_of(number, gpus)}}
                    for number in range(workers)
                },
                scheduler={"cls": Scheduler, "options": _SCHEDULER},
                loop=loop,
                silence_logs=logging.CRITICAL,
                shutdown_on_close=False,  # at exit, after Ctrl-C while it started: workers end with this process
            )
        try:
            yield cluster
        finally:
            cluster.sync(_end, list(cluster.workers.values()))
            with suppress(TimeoutError):
                cluster.close(timeout=SECONDS_TO_STOP)


@contextmanager
def _naming_the_cause():
    """Name what kept the workers from starting, for which Dask has no class of its own."""
    try:
        yield
    except RuntimeError as error:
        cause = describe(error.__cause__ or error)
        raise ChildProcessError(
            f"the workers could not be started ({cause}). Use fewer if memory is short. A script must call this below "
            'if __name__ == "__main__":'
        ) from error


async def _end(nannies):
    """Kill the workers: a regular shutdown takes seconds, and files that must not remain are already removed."""
    await asyncio.gather(*(nanny.close(timeout=0.5) for nanny in nannies), return_exceptions=True)


_ENDED = {Status.closing, Status.closed, Status.failed}
_SCHEDULER = {"host": "127.0.0.1", "port": 0, "dashboard_address": "127.0.0.1:0", "allowed_failures": 0}
_NANNY = {
    "host": "127.0.0.1",
    "nthreads": 1,
    "memory_limit": 0,
    "dashboard": False,
    "silence_logs": logging.CRITICAL,
}


def _settings(workers):
    """Dask's settings of scheduler, nannies and workers; the environment's own counts of threads take precedence."""
    threads = max(1, available_cores() // workers)
    levels = {f"DASK_LOGGING__{name.upper()}": "critical" for name in LOGGERS if "." not in name}
    return {
        "distributed.nanny.pre-spawn-environ": dict.fromkeys(THREADS, threads) | levels,
        "distributed.scheduler.worker-saturation": 1.0,  # one task per worker, so that a death can be blamed on it
        "distributed.deploy.lost-worker-timeout": "1 hour",  # a new worker may need a minute on a busy machine
        "distributed.worker.profile.enabled": False,
    }


def visible_gpus(device: str) -> list[str]:
    """Names of the GPUs that workers on a device may share, in the form of CUDA_VISIBLE_DEVICES."""
    if device == "cpu":
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [gpu.strip() for gpu in named.split(",") if gpu.strip()]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def gpu_of(number: int, gpus: Sequence[str]) -> dict[str, str]:
    """The environment that gives a worker its GPU."""
    return {"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]} if gpus else {}


def is_lost(cluster: SpecCluster) -> bool:
    """Whether a local cluster has no worker left, because a dead worker could not be replaced."""
    return all(nanny.status in _ENDED for nanny in cluster.workers.values())


@contextmanager
def event_loop() -> Iterator["IOLoop"]:
    """An event loop in a thread. Ctrl-C, SIGTERM and SIGHUP do not reach it or the processes that it starts: the driver
    ends those, and they must not die of a signal before that."""
    ours = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}  # any may come to the whole process group
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ours)  # a thread inherits this, and a process
    try:
        # The tracker ignores Ctrl-C and SIGTERM by itself, but not SIGHUP. Starting it unblocks the former two here.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, ours)
        runner = LoopRunner()
        runner.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        yield runner.loop
    finally:
        runner.stop()


@contextmanager
def quiet() -> Iterator[None]:
    """Keep Dask's log lines off the terminal: dead workers that matter are reported by this package.

    After an error they stay hidden until the end of the next block without one, because an interrupted start logs
    complaints as late as its garbage collection.
    Lines of distributed.process are always hidden: it names each worker that has not ended when this process exits.
    """
    logging.getLogger("distributed.process").setLevel(logging.CRITICAL)
    levels = {name: _levels_before.get(name, logging.getLogger(name).level) for name in LOGGERS}
    for name in levels:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    except BaseException:
        _levels_before.update(levels)
        raise
    _levels_before.clear()
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@contextmanager
def _environment_kept():
    """Restore this process's environment, which nannies change to set their workers' environment."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


# -- what a worker does ------------------------------------------------------------------------------------


class Dismissed(Exception):
    """Ends a task whose driver no longer exists."""


def perform(name: str, function: Function, item: Any) -> tuple[list[Note], Any]:
    """Apply a function to an item with the Work of that name in this process. Returns its notes and its result."""
    return get_worker().plugins[name].perform(function, item)


class Work(WorkerPlugin):
    """A job for a worker. The driver makes it, and relative paths start in the driver's working directory.

    topic  under which the driver receives reports
    """

    def __init__(self, job: Any, topic: str):
        self._job, self._topic, self._directory, self._code = job, topic, os.getcwd(), CODE
        self._is_ours = job.config.scheduler is None  # the driver started this process for itself
        self._umask = os.umask(0o077)
        os.umask(self._umask)

    def setup(self, worker: Any) -> None:
        self._stopped = threading.Event()
        self._context = WorkerContext(self._job, self._stopped)
        topic = self._topic  # a reference to `self` would keep the teacher in memory after the command's end
        self._context.report = lambda *report: worker.log_event(topic, report)

    def teardown(self, worker: Any) -> None:
        """End the task in flight at its next window.

        A local worker may be killed before that, so its temporary files are removed now, and it makes no more.
        """
        self._stopped.set()
        if self._is_ours:
            disk.end_writing()

    def perform(self, function: Function, item: Any) -> tuple[list[Note], Any]:
        """The notes and the result of a task; an error has the notes as `worker_notes`."""
        with _one_task, _collect_notes() as notes:
            try:
                self._go_to_directory()
                with name_extras(f"a worker on {socket.gethostname()}"):
                    (result,) = function(self._context, iter([item]))
                return notes, result
            except Exception as error:
                vars(error)["worker_notes"] = notes
                raise

    def _go_to_directory(self):
        if self._code != CODE:  # it joined after the driver had checked the workers
            raise EncodeError(f"a worker on {socket.gethostname()} {OTHER_VERSION}")
        try:
            os.chdir(self._directory)  # each time: the process may serve other commands as well
            os.umask(self._umask)  # so that whoever may read the driver's files may read the worker's
        except OSError as error:
            raise EncodeError(
                f"a worker on {socket.gethostname()} does not see {self._directory} ({error.strerror}). Workers "
                "need the driver's files under the same names."
            ) from None
        disk.follow_no_links_below(self._job.config.output)  # as in the driver, by its settings


class WorkerContext(Context):
    """A worker's Context: arrays are passed in files, and it stops when the driver no longer exists."""

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
