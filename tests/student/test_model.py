import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_store import write_tokenizer
from transformers import BertConfig, GPT2Config

from mlsm.common.errors import RunError
from student.config import StudentConfig
from student.encoders.build import build_encoder, encoder_config, weights_fingerprint
from student.encoders.model import Student, build_student
from student.objectives.mlm import Mlm
from student.objectives.mlsm import Mlsm

pytestmark = pytest.mark.promise("a checkpoint of which …")

TINY_BERT = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)


def settings_for(encoder, **changes):
    return StudentConfig(encoder=str(encoder), **changes)


def test_padding_changes_nothing_in_any_family(family, ids_store):
    model = build_student(settings_for(family), ids_store, Mlm(ids_store)).eval()
    ids = torch.randint(5, 60, (2, 12))
    padded = torch.nn.functional.pad(ids, (0, 4), value=ids_store.special_ids["pad"])
    attention = (torch.arange(16) < 12).long().expand(2, 16)
    alone = model(ids, None, torch.tensor([3, 12 + 5]))
    among = model(padded, attention, torch.tensor([3, 16 + 5]))
    assert alone.shape == (2, ids_store.vocab_size)
    assert torch.allclose(alone, among, atol=1e-5)


def test_every_weight_gets_a_gradient(family, lsp_store):
    for objective in (Mlsm(lsp_store), Mlm(lsp_store)):
        model = build_student(settings_for(family), lsp_store, objective)
        model(torch.randint(5, 60, (2, 16)), None, torch.arange(6)).sum().backward()
        assert [name for name, weight in model.named_parameters() if weight.grad is None] == []


def test_only_masked_positions_go_through_the_head(lsp_store):
    model = build_student(settings_for("bert-2x32"), lsp_store, Mlsm(lsp_store)).eval()
    rows = []
    model.head.register_forward_hook(lambda module, inputs, output: rows.append(len(output)))
    ids, where = torch.randint(5, 60, (2, 16)), torch.tensor([1, 7, 20])
    logits = model(ids, None, where)
    hidden = model.encoder(ids).last_hidden_state.flatten(0, 1)
    everywhere = model.head(hidden) @ model.output_Kd.T + model.output_bias_K
    assert rows[0] == 3
    assert torch.allclose(logits, everywhere[where], atol=1e-6)


def test_the_encoder_depends_on_the_seed_alone(lsp_store):
    def encoder(seed, objective):
        config = settings_for("bert-2x32", seed=seed, objective=objective.name)
        return weights_fingerprint(build_student(config, lsp_store, objective).encoder)

    torch.rand(3)  # whatever happened before
    mlsm, mlm = Mlsm(lsp_store), Mlm(lsp_store)
    assert encoder(1, mlsm) == encoder(1, mlm) != encoder(2, mlm)
    heads = [build_student(settings_for("bert-2x32", seed=1), lsp_store, o).head for o in (mlsm, mlm)]
    assert weights_fingerprint(heads[0]) == weights_fingerprint(heads[1])


def test_building_leaves_global_randomness_alone(lsp_store):
    before = torch.random.get_rng_state()
    build_student(settings_for("bert-2x32"), lsp_store, Mlsm(lsp_store))
    assert torch.equal(before, torch.random.get_rng_state())


def test_mlm_output_is_tied_to_the_embeddings(ids_store):
    model = build_student(settings_for("bert-2x32"), ids_store, Mlm(ids_store))
    assert model.output_matrix is model.encoder.get_input_embeddings().weight
    assert "output_Kd" not in dict(model.named_parameters())


def test_vocabulary_length_and_special_ids_come_from_the_store(family, ids_store):
    config = encoder_config(settings_for(family, dropout=0.3), ids_store)
    assert config.vocab_size == ids_store.vocab_size and config.pad_token_id == 0
    assert config.max_position_embeddings >= ids_store.max_length
    names = {"attention_dropout", "hidden_dropout_prob"} & config.to_dict().keys()
    assert {getattr(config, name) for name in names} == {0.3}


def test_a_config_file_alone_is_enough(family, ids_store):
    config = encoder_config(settings_for(family / "config.json"), ids_store)
    assert config.model_type == family.name


