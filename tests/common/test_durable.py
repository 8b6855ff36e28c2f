"""A name that may not survive a power cut is withdrawn, unless another file has it by then; a directory that is
replaced keeps its user's files."""

import errno
import json
import math
import os
import re
from contextlib import nullcontext

import pytest
from faulty_disk import killed_at, recorded

from mlsm.common import disk
from mlsm.common.durable import publish_directory, publish_json, replace_bytes, replace_json
from mlsm.common.errors import PlaceError
from shards.clean import clean


@pytest.mark.parametrize(
    ("withdraw", "replaced", "left"),
    [(True, False, None), (True, True, "theirs"), (False, False, "ours"), (False, True, "theirs")],
)
def test_only_our_own_file_is_withdrawn(tmp_path, monkeypatch, withdraw, replaced, left):
    """The directory cannot be made durable after our link, and somebody may have replaced the file by then."""
    final = tmp_path / "unit.json"
    (tmp_path / "other").write_text('"theirs"')

    def fail(path):
        assert path == tmp_path and json.loads(final.read_text()) == "ours"
        if replaced:
            os.replace(tmp_path / "other", final)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(disk, "fsync_path", fail)
    with pytest.raises(OSError, match="Input/output error"):
        publish_json(final, "ours", withdraw=withdraw)
    assert (json.loads(final.read_text()) if final.exists() else None) == left
    assert not list(tmp_path.glob(".*")), "no temporary"


def test_a_name_of_another_is_neither_replaced_nor_withdrawn(tmp_path, monkeypatch):
    final = tmp_path / "unit.json"
    final.write_text('"theirs"')
    assert publish_json(final, "ours", withdraw=True) is False
    monkeypatch.setattr(disk, "fsync_path", lambda path: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
    with pytest.raises(OSError, match="broken"):
        publish_json(final, "ours", withdraw=True)
    assert json.loads(final.read_text()) == "theirs"


@pytest.mark.parametrize("write", [publish_json, replace_json])
def test_a_number_that_json_lacks_is_written_only_if_asked_for(tmp_path, write):
    with pytest.raises(ValueError, match="JSON"):
        write(tmp_path / "record.json", {"loss": math.nan})
    assert not os.listdir(tmp_path)
    write(tmp_path / "record.json", {"loss": math.nan}, allow_nan=True)
    assert math.isnan(json.loads((tmp_path / "record.json").read_text())["loss"])


@pytest.mark.parametrize("sync", [True, False])
def test_what_replaces_a_file_is_durable_unless_it_need_not_be(tmp_path, sync):
    calls = [name for name, _ in recorded(lambda: replace_bytes(tmp_path / "state", b"new", sync))]
    assert calls == ["create", "write", *["fsync"] * sync, "close", "rename", *["fsync_path"] * sync]
    assert (tmp_path / "state").read_bytes() == b"new"


def test_files_of_the_user_survive_a_kill_at_any_call_and_then_a_clean(tmp_path):
    def publish(final):
        def carry(old, new):
            disk.rename(new, new)  # so that one of the kills is in the middle
            os.link(old / "mine", new / "mine")

        publish_directory(final, lambda new: (new / "page").write_text("ours"), carry=carry)

    def old_view(name):
        final = tmp_path / name / "view"
        publish_directory(final, lambda new: (new / "page").write_text("old"))
        (final / "mine").write_text("mine")
        return final

    final = old_view("counted")
    calls = [name for name, _ in recorded(lambda: publish(final))]
    assert calls.count("rename") == 5  # the attempt without replacing, aside, in `carry`, new, old
    assert os.listdir(final.parent) == ["view"]
    refused = 0
    for number in range(len(calls)):
        final = old_view(str(number))
        killed_at(number, lambda final=final: publish(final))
        try:
            publish(final)
        except PlaceError as error:  # the new one has come, and the old one is not yet a temporary
            assert "left from a command that was killed" in str(error) and (final / "page").read_text() == "ours"
            refused += 1
        clean(final.parent, everything=True)
        assert (final / "mine").read_text() == "mine", calls[number]
        assert set(os.listdir(final.parent)) <= {"view", ".view.replaced"}
    assert refused == 1


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_file_system_that_syncs_no_directories_is_no_error(tmp_path, monkeypatch, number):
    def refuse(descriptor):
        raise OSError(number, os.strerror(number))

    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match=re.escape(str(tmp_path / "file"))):
        disk.fsync_path(tmp_path / "file")
    with pytest.raises(OSError, match=re.escape(str(tmp_path))) if number == errno.EIO else nullcontext():
        disk.fsync_path(tmp_path)
