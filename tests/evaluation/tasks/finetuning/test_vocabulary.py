"""A part of the vocabulary's embeddings gives the same scores and weights as all of them."""

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_families import tiny_model
from transformers import AutoTokenizer

from mlsm.evaluation import records
from mlsm.evaluation.tasks.finetuning import training, trials
from mlsm.evaluation.tasks.finetuning.config import FinetuneConfig
from mlsm.evaluation.tasks.finetuning.heads import Backbone, PartialEmbedding
from mlsm.evaluation.tasks.finetuning.suite import finetune

FAMILIES = ("bert", "deberta", "deberta-v2", "distilbert", "electra", "modernbert", "roberta")


@pytest.fixture
def settings(teacher_directory, miniatures, tmp_path):
    """One model, one task, one seed."""
    return FinetuneConfig(
        models=(str(teacher_directory),), tasks=("mrpc",), seeds=1, data_dir=miniatures, output=tmp_path / "out",
        epochs=1, lr=1e-3, batch=16, device="cpu",
    )  # fmt: skip


def trained(settings, monkeypatch, whole=False):
    """The record of a training, its model, and the logits of the model for every batch that was scored. `whole` trains
    all rows of the table."""
    models, logits = [], []
    predict = training.predict

    def watch(model, encoded, task):
        models.append(model)
        model.register_forward_hook(lambda module, given, output: logits.append(output.logits.clone()))
        return predict(model, encoded, task)

    with monkeypatch.context() as patch:
        patch.setattr(training, "predict", watch)
        if whole:
            patch.setattr(Backbone, "keep_rows", lambda self, *used: None)
        finetune(settings)
    (record,) = records.read([settings.output / "evaluations"])
    return record, models[0], logits


def family_directory(family, teacher_directory, directory):
    """A tiny model that reads the tiny teacher's tokens."""
    tokenizer = AutoTokenizer.from_pretrained(teacher_directory)
    sizes = {"vocab_size": 600, "max_position_embeddings": 60, "pad_token_id": tokenizer.pad_token_id}
    sizes |= {"type_vocab_size": 1} if family == "roberta" else {}
    tiny_model(family, "masked-lm", **sizes).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_scores_are_those_of_the_whole_vocabulary(
    settings, teacher_directory, tmp_path, monkeypatch, family
):
    """To the last bit on a CPU, with dropout, weight decay and pairs of sentences, for any family."""
    directory = family_directory(family, teacher_directory, tmp_path / family)
    settings = replace(settings, models=(str(directory),), segments="always", max_length=32)
    whole, expected, logits = trained(settings, monkeypatch, whole=True)
    partial = replace(settings, output=tmp_path / "partial")
    record, model, ours = trained(partial, monkeypatch)
    assert record["figures"] == whole["figures"] and record["settings"] == whole["settings"]
    assert logits and all(torch.equal(a, b) for a, b in zip(logits, ours, strict=True))
    table, all_rows = model.get_input_embeddings(), expected.get_input_embeddings().weight
    assert torch.equal(table.weight, all_rows[table.ids_R])
    others = dict(expected.named_parameters())
    for name, weight in model.named_parameters():
        assert weight is table.weight or torch.equal(weight, others[name]), name
    assert record["cost"]["embedding_rows"] == len(table.weight) < whole["cost"]["embedding_rows"] == 600


def test_rows_that_are_left_out_would_have_been_decayed_and_nothing_else(settings, tmp_path, monkeypatch):
    before = Backbone(settings.models[0]).encoder.get_input_embeddings().weight
    _, whole, _ = trained(settings, monkeypatch, whole=True)
    partial = replace(settings, output=tmp_path / "partial")
    _, model, _ = trained(partial, monkeypatch)
    left_out = torch.ones(600, dtype=torch.bool)
    left_out[model.get_input_embeddings().ids_R] = False
    decay = math.prod(1 - settings.lr * (1 - step / 4) * training.WEIGHT_DECAY for step in range(4))
    torch.testing.assert_close(whole.get_input_embeddings().weight[left_out], decay * before[left_out])


def test_the_rows_are_those_of_all_texts_that_are_read_and_of_special_tokens(settings, teacher_directory, monkeypatch):
    """MNLI's two development sets among them, cut as the model reads them."""
    settings = replace(settings, tasks=("mnli",), limit_train=8, max_length=16)
    read = []
    tokenise = trials.tokenise
    monkeypatch.setattr(trials, "tokenise", lambda *given, **named: read.append(tokenise(*given, **named)) or read[-1])
    _, model, _ = trained(settings, monkeypatch)
    special = set(AutoTokenizer.from_pretrained(teacher_directory).all_special_ids)
    assert len(read) == 3 and special
    used = special.union(*(part.ids_T.tolist() for part in read))
    assert model.get_input_embeddings().ids_R.tolist() == sorted(used)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="what is mapped into memory is asked of Linux")
def test_the_file_of_the_whole_vocabulary_leaves_memory(teacher_directory, tmp_path):
    directory = shutil.copytree(teacher_directory, tmp_path / "teacher")  # which no other test has read

    def is_mapped():
        return str(directory) in Path("/proc/self/maps").read_text(encoding="utf-8")

    backbone = Backbone(directory)
    assert is_mapped()
    backbone.keep_rows([3, 5])
    assert not is_mapped()


def test_a_token_without_a_row_is_an_error_not_another_token():
    whole = torch.nn.Embedding(10, 4, padding_idx=1)
    partial = PartialEmbedding(whole, torch.tensor([1, 4, 9]))
    ids = torch.tensor([[9, 1], [4, 4]])
    assert torch.equal(partial(ids), whole(ids))
    partial(ids).sum().backward()
    assert partial.weight.grad.tolist() == [[0.0] * 4, [2.0] * 4, [1.0] * 4]  # none for the padding
    with pytest.raises(IndexError):
        partial(torch.tensor([3]))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux forgets a peak")
def test_the_cost_of_a_training_is_in_its_record(settings, monkeypatch):
    """Measured from its own beginning, not from that of the process."""
    record, *_ = trained(settings, monkeypatch)
    ballast = torch.ones(100 * 2**20)  # 400 MiB
    heavy, *_ = trained(replace(settings, overwrite="always"), monkeypatch)
    del ballast
    light, *_ = trained(replace(settings, overwrite="always"), monkeypatch)
    assert 0 < record["cost"]["step_seconds"] < record["wall"]
    assert heavy["cost"]["peak_memory_bytes"] - light["cost"]["peak_memory_bytes"] > 200 * 2**20


def test_an_encoder_that_uses_its_table_twice_keeps_all_of_it(teacher_directory):
    backbone = Backbone(teacher_directory)
    backbone.encoder.decoder = torch.nn.Linear(32, 600)
    backbone.encoder.decoder.weight = backbone.encoder.get_input_embeddings().weight
    backbone.keep_rows([1, 2])
    assert type(backbone.encoder.get_input_embeddings()) is torch.nn.Embedding
