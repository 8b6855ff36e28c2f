"""The windows of one split: read in a counted order, with rows decoded only for the requested tokens.

    windows = Store.open("runs/stores/lsp-...").split("train")
    batch = windows.read(windows.order(seed=42, epoch=0, start=0, stop=32))
    rows = windows.targets(batch, window_M, position_M)       # of a store of hidden states: windows.hidden(...)

Every block's SHA-256 is checked when it is read first, and again if the file's inode, size or time of change differ.
So damage is an error and never a short epoch. Once per batch it is checked that the mapped files are unchanged: a
truncated file raises an error, instead of ending the process by a signal (SIGBUS) when its lost pages are read.
The order of an epoch permutes blocks, then windows inside groups of `SHUFFLE_BLOCKS` permuted blocks. Any part of it
follows from (seed, epoch, position), so there is no shuffle buffer to save, and reads stay near each other.
docs/benchmark-details.md compares it with a uniform shuffle. Records are only kept as arrays, about a hundred bytes per
block, so a store of 10^11 tokens opens in little memory. Not handled here: where the bytes are (blocks.py), ranks,
loader workers and torch (torch_dataset.py).

Shapes: W windows, L window length, M chosen tokens, B blocks.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from mlsm.common.errors import ShardError, StoreError
from shards import codec, counter
from shards.blocks import KEPT, Blocks, BlockTable, Mapping
from shards.codec import HiddenRows, SparseRows
from shards.copies import load_codebook
from shards.files import StoreFiles
from shards.manifest import Plan, UnitRecord
from shards.members import check_columns, group_columns
from shards.schema import HiddenLayout, ShardMeta, kind_of

_LONG_RUN = 32  # tokens that follow each other, on average, are copied; fewer are looked up one by one
Split: TypeAlias = Literal["train", "held_out"]
SHUFFLE_BLOCKS = 64  # about 4 million tokens share a shuffle window; their row offsets take 16 MB


class StoreFacts:
    """The facts in a store's target and plan that are needed to read windows. Store (reader.py) is a subclass."""

    def __init__(self, files: StoreFiles, plan: Plan):
        self.files, self.plan = files, plan
        target = files.target()
        self.settings = target["lineage"] | target["settings"]
        self.fingerprinted = target["settings"]
        self.target_id, self.plan_id = target["target"], plan.id
        self.kind = kind_of(target)
        self.k: int = target["k"]
        self.vocab_size: int = target["vocab_size"]
        self.max_length: int = target["max_length"]
        self.special_ids: dict[str, Any] = target["special_ids"]
        self.weight_octaves = target["weight_octaves"]
        self.hidden = HiddenLayout.of_settings(target["settings"])

    @property
    def path(self) -> str | Path:
        return self.files.path

    @cached_property
    def codebook(self) -> np.ndarray | None:
        """The centroids of product-quantised hidden states, float32 (b, 256, d / b); None in other stores.

        Raises  StoreError when they are not those that the target names
        """
        return load_codebook(self.files) if self.hidden and self.hidden.quantise == "pq" else None


@dataclass(frozen=True)
class WindowBatch(codec.Windows):
    """Windows with their numbers in the split: `window_ids` int64 (W)."""

    window_ids: np.ndarray


@dataclass(frozen=True)
class _Block:
    """One verified block: its columns (views of the mapped file), and the cumulative sums for indexing them."""

    mapping: Mapping
    columns: dict
    window_starts: np.ndarray
    first_entry: np.ndarray | None


