"""type: the average LSP distribution of a token's occurrences. The oracle is a plain loop over the store's rows."""

import math
from collections import defaultdict

import numpy as np
import pytest
import torch
from tiny_store import log_of, write_store

from mlsm.common.arrays import read_npz
from shards.reader import Store
from student.batches import Loader
from student.config import StudentConfig
from student.lsp_model import LspModel
from student.masks.masking import Masking
from student.objectives import type as token_tables
from student.objectives.type import TypeAverage, average_by_token
from student.train import train


def rows_of(windows):
    """(token id, {LSP: weight}) of every real token of a split, window by window."""
    for window in range(len(windows)):
        read = windows.read([window])
        for position in range(int(read.lengths[0])):
            rows = windows.targets(read, np.array([0]), np.array([position]))
            yield int(read.ids[0, position]), dict(zip(rows.indices.tolist(), rows.weights.tolist(), strict=True))


def averages_by_hand(windows):
    """Token id -> its average row, of occurrences that have one."""
    sums, counts = defaultdict(lambda: np.zeros(windows.store.k)), defaultdict(int)
    for token, row in rows_of(windows):
        for lsp, weight in row.items():
            sums[token][lsp] += weight
        counts[token] += bool(row)
    return {token: sums[token] / counts[token] for token in counts if counts[token]}


def test_the_table_is_the_average_of_all_training_occurrences(lsp_store, monkeypatch):
    windows, read = lsp_store.split("train"), []
    monkeypatch.setattr(token_tables, "TOKENS_AT_ONCE", 7 * lsp_store.max_length)
    monkeypatch.setattr(windows, "read", lambda ids, real=windows.read: read.append(len(ids)) or real(ids))
    expected, table_VK = averages_by_hand(windows), average_by_token(windows).toarray()
    assert table_VK.shape == (lsp_store.vocab_size, lsp_store.k) and len(expected) > 20
    assert max(read) == 7, "as many windows at once as that have so many tokens"
    for token, row_K in enumerate(table_VK):
        np.testing.assert_allclose(row_K, expected.get(token, np.zeros(lsp_store.k)), atol=1e-6)


