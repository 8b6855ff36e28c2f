"""Weighted masks: against NumPy's `choice`, slow loops and a library's logarithm; equal weights are uniform masks."""

import hashlib
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mask_cases import CONTINUES, LENGTH_PURPOSE, MASK_PURPOSE, documents, hashed, masking, runs_of
from scipy.stats import chi2_contingency

from shards.counter import hash_u64
from student.masks.masking import choose_mask, exponential
from student.masks.table import LONGEST, MaskTable

UNITS = ("token", "word", "span")
NO_COLLOCATIONS = np.zeros((0, LONGEST), np.int32)
WEIGHTS = np.array([1, 1, 1, 4, 0.25, 1, 3, 0, 9, 1e-3], np.float32)


def table(weights=WEIGHTS, collocations=()):
    rows = [[*ids, *[-1] * (LONGEST - len(ids))] for ids in collocations]
    return MaskTable("test", "", np.asarray(weights, np.float32), np.array(rows or NO_COLLOCATIONS, np.int32))


def golden(unit, weights=None):
    """Digest of the masks of 64 windows of several lengths, documents and epochs."""
    places = np.arange(64 * 40).reshape(64, 40)
    lengths = 20 + places[:, 0] % 21
    ordinals = np.where(np.arange(40) < lengths[:, None], (np.arange(40) > 25).astype(int), -1)
    read = SimpleNamespace(ids=places * 7919 % 97, lengths=lengths, documents=ordinals)
    hide = masking(unit, vocab_size=97, continues=np.arange(97) % 3 == 0)
    counted = {"seed": 42, "epoch": np.arange(64) % 5, "rate": 0.3}
    mask = hide.choose(read, 10**12 + np.arange(64), **counted, table=None if weights is None else table(weights))
    return hashlib.sha256(np.packbits(mask)).hexdigest()[:16]


UNIFORM = {"token": "025c9c5337714c89", "word": "5b7a76af7db4af44", "span": "b2c79a523f831db7"}
WEIGHTED = {"token": "25f2022838f8e2d8", "word": "05dd5bc5f9bc959f", "span": "0a63d5b4430959a8"}


@pytest.mark.parametrize("unit", UNITS)
def test_masks_have_the_bits_that_they_always_had(unit):
    assert golden(unit) == golden(unit, np.ones(97)) == UNIFORM[unit]
    assert golden(unit, 1 / (1 + np.arange(97))) == WEIGHTED[unit]


@pytest.mark.parametrize("unit", UNITS)
@given(
    documents(), st.integers(0, 2**32), st.integers(0, 100), st.floats(0.01, 0.99), st.floats(2**-99, 2**99, width=32)
)
def test_equal_weights_are_uniform_masks_bit_for_bit(unit, batch, seed, epoch, rate, weight):
    read, window_ids = batch
    counted = {"seed": seed, "epoch": epoch, "rate": rate}
    uniform = masking(unit).choose(read, window_ids, **counted)
    equal = masking(unit).choose(read, window_ids, **counted, table=table(np.full(10, weight)))
    assert np.array_equal(equal, uniform)


def test_positions_are_drawn_as_numpy_draws_them():
    """Two of six without replacement, as by `choice` with these probabilities: a chi-squared test of the 15 pairs."""
    weights, draws = np.array([1, 2, 3, 4, 0.5, 8]), 50_000
    mask = choose_mask(
        np.ones((draws, 6), bool),
        np.arange(draws),
        seed=0,
        epoch=0,
        rate=1 / 3,
        weights_WL=np.broadcast_to(weights, (draws, 6)),
    )
    rng, share = np.random.default_rng(0), weights / weights.sum()
    theirs = np.array([rng.choice(6, 2, replace=False, p=share) for _ in range(draws)])
    counts = [
        np.bincount(pairs.min(axis=1) * 6 + pairs.max(axis=1), minlength=36)
        for pairs in (np.nonzero(mask)[1].reshape(draws, 2), theirs)
    ]
    counts = np.array(counts)[:, counts[1] > 0]
    assert counts.shape == (2, 15) and chi2_contingency(counts).pvalue > 1e-6
    assert chi2_contingency([counts[0], np.full(15, draws / 15)]).pvalue < 1e-100  # the test can tell


def test_variates_are_those_of_a_library_never_fall_and_have_fixed_bits():
    hashes = hash_u64(5, np.arange(100_000))
    u = (hashes >> np.uint64(12)) / 2.0**52
    assert np.allclose(exponential(hashes), -np.log1p(-u), rtol=1e-11, atol=1e-15)
    assert hashlib.sha256(exponential(hashes).tobytes()).hexdigest()[:16] == "2f5e4f464a4b5bdc"
    edges = [2**64 - 2**power + shift for power in range(64) for shift in (-(2**13), -(2**12), -1, 0, 1, 2**12, 2**13)]
    edges = [0, 1, 2**12, *(edge for edge in edges if 0 <= edge < 2**64)]  # 1 - u is a power of two
    rising = exponential(np.sort(np.concatenate((np.array(edges, np.uint64), hashes))))
    assert (np.diff(rising) >= 0).all() and rising[0] > 0 and math.isfinite(rising[-1])


