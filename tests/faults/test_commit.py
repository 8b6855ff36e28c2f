"""Every call of the commit protocol: its order, an error at it, death at it, and several writers at once.

The unit of proof is the call: the tests count the calls of one whole run and repeat it once for each of them.
"""

import errno
import json
import os
import shutil
import subprocess
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from faulty_disk import forked, raising_at, recorded, watched
from make_store import SPECIAL, make_store, random_block
from preloaded import Python, run_python

from mlsm.common import disk
from mlsm.common.disk import file_sha256
from mlsm.common.durable import check_links, publish_directory
from mlsm.common.errors import PlaceError, StoreError, WriteError, exit_code
from shards.files import StoreFiles
from shards.manifest import Plan, PlannedUnit, fingerprint
from shards.reader import Store
from shards.schema import FORMAT_VERSION, LSP_OCTAVES, ShardMeta
from shards.writer import UnitWriter

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {"format": FORMAT_VERSION, "kind": "lsp"}
TARGET = {
    "target": fingerprint(SETTINGS),
    "settings": SETTINGS,
    "lineage": {},
    "k": 300,
    "vocab_size": 1000,
    "max_length": 32,
    "weight_octaves": LSP_OCTAVES,
    "special_ids": SPECIAL,
}


@cache
def blocks():
    """Two blocks for each of two units, made once: what is tried here is writing them, hundreds of times."""
    rng = np.random.default_rng(0)
    return [[random_block(rng, windows=9, max_length=32, vocab_size=1000, k=300) for _ in range(2)] for _ in range(2)]


def write(path):
    """A store of two units; those that are finished are left alone."""
    files = StoreFiles(path)
    files.create(TARGET)
    units = [PlannedUnit(f"unit{n}", split, "test", n, n + 1) for n, split in enumerate(("train", "held_out"))]
    plan = Plan({"max_length": 32}, tuple(units))
    files.publish_plan(plan)
    for unit in files.missing_units(plan):
        with UnitWriter(files, ShardMeta(TARGET["target"], unit.id, 300, 1000, 32)) as writer:
            for block in blocks()[unit.start]:
                writer.write_block(**block)


def content(path):
    """Shards and records byte for byte."""
    units = Path(path) / "units"
    return {file.name: file.read_bytes() for file in sorted(units.iterdir())}


def temporaries(path):
    return list(Path(path).rglob(".*.tmp"))


def visible_units_are_whole(path):
    """Every record's shard is there with its bytes; returns how many there are."""
    files = StoreFiles(path)
    records = [files.record(record.stem) for record in files.units.glob("*.json")]
    for record in records:
        assert file_sha256(files.units / record.file) == record.sha256
    return len(records)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "store"
    write(path)
    return content(path)


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    """The calls of one whole run, in order."""
    return recorded(lambda: write(tmp_path_factory.mktemp("calls") / "store"))


def test_a_temporary_shard_that_was_removed_is_told(tmp_path):
    """By `clean` on another machine, while this process was suspended for more than an hour."""
    files, *_ = make_store(tmp_path / "store", blocks=1, units=())
    with (
        pytest.raises(WriteError, match="was removed before it was complete"),
        UnitWriter(files, ShardMeta("target", "unit", 0, 100, 8)),
    ):
        for temporary in temporaries(files.path):
            temporary.unlink()
    assert not content(files.path)


@pytest.mark.promise(
    "file fsynced before it is linked, directory after, record last; new directories durable in their parents",
    cases="every call of a run",
)
def test_the_order_of_the_calls(tmp_path):
    """One unit: shard written, fsynced, closed, linked, directory fsynced; then the record alike; then the temporary
    names: the record's at once, the shard's when the record is there."""
    files, *_ = make_store(tmp_path / "store", blocks=1, units=())

    def one_unit():
        with UnitWriter(files, ShardMeta("target", "unit", 0, 100, 8)):
            pass

    found = recorded(one_unit)
    names = [name for name, _ in found if name != "write"]
    once = ["create", "fsync", "close", "link", "unlink", "fsync_path"]
    assert names == [name for name in once if name != "unlink"] + once + ["unlink"]
    assert {name for name, _ in found[: found.index(("fsync_path", (files.units,)))]} >= {"write", "link"}
    links = [arguments for name, arguments in found if name == "link"]
    assert links[0][1].suffix == ".tar" and links[1][1] == files.record_file("unit")
    last_write = max(i for i, (name, _) in enumerate(found) if name == "write")
    assert all(name != "write" for name, _ in found[last_write + 1 :]) and found[last_write + 1][0] == "fsync"
    for name, arguments in found:
        if name in ("fsync", "close"):
            assert Path(arguments[0].name).name.startswith(".unit.")


