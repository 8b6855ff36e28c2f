"""Write one unit's shard and commit it.

    with UnitWriter(files, meta) as unit:
        unit.write_block(ids=..., lengths=..., ...)
        unit.statistics["max_kkt"] = ...

Each block becomes tar members in memory, as in webdataset's writer. They are hashed there and appended to our file, so
that offsets and hashes are exact. Leaving the `with` block commits: shard first, record last. After an exception
inside, nothing is published. For a sample of the tokens, the record states how far the stored distributions are from
the given ones: Kullback-Leibler divergence, total variation, dropped mass. Layout: schema.py; names and fsync:
mlsm/common/durable.py.
"""

import hashlib
import io
import json
import os
import platform
import tarfile
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import numpy as np

from mlsm.common import disk, locks
from mlsm.common.durable import explain_link, naming, publish_json, replace_json
from mlsm.common.errors import WriteError
from mlsm.common.machine import cpu_model
from mlsm.common.version import VERSION
from shards import codec
from shards.files import StoreFiles
from shards.manifest import Group, Quarantined, UnitRecord, shard_name
from shards.schema import BLOCK_TOKENS, SHARD_MTIME, ShardMeta

FIDELITY = ("fidelity_tokens", "fidelity_kl", "fidelity_tv", "fidelity_tail")  # sums in the unit's statistics
FIDELITY_STRIDE = 251  # every 251st token; a prime, so that all positions of a window occur
_END_OF_ARCHIVE = bytes(1024)


