"""What the kernels cost by instruction_budget.py stays within a budget, and the count finds what is known.

Needs ptxas, NVVM and nvdisasm (a CUDA toolkit, or nvidia-cuda-nvcc with what it needs, and nvidia-cuda-nvdisasm), and
the bench data.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from data import ROOT

pytest.importorskip("cuda.bindings", reason='no numba-cuda: pip install "mlsm-pretrain[test]"')
cuda = pytest.importorskip("numba.cuda")

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE))

import instruction_budget  # noqa: E402
import kernels_changed  # noqa: E402
import sass  # noqa: E402

pytestmark = kernels_changed.only_if_changed("budgets")

# Instructions a token on four rows of the bench data at width 768, for every capability that we compile for. Who makes
# a kernel cheaper lowers its budget: python tests/pipeline/solvers/instruction_budget.py --tokens 4 --capability ...
BUDGETS = {
    "8.0": {
        "select of float16": 9_300,
        "minimise_small of float16": 33_000,
        "minimise_medium of float16": 1_100,
        "subtract of float16": 12_250,
        "pack": 2_000,
    },
    "9.0": {
        "select of float16": 8_750,
        "minimise_small of float16": 35_150,
        "minimise_medium of float16": 1_250,
        "subtract of float16": 12_600,
        "pack": 2_250,
    },
    "10.0": {
        "select of float16": 7_200,
        "minimise_small of float16": 38_350,
        "minimise_medium of float16": 1_150,
        "subtract of float16": 13_850,
        "pack": 1_600,
    },
}

needs_compilers = pytest.mark.skipif(
    sass.missing() is not None, reason=f"no {sass.missing()}: pip install nvidia-cuda-nvcc nvidia-cuda-nvdisasm"
)


@functools.cache
def budgets():
    run = subprocess.run(
        [sys.executable, HERE / "instruction_budget.py", "--tokens", "4", "--capability", *BUDGETS],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"},
    )
    if "no bench data" in run.stderr:
        pytest.skip("no bench data")
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@needs_compilers
@pytest.mark.parametrize("capability", BUDGETS)
def test_kernels_keep_to_their_budgets(capability):
    found = {name.split(".")[-1]: kernel for name, kernel in budgets()[capability].items() if name != "ns_per_token"}
    costs = {name: kernel["instructions_per_token"] for name, kernel in found.items()}
    assert costs.keys() == BUDGETS[capability].keys()
    assert {name: cost for name, cost in costs.items() if cost > BUDGETS[capability][name]} == {}


@needs_compilers
@pytest.mark.parametrize("capability", BUDGETS)
def test_what_is_written_to_memory_agrees_with_the_count(capability):
    """Each line's writes run once, or a whole number of times if it has several, for every time that it ran.

    The exceptions are second versions of a loop that the compiler makes for when another has no pass.
    """
    kernels = [kernel for name, kernel in budgets()[capability].items() if name != "ns_per_token"]
    stores = {line: times for kernel in kernels for line, times in kernel["stores"].items() if times[1] >= 10}
    ratios = [times / ran for times, ran in stores.values()]
    assert len(ratios) >= 5 and all(0.95 <= ratio <= 2.05 for ratio in ratios), stores
    assert sum(abs(ratio - round(ratio)) < 0.05 for ratio in ratios) >= 0.8 * len(ratios), stores


@cuda.jit(fastmath=True, lineinfo=True)
def add_rows(rows, total, length):
    for row in range(rows.shape[0]):
        for i in range(cuda.threadIdx.x, length, 32):
            if rows[row, i] > 0:
                total[i] += rows[row, i]


@needs_compilers
@pytest.mark.parametrize("length", [1, 3, 4, 7, 8, 101])
def test_passes_of_a_loop_that_is_unrolled(length):
    """The compiler makes of the inner loop one that takes several passes at once, and one for those left over."""
    from numba import float32, int64

    signature = (float32[:, ::1], float32[::1], int64)
    code = sass.parse(sass.compile_kernel(add_rows, signature, (9, 0)))
    name, line = Path(__file__).stem, add_rows.py_func.__code__.co_firstlineno + 2
    key = {offset: f"{name}:{line + offset}" for offset in range(4)}
    counts = {
        "blocks": 2,
        "lines": {key[0]: 2, key[1]: 6, key[2]: 6 * length, key[3]: 3 * length},
        "lengths": {key[0]: {"3": 2}, key[1]: {str(length): 6}},
    }
    kernel = instruction_budget.Kernel(code, counts)
    assert max(kernel.unrolled.values()) > 1
    assert kernel.stores() == {key[3]: [3 * length, 3 * length]}
