"""From (seed, step) to masked input and targets: a pure function, so there is no state to save.

The training stream is one endless sequence of windows: epoch 0 in its order, then epoch 1 in its own, and
so on. Step s takes the windows [s B, (s + 1) B), so every batch is full and some span two epochs. Reading
happens one step ahead in a thread. Left out: how windows are stored (shards), which positions are masked
(masking.py), what a target is (objectives.py).

Shapes: W windows, L positions of a window, M masked tokens.
"""

import hashlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch

from student.masking import choose_mask, maskable_positions


class MicroBatch(NamedTuple):
    """Windows of one forward pass, as CPU tensors."""

    input_WL: torch.Tensor
    """int64 token ids, the masked ones replaced by the mask token"""
    attention_WL: torch.Tensor | None
    """int64, 0 at padding and 1 elsewhere; None where no window is padded"""
    where_M: torch.Tensor
    """int64 masked positions in the flattened (W L) input"""
    targets: Any
    """what the objective compares its logits with; has a `count` of tokens that carry loss"""


class Batch(NamedTuple):
    """One effective batch."""

    micro: list[MicroBatch]
    count: int
    """tokens that carry loss"""
    tokens: int
    """real tokens, special ones included"""
    digest: str
    """hash of window ids, epochs, token ids and mask: equal for every objective on one plan"""


class Loader:
    """Reads batches of a split for one objective.

    read_targets  (windows, window_batch, window_M, position_M) -> targets; the objective's method
    """

    def __init__(self, windows, special_ids, read_targets: Callable, *, mask_rate: float, micro_batch: int):
        self.windows = windows
        self.special_ids = special_ids
        self.read_targets = read_targets
        self.mask_rate = mask_rate
        self.micro_batch = micro_batch

    def step(self, seed: int, step: int, batch_windows: int) -> Batch:
        """The batch of one optimiser step, counted from 0."""
        window_ids_W, epochs_W = stream(self.windows, seed, step * batch_windows, (step + 1) * batch_windows)
        return self.load(window_ids_W, epochs_W, seed)

    def load(self, window_ids_W, epochs_W, mask_seed: int) -> Batch:
        """Read windows, mask them, and split them into micro-batches."""
        read = self.windows.read(window_ids_W)
        maskable_WL = maskable_positions(read.ids, read.lengths, self.special_ids["all"])
        mask_WL = choose_mask(maskable_WL, window_ids_W, seed=mask_seed, epoch=epochs_W, rate=self.mask_rate)
        starts = range(0, len(window_ids_W), self.micro_batch)
        micro = [self._micro(read, mask_WL, start) for start in starts]
        return Batch(
            micro=micro,
            count=sum(part.targets.count for part in micro),
            tokens=int(read.lengths.sum()),
            digest=_digest(window_ids_W, epochs_W, read.ids, mask_WL),
        )

    def _micro(self, read, mask_WL, start: int) -> MicroBatch:
        part = slice(start, start + self.micro_batch)
        ids_WL, lengths_W, mask_WL = read.ids[part], read.lengths[part], mask_WL[part]
        window_M, position_M = np.nonzero(mask_WL)
        width = ids_WL.shape[1]
        padded = bool((lengths_W < width).any())
        real_WL = np.arange(width) < lengths_W[:, None]
        return MicroBatch(
            input_WL=torch.from_numpy(np.where(mask_WL, self.special_ids["mask"], ids_WL).astype(np.int64)),
            attention_WL=torch.from_numpy(real_WL.astype(np.int64)) if padded else None,
            where_M=torch.from_numpy(window_M * width + position_M),
            targets=self.read_targets(self.windows, read, start + window_M, position_M),
        )


def stream(windows, seed: int, start: int, stop: int):
    """Windows [start, stop) of the endless sequence of epochs.

    Returns  window ids and the epoch of each, int64 arrays
    """
    return windows.stream(seed, start, stop)


def read_ahead(load: Callable[[int], Batch], start: int, stop: int):
    """Read the batch of the next step while the caller works on this one.

    Yields  (step, load(step), seconds spent waiting for it); an error in the thread is raised at its step
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") as reader:
        upcoming = reader.submit(load, start) if start < stop else None
        for step in range(start, stop):
            asked = time.perf_counter()
            batch = upcoming.result()
            waited = time.perf_counter() - asked
            if step + 1 < stop:
                upcoming = reader.submit(load, step + 1)
            yield step, batch, waited


def to_device(value, device):
    """Copy the tensors of nested named tuples to a device; other values stay."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple):
        return type(value)(*(to_device(field, device) for field in value))
    return value


def _digest(window_ids_W, epochs_W, ids_WL, mask_WL) -> str:
    state = hashlib.blake2b(digest_size=8)
    for array in (window_ids_W, epochs_W, ids_WL):
        state.update(np.ascontiguousarray(array, dtype=np.int64))
    state.update(np.packbits(mask_WL))
    return state.hexdigest()
