"""Packed columns against plain definitions, and golden bytes that must never change."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shards import codec
from shards.schema import ShardMeta


@given(st.lists(st.integers(0, 4095), max_size=40))
def test_twelve_bits_round_trip_in_any_order(values):
    values = np.array(values, np.int64)
    column = codec.pack_indices(values, 12)
    assert column.dtype == np.uint8 and len(column) == (3 * len(values) + 1) // 2
    entries = np.random.default_rng(0).permutation(len(values))
    assert np.array_equal(codec.unpack_indices(column, entries, 12), values[entries])


@pytest.mark.parametrize(("bits", "largest"), [(16, 65_535), (32, 2**20)])
def test_wide_indices_round_trip(bits, largest):
    values = np.array([0, 5, largest])
    column = codec.pack_indices(values, bits)
    assert column.dtype.itemsize * 8 == bits
    assert np.array_equal(codec.unpack_indices(column, np.arange(3), bits), values)


@pytest.mark.parametrize("octaves", [12, 26, 1])
def test_a_code_is_a_count_of_bounds(octaves):
    """For ratios over the whole range, and for the floats next to every bound."""
    bounds = codec.ratio_bounds(octaves)
    assert bounds.dtype == np.float32 and len(bounds) == 255 and (np.diff(bounds) > 0).all() and bounds[-1] < 1
    near = bounds.view(np.int32)[:, None] + np.arange(-40, 41)
    spread = np.exp2(-np.random.default_rng(0).uniform(0, 1.2 * octaves, 200_000)).astype(np.float32)
    ratios = np.concatenate([near.astype(np.int32).view(np.float32).ravel(), spread, np.float32([1, 1e-30, 1e-40])])
    ratios = np.minimum(ratios, 1)
    rows = np.stack([np.ones_like(ratios), ratios], axis=1).ravel()
    codes = codec.encode_weights(rows, np.full(len(ratios), 2), octaves)[1::2]
    assert np.array_equal(codes, 255 - np.searchsorted(bounds, ratios, side="right"))


def test_codes_that_are_known_are_taken_where_the_store_has_their_octaves():
    columns = {"ids": np.array([5, 6]), "lengths": np.array([2]), "run_starts": np.array([0])}
    columns |= {"run_records": np.array([0]), "nnz": np.array([2, 1]), "indices": np.array([1, 3, 2])}
    columns |= {"weights": np.float32([0.5, 0.25, 1]), "tail": np.float32([0.25, 0])}
    given = np.array([0, 9, 7], np.uint8)
    for octaves, expected in ((12, given), (11, codec.encode_weights(columns["weights"], columns["nnz"], 11))):
        meta = ShardMeta("target", "unit", 24, 65, 16, octaves)
        assert np.array_equal(codec.pack_block(meta, **columns, lsp_codes=given)["weights"], expected)
    short = columns | {"nnz": np.array([1, 1])}
    with pytest.raises(ValueError, match="2 entries"):
        codec.pack_block(ShardMeta("target", "unit", 24, 65, 16), **short, lsp_codes=given)


@given(st.lists(st.lists(st.floats(1e-6, 1.0), max_size=50), min_size=1, max_size=8))
def test_weights_keep_their_ratio_within_half_a_step(rows):
    nnz = np.array([len(row) for row in rows])
    weights = np.array([w for row in rows for w in row])
    decoded = codec.decode_weights(codec.encode_weights(weights, nnz, 12), nnz, 12)
    ends = np.cumsum(nnz)
    for begin, end in zip(ends - nnz, ends, strict=True):
        if begin == end:
            continue
        exact, read = weights[begin:end], decoded[begin:end]
        assert read.sum() == pytest.approx(1, abs=1e-5)
        expected = np.maximum(exact / exact.max(), 2.0**-12)
        assert np.allclose(read / read.max(), expected, rtol=2 ** (12 / 510) - 1 + 1e-4)


@given(st.lists(st.floats(0, 1), min_size=1))
def test_tail_is_within_half_a_step(values):
    values = np.array(values)
    read = codec.decode_tail(codec.encode_tail(values))
    stored = values > 2**-15.875
    assert np.allclose(read[stored], values[stored], rtol=2 ** (1 / 32) - 1 + 1e-5)
    assert np.all(read[~stored] <= 2**-15.8)


def test_golden_bytes():
    meta = ShardMeta("t", "u", k=3072, vocab_size=30_000, max_length=8)
    block = codec.pack_block(
        meta,
        ids=np.array([101, 7, 29_999, 102]),
        lengths=np.array([4]),
        run_starts=np.array([0, 2]),
        run_records=np.array([4, 5]),
        nnz=np.array([0, 3, 1, 0]),
        indices=np.array([0, 17, 3071, 4]),
        weights=np.array([0.5, 0.25, 0.125, 1.0]),
        tail=np.array([0, 0.125, 0, 0]),
    )
    assert {name: column.tobytes().hex() for name, column in block.items()} == {
        "ids": "650007002f756600",
        "lengths": "0400",
        "run_starts": "0000000002000000",
        "run_records": "0400000005000000",
        "nnz": "00030100",
        "atoms": "001001ff4b00",
        "weights": "00152a00",
        "tail": "ff30ffff",
        "layout": "0c0c",
    }


def test_rows_that_break_the_contract_are_refused():
    meta = ShardMeta("t", "u", k=10, vocab_size=100, max_length=8)
    window = {
        "ids": np.array([1, 5]),
        "lengths": np.array([2]),
        "run_starts": np.array([0]),
        "run_records": np.array([0]),
    }
    for nnz, indices, weights, message in [
        ([2, 0], [3, 3], [0.5, 0.5], "increase"),
        ([2, 0], [4, 3], [0.5, 0.5], "increase"),
        ([1, 0], [10], [1.0], "below k"),
        ([1, 0], [3], [0.0], "positive"),
        ([256, 0], range(256), [1] * 256, "255"),
        ([1], [3], [1.0], "1 rows, .* for 2 tokens"),
        ([1, 1], [3], [1.0], "1 atoms, 1 weights for 2 tokens and 2 entries"),
    ]:
        with pytest.raises(ValueError, match=message):
            codec.pack_block(
                meta,
                **window,
                nnz=np.array(nnz),
                indices=np.array(indices),
                weights=np.array(weights, float),
                tail=np.zeros(2),
            )


def test_windows_come_back_padded_with_their_documents():
    block = {
        "ids": np.array([1, 8, 9, 2, 1, 7, 2], np.uint16),
        "lengths": np.array([4, 3], np.uint16),
        "run_starts": np.array([0, 2, 4], np.uint32),
    }
    windows = codec.padded_windows_of_blocks([(block, np.array([0, 4, 7]), np.array([1, 0]))], 5, pad_id=0)
    assert windows.ids.tolist() == [[1, 7, 2, 0, 0], [1, 8, 9, 2, 0]]
    assert windows.documents.tolist() == [[0, 0, 0, -1, -1], [0, 0, 1, 1, -1]]
    assert windows.lengths.tolist() == [3, 4]


def test_golden_counter():
    """Orders and masks of finished runs depend on these numbers."""
    from shards.counter import hash_u64, permutation

    assert int(hash_u64(42, 0, 7)) == int(hash_u64(42, 0, np.array([7]))[0])
    assert hashlib.sha256(hash_u64(1, 2, np.arange(1000)).tobytes()).hexdigest()[:16] == GOLDEN_COUNTER
    assert permutation(8, 42, 0).tolist() == GOLDEN_PERMUTATION


GOLDEN_COUNTER = "1388b8bd9985090a"
GOLDEN_PERMUTATION = [4, 3, 5, 0, 7, 6, 1, 2]


@pytest.mark.parametrize("k", [50, 5000, 100_000])
@pytest.mark.parametrize("nnz", [[0, 3, 0, 4, 1, 0, 2, 0], [1, 1, 1], [2], [0, 0]])
def test_a_slice_of_tokens_has_the_rows_of_its_tokens(k, nnz):
    """At odd and even entries, and at the block's ends; atoms of 12, 16 and 32 bits."""
    rng, nnz = np.random.default_rng(3), np.array(nnz)
    indices = np.concatenate([[], *(np.sort(rng.choice(k, count, replace=False)) for count in nnz)]).astype(np.int64)
    tokens = len(nnz)
    ids = {"ids": np.full(tokens, 7), "lengths": np.array([tokens]), "run_starts": np.array([0])}
    rows = {"run_records": np.array([0]), "nnz": nnz, "indices": indices, "tail": np.zeros(tokens)}
    meta = ShardMeta("t", "u", k, 100, 16)
    block = codec.pack_block(meta, **ids, **rows, weights=rng.uniform(0.01, 1, len(indices)))
    first_entry = np.concatenate(([0], np.cumsum(nnz)))
    for first, last in ((a, b) for a in range(tokens) for b in range(a, tokens + 1)):
        one = codec.gather_rows(meta, block, first_entry, slice(first, last))
        other = codec.gather_rows(meta, block, first_entry, np.arange(first, last))
        assert np.array_equal(one.indices, indices[first_entry[first] : first_entry[last]])
        assert all(np.array_equal(*pair) for pair in zip(vars(one).values(), vars(other).values(), strict=True))


