"""Compile the CUDA kernels without a GPU, and report what would make them slow: float64, spilled registers.

    pip install "numba-cuda[cu13]" nvidia-cuda-nvcc      # nvcc for ptxas, which counts registers; may be left out
    python tests/pipeline/solvers/compile_kernels.py

Prints as its last line a JSON object.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import sass
from numba import cuda, float32, int32, int64
from numba.cuda.types import float16

from pipeline.solvers import cuda_kernels, cuda_large, cuda_working_set

CAPABILITY = (9, 0)  # of an H100 or H200

int64s, int32s, float32s = int64[::1], int32[::1], float32[::1]
integers, matrix, halves, matrices = int32[:, ::1], float32[:, ::1], float16[:, ::1], float32[:, :, ::1]
OF_SET = (integers, matrix, matrix, int32s, float32s, int32s, float32)
OF_LARGE = (integers, matrix, matrix, matrices, int32s, int32s, float32s, int32s, float32)
OF_SELECT = (float32s, integers, matrix, matrix, int32s, float32s, float32s, int32s, float32, float32)
OF_SUBTRACT = (int64s, matrix, matrix, halves, integers, matrix, int32s)
ERRORS = (float32s, float32s, int32s, *[float32] * 5)
KERNELS = {
    "select": (cuda_kernels.select, (int64s, halves, *OF_SELECT)),
    "select_precisely": (cuda_kernels.select, (int64s, matrix, *OF_SELECT)),
    "minimise_small": (cuda_working_set.minimise_small, (int64s, halves, *OF_SET)),
    "minimise_medium": (cuda_working_set.minimise_medium, (int64s, halves, *OF_SET)),
    "minimise_large": (cuda_large.minimise_large, (int64s, matrix, matrix, *OF_LARGE)),
    "subtract": (cuda_kernels.subtract, (*OF_SUBTRACT, halves, *ERRORS)),
    "subtract_precisely": (cuda_kernels.subtract, (*OF_SUBTRACT, matrix, *ERRORS)),
    "pack": (cuda_kernels.pack, (int64s, int32s, integers, matrix, int32s, int32s, float32s)),
}


def main():
    with sass.device(CAPABILITY):
        print(json.dumps({name: report(ptx(*KERNELS[name])) for name in KERNELS}))


def ptx(kernel, signature):
    options = {option: kernel.targetoptions[option] for option in ("fastmath", "launch_bounds")}
    return cuda.compile_ptx(kernel.py_func, signature, cc=CAPABILITY, **options)[0]


def report(code):
    """Lines of PTX with float64, local memory and calls; registers and spilled bytes, if ptxas is there."""
    patterns = {"float64": r"\.f64", "local": r"\.local\b", "calls": r"\bcall\b", "barriers": r"\bbar\."}
    alignments = re.findall(r"\.extern \.shared \.align (\d+)", code)  # of the memory whose size a launch gives
    counts = {name: len(re.findall(pattern, code)) for name, pattern in patterns.items()}
    return counts | {"alignments": [*map(int, alignments)]} | registers(code)


def registers(code):
    if sass.tool("ptxas") is None:
        return {}
    run = subprocess.run(
        [sass.tool("ptxas"), "-v", "-arch=sm_{}{}".format(*CAPABILITY), "-o", "/dev/null", "-"],
        input=code,
        capture_output=True,
        text=True,
    )
    if run.returncode:
        raise RuntimeError(run.stderr)
    return {
        "registers": int(re.search(r"Used (\d+) registers", run.stderr)[1]),
        "spilled_bytes": sum(map(int, re.findall(r"(\d+) bytes spill", run.stderr))),
    }


if __name__ == "__main__":
    main()
