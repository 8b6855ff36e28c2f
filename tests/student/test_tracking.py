"""Trackers mirror the log: every step once, whatever happened on the way. Real ones, read back from their files."""

import json
import os
import struct
import sys
import time
from importlib.util import find_spec
from typing import get_args

import pytest
from tiny_store import log_of

import student.runs.tracking
from mlsm.common.errors import RunError
from student.config import StudentConfig, TrackerName
from student.runs.tracking import Trackers, _id, _tensorboard, figures_of
from student.train import train

TRACKERS = get_args(TrackerName)
INSTALLED = tuple(name for name in TRACKERS if find_spec("accelerate") and find_spec(name))


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A place of its own for what trackers keep, and no login anywhere."""
    for name, value in {"HOME": tmp_path, "NETRC": tmp_path / "netrc", "TRACKIO_DIR": tmp_path / "trackio"}.items():
        monkeypatch.setenv(name, str(value))
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    if "wandb" in INSTALLED:
        __import__("wandb").teardown()  # what it knows of the environment
    return tmp_path


def tensorboard_points(directory, name):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard")).Reload()
    assert '"lr": 0.001' in events.Tensors("settings/text_summary")[0].tensor_proto.string_val[0].decode()
    assert len(events.Tensors("settings/text_summary")) == 1
    return [(event.step, event.value) for event in events.Scalars(name)]


def wandb_points(directory, name):
    """Of the newest offline run, the one that counts when all are synchronised in their order."""
    from wandb.proto.wandb_internal_pb2 import Record

    points = []
    newest = max(directory.glob("wandb/offline-run-*/*.wandb"), key=os.path.getmtime)
    for data in wandb_records(newest.read_bytes()):
        record = Record.FromString(data)
        items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        if name in items:
            points.append((json.loads(items["_step"]), json.loads(items[name])))
    return points


def wandb_records(data):
    """LevelDB's log format behind a header of 7 bytes: blocks of 32 KiB, records whole (1) or in parts (2, 3, 4)."""
    position, record = 7, b""
    while position + 7 <= len(data):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)  # behind a checksum
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def trackio_points(directory, name):
    import trackio

    run = f"{directory.parent.name}-{(directory / 'id').read_text()}"
    return [(row["step"], row[name]) for row in trackio.SQLiteStorage.get_logs("mlsm", run) if name in row]


POINTS = {"tensorboard": tensorboard_points, "wandb": wandb_points, "trackio": trackio_points}