@pytest.mark.promise("file fsynced before …")
def test_new_directories_are_durable_before_anything_is_in_them(calls):
    made = [(i, arguments[0]) for i, (name, arguments) in enumerate(calls) if name == "mkdir"]
    assert {path.name for _, path in made} == {"store", "units", "plans"}
    for i, path in made:
        assert calls[i + 1] == ("fsync_path", (path.parent,))


@pytest.mark.promise(
    "ENOSPC, EIO, EROFS at a call (a write half done): as after SIGKILL, and no temporary; a record that may not be "
    "durable is withdrawn",
    cases="3 × 58",
)
@pytest.mark.promise("8 read-only directory, EIO, failed fsync")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS], ids=errno.errorcode.get)
def test_an_error_at_every_call(tmp_path, whole, calls, number):
    for chosen in range(len(calls)):
        path = tmp_path / str(chosen)
        with raising_at(chosen, number), pytest.raises(OSError, match=os.strerror(number)) as caught:
            write(path)
        assert caught.value.errno == number
        assert not temporaries(tmp_path), calls[chosen]
        failed_unit = sum(
            name == "link" and arguments[1].parent.name == "units" and arguments[1].suffix == ".json"
            for name, arguments in calls[:chosen]
        )
        if (path / "units").is_dir():
            visible = visible_units_are_whole(path)
            last_link = max((i for i in range(chosen) if calls[i][0] == "link"), default=None)
            in_doubt = last_link is not None and calls[last_link][1][1].suffix == ".json" and chosen - last_link <= 2
            assert visible == failed_unit - (in_doubt and calls[last_link][1][1].parent.name == "units")
        write(path)
        assert content(path) == whole and not temporaries(path), calls[chosen]
        shutil.rmtree(path)


@pytest.mark.promise("a disk that stays read-only from a call on", cases="20")
@pytest.mark.promise("8 read-only directory …")
def test_errors_that_last(tmp_path, whole, calls):
    """From the i-th call on nothing can be written, nor removed: what is visible is whole, and a rerun repairs."""
    for chosen in range(0, len(calls), 3):
        path = tmp_path / str(chosen)

        def before(number, name, arguments, chosen=chosen):
            if number >= chosen and name != "close":
                raise OSError(errno.EROFS, "Read-only file system")

        with watched(before), pytest.raises(OSError, match="Read-only"):
            write(path)
        if (path / "units").is_dir():
            visible_units_are_whole(path)
        disk.discard_all()
        assert not temporaries(tmp_path)
        write(path)
        assert content(path) == whole
        shutil.rmtree(path)


@pytest.mark.promise("Ctrl-C at a call: as after SIGKILL, and no temporary", cases="58")
@pytest.mark.promise("30 SIGTERM, Ctrl-C")
def test_interrupted_at_every_call(tmp_path, whole, calls):
    """Ctrl-C arrives as an exception between any two calls."""
    for chosen in range(len(calls)):
        path = tmp_path / str(chosen)

        def before(number, name, arguments, chosen=chosen):
            if number == chosen:
                raise KeyboardInterrupt

        with watched(before), pytest.raises(KeyboardInterrupt):
            write(path)
        if (path / "units").is_dir():
            visible_units_are_whole(path)
        assert not temporaries(tmp_path), calls[chosen]
        write(path)
        assert content(path) == whole
        shutil.rmtree(path)


def run_script(module, *arguments, process=Python):
    """Run a script of this directory in a fresh process, which forks and kills its children."""
    return run_python([Path(__file__).with_name(module), *arguments], process, env=environment())


def environment():
    here = Path(__file__).resolve().parent
    paths = [ROOT, here, here.parent, here.parent / "shards"]
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}


@pytest.mark.promise(
    "SIGKILL at a call: no uncommitted unit visible, visible ones whole, the rerun's bytes are an unbroken run's",
    cases="58 real kills",
)
@pytest.mark.promise("1 kill -9 at each step of the commit")
def test_kill_at_every_call(tmp_path, whole, calls):
    run = run_script("kill_at_every_call.py", tmp_path)
    assert run.returncode == 0, run.stderr
    outcome = json.loads(run.stdout)
    assert outcome["killed"] == len(calls) and outcome["finished"] == 1
    assert outcome["rerun"] == {name: len(raw) for name, raw in whole.items()}


