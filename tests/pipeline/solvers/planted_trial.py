"""A child of proof.py in which a solver does what $MLSM_PLANTED says, in place of the CUDA kernels or of plain torch.

    MLSM_PLANTED="cuda=crash torch=slow" python -m planted_trial DIRECTORY

On a machine without a GPU the CPU's solver stands in for both.
"""

import dataclasses
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch

from pipeline.solvers import trial

RIGHT = trial.SOLVERS["cpu"]


def crash(*given):
    os.kill(os.getpid(), signal.SIGSEGV)


def hang(*given):
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))  # as a process does that waits for a driver
    Path(sys.argv[1], "hanging").touch()
    time.sleep(3600)


def fail(*given):
    raise ImportError("numba-cuda is missing")


def lack_memory(*given):
    raise torch.OutOfMemoryError("CUDA out of memory")


def lack_memory_of_cublas(*given):
    raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


def be_killed(*given):
    os.kill(os.getpid(), signal.SIGKILL)  # as Linux does where memory is full


def slow(*given):
    time.sleep(0.05)
    return RIGHT(*given)


def other_atoms(*given):
    codes = RIGHT(*given)
    return dataclasses.replace(codes, values=codes.values[::-1].copy())


def nothing(hidden_Nd, *given):
    none = np.zeros(0, np.float32)
    indptr, kkt = np.zeros(len(hidden_Nd) + 1, np.int64), np.zeros(len(hidden_Nd), np.float32)
    return trial.Codes(indptr, none.astype(np.int32), none, kkt)


def honest(*given):
    codes = nothing(*given)
    return dataclasses.replace(codes, kkt=np.ones_like(codes.kkt))


if __name__ == "__main__":
    for planted in os.environ["MLSM_PLANTED"].split():
        name, _, does = planted.partition("=")
        trial.SOLVERS[name] = {**globals(), "right": RIGHT}[does]
    trial.main(Path(sys.argv[1]))
