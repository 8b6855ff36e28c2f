"""Position tables that begin behind the padding id, in every family of transformers. The oracle is its own code."""

import pytest
import torch
from transformers import AutoConfig, AutoModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING

from mlsm.common.documents import attention_inputs
from student.config import StudentConfig
from student.encoders import build as encoders
from student.encoders.build import build_encoder, encoder_config
from student.encoders.model import Student

SIZE = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
SHIFTED = (*encoders._POSITIONS_BEHIND_PADDING, "mpnet")
PECULIAR = {
    "longformer": {"attention_window": 4},
    "esm": {"position_embedding_type": "absolute", "mask_token_id": 32},
    "luke": {"entity_vocab_size": 10, "entity_emb_size": 8},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
}
OTHERS = ("albert", "bert", "convbert", "electra", "megatron-bert", "nystromformer", "rembert", "yoso")
# No plain position table: other modalities, other structures, or no table at all.
NOT_BUILT = {"funnel", "perceiver", "tapas"}


def position_tables(model):
    """Row of the padding (None: there is none) of every table of absolute positions of tokens."""
    named = ((name.split("."), module) for name, module in model.named_modules())
    return [
        getattr(module, "padding_idx", None)
        for path, module in named
        if path[-1] == "position_embeddings" and path[0] == "embeddings"
    ]


def test_the_families_are_those_that_transformers_has():
    behind, built = set(), 0
    for config_class in MODEL_FOR_MASKED_LM_MAPPING:
        family = config_class.model_type
        if family in NOT_BUILT:
            continue
        given = {"vocab_size": 100, "pad_token_id": 7}
        try:
            hf_config = config_class(**given | PECULIAR.get(family, {}))
            hf_config.num_hidden_layers = 1
            with torch.device("meta"):
                model = AutoModel.from_config(hf_config)
        except (AttributeError, NotImplementedError):  # of several parts: no encoder of text alone
            continue
        built += 1
        if any(row is not None for row in position_tables(model)):
            behind.add(family)
            assert position_tables(model) == [encoders._first_position(hf_config) - 1], family
        else:
            assert encoders._first_position(hf_config) == 0, family
    assert behind == set(SHIFTED) and built > 35


def tiny_config(family, store, tmp_path, **changes):
    """The config that train-student makes of one whose table is just long enough, were it read from row 0."""
    given = SIZE | {"max_position_embeddings": store.max_length, "vocab_size": 65} | PECULIAR.get(family, {})
    AutoConfig.for_model(family, **given).save_pretrained(tmp_path)
    return encoder_config(StudentConfig(encoder=str(tmp_path), dropout=0.0, **changes), store)


@pytest.mark.parametrize("family", SHIFTED + OTHERS)
@torch.no_grad()
def test_windows_of_the_full_length_fit_in_and_are_read_as_by_transformers(family, ids_store, tmp_path):
    hf_config = tiny_config(family, ids_store, tmp_path)
    mask = getattr(hf_config, "mask_token_id", None)  # ESM computes with it
    assert mask in (None, ids_store.special_ids["mask"])
    student = Student(build_encoder(hf_config, seed=0), 65, tied=True, seed=0).eval()
    length = ids_store.max_length
    ids = torch.randint(5, 60, (2, length), generator=torch.Generator().manual_seed(0))
    where = torch.tensor([0, length - 1, 2 * length - 1])
    stock = AutoModel.from_config(hf_config).eval()
    stock.load_state_dict(student.encoder.state_dict(), strict=False)  # but for a pooler
    expected = student.head(stock(input_ids=ids).last_hidden_state.flatten(0, 1)[where])
    found = student(ids, None, where)
    assert torch.allclose(found, expected @ student.output_matrix.T + student.output_bias_K, atol=1e-5)
    if family in SHIFTED:  # as many rows as needed, and not one more
        assert hf_config.max_position_embeddings == length + (2 if family == "mpnet" else 1)
        hf_config.max_position_embeddings -= 1
        short = build_encoder(hf_config, seed=0).eval()
        with pytest.raises((IndexError, RuntimeError), match="index"):
            short(input_ids=ids)


@pytest.mark.parametrize("family", ["roberta", "xlm-roberta", "camembert"])
@torch.no_grad()
def test_a_document_of_the_full_length_is_kept_apart_from_none(family, ids_store, tmp_path):
    hf_config = tiny_config(family, ids_store, tmp_path, documents_apart=True)
    encoder = build_encoder(hf_config, seed=0).eval()
    ids = torch.randint(5, 60, (1, ids_store.max_length), generator=torch.Generator().manual_seed(0))
    apart = encoder(ids, **attention_inputs(encoder, None, torch.zeros_like(ids))).last_hidden_state
    assert torch.allclose(apart, encoder(ids).last_hidden_state, atol=1e-5)
