"""Read a store: windows in a counted order, rows decoded for the tokens that are asked for.

    store = Store.open("runs/stores/lsp-...")       # or a URL: remote.py
    windows = store.split("train")
    batch = windows.read(windows.order(seed=42, epoch=0, start=0, stop=32))
    rows = windows.targets(batch, window_M, position_M)

Shards are memory-mapped; every block's SHA-256 is checked the first time it is read, and again when the file has
another inode, size or time of change than at that time, so damage is an error and never a short epoch. Whether a mapped
file still is as it was is looked up once for every batch: one that was cut meanwhile is an error, and not the signal
(SIGBUS) that touching its lost pages would be. The order of an epoch permutes blocks, then windows inside groups of
`SHUFFLE_BLOCKS` permuted blocks; any part of it follows from (seed, epoch, position), so there is no
shuffle buffer to save and reads stay near each other. How far that is from a uniform shuffle is measured
(docs/benchmarks.md). Of the records only arrays are kept, about a hundred bytes a block, so that a store of
10^11 tokens opens in little memory. Of a remote store the blocks of a batch are fetched together and their cached
copies mapped (remote.py). Left out: ranks, loader workers and torch (torch_dataset.py).

Shapes: W windows, L window length, M chosen tokens, B blocks, U units.
"""

import hashlib
import mmap
import os
import re
from array import array
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from common import disk
from common.errors import RequestError, ShardError, StoreError
from common.invocation import program
from shards import codec, copies, counter
from shards.codec import SparseRows
from shards.manifest import OF_THE_MACHINE, StoreFiles, differing
from shards.members import check_columns, group_columns
from shards.schema import ShardMeta, kind_of

SHUFFLE_BLOCKS = 64  # about 4 million tokens share a shuffle window; their row offsets take 16 MB
_KEPT_BLOCKS = 2 * SHUFFLE_BLOCKS


