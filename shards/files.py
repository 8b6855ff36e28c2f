"""The files of one store directory: paths, target, plans, records, and what errors advise about damage.

    files = StoreFiles("runs/stores/lsp-...")
    files.record(unit_id)                        # UnitRecord, or None when the unit is not finished

Each file appears whole or not at all (mlsm/common/durable.py). Shards are linked to their names, which never replaces a
file; a record or a plan may be replaced as a whole.
Not handled here: what the bytes mean (manifest.py), arrays (members.py), stores behind a URL (remote.py).
"""

import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, cached_property
from io import FileIO
from itertools import chain
from pathlib import Path
from typing import TypeVar

from mlsm.common import disk
from mlsm.common.durable import make_directories, publish_json
from mlsm.common.errors import RequestError, ShardError, StoreError
from mlsm.common.invocation import program
from mlsm.common.json_checks import parse_json
from mlsm.common.text import printable, shell_quote
from shards.manifest import Plan, PlannedUnit, UnitRecord, differing, fits_checksum, parse_target, with_checksum

logger = logging.getLogger(__name__)

T = TypeVar("T")
_TARGET_REMEDY = (
    ". Delete it and run the encoding command again; finished units are kept. If that is refused, encode again "
    "elsewhere."
)


@cache  # once per process: a command may open a store several times
def _tell_of_other_plans(plans: Path, read: str, text: str, count: int, unfinished: str | None) -> None:
    newer = f" Plan {unfinished} is newer, but unfinished: its command has to run again." if unfinished else ""
    logger.info(
        "%s has %d plans. The text of %s%s is read, the newest that is finished.%s To read another plan, pass "
        "%s/PLAN.json instead of the store", plans.parent, count, read, text, newer, plans,
    )  # fmt: skip


def refuse_foreign_output(output: str | Path) -> None:
    """Raise StoreError when the output directory is a file, a store or a run itself."""
    if Path(output).is_file():
        raise StoreError(f"--output {output} is a file. Pass a directory, such as ./runs.")
    for mark, what in (("target.json", "a store"), ("config.json", "a training run")):
        if (Path(output) / mark).is_file():
            raise StoreError(
                f"--output {output} is {what} itself. Pass the directory to contain the stores, such as ./runs."
            )


