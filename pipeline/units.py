"""One unit of the plan becomes one committed shard of every store that lacks the unit.

    for unit, counts, figures in encode_missing(executor, tasks, stores, kind): ...

Reading and coding run in stages ahead of the writing (coding/coder.py says which beside which), over all units without
a pause between two; writing stays in the caller's thread. A document whose coding fails is quarantined: its windows
keep their numbers but carry no entries, and its unit's record names it.

A unit at which workers die twice is put aside until nothing else runs. Then ever smaller ranges of its windows are
probed, until the windows that kill a worker are alone; the unit is encoded without them, and its record names their
documents. Left out: one unit on several workers; what is coded (kinds.py); who does it (executors/).
"""

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np

from common.errors import EncodeError
from common.progress import silent
from pipeline.coding.batch import UNIT_END, Block
from pipeline.coding.coder import IdsCoder, TeacherCoder
from pipeline.coding.stages import Stages
from pipeline.corpus import Window
from pipeline.executors.base import KILLED, Context, Executor
from pipeline.executors.killers import REASON, TOO_LITTLE_MEMORY, find_killers
from pipeline.stores import OpenStore
from shards.manifest import PlannedUnit, UnitRecord
from shards.schema import windows_per_block
from shards.writer import UnitWriter

Task: TypeAlias = tuple[PlannedUnit, Sequence[int]]  # a unit, and the numbers of the stores that want it
Counts: TypeAlias = dict[int, tuple[int, Sequence[dict]]]  # by a store's number: tokens and quarantined documents
logger = logging.getLogger(__name__)


class OpensCoders(Protocol):
    """What is asked here of a Kind of kinds.py."""

    def open_coder(self, context: Context, stores: list[OpenStore]) -> IdsCoder | TeacherCoder: ...


def encode_missing(
    executor: Executor,
    tasks: Iterable[Task],
    stores: Sequence[Path],
    kind: OpensCoders,
    report: Callable[..., None] = silent,
) -> Iterator[tuple[PlannedUnit, Counts, dict[str, float]]]:
    """Encode units, each for the stores that want it.

    stores  directories of the stores, as every process that encodes sees them;  kind  theirs, of kinds.py
    report  called as report(output, tokens, figures) after each block that is written in this process
    Yields  a unit, its Counts and its figures of merit, as units end
    Raises  as encode_lsp
    """
    units, number_of = executor.job.plan.units, {unit.id: i for i, unit in enumerate(executor.job.plan.units)}
    encode = partial(encode_units, stores=tuple(stores), kind=kind)
    items: Iterator[tuple] = ((number_of[unit.id], tuple(outputs), {}) for unit, outputs in tasks)
    suspects = []
    with closing(executor.map(encode, items, report=report)) as results:
        for item, result in results:
            if result is KILLED:
                suspects.append(item)
            else:
                yield units[item[0]], *result
    for number, outputs, _ in suspects:
        for output in outputs:
            yield units[number], *_encode_without_killers(executor, number, output, tuple(stores), kind)


def _encode_without_killers(executor, number, output, stores, kind):
    """Encode a unit for one store without the windows that kill workers. Returns what `encode_units` yields."""
    unit = executor.job.plan.units[number]
    where = f"records {unit.start} to {unit.stop - 1} of {unit.source}"
    logger.info("workers died at %s: looking for the windows that kill them", where)
    ((_, windows),) = executor.map(count_windows, [(number,)])
    if windows is KILLED:
        raise EncodeError(f"workers die when they read {where}: nothing of it can be encoded. Leave it out.")
    probe = partial(probe_windows, stores=stores, kind=kind)
    killers = find_killers(
        lambda first, stop, trials: executor.survives(probe, (number, first, stop, output), trials),
        windows,
        executor.job.progress,
    )
    encode = partial(encode_units, stores=stores, kind=kind)
    ((_, result),) = executor.map(encode, [(number, (output,), dict.fromkeys(killers, REASON))])
    if result is KILLED:
        raise EncodeError(
            f"workers die at {where}, also without the {len(killers)} windows that kill one alone. {TOO_LITTLE_MEMORY}"
        )
    return result


# -- functions for executors -------------------------------------------------------------------------------


