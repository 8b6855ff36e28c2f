"""Settings of the tools over finished stores. Imports nothing heavy."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mlsm.common.settings import Positional, check, require_at_least


@dataclass(frozen=True, kw_only=True)
class VerifyConfig:
    """Check that a store is whole."""

    store: Positional[str | None] = None
    """Store directory or URL; unset: the newest finished one under ./runs."""
    full: bool = False
    """Read every byte: hashes, and what the columns hold. Otherwise records, sizes and end marks."""
    repair: bool = False
    """Check in full and remove the damaged units, so that the encoding command, which is named, makes them again."""

    def __post_init__(self):
        check(self)


@dataclass(frozen=True, kw_only=True)
class ShowConfig:
    """Show what a store holds: statistics, or one document or window with its LSPs, or its teacher's words."""

    store: Positional[str | None] = None
    """Store directory or URL; unset: the newest finished one under ./runs."""
    document: int | None = None
    """Show this document of the split, counted from 0 in the plan's order."""
    window: int | None = None
    """Show this window of the split, counted from 0."""
    split: Literal["train", "held_out"] = "train"
    """Split of the document or window."""
    top_n: int = 5
    """LSPs, or words, to show per token."""
    max_tokens: int = 512
    """Most tokens of a document to show."""
    against: str | None = None
    """Another store: show the settings in which the two differ."""

    def __post_init__(self):
        check(self)
        if sum(value is not None for value in (self.document, self.window, self.against)) > 1:
            raise ValueError(
                "--document, --window and --against are three different things to show. Pass only one of them"
            )
        require_at_least(self, 1, "top_n", "max_tokens")


@dataclass(frozen=True, kw_only=True)
class DeriveConfig:
    """Make a store with fewer entries per token from a stored one, without the teacher."""

    store: Positional[str | None] = None
    """Store directory or URL; unset: the newest finished one under ./runs."""
    top_n: int = 8
    """Keep this many of the largest entries of each token's distribution; fewer than the store has."""
    output: Path | None = None
    """Directory whose `stores` gets the new one; unset: next to the old one."""

    def __post_init__(self):
        check(self)
        if not 1 <= self.top_n <= 255:
            raise ValueError(f"--top-n must lie between 1 and 255, found {self.top_n}")


@dataclass(frozen=True, kw_only=True)
class ExportStoreConfig:
    """Write a store as Parquet files, one row per window, with a dataset card and the tokenizer."""

    store: Positional[str | None] = None
    """Store directory or URL; unset: the newest finished one under ./runs."""
    output: Path | None = None
    """Directory to write; unset: runs/exports/<store>-parquet."""

    def __post_init__(self):
        check(self)


@dataclass(frozen=True, kw_only=True)
class CleanConfig:
    """Remove what killed processes left behind."""

    path: Positional[Path] = Path("runs")
    """Directory to look through: a store, or all of ./runs."""
    dry_run: bool = False
    """Only list."""
    all: bool = False
    """Also remove what is younger than an hour: use it when no process on any machine writes there. Temporaries of a
    living process of this machine always stay."""

    def __post_init__(self):
        check(self)


def store_of(settings: Any) -> str | Path:
    """The store that the settings name; callers fill in the newest one if the settings name none."""
    if settings.store is None:
        raise ValueError("STORE is missing: name the directory or the URL of a store")
    return settings.store