def test_loss_and_gradient_are_those_of_the_dense_formula(lsp_store):
    objective, windows = TypeAverage(lsp_store), lsp_store.split("held_out")
    masking = Masking(lsp_store.special_ids, lsp_store.vocab_size, 0.5)
    loader = Loader(windows, masking, objective.read_targets, micro_batch=999, by_token=True)
    (micro,) = loader.load(np.arange(len(windows)), np.zeros(len(windows), np.int64), 0, 0.5).micro
    expected_rows = averages_by_hand(lsp_store.split("train"))
    logits = (
        3 * torch.randn((len(micro.ids_M), lsp_store.k), generator=torch.Generator().manual_seed(0))
    ).requires_grad_()
    log_q_MK = torch.log_softmax(logits.double(), dim=1)
    expected, coded = torch.zeros((), dtype=torch.float64), 0
    for token, log_q_K in zip(micro.ids_M.tolist(), log_q_MK, strict=True):
        row_K = expected_rows.get(token)
        coded += row_K is not None
        for lsp in np.flatnonzero(row_K) if row_K is not None else ():
            expected = expected + row_K[lsp] * (math.log(row_K[lsp]) - log_q_K[lsp])
    assert 0 < coded <= len(micro.ids_M) and micro.targets.counts == (coded,)
    loss = objective.loss_sums(logits, micro.targets)[0]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    (theirs,) = torch.autograd.grad(expected, logits)
    (ours,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_the_baseline_is_the_average_of_the_table_over_training_tokens(lsp_store):
    objective = TypeAverage(lsp_store)
    train_windows, held_out = lsp_store.split("train"), lsp_store.split("held_out")
    loader = Loader(
        held_out, Masking(lsp_store.special_ids, lsp_store.vocab_size, 0.5), objective.read_targets, micro_batch=9
    )
    batch = loader.load(np.arange(len(held_out)), np.zeros(len(held_out), np.int64), 0, 0.5)
    rows = averages_by_hand(train_windows)
    mean_K = np.full(lsp_store.k, 1 / lsp_store.k)
    total = 1.0
    for token, _ in rows_of(train_windows):
        if token in rows and token not in lsp_store.special_ids["all"]:
            mean_K, total = mean_K + rows[token], total + 1
    mean_K /= total
    losses = []
    for micro in batch.micro:
        for row_K in micro.targets.shares_MK.double().numpy():
            if row_K.any():
                used = row_K > 0
                losses.append(float((row_K[used] * np.log(row_K[used] / mean_K[used])).sum()))
    found = objective.baseline(train_windows, [micro.targets for micro in batch.micro])
    assert found["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    ordinary = [token for token, _ in rows_of(train_windows) if token not in lsp_store.special_ids["all"]]
    share = np.mean([token in rows for token in ordinary])
    assert objective.facts["tokens_with_a_type"] == pytest.approx(share)


def test_the_table_is_kept_for_the_next_run_and_made_again_where_it_is_damaged(lsp_store, tmp_path, monkeypatch):
    windows, directory = lsp_store.split("train"), tmp_path / "kept"
    first = average_by_token(windows, directory)
    (file,) = directory.iterdir()

    def refuse(*_):
        raise AssertionError("the shards were read again")

    with monkeypatch.context() as patch:
        patch.setattr(token_tables, "mass_by_group", refuse)
        assert (average_by_token(windows, directory) != first).nnz == 0
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 3] ^= 1
        file.write_bytes(raw)
        with pytest.raises(AssertionError, match="read again"):
            average_by_token(windows, directory)
    assert (average_by_token(windows, directory) != first).nnz == 0


@pytest.mark.parametrize("name, values", [
    ("data", lambda data: -data), ("data", lambda data: 3 * data), ("data", lambda data: np.nan * data),
    ("data", lambda data: np.inf * data), ("data", lambda data: data.astype(np.complex64)),
    ("data", lambda data: data.astype(str)), ("indices", lambda at: np.where(at == at.max(), 2**30, at)),
    ("indices", lambda at: at - 1), ("indptr", lambda at: at[::-1].copy()), ("indptr", lambda at: at[:-1]),
    ("indptr", lambda at: at.astype(str)), ("indptr", lambda at: at[-1]),
])  # fmt: skip
def test_a_kept_table_of_anything_but_distributions_is_made_again(name, values, lsp_store, tmp_path):
    """The directory of runs may come from somebody else. Unchecked indices outside the table end the process."""
    windows = lsp_store.split("train")
    first = average_by_token(windows, tmp_path)
    (file,) = tmp_path.iterdir()
    kept = read_npz(file)
    np.savez_compressed(file, **kept | {name: values(kept[name])})
    again = average_by_token(windows, tmp_path)
    assert again.dtype == np.float32 and np.array_equal(again.toarray(), first.toarray())


def test_a_kept_table_is_of_the_shards_as_they_are_now(tmp_path, monkeypatch):
    """A unit that is encoded again, as one that was quarantined, keeps target and plan of the store."""
    before, after = (write_store(tmp_path / f"{bare}", k=20, bare=bare) for bare in (3, 5))
    monkeypatch.setattr(after, "target_id", before.target_id)
    windows = [before.split("train"), after.split("train")]
    assert before.plan_id == after.plan_id and windows[0].digest != windows[1].digest
    kept = [average_by_token(reader, tmp_path / "kept") for reader in windows]
    assert (kept[0] != kept[1]).nnz and (average_by_token(windows[1]) != kept[1]).nnz == 0


def test_a_killed_run_resumes_as_an_unbroken_one_and_its_export_predicts_lsps(
    lsp_store, settings, tmp_path, train_until_killed
):
    settings |= {"store": str(lsp_store.path), "objective": "type"}
    train(StudentConfig(**settings | {"run_dir": tmp_path / "unbroken"}))
    config = StudentConfig(**settings)
    train_until_killed(config, 5)
    result = train(config)
    ours, theirs = log_of(config.run_dir), log_of(tmp_path / "unbroken")
    assert [line["loss"] for line in ours.values()] == [line["loss"] for line in theirs.values()]
    assert LspModel.from_pretrained(result["export"]).facts["lsps"] == Store.open(lsp_store.path).k
    assert "whatever its context" in (config.run_dir / "export" / "README.md").read_text()
