"""Lanes: where a stage's work on the device is queued, and how it waits for another stage's.

On a GPU every stage has a CUDA stream of its own, so that teacher, solver and copies overlap; order between
them is by events, and memory that crosses over is not used again before its reader is done. How torch sums products
of float16 is a setting of the process: all lanes have the solver's, or the last bits of a teacher's states would
depend on whether the solver is at work beside it. On a CPU a call returns when its work is done, and a lane only
reads the clock. Not run on a GPU yet.
"""

import contextlib
import time

import torch

from pipeline.solvers.cuda_products import sums_in_float32


def open_lane(device: torch.device) -> "GpuLane | HostLane":
    """A new lane of the device; use it as `with lane:` around the calls that queue work."""
    return GpuLane(device) if device.type == "cuda" else HostLane()


class HostLane:
    """Work is done when the call returns: nothing to order."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def mark(self) -> float:
        """A point in the lane's work, for `after` and `seconds`."""
        return time.perf_counter()

    def after(self, mark: float, *tensors: torch.Tensor) -> None:
        """Let this lane's next work wait for a mark of another lane, from which it takes over tensors."""

    @staticmethod
    def seconds(begin: float, end: float) -> float:
        """Time between two marks of one lane; waits until the second is reached."""
        return end - begin


class GpuLane:
    """A CUDA stream, for the thread of one stage."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)
        self._entered = contextlib.ExitStack()

    def __enter__(self):
        self._entered.enter_context(torch.cuda.stream(self._stream))  # the device as well: both belong to the thread
        self._entered.enter_context(sums_in_float32())
        return self

    def __exit__(self, *_):
        self._entered.close()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def after(self, mark: torch.cuda.Event, *tensors: torch.Tensor) -> None:
        self._stream.wait_event(mark)
        for tensor in tensors:
            tensor.record_stream(self._stream)  # else freed memory would go back to the other stream at once

    @staticmethod
    def seconds(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return begin.elapsed_time(end) / 1000
