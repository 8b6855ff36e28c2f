"""What a step costs: the figures of speed and memory in a run's log.

Left out: how operations are counted (flops.py), what a step computes (step.py).
"""

import torch
from torch import nn

from student.config import ResolvedConfig
from student.flops import peak_flops, step_flops
from student.memory import peak_memory


class Meter:
    """Turns the time of a step into figures.

    step_flops  floating-point operations of one optimiser step, over all devices
    peak_flops  what these devices could do in a second; None where that is not known
    device      whose memory counts
    """

    def __init__(self, step_flops: int, peak_flops: float | None, device: torch.device):
        self.step_flops, self.peak_flops, self.device = step_flops, peak_flops, device

    @classmethod
    def of_run(
        cls, config: ResolvedConfig, model: nn.Module, length: int, autocast_dtype: torch.dtype | None, ranks: int = 1
    ) -> "Meter":
        """The meter of a run of `ranks` equal devices on windows of a length."""
        device = next(model.parameters()).device
        peak = peak_flops(device, autocast_dtype)
        return cls(step_flops(model, config, length), None if peak is None else ranks * peak, device)

    def figures(self, *, steps: int, tokens: int, seconds: float, waited: float) -> dict:
        """Figures of the step that was the `steps`th, waiting included.

        tokens   real ones of the batch
        seconds  the step took
        waited   of these for data
        Returns  tokens_per_second, data_wait_seconds, data_wait_share, flops (of the run so far, nominal: a function
                 of the step, so that interruptions do not matter), flops_per_second, mfu (share of the peak; absent
                 where that is not known), peak_memory_bytes (of the GPU's tensors, or of this process on a CPU)
        """
        rate = self.step_flops / seconds
        mfu = {} if self.peak_flops is None else {"mfu": rate / self.peak_flops}
        return {
            "tokens_per_second": tokens / seconds,
            "data_wait_seconds": waited,
            "data_wait_share": waited / seconds,
            "flops": steps * self.step_flops,
            "flops_per_second": rate,
            **mfu,
            "peak_memory_bytes": peak_memory(self.device),
        }


def share_of_baseline(held_out: dict, baseline: dict, name: str = "loss") -> float | None:
    """Held-out loss over that of the constant prediction: at 1 nothing was learned. None without evaluation."""
    if not held_out or not baseline.get(name):
        return None
    return held_out["loss"] / baseline[name]
