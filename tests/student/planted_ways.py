"""A child of student/proof.py in which a way to train does what $MLSM_PLANTED says, at once.

MLSM_PLANTED="bfloat16=crash compiled=right" python -m planted_ways DIRECTORY
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch

from student import trial

PLANTED = dict(planted.split("=") for planted in os.environ["MLSM_PLANTED"].split())
SECONDS = {"float32": 0.03, "bfloat16": 0.02, "compiled": 0.01}  # so that no other load decides


def take_steps(config, *given):
    way = "compiled" if config.compile else config.dtype
    does = PLANTED.get(way, "right")
    if does == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if does == "hang":
        signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))  # as a process does that waits for a driver
        Path(sys.argv[1], "hanging").touch()
        time.sleep(3600)
    if does == "fail":
        raise RuntimeError("Failed to find a C compiler")
    if does == "be_killed":
        os.kill(os.getpid(), signal.SIGKILL)  # as Linux does where memory is full
    if does == "lack_memory":
        raise torch.OutOfMemoryError("CUDA out of memory")
    found = {"losses": [4.0, 3.9, 3.8], "first_seconds": 1.0, "seconds": SECONDS[way]}
    if does == "slow":
        found["seconds"] = 1.0
    if does == "wrong":
        found["losses"] = [1.1 * loss for loss in found["losses"]]
    return found


if __name__ == "__main__":
    trial.take_steps = take_steps
    trial.main(Path(sys.argv[1]))
