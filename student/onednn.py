"""Linear layers by oneDNN on a CPU, forward and backward.

torch sends a float32 product on a CPU to MKL, which on an AMD EPYC (Zen 5) does not use AVX-512; oneDNN, which torch
carries too, took less than half the time for the products of a BERT of 6 x 256. The operator is a private one, so
it is tried once, and everything works without it. On a GPU, under autocast or torch.compile, layers are torch's own.

Shapes: N rows, d inputs, K outputs.
"""

import functools

import torch
import torch.nn.functional as F


def linear(rows_nd, weight_Kd, bias_K=None):
    """rows @ weight.T + bias; rows may have any leading dimensions."""
    if not _serves(rows_nd, weight_Kd):
        return F.linear(rows_nd, weight_Kd, bias_K)
    rows_Nd = rows_nd.reshape(-1, rows_nd.shape[-1])    # outside: a view made inside may not be changed in place
    return _Linear.apply(rows_Nd, weight_Kd, bias_K).view(*rows_nd.shape[:-1], len(weight_Kd))


def use_onednn(model) -> None:
    """Let the linear layers inside a model be computed by `linear`; their weights and names stay."""
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = OneDnnLinear


class OneDnnLinear(torch.nn.Linear):
    """A linear layer computed by `linear`."""

    def forward(self, rows_nd):
        return linear(rows_nd, self.weight, self.bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_Nd, weight_Kd, bias_K):
        ctx.save_for_backward(rows_Nd, weight_Kd)
        return _product(rows_Nd, weight_Kd, bias_K)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient_NK):
        rows_Nd, weight_Kd = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (
            _product(gradient_NK, weight_Kd.t()) if wanted[0] else None,
            _product(gradient_NK.t(), rows_Nd.t()) if wanted[1] else None,
            gradient_NK.sum(0) if wanted[2] else None,
        )


def _product(rows_Nd, weight_Kd, bias_K=None):
    return torch.ops.mkldnn._linear_pointwise(rows_Nd, weight_Kd, bias_K, "none", [], "")


def _serves(rows_nd, weight_Kd) -> bool:
    if torch.compiler.is_compiling():
        return False
    plain = rows_nd.dtype == weight_Kd.dtype == torch.float32 and rows_nd.device.type == "cpu"
    return plain and rows_nd.numel() > 0 and not torch.is_autocast_enabled("cpu") and _available()


@functools.cache
def _available() -> bool:
    """Whether the operator exists here and computes what it should."""
    place = {"dtype": torch.float32, "device": "cpu"}
    rows, weight = torch.arange(6, **place).view(2, 3), torch.arange(12, **place).view(4, 3)
    bias = torch.arange(4, **place)
    try:
        return torch.equal(_product(rows, weight, bias), F.linear(rows, weight, bias))
    except (AttributeError, RuntimeError, TypeError):
        return False
