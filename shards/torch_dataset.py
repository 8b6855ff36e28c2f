"""A store as a torch dataset, for any training loop.

    dataset = LspDataset("runs/stores/lsp-...", seed=42)    # in counted order, resumes mid-epoch, shared among ranks
    windows = LspWindows("runs/stores/lsp-...")             # by number, for loaders that sample and shard: Trainer's

A sample is one window, a dict of tensors (n tokens, N the most entries of one of them):

    input_ids, attention_mask, document_ids   int64 (n,); documents are counted inside the window
    window_id                                 int64 (), number in the split: one store's masks fit another's
    lsp_indices, lsp_weights                  int64 and float32 (n, N): the distribution of each token, which sums to 1,
                                              then entries of weight 0; only these at a token without a distribution
    lsp_tail                                  float32 (n,): mass dropped before normalisation

    hidden, hidden_mask                       float32 (n, d), bool (n,): for hidden states; zeros and False at
                                              tokens without one

Stores of ids and of hidden states have no lsp_ tensors. `dataset.collate` pads samples to the longest into a batch:
(B, L) if a sample has (n,), (B, L, N) if it has (n, N), document -1 at padding, `window_ids` (B,).

    DataLoader(LspDataset(path, batch_size=32), batch_size=None, num_workers=4)     # workers collate batches
    DataLoader(dataset, batch_size=32, collate_fn=dataset.collate)                  # the loader collates batches

With workers, pass the batch size to the dataset (first line). Batches then come in one order for any number of workers.
With the second line every window still comes once, but the number of workers decides which windows share a batch,
and with `drop_last=True` each worker drops its own last batch, which may be all that it has.
`StatefulDataLoader` of torchdata works with both. A loader of an LspDataset that accelerate has prepared is refused,
because both share the windows among ranks: use LspWindows with accelerate and Trainer. Not handled here: masks and
losses (for LspWindows, see student/pretraining.py).
"""

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from mlsm.common.errors import StoreError
from shards.codec import HiddenRows, SparseRows, pad_rows
from shards.manifest import differing
from shards.position import STATE_FORMAT, Share, check_identity, sequence_identity
from shards.reader import Store, open_store
from shards.windows import Split, WindowReader

logger = logging.getLogger(__name__)
_TOKENS_AT_ONCE = 32_768  # of windows that are decoded together
_RANKS = 1024  # most ranks on one machine


@dataclass
class _Progress:
    """The start of an iteration, and how much of it this process has read."""

    epoch: int = 0
    position: int = 0
    items: int = 0


class _Requests:
    """The start of the next iteration, for loader workers that outlive an epoch.

    It is in memory that a process shares with the workers it starts, by fork or spawn. Ranks forked from one process
    share it as well, so each has its own row (number of the request, epoch, position).
    """

    def __init__(self):
        self._rows, self._heard = torch.zeros(_RANKS, 3, dtype=torch.int64).share_memory_(), 0

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._rows.share_memory_()  # an ordinary pickle would hold a copy

    def add(self, rank, progress):
        self._heard += 1
        self._rows[rank % _RANKS, 1:] = torch.tensor([progress.epoch, progress.position])
        self._rows[rank % _RANKS, 0] = self._heard

    def new(self, rank):
        """The start that was requested since this process started or last called this; None without a request."""
        number, epoch, position = self._rows[rank % _RANKS].tolist()
        if number <= self._heard:
            return None
        self._heard = number
        return _Progress(epoch, position)


