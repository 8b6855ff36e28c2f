"""What a batch holds, and how it travels: read one step ahead in a thread, pinned, copied to the device.

The figures of a step come back the same way. Left out: how a batch is read and masked, and what is done with it
(step.py).

Shapes: W windows, L positions of a window, M masked tokens.
"""

import hashlib
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from shards.reader import Store

Nested = TypeVar("Nested")  # a tensor, or a tuple (named or not) of tensors, of such tuples and of anything else


class MicroBatch(NamedTuple):
    """Windows of one forward pass, or the pieces that they are cut into, as CPU tensors."""

    input_WL: Tensor
    """int64 token ids, the masked ones hidden"""
    attention_WL: Tensor | None
    """int64, 0 at padding and 1 elsewhere; None where no window is padded"""
    where_M: Tensor
    """int64 masked positions in the flattened (W L) input, ascending, and perhaps fillers"""
    most_masked: int
    """the most masked positions of a window, or a few more"""
    targets: Any
    """what the objective compares its logits with; has `counts` of tokens that carry loss, one for every term"""
    documents_WL: Tensor | None = None
    """int64 number of each token's document in its window, -1 at padding; None unless documents are kept apart"""
    segments_WL: Tensor | None = None
    """int64, 0 in the first sentence of a pair and at padding, 1 in the second; None where segments are not used"""
    fillers: int = 0
    """how many of where_M, at its end, are copies of the last masked position: their logits are dropped"""
    visible: tuple[int, int] | None = None
    """the fewest and the most tokens of a window that are neither masked nor padding, the latter perhaps rounded up;
    None where [MASK] enters the encoder at its first layer"""
    ids_M: Tensor | None = None
    """int64 ids of the masked tokens, fillers left out; None where nobody counts losses by token"""


class Batch(NamedTuple):
    """One effective batch."""

    micro: list[MicroBatch]
    counts: tuple[int, ...]
    """tokens that carry loss, for every term of it"""
    tokens: int
    """real tokens, special ones included"""
    digest: int
    """64-bit hash of window ids, epochs, token ids and what is shown in place of the masked ones, in their order. It is
    equal for every objective on one plan. As a sum over windows modulo 2^64, it adds up over parts of a batch"""


def store_has_pairs(store: Store) -> bool:
    """Whether the windows of a store are sentence pairs, [CLS] A [SEP] B [SEP]."""
    return store.plan.windowing.get("packing") == "pairs"


def read_ahead(
    load: Callable[[int], Batch], start: int, stop: int, waits: Callable[[int], bool] | None = None
) -> Generator[tuple[int, Batch, float], None, None]:
    """Read the batch of the next step while the caller works on this one.

    waits   whether a step's batch can be read only when the caller has finished the step before; by default none is
    Yields  (step, load(step), seconds spent waiting for it); an error in the thread is raised at its step
    """
    if start >= stop:
        return
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="batches") as reader:
        upcoming = None
        for step in range(start, stop):
            asked = time.perf_counter()
            batch = (upcoming or reader.submit(load, step)).result()
            waited = time.perf_counter() - asked
            is_last = step + 1 == stop
            upcoming = None if is_last or (waits and waits(step + 1)) else reader.submit(load, step + 1)
            yield step, batch, waited


def to_device(value: Nested, device: torch.device) -> Nested:
    """Copy the tensors of nested tuples, named or not, to a device; other values stay."""
    return _with_tensors(value, lambda tensor: tensor.to(device, non_blocking=True))


def pin(batch: Batch) -> Batch:
    """Put a batch into memory that a GPU copies from by itself, so that `to_device` does not wait."""
    return batch._replace(micro=[_with_tensors(micro, Tensor.pin_memory) for micro in batch.micro])


def begin_reading(figures: Tensor) -> Callable[[], list[float]]:
    """Copy some numbers to the host behind the work that makes them; the function returned waits for these alone, and
    not for what is queued later."""
    if not figures.is_cuda:
        return figures.tolist
    copied, arrived = figures.to("cpu", non_blocking=True), torch.cuda.Event()  # torch takes pinned memory for that
    arrived.record()

    def read() -> list[float]:
        arrived.synchronize()
        return copied.tolist()

    return read


def _with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if hasattr(value, "_fields"):
        return type(value)(*(_with_tensors(field, change) for field in value))
    return tuple(_with_tensors(item, change) for item in value) if type(value) is tuple else value


def digest_windows(
    places_W: np.ndarray, window_ids_W: np.ndarray, epochs_W: np.ndarray, ids_WL: np.ndarray, shown_WL: np.ndarray
) -> int:
    """What these windows contribute to the `digest` of their Batch.

    places_W  where in the batch each window stands
    shown_WL  what stands in place of the masked tokens, -1 where nothing is masked
    """
    columns = np.stack((places_W, window_ids_W, epochs_W), axis=1)
    rows = np.concatenate((columns, ids_WL, shown_WL), axis=1, dtype=np.int64, casting="unsafe")
    hashes = [hashlib.blake2b(row, digest_size=8).digest() for row in rows]
    return sum(int.from_bytes(digest, "little") for digest in hashes) % 2**64