@pytest.mark.skipif(not INSTALLED, reason="no tracker installed")
def test_killed_and_resumed_every_step_is_there_once(ids_store, settings, home, monkeypatch, train_until_killed):
    """The checkpoint is of step 3, the log and the trackers have gone to step 5."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    changes = {"store": str(ids_store.path), "objective": "mlm", "track": INSTALLED}
    changes |= {"eval_every": 4, "checkpoints": (1,)}
    config = StudentConfig(**settings | changes)
    train_until_killed(config, 5)
    assert max(log_of(config.run_dir)) == 5 and (config.run_dir / "checkpoints" / "step-00000003").exists()
    train(config)
    log = log_of(config.run_dir)
    expected = {step: line["held_out"]["loss"] for step, line in log.items() if "held_out" in line}
    for tracker in INSTALLED:
        losses = POINTS[tracker](config.run_dir / "tracking", "loss")
        assert [step for step, _ in losses] == list(range(1, 9)), tracker
        assert [loss for _, loss in losses] == pytest.approx([line["loss"] for line in log.values()], rel=1e-6)
        held_out = POINTS[tracker](config.run_dir / "tracking", "held_out/loss")
        assert len(held_out) == len(expected) and dict(held_out) == pytest.approx(expected, rel=1e-6)


def test_a_run_that_was_not_tracked_before_is_shown_whole(ids_store, settings):
    pytest.importorskip("tensorboard")
    common = settings | {"store": str(ids_store.path), "objective": "mlm"}

    def stop(*args, step, **figures):
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(StudentConfig(**common), stop)
    config = StudentConfig(**common, track=("tensorboard",))
    train(config)
    losses = tensorboard_points(config.run_dir / "tracking", "loss")
    assert [step for step, _ in losses] == list(range(1, 9))


def test_a_run_that_was_not_tracked_for_a_while_lacks_nothing(ids_store, settings):
    pytest.importorskip("tensorboard")
    common = settings | {"store": str(ids_store.path), "objective": "mlm", "save_every": 1}

    def stop_at(last):
        def stop(*args, step, **figures):
            if step >= last:
                raise KeyboardInterrupt

        return stop

    for last, track in ((2, ("tensorboard",)), (5, ())):
        with pytest.raises(KeyboardInterrupt):
            train(StudentConfig(**common, track=track), stop_at(last))
    config = StudentConfig(**common, track=("tensorboard",))
    train(config)
    losses = tensorboard_points(config.run_dir / "tracking", "loss")
    assert [step for step, _ in losses] == list(range(1, 9))


def test_a_run_resumed_within_the_same_second_is_read_in_order(tmp_path):
    """TensorBoard reads event files by name: the second they were made in, then host and process."""
    pytest.importorskip("tensorboard")
    board = tmp_path / "tensorboard"
    board.mkdir()
    now = int(time.time())
    (board / f"events.out.tfevents.{now}.zzz.1.0").touch()
    tracker, _ = _tensorboard("title", tmp_path, {}, 0)
    tracker.finish()
    (made,) = [file.name for file in board.iterdir() if ".zzz." not in file.name]
    assert int(made.split(".")[3]) > now


def test_wandbs_links_are_removed_and_others_are_refused(ids_store, settings, tmp_path):
    """wandb 0.31 links the newest run and its logs, and in each run's directory a log in the user's cache."""
    pytest.importorskip("tensorboard")
    config = StudentConfig(**settings, store=ids_store.path, objective="mlm", track=("tensorboard",))

    def stop(*args, step, **figures):
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, stop)
    kept, place = tmp_path / "core-debug.log", config.run_dir / "tracking"
    kept.write_text("of wandb's core")
    links = [place / "wandb" / "latest-run", place / "wandb" / "offline-run-1" / "logs" / "debug-core.log"]
    for link in links:
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(kept)
    other = place / "debug-core.log"
    other.symlink_to(kept)
    with pytest.raises(RunError, match="debug-core.log is a link, which our trackers never make"):
        train(config)
    other.unlink()
    assert train(config)["steps"] == 8
    assert not any(link.is_symlink() for link in links) and kept.read_text() == "of wandb's core"


def test_an_id_that_was_cut_is_made_anew(tmp_path):
    first = _id(tmp_path)
    assert len(first) == 8 and _id(tmp_path) == first
    (tmp_path / "id").write_text("")
    assert len(_id(tmp_path)) == 8


def test_nothing_is_imported_unless_asked_for(ids_store, settings, monkeypatch):
    for name in (*TRACKERS, "accelerate.tracking"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it fails
    config = StudentConfig(store=ids_store.path, objective="mlm", **settings)
    assert train(config)["steps"] == 8
    assert not (config.run_dir / "tracking").exists()


def test_a_missing_package_is_one_clear_line_and_nothing_is_written(ids_store, settings, monkeypatch):
    monkeypatch.setattr(student.runs.tracking, "find_spec", lambda package: None if package == "wandb" else True)
    config = StudentConfig(store=ids_store.path, objective="mlm", track=("wandb",), **settings)
    with pytest.raises(RunError, match="--track wandb needs wandb, not installed.*pip install wandb") as caught:
        train(config)
    assert "\n" not in str(caught.value) and not config.run_dir.exists()


def test_no_login_is_one_clear_line_before_training_starts(ids_store, settings, home):
    pytest.importorskip("wandb")
    config = StudentConfig(store=ids_store.path, objective="mlm", track=("wandb",), **settings)
    with pytest.raises(RunError, match="--track wandb: UsageError: No API key.*set WANDB_MODE=offline") as caught:
        train(config)
    assert "\n" not in str(caught.value) and not (config.run_dir / "log.jsonl").exists()


def test_a_tracker_that_fails_is_dropped_and_training_goes_on(caplog):
    class Tracker:
        name = "flaky"
        logged = []

        def log(self, figures, step):
            if step == 2:
                raise OSError("no network")
            self.logged.append(step)

    trackers = Trackers([(Tracker(), 0)])
    for step in (1, 2, 3):
        trackers.log({"step": step, "loss": 1.0})
    assert Tracker.logged == [1] and trackers.started == []
    assert "flaky fails (OSError: no network); training continues" in caplog.text


def test_the_figures_of_a_line_are_its_numbers():
    line = {"step": 4, "loss": 1.5, "batch": "00ff", "mfu": None, "held_out": {"loss": 2.0, "accuracy": 0.5}}
    assert figures_of(line) == {"loss": 1.5, "held_out/loss": 2.0, "held_out/accuracy": 0.5}
    assert figures_of({"step": 0, "event": "start", "baseline": {"loss": 3.0}}) == {}


def test_where_a_run_is_shown_is_no_part_of_what_it_is():
    assert StudentConfig(track=("wandb",)).identity() == StudentConfig().identity()
    with pytest.raises(ValueError, match="--track takes a list, each one of tensorboard"):
        StudentConfig(track=("excel",))
