"""The GPU path of training, encoding and evaluation on GPUs that are not there: no mixed devices, no needless waits of
the host where it matters.

The runs are those of gpu_path.py, all in one process, since torch has GPUs in a process or has none.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from data import ROOT

from student.objectives import OBJECTIVES

HERE, TORCH = Path(__file__).resolve().parent, Path(torch.__file__).parent
PINNED = re.search(r"^torch==(.+)$", (ROOT / "constraints.txt").read_text(), re.M)[1]
SECONDS = 300  # for the child; it needs about thirty
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="no Linux with g++"),
    pytest.mark.skipif(bool(torch.version.cuda or torch.version.hip), reason="torch has code for GPUs"),
    pytest.mark.skipif(
        torch.__version__.partition("+")[0] != PINNED, reason=f"it uses private interfaces of torch {PINNED}"
    ),
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the runs found, by their names."""
    library = tmp_path_factory.mktemp("gpus") / "two_gpus.so"
    libraries = [f"-L{TORCH / 'lib'}", f"-Wl,-rpath,{TORCH / 'lib'}", "-lc10", "-ltorch_cpu"]
    options = ["-shared", "-fPIC", "-std=c++20", "-I", TORCH / "include", "-o", library]
    subprocess.run(["g++", HERE / "two_gpus.cpp", *options, *libraries], check=True, timeout=SECONDS)
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    run = subprocess.run(
        [sys.executable, HERE / "gpu_path.py"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [*(f"{name}, bert" for name in OBJECTIVES), "mlsm, modernbert", "mlm, modernbert"])
def test_a_step_waits_only_for_its_figures(found, name):
    assert found[name] == {"error": None, "mixed": {}, "waits": {}, "events": {"cuda:1": 2}}


def test_encoding_mixes_no_devices_and_its_teacher_does_not_wait(found):
    run = found["encode-lsp"]
    assert (run["error"], run["mixed"], run["waits"], run["quarantined"]) == (None, {}, {}, 0)
    assert run["events"].keys() == {"cuda:1"} and run["tokens"] > 1000


@pytest.mark.parametrize("name", ["finetune", "frozen"])
def test_evaluation_mixes_no_devices_and_scores_as_on_the_cpu(found, name):
    run = found[name]
    assert (run["error"], run["mixed"]) == (None, {})
    there, here = ([score["value"] for of in run[place] for score in of] for place in ("scores", "on the CPU"))
    assert there == pytest.approx(here, abs=0.01) and there  # attention and dropout of the CPU add up differently


@pytest.mark.parametrize(
    ("fault", "place", "shows"),
    [
        ("training reads a number", "waits", "_local_scalar_dense, at tests/fake_gpu/gpu_path.py"),
        ("training indexes with a mask", "waits", "index with a mask"),
        ("training does not pin a batch", "waits", "copy from memory that is not pinned, at student/batches.py"),
        ("training does not move a batch", "mixed", "tensors on cuda:1 and cpu, at student/encoders/model.py"),
        ("training names no stream", "events", "cuda:0"),
        ("encoding reads a number", "waits", "stage teach: _local_scalar_dense"),
        ("encoding does not move the input", "mixed", "tensors on cuda:1 and cpu, at pipeline/teacher/cut.py"),
    ],
)
def test_a_planted_fault_shows(found, fault, place, shows):
    assert [line for line in found[fault][place] if shows in line], found[fault]
