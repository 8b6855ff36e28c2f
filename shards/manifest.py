"""Small JSON files that make a store: target, plans, unit records.

Each appears whole or not at all, by a link, which never replaces (common/durable.py). The unit's record is the only
commit; it names its shard, whose name carries its hash, so two writers of one unit cannot mix. Every file also carries
a checksum over its values.
Left out: the checksums (checksums.py), tar members (writer.py), choosing what to encode (pipeline/plan.py).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from io import RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import disk
from common.durable import make_directories, publish_json
from common.errors import RequestError, ShardError, StoreError
from common.invocation import program
from shards import checked_json
from shards.blocks import BlockStore, BlockTable, LocalBlocks
from shards.checksums import fingerprint, fits_checksum, with_checksum
from shards.schema import FORMAT_VERSION, repair_hint

if TYPE_CHECKING:
    from shards.remote import Answer

TARGET_FIELDS = checked_json.TARGET.keys()
ROW_STATISTICS = {"entries", "coded_tokens", "kept_mass", "entropy_nats", "nnz_histogram"}  # of stores with k > 0


def needed_statistics(target: Mapping) -> set[str]:
    """Which statistics the records of a store with this target must have."""
    if target["settings"].get("kind") == "hidden":
        return {"coded_tokens"}
    return ROW_STATISTICS if target["k"] else set()


def read_json(path: "Path | Answer") -> Any:
    """Parse a plan, a record or target.json.

    path    of a file, or what a URL answered
    Raises  ShardError when it is damaged, or no file; FileNotFoundError
    """
    try:
        raw = disk.read_file(path) if isinstance(path, Path) else path.read_text(encoding="utf-8")
        return checked_json.parse_json(raw, path)
    except ShardError as error:
        raise _with_remedy(path, error) from None
    except ValueError as error:
        raise _with_remedy(path, f"{path}: not readable as JSON ({error})") from None
    except OSError as error:
        gone = isinstance(error, FileNotFoundError) and not path.is_symlink()
        if gone or error.errno in disk.OF_THE_MACHINE:
            raise
        raise _with_remedy(path, f"{path}: cannot be read, {error.strerror}") from None


def _with_remedy(path: "Path | Answer", problem: object) -> ShardError:
    """A ShardError that says what to do about a damaged plan, record or target."""
    return ShardError(f"{problem}. {_remedy(path)}")


def _remedy(path):
    if path.parent.name in ("units", "plans"):
        return repair_hint(path.parent.parent)
    return "Delete it and run the encoding command again; finished units are kept."


@dataclass(frozen=True)
class PlannedUnit:
    """One unit of work in a plan: a range of records of one source."""

    id: str
    """Content address: windowing, source content, record range, what is dropped of it, split, window limit."""
    split: str
    """`train` or `held_out`."""
    source: str
    """Where the text came from, for people."""
    start: int
    """First record of the range."""
    stop: int
    """Record after the last."""
    offset: int = 0
    """Where to open the source: byte of the uncompressed file, or row group, in which the first record begins."""
    max_windows: int | None = None
    """Windows to take when `--max-tokens` ends inside the unit."""
    dropped: str = ""
    """Records of the range that are left out, such as duplicates, counted from `start`: `3,7-9`."""

    def as_dict(self) -> dict:
        """Its fields, without `dropped` when that is empty: so plans are equal to those of versions that lacked it."""
        return {name: value for name, value in asdict(self).items() if name != "dropped" or value}


@dataclass(frozen=True)
class Plan:
    """An ordered list of units over a corpus; order, masks and window ids follow from it."""

    windowing: dict
    """Tokenizer fingerprint, packing, window length, held-out share: what turns text into windows."""
    units: tuple[PlannedUnit, ...]
    """In the order that window numbers follow."""
    corpus: dict = field(default_factory=dict)
    """Counts of the scan: sources, documents, bytes; for people, not in the fingerprint."""

    @property
    def id(self) -> str:
        """Fingerprint of the plan: the ordered unit ids (which contain the windowing) and their splits."""
        return fingerprint({"windowing": self.windowing, "units": [[unit.id, unit.split] for unit in self.units]})

    def as_dict(self) -> dict:
        return with_checksum(
            {
                "plan": self.id,
                "windowing": self.windowing,
                "corpus": self.corpus,
                "units": [unit.as_dict() for unit in self.units],
            }
        )

    @classmethod
    def read(cls, path: "Path | Answer") -> "Plan":
        """Read a plan file; ShardError when it is not the plan that its name says."""
        values = read_json(path)
        try:
            checked_json.require(values, checked_json.PLAN, path)
            plan = cls(values["windowing"], tuple(PlannedUnit(**unit) for unit in values["units"]), values["corpus"])
        except (ShardError, TypeError) as error:
            raise _with_remedy(path, error if isinstance(error, ShardError) else f"{path}: {error}") from None
        if plan.id != path.stem:
            raise ShardError(f"{path} holds plan {plan.id}. {_remedy(path)}")
        if not fits_checksum(values, {"plan", "windowing", "corpus", "units"}):
            raise ShardError(f"{path} does not match its checksum. {_remedy(path)}")
        return plan


@dataclass(frozen=True)
class UnitRecord:
    """The commit of one unit: what its shard holds, byte for byte, and its statistics."""

    unit: str
    target: str
    file: str
    """Shard's name in `units/`."""
    bytes: int
    sha256: str
    """Of the whole shard."""
    windows: int
    tokens: int
    """Real tokens, special ones included."""
    groups: tuple[dict, ...]
    """Member groups in order: name, offset, length, sha256; blocks also windows and tokens."""
    statistics: dict
    """Sums over the unit; additive between units, but for names beginning with `max_`."""
    environment: dict
    """Device and library versions that made it."""
    quarantined: tuple[dict, ...] = ()
    """Documents that could not be coded: record, source, windows of the unit without LSPs for it, reason."""

    @property
    def lacking(self) -> int:
        """How many windows carry no LSPs because coding them failed."""
        return len({window for entry in self.quarantined for window in entry["windows"]})

    @property
    def blocks(self) -> list[dict]:
        return [group for group in self.groups if "windows" in group]

    def as_dict(self) -> dict:
        """The JSON of the record."""
        return with_checksum(asdict(self))

    @classmethod
    def read(cls, path: "Path | Answer") -> "UnitRecord":
        """Read a record file; ShardError when it is damaged, another unit's, or names a file elsewhere."""
        values = read_json(path)
        checksum = values.pop("checksum", None) if isinstance(values, dict) else None
        if checksum != fingerprint(values):
            raise ShardError(f"{path}: the record does not match its checksum. {_remedy(path)}")
        try:
            checked_json.require(values, checked_json.RECORD, path)
            checked_json.check_groups(values, path)
            lists = {name: tuple(values.get(name, ())) for name in ("groups", "quarantined")}
            record = cls(**{**values, **lists})
        except (ShardError, TypeError) as error:
            raise _with_remedy(path, error if isinstance(error, ShardError) else f"{path}: {error}") from None
        if record.unit != path.stem:
            raise ShardError(f"{path}: this is the record of unit {record.unit}. {_remedy(path)}")
        if "/" in record.file or record.file in ("", ".", ".."):
            raise ShardError(f"{path}: names the shard {record.file}, outside its own directory. {_remedy(path)}")
        return record