class Store:
    """One target directory, seen through one finished plan."""

    def __init__(self, files, plan):
        self.files, self.plan = files, plan
        target = files.target()
        _check_windowing(files, plan, target)
        self.settings = target["lineage"] | target["settings"]
        self.fingerprinted = target["settings"]
        self.target_id, self.plan_id = target["target"], plan.id
        self.kind = kind_of(target)
        self.k, self.vocab_size = target["k"], target["vocab_size"]
        self.max_length, self.special_ids = target["max_length"], target["special_ids"]
        self.weight_octaves = target["weight_octaves"]

    @classmethod
    def open(cls, path, plan_id=None, remote=None):
        """Open a store directory or URL, or one of its `plans/<plan>.json`.

        plan_id  which plan; by default the newest finished one
        remote   shards.source.Remote, how a URL is read; by default as the environment says
        Raises   StoreError when there is no store, or the plan is unfinished; RemoteError, which is one, when a URL
                 cannot be read
        """
        path, of_path = plan_of(path)
        plan_id = plan_id or of_path
        files = open_files(path, remote)
        files.target()
        if plan_id is None:
            return cls(files, files.newest_plan())
        plan = files.load_plan(plan_id)
        if missing := files.missing_units(plan):
            raise StoreError(
                f"{files.path} is unfinished: {len(missing)} of {len(plan.units)} units are missing. "
                "Run the encoding command that began it again; finished units are kept."
            )
        return cls(files, plan)

    @property
    def path(self):
        return self.files.path

    @property
    def tokenizer_dir(self):
        return self.files.tokenizer

    def read_tokenizer(self):
        """The files of the tokenizer, name to bytes, once they are compared with the target.

        Raises  StoreError when they are not those of the tokenizer that the text was encoded with
        """
        return self._tokenizer_files

    @cached_property
    def _tokenizer_files(self):
        return copies.read_tokenizer(self.files)

    def load_tokenizer(self):
        """The tokenizer, as an object of transformers. Raises as `read_tokenizer`."""
        contents = self.read_tokenizer()
        with copies.foreign_errors(self.files):
            return copies.load_tokenizer(contents)

    @property
    def mask_id(self):
        return self.special_ids["mask"]

    @cached_property
    def command(self):
        """What was kept of the command that made the plan: {verb: settings, "recipe": its name}; {} without any."""
        return self.files.command(self.plan_id)

    def records(self, split=None):
        """Unit records in plan order, of one split or of all."""
        return list(self.iter_records(split))

    def iter_records(self, split=None):
        """The same one by one: all records of a large store take gigabytes.

        Raises  StoreError when a record has gone since, ShardError when it is damaged or another store's
        """
        for unit in self.plan.units:
            if split in (None, unit.split):
                yield self.record(unit.id)

    def record(self, unit_id):
        """The record of a unit of the plan. Raises as `iter_records`."""
        record = self.files.record(unit_id)
        if record is None:
            path = self.files.record_file(unit_id)
            raise StoreError(f"{path} is missing. Run the encoding command again: it encodes that unit and no other.")
        return record

    def urls(self, split="train"):
        """Paths or URLs of the split's shards in plan order, for plain WebDataset."""
        return [f"{self.path}/units/{record.file}" for record in self.iter_records(split)]

    def split(self, name):
        """WindowReader over `train` or `held_out`."""
        if not any(unit.split == name for unit in self.plan.units):
            raise StoreError(f"{self.path} has no {name} windows; the corpus is too small for a held-out part")
        return WindowReader(self, self.iter_records(name))

    def report(self):
        """Totals over all units; stores with distributions add non-zeros and mass kept per coded token."""
        totals = dict.fromkeys(("units", "windows", "tokens", "bytes", "documents"), 0)
        seconds = dict.fromkeys(("teacher_seconds", "solver_seconds", "head_seconds"), 0.0)
        statistics = []
        for record in self.iter_records():  # one at a time: their tables of blocks would fill the memory
            statistics.append({name: value for name, value in record.statistics.items() if np.isscalar(value)})
            totals["units"] += 1
            for name in ("windows", "tokens", "bytes"):
                totals[name] += getattr(record, name)
            totals["documents"] += record.statistics["documents"]
            for stage in seconds:
                seconds[stage] += record.environment.get(stage, 0.0)
        totals |= {"kind": self.kind, "bytes_per_token": totals["bytes"] / max(1, totals["tokens"])} | seconds
        solver = {"solver": self.settings["solver"]} if "solver" in self.settings else {}
        return totals | solver | (_row_statistics(statistics, "derived_from" in self.settings) if self.k else {})


def _check_windowing(files, plan, target):
    """Raise StoreError when a plan cut the text into other windows than the target says."""
    windowing = target["settings"].get("windowing")
    if windowing is not None and plan.windowing != windowing:
        raise StoreError(
            f"{files.path}: plan {plan.id} is of another store: {differing(plan.windowing, windowing)}. Remove it from "
            "plans/, or give the store that it belongs to."
        )


def plan_of(path):
    """The store and the plan id of a path or URL `<store>/plans/<plan>.json`; of another one itself and None."""
    match = re.fullmatch(r"(.+)/plans/([^/]+)\.json", str(path))
    return (match[1], match[2]) if match and (is_url(path) or Path(path).is_file()) else (path, None)


def is_url(path):
    """Whether this is the address of something on another machine."""
    return isinstance(path, str) and "://" in path


def open_files(path, remote=None):
    """StoreFiles of a directory, RemoteFiles of a URL."""
    if not is_url(path):
        return StoreFiles(path)
    from shards.remote import RemoteFiles  # only here: fsspec and aiohttp take a while to import

    return RemoteFiles(path, remote)


def newest_store(root, kinds=("lsp", "ids", "logits")):
    """The first of `finished_stores`: what a command takes that names no store. Raises as that."""
    return finished_stores(root, kinds)[0]


