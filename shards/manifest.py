"""Small JSON files that make a store: target, plans, unit records; and how any file becomes visible.

A file appears whole or not at all: unique temporary name, fsync, `os.link` to the final name (which never
replaces; where something shall be replaced, a rename), unlink, fsync of the directory. The unit's record is the only
commit; it names its shard, whose name carries its hash, so two writers of one unit cannot mix. Every file also carries
a checksum over its values.
Left out: the calls themselves (disk.py), tar members (writer.py), choosing what to encode (pipeline/plan.py).
"""

import errno
import hashlib
import json
import os
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path

from shards import disk
from shards.schema import FORMAT_VERSION, ShardError, StoreError, repair_hint

TARGET_FIELDS = {"target", "settings", "lineage", "k", "vocab_size", "max_length", "weight_octaves", "special_ids"}


def canonical_json(value):
    """The one JSON text of a value: sorted keys, no spaces, so that equal settings have equal hashes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def fingerprint(value):
    """SHA-256 of the canonical JSON, as 32 hexadecimal digits."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:32]


def publish(temporary, final, withdraw=False):
    """Give a written and fsynced file its final name, unless that name exists.

    withdraw  whether to take the name back if it may not survive a power cut, because what follows the link failed
    Returns   True when this call published it, False when another had; the temporary is gone either way
    """
    written = os.stat(temporary)
    try:
        disk.link(temporary, final)
        published = True
    except FileExistsError:
        published = False
    try:
        disk.unlink(temporary)
        disk.fsync_path(final.parent)
    except OSError:
        if published and withdraw:
            with suppress(OSError):
                if os.path.samestat(os.stat(final), written):  # nobody has replaced it meanwhile
                    disk.unlink(final)
        raise
    return published


def publish_directory(final, fill, replace=True):
    """Let a directory appear whole: filled by `fill(path)` under a temporary name, fsynced, renamed.

    replace  whether one that is already there is replaced, or stays and counts as this one
    A failure leaves things as they were, and no temporary.
    """
    make_directories(final.parent)
    temporary = disk.temporary_name(final.parent, final.name)
    try:
        disk.mkdir(temporary)
        fill(temporary)
        _fsync_tree(temporary)
        try:
            disk.rename(temporary, final)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if replace:
                _replace_directory(temporary, final)
        disk.fsync_path(final.parent)
    finally:
        disk.discard(temporary)


def _replace_directory(temporary, final):
    replaced = disk.temporary_name(final.parent, final.name)
    try:
        disk.rename(final, replaced)
        disk.rename(temporary, final)
    except BaseException:       # Ctrl-C as well: the old one would go with the other temporaries
        if not final.exists() and replaced.exists():
            disk.rename(replaced, final)
        raise
    disk.discard(replaced)


def _fsync_tree(directory):
    for path in directory.rglob("*"):
        disk.fsync_path(path)
    disk.fsync_path(directory)


def make_directories(path):
    """Make a directory and its parents, each of them durable in the one above."""
    if not path.is_dir():
        make_directories(path.parent)
        with suppress(FileExistsError):
            disk.mkdir(path)
        disk.fsync_path(path.parent)


def file_sha256(path):
    """SHA-256 of a file's bytes, hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def publish_json(path, value, withdraw=False):
    """Write JSON under a final name, unless it exists. Returns, and `withdraw`, as `publish`."""
    with _written(path, _json_bytes(value)) as temporary:
        return publish(temporary, path, withdraw)


def replace_json(path, value):
    """Write JSON under a final name, in place of what has it."""
    replace_bytes(path, _json_bytes(value))


def replace_bytes(path, content):
    """Write a file's content under a final name, in place of what has it."""
    with _written(path, content) as temporary:
        disk.rename(temporary, path)
        disk.fsync_path(path.parent)


def _json_bytes(value):
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n").encode()


@contextmanager
def _written(path, content):
    """A temporary beside `path` that holds the content on disk."""
    temporary = disk.temporary_name(path.parent, path.stem)
    try:
        file = disk.create(temporary)
        try:
            disk.write(file, content)
            disk.fsync(file)
        finally:
            disk.close(file)
        yield temporary
    finally:
        disk.discard(temporary)


def with_checksum(values):
    """A dict with a checksum over all the rest of it."""
    rest = {name: value for name, value in values.items() if name != "checksum"}
    return rest | {"checksum": fingerprint(rest)}


def fits_checksum(values, fields):
    """Whether the checksum fits; files of before there was one have exactly the `fields`."""
    rest = {name: value for name, value in values.items() if name != "checksum"}
    return values.keys() == fields if "checksum" not in values else values["checksum"] == fingerprint(rest)