class UnitWriter:
    """Writes the shard of one unit, from its first block to its record.

    files        StoreFiles of the store
    meta         ShardMeta of the unit
    environment  extra facts for the record (device, libraries)
    retry        whether to replace this unit's record if it has more failed windows than ours
    replaces     SHA-256 of a shard whose record is always replaced
    windows, tokens  written so far
    Raises       ValueError when a block has more tokens than the format allows
    """

    def __init__(
        self,
        files: StoreFiles,
        meta: ShardMeta,
        environment: dict | None = None,
        retry: bool = False,
        replaces: str | None = None,
    ):
        self.files, self.meta, self._retry, self._replaces = files, meta, retry, replaces
        self.environment = local_environment() | (environment or {})
        self.quarantined: list[Quarantined] = []
        self.statistics: dict[str, Any] = {"documents": 0}
        self.sums: dict[str, np.ndarray] = {}  # float64; the caller adds those of hidden states
        if meta.k:
            self.statistics |= {"entries": 0, "coded_tokens": 0, "kept_mass": 0.0, "entropy_nats": 0.0}
            self.statistics |= {"nnz_histogram": [0] * 256, **dict.fromkeys(FIDELITY, 0.0)}
            self.sums["mass"] = np.zeros(meta.k)
        if meta.hidden:
            self.statistics["coded_tokens"] = 0
            self.sums = {name: np.zeros(meta.hidden.width) for name in ("hidden_sum", "hidden_squares")}
        self._token_counts = np.zeros(meta.vocab_size, np.int64)
        self._groups: list[Group] = []
        self.windows, self.tokens, self._last_record = 0, 0, -1
        self._hash = hashlib.sha256()

    def __enter__(self):
        self._temporary, self._size = disk.temporary_name(self.files.units, self.meta.unit), 0
        self._is_open = False
        try:
            self._file, self._is_open = disk.create(self._temporary), True
            self._write_group("__meta__", {"__meta__/meta": {"json": _json_bytes(self.meta.as_dict())}})
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(self, kind, error, trace):
        try:
            if kind is None:
                self.record = self._commit()
        finally:
            self._discard()

    def _discard(self):
        try:
            if self._is_open:
                self._close()
        finally:
            disk.discard(self._temporary)

    def _close(self):
        self._is_open = False
        disk.close(self._file)

    def write_block(self, **columns: np.ndarray) -> None:
        """Append one block; the columns are those of `codec.pack_block`."""
        key = f"{len(self._groups) - 1:06d}"  # the first group is __meta__
        block = codec.pack_block(self.meta, **columns)
        members = {f"{name}.npy": _npy_bytes(array) for name, array in block.items()}
        windows, tokens = len(columns["lengths"]), len(columns["ids"])
        if tokens > BLOCK_TOKENS:
            raise ValueError(f"a block of {tokens} tokens; the format's blocks have at most {BLOCK_TOKENS}")
        self._write_group(key, {key: members}, windows=windows, tokens=tokens)
        self.windows += windows
        self._count(columns, block)
        self.tokens += tokens

    def _count(self, columns, block):
        self._token_counts += np.bincount(columns["ids"], minlength=self.meta.vocab_size)
        records = columns["run_records"]
        fresh = np.unique(records[records > self._last_record])
        self._last_record = max(self._last_record, int(records.max(initial=-1)))
        self.statistics["documents"] += len(fresh)
        if self.meta.k:
            self._count_rows(columns["nnz"], columns["indices"], columns["weights"], columns["tail"])
            self._measure_fidelity(columns, block)
        if self.meta.hidden:
            self.statistics["coded_tokens"] += int(np.count_nonzero(block[self.meta.hidden.mark]))

    def _count_rows(self, nnz, indices, weights, tail):
        coded, mass, terms = nnz > 0, np.zeros(self.meta.k), np.empty(len(weights), np.result_type(weights, tail))
        for rows, entries in codec.row_parts(nnz):
            probability = weights[entries] / np.repeat(1 - tail[rows], nnz[rows])  # renormalised over the kept entries
            np.add.at(mass, indices[entries].astype(np.int64), probability.astype(np.float64))
            np.log(probability, out=terms[entries])
            terms[entries] *= probability
        self.sums["mass"] += mass
        totals = self.statistics
        totals["entries"] += int(nnz.sum())
        totals["coded_tokens"] += int(coded.sum())
        totals["kept_mass"] += float((1 - tail[coded]).sum(dtype=np.float64))
        totals["entropy_nats"] -= float(terms.sum(dtype=np.float64))
        histogram = np.bincount(nnz[coded], minlength=256)
        totals["nnz_histogram"] = [a + int(b) for a, b in zip(totals["nnz_histogram"], histogram, strict=True)]

    def _measure_fidelity(self, columns, block):
        """Compare every FIDELITY_STRIDE-th token of the unit, as a reader will decode it, with the given values."""
        rows_T = np.arange(-self.tokens % FIDELITY_STRIDE, len(columns["ids"]), FIDELITY_STRIDE)
        ends = np.cumsum(columns["nnz"], dtype=np.int64)
        found = codec.fidelity(self.meta, columns, block, ends - columns["nnz"], rows_T)
        for name, amount in zip(FIDELITY, found, strict=True):
            self.statistics[name] += amount

    def _write_group(self, name, samples, **facts):
        raw = _tar_members(samples)
        self._groups.append(
            {
                "name": name,
                "offset": self._size,
                "length": len(raw),
                "sha256": hashlib.sha256(raw).hexdigest(),
                **facts,  # type: ignore[typeddict-item]
            }
        )
        self._append(raw)

    def _append(self, raw):
        with naming(self.files.units):
            disk.write(self._file, raw)
        self._hash.update(raw)
        self._size += len(raw)

    def _commit(self):
        """Publish the shard, then the record.

        The temporary name stays until the record is written, so that the shard gets its name back if `clean` takes it
        for a left-over until then. Shards of another name, replaced or without a record, are left to `clean`: another
        process may be about to record them, or may be reading them.
        """
        sums = {"token_counts.npy": _npy_bytes(self._token_counts.astype(np.uint32))}
        sums |= {f"{name}.npy": _npy_bytes(total) for name, total in self.sums.items()}
        self._write_group("__stats__", {"__stats__/sums": sums})
        self._append(_tar_members({"__end__/end": {"json": _json_bytes({"groups": self._groups})}}))
        self._append(_END_OF_ARCHIVE)
        disk.fsync(self._file)
        self._close()
        digest = self._hash.hexdigest()
        name = shard_name(self.meta.unit, digest)
        self._publish_shard(self.files.units / name)
        record = self._publish_record(
            UnitRecord(
                self.meta.unit,
                self.meta.target,
                name,
                self._size,
                digest,
                self.windows,
                self.tokens,
                tuple(self._groups),
                self.statistics,
                self.environment,
                tuple(self.quarantined),
            )
        )
        if record.file == name and not (self.files.units / name).exists():
            self._publish_shard(self.files.units / name)
        disk.unlink(self._temporary)
        return record

    def _publish_shard(self, final):
        """Give the shard its final name, which contains its hash. An existing file of this name is replaced: it is
        damaged, or it has the same bytes but may be so old that `clean` removes it."""
        try:
            disk.link(self._temporary, final)
        except FileExistsError:
            again = disk.temporary_name(final.parent, self.meta.unit)
            try:
                disk.link(self._temporary, again)
                disk.rename(again, final)
            finally:
                disk.discard(again)
        except FileNotFoundError as error:
            raise WriteError(f"{self._temporary} was removed before it was complete. Run the same command.") from error
        except OSError as error:
            raise explain_link(error, final) from error
        disk.fsync_path(final.parent)

    def _publish_record(self, record):
        """Commit, unless another process committed this unit first; a retry with fewer failed windows replaces it.

        A record that could not be made durable is withdrawn, so another process's record may be gone when it is read.
        Between its comparison and its replacement no other process replaces it, so that of simultaneous retries the
        best one remains. Where directories have no locks (NFS), the loop's check after a replacement makes that likely.
        """
        path = self.files.record_file(record.unit)
        while not publish_json(path, record.as_dict(), withdraw=True):
            with _alone(self.files.units):
                if winner := self.files.record(record.unit):
                    better = self._retry and winner.lacking > record.lacking
                    if not better and (winner.sha256 != self._replaces or _same(winner, record)):
                        return winner
                    replace_json(path, record.as_dict())  # the next round finds ours, or another that replaced it (NFS)
        return record