def finished_stores(root, kinds=("lsp", "ids", "logits")):
    """Paths of the finished stores under `root`, the one first whose text was encoded last.

    That is when its plan was published. Stores that were derived from others come behind all others, for they add no
    text: making one does not change what the next command takes.

    kinds   pass over stores that hold anything else
    Raises  StoreError when there is none, naming an unfinished one if that is why; otherwise it is a RequestError
    """
    newest, unusable = {}, None
    for plan in Path(root).glob("*/plans/*.json"):
        try:
            store = Store.open(plan)
            if store.kind in kinds:
                rank = "derived_from" not in store.settings, plan.stat().st_mtime_ns
                newest[store.path] = max(rank, newest.get(store.path, rank))
        except (StoreError, ShardError, OSError) as error:  # one bad store hides no other
            unusable = error
    if not newest and unusable is not None:
        raise StoreError(str(unusable))
    if not newest:
        wanted = " or ".join(kinds)
        raise RequestError(f"no finished store of {wanted} under {root}. Make one:  {program()} encode-{kinds[0]}")
    return sorted(newest, key=lambda path: (newest[path], path), reverse=True)


def _row_statistics(statistics, derived):
    coded = sum(s["coded_tokens"] for s in statistics)
    share = {"nnz_per_token": "entries", "mass_kept": "kept_mass", "entropy_nats": "entropy_nats"}
    report = {name: sum(s[key] for s in statistics) / max(1, coded) for name, key in share.items()}
    report |= {"coded_tokens": coded}
    report |= {name: sum(s.get(name, 0) for s in statistics) for name in ("empty_codes", "truncated_tokens")}
    if sampled := sum(s.get("fidelity_tokens", 0) for s in statistics):  # stores of before it was measured have none
        means = {name: sum(s.get(f"fidelity_{name}", 0) for s in statistics) / sampled for name in ("kl", "tv", "tail")}
        report["fidelity"] = {"tokens": int(sampled), "of": "source" if derived else "exact", **means}
    if compared := sum(s.get("dtype_tokens", 0) for s in statistics):  # of a teacher in another dtype than float32
        means = {name: sum(s.get(f"dtype_{name}", 0) for s in statistics) / compared for name in ("tv", "hidden")}
        report["dtype_effect"] = {"tokens": int(compared), **means}
    violations = [s["max_kkt"] for s in statistics if "max_kkt" in s]  # the writer's own
    return report | ({"max_kkt": max(violations)} if violations else {})


@dataclass(frozen=True)
class WindowBatch(codec.Windows):
    """Windows with their numbers in the split: `window_ids` int64 (W)."""

    window_ids: np.ndarray


class _Mapping:
    """A mapped file and its identity: device, inode, size, time of the last change.

    raw  uint8 array, a view of the mapping
    """

    def __init__(self, file, path):
        status = os.fstat(file.fileno())
        self._path, self._identity = str(path), _identity(status)
        self.key = hash(self._identity) or 1  # 0 stands for no file
        size = status.st_size
        self.raw = np.frombuffer(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) if size else b"", np.uint8)

    def is_unchanged(self):
        """Whether nobody has written to the file since. Another one of its name, or none, leaves what is mapped."""
        try:
            now = _identity(os.stat(self._path))
        except OSError:
            return True
        return now == self._identity or now[:2] != self._identity[:2]


def _identity(status):
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@dataclass(frozen=True)
class _Block:
    """One verified block: its columns (views of the mapped file) and the cumulative sums that index them."""

    mapping: _Mapping
    columns: dict
    window_starts: np.ndarray
    first_entry: np.ndarray | None


