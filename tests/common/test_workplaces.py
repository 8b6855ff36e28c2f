"""A working directory is for one process at a time, remains after an interruption, and lists its own files."""

import errno
import fcntl
import logging
import os
import shutil
from contextlib import ExitStack, nullcontext, suppress

import pytest

from mlsm.common import disk
from mlsm.common.disk import temporary_name
from mlsm.common.workplaces import LOCK, discard, is_part, lock_if_free, read_mark, workplace

FILES = ["something", "part-*.npz"]


def test_what_a_killed_process_was_writing_goes_at_the_next_start(tmp_path):
    """A sample may be gigabytes, and the next one is written under another name."""
    left, kept = temporary_name(tmp_path, "sample.npy"), tmp_path / "sample.npy"
    of_others = tmp_path / ".sample.npy.123.0123456789ab.tmp"
    left.write_bytes(b"half")
    kept.write_bytes(b"whole")
    of_others.write_bytes(b"of our form, but not ours")
    with pytest.raises(KeyError), workplace(tmp_path, FILES):
        assert not left.exists() and kept.exists() and of_others.exists()
        raise KeyError


def test_a_workplace_is_for_one_and_goes_when_done(tmp_path):
    place = tmp_path / "deep" / "place"
    with workplace(place, FILES):
        (place / "something").touch()
        with pytest.raises(ValueError, match="another process is working"), workplace(place, FILES):
            pass
    assert not place.exists()
    with pytest.raises(KeyError), workplace(place, FILES):
        (place / "something").touch()
        raise KeyError
    assert (place / "something").exists()
    with pytest.raises(KeyError), workplace(tmp_path / "nothing came of it", FILES):
        raise KeyError
    assert not (tmp_path / "nothing came of it").exists()


def test_a_file_system_without_locks_is_worked_on_with_a_note(monkeypatch, tmp_path, caplog):
    caplog.set_level(logging.INFO, "mlsm.common")

    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with workplace(tmp_path / "place", FILES) as place:
        (place / "something").touch()
        discard(place)  # nobody can know whether it is in use
        assert (place / "something").exists()
        with lock_if_free(place) as is_free:
            assert not is_free
    assert "no lock on" in caplog.text and not place.exists()


def test_a_place_that_vanishes_before_it_is_locked_is_made_again(monkeypatch, tmp_path):
    place, flock, calls = tmp_path / "place", fcntl.flock, []

    def late(lock, how):
        if not calls:
            shutil.rmtree(place)
        calls.append(how)
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with workplace(place, FILES):
        assert (place / "lock").exists() and len(calls) == 2
        with pytest.raises(ValueError, match="another process"), workplace(place, FILES):
            pass


@pytest.mark.parametrize("times", [1, 2])
def test_a_place_that_vanishes_before_its_lock_is_made_is_made_once_again(monkeypatch, tmp_path, times):
    place, append, calls = tmp_path / "place", disk.append, []

    def late(path):
        calls.append(path)
        if len(calls) <= times:
            shutil.rmtree(place)
        return append(path)

    monkeypatch.setattr(disk, "append", late)
    with pytest.raises(FileNotFoundError) if times > 1 else nullcontext(), workplace(place, FILES):
        assert (place / LOCK).exists()
    assert len(calls) == 2 and not place.exists()


def test_only_a_free_place_is_discarded(tmp_path):
    with pytest.raises(KeyError), workplace(tmp_path / "place", FILES) as place:
        (place / "something").touch()
        discard(place)
        assert (place / "something").exists()
        raise KeyError
    discard(place)
    discard(place)
    assert not place.exists()


@pytest.mark.parametrize("call", ["remove", "unlink", "rmdir"])
@pytest.mark.parametrize("way", ["done", "nothing kept", "discard"])
def test_another_process_that_starts_while_a_place_is_removed_keeps_it(tmp_path, monkeypatch, call, way):
    """It can start once the lock file has gone, ahead of `rmdir`."""
    place, real, holders = tmp_path / "place", getattr(disk, call), []
    with ExitStack() as started:

        def start_before(path):
            with suppress(ValueError):
                holders.append(started.enter_context(workplace(place, FILES)))
                (place / "part-1.npz").touch()
            real(path)

        with suppress(KeyError), workplace(place, FILES):
            if way != "nothing kept":
                (place / "something").touch()
            if way == "discard":
                raise KeyError
            monkeypatch.setattr(disk, call, start_before)
            if way == "nothing kept":
                raise KeyError
        monkeypatch.setattr(disk, call, start_before)
        discard(place)
        monkeypatch.undo()
        assert len(holders) == (call == "rmdir")
        for holder in holders:
            assert (holder / "part-1.npz").exists()
            with pytest.raises(ValueError, match="another process is working"), workplace(place, FILES):
                pass
    assert not place.exists()


def test_a_place_is_marked_with_the_names_of_its_files(tmp_path):
    with workplace(tmp_path / "place", ["an older name"]), pytest.raises(ValueError):
        with workplace(tmp_path / "place", FILES):
            pass  # what another process holds keeps its mark
        assert read_mark(tmp_path / "place") == ["an older name"]
    with pytest.raises(KeyError), workplace(tmp_path / "place", FILES) as place:
        (place / "something").touch()
        assert read_mark(place) == FILES
        raise KeyError
    assert read_mark(place) == FILES and LOCK == "lock"
    with pytest.raises(KeyError), workplace(place, FILES[:1]):  # what is kept is marked with what is worked on now
        raise KeyError
    assert read_mark(place) == FILES[:1]
    assert [name for name in ("lock", "something", "part-1.npz", "mine.npz", "part-1.npy") if is_part(name, FILES)] == [
        "lock",
        "something",
        "part-1.npz",
    ]


@pytest.mark.parametrize("content", [b"", b"\xff", b"x" * 100_000, None])
def test_what_is_no_mark(tmp_path, content):
    (tmp_path / LOCK).write_bytes(content) if content is not None else os.mkfifo(tmp_path / LOCK)
    assert read_mark(tmp_path) is None and read_mark(tmp_path / "nothing") is None


def test_whether_a_place_is_free(tmp_path):
    with lock_if_free(tmp_path) as is_free:  # a place of an earlier version may have no lock
        assert is_free and not (tmp_path / LOCK).exists()
    with workplace(tmp_path / "place", FILES) as place:
        with lock_if_free(place) as is_free:
            assert not is_free
        shutil.rmtree(place)
        with workplace(place, FILES), lock_if_free(place) as is_free:
            assert not is_free
