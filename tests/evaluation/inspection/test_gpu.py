"""doctor --gpu, simulated on a CPU with real child processes: its trials, the table, and its output without a GPU."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from preloaded import SUBPROCESS

from mlsm import __main__ as cli
from mlsm.commands.doctor import show as examination
from mlsm.common import proofs
from mlsm.evaluation.inspection import gpu
from mlsm.evaluation.inspection.machine import DoctorConfig
from pipeline.solvers import proof as solvers
from student import proof as training

TESTS = Path(__file__).resolve().parents[2]
sys.path += [str(TESTS / "pipeline" / "solvers"), str(TESTS / "student")]  # where children find what is planted


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_in_one_line(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["doctor", "--gpu"])
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "finds no GPU here" in line


def test_what_it_proves_and_prints(monkeypatch, tmp_path):
    monkeypatch.setenv("MLSM_CACHE", str(tmp_path))
    monkeypatch.setenv("MLSM_PLANTED", "torch=right cuda=crash bfloat16=right compiled=fail")
    monkeypatch.setattr(proofs, "subprocess", SUBPROCESS)
    monkeypatch.setattr(solvers, "TRIAL", "planted_trial")
    monkeypatch.setattr(solvers, "ROWS", 32)
    monkeypatch.setattr(training, "TRIAL", "planted_ways")
    here, elsewhere = proofs.key_of(torch.device("cpu"), "solvers of another size"), "device another GPU, driver 1"
    for key in (here, elsewhere):
        proofs.keep(key, {})
    report = gpu.prove_gpu(device="cpu", encoder="bert-1x32")
    table = examination({"checks": [], **report}, DoctorConfig(gpu=True))
    rows = {row.split(" | ")[0].strip("| "): row for row in table.splitlines() if row.startswith("| ")}
    assert "| right |" in rows["solver: torch"] and "| right |" in rows["training: bfloat16"]
    assert "not right, see above" in rows["solver: cuda"] and "SIGSEGV" in table
    assert "Failed to find a C compiler" in rows["training: bfloat16, compiled"]
    assert f"- torch: {torch.__version__}" in table and "sparse coding uses plain torch" in table
    assert proofs.recall(here) is None and proofs.recall(elsewhere) == {}, "the answers for this GPU are found again"
    assert len(list(tmp_path.glob("gpu-proofs.json"))) == 1, "the answers are kept"
    assert solvers.kept_backend(torch.device("cpu"), gpu.WIDTH, gpu.ATOMS, gpu.LAM) == "torch"


def test_states_are_the_teachers_and_a_wider_space_changes_no_product():
    rows_Nd = gpu.bundled_states(200)
    wide_Nd = gpu.lift(rows_Nd, 300)
    assert rows_Nd.shape == (200, 144) and wide_Nd.shape == (200, 300)
    np.testing.assert_allclose(wide_Nd @ wide_Nd.T, rows_Nd @ rows_Nd.T, atol=1e-5)
    assert np.linalg.norm(wide_Nd.astype(float), axis=1).max() <= 1
