"""The output layer of V + k columns, tied to the token embedding. The oracle is what the official code does."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tiny_exports import ATTENTION, IDS, WHERE, exported, scrambled
from tiny_store import log_of
from transformers import AutoModelForMaskedLM

from mlsm.common.errors import RunError
from student.config import StudentConfig
from student.encoders.build import weights_fingerprint
from student.encoders.model import build_student
from student.encoders.stock import has_known_head, masked_lm
from student.lsp_model import LspModel
from student.objectives.mlsm import Mlsm
from student.objectives.mtl import Mtl
from student.objectives.naive_mlsm import NaiveMlsm
from student.runs.config import ExportConfig
from student.runs.export_run import export_run
from student.train import train

VOCABULARY, LSPS = 65, 24


class Stopped(Exception):
    pass


def stop_after(last):
    def progress(*args, step=0, **figures):
        if step == last:
            raise Stopped

    return progress


def officially_tied(student):
    """The family's *ForMaskedLM after resize_token_embeddings(V + k), as in the official code, with our weights."""
    stock = masked_lm(student, None, student.output_bias_K[:VOCABULARY])
    stock.resize_token_embeddings(VOCABULARY + LSPS, mean_resizing=False)
    assert stock.get_output_embeddings().weight is stock.get_input_embeddings().weight
    with torch.no_grad():
        stock.get_input_embeddings().weight[VOCABULARY:] = student.output_Kd
        stock.get_output_embeddings().bias.copy_(student.output_bias_K)
    return stock


def losses(logits_MK, objective):
    """KL to a dense random distribution over the LSPs; of mtl, cross-entropy to the tokens too."""
    target_Mk = torch.rand(len(logits_MK), LSPS, generator=torch.Generator().manual_seed(1)).softmax(dim=1)
    kl = F.kl_div(logits_MK[:, VOCABULARY:].log_softmax(dim=1), target_Mk, reduction="batchmean")
    labels_M = IDS.flatten()[WHERE]
    return kl + (F.cross_entropy(logits_MK[:, :VOCABULARY], labels_M) if objective.name == "mtl" else 0.0)


