"""Every reader of the benchmark delivers the rows of the store, and what follows a kill is judged by who comes when."""

from itertools import islice

import numpy as np
import pytest
import torch

from benchmarks import rivals_readers as benchmark
from benchmarks.stores import MAX_LENGTH, row_columns, window_columns, write_store
from pipeline.targets.distributions import Distributions
from shards.reader import Store

WINDOWS = 256
READERS = "ours", "streaming", "LitData", "HF datasets", "WebDataset"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rng, tokens = np.random.default_rng(0), WINDOWS * MAX_LENGTH
    nnz = rng.integers(0, 6, tokens)
    indptr = np.concatenate([[0], nnz.cumsum()])
    first = np.repeat(indptr[:-1], nnz)
    indices = (10 * (np.arange(indptr[-1]) - first) + rng.integers(0, 10, indptr[-1])).astype(np.int32)
    weights = np.repeat(1 / np.maximum(nnz, 1), nnz).astype(np.float32)
    columns = window_columns(tokens) | row_columns(
        Distributions(indptr, indices, weights, np.zeros(tokens, np.float32), 0)
    )
    return Store.open(write_store(tmp_path_factory.mktemp("readers") / "store", columns, units=1, blocks=1).path)


def epoch_of(reader, path, rank, ranks):
    """The batches of an epoch, as arrays by name, in the order of the windows."""
    batches = list(islice(reader(path, WINDOWS).batches(), WINDOWS // benchmark.BATCH))
    names = "window_ids", "input_ids", "lsp_indices", "lsp_weights"
    width = max(batch["lsp_indices"].shape[2] for batch in batches)
    for batch in batches:
        for name in names[2:]:
            batch[name] = torch.nn.functional.pad(batch[name], (0, width - batch[name].shape[2]))
    whole = {name: np.concatenate([batch[name].numpy() for batch in batches]) for name in names}
    order = np.argsort(whole["window_ids"])
    return {name: array[order] for name, array in whole.items()} | {"shuffled": bool((np.diff(order) != 1).any())}


def reader_of(name):
    if name not in (readers := benchmark.available()[0]):
        pytest.skip(f"{name} is not installed")
    return readers[name]


@pytest.fixture(scope="module")
def ours(store):
    return benchmark.in_processes(epoch_of, benchmark.Ours, store.path)


@pytest.mark.parametrize("name", READERS)
def test_everybody_delivers_the_rows_of_the_store(name, store, ours, tmp_path):
    reader = reader_of(name)
    assert benchmark.in_processes(benchmark.write, reader, store, tmp_path / "rows") is None
    found = benchmark.in_processes(epoch_of, reader, tmp_path / "rows")
    assert "error" not in found and found["shuffled"]
    for part in ("window_ids", "input_ids", "lsp_indices"):
        assert np.array_equal(found[part], ours[part]), part
    np.testing.assert_allclose(found["lsp_weights"], ours["lsp_weights"], atol=1e-3)
    assert np.array_equal(ours["window_ids"], np.arange(WINDOWS))


@pytest.mark.parametrize("name", ["ours", "HF datasets", "WebDataset"])
def test_a_late_place_is_that_of_the_epoch(name, store, tmp_path):
    reader = reader_of(name)
    benchmark.in_processes(benchmark.write, reader, store, tmp_path / "rows")
    found = benchmark.in_processes(benchmark.resume_late, reader, tmp_path / "rows", WINDOWS)
    assert found["resume_exact"] and found["resume_s"] > 0


def test_after_a_kill_ours_goes_on_exactly(store, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark, "SAVED", 2)
    monkeypatch.setattr(benchmark, "KILLED", 3)
    (tmp_path / "rows").symlink_to(store.path)
    found = benchmark.kill_and_resume(benchmark.Ours, tmp_path / "rows", WINDOWS)
    assert found == {"2 ranks": "exact", "1 rank": "exact"}


def test_what_follows_a_kill_is_judged_by_its_windows(monkeypatch):
    monkeypatch.setattr(benchmark, "SAVED", 1)
    steps = [[0, 1], [2, 3], [4, 5]]
    assert benchmark.judge(steps, [[3, 2], [4, 5]]) == "exact"
    assert benchmark.judge(steps, [[2, 4], [3, 5]]) == "each once"
    assert benchmark.judge(steps, [[0, 3], [4, 5]]) == "1 twice, 1 never"
    ranks = [{"batches": [[0], [2]]}, {"batches": [[1]]}]
    assert benchmark.steps_of(ranks) == [[0, 1], [2]]


def test_an_error_of_a_reader_is_told(tmp_path, capfd):
    found = benchmark.in_processes(benchmark.read_epoch, benchmark.Ours, tmp_path / "none", WINDOWS, 0)
    assert "none" in found["error"]
    assert benchmark.summarize([(found, found, found)])["one_core_error"] == found["error"]
