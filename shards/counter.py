"""Counted randomness: a value that follows from (seed, epoch, index), with no state to lose.

Every order, mask and sample of the project comes from `hash_u64`, so that resuming is instant, the
number of workers does not matter, and two objectives see the same batches. NumPy's generators promise
no stable stream between versions; this mixing function (SplitMix64, Steele et al. 2014) is ours to keep.
Left out: dropout, which is torch's.
"""

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def hash_u64(*keys):
    """Mix integers into 64 random bits.

    keys     integers or integer arrays that broadcast together; their order matters
    Returns  uint64 array of the broadcast shape (a zero-dimensional one for plain integers)
    """
    state = np.uint64(0)
    with np.errstate(over="ignore"):
        for key in keys:
            state = _splitmix(state ^ _as_u64(key))
    return state


def permutation(n, *keys):
    """A permutation of range(n), int64, that follows from the keys alone."""
    return np.argsort(hash_u64(*keys, np.arange(n)), kind="stable")


def _as_u64(key):
    if isinstance(key, int):
        return np.uint64(key & 0xFFFF_FFFF_FFFF_FFFF)
    return np.asarray(key).astype(np.uint64)


def _splitmix(x):
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