class _BlockTable:
    """What a reader needs of the records: shards by unit, and member groups by block.

    ids, files               lists (U) of unit ids and shard names
    sizes, tokens            int64 (U), bytes of the shard and real tokens
    first_block              int64 (U + 1)
    unit, offset, length, windows, block_tokens   int64 (B)
    sha256                   uint8 (B, 32)
    sums                     list of (offset, length, sha256), the `__stats__` group of every unit
    digest                   hexadecimal SHA-256 over the hashes of the shards
    """

    def __init__(self, records):
        self.ids, self.files, self.sums = [], [], []
        sizes, tokens, first_block = array("q"), array("q"), array("q", [0])
        blocks, digests, digest = array("q"), bytearray(), hashlib.sha256()
        for record in records:
            self.ids.append(record.unit)
            self.files.append(record.file)
            sizes.append(record.bytes)
            digest.update(bytes.fromhex(record.sha256))
            tokens.append(record.tokens)
            for block in record.blocks:
                blocks.extend((block["offset"], block["length"], block["windows"], block["tokens"]))
                digests += bytes.fromhex(block["sha256"])
            first_block.append(len(blocks) // 4)
            sums = record.groups[-1]
            self.sums.append((sums["offset"], sums["length"], bytes.fromhex(sums["sha256"])))
        self.sizes, self.tokens, self.first_block = (np.array(a, np.int64) for a in (sizes, tokens, first_block))
        self.offset, self.length, self.windows, self.block_tokens = np.array(blocks, np.int64).reshape(-1, 4).T.copy()
        self.sha256 = np.frombuffer(bytes(digests), np.uint8).reshape(-1, 32)
        self.digest = digest.hexdigest()
        self.unit = np.repeat(np.arange(len(self.ids)), np.diff(self.first_block))

    def __len__(self):
        return len(self.unit)

    def group(self, number):
        """(name, offset, length, sha256) of a block."""
        name = f"{number - self.first_block[self.unit[number]]:06d}"
        return name, int(self.offset[number]), int(self.length[number]), self.sha256[number].tobytes()


class WindowReader:
    """The windows of one split, numbered in plan order.

    records  UnitRecords in plan order, read once
    """

    def __init__(self, store, records):
        self.store = store
        self._table = _BlockTable(records)
        self._first_window = np.concatenate(([0], np.cumsum(self._table.windows)))
        self._verified = np.zeros(len(self._table), np.int64)  # key of the mapping in which a block's hash was right
        self._make_caches()

    def _make_caches(self):
        self._block = lru_cache(maxsize=_KEPT_BLOCKS)(self._load_block)
        self._shard = lru_cache(maxsize=_KEPT_BLOCKS)(self._map_shard)
        self._epoch_blocks = lru_cache(maxsize=2)(self._permute_blocks)
        self._group_order = lru_cache(maxsize=4)(self._permute_group)

    def __getstate__(self):
        caches = {"_block", "_shard", "_epoch_blocks", "_group_order"}  # a loader worker maps files for itself
        return {name: value for name, value in self.__dict__.items() if name not in caches}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._make_caches()

    def __len__(self):
        return int(self._first_window[-1])

    @cached_property
    def tokens(self):
        """Real tokens of the split, special ones included."""
        return int(self._table.tokens.sum())

    @property
    def digest(self):
        """Hexadecimal SHA-256 over the hashes of the split's shards, in plan order: other bytes, another digest."""
        return self._table.digest

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
        blocks = counter.permutation(len(self._table), seed, epoch, 0)
        ends = np.cumsum(self._table.windows[blocks])
        return blocks, np.append(ends[SHUFFLE_BLOCKS - 1 : -1 : SHUFFLE_BLOCKS], ends[-1])

    def _permute_group(self, seed, epoch, group):
        blocks = self._epoch_blocks(seed, epoch)[0][group * SHUFFLE_BLOCKS : (group + 1) * SHUFFLE_BLOCKS]
        windows = np.concatenate([np.arange(self._first_window[b], self._first_window[b + 1]) for b in blocks])
        return windows[counter.permutation(len(windows), seed, epoch, 1, group)]

    def stream(self, seed, start, stop):
        """Windows [start, stop) of the endless sequence of epochs: epoch 0 in its order, epoch 1 in its own, ...

        Returns  window ids and the epoch of each, int64 arrays
        Raises   StoreError when the split holds no window
        """
        if not len(self):
            raise StoreError(f"{self.store.path}: the split holds no window. Encode more text.")
        ids, epochs = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        while start < stop:
            epoch, first = divmod(start, len(self))
            last = min(first + stop - start, len(self))
            ids.append(self.order(seed, epoch, first, last))
            epochs.append(np.full(last - first, epoch))
            start += last - first
        return np.concatenate(ids), np.concatenate(epochs)

    # -- windows and rows --------------------------------------------------------------------------------

    def read(self, window_ids):
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

    def targets(self, batch, window_M, position_M):
        """Stored distributions of the tokens batch.ids[window_M, position_M], as SparseRows in that order."""
        sort, parts = self._by_block(batch.window_ids[window_M])
        position_M = np.asarray(position_M)[sort]
        parts = [
            (number, (block.columns, block.first_entry, block.window_starts[local] + position_M[chosen]))
            for number, block, local, chosen in parts
        ]
        try:
            rows = codec.gather_rows_of_blocks(self._meta, [part for _, part in parts])
        except ShardError:
            self._name_the_block(parts)
            raise
        return _take_rows(rows, _inverse(sort))

    def document_keys(self, batch):
        """Which document every token of a batch is of, int64 (W, L): equal keys within the split are one document; -1
        at padding."""
        sort, parts = self._by_block(batch.window_ids)
        keys_WL = np.full(batch.ids.shape, -1)
        for number, block, local, chosen in parts:
            runs_WL = block.columns["run_starts"].searchsorted(block.window_starts[local], side="right")[:, None] - 1
            runs_WL = runs_WL + np.maximum(batch.documents[sort[chosen]], 0)
            records_WL = block.columns["run_records"][runs_WL].astype(np.int64)
            keys_WL[sort[chosen]] = (self._table.unit[number] << 32) | records_WL
        return np.where(batch.documents < 0, -1, keys_WL)

    def _name_the_block(self, parts):
        """Decode block by block, to say which one breaks the format although its hash is right."""
        for number, part in parts:
            try:
                codec.gather_rows_of_blocks(self._meta, [part])
            except ShardError as error:
                unit = self._table.unit[number]
                where = f"{self._table.files[unit]}: block {self._table.group(number)[0]}"
                raise ShardError(f"{where}: {error}. {self._repair_hint()}") from None

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
        """Sort by block: the order, and a list of (number, block, window numbers inside it, slice of the order)."""
        if len(window_ids) and not (window_ids.min() >= 0 and window_ids.max() < len(self)):
            raise ValueError(f"window numbers must lie in [0, {len(self)})")
        numbers = self._first_window.searchsorted(window_ids, side="right") - 1
        sort = np.argsort(numbers, kind="stable")
        numbers, local = numbers[sort], window_ids[sort]
        local = local - self._first_window[numbers]
        if self.store.files.remote:
            self._fetch(np.unique(numbers))
        cuts = [0, *(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), len(numbers)]
        slices = [slice(begin, end) for begin, end in zip(cuts[:-1], cuts[1:], strict=True) if begin < end]
        found = [(int(numbers[chosen.start]), chosen) for chosen in slices]
        parts = [(number, self._block(number), local[chosen], chosen) for number, chosen in found]
        if not all(mapping.is_unchanged() for mapping in {part[1].mapping for part in parts}):
            self._make_caches()  # maps and verifies again what was written to
            parts = [(number, self._block(number), *rest) for number, _, *rest in parts]
        return sort, parts

    # -- verified bytes ----------------------------------------------------------------------------------

    def _load_block(self, number):
        table = self._table
        unit, group = int(table.unit[number]), table.group(number)
        mapping = self._map(unit, group[0])
        fresh = self._verified[number] != mapping.key
        columns = self._members(mapping, unit, group, verify=fresh)
        if fresh:
            try:
                check_columns(columns, int(table.windows[number]), int(table.block_tokens[number]), self._meta)
            except ShardError as error:
                raise self._named(unit, group[0], error) from None
            self._verified[number] = mapping.key
        starts = np.concatenate(([0], np.cumsum(columns["lengths"], dtype=np.int64)))
        entries = None
        if self.store.k:
            entries = np.zeros(len(columns["nnz"]) + 1, np.int32)  # 65,536 rows of 255 entries at most
            np.cumsum(columns["nnz"], out=entries[1:])
        return _Block(mapping, columns, starts, entries)

    def _members(self, mapping, unit, group, verify=True):
        """Arrays of one member group by column name, views of the mapped shard."""
        name, offset, length, sha256 = group
        files, file = self.store.files, self._table.files[unit]
        raw = mapping.raw if files.remote else mapping.raw[offset : offset + length]
        if verify and hashlib.sha256(raw).digest() != sha256:
            raise ShardError(
                f"{file}: block {name} (bytes {offset} to {offset + length}) does not match its hash. "
                + (files.discard_group(file, name) if files.remote else self._repair_hint())
            )
        try:
            return group_columns(raw, name)
        except ShardError as error:
            raise self._named(unit, name, error) from None

    def _named(self, unit, block, error):
        """The same error with the shard, the block and the way out."""
        return ShardError(f"{self._table.files[unit]}: block {block}: {error}. {self._repair_hint()}")

    def _map(self, unit, group):
        """What holds a member group: the mapped shard, or of a remote store the group's file in the cache."""
        return self._map_group(unit, group) if self.store.files.remote else self._shard(unit)

    def _map_shard(self, unit):
        path, size = self.store.files.units / self._table.files[unit], self._table.sizes[unit]
        try:
            with disk.open_to_read(path) as file:
                mapping = _Mapping(file, path)
        except FileNotFoundError:
            self._refuse_replaced(unit)
            raise ShardError(f"{path} is missing although its record exists. " + self._repair_hint()) from None
        except OSError as error:
            if error.errno in OF_THE_MACHINE:
                raise
            raise ShardError(f"{path} cannot be read: {error.strerror}. " + self._repair_hint()) from None
        if len(mapping.raw) != size:
            raise ShardError(f"{path}: {len(mapping.raw)} bytes, the record says {size}. " + self._repair_hint())
        return mapping

    def _refuse_replaced(self, unit):
        """Raise StoreError if the unit was encoded again, and its old shard cleaned away, since we read its record."""
        record = self.store.files.record(self._table.ids[unit])
        if record is not None and record.file != self._table.files[unit]:
            raise StoreError(
                f"{self.store.path}: unit {record.unit} was encoded again since the store was opened, and its old "
                "shard was cleaned away. Open the store again, or start the command again."
            )

    def _map_group(self, unit, name):
        with self.store.files.open_group(self._table.ids[unit], self._table.files[unit], name) as file:
            return _Mapping(file, file.name)

    def _fetch(self, blocks):
        """Let a remote store fetch at once the blocks that are about to be read."""
        table = self._table
        units = table.unit[blocks].tolist()
        names = [table.group(number)[0] for number in blocks.tolist()]
        self.store.files.fetch_groups(
            [(table.ids[unit], table.files[unit], name) for unit, name in zip(units, names, strict=True)]
        )

    def _repair_hint(self):
        return self.store.files.repair_hint()

    @cached_property
    def _meta(self):
        """What decoding needs; the unit plays no part in it."""
        store = self.store
        return ShardMeta(store.target_id, "", store.k, store.vocab_size, store.max_length, store.weight_octaves)

    def _sum_over_units(self, name, total):
        groups = (("__stats__", *group) for group in self._table.sums)
        return sum(self._sum(unit, group, name).astype(total) for unit, group in self._fetched(groups))

    def _sum(self, unit, group, name):
        column = self._members(self._map(unit, group[0]), unit, group).get(name)
        expected = {"token_counts": self.store.vocab_size, "mass": self.store.k}[name]
        if column is None or len(column) != expected:
            raise self._named(unit, group[0], f"it does not hold {expected} sums called {name}")
        return column

    def _fetched(self, groups):
        """Number the units' groups; those of a remote store are fetched some at once, before they are needed."""
        units = [(*unit, "__stats__") for unit in zip(self._table.ids, self._table.files, strict=True)]
        for unit, group in enumerate(groups):
            if self.store.files.remote and unit % _KEPT_BLOCKS == 0:
                self.store.files.fetch_groups(units[unit : unit + _KEPT_BLOCKS])
            yield unit, group


def _inverse(permutation):
    """Where each item went."""
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
