"""Open a store, and find existing stores.

    store = Store.open("runs/stores/lsp-...")       # or a URL: remote.py
    store.report()
    windows = store.split("train")                  # windows.py

A store is read through one of its plans, all of whose units must exist. Not handled here: windows and rows
(windows.py).
"""

import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from os import PathLike, fspath
from os.path import expanduser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlsm.common.errors import RequestError, ShardError, StoreError
from mlsm.common.invocation import program
from shards import copies
from shards.files import StoreFiles
from shards.manifest import Plan, UnitRecord, differing
from shards.windows import Split, StoreFacts, WindowReader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from shards.remote import Remote


class Store(StoreFacts):
    """A store directory, read through one finished plan."""

    def __init__(self, files: StoreFiles, plan: Plan):
        super().__init__(files, plan)
        _check_windowing(files, plan, self.fingerprinted)
        self._tokenizer: dict[str, bytes] | None = None  # its files, after their comparison with the target

    @classmethod
    def open(cls, path: str | PathLike[str], plan_id: str | None = None, remote: "Remote | None" = None) -> "Store":
        """Open a store directory or URL, or one of its `plans/<plan>.json`.

        plan_id  which plan; by default the newest finished one
        remote   shards.remote.Remote, how a URL is read; by default as the environment says
        Raises   StoreError when there is no store, or the plan is unfinished; RemoteError, which is one, when a URL
                 cannot be read
        """
        path, of_path = plan_of(fspath(path))
        plan_id = plan_id or of_path
        files = open_files(path, remote)
        files.target()
        if plan_id is None:
            return cls(files, files.newest_plan())
        plan = files.load_plan(plan_id)
        files.check_finished(plan)
        return cls(files, plan)

    @property
    def tokenizer_dir(self) -> Path:
        return self.files.tokenizer

    def read_tokenizer(self) -> dict[str, bytes]:
        """The files of the tokenizer, name to bytes, compared with the target the first time.

        Raises  StoreError when the text was encoded with another tokenizer
        """
        if self._tokenizer is None:
            self._tokenizer = copies.read_tokenizer(self.files)
        return self._tokenizer

    def load_tokenizer(self) -> "PreTrainedTokenizerBase":
        """The tokenizer, as an object of transformers. Raises what `read_tokenizer` does."""
        contents = self.read_tokenizer()
        with copies.foreign_errors(self.files):
            return copies.load_tokenizer(contents)

    @cached_property
    def command(self) -> dict[str, Any]:
        """The stored settings of the command that made the plan: {verb: settings, "recipe": its name}; {} without
        any."""
        return self.files.command(self.plan_id)

    def records(self, split: Split | None = None) -> list[UnitRecord]:
        """Unit records in plan order, of one split or of all."""
        return list(self.iter_records(split))

    def iter_records(self, split: Split | None = None) -> Iterator[UnitRecord]:
        """The same records one by one, as all records of a large store take gigabytes.

        Raises  StoreError when a record no longer exists, ShardError when it is damaged or another store's; ValueError
                for a split other than train and held_out
        """
        if split not in (None, "train", "held_out"):
            raise ValueError(f"a split is train or held_out, found {split!r}")
        for unit in self.plan.units:
            if split in (None, unit.split):
                yield self.record(unit.id)

    def record(self, unit_id: str) -> UnitRecord:
        """The record of a unit of the plan. Raises what `iter_records` does."""
        record = self.files.record(unit_id)
        if record is None:
            path = self.files.record_file(unit_id)
            if isinstance(self.path, Path) and not self.path.exists():
                raise StoreError(
                    f"{self.path} is no longer there. It was moved, or opened by a path relative to another directory."
                )
            raise StoreError(f"{path} is missing. Run the encoding command again: it encodes only that unit.")
        return record

    def urls(self, split: Split = "train") -> list[str]:
        """Paths or URLs of the split's shards in plan order, for plain WebDataset."""
        return [f"{self.path}/units/{record.file}" for record in self.iter_records(split)]

    def split(self, name: Split) -> WindowReader:
        """WindowReader over `train` or `held_out`. Raises StoreError when it has no windows, or as `iter_records`."""
        if name is None:  # to `iter_records` it means both
            raise ValueError("a split is train or held_out, found None")
        if name in ("train", "held_out") and not any(unit.split == name for unit in self.plan.units):
            other = "its corpus is too small for a held-out part" if name == "held_out" else "all its text is held out"
            raise StoreError(f"{self.path} has no {name} windows; {other}")
        return WindowReader(self, self.iter_records(name), name)

    def report(self) -> dict[str, Any]:
        """Totals over all units; stores with distributions also have non-zeros and kept mass per coded token."""
        totals: dict = dict.fromkeys(("units", "windows", "tokens", "bytes", "documents"), 0)
        seconds = dict.fromkeys(("teacher_seconds", "solver_seconds", "head_seconds"), 0.0)
        statistics = []
        for record in self.iter_records():  # one by one: all block tables would fill the memory
            statistics.append({name: value for name, value in record.statistics.items() if np.isscalar(value)})
            totals["units"] += 1
            for name in ("windows", "tokens", "bytes"):
                totals[name] += getattr(record, name)
            totals["documents"] += record.statistics["documents"]
            for stage in seconds:
                seconds[stage] += record.environment.get(stage, 0.0)
        totals |= {"from_stored": "hidden" in self.settings}  # then teacher_seconds are those of decoding stored states
        totals |= {"kind": self.kind, "bytes_per_token": totals["bytes"] / max(1, totals["tokens"])} | seconds
        if self.hidden:
            return totals | _hidden_statistics(statistics)
        solver = {"solver": self.settings["solver"]} if "solver" in self.settings else {}
        return totals | solver | (_row_statistics(statistics, "derived_from" in self.settings) if self.k else {})


