"""A cluster of Dask workers on this machine, which stops quickly and says nothing on the terminal.

    with event_loop() as loop, local_cluster(workers, device, loop) as cluster:
        cluster.scheduler_address

Each worker is a process with one task at a time and its share of the cores; where there are GPUs, each sees one of
them, in turn. A worker that dies is started anew, and its task is reported as failed at once: who tries again, and
when, is dask.py's to decide. Left out: clusters of several machines, which --scheduler names (docs/clusters.md).
"""

import asyncio
import logging
import os
import signal
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker

import dask
from distributed import Nanny, Scheduler, SpecCluster, Status
from distributed.utils import LoopRunner

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS", "RAYON_NUM_THREADS")
LOGGERS = ("distributed", "distributed.client", "distributed.gc", "bokeh", "tornado", "tornado.application", "asyncio")
SECONDS_TO_STOP = 2  # that workers have to hear that they are no longer needed


@contextmanager
def local_cluster(workers, device, loop):
    """A SpecCluster of so many workers, until the block ends.

    device  as the settings name it; workers on "cpu" see what GPUs there are, but no one in particular
    loop    an event loop from `event_loop`
    """
    gpus = visible_gpus(device)
    with _environment_kept(), dask.config.set(_settings(workers)):
        with _environment_kept():  # for what the driver computes itself; a worker started anew changes it again
            cluster = SpecCluster(
                workers={
                    number: {"cls": Nanny, "options": _NANNY | {"env": gpu_of(number, gpus)}}
                    for number in range(workers)
                },
                scheduler={"cls": Scheduler, "options": _SCHEDULER},
                loop=loop,
                silence_logs=logging.CRITICAL,
                shutdown_on_close=False,  # at exit, when Ctrl-C came while it started: workers end with this process
            )
        try:
            yield cluster
        finally:
            cluster.sync(_end, list(cluster.workers.values()))
            with suppress(TimeoutError):
                cluster.close(timeout=SECONDS_TO_STOP)


async def _end(nannies):
    """Kill the workers: leaving in peace takes them seconds, and what they must not leave behind is gone by now."""
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
    """Dask's settings of scheduler, nannies and workers; threads that the environment names already win."""
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    levels = {f"DASK_LOGGING__{name.upper()}": "critical" for name in LOGGERS if "." not in name}
    return {
        "distributed.nanny.pre-spawn-environ": dict.fromkeys(THREADS, threads) | levels,
        "distributed.scheduler.worker-saturation": 1.0,  # but at first, a worker's death is blamed on its one task
        "distributed.deploy.lost-worker-timeout": "1 hour",  # a new worker may need a minute on a busy machine
        "distributed.worker.profile.enabled": False,
    }


def visible_gpus(device):
    """Names of the GPUs that workers on a device may share, as CUDA_VISIBLE_DEVICES has them."""
    if device == "cpu":
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [gpu.strip() for gpu in named.split(",") if gpu.strip()]
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def gpu_of(number, gpus):
    """What a worker's environment says of its GPU."""
    return {"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]} if gpus else {}


def is_lost(cluster):
    """Whether no worker of a local cluster runs or will, because none could be started in a dead one's place."""
    return all(nanny.status in _ENDED for nanny in cluster.workers.values())


@contextmanager
def event_loop():
    """An event loop in a thread that Ctrl-C, SIGTERM and SIGHUP do not reach, nor the processes that it starts: those
    are the driver's to end, and must not die of it halfway."""
    ours = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}  # any may come to the whole group
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
def quiet():
    """Keep Dask's log lines off the terminal: a dead worker is reported by us, or not worth a word.

    After an error they stay off: what an interrupted start has to say, it says when it is collected.
    """
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
