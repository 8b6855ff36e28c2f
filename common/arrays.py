"""Reading .npz files that somebody may have damaged."""

from io import BufferedReader
from pathlib import Path

import numpy as np

from common.disk import open_to_read
from common.errors import describe


def read_npz(path: str | Path) -> dict[str, np.ndarray]:
    """All arrays of a .npz file, by name; objects are refused.

    Raises  FileNotFoundError where there is none; ValueError, in one line, where it is damaged: NumPy lets through
            whatever zipfile, zlib and Python's parser, which reads an array's header, make of such a file
    """
    try:
        with open_to_read(path) as file, np.load(BufferedReader(file), allow_pickle=False) as stored:
            # its zip entries carry a CRC
            return {name: stored[name] for name in stored.files}
    except FileNotFoundError:
        raise
    except Exception as error:
        raise ValueError(f"{path} cannot be read as arrays ({describe(error)})") from error