def places_of(batch, row, weights, seed, epoch, window_id, units):
    """The units of a window, lists of positions, in the order of the race, by a library's logarithm."""

    def arrival(unit):
        u = hashed(MASK_PURPOSE, seed, epoch, window_id, unit[0]) / 2**64
        weight = np.mean([float(weights[batch.ids[row, i]]) for i in unit])
        return -math.log1p(-u) / weight if weight else math.inf, u

    return sorted(units, key=arrival)


@given(documents(), st.integers(0, 2**32), st.integers(0, 100), st.floats(0.01, 0.99))
def test_weighted_tokens_equal_a_slow_loop_and_weights_of_zero_come_last(batch, seed, epoch, rate):
    read, window_ids = batch
    mask = masking().choose(read, window_ids, seed=seed, epoch=epoch, rate=rate, table=table())
    for row, window_id in enumerate(window_ids):
        tokens = [[i] for run in runs_of(read, row) for i in run]
        ordered = places_of(read, row, WEIGHTS, seed, epoch, window_id, tokens)
        expected = {i for (i,) in ordered[: round(rate * len(tokens))]}
        assert set(np.flatnonzero(mask[row])) == expected
        spared = [read.ids[row, i] for (i,) in tokens if i not in expected]
        assert not any(WEIGHTS[read.ids[row, i]] == 0 for i in expected) or not any(WEIGHTS[spared])


@pytest.mark.parametrize("unit", ["token", "word"])
@given(documents(), st.integers(0, 2**32), st.floats(0.01, 0.99))
def test_weighted_words_and_collocations_equal_a_slow_loop(unit, batch, seed, rate):
    read, window_ids = batch
    collocations = [(3, 4), (4, 5), (4, 5, 6), (6, 6), (7, 8, 9, 3, 3)]
    weights = table(collocations=collocations)
    mask = masking(unit).choose(read, window_ids, seed=seed, epoch=2, rate=rate, table=weights)
    for row, window_id in enumerate(window_ids):
        words, tokens = [], 0
        for run in runs_of(read, row):
            ids, taken, tokens = [int(read.ids[row, i]) for i in run], 0, tokens + len(run)
            for place, i in enumerate(run):
                inside = place < taken
                if not inside:
                    fitting = [len(found) for found in collocations if tuple(ids[place : place + len(found)]) == found]
                    taken = place + max([1, *fitting])
                if place == 0 or not (inside or (unit == "word" and CONTINUES[ids[place]])):
                    words.append([])
                words[-1].append(i)
        left, expected = round(rate * tokens), set()
        for word in places_of(read, row, WEIGHTS, seed, 2, window_id, words):
            if len(word) <= left:
                expected |= set(word)
                left -= len(word)
        assert set(np.flatnonzero(mask[row])) == expected


@given(documents(), st.integers(0, 2**32), st.integers(0, 100), st.floats(0.01, 0.99))
def test_weighted_spans_equal_a_slow_loop(batch, seed, epoch, rate):
    read, window_ids = batch
    mask = masking("span").choose(read, window_ids, seed=seed, epoch=epoch, rate=rate, table=table())
    for row, window_id in enumerate(window_ids):
        spans = []
        for run in runs_of(read, row):
            for place, i in enumerate(run):
                u = hashed(LENGTH_PURPOSE, seed, epoch, window_id, i) / 2**64
                length = next(n for n in range(1, 11) if u < (1 - 0.8**n) / (1 - 0.8**10))
                spans.append(run[place : place + length])
        left, expected = round(rate * sum(map(len, runs_of(read, row)))), set()
        for span in places_of(read, row, WEIGHTS, seed, epoch, window_id, spans):
            expected |= set([i for i in span if i not in expected][: left - len(expected)])
        assert set(np.flatnonzero(mask[row])) == expected and len(expected) == left


@pytest.mark.parametrize("unit", UNITS)
@given(documents(), st.integers(0, 2**32))
def test_a_weighted_mask_depends_on_its_own_window_only(unit, batch, seed):
    read, window_ids = batch
    hide, counted = masking(unit), {"seed": seed, "epoch": 3, "rate": 0.3, "table": table()}
    whole = hide.choose(read, window_ids, **counted)
    last = SimpleNamespace(ids=read.ids[-1:], lengths=read.lengths[-1:], documents=read.documents[-1:])
    assert np.array_equal(whole[-1:], hide.choose(last, window_ids[-1:], **counted))


def test_the_rate_moves_along_a_cosine_or_in_steps():
    cosine = masking(rate=0.3, rate_end=0.1, max_steps=101, schedule="cosine")
    for step in range(101):
        assert cosine.rate_at(step) == pytest.approx(0.1 + 0.2 * (1 + math.cos(math.pi * step / 100)) / 2, abs=1e-9)
    assert (cosine.rate_at(0), cosine.rate_at(100)) == (0.3, 0.1)
    steps = masking(rate=0.3, rate_end=0.1, max_steps=8, schedule="steps", rate_steps=(0.25, 0.5))
    assert [steps.rate_at(step) for step in range(8)] == pytest.approx([0.3] * 2 + [0.2] * 2 + [0.1] * 4)