class StoreFiles:
    """Paths and small files of one store directory. It does not read tar or arrays."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.units = Path(path) / "units"
        self.plans = Path(path) / "plans"
        self.target_file = Path(path) / "target.json"

    @property
    def tokenizer(self) -> Path:
        return self.units.parent / "tokenizer"

    @property
    def dictionary(self) -> Path:
        return self.units.parent / "dictionary"

    @property
    def codebook(self) -> Path:
        return self.units.parent / "codebook"

    def create(self, target: dict) -> None:
        """Make the directories and write target.json; the settings of an existing one must be equal.

        target  dict with the fingerprinted `settings` and the `target` fingerprint
        """
        for directory in (self.units, self.plans):
            make_directories(directory)
        made = publish_json(self.target_file, with_checksum(target))
        if not made and self.target()["target"] != target["target"]:
            difference = differing(self.target()["settings"], target["settings"])
            raise StoreError(f"{self.path} is a store of another target: {difference}. Choose another --output.")

    def target(self) -> dict:
        if not self.target_file.is_file():
            raise self.no_target_error()
        return parse_target(read_small(self.target_file, _TARGET_REMEDY), self.target_file, _TARGET_REMEDY)

    @cached_property
    def _target(self) -> dict:
        return self.target()

    def record_file(self, unit_id: str) -> Path:
        return self.units / f"{unit_id}.json"

    def record(self, unit_id: str) -> UnitRecord | None:
        """The commit record of a unit, or None when it is not finished."""
        path = self.record_file(unit_id)
        try:
            return self._read(path, self._parse_record)
        except FileNotFoundError:
            return None

    def _parse_record(self, raw: bytes, where: object) -> UnitRecord:
        """Parse a record, which must belong to this store's target."""
        record = UnitRecord.parse(raw, where)
        record.check(self._target, where)
        return record

    def _read(self, path: Path, parse: Callable[[bytes, object], T]) -> T:
        """A plan or a record. Raises FileNotFoundError, or ShardError with advice about damage."""
        try:
            return parse(read_small(path, ""), path)
        except ShardError as error:
            raise ShardError(f"{error}. {self.read_hint(error.__cause__)}") from error.__cause__

    def open_shard(self, unit_id: str, file: str) -> FileIO:
        """Open the shard that the unit's record names. Raises FileNotFoundError if there is none."""
        return disk.open_to_read(self.units / file)

    def stated_size(self, record: UnitRecord) -> int | None:
        """The shard's size as a server states it, without reading the shard; None if it must be read."""
        return None

    def stop(self) -> None:
        """Called when a check of the store ends, perhaps early: running downloads end soon."""

    def check_size(self, record: UnitRecord) -> None:
        """Raise ShardError if a finished unit's shard is missing or cut. Hashes are checked where it is read."""
        shard = self.units / record.file
        size = shard.stat().st_size if shard.exists() else None
        if size != record.bytes:
            found = "is missing" if size is None else f"has {size:,} bytes"
            raise ShardError(f"{shard} {found}; its record says {record.bytes:,} bytes. {self.repair_hint()}")

    def publish_plan(self, plan: Plan) -> None:
        """Write a plan. If it exists, it becomes the newest one, as the last command's."""
        path = self.plans / f"{plan.id}.json"
        if not publish_json(path, plan.as_dict()):
            with suppress(OSError):  # of a file of another user
                os.utime(path)

    def load_plan(self, plan_id: str) -> Plan:
        path = self.plans / f"{plan_id}.json"
        if not path.is_file():
            raise StoreError(
                f"{self.path} has no plan {plan_id}; "
                f"it has {', '.join(sorted(p.stem for p in self.plans.glob('*.json')))}"
            )
        return self._read(path, Plan.parse)

    def command(self, plan_id: str) -> dict:
        """The stored settings of the command that made a plan: {verb: settings, "recipe": its name}; {} if there are
        none. If they are damaged it is also {}, with a warning, because targets do not depend on them."""
        path = self.plans / f"{plan_id}.yaml"
        try:
            return read_command(path)
        except FileNotFoundError:
            return {}
        except (ShardError, OSError) as error:
            logger.warning("%s. Until then, defaults of training do not follow from it", str(error).rstrip("."))
            return {}

    def newest_plan(self) -> Plan:
        """The newest plan whose units are all finished. Raises StoreError, which says what is missing, without one.

        Only files that have the name of a plan are looked at.
        """
        files = sorted(filter(is_plan_file, self.plans.glob("*.json")), key=_time_of_change, reverse=True)
        if not files:
            raise StoreError(f"{self.path} has no plan yet. Run the encoding command again.")
        newest = self._first_finished(self._read(path, Plan.parse) for path in files)
        if len(files) > 1:
            unfinished = None if newest.id == files[0].stem else files[0].stem
            _tell_of_other_plans(self.plans, newest.id, _text_of(newest), len(files), unfinished)
        return newest

    def _first_finished(self, plans: Iterator[Plan]) -> Plan:
        """The first finished one of some plans; those after it are not read."""
        newest = next(plans)
        for plan in chain([newest], plans):
            if not self.missing_units(plan):
                return plan
        self.check_finished(newest)
        return newest  # its last unit was committed between the two checks

    def missing_units(self, plan: Plan) -> list[PlannedUnit]:
        """Units of the plan that have no record yet, in order."""
        done = {path.stem for path in self.units.glob("*.json")}
        return [unit for unit in plan.units if unit.id not in done]

    def check_finished(self, plan: Plan) -> None:
        """Raise StoreError when units of a plan are missing."""
        if missing := self.missing_units(plan):
            raise StoreError(
                f"{self.path} is unfinished: {len(missing)} of {len(plan.units)} units are missing. "
                f"{self.finish_hint()}"
            )

    def no_target_error(self) -> StoreError:
        """The error to raise without a target.json: for a damaged store, or for something that is not a store."""
        directory = Path(self.path)
        lacking = "it has no target.json" if directory.exists() else "there is no such directory"
        if (directory / "stores").is_dir():
            lacking += f", but stores are under {directory / 'stores'}"
        is_damaged = self.units.is_dir() and self.plans.is_dir()
        return (StoreError if is_damaged else RequestError)(describe_no_store(self.path, lacking))

    # Advice: RemoteFiles (remote.py) overrides it, as it does the methods above that read a file.

    def is_encoded_here(self) -> bool:
        """Whether encoding commands can write to this store and so remake its missing units."""
        return True

    def repair_hint(self) -> str:
        """The advice about damage in this store, for an error message."""
        return (
            f"Remove the damaged files with: {program()} verify-shards {shell_quote(self.path)} --repair, and run the "
            "encoding command that it names: it encodes only those units again."
        )

    def read_hint(self, error: BaseException | None) -> str:
        """The advice about a shard that could not be read, for an error message; `error` is what the disk said."""
        if isinstance(error, OSError) and not disk.is_of_the_file(error):
            return "It may be whole: check its permissions and its disk, and run the same command again."
        return self.repair_hint()

    def discard(self, file: str) -> str:
        """Remove a damaged shard if it can be fetched again. Returns the advice for an error message."""
        return self.repair_hint()

    def restore_hint(self) -> str:
        """The advice about a damaged copy of the tokenizer or dictionary, for an error message."""
        where = f" ({program()} verify-shards names the command)" if any(self.plans.glob("*.yaml")) else ""
        return f"Run the command that encoded the store again, which restores it{where}."

    def finish_hint(self) -> str:
        """The advice about missing units, for an error message."""
        return "Run the encoding command that started it again; finished units are kept."


