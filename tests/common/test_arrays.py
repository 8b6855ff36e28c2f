"""A damaged .npz file gives the same arrays or one clear ValueError."""

import errno
import os

import numpy as np
import pytest

from mlsm.common import arrays
from mlsm.common.arrays import read_npz

ARRAYS = {"rows": np.arange(6, dtype=np.float32).reshape(2, 3), "name": np.array("a name")}


def test_arrays_come_back(tmp_path):
    np.savez(tmp_path / "a.npz", **ARRAYS)
    found = read_npz(tmp_path / "a.npz")
    assert found.keys() == ARRAYS.keys()
    assert all(np.array_equal(found[name], value) for name, value in ARRAYS.items())


def test_no_file_is_no_damage(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_npz(tmp_path / "a.npz")


@pytest.mark.parametrize("change", [0x01, 0x20, 0xFF])
def test_a_changed_byte_is_a_value_error_or_changes_nothing_that_is_read(tmp_path, change):
    path = tmp_path / "a.npz"
    np.savez(path, **ARRAYS)
    whole, damaged = path.read_bytes(), 0
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ change]) + whole[place + 1 :])
        try:
            found = read_npz(path)
        except ValueError as error:
            damaged += "\n" not in str(error)
            continue
        assert all(np.array_equal(found[name], ARRAYS[name]) for name in found)
    assert damaged > len(whole) // 3


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.ESTALE, errno.EIO, errno.EACCES])
def test_a_read_error_that_may_pass_is_no_damage(tmp_path, monkeypatch, number):
    np.savez(tmp_path / "a.npz", **ARRAYS)

    def fail(path):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(arrays, "open_to_read", fail)
    with pytest.raises(OSError, match="a.npz") as caught:
        read_npz(tmp_path / "a.npz")
    assert caught.value.errno == number


def test_objects_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", thing=np.array([{}], dtype=object))
    with pytest.raises(ValueError, match="cannot be read as arrays"):
        read_npz(tmp_path / "a.npz")
