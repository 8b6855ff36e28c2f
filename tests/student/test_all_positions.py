"""--positions all: every token that is not special is predicted, and none is hidden."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_exports import LINEAGE
from tiny_store import log_of
from transformers import AutoModel, AutoTokenizer

from mlsm.commands import train_student
from shards.reader import Store
from student.batches import Loader
from student.config import ProbeConfig, StudentConfig
from student.encoders.flops import step_flops
from student.encoders.model import build_student
from student.lsp_model import LspModel
from student.masks.masking import build_masking
from student.objectives import OBJECTIVES
from student.probe import train_probe
from student.resolve import resolve
from student.runs.export import export_student
from student.train import train


def resolved(store, **settings):
    return resolve(StudentConfig(store=str(store.path), device="cpu", **settings), store).config


def load_one(store, config, objective):
    windows = store.split("train")
    loader = Loader(windows, build_masking(config, store), objective.read_targets, micro_batch=99)
    return windows, loader.step(config.seed, 0, 20).micro[0]


STORED = ("mlsm", "kd", "hard-mlsm", "naive-mlsm", "regress", "recon")  # learn stored targets alone, token by token


@pytest.mark.parametrize("objective", STORED)
def test_the_text_is_read_whole_and_every_ordinary_token_is_predicted(objective, store_for):
    store = Store.open(store_for(objective).path)
    config = resolved(store, encoder="bert-2x32", objective=objective, positions="all")
    windows, micro = load_one(store, config, OBJECTIVES[objective](store))
    ids_W, _ = windows.stream(config.seed, 0, 20)
    read = windows.read(ids_W)
    assert np.array_equal(micro.input_WL.numpy(), read.ids)
    expected = [
        row * read.ids.shape[1] + column
        for row, length in enumerate(read.lengths)
        for column in range(length)
        if read.ids[row, column] not in store.special_ids["all"]
    ]
    assert micro.where_M.tolist() == expected
    model = build_student(replace(config, dropout=0.0), store, OBJECTIVES[objective](store))
    logits_MK = model(micro.input_WL, micro.attention_WL, micro.where_M, most_masked=micro.most_masked)
    assert logits_MK.shape == (len(expected), OBJECTIVES[objective](store).outputs)


def test_the_loss_is_the_mean_kl_over_all_tokens_with_a_code(lsp_store):
    store = Store.open(lsp_store.path)
    config = resolved(store, encoder="bert-2x32", positions="all", dropout=0.0)
    objective = OBJECTIVES["mlsm"](store)
    windows, micro = load_one(store, config, objective)
    model = build_student(config, store, objective).eval()
    hidden = model.encoder(input_ids=micro.input_WL, attention_mask=micro.attention_WL).last_hidden_state
    states = model.head(hidden.flatten(0, 1)[micro.where_M])
    log_q_Mk = F.log_softmax((states @ model.output_matrix.T + model.output_bias_K).double(), dim=1)
    ids_W, _ = windows.stream(config.seed, 0, 20)
    read = windows.read(ids_W)
    row_M, column_M = np.divmod(micro.where_M.numpy(), read.ids.shape[1])
    rows = windows.targets(read, row_M, column_M)
    losses = []
    for token in range(len(row_M)):
        entries = slice(rows.indptr[token], rows.indptr[token + 1])
        weights = torch.from_numpy(np.asarray(rows.weights[entries], dtype=np.float64))
        if len(weights):
            log_q = log_q_Mk.detach()[token, torch.from_numpy(rows.indices[entries].astype(np.int64))]
            losses.append(float((weights * (weights.log() - log_q)).sum()))
    logits_MK = model(micro.input_WL, micro.attention_WL, micro.where_M, most_masked=micro.most_masked)
    ours = float(objective.loss_sums(logits_MK, micro.targets)[0]) / micro.targets.counts[0]
    assert ours == pytest.approx(np.mean(losses), rel=1e-5)


def test_a_killed_run_resumes_as_an_unbroken_one(lsp_store, settings, tmp_path, train_until_killed):
    settings |= {"store": str(lsp_store.path), "positions": "all"}
    train(StudentConfig(**settings | {"run_dir": tmp_path / "unbroken"}))
    config = StudentConfig(**settings)
    train_until_killed(config, 5)
    result = train(config)
    ours, theirs = log_of(config.run_dir), log_of(tmp_path / "unbroken")
    assert [line["loss"] for line in ours.values()] == [line["loss"] for line in theirs.values()]
    assert not any("mask_rate" in line for line in ours.values())
    assert result["held_out_loss"] < result["baseline_loss"] + 1


def test_a_step_costs_the_head_at_all_positions(lsp_store):
    masked, everywhere = (resolved(lsp_store, encoder="bert-2x32", positions=name) for name in ("masked", "all"))
    model = build_student(masked, lsp_store, OBJECTIVES["mlsm"](lsp_store))
    assert step_flops(model, everywhere, 10) > 1.2 * step_flops(model, masked, 10)


def test_what_would_be_copied_or_has_no_effect_is_refused():
    for objective in OBJECTIVES.keys() - {*STORED, "supersense"}:  # which needs WordNet
        with pytest.raises(ValueError, match=f"{objective} would learn to copy its input"):
            StudentConfig(objective=objective, positions="all")
    for setting in ({"mask_rate": 0.3}, {"mask_unit": "word"}, {"corruption": "80-10-10"}, {"mask_weights": "pmi"}):
        flag = f"--{next(iter(setting)).replace('_', '-')}"
        with pytest.raises(ValueError, match=f"^{flag} sets how tokens are hidden, but --positions all hides none"):
            StudentConfig(positions="all", **setting)


def test_runs_at_masked_positions_keep_their_names():
    assert "positions" not in StudentConfig().identity()
    assert StudentConfig(positions="all").identity()["positions"] == "all"


@pytest.fixture(scope="module")
def trained(lsp_store, tmp_path_factory):
    """Settings and result of a short run for each choice of positions."""
    place = tmp_path_factory.mktemp("trained")
    runs = {}
    for name in ("masked", "all"):
        config = StudentConfig(
            store=str(lsp_store.path),
            run_dir=place / name,
            encoder="bert-2x32",
            positions=name,
            max_steps=20,
            device="cpu",
        )
        runs[name] = config, train(config)
    return runs


@pytest.mark.parametrize(("positions", "reading"), [("masked", "each"), ("all", "none")])
def test_a_student_reads_a_text_as_it_was_trained(positions, reading, trained):
    export, text = trained[positions][1]["export"], "w1 w2 w3 w4"
    model = LspModel.from_pretrained(export)
    found = {name: model.lsp([text], masking=name)[0].distributions_Tk for name in (None, "each", "none")}
    other = ({"each", "none"} - {reading}).pop()
    assert torch.equal(found[None], found[reading]) and not torch.allclose(found[None], found[other], atol=1e-4)
    alone = AutoModel.from_pretrained(export, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(export)
    for words in (text, "w5", ""):
        tokens, distributions_Tk = alone.lsp(words, tokenizer)
        (ours,) = model.lsp([words])
        assert tokens == ours.tokens and torch.allclose(distributions_Tk, ours.distributions_Tk, atol=1e-6)


def test_what_is_said_of_a_student_of_all_tokens_does_not_mask(trained, tmp_path, lsp_store, caplog):
    card, printed = {}, {}
    for name, (config, result) in trained.items():
        card[name] = Path(result["export"], "README.md").read_text(encoding="utf-8")
        printed[name] = train_student.show(result, config)
    for words in ("(LSPs) of masked tokens", "Each token is masked in turn"):
        assert words in card["masked"] and words not in card["all"]
    assert "(LSPs) of all tokens of unmasked text" in card["all"]
    for words in ("train-probe", "In [MASK] 1995"):
        assert words in printed["masked"] and words not in printed["all"]
    assert "In 1995" in printed["all"]
    probe = {"store": str(lsp_store.path), "max_steps": 1, "device": "cpu"}
    for name, (_, result) in trained.items():
        caplog.clear()
        train_probe(ProbeConfig(student=result["run"], run_dir=tmp_path / f"probe-{name}", **probe))
        assert ("which it never saw" in caplog.text) == (name == "all")


def test_a_student_of_words_that_were_never_masked_is_not_offered_to_fill_masks(store_for, tmp_path):
    store = Store.open(store_for("kd").path)
    objective = OBJECTIVES["kd"](store)
    model = build_student(resolved(store, encoder="bert-2x32", objective="kd"), store, objective)
    for positions in ("masked", "all"):
        place = tmp_path / positions
        place.mkdir()
        export_student(model, place, objective, store, LINEAGE | {"settings": {"positions": positions}})
        assert ("fill-mask" in (place / "README.md").read_text(encoding="utf-8")) == (positions == "masked")
