"""Several processes that train one student: how they share a batch, add up results and end together.

torchrun or `accelerate launch` starts them; accelerate connects them, by nccl on GPUs and by gloo on CPUs. Each takes
a contiguous share of every effective batch, so order and masks do not depend on the number of processes. Gradients are
summed while the backward pass of the last micro-batch is running. A few more numbers per step are summed on the CPU in
a separate process group, so that no process waits for a GPU.

When a process ends, the others end too, because their next sum finds its connection closed. When one hangs, they end
after TIMEOUT. Not supported: models that do not fit into one GPU's memory.
"""

import atexit
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mlsm.common.errors import PeerError, RunError
from student.batches import Batch

TIMEOUT = timedelta(minutes=30)  # longer than writing a checkpoint takes: the others wait for the first process

Value = TypeVar("Value")


@dataclass(frozen=True)
class Ranks:
    """This process among the processes of the run; by default there is only one."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")
    """this process's device"""
    group: Any = None
    """process group for sums of a few numbers on the CPU"""

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that writes files and reports."""
        return self.rank == 0

    def share(self, windows: int) -> tuple[int, int]:
        """First and last (exclusive) window of a batch that this process takes. Raises RunError if some get none."""
        if windows < self.size:
            raise RunError(
                f"batch_windows is {windows}, and there are {self.size} processes: each needs a window of every"
                f" step. Raise --batch-windows, or start fewer processes."
            )
        return self._bound(windows, self.rank), self._bound(windows, self.rank + 1)

    def micro_batches_before(self, windows: int, micro_batch: int) -> int:
        """The number of this process's first micro-batch in the step: how many micro-batches lower ranks take."""
        bounds = [self._bound(windows, rank) for rank in range(self.rank + 1)]
        return sum(-(-(last - first) // micro_batch) for first, last in zip(bounds, bounds[1:], strict=False))

    def _bound(self, windows: int, rank: int) -> int:
        return windows * rank // self.size

    def whole(self, batch: Batch) -> Batch:
        """This process's share of a batch, with counts, tokens and digest of the whole batch."""
        digest = divmod(batch.digest, 2**32)  # in halves: sums are float64
        *counts, tokens, high, low = map(int, self.sum([*batch.counts, batch.tokens, *digest]))
        return batch._replace(counts=tuple(counts), tokens=tokens, digest=(high * 2**32 + low) % 2**64)

    def sum(self, values: list) -> list:
        """Numbers added up over all processes, in float64."""
        return values if self.size == 1 else self._reduce(values, dist.ReduceOp.SUM)

    def sum_exactly(self, numbers: torch.Tensor) -> torch.Tensor:
        """Whole numbers, int64 on the CPU, added up over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(numbers, group=self.group)
        return numbers

    def any(self, flag: torch.Tensor) -> torch.Tensor:
        """1 where the flag, a float on each process's own device, is 1 in some process; nothing waits for a GPU."""
        if self.size > 1:
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        return flag

    def agree(self, requested: signal.Signals | None) -> signal.Signals | None:
        """The signal that some process received, or None."""
        if self.size == 1:
            return requested
        number = int(self._reduce([requested or 0], dist.ReduceOp.MAX)[0])
        return signal.Signals(number) if number else None

    def _reduce(self, values: list, operation: Any) -> list:
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, operation, group=self.group)
        return total.tolist()

    def gather(self, value: Value) -> list[Value]:
        """Every process's value, by rank."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value, group=self.group)
        return values

    def ask_first(self, work: Callable[[], Value]) -> Value:
        """Run work() in the first process only and return its result in all of them."""
        return self.tell(work() if self.is_first else None)

    def tell(self, value: Any) -> Any:
        """The first process's value, in all of them."""
        values = [value]
        if self.size > 1:
            dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]

    def first_then_all(self, work: Callable[[], Value]) -> Value:
        """Run work() in the first process, then in the others, which raise PeerError if it failed there."""
        if not self.is_first:
            if not self.tell(None):
                raise PeerError("the first process of this run ended. If it wrote a message, that says why.")
            return work()
        try:
            result = work()
        except BaseException:
            self.tell(False)
            raise
        self.tell(True)
        return result

    def check_alike(self, facts: dict[str, Any]) -> None:
        """Raise RunError, which names what differs, if some process has other facts than the first."""
        first, *others = self.gather(facts)
        for rank, theirs in enumerate(others, start=1):
            differing = [
                f"{name} ({first[name]}, there {theirs[name]})" for name in first if theirs[name] != first[name]
            ]
            if differing:
                what = f"process {rank} differs from the first in {', '.join(differing)}. Start all processes alike."
                raise self.as_one(RunError(what))

    def as_one(self, error: Exception) -> Exception:
        """Replace an error that all processes raise at once, so that only one of them reports it."""
        return error if self.is_first else PeerError("the first process of this run says why.")

    def parallel(self, model: nn.Module) -> nn.Module:
        """Wrap the model so that its backward pass also sums the gradients over all processes."""
        if self.size == 1:
            return model
        # This also allows for weights without a gradient. Without it, DistributedDataParallel changes its buckets
        # after the first step, and three or more ranks would add up in another order after a resume.
        fixed_buckets = {"find_unused_parameters": True}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated")  # torch 2.12 lacks the new
            parallel = DistributedDataParallel(model, broadcast_buffers=False, **fixed_buckets)

        def sum_gradients(state, bucket):  # the default hook divides the sums by the number of processes
            work = dist.all_reduce(bucket.buffer(), async_op=True)
            return work.get_future().then(lambda future: future.value()[0])

        parallel.register_comm_hook(None, sum_gradients)
        return parallel

    def accumulating(self, parallel: nn.Module, last: bool) -> AbstractContextManager[None]:
        """The context of one micro-batch's forward and backward pass; gradients are summed over ranks in the last."""
        return nullcontext() if last or self.size == 1 else parallel.no_sync()


