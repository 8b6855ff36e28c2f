"""The reader's checks beyond hashes, what it keeps in memory, and its order as one endless stream."""

import errno
import pickle
import subprocess
import sys
import tracemalloc
from unittest import mock

import numpy as np
import pytest
import webdataset as wds
from hypothesis import given
from hypothesis import strategies as st
from make_store import make_store

from mlsm.commands.verify_shards import show
from mlsm.common.errors import ShardError, StoreError, WriteError
from shards import codec
from shards.codec import block_windows
from shards.config import VerifyConfig
from shards.files import StoreFiles
from shards.reader import Store
from shards.shard_file import blocks
from shards.verify import verify


@pytest.fixture(scope="module")
def windows(tmp_path_factory):
    files, *_ = make_store(tmp_path_factory.mktemp("reader") / "s", blocks=1, units=("train",) * 3)
    return Store.open(files.path).split("train")


def store_with_wrong_atoms(path, change):
    """A store whose hashes are right and whose stored atoms are not: as a faulty writer would leave it."""
    pack = codec.pack_indices
    with (
        mock.patch("shards.codec.pack_indices", lambda indices, bits: pack(change(indices), bits)),
        mock.patch("shards.codec.fidelity", lambda *args: (0, 0, 0, 0)),  # which would find it in its sample
    ):
        files, *_ = make_store(path, blocks=1, units=("train",))
    return Store.open(files.path)


def all_rows(reader):
    batch = reader.read(np.arange(len(reader)))
    return reader.targets(batch, *np.nonzero(batch.documents >= 0))


WRONG = {
    "unsorted": lambda indices: indices[::-1],
    "out of range": lambda indices: np.where(indices == 299, 300, indices),
}


@pytest.mark.promise("23 more than 255 …")
@pytest.mark.parametrize("kind", WRONG)
def test_atoms_that_break_the_format_are_refused_by_block(tmp_path, kind):
    store = store_with_wrong_atoms(tmp_path / "s", WRONG[kind])
    with pytest.raises(ShardError, match=r"block 000000: .*not strictly increasing below k = 300.* --repair"):
        all_rows(store.split("train"))


def test_the_plain_path_refuses_unsorted_atoms(tmp_path):
    store = store_with_wrong_atoms(tmp_path / "s", WRONG["unsorted"])
    with pytest.raises(ShardError, match="tar: stored atoms are not increasing"):
        next(iter(wds.WebDataset(store.urls(), shardshuffle=False).compose(block_windows)))


@given(st.lists(st.integers(0, 110), max_size=40))
def test_any_windows_in_any_order_equal_each_alone(windows, numbers):
    batch = windows.read(np.array(numbers, np.int64))
    where = np.nonzero(batch.documents >= 0)
    rows = windows.targets(batch, *where)
    alone = [windows.read([number]) for number in numbers]
    assert all(np.array_equal(batch.ids[i], one.ids[0]) for i, one in enumerate(alone))
    parts = [windows.targets(one, *np.nonzero(one.documents >= 0)) for one in alone]
    for name in ("indices", "weights", "tail"):
        assert np.array_equal(getattr(rows, name), np.concatenate([[], *(getattr(part, name) for part in parts)]))


@given(st.lists(st.tuples(st.integers(0, 110), st.integers(0, 31), st.integers(1, 32)), max_size=12), st.randoms())
def test_tokens_that_follow_each_other_equal_each_alone(windows, runs, random):
    """Runs are copied; in another order the tokens are looked up one by one."""
    batch = windows.read(np.array([number for number, *_ in runs], np.int64))
    spans = [range(first, min(first + count, int(n))) for (_, first, count), n in zip(runs, batch.lengths, strict=True)]
    window_M = np.array([window for window, span in enumerate(spans) for _ in span], np.int64)
    position_M = np.array([position for span in spans for position in span], np.int64)
    order = random.sample(range(len(window_M)), len(window_M))
    with mock.patch("shards.windows._LONG_RUN", 1):
        together = windows.targets(batch, window_M, position_M)
    apart = windows.targets(batch, window_M[order], position_M[order])
    for place, token in enumerate(order):
        one, other = ((rows.indptr[at], rows.indptr[at + 1]) for rows, at in ((together, token), (apart, place)))
        assert together.tail[token] == apart.tail[place]
        for name in ("indices", "weights"):
            assert np.array_equal(getattr(together, name)[slice(*one)], getattr(apart, name)[slice(*other)])