def encode_units(
    context: Context,
    items: Iterable[tuple[int, Sequence[int], Mapping[int, str]]],
    *,
    stores: Sequence[Path],
    kind: OpensCoders,
) -> Generator[tuple[Counts, dict[str, float]], None, None]:
    """Encode what stores still lack of units.

    items   triples of a unit's number, the numbers of the stores that want it, and its windows that are known to fail
            with the reason
    stores  directories;  kind  of kinds.py
    Yields  the Counts of a unit and its figures of merit
    """
    items, units = list(items), context.job.plan.units
    if not items:
        return
    opened, coder = _open(context, stores, kind)
    # An item may have been encoded before: by a worker that died before it could say so, or by another command.
    found = [{output: opened[output].finished(units[number]) for output in outputs} for number, outputs, _ in items]
    lacking = [[output for output, record in records.items() if record is None] for records in found]
    figures: dict[str, float] = {}

    def note_block(block, writer):
        figures.update(_figures_of_merit(writer.statistics))
        context.report(block.output, block.tokens, _figures_of_merit(writer.statistics))

    written = write_units(
        [(units[number], outputs) for (number, *_), outputs in zip(items, lacking, strict=True) if outputs],
        partial(read_windows, context),
        coder,
        context.job.config.max_length,
        lambda unit, output: opened[output].writer(unit, coder.environment),
        note_block,
        {units[number].id: context.job.known_failures(units[number]) | failed for number, _, failed in items},
    )
    with closing(written):
        for outputs in lacking:
            records = found.pop(0)
            if outputs:
                records |= next(written)
            yield {output: (record.tokens, record.quarantined) for output, record in records.items()}, dict(figures)
            figures.clear()
        for _ in written:  # what a stage raises while it is closed comes at the end
            pass


def count_windows(context: Context, items: Iterable[tuple[int]]) -> Generator[int, None, None]:
    """How many windows a unit has; items are tuples of its number."""
    for (number,) in items:
        yield len(_keep_windows(context, number))


def probe_windows(
    context: Context, items: Iterable[tuple[int, int, int, int]], *, stores: Sequence[Path], kind: OpensCoders
) -> Generator[None, None, None]:
    """Code ranges of units' windows and keep nothing: all that matters is whether this process survives it.

    items   (number of a unit, first and stop of the range, number of the store that they are coded for)
    """
    for number, first, stop, output in items:
        _, coder = _open(context, stores, kind)
        try:
            windows = _keep_windows(context, number)[first:stop]
            found: Iterable[Any] = [[Block.of(windows, output)]] if windows else []
            for _, stage in coder.stages():
                found = stage(found)
            for _ in found:
                pass
        except Exception:
            logger.debug("raises, and so does not kill", exc_info=True)
        yield None


def _open(context, stores, kind):
    """OpenStores of the directories and their coder, kept for the next item."""

    def make():
        opened = [OpenStore(context.job, path) for path in stores]
        return opened, kind.open_coder(context, opened)

    return context.keep("coder", make, (stores, kind))


def _keep_windows(context, number):
    """List of a unit's windows, kept until another unit's are asked for."""
    unit = context.job.plan.units[number]
    return context.keep("windows", lambda: list(read_windows(context, unit)), unit.id)


def read_windows(context: Context, unit: PlannedUnit) -> Iterator[Window]:
    """The windows of a unit, as long as somebody waits for what becomes of them."""
    for window in context.job.windows(unit):
        context.check_wanted()
        yield window


def _figures_of_merit(statistics):
    """The figures beside the progress bar, from the sums of the unit in flight."""
    coded = statistics.get("coded_tokens")
    if not coded:
        return {}
    if "entries" not in statistics:
        return {"cosine": statistics["cosine"] / coded}
    return {"nnz": statistics["entries"] / coded, "mass_kept": statistics["kept_mass"] / coded}


# -- reading, coding, writing ------------------------------------------------------------------------------


def write_units(
    tasks: Iterable[Task],
    windows_of: Callable[[PlannedUnit], Iterator[Window]],
    coder: IdsCoder | TeacherCoder,
    max_length: int,
    open_writer: Callable[[PlannedUnit, int], AbstractContextManager[UnitWriter]],
    after_block: Callable[[Block, UnitWriter], None] = silent,
    failed: Mapping[str, Mapping[int, str]] | None = None,
) -> Generator[dict[int, UnitRecord], None, None]:
    """Read, code and write units in overlapping stages; the bytes do not depend on what overlaps.

    windows_of   function from a unit to its windows
    open_writer  function from a unit and an output to a context manager that gives a UnitWriter and commits at its end
    after_block  called with each Block and its UnitWriter once it is written
    failed       by the id of a unit: its windows that are known to fail, with the reason
    Yields       for each unit once it is committed, a dict of its outputs to their records
    Raises       what any of these raises, as it is; the units before it are committed
    """
    with Stages() as stages:
        items = _read_blocks(tasks, windows_of, max_length, failed or {})
        for name, stage in coder.stages():
            items = stages.ahead(stage(items), coder.layout[name])
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
    """Lists of Blocks with the ids alone, one for every output, and UNIT_END after those of each unit."""
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
    raise AssertionError("the stages ended inside a unit")  # it must not be committed


def _note_failed(quarantined, block, unit, first_window):
    """Name the documents in the windows that failed, each once in a unit."""
    known = {entry["record"]: entry for entry in quarantined}
    begins = np.cumsum(block.columns["lengths"]) - block.columns["lengths"]
    windows = np.searchsorted(begins, block.columns["run_starts"], side="right") - 1
    for window, reason in sorted(block.failed.items()):
        for record in block.columns["run_records"][windows == window]:
            number = unit.start + int(record)
            if number not in known:
                known[number] = {"record": number, "source": unit.source, "windows": [], "reason": reason}
                quarantined.append(known[number])
            known[number]["windows"].append(first_window + window)
