"""Parse and write a store's small JSON files: target, plans, unit records.

    target = parse_target(raw, where)
    plan = Plan.parse(raw, where)
    record = UnitRecord.parse(raw, where)       # ShardError: where, field, what was expected, what was found

A unit is committed by its record only. The record names its shard, and the shard's name contains its hash, so two
writers of one unit cannot mix. Every file has a checksum over its values. Each field's type is checked before anything
is computed or allocated from it, because these files may come from anybody.
Not handled here: the files themselves (files.py, remote.py), tar members (writer.py).
"""

import hashlib
import json
import re
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from operator import itemgetter
from pathlib import PurePosixPath
from typing import Annotated, Any, NotRequired, TypedDict

from msgspec import Meta

from mlsm.common.errors import ShardError
from mlsm.common.json_checks import (
    Count,
    Digest,
    Fingerprint,
    Name,
    Number,
    find_problem,
    is_count,
    is_number,
    one_of,
    parse_as,
    parse_json,
)
from mlsm.common.paths import utf8
from shards.schema import BLOCK_TOKENS, FORMAT_VERSION, KINDS, MAX_OCTAVES

MAX_WIDTH = 1 << 24  # vocabulary or LSPs: ten times the largest known; arrays have this size
MOST_WIDTH = 1 << 16  # of a hidden state, for which readers allocate arrays
ROW_STATISTICS = {"entries", "coded_tokens", "kept_mass", "entropy_nats", "nnz_histogram"}  # of stores with k > 0
_HISTOGRAM = 256  # a token has 0 to 255 entries

# The canonical JSON text of a value: sorted keys, no spaces, so that equal settings have equal hashes.
canonical_json = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode


def fingerprint(value: object) -> str:
    """SHA-256 of the canonical JSON, as 32 hexadecimal digits."""
    return hashlib.sha256(utf8(canonical_json(value))).hexdigest()[:32]


def with_checksum(values: Mapping) -> dict:
    """A dict with a checksum over all the rest of it."""
    rest = {name: value for name, value in values.items() if name != "checksum"}
    return rest | {"checksum": fingerprint(rest)}


def fits_checksum(values: Any) -> bool:
    """Whether these values of a JSON file are an object with a checksum that fits the rest of it."""
    if not isinstance(values, dict):
        return False
    rest = values.copy()
    return rest.pop("checksum", None) == fingerprint(rest)


def differing(old: Mapping, new: Mapping) -> str:
    """The settings in which two flat dicts differ, in words for an error."""
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    return ", ".join(f"{name} is {old.get(name)!r}, not {new.get(name)!r}" for name in names)


# -- target.json ------------------------------------------------------------------------------------------


class _Windowing(TypedDict, total=False):
    tokenizer: str
    packing: str
    max_length: Count


class _FileCounts(TypedDict, total=False):
    source: str
    number: Count
    first_record: Count


class _Corpus(TypedDict, total=False):
    files: dict[str, _FileCounts]


class _Quantise(TypedDict):
    name: one_of("int8", "pq")  # type: ignore[valid-type]
    bytes: NotRequired[Annotated[int, Meta(ge=1, le=255)]]
    codebook: NotRequired[Digest]


class _Solver(TypedDict):
    name: str
    steps: NotRequired[Count]


class _Hidden(TypedDict):
    target: Fingerprint
    quantise: _Quantise


class _Settings(TypedDict, total=False):
    kind: one_of(*KINDS)  # type: ignore[valid-type]
    format: Count
    windowing: _Windowing
    teacher: str
    layer: Count
    dictionary: str
    k: Count
    lam: Number
    tolerance: Number
    solver: _Solver
    masked_passes: Count
    dtype: str
    top_n: Count | one_of("all")  # type: ignore[valid-type]
    derived_from: Fingerprint
    width: Annotated[int, Meta(ge=1, le=MOST_WIDTH)]
    quantise: _Quantise
    hidden: _Hidden


class _SpecialIds(TypedDict):
    cls: Count
    sep: Count
    mask: Count
    pad: Count
    all: list[Count]


class _Target(TypedDict):
    target: Fingerprint
    settings: _Settings
    lineage: dict
    k: Annotated[int, Meta(ge=0, le=MAX_WIDTH)]
    vocab_size: Annotated[int, Meta(ge=1, le=MAX_WIDTH)]
    max_length: Annotated[int, Meta(ge=1, le=65_535)]
    weight_octaves: Annotated[int, Meta(ge=1, le=MAX_OCTAVES)]
    special_ids: _SpecialIds


def parse_target(raw: bytes, where: object, remedy: str = "") -> dict:
    """The values of a target.json.

    remedy  what to do about damage, for the error
    Raises  ShardError, naming `where` and the field: damaged, of another format, or its parts do not agree
    """
    try:
        target = parse_json(raw, where)
    except ShardError as error:
        raise ShardError(f"{error}{remedy}") from None
    settings = target.get("settings") if isinstance(target, dict) else None
    settings = settings if isinstance(settings, dict) else {}
    if settings.get("format", FORMAT_VERSION) != FORMAT_VERSION:
        raise ShardError(
            f"{where} is of shard format {settings['format']}, this version reads {FORMAT_VERSION}. "
            "Install the release of this project that wrote it, or encode again."
        )
    if not fits_checksum(target) or target.get("target") != fingerprint(settings):
        raise ShardError(f"{where} does not match its fingerprint{remedy}")
    if problem := find_problem(target, _Target) or _problem_between_fields(target):
        raise ShardError(f"{where}: {problem}{remedy}")
    return target


