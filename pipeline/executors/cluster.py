"""A cluster of Dask workers on this machine, which stops quickly and says nothing on the terminal.

    with event_loop() as loop, local_cluster(workers, device, loop) as cluster:
        cluster.scheduler_address

Each worker is a process with one task at a time and its share of the cores; where there are GPUs, each sees one of
them, in turn. A worker that dies is started anew, and its task is reported as failed at once: dask.py decides whether
and when it is tried again. Left out: clusters of several machines, which --scheduler names (docs/clusters.md).
"""

import asyncio
import logging
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING

import dask
from distributed import Nanny, Scheduler, SpecCluster, Status
from distributed.utils import LoopRunner

if TYPE_CHECKING:
    from tornado.ioloop import IOLoop

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS", "RAYON_NUM_THREADS")
LOGGERS = ("distributed", "distributed.client", "distributed.gc", "bokeh", "tornado", "tornado.application", "asyncio")
SECONDS_TO_STOP = 2  # in which workers can hear that they are no longer needed


@contextmanager
def local_cluster(workers: int, device: str, loop: "IOLoop") -> Iterator[SpecCluster]:
    """A cluster of so many workers, until the block ends.

    device  as the settings name it; for "cpu", workers are given no GPU of their own
    loop    an event loop from `event_loop`
    """
    gpus = visible_gpus(device)
    with _environment_kept(), dask.config.set(_settings(workers)):
        with _environment_kept():  # so that the driver computes as before; a worker started anew changes it again
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


async def _end(nannies):
    """Kill the workers: an orderly end takes seconds, and what they must not leave behind is removed by now."""
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
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    levels = {f"DASK_LOGGING__{name.upper()}": "critical" for name in LOGGERS if "." not in name}
    return {
        "distributed.nanny.pre-spawn-environ": dict.fromkeys(THREADS, threads) | levels,
        "distributed.scheduler.worker-saturation": 1.0,  # one task a worker, on which its death is blamed
        "distributed.deploy.lost-worker-timeout": "1 hour",  # a new worker may need a minute on a busy machine
        "distributed.worker.profile.enabled": False,
    }


def visible_gpus(device: str) -> list[str]:
    """Names of the GPUs that workers on a device may share, as CUDA_VISIBLE_DEVICES has them."""
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
    """Whether no worker of a local cluster runs or will run, because none could be started in place of a dead one."""
    return all(nanny.status in _ENDED for nanny in cluster.workers.values())


@contextmanager
def event_loop() -> Iterator["IOLoop"]:
    """An event loop in a thread that Ctrl-C, SIGTERM and SIGHUP do not reach, nor the processes that it starts: the
    driver ends those, and they must not die of a signal before that."""
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
    """Keep Dask's log lines off the terminal: where a dead worker matters, we report it.

    After an error they stay off, because an interrupted start logs its complaints only when it is garbage collected.
    Those of distributed.process always do: at the exit of this process it names each worker that has not ended yet.
    """
    logging.getLogger("distributed.process").setLevel(logging.CRITICAL)
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    for name in levels:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@contextmanager
def _environment_kept():
    """Restore this process's environment, where nannies set what their workers are to find in theirs."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
