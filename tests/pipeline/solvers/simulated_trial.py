"""The child of proof.py with the CUDA kernels in Numba's simulator (NUMBA_ENABLE_CUDASIM=1), for a few rows."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import lockstep

lockstep.install()  # before kernels are made

from pipeline.solvers import trial  # noqa: E402

if __name__ == "__main__":
    lockstep.shrink_kernels()
    trial.ROUNDS = 1
    trial.main(Path(sys.argv[1]))
