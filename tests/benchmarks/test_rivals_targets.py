"""What the benchmark of formats counts is what it writes, and the rows can be read back from every format."""

import io
import math
import tarfile

import numpy as np
import pytest
import torch

from benchmarks import rivals_targets as benchmark
from benchmarks.stores import MAX_LENGTH
from pipeline.targets.distributions import Distributions
from shards.schema import BLOCK_TOKENS

TOKENS, VOCABULARY = 2 * MAX_LENGTH, 70_000


@pytest.fixture(scope="module")
def ranked():
    """Weights that fall with the rank, as a polynomial in it, and indices of 17 bits."""
    rng = np.random.default_rng(0)
    rank_n, start_T = np.arange(50), rng.uniform(0, 1, (TOKENS, 1))
    weights_Tn = np.exp(-start_T - 0.1 * rank_n - 0.5 * np.sqrt(np.maximum(rank_n - 1, 0))).astype(np.float32)
    indices_Tn = np.stack([rng.permutation(VOCABULARY)[:50] for _ in range(TOKENS)])
    return weights_Tn / (1.01 * weights_Tn.sum(1, keepdims=True)), indices_Tn


def rows_of(weights_Tn, indices_Tn):
    order_Tn = indices_Tn.argsort(1)
    sort = [np.take_along_axis(table, order_Tn, 1).ravel() for table in (indices_Tn.astype(np.int32), weights_Tn)]
    return Distributions(50 * np.arange(TOKENS + 1), *sort, (1 - weights_Tn.sum(1)).astype(np.float32), 0)


def test_ranks_are_those_of_the_rows(ranked):
    for found, expected in zip(benchmark.by_rank(rows_of(*ranked), 50), ranked, strict=True):
        assert np.array_equal(found, expected)
    few = benchmark.by_rank(
        Distributions(np.array([0, 0, 1]), np.array([7], np.int32), np.ones(1, np.float32), None, 0), 2
    )
    assert few[0].tolist() == [[0, 0], [1, 0]] and few[1].tolist() == [[-1, -1], [7, -1]]


def test_distillkit_holds_its_payload_and_the_rows(ranked):
    weights_Tn, indices_Tn = ranked
    bits = math.ceil(math.log2(VOCABULARY))
    values_Tb, stored_Tn = benchmark.fit(weights_Tn, benchmark.DISTILLKIT[50])
    packed_Tb = benchmark.pack_bits(indices_Tn, bits)
    assert values_Tb.shape[1] + packed_Tb.shape[1] == benchmark.payload("distillkit", 50, VOCABULARY)
    bits_Tb = np.unpackbits(packed_Tb, axis=1)[:, : 50 * bits].reshape(TOKENS, 50, bits)
    assert np.array_equal(bits_Tb @ (1 << np.arange(bits)), indices_Tn)
    np.testing.assert_allclose(stored_Tn, weights_Tn, rtol=5e-3)  # the first is a bfloat16, the others a polynomial
    assert 0 <= benchmark.lost(weights_Tn, stored_Tn) < 1e-5

    parquet = pytest.importorskip("pyarrow.parquet")
    file = benchmark.distillkit_file(values_Tb, packed_Tb, np.arange(TOKENS))
    table = parquet.read_table(io.BytesIO(file)).to_pydict()
    assert np.array_equal(np.concatenate(table["bytepacked_indices"]), packed_Tb)
    assert np.array_equal(np.concatenate(table["compressed_logprobs"]), values_Tb)
    assert np.array_equal(np.concatenate(table["input_ids"]), np.arange(TOKENS))


def test_the_recommended_settings_take_what_their_readme_says():
    """About 300 and 114 bytes for its vocabularies; the rule of `total_bits`."""
    assert benchmark.payload("distillkit", 128, 128_256) == 32 + 24 + 272
    assert benchmark.payload("distillkit", 50, 128_256) == 2 + 12 + 107


def test_megatron_holds_the_rows(ranked):
    pyarrow = pytest.importorskip("pyarrow")
    weights_Tn, indices_Tn = ranked
    log_Tn = torch.from_numpy(np.log(weights_Tn)).half()
    with tarfile.open(fileobj=io.BytesIO(benchmark.megatron_file(log_Tn, indices_Tn))) as tar:
        (member,) = tar.getmembers()
        data = tar.extractfile(member).read()
    with pyarrow.CompressedInputStream(pyarrow.BufferReader(data), "zstd") as stream:
        saved = torch.load(io.BytesIO(stream.read()))
    (low,), (high,), (values,) = (saved[name] for name in ("indices_low", "bit_17", "values"))
    found = (high.long() << 16 | low.long()).transpose(0, 1).reshape(TOKENS, 50)
    assert np.array_equal(found, indices_Tn) and torch.equal(values.transpose(0, 1).reshape(TOKENS, 50), log_Tn)
    assert sum(each.nbytes for each in (low, high, values)) == TOKENS * benchmark.payload("megatron", 50, VOCABULARY)


def test_ours_takes_its_payload_and_the_id(ranked):
    figures = benchmark.measure_ours(rows_of(*ranked), {}, kind="logits", k=VOCABULARY, top_n=50)
    headers = 8 * VOCABULARY / 2**20 + 4 * VOCABULARY / 2**20 + 0.5
    payload = benchmark.payload("ours", 50, VOCABULARY)
    assert payload + 4 < figures["bytes_per_token"] < payload + 4 + headers
    assert 0 < figures["kl"] < 1e-3 and BLOCK_TOKENS % TOKENS == 0
