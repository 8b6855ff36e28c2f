"""A run with damaged small files and whole checkpoints continues; no advice discards checkpoints."""

import json
import os
import shutil
import signal
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from tiny_store import log_of

from mlsm.common.errors import RunError
from student.config import StudentConfig
from student.runs import tracking
from student.runs.config import ExportConfig
from student.runs.export_run import export_run
from student.runs.probed import export_of
from student.train import train

pytestmark = [
    pytest.mark.promise(
        "a damaged line, cut or bad byte in a run's log, a damaged or lost result.json or config.json, with whole "
        "checkpoints: the run continues to the weights of an unbroken one; other settings and foreign checkpoints "
        "are refused; no advice discards a checkpoint",
        cases="7, 5, 7, 3",
    ),
    pytest.mark.promise("37 log, result or config of a run damaged"),
]


@pytest.fixture(scope="module")
def begun(ids_store, tmp_path_factory):
    """(config, directory) of a run that was stopped after step 5 of 8, with a checkpoint of that step."""
    place = tmp_path_factory.mktemp("begun")
    config = StudentConfig(
        store=ids_store.path,
        objective="mlm",
        encoder="bert-1x32",
        max_steps=8,
        batch_windows=12,
        micro_batch=4,
        seed=1,
        eval_windows=8,
        save_every=2,
        eval_every=0,
        device="cpu",
        run_dir=place / "run",
    )

    def stop(*_, step, **__):
        if step == 5:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(config, stop)
    train(replace(config, run_dir=place / "unbroken"))
    return config


@pytest.fixture
def run(begun, tmp_path):
    shutil.copytree(begun.run_dir, tmp_path / "run")
    return replace(begun, run_dir=tmp_path / "run")


def assert_finished(run, begun):
    result = train(run)
    ours, theirs = (
        load_file(path / "export" / "model.safetensors") for path in (run.run_dir, begun.run_dir.parent / "unbroken")
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs) and result["steps"] == 8
    return result


@pytest.mark.parametrize("where", ["start", "key", "value", "utf-8", "line end", "cut", "not ours"])
def test_a_damaged_log_costs_its_damaged_lines(run, begun, where, caplog):
    log = run.run_dir / "log.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    third = lines[3]
    damaged = {
        "start": b"z" + third[1:],
        "key": third.replace(b'"step"', b'"stfp"'),
        "utf-8": third[:9] + b"\xe9" + third[10:],
        "value": third.replace(b'"step": 3', b'"step": "3'),
        "line end": third[:-1] + b"*",
        "cut": third[:20] + b"\n",
        "not ours": b"[" * 5000 + b"\n",
    }[where]
    assert damaged != third and json.loads(third)["step"] == 3
    log.write_bytes(b"".join([*lines[:3], damaged, *lines[4:]]))
    assert_finished(run, begun)
    lost = {3, 4} if where == "line end" else {3}  # two lines have become one
    assert set(log_of(run.run_dir)) == set(range(1, 9)) - lost
    assert "1 damaged lines are passed over (line 4)" in caplog.text
    assert (run.run_dir / "log.damaged").read_bytes().rstrip(b"\n") == (
        damaged + lines[4] if where == "line end" else damaged
    ).rstrip(b"\n")


@pytest.mark.parametrize("content", [b"", b"{", b'{"steps": 8}', b"[]", b"\xff\xfe"])
def test_a_damaged_summary_is_written_anew_from_the_last_checkpoint(run, begun, content, caplog):
    before = assert_finished(run, begun)
    steps = log_of(run.run_dir)
    (run.run_dir / "result.json").write_bytes(content)
    again = train(run)
    assert again | {"seconds_to_first_step": 0} == before | {"seconds_to_first_step": 0}
    assert log_of(run.run_dir) == steps and "written again from the last checkpoint" in caplog.text
    assert train(run)["finished_before"]


