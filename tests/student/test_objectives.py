import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from shards.codec import SparseRows
from student.batches import Loader
from student.errors import RunError
from student.held_out import MASK_SEED, HeldOut
from student.masking import Masking
from student.objectives import Mlm, Mlsm


class FakeStore:
    def __init__(self, k):
        self.k, self.vocab_size, self.kind, self.path = k, k, "lsp" if k else "ids", "store"


class FixedRows:
    """A split whose rows are given."""

    def __init__(self, rows):
        self.rows = rows

    def targets(self, batch, window_M, position_M):
        return self.rows


def sparse_rows(dense_MK):
    nnz = (dense_MK > 0).sum(axis=1)
    return SparseRows(
        np.concatenate(([0], np.cumsum(nnz))).astype(np.int64),
        np.nonzero(dense_MK)[1].astype(np.int32),
        dense_MK[dense_MK > 0].astype(np.float32),
        np.zeros(len(dense_MK), np.float32),
    )


def dense_kl(target_MK, logits_MK):
    """KL(P || Q) of the rows that are not empty, by the definition."""
    log_q = F.log_softmax(logits_MK.double(), dim=1)
    total = torch.zeros((), dtype=torch.float64)
    for p, row in zip(torch.from_numpy(target_MK), log_q, strict=True):
        stored = p > 0
        total = total + (p[stored] * (p[stored].log() - row[stored])).sum()
    return total


@given(st.integers(0, 2**32 - 1), st.integers(0, 12), st.integers(2, 40))
def test_sparse_kl_equals_the_dense_formula_with_its_gradient(seed, tokens, k):
    rng = np.random.default_rng(seed)
    target = rng.random((tokens, k)) * (rng.random((tokens, k)) < 0.3)
    target /= np.maximum(target.sum(axis=1, keepdims=True), 1e-30)
    target = target.astype(np.float32).astype(np.float64)
    logits = torch.from_numpy(5 * rng.standard_normal((tokens, k))).float().requires_grad_()
    mlsm = Mlsm(FakeStore(k))
    targets = mlsm.read_targets(FixedRows(sparse_rows(target)), None, None, None)
    assert targets.counts[0] == (target.sum(axis=1) > 0).sum()
    loss, = mlsm.loss_sums(logits, targets)
    expected = dense_kl(target, logits)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4, abs=1e-4)
    if tokens:
        gradient, = torch.autograd.grad(loss, logits)
        by_definition, = torch.autograd.grad(expected, logits)
        assert torch.allclose(gradient, by_definition.float(), atol=1e-5)


def test_a_perfect_prediction_has_no_loss():
    target = np.array([[0.5, 0.25, 0.25], [0.0, 0.0, 0.0]])
    mlsm = Mlsm(FakeStore(3))
    targets = mlsm.read_targets(FixedRows(sparse_rows(target)), None, None, None)
    logits = torch.tensor([[0.5, 0.25, 0.25], [1.0, 2.0, 3.0]]).log()
    assert mlsm.loss_sums(logits, targets).item() == pytest.approx(0, abs=1e-6)


def test_mlsm_needs_stored_distributions(ids_store):
    with pytest.raises(RunError, match="token ids only"):
        Mlsm(ids_store)


def masking(store):
    return Masking(store.special_ids, store.vocab_size, 0.3, rate_end=0.15)    # held-out: the final rate


def masked_tokens(store):
    """(window id, position) of the evaluation's masked tokens, found through the loader's own mask."""
    split = store.split("held_out")
    loader = Loader(split, masking(store), Mlm(store).read_targets, micro_batch=len(split))
    order = split.order(MASK_SEED, 0, 0, len(split))
    micro, = loader.load(order, np.zeros(len(order), np.int64), MASK_SEED, 0.15).micro
    window, position = np.divmod(micro.where_M.numpy(), store.max_length)
    return order[window], position


def test_marginal_baseline_equals_an_independent_dense_computation(lsp_store):
    def dense(split_name):
        split = lsp_store.split(split_name)
        read = split.read(np.arange(len(split)))
        window, position = np.nonzero(read.documents >= 0)
        rows = split.targets(read, window, position)
        matrix = np.zeros((len(split), lsp_store.max_length, lsp_store.k))
        token = np.repeat(np.arange(len(window)), np.diff(rows.indptr))
        matrix[window[token], position[token], rows.indices] = rows.weights
        return matrix

    train = dense("train").reshape(-1, lsp_store.k)
    mean = train.sum(axis=0) / (train.sum(axis=1) > 0).sum()
    window, position = masked_tokens(lsp_store)
    target = dense("held_out")[window, position]
    target = target[target.sum(axis=1) > 0]
    logs = np.log(np.where(target > 0, target, 1)) - np.log(np.where(target > 0, mean, 1))
    expected = (target * logs).sum(axis=1).mean()
    mlsm = Mlsm(lsp_store)
    held_out = HeldOut(lsp_store, lsp_store.split("train"), mlsm, windows=99, masking=masking(lsp_store), micro_batch=7)
    assert held_out.baseline["loss"] == pytest.approx(expected, rel=2e-3)


def test_unigram_baseline_equals_an_independent_count(ids_store):
    train, held_out = ids_store.split("train"), ids_store.split("held_out")
    read = train.read(np.arange(len(train)))
    words = [int(i) for row, n in zip(read.ids, read.lengths, strict=True) for i in row[1 : n - 1]]
    counts = {word: words.count(word) for word in set(words)}
    window, position = masked_tokens(ids_store)
    labels = held_out.read(window).ids[np.arange(len(window)), position].tolist()
    total = len(words) + ids_store.vocab_size
    expected = -np.mean([np.log((counts.get(label, 0) + 1) / total) for label in labels])
    best = max(sorted(counts), key=counts.get)
    found = HeldOut(ids_store, train, Mlm(ids_store), windows=99, masking=masking(ids_store), micro_batch=7).baseline
    assert found["loss"] == pytest.approx(expected)
    assert found["accuracy"] == pytest.approx(np.mean([label == best for label in labels]))
    assert found["perplexity"] == pytest.approx(np.exp(expected))