def test_fidelity_against_dense_distributions():
    """KL, total variation and tail of chosen rows, from the definitions in float64."""
    rng = np.random.default_rng(3)
    k, nnz = 50, np.array([4, 0, 7, 1, 9])
    exact = np.zeros((5, k))
    for row, count in enumerate(nnz + 3 * (nnz > 1)):
        exact[row, rng.choice(k, count, replace=False)] = rng.gamma(0.7, size=count) + 1e-3
    exact[nnz > 0] /= exact[nnz > 0].sum(1, keepdims=True)
    kept = np.zeros_like(exact)
    for row, count in enumerate(nnz):
        chosen = np.argsort(-exact[row])[:count]
        kept[row, chosen] = exact[row, chosen]
    meta = ShardMeta("t", "u", k, 100, 16)
    given = {"nnz": nnz, "indices": np.nonzero(kept)[1], "weights": kept[kept > 0], "tail": (exact - kept).sum(1)}
    ids = {"ids": np.full(5, 7), "lengths": np.array([5]), "run_starts": np.array([0]), "run_records": np.array([0])}
    block = codec.pack_block(meta, **ids, **given)
    tokens = np.array([0, 1, 2, 4])
    count, kl, tv, tail = codec.fidelity(meta, given, block, np.cumsum(nnz) - nnz, tokens)
    rows = codec.gather_rows(meta, block, np.concatenate(([0], np.cumsum(nnz))), np.arange(5))
    stored = np.zeros_like(exact)
    stored[np.repeat(np.arange(5), nnz), rows.indices] = rows.weights
    chosen = [0, 2, 4]
    p, q = exact[chosen], stored[chosen]
    some = q > 0
    assert count == 3 and kl == pytest.approx((q[some] * np.log(q[some] / p[some])).sum(), rel=1e-5)
    assert tv == pytest.approx(np.abs(q - p).sum() / 2, rel=1e-5)
    assert tail == pytest.approx((exact - kept)[chosen].sum(), rel=1e-6) and tail > 0.01