def test_no_such_encoder_is_one_clear_line(ids_store, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(RunError, match="no Hugging Face config") as caught:
        encoder_config(settings_for("nobody/nothing"), ids_store)
    assert "\n" not in str(caught.value)


@pytest.mark.promise("13 teacher or tokenizer …")
def test_an_encoder_with_another_tokenizer_is_refused(ids_store, tmp_path):
    TINY_BERT.save_pretrained(tmp_path / "same")
    write_tokenizer(tmp_path / "same", words=60)
    assert encoder_config(settings_for(tmp_path / "same"), ids_store).vocab_size == ids_store.vocab_size
    write_tokenizer(tmp_path / "same", words=50)
    with pytest.raises(RunError, match="store of another tokenizer"):
        encoder_config(settings_for(tmp_path / "same"), ids_store)


@pytest.mark.promise("13 teacher or tokenizer …")
def test_weights_of_another_vocabulary_are_refused(ids_store, tmp_path):
    """Without a tokenizer beside them the number of tokens is all there is to compare; with one, every token."""
    config = BertConfig(**TINY_BERT.to_diff_dict() | {"vocab_size": 55})
    build_encoder(config, seed=0).save_pretrained(tmp_path / "model")
    with pytest.raises(RunError, match="has 55 tokens, but the store has 65"):
        encoder_config(settings_for("bert-2x32", continue_from=tmp_path / "model"), ids_store)
    config.vocab_size = 72  # padded, as DeBERTa's
    build_encoder(config, seed=0).save_pretrained(tmp_path / "model")
    with pytest.raises(RunError, match=r"has 72 rows of word vectors, .* model.resize_token_embeddings\(65\)"):
        encoder_config(settings_for("bert-2x32", continue_from=tmp_path / "model"), ids_store)
    config.vocab_size = ids_store.vocab_size
    build_encoder(config, seed=0).save_pretrained(tmp_path / "model")
    assert encoder_config(settings_for("bert-2x32", continue_from=tmp_path / "model"), ids_store).hidden_size == 32
    write_tokenizer(tmp_path / "model", words=60)
    renamed = tmp_path / "model" / "tokenizer.json"
    renamed.write_text(renamed.read_text().replace('"w7"', '"v7"'))
    with pytest.raises(RunError, match="store of another tokenizer"):
        encoder_config(settings_for("bert-2x32", continue_from=tmp_path / "model"), ids_store)


def test_weights_and_configs_of_another_model_are_refused(ids_store, tmp_path):
    build_encoder(TINY_BERT, seed=0).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file(weights | {"embeddings.position_ids": torch.ones(2)}, tmp_path / "model.safetensors")
    build_encoder(TINY_BERT, seed=0, continue_from=tmp_path)
    save_file(weights | {"encoder.layer.0.adapter.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(RunError, match=r"--continue-from .*no place for \(encoder.layer.0.adapter.weight\)"):
        build_encoder(TINY_BERT, seed=0, continue_from=tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for setting, value in (("position_embedding_type", "relative_key"), ("auto_map", {"AutoModel": "own.Model"})):
        (tmp_path / "config.json").write_text(json.dumps(config | {setting: value}))
        for settings in (settings_for(tmp_path / "config.json"), settings_for("bert-2x32", continue_from=tmp_path)):
            with pytest.raises(RunError, match=setting):
                encoder_config(settings, ids_store)


def test_weights_that_could_execute_code_are_refused(ids_store, tmp_path):
    build_encoder(TINY_BERT, seed=0).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(RunError, match="has no safetensors file"):
        encoder_config(settings_for("bert-2x32", continue_from=tmp_path), ids_store)


def test_weights_to_continue_from_lie_in_a_directory(ids_store, tmp_path, monkeypatch):
    """The name of a model on the Hub has no weights that the run's identity could hold."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match="nobody/model is not a directory. Pass"):
        encoder_config(settings_for("bert-2x32", continue_from=Path("nobody/model")), ids_store)


def test_encoder_without_a_pooler():
    encoder = build_encoder(TINY_BERT, seed=0)
    assert encoder.pooler is None and next(encoder.parameters()).dtype == torch.float32


def test_a_decoder_is_refused(ids_store, tmp_path):
    GPT2Config(n_embd=32, n_layer=1, n_head=2).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(RunError, match="gpt2"):
        encoder_config(settings_for(tmp_path / "gpt2"), ids_store)


def test_untied_student_has_its_own_matrix(lsp_store):
    encoder = build_encoder(encoder_config(settings_for("bert-2x32"), lsp_store), seed=0)
    assert Student(encoder, 24, tied=False, seed=0).output_Kd.shape == (24, 32)
