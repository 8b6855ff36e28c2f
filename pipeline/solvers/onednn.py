"""Matrix products by oneDNN, which torch carries but asks only for some of its float32 products.

torch sends a float32 product on a CPU to MKL, NumPy to OpenBLAS. On an AMD EPYC (Zen 5) neither uses AVX-512:
the correlations of 256 tokens with 3072 atoms took 22 and 19 microseconds a token, 9.7 by oneDNN. The operator
is a private one of torch, so it is tried once, and both functions do without where it is missing or fails.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from threadpoolctl import ThreadpoolController

from mlsm.common.onednn import available, multiplies_bfloat16, multiply


def linear(rows_nd: torch.Tensor, weight_Kd: torch.Tensor, bias_K: torch.Tensor | None = None) -> torch.Tensor:
    """rows @ weight.T + bias on float32 tensors of the CPU, for inference: a new tensor (n, K).

    As with torch's own, torch.set_float32_matmul_precision lets some processors round the factors.
    """
    if not available():
        return torch.nn.functional.linear(rows_nd, weight_Kd, bias_K)
    return multiply(rows_nd, weight_Kd, bias_K)


def product(rows_nd: torch.Tensor, weight_Kd: torch.Tensor) -> torch.Tensor:
    """rows @ weight.T on float32 tensors of the CPU, in float32 whatever torch is allowed to round."""
    return linear(rows_nd, weight_Kd) if is_exact() else torch.from_numpy(rows_nd.numpy() @ weight_Kd.numpy().T)


def is_exact() -> bool:
    """Whether oneDNN is there and not allowed to round the factors; else `product` is NumPy's."""
    return available() and torch.backends.mkldnn.matmul.fp32_precision not in ("bf16", "tf32")


__all__ = ["is_exact", "linear", "multiplies_bfloat16", "one_thread", "product"]
_libraries = functools.cache(ThreadpoolController)  # made after torch, hence OpenMP, is loaded


@contextmanager
def one_thread() -> Iterator[None]:
    """In the calling thread alone, let products run in this thread."""
    torch.get_num_threads()  # torch sets OpenMP's number in each thread once, at its first use: before us
    with _libraries().limit(limits=1, user_api="openmp"):
        yield
