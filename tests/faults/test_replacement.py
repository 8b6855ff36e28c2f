"""A unit tried again (--retry-quarantine): its old record counts until the new one takes its place, in one step."""

import errno
from dataclasses import replace

import numpy as np
import pytest
from faulty_disk import killed_at, raising_at, recorded
from make_store import make_store, random_block

from shards import disk
from shards.manifest import file_sha256
from shards.schema import ShardMeta
from shards.verify import verify
from shards.writer import UnitWriter


def old_store(path):
    """A store of one unit with a document in quarantine; its files and record."""
    files, plan, _ = make_store(path, blocks=1, units=("train",))
    old = files.record(plan.units[0].id)
    again = replace(old, quarantined=({"record": 0, "source": "a", "windows": [0], "reason": "NaN"},))
    files.replace_record(old, again)
    return files, again


def try_again(files, old):
    block = random_block(np.random.default_rng(9), windows=9, max_length=32, vocab_size=1000, k=300)
    with UnitWriter(files, ShardMeta(old.target, old.unit, 300, 1000, 32), replaces=old) as writer:
        writer.write_block(**block)


def calls_of_a_replacement(directory):
    files, old = old_store(directory)
    return len(recorded(lambda: try_again(files, old)))


@pytest.mark.parametrize("how", ["killed", "error"])
def test_the_unit_is_whole_at_every_moment(tmp_path, how):
    calls = calls_of_a_replacement(tmp_path / "counted")
    assert calls >= 10
    kept = set()
    for number in range(calls):
        files, old = old_store(tmp_path / str(number))
        if how == "killed":
            assert killed_at(number, lambda files=files, old=old: try_again(files, old)) != 0
        else:
            with raising_at(number, errno.EIO), pytest.raises(OSError):
                try_again(files, old)
            assert not list(files.path.rglob(".*.tmp"))
        record = files.record(old.unit)
        kept.add(bool(record.quarantined))
        assert file_sha256(files.units / record.file) == record.sha256
        assert not verify(files.path, full=True)["damaged"] and not verify(files.path)["missing"]
        try_again(files, record)
        assert not files.record(old.unit).quarantined
    assert kept == {True, False}, "some ended before the replacement, some after it"


def test_the_old_shard_goes_and_the_same_one_stays(tmp_path):
    files, old = old_store(tmp_path / "store")
    try_again(files, old)
    assert [path.name for path in files.units.glob("*.tar")] == [files.record(old.unit).file] != [old.file]
    try_again(files, files.record(old.unit))
    assert [path.name for path in files.units.glob("*.tar")] == [files.record(old.unit).file]


def test_two_that_try_again_at_once_leave_one_whole_unit(tmp_path, monkeypatch):
    files, old = old_store(tmp_path / "store")
    works, inside = disk.rename, []

    def late(temporary, final):
        if not inside:
            inside.append(1)
            try_again(files, old)
        works(temporary, final)

    monkeypatch.setattr(disk, "rename", late)
    try_again(files, old)
    assert inside and not verify(files.path, full=True)["damaged"]
