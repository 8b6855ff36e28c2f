"""Which tokens a student must predict: a pure function of (seed, epoch, window id, position).

A window masks exactly round(rate x maskable) positions: those with the smallest counter-based hash. So
full windows have equal counts (static shapes), resume needs no state, and every objective masks alike;
codes are never looked at. Corruption is always the mask token. Left out: 80/10/10, spans, schedules.

Shapes: W windows, L positions of a window.
"""

import numpy as np

from shards.counter import hash_u64

_PURPOSE = 0x6D61736B  # "mask": keeps these hashes apart from those of order and dropout
_LAST = np.uint64(2**64 - 1)


def maskable_positions(ids_WL, lengths_W, special_ids):
    """Positions that may be masked: real tokens that are not special.

    ids_WL       integer token ids
    lengths_W    real tokens of each window
    special_ids  ids that are never masked
    Returns      bool (W, L)
    """
    ids_WL = np.asarray(ids_WL)
    real_WL = np.arange(ids_WL.shape[1]) < np.asarray(lengths_W)[:, None]
    return real_WL & ~np.isin(ids_WL, np.asarray(special_ids))


def choose_mask(maskable_WL, window_ids_W, *, seed, epoch, rate):
    """Choose exactly round(rate x maskable) positions of every window.

    maskable_WL   bool
    window_ids_W  integers; a window's mask depends on its own id only, not on its neighbours
    epoch         integer, or one for every window
    rate          share of the maskable positions
    Returns       bool (W, L)
    """
    positions_L = np.arange(maskable_WL.shape[1])
    epochs_W1 = np.broadcast_to(epoch, len(maskable_WL))[:, None]
    keys_WL = hash_u64(_PURPOSE, seed, epochs_W1, np.asarray(window_ids_W)[:, None], positions_L)
    keys_WL = np.where(maskable_WL, np.minimum(keys_WL, _LAST - np.uint64(1)), _LAST)
    order_WL = np.argsort(keys_WL, axis=1, kind="stable")
    count_W = np.rint(rate * maskable_WL.sum(axis=1)).astype(np.int64)
    mask_WL = np.zeros_like(maskable_WL)
    np.put_along_axis(mask_WL, order_WL, positions_L < count_W[:, None], axis=1)
    return mask_WL
