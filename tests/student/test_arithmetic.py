"""A run keeps the arithmetic that it chose at its start, also if it is resumed on another machine."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from tiny_store import log_of

import student.encoders.libraries
from mlsm.common.errors import Interrupted, RunError
from mlsm.common.matrix_products import TORCH, USUAL, WAYS
from mlsm.common.onednn import available
from student.config import StudentConfig
from student.encoders.libraries import choose_libraries, contradicts, recorded_libraries
from student.train import train

pytestmark = pytest.mark.skipif(not available(), reason="this torch lacks the operator, so there is nothing to choose")


@pytest.fixture
def taken(monkeypatch):
    """Names of the ways in which products were computed."""
    names = set()

    def follow(name, compute):
        def followed(*arguments):
            names.add(name)
            return compute(*arguments)

        return followed

    for ways in WAYS.values():
        for name, compute in list(ways.items()):
            monkeypatch.setitem(ways, name, follow(name, compute))
    return names


def measuring(monkeypatch, libraries):
    monkeypatch.setattr(student.encoders.libraries, "measure_libraries", lambda shapes: libraries)


def stop_after_four(*_, step, **figures):
    if step == 4:
        raise Interrupted("stopped", 2)


@pytest.mark.parametrize("lost", ["nothing", "config.json"])
def test_a_resumed_run_computes_as_it_began(ids_store, settings, tmp_path, monkeypatch, taken, lost):
    measuring(monkeypatch, dict(TORCH))
    unbroken = StudentConfig(store=ids_store.path, objective="mlm", **settings | {"run_dir": tmp_path / "unbroken"})
    train(unbroken)
    config = StudentConfig(store=ids_store.path, objective="mlm", **settings)
    with pytest.raises(Interrupted):
        train(config, stop_after_four)
    assert taken == {"torch"}
    measuring(monkeypatch, {})  # another machine, or another day
    if lost != "nothing":
        (config.run_dir / lost).unlink()
    train(config)
    assert taken == {"torch"}
    ours, theirs = (load_file(run.run_dir / "export" / "model.safetensors") for run in (config, unbroken))
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())
    for file in (config.run_dir / "config.json", config.run_dir / "export" / "lineage.json"):
        assert json.loads(file.read_text())["products"] == {"all": "torch"}


def test_a_run_that_began_with_onednn_stays_with_it(ids_store, settings, monkeypatch, taken):
    measuring(monkeypatch, {})
    config = StudentConfig(store=ids_store.path, objective="mlm", **settings)
    with pytest.raises(Interrupted):
        train(config, stop_after_four)
    assert "products" not in json.loads((config.run_dir / "config.json").read_text())
    measuring(monkeypatch, dict(TORCH))
    train(config)
    assert taken == {"onednn"}
    assert len(log_of(config.run_dir)) == 8


def test_a_changed_record_of_it_is_refused(ids_store, settings, monkeypatch):
    measuring(monkeypatch, dict(TORCH))
    config = StudentConfig(store=ids_store.path, objective="mlm", **settings)
    with pytest.raises(Interrupted):
        train(config, stop_after_four)
    file = config.run_dir / "config.json"
    file.write_text(file.read_text().replace('"torch"', '"onednn"'))
    with pytest.raises(RunError, match="field products is not what .* was trained with"):
        train(config)


@pytest.mark.parametrize(("setting", "way"), [("onednn", "onednn"), ("torch", "torch")])
def test_it_can_be_set(ids_store, settings, monkeypatch, taken, setting, way):
    monkeypatch.setattr(
        student.encoders.libraries, "measure_libraries", lambda shapes: pytest.fail("nothing is to be measured")
    )
    config = StudentConfig(store=ids_store.path, objective="mlm", products=setting, **settings)
    train(config)
    assert taken == {way}
    assert len(train(config)) and taken == {way}


def test_another_setting_of_a_run_that_has_begun_is_said_to_be_without_effect(ids_store, settings, taken, caplog):
    config = StudentConfig(store=ids_store.path, objective="mlm", products="torch", **settings)
    with pytest.raises(Interrupted):
        train(config, stop_after_four)
    train(replace(config, products="onednn"))
    assert taken == {"torch"}
    (message,) = [record.getMessage() for record in caplog.records if "products" in record.getMessage()]
    assert message.startswith(f"--products onednn is ignored: the run in {config.run_dir} started with other libraries")
    caplog.clear()
    for libraries in ("torch", "auto"):
        train(replace(config, products=libraries))
    assert not caplog.records


def test_where_products_are_not_chosen_no_setting_contradicts_them():
    asking = StudentConfig(dtype="float32", products="torch")
    assert contradicts(USUAL, asking, torch.device("cpu"))
    assert not contradicts(TORCH, asking, torch.device("cpu"))
    assert not contradicts(USUAL, asking, torch.device("cuda"))
    assert not contradicts(USUAL, replace(asking, dtype="bfloat16"), torch.device("cpu"))
    assert not contradicts(USUAL, replace(asking, products="auto"), torch.device("cpu"))


@pytest.mark.parametrize("record", [{}, {"products": None}, {"products": 3}, {"products": ["torch"]}], ids=str)
def test_records_without_products_mean_onednn(record):
    assert recorded_libraries(record) == USUAL


def test_what_is_measured_for_a_student(ids_store, settings, monkeypatch):
    shapes: set = set()
    monkeypatch.setattr(student.encoders.libraries, "measure_libraries", lambda wanted: shapes.update(wanted) or {})
    config = StudentConfig(store=ids_store.path, objective="mlm", **settings)
    train(config)
    tokens = 4 * ids_store.max_length
    assert {shape for shape in shapes if shape[0] == tokens} == {(tokens, 32, 32), (tokens, 32, 128), (tokens, 128, 32)}
    outputs = {shape for shape in shapes if shape[2] == ids_store.vocab_size}
    assert outputs and all(rows < tokens for rows, *_ in outputs)


@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"compile": True}, {"products": "onednn"}], ids=str)
def test_nothing_is_measured_where_it_is_not_used(monkeypatch, change):
    monkeypatch.setattr(student.encoders.libraries, "measure_libraries", lambda shapes: pytest.fail("measured"))
    config = StudentConfig(**{"dtype": "float32", "micro_batch": 4} | change)
    assert choose_libraries(config, None, 128, torch.device("cpu")) == USUAL


def test_of_several_processes_each_has_a_part_of_the_batch(monkeypatch):
    asked: list = []
    monkeypatch.setattr(
        student.encoders.libraries, "measure_libraries", lambda shapes: asked.append({n for n, *_ in shapes}) or {}
    )
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    model.output_shapes = []
    config = StudentConfig(dtype="float32", micro_batch=32, batch_windows=32, mask_rate=0.25)
    for ranks in (1, 4, 5):
        choose_libraries(config, model, 128, torch.device("cpu"), ranks)
    assert asked == [{4096, 819, 1280}, {1024, 205, 320}, {7 * 128, 179, 280}]
