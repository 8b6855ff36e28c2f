"""Dropout from 16 bits: what it keeps, its gradient, and attention against torch's formula."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from transformers import AutoConfig, BertConfig, EuroBertConfig

from mlsm.common.documents import attention_inputs
from student.encoders.build import build_encoder
from student.encoders.dropout import Dropout, attend, drop, use_fast_dropout


def kept_of(shape, probability, seed=0):
    torch.manual_seed(seed)
    return drop(torch.ones(shape), probability)


@pytest.fixture(autouse=True)
def own_generator():
    with torch.random.fork_rng():
        yield


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_as_many_are_dropped_as_asked_for_and_the_mean_stays(probability):
    kept = kept_of((1000, 1001), probability)
    dropped = int((kept == 0).sum())
    assert stats.binomtest(dropped, kept.numel(), probability).pvalue > 1e-6
    assert np.unique(kept).tolist() == [0, pytest.approx(1 / (1 - probability), rel=1e-3)]
    assert kept.mean().item() == pytest.approx(1, abs=0.02)


def test_neighbours_are_independent():
    dropped = (kept_of(400_000, 0.3) == 0).numpy()
    for distance in (1, 2, 3, 4, 5, 64):
        pairs = np.histogram2d(dropped[:-distance], dropped[distance:], bins=2)[0]
        assert stats.chi2_contingency(pairs).pvalue > 1e-6, distance


def test_the_generators_seed_decides():
    assert torch.equal(kept_of(999, 0.4, seed=1), kept_of(999, 0.4, seed=1))
    assert not torch.equal(kept_of(999, 0.4, seed=1), kept_of(999, 0.4, seed=2))


def test_the_gradient_passes_where_the_value_did():
    states = torch.randn(50, 7, requires_grad=True)
    found = drop(states, 0.3)
    found.backward(torch.ones(50, 7))
    assert torch.equal(states.grad * states, found)


@pytest.mark.parametrize("probability", [0.0, 1.0, 1e-9])
def test_the_ends_of_the_scale_are_torchs(probability):
    states = torch.randn(20, 5)
    assert torch.equal(drop(states, probability), states if probability < 1 else torch.zeros(20, 5))


def test_bfloat16_stays_bfloat16():
    assert drop(torch.ones(100, dtype=torch.bfloat16), 0.5).dtype == torch.bfloat16


MASKS = {
    "none": None,
    "boolean": torch.ones(2, 1, 5, 5).tril().bool(),
    "of keys": torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]).bool()[:, None, None],
    "bias": torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(0)),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_attention_averages_to_that_without_dropout(mask):
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 3, 5, 8).unbind()
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3)
    draws = torch.stack([attend(query, key, value, mask, 0.2, 0.3) for _ in range(3000)])
    error = draws.std(dim=0) / len(draws) ** 0.5
    assert ((draws.mean(dim=0) - expected).abs() <= 6 * error + 1e-5).all()
    assert torch.equal(attend(query, key, value, mask, 0.0, 0.3), expected)


def test_documents_are_kept_apart_by_a_boolean_mask_as_with_torchs_sdpa():
    encoder = build_encoder(BertConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1), 1).eval()
    documents = torch.tensor([[0, 0, 0, 1, 1, 1]])
    ids, apart = torch.arange(5, 11)[None], attention_inputs(encoder, None, documents)
    before = encoder(ids, **apart).last_hidden_state
    use_fast_dropout(encoder)
    apart = attention_inputs(encoder, None, documents)
    assert apart["attention_mask"].dtype == torch.bool
    assert torch.allclose(encoder(ids, **apart).last_hidden_state, before, atol=1e-6)


def test_queries_that_share_keys_and_values_attend_as_in_transformers():
    """EuroBERT's larger ones do."""
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 65, "pad_token_id": 0}
    config = EuroBertConfig(**size, num_attention_heads=4, num_key_value_heads=2, attention_dropout=0.2)
    encoder, ids = build_encoder(config, 1).eval(), torch.arange(5, 29).view(2, 12)
    padding = torch.tensor([[1] * 12, [1] * 8 + [0] * 4])
    before = encoder(ids, attention_mask=padding).last_hidden_state
    use_fast_dropout(encoder)
    assert torch.allclose(encoder(ids, attention_mask=padding).last_hidden_state[:, :8], before[:, :8], atol=1e-6)
    states = encoder.train()(ids, attention_mask=padding).last_hidden_state
    assert states.isfinite().all() and not torch.allclose(states[:, :8], before[:, :8], atol=1e-3)


def test_an_encoder_drops_out_this_way_in_training_only(family):
    config = AutoConfig.from_pretrained(family)
    config.max_position_embeddings = 64
    encoder, ids = build_encoder(config, 1), torch.full((2, 12), 9)
    ids[:, 6:] = 11
    padding = torch.tensor([[1] * 12, [1] * 8 + [0] * 4])
    before = encoder.eval()(ids, attention_mask=padding).last_hidden_state
    use_fast_dropout(encoder)
    assert torch.allclose(encoder(ids, attention_mask=padding).last_hidden_state[:, :8], before[:, :8], atol=1e-5)
    dropouts = [module for module in encoder.modules() if isinstance(module, torch.nn.Dropout)]
    assert all(isinstance(module, Dropout) for module in dropouts)
    encoder.train()
    if any(module.p for module in dropouts):
        first, second = (encoder(ids, attention_mask=padding).last_hidden_state for _ in range(2))
        assert not torch.equal(first, second)
