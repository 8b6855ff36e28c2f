"""Windows of ids and documents for tests of masks, and a slow look at them."""

from types import SimpleNamespace

import numpy as np
from hypothesis import strategies as st

from shards.counter import hash_u64
from student.masks.masking import Masking

SPECIAL_IDS = [0, 1, 2]
CONTINUES = np.array([0, 0, 0, 1, 0, 1, 1, 0, 0, 0], bool)
MASK_PURPOSE, LENGTH_PURPOSE = 0x6D61736B, 0x7370616E


@st.composite
def windows(draw):
    lengths = draw(st.lists(st.integers(0, 20), min_size=1, max_size=6))
    rows = [draw(st.lists(st.integers(0, 9), min_size=20, max_size=20)) for _ in lengths]
    ids = draw(st.lists(st.integers(0, 2**40), min_size=len(lengths), max_size=len(lengths), unique=True))
    return np.array(rows, np.int32), np.array(lengths), np.array(ids)


@st.composite
def documents(draw):
    """Windows as a reader gives them, of one to four documents, and their ids."""
    ids, lengths, window_ids = draw(windows())
    starts = draw(st.lists(st.integers(1, 19), max_size=3))
    ordinals = np.searchsorted(sorted(starts), np.arange(20), side="right")
    padding = np.arange(20) >= lengths[:, None]
    return SimpleNamespace(ids=ids, lengths=lengths, documents=np.where(padding, -1, ordinals)), window_ids


def masking(unit="token", rate=0.15, vocab_size=10, continues=CONTINUES, **settings):
    special_ids = {"mask": 2, "all": SPECIAL_IDS}
    return Masking(special_ids, vocab_size, rate, unit=unit, continues_V=continues, **settings)


def runs_of(read, row):
    """Stretches of maskable tokens of one document, lists of positions."""
    runs, last = [], None
    for i in range(read.lengths[row]):
        if read.ids[row, i] in SPECIAL_IDS:
            last = None
            continue
        if last != read.documents[row, i]:
            runs.append([])
        runs[-1].append(i)
        last = read.documents[row, i]
    return runs


def hashed(purpose, seed, epoch, window_id, position):
    return int(hash_u64(purpose, seed, epoch, int(window_id), position))
