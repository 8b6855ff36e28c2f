"""Announcements: when the learning rate falls; bfloat16, if it is faster on this processor."""

import contextlib
import json

import pytest

import student.announcement
from mlsm.common.errors import Interrupted
from student.config import StudentConfig
from student.train import train


@pytest.fixture
def rates(monkeypatch):
    """Rates of products, by dtype's name."""
    found = {"torch.bfloat16": 3e9, "torch.float32": 1e9}
    monkeypatch.setattr(student.announcement, "multiplies_bfloat16", lambda: True)
    monkeypatch.setattr(student.announcement, "matrix_product_rate", lambda device, dtype: found[str(dtype)])
    return found


def said(caplog, config, stop_at=None):
    def stop(*_, step, **figures):
        if step == stop_at:
            raise Interrupted("stopped", 2)

    caplog.clear()
    with caplog.at_level("INFO"), contextlib.suppress(Interrupted):
        train(config, stop)
    return "--dtype bfloat16" in caplog.text


def test_it_is_given_once_where_it_pays(ids_store, settings, rates, caplog):
    config = StudentConfig(store=ids_store.path, objective="mlm", **settings)
    assert said(caplog, config, stop_at=4)
    assert "this processor multiplies bfloat16 itself" in caplog.text
    assert "times as fast" not in caplog.text, "what was timed once for a moment is no fact"
    assert not said(caplog, config), "a run that goes on cannot change it"


@pytest.mark.parametrize("change", ["slow", "unable", "bfloat16"])
def test_it_is_not_given_where_it_does_not(ids_store, settings, rates, caplog, monkeypatch, change):
    rates["torch.bfloat16"] = 1.2e9 if change == "slow" else 3e9
    if change == "unable":
        monkeypatch.setattr(student.announcement, "multiplies_bfloat16", lambda: False)
    dtype = "bfloat16" if change == "bfloat16" else "float32"
    config = StudentConfig(store=ids_store.path, objective="mlm", **settings | {"max_steps": 1, "dtype": dtype})
    assert not said(caplog, config)


def test_the_rate_falls_in_the_steps_that_the_warm_up_leaves(ids_store, settings, rates, caplog):
    late = {"schedule": "wsd", "warmup": 0.75, "decay_share": 0.5, "max_steps": 4, "dtype": "bfloat16"}
    said(caplog, StudentConfig(store=ids_store.path, objective="mlm", **settings | late))
    assert "reached after 75% of the steps, then falling to zero in the last 25%" in caplog.text
    rates = [step["lr"] for step in map(json.loads, (settings["run_dir"] / "log.jsonl").open()) if "lr" in step]
    assert rates == pytest.approx([1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3])
