"""A damaged .npz file gives the same arrays or one clear ValueError."""

import numpy as np
import pytest

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


def test_objects_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", thing=np.array([{}], dtype=object))
    with pytest.raises(ValueError, match="cannot be read as arrays"):
        read_npz(tmp_path / "a.npz")
