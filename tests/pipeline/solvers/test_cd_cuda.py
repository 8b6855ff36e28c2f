"""The GPU solver: its kernels in Numba's CUDA simulator, and the same checks on a GPU where there is one.

The checks are functions of cuda_checks.py. They run in one process for all tests, since a process simulates or
does not.
"""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from data import ROOT

pytest.importorskip("cuda.bindings", reason='no numba-cuda: pip install "mlsm-pretrain[test]"')
pytest.importorskip("numba.cuda")

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE))

import kernels_changed  # noqa: E402
import sass  # noqa: E402

only_if_changed = kernels_changed.only_if_changed("simulator")
SOURCE = (HERE / "cuda_checks.py").read_text()


def names(*decorators):
    return [name for decorator in decorators for name in re.findall(rf"^@{decorator}\ndef (\w+)", SOURCE, re.M)]


def python(*arguments, **environment):
    run = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), **environment},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@functools.cache
def results(simulated):
    output = python(HERE / "cuda_checks.py", NUMBA_ENABLE_CUDASIM=str(simulated), OMP_NUM_THREADS="1")
    return json.loads(output.splitlines()[-1])


@only_if_changed
@pytest.mark.parametrize("name", names("check", "simulator_check"))
def test_in_the_simulator(name):
    assert results(1)[name] is None, results(1)[name]


@only_if_changed
def test_arithmetic_at_real_size_on_a_cpu():
    of_gpus = ("few_of_real_size", "hundreds_of_non_zeros")
    output = python(HERE / "kernels_on_cpu.py", *names("check"), *of_gpus, NUMBA_ENABLE_CUDASIM="0")
    assert not any(json.loads(output.splitlines()[-1]).values()), output


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", names("check", "gpu_check"))
def test_on_a_gpu(name):
    assert results(0)[name] is None, results(0)[name]


@only_if_changed
def test_kernels_compile_for_a_gpu():
    """For what a GPU runs, not the simulator's variants: types, no float64, nothing of note in local memory."""
    if sass.missing() == "NVVM":
        pytest.skip("no NVVM: pip install nvidia-cuda-nvcc")
    kernels = json.loads(python(HERE / "compile_kernels.py").splitlines()[-1])
    for name, report in kernels.items():
        assert report["float64"] == report["local"] == report["calls"] == 0, name
        assert all(alignment >= 16 for alignment in report["alignments"]), name
        assert report.get("spilled_bytes", 0) <= (0 if name != "minimise_large" else 128), name


def test_solvers_can_be_imported_without_numba_cuda():
    said = python(
        "-c",
        "import sys, pipeline.solvers\nassert 'numba.cuda' not in sys.modules\nsys.modules['numba.cuda'] = None\n"
        "try: import pipeline.solvers.cd_cuda\nexcept ImportError as error: print(error)",
    )
    assert 'pip install "mlsm-pretrain[gpu]"' in said
