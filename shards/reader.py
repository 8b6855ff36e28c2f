"""Read a store: windows in a counted order, rows decoded for the tokens that are asked for.

    store = Store.open("runs/stores/lsp-...")
    windows = store.split("train")
    batch = windows.read(windows.order(seed=42, epoch=0, start=0, stop=32))
    rows = windows.targets(batch, window_M, position_M)

Shards are memory-mapped; every block's SHA-256 is checked the first time it is read, so damage is an error
and never a short epoch. The order of an epoch permutes blocks, then windows inside groups of
`SHUFFLE_BLOCKS` permuted blocks; any part of it follows from (seed, epoch, position), so there is no
shuffle buffer to save and reads stay near each other. Left out: remote stores and torch datasets.

Shapes: W windows, L window length, M chosen tokens.
"""

import hashlib
import io
import tarfile
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from shards import codec, counter
from shards.codec import SparseRows
from shards.manifest import StoreFiles
from shards.schema import ShardError, ShardMeta, StoreError, repair_hint

SHUFFLE_BLOCKS = 64  # about 4 million tokens share a shuffle window; their row offsets take 32 MB
_KEPT_BLOCKS = 2 * SHUFFLE_BLOCKS


class Store:
    """One target directory, seen through one finished plan."""

    def __init__(self, files, plan):
        self.files, self.plan = files, plan
        target = files.target()
        self.settings = target["lineage"] | target["settings"]
        self.target_id, self.plan_id = target["target"], plan.id
        self.k, self.vocab_size = target["k"], target["vocab_size"]
        self.max_length, self.special_ids = target["max_length"], target["special_ids"]
        self.weight_octaves = target["weight_octaves"]

    @classmethod
    def open(cls, path, plan_id=None):
        """Open a store directory, or one of its `plans/<plan>.json`.

        plan_id  which plan; by default the newest finished one
        Raises   StoreError when there is no store, or the plan is unfinished
        """
        path = Path(path)
        if path.is_file() and path.parent.name == "plans":
            path, plan_id = path.parent.parent, path.stem
        files = StoreFiles(path)
        files.target()
        if plan_id is None:
            return cls(files, files.newest_plan())
        plan = files.load_plan(plan_id)
        if missing := files.missing_units(plan):
            raise StoreError(
                f"{path} is unfinished: {len(missing)} of {len(plan.units)} units are missing. "
                "Run the encoding command that began it again; finished units are kept."
            )
        return cls(files, plan)

    @property
    def path(self):
        return self.files.path

    @property
    def tokenizer_dir(self):
        return self.files.tokenizer

    @property
    def mask_id(self):
        return self.special_ids["mask"]

    def records(self, split=None):
        """Unit records in plan order, of one split or of all."""
        return [self.files.record(unit.id) for unit in self.plan.units if split in (None, unit.split)]

    def urls(self, split="train"):
        """Paths of the split's shards in plan order, for plain WebDataset."""
        return [str(self.files.units / record.file) for record in self.records(split)]

    def split(self, name):
        """WindowReader over `train` or `held_out`."""
        records = self.records(name)
        if not records:
            raise StoreError(f"{self.path} has no {name} windows; the corpus is too small for a held-out part")
        return WindowReader(self, records)

    def report(self):
        """Totals over all units; LSP stores add non-zeros and mass kept per coded token."""
        records = self.records()
        totals = {
            "units": len(records),
            "windows": sum(r.windows for r in records),
            "tokens": sum(r.tokens for r in records),
            "bytes": sum(r.bytes for r in records),
            "documents": sum(r.statistics["documents"] for r in records),
        }
        totals["bytes_per_token"] = totals["bytes"] / max(1, totals["tokens"])
        for stage in ("teacher_seconds", "solver_seconds"):
            totals[stage] = sum(record.environment.get(stage, 0.0) for record in records)
        if self.k:
            totals |= _row_statistics([record.statistics for record in records])
        return totals


def newest_store(root, needs_lsps=False):
    """Path of the finished store under `root` whose plan was published last.

    needs_lsps  pass over stores of token ids only
    Raises      StoreError when there is none, naming an unfinished one if that is why
    """
    found, reason = [], f"no store under {root}. Make one with: mlsm encode-lsp"
    for plan in Path(root).glob("*/plans/*.json"):
        try:
            store = Store.open(plan)
        except (StoreError, ShardError) as error:
            reason = str(error)
            continue
        if store.k or not needs_lsps:
            found.append((plan.stat().st_mtime_ns, store.path))
    if not found:
        raise StoreError(reason)
    return max(found)[1]


