"""Heads come from the bank, encoders from the checkpoint, and all random weights are recorded."""

import pytest
import torch
from safetensors.torch import load_file
from tiny_families import edit_weights, tiny_model, windows
from transformers import AutoModel, AutoModelForSequenceClassification

from mlsm.common.errors import ModelError, TeacherError
from mlsm.evaluation.tasks.finetuning.heads import Backbone
from mlsm.evaluation.tasks.finetuning.tasks import TASKS

pytestmark = pytest.mark.promise("a checkpoint of which …")

FAMILIES = ("bert", "deberta", "deberta-v2", "distilbert", "electra", "modernbert", "roberta", "xlm-roberta")


def head_of(model):
    prefix = f"{model.base_model_prefix}."
    return {
        name: weight.clone()
        for name, weight in model.state_dict().items()
        if not name.startswith(prefix) or ".pooler." in name
    }


def saved(family, directory, layout="bare", **settings):
    tiny_model(family, layout, **settings).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("layout", ["bare", "masked-lm"])
@pytest.mark.parametrize("family", FAMILIES)
def test_encoder_of_the_checkpoint_head_of_the_bank(tmp_path, family, layout):
    backbone = Backbone(saved(family, tmp_path / "model", layout))
    ids, attention = windows()[1]
    whole = AutoModel.from_pretrained(tmp_path / "model").eval()
    expected = whole(ids, attention.long())[0]
    for name in ("rte", "conll2003"):
        model, digest = backbone.with_head(TASKS[name], 0, tmp_path / "heads")
        model.eval()
        hidden = model.base_model(ids, attention.long())[0]
        torch.testing.assert_close(hidden[attention], expected[attention], rtol=1e-4, atol=1e-5)
        (file,) = (tmp_path / "heads").glob(f"{name}-seed0-*.safetensors")
        bank, head = load_file(file), head_of(model)
        assert bank.keys() == head.keys() and all(torch.equal(bank[key], head[key]) for key in bank)
        assert model(ids, attention.long()).logits.shape[-1] == TASKS[name].outputs
        assert len(digest) == 64


def test_models_that_differ_in_all_else_have_equal_heads(tmp_path):
    small, deep = (Backbone(saved("bert", tmp_path / str(n), num_hidden_layers=n)) for n in (1, 3))
    torch.manual_seed(5)
    heads = {}
    for seed in (0, 1):
        pairs = [backbone.with_head(TASKS["mrpc"], seed, tmp_path / "heads") for backbone in (small, deep)]
        first, second = (head_of(model) for model, _ in pairs)
        assert pairs[0][1] == pairs[1][1] and all(torch.equal(first[name], second[name]) for name in first)
        heads[seed] = first["classifier.weight"]
        torch.manual_seed(seed + 77)
    assert not torch.equal(heads[0], heads[1])
    other, _ = small.with_head(TASKS["rte"], 0, tmp_path / "heads")
    assert not torch.equal(other.classifier.weight, heads[0])
    assert heads[0].std().item() == pytest.approx(0.02, rel=0.35)


def test_the_random_state_stays(tmp_path):
    backbone = Backbone(saved("bert", tmp_path / "model"))
    torch.manual_seed(3)
    before = torch.get_rng_state()
    backbone.with_head(TASKS["mrpc"], 0, tmp_path / "heads")
    assert torch.equal(before, torch.get_rng_state())


def test_heads_do_not_follow_the_callers_default_type(tmp_path):
    backbone = Backbone(saved("bert", tmp_path / "model"))
    _, digest = backbone.with_head(TASKS["mrpc"], 0, tmp_path / "heads")
    torch.set_default_dtype(torch.float64)
    try:
        assert backbone.with_head(TASKS["mrpc"], 0, tmp_path / "others")[1] == digest
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_pooler_in_the_checkpoint_is_replaced_by_the_banks(tmp_path):
    stock = saved("bert", tmp_path / "stock")
    assert any("pooler" in name for name in load_file(stock / "model.safetensors"))
    bare = saved("bert", tmp_path / "bare")
    edit_weights(bare, lambda weights: {name: w for name, w in weights.items() if "pooler" not in name})
    digests = {Backbone(directory).with_head(TASKS["rte"], 0, tmp_path / "heads")[1] for directory in (stock, bare)}
    assert len(digests) == 1


def test_the_head_is_that_of_the_bank_even_if_the_bank_was_made_elsewhere(tmp_path):
    backbone = Backbone(saved("bert", tmp_path / "model"))
    _, first = backbone.with_head(TASKS["rte"], 0, tmp_path / "heads")
    (file,) = (tmp_path / "heads").iterdir()
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="Delete it and run again"):
        backbone.with_head(TASKS["rte"], 0, tmp_path / "heads")
    file.unlink()
    assert backbone.with_head(TASKS["rte"], 0, tmp_path / "heads")[1] == first


@pytest.mark.parametrize("layout", ["bare", "masked-lm"])
def test_a_missing_encoder_weight_is_an_error(tmp_path, layout):
    directory = saved("bert", tmp_path / "model", layout)

    def without_one(weights):
        return {name: weight for name, weight in weights.items() if "layer.2.output.dense.weight" not in name}

    edit_weights(directory, without_one)
    with pytest.raises(TeacherError, match="lacks 1 weights"):
        Backbone(directory)


def test_directories_that_hold_no_model(tmp_path):
    with pytest.raises(ModelError, match="no config.json.*export-student"):
        Backbone(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "clip"}')
    with pytest.raises(ModelError, match="have no classifier"):
        Backbone(tmp_path)


@pytest.mark.parametrize("family", ["bert", "deberta"])
def test_the_model_computes_what_transformers_computes(tmp_path, family):
    directory = saved(family, tmp_path / "model")
    model, _ = Backbone(directory).with_head(TASKS["mnli"], 0, tmp_path / "heads")
    model.eval().save_pretrained(tmp_path / "whole")
    stock = AutoModelForSequenceClassification.from_pretrained(tmp_path / "whole").eval()
    ids, attention = windows()[1]
    torch.testing.assert_close(
        model(ids, attention.long()).logits, stock(ids, attention.long()).logits, rtol=1e-4, atol=1e-5
    )


def test_a_model_that_transformers_would_compute_as_another_is_refused(tmp_path):
    directory = saved("bert", tmp_path / "model", position_embedding_type="relative_key")
    with pytest.raises(TeacherError, match="position_embedding_type 'relative_key'"):
        Backbone(directory)
    saved("bert", tmp_path / "other")
    edit_weights(tmp_path / "other", lambda weights: weights | {"embeddings.scale": torch.ones(2)})
    with pytest.raises(TeacherError, match=r"no place for \(embeddings.scale\)"):
        Backbone(tmp_path / "other")
