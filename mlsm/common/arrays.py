"""Keep arrays in .npz files for the next run, and read them safely although the files may be damaged."""

import errno
import logging
from io import BufferedReader
from pathlib import Path

import numpy as np

from mlsm.common.disk import is_of_the_file, open_to_read
from mlsm.common.durable import appearing_whole, make_directories
from mlsm.common.errors import describe

logger = logging.getLogger(__name__)


def read_npz(path: str | Path) -> dict[str, np.ndarray]:
    """All arrays of a .npz file, by name; objects are refused.

    Raises  FileNotFoundError if there is none; ValueError, in one line, if it is damaged: for such a file NumPy passes
            on any error of zipfile, of zlib, or of Python's parser, which reads an array's header; OSError if it cannot
            be read now and may be whole
    """
    try:
        with open_to_read(path) as file, np.load(BufferedReader(file), allow_pickle=False) as stored:
            # the zip entries have a CRC, so damage is noticed here
            return {name: stored[name] for name in stored.files}
    except FileNotFoundError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and not is_of_the_file(error):
            raise
        raise ValueError(f"{path} cannot be read as arrays ({describe(error)})") from error


def keep_npz(path: Path, what: str, **arrays: np.ndarray) -> None:
    """Write arrays for the next run. A failure is only logged, because the next run can compute them again.

    what  their name in the log
    """
    try:
        if path.parent.is_symlink():
            raise OSError(errno.ELOOP, "its directory is a link, which is not followed")
        make_directories(path.parent)
        with appearing_whole(path) as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    except OSError as error:
        logger.info("%s are not kept: %s could not be written (%s)", what, path, error)