def read_json(path):
    """Parse a plan, a record or target.json; ShardError when it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        remedy = "Delete it and run the encoding command again; finished units are kept."
        if path.parent.name in ("units", "plans"):
            remedy = _remedy(path)
        raise ShardError(f"{path}: not readable as JSON ({error}). {remedy}") from None


def _remedy(path):
    """What to do about a damaged plan or record."""
    return repair_hint(path.parent.parent)


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

    def as_dict(self):
        """Its fields, without `dropped` when nothing is: such plans are what they were before it existed."""
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
    def id(self):
        """Fingerprint of the plan: the ordered unit ids (which contain the windowing) and their splits."""
        return fingerprint({"windowing": self.windowing, "units": [[unit.id, unit.split] for unit in self.units]})

    def as_dict(self):
        return with_checksum(
            {
                "plan": self.id,
                "windowing": self.windowing,
                "corpus": self.corpus,
                "units": [unit.as_dict() for unit in self.units],
            }
        )

    @classmethod
    def read(cls, path):
        """Read a plan file; ShardError when it is not the plan that its name says."""
        values = read_json(path)
        try:
            plan = cls(values["windowing"], tuple(PlannedUnit(**unit) for unit in values["units"]), values["corpus"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ShardError(f"{path} is not a plan ({error}). {_remedy(path)}") from None
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
    def lacking(self):
        """How many windows carry no LSPs because coding them failed."""
        return len({window for entry in self.quarantined for window in entry["windows"]})

    @property
    def blocks(self):
        return [group for group in self.groups if "windows" in group]

    def as_dict(self):
        """The JSON of the record."""
        return with_checksum(asdict(self))

    @classmethod
    def read(cls, path):
        """Read a record file; ShardError when it is damaged, another unit's, or names a file elsewhere."""
        values = read_json(path)
        checksum = values.pop("checksum", None) if isinstance(values, dict) else None
        if checksum != fingerprint(values):
            raise ShardError(f"{path}: the record does not match its checksum. {_remedy(path)}")
        lists = {name: tuple(values.get(name, ())) for name in ("groups", "quarantined")}
        record = cls(**{**values, **lists})
        if record.unit != path.stem:
            raise ShardError(f"{path}: this is the record of unit {record.unit}. {_remedy(path)}")
        if Path(record.file).name != record.file:
            raise ShardError(f"{path}: names the shard {record.file}, outside its own directory. {_remedy(path)}")
        return record


class StoreFiles:
    """Paths and small files of one store directory. Knows nothing of tar or arrays."""

    remote = False

    def __init__(self, path):
        self.path = Path(path)
        self.units = self.path / "units"
        self.plans = self.path / "plans"
        self.target_file = self.path / "target.json"

    @property
    def tokenizer(self):
        return self.path / "tokenizer"

    @property
    def dictionary(self):
        return self.path / "dictionary"

    def create(self, target):
        """Make the directories and write target.json; the settings of an existing one must be equal.

        target  dict with the fingerprinted `settings` and the `target` fingerprint
        """
        for directory in (self.units, self.plans):
            make_directories(directory)
        made = publish_json(self.target_file, with_checksum(target))
        if not made and self.target()["target"] != target["target"]:
            difference = differing(self.target()["settings"], target["settings"])
            raise StoreError(f"{self.path} holds another target: {difference}. Choose another --output.")

    def target(self):
        if not self.target_file.is_file():
            raise StoreError(f"{self.path} is not a store: it has no target.json. Make one with: mlsm encode-lsp")
        target = read_json(self.target_file)
        target = target if isinstance(target, dict) else {}
        settings = target.get("settings", {})
        settings = settings if isinstance(settings, dict) else {}
        if settings.get("format", FORMAT_VERSION) != FORMAT_VERSION:
            raise ShardError(
                f"{self.path} is of shard format {settings['format']}, this version reads {FORMAT_VERSION}. "
                "Install the release of this project that wrote it, or encode again."
            )
        sound = target.keys() >= TARGET_FIELDS and target["target"] == fingerprint(settings)
        if not sound or not fits_checksum(target, TARGET_FIELDS):
            raise ShardError(f"{self.target_file} does not match its fingerprint. Encode again elsewhere.")
        return target

    @cached_property
    def _target_id(self):
        return self.target()["target"]

    def record_file(self, unit_id):
        return self.units / f"{unit_id}.json"

    def record(self, unit_id):
        """The commit record of a unit, or None when it is not finished."""
        path = self.record_file(unit_id)
        if not path.is_file():
            return None
        record = UnitRecord.read(path)
        if record.target != self._target_id:
            raise ShardError(f"{path}: this is a record of target {record.target}. {_remedy(path)}")
        return record

    def open_shard(self, record):
        """The shard of a record as an open file; FileNotFoundError when there is none."""
        return open(self.units / record.file, "rb", buffering=0)

    def repair_hint(self):
        """What to do about damage in this store, in words for an error."""
        return repair_hint(self.path)

    def missing_units(self, plan):
        """Units of the plan that have no record yet, in order."""
        done = {path.stem for path in self.units.glob("*.json")}
        return [unit for unit in plan.units if unit.id not in done]

    def publish_plan(self, plan):
        publish_json(self.plans / f"{plan.id}.json", plan.as_dict())

    def load_plan(self, plan_id):
        path = self.plans / f"{plan_id}.json"
        if not path.is_file():
            raise StoreError(
                f"{self.path} has no plan {plan_id}; "
                f"it has {', '.join(sorted(p.stem for p in self.plans.glob('*.json')))}"
            )
        return Plan.read(path)

    def newest_plan(self):
        """The newest plan all of whose units are finished; StoreError says what is missing otherwise."""
        files = sorted(self.plans.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
        plans = [Plan.read(path) for path in files]
        for plan in plans:
            if not self.missing_units(plan):
                return plan
        if not plans:
            raise StoreError(f"{self.path} has no plan yet. Run the encoding command again.")
        missing = len(self.missing_units(plans[0]))
        raise StoreError(
            f"{self.path} is unfinished: {missing} of {len(plans[0].units)} units are missing. "
            "Run the encoding command that began it again; finished units are kept."
        )


def differing(old, new):
    """The settings in which two flat dicts differ, in words for an error."""
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    return ", ".join(f"{name} is {old.get(name)!r}, not {new.get(name)!r}" for name in names)
