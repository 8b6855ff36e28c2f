"""Encoders by name, how they attend, and what is refused."""

import pytest
import torch
from transformers import (
    AlbertConfig,
    AutoConfig,
    AutoModel,
    BartConfig,
    BertConfig,
    DebertaConfig,
    MPNetConfig,
    T5Config,
)

from mlsm.common.errors import RunError
from student.config import StudentConfig
from student.encoders.build import NAMED_ENCODERS, build_encoder, encoder_config
from student.encoders.model import Student

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
# Without embeddings and pooler, counted by hand from the papers. A BERT layer has 12 d^2 + 13 d.
PARAMETERS = {
    "bert-tiny": 2 * (12 * 128**2 + 13 * 128),
    "bert-mini": 4 * (12 * 256**2 + 13 * 256),
    "bert-small": 4 * (12 * 512**2 + 13 * 512),
    "bert-medium": 8 * (12 * 512**2 + 13 * 512),
    "bert-base": 12 * (12 * 768**2 + 13 * 768),
    # DeBERTa: queries and values have a bias, keys have none; two matrices more for positions, one with a bias
    "deberta-base": 12 * (14 * 768**2 + 13 * 768) + 1024 * 768,
    # ModernBERT: no biases, a gated layer of 2 x 1152; no norm before the first attention, but one at the end
    "modernbert-base": 22 * (4 * 768**2 + 3 * 768 * 1152 + 2 * 768) - 768 + 768,
}


def config_of(encoder, store, **changes):
    return encoder_config(StudentConfig(encoder=str(encoder), **changes), store)


@pytest.mark.parametrize("family", [AlbertConfig, MPNetConfig])
def test_layers_that_cannot_be_computed_again_are_refused(family, ids_store, tmp_path):
    family(**SMALL).save_pretrained(tmp_path)
    with pytest.raises(RunError, match="--activation-checkpointing: .* cannot compute the layers .* second time"):
        config_of(tmp_path, ids_store, activation_checkpointing=True)
    model = AutoModel.from_config(config_of(tmp_path, ids_store))
    with pytest.raises(ValueError, match="does not support"):  # once transformers can, so may we
        model.gradient_checkpointing_enable()


def test_an_unfinished_run_to_continue_from_is_called_one(ids_store, tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(RunError, match="is an unfinished run. Finish it, .* export-student"):
        encoder_config(StudentConfig(continue_from=tmp_path / "run"), ids_store)


def on_meta(hf_config):
    with torch.device("meta"):
        return AutoModel.from_config(hf_config)


def layer_parameters(hf_config):
    model = on_meta(hf_config)
    return sum(
        weight.numel() for name, weight in model.named_parameters() if not name.startswith(("embeddings", "pooler"))
    )


@pytest.mark.parametrize("name", NAMED_ENCODERS)
def test_named_encoders_have_the_published_sizes(name, ids_store, monkeypatch):
    monkeypatch.setattr(AutoConfig, "from_pretrained", None)  # needs no file and no network
    assert layer_parameters(config_of(name, ids_store)) == PARAMETERS[name]


def test_bert_base_is_the_default_of_transformers(ids_store):
    changed = {"vocab_size", "pad_token_id"}
    ours, theirs = config_of("bert-base", ids_store).to_dict(), BertConfig().to_dict()
    assert {name for name in theirs if ours[name] != theirs[name]} <= changed
    assert config_of("bert-12x768", ids_store).to_dict() == ours


def test_a_modernbert_of_the_published_size_is_the_published_one(ids_store):
    assert config_of("modernbert-22x768", ids_store).to_dict() == config_of("modernbert-base", ids_store).to_dict()
    narrow = config_of("modernbert-2x128", ids_store)
    assert layer_parameters(narrow) == 2 * (4 * 128**2 + 3 * 128 * 192 + 2 * 128)


def test_deberta_base_is_that_of_the_hub(ids_store, tmp_path):
    """The published config.json of microsoft/deberta-base gives the same encoder."""
    (tmp_path / "config.json").write_text("""{"model_type": "deberta", "attention_probs_dropout_prob": 0.1,
        "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02,
        "intermediate_size": 3072, "max_position_embeddings": 512, "relative_attention": true,
        "pos_att_type": "c2p|p2c", "layer_norm_eps": 1e-7, "padding_idx": 0, "max_relative_positions": -1,
        "position_biased_input": false, "num_attention_heads": 12, "num_hidden_layers": 12, "type_vocab_size": 0,
        "vocab_size": 50265}""")
    named, read = config_of("deberta-base", ids_store).to_dict(), config_of(tmp_path, ids_store).to_dict()
    assert {name for name in read if read[name] != named.get(name)} <= {"padding_idx", "_name_or_path"}
    bare = on_meta(DebertaConfig())
    assert not any("pos" in name for name, _ in bare.encoder.named_parameters())  # which is why there is a name


def test_transformers_picks_sdpa_where_it_has_it(family, ids_store):
    """With no mask torch then takes its flash kernel on a GPU; DeBERTa's attention has no such form."""
    encoder = build_encoder(config_of(family, ids_store), seed=0)
    expected = "eager" if family.name.startswith("deberta") else "sdpa"
    assert encoder.config._attn_implementation == expected


def test_every_family_trains_in_bfloat16(family, ids_store):
    """The arithmetic of a GPU by default. DeBERTa as transformers has it fails there."""
    encoder = Student(build_encoder(config_of(family, ids_store, dropout=0.0), 0), 7, tied=False, seed=0).encoder
    ids = torch.randint(5, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    exact = encoder(ids).last_hidden_state
    with torch.autocast("cpu", torch.bfloat16):
        rounded = encoder(ids).last_hidden_state
    rounded.float().square().sum().backward()
    assert torch.allclose(rounded.float(), exact, atol=0.1)
    assert all(weight.grad is None or weight.grad.isfinite().all() for weight in encoder.parameters())


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("bert-bse", "bert-base"), ("DeBERTa-base", "deberta-base"), ("modernbret-2x96", "modernbert-2x96")],
)
def test_a_typing_error_gets_a_suggestion(wrong, meant, ids_store):
    with pytest.raises(RunError, match=f"no Hugging Face config.*Did you mean {meant}") as caught:
        config_of(wrong, ids_store)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "hf_config",
    [
        BartConfig(d_model=32, vocab_size=65),
        T5Config(d_model=32, vocab_size=65),
        BertConfig(**SMALL, is_decoder=True),
    ],
)
def test_what_decodes_is_refused(hf_config, ids_store, tmp_path):
    hf_config.save_pretrained(tmp_path)
    with pytest.raises(RunError, match=f"{hf_config.model_type} is not an encoder for masked text"):
        config_of(tmp_path, ids_store)


def test_weights_in_a_directory_with_a_name_of_ours_are_used(ids_store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    build_encoder(BertConfig(**SMALL, vocab_size=ids_store.vocab_size), seed=0).save_pretrained("bert-base")
    config = StudentConfig(continue_from=tmp_path.joinpath("bert-base").relative_to(tmp_path))
    assert encoder_config(config, ids_store).hidden_size == 32
