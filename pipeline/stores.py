"""A store that a job writes units into, and the command's files next to them.

    store = TargetStore(job, target, command)                        # in the command's process: creates or finds it
    with OpenStore(job, store.files.path).writer(unit, environment) as writer: ...   # in every process that encodes

Not handled here: the content of the units (encode.py), what a store of each kind needs (targets/).
"""

import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlsm.common.durable import publish_directory, replace_json
from mlsm.common.errors import EncodeError, StoreError
from pipeline.corpus_summary import describe_corpus
from pipeline.job import Job, named_by_content
from shards import copies
from shards.files import StoreFiles
from shards.manifest import PlannedUnit, UnitRecord, canonical_json, with_checksum
from shards.reader import Store
from shards.schema import HiddenLayout, ShardMeta, ids_dtype, index_bits
from shards.writer import UnitWriter

logger = logging.getLogger(__name__)
QUARANTINE_SHARE = 0.01  # if a larger share of documents fails, they are not the cause
QUARANTINE_LEAST = 10  # so many documents may fail even in a small plan
USUAL_ENTRIES = 30  # per token for any n: more than real codes have at the usual penalty
FISTA_ENTRIES = 75  # the same for 100 FISTA steps


class OpenStore:
    """A store into which a process writes units of a job.

    target_json  the content of its target.json
    """

    def __init__(self, job: Job, path: str | Path):
        self.job, self.files = job, StoreFiles(path)
        self.target_json = self.files.target()
        self._failed: dict[str, int] | None = None  # of `_count_failed`, once a document fails here

    def finished(self, unit: PlannedUnit) -> UnitRecord | None:
        """The record of a unit; None if the unit must be encoded, for the first time or again."""
        record = self.files.record(unit.id)
        if record and (self._is_outdated(record, unit) or (record.quarantined and self.job.config.retry_quarantine)):
            return None
        return record

    def _is_outdated(self, record, unit):
        """Whether a unit was coded from a shard of hidden states that has been encoded again since."""
        stored = self.job.stored
        return stored is not None and record.environment.get("source_sha256") != stored.sha256(unit)

    @contextmanager
    def writer(self, unit: PlannedUnit, environment: dict) -> Iterator[UnitWriter]:
        """The UnitWriter of a unit. The block's end commits if the source is unchanged and few documents failed."""
        meta, replaces = ShardMeta.of_unit(self.target_json, unit.id), None
        if self.job.stored is not None:
            environment = environment | {"source_sha256": self.job.stored.sha256(unit)}
            record = self.files.record(unit.id)
            replaces = record.sha256 if record and self._is_outdated(record, unit) else None
        with UnitWriter(self.files, meta, environment, self.job.config.retry_quarantine, replaces) as writer:
            yield writer
            self.job.check_unchanged(unit.source)
            for entry in writer.quarantined:
                entry["source"], entry["record"] = self.job.plan.place(unit, entry["record"])
            self.check_quarantine(unit, writer.quarantined)

    def check_quarantine(self, unit: PlannedUnit, quarantined: Sequence[Mapping]) -> None:
        """Raise EncodeError when too many documents failed in this unit and all units with a record together.

        What other processes have done since the first document failed here is counted only before raising.
        """
        if not quarantined:
            if self._failed:
                self._failed.pop(unit.id, None)
            return
        if self._failed is None:
            self._failed = self._count_failed()
        self._failed[unit.id] = len(quarantined)
        allowed = max(QUARANTINE_LEAST, int(QUARANTINE_SHARE * self.job.planned_documents))
        if sum(self._failed.values()) > allowed:
            self._failed = self._count_failed() | {unit.id: len(quarantined)}
        if (count := sum(self._failed.values())) > allowed:
            raise EncodeError(
                f"{self.files.path.name}: {count} documents could not be coded, more than the {allowed} that may be "
                "in quarantine, so the documents are probably not the cause. The last one: "
                f"{quarantined[-1]['reason']}"
            )

    def _count_failed(self):
        """The units with documents in quarantine -> how many."""
        records = map(self.files.record, (unit.id for unit in self.job.plan.units))
        return {record.unit: len(record.quarantined) for record in records if record and record.quarantined}


