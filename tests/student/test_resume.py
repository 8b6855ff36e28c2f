"""Resuming: fast at any step, and after a full disk. The oracles are the loader and an uninterrupted run."""

import json
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from preloaded import run_command
from safetensors.torch import load_file
from tiny_store import log_of

from benchmarks.student_run import move_to
from mlsm.common.errors import Interrupted, RunError
from student.config import StudentConfig
from student.ranks import Ranks
from student.train import train

pytestmark = pytest.mark.promise("17 trainer killed …")

ROOT = Path(__file__).resolve().parents[2]
MILLION = 1_000_000


def stop_after(last):
    def progress(*args, step, **figures):
        if step >= last:
            os.kill(os.getpid(), signal.SIGINT)

    return progress


def start_line(run):
    """Of the newest process."""
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("event") == "start"][-1]


def test_a_run_is_ready_at_once_after_a_million_steps(lsp_store, settings):
    config = StudentConfig(store=lsp_store.path, **settings | {"max_steps": 2 * MILLION})
    with pytest.raises(Interrupted):
        train(config, stop_after(2))
    move_to(config, lsp_store, MILLION)
    with pytest.raises(Interrupted, match="step 1000002 of"):
        train(config, stop_after(MILLION + 2))
    line = start_line(config.run_dir)
    assert line["step"] == MILLION and line["ready_seconds"] <= 2 and line["restore_seconds"] <= 2
    log = log_of(config.run_dir)
    assert log[MILLION + 2]["data_wait_seconds"] < 1
    windows = lsp_store.split("train")
    ids, epochs = windows.stream(config.seed, MILLION * 12, MILLION * 12 + 12)
    assert set(epochs) == {80_000} and len(set(ids)) == 12, "12 x 1,000,000 windows are 80,000 epochs of 150"


def test_a_run_with_muon_goes_on_exactly(lsp_store, settings, tmp_path):
    common = settings | {"store": lsp_store.path, "optimizer": "muon", "schedule": "wsd", "adam_beta2": 0.98}
    train(unbroken := StudentConfig(**common | {"run_dir": tmp_path / "unbroken"}))
    with pytest.raises(Interrupted):
        train(broken := StudentConfig(**common | {"run_dir": tmp_path / "broken"}), stop_after(4))
    train(broken)
    figures = [[line["loss"] for line in log_of(run.run_dir).values() if "loss" in line] for run in (unbroken, broken)]
    assert figures[0] == figures[1] and len(figures[0]) == 8
    ours, theirs = (load_file(run.run_dir / "export" / "model.safetensors") for run in (broken, unbroken))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_order_far_into_a_run_costs_what_it_does_at_its_beginning(lsp_store):
    seconds = []
    for start in (0, 10**12):
        windows = lsp_store.split("train")
        begun = time.process_time()
        windows.stream(1, start, start + 1024)
        seconds.append(time.process_time() - begun)
    assert seconds[1] < 0.5 and seconds[1] < 10 * seconds[0] + 0.05


@pytest.mark.promise("7 full disk, file …")
def test_a_full_disk_stops_cleanly_and_the_run_goes_on_when_there_is_room(ids_store, settings, tmp_path):
    """A limit on the size of files stands in for the disk: the checkpoint's weights do not fit."""
    config = StudentConfig(store=ids_store.path, objective="mlm", **settings | {"dropout": 0.1})
    train(replace(config, run_dir=tmp_path / "unbroken"))
    with pytest.raises(Interrupted):
        train(config, stop_after(4))
    before = contents(config.run_dir / "checkpoints")
    said, code = under_limit(config, 64_000)
    assert code == 74, said
    assert (
        said.count("mlsm: error:") == 1
        and "step-00000006 could not be written" in said
        and "Raise the limit of file sizes" in said
    )
    assert "Traceback" not in said
    assert contents(config.run_dir / "checkpoints") == before and not list(config.run_dir.rglob(".*.tmp"))
    train(config)
    for name in ("loss", "grad_norm", "batch"):
        ours, theirs = (log_of(run) for run in (config.run_dir, tmp_path / "unbroken"))
        assert [line[name] for line in ours.values()] == [line[name] for line in theirs.values()]
    ours, theirs = (load_file(run / "export" / "model.safetensors") for run in (config.run_dir, tmp_path / "unbroken"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.promise("7 full disk, file …")
def test_a_full_disk_at_the_last_export_is_one_clear_line_too(ids_store, settings):
    config = StudentConfig(store=ids_store.path, objective="mlm", **settings | {"dropout": 0.1})
    train(config)
    weights = load_file(config.run_dir / "export" / "model.safetensors")
    shutil.rmtree(config.run_dir / "export")  # as if the disk had been full then
    (config.run_dir / "result.json").unlink()
    said, code = under_limit(config, 64_000)
    assert code == 74, said
    assert said.count("mlsm: error:") == 1 and f"{config.run_dir / 'export'} could not be written" in said
    assert "Make room" in said and "Traceback" not in said
    assert not (config.run_dir / "export").exists() and not list(config.run_dir.rglob(".*.tmp"))
    train(config)
    found = load_file(config.run_dir / "export" / "model.safetensors")
    assert found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in found)


def under_limit(config, most_bytes):
    """Run the command where no file may grow beyond a size; returns what it said and its exit code."""
    given = ("store", "objective", "dropout", "encoder", "max_steps", "batch_windows", "micro_batch", "lr", "seed")
    given += ("eval_windows", "save_every", "eval_every", "device", "run_dir")
    command = [part for name in given for part in (f"--{name}", str(getattr(config, name)))]
    recipe = config.run_dir.with_name("plain.yaml")
    recipe.write_text("train-student: {}")
    process = run_command(["train-student", "--recipe", recipe, *command], largest_file=most_bytes)
    return process.stderr, process.returncode


def contents(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_checkpoint_that_only_one_machine_has_is_one_clear_line(ids_store, settings, monkeypatch):
    """Of several machines each must see the run's directory."""
    config = StudentConfig(store=ids_store.path, objective="mlm", **settings)
    with pytest.raises(Interrupted):
        train(config, stop_after(4))
    tell = Ranks.tell

    def elsewhere(self, value):
        if isinstance(value, tuple):
            shutil.rmtree(value[0])
        return tell(self, value)

    monkeypatch.setattr(Ranks, "tell", elsewhere)
    with pytest.raises(RunError, match="not on this machine. Give a --run-dir on a file system"):
        train(config)
