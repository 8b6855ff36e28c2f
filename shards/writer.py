"""Write one unit's shard and commit it.

    with UnitWriter(files, meta) as unit:
        unit.write_block(ids=..., lengths=..., ...)
        unit.statistics["max_kkt"] = ...

Each block becomes tar members through webdataset's writer into memory, is hashed there and appended to our
own file, so that offsets and hashes are exact. Leaving the `with` block commits: shard first, record last.
An exception inside publishes nothing. Layout: schema.py; names and fsync: manifest.py.
"""

import hashlib
import io
import json
import os
import platform
from functools import cache

import numpy as np
import webdataset as wds

from shards import codec
from shards.manifest import UnitRecord, file_sha256, fsync_directory, publish, publish_json, temporary_name
from shards.schema import SHARD_MTIME

_END_OF_ARCHIVE = bytes(1024)


class UnitWriter:
    """The shard of one unit, from its first block to its record.

    files        StoreFiles of the store
    meta         ShardMeta of the unit
    environment  extra facts for the record (device, libraries)
    """

    def __init__(self, files, meta, environment=None):
        self.files, self.meta = files, meta
        self.environment = local_environment() | (environment or {})
        self.statistics = (
            {
                "documents": 0,
                "entries": 0,
                "coded_tokens": 0,
                "kept_mass": 0.0,
                "entropy_nats": 0.0,
                "nnz_histogram": [0] * 256,
            }
            if meta.k
            else {"documents": 0}
        )
        self._token_counts = np.zeros(meta.vocab_size, np.int64)
        self._mass = np.zeros(meta.k)
        self._groups, self._windows, self._tokens, self._last_record = [], 0, 0, -1
        self._hash = hashlib.sha256()

    def __enter__(self):
        self._temporary = temporary_name(self.files.units, self.meta.unit)
        self._file = open(self._temporary, "wb")
        self._write_group("__meta__", {"__meta__/meta": {"json": _json_bytes(self.meta.as_dict())}})
        return self

    def __exit__(self, kind, error, trace):
        try:
            if kind is None:
                self.record = self._commit()
        finally:
            self._discard()

    def _discard(self):
        try:
            self._file.close()      # may want to write once more, and fail on a full disk
        finally:
            self._temporary.unlink(missing_ok=True)

    def write_block(self, **columns):
        """Append one block; the columns are those of `codec.pack_block`."""
        key = f"{sum('windows' in group for group in self._groups):06d}"
        block = codec.pack_block(self.meta, **columns)
        members = {f"{name}.npy": _npy_bytes(array) for name, array in block.items()}
        windows, tokens = len(columns["lengths"]), len(columns["ids"])
        self._write_group(key, {key: members}, windows=windows, tokens=tokens)
        self._windows += windows
        self._tokens += tokens
        self._count(columns)

    def _count(self, columns):
        self._token_counts += np.bincount(columns["ids"], minlength=self.meta.vocab_size)
        records = columns["run_records"]
        fresh = np.unique(records[records > self._last_record])
        self._last_record = max(self._last_record, int(records.max(initial=-1)))
        self.statistics["documents"] += len(fresh)
        if self.meta.k:
            self._count_rows(columns["nnz"], columns["indices"], columns["weights"], columns["tail"])

    def _count_rows(self, nnz, indices, weights, tail):
        coded = nnz > 0
        probability = weights / np.repeat(1 - tail, nnz)  # of the kept entries alone
        self._mass += np.bincount(indices, probability, minlength=self.meta.k)
        totals = self.statistics
        totals["entries"] += int(nnz.sum())
        totals["coded_tokens"] += int(coded.sum())
        totals["kept_mass"] += float((1 - tail[coded]).sum(dtype=np.float64))
        totals["entropy_nats"] -= float((probability * np.log(probability)).sum(dtype=np.float64))
        histogram = np.bincount(nnz[coded], minlength=256)
        totals["nnz_histogram"] = [a + int(b) for a, b in zip(totals["nnz_histogram"], histogram, strict=True)]

    def _write_group(self, name, samples, **facts):
        raw = _tar_members(samples)
        self._groups.append(
            {
                "name": name,
                "offset": self._file.tell(),
                "length": len(raw),
                "sha256": hashlib.sha256(raw).hexdigest(),
                **facts,
            }
        )
        self._append(raw)

    def _append(self, raw):
        self._file.write(raw)
        self._hash.update(raw)

    def _commit(self):
        sums = {"token_counts.npy": _npy_bytes(self._token_counts.astype(np.uint32))}
        if self.meta.k:
            sums["mass.npy"] = _npy_bytes(self._mass)
        self._write_group("__stats__", {"__stats__/sums": sums})
        self._append(_tar_members({"__end__/end": {"json": _json_bytes({"groups": self._groups})}}))
        self._append(_END_OF_ARCHIVE)
        size = self._file.tell()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        digest = self._hash.hexdigest()
        name = f"{self.meta.unit}-{digest[:12]}.tar"
        self._publish_shard(self.files.units / name, digest)
        record = UnitRecord(
            self.meta.unit,
            self.meta.target,
            name,
            size,
            digest,
            self._windows,
            self._tokens,
            tuple(self._groups),
            self.statistics,
            self.environment,
        )
        if publish_json(self.files.record_file(self.meta.unit), record.as_dict()):
            return record
        return self._yield_to_winner(name)

    def _publish_shard(self, final, digest):
        """The shard under its final name; a damaged file of that name, which its hash betrays, is replaced."""
        if final.exists() and file_sha256(final) != digest:
            self._temporary.replace(final)
            fsync_directory(final.parent)
        else:
            publish(self._temporary, final)

    def _yield_to_winner(self, name):
        winner = self.files.record(self.meta.unit)
        if winner.file != name:
            (self.files.units / name).unlink(missing_ok=True)
        return winner


def _tar_members(samples):
    """Raw tar bytes of the samples (key to {extension: bytes}), without the end of the archive."""
    buffer = io.BytesIO()
    tar = wds.TarWriter(buffer, encoder=False, mtime=SHARD_MTIME, user="mlsm", group="mlsm")
    for key, members in samples.items():
        tar.write({"__key__": key, **members})
    length = tar.tarstream.offset
    tar.close()
    return buffer.getvalue()[:length]


def _npy_bytes(array):
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, np.ascontiguousarray(array), version=(1, 0), allow_pickle=False)
    return buffer.getvalue()


def _json_bytes(value):
    return json.dumps(value, sort_keys=True).encode()


@cache
def local_environment():
    """CPU model and the library versions that shape the bytes."""
    return {"cpu": _cpu_model(), "python": platform.python_version(), "numpy": np.__version__}


def _cpu_model():
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