@contextmanager
def join(device: torch.device) -> Iterator[Ranks]:
    """Join the processes that a launcher started with this one; yields Ranks.

    device  what --device means to one process; each gets its own GPU
    Raises  RunError   too few GPUs
            PeerError  another process ended, or hangs
    """
    if int(os.environ.get("WORLD_SIZE") or 1) == 1:
        yield Ranks(device=device)
        return
    from accelerate import PartialState  # only here: a single process does not need it

    _check_devices(device)
    state = PartialState(cpu=device.type == "cpu", timeout=TIMEOUT)
    group = dist.new_group(backend="gloo", timeout=TIMEOUT)
    try:
        yield Ranks(state.process_index, state.num_processes, state.device, group)
    except RuntimeError as error:
        # torch has a class for some errors of a connection; others are plain RuntimeErrors that gloo names.
        words = ("gloo", "pair closure", "Connection")
        is_of_gloo = type(error) is RuntimeError and any(word in str(error) for word in words)
        if isinstance(error, dist.DistError) or is_of_gloo:
            raise PeerError(
                f"another process of this run ended, or did not answer for {TIMEOUT}. If it wrote a message, that says"
                " why. The same command continues from the last whole checkpoint."
            ) from error
        raise
    # Only at the end of the process, because a launcher's rendezvous works once and another run may follow. Never after
    # an error, as NCCL could wait for processes that have ended.
    atexit.unregister(state.destroy_process_group)
    atexit.register(state.destroy_process_group)


def _check_devices(device: torch.device) -> None:
    here = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    if device.type == "cuda" and here > torch.cuda.device_count():
        raise RunError(
            f"{here} processes on a machine where torch sees {torch.cuda.device_count()} GPUs. Start one for each GPU"
            f" at most, like  torchrun --nproc-per-node {torch.cuda.device_count()}"
        )
