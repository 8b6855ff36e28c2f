"""One step: the norm by which the gradient is clipped, against float64, and which runs are clipped by the older sum."""

import json
import math
import shutil
from types import SimpleNamespace

import pytest
import torch

import student.step
from common.errors import Interrupted
from student.config import StudentConfig
from student.step import Stepper
from student.trainer import train

LARGE = 2**24  # values: as many as a third of the embeddings of a base-size model


class Table(torch.nn.Module):
    """A model whose gradient is a given table."""

    def __init__(self, gradient):
        super().__init__()
        self.weight, self.gradient = torch.nn.Parameter(torch.zeros(len(gradient))), gradient
        self.encoder = None

    def forward(self, *_):
        return self.weight @ self.gradient


def test_the_gradient_of_a_large_table_is_clipped_by_its_exact_norm(monkeypatch):
    monkeypatch.setattr(student.step, "use_fast_dropout", lambda encoder: None)
    monkeypatch.setattr(student.step, "to_device", lambda micro, device: micro)
    gradient = torch.rand(LARGE, generator=torch.Generator().manual_seed(0))
    objective = SimpleNamespace(term_weights=(1.0,), loss_sums=lambda logits, _: logits[None])
    config = StudentConfig(grad_clip=2.0, max_steps=10, batch_windows=1, micro_batch=1, lr=1e-3, device="cpu")
    stepper = Stepper(config, Table(gradient), objective)
    nothing = dict.fromkeys(("input_WL", "attention_WL", "where_M", "documents_WL", "most_masked", "segments_WL"))
    micro = SimpleNamespace(targets=(), **nothing)
    with torch.random.fork_rng():
        _, norm = stepper.update(0, SimpleNamespace(micro=[micro], counts=(1,)))
    exact = math.sqrt(gradient.double().square().sum())
    assert norm == pytest.approx(exact, rel=2e-6)
    clipped = math.sqrt(stepper.model.weight.grad.double().square().sum())
    assert clipped == pytest.approx(2.0, rel=2e-6)


def stop_after_three(*_, step, **figures):
    if step == 3:
        raise Interrupted("stopped", 2)


def lineage_of(config):
    return json.loads((config.output / "export" / "lineage.json").read_text())


def test_a_run_that_was_begun_with_the_older_sum_ends_with_it(ids_store, settings, monkeypatch):
    config = StudentConfig(store=ids_store.path, objective="mlm", **settings | {"save_every": 1})
    with pytest.raises(Interrupted):
        train(config, stop_after_three)
    file = config.output / "config.json"
    older = json.loads(file.read_text())
    assert older.pop("gradient_norm") == "blocks"
    file.write_text(json.dumps(older))
    shutil.rmtree(config.output / "checkpoints")
    monkeypatch.setattr(student.step, "gradient_norm", lambda weights: pytest.fail("another sum within a run"))
    with pytest.raises(Interrupted):
        train(config, stop_after_three)
    train(config)
    assert "gradient_norm" not in lineage_of(config)


def test_a_new_run_records_its_sum(ids_store, settings):
    config = StudentConfig(store=ids_store.path, objective="mlm", **settings | {"max_steps": 1})
    train(config)
    assert lineage_of(config)["gradient_norm"] == "blocks"
