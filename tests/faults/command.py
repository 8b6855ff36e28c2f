"""cli.py with the knobs that no user needs: MLSM_TEST_LAYOUT=cuda overlaps all stages, as on a GPU,
MLSM_TEST_SAVE_ALWAYS=1 saves the state of dictionary learning at every evaluation, and MLSM_TEST_FORKED_WORKERS=1 forks
Dask's workers from this process as it is now, so that they do not import what it has imported (preloaded.py)."""

import os
import signal
import sys
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored


def fork_workers():
    """Start the server that forks workers, with the signals blocked that the thread of the cluster blocks for them."""
    import dask

    start = util.spawnv_passfds

    def fork(path, arguments, descriptors):
        if "forkserver" not in arguments[-1]:
            return start(path, arguments, descriptors)
        if process := os.fork():
            return process
        kept = sorted({0, 1, 2, *descriptors})
        for one, following in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
            os.closerange(one + 1, following)
        try:
            exec(arguments[-1])  # what it gives to `python -c`
        finally:
            os._exit(0)

    dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"})
    ours = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ours)
    resource_tracker.ensure_running()  # which unblocks two of them
    signal.pthread_sigmask(signal.SIG_BLOCK, ours)
    util.spawnv_passfds = fork
    forkserver.ensure_running()
    util.spawnv_passfds = start
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


if __name__ == "__main__":
    if layout := os.environ.get("MLSM_TEST_LAYOUT"):
        from pipeline.encode import LAYOUTS

        LAYOUTS["cpu"] = LAYOUTS[layout]
    if "MLSM_TEST_SAVE_ALWAYS" in os.environ:
        from pipeline.dictionary import checkpoint as learning_checkpoint

        learning_checkpoint.SECONDS_BETWEEN = 0
    if "MLSM_TEST_FORKED_WORKERS" in os.environ:
        fork_workers()
    from mlsm import __main__ as cli

    cli.main()
