"""Documents of a packed window, kept apart: each is read as if it were alone."""

import copy
from dataclasses import replace

import pytest
import torch
from tiny_exports import exported
from tiny_store import log_of
from transformers import (
    BertConfig,
    CamembertConfig,
    DebertaConfig,
    DebertaV2Config,
    DistilBertConfig,
    ElectraConfig,
    EsmConfig,
    LongformerConfig,
    ModernBertConfig,
    MPNetConfig,
    RobertaConfig,
    XLMRobertaConfig,
)

from mlsm.common.documents import attention_inputs, padding_mask
from mlsm.common.errors import RunError
from student.batches import Loader
from student.config import ProbeConfig, StudentConfig
from student.encoders.build import build_encoder, encoder_config
from student.encoders.deberta import adapt_deberta
from student.held_out import HeldOut
from student.masks.masking import Masking
from student.objectives.mlm import Mlm
from student.probe import probe_task
from student.train import train

VOCABULARY, LENGTH = 60, 24
SIZE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": LENGTH + 2,
    "pad_token_id": 1,
}
RELATIVE = SIZE | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
FAMILIES = {
    "bert": BertConfig(**SIZE),
    "roberta": RobertaConfig(**SIZE),
    "xlm-roberta": XLMRobertaConfig(**SIZE),
    "camembert": CamembertConfig(**SIZE),
    "mpnet": MPNetConfig(**SIZE),
    "electra": ElectraConfig(**SIZE, embedding_size=16),
    "distilbert": DistilBertConfig(dim=32, n_layers=2, n_heads=2, hidden_dim=64, max_position_embeddings=LENGTH + 2),
    "deberta": DebertaConfig(**RELATIVE, position_biased_input=False),
    "deberta, absolute too": DebertaConfig(**RELATIVE, position_biased_input=True),
    "deberta-v2": DebertaV2Config(
        **RELATIVE, position_biased_input=False, share_att_key=True, position_buckets=4, norm_rel_ebd="layer_norm"
    ),
    # layers 0 and 3 see everything, 1 and 2 see three tokens to each side
    "modernbert": ModernBertConfig(**SIZE, local_attention=6),
}
DOCUMENTS = torch.tensor([[0] * 9 + [1] * 11 + [2] * 4, [0] * 13 + [1] * 5 + [-1] * 6])


def scrambled(hf_config):
    encoder = build_encoder(hf_config, seed=0).eval()
    adapt_deberta(encoder)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in encoder.parameters():  # norms and biases too, and attention far from uniform
            noise = 0.2 * torch.randn(weight.shape, generator=generator)
            weight.copy_(noise if weight.ndim > 1 else weight + noise)
    return encoder