def open_store(store: Store | str | PathLike[str]) -> Store:
    """The store itself if it is open, else the one at this path or URL. Raises the errors of `Store.open`."""
    return store if isinstance(store, Store) else Store.open(fspath(store))


def _check_windowing(files, plan, settings):
    """Raise StoreError when the plan's windows are not those that the target's settings describe."""
    windowing = settings.get("windowing")
    if windowing is not None and plan.windowing != windowing:
        raise StoreError(
            f"{files.path}: plan {plan.id} is of another store: {differing(plan.windowing, windowing)}. Remove it "
            "from plans/, or pass the store that it belongs to."
        )


def plan_of(path: str | Path) -> tuple[str | Path, str | None]:
    """The store and the plan id of a path or URL `<store>/plans/<plan>.json`; else the path and None. ~ is expanded."""
    path = expanduser(path)
    match = re.fullmatch(r"(.+)/plans/([^/]+)\.json", str(path))
    return (match[1], match[2]) if match and (is_url(path) or Path(path).is_file()) else (path, None)


def is_url(path: object) -> bool:
    """Whether this is a URL of another machine."""
    return isinstance(path, str) and "://" in path


def open_files(path: str | PathLike[str], remote: "Remote | None") -> StoreFiles:
    """StoreFiles of a directory, RemoteFiles of a URL."""
    path = fspath(path)
    if not is_url(path):
        return StoreFiles(path)
    from shards.remote import RemoteFiles  # only here: fsspec takes a while to import

    return RemoteFiles(path, remote)


def finished_stores(root: str | Path = "runs/stores", kinds: Sequence[str] = ()) -> list[Path]:
    """Paths of the finished stores under `root`, that of the last encoding command first.

    They are sorted by the time at which a command last began to encode a plan. Derived stores come last, since they
    add no text: so making one does not change which store the next command uses.

    kinds   of the stores to find; empty: all kinds
    Raises  StoreError when the only ones are unfinished or damaged, naming one; RequestError when there are none at all
    """
    newest: dict[Path, tuple[bool, int]] = {}
    unusable = None
    for plan in Path(root).glob("*/plans/*.json"):
        try:
            store = Store.open(plan)
            if not kinds or store.kind in kinds:
                rank = "derived_from" not in store.settings, plan.stat().st_mtime_ns
                newest[plan.parent.parent] = max(rank, newest.get(plan.parent.parent, rank))
        except (StoreError, ShardError, OSError) as error:  # a bad store must not hide the others
            unusable = error
    if not newest and unusable is not None:
        raise StoreError(str(unusable))
    if not newest:
        wanted = f" of {' or '.join(kinds)}" if kinds else ""
        raise RequestError(
            f"no finished store{wanted} under {root}. Name one that is elsewhere, or make one:"
            f"  {program()} encode-{kinds[0] if kinds else 'lsp'}"
        )
    return sorted(newest, key=lambda path: (newest[path], path), reverse=True)


def _row_statistics(statistics, derived):
    coded = sum(s["coded_tokens"] for s in statistics)
    share = {"nnz_per_token": "entries", "mass_kept": "kept_mass", "entropy_nats": "entropy_nats"}
    report = {name: sum(s[key] for s in statistics) / max(1, coded) for name, key in share.items()}
    report |= {"coded_tokens": coded}
    report |= {name: sum(s.get(name, 0) for s in statistics) for name in ("empty_codes", "truncated_tokens")}
    if sampled := sum(s.get("fidelity_tokens", 0) for s in statistics):
        means = {name: sum(s.get(f"fidelity_{name}", 0) for s in statistics) / sampled for name in ("kl", "tv", "tail")}
        report["fidelity"] = {"tokens": int(sampled), "of": "source" if derived else "exact", **means}
    if compared := sum(s.get("dtype_tokens", 0) for s in statistics):  # if the teacher's dtype was not float32
        means = {name: sum(s.get(f"dtype_{name}", 0) for s in statistics) / compared for name in ("tv", "hidden")}
        report["dtype_effect"] = {"tokens": int(compared), **means}
    violations = [s["max_kkt"] for s in statistics if "max_kkt" in s]  # statistics from the encoder
    return report | ({"max_kkt": max(violations)} if violations else {})


def _hidden_statistics(statistics):
    """Averages over coded tokens: cosine and squared distance between the stored hidden state and the teacher's."""
    coded = sum(s.get("coded_tokens", 0) for s in statistics)
    means = {name: sum(s.get(name, 0.0) for s in statistics) / max(1, coded) for name in ("cosine", "squared_error")}
    report = {"coded_tokens": coded, **means}
    if compared := sum(s.get("dtype_tokens", 0) for s in statistics):  # if the teacher's dtype was not float32
        changed = sum(s.get("dtype_hidden", 0) for s in statistics) / compared
        report["dtype_effect"] = {"tokens": int(compared), "hidden": changed}
    return report
