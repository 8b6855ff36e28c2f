"""Matrix products by oneDNN, which torch carries but asks only for some of its float32 products.

torch sends a float32 product on a CPU to MKL, NumPy to OpenBLAS. On an AMD EPYC (Zen 5) neither uses AVX-512:
the correlations of 256 tokens with 3072 atoms took 22 and 19 microseconds a token, 9.7 by oneDNN. The operator
is a private one of torch, so it is tried once, and `linear` does without where it is missing or fails.
"""

import functools
from contextlib import contextmanager

import torch
from threadpoolctl import ThreadpoolController


def linear(rows_nd, weight_Kd, bias_K=None):
    """rows @ weight.T + bias on float32 tensors of the CPU, without gradients: a new tensor (n, K)."""
    if not available():
        return torch.nn.functional.linear(rows_nd, weight_Kd, bias_K)
    return torch.ops.mkldnn._linear_pointwise(rows_nd, weight_Kd, bias_K, "none", [], "")


@functools.cache
def available():
    """Whether the operator exists here and computes what it should."""
    rows, weight, bias = torch.arange(6.0).view(2, 3), torch.arange(12.0).view(4, 3), torch.arange(4.0)
    try:
        found = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    except (AttributeError, RuntimeError, TypeError):
        return False
    return torch.equal(found, torch.nn.functional.linear(rows, weight, bias))


_libraries = functools.cache(ThreadpoolController)      # made after torch, hence OpenMP, is loaded


@contextmanager
def one_thread():
    """In the calling thread alone, let `linear` run in this thread."""
    with _libraries().limit(limits=1, user_api="openmp"):
        yield
