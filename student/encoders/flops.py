"""How many floating-point operations a step takes, and how many a device could do.

They are counted by running the student's own forward pass on tensors without content, or on zeros if the pass asks for
values. So whatever this pass skips (the head at positions that are not masked) is not counted either. Only matrix
products are counted, a multiplication and an addition as two operations. A training step counts as three forward
passes, as the backward pass has two products for each one. Recomputed activations are not counted: they save memory and
are not work on the model. Not handled here: time (meter.py).

Shapes: W windows, L positions, M masked tokens.
"""

import math
import re
from collections.abc import Callable
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mlsm.common.device import spare_randomness
from mlsm.common.onednn import available
from student.config import ResolvedConfig

# Peak of dense matrix products in 10^12 FLOP/s, in bfloat16 (tensor cores, float32 sums) and plain float32; the first
# pattern found in CUDA's name of the device counts. Where NVIDIA's data sheets say "with sparsity", half of that.
# Data sheets: DGX B200 (72 PFLOPS of sparse FP8 are 8 x 2 x 2 x 2.25), H200, H100, A100, L40S, V100, T4; GA102 and Ada
# white papers, appendix A: RTX 3090 and 4090. V100 and T4 have no bfloat16.
_PEAK_TERAFLOPS = (
    (r"\bB200\b", {torch.bfloat16: 2250.0}),
    (r"\bH[12]00 NVL\b", {torch.bfloat16: 835.5, torch.float32: 60.0}),
    (r"\bH100 PCIe\b", {torch.bfloat16: 756.5, torch.float32: 51.0}),
    (r"\bH100 80GB HBM3\b|\bH200\b", {torch.bfloat16: 989.5, torch.float32: 67.0}),
    (r"\bA100\b", {torch.bfloat16: 312.0, torch.float32: 19.5}),
    (r"\bL40S\b", {torch.bfloat16: 362.0, torch.float32: 91.6}),
    (r"\bRTX 4090$", {torch.bfloat16: 165.2, torch.float32: 82.6}),  # 4090 D and Laptop are slower
    (r"\bRTX 3090$", {torch.bfloat16: 71.0, torch.float32: 35.6}),
    (r"\bV100S\b", {torch.float32: 16.4}),
    (r"\bV100-PCIE\b", {torch.float32: 14.1}),
    (r"\bV100-SXM2\b", {torch.float32: 15.7}),
    (r"\bT4$", {torch.float32: 8.1}),
)


def forward_flops(model: nn.Module, windows: int, length: int, masked: int) -> int:
    """Operations of a student's forward pass: encoder, head and output matrix.

    masked  masked positions in all windows together
    """
    inputs = {"input_WL": (windows, length), "where_M": (masked,), "most_masked": -(-masked // windows)}
    visible = length - masked // windows  # tokens per window below the layer where [MASK] enters
    return count_operations(model, attention_WL=None, **inputs, visible=[visible, visible])


def count_operations(module: nn.Module, **inputs: Any) -> int:
    """Operations of a forward pass of any module, without computing it if that is possible.

    inputs  keyword arguments; a tuple is the shape of an int64 tensor
    """
    # On `meta`, because there attention falls apart into products that the counter knows; the CPU's fused one it
    # does not. As fake tensors, because transformers looks for padding in real ones.
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return _count(module, inputs, partial(torch.empty, device="meta"))
    except DataDependentOutputException:  # the forward pass asks for a value, as Longformer's does
        with spare_randomness(), sdpa_kernel(SDPBackend.MATH):  # this one the counter knows
            return _count(module, inputs, partial(torch.zeros, device="cpu"))


def _count(module: nn.Module, inputs: dict, make: Callable[..., torch.Tensor]) -> int:
    """Operations of a forward pass with weights and inputs that are made of a shape and a type."""
    # Not compiled: torch.compile would give up on the forward pass here, and leave it alone from then on.
    eager = torch.compiler.set_stance("force_eager")
    # What FastLinear calls on a CPU, which the counter does not know.
    own = {torch.ops.mkldnn._linear_pointwise: _linear_operations} if available() else {}
    with eager, torch.no_grad(), FlopCounterMode(display=False, custom_mapping=own) as counter:
        tensors = [*module.named_parameters(), *module.named_buffers()]
        state = {name: make(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors}
        given = {
            name: make(value, dtype=torch.int64) if isinstance(value, tuple) else value
            for name, value in inputs.items()
        }
        functional_call(module, state, (), given)
    return counter.get_total_flops()


def _linear_operations(rows_shape, weight_shape, *_, **__) -> int:
    return 2 * math.prod(rows_shape) * weight_shape[0]


def step_flops(model: nn.Module, config: ResolvedConfig, length: int, pieces: int = 1) -> int:
    """Operations of a run's average optimiser step on windows of `length` full of text, each cut into pieces."""
    at_end = 1 - fmean(config.mask_rate_steps) if config.mask_schedule == "steps" else 0.5  # of the way, on average
    first, last = config.predicted
    rate = (1 - at_end) * first + at_end * last
    masked = round(rate * (length - 2))  # of a window with its two special tokens
    whole, rest = divmod(config.batch_windows, config.micro_batch)
    flops = 0
    if whole:
        flops += whole * model.training_flops(
            pieces * config.micro_batch, length // pieces, config.micro_batch * masked
        )
    if rest:
        flops += model.training_flops(pieces * rest, length // pieces, rest * masked)
    return flops


def peak_flops(device: torch.device, dtype: torch.dtype | None) -> float | None:
    """Operations per second that a device can do in products of a type (None: float32); None if not known."""
    if device.type != "cuda":
        return None
    return named_peak(torch.cuda.get_device_name(device), dtype)


def named_peak(name: str, dtype: torch.dtype | None) -> float | None:
    """The same for the name that CUDA gives a GPU, like NVIDIA H100 80GB HBM3."""
    if " MIG " in name:  # a slice, which does a part of that
        return None
    peaks = next((peaks for pattern, peaks in _PEAK_TERAFLOPS if re.search(pattern, name)), {})
    peak = peaks.get(dtype or torch.float32)
    return None if peak is None else peak * 1e12