@pytest.mark.parametrize("objective", [Mtl, NaiveMlsm])
def test_loss_and_gradients_are_those_of_resized_tied_embeddings(objective, family, lsp_store):
    objective = objective(lsp_store)
    student = scrambled(build_student(StudentConfig(encoder=str(family), dropout=0.0), lsp_store, objective))
    assert has_known_head(student.encoder.config)
    stock = officially_tied(student)
    hidden_WLK = stock(input_ids=IDS, attention_mask=ATTENTION).logits
    theirs = losses(hidden_WLK.flatten(0, 1)[WHERE], objective)
    ours = losses(student(IDS, ATTENTION, WHERE), objective)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    ours.backward()
    theirs.backward()
    embedding = stock.get_input_embeddings().weight.grad
    close = {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(student.encoder.get_input_embeddings().weight.grad, embedding[:VOCABULARY], **close)
    torch.testing.assert_close(student.output_Kd.grad, embedding[VOCABULARY:], **close)
    torch.testing.assert_close(student.output_bias_K.grad, stock.get_output_embeddings().bias.grad, **close)
    rest = dict(stock.base_model.named_parameters())
    for name, weight in student.encoder.named_parameters():
        if weight is not student.encoder.get_input_embeddings().weight:
            torch.testing.assert_close(weight.grad, rest[name].grad, **close)


def test_as_many_parameters_as_the_official_model(lsp_store):
    student = build_student(StudentConfig(encoder="bert-2x32"), lsp_store, Mtl(lsp_store))
    official = officially_tied(student)
    assert sum(map(torch.numel, student.parameters())) == sum(map(torch.numel, official.parameters()))
    untied = build_student(StudentConfig(encoder="bert-2x32"), lsp_store, Mtl(lsp_store, untied=True))
    assert sum(map(torch.numel, untied.parameters())) - sum(map(torch.numel, student.parameters())) == VOCABULARY * 32


def test_encoder_and_lsp_rows_begin_alike(lsp_store):
    models = [
        build_student(StudentConfig(encoder="bert-2x32"), lsp_store, objective)
        for objective in (Mtl(lsp_store), NaiveMlsm(lsp_store), Mlsm(lsp_store))
    ]
    mtl, naive, mlsm = models
    assert len({weights_fingerprint(model.encoder) for model in models}) == 1
    assert torch.equal(mtl.output_Kd, naive.output_Kd) and mtl.output_Kd.shape == (LSPS, 32)
    assert torch.equal(mtl.output_Kd, mlsm.output_Kd)
    whole = torch.cat((mtl.encoder.get_input_embeddings().weight, mtl.output_Kd))
    assert torch.equal(mtl.output_matrix, whole) and mtl.output_bias_K.shape == (VOCABULARY + LSPS,)


def test_an_mtl_export_is_tied_and_has_the_lsps(family, lsp_store, tmp_path):
    objective = Mtl(lsp_store)
    student, export = exported(family, objective, lsp_store, tmp_path / "export")
    stock, info = AutoModelForMaskedLM.from_pretrained(export, output_loading_info=True)
    assert not info["missing_keys"] and len(stock.get_input_embeddings().weight) == VOCABULARY
    assert stock.get_output_embeddings().weight is stock.get_input_embeddings().weight
    expected = student(IDS, ATTENTION, WHERE)
    theirs = stock(input_ids=IDS, attention_mask=ATTENTION).logits.flatten(0, 1)[WHERE]
    assert torch.allclose(theirs, expected[:, objective.token_columns], atol=1e-5)
    lsps = LspModel.from_pretrained(export)(IDS, ATTENTION).flatten(0, 1)[WHERE]
    assert torch.allclose(lsps, expected[:, objective.lsp_columns], atol=1e-5)


@pytest.mark.parametrize("untied", [False, True])
@pytest.mark.parametrize("objective", ["mlm", "kd", "mtl", "naive-mlsm"])
def test_an_unfinished_run_resumes_and_exports_tied_or_not(objective, untied, store_for, settings, tmp_path):
    settings |= {"store": store_for(objective).path, "objective": objective}
    settings |= {"untied": untied, "checkpoints": (1.0,)}
    train(StudentConfig(**settings | {"run_dir": tmp_path / "unbroken"}))
    config = StudentConfig(**settings)
    with pytest.raises(Stopped):
        train(config, stop_after(4))
    assert export_run(ExportConfig(run=config.run_dir, output=tmp_path / "out"))["step"] == 3
    weights = load_file(config.run_dir / "checkpoints" / "step-00000003" / "resume" / "student.safetensors")
    own_rows = LSPS * (objective not in ("mlm", "kd")) + untied * VOCABULARY
    assert len(weights.get("output_Kd", ())) == own_rows
    if objective in ("mlm", "kd"):
        stock = AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
        assert torch.equal(stock.get_output_embeddings().weight, stock.get_input_embeddings().weight) != untied
        if untied:
            assert torch.equal(stock.get_output_embeddings().weight, weights["output_Kd"])
    else:
        lsps = load_file(tmp_path / "out" / "lsp_head.safetensors")["output.weight"]
        assert torch.equal(lsps, weights["output_Kd"][-LSPS:])
    steps = []
    train(config, lambda *args, step=0, **figures: steps.append(step))
    assert steps[0] == 3
    ours, theirs = (log_of(run) for run in (config.run_dir, tmp_path / "unbroken"))
    assert [line["loss"] for line in ours.values()] == [line["loss"] for line in theirs.values()]


def test_only_the_unusual_output_matrix_is_in_the_identity():
    for objective in ("mtl", "naive-mlsm"):
        tied, untied = (StudentConfig(objective=objective, untied=untied).identity() for untied in (False, True))
        assert tied == untied | {"tied": True} and "tied" not in untied and "untied" not in untied
    for objective in ("mlm", "kd"):
        tied, untied = (StudentConfig(objective=objective, untied=untied).identity() for untied in (False, True))
        assert untied == tied | {"untied": True} and not {"tied", "untied"} & tied.keys()
    with pytest.raises(ValueError, match=r"--untied is only for objectives with an output for every token \(mlm, kd,"):
        StudentConfig(untied=True)


def test_a_run_that_was_asked_to_be_untied_is_no_earlier_one(lsp_store, settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings |= {"store": lsp_store.path, "objective": "mtl", "run_dir": None}
    with pytest.raises(Stopped):
        train(StudentConfig(**settings | {"untied": True}), stop_after(4))
    tied = train(StudentConfig(**settings))
    with pytest.raises(RunError, match=r"tied \(there True, now not set\)"):
        train(StudentConfig(**settings | {"untied": True, "run_dir": tied["run"]}))
