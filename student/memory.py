"""Memory of the device: how much was used, and which micro-batch fits where another one did not.

Left out: one pass of forward and backward (step.py).
"""

import resource
import sys
from collections.abc import Callable

import torch


def peak_memory(device: torch.device) -> int:
    """Most bytes used so far: of tensors on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def free_unused(device: torch.device) -> None:
    """Give memory that torch keeps for later back to the GPU."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def what_fits(micro_batch: int, fits: Callable[[int], bool]) -> str:
    """Advice to someone whose micro-batch did not fit."""
    smaller = largest_that_fits(micro_batch, fits)
    advice = f"--micro-batch {smaller} fits" if smaller else "Not even one window fits: take a smaller --encoder"
    return (
        f"with --micro-batch {micro_batch}. {advice}; the effective batch stays as it is. --activation-checkpointing"
        f" needs less, too."
    )


def largest_that_fits(micro_batch: int, fits: Callable[[int], bool]) -> int | None:
    """The first of a half, a quarter, ... of a micro-batch that fits; None where not even one window does."""
    while micro_batch > 1:
        micro_batch //= 2
        if fits(micro_batch):
            return micro_batch
    return None
