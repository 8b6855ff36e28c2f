"""oneDNN's linear layers against torch's own."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F

import student.encoders.linear
from mlsm.common.matrix_products import TORCH, USUAL
from student.encoders.linear import FastLinear, linear, use_fast_linear

pytestmark = pytest.mark.skipif(not student.encoders.linear.available(), reason="this torch lacks the operator")


def results(function, shape, bias, wanted=(True, True)):
    """Product and gradients for fixed random arguments."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(*shape, 48, generator=generator, requires_grad=wanted[0])
    weight = torch.randn(80, 48, generator=generator, requires_grad=wanted[1])
    bias = torch.randn(80, generator=generator, requires_grad=True) if bias else None
    found = function(rows, weight, bias)
    found.backward(torch.randn(found.shape, generator=generator))
    return [found, rows.grad, weight.grad, None if bias is None else bias.grad]


@pytest.mark.parametrize("shape", [(1,), (200,), (5, 40), (2, 3, 7)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_product_and_gradients_are_torchs(shape, bias):
    for found, expected in zip(results(linear, shape, bias), results(F.linear, shape, bias), strict=True):
        assert (found is None) == (expected is None)
        assert expected is None or torch.allclose(found, expected, atol=1e-4)


def test_gradients_that_nobody_wants_are_not_computed():
    _, rows, weight, _ = results(linear, (20,), True, wanted=(False, True))
    assert rows is None and weight is not None


@pytest.mark.parametrize("rows", [torch.randn(0, 8), torch.randn(3, 8, dtype=torch.float64)], ids=["empty", "double"])
def test_what_it_does_not_serve_is_torchs(rows):
    weight = torch.randn(4, 8, dtype=rows.dtype)
    assert torch.equal(linear(rows, weight), F.linear(rows, weight))


def test_autocast_rules():
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(torch.randn(3, 8), torch.randn(4, 8)).dtype == torch.bfloat16


def test_a_model_keeps_its_names_and_weights():
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4, bias=False))
    rows, before = torch.randn(5, 8), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = model(rows)
    use_fast_linear(model)
    assert isinstance(model[0], FastLinear) and isinstance(model[2], FastLinear)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.allclose(model(rows), expected, atol=1e-5)


def test_without_the_operator_everything_works(monkeypatch):
    monkeypatch.setattr(student.encoders.linear, "available", lambda: False)
    rows, weight = torch.randn(5, 8), torch.randn(4, 8)
    assert torch.equal(linear(rows, weight), F.linear(rows, weight))


def test_a_model_with_fast_layers_can_be_copied_and_pickled():
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    rows = torch.randn(5, 8)
    for libraries in (USUAL, TORCH, {"forward 64 8 16": "torch"}):
        use_fast_linear(model, libraries)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(twin(rows), model(rows)) and twin[0].libraries == libraries