class WindowReader:
    """The windows of one split, numbered in plan order.

    store    StoreFacts of the store
    records  UnitRecords in plan order, read once
    split    train or held_out; None: both
    """

    def __init__(self, store: StoreFacts, records: Iterable[UnitRecord], split: Split | None):
        self.store, self.split = store, split
        self._table = BlockTable(records)
        self._first_window = np.concatenate(([0], np.cumsum(self._table.windows)))
        self._verified = np.zeros(len(self._table), np.int64)  # Mapping.key with which the block's hash was right
        self._make_caches()

    def _make_caches(self):
        self._blocks = Blocks(self.store.files, self._table)
        self._block = lru_cache(maxsize=KEPT)(self._load_block)
        self._epoch_blocks = lru_cache(maxsize=2)(self._permute_blocks)
        self._group_order = lru_cache(maxsize=4)(self._permute_group)

    def __getstate__(self):
        caches = {"_blocks", "_block", "_epoch_blocks", "_group_order"}  # a loader worker maps the files itself
        return {name: value for name, value in self.__dict__.items() if name not in caches}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._make_caches()

    def __len__(self) -> int:
        return int(self._first_window[-1])

    @cached_property
    def tokens(self) -> int:
        """Real tokens of the split, special ones included."""
        return int(self._table.tokens.sum())

    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 over the hashes of the split's shards, in plan order. It differs if any byte differs."""
        return self._table.digest

    # -- order -------------------------------------------------------------------------------------------

    def order(self, seed: int, epoch: int, start: int, stop: int) -> np.ndarray:
        """Window ids at positions start to stop of the epoch's permutation, int64.

        Raises  ValueError when the positions leave [0, len(self)]
        """
        if not 0 <= start <= stop <= len(self):
            raise ValueError(f"positions {start} to {stop} leave the epoch's {len(self)} windows")
        if start == stop:
            return np.zeros(0, np.int64)
        _, group_ends = self._epoch_blocks(seed, epoch)
        parts = []
        while start < stop:
            group = int(np.searchsorted(group_ends, start, side="right"))
            begin = int(group_ends[group - 1]) if group else 0
            end = min(stop, int(group_ends[group]))
            parts.append(self._group_order(seed, epoch, group)[start - begin : end - begin])
            start = end
        return np.concatenate(parts)

    def _permute_blocks(self, seed, epoch):
        blocks = counter.permutation(len(self._table), seed, epoch, 0)
        ends = np.cumsum(self._table.windows[blocks])
        return blocks, np.append(ends[SHUFFLE_BLOCKS - 1 : -1 : SHUFFLE_BLOCKS], ends[-1])

    def _permute_group(self, seed, epoch, group):
        blocks = self._epoch_blocks(seed, epoch)[0][group * SHUFFLE_BLOCKS : (group + 1) * SHUFFLE_BLOCKS]
        windows = np.concatenate([np.arange(self._first_window[b], self._first_window[b + 1]) for b in blocks])
        return windows[counter.permutation(len(windows), seed, epoch, 1, group)]

    def stream(self, seed: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Windows [start, stop) of the endless sequence of epochs: epoch 0 in its order, epoch 1 in its own, ...

        Returns  window ids and the epoch of each, int64 arrays
        Raises   StoreError when the split holds no window
        """
        if not len(self):
            raise StoreError(f"{self.store.path}: the split has no windows. Encode more text.")
        ids, epochs = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        while start < stop:
            epoch, first = divmod(start, len(self))
            last = min(first + stop - start, len(self))
            ids.append(self.order(seed, epoch, first, last))
            epochs.append(np.full(last - first, epoch))
            start += last - first
        return np.concatenate(ids), np.concatenate(epochs)

    # -- windows and rows --------------------------------------------------------------------------------

    def read(self, window_ids: np.ndarray | Sequence[int]) -> WindowBatch:
        """The windows with these numbers, in this order, as a WindowBatch."""
        window_ids = np.asarray(window_ids, np.int64)
        sort, parts = self._by_block(window_ids)
        read = codec.padded_windows_of_blocks(
            [(block.columns, block.window_starts, local) for _, block, local, _ in parts],
            self.store.max_length,
            self.store.special_ids["pad"],
        )
        back = _inverse(sort)
        return WindowBatch(read.ids[back], read.lengths[back], read.documents[back], window_ids)

    def windows_of_unit(self, unit_id: str) -> Iterator[tuple[list[int], list[int], list[int], int]]:
        """The windows of a unit in order, as they were cut from the text. Of each: ids, positions at which a document's
        run starts, the documents' records counted from the unit's first, and the window's number in the split."""
        unit = self._table.ids.index(unit_id)
        for number in range(int(self._table.first_block[unit]), int(self._table.first_block[unit + 1])):
            _, ((_, block, _, _),) = self._by_block(self._first_window[number : number + 1])
            starts, runs = block.window_starts, block.columns["run_starts"].astype(np.int64)
            first_W = runs.searchsorted(starts)
            for window, (begin, end) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
                run = slice(first_W[window], first_W[window + 1])
                records = block.columns["run_records"][run].tolist()
                ids = block.columns["ids"][begin:end].tolist()
                yield ids, (runs[run] - begin).tolist(), records, int(self._first_window[number]) + window

    def targets(self, batch: WindowBatch, window_M: np.ndarray, position_M: np.ndarray) -> SparseRows:
        """Stored distributions of the tokens batch.ids[window_M, position_M], as SparseRows in that order.

        Raises  ValueError for a position at padding
        """
        window_M, position_M = np.asarray(window_M), np.asarray(position_M)
        _refuse_padding(position_M, batch.lengths[window_M])
        follows_M = (window_M[1:] == window_M[:-1]) & (position_M[1:] == position_M[:-1] + 1)
        if np.count_nonzero(~follows_M) < len(window_M) // _LONG_RUN:
            return self._targets_of_runs(batch, window_M, position_M, follows_M)
        sort, parts = self._by_block(batch.window_ids[window_M])
        position_M = position_M[sort]
        parts = [
            (number, (block.columns, block.first_entry, block.window_starts[local] + position_M[chosen]))
            for number, block, local, chosen in parts
        ]
        return _take_rows(self._rows(parts), _inverse(sort))

    def _targets_of_runs(self, batch, window_M, position_M, follows_M):
        """The same for tokens most of which follow the one before, such as those of whole windows."""
        begins_R = np.concatenate(([0], np.flatnonzero(~follows_M) + 1))
        lengths_R = np.diff(begins_R, append=len(window_M))
        sort, found = self._by_block(batch.window_ids[window_M[begins_R]])
        parts: list = [None] * len(sort)
        for number, block, local, chosen in found:
            for run, start in zip(sort[chosen], block.window_starts[local], strict=True):
                first = int(start + position_M[begins_R[run]])
                parts[run] = number, (block.columns, block.first_entry, slice(first, first + int(lengths_R[run])))
        return self._rows(parts)

    def _rows(self, parts):
        """The rows of pairs (number of a block, part as of codec.gather_rows_of_blocks)."""
        try:
            return codec.gather_rows_of_blocks(self._meta, [part for _, part in parts])
        except ShardError:
            self._name_the_block(parts)
            raise

    def hidden(self, batch: WindowBatch, window_M: np.ndarray, position_M: np.ndarray) -> HiddenRows:
        """Stored hidden states of the tokens batch.ids[window_M, position_M], as HiddenRows in that order.

        Raises  StoreError when the store's codebook is not the one that its target names
        """
        return self.hidden_at(batch.window_ids[window_M], position_M)

    def hidden_at(self, window_id_M: np.ndarray, position_M: np.ndarray) -> HiddenRows:
        """The same for tokens given by the numbers of their windows in the split and their positions in the windows.

        Raises  ValueError also for a position outside of its window
        """
        layout = self._meta.hidden
        if layout is None:
            raise ValueError(f"{self.store.path} is a store of {self.store.kind} and has no hidden states")
        sort, parts = self._by_block(window_id_M)
        position_M = np.asarray(position_M)[sort]
        for _, block, local, chosen in parts:
            _refuse_padding(position_M[chosen], block.columns["lengths"][local])
        return codec.gather_hidden_of_blocks(
            layout,
            [
                (block.columns, block.window_starts[local] + position_M[chosen], sort[chosen])
                for _, block, local, chosen in parts
            ],
            self.store.codebook,
        )

    def hidden_statistics(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of every value of the split's hidden states before quantisation: float64 (d).

        They are over all coded tokens of the split. Every unit keeps their sums, so no hidden state is read.
        """
        count = self._table.coded_tokens
        if not count:
            raise StoreError(f"{self.store.path}: no token of this split has a hidden state")
        mean_d = self._sum_over_units("hidden_sum", np.float64) / count
        squares_d = self._sum_over_units("hidden_squares", np.float64) / count
        return mean_d, np.sqrt(np.maximum(squares_d - mean_d**2, 0))

    def document_keys(self, batch: WindowBatch) -> np.ndarray:
        """A key for the document of every token of a batch, int64 (W, L), unique within the split; -1 at padding."""
        sort, parts = self._by_block(batch.window_ids)
        keys_WL = np.full(batch.ids.shape, -1)
        for number, block, local, chosen in parts:
            runs_WL = block.columns["run_starts"].searchsorted(block.window_starts[local], side="right")[:, None] - 1
            runs_WL = runs_WL + np.maximum(batch.documents[sort[chosen]], 0)
            records_WL = block.columns["run_records"][runs_WL].astype(np.int64)
            keys_WL[sort[chosen]] = (self._table.unit[number] << 32) | records_WL
        return np.where(batch.documents < 0, -1, keys_WL)

    def _name_the_block(self, parts):
        """Decode block by block after an error, to find the block that breaks the format although its hash is right."""
        for number, part in parts:
            try:
                codec.gather_rows_of_blocks(self._meta, [part])
            except ShardError as error:
                raise self._describe(self._table.unit[number], self._table.group(number)[0], error) from None

    def mean_distribution(self) -> np.ndarray:
        """Average stored distribution over the split's coded tokens, float64 (k,); sums to 1."""
        mass = self._sum_over_units("mass", np.float64)
        if mass.sum() == 0:
            raise StoreError(f"{self.store.path}: no token of this split has a code. Encode with a smaller --lam.")
        return mass / mass.sum()

    def token_counts(self) -> np.ndarray:
        """How often each token id occurs in the split, int64 (vocabulary,)."""
        return self._sum_over_units("token_counts", np.int64)

    def ordinary_counts(self) -> np.ndarray:
        """`token_counts` as float64, 0 for special tokens, which are never masked."""
        counts_V = self.token_counts().astype(np.float64)
        counts_V[self.store.special_ids["all"]] = 0
        return counts_V

    def _by_block(self, window_ids):
        """Sort by block: the order, and a list of (number, block, window numbers inside it, slice of the order)."""
        if len(window_ids) and not (window_ids.min() >= 0 and window_ids.max() < len(self)):
            raise ValueError(f"window numbers must lie in [0, {len(self)})")
        numbers = self._first_window.searchsorted(window_ids, side="right") - 1
        sort = np.argsort(numbers, kind="stable")
        numbers, local = numbers[sort], window_ids[sort]
        local = local - self._first_window[numbers]
        cuts = [0, *(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), len(numbers)]
        slices = [slice(begin, end) for begin, end in zip(cuts[:-1], cuts[1:], strict=True) if begin < end]
        found = [(int(numbers[chosen.start]), chosen) for chosen in slices]
        parts = [(number, self._block(number), local[chosen], chosen) for number, chosen in found]
        if not all(mapping.is_unchanged() for mapping in {part[1].mapping for part in parts}):
            self._make_caches()  # so that changed files are mapped and verified again
            parts = [(number, self._block(number), *rest) for number, _, *rest in parts]
        return sort, parts

    # -- verified bytes ----------------------------------------------------------------------------------

    def _load_block(self, number):
        table = self._table
        unit, group = int(table.unit[number]), table.group(number)
        mapping, raw = self._blocks.map(unit, group)
        fresh = self._verified[number] != mapping.key
        columns = self._members(raw, unit, group, verify=fresh)
        if fresh:
            try:
                check_columns(columns, int(table.windows[number]), int(table.block_tokens[number]), self._meta)
            except ShardError as error:
                raise self._describe(unit, group[0], error) from None
            self._verified[number] = mapping.key
        starts = np.concatenate(([0], np.cumsum(columns["lengths"], dtype=np.int64)))
        entries = None
        if self.store.k:
            entries = np.zeros(len(columns["nnz"]) + 1, np.int32)  # int32 suffices for 65,536 rows of 255 entries
            np.cumsum(columns["nnz"], out=entries[1:])
        return _Block(mapping, columns, starts, entries)

    def _members(self, raw, unit, group, verify=True):
        """Arrays of one member group by column name, views of its mapped bytes."""
        name, offset, length, sha256 = group
        if verify and hashlib.sha256(raw).digest() != sha256:
            raise ShardError(
                f"{self._table.files[unit]}: block {name} (bytes {offset} to {offset + length}) does not match its "
                f"hash. {self._blocks.discard(unit)}"
            )
        try:
            return group_columns(raw, name)
        except ShardError as error:
            raise self._describe(unit, name, error) from None

    def _describe(self, unit, block, error):
        """A ShardError with another one's text, the shard, the block and advice."""
        return ShardError(f"{self._table.files[unit]}: block {block}: {error}. {self.store.files.repair_hint()}")

    @cached_property
    def _meta(self):
        """The facts needed for decoding, which does not depend on the unit."""
        store = self.store
        sizes = store.k, store.vocab_size, store.max_length, store.weight_octaves
        return ShardMeta(store.target_id, "", *sizes, hidden=store.hidden)

    def _sum_over_units(self, name, total):
        """One of the sums that every unit keeps, added up over the split's units."""
        width = self.store.hidden.width if self.store.hidden else 0
        expected = {"token_counts": self.store.vocab_size, "mass": self.store.k}.get(name, width)
        added = 0
        for unit, sums in enumerate(self._table.sums):
            group = ("__stats__", *sums)
            column = self._members(self._blocks.map(unit, group)[1], unit, group).get(name)
            if column is None or len(column) != expected:
                raise self._describe(unit, group[0], f"it does not hold {expected} sums called {name}")
            if not (np.isfinite(column).all() and (name == "hidden_sum" or (column >= 0).all())):
                raise self._describe(unit, group[0], f"its sums called {name} are not all finite numbers from 0")
            tokens = int(self._table.tokens[unit])
            if np.abs(column).max() > tokens + 1:  # + 1, as mass is a sum of rounded probabilities
                raise self._describe(unit, group[0], f"its sums called {name} are larger than its {tokens} tokens")
            added += column.astype(total)
        return added


def _refuse_padding(position_M, length_M):
    """Raise ValueError unless these positions are of tokens of windows of these lengths."""
    if not ((position_M >= 0) & (position_M < length_M)).all():
        raise ValueError("some positions are not of tokens: those of a window are 0 to its length - 1, without padding")


def _inverse(permutation):
    """The inverse permutation: the new place of each item."""
    inverse = np.empty_like(permutation)
    inverse[permutation] = np.arange(len(permutation))
    return inverse


def _take_rows(rows, chosen):
    """The chosen rows in this order."""
    if np.array_equal(chosen, np.arange(len(rows.tail))):
        return rows
    nnz = np.diff(rows.indptr)[chosen]
    indptr = np.concatenate(([0], np.cumsum(nnz)))
    entries = np.arange(indptr[-1]) + np.repeat(rows.indptr[:-1][chosen] - indptr[:-1], nnz)
    return SparseRows(indptr, rows.indices[entries], rows.weights[entries], rows.tail[chosen])