def _problem_between_fields(target):
    settings, vocab_size = target["settings"], target["vocab_size"]
    special = [number for ids in target["special_ids"].values() for number in (ids if type(ids) is list else [ids])]
    if not all(is_count(number) and number < vocab_size for number in special):
        return f"field special_ids: expected ids below the vocabulary of {vocab_size:,}"
    if settings.get("kind") == "hidden":
        quantise = settings.get("quantise")
        if "width" not in settings or quantise is None or target["k"]:
            return "a store of hidden states states their width, how they are quantised, and k = 0"
        is_whole = {"bytes", "codebook"} <= quantise.keys() and settings["width"] % quantise["bytes"] == 0
        if quantise["name"] == "pq" and not is_whole:
            return "product-quantised hidden states need a codebook, and bytes that divide their width"
    stated = {"k": settings.get("k"), "max_length": settings.get("windowing", {}).get("max_length")}
    for name, value in stated.items():
        if value not in (None, target[name]):
            return f"field {name} is {target[name]}, but {value} in its settings"
    return None


def _needed_statistics(target: Mapping) -> set[str]:
    """The statistics that the records of a store with this target must have."""
    if target["settings"].get("kind") == "hidden":
        return {"coded_tokens"}
    return ROW_STATISTICS if target["k"] else set()


# -- plans ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlannedUnit:
    """One unit of work in a plan: a range of records of one source."""

    id: Name
    """Content address: hash of windowing, source content, record range, dropped records, split and window limit."""
    split: Name
    """`train` or `held_out`."""
    source: str
    """Name of the source that its text is read from; not in the id."""
    start: Count
    """First record of the range."""
    stop: Count
    """Record after the last."""
    offset: Count = 0
    """Where to open the source for the first record: byte of the uncompressed file, row group, or number of a file."""
    max_windows: Count | None = None
    """How many windows to use if `--max-tokens` is reached inside the unit."""
    dropped: str = ""
    """Records of the range that are left out, such as duplicates, counted from `start`: `3,7-9`."""

    def as_dict(self) -> dict:
        """The fields as a dict, without `dropped` if that is empty."""
        return {name: value for name, value in asdict(self).items() if name != "dropped" or value}


@dataclass(frozen=True)
class Plan:
    """An ordered list of units over a corpus; order, masks and window ids follow from it."""

    windowing: dict
    """Tokenizer fingerprint, packing, window length, held-out share: the settings that turn text into windows."""
    units: tuple[PlannedUnit, ...]
    """Units in the order of the window numbers."""
    corpus: dict = field(default_factory=dict)
    """Counts of the scan (sources, documents, bytes), and which file of a joined source begins at which record; not in
    the fingerprint."""

    @cached_property
    def _joined(self) -> dict[str, list[tuple[int, str]]]:
        """The files of each source that joins small ones, in their order, each after the number of its first record."""
        found: dict[str, list[tuple[int, int, str]]] = {}
        for name, counts in self.corpus.get("files", {}).items():
            if "source" in counts:
                place = counts.get("number", 0), counts.get("first_record", 0), name
                found.setdefault(counts["source"], []).append(place)
        return {source: [(first, name) for _, first, name in sorted(files)] for source, files in found.items()}

    def files_of(self, source: str) -> list[str]:
        """The names of a source's files: several if small files were joined."""
        return [name for _, name in self._joined.get(source, [(0, source)])]

    def place(self, unit: PlannedUnit, record: int) -> tuple[str, int]:
        """The file that a record of a unit's source is in, and the record's number in that file."""
        files = self._joined.get(unit.source, [(0, unit.source)])
        first, name = files[max(0, bisect_right(files, record, key=itemgetter(0)) - 1)]
        return name, record - first

    def text_of(self, unit: PlannedUnit) -> str:
        """Where a unit's text is, for messages."""
        (begin, first), (end, last) = self.place(unit, unit.start), self.place(unit, unit.stop - 1)
        if begin == end:
            return f"records {first:,} to {last:,} of {begin}"
        return f"record {first:,} of {begin} to record {last:,} of {end}"

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
    def parse(cls, raw: bytes, where: object) -> "Plan":
        """The plan in a file of the name `where`; ShardError when it is damaged or not the plan that the name says."""
        values = parse_json(raw, where)
        plan = parse_as(values, cls, where)
        if problem := find_problem(plan.windowing, _Windowing, "windowing."):
            raise ShardError(f"{where}: {problem}")
        if problem := find_problem(plan.corpus, _Corpus, "corpus."):
            raise ShardError(f"{where}: {problem}")
        if plan.id != _stem(where):
            raise ShardError(f"{where} holds plan {plan.id}")
        if not fits_checksum(values):
            raise ShardError(f"{where} does not match its checksum")
        return plan


