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


def write_rows(path, shape, dtype, blocks):
    """Write a .npy file of that shape from blocks of rows, in order; it appears when it is complete.

    Raises  OSError on a full disk and the like; what `blocks` raises
    """
    count, dtype = shape[0], np.dtype(dtype)
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    with appearing_whole(path) as file:
        np.lib.format.write_array_header_1_0(file, header)
        for rows_nd in blocks:
            if rows_nd.shape[1:] != shape[1:]:
                raise AssertionError(f"rows of shape {rows_nd.shape[1:]} for a file of {shape}")
            file.write(np.ascontiguousarray(rows_nd, dtype).data)
            count -= len(rows_nd)
        if count:
            raise AssertionError(f"{shape[0] - count} rows where {shape[0]} were counted")
