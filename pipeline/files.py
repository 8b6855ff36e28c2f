"""A .npy file that grows by rows and appears whole or not at all (mlsm/common/durable.py)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from mlsm.common.durable import appearing_whole


@contextmanager
def growing_rows(path: Path, shape: tuple[int, ...], dtype: DTypeLike) -> Iterator[Callable[[np.ndarray], None]]:
    """A .npy file to which rows are added in order. It appears when the `with` block ends without an error.

    shape   of the file; if fewer rows are added, their number replaces its first entry
    Yields  a function that adds an array of rows
    Raises  OSError on a full disk and the like
    """
    count, dtype = 0, np.dtype(dtype)

    def add(rows_nd):
        nonlocal count
        if rows_nd.shape[1:] != shape[1:] or count + len(rows_nd) > shape[0]:
            raise AssertionError(f"rows {count} on of shape {rows_nd.shape} for a file of {shape}")
        file.write(np.ascontiguousarray(rows_nd, dtype).data)
        count += len(rows_nd)

    with appearing_whole(path) as file:
        _write_header(file, shape, dtype)
        begin = file.tell()
        yield add
        if count < shape[0]:
            file.seek(0)
            _write_header(file, (count, *shape[1:]), dtype)
            assert file.tell() == begin  # NumPy pads the header for any row count


def _write_header(file, shape, dtype):
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
