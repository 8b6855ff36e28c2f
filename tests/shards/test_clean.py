"""clean removes left-overs of dead processes, and nothing that may be in use or is not recognised."""

import fcntl
import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
from make_store import make_store

from mlsm.common.disk import temporary_name
from mlsm.common.errors import RequestError
from mlsm.common.workplaces import LOCK, MARK, workplace
from shards import clean as module
from shards.clean import clean
from shards.reader import Store

pytestmark = pytest.mark.promise("28 left-overs, process …")


@pytest.fixture
def store(tmp_path):
    return make_store(tmp_path / "runs" / "stores" / "lsp", blocks=1, units=("train", "held_out"))[0]


@pytest.fixture
def dead_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def later(monkeypatch, hours=2):
    now = time.time()
    monkeypatch.setattr(module.time, "time", lambda: now + hours * 3600)


def names(report, which="removed"):
    return sorted(entry["path"].rpartition("/")[2] for entry in report[which])


def temporary(directory, stem, pid):
    """The name that a process of that id would have given."""
    with mock.patch("os.getpid", lambda: pid):
        return temporary_name(directory, stem)


def unrecorded_shard(store, unit, raw):
    path = store.units / f"{unit}-{hashlib.sha256(raw).hexdigest()[:12]}.tar"
    path.write_bytes(raw)
    return path


def left_overs(store, pid):
    """One of each kind; returns their paths."""
    runs = store.path.parent.parent
    unit = temporary(store.units, "unit", pid)
    unit.write_bytes(b"x" * 100)
    replaced = temporary(store.path, "tokenizer", pid)
    replaced.mkdir()
    (replaced / "tokenizer.json").write_bytes(b"y" * 50)
    unfinished = temporary(runs / "dictionaries", "name-0123", pid)
    unfinished.mkdir(parents=True)
    learning = runs / "dictionaries" / ".name-0123.learning"
    with pytest.raises(KeyboardInterrupt), workplace(learning, ("sample.npy", "part-*")):
        (learning / "sample.npy").write_bytes(b"z" * 20)
        temporary(learning, "learning.npz", pid).touch()
        raise KeyboardInterrupt
    return [unit, replaced, unfinished, learning, unrecorded_shard(store, f"{0:032}", b"t" * 10)]


def test_left_overs_of_the_dead_go_after_an_hour(store, dead_pid, monkeypatch):
    paths = left_overs(store, dead_pid)
    whole = Store.open(store.path).report()
    runs = store.path.parent.parent
    young = clean(runs)
    assert not young["removed"] and len(young["kept"]) == 5 and all(path.exists() for path in paths)
    later(monkeypatch)
    listed = clean(runs, dry_run=True)
    assert listed["bytes"] == 180 + (paths[3] / "lock").stat().st_size and all(path.exists() for path in paths)
    report = clean(runs)
    assert names(report) == names(listed) == sorted(path.name for path in paths)
    assert not any(path.exists() for path in paths) and report["bytes"] == listed["bytes"]
    assert Store.open(store.path).report() == whole
    assert clean(runs)["removed"] == []


def test_all_takes_the_young_ones_too_but_a_shard_that_has_just_appeared(store, dead_pid, monkeypatch):
    paths = left_overs(store, dead_pid)
    report = clean(store.path.parent.parent, everything=True)
    assert len(report["removed"]) == len(paths) - 1 and names(report, "kept") == [paths[-1].name]
    assert "its record may be about to follow" in report["kept"][0]["reason"]
    later(monkeypatch, hours=(module.COMMIT_SECONDS + 1) / 3600)
    assert names(clean(store.path.parent.parent, everything=True)) == [paths[-1].name]


def test_a_mark_inside_a_store_does_not_make_its_units_a_work_place(store, dead_pid, monkeypatch):
    """Whoever made the store may have put it there; a temporary next to the units goes all the same."""
    (store.units / LOCK).write_text(f"{MARK}\n*\n")
    earlier = temporary(store.path, "dictionary", dead_pid)
    earlier.mkdir()
    before = sorted(store.units.iterdir())
    later(monkeypatch)
    assert names(clean(store.path.parent, everything=True)) == [earlier.name]
    assert sorted(store.units.iterdir()) == before


def test_a_living_writer_loses_nothing(store, monkeypatch):
    mine = temporary_name(store.units, "unit")
    mine.write_bytes(b"x")
    later(monkeypatch)
    report = clean(store.path, everything=True)
    assert not report["removed"] and f"process {os.getpid()} is alive" in report["kept"][0]["reason"]
    assert mine.exists()