class LspDataset(IterableDataset[dict[str, Tensor]]):
    """Windows of one split in the counted order of (seed, epoch).

    store       path of a store or of one of its plans, or an open Store
    endless     one epoch after another without a border, so every batch is full. Use it for training by steps: only in
                this mode do all ranks get equally many batches. Otherwise an iteration is one epoch, its last
                batch may be short, and ranks differ by one item at most: call `set_epoch` before each
    shuffle     False gives the plan's order
    batch_size  windows of a batch on one rank; None for samples
    rank, world_size  by default those of torch.distributed when it is initialised, else 0 of 1
    Raises      StoreError when there is no such store or split, ValueError on settings that make no sense
    """

    def __init__(
        self,
        store: str | PathLike[str] | Store,
        *,
        seed: int = 0,
        split: Split = "train",
        endless: bool = False,
        shuffle: bool = True,
        batch_size: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ):
        super().__init__()
        if (rank is None) != (world_size is None):
            raise ValueError("pass both rank and world_size, or neither")
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; it must be at least 1, or None for samples")
        self.store = open_store(store)
        self.windows = self.store.split(split)
        self.seed, self.split, self.shuffle = seed, split, shuffle
        self.endless, self.batch_size = endless, batch_size
        if endless and not len(self.windows):
            raise StoreError(f"{self.store.path}: the {split} split has no windows, so it cannot repeat endlessly")
        self._ranks = None if rank is None else (rank, world_size)
        self._share()  # raises at once if the rank is invalid
        self._progress, self._pending = _Progress(), True  # pending: the next iteration continues from _progress
        self._epoch: int | None = None  # the epoch last set; loading a state does not change it
        self._requests = _Requests()

    def __getstate__(self):
        # A spawned loader worker has no process group. Without a group here, the copy may still be of any rank.
        return self.__dict__ | {"_ranks": self._rank_and_size() if _in_process_group() else self._ranks}

    def __len__(self) -> int:
        """Items of a whole epoch on this rank."""
        if self.endless:
            raise TypeError("an endless dataset has no length")
        return Share(*self._rank_and_size()).items_before(-(-len(self.windows) // self._width))

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        _refuse_accelerate()
        if not self._pending:  # a second iteration without a new request
            if asked := self._requests.new(self._rank_and_size()[0]):
                self._epoch, self._progress = asked.epoch, asked
            else:
                self._progress = _Progress(self._progress.epoch if self._epoch is None else self._epoch)
        self._pending = False
        return self._deliver(self._progress, self._share())

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration read this epoch from its start, or from a loaded state in this epoch.

        With workers of a plain DataLoader, it also ends the effect of `load_state_dict`: call it before each
        `iter(loader)`. It also reaches persistent workers.
        Raises  ValueError when a loader that accelerate has prepared is about to read this dataset
        """
        _refuse_accelerate()
        self._epoch = epoch
        if epoch != self._progress.epoch:
            self._begin(_Progress(epoch))

    def _begin(self, progress):
        """Let the next iteration continue from this place, here and in this process's loader workers."""
        self._progress, self._pending = progress, True
        if get_worker_info() is None:
            self._requests.add(self._rank_and_size()[0], progress)

    def collate(self, samples: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """A batch of samples, padded to the longest."""
        return _pad(samples, self.store.special_ids["pad"])

    # -- which windows, in which order ---------------------------------------------------------------------

    def _deliver(self, progress, share):
        while (window_ids := self._next_windows(progress, share)) is not None:
            items = [_batch(self.windows, window_ids)] if self.batch_size else _samples(self.windows, window_ids)
            for item in items:
                progress.items += 1
                yield item

    def _next_windows(self, progress, share):
        """Window ids of the next batch, or of the next chunk of samples; None after the last."""
        step = 1 if self.batch_size else share.ranks * share.workers
        begin = self._start(progress) + share.item(progress.items) * self._width
        end = begin + (self.batch_size or step * max(1, _TOKENS_AT_ONCE // self.store.max_length))
        if not self.endless:
            end = min(end, (progress.epoch + 1) * len(self.windows))
        if begin >= end:
            return None
        if self.shuffle:
            return self.windows.stream(self.seed, begin, end)[0][::step]
        return np.arange(begin, end, step) % len(self.windows)

    def _start(self, progress):
        return progress.epoch * len(self.windows) + progress.position

    @property
    def _width(self):
        return self.batch_size or 1

    def _share(self):
        worker = get_worker_info()
        return Share(*self._rank_and_size(), *((worker.id, worker.num_workers) if worker else ()))

    def _rank_and_size(self):
        if self._ranks:
            return self._ranks
        if _in_process_group():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1

    # -- state ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The position of this process, as JSON. Outside loader workers it is the state of all ranks: save it once.

        This assumes that every rank has had as many items as this one, as between training steps.
        """
        share, progress = self._share(), self._progress
        if share.workers == 1:
            return self.state_after(progress.items)
        worker = {"id": share.worker, "workers": share.workers, "ranks": share.ranks, "width": self._width}
        began = {"epoch": progress.epoch, "position": progress.position}
        return self._identity() | began | {"worker": worker | {"items": progress.items}}

    def state_after(self, items: int) -> dict[str, Any]:
        """The state after every rank has had this many items since the start of the current or next iteration.

        For a plain DataLoader with workers, which run ahead of training: count the batches that it has used.
        """
        place = self._move(self._progress, items * self._width * self._share().ranks)
        return self._identity() | {"epoch": place.epoch, "position": place.position}

    def load_state_dict(self, state: Any) -> None:
        """Continue from a state of this dataset, or from that of a StatefulDataLoader over it, regardless of its
        workers.

        Raises  StoreError when it is of another store, plan, split, seed or order, naming what differs
        """
        parts = _own_states(state)
        for part in parts:
            check_identity(part, self._identity())
        began = _Progress(parts[0]["epoch"], parts[0]["position"])
        if "worker" in parts[0]:
            workers = [part["worker"] for part in parts]
            began = self._as_worker(began, *workers) if parts[0] is state else self._join(began, workers)
        self._begin(began)

    def _identity(self):
        return sequence_identity(self.store, self.split, self.seed, self.shuffle)

    def _move(self, place, windows):
        """The place after this many more windows, counted over all ranks."""
        position = place.position + windows
        if not self.endless:
            return _Progress(place.epoch, min(position, len(self.windows)))
        epochs, position = divmod(position, max(1, len(self.windows)))
        return _Progress(place.epoch + epochs, position)

    def _as_worker(self, began, saved):
        """Continue as the loader worker that saved this state."""
        share = self._share()
        now = {"id": share.worker, "workers": share.workers, "ranks": share.ranks, "width": self._width}
        if difference := differing({name: saved[name] for name in now}, now):
            raise StoreError(
                f"the state of a loader worker does not fit: {difference}. To change the number of workers, ranks or "
                "the batch size pass the loader's whole state to dataset.load_state_dict, and none to the loader."
            )
        return _Progress(began.epoch, began.position, saved["items"])

    def _join(self, began, workers):
        """The position of a loader, computed from the states of all its workers."""
        first, items = workers[0], sum(worker["items"] for worker in workers)
        in_turn = [Share(0, 1, w["id"], w["workers"]).items_before(items) == w["items"] for w in workers]
        if len(workers) != first["workers"] or not all(in_turn):
            raise StoreError(
                "the loader's workers did not deliver item by item in turn, so its position is not one number: pass "
                "the batch size to the dataset and batch_size=None to the loader, or keep the number of workers and "
                "pass this state to the loader."
            )
        return self._move(began, items * first["width"] * first["ranks"])


def _in_process_group():
    return torch.distributed.is_available() and torch.distributed.is_initialized()


# -- by number ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class WindowTensors(Mapping[str, Tensor]):
    """One window in one epoch: a sample as of LspDataset, which is read from the store when a tensor is accessed."""

    windows: WindowReader
    number: int
    """number of the window in the split"""
    epoch: int

    @cached_property
    def _sample(self) -> dict[str, Tensor]:
        return next(_samples(self.windows, np.array([self.number])))

    def __getitem__(self, name: str) -> Tensor:
        return self._sample[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._sample)

    def __len__(self) -> int:
        return len(self._sample)


class LspWindows(Dataset[WindowTensors]):
    """The windows of one split by number, for loaders that order and shard them: those of Trainer and of accelerate.

    store   path of a store or of one of its plans, or an open Store
    split   train or held_out
    seed    None: item i is the split's window i, for loaders that shuffle. A number: item i is window i of the epoch in
            the counted order of (seed, epoch), which `train-student --seed` uses. Neighbours in this order are near
            each other on disk; use it for loaders that read in sequence
    Raises  StoreError when there is no such store or split

    An item knows its epoch, from which its mask follows (student/pretraining.py). With accelerate and Trainer this is
    the epoch of the loader, on any number of ranks and workers and after resuming. With a plain DataLoader, or if
    another dataset wraps this one, call `set_epoch` before each epoch. All loaders of one LspWindows share its epoch.
    Held-out windows are always in epoch 0.
    """

    def __init__(self, store: Store | str | PathLike[str], split: Split = "train", *, seed: int | None = None):
        super().__init__()
        self.store, self.split, self.seed = open_store(store), split, seed
        self.windows = self.store.split(split)
        self._epoch, self._process = _shared_number(), os.getpid()
        self._asked: int | None = None  # the epoch of `set_epoch` if accelerate's loader has not been compared with it

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._epoch.share_memory_()  # an ordinary pickle or copy would hold its own epoch

    def __len__(self) -> int:
        self._follow_accelerate()  # samplers call len() in the main process when an epoch starts
        return len(self.windows)

    def __getitem__(self, index: int) -> WindowTensors:
        if not -len(self.windows) <= index < len(self.windows):
            raise IndexError(f"window {index} of {len(self.windows)}")
        return self.__getitems__([index % len(self.windows)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[WindowTensors]:
        """The items of a batch, as torch's loaders ask for them."""
        self._follow_accelerate()
        epoch = int(self._epoch)
        if self.seed is None:
            return [WindowTensors(self.windows, int(index), epoch) for index in indices]
        places = (self.windows.order(self.seed, epoch, int(index), int(index) + 1) for index in indices)
        return [WindowTensors(self.windows, int(number), epoch) for (number,) in places]

    def set_epoch(self, epoch: int) -> None:
        """From now on, items belong to this epoch, here and in loader workers."""
        if self.split == "held_out":
            return
        loader = self._accelerate_loader()
        if loader is None or loader.iteration != epoch:  # else accelerate calls
            self._asked = epoch
        self._fill_epoch(epoch)

    def _fill_epoch(self, epoch):
        if os.getpid() != self._process:  # ranks forked from one process must not share it
            self._epoch, self._process = _shared_number(), os.getpid()
        self._epoch.fill_(epoch)

    def _follow_accelerate(self):
        """Set the epoch of the accelerate loader that is reading this dataset, if one is.

        accelerate calls a dataset's `set_epoch` only if the sampler has none. The sampler that accelerate makes from a
        random sampler has one, so on several ranks and after resuming the dataset has to ask for the epoch.
        """
        loader = self._accelerate_loader()
        if loader is None or self.split == "held_out":
            return
        if self._asked not in (None, loader.iteration):
            logger.warning(
                "LspWindows.set_epoch(%d) has no effect: accelerate's loader is in epoch %d. Call "
                "loader.set_epoch(%d), which also sets the order of the windows.",
                self._asked,
                loader.iteration,
                self._asked,
            )
        self._asked = None
        self._fill_epoch(loader.iteration)

    def _accelerate_loader(self):
        """Accelerate's loader that is reading this dataset in this process, or None."""
        if get_worker_info() is not None or not (state := sys.modules.get("accelerate.state")):
            return None
        loader = state.GradientState().active_dataloader
        return loader if getattr(loader, "dataset", None) is self else None


def _shared_number():
    """A number in memory that a process shares with the workers that it starts, by fork or spawn."""
    return torch.zeros((), dtype=torch.int64).share_memory_()


# -- accelerate --------------------------------------------------------------------------------------------


def _refuse_accelerate():
    """Raise ValueError if the caller, direct or indirect, is a loader that accelerate has prepared.

    Such a loader calls `set_epoch` in the main process before it reads. A dataset that wraps this one may not pass that
    on, but without workers the loader's reading is also such a call. SkipDataLoader changes nothing.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        called_by_accelerate = frame.f_globals.get("__name__") == "accelerate.data_loader"
        if called_by_accelerate and type(frame.f_locals.get("self")).__name__ != "SkipDataLoader":
            raise ValueError(
                "accelerate has prepared this loader of an LspDataset, so windows would be shared among ranks twice. "
                "Use mlsm.LspWindows with mlsm.LspCollator, or keep the loader out of prepare()."
            )
        frame = frame.f_back


def _own_states(state):
    """The states of this class in a state: the state itself, or one per worker if it is a StatefulDataLoader's."""
    found = _nested_states(state)
    if not found:
        raise StoreError(f"not a state of this dataset: there is no {STATE_FORMAT!r} in it")
    if state.get("_steps_since_snapshot"):
        raise StoreError("the loader's state is older than its position: make it with snapshot_every_n_steps=1")
    return found


def _nested_states(state):
    if not isinstance(state, dict):
        return []
    if state.get("format") == STATE_FORMAT:
        return [state]
    return [found for value in state.values() for found in _nested_states(value)]


# -- tensors -----------------------------------------------------------------------------------------------


def _batch(windows, window_ids):
    """Windows as one padded batch."""
    read, real, rows = _decode(windows, window_ids)
    width = real.shape[1]
    batch = {
        "input_ids": _long(read.ids[:, :width]),
        "attention_mask": _long(real),
        "document_ids": _long(read.documents[:, :width]),
        "window_ids": _long(read.window_ids),
    }
    if isinstance(rows, HiddenRows):
        hidden = np.zeros((*real.shape, rows.rows_Md.shape[1]), np.float32)
        mask = np.zeros(real.shape, bool)
        hidden[real], mask[real] = rows.rows_Md, rows.coded_M
        batch |= {"hidden": torch.from_numpy(hidden), "hidden_mask": torch.from_numpy(mask)}
    elif rows is not None:
        for name, of_tokens in _padded(rows).items():
            shape = *real.shape, *of_tokens.shape[1:]
            if real.all():  # in most batches all windows are full
                batch[name] = of_tokens.view(shape)
            else:
                batch[name] = of_tokens.new_zeros(shape)
                batch[name][torch.from_numpy(real)] = of_tokens
    return batch


def _samples(windows, window_ids):
    """Windows as samples, one by one."""
    read, _, rows = _decode(windows, window_ids)
    first_token = np.concatenate(([0], np.cumsum(read.lengths)))
    for number, n in enumerate(read.lengths.tolist()):
        sample = {
            "input_ids": _long(read.ids[number, :n]),
            "attention_mask": torch.ones(n, dtype=torch.int64),
            "document_ids": _long(read.documents[number, :n]),
            "window_id": torch.tensor(read.window_ids[number]),
        }
        begin, end = first_token[number], first_token[number + 1]
        if isinstance(rows, HiddenRows):
            sample["hidden"] = torch.from_numpy(rows.rows_Md[begin:end].copy())
            sample["hidden_mask"] = torch.from_numpy(rows.coded_M[begin:end].copy())
        elif rows is not None:
            indptr = rows.indptr[begin : end + 1]
            entries = slice(indptr[0], indptr[-1])
            tail = rows.tail[begin:end].copy()  # else a worker would send the whole chunk with a sample
            sample |= _padded(SparseRows(indptr, rows.indices[entries], rows.weights[entries], tail))
        yield sample


def _decode(windows, window_ids):
    """The windows, a mask of their tokens (up to the longest window), and the tokens' rows, if the store has any."""
    read = windows.read(window_ids)
    real = np.arange(read.lengths.max()) < read.lengths[:, None]
    if windows.store.hidden:
        return read, real, windows.hidden(read, *np.nonzero(real))
    return read, real, windows.targets(read, *np.nonzero(real)) if windows.store.k else None


def _pad(samples, pad_id):
    width = max(len(sample["input_ids"]) for sample in samples)
    fill = {"input_ids": pad_id, "attention_mask": 0, "document_ids": -1}
    batch = {name: _stack([sample[name] for sample in samples], width, value) for name, value in fill.items()}
    batch["window_ids"] = torch.stack([sample["window_id"] for sample in samples])
    for name in ("lsp_tail", "hidden", "hidden_mask"):
        if name in samples[0]:
            batch[name] = _stack([sample[name] for sample in samples], width, 0)
    for name in ("lsp_indices", "lsp_weights"):
        if name in samples[0]:
            most = max(sample[name].shape[1] for sample in samples)
            rows = [torch.nn.functional.pad(sample[name], (0, most - sample[name].shape[1])) for sample in samples]
            batch[name] = _stack(rows, width, 0)
    return batch


def _stack(rows, width, fill):
    stacked = rows[0].new_full((len(rows), width, *rows[0].shape[1:]), fill)
    for number, row in enumerate(rows):
        stacked[number, : len(row)] = row
    return stacked


def _padded(rows):
    counts = np.diff(rows.indptr)
    return {
        "lsp_indices": torch.from_numpy(pad_rows(counts, rows.indices, dtype=np.int64)),
        "lsp_weights": torch.from_numpy(pad_rows(counts, rows.weights)),
        "lsp_tail": torch.from_numpy(rows.tail),
    }


def _long(array):
    return torch.from_numpy(array.astype(np.int64))
