"""The benchmarks of shards compare like with like: the raw arrays hold what the store holds."""

import numpy as np

from benchmarks import pack, shard_reader, stores
from pipeline.targets.distributions import distributions
from shards.reader import Store


def test_a_gather_from_raw_arrays_gives_what_the_store_gives(tmp_path):
    codes, columns = pack.made_up(np.random.default_rng(0))
    columns |= stores.row_columns(distributions(codes, stores.TOP_N))
    windows = Store.open(stores.write_store(tmp_path / "store", columns, units=1, blocks=2).path).split("train")
    raw = shard_reader.RawArrays(tmp_path / "raw", columns, blocks=2)
    order, (mask, *_) = windows.order(0, 0, 0, 64), shard_reader.choose_tokens(64, 0)
    batch = windows.read(order)
    stored, (ids, documents, (indptr, indices, weights, tail)) = windows.targets(batch, *mask), raw.gather(order, *mask)
    assert np.array_equal(ids, batch.ids) and np.array_equal(documents, batch.documents)
    assert np.array_equal(indptr, stored.indptr) and np.array_equal(indices, stored.indices)
    exact = weights / np.repeat(1 - tail, np.diff(indptr))
    np.testing.assert_allclose(exact, stored.weights, rtol=0.04, atol=1e-4)
    np.testing.assert_allclose(tail, stored.tail, rtol=0.03, atol=1e-4)


def test_packing_is_timed_on_the_rows_that_the_npz_holds(tmp_path):
    codes, columns = pack.made_up(np.random.default_rng(1))
    rows = distributions(codes, stores.TOP_N)
    size = pack.write(tmp_path, rows, columns, blocks=1)
    assert size == sum(path.stat().st_size for path in (tmp_path / "store" / "units").glob("*.tar"))
    assert pack.write_npz(tmp_path, rows, columns, blocks=1) > 0
    with np.load(tmp_path / "rows.npz") as saved:
        assert np.array_equal(saved["weights0"], rows.weights) and np.array_equal(saved["ids0"], columns["ids"])


def test_made_up_units_are_opened_like_real_ones(tmp_path):
    """Records are checked when a store is opened, so those that nobody packed must hold what the writer's do."""
    shard_reader.write_records(tmp_path / "units", 3)
    found = shard_reader.opening(tmp_path / "units")
    assert 0 < found["missing_units_seconds"] < found["open_seconds"]
