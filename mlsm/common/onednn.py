"""Matrix products by oneDNN, which torch carries but asks only for some of its float32 products.

torch sends a float32 product on a CPU to MKL, NumPy to OpenBLAS. On an AMD EPYC (Zen 5) neither uses AVX-512, and
oneDNN took half the time or less. The operator is a private one of torch, so it is tried once; where `available()` says
no, its users must do without. Not handled here: where torch's own is faster (matrix_products.py), gradients
(student/encoders/), threads and rounding (pipeline/solvers/onednn.py).

Shapes: N rows, d inputs, K outputs.
"""

import functools

import torch


def multiply(rows_Nd: torch.Tensor, weight_Kd: torch.Tensor, bias_K: torch.Tensor | None = None) -> torch.Tensor:
    """rows @ weight.T + bias on float32 tensors of the CPU: a new tensor (N, K) without a gradient."""
    return torch.ops.mkldnn._linear_pointwise(rows_Nd, weight_Kd, bias_K, "none", [], "")


@functools.cache
def available() -> bool:
    """Whether the operator exists here and computes what it should."""
    place = {"dtype": torch.float32, "device": "cpu"}
    rows, weight = torch.arange(6, **place).view(2, 3), torch.arange(12, **place).view(4, 3)
    bias = torch.arange(4, **place)
    try:
        return torch.equal(multiply(rows, weight, bias), torch.nn.functional.linear(rows, weight, bias))
    except (AttributeError, RuntimeError, TypeError):
        return False


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 itself, and oneDNN's operator takes it."""
    rows = torch.arange(6, dtype=torch.float32).view(2, 3)
    try:
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return fast and available() and torch.equal(multiply(rows.bfloat16(), rows.bfloat16()).float(), rows @ rows.T)
    except (AttributeError, RuntimeError, TypeError):
        return False
