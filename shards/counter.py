"""Counter-based random numbers: each value follows from (seed, epoch, index), so there is no state to save.

Every order, mask and sample of the project comes from `hash_u64`. So resuming takes no time, the number of workers does
not matter, and two objectives see the same batches. NumPy does not guarantee that its generators give the same numbers
in every version; this mixing function (SplitMix64, Steele et al. 2014) is part of this package and stays the same.
Not handled here: dropout, which is torch's.
"""

from typing import Any

import numpy as np

_ALL_BITS = 0xFFFF_FFFF_FFFF_FFFF
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def hash_u64(*keys: int | np.integer | np.ndarray) -> np.ndarray:
    """Mix integers into 64 random bits.

    keys     integers or integer arrays that broadcast together; their order matters
    Returns  uint64 array of the broadcast shape (a zero-dimensional one for plain integers)
    """
    state: Any = np.uint64(0)
    with np.errstate(over="ignore"):
        for key in keys:
            number = np.uint64(key & _ALL_BITS) if isinstance(key, int) else np.asarray(key).astype(np.uint64)
            state = (state ^ number) + _GOLDEN
            state = (state ^ (state >> np.uint64(30))) * _MIX_1
            state = (state ^ (state >> np.uint64(27))) * _MIX_2
            state = state ^ (state >> np.uint64(31))
    return state


def permutation(n: int, *keys: int | np.integer | np.ndarray) -> np.ndarray:
    """A permutation of range(n), int64, that follows from the keys only."""
    return np.argsort(hash_u64(*keys, np.arange(n)), kind="stable")
