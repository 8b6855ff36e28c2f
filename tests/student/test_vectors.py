"""regress and recon: a vector at each token. The oracles are float64 formulas over the store's rows."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from masked_half import mask_half
from tiny_store import WIDTH, log_of
from transformers import AutoModel

from mlsm.common.errors import RunError, StoreError
from student.config import StudentConfig
from student.objectives import OBJECTIVES
from student.objectives.recon import Recon
from student.objectives.regress import Regress
from student.objectives.vectors import mean_vectors
from student.train import train


def read_all(store, objective):
    """The masked tokens, with what they were read from."""
    micro, windows = mask_half(store, objective), store.split("held_out")
    read = windows.read(np.arange(len(windows)))
    return micro, read, np.divmod(micro.where_M.numpy(), read.ids.shape[1])


def stored(windows):
    """float64 rows of all tokens of a split that have one, and their ids."""
    read = windows.read(np.arange(len(windows)))
    where = np.nonzero(np.arange(read.ids.shape[1]) < read.lengths[:, None])
    rows = windows.hidden(read, *where)
    return rows.rows_Md[rows.coded_M].astype(np.float64), read.ids[where][rows.coded_M]


def standardised_by_hand(store, rows_Md):
    """(h - mean) / deviation with the moments of all stored training rows; near those of the rows before rounding."""
    train_Nd, _ = stored(store.split("train"))
    return (rows_Md - train_Nd.mean(axis=0)) / train_Nd.std(axis=0)


def logits_for(micro, outputs, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((len(micro.ids_M), outputs), generator=generator).requires_grad_()


@pytest.mark.parametrize("loss", ["cosine", "mse"])
def test_regress_is_the_formula_over_standardised_hidden_states(loss, hidden_store):
    objective = Regress(hidden_store, regress_loss=loss)
    micro, read, where = read_all(hidden_store, objective)
    rows = hidden_store.split("held_out").hidden(read, *where)
    wanted_Md = torch.from_numpy(standardised_by_hand(hidden_store, rows.rows_Md))
    has_row = torch.from_numpy(rows.coded_M)
    assert 0 < has_row.sum() < len(has_row) and micro.targets.counts == (int(has_row.sum()),)
    logits = logits_for(micro, WIDTH)
    if loss == "cosine":
        expected_M = 1 - F.cosine_similarity(logits.double(), wanted_Md, dim=1)
    else:
        expected_M = ((logits.double() - wanted_Md) ** 2).mean(dim=1)
    expected = expected_M[has_row].sum()
    ours = objective.loss_sums(logits, micro.targets)[0]
    assert ours.item() == pytest.approx(expected.item(), rel=5e-3)  # int8: the moments are those before rounding
    (theirs,), (gradient,) = torch.autograd.grad(expected, logits), torch.autograd.grad(ours, logits)
    assert not gradient[~has_row].any()
    assert F.cosine_similarity(gradient.flatten(), theirs.flatten(), dim=0) > 0.9999


def test_recon_is_the_cosine_to_what_the_stored_code_rebuilds(atoms_store):
    objective = Recon(atoms_store)
    micro, read, where = read_all(atoms_store, objective)
    rows = atoms_store.split("held_out").targets(read, *where)
    atoms_Kd = np.load(atoms_store.files.dictionary / "atoms.npy").astype(np.float64)
    logits, expected, coded = logits_for(micro, WIDTH), torch.zeros((), dtype=torch.float64), 0
    for token in range(len(micro.ids_M)):
        entries = slice(rows.indptr[token], rows.indptr[token + 1])
        if entries.start < entries.stop:
            rebuilt_d = rows.weights[entries].astype(np.float64) @ atoms_Kd[rows.indices[entries]]
            cosine = F.cosine_similarity(logits[token].double(), torch.from_numpy(rebuilt_d), dim=0)
            expected, coded = expected + 1 - cosine, coded + 1
    assert 0 < coded < len(micro.ids_M) and micro.targets.counts == (coded,)
    ours = objective.loss_sums(logits, micro.targets)[0]
    assert ours.item() == pytest.approx(expected.item(), rel=1e-5)
    (theirs,), (gradient,) = torch.autograd.grad(expected, logits), torch.autograd.grad(ours, logits)
    torch.testing.assert_close(gradient, theirs, rtol=1e-4, atol=1e-6)


def test_recon_needs_a_dictionary(lsp_store):
    with pytest.raises(StoreError, match="has no dictionary: its target names none"):
        Recon(lsp_store)


def test_regress_refuses_a_store_of_other_targets(lsp_store):
    with pytest.raises(RunError, match=r"needs a store of a teacher's hidden states \(encode-hidden\).*LSP distrib"):
        Regress(lsp_store)


@pytest.mark.parametrize("loss", ["cosine", "mse"])
def test_baselines_are_the_mean_vector_and_the_mean_of_the_type(loss, hidden_store):
    objective = Regress(hidden_store, regress_loss=loss)
    micro, *_ = read_all(hidden_store, objective)
    train_Nd, ids_N = stored(hidden_store.split("train"))
    wanted_Nd = (train_Nd - train_Nd.mean(axis=0)) / train_Nd.std(axis=0)
    if loss == "cosine":
        wanted_Nd /= np.linalg.norm(wanted_Nd, axis=1, keepdims=True)
    mean_d = wanted_Nd.mean(axis=0)
    by_id = {id: wanted_Nd[ids_N == id].mean(axis=0) for id in np.unique(ids_N).tolist()}
    found_d, found_by_id = mean_vectors(hidden_store.split("train"), objective)
    np.testing.assert_allclose(found_d, mean_d, atol=5e-3)
    assert found_by_id.keys() == by_id.keys()
    targets_Md = micro.targets.vectors_Md.double().numpy()
    losses = {"loss": [], "loss_by_type": []}
    for id, target_d in zip(micro.ids_M.tolist(), targets_Md, strict=True):
        if target_d.any():
            for name, constant_d in (("loss", mean_d), ("loss_by_type", by_id.get(id, mean_d))):
                if loss == "mse":
                    losses[name].append(((constant_d - target_d) ** 2).mean())
                else:
                    losses[name].append(1 - constant_d @ target_d / np.linalg.norm(constant_d))
    found = objective.baseline(hidden_store.split("train"), [micro.targets])
    for name, values in losses.items():
        assert found[name] == pytest.approx(np.mean(values), rel=0.02, abs=0.01)
    assert found["loss_by_type"] < 0.6 * found["loss"], "the word decides most of the tiny store's vectors"
    if loss == "mse":
        assert found["loss"] == pytest.approx(1, abs=0.1), "standardised values have a variance of one"
    nothing = micro.targets._replace(
        counts=(0,), **{n: getattr(micro.targets, n)[:0] for n in micro.targets._fields[1:]}
    )
    assert objective.baseline(hidden_store.split("train"), [nothing, micro.targets]) == found


def test_with_kappa_the_words_are_learned_beside_as_in_mlm(hidden_store):
    objective, words = Regress(hidden_store, kappa=0.5), OBJECTIVES["mlm"](hidden_store)
    micro, *_ = read_all(hidden_store, objective)
    logits = logits_for(micro, hidden_store.vocab_size + WIDTH)
    vectors, cross_entropy = objective.loss_sums(logits, micro.targets)
    alone = Regress(hidden_store).loss_sums(logits[:, hidden_store.vocab_size :], micro.targets)
    assert vectors.item() == pytest.approx(alone.item(), rel=1e-6)
    expected = F.cross_entropy(logits[:, : hidden_store.vocab_size].double(), micro.ids_M, reduction="sum")
    assert cross_entropy.item() == pytest.approx(expected.item(), rel=1e-6)
    assert micro.targets.counts == (int(micro.targets.coded_M.sum()), len(micro.ids_M))
    assert objective.term_weights == (1.0, 0.5) and objective.tied and words.tied
    sums = {name: value.item() for name, value in objective.measure(logits, micro.targets).items()}
    found = objective.figures(sums, micro.targets.counts)
    coded, tokens = micro.targets.counts
    assert found["loss"] == pytest.approx(vectors.item() / coded + 0.5 * cross_entropy.item() / tokens)
    losses_TM, carries_TM = objective.token_losses(logits, micro.targets)
    torch.testing.assert_close(losses_TM.sum(dim=1), torch.stack((vectors, cross_entropy)), rtol=1e-5, atol=1e-4)
    assert tuple(map(int, carries_TM.sum(dim=1))) == micro.targets.counts


@pytest.mark.parametrize(
    "change",
    [{"objective": "regress"}, {"objective": "regress", "kappa": 0.3, "regress_loss": "mse"}, {"objective": "recon"}],
)
def test_a_killed_run_resumes_as_an_unbroken_one(change, store_for, settings, tmp_path, train_until_killed):
    settings |= {"store": str(store_for(change["objective"]).path), "max_steps": 30, "lr": 1e-2} | change
    train(StudentConfig(**settings | {"run_dir": tmp_path / "unbroken"}))
    config = StudentConfig(**settings)
    train_until_killed(config, 16)
    result = train(config)
    ours, theirs = log_of(config.run_dir), log_of(tmp_path / "unbroken")
    assert [line["loss"] for line in ours.values()] == [line["loss"] for line in theirs.values()]
    assert result["held_out_loss"] < result["baseline_loss"]
    assert result["improvement_by_type"] == pytest.approx(1 - result["held_out_loss"] / result["baseline_loss_by_type"])
    export = config.run_dir / "export"
    assert AutoModel.from_pretrained(export).config.hidden_size == 32
    card = (export / "README.md").read_text()
    assert "constant for each token id" in card and "nats" not in card.partition("## How it was made")[0]
    assert json.loads((export / "lineage.json").read_text())["objective"] == change["objective"]


def test_runs_are_named_by_loss_and_kappa():
    plain = StudentConfig(objective="regress").identity()
    assert not {"kappa", "regress_loss"} & plain.keys()
    assert StudentConfig(objective="regress", kappa=0.0).identity() == plain
    assert StudentConfig(objective="regress", kappa=0.5).identity()["kappa"] == 0.5
    assert StudentConfig(objective="regress", regress_loss="mse").identity()["regress_loss"] == "mse"
    assert StudentConfig(objective="mtl").identity()["kappa"] == 1.0
    with pytest.raises(ValueError, match="--regress-loss mse is only for --objective regress, found mlsm"):
        StudentConfig(regress_loss="mse")
    with pytest.raises(ValueError, match="--kappa would teach to copy the input"):
        StudentConfig(objective="regress", positions="all", kappa=1.0)
    with pytest.raises(ValueError, match="--kappa must be a positive number"):
        StudentConfig(objective="mtl", kappa=0.0)
    with pytest.raises(ValueError, match="--kappa must be 0 or more"):
        StudentConfig(objective="regress", kappa=-1.0)
