"""How a file of stage A that is no part of a store appears: whole or not at all.

    with appearing_whole(path) as file:
        file.write(...)

Written with plain writes, never through a memory map: on a full disk these raise OSError, a map kills the process.
Left out: a store's files, which never replace one another (shards/manifest.py).
"""

import os
from contextlib import contextmanager

import numpy as np


@contextmanager
def appearing_whole(path):
    """A binary file to write to, which gets its name, synced to disk, when the block ends well; else nothing stays."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def fsync_directory(path):
    """Make new names in a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def growing_rows(path, shape, dtype):
    """A .npy file that rows are added to, in order; it appears when the block ends well.

    shape   the file's; where fewer rows are added, its first number becomes theirs
    Gives   a function that adds an array of rows
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
            assert file.tell() == begin     # NumPy pads it for numbers of any length


def _write_header(file, shape, dtype):
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