class StoreFiles:
    """Paths and small files of one store directory. Knows nothing of tar or arrays."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.units = self.path / "units"
        self.plans = self.path / "plans"
        self.target_file: Path | Answer = self.path / "target.json"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer"

    @property
    def dictionary(self) -> Path:
        return self.path / "dictionary"

    @property
    def codebook(self) -> Path:
        return self.path / "codebook"

    def create(self, target: dict) -> None:
        """Make the directories and write target.json; the settings of an existing one must be equal.

        target  dict with the fingerprinted `settings` and the `target` fingerprint
        """
        for directory in (self.units, self.plans):
            make_directories(directory)
        made = publish_json(self.path / "target.json", with_checksum(target))
        if not made and self.target()["target"] != target["target"]:
            difference = differing(self.target()["settings"], target["settings"])
            raise StoreError(f"{self.path} holds another target: {difference}. Choose another --output.")

    def target(self) -> dict:
        if not self.target_file.is_file():
            raise self.no_target_error()
        target = read_json(self.target_file)
        settings = target.get("settings") if isinstance(target, dict) else None
        settings = settings if isinstance(settings, dict) else {}
        if settings.get("format", FORMAT_VERSION) != FORMAT_VERSION:
            raise ShardError(
                f"{self.path} is of shard format {settings['format']}, this version reads {FORMAT_VERSION}. "
                "Install the release of this project that wrote it, or encode again."
            )
        sound = isinstance(target, dict) and target.get("target") == fingerprint(settings)
        if not sound or not fits_checksum(target, TARGET_FIELDS):
            raise ShardError(f"{self.target_file} does not match its fingerprint. Encode again elsewhere.")
        _check_target(target, self.target_file)
        return target

    @cached_property
    def _of_target(self):
        """Fingerprint of the target, which statistics its records need, and the bytes that the sums of a unit take."""
        target = self.target()
        width = target["settings"].get("width", 0)
        return target["target"], needed_statistics(target), 4 * target["vocab_size"] + 8 * target["k"] + 16 * width

    def record_file(self, unit_id: str) -> Path:
        return self.units / f"{unit_id}.json"

    def record(self, unit_id: str) -> UnitRecord | None:
        """The commit record of a unit, or None when it is not finished."""
        path = self.record_file(unit_id)
        try:
            record = UnitRecord.read(path)
        except FileNotFoundError:
            return None
        target_id, needed, bytes_of_sums = self._of_target
        if record.target != target_id:
            raise ShardError(f"{path}: this is a record of target {record.target}. {_remedy(path)}")
        if lost := needed - record.statistics.keys():
            raise ShardError(f"{path}: field statistics.{min(lost)} is missing. {_remedy(path)}")
        if record.groups[-1]["length"] < bytes_of_sums:  # readers make arrays as wide as the target says
            raise ShardError(
                f"{path}: field groups: __stats__ of {record.groups[-1]['length']:,} bytes cannot hold the sums of the "
                f"target's vocabulary and LSPs, {bytes_of_sums:,} bytes. {_remedy(path)}"
            )
        return record

    def open_shard(self, record: UnitRecord) -> RawIOBase:
        """The shard of a record as an open file; FileNotFoundError when there is none."""
        return disk.open_to_read(self.units / record.file)

    def open_blocks(self, table: BlockTable) -> BlockStore:
        """A BlockStore, from which the windows of the units in a BlockTable are read."""
        return LocalBlocks(self, table)

    # What differs where a store lies elsewhere: RemoteFiles (remote.py) says the same of one behind a URL.

    def no_target_error(self) -> StoreError:
        """The error to raise without a target.json: for a damaged store, or for something that is not a store."""
        lacking = "it has no target.json" if self.path.exists() else "there is no such directory"
        if (self.path / "stores").is_dir():
            lacking += f", but stores are under {self.path / 'stores'}"
        is_damaged = self.units.is_dir() and self.plans.is_dir()
        return (StoreError if is_damaged else RequestError)(describe_no_store(self.path, lacking))

    def is_encoded_here(self) -> bool:
        """Whether the encoding commands write to this store, so that they can make again what it lacks."""
        return True

    def repair_hint(self) -> str:
        """What to do about damage in this store, in words for an error."""
        return repair_hint(self.path)

    def restore_hint(self) -> str:
        """What to do about a damaged copy of the tokenizer or dictionary, in words for an error."""
        return (
            "Run the command that encoded the store again, which restores it "
            f"({program()} verify-shards names the command)."
        )

    def finish_hint(self) -> str:
        """What to do about units that are missing, in words for an error."""
        return "Run the encoding command that began it again; finished units are kept."

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

    def publish_plan(self, plan: Plan) -> None:
        publish_json(self.plans / f"{plan.id}.json", plan.as_dict())

    def load_plan(self, plan_id: str) -> Plan:
        path = self.plans / f"{plan_id}.json"
        if not path.is_file():
            raise StoreError(
                f"{self.path} has no plan {plan_id}; "
                f"it has {', '.join(sorted(p.stem for p in self.plans.glob('*.json')))}"
            )
        return Plan.read(path)

    def command(self, plan_id: str) -> dict:
        """What was kept of the command that made a plan: {verb: settings, "recipe": its name}; {} where nothing was."""
        try:
            kept = json.loads(disk.read_file(self.plans / f"{plan_id}.yaml"))  # JSON is YAML
        except (OSError, ValueError, RecursionError):
            return {}
        return kept if isinstance(kept, dict) else {}

    def newest_plan(self) -> Plan:
        """The newest plan all of whose units are finished. Raises StoreError, which says what is missing, without one.

        Only files that have the name of a plan are looked at.
        """
        files = sorted(filter(is_plan_file, self.plans.glob("*.json")), key=_time_of_change, reverse=True)
        plans = [Plan.read(path) for path in files]
        for plan in plans:
            if not self.missing_units(plan):
                return plan
        if not plans:
            raise StoreError(f"{self.path} has no plan yet. Run the encoding command again.")
        self.check_finished(plans[0])
        return plans[0]  # its last unit was committed between the two looks


def describe_no_store(path: object, lacking: str) -> str:
    """What an error says of something that is not a store."""
    return f"{path} is not a store: {lacking}. Give one that {program()} encode-lsp made."


def is_plan_file(path: Path) -> bool:
    """Whether a file's name is that of a plan."""
    return re.fullmatch(r"[0-9a-f]{32}\.json", path.name) is not None


