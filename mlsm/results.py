"""Results of the functions of `mlsm`: the main values as fields, the whole report as a dict.

    student                       # TrainedStudent(run='runs/students/mlsm-...', steps=500, held_out_loss=3.508, ...)
    student.report["baseline"]    # anything else that --json prints; also student["baseline"]

A result with files can be passed wherever a path is expected: mlsm.train_student(store=store).
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from mlsm.evaluation.comparison.result import Comparison
    from pipeline.dictionary import Dictionary
    from shards.reader import Store


@dataclass(frozen=True, eq=False)
class Result(Mapping[str, Any]):
    """A report. It can be used like a dict, and its fields are the most important values."""

    report: dict[str, Any] = field(repr=False, compare=False)

    @classmethod
    def of(cls, report: dict[str, Any]) -> Self:
        """Make a result from a report, whose keys are the fields' names."""
        names = [entry.name for entry in fields(cls) if entry.name != "report"]
        return cls(report=report, **{name: report.get(name) for name in names})

    def __getitem__(self, name: str) -> Any:
        return self.report[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.report)

    def __len__(self) -> int:
        return len(self.report)

    def __eq__(self, other: object) -> bool:  # a dict inside could not be hashed
        return self is other

    def __hash__(self) -> int:
        return id(self)


@dataclass(frozen=True, eq=False)
class Report(Result):
    """A report without fields, for comparisons and views."""

    def __repr__(self):
        return f"Report({', '.join(f'{name}={_short(value)}' for name, value in self.report.items())})"


@dataclass(frozen=True, eq=False, repr=False)
class Evaluated(Report):
    """The records of evaluated models."""

    output: str
    """the directory whose `evaluations` has them"""

    def __fspath__(self) -> str:
        return os.path.join(self.output, "evaluations")


@dataclass(frozen=True, eq=False, repr=False)
class Compared(Report):
    """The result of `compare`: the report as a dict, and as a typed object with models and arms."""

    comparison: "Comparison"


def _short(value):
    if isinstance(value, list | tuple | dict):
        return f"<{len(value)} {'entry' if len(value) == 1 else 'entries'}>"
    return repr(value)


@dataclass(frozen=True, eq=False)
class EncodedStore(Result):
    """A finished store."""

    store: str
    kind: str
    tokens: int
    windows: int
    documents: int
    bytes_per_token: float
    quarantined: int | None
    """documents that could not be encoded and have no targets"""
    finished_before: bool

    def __fspath__(self) -> str:
        return self.store

    def open(self) -> "Store":
        """The open mlsm.Store."""
        from shards.reader import Store

        return Store.open(self.store)


@dataclass(frozen=True, eq=False)
class Estimate(Result):
    """The estimated cost of an encoding, from dry_run=True."""

    tokens: int
    units: int
    bytes: int
    seconds: float
    """with one process"""
    tokens_per_second: float
    disk_free: int
    """bytes"""


@dataclass(frozen=True, eq=False)
class SavedDictionary(Result):
    """A dictionary of LSP atoms in a directory."""

    dictionary: str
    k: int
    width: int
    finished_before: bool

    def __fspath__(self) -> str:
        return self.dictionary

    def open(self) -> "Dictionary":
        """The loaded mlsm.Dictionary."""
        from pipeline.dictionary import Dictionary

        return Dictionary.load(self.dictionary)


@dataclass(frozen=True, eq=False)
class LearnedDictionary(SavedDictionary):
    """A learned one."""

    objective: float
    """held-out mean of equation 2"""
    explained_variance: float
    nnz: float
    """non-zeros of a code on average"""
    dead_atoms: int


@dataclass(frozen=True, eq=False)
class MaskWeights(Result):
    """A table of how often each token is masked."""

    mask_weights: str
    tokens: int
    """that were counted"""
    finished_before: bool

    def __fspath__(self) -> str:
        return self.mask_weights


@dataclass(frozen=True, eq=False)
class TrainedStudent(Result):
    """A finished training of a student or of a probe."""

    run: str
    """its directory, with log, checkpoints, and the files for transformers in `export`"""
    export: str
    objective: str
    encoder: str
    parameters: int
    steps: int
    held_out_loss: float | None
    """of the objective, per predicted token; in nats except for regress and recon"""
    improvement: float | None
    """fraction by which the loss is below that of a constant prediction"""
    finished_before: bool

    def __fspath__(self) -> str:
        return self.run


@dataclass(frozen=True, eq=False)
class Exported(Result):
    """A checkpoint as files that transformers loads."""

    export: str
    run: str
    step: int
    dry_run: bool

    def __fspath__(self) -> str:
        return self.export


@dataclass(frozen=True, eq=False)
class ImportedStudent(Result):
    """A checkpoint of the official code, split into the files of an export."""

    export: str
    words: int
    lsps: int
    predicts_words: bool

    def __fspath__(self) -> str:
        return self.export


@dataclass(frozen=True, eq=False)
class Verified(Result):
    """The result of checking a store."""

    store: str
    full: bool
    units: int
    damaged: list[dict[str, Any]]
    missing: list[dict[str, Any]]

    @property
    def whole(self) -> bool:
        """Whether every unit is there and nothing is damaged."""
        return not self.damaged and not self.missing


def stores_or_estimates(reports: list[dict[str, Any]]) -> list[Any]:
    """The stores that were made, or a dry run's estimates."""
    return [(EncodedStore if "store" in report else Estimate).of(report) for report in reports]


def report_of(result: Any) -> Any:
    """The part of a result that a command shows: its report, a list of reports, or the typed comparison."""
    if isinstance(result, Compared):
        return result.comparison
    if isinstance(result, list):
        return [report_of(one) for one in result]
    return result.report if isinstance(result, Result) else result
