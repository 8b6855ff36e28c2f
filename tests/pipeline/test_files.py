"""Files that appear whole or not at all, also when the disk is full."""

import errno
from pathlib import Path

import numpy as np
import pytest

from mlsm.common import disk
from mlsm.common.durable import appearing_whole
from pipeline.files import growing_rows


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_rows_in_blocks_are_the_array(tmp_path, dtype):
    rows = np.random.default_rng(0).normal(size=(50, 7)).astype(np.float32)
    with growing_rows(tmp_path / "rows.npy", rows.shape, dtype) as add:
        for i in range(0, 50, 8):
            add(rows[i : i + 8])
    np.save(tmp_path / "expected.npy", rows.astype(dtype))
    assert (tmp_path / "rows.npy").read_bytes() == (tmp_path / "expected.npy").read_bytes()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    def create(path):
        path.symlink_to("/dev/full")
        return open(path, "wb", buffering=0)

    monkeypatch.setattr(disk, "create", create)
    with pytest.raises(OSError) as caught, growing_rows(tmp_path / "rows.npy", (9, 1000), np.float32) as add:
        add(np.ones((9, 1000)))
    assert caught.value.errno == errno.ENOSPC and not list(tmp_path.iterdir())


def test_a_failure_leaves_what_was_there(tmp_path):
    (tmp_path / "a").write_bytes(b"before")
    with pytest.raises(KeyboardInterrupt), appearing_whole(tmp_path / "a") as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"before"]


def test_fewer_rows_than_foreseen_make_a_shorter_file(tmp_path):
    rows = np.arange(16, dtype=np.float32).reshape(8, 2)
    with growing_rows(tmp_path / "rows.npy", (1000, 2), np.float32) as add:
        add(rows[:5])
        add(rows[5:])
    np.testing.assert_array_equal(np.load(tmp_path / "rows.npy"), rows)
    with (
        pytest.raises(AssertionError, match="rows 0 on"),
        growing_rows(tmp_path / "more.npy", (7, 2), np.float32) as add,
    ):
        add(rows)
    assert not (tmp_path / "more.npy").exists()
