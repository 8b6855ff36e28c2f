"""hard-mlsm: the largest LSP alone. The oracle is torch's cross-entropy to NumPy's arg-max of the dense rows."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from masked_half import read_half
from tiny_store import log_of

from mlsm.commands.train_student import show as training
from shards.codec import SparseRows
from student.config import StudentConfig
from student.objectives.hard_mlsm import HardMlsm
from student.objectives.mlsm import Mlsm
from student.objectives.sparse_rows import temper
from student.train import train

LSPS = 24


def stored_rows(store):
    """The dense distributions of these tokens, float64, as mlsm reads them."""
    targets = read_half(store, Mlsm(store))
    dense_Mk = torch.zeros(len(targets.coded_M), LSPS, dtype=torch.float64)
    dense_Mk.view(-1)[targets.entries_E] = targets.weights_E.double()
    return dense_Mk


def test_loss_gradient_and_figures_are_cross_entropy_to_the_arg_max(lsp_store):
    hard, p_Mk = HardMlsm(lsp_store), stored_rows(lsp_store)
    targets, coded_M = read_half(lsp_store, hard), p_Mk.sum(dim=1) > 0
    labels_C = torch.from_numpy(p_Mk.numpy().argmax(axis=1))[coded_M]
    assert 0 < coded_M.sum() < len(coded_M) and targets.counts == (int(coded_M.sum()),)
    logits = (2 * torch.randn(p_Mk.shape, generator=torch.Generator().manual_seed(0))).requires_grad_()
    (loss,) = hard.loss_sums(logits, targets)
    expected = F.cross_entropy(logits.double()[coded_M], labels_C, reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert torch.allclose(gradient, torch.autograd.grad(expected, logits)[0], atol=1e-5)
    logits = logits.detach()
    figures = hard.figures(hard.measure(logits, targets), targets.counts)
    log_q_Ck, p_Ck = logits.double().log_softmax(dim=1)[coded_M], p_Mk[coded_M]
    kl = (p_Ck * (p_Ck.clamp(min=1e-300).log() - log_q_Ck)).sum(dim=1).mean()
    mean = expected.item() / len(labels_C)
    assert figures == {
        "loss": pytest.approx(mean, rel=1e-5),
        "perplexity": pytest.approx(np.exp(mean), rel=1e-4),
        "accuracy": pytest.approx((log_q_Ck.argmax(dim=1) == labels_C).double().mean().item()),
        "kl_untempered": pytest.approx(kl.item(), rel=1e-4),
    }
    mlsm = Mlsm(lsp_store)
    assert (
        figures["kl_untempered"]
        == mlsm.figures(mlsm.measure(logits, read := read_half(lsp_store, mlsm)), read.counts)["loss"]
    )


def test_of_equal_entries_the_first_is_the_largest():
    weights = np.array([0.4, 0.4, 0.2, 1.0, 0.1, 0.45, 0.45], np.float32)
    rows = SparseRows(np.array([0, 3, 3, 4, 7]), np.arange(7, dtype=np.int32), weights, np.zeros(4, np.float32))
    assert temper(rows, 0.0).tolist() == [1, 0, 0, 1, 0, 1, 0]
    assert temper(SparseRows(np.zeros(3, int), *[np.zeros(0, np.float32)] * 2, np.zeros(2)), 0.0).tolist() == []


def test_the_baseline_is_the_frequencies_of_largest_lsps(lsp_store):
    windows, hard = lsp_store.split("train"), HardMlsm(lsp_store)
    read = windows.read(np.arange(len(windows)))
    rows = windows.targets(read, *np.nonzero(read.documents >= 0))
    counts_k = np.full(LSPS, 1 / LSPS)
    for start, stop in zip(rows.indptr[:-1], rows.indptr[1:], strict=True):
        if stop > start:
            counts_k[rows.indices[start + rows.weights[start:stop].argmax()]] += 1
    p_Mk = stored_rows(lsp_store).numpy()
    labels_C = p_Mk.argmax(axis=1)[p_Mk.sum(axis=1) > 0]
    found = hard.baseline(windows, [read_half(lsp_store, hard)])
    assert found["loss"] == pytest.approx(-np.log(counts_k / counts_k.sum())[labels_C].mean())
    assert found["perplexity"] == pytest.approx(np.exp(found["loss"]))
    assert found["accuracy"] == pytest.approx((labels_C == counts_k.argmax()).mean())
    mlsm = Mlsm(lsp_store)
    usual = mlsm.baseline(windows, [read_half(lsp_store, mlsm)])
    assert found["kl_untempered"] == usual["loss"] and found["kl_untempered_by_position"] == usual["loss_by_position"]


def test_a_run_beats_its_baseline_on_the_batches_of_mlsm(lsp_store, settings, tmp_path):
    settings |= {"store": lsp_store.path, "max_steps": 60, "lr": 5e-3}
    results = {
        name: train(StudentConfig(**settings | {"objective": name, "run_dir": tmp_path / name}))
        for name in ("mlsm", "hard-mlsm")
    }
    hard = results["hard-mlsm"]
    assert hard["improvement"] > 0.05 and hard["held_out"]["accuracy"] > hard["baseline"]["accuracy"]
    lines = {name: log_of(tmp_path / name) for name in results}
    batches = [[line["batch"] for line in log.values()] for log in lines.values()]
    assert batches[0] == batches[1]
    starts = [json.loads((tmp_path / name / "log.jsonl").read_text().splitlines()[0]) for name in results]
    assert starts[0]["initial_encoder"] == starts[1]["initial_encoder"]
    assert results["mlsm"]["held_out"]["loss"] < hard["held_out"]["kl_untempered"], "the soft targets say more"
    text = training(hard, StudentConfig(**settings))
    assert "(most frequent largest LSP: " in text and "train-probe --student" in text
    assert (tmp_path / "hard-mlsm" / "export" / "lsp_head.safetensors").is_file()


def test_no_temperature_and_no_warning_of_mass_that_is_dropped(lsp_store, caplog, monkeypatch):
    with pytest.raises(ValueError, match="--target-temperature.*mlsm, mtl, naive-mlsm, found hard-mlsm"):
        StudentConfig(objective="hard-mlsm", target_temperature=2.0)
    report = lsp_store.report() | {"mass_kept": 0.5}
    monkeypatch.setattr(lsp_store, "report", lambda: report)
    assert HardMlsm(lsp_store).facts == {"mass_kept": 0.5} and not caplog.text
