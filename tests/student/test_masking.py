import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shards.counter import hash_u64
from student.masking import choose_mask, maskable_positions

SPECIAL_IDS = [0, 1, 2]


@st.composite
def windows(draw):
    lengths = draw(st.lists(st.integers(0, 20), min_size=1, max_size=6))
    rows = [draw(st.lists(st.integers(0, 9), min_size=20, max_size=20)) for _ in lengths]
    ids = draw(st.lists(st.integers(0, 2**40), min_size=len(lengths), max_size=len(lengths), unique=True))
    return np.array(rows, np.int32), np.array(lengths), np.array(ids)


@given(windows(), st.integers(0, 2**32), st.integers(0, 100), st.floats(0.01, 0.99))
def test_exactly_the_share_is_masked_and_specials_and_padding_never(batch, seed, epoch, rate):
    ids, lengths, window_ids = batch
    maskable = maskable_positions(ids, lengths, SPECIAL_IDS)
    mask = choose_mask(maskable, window_ids, seed=seed, epoch=epoch, rate=rate)
    for row, length in enumerate(lengths):
        allowed = [i for i in range(length) if ids[row, i] not in SPECIAL_IDS]
        assert set(np.flatnonzero(mask[row])) <= set(allowed)
        assert mask[row].sum() == round(rate * len(allowed))


@given(windows(), st.integers(0, 2**32), st.integers(0, 100))
def test_the_smallest_hashes_are_masked(batch, seed, epoch):
    ids, lengths, window_ids = batch
    maskable = maskable_positions(ids, lengths, SPECIAL_IDS)
    mask = choose_mask(maskable, window_ids, seed=seed, epoch=epoch, rate=0.5)
    for row, window_id in enumerate(window_ids):
        hashes = [int(hash_u64(0x6D61736B, seed, epoch, int(window_id), i)) for i in range(ids.shape[1])]
        masked = [h for h, m in zip(hashes, mask[row], strict=True) if m]
        spared = [h for h, a, m in zip(hashes, maskable[row], mask[row], strict=True) if a and not m]
        assert max(masked, default=-1) < min(spared, default=2**64)


@given(windows(), st.integers(0, 2**32), st.randoms())
def test_a_mask_depends_on_its_own_window_only(batch, seed, random):
    ids, lengths, window_ids = batch
    order = list(range(len(lengths)))
    random.shuffle(order)
    order = order[: max(1, len(order) // 2)]
    maskable = maskable_positions(ids, lengths, SPECIAL_IDS)
    whole = choose_mask(maskable, window_ids, seed=seed, epoch=3, rate=0.3)
    part = choose_mask(maskable[order], window_ids[order], seed=seed, epoch=3, rate=0.3)
    assert np.array_equal(whole[order], part)


def test_seed_epoch_and_window_change_the_mask():
    maskable = np.ones((2, 400), bool)
    mask = choose_mask(maskable, [7, 8], seed=1, epoch=0, rate=0.5)
    assert not np.array_equal(mask[0], mask[1])
    assert not np.array_equal(mask, choose_mask(maskable, [7, 8], seed=2, epoch=0, rate=0.5))
    assert not np.array_equal(mask, choose_mask(maskable, [7, 8], seed=1, epoch=1, rate=0.5))
    by_window = choose_mask(maskable, [7, 8], seed=1, epoch=np.array([0, 1]), rate=0.5)
    assert np.array_equal(by_window[0], mask[0]) and not np.array_equal(by_window[1], mask[1])


def test_every_position_is_masked_equally_often():
    mask = choose_mask(np.ones((4000, 20), bool), np.arange(4000), seed=0, epoch=0, rate=0.15)
    assert np.allclose(mask.mean(axis=0), 0.15, atol=0.025)