def test_an_export_that_was_removed_is_written_anew_from_the_last_checkpoint(run, begun, caplog):
    assert_finished(run, begun)
    before = {path.name: path.read_bytes() for path in (run.run_dir / "export").iterdir()}
    shutil.rmtree(run.run_dir / "export")
    with pytest.raises(RunError, match="has no export; run its command again, or pass the directory"):
        export_of(run.run_dir)
    train(run)
    after = {path.name: path.read_bytes() for path in (run.run_dir / "export").iterdir()}
    after["README.md"] = before["README.md"]  # the order of its figures may differ
    assert after == before
    assert "export is gone; it is written again" in caplog.text
    for name in ("export", "checkpoints"):  # a student whose weights were deleted is not trained again
        shutil.rmtree(run.run_dir / name)
    assert train(run)["finished_before"]


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", None, "lr", "no store"])
def test_a_damaged_or_lost_description_is_written_anew_if_the_checkpoints_are_of_the_same_settings(
    run, begun, content, caplog
):
    file = run.run_dir / "config.json"
    sound = json.loads(file.read_text())
    if content == "lr":  # one flipped bit in a digit
        file.write_text(json.dumps(sound | {"settings": sound["settings"] | {"lr": 0.0005}}))
    elif content == "no store":
        file.write_text(json.dumps({name: value for name, value in sound.items() if name != "store"}))
    elif content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    before = {path: path.read_bytes() for path in run.run_dir.rglob("*") if path.is_file()}
    with pytest.raises(RunError, match="another run|cannot tell") as refused:
        train(replace(run, seed=7))
    assert "elete" not in str(refused.value) and "emove" not in str(refused.value)
    assert {path: path.read_bytes() for path in run.run_dir.rglob("*") if path.is_file()} == before
    assert_finished(run, begun)
    written = json.loads(file.read_text())
    sound["operational"]["run_dir"] = str(run.run_dir)
    assert written == sound and "damaged or lost: written again" in caplog.text


def test_checkpoints_of_other_settings_are_not_discarded_where_config_json_is_damaged(run, begun):
    sound = (run.run_dir / "config.json").read_bytes()
    (run.run_dir / "config.json").write_bytes(sound[:50])
    with pytest.raises(RunError, match="cannot tell whether.*Put back a copy of config.json.*--continue-from"):
        train(replace(run, seed=5))
    with pytest.raises(RunError, match="the checkpoints were not touched") as refused:
        export_run(ExportConfig(run=run.run_dir, output=run.run_dir.parent / "export"))
    assert "elete" not in str(refused.value)
    (run.run_dir / "config.json").write_bytes(sound)
    assert_finished(run, begun)


def test_a_checkpoint_of_another_run_is_not_gone_on_with(run, begun, tmp_path):
    other = replace(run, run_dir=tmp_path / "other", seed=5, max_steps=6)
    train(other)
    shutil.copytree(tmp_path / "other" / "checkpoints" / "step-00000006", run.run_dir / "checkpoints" / "step-00000006")
    with pytest.raises(RunError, match="step-00000006 is a checkpoint of another run"):
        train(run)
    shutil.rmtree(run.run_dir / "checkpoints" / "step-00000006")
    assert_finished(run, begun)


def test_readers_of_a_damaged_log(run, begun, monkeypatch, caplog):
    """Trackers and exports."""
    log = run.run_dir / "log.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([b"\xff\n", b'{"event": "start"}\n', b'{"step": 0, "flops": 5}\n', *lines]))
    export_run(ExportConfig(run=run.run_dir, output=run.run_dir.parent / "export"))
    assert json.loads((run.run_dir.parent / "export" / "lineage.json").read_text())["baseline"]["loss"] > 0
    assert caplog.text.count("2 damaged lines are passed over (line 1, 2)") == 1
    told = []
    monkeypatch.setattr(tracking, "_start", lambda *_: (Tracker(told), 0))
    (run.run_dir / "tracking").mkdir()
    (run.run_dir / "tracking" / "tensorboard.step").write_bytes(b"\xffx")
    monkeypatch.setattr(tracking, "check_trackers", lambda *_: None)
    tracking.start_trackers(("tensorboard",), RunOf(run.run_dir), {}, 5)
    assert [step for step, _ in told] == [1, 2, 3, 4, 5]


class Tracker:
    name = "told"

    def __init__(self, told):
        self.told = told

    def log(self, figures, step):
        self.told.append((step, figures))


class RunOf:
    def __init__(self, directory):
        self.directory, self.log_file = directory, directory / "log.jsonl"
