"""Memory of the device: how much was used, and which smaller micro-batch fits after one did not fit.

Not handled here: the forward and backward pass (train.py).
"""

import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from mlsm.common.errors import TrainingError, describe


def peak_memory(device: torch.device) -> int:
    """Peak bytes since the start or `forget_peak`: of tensors on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def forget_peak(device: torch.device) -> None:
    """Reset `peak_memory`; on a CPU only Linux does that."""
    if device.type == "cuda":
        if torch.cuda.is_initialized():  # otherwise there is nothing to forget, and torch raises RuntimeError
            torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # 5 resets only the peak


@contextmanager
def name_lack_of_memory(place: object, length: int) -> Iterator[None]:
    """Turn torch's error for a CPU without memory, which has no class of its own, into a TrainingError.

    place, length  the store, and the tokens in its windows; a damaged store can ask for any amount of memory
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "DefaultCPUAllocator" not in str(error):
            raise
        raise TrainingError(
            f"too little memory for windows of {length:,} tokens, as in {place} ({describe(error)}). Use a smaller "
            "--micro-batch or --encoder, or a store of shorter windows."
        ) from error


def shortage(error: Exception) -> str:
    """What torch says of a lack of memory, without its advice: the first sentence of the first line."""
    return str(error).partition("\n")[0].partition(". ")[0]


def what_fits(micro_batch: int, fits: Callable[[int], bool]) -> str:
    """Advice to someone whose micro-batch did not fit: the first of its half, its quarter, ... that does."""
    smaller = micro_batch // 2
    while smaller > 0 and not fits(smaller):
        smaller //= 2
    advice = f"--micro-batch {smaller} fits" if smaller else "Not even one window fits: use a smaller --encoder"
    return (
        f"with --micro-batch {micro_batch}. {advice}; the effective batch stays as it is. --activation-checkpointing"
        f" needs less, too."
    )