def random_ids():
    ids = torch.randint(5, VOCABULARY, DOCUMENTS.shape, generator=torch.Generator().manual_seed(2))
    return torch.where(DOCUMENTS < 0, 1, ids)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_a_packed_document_is_read_as_if_alone(name):
    encoder, ids, attention = scrambled(FAMILIES[name]), random_ids(), (DOCUMENTS >= 0).long()
    apart = encoder(ids, **attention_inputs(encoder, attention, DOCUMENTS)).last_hidden_state
    as_one = encoder(ids, **attention_inputs(encoder, attention)).last_hidden_state
    for window, document in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]:
        mine = DOCUMENTS[window] == document
        alone = encoder(ids[window, mine][None]).last_hidden_state[0]
        assert torch.allclose(apart[window, mine], alone, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(as_one[window, mine], alone, atol=1e-2)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_the_mask_of_padding_is_what_transformers_makes_of_it(name, implementation):
    """Ours serves GPUs, where transformers would wait for the device to say whether anything is padded."""
    encoder, ids = scrambled(copy.deepcopy(FAMILIES[name])), random_ids()
    attention = (DOCUMENTS >= 0).long()
    if implementation == "eager":
        encoder.set_attn_implementation("eager")
    expected = encoder(ids, attention_mask=attention).last_hidden_state
    found = encoder(ids, attention_mask=padding_mask(encoder, attention)).last_hidden_state
    real = attention.bool()
    assert torch.allclose(found[real], expected[real], rtol=1e-5, atol=1e-6) and found.isfinite().all()


def test_on_a_gpu_the_mask_of_padding_is_ours():
    class OnGpu(torch.Tensor):
        is_cuda = True

    encoder, attention = scrambled(FAMILIES["roberta"]), (DOCUMENTS >= 0).long()
    assert attention_inputs(encoder, attention)["attention_mask"] is attention
    mask = attention_inputs(encoder, attention.as_subclass(OnGpu))["attention_mask"]
    assert mask.shape == (2, 1, 1, 24) and mask.dtype == torch.bool
    assert attention_inputs(encoder, None) == {"attention_mask": None}
    other = build_encoder(EsmConfig(**SIZE), seed=0).eval()  # it multiplies embeddings by the mask
    mask = attention_inputs(other, attention.as_subclass(OnGpu))["attention_mask"]
    assert mask.shape == attention.shape


@torch.no_grad()
def test_positions_alone_would_not_keep_documents_apart():
    encoder, ids = scrambled(FAMILIES["bert"]), random_ids()[:1]
    positions = attention_inputs(encoder, None, DOCUMENTS[:1])["position_ids"]
    assert positions.tolist() == [[*range(9), *range(11), *range(4)]]
    hidden = encoder(ids, position_ids=positions).last_hidden_state[0, 9:20]
    assert not torch.allclose(hidden, encoder(ids[:, 9:20]).last_hidden_state[0], atol=1e-2)


@torch.no_grad()
def test_eager_attention_gets_a_mask_that_it_can_add():
    encoder, ids = scrambled(FAMILIES["bert"]), random_ids()
    inputs = attention_inputs(encoder, None, DOCUMENTS)
    expected = encoder(ids, **inputs).last_hidden_state
    encoder.set_attn_implementation("eager")
    found = encoder(ids, **attention_inputs(encoder, None, DOCUMENTS)).last_hidden_state
    assert inputs["attention_mask"].dtype == torch.bool
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_masks_suit_bfloat16(name):
    encoder, ids = scrambled(FAMILIES[name]), random_ids()
    inputs = attention_inputs(encoder, None, DOCUMENTS)
    exact = encoder(ids, **inputs).last_hidden_state
    with torch.autocast("cpu", torch.bfloat16):
        rounded = encoder(ids, **inputs).last_hidden_state
    real = DOCUMENTS >= 0
    assert torch.corrcoef(torch.stack((exact[real].flatten(), rounded[real].float().flatten())))[0, 1] > 0.99


@pytest.mark.parametrize(
    ("hf_config", "reason"),
    [
        (
            LongformerConfig(
                hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, attention_window=4
            ),
            "cannot be kept apart.*longformer.*use one of bert",
        ),
        (DebertaV2Config(**RELATIVE, conv_kernel_size=3), "convolution over neighbouring tokens"),
    ],
)
def test_where_it_cannot_be_done_right_it_is_refused(hf_config, reason, ids_store, tmp_path):
    hf_config.save_pretrained(tmp_path)
    encoder_config(StudentConfig(encoder=str(tmp_path)), ids_store)
    with pytest.raises(RunError, match=reason):
        encoder_config(StudentConfig(encoder=str(tmp_path), documents_apart=True), ids_store)
    _, export = exported(tmp_path, Mlm(ids_store), ids_store, tmp_path / "export")
    probe = ProbeConfig(student=str(export), probe_input="hidden")
    probe_task(probe, ids_store)
    with pytest.raises(RunError, match=f"--documents-apart: .*{reason}"):
        probe_task(replace(probe, documents_apart=True), ids_store)


def test_a_batch_says_which_documents_it_holds_if_asked(packed_store):
    masking = Masking(packed_store.special_ids, packed_store.vocab_size, 0.15)
    given = (packed_store.split("train"), masking, Mlm(packed_store).read_targets)
    loader = Loader(*given, micro_batch=4, documents_apart=True)
    apart = loader.step(1, 0, 6)
    as_one = Loader(*given, micro_batch=4).step(1, 0, 6)
    for micro in apart.micro:
        real = (micro.input_WL != 0).long()
        assert torch.equal(micro.documents_WL[:, :5], torch.zeros_like(real[:, :5]))
        assert torch.equal(micro.documents_WL[:, 5:], 2 * real[:, 5:] - 1)  # 1, and -1 at padding
    assert [micro.documents_WL for micro in as_one.micro] == [None, None]
    assert apart.digest == as_one.digest
    held_out = HeldOut(packed_store, loader, Mlm(packed_store), windows=5)
    assert [len(micro.documents_WL) for micro in held_out.batch.micro] == [4, 1]


def test_the_option_changes_what_is_trained(packed_store, settings, tmp_path):
    logs = []
    for apart in (False, True):
        output = tmp_path / str(apart)
        train(
            StudentConfig(
                **settings
                | {
                    "store": packed_store.path,
                    "objective": "mlm",
                    "documents_apart": apart,
                    "dropout": 0.0,
                    "run_dir": output,
                }
            )
        )
        logs.append(log_of(output))
    assert logs[0][1]["batch"] == logs[1][1]["batch"]
    assert logs[0][1]["loss"] != logs[1][1]["loss"]
    assert logs[0][8]["held_out"] != logs[1][8]["held_out"]
    assert StudentConfig().identity() != StudentConfig(documents_apart=True).identity()