@pytest.mark.promise(
    "writers of one plan at once: one winner a unit, the bytes of one writer",
    cases="4 processes × 10; 2 commands",
)
@pytest.mark.promise("15 two writers at once")
def test_writers_of_one_plan_at_once(tmp_path, whole):
    run = run_script("writers_at_once.py", tmp_path, 4, 10)
    assert run.returncode == 0, run.stderr
    outcome = json.loads(run.stdout)
    assert outcome == {"rounds": 10, "writers": 4}
    for number in range(10):
        assert content(tmp_path / str(number)) == whole
        assert not temporaries(tmp_path / str(number))


@pytest.mark.promise("a writer whose bytes differ (another processor) loses whole", cases="2")
def test_a_writer_on_another_machine_loses_or_wins_whole(tmp_path, monkeypatch):
    """Two writers whose bytes differ, as on two kinds of processor: one record, and only its shard."""
    files, plan, _ = make_store(tmp_path / "store", blocks=1, units=("train",))
    unit = plan.units[0].id
    first = files.record(unit)
    with UnitWriter(files, ShardMeta(first.target, unit, 300, 1000, 32)) as writer:
        writer.write_block(**random_block(np.random.default_rng(9), windows=37, max_length=32, vocab_size=1000, k=300))
    assert writer.record == first and files.record(unit) == first
    assert len(list(files.units.iterdir())) == 3, "the loser's shard has no record: clean takes it"


@pytest.mark.promise("a writer whose bytes …")
def test_the_winners_record_is_withdrawn_while_we_look(tmp_path, monkeypatch):
    files, plan, _ = make_store(tmp_path / "store", blocks=1, units=("train",))
    works, looked = StoreFiles.record, []

    def withdrawn_once(self, unit):
        if not looked:
            looked.append(1)
            self.record_file(unit).unlink()
        return works(self, unit)

    monkeypatch.setattr(StoreFiles, "record", withdrawn_once)
    make_store(tmp_path / "store", blocks=1, units=("train",))
    assert looked and visible_units_are_whole(tmp_path / "store") == 1


def test_a_directory_appears_whole_or_not_at_all(tmp_path):
    """Every call of publish_directory fails once, for a new directory and for one that is replaced."""

    def fill(text):
        return lambda directory: (directory / "file").write_text(text)

    for replaced in (False, True):
        final = tmp_path / "final"
        number = 0
        while True:
            shutil.rmtree(final, ignore_errors=True)
            if replaced:
                publish_directory(final, fill("old"))
            try:
                with raising_at(number, errno.EIO):
                    publish_directory(final, fill("new"))
            except OSError:
                assert not temporaries(tmp_path)
                assert not final.exists() or (final / "file").read_text() in ("old", "new")
                assert final.exists() or not replaced
                number += 1
            else:
                break
        assert number >= 5 and (final / "file").read_text() == "new"
    publish_directory(final, fill("third"), replace=False)
    assert (final / "file").read_text() == "new" and not temporaries(tmp_path)
    (tmp_path / "link").symlink_to(final)
    publish_directory(tmp_path / "link", fill("third"))
    assert (tmp_path / "link" / "file").read_text() == "third" and (final / "file").read_text() == "new"


@pytest.mark.parametrize("replace", [False, True])
def test_a_directory_takes_no_files_place(replace, tmp_path):
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(PlaceError, match="notes is a file, and a directory is to be written there. Move it."):
        publish_directory(tmp_path / "notes", lambda directory: None, replace)
    assert (tmp_path / "notes").read_text() == "mine" and not temporaries(tmp_path)


def test_a_directory_takes_no_place_of_a_disk(tmp_path):
    """Refused before any work: no directory can replace a mount point, or may be lost behind a link."""
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    for place, replace, message in ((Path("/proc"), True, "is a mount point"), (tmp_path / "link", False, "is a link")):
        with pytest.raises(PlaceError, match=message):
            publish_directory(place, lambda directory: pytest.fail("was filled"), replace)


@pytest.mark.promise(
    "a full disk, a file size limit, a directory without permission: typed error, no temporary, resumable, "
    "exit code 74",
    cases="5, 6, 1, 1",
)
@pytest.mark.promise("7 full disk, file size limit")
def test_full_tmpfs(tmp_path, whole):
    """A real file system that is full, at sizes from nothing to almost enough."""
    place = tmp_path / "small"
    place.mkdir()
    need = sum(map(len, whole.values()))
    tried = 0
    for share in (0.05, 0.3, 0.6, 0.9, 0.98):
        size = int(need * share) // 4096 * 4096 + 4096
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
        mounted = subprocess.run(mount, capture_output=True)
        if mounted.returncode:
            pytest.skip(f"may not mount a tmpfs: {mounted.stderr.decode().strip()}")
        try:
            with pytest.raises(OSError, match="No space left"):
                write(place / "store")
            assert not temporaries(place)
            before = visible_units_are_whole(place / "store") if (place / "store" / "units").is_dir() else 0
            grow = f"remount,size={4 * need + (1 << 20)}"
            subprocess.run(["mount", "-o", grow, str(place)], check=True)
            write(place / "store")
            assert content(place / "store") == whole and before in (0, 1)
            tried += 1
        finally:
            subprocess.run(["umount", str(place)], check=True)
    assert tried == 5