def _row_statistics(statistics):
    coded = sum(s["coded_tokens"] for s in statistics)
    share = {"nnz_per_token": "entries", "mass_kept": "kept_mass", "entropy_nats": "entropy_nats"}
    report = {name: sum(s[key] for s in statistics) / max(1, coded) for name, key in share.items()}
    report |= {"coded_tokens": coded, "empty_codes": sum(s.get("empty_codes", 0) for s in statistics)}
    violations = [s["max_kkt"] for s in statistics if "max_kkt" in s]  # the writer's own
    return report | ({"max_kkt": max(violations)} if violations else {})


@dataclass(frozen=True)
class WindowBatch(codec.Windows):
    """Windows with their numbers in the split: `window_ids` int64 (W)."""

    window_ids: np.ndarray


@dataclass(frozen=True)
class _Block:
    """One verified block: its columns (views of the mapped file) and the cumulative sums that index them."""

    columns: dict
    window_starts: np.ndarray
    first_entry: np.ndarray | None


class WindowReader:
    """The windows of one split, numbered in plan order."""

    def __init__(self, store, records):
        self.store = store
        self._records = records
        self._units = np.repeat(np.arange(len(records)), [len(record.blocks) for record in records])
        self._groups = [block for record in records for block in record.blocks]
        self._block_windows = np.array([block["windows"] for block in self._groups], np.int64)
        self._first_window = np.concatenate(([0], np.cumsum(self._block_windows)))
        self._block = lru_cache(maxsize=_KEPT_BLOCKS)(self._load_block)
        self._shard = lru_cache(maxsize=_KEPT_BLOCKS)(self._map_shard)
        self._epoch_blocks = lru_cache(maxsize=2)(self._permute_blocks)
        self._group_order = lru_cache(maxsize=4)(self._permute_group)
        self._verified = np.zeros(len(self._groups), bool)

    def __len__(self):
        return int(self._first_window[-1])

    @cached_property
    def tokens(self):
        """Real tokens of the split, special ones included."""
        return sum(record.tokens for record in self._records)

    # -- order -------------------------------------------------------------------------------------------

    def order(self, seed, epoch, start, stop):
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
        blocks = counter.permutation(len(self._groups), seed, epoch, 0)
        ends = np.cumsum(self._block_windows[blocks])
        return blocks, np.append(ends[SHUFFLE_BLOCKS - 1 : -1 : SHUFFLE_BLOCKS], ends[-1])

    def _permute_group(self, seed, epoch, group):
        blocks = self._epoch_blocks(seed, epoch)[0][group * SHUFFLE_BLOCKS : (group + 1) * SHUFFLE_BLOCKS]
        windows = np.concatenate([np.arange(self._first_window[b], self._first_window[b + 1]) for b in blocks])
        return windows[counter.permutation(len(windows), seed, epoch, 1, group)]

    # -- windows and rows --------------------------------------------------------------------------------

    def read(self, window_ids):
        """The windows with these numbers, in this order, as a WindowBatch."""
        window_ids = np.asarray(window_ids, np.int64)
        ids = np.empty((len(window_ids), self.store.max_length), np.int32)
        documents, lengths = np.empty_like(ids), np.empty(len(window_ids), np.int32)
        for number, chosen in self._by_block(window_ids):
            block = self._block(number)
            part = codec.padded_windows(
                block.columns,
                block.window_starts,
                window_ids[chosen] - self._first_window[number],
                self.store.max_length,
                self.store.special_ids["pad"],
            )
            ids[chosen], documents[chosen], lengths[chosen] = part.ids, part.documents, part.lengths
        return WindowBatch(ids, lengths, documents, window_ids)

    def targets(self, batch, window_M, position_M):
        """Stored distributions of the tokens batch.ids[window_M, position_M], as SparseRows in that order."""
        window_ids = batch.window_ids[window_M]
        parts, chosen_parts = [], []
        for number, chosen in self._by_block(window_ids):
            block = self._block(number)
            tokens = block.window_starts[window_ids[chosen] - self._first_window[number]] + position_M[chosen]
            parts.append(codec.gather_rows(self._meta(number), block.columns, block.first_entry, tokens))
            chosen_parts.append(chosen)
        return _reorder(parts, np.concatenate(chosen_parts) if chosen_parts else np.zeros(0, np.int64))

    def mean_distribution(self):
        """Average stored distribution over the split's coded tokens, float64 (k,); sums to 1."""
        mass = self._sum_over_units("mass", np.float64)
        if mass.sum() == 0:
            raise StoreError(f"{self.store.path}: no token of this split has a code. Encode with a smaller --lam.")
        return mass / mass.sum()

    def token_counts(self):
        """How often each token id occurs in the split, int64 (vocabulary,)."""
        return self._sum_over_units("token_counts", np.int64)

    def _by_block(self, window_ids):
        """Pairs (block number, positions in window_ids), one a block."""
        numbers = np.searchsorted(self._first_window, window_ids, side="right") - 1
        order = np.argsort(numbers, kind="stable")
        cuts = np.flatnonzero(np.diff(numbers[order])) + 1
        return [(int(numbers[chosen[0]]), chosen) for chosen in np.split(order, cuts) if len(chosen)]

    # -- verified bytes ----------------------------------------------------------------------------------

    def _load_block(self, number):
        unit, group = self._units[number], self._groups[number]
        columns = self._members(unit, group, verify=not self._verified[number])
        if (len(columns["lengths"]), len(columns["ids"])) != (group["windows"], group["tokens"]):
            record = self._records[unit]
            raise ShardError(
                f"{record.file}: block {group['name']} has {len(columns['lengths'])} windows, its record says "
                f"{group['windows']}. " + self._repair_hint(record)
            )
        self._verified[number] = True
        starts = np.concatenate(([0], np.cumsum(columns["lengths"], dtype=np.int64)))
        entries = np.concatenate(([0], np.cumsum(columns["nnz"], dtype=np.int64))) if self.store.k else None
        return _Block(columns, starts, entries)

    def _members(self, unit, group, verify=True):
        """Arrays of one member group by column name, views of the mapped shard."""
        record = self._records[unit]
        raw = self._shard(unit)[group["offset"] : group["offset"] + group["length"]]
        if verify and hashlib.sha256(raw).hexdigest() != group["sha256"]:
            raise ShardError(
                f"{record.file}: block {group['name']} (bytes {group['offset']} to "
                f"{group['offset'] + group['length']}) does not match its hash. " + self._repair_hint(record)
            )
        return {name.removesuffix(".npy").rpartition(".")[2]: array for name, array in npy_members(raw)}

    def _map_shard(self, unit):
        record = self._records[unit]
        path = self.store.files.units / record.file
        if not path.is_file():
            raise ShardError(f"{path} is missing although its record exists. " + self._repair_hint(record))
        if path.stat().st_size != record.bytes:
            raise ShardError(
                f"{path}: {path.stat().st_size} bytes, the record says {record.bytes}. " + self._repair_hint(record)
            )
        return np.memmap(path, np.uint8, mode="r")

    def _repair_hint(self, record):
        return repair_hint(self.store.path)

    def _meta(self, number):
        store = self.store
        return ShardMeta(
            store.target_id,
            self._records[self._units[number]].unit,
            store.k,
            store.vocab_size,
            store.max_length,
            store.weight_octaves,
        )

    def _sum_over_units(self, name, total):
        groups = [record.groups[-1] for record in self._records]
        return sum(self._members(unit, group)[name].astype(total) for unit, group in enumerate(groups))


