"""torch.compile on the CPU, through the trainer: slow to start, so two steps."""

import shutil

import pytest
from tiny_store import log_of
from torch._dynamo.utils import counters

from student.config import StudentConfig
from student.trainer import train


@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
def test_a_compiled_run_is_the_same_run_after_one_that_was_not(lsp_store, settings, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    common = settings | {"store": lsp_store.path, "encoder": "bert-1x32", "max_steps": 2, "eval_windows": 4}
    curves = []
    for compiled in (False, True):
        counters.clear()
        config = StudentConfig(**common | {"compile": compiled, "dropout": 0.0, "output": tmp_path / str(compiled)})
        train(config)
        curves.append([(line["loss"], line["grad_norm"]) for line in log_of(config.output).values()])
    assert counters["stats"]["calls_captured"] > 100, "the model itself was compiled, not only what it calls"
    for (loss, norm), (other_loss, other_norm) in zip(*curves, strict=True):
        assert other_loss == pytest.approx(loss, rel=1e-4)
        assert other_norm == pytest.approx(norm, rel=1e-3)
