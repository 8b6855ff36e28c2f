from operator import attrgetter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from masked_half import read_half
from tiny_store import teacher_says, write_store

from mlsm.common.errors import RunError
from shards.codec import SparseRows
from student.batches import Loader
from student.config import StudentConfig
from student.held_out import MASK_SEED, HeldOut
from student.masks.masking import Masking
from student.objectives import OBJECTIVES
from student.objectives.base import MaskedTokens
from student.objectives.kd import Kd
from student.objectives.mlm import Mlm
from student.objectives.mlsm import Mlsm
from student.objectives.mtl import Mtl
from student.objectives.naive_mlsm import NaiveMlsm
from student.train import term_scales


class FakeStore:
    def __init__(self, k):
        self.k, self.vocab_size, self.kind, self.path = k, k, "lsp" if k else "ids", "store"
        self.report = lambda: {"mass_kept": 1.0}
        self.iter_records = lambda: [SimpleNamespace(statistics={"coded_tokens": 1})]
        self.settings = {}


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
    mlsm, targets = mlsm_targets(sparse_rows(target), k)
    assert targets.counts[0] == (target.sum(axis=1) > 0).sum()
    (loss,) = mlsm.loss_sums(logits, targets)
    expected = dense_kl(target, logits)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4, abs=1e-4)
    if tokens:
        (gradient,) = torch.autograd.grad(loss, logits)
        (by_definition,) = torch.autograd.grad(expected, logits)
        assert torch.allclose(gradient, by_definition.float(), atol=1e-5)


def test_a_perfect_prediction_has_no_loss():
    target = np.array([[0.5, 0.25, 0.25], [0.0, 0.0, 0.0]])
    mlsm, targets = mlsm_targets(sparse_rows(target), 3)
    logits = torch.tensor([[0.5, 0.25, 0.25], [1.0, 2.0, 3.0]]).log()
    assert mlsm.loss_sums(logits, targets).item() == pytest.approx(0, abs=1e-6)


NAMES = list(OBJECTIVES)


@pytest.mark.parametrize(
    ("objective", "wrong", "command"),
    [
        ("mlsm", ["ids", "logits"], "encode-lsp"),
        ("naive-mlsm", ["ids", "logits"], "encode-lsp"),
        ("mtl", ["ids", "logits"], "encode-lsp"),
        ("kd", ["ids", "lsp"], "encode-logits"),
    ],
)
def test_a_store_that_holds_something_else_names_the_command_that_makes_the_right_one(
    ids_store, lsp_store, logits_store, objective, wrong, command
):
    stores = {"ids": ids_store, "lsp": lsp_store, "logits": logits_store}
    for kind in wrong:
        with pytest.raises(RunError, match=f"objective {objective} needs.*{command}") as caught:
            OBJECTIVES[objective](stores[kind])
        assert "\n" not in str(caught.value) and str(stores[kind].path) in str(caught.value)


def test_any_store_will_do_for_mlm(ids_store, lsp_store, logits_store):
    assert {Mlm(store).outputs for store in (ids_store, lsp_store, logits_store)} == {65}


def random_logits(objective, targets, dtype=torch.float32, seed=0):
    per_token = {"mtl": "tokens.labels_M", "mlm": "labels_M"}.get(objective.name, "coded_M")
    tokens = len(attrgetter(per_token)(targets))
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn((tokens, objective.outputs), generator=generator)).to(dtype).requires_grad_()


def dense_bucket_kl(rows, logits_MV, vocabulary):
    """KL over (stored entries, all others together) by the definition, entry by entry, in double precision."""
    total = torch.zeros((), dtype=torch.float64)
    for row, q_V in enumerate(F.softmax(logits_MV.double(), dim=1)):
        mine = slice(rows.indptr[row], rows.indptr[row + 1])
        rest, others = float(rows.tail[row]), torch.ones(len(q_V), dtype=torch.bool)
        if mine.start == mine.stop:
            continue
        for index, weight in zip(rows.indices[mine].tolist(), rows.weights[mine].tolist(), strict=True):
            p = weight * (1 - float(rows.tail[row]))
            if index >= vocabulary:
                rest += p
            else:
                total = total + p * (np.log(p) - q_V[index].log())
                others[index] = False
        if rest > 0:
            total = total + rest * (np.log(rest) - q_V[others].sum().log())
    return total


