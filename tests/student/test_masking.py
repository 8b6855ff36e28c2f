from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mask_cases import (
    CONTINUES,
    LENGTH_PURPOSE,
    MASK_PURPOSE,
    SPECIAL_IDS,
    documents,
    hashed,
    masking,
    runs_of,
    windows,
)
from scipy.stats import chi2

from shards.counter import hash_u64
from student.config import StudentConfig
from student.held_out import _warn_of_few_masked
from student.masks.masking import Masking, choose_mask, maskable_positions, span_lengths


def assert_like(counts, expected, freedom=None):
    """Counts are as expected by Pearson's test, at one in a million."""
    possible = expected > 0
    assert not counts[~possible].any()
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert statistic <= chi2.ppf(1 - 1e-6, freedom or max(1, possible.sum() - 1))


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
        hashes = [hashed(MASK_PURPOSE, seed, epoch, window_id, i) for i in range(ids.shape[1])]
        masked = [h for h, m in zip(hashes, mask[row], strict=True) if m]
        spared = [h for h, a, m in zip(hashes, maskable[row], mask[row], strict=True) if a and not m]
        assert max(masked, default=-1) < min(spared, default=2**64)


@pytest.mark.parametrize("unit", ["token", "word", "span"])
@given(documents(), st.integers(0, 2**32), st.randoms())
def test_a_mask_depends_on_its_own_window_only(unit, batch, seed, random):
    read, window_ids = batch
    order = list(range(len(window_ids)))
    random.shuffle(order)
    order = order[: max(1, len(order) // 2)]
    part = SimpleNamespace(ids=read.ids[order], lengths=read.lengths[order], documents=read.documents[order])
    hide = masking(unit, corruption="80-10-10")
    masks = [
        hide.choose(chosen, numbers, seed=seed, epoch=3, rate=0.3)
        for chosen, numbers in ((read, window_ids), (part, window_ids[order]))
    ]
    assert np.array_equal(masks[0][order], masks[1])
    whole = hide.corrupt(read.ids, masks[0], window_ids, seed=seed, epoch=3)
    assert np.array_equal(whole[order], hide.corrupt(part.ids, masks[1], window_ids[order], seed=seed, epoch=3))


@given(documents(), st.integers(0, 2**32), st.integers(0, 100), st.floats(0.01, 0.99))
def test_words_equal_a_slow_loop_over_whole_words(batch, seed, epoch, rate):
    read, window_ids = batch
    mask = masking("word").choose(read, window_ids, seed=seed, epoch=epoch, rate=rate)
    for row, window_id in enumerate(window_ids):
        words = []
        for run in runs_of(read, row):
            for i in run:
                if i == run[0] or not CONTINUES[read.ids[row, i]]:
                    words.append([])
                words[-1].append(i)
        words.sort(key=lambda word: hashed(MASK_PURPOSE, seed, epoch, window_id, word[0]))
        left, expected = round(rate * sum(map(len, words))), set()
        for word in words:
            if len(word) <= left:
                expected |= set(word)
                left -= len(word)
        assert set(np.flatnonzero(mask[row])) == expected


@given(documents(), st.integers(0, 2**32), st.integers(0, 100), st.floats(0.01, 0.99))
def test_spans_equal_a_slow_loop_over_spans(batch, seed, epoch, rate):
    read, window_ids = batch
    mask = masking("span").choose(read, window_ids, seed=seed, epoch=epoch, rate=rate)
    for row, window_id in enumerate(window_ids):
        runs, spans = runs_of(read, row), []
        for run in runs:
            for place, i in enumerate(run):
                u = hashed(LENGTH_PURPOSE, seed, epoch, window_id, i) / 2**64
                length = next(n for n in range(1, 11) if u < (1 - 0.8**n) / (1 - 0.8**10))
                spans.append((hashed(MASK_PURPOSE, seed, epoch, window_id, i), run[place : place + length]))
        left, expected = round(rate * sum(map(len, runs))), set()
        for _, span in sorted(spans):
            fresh = [i for i in span if i not in expected][: left - len(expected)]
            expected |= set(fresh)
        assert set(np.flatnonzero(mask[row])) == expected and len(expected) == left


@pytest.mark.parametrize("unit", ["token", "span"])
@given(documents(), st.integers(0, 2**32), st.floats(0.01, 0.99), st.floats(0.01, 0.99))
def test_the_mask_of_a_lower_rate_is_a_subset(unit, batch, seed, one, other):
    read, window_ids = batch
    low, high = (masking(unit).choose(read, window_ids, seed=seed, epoch=1, rate=rate) for rate in sorted((one, other)))
    assert not (low & ~high).any()


@pytest.mark.parametrize("unit", ["token", "word", "span"])
@pytest.mark.parametrize("corruption", ["mask", "80-10-10"])
@given(documents(), st.integers(0, 2**32))
def test_special_tokens_are_neither_masked_nor_made_up(unit, corruption, batch, seed):
    read, window_ids = batch
    hide = masking(unit, corruption=corruption)
    mask = hide.choose(read, window_ids, seed=seed, epoch=0, rate=0.8)
    assert not (mask & (np.isin(read.ids, SPECIAL_IDS) | (read.documents < 0))).any()
    shown = hide.corrupt(read.ids, mask, window_ids, seed=seed, epoch=0)
    assert np.array_equal(shown[~mask], read.ids[~mask])
    assert not np.isin(shown[mask], [0, 1]).any() and shown.max(initial=0) < 10
    if corruption == "mask":
        assert (shown[mask] == 2).all()


@pytest.mark.parametrize("percent", [(80, 10, 10), (50, 0, 50), (0, 100, 0), (1, 99, 0)])
def test_corruption_has_the_shares_it_is_named_after(percent):
    ids = np.full((2000, 50), 3)
    window_ids = np.arange(2000)
    hide = masking(corruption="{}-{}-{}".format(*percent), vocab_size=1003)
    masked, random, kept = (share / 100 for share in percent)
    mask = choose_mask(np.ones(ids.shape, bool), window_ids, seed=1, epoch=0, rate=0.5)
    shown = hide.corrupt(ids, mask, window_ids, seed=1, epoch=0)[mask]
    total = len(shown)
    counts = np.array([(shown == 2).sum(), (shown == 3).sum(), ((shown != 2) & (shown != 3)).sum()])
    assert_like(counts, total * np.array([masked, kept + random / 1000, random * 999 / 1000]))  # may be the true one
    by_token = np.bincount(shown[shown > 3], minlength=1003)[4:]
    assert_like(by_token, np.full(999, total * random / 1000))


@pytest.mark.parametrize(
    "corruption", ["100-0-0", "0-0-100", "080-10-10", "80-10", "80-10-20", "80-30--10", "none", ""]
)
def test_shares_that_do_not_add_up_are_refused(corruption):
    with pytest.raises(ValueError, match="--corruption takes mask, or per cent .* add up to 100, such as 80-10-10"):
        StudentConfig(corruption=corruption)


def test_the_fate_of_a_token_does_not_depend_on_the_rate_and_changes_with_the_epoch():
    ids = np.tile(np.arange(3, 10), (50, 8))
    hide = masking(corruption="80-10-10")
    at = {"seed": 4, "epoch": np.arange(50) % 3}
    low, high = (choose_mask(np.ones(ids.shape, bool), np.arange(50), rate=rate, **at) for rate in (0.2, 0.6))
    shown = [hide.corrupt(ids, mask, np.arange(50), **at) for mask in (low, high)]
    assert np.array_equal(shown[0][low], shown[1][low])
    assert not np.array_equal(shown[0], hide.corrupt(ids, low, np.arange(50), seed=4, epoch=7))


def test_lengths_of_spans_are_geometric_up_to_ten():
    lengths = span_lengths(hash_u64(1, np.arange(200_000)))
    shares = 0.2 * 0.8 ** np.arange(10) / (1 - 0.8**10)
    assert_like(np.bincount(lengths, minlength=11)[1:], 200_000 * shares)
    assert lengths.mean() == pytest.approx(3.8, abs=0.02)  # as SpanBERT says of its own
    assert span_lengths(np.array([0, 2**64 - 1], np.uint64)).tolist() == [1, 10]


def test_spans_are_longer_than_chance():
    ids = np.full((500, 100), 3)
    read = SimpleNamespace(ids=ids, lengths=np.full(500, 100), documents=np.zeros_like(ids))
    together = {}
    for unit in ("token", "span"):
        mask = masking(unit).choose(read, np.arange(500), seed=0, epoch=0, rate=0.15)
        assert (mask.sum(axis=1) == 15).all()
        together[unit] = (mask[:, 1:] & mask[:, :-1]).sum() / mask.sum()
    assert together["token"] < 0.17 and together["span"] > 0.6


def test_the_rate_moves_on_a_line_from_the_first_step_to_the_last():
    hide = masking(rate=0.3, rate_end=0.15, max_steps=101)
    assert hide.rate_at(0) == 0.3 and hide.rate_at(100) == hide.final_rate == 0.15
    assert hide.rate_at(50) == pytest.approx(0.225)
    assert masking(rate=0.3, rate_end=0.15, max_steps=1).rate_at(0) == 0.3
    constant = masking(rate=0.3, max_steps=7)
    assert {constant.rate_at(step) for step in range(7)} == {constant.final_rate} == {0.3}


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
    scale = 1 - 3 / 20  # three of twenty, drawn without replacement
    assert_like(mask.sum(axis=0) / scale * 19 / 20, np.full(20, 4000 * 0.15) / scale * 19 / 20)


def test_all_pairs_of_positions_are_masked_equally_often():
    mask = choose_mask(np.ones((20_000, 6), bool), np.arange(20_000), seed=0, epoch=0, rate=1 / 3)
    pairs = [tuple(np.flatnonzero(row)) for row in mask]
    counts = np.unique(pairs, axis=0, return_counts=True)[1]
    assert len(counts) == 15
    assert_like(counts, np.full(15, 20_000 / 15))


@pytest.mark.parametrize(("clause", "is_told"), [(2, False), (10, True)])
def test_a_language_without_spaces_in_a_mixed_text_is_told(clause, is_told, caplog):
    """The words of the other language fill the mask, so as many tokens are masked as should be."""
    continues_V = np.arange(10) == 7  # after the clause's first token, 6
    ids_WL = np.array([[5] * (20 - clause) + [6] + [7] * (clause - 1)])
    read = SimpleNamespace(ids=ids_WL, lengths=np.array([20]), documents=np.zeros((1, 20), int))
    masking = Masking({"mask": 4, "all": [0, 1, 2, 3, 4]}, 10, 0.15, unit="word", continues_V=continues_V)
    batch = SimpleNamespace(micro=[SimpleNamespace(where_M=np.zeros(3), fillers=0)])
    _warn_of_few_masked(read, batch, masking)
    assert ("instead of 15.0 %: 50 % are in words longer" in caplog.text) == is_told
    assert bool(caplog.text) == is_told