# -- unit records -----------------------------------------------------------------------------------------

_BlockCount = Annotated[int, Meta(ge=0, le=BLOCK_TOKENS)]


class Group(TypedDict):
    """A member group of a shard, as listed in records; blocks also have windows and tokens."""

    name: Name
    offset: Count
    length: Count
    sha256: Digest
    windows: NotRequired[_BlockCount]
    tokens: NotRequired[_BlockCount]


class Quarantined(TypedDict):
    """A document that could not be coded; because of it, `windows` of the unit have no LSPs."""

    record: Count
    source: str
    windows: list[Count]
    reason: str


@dataclass(frozen=True)
class UnitRecord:
    """The commit of one unit: offsets and hashes of all bytes of its shard, and its statistics."""

    unit: Name
    target: str
    file: Name
    """Shard's name in `units/`."""
    bytes: Count
    sha256: Digest
    """SHA-256 of the whole shard."""
    windows: Count
    tokens: Count
    """Real tokens, special ones included."""
    groups: tuple[Group, ...]
    """Member groups in order."""
    statistics: dict
    """Sums over the unit. Sums of several units add up, except names that start with `max_`."""
    environment: dict
    """Device and library versions of the encoding process."""
    quarantined: tuple[Quarantined, ...] = ()

    @property
    def lacking(self) -> int:
        """How many windows carry no LSPs because coding them failed."""
        return len({window for entry in self.quarantined for window in entry["windows"]})

    @property
    def blocks(self) -> list[Group]:
        return [group for group in self.groups if "windows" in group]

    def as_dict(self) -> dict:
        """The JSON of the record."""
        return with_checksum(asdict(self))

    @classmethod
    def parse(cls, raw: Any, where: object) -> "UnitRecord":
        """The record in a file of the name `where`; ShardError when it is damaged, another unit's, or names a file
        outside of `units`."""
        values = parse_json(raw, where)
        if not fits_checksum(values):
            raise ShardError(f"{where}: the record does not match its checksum")
        record = parse_as(values, cls, where)
        if problem := record._problem_between_fields():
            raise ShardError(f"{where}: {problem}")
        if record.unit != _stem(where):
            raise ShardError(f"{where}: this is the record of unit {record.unit}")
        return record

    def check(self, target: Mapping, where: object) -> None:
        """Raise ShardError unless the record can be one of a store of this target."""
        if self.target != target["target"]:
            raise ShardError(f"{where}: this is a record of target {self.target}")
        if lost := _needed_statistics(target) - self.statistics.keys():
            raise ShardError(f"{where}: field statistics.{min(lost)} is missing")
        needed = 4 * target["vocab_size"] + 8 * target["k"] + 16 * target["settings"].get("width", 0)
        if self.groups[-1]["length"] < needed:  # readers make arrays as wide as the target says
            raise ShardError(
                f"{where}: field groups: __stats__ of {self.groups[-1]['length']:,} bytes cannot hold the sums of the "
                f"target's vocabulary and LSPs, {needed:,} bytes"
            )

    def _problem_between_fields(self):
        """Check a block's windows and tokens against its bytes, because a reader allocates memory for so many."""
        histogram = self.statistics.get("nnz_histogram", [0] * _HISTOGRAM)
        sums = [value for name, value in self.statistics.items() if name != "nnz_histogram"]
        if not (is_count(self.statistics.get("documents")) and all(map(is_number, sums))) or (
            find_problem(histogram, _Histogram)
        ):
            return f"field statistics: expected an object of numbers with 'documents', found {self.statistics!r:.60}"
        if not all(is_number(value) for name, value in self.environment.items() if name.endswith("_seconds")):
            return f"field environment: expected numbers called '..._seconds', found {self.environment!r:.60}"
        ends = [group["name"] for group in self.groups if "windows" not in group]
        if ends != ["__meta__", "__stats__"] or [self.groups[0]["name"], self.groups[-1]["name"]] != ends:
            return "field groups: expected __meta__, then blocks, then __stats__"
        for group in self.groups:
            name, length = group["name"], group["length"]
            windows, tokens = group.get("windows", 0), group.get("tokens", 0)
            if group["offset"] + length > self.bytes:
                return f"field groups: {name} lies beyond the {self.bytes:,} bytes of the shard"
            if ("windows" in group) != ("tokens" in group) or windows > tokens or 2 * (windows + tokens) > length:
                return f"field groups: {name} of {length:,} bytes cannot hold {windows} windows of {tokens} tokens"
        return None


def shard_name(unit: str, sha256: str) -> str:
    """The name of a unit's shard: the unit, and the first digits of the hash of the shard's bytes."""
    return f"{unit}-{sha256[:12]}.tar"


def unit_of_shard(name: str) -> str | None:
    """The unit of a shard's name; None if it is not the name of a shard."""
    match = re.fullmatch(r"(.+)-[0-9a-f]{12}\.tar", name)
    return match and match[1]


_Histogram = Annotated[list[Count], Meta(min_length=_HISTOGRAM, max_length=_HISTOGRAM)]


def _stem(where):
    return PurePosixPath(str(where)).stem