class TargetStore(OpenStore):
    """A store that a command adds to, or creates: which units are still needed, and what was done.

    command  {verb: settings}, kept with the plan, so that verify-shards can print the command
    wanted   ids of the units that are missing or must be tried again
    done     tokens of the finished units;  new_tokens  tokens of those that this command finished
    """

    def __init__(self, job: Job, target: Any, command: dict):
        name, target_json = target.describe_store(job)
        files = StoreFiles(named_by_content(job.config.output / "stores", name, target_json["target"]))
        files.create(target_json)
        super().__init__(job, files.path)
        keep_copy(
            files.tokenizer,
            lambda: copies.read_tokenizer(files),
            lambda directory: copies.save_tokenizer(job.tokenizer, directory),
        )
        target.save_copies(files)
        files.publish_plan(job.plan)
        # Training on the store starts from this recipe. A command that finds the store by its flags does not change it.
        stored = files.command(job.plan.id)
        kept = command | {"recipe": job.config.recipe or stored.get("recipe")}
        # JSON is YAML. It is written again if the corpus has moved; else a finished store may be on a read-only disk.
        if canonical_json(kept) != canonical_json(stored):
            replace_json(files.plans / f"{job.plan.id}.yaml", with_checksum(kept))
        self.wanted: set[str] = set()
        self.done = self.new_tokens = 0
        for unit in job.plan.units:
            record = self.finished(unit)
            if record is None:
                self.wanted.add(unit.id)
            else:
                self.files.check_size(record)
                self.done += record.tokens

    def note(self, unit: PlannedUnit, record: UnitRecord) -> None:
        """Note that a unit was committed. Raises EncodeError when too many documents failed, since the process that
        committed it could not know what other processes were about to commit."""
        self.done += record.tokens
        self.new_tokens += record.tokens
        self.check_quarantine(unit, record.quarantined)

    def report(self, seconds: float) -> dict:
        """A report on the store, with its statistics."""
        store = Store.open(self.files.path, self.job.plan.id)
        return {
            "store": str(self.files.path),
            "plan": self.job.plan.id,
            "finished_before": not self.wanted,
            "new_units": len(self.wanted),
            "new_tokens": self.new_tokens,
            "seconds": seconds,
            "quarantined": sum(len(record.quarantined) for record in store.iter_records()),
            "corpus": describe_corpus(self.job),
            **store.report(),
        }


def keep_copy(directory: Path, read: Callable, write: Callable) -> None:
    """Write a store's copy of a tokenizer, dictionary or codebook, unless the one that its target names exists.

    read   raises StoreError unless the copy is the right one
    write  called with a directory to fill
    """
    there = os.path.lexists(directory)
    if there:
        try:
            read()
            return
        except StoreError as error:
            logger.warning("%s It is restored now.", error)
    publish_directory(directory, write, replace=there)


# -- disk --------------------------------------------------------------------------------------------------


def warn_of_disk(output: str | Path, needed: float) -> None:
    """Warn when about this many bytes will not fit. The encoding still starts."""
    free = free_bytes(output)
    if needed > free:
        warnings.warn(
            f"about {needed / 1e9:,.1f} GB will be written under {output}, where {free / 1e9:,.1f} GB are free. A "
            "full disk loses nothing: the same command continues once there is room. --dry-run measures it.",
            stacklevel=2,
        )


def free_bytes(path: str | Path) -> int:
    """Free bytes of the disk that a path is on, or will be on."""
    path = Path(path).absolute()
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


def likely_bytes(target_json: Mapping) -> float:
    """Bytes per token in a store with this target.json, a high estimate."""
    size = 2 if ids_dtype(target_json["vocab_size"]) == "uint16" else 4
    if layout := HiddenLayout.of_settings(target_json["settings"]):
        return size + layout.bytes + (4 if layout.quantise == "int8" else 1)
    if not target_json["k"]:
        return size
    kept = target_json["settings"].get("top_n", "all")
    usual = USUAL_ENTRIES if target_json["settings"].get("kind") == "lsp" else 255
    usual = FISTA_ENTRIES if "solver" in target_json["settings"] else usual
    return size + 2 + (usual if kept == "all" else min(kept, usual)) * (index_bits(target_json["k"]) / 8 + 1)
