"""Matrix products by oneDNN, which torch carries but asks only for some of its float32 products.

torch sends a float32 product on a CPU to MKL, NumPy to OpenBLAS. On an AMD EPYC (Zen 5) neither uses AVX-512:
the correlations of 256 tokens with 3072 atoms took 22 and 19 microseconds a token, 9.7 by oneDNN. The operator
is a private one of torch, so it is tried once, and both functions do without where it is missing or fails.
"""

import functools
from contextlib import contextmanager

import torch
from threadpoolctl import ThreadpoolController


def linear(rows_nd, weight_Kd, bias_K=None):
    """rows @ weight.T + bias on float32 tensors of the CPU, for inference: a new tensor (n, K).

    As with torch's own, torch.set_float32_matmul_precision lets some processors round the factors.
    """
    if not available():
        return torch.nn.functional.linear(rows_nd, weight_Kd, bias_K)
    return torch.ops.mkldnn._linear_pointwise(rows_nd, weight_Kd, bias_K, "none", [], "")


def product(rows_nd, weight_Kd):
    """rows @ weight.T on float32 tensors of the CPU, in float32 whatever torch is allowed to round."""
    return linear(rows_nd, weight_Kd) if is_exact() else torch.from_numpy(rows_nd.numpy() @ weight_Kd.numpy().T)


def is_exact():
    """Whether oneDNN is there and not allowed to round the factors; else `product` is NumPy's."""
    return available() and torch.backends.mkldnn.matmul.fp32_precision not in ("bf16", "tf32")


@functools.cache
def available():
    """Whether the operator exists here and computes what it should."""
    place = {"dtype": torch.float32, "device": "cpu"}
    rows, weight = torch.arange(6, **place).view(2, 3), torch.arange(12, **place).view(4, 3)
    bias = torch.arange(4, **place)
    try:
        found = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
        return torch.equal(found, torch.nn.functional.linear(rows, weight, bias))
    except (AttributeError, RuntimeError, TypeError):
        return False


_libraries = functools.cache(ThreadpoolController)      # made after torch, hence OpenMP, is loaded


@contextmanager
def one_thread():
    """In the calling thread alone, let products run in this thread."""
    torch.get_num_threads()         # torch sets OpenMP's number in each thread once, at its first use: before us
    with _libraries().limit(limits=1, user_api="openmp"):
        yield
