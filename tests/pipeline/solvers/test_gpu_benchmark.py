"""benchmarks/gpu_coding.py: its parts in the simulator at toy sizes, and what it says without a GPU."""

import os
import subprocess
import sys

import pytest
import torch
from data import ROOT

pytest.importorskip("numba.cuda")

TOY = """
import json, sys, numpy as np, torch
from types import SimpleNamespace
from benchmarks import gpu_coding
sys.path.append("tests/pipeline/solvers")
import lockstep

lockstep.install()  # the simulator's own scheduler polls
gpu_coding.WARM_UP, gpu_coding.ROUNDS = 0, 1
toy = SimpleNamespace(config={"hidden_size": 8, "num_attention_heads": 1, "intermediate_size": 8, "vocab_size": 50},
                      layer=1, windows=1, length=4, atoms=6, training_vectors=60)
rng = np.random.default_rng(0)
hidden, atoms = (array / np.linalg.norm(array, axis=1, keepdims=True) for array in (rng.normal(size=(3, 8)),
                                                                                   rng.normal(size=(9, 8))))
result = gpu_coding.coder_against_teacher(torch.device("cpu"), toy)
result |= gpu_coding.coder_against_fista(torch.device("cpu"), hidden, atoms.astype(np.float32), 0.3)
gpu_coding.show(result)
print(json.dumps(result))
"""


def python(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
    )


def test_the_parts_run_in_the_simulator():
    run = python("-c", TOY, NUMBA_ENABLE_CUDASIM="1")
    assert run.returncode == 0, run.stderr
    assert '"gpu_vs_fista100": {"median"' in run.stdout.splitlines()[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_so():
    run = python("-m", "benchmarks.gpu_coding")
    assert run.returncode == 1 and run.stderr.strip() == "this benchmark needs a CUDA GPU; torch finds none here"
