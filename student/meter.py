"""Measure what a step costs: the numbers on speed and memory in a run's log.

Not handled here: how operations are counted (flops.py), what a step computes (train.py).
"""

from dataclasses import KW_ONLY, dataclass

import torch
from torch import nn

from student.config import ResolvedConfig
from student.encoders.flops import peak_flops, step_flops
from student.memory import peak_memory


@dataclass(eq=False)
class Meter:
    """Computes throughput, FLOPs and memory from the time of a step.

    step_flops   floating-point operations of one optimiser step on whole windows, over all devices
    peak_flops   peak operations per second of these devices; None if unknown
    device       the device whose memory is measured
    short_steps  how many steps at the beginning read windows cut into pieces
    short_flops  operations of one of these
    """

    step_flops: int
    peak_flops: float | None
    device: torch.device
    _: KW_ONLY
    short_steps: int = 0
    short_flops: int = 0

    @classmethod
    def of_run(
        cls, config: ResolvedConfig, model: nn.Module, length: int, autocast_dtype: torch.dtype | None, ranks: int = 1
    ) -> "Meter":
        """The meter of a run of `ranks` equal devices on windows of a length."""
        device = next(model.parameters()).device
        peak = peak_flops(device, autocast_dtype)
        own, short = step_flops(model, config, length), {}
        if config.short_windows is not None:
            short["short_steps"] = config.short_steps(config.max_steps)
            short["short_flops"] = step_flops(model, config, length, length // config.short_windows)
        return cls(own, None if peak is None else ranks * peak, device, **short)

    def flops_after(self, steps: int) -> int:
        """Nominal operations of the first steps of the run. They follow from the number of steps only, so interruptions
        do not change them."""
        short = min(steps, self.short_steps)
        return short * self.short_flops + (steps - short) * self.step_flops

    def figures(self, *, steps: int, tokens: int, seconds: float, waited: float) -> dict:
        """Figures of one step, including its waiting time.

        steps    optimiser steps done, with this one
        tokens   real tokens of the batch
        seconds  duration of the step
        waited   seconds of these in which the step waited for data
        Returns  tokens_per_second, data_wait_seconds, data_wait_share, flops (of the run so far), flops_per_second, mfu
                 (share of the peak; absent if that is not known), peak_memory_bytes (of the GPU's tensors, or of
                 this process on a CPU)
        """
        flops = self.flops_after(steps)
        rate = (flops - self.flops_after(steps - 1)) / seconds
        mfu = {} if self.peak_flops is None else {"mfu": rate / self.peak_flops}
        return {
            "tokens_per_second": tokens / seconds,
            "data_wait_seconds": waited,
            "data_wait_share": waited / seconds,
            "flops": flops,
            "flops_per_second": rate,
            **mfu,
            "peak_memory_bytes": peak_memory(self.device),
        }


def closest_baseline(baseline: dict, reads_words: bool = False) -> str:
    """The name of the loss of the strongest constant prediction: one constant, or one for each position (LSPs). If no
    token is hidden from the student, there is also one for each token id (`loss_by_type`, of vectors)."""
    names = ("loss_by_position", *(("loss_by_type",) if reads_words else ()))
    return next((name for name in names if name in baseline), "loss")


def share_of_baseline(held_out: dict, baseline: dict, name: str = "loss") -> float | None:
    """Held-out loss divided by the constant prediction's: 1 means nothing was learned. None without evaluation."""
    if not held_out or not baseline.get(name):
        return None
    return held_out["loss"] / baseline[name]
