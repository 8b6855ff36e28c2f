"""A store that units of a job are written into, and what a command keeps beside them.

    store = TargetStore(job, name, target, command, dictionary)   # in the command's process: made, or found
    with OpenStore(job, store.files.path).writer(unit, environment) as writer: ...   # in every process that encodes

Left out: the content of the units (units.py), what a store of each kind needs (kinds.py).
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from common.durable import publish_directory, replace_json
from common.errors import EncodeError, StoreError
from pipeline.job import Job, named_by_content
from shards import copies
from shards.files import StoreFiles
from shards.manifest import PlannedUnit, UnitRecord
from shards.reader import Store
from shards.schema import ShardMeta
from shards.writer import UnitWriter

if TYPE_CHECKING:
    from pipeline.coding.quantise import Codebook
    from pipeline.dictionary import Dictionary

logger = logging.getLogger(__name__)
QUARANTINE_SHARE = 0.01  # of a plan's documents; when more fail, the fault is not the documents'
QUARANTINE_LEAST = 10  # documents that may fail, however small the plan


class OpenStore:
    """A store into which a process writes units of a job."""

    def __init__(self, job: Job, path: str | Path):
        self.job, self.files = job, StoreFiles(path)
        self.target = self.files.target()

    def finished(self, unit: PlannedUnit) -> UnitRecord | None:
        """The record of a unit; None if the unit is to be encoded, for the first time or again."""
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
        """The UnitWriter of a unit; the block's end commits, if the source is unchanged and not too much failed."""
        meta, replaces = ShardMeta.of_unit(self.target, unit.id), None
        if self.job.stored is not None:
            environment = environment | {"source_sha256": self.job.stored.sha256(unit)}
            record = self.files.record(unit.id)
            replaces = record.sha256 if record and self._is_outdated(record, unit) else None
        with UnitWriter(self.files, meta, environment, self.job.config.retry_quarantine, replaces) as writer:
            yield writer
            self.job.check_unchanged(unit.source)
            self.check_quarantine(unit, writer.quarantined)

    def check_quarantine(self, unit: PlannedUnit, quarantined: Sequence[dict]) -> None:
        """Raise EncodeError when too many documents failed, those of this unit and of all units that have a record."""
        if not quarantined:
            return
        plan = self.job.plan
        records = (self.files.record(other.id) for other in plan.units if other.id != unit.id)
        count = len(quarantined) + sum(len(record.quarantined) for record in records if record)
        allowed = max(QUARANTINE_LEAST, int(QUARANTINE_SHARE * plan.corpus["documents"]))
        if count > allowed:
            raise EncodeError(
                f"{self.files.path.name}: {count} documents could not be coded, more than the {allowed} that may be "
                f"in quarantine, so the fault is hardly theirs. The last one: {quarantined[-1]['reason']}"
            )


class TargetStore(OpenStore):
    """A store that a command adds to, and makes where it is not there: which units it wants, and what was done.

    command  {verb: settings}, kept beside the plan, so that verify-shards can name the command again
    wanted   ids of the units that it lacks, or that are to be tried again
    done     tokens of the units that are finished;  new_tokens  of those that this command finished
    """

    def __init__(
        self,
        job: Job,
        name: str,
        target: dict,
        command: dict,
        dictionary: "Dictionary | None" = None,
        codebook: "Codebook | None" = None,
    ):
        files = StoreFiles(named_by_content(job.config.output / "stores", name, target["target"]))
        files.create(target)
        super().__init__(job, files.path)
        _keep_copy(
            files.tokenizer,
            lambda: copies.read_tokenizer(files),
            lambda directory: copies.save_tokenizer(job.tokenizer, directory),
        )
        if dictionary is not None:
            _keep_copy(files.dictionary, lambda: copies.read_dictionary(files), dictionary.save)
        if codebook is not None:
            _keep_copy(files.codebook, lambda: copies.read_codebook(files), codebook.save)
        files.publish_plan(job.plan)
        # What trains on the store starts from that recipe. A command that finds the store by flags does not change it.
        kept = command | {"recipe": job.config.recipe or files.command(job.plan.id).get("recipe")}
        replace_json(files.plans / f"{job.plan.id}.yaml", kept)  # JSON is YAML; the corpus may have moved
        self.wanted = {unit.id for unit in files.missing_units(job.plan)}
        self.done = self.new_tokens = 0
        for unit in job.plan.units:
            record = None if unit.id in self.wanted else self.finished(unit)
            if record is None:
                self.wanted.add(unit.id)
            else:
                self.done += record.tokens

    def note(self, unit: PlannedUnit, tokens: int, quarantined: Sequence[dict]) -> None:
        """Note that a unit was committed. Raises EncodeError when too many documents failed: whoever committed it could
        not see what other processes were about to commit."""
        self.new_tokens += tokens
        self.check_quarantine(unit, quarantined)

    def report(self, seconds: float) -> dict:
        """What was made, with the store's statistics."""
        store = Store.open(self.files.path, self.job.plan.id)
        return {
            "store": str(self.files.path),
            "plan": self.job.plan.id,
            "finished_before": not self.wanted,
            "new_units": len(self.wanted),
            "new_tokens": self.new_tokens,
            "seconds": seconds,
            "quarantined": sum(len(record.quarantined) for record in store.iter_records()),
            "corpus": self.job.describe_corpus(),
            **store.report(),
        }


def _keep_copy(directory: Path, read: Callable, write: Callable):
    """Write a store's copy of a tokenizer or dictionary, unless the one that its target names is there.

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
