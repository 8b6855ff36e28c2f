"""torch.compile on the CPU: slow to start, so one shape."""

import shutil

import pytest
import torch

from student.batches import Loader
from student.config import StudentConfig
from student.masking import build_masking
from student.model import build_student
from student.objectives import OBJECTIVES
from student.step import Stepper


@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
def test_compiled_steps_are_the_same_steps(lsp_store, settings, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    plain, compiled = (two_steps(lsp_store, settings | {"compile": compiled}) for compiled in (False, True))
    assert list((tmp_path / "cache").rglob("*.so")), "something was compiled"
    for (loss, norm), (other_loss, other_norm) in zip(plain, compiled, strict=True):
        assert other_loss == pytest.approx(loss, rel=1e-4)
        assert other_norm == pytest.approx(norm, rel=1e-3)


def two_steps(store, settings):
    """Loss and gradient norm of two steps on one batch."""
    config = StudentConfig(**settings | {"dropout": 0.0, "encoder": "bert-1x32", "micro_batch": 12})
    objective = OBJECTIVES["mlsm"](store)
    stepper = Stepper(config, build_student(config, store, objective), objective)
    given = (store.split("train"), build_masking(config, store), objective.read_targets)
    batch = Loader(*given, micro_batch=config.micro_batch).step(1, 0, 12)
    with torch.random.fork_rng():
        return [stepper.update(step, batch) for step in range(2)]