def _time_of_change(path):
    """When a file was written last; of a link that ends nowhere, when that was made."""
    try:
        return path.stat().st_mtime
    except OSError:
        return path.lstat().st_mtime


def _check_target(target, path):
    """Raise ShardError unless a target with a right checksum is as its table says and its parts agree."""
    remedy = "Encode again elsewhere."
    if problem := checked_json.find_problem(target, checked_json.TARGET):
        raise ShardError(f"{path}: {problem}. {remedy}")
    settings, vocab_size = target["settings"], target["vocab_size"]
    special = [number for ids in target["special_ids"].values() for number in (ids if type(ids) is list else [ids])]
    if not all(checked_json.is_count(number) and number < vocab_size for number in special):
        raise ShardError(f"{path}: field special_ids: expected ids below the vocabulary of {vocab_size:,}. {remedy}")
    if settings.get("kind") == "hidden" and (problem := _problem_of_hidden(settings, target["k"])):
        raise ShardError(f"{path}: {problem}. {remedy}")
    stated = {"k": settings.get("k"), "max_length": settings.get("windowing", {}).get("max_length")}
    for name, value in stated.items():
        if value not in (None, target[name]):
            raise ShardError(f"{path}: field {name} is {target[name]}, but {value} in its settings. {remedy}")


def _problem_of_hidden(settings, k):
    """What is wrong with the settings of a store of hidden states; None when they are well formed."""
    quantise = settings.get("quantise")
    if "width" not in settings or quantise is None or k:
        return "a store of hidden states states their width, how they are quantised, and k = 0"
    is_whole = {"bytes", "codebook"} <= quantise.keys() and settings["width"] % quantise["bytes"] == 0
    if quantise["name"] == "pq" and not is_whole:
        return "product-quantised hidden states need a codebook, and bytes that divide their width"
    return None


def differing(old: Mapping, new: Mapping) -> str:
    """The settings in which two flat dicts differ, in words for an error."""
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    return ", ".join(f"{name} is {old.get(name)!r}, not {new.get(name)!r}" for name in names)
