"""Encode each unit of the plan: read, run the teacher, code, write a shard into every store that lacks the unit.

    reports = encode(executor, stores, kind)

    read    the unit's windows -> blocks -> batches of one forward pass
    teach   batches -> hidden states, one pass of the teacher for all targets
    code    hidden states -> codes, one target after the other (targets/ says what each does)
    retry   batches at which one of these stages failed are tried again (failures.py)
    finish  codes -> the columns of blocks
    write   blocks -> a shard, which is committed at its end, in the caller's thread

A target is one store that is being written, for example for a layer and a dictionary. Each target gets, bit for bit,
what it would get if it were the only one. (One exception: if the teacher fails in a layer that is deeper than a
target's own, that target loses the window too.) The stages are generators, each over the items of the one before. They
run over all units without a pause in between. The table `LAYOUTS` says what runs at the same time:

- On a GPU, teacher and solver (or the vocabulary's head) have a thread and a stream each. Hidden states and codes
  stay on the device. A third stream turns codes into distributions, which go to the host.
- On a CPU, every kernel of teacher and solver uses all cores, so the two take turns in one thread. Only reading ahead
  and writing behind overlap with them, as these use one core or wait for the disk.

A document whose coding fails is quarantined: its windows keep their numbers but have no entries, and its unit's record
names it. If workers die twice at a unit, the unit is put aside until nothing else runs. Then ever smaller ranges of its
windows are tried, until the windows that kill a worker are found. The unit is encoded without them, and its record
names their documents. Not supported: several workers on one unit. Not handled here: threads and streams (overlap.py),
processes (executor.py).

Shapes: W windows, L window length, T tokens end to end, N coded tokens, d hidden width.
"""

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import tokenizers
import torch

from mlsm.common.device import environment
from mlsm.common.errors import EncodeError
from mlsm.common.progress import silent
from pipeline.batch import (
    UNIT_END,
    Block,
    Hidden,
    InputFormat,
    TeacherBatch,
    add_amounts,
    documents_of,
    make_batch,
)
from pipeline.config import TeacherConfig
from pipeline.corpus import Window
from pipeline.executor import KILLED, Context, Executor
from pipeline.failures import REASON, TOO_LITTLE_MEMORY, find_killers, retry
from pipeline.job import Job, check_same_teacher
from pipeline.overlap import Stages, open_stream
from pipeline.precision import PrecisionCheck
from pipeline.stores import OpenStore, TargetStore, likely_bytes, warn_of_disk
from pipeline.targets import CodedTarget, Target
from shards.manifest import PlannedUnit, UnitRecord, differing, fingerprint
from shards.schema import windows_per_block
from shards.writer import UnitWriter

# `output` is everywhere the number of a store, and of its target, among those that a command adds to.
Task: TypeAlias = tuple[PlannedUnit, Sequence[int]]  # a unit, and the outputs that need it
Records: TypeAlias = dict[int, UnitRecord]  # of one unit, by output
# How many items each stage may have ready for the next; 0 means that both share a thread.
LAYOUTS = {
    "cpu": {"read": 4, "teach": 0, "code": 0, "retry": 0, "finish": 2},
    "cuda": {"read": 4, "teach": 2, "code": 0, "retry": 2, "finish": 2},
}
logger = logging.getLogger(__name__)


