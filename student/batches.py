"""What a batch holds, how it is read and masked, and how it travels.

    batch = loader.step(config.seed, step, config.batch_windows)      # load and mask; runs one step ahead in a thread

A batch is a function of (seed, step), so there is no state of a reader or generator to save. The training stream is one
endless sequence of windows: epoch 0 in its order, then epoch 1 in its own, and so on. With B windows in a batch, step s
reads the windows [s B, (s + 1) B), so every batch is full and some batches span two epochs. Not handled here: how
windows are stored (shards), which positions are masked (masks/), what a target is (objectives/).

Shapes: W windows, L positions of a window, M masked tokens.
"""

import hashlib
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from shards.reader import Store
from shards.segments import segment_ids
from shards.windows import WindowBatch, WindowReader
from student.masks.masking import Masking
from student.masks.table import MaskTable
from student.objectives.base import MaskedTokens

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
    """what the objective compares its logits with; its `counts` are the tokens that carry loss, per loss term"""
    documents_WL: Tensor | None = None
    """int64 number of each token's document in its window, -1 at padding; None unless documents are kept apart"""
    segments_WL: Tensor | None = None
    """int64, 0 in the first sentence of a pair and at padding, 1 in the second; None where segments are not used"""
    fillers: int = 0
    """how many fillers where_M ends with: copies of the last masked position, whose logits are dropped"""
    visible: tuple[int, int] | None = None
    """the fewest and the most tokens per window that are neither masked nor padding, the latter perhaps rounded up;
    None if [MASK] enters the encoder at its first layer"""
    ids_M: Tensor | None = None
    """int64 ids of the masked tokens without fillers; None unless losses are counted by token (adaptive masks)"""

    @property
    def inputs(self) -> tuple:
        """The arguments of a Student."""
        return (
            self.input_WL,
            self.attention_WL,
            self.where_M,
            self.documents_WL,
            self.most_masked,
            self.segments_WL,
            self.visible,
        )


class Batch(NamedTuple):
    """One effective batch."""

    micro: list[MicroBatch]
    counts: tuple[int, ...]
    """tokens that carry loss, per loss term"""
    tokens: int
    """real tokens, special ones included"""
    digest: int
    """64-bit hash of window ids, epochs, token ids and what is shown in place of the masked tokens, in their order. For
    one plan it is the same for every objective. It is a sum over windows modulo 2^64, so parts of a batch add up"""


def store_has_pairs(store: Store) -> bool:
    """Whether the windows of a store are sentence pairs, [CLS] A [SEP] B [SEP]."""
    return store.plan.windowing.get("packing") == "pairs"