@pytest.mark.promise("a full disk, a file …")
@pytest.mark.promise("7 full disk, file …")
def test_file_size_limits(tmp_path, whole):
    """RLIMIT_FSIZE at sizes from nothing to almost enough, in a child process."""
    import resource
    import signal

    largest = max(map(len, whole.values()))
    for number, share in enumerate((0.001, 0.2, 0.5, 0.8, 0.99, 0.9999)):
        path = tmp_path / str(number)

        def limited(path=path, share=share):
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            limit = int(largest * share)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            try:
                write(path)
            except OSError as error:
                os._exit(41 if error.errno == errno.EFBIG and not temporaries(path) else 42)

        assert forked(limited) == 41
        write(path)
        assert content(path) == whole


@pytest.mark.promise("a full disk, a file …")
@pytest.mark.promise("8 read-only directory …")
def test_a_read_only_directory(tmp_path, whole):
    """Root may write anywhere, so this one needs another user, or a directory that is made immutable."""
    path = tmp_path / "store"
    write(path)
    victim = next((path / "units").glob("*.json"))
    victim.unlink()
    os.chmod(path / "units", 0o555)
    try:

        def as_nobody():
            for parent in [path, *path.parents[:3]]:
                os.chmod(parent, 0o755)
            os.chmod(path / "units", 0o555)
            os.setuid(65534)
            try:
                write(path)
            except PermissionError:
                os._exit(41)

        if os.getuid() == 0:
            code = forked(as_nobody)
        else:
            with pytest.raises(PermissionError):
                write(path)
            code = 41
    finally:
        os.chmod(path / "units", 0o755)
    assert code == 41 and not victim.exists() and not temporaries(path)
    write(path)
    assert content(path) == whole


@pytest.mark.promise("a missing shard is …")
@pytest.mark.promise("28 left-overs, process ids used again")
def test_left_overs_do_no_harm(tmp_path, whole):
    """Temporaries of dead processes, one with our own process id, a stray shard, files dated in the future."""
    path = tmp_path / "store"
    write(path)
    files = StoreFiles(path)
    unit = next(files.units.glob("*.json")).stem
    files.record_file(unit).unlink()
    for name in (f".{unit}.{os.getpid()}.0123456789ab.tmp", f".{unit}.1.ffffffffffff.tmp"):
        (files.units / name).write_bytes(b"half a shard")
    (files.units / f"{unit}-000000000000.tar").write_bytes(b"not a shard")
    for file in path.rglob("*"):
        os.utime(file, (time.time() + 10**6,) * 2)
    with pytest.raises(StoreError, match="unfinished: 1 of 2"):
        Store.open(path)
    write(path)
    assert {name: raw for name, raw in content(path).items() if name in whole} == whole
    assert len(Store.open(path).split("train")) > 0
    disk.discard_all()
    assert len(temporaries(path)) == 2, "only ours are removed: another process may still write to its own"


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_disk_without_hard_links_is_refused_in_words(tmp_path, number, monkeypatch):
    """What link(2) says on FAT, on some network file systems and in FUSE. Nothing is left, and nothing is replaced."""

    def no_links(old, new):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(disk, "link", no_links)
    with pytest.raises(OSError, match="does not support hard links .*a directory on another disk") as caught:
        write(tmp_path / "store")
    assert exit_code(caught.value) == 74
    assert not temporaries(tmp_path)


def test_a_disk_without_hard_links_is_refused_before_long_work(tmp_path, monkeypatch):
    def no_links(old, new):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    check_links(tmp_path / "runs")
    monkeypatch.setattr(disk, "link", no_links)
    with pytest.raises(WriteError, match="runs could not be written: this disk does not support hard links"):
        check_links(tmp_path / "runs")
    assert list(tmp_path.rglob("*")) == [tmp_path / "runs"]


def test_another_error_of_a_link_is_as_it_was(tmp_path, monkeypatch):
    def full(old, new):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk, "link", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write(tmp_path / "store")
    assert caught.value.errno == errno.ENOSPC