def encode(executor: Executor, stores: Sequence[TargetStore], kind: type[Target]) -> list[dict]:
    """Encode every unit of the plan that a store lacks. Returns the stores' reports.

    kind    the class of the targets of all these stores
    Raises  CorpusError if the text gives no window
    """
    job, started = executor.job, time.perf_counter()
    tasks = [(unit, [i for i, store in enumerate(stores) if unit.id in store.wanted]) for unit in job.plan.units]
    tasks = [(unit, wanting) for unit, wanting in tasks if wanting]
    shares = [likely_bytes(store.target_json) * len(store.wanted) / len(job.plan.units) for store in stores]
    warn_of_disk(job.config.output, sum(shares) * job.expected_tokens)
    begun = {(unit.id, output): 0 for unit, wanting in tasks for output in wanting}  # tokens so far, by unit and store

    in_begun = 0  # the sum of these, which may be many

    def show(figures):
        done = sum(store.done for store in stores) + in_begun
        job.progress("encode", done // len(stores), job.expected_tokens, **figures)

    def note_block(unit_id, output, tokens, figures):
        nonlocal in_begun
        if tokens > (before := begun.get((unit_id, output), tokens)):  # a worker's report may come after its result
            begun[unit_id, output] = tokens
            in_begun += tokens - before
            show(figures)

    show({})
    paths = [store.files.path for store in stores]
    for unit, records, figures in encode_missing(executor, tasks, paths, kind, note_block):
        for output, record in records.items():
            stores[output].note(unit, record)
            in_begun -= begun.pop((unit.id, output))
        show(figures)
    if not any(store.done for store in stores):
        raise job.no_windows_error()
    return [store.report(time.perf_counter() - started) for store in stores]


def encode_missing(
    executor: Executor,
    tasks: Iterable[Task],
    stores: Sequence[Path],
    kind: type[Target],
    report: Callable[..., None] = silent,
) -> Iterator[tuple[PlannedUnit, Records, dict[str, float]]]:
    """Encode units, each for the stores that need it.

    stores  directories of the stores, valid in every process that encodes;  kind  see `encode`
    report  called as report(unit's id, output, its tokens so far, figures) after each block that is written
    Yields  a unit, its Records and its figures of merit, when a unit ends
    Raises  as encode_lsp
    """
    units, number_of = executor.job.plan.units, {unit.id: i for i, unit in enumerate(executor.job.plan.units)}
    encode, probe = (partial(each, stores=tuple(stores), kind=kind) for each in (encode_units, probe_windows))
    items: Iterator[tuple] = ((number_of[unit.id], tuple(outputs), {}) for unit, outputs in tasks)
    rescue = partial(_encode_without_killers, executor, encode, probe)
    for (unit_number, *_), found in executor.map_or_rescue(encode, items, rescue, report):
        yield units[unit_number], *found


def _encode_without_killers(executor, encode, probe, item):
    """Encode a unit without the windows that kill workers. Returns what `encode_units` yields.

    encode, probe  `encode_units` and `probe_windows` for the stores;  item  of `encode_units`, at which workers died
    """
    unit_number, outputs, _ = item
    where = executor.job.plan.text_of(executor.job.plan.units[unit_number])
    logger.info("workers died at %s: searching for the windows that crash them", where)
    windows = executor.apply(count_windows, (unit_number,))
    if windows is KILLED:
        raise EncodeError(
            f"workers crash when they read {where}, so none of it can be encoded. Remove it from the corpus. "
            f"{TOO_LITTLE_MEMORY}"
        )

    def survives(output, first, stop, trials):
        return executor.apply(probe, (unit_number, first, stop, output), trials) is not KILLED

    records: Records = {}
    for output in outputs:
        killers = find_killers(partial(survives, output), windows, executor.job.progress)
        found = executor.apply(encode, (unit_number, (output,), dict.fromkeys(killers, REASON)))
        if found is KILLED:
            raise EncodeError(
                f"workers crash at {where}, even without the {len(killers)} windows that crash one by themselves. "
                f"{TOO_LITTLE_MEMORY}"
            )
        of_output, figures = found  # those of the last output
        records |= of_output
    return records, figures


# -- one item of the work, in any process ------------------------------------------------------------------


def encode_units(
    context: Context,
    items: Iterable[tuple[int, Sequence[int], Mapping[int, str]]],
    *,
    stores: Sequence[Path],
    kind: type[Target],
) -> Generator[tuple[Records, dict[str, float]], None, None]:
    """Encode units for the stores that lack them.

    items   triples of a unit's number, the numbers of the stores that need it, and its windows that are known to fail
            with the reason
    stores  directories;  kind  see `encode`
    Yields  the Records of a unit and its figures of merit
    """
    items, units = list(items), context.job.plan.units
    if not items:
        return
    opened, coder = _open(context, stores, kind)
    # An item may be encoded already, by a worker that died before it reported this, or by another command.
    found = [
        {output: opened[output].finished(units[unit_number]) for output in outputs} for unit_number, outputs, _ in items
    ]
    lacking = [[output for output, record in records.items() if record is None] for records in found]
    figures: dict[str, float] = {}

    def note_block(block, writer):
        figures.update(_figures_of_merit(writer.statistics))
        context.report(writer.meta.unit, block.output, writer.tokens, dict(figures))

    written = write_units(
        [(units[unit_number], outputs) for (unit_number, *_), outputs in zip(items, lacking, strict=True) if outputs],
        context.windows,
        coder,
        context.job.config.max_length,
        lambda unit, output: opened[output].writer(unit, coder.environment),
        note_block,
        {
            units[unit_number].id: context.job.known_failures(units[unit_number]) | failed
            for unit_number, _, failed in items
        },
    )
    with closing(written):
        for outputs in lacking:
            records = found.pop(0)
            if outputs:
                records |= next(written)
            yield records, dict(figures)
            figures.clear()
        for _ in written:  # an error from closing a stage is raised at the end
            pass


def count_windows(context: Context, items: Iterable[tuple[int]]) -> Generator[int, None, None]:
    """How many windows a unit has; items are 1-tuples of the unit's number."""
    for (unit_number,) in items:
        yield sum(1 for _ in context.windows(context.job.plan.units[unit_number]))


def probe_windows(
    context: Context, items: Iterable[tuple[int, int, int, int]], *, stores: Sequence[Path], kind: type[Target]
) -> Generator[None, None, None]:
    """Code ranges of units' windows and drop the result, to test whether the process survives it.

    items   (number of a unit, first and stop of the range, number of the store that they are coded for)
    """
    for unit_number, first, stop, output in items:
        _, coder = _open(context, stores, kind)
        try:
            windows = list(islice(context.windows(context.job.plan.units[unit_number]), first, stop))
            found: Iterable[Any] = [[Block.of(windows, output)]] if windows else []
            for stage, _ in coder.stages():
                found = stage(found)
            for _ in found:
                pass
        except Exception:
            logger.debug("raises, and so does not kill", exc_info=True)
        yield None


def _open(context, stores, kind):
    """OpenStores of the directories and the coder for them, kept for the next item."""
    return context.keep("coder", partial(open_coder, context, stores, kind), (stores, kind))


def open_coder(
    context: Context, stores: Sequence[Path], kind: type[Target]
) -> "tuple[list[OpenStore], Coder | IdsCoder]":
    """OpenStores of the directories, and a coder with a target for each, in any process that encodes.

    Raises  EncodeError when the stores were made with another teacher or other settings; StoreError when a store holds
            another dictionary or codebook than its target names
    """
    job, opened = context.job, [OpenStore(context.job, path) for path in stores]
    teacher = context.keep("teacher", partial(kind.load_teacher, job))
    targets: list[Any] = []
    for store in opened:
        found = store.target_json["settings"]
        if teacher is not None:
            check_same_teacher(teacher, found["teacher"], found["dtype"])
        targets.append(kind.open(job, teacher, store.files, found))
        _, target_json = targets[-1].describe_store(job)
        given = target_json["settings"]
        if fingerprint(given) != fingerprint(found):
            raise EncodeError(
                f"{store.files.path} was made with other settings than those of this command: "
                f"{differing(found, given)}. Use the settings of the store, or another --output."
            )
    return opened, make_coder(teacher, targets, job)


def _figures_of_merit(statistics):
    """The figures next to the progress bar, from the sums of the unit being encoded."""
    coded = statistics.get("coded_tokens")
    if not coded:
        return {}
    if "entries" not in statistics:
        return {"cosine": statistics["cosine"] / coded}
    return {"nnz": statistics["entries"] / coded, "mass_kept": statistics["kept_mass"] / coded}


# -- read, code, write -------------------------------------------------------------------------------------


def write_units(
    tasks: Iterable[Task],
    windows_of: Callable[[PlannedUnit], Iterator[Window]],
    coder: "Coder | IdsCoder",
    max_length: int,
    open_writer: Callable[[PlannedUnit, int], AbstractContextManager[UnitWriter]],
    after_block: Callable[[Block, UnitWriter], None] = silent,
    failed: Mapping[str, Mapping[int, str]] | None = None,
) -> Generator[Records, None, None]:
    """Read, code and write units in overlapping stages; the bytes do not depend on what overlaps.

    windows_of   function from a unit to its windows
    open_writer  function from a unit and the number of a target to a context manager that gives a UnitWriter and
                 commits at its end
    after_block  called with each Block and its UnitWriter once it is written
    failed       by the id of a unit: its windows that are known to fail, with the reason
    Yields       the Records of each unit once it is committed
    Raises       what any of these raises, as it is; the units before it are committed
    """
    with Stages() as stages:
        items = _read_blocks(tasks, windows_of, max_length, failed or {})
        for stage, depth in coder.stages():
            items = stages.ahead(stage(items), depth)
        for unit, outputs in tasks:
            with ExitStack() as commits:
                writers = {output: commits.enter_context(open_writer(unit, output)) for output in outputs}
                for block in _blocks_of_unit(items):
                    writer = writers[block.output]
                    _note_failed(writer.quarantined, block, unit, writer.windows)
                    writer.write_block(**block.columns)
                    block.add_to(writer.statistics, writer.environment, writer.sums)
                    after_block(block, writer)
            yield {output: writer.record for output, writer in writers.items()}


def _read_blocks(tasks, windows_of, max_length, failed):
    """Lists of Blocks with only ids, one Block per target, and UNIT_END after the lists of each unit."""
    for unit, outputs in tasks:
        windows, first, known = windows_of(unit), 0, failed.get(unit.id, {})
        while chunk := list(islice(windows, windows_per_block(max_length))):
            stop = first + len(chunk)
            here = {window - first: reason for window, reason in known.items() if first <= window < stop}
            yield [Block.of(chunk, output, here) for output in outputs]
            first = stop
        yield UNIT_END


def _blocks_of_unit(items):
    for item in items:
        if item is UNIT_END:
            return
        yield item
    raise AssertionError("the stages ended inside a unit")  # an incomplete unit must not be committed


def _note_failed(quarantined, block, unit, first_window):
    """Record the documents in the failed windows, each once per unit."""
    known = {entry["record"]: entry for entry in quarantined}
    begins = np.cumsum(block.columns["lengths"]) - block.columns["lengths"]
    windows = np.searchsorted(begins, block.columns["run_starts"], side="right") - 1
    for window, reason in sorted(block.failed.items()):
        for record_in_unit in block.columns["run_records"][windows == window]:
            record = unit.start + int(record_in_unit)
            if record not in known:
                known[record] = {"record": record, "source": unit.source, "windows": [], "reason": reason}
                quarantined.append(known[record])
            known[record]["windows"].append(first_window + window)


def make_coder(teacher: Any, targets: Sequence[Any], job: Job) -> "Coder | IdsCoder":
    """The coder for targets of one class. Blocks refer to targets by number."""
    return IdsCoder() if teacher is None else Coder(teacher, targets, job.config, job.special_ids)


class IdsCoder:
    """A coder that leaves blocks with only their ids."""

    most_windows = 1

    def __init__(self) -> None:
        self.environment = {"tokenizers": tokenizers.__version__}

    def room_for(self, windows: int, most: int) -> int:
        return windows

    def stages(self) -> tuple:
        return ((lambda items: (item if item is UNIT_END else item[0] for item in items), 2),)


class Coder:
    """Read, teach, code, retry and finish: the stages from blocks of ids to blocks with the columns of a target.

    targets       blocks refer to them by number; none has a deeper layer than the last one of the teacher
    most_windows  most windows of a forward pass; lowered when the device has too little memory

    It serves one chain of stages at a time. If a stage meets an error, it marks the batch with it and continues;
    `retry` handles it. Windows that are known to fail from the start never reach the teacher.
    """

    def __init__(self, teacher: Any, targets: Sequence[CodedTarget], config: TeacherConfig, special_ids: dict):
        self.teacher, self.targets, self.config, self.special_ids = teacher, targets, config, special_ids
        self._form = InputFormat.of(config, teacher)
        self._on_gpu = teacher.device.type == "cuda"
        import numba  # only here: encode-ids works without it

        versions = {"tokenizers": tokenizers.__version__, "numba": numba.__version__}
        self.environment = environment(teacher.device) | versions
        if teacher.libraries:
            self.environment["products"] = dict(teacher.libraries)
        for target in targets:
            target.prepare()
            self.environment |= target.environment
        self._streams = {stage: open_stream(teacher.device) for stage in ("teach", "code", "finish")}
        self._teaching, self._coding = threading.Lock(), threading.Lock()  # `retry` does both in its own thread
        self.most_windows = config.windows_at_once(teacher.device.type)
        self._comparison = PrecisionCheck(self)

    def stages(self) -> tuple:
        """Pairs of a stage and the number of items that it may have ready; the first takes lists of blocks with ids."""
        ready = LAYOUTS[self.teacher.device.type]
        return (
            (self.read, ready["read"]),
            (self.teach, ready["teach"]),
            (self.code, ready["code"]),
            (self.retry, ready["retry"]),
            (self.finish, ready["finish"]),
        )

    # -- read ----------------------------------------------------------------------------------------------

    def read(self, items: Iterable) -> Iterator:
        """Turn lists of blocks of one text (one per target) into batches for all targets."""
        begins_unit = True
        for blocks in items:
            if blocks is UNIT_END:
                yield blocks
                begins_unit = True
                continue
            size, windows = self.most_windows, len(blocks[0].columns["lengths"])
            for block in blocks:
                block.batches = -(-windows // size)
            for start in range(0, windows, size):
                stop = min(start + size, windows)
                compared, begins_unit = self._comparison.wanted and begins_unit, False
                yield self.cut(blocks, start, stop, self.room_for(stop - start, size), compared)

    def room_for(self, windows: int, most: int) -> int:
        """How many windows a forward pass has for the last windows of a block: on a CPU as few as halving `most`
        gives, because small units would otherwise take as long as large ones.

        Nothing else decides, as passes of another shape may round otherwise. On a GPU all passes have one shape, so
        that a lack of memory says something about all of them.
        """
        while not self._on_gpu and windows <= most // 2:
            most //= 2
        return most

    def cut(self, blocks: list[Block], start: int, stop: int, size: int, compared: bool) -> TeacherBatch:
        """The batch of the windows from `start` to `stop` of blocks of one text, filled up to `size` windows, without
        those that are known to fail."""
        columns, number_W = blocks[0].columns, blocks[0].number_W
        ends_W = np.cumsum(columns["lengths"])
        tokens = slice(ends_W[start] - columns["lengths"][start], ends_W[stop - 1])
        documents_t = documents_of(columns)[tokens] if self._form.documents_apart else None
        batch = make_batch(
            columns["ids"][tokens],
            columns["lengths"][start:stop],
            size,
            self.config.max_length,
            self.special_ids,
            self._on_gpu,
            documents_t,
            self._form.segments,
        )
        batch.blocks, batch.first, batch.compared = blocks, start, compared
        if number_W is not None:
            batch.rows_Nd = self.teacher.read(batch, number_W[start:stop])
        return batch.without_known_failures()

    # -- teach ---------------------------------------------------------------------------------------------

    def teach(self, batches: Iterable) -> Iterator:
        """Turn batches into one per block, with its hidden states or the error that the teacher raised.

        A batch with more than `most_windows` windows, which may have been lowered since, is passed on with neither.
        """
        for batch in batches:
            if batch is UNIT_END:
                yield batch
                continue
            alone = [replace(batch, blocks=[block], marks={}, sharing=len(batch.blocks)) for block in batch.blocks]
            try:
                if not batch.idle and len(batch.ids_WL) <= self.most_windows:
                    self._teach(alone)
            except Exception as error:
                for one in alone:
                    one.error = error
            while alone:
                yield alone.pop(0)

    def _teach(self, batches):
        """Set the hidden states of batches of the same windows, each for another target."""
        with self._teaching, self._streams["teach"] as stream:
            begin = stream.mark()
            found = self.states(self.teacher, batches[0], [batch.block.output for batch in batches])
            end = stream.mark()
        for batch, hidden in zip(batches, found, strict=True):
            batch.hidden, batch.marks["teacher"] = hidden, (begin, end)

    def states(self, teacher: Any, batch: TeacherBatch, numbers: Sequence[int]) -> list[Hidden]:
        """The hidden states of a batch's coded tokens for the targets with these numbers, from one pass."""
        targets = [self.targets[number] for number in numbers]
        return targets[0].states(teacher, batch, targets)

    # -- code ---------------------------------------------------------------------------------------------

    def code(self, batches: Iterable) -> Iterator:
        """Batches with their codes, without the hidden states, or with the error that the target met."""
        for batch in batches:
            if batch is not UNIT_END and batch.hidden is not None:
                try:
                    self._code(batch)
                except Exception as error:
                    batch.error = error
            yield batch

    @torch.inference_mode()
    def _code(self, batch):
        target = self.targets[batch.block.output]
        hidden, batch.hidden = batch.hidden, None
        with self._coding, self._streams["code"] as stream:
            stream.after(batch.marks["teacher"][1], hidden.rows_Nd, hidden.not_finite)
            hidden.check(self.teacher)  # waits for the teacher, but the teacher's thread continues
            begin = stream.mark()
            batch.codes = target.code(hidden.rows_Nd)
            batch.marks[target.work] = begin, stream.mark()
        return batch

    # -- retry ----------------------------------------------------------------------------------------------

    def retry(self, batches: Iterable) -> Iterator:
        """Batches with their codes, after handling failures (failures.py). A unit's first is compared with float32."""
        for batch in retry(self, batches):
            if batch is not UNIT_END and batch.compared:
                self._comparison.compare(batch)
            yield batch

    def code_again(self, batch: TeacherBatch) -> TeacherBatch:
        """The batch with its codes, from a separate pass of the teacher."""
        batch.sharing = 1
        self._teach([batch])
        return self._code(batch)

    @contextmanager
    def alone_on_device(self) -> Iterator[None]:
        """Lock teacher and solver for this thread, for work on the solver's stream."""
        with self._teaching, self._coding, self._streams["code"]:
            yield

    # -- finish --------------------------------------------------------------------------------------------

    def finish(self, batches: Iterable) -> Iterator:
        """Blocks with all their columns, each yielded after its last batch."""
        for batch in batches:
            if batch is UNIT_END:
                yield batch
                continue
            block = batch.block
            block.parts.append(self._finish(batch))
            if len(block.parts) == block.batches:
                names = {name: None for part in block.parts for name in part}
                for name in names:  # a part without entries may lack some
                    block.columns[name] = np.concatenate([part[name] for part in block.parts if name in part])
                yield block

    def _finish(self, batch):
        target = self.targets[batch.block.output]
        if batch.codes is None:  # none of its windows can be coded
            return target.columns(None, batch)
        with self._streams["finish"] as stream:
            stream.after(batch.marks[target.work][1], *target.tensors(batch.codes))
            seconds = {name: stream.seconds(*marks) for name, marks in batch.marks.items()}
            clock = time.perf_counter()
            columns = target.columns(batch.codes, batch)
            seconds["distributions"] = time.perf_counter() - clock
        seconds["teacher"] /= batch.sharing
        add_amounts(batch.block.seconds, {f"{name}_seconds": amount for name, amount in seconds.items()})
        return columns
