"""Vectors to learn a dictionary from: memory-mapped, in an order that follows from (seed, epoch).

The input may be larger than memory: rows are read one minibatch at a time, in the order of the file, and scaled to unit
length. In addition, only two row numbers per vector (16 bytes) and the held-out rows are in memory. Not handled here:
learning from the vectors (learning.py, cpu.py, torch.py).

Shapes: N training vectors, n of a minibatch, H held-out vectors, d width.
"""

import hashlib
import os
from pathlib import Path

import numpy as np

from mlsm.common.errors import describe

HELD_OUT_VECTORS = 2048  # at most a tenth of the vectors
IDENTITY_ROWS = 512  # number of rows that a checkpoint compares
MAGIC = b"\x93NUMPY"  # first bytes of a .npy file
FLOATS = ("float16", "float32", "float64")


def open_vectors(path: str | os.PathLike) -> np.ndarray:
    """The array of a .npy file, memory-mapped. Raises ValueError, in one line, if it does not hold numbers."""
    path = Path(path)
    advice = "Write one with: numpy.save(path, array) of shape (vectors, width), float16, float32 or float64"
    if not path.is_file():
        raise ValueError(f"{path} is not a file. {advice}")
    with open(path, "rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise ValueError(f"{path} is not a .npy file. {advice}")
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except Exception as error:  # NumPy passes the header to Python's parser, which raises many classes
        raise ValueError(f"{path} cannot be read as numbers ({describe(error)}). {advice}") from error


def file_stamp(path: Path) -> tuple[int, int, int] | None:
    """Size, time and inode of a file, which identify its content; None if it does not exist."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ino


def refuse_unusable(hidden_Nd: np.ndarray, name: str | Path, rows_at_once: int = 65_536) -> None:
    """Raise ValueError, before hours are spent, if nothing can be learned from an array: it has another type or shape,
    rows that are not finite, or only zeros."""
    try:
        _check(hidden_Nd)
        is_nothing = len(hidden_Nd) > 0
        for start in range(0, len(hidden_Nd), rows_at_once):
            rows_nd = hidden_Nd[start : start + rows_at_once]
            finite_n = np.isfinite(rows_nd).all(1)
            if not finite_n.all():
                raise ValueError(_not_finite(start + np.flatnonzero(~finite_n)))
            is_nothing = is_nothing and not rows_nd.any()
        if is_nothing:
            raise ValueError(f"training vectors: all {len(hidden_Nd):,} rows are zero; check what wrote them")
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def held_out_of(vectors: int) -> int:
    """How many of so many vectors are set aside for evaluation."""
    return min(HELD_OUT_VECTORS, max(1, vectors // 10))


class TrainingVectors:
    """Training vectors in an order that follows from (seed, epoch), and held-out ones."""

    def __init__(self, hidden_Nd: np.ndarray | str | os.PathLike, held_out_Hd: np.ndarray | None, seed: int):
        """hidden_Nd is an array or the path of a .npy file; without held_out_Hd some rows are set aside."""
        if isinstance(hidden_Nd, str | os.PathLike):
            hidden_Nd = open_vectors(hidden_Nd)
        _check(hidden_Nd)
        self.hidden_Nd, self.seed, self.epoch = hidden_Nd, seed, -1
        count, self.width = hidden_Nd.shape
        if held_out_Hd is None:
            held_out = held_out_of(count)
            chosen = np.random.default_rng([seed, 0]).permutation(count)[:held_out]
            is_training = np.ones(count, bool)
            is_training[chosen] = False
            self.train_rows = np.flatnonzero(is_training)
            self.held_out_Hd = self._unit_rows(chosen)
        else:
            self.train_rows = np.arange(count)
            self.held_out_Hd = unit_length(held_out_Hd, np.arange(len(held_out_Hd)))

    def __len__(self):
        return len(self.train_rows)

    def minibatch(self, start: int, length: int) -> np.ndarray:
        """Unit-length vectors start to start + length of the endless order, cut at the end of the epoch."""
        epoch, place = divmod(start, len(self))
        if epoch != self.epoch:
            self.epoch = epoch
            self.order = np.random.default_rng([self.seed, 1, epoch]).permutation(self.train_rows)
        return self._unit_rows(self.order[place : place + length])

    def sample(self, count: int, skip: int = 0) -> np.ndarray:
        """`count` distinct training vectors after the first `skip` of the same order; fewer if no more are left."""
        order = np.random.default_rng([self.seed, 2]).permutation(self.train_rows)
        return self._unit_rows(order[skip : skip + count])

    def identity(self) -> str:
        """A cheap fingerprint of these vectors: sha256 over type, shape, evenly spread rows and held-out rows.

        It does not notice a change in rows that are not among the IDENTITY_ROWS spread ones or the held-out ones.
        """
        count = len(self.hidden_Nd)
        spread = np.linspace(0, count - 1, min(count, IDENTITY_ROWS)).astype(np.int64)
        digest = hashlib.sha256(f"{self.hidden_Nd.dtype} {self.hidden_Nd.shape}".encode())
        digest.update(np.ascontiguousarray(self.hidden_Nd[spread]).data)
        digest.update(np.ascontiguousarray(self.held_out_Hd).data)
        return digest.hexdigest()

    def _unit_rows(self, rows):
        rows = np.sort(rows)  # in the order on disk
        return unit_length(self.hidden_Nd[rows], rows)


def _check(hidden_Nd):
    if np.ndim(hidden_Nd) != 2 or hidden_Nd.shape[1] == 0:
        raise ValueError(f"vectors must have shape (N, d); found {np.shape(hidden_Nd)}")
    if hidden_Nd.dtype.name not in FLOATS:
        raise ValueError(f"vectors must be {', '.join(FLOATS)}; found {hidden_Nd.dtype}")


def unit_length(hidden_nd: np.ndarray, row_numbers: np.ndarray) -> np.ndarray:
    """Rows of unit length, float32; rows of zeros stay. Raises ValueError naming rows that are not finite.

    Each row is first scaled by a power of two, which is exact: squares of huge or tiny numbers would not be numbers.
    """
    hidden_nd = np.asarray(hidden_nd)
    hidden_nd = hidden_nd.astype(np.promote_types(hidden_nd.dtype, np.float32), copy=False)
    largest_n = np.maximum(hidden_nd.max(1), -hidden_nd.min(1))
    if not np.isfinite(largest_n).all():
        raise ValueError(_not_finite(row_numbers[~np.isfinite(largest_n)]))
    exponents_n = np.frexp(largest_n)[1]
    hidden_nd = np.ldexp(hidden_nd, -exponents_n[:, None])
    norms_n = np.linalg.norm(hidden_nd, axis=1, keepdims=True)
    norms_n[norms_n == 0] = 1
    return (hidden_nd / norms_n).astype(np.float32, copy=False)


def _not_finite(rows):
    return f"vectors: NaN or infinity in row {', '.join(map(str, rows[:10]))}; leave them out"