@contextmanager
def _alone(directory):
    """Exclude other processes that replace a record in this directory, if its file system has locks."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            locks.acquire(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)


def _same(record, other):
    """Whether two records of a unit name the same bytes, made of the same source (environment.source_sha256)."""
    sources = [one.environment.get("source_sha256") for one in (record, other)]
    return record.sha256 == other.sha256 and sources[0] == sources[1]


def _tar_members(samples):
    """Raw tar bytes of the samples (key to {extension: bytes}), without the end of the archive.

    They equal those of webdataset.TarWriter, which would copy a block's bytes four times.
    """
    pieces = []
    for key, members in samples.items():
        for extension, content in sorted(members.items()):
            member = tarfile.TarInfo(f"{key}.{extension}")
            member.size, member.mtime, member.mode = len(content), SHARD_MTIME, 0o444
            member.uname = member.gname = "mlsm"
            pieces += [member.tobuf(tarfile.USTAR_FORMAT), content, bytes(-len(content) % tarfile.BLOCKSIZE)]
    return b"".join(pieces)


def _npy_bytes(array):
    buffer, array = io.BytesIO(), np.ascontiguousarray(array)
    np.lib.format.write_array_header_1_0(buffer, np.lib.format.header_data_from_array_1_0(array))
    return b"".join((buffer.getvalue(), array.data))


def _json_bytes(value):
    return json.dumps(value, sort_keys=True).encode()


@cache
def local_environment() -> dict[str, str]:
    """CPU model and the versions of the libraries that affect the bytes."""
    return {"cpu": cpu_model(), "python": platform.python_version(), "numpy": np.__version__, "mlsm": VERSION}
