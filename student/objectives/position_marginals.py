"""The average distribution over LSPs at every position of the window: a baseline that knows only the position.

    marginals_PK = position_marginals(windows, Path("runs/.marginals"))

The averages are over at most TOKENS training tokens, shrunk towards the average of all positions
(mlsm/common/gains.py). Reading so many tokens takes time, so the sums are kept in a file for the next run on the same
shards: `<directory>/<12 digits>.npz`, named by target, plan, hash of the shards, temperature and TOKENS. If the file is
damaged, holds no such sums, or cannot be written, the tokens are read again. Not handled here: the loss of held-out
rows under these averages (objectives/).

Shapes: W windows, L window length, P positions, k LSPs.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from scipy import sparse

from mlsm.common.arrays import keep_npz, read_npz
from mlsm.common.documents import positions_in_documents
from mlsm.common.gains import GroupMass, cross_fitted_gain, mass_by_group, shrunk_marginals
from shards.codec import Windows
from shards.manifest import fingerprint
from shards.windows import WindowReader
from student.objectives.sparse_rows import temper

TOKENS = 10_000_000  # most training tokens that are read
TOKENS_AT_ONCE = 65_536  # of windows that are read together

Halves = list[GroupMass]  # summed distributions over every other window, and over the others


def teacher_positions(batch: Windows, settings: Mapping) -> np.ndarray:
    """Position of every token in its window, as the teacher counted it: int64 (W, L). Values at padding are
    meaningless.

    settings  of a store. If its teacher read the documents of a window apart, positions start again from 0 at each
              document
    """
    if settings.get("documents_apart", False):
        return positions_in_documents(torch.from_numpy(batch.documents)).numpy()
    return np.broadcast_to(np.arange(batch.ids.shape[1]), batch.ids.shape)


def position_marginals(windows: WindowReader, directory: Path | None = None) -> np.ndarray:
    """Average distribution of the coded tokens at each position of a split: float64 (P, k), rows sum to one.

    Arguments as of `position_sums`.
    """
    return shrink(position_sums(windows, directory))


def shrink(halves: Halves) -> np.ndarray:
    """The averages at each position from what `position_sums` returns."""
    _, pseudo_count = cross_fitted_gain(*halves)
    return shrunk_marginals(halves[0] + halves[1], pseudo_count)


def position_sums(windows: WindowReader, directory: Path | None = None, *, temperature: float = 1.0) -> Halves:
    """Summed distributions of a split's coded tokens by position, over every other window and over the others.

    windows      WindowReader of the training split
    directory    where the sums are kept; None: not kept
    temperature  the distributions are tempered before the average (sparse_rows.py)
    Returns      two GroupMass
    """
    store = windows.store
    of_store = {"target": store.target_id, "plan": store.plan_id, "shards": windows.digest}
    name = fingerprint(of_store | {"temperature": temperature, "tokens": TOKENS})
    path = directory and directory / f"{name[:12]}.npz"
    found = path and _load(path, (store.max_length, store.k))
    if found:
        return found
    halves = _sums(windows, temperature)
    if path:
        sums = {
            "mass": np.stack([half.mass_GK.toarray() for half in halves]),
            "tokens": np.stack([half.tokens_G for half in halves]),
        }
        keep_npz(path, "the averages by position", **sums)
    return halves


def _sums(windows, temperature):
    store, count = windows.store, min(len(windows), -(-TOKENS * len(windows) // max(1, windows.tokens)))
    mass_2PK, tokens_2P = np.zeros((2, store.max_length, store.k)), np.zeros((2, store.max_length))
    at_once = max(1, TOKENS_AT_ONCE // store.max_length)
    for start in range(0, count, at_once):
        read = windows.read(windows.order(0, 0, start, min(start + at_once, count)))
        half_W = np.arange(start, start + len(read.ids)) % 2
        positions_WL, real_WL = teacher_positions(read, store.settings), read.documents >= 0
        for half in (0, 1):
            window_N, place_N = np.nonzero(real_WL & (half_W == half)[:, None])
            rows = windows.targets(read, window_N, place_N)
            weights_E = rows.weights if temperature == 1 else temper(rows, temperature)
            found = mass_by_group(
                positions_WL[window_N, place_N], rows.indptr, rows.indices, weights_E, store.max_length, store.k
            )
            mass_PK = found.mass_GK.tocoo()  # few entries, if windows are long
            mass_2PK[half, mass_PK.row, mass_PK.col] += mass_PK.data
            tokens_2P[half] += found.tokens_G
    return _two(mass_2PK, tokens_2P)


def _two(mass_2PK, tokens_2P):
    return [
        GroupMass(sparse.csr_array(mass_PK), tokens_P) for mass_PK, tokens_P in zip(mass_2PK, tokens_2P, strict=True)
    ]


def _load(path, shape):
    try:
        kept = read_npz(path)
        mass_2PK, tokens_2P = kept["mass"], kept["tokens"]
    except (OSError, ValueError, KeyError):
        return None
    if mass_2PK.shape != (2, *shape) or tokens_2P.shape != (2, shape[0]):
        return None
    if mass_2PK.dtype != np.float64 or tokens_2P.dtype != np.float64 or not np.isfinite(tokens_2P).all():
        return None
    if not (mass_2PK >= 0).all() or not np.allclose(mass_2PK.sum(2), tokens_2P, rtol=1e-3):  # a row sums to one
        return None
    return _two(mass_2PK, tokens_2P)
