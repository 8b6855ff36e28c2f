"""A job's work shared among Dask workers.

    with WorkerPool(job) as pool:
        for item, result in pool.map(function, items): ...

Workers are processes of this machine (--workers; cluster.py) or those of a running scheduler (--scheduler). Each item
is one task, and what a worker does for it is in worker.py. A task may run twice or die anywhere, so it must do no harm
to apply a function to an item again. Errors come back to the driver.
Left out: what follows when an item kills workers (units.py, sample.py), and how the text that does it is found
(killers.py).
"""

import logging
import time
import uuid
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError
from contextlib import ExitStack, suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import Any, Self

from distributed import Client, as_completed
from distributed.comm import CommClosedError
from distributed.scheduler import KilledWorker

from common import disk
from common.durable import make_directories
from common.errors import EncodeError, describe
from common.progress import silent
from pipeline.executors.base import KILLED, Executor, Function, Results
from pipeline.executors.cluster import SECONDS_TO_STOP, event_loop, is_lost, local_cluster, quiet
from pipeline.executors.worker import CODE, OTHER_VERSION, Work, perform

SECONDS_TO_ANSWER = 10  # in which a scheduler must answer
NAMED_WORKERS = 5
SECONDS_BETWEEN_LOOKS = 0.02
logger = logging.getLogger(__name__)


class WorkerPool(Executor):
    """The workers of one command, which are started for the first item and gone after the `with` block."""

    grain = 8

    def __init__(self, job: Any):
        super().__init__(job)
        self._name = f"mlsm-{uuid.uuid4().hex}"
        self._client: Any = None
        self._cluster: Any = None  # only if this process started it

    def __enter__(self) -> Self:
        self._opened = ExitStack()
        return self

    def __exit__(self, *error: object) -> None:
        with self._opened:
            if self._client:
                with suppress(Exception):  # it may be the cluster's loss that brought us here
                    forget = self._client._unregister_worker_plugin  # workers end what they do and forget the job
                    self._client.sync(forget, self._name, callback_timeout=SECONDS_TO_STOP)

    def map(
        self, function: Function, items: Iterable[Any], *, trials: int = 2, report: Callable[..., None] = silent
    ) -> Results:
        """As of Executor, in the order in which workers end. What functions report on their way is not heard."""
        try:
            yield from self._map_as_they_end(function, iter(items), trials)
        except (CancelledError, CommClosedError) as error:
            raise ConnectionError(
                "the scheduler is gone; finished units are kept. Run the same command to go on"
            ) from error

    def _map_as_they_end(self, function, items, trials):
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
            future = self._next(ended)
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
                _check_workers(self._client, Path(self.job.config.output))
            self._client.register_plugin(Work(self.job), name=self._name)
            logger.info("workers at %s, dashboard %s", self._client.scheduler.address, self._client.dashboard_link)
        return self._client

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
            raise EncodeError(
                f"--scheduler {address}: no scheduler answers there ({error}). Start one with: dask scheduler"
            ) from error

    def _next(self, ended):
        """The next future that ends. Raises ChildProcessError if no worker is left to end one."""
        while not ended.has_ready():
            if self._cluster and is_lost(self._cluster):
                raise ChildProcessError("no worker is left and none can be started; finished units are kept")
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
    try:
        release = f"mlsm {version('mlsm')}"
    except PackageNotFoundError:  # a checkout that is not installed
        release = "this version of mlsm"
    trouble = []
    for address, answer in sorted(found.items()):
        if isinstance(answer, BaseException):
            trouble.append(f"{address} cannot be examined ({describe(answer)}). Use the same version of Python there.")
            continue
        host, code, seen = answer
        who = f"{address} on {host}"
        if code is None:
            trouble.append(f"{who} does not have mlsm. Install {release} there, and restart the worker.")
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
    """A function for a worker to run that may lack our package: an inner one is sent whole, not by its name."""

    def examine(path):
        import socket

        try:
            from pipeline.executors import worker

            code = getattr(worker, "CODE", "none")
        except ImportError:  # there is no `pipeline`, or another one
            code = None
        try:
            with open(path) as file:
                seen = file.read()
        except OSError:
            seen = None
        return socket.gethostname(), code, seen

    return examine


def _pass_on(notes):
    """Log and warn in this process as the task did in its own."""
    for name, kind, text in notes:
        if name is None:
            warnings.warn(text, kind, stacklevel=2)
        else:
            logging.getLogger(name).log(kind, "%s", text)
