"""The job of one stage A command: settings, tokenizer, plan and sources.

    job = open_job(config, progress)
    job.plan.units, job.windows(unit)
    with open_executor(job, teacher) as executor: ...

A Job is immutable and can be sent to other processes. A command makes one by `open_job` (text and teacher, or
the store of --hidden) or, without a layer, by `scan_corpus`.
Not handled here: dictionaries (learn.py), encoding (encode.py), how executors work (executor.py, dask_workers.py).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from mlsm.common.device import choose_device
from mlsm.common.errors import CorpusError, EncodeError
from mlsm.common.progress import silent
from pipeline import plan as planning
from pipeline.config import CorpusConfig, DictionaryConfig
from pipeline.corpus import Window, join_small_files, open_sources
from pipeline.corpus import windows as packing
from pipeline.corpus.documents import Selection
from pipeline.corpus.source import Piece, Source
from pipeline.corpus.windows import drops_white_space
from pipeline.executor import Executor, Inline
from pipeline.stored import StoredHidden
from shards.copies import tokenizer_fingerprint
from shards.files import refuse_foreign_output
from shards.manifest import Plan, PlannedUnit, fingerprint
from shards.schema import LSP_OCTAVES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from pipeline.teacher import Teacher

PROBED_UNITS, PROBED_BYTES = 4, 1 << 18  # text that is tokenised to estimate the tokens per byte
MOST_PROBED_BYTES = 1 << 20  # per unit, if a document is longer than PROBED_BYTES

_scanned: dict[tuple, tuple[list[Source], Plan]] = {}  # the last scan, as all stores of a study have one plan


@dataclass(frozen=True, eq=False)
class Job:
    """Sources, tokenizer and plan of one command.

    config       its settings: a CorpusConfig with those of the command, such as EncodeConfig
    special_ids  dict of `teacher.special_ids`
    rules        dict of `plan.windowing`
    sources      by name
    stamps       of the sources' files when they were scanned, by name: if they are unchanged, contents are assumed to
                 be unchanged
    progress     called with what the command is doing; a process that the job is sent to reports nothing
    libraries    the library for each matrix product of the teacher, if already decided
    stored       a store of hidden states that replaces text and teacher, or None
    """

    config: Any
    tokenizer: "PreTrainedTokenizerFast"
    special_ids: dict
    rules: dict
    plan: Plan
    sources: dict[str, Source]
    stamps: dict[str, tuple[int, int]]
    progress: Callable[..., None] = silent
    libraries: Mapping[str, str] | None = None
    stored: StoredHidden | None = None

    def __post_init__(self) -> None:
        # Of load_tokenizer. Pickling loses it, and a worker would read "[MASK]" in a text as the special token.
        self.tokenizer.backend_tokenizer.encode_special_tokens = True

    def __reduce__(self) -> tuple:
        fields = (self.config, self.tokenizer, self.special_ids, self.rules, self.plan, self.sources, self.stamps)
        return Job, (*fields, silent, None if self.libraries is None else dict(self.libraries), self.stored)

    def check_sources(self) -> None:
        """Raise CorpusError if a file has changed since the scan."""
        for name in self.sources:
            self.check_unchanged(name)

    def check_unchanged(self, name: str) -> None:
        """The same for one source; for stored windows, every block is compared with its hash."""
        if self.stored is None:
            for file in self.sources[name].files:
                file.check_unchanged(self.stamps[file.name])

    def no_windows_error(self) -> CorpusError:
        """The error to raise if the text gives no window."""
        advice = (
            "A pair needs two lines of one document, one sentence on each, with five words or more together. Words are"
            " separated by spaces, so a text in Chinese, Japanese or Thai has no pairs"
            if self.config.packing == "pairs"
            else "Check --corpus"
        )
        return CorpusError(f"no window can be cut from {', '.join(self.config.corpus)}. {advice}.")

    @property
    def planned_tokens(self) -> int:
        """A rough number of tokens that follows from the plan alone, as names of dictionaries depend on it."""
        if self.stored is not None:
            return self.stored.tokens
        estimate = self.plan.corpus["bytes"] // planning.BYTES_PER_TOKEN
        return min(estimate, self.config.max_tokens or estimate)

    @property
    def planned_documents(self) -> int:
        """About how many documents are encoded; those of the plan are all that were scanned, also with --max-tokens."""
        whole = self.plan.corpus.get("bytes", 0) // planning.BYTES_PER_TOKEN
        return round(self.plan.corpus["documents"] * min(1, self.planned_tokens / max(1, whole)))

    @cached_property
    def _probed(self) -> tuple[int, Counter[int]]:
        """Bytes of the beginnings of some files, and how often each token id is in them, special ones included."""
        first = {unit.source: unit for unit in reversed(self.plan.units) if unit.split == "train"}
        return self._probe(list(first.values()))

    @property
    def expected_tokens(self) -> int:
        """About how many tokens the plan holds, special ones included, from the beginnings of some of its files."""
        return (
            self.stored.tokens if self.stored is not None else self._extrapolate(*self._probed) or self.planned_tokens
        )

    @cached_property
    def unknown_share(self) -> float:
        """About which share of the text's tokens is unknown to the tokenizer ([UNK]), from the same beginnings."""
        unknown = self.tokenizer.unk_token_id
        others = {self.special_ids[name] for name in ("pad", "cls", "sep", "mask")}
        if self.stored is not None or unknown is None or unknown in others:  # GPT-2 calls the end of a text unknown
            return 0.0
        _, ids = self._probed
        return ids[unknown] / max(1, ids.total() - sum(ids[id] for id in others))

    def tokens_by_sample(self, units: Sequence[PlannedUnit]) -> int:
        """About how many tokens the plan holds, from the beginnings of some of these units, at most PROBED_UNITS."""
        return self.stored.tokens if self.stored is not None else self._extrapolate(*self._probe(units))

    def _extrapolate(self, size, ids):
        found = round(self.plan.corpus["bytes"] * ids.total() / max(1, size))
        return min(found, self.config.max_tokens or found)

    def _probe(self, units):
        size, ids = 0, Counter[int]()
        for unit in units[:: max(1, -(-len(units) // PROBED_UNITS))]:
            pieces: list[Piece] = []
            taken = 0
            for piece in self.sources[unit.source].pieces(unit.start, unit.offset):
                # pairs that a cut inside a document would lose are few in a long one
                if taken >= PROBED_BYTES and (piece.record != pieces[-1].record or taken >= MOST_PROBED_BYTES):
                    break
                pieces.append(piece)
                taken += len(piece.text.encode("utf-8", "surrogatepass"))
            size += taken
            for window in packing.windows(pieces, self.tokenizer, self.special_ids, self.rules):
                ids.update(window.ids)
        return size, ids

    def target_json(self, settings: dict, lineage: dict, k: int = 0, octaves: int = LSP_OCTAVES) -> dict:
        """The content of a store's target.json.

        settings  those that name the store: stores with different settings differ in content
        lineage   what else is kept about its origin
        k         entries of a distribution; 0 for ids and hidden states
        octaves   range of the stored weights, in octaves
        """
        return {
            "target": fingerprint(settings),
            "settings": settings,
            "lineage": lineage,
            "k": k,
            "vocab_size": max(self.tokenizer.get_vocab().values()) + 1,
            "max_length": self.config.max_length,
            "weight_octaves": octaves,
            "special_ids": self.special_ids,
        }

    def windows(self, unit: PlannedUnit) -> Iterator[Window]:
        """The windows of a planned unit."""
        if self.stored is not None:
            return self.stored.windows(unit)
        return planning.unit_windows(unit, self.sources[unit.source], self.tokenizer, self.special_ids, self.rules)

    def known_failures(self, unit: PlannedUnit) -> dict[int, str]:
        """The windows of a unit that cannot be coded, by their number in it, with the reason."""
        return {} if self.stored is None else self.stored.failures(unit)


def open_job(config: Any, progress: Callable[..., None]) -> Job:
    """The Job of a command that reads text with a teacher, or the store that --hidden names.

    Raises  ValueError, StoreError; as teacher_job
    """
    if config.hidden is None:
        return teacher_job(config, progress)
    refuse_foreign_output(config.output)
    stored = StoredHidden.open(config.hidden, config.device)
    store, config = stored.store, stored.settle(config)
    tokenizer = store.load_tokenizer()
    return Job(config, tokenizer, store.special_ids, store.plan.windowing, store.plan, {}, {}, progress, stored=stored)


def scan_corpus(config: CorpusConfig, tokenizer: "PreTrainedTokenizerFast", progress: Callable[..., None]) -> Job:
    """Scan the corpus of the settings; the plan of the last scan is reused if its files and settings are the same.

    Raises  CorpusError, StoreError
    """
    from pipeline.teacher import special_ids

    refuse_foreign_output(config.output)
    specials = special_ids(tokenizer)
    rules = planning.windowing(
        tokenizer_fingerprint(tokenizer),
        config.max_length,
        config.packing,
        whole_documents=not drops_white_space(tokenizer),
        held_out_by=config.held_out_by,
    )
    files = open_sources(config)
    stamps = {file.name: file.stamp() for file in files}
    settings = [getattr(config, field.name) for field in fields(CorpusConfig) if field.name != "output"]
    asked = fingerprint(rules), repr(settings), repr(stamps), repr([file.identity() for file in files])
    if asked not in _scanned:
        progress("scan", 0, None, unit="bytes")  # or the only line of a short scan would say how far it was
        sources: list[Source] = [*files]
        if config.held_out_by == "document":
            sources = join_small_files(files, config.unit_tokens * planning.BYTES_PER_TOKEN, progress)
        plan = planning.scan(
            sources,
            tokenizer,
            specials,
            rules,
            unit_tokens=config.unit_tokens,
            max_tokens=config.max_tokens,
            selection=Selection.of(config),
            progress=progress,
        )
        _scanned.clear()
        _scanned[asked] = sources, plan
    sources, plan = _scanned[asked]
    by_name = {source.name: source for source in sources}
    job = Job(config, tokenizer, specials, rules, plan, by_name, stamps, progress)
    job.check_sources()
    return job


def teacher_job(config: DictionaryConfig, progress: Callable[..., None]) -> Job:
    """The Job of a command with a teacher. What the teacher or this machine cannot do is refused before the scan."""
    from pipeline.teacher import (
        check_documents_apart,
        check_layers,
        check_max_length,
        check_position_means,
        load_tokenizer,
    )

    assert config.teacher is not None, "a config without vectors has taken the bundled one"
    check_layers(config.teacher, config.layer)
    if config.center == "position":
        check_position_means(config.teacher)
    if config.documents_apart:
        check_documents_apart(config.teacher)
    check_max_length(config.teacher, config.max_length)
    choose_device(config.device)  # refuses a device that does not exist
    return scan_corpus(config, load_tokenizer(config.teacher), progress)


def load_teacher(job: Job) -> "Teacher":
    """The teacher of the settings, cut after the deepest of their layers, or the store that replaces it.

    Raises  TeacherError, DeviceError
    """
    from pipeline.teacher import Teacher

    if job.stored is not None:
        return cast("Teacher", job.stored)  # it has a teacher's interface
    config = job.config
    job.progress("load teacher", 0, None)
    teacher = Teacher.load(config.teacher, max(config.layer), dtype=config.dtype, device=config.device)
    fit_teacher(job, teacher)
    return teacher


def fit_teacher(job: Job, teacher: "Teacher") -> None:
    """Choose the libraries of a teacher's matrix products, after a check that it can read the job's token ids.

    Raises  TeacherError
    """
    config = job.config
    teacher.check_tokenizer(job.tokenizer)
    teacher.choose_libraries(config.products, config.tokens_at_once(), config.max_length, job.libraries)


def open_executor(job: Job, teacher: "Teacher | None" = None) -> Executor:
    """The executor that the settings require, as a context manager.

    teacher  the job's teacher, if it is loaded already: workers use its libraries of matrix products
    Raises   ImportError if the work is for several processes and Dask is not installed
    """
    if teacher is not None:
        job = replace(job, libraries=teacher.libraries)
    if job.config.workers == 1 and job.config.scheduler is None:
        return Inline(job, teacher)
    from pipeline.dask_workers import WorkerPool  # takes half a second to import

    return WorkerPool(job)


def name_of_dtype(teacher: Any) -> str:
    """The name in settings of the precision that a teacher computes in."""
    return str(teacher.dtype).removeprefix("torch.")


def check_same_teacher(teacher: Any, fingerprint: str, dtype: str) -> None:
    """Raise EncodeError if the teacher or its precision is not the one that the work was planned for."""
    found = name_of_dtype(teacher)
    if (teacher.fingerprint, found) != (fingerprint, dtype):
        what = f"computes in {found}, not {dtype} as" if found != dtype else f"finds other files at {teacher.name} than"
        raise EncodeError(
            f"a worker {what} this command. Make the same files visible to all workers, and pass --dtype and --device."
        )


def named_by_content(parent: Path, name: str, content: str) -> Path:
    """`<parent>/<name>-<12 digits of content>`, or if there is none, a directory of another name with these digits.

    content  a fingerprint
    """
    usual = parent / f"{name}-{content[:12]}"
    return usual if usual.exists() else min(parent.glob(f"*-{content[:12]}"), default=usual)
