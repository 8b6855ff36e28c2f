"""Linear layers on a CPU, forward and backward, each product by the faster of torch's two libraries.

mlsm/common/matrix_products.py measures which one is faster, and explains why this differs between machines. Without
oneDNN, on a GPU, under autocast or torch.compile, layers use torch's own operations.

Shapes: N rows, d inputs, K outputs.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlsm.common.matrix_products import USUAL, find_way
from mlsm.common.onednn import available


def linear(
    rows_nd: Tensor, weight_Kd: Tensor, bias_K: Tensor | None = None, libraries: Mapping[str, str] = USUAL
) -> Tensor:
    """rows @ weight.T + bias; rows may have any leading dimensions.

    libraries  which library computes which product, from `measure_libraries`; by default everything is oneDNN's
    """
    if not _serves(rows_nd, weight_Kd):
        return F.linear(rows_nd, weight_Kd, bias_K)
    rows_Nd = rows_nd.reshape(-1, rows_nd.shape[-1])  # a view made inside may not be changed in place
    return _Linear.apply(rows_Nd, weight_Kd, bias_K, libraries).view(*rows_nd.shape[:-1], len(weight_Kd))


def use_fast_linear(model: nn.Module, libraries: Mapping[str, str] = USUAL) -> None:
    """Let `linear` compute the linear layers inside a model; their weights and names stay.

    Modules that call `linear` themselves have an attribute `libraries`, which this also sets.
    """
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.__class__ = FastLinear
        if isinstance(module, FastLinear) or hasattr(module, "libraries"):
            module.libraries = libraries


class FastLinear(torch.nn.Linear):
    """A linear layer computed by `linear`."""

    libraries: Mapping[str, str] = USUAL

    def forward(self, rows_nd: Tensor) -> Tensor:
        return linear(rows_nd, self.weight, self.bias, self.libraries)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_Nd, weight_Kd, bias_K, libraries):
        ctx.save_for_backward(rows_Nd, weight_Kd)
        ctx.libraries, ctx.shape = libraries, (len(rows_Nd), *reversed(weight_Kd.shape))
        return find_way("forward", ctx.shape, libraries)(rows_Nd, weight_Kd, bias_K)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient_NK):
        rows_Nd, weight_Kd = ctx.saved_tensors
        of_rows = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_rows = find_way("input_gradient", ctx.shape, ctx.libraries)(gradient_NK, weight_Kd)
        if ctx.needs_input_grad[1]:
            of_weight = find_way("weight_gradient", ctx.shape, ctx.libraries)(gradient_NK, rows_Nd)
        if ctx.needs_input_grad[2]:
            of_bias = gradient_NK.sum(0)
        return of_rows, of_weight, of_bias, None


def _serves(rows_nd, weight_Kd) -> bool:
    if torch.compiler.is_compiling():
        return False
    plain = rows_nd.dtype == weight_Kd.dtype == torch.float32 and rows_nd.device.type == "cpu"
    return plain and rows_nd.numel() > 0 and not torch.is_autocast_enabled("cpu") and available()