@st.composite
def teacher_rows(draw, vocabulary=11, head=14):
    """Rows without entries, without tail, with entries behind the vocabulary, full ones but for one token."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dense = rng.random((draw(st.integers(0, 9)), head)) ** 3 * (rng.random(head) < draw(st.floats(0, 1)))
    dense[:, rng.integers(vocabulary)] = 0
    dense[rng.random(len(dense)) < 0.2] = 0
    dense /= np.maximum(dense.sum(axis=1, keepdims=True), 1e-30)
    rows = sparse_rows(dense)
    tail = np.where(rng.random(len(dense)) < 0.5, 0, rng.random(len(dense))).astype(np.float32)
    return SparseRows(rows.indptr, rows.indices, rows.weights, tail)


def mlsm_targets(rows, k):
    mlsm = Mlsm(FakeStore(k))
    nowhere = np.zeros(len(rows.indptr) - 1, int)
    return mlsm, mlsm.read_targets(
        MaskedTokens(FixedRows(rows), SimpleNamespace(ids=np.zeros((1, 1))), nowhere, nowhere)
    )


def kd_targets(rows, vocabulary):
    store = FakeStore(vocabulary)
    store.kind, store.report = "logits", lambda: {"mass_kept": 1.0}
    tokens = len(rows.indptr) - 1
    read = SimpleNamespace(ids=np.zeros((1, max(tokens, 1)), np.int32))
    kd = Kd(store)
    return kd, kd.read_targets(MaskedTokens(FixedRows(rows), read, np.zeros(tokens, int), np.arange(tokens)))


@given(teacher_rows(), st.integers(0, 2**32 - 1))
def test_kd_equals_the_dense_definition_with_its_gradient(rows, seed):
    kd, targets = kd_targets(rows, 11)
    logits = random_logits(kd, targets, seed=seed)
    assert targets.counts[0] == sum(np.diff(rows.indptr) > 0)
    (loss,) = kd.loss_sums(logits, targets)
    expected = dense_bucket_kl(rows, logits, 11)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4, abs=1e-4)
    if expected.requires_grad:
        (gradient,) = torch.autograd.grad(0.5 * loss, logits)
        (by_definition,) = torch.autograd.grad(0.5 * expected, logits)
        assert torch.allclose(gradient, by_definition, atol=1e-5)


def test_kd_of_a_teacher_that_stores_everything_has_no_bucket():
    rows = sparse_rows(np.random.default_rng(0).dirichlet(np.ones(6), 4))
    kd, targets = kd_targets(rows, 6)
    logits = random_logits(kd, targets)
    (loss,) = kd.loss_sums(logits, targets)
    dense = F.kl_div(
        F.log_softmax(logits.double(), dim=1), torch.from_numpy(rows.weights).double().view(4, 6), reduction="sum"
    )
    assert loss.item() == pytest.approx(dense.item(), abs=1e-5)
    (gradient,) = torch.autograd.grad(2 * loss, logits)
    assert torch.allclose(gradient, 2 * torch.autograd.grad(dense, logits)[0], atol=1e-6)


def test_kd_reads_a_store_of_logits(logits_store):
    kd = Kd(logits_store)
    targets, tokens = (read_half(logits_store, objective) for objective in (kd, Mlm(logits_store)))
    assert torch.equal(targets.labels_M, tokens.labels_M) and targets.counts == tokens.counts
    found = torch.zeros(len(targets.tail_M), 65)
    found.view(-1)[targets.entries_E] = targets.weights_E
    expected, tails = torch.zeros_like(found), []
    for row, token in enumerate(tokens.labels_M.tolist()):
        dropped = 0.01 if token % 2 else 0.0
        said = teacher_says(token, 60)
        for index, probability in said.items():
            if index < 65:
                expected[row, index] = probability * (1 - dropped)
        tails.append(1 - float(expected[row].sum()))
    assert torch.allclose(found, expected, atol=0.02)  # stored in 8 bits
    assert torch.allclose(targets.tail_M, torch.tensor(tails), atol=0.02)
    assert torch.allclose(found.sum(dim=1) + targets.tail_M, torch.ones(len(found)), atol=1e-6)


def test_kd_warns_of_a_store_that_keeps_too_little(logits_store, tmp_path, caplog):
    assert Kd(logits_store).facts["mass_kept"] > 0.99 and not caplog.text
    kept = Kd(write_store(tmp_path / "store", k=72, kind="logits", tail=0.2)).facts["mass_kept"]
    assert kept == pytest.approx(0.9, abs=0.02)  # every other row drops a fifth
    assert f"keeps {100 * kept:.1f} %" in caplog.text and "larger --top-n" in caplog.text


def test_mtl_equals_its_two_dense_formulas_each_with_its_own_mean(lsp_store):
    kappa, k, vocabulary = 0.25, 24, 65
    mtl = Mtl(lsp_store, kappa)
    assert mtl.term_weights == (1.0, kappa) and Mtl(lsp_store).term_weights == (
        1.0,
        StudentConfig(objective="mtl").word_weight,
    ) == (1, 1)
    targets, rows = read_half(lsp_store, mtl), read_half(lsp_store, Mlsm(lsp_store))
    coded, tokens = targets.counts
    assert 0 < coded < tokens == len(targets.tokens.labels_M)
    logits = random_logits(mtl, targets)
    loss = mtl.loss_sums(logits, targets) @ torch.tensor(term_scales(mtl.term_weights, targets.counts))
    target = np.zeros((tokens, k))
    target.reshape(-1)[rows.entries_E] = rows.weights_E
    kl = dense_kl(target, logits[:, vocabulary:]) / coded
    cross_entropy = F.nll_loss(F.log_softmax(logits[:, :vocabulary].double(), dim=1), targets.tokens.labels_M)
    expected = kl + kappa * cross_entropy
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
    assert torch.allclose(gradient, torch.autograd.grad(expected, logits)[0], atol=1e-7)
    bare = targets.lsps.coded_M == 0
    assert (gradient[bare, vocabulary:] == 0).all() and (gradient[bare, :vocabulary] != 0).any(dim=1).all()
    sums = {name: value.double() for name, value in mtl.measure(logits.detach(), targets).items()}
    figures = mtl.figures(sums, targets.counts)
    assert figures["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert figures["perplexity"] == pytest.approx(cross_entropy.exp().item(), rel=1e-4)


def test_naive_mlsm_is_mlsm_on_a_slice_and_leaves_the_other_columns_alone(lsp_store):
    naive, mlsm = NaiveMlsm(lsp_store), Mlsm(lsp_store)
    ours, theirs = read_half(lsp_store, naive), read_half(lsp_store, mlsm)
    logits = random_logits(naive, ours)
    slice_MK = logits.detach()[:, 65:].clone().requires_grad_()
    losses = naive.loss_sums(logits, ours), mlsm.loss_sums(slice_MK, theirs)
    assert ours.counts == theirs.counts and torch.equal(*losses)
    (gradient,) = torch.autograd.grad(losses[0], logits)
    assert torch.equal(gradient[:, 65:], torch.autograd.grad(losses[1], slice_MK)[0])
    assert (gradient[:, :65] == 0).all()
    train = lsp_store.split("train")
    assert naive.baseline(train, [ours]) == mlsm.baseline(train, [theirs])


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_logits_are_widened_before_the_arithmetic(store_for, needed_by, name):
    objective = OBJECTIVES[name](store_for(name), **needed_by(name))
    targets = read_half(store_for(name), objective)
    half = random_logits(objective, targets, torch.bfloat16)
    wide = half.detach().float().requires_grad_()
    losses = [objective.loss_sums(logits, targets) for logits in (half, wide)]
    assert losses[0].dtype == torch.float32 and torch.equal(*losses)
    gradients = [torch.autograd.grad(loss.sum(), logits)[0] for loss, logits in zip(losses, (half, wide), strict=True)]
    assert gradients[0].dtype == torch.bfloat16
    assert torch.allclose(gradients[0].float(), gradients[1], rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_micro_batch_without_masked_tokens_adds_nothing(store_for, needed_by, name):
    store = store_for(name)
    objective = OBJECTIVES[name](store, **needed_by(name))
    windows = store.split("train")
    none = np.zeros(0, np.int64)
    targets = objective.read_targets(MaskedTokens(windows, windows.read([3, 4]), none, none))
    assert set(targets.counts) == {0} and len(targets.counts) == len(objective.term_weights)
    logits = torch.zeros((0, objective.outputs), requires_grad=True)
    losses = objective.loss_sums(logits, targets)
    (losses @ torch.tensor(term_scales(objective.term_weights, targets.counts))).backward()
    assert losses.tolist() == [0.0] * len(targets.counts) and logits.grad.shape == logits.shape
    figures = objective.figures(objective.measure(logits.detach(), targets), targets.counts)
    assert figures.pop("perplexity", 1.0) == 1.0 and set(figures.values()) == {0.0}


def test_the_average_of_a_teacher_has_a_bucket_too():
    """Half of the row and nine tenths of the average lie on token 0; the rest is the bucket."""
    rows = SparseRows(np.array([0, 1]), np.array([0], np.int32), np.ones(1, np.float32), np.array([0.5], np.float32))
    kd, targets = kd_targets(rows, 4)
    average = np.array([0.9, 0.05, 0.03, 0.02])
    train = SimpleNamespace(tokens=10**9, store=SimpleNamespace(k=4), mean_distribution=lambda: average)
    expected = 0.5 * np.log(0.5 / 0.9) + 0.5 * np.log(0.5 / 0.1)
    assert kd.baseline(train, [targets])["loss"] == pytest.approx(expected, rel=1e-6)


def test_cross_entropy_equals_torchs_with_its_gradient(ids_store):
    mlm = Mlm(ids_store)
    targets = read_half(ids_store, mlm)
    logits = random_logits(mlm, targets)
    (loss,) = mlm.loss_sums(logits, targets)
    expected = F.cross_entropy(logits.double(), targets.labels_M, reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    (gradient,) = torch.autograd.grad(3 * loss, logits, retain_graph=True)
    assert torch.allclose(gradient, 3 * torch.autograd.grad(expected, logits)[0], atol=1e-6)
    with pytest.raises(RuntimeError, match="modified"):  # what was kept has become the gradient: refused, not wrong
        loss.backward()


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_any_size_have_finite_losses_and_gradients(store_for, needed_by, name):
    objective = OBJECTIVES[name](store_for(name), **needed_by(name))
    targets = read_half(store_for(name), objective)
    logits = random_logits(objective, targets)
    huge = (logits.detach() * 1e4).requires_grad_()
    loss = objective.loss_sums(huge, targets).sum()
    loss.backward()
    assert loss.isfinite() and huge.grad.isfinite().all()


@pytest.mark.parametrize("name", ["mlsm", "kd"])
def test_tokens_without_a_row_add_nothing(name):
    rows = sparse_rows(np.zeros((3, 7)))
    objective, targets = kd_targets(rows, 7) if name == "kd" else mlsm_targets(rows, 7)
    logits = (40 * torch.randn(3, 7)).requires_grad_()
    (loss,) = objective.loss_sums(logits, targets)
    loss.backward()
    assert targets.counts == (0,) and loss.item() == 0 and (logits.grad == 0).all()
    assert objective.measure(logits.detach(), targets)["loss"].item() == 0


def masking(store):
    return Masking(store.special_ids, store.vocab_size, 0.3, rate_end=0.15)  # held-out: the final rate


def masked_tokens(store):
    """(window id, position) of the evaluation's masked tokens, found through the loader's own mask."""
    split = store.split("held_out")
    loader = Loader(split, masking(store), Mlm(store).read_targets, micro_batch=len(split))
    order = split.order(MASK_SEED, 0, 0, len(split))
    (micro,) = loader.load(order, np.zeros(len(order), np.int64), MASK_SEED, 0.15).micro
    window, position = np.divmod(micro.where_M.numpy(), store.max_length)
    return order[window], position


def baseline_of(objective, store):
    loader = Loader(store.split("train"), masking(store), objective.read_targets, micro_batch=7)
    return HeldOut(store, loader, objective, windows=99).baseline


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
    assert baseline_of(Mlsm(lsp_store), lsp_store)["loss"] == pytest.approx(expected, rel=2e-3)


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
    found = baseline_of(Mlm(ids_store), ids_store)
    assert found["loss"] == pytest.approx(expected)
    assert found["accuracy"] == pytest.approx(np.mean([label == best for label in labels]))
    assert found["perplexity"] == pytest.approx(np.exp(expected))


def test_the_teachers_average_equals_an_independent_dense_computation(logits_store):
    train, held_out = logits_store.split("train"), logits_store.split("held_out")
    read = train.read(np.arange(len(train)))
    rows = train.targets(read, *np.nonzero(read.documents >= 0))
    mean = np.bincount(rows.indices, rows.weights, 72) / (np.diff(rows.indptr) > 0).sum()
    window, position = masked_tokens(logits_store)
    masked = held_out.targets(held_out.read(window), np.arange(len(window)), position)
    log_mean = torch.from_numpy(np.log(mean.clip(1e-30))).repeat(len(window), 1)
    expected = dense_bucket_kl(masked, log_mean, 65).item() / len(window)
    found = baseline_of(Kd(logits_store), logits_store)
    assert found["loss"] == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize("objective", ["mlsm", "hard-mlsm", "naive-mlsm", "type", "regress"])
def test_a_store_without_a_single_target_is_refused(objective, tmp_path):
    kind, k = ("hidden", 0) if objective == "regress" else (None, 24)
    store = write_store(tmp_path / "store", k=k, kind=kind, bare=1)  # as of text that is all [UNK]
    with pytest.raises(RunError, match="no token has a target.*Encode other text"):
        OBJECTIVES[objective](store)
