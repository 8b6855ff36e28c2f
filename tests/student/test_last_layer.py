"""Masked positions only, against the whole last layer: logits and gradients of every family."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, BertConfig, DebertaV2Config

from student.encoders import linear
from student.encoders.build import build_encoder
from student.encoders.last_layer import FORWARDS
from student.encoders.model import Student

WINDOWS, LENGTH = 3, 12
WHERE = torch.tensor([1, 4, 7, 12 + 3, 24 + 0, 24 + 11])  # 3, 1 and 2 of a window
PADDED = torch.tensor([[1] * 12, [1] * 8 + [0] * 4, [1] * 12])


def config_of(family):
    config = AutoConfig.from_pretrained(family)
    config.max_position_embeddings = 64
    return config


def students(config):
    """The same student twice: with the last layer restricted, and without."""
    restricted, whole = (Student(build_encoder(config, 1), 7, tied=False, seed=1).eval() for _ in range(2))
    assert restricted._last_layer.restricted
    whole._last_layer.restricted = False
    return restricted, whole


def assert_same(config, attention, **kwargs):
    ids = torch.randint(5, 60, (WINDOWS, LENGTH), generator=torch.Generator().manual_seed(0))
    logits, gradients = [], []
    for student in students(config):
        logits.append(student(ids, attention, WHERE, **kwargs))
        logits[-1].square().sum().backward()
        gradients.append({name: weight.grad for name, weight in student.named_parameters()})
    assert torch.allclose(*logits, atol=1e-5)
    for name, gradient in gradients[1].items():
        found = gradients[0][name]
        assert (gradient is None) == (found is None), name
        assert gradient is None or torch.allclose(found, gradient, atol=1e-4), name


@pytest.mark.parametrize("attention", [None, PADDED], ids=["full", "padded"])
def test_logits_and_gradients_are_those_of_the_whole_layer(family, attention):
    config = config_of(family)
    assert config.model_type in FORWARDS
    assert_same(config, attention)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_every_form_of_attention_mask(family, implementation):
    config = config_of(family)
    if config.model_type != "bert":
        pytest.skip("the mask's rows are chosen for BERT's relatives only")
    config._attn_implementation = implementation
    own_documents = torch.ones(WINDOWS, 1, LENGTH, LENGTH).tril().bool()
    assert_same(config, own_documents if implementation == "sdpa" else PADDED)


def test_windows_without_a_masked_position(family):
    config = config_of(family)
    ids = torch.full((WINDOWS, LENGTH), 9)
    restricted, whole = students(config)
    for where in (WHERE[:3], WHERE[3:4], WHERE[:0]):
        assert torch.allclose(restricted(ids, None, where), whole(ids, None, where), atol=1e-5)


@pytest.mark.parametrize("attention", [None, PADDED], ids=["full", "padded"])
def test_fillers_change_neither_logits_nor_gradients(family, attention):
    """Copies of the last masked position, whose logits are dropped, and room for more positions of a window."""
    ids = torch.randint(5, 60, (WINDOWS, LENGTH), generator=torch.Generator().manual_seed(0))
    student, _ = students(config_of(family))
    for where in (WHERE, WHERE[:3], torch.tensor([0, 30, 31, 32, 33])):  # the last: four of the last window
        logits, gradients = [], []
        for fillers, most in ((0, None), (2, None), (3, 5)):
            student.zero_grad()
            filled = torch.cat([where, where[-1:].expand(fillers)])
            given = most or int(torch.bincount(where // LENGTH).max())
            logits.append(student(ids, attention, filled, None, given)[: len(where)])
            logits[-1].square().sum().backward()
            gradients.append(torch.cat([w.grad.flatten() for w in student.parameters() if w.grad is not None]))
        for other in (1, 2):
            assert torch.allclose(logits[other], logits[0], atol=1e-5)
            assert torch.allclose(gradients[other], gradients[0], rtol=1e-4, atol=1e-5)


def test_only_the_students_own_forward_is_restricted(family):
    encoder = build_encoder(config_of(family), 1).eval()
    ids = torch.full((WINDOWS, LENGTH), 9)
    before = encoder(ids).last_hidden_state
    student = Student(encoder, 7, tied=False, seed=1).eval()
    student(ids, None, WHERE)
    assert torch.allclose(encoder(ids).last_hidden_state, before, atol=1e-5)
    names = build_encoder(config_of(family), 1).state_dict().keys()
    assert encoder.state_dict().keys() == names


def test_a_layer_that_is_followed_by_a_convolution_is_computed_whole():
    config = DebertaV2Config(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, conv_kernel_size=3
    )
    student = Student(build_encoder(config, 1), 7, tied=False, seed=1)
    assert not student._last_layer.restricted
    assert student(torch.full((2, LENGTH), 9), torch.ones(2, LENGTH), torch.tensor([1])).shape == (1, 7)


def test_the_work_of_the_last_layer_is_saved(monkeypatch):
    monkeypatch.setattr(linear, "available", lambda: False)  # whose products are not counted
    config = BertConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256)
    ids, where = torch.full((4, 64), 9), torch.arange(0, 256, 8)
    flops = []
    for model in students(config):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(ids, None, where)
        flops.append(counter.get_total_flops())
    restricted, whole = flops
    saved_rows = ids.numel() - len(where)
    assert whole - restricted >= saved_rows * 2 * (2 * 64 * 64 + 2 * 64 * 256)  # queries, output, feed-forward
