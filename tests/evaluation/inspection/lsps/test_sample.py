"""The sample against another way of reading the store: window by window, as show-shards does."""

import numpy as np
import pytest
from make_store import make_store
from tiny_store import write_store

from mlsm.common.progress import silent
from mlsm.evaluation.inspection.lsps import sample as module
from mlsm.evaluation.inspection.lsps.sample import Entries, by_lsp, sample_tokens
from mlsm.evaluation.inspection.stores import window_tokens
from shards.reader import Store


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("stores") / "s", k=24)


def test_the_whole_split_when_it_is_small_enough(store):
    sample = sample_tokens(store, 10**6, silent)
    token = 0
    for window in range(len(store.split("train"))):
        shown = window_tokens(store, "train", window, top=24)["tokens"]
        for position, expected in enumerate(shown):
            if expected["text"] in ("[CLS]", "[SEP]"):
                continue
            assert sample.ids_N[token] == expected["id"]
            assert (sample.window_N[token], sample.position_N[token]) == (window, position)
            lsps, weights = sample.row(token)
            assert dict(zip(lsps.tolist(), weights.tolist(), strict=True)) == pytest.approx(dict(expected["lsps"]))
            token += 1
    assert token == len(sample) and sample.of == store.split("train").tokens


def test_a_sample_is_bounded_and_spread_and_the_same_again(store):
    whole, part, again = (
        sample_tokens(store, 10**6, silent),
        sample_tokens(store, 600, silent),
        sample_tokens(store, 600, silent),
    )
    assert 400 < len(part) <= 600
    assert np.array_equal(part.weights_E, again.weights_E) and np.array_equal(part.window_N, again.window_N)
    windows = np.unique(part.window_N)
    assert windows.min() < 30 and windows.max() > 120  # of 150
    chosen = np.flatnonzero(np.isin(whole.window_N, windows))
    assert np.array_equal(whole.ids_N[chosen], part.ids_N)
    indptr, lsps, weights = whole.rows(chosen)
    assert np.array_equal(indptr, part.indptr) and np.array_equal(lsps, part.lsps_E)
    assert np.array_equal(weights, part.weights_E)


def test_the_sample_is_the_same_however_many_windows_are_read_at_once(store, monkeypatch):
    whole, told = sample_tokens(store, 10**6, silent), []
    monkeypatch.setattr(module, "TOKENS_AT_ONCE", 7 * store.max_length)
    again = sample_tokens(store, 10**6, lambda what, done, *_, **__: told.append(done))
    assert told[:2] == [7, 14] and told[-1] == len(store.split("train"))
    for name in ("ids_N", "window_N", "position_N", "document_N", "indptr", "lsps_E", "weights_E"):
        assert np.array_equal(getattr(again, name), getattr(whole, name)), name


def test_entries_by_lsp_are_the_columns_of_the_dense_matrix(store):
    sample = sample_tokens(store, 10**6, silent)
    entries, dense_NK = by_lsp(sample), dense(sample)
    for lsp in range(24):
        assert np.array_equal(entries.tokens(lsp), np.flatnonzero(dense_NK[:, lsp]))
        assert np.array_equal(entries.weights(lsp), dense_NK[dense_NK[:, lsp] > 0, lsp])
        tokens, weights = entries.heaviest_first(lsp)
        assert np.array_equal(np.sort(tokens), entries.tokens(lsp)) and (np.diff(weights) <= 0).all()
        assert np.array_equal(weights, dense_NK[tokens, lsp])
        expected = weights.mean(dtype=float) if len(weights) else 0
        assert entries.mean_weights[lsp] == pytest.approx(expected)


def test_equal_weights_are_in_a_random_order_that_is_always_the_same():
    """In stores of one LSP per token all weights are 1: in the order of the store, they would show its beginning."""
    tokens, weights = np.arange(9_000, dtype=np.int32), np.repeat(np.float32([1, 0.5, 1]), 3_000)
    entries = Entries(np.array([0, 9_000, 9_000]), tokens, weights)
    first, ordered = entries.heaviest_first(0)
    assert ordered.tolist() == [1] * 6_000 + [0.5] * 3_000 and len(entries.heaviest_first(1)[0]) == 0
    assert np.array_equal(np.sort(first[:6_000]), np.flatnonzero(weights == 1))
    assert 0.4 < (first[:200] < 3_000).mean() < 0.6 and (np.diff(first[:200]) > 0).mean() < 0.6
    assert np.array_equal(first, Entries(np.array([0, 9_000, 9_000]), tokens, weights).heaviest_first(0)[0])


def dense(sample):
    rows = np.zeros((len(sample), sample.k), np.float32)
    for token in range(len(sample)):
        lsps, weights = sample.row(token)
        rows[token, lsps] = weights
    return rows


def test_document_keys_tell_documents_apart(tmp_path):
    files, plan, truth = make_store(tmp_path / "s", k=0, blocks=1)
    reader = Store.open(files.path).split("train")
    batch = reader.read(np.arange(len(reader))[::-1])
    keys = reader.document_keys(batch)
    expected, at = [], 0
    for unit, block in enumerate(truth["train"]):
        run = np.searchsorted(block["run_starts"], np.arange(len(block["ids"])), side="right") - 1
        records = block["run_records"][run]
        for length in block["lengths"]:
            expected.append([(unit, int(record)) for record in records[at : at + length]])
            at += length
        at = 0
    named = {}
    for row, names, length in zip(keys, reversed(expected), batch.lengths, strict=True):
        assert len(names) == length and (row[length:] == -1).all()
        for key, name in zip(row[:length].tolist(), names, strict=True):
            assert named.setdefault(name, key) == key
    assert len(set(named.values())) == len(named) > 10