def _reorder(parts, places):
    """Join CSR parts whose rows belong at `places`."""
    if not parts:
        return SparseRows(
            np.zeros(1, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.float32)
        )
    nnz = np.concatenate([np.diff(part.indptr) for part in parts])
    starts = np.concatenate(([0], np.cumsum(nnz)[:-1]))
    source = np.argsort(places)
    indptr = np.concatenate(([0], np.cumsum(nnz[source])))
    entries = np.arange(indptr[-1]) + np.repeat(starts[source] - indptr[:-1], nnz[source])
    indices, weights, tail = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("indices", "weights", "tail")
    )
    return SparseRows(indptr, indices[entries], weights[entries], tail[source])


def npy_members(raw):
    """Pairs (member name, array view) of the `.npy` members in raw tar bytes.

    raw     uint8 array that begins at a tar header and ends after a member's padding
    Raises  ShardError on a header that is not one
    """
    position = 0
    while position < len(raw):
        try:
            header = tarfile.TarInfo.frombuf(raw[position : position + 512].tobytes(), "utf-8", "strict")
        except tarfile.HeaderError as error:
            raise ShardError(f"no tar header at byte {position} of the block: {error}") from None
        begin = position + 512
        if header.name.endswith(".npy"):
            yield header.name, _npy_view(raw[begin : begin + header.size])
        position = begin + -(-header.size // 512) * 512


def _npy_view(raw):
    head = io.BytesIO(raw[:256].tobytes())
    np.lib.format.read_magic(head)
    shape, _, dtype = np.lib.format.read_array_header_1_0(head)
    return np.frombuffer(raw, dtype, count=int(np.prod(shape)), offset=head.tell()).reshape(shape)