@pytest.mark.parametrize("position", [-1, None])
@pytest.mark.parametrize("many", [1, 40])
def test_padding_has_no_targets(windows, position, many):
    """Not even those of the next window, whose tokens follow in the block."""
    batch = windows.read(np.arange(4))
    shorter = int(batch.lengths.argmin())
    last = int(batch.lengths[shorter]) if position is None else position
    places = np.arange(last - many + 1, last + 1) if position is None else np.full(many, position)
    with pytest.raises(ValueError, match="not of tokens"):
        windows.targets(batch, np.full(many, shorter), places)


@pytest.mark.parametrize("number", [-1, 111])
def test_a_window_that_is_not_there(windows, number):
    with pytest.raises(ValueError, match=r"\[0, 111\)"):
        windows.read([0, number])


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(errno.EMFILE, "too many open files"), OSError),
        (WriteError("the cache is full"), WriteError),
        (OSError(errno.EIO, "input/output error"), ShardError),
    ],
)
def test_an_error_of_the_machine_is_not_called_a_damaged_shard(tmp_path, monkeypatch, error, raised):
    files, plan, _ = make_store(tmp_path / "s", blocks=1, units=("train",))
    reader, record = Store.open(files.path).split("train"), files.record(plan.units[0].id)
    monkeypatch.setattr(StoreFiles, "open_shard", mock.Mock(side_effect=error))
    for use in (lambda: reader.read(np.arange(2)), lambda: next(blocks(files, record))):
        with pytest.raises(raised) as caught:
            use()
        assert (caught.value is error) == (raised is not ShardError)
        assert raised is not ShardError or "It may be whole: check its permissions" in str(caught.value)
    if raised is ShardError:
        report = verify(files.path, full=True)
        shown = show(report, VerifyConfig(store=files.path))
        assert "1 place could not be read, and may be whole." in shown and "--repair" not in shown
    else:
        with pytest.raises(raised):
            verify(files.path, full=True)


def test_several_large_stores_are_read_below_a_low_limit_of_open_files(tmp_path):
    """As in a run of several stores: two readers here map 128 shards each, where a process may open 256 files."""
    files, *_ = make_store(tmp_path / "s", k=0, blocks=1, max_length=16, units=("train",) * 140)
    code = """if True:
        import resource, sys
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        from shards.reader import Store
        readers = [Store.open(sys.argv[1]).split("train") for _ in range(2)]
        for reader in readers:
            assert len(reader.read(range(0, len(reader))).ids) == len(reader)
        """
    subprocess.run([sys.executable, "-c", code, files.path], check=True)


def test_a_reader_travels_to_another_process(windows):
    windows.read([3])
    again = pickle.loads(pickle.dumps(windows))
    assert np.array_equal(again.read([50, 3]).ids, windows.read([50, 3]).ids)
    assert np.array_equal(again.order(1, 0, 5, 60), windows.order(1, 0, 5, 60))


def test_a_store_that_was_moved_is_not_called_damaged(tmp_path):
    files, *_ = make_store(tmp_path / "s", blocks=1, units=("train",))
    windows = Store.open(files.path).split("train")
    files.path.rename(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="is no longer there. It may have been moved"):
        windows.read([0])


def test_a_store_opened_by_a_relative_path_is_not_called_unfinished_elsewhere(tmp_path, monkeypatch):
    make_store(tmp_path / "s", blocks=1, units=("train",))
    monkeypatch.chdir(tmp_path)
    store = Store.open("s")
    monkeypatch.chdir("/")
    with pytest.raises(StoreError, match="s is no longer there.* relative to another directory"):
        store.report()


def test_a_record_of_another_target_or_unit_is_refused(tmp_path):
    files, plan, _ = make_store(tmp_path / "s", k=0, blocks=1, units=("train", "train"))
    other, *_ = make_store(tmp_path / "other", k=0, blocks=1, units=("train",), max_length=64)
    first, second = (files.record_file(unit.id) for unit in plan.units)
    for foreign in (other.record_file(plan.units[0].id), second):
        first.write_bytes(foreign.read_bytes())
        with pytest.raises(ShardError, match=r"this is (a|the) record of (unit|target) .*Remove the damaged files"):
            Store.open(files.path).split("train")
    store = Store.open(files.path)
    first.unlink()
    with pytest.raises(StoreError, match="is missing"):
        store.split("train")


def test_many_blocks_take_little_memory(windows):
    """About a hundred bytes a block and three hundred a unit; as Python dicts a block alone took 1.3 kB."""
    records = windows.store.records() * 700
    tracemalloc.start()
    reader = type(windows)(windows.store, iter(records), "train")
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert size / len(reader._table) < 600  # a unit has one block here
    assert len(reader) == 700 * len(windows)