def read_small(path: Path, remedy: str) -> bytes:
    """The bytes of a target, plan or record.

    remedy  the advice in the ShardError that is raised if it is not a file or cannot be read
    Raises  ShardError, FileNotFoundError, and OSError of the machine
    """
    try:
        return disk.read_file(path)
    except OSError as error:
        gone = isinstance(error, FileNotFoundError) and not path.is_symlink()
        if gone or disk.is_of_the_machine(error):
            raise
        raise ShardError(f"{path}: cannot be read, {error.strerror}{remedy}") from error


def read_command(path: Path) -> dict:
    """The settings that a plan's .yaml file holds. Raises ShardError when they are damaged, FileNotFoundError."""
    remedy = ". The encoding command restores it when it is run again"
    raw = read_small(path, remedy)
    try:
        kept = parse_json(raw, path)  # JSON is YAML
    except ShardError as error:
        raise ShardError(f"{error}{remedy}") from None
    if not isinstance(kept, dict) or ("checksum" in kept and not fits_checksum(kept)):
        raise ShardError(f"{path}: the checksum does not fit its content{remedy}")
    return {name: value for name, value in kept.items() if name != "checksum"}


def describe_no_store(path: object, lacking: str) -> str:
    """The error message for something that is not a store."""
    return f"{path} is not a store: {lacking}. Pass a store made by {program()} encode-lsp."


def _text_of(plan):
    """The first file of a plan's text and the number of the others, in brackets; nothing if the plan names none."""
    first, *others = plan.corpus.get("files") or [""]
    more = f" and {len(others)} more" if others else ""
    return f" ({printable(first, keep='')}{more})" if first else ""


def is_plan_file(path: Path) -> bool:
    """Whether a file's name is that of a plan."""
    return re.fullmatch(r"[0-9a-f]{32}\.json", path.name) is not None


def _time_of_change(path):
    """The time when a file was last written; for a broken link, when the link was made."""
    try:
        return path.stat().st_mtime
    except OSError:
        return path.lstat().st_mtime