@dataclass(eq=False)
class Loader:
    """Reads and masks batches of a split for one objective.

    read_targets     MaskedTokens -> their targets; the objective's method
    documents_apart  whether batches say which tokens belong to one document
    segments         whether batches of sentence pairs say which sentence a token belongs to
    mask_later       whether batches say how many tokens are visible, that is neither masked nor padding
    by_token         whether batches say which tokens are masked, for counting losses by token
    few_shapes       whether fillers round up the numbers of visible and of masked tokens, so that a compiled model
                     meets few different shapes
    pieces           into how many pieces of equal length the first `short_steps` steps cut each window
    """

    windows: WindowReader
    masking: Masking
    read_targets: Callable[[MaskedTokens], Any]
    _: KW_ONLY
    micro_batch: int
    documents_apart: bool = False
    segments: bool = False
    mask_later: bool = False
    by_token: bool = False
    few_shapes: bool = False
    pieces: int = 1
    short_steps: int = 0

    def step(self, seed: int, step: int, batch_windows: int, share: tuple[int, int] | None = None) -> Batch:
        """The batch of one optimiser step, counted from 0.

        share  first and last (exclusive) of its windows to read, for one of several processes; by default all
        """
        first, last = share or (0, batch_windows)
        begin = step * batch_windows
        window_ids_W, epochs_W = self.windows.stream(seed, begin + first, begin + last)
        rate, table = self.masking.rate_at(step), self.masking.table_at(step)
        pieces = self.pieces if step < self.short_steps else 1
        return self.load(window_ids_W, epochs_W, seed, rate, table, first, pieces)

    def load(
        self,
        window_ids_W: np.ndarray,
        epochs_W: np.ndarray,
        mask_seed: int,
        mask_rate: float,
        table: MaskTable | None = None,
        first_place: int = 0,
        pieces: int = 1,
    ) -> Batch:
        """Read windows, mask them, and split them into micro-batches.

        table        mask weights; None: all tokens have the same weight
        first_place  the index in the batch of the first of these windows
        pieces       into how many pieces the encoder reads each window cut; masks and targets are those of the window
        """
        read = self.windows.read(window_ids_W)
        counted: dict[str, Any] = {"seed": mask_seed, "epoch": epochs_W}
        mask_WL = self.masking.choose(read, window_ids_W, **counted, rate=mask_rate, table=table)
        input_WL = self.masking.corrupt(read.ids, mask_WL, window_ids_W, seed=mask_seed, epoch=epochs_W)
        places_W = first_place + np.arange(len(window_ids_W))
        starts = range(0, len(window_ids_W), self.micro_batch)
        micro = [self._build_micro_batch(read, input_WL, mask_WL, start, pieces) for start in starts]
        return Batch(
            micro=micro,
            counts=tuple(map(sum, zip(*(part.targets.counts for part in micro), strict=True))),
            tokens=int(read.lengths.sum()),
            digest=digest_windows(places_W, window_ids_W, epochs_W, read.ids, np.where(mask_WL, input_WL, -1)),
        )

    def _build_micro_batch(
        self, read: WindowBatch, input_WL: np.ndarray, mask_WL: np.ndarray, start: int, pieces: int
    ) -> MicroBatch:
        part = slice(start, start + self.micro_batch)
        ids_WL, input_WL, lengths_W, mask_WL = read.ids[part], input_WL[part], read.lengths[part], mask_WL[part]
        documents_WL = read.documents[part]
        window_M, position_M = np.nonzero(mask_WL)
        width = input_WL.shape[1]
        real_WL = np.arange(width) < lengths_W[:, None]
        segments_WL = None
        if self.segments:  # from the original ids: the replacement of a masked token may hide a [SEP]
            segments_WL = torch.from_numpy(segment_ids(ids_WL, lengths_W, self.masking.special_ids["sep"]))
        if pieces > 1:  # each becomes a row of its own; no token leaves its place in the flattened input
            rows = pieces * len(input_WL)
            input_WL, mask_WL = input_WL.reshape(rows, -1), mask_WL.reshape(rows, -1)
            real_WL, documents_WL = real_WL.reshape(rows, -1), documents_WL.reshape(rows, -1)
            real_WL[~real_WL.any(axis=1)] = True  # padding attends to itself, or some kernels give NaN
        where_M, most_masked, fillers = window_M * width + position_M, int(mask_WL.sum(axis=1).max()), 0
        if self.few_shapes:
            most_masked, fillers = round_to_three_bits(most_masked), round_to_three_bits(len(where_M)) - len(where_M)
            where_M = np.pad(where_M, (0, fillers), mode="edge") if fillers else where_M
        visible = None
        if self.mask_later:
            visible_W = (real_WL & (input_WL != self.masking.special_ids["mask"])).sum(axis=1)
            most = int(visible_W.max())
            visible = int(visible_W.min()), min(width, round_to_three_bits(most)) if self.few_shapes else most
        masked = MaskedTokens(self.windows, read, start + window_M, position_M)
        return MicroBatch(
            input_WL=torch.from_numpy(input_WL),
            attention_WL=None if real_WL.all() else torch.from_numpy(real_WL.astype(np.int64)),
            where_M=torch.from_numpy(where_M),
            most_masked=most_masked,
            targets=self.read_targets(masked),
            documents_WL=torch.from_numpy(documents_WL.astype(np.int64)) if self.documents_apart else None,
            segments_WL=segments_WL,
            fillers=fillers,
            visible=visible,
            ids_M=torch.from_numpy(masked.ids()) if self.by_token else None,
        )


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


def copy_to_host(figures: Tensor) -> Callable[[], list[float]]:
    """Copy a few numbers to the host as soon as the queued work has computed them. The returned function waits for
    these numbers only, not for work that is queued later."""
    if not figures.is_cuda:
        return figures.tolist
    copied, arrived = figures.to("cpu", non_blocking=True), torch.cuda.Event()  # torch takes pinned memory for that
    arrived.record(torch.cuda.current_stream(figures.device))  # without it, that of the current device

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

    places_W  the index of each window in the batch
    shown_WL  what replaces the masked tokens, -1 at all other positions
    """
    columns = np.stack((places_W, window_ids_W, epochs_W), axis=1)
    rows = np.concatenate((columns, ids_WL, shown_WL), axis=1, dtype=np.int64, casting="unsafe")
    hashes = [hashlib.blake2b(row, digest_size=8).digest() for row in rows]
    return sum(int.from_bytes(digest, "little") for digest in hashes) % 2**64


def round_to_three_bits(count: int) -> int:
    """Round up to three significant bits: 19 to 20, 2,432 to 2,560. The result is at most a quarter larger."""
    unit = 1 << max(0, count.bit_length() - 3)
    return -(-count // unit) * unit