def test_a_process_id_that_was_given_anew_does_not_count(store, monkeypatch):
    mine = temporary_name(store.units, "unit")
    mine.write_bytes(b"x")
    monkeypatch.setattr(module, "_began", lambda pid: time.time() + 3600)
    assert names(clean(store.path, everything=True)) == [mine.name]


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="no /proc")
def test_when_a_process_began():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert abs(module._began(process.pid) - time.time()) < 30
        assert module._began(2**22 + 5) is None
    finally:
        process.communicate(b"\n")


def test_a_learning_directory_in_use_stays(store, dead_pid, monkeypatch):
    learning = left_overs(store, dead_pid)[3]
    later(monkeypatch)
    with open(learning / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert names(clean(store.path.parent.parent), "kept") == [learning.name]
    assert names(clean(store.path.parent.parent)) == [learning.name]


def test_a_work_place_is_known_by_its_mark_whatever_it_is_called(store, dead_pid, monkeypatch):
    runs = store.path.parent.parent
    with pytest.raises(KeyboardInterrupt), workplace(runs / "any" / "name", ("part-*.npz",)) as place:
        left = temporary(place, "part-00001.npz", dead_pid)
        for path in (place / "part-00000.npz", left):
            path.write_bytes(b"v" * 10)
        raise KeyboardInterrupt
    later(monkeypatch)
    for mine in (place / "mine.npz", place / "part-0.npz"):  # a file that is not of the work; a directory
        mine.mkdir() if mine.name.startswith("part") else mine.touch()
        report = clean(runs, everything=True)
        assert report["kept"] == [] and names(report) in ([], [left.name])
        mine.rmdir() if mine.is_dir() else mine.unlink()
    with workplace(place, ("part-*.npz",)):
        assert "another process is working" in clean(runs, everything=True)["kept"][0]["reason"]
        (place / "part-00000.npz").rename(runs / "part")
    assert not place.exists() and names(clean(runs)) == []


def test_the_shard_of_an_unreadable_record_stays(store, monkeypatch):
    record = next(store.units.glob("*.json"))
    shard = store.units / store.record(record.stem).file
    record.write_text("{")
    later(monkeypatch)
    assert "record is damaged" in clean(store.path)["kept"][0]["reason"] and shard.exists()


def test_a_loser_of_a_race_goes_and_the_winner_stays(store, monkeypatch):
    record = store.record(next(store.units.glob("*.json")).stem)
    loser = unrecorded_shard(store, record.unit, b"x")
    later(monkeypatch)
    assert names(clean(store.path)) == [loser.name] and (store.units / record.file).exists()


def test_a_second_name_of_a_shard_frees_nothing(store, dead_pid, monkeypatch):
    """Killed between link and unlink: the temporary and the shard are one file."""
    shard = next(store.units.glob("*.tar"))
    os.link(shard, temporary(store.units, "unit", dead_pid))
    later(monkeypatch)
    report = clean(store.path)
    assert len(report["removed"]) == 1 and report["bytes"] == 0 and shard.exists()


def test_what_is_not_recognised_is_not_touched(store, dead_pid, monkeypatch, tmp_path):
    runs = store.path.parent.parent
    others = [
        runs / ".cache.tmp",
        runs / f".x.{dead_pid}.zzz.tmp",
        runs / "a.tmp",
        runs / f"x-{0:012}.tar",
        store.units / "notes.txt",
        store.units / "mine.tar",
        store.path / ".learning",
        # of our form, but without the digits that ours have
        runs / f".x.{dead_pid}.0123456789ab.tmp",
        store.units / f".unit.{dead_pid}.000000000000.tmp",
        runs / f".dictionary.{10**18}.tmp",
        store.units / f"{0:032}-0123456789ab.tar",
        store.units / "mine-000000000000.tar",
        runs / "mine.learning" / "sample.npy",
        runs / "diagnostics" / "mine" / "vectors" / "part-00000.npz",
    ]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    outside = tmp_path / "outside"
    outside.mkdir()
    kept = temporary(outside, "x", dead_pid)
    kept.write_bytes(b"x")
    (runs / "link").symlink_to(outside)
    temporary(runs, "link", dead_pid).symlink_to(outside)
    later(monkeypatch)
    report = clean(runs, everything=True)
    assert report["removed"] == [] and all(path.exists() for path in [*others, kept])
    for place in ("/", Path.home()):
        with pytest.raises(RequestError, match="holds more than outputs of this package"):
            clean(place, dry_run=True)
    with pytest.raises(RequestError, match="no such directory to clean"):
        clean(tmp_path / "nothing")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # a user whom the system does not know, without HOME
    assert clean(runs, dry_run=True)["removed"] == []
