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

from shards.segments import segment_ids
from student.masking import Masking


class MicroBatch(NamedTuple):
    """Windows of one forward pass, as CPU tensors."""

    input_WL: torch.Tensor
    """int64 token ids, the masked ones hidden"""
    attention_WL: torch.Tensor | None
    """int64, 0 at padding and 1 elsewhere; None where no window is padded"""
    where_M: torch.Tensor
    """int64 masked positions in the flattened (W L) input, ascending"""
    most_masked: int
    """the most masked positions of a window"""
    targets: Any
    """what the objective compares its logits with; has `counts` of tokens that carry loss, one for every term"""
    documents_WL: torch.Tensor | None = None
    """int64 number of each token's document in its window, -1 at padding; None unless documents are kept apart"""
    segments_WL: torch.Tensor | None = None
    """int64, 0 in the first sentence of a pair and at padding, 1 in the second; None unless the encoder is told so"""


class Batch(NamedTuple):
    """One effective batch."""

    micro: list[MicroBatch]
    counts: tuple[int, ...]
    """tokens that carry loss, for every term of it"""
    tokens: int
    """real tokens, special ones included"""
    digest: int
    """64-bit hash of window ids, epochs, token ids and what is shown in place of the masked ones, in their order: equal
    for every objective on one plan.
    A sum over windows modulo 2^64, so that parts of a batch add up to the whole"""


class Loader:
    """Reads batches of a split for one objective.

    read_targets     (windows, window_batch, window_M, position_M) -> targets; the objective's method
    documents_apart  whether batches say which tokens belong to one document
    segments         whether batches of sentence pairs say which sentence a token belongs to
    """

    def __init__(self, windows, masking: Masking, read_targets: Callable, *, micro_batch: int,
                 documents_apart: bool = False, segments: bool = False):
        self.windows = windows
        self.masking = masking
        self.read_targets = read_targets
        self.micro_batch = micro_batch
        self.documents_apart = documents_apart
        self.segments = segments

    def step(self, seed: int, step: int, batch_windows: int, share: tuple[int, int] | None = None) -> Batch:
        """The batch of one optimiser step, counted from 0.

        share  first and last (exclusive) of its windows to read, for one of several processes; by default all
        """
        first, last = share or (0, batch_windows)
        begin = step * batch_windows
        window_ids_W, epochs_W = self.windows.stream(seed, begin + first, begin + last)
        return self.load(window_ids_W, epochs_W, seed, self.masking.rate_at(step), first)

    def load(self, window_ids_W, epochs_W, mask_seed: int, mask_rate: float, first_place: int = 0) -> Batch:
        """Read windows, mask them, and split them into micro-batches.

        first_place  where in the batch they begin
        """
        read = self.windows.read(window_ids_W)
        counted = {"seed": mask_seed, "epoch": epochs_W}
        mask_WL = self.masking.choose(read, window_ids_W, rate=mask_rate, **counted)
        input_WL = self.masking.corrupt(read.ids, mask_WL, window_ids_W, **counted)
        places_W = first_place + np.arange(len(window_ids_W))
        starts = range(0, len(window_ids_W), self.micro_batch)
        micro = [self._micro(read, input_WL, mask_WL, start) for start in starts]
        return Batch(
            micro=micro,
            counts=tuple(map(sum, zip(*(part.targets.counts for part in micro), strict=True))),
            tokens=int(read.lengths.sum()),
            digest=_digest(places_W, window_ids_W, epochs_W, read.ids, np.where(mask_WL, input_WL, -1)),
        )

    def _micro(self, read, input_WL, mask_WL, start: int) -> MicroBatch:
        part = slice(start, start + self.micro_batch)
        ids_WL, input_WL, lengths_W, mask_WL = read.ids[part], input_WL[part], read.lengths[part], mask_WL[part]
        window_M, position_M = np.nonzero(mask_WL)
        width = input_WL.shape[1]
        padded = bool((lengths_W < width).any())
        real_WL = np.arange(width) < lengths_W[:, None]
        documents_WL = torch.from_numpy(read.documents[part].astype(np.int64)) if self.documents_apart else None
        segments_WL = None
        if self.segments:    # of the window as it was read: what is masked may have become another token
            segments_WL = torch.from_numpy(segment_ids(ids_WL, lengths_W, self.masking.special_ids["sep"]))
        return MicroBatch(
            input_WL=torch.from_numpy(input_WL),
            attention_WL=torch.from_numpy(real_WL.astype(np.int64)) if padded else None,
            where_M=torch.from_numpy(window_M * width + position_M),
            most_masked=int(mask_WL.sum(axis=1).max()),
            targets=self.read_targets(self.windows, read, start + window_M, position_M),
            documents_WL=documents_WL,
            segments_WL=segments_WL,
        )


def store_has_pairs(store) -> bool:
    """Whether the windows of a store are sentence pairs, [CLS] A [SEP] B [SEP]."""
    return store.plan.windowing.get("packing") == "pairs"


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
    return _with_tensors(value, lambda tensor: tensor.to(device, non_blocking=True))


def pinned(batch: Batch) -> Batch:
    """The batch in memory that a GPU copies from by itself, so that `to_device` does not wait."""
    return batch._replace(micro=[_with_tensors(micro, torch.Tensor.pin_memory) for micro in batch.micro])


def _with_tensors(value, change: Callable):
    if isinstance(value, torch.Tensor):
        return change(value)
    if hasattr(value, "_fields"):
        return type(value)(*(_with_tensors(field, change) for field in value))
    return value


def _digest(places_W, window_ids_W, epochs_W, ids_WL, shown_WL) -> int:
    columns = np.stack((places_W, window_ids_W, epochs_W), axis=1)
    rows = np.concatenate((columns, ids_WL, shown_WL), axis=1, dtype=np.int64, casting="unsafe")
    hashes = [hashlib.blake2b(row, digest_size=8).digest() for row in rows]
    return sum(int.from_bytes(digest, "little") for digest in hashes) % 2**64
