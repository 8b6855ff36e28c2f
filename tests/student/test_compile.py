"""torch.compile on the CPU, through the trainer: slow to start, so one step and no evaluation."""

import shutil

import pytest
from tiny_store import log_of, write_store
from torch._dynamo.utils import counters
from torch._inductor import config as inductor

from student.config import StudentConfig
from student.train import train


@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
def test_a_compiled_run_is_the_same_run_after_one_that_was_not(settings, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(inductor.cpp, "vec_isa_ok", True)  # tried by compiling five programs otherwise
    store = write_store(tmp_path / "store", k=24, held_out_windows=0)
    common = settings | {"store": store.path, "encoder": "bert-1x32", "max_steps": 1, "micro_batch": 12}
    curves = []
    for compiled in (False, True):
        counters.clear()
        config = StudentConfig(**common | {"compile": compiled, "dropout": 0.0, "run_dir": tmp_path / str(compiled)})
        with caplog.at_level("INFO", "student"):
            train(config)
        assert ("--no-compile" in caplog.text) == compiled
        curves.append([(line["loss"], line["grad_norm"]) for line in log_of(config.run_dir).values()])
    assert counters["stats"]["calls_captured"] > 50, "the model itself was compiled, not only what it calls"
    assert curves[1] == [pytest.approx(figures, rel=1e-3) for figures in curves[0]]
