"""Linear layers by oneDNN on a CPU, forward and backward.

On an AMD EPYC (Zen 5) they took less than half the time of torch's own for the products of a BERT of 6 x 256
(common/onednn.py says why). Everything works without the operator. On a GPU, under autocast or torch.compile, layers
are torch's own.

Shapes: N rows, d inputs, K outputs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.onednn import available, multiply


def linear(rows_nd: Tensor, weight_Kd: Tensor, bias_K: Tensor | None = None) -> Tensor:
    """rows @ weight.T + bias; rows may have any leading dimensions."""
    if not _serves(rows_nd, weight_Kd):
        return F.linear(rows_nd, weight_Kd, bias_K)
    rows_Nd = rows_nd.reshape(-1, rows_nd.shape[-1])  # outside: a view made inside may not be changed in place
    return _Linear.apply(rows_Nd, weight_Kd, bias_K).view(*rows_nd.shape[:-1], len(weight_Kd))


def use_onednn(model: nn.Module) -> None:
    """Let the linear layers inside a model be computed by `linear`; their weights and names stay."""
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = OneDnnLinear


class OneDnnLinear(torch.nn.Linear):
    """A linear layer computed by `linear`."""

    def forward(self, rows_nd: Tensor) -> Tensor:
        return linear(rows_nd, self.weight, self.bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_Nd, weight_Kd, bias_K):
        ctx.save_for_backward(rows_Nd, weight_Kd)
        return multiply(rows_Nd, weight_Kd, bias_K)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient_NK):
        rows_Nd, weight_Kd = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return (
            multiply(gradient_NK, weight_Kd.t()) if wanted[0] else None,
            multiply(gradient_NK.t(), rows_Nd.t()) if wanted[1] else None,
            gradient_NK.sum(0) if wanted[2] else None,
        )


def _serves(rows_nd, weight_Kd) -> bool:
    if torch.compiler.is_compiling():
        return False
    plain = rows_nd.dtype == weight_Kd.dtype == torch.float32 and rows_nd.device.type == "cpu"
    return plain and rows_nd.numel() > 0 and not torch.is_autocast_enabled("cpu") and available()
