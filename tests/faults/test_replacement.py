"""A unit tried again (--retry-quarantine): its old record counts until the new one takes its place, in one step."""

import errno
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager

import numpy as np
import pytest
from faulty_disk import killed_at, raising_at, recorded
from make_store import random_block
from test_commit import TARGET

from mlsm.common import disk
from mlsm.common.disk import file_sha256
from shards import writer
from shards.files import StoreFiles
from shards.manifest import Plan, PlannedUnit
from shards.schema import ShardMeta
from shards.verify import verify
from shards.writer import UnitWriter

pytestmark = pytest.mark.promise(
    "`--retry-quarantine`: SIGKILL or EIO at a call leaves the old or the new record, with its shard; of two "
    "retries at once, or one during an encoding, the better stays; a shard that was taken away before its "
    "record comes back",
    cases="2 × every call; 19",
)

BLOCK = random_block(np.random.default_rng(9), windows=9, max_length=32, vocab_size=1000, k=300)


def write(files, failing, retry=True):
    """Write the one unit with so many windows in quarantine, whose rows are empty; returns its record."""
    block = dict(BLOCK)
    first = int(BLOCK["lengths"][:failing].sum())
    dropped = int(BLOCK["nnz"][:first].sum())
    block["nnz"] = np.where(np.arange(len(BLOCK["nnz"])) < first, 0, BLOCK["nnz"])
    block["tail"] = np.where(block["nnz"] > 0, BLOCK["tail"], 0)
    block |= {name: BLOCK[name][dropped:] for name in ("indices", "weights")}
    with UnitWriter(files, ShardMeta(TARGET["target"], "unit", 300, 1000, 32), retry=retry) as unit:
        unit.write_block(**block)
        if failing:
            windows = list(range(failing))
            unit.quarantined.append({"record": 0, "source": "a", "windows": windows, "reason": "NaN"})
    return unit.record


@pytest.fixture
def new_store(tmp_path):
    def make(name):
        files = StoreFiles(tmp_path / name)
        files.create(TARGET)
        files.publish_plan(Plan({"max_length": 32}, (PlannedUnit("unit", "train", "test", 0, 1),)))
        return files

    return make


def check_whole(files):
    record = files.record("unit")
    assert file_sha256(files.units / record.file) == record.sha256
    report = verify(files.path, full=True)
    assert not report["damaged"] and not report["missing"]
    return record


@pytest.mark.parametrize("how", ["killed", "error"])
def test_the_unit_is_whole_at_every_moment(new_store, how):
    counted = new_store("counted")
    write(counted, 2)
    calls = len(recorded(lambda: write(counted, 0)))
    assert calls >= 10
    kept = set()
    for number in range(calls):
        files = new_store(str(number))
        write(files, 2)
        if how == "killed":
            assert killed_at(number, lambda files=files: write(files, 0)) != 0
        else:
            with raising_at(number, errno.EIO):
                try:
                    write(files, 0)
                except OSError:
                    assert not list(files.path.rglob(".*.tmp"))
        kept.add(bool(check_whole(files).quarantined))
        write(files, 0)
        assert not check_whole(files).quarantined
    assert kept == {True, False}, "some ended before the replacement, some after it"


def test_only_a_retry_that_lacks_less_replaces(new_store):
    files = new_store("store")
    assert write(files, 2).lacking == 2
    assert write(files, 0, retry=False).lacking == 2
    assert write(files, 3).lacking == 2 and write(files, 2).lacking == 2
    assert write(files, 1).lacking == 1 and check_whole(files).lacking == 1
    assert len(list(files.units.glob("*.tar"))) > 1, "what readers may have open is left to clean"


@contextmanager
def in_between(monkeypatch, name, place, work):
    """Let work() run once, before the first call of a function."""
    works, once = getattr(place, name), []

    def later(*arguments, **options):
        if not once:
            once.append(1)
            work()
        return works(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(place, name, later)
        yield once


@pytest.mark.parametrize("moment", [("link", disk), ("publish_json", writer), ("replace_json", writer)])
@pytest.mark.parametrize(("one", "other"), [(0, 2), (2, 0), (1, 0), (0, 1), (0, 0), (2, 2)])
def test_of_two_retries_at_once_the_better_stays(new_store, monkeypatch, moment, one, other):
    """One retry runs inside the other, whole unless it must wait for it; it may have the bytes of the old shard."""
    files = new_store("store")
    write(files, 2)
    with (
        ThreadPoolExecutor() as pool,
        in_between(monkeypatch, *moment, lambda: wait([pool.submit(write, files, one)], timeout=1)) as once,
    ):
        write(files, other)
    assert check_whole(files).lacking == (min(one, other) if once else other)


def test_a_retry_inside_the_encoder_that_loses(new_store, monkeypatch):
    """The encoder has linked its shard and finds another's record; a retry makes the same shard the unit's own."""
    files = new_store("store")

    def others():
        write(files, 2)
        write(files, 0)

    with in_between(monkeypatch, "publish_json", writer, others):
        write(files, 0, retry=False)
    assert check_whole(files).lacking == 0


def test_a_shard_that_was_taken_away_before_its_record_comes_back(new_store, monkeypatch):
    """As clean or a repair may, when this process was stopped between the two for long."""
    files = new_store("store")

    def taken():
        for path in files.units.glob("*.tar"):
            path.unlink()

    with in_between(monkeypatch, "publish_json", writer, taken) as once:
        write(files, 0)
    assert once and check_whole(files).lacking == 0 and not list(files.units.glob(".*"))
