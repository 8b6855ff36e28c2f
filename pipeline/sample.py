"""The sample that dictionaries and codebooks are learned from: hidden states of training windows, chosen by a hash.

    hidden_Nd, ... = sample_hidden(executor, teacher, places)

Windows at which the teacher fails or a worker dies are skipped. Not handled here: which dictionaries are learned
(learn.py), the learning (dictionary/).

Shapes: N vectors of the sample, n of a part of it, d hidden width.
"""

import logging
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from heapq import heappush, heapreplace, nsmallest
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mlsm.common import disk
from mlsm.common.durable import explain_link
from mlsm.common.errors import EncodeError, describe
from pipeline.batch import InputFormat, hidden_rows
from pipeline.corpus import Window
from pipeline.dictionary.centering import HiddenSums
from pipeline.dictionary.vectors import held_out_of
from pipeline.executor import KILLED, PART, Context, Executor, unpack
from pipeline.failures import REASON, SOME_WINDOWS, TOO_LITTLE_MEMORY, find_killers, isolate, may_be_the_texts_fault
from pipeline.files import growing_rows
from pipeline.job import Job, check_same_teacher, load_teacher, name_of_dtype
from shards.counter import hash_u64
from shards.manifest import Plan

if TYPE_CHECKING:
    from pipeline.teacher import Teacher

SAMPLE, RAW_SAMPLE = "sample.npy", "raw.npy"
ROWS_AT_ONCE = 65_536
LARGEST_SHARE = 0.25  # of all length that one hundredth of the tokens may have before --center warns
logger = logging.getLogger(__name__)


def sample_hidden(
    executor: Executor, teacher: "Teacher", places: Sequence[tuple[int, Path]], k: int = 0
) -> list[np.ndarray]:
    """Unit-length hidden states of a uniform sample of training windows: one float16 (N, d) map for every place.

    The rows are written to sample.npy in each place batch by batch. The file appears when it is complete, and an
    existing file is used. Places of one layer share its file. With --center, the teacher's raw hidden states go to
    raw.npy first, in float32 and with their positions. Then the means are computed, and sample.npy and center.npy made.

    places  pairs (layer, directory)
    k       the most atoms that are learned from a sample, which must have more vectors
    """
    job = executor.job
    centred = job.config.center != "none"
    place_of = dict(places) | {layer: place for layer, place in places if (place / SAMPLE).is_file()}
    first = RAW_SAMPLE if centred else SAMPLE
    new = {
        layer: place / first
        for layer, place in place_of.items()
        if not (place / SAMPLE).is_file() and not (place / first).is_file()
    }
    if new:
        _write_samples(new, executor, teacher, k)
    for place in place_of.values():
        if not (place / SAMPLE).is_file():
            job.progress("centre", 0, None)
            _center_sample(place, job.config.center)
    names = ("center.npy", "center.json", SAMPLE) if centred else (SAMPLE,)  # SAMPLE last: then all are there
    for layer, place in places:
        for name in names:
            if not (place / name).is_file():
                try:
                    (place / name).hardlink_to(place_of[layer] / name)
                except OSError as error:
                    raise explain_link(error, place / name) from error
    return [np.load(place / SAMPLE, mmap_mode="r") for _, place in places]


def _center_sample(place, kind):
    """Make center.npy, center.json and, last, sample.npy from the raw.npy of a place."""
    raw_N = np.load(place / RAW_SAMPLE, mmap_mode="r")
    shape, starts = raw_N["row"].shape, range(0, len(raw_N), ROWS_AT_ONCE)
    sums, lengths = HiddenSums(shape[1]), []
    for start in starts:
        rows_n = raw_N[start : start + ROWS_AT_ONCE]
        sums.add(rows_n["position"], rows_n["row"])
        lengths.append(np.linalg.norm(rows_n["row"], axis=1))
    length_N = np.sort(np.concatenate(lengths))
    if (share := length_N[int(0.99 * len(length_N)) :].sum() / length_N.sum()) > LARGEST_SHARE:
        logger.warning(
            "the longest hidden states, one hundredth of all, make up %.0f %% of the summed length, so the mean that "
            "--center subtracts is mostly theirs. Without --center their length does not count",
            100 * share,
        )
    center = sums.center(kind)
    center.save(place)
    with growing_rows(place / SAMPLE, shape, np.float16) as add:
        for start in starts:
            rows_n = raw_N[start : start + ROWS_AT_ONCE]
            rows_nd = center.subtract_from(rows_n["row"], rows_n["position"])
            add(rows_nd / np.maximum(np.linalg.norm(rows_nd, axis=1, keepdims=True), 1e-12))
    disk.unlink(place / RAW_SAMPLE)


def sample_dtype(job: Job, teacher: "Teacher") -> np.dtype:
    """The type of a sample's rows: with --center a raw hidden state and its position."""
    if job.config.center == "none":
        return np.dtype((np.float16, (teacher.hidden_size,)))
    return np.dtype([("position", "<i4"), ("row", "<f4", (teacher.hidden_size,))])


def check_enough(k: int, vectors: int) -> None:
    """Raise EncodeError if a sample has too few vectors for k atoms, after some are set aside for evaluation."""
    if not vectors:
        raise EncodeError(
            "no token of the sample has a hidden state: the teacher's tokenizer knows none of the text's words. Use a "
            "teacher that knows its script, or other text."
        )
    training = vectors - held_out_of(vectors)
    if training < k:
        raise EncodeError(
            f"--k {k} atoms need at least {k:,} vectors to learn from, but of the sample's {vectors:,} only "
            f"{training:,} are left after {vectors - training:,} are set aside for evaluation. Use a smaller --k, or "
            "more text; or more --dictionary-tokens if the text has more."
        )


class WindowSample:
    """Collects the windows of a plan with the smallest hashes. They follow only from the plan and the seed, in whatever
    order units are added. Only the sample is in memory.

    tokens  coded tokens that the sample should have
    most    windows that are collected
    """

    def __init__(self, plan: Plan, tokens: int):
        self._tokens = tokens
        self._heap: list[tuple[int, tuple[str, int], Window]] = []  # (-hash, place, window): largest hash first
        least = plan.windowing["max_length"] // (16 if plan.windowing["packing"] == "pairs" else 2)
        self.most = -(-tokens // max(1, least))  # windows: enough for windows of `least` tokens on average

    @property
    def bound(self) -> int:
        """Only windows with a hash below this bound can be in the sample."""
        return -self._heap[0][0] if len(self._heap) == self.most else 2**64

    def add(self, found: Iterable[tuple[int, tuple[str, int], Window]]) -> None:
        """Add triples from `find_candidates`."""
        for value, place, window in found:
            if len(self._heap) < self.most:
                heappush(self._heap, (-value, place, window))
            elif value < self.bound:
                heapreplace(self._heap, (-value, place, window))

    def windows(self) -> list[Window]:
        """The windows with the smallest hashes that together have enough tokens, in the order of their hashes."""
        chosen, total = [], 0
        for _, _, window in sorted(self._heap, reverse=True):
            if total >= self._tokens:
                break
            chosen.append(window)
            total += len(window.ids) - 2
        return chosen


def sample_windows(executor: Executor, tokens: int, seed: int) -> list[Window]:
    """A uniform sample of training windows that holds at least `tokens` tokens, if the plan has them.

    [SEP] and [UNK] within a window are counted, although they have no code. The windows are in the order of their hash.
    """
    job = executor.job
    sample = WindowSample(job.plan, tokens)
    training = [number for number, unit in enumerate(job.plan.units) if unit.split == "train"]
    find = partial(find_candidates, seed=seed, most=sample.most)

    def try_again(item):  # by itself, as another item may have killed the worker
        found = executor.apply(find, item)
        if found is KILLED:
            text = job.plan.text_of(job.plan.units[item[0]])
            raise EncodeError(f"workers crash when they read {text}. Remove it from the corpus. {TOO_LITTLE_MEMORY}")
        return found

    job.progress("choose", 0, len(training), unit="units")
    items = ((number, sample.bound) for number in training)
    with closing(executor.map_or_rescue(find, items, try_again)) as results:
        for done, (_, found) in enumerate(results, start=1):
            sample.add(found)
            job.progress("choose", done, len(training), unit="units")
    return sample.windows()


def _write_samples(path_of, executor, teacher, k):
    """Choose the windows of the sample, and write it for every layer in one pass of the teacher."""
    job, config, layers = executor.job, executor.job.config, tuple(path_of)
    windows = sample_windows(executor, config.dictionary_tokens, config.seed)
    job.check_sources()
    if not windows:
        raise job.no_windows_error()
    special = job.special_ids["all"]
    count = min(config.dictionary_tokens, sum(int((~np.isin(window.ids, special)).sum()) for window in windows))
    check_enough(k, count)
    batch, dtype = config.windows_at_once(), sample_dtype(job, teacher)
    batches = [windows[i : i + batch] for i in range(0, len(windows), batch)]
    with ExitStack() as files:
        shape = (count, *dtype.shape)
        add = {layer: files.enter_context(growing_rows(path, shape, dtype.base)) for layer, path in path_of.items()}
        done = dict.fromkeys(path_of, 0)
        place = next(iter(path_of.values())).parent
        job.progress("sample", 0, count)
        for rows in files.enter_context(closing(_read_hidden(executor, teacher, batches, layers, place))):
            for layer, rows_nd in zip(layers, rows, strict=True):
                rows_nd = rows_nd[: count - done[layer]]
                done[layer] += len(rows_nd)
                add[layer](rows_nd)
            job.progress("sample", max(done.values()), count)


def _read_hidden(executor, teacher, batches, layers, place):
    """Hidden states of batches of windows, in order.

    teacher  the teacher of this process; all processes must have the same one
    place    directory for the files of other processes, which are removed at the end
    Yields   lists of rows as the sample holds them (sample_dtype), one for a layer
    """
    expected = teacher.fingerprint, name_of_dtype(teacher)
    starts = range(0, len(batches), executor.batches_at_once)
    items = [(number, batches[i : i + executor.batches_at_once]) for number, i in enumerate(starts)]
    read = partial(read_hidden, layers=layers, place=place, expected=expected)
    ready, wanted = {}, 0

    def leave_out_killers(item):
        number, batches = item
        packed = executor.apply(read, (number, [_leave_out_killers(executor, windows, layers) for windows in batches]))
        if packed is KILLED:
            raise EncodeError(f"workers crash at the dictionary's sample. {TOO_LITTLE_MEMORY}")
        return packed

    try:
        for (number, _), packed in executor.map_or_rescue(read, items, leave_out_killers):
            ready[number] = packed
            while wanted in ready:
                yield [unpack(rows) for rows in ready.pop(wanted)]
                wanted += 1
    finally:
        for path in place.glob(f"*{PART}*"):
            with suppress(FileNotFoundError):
                disk.unlink(path)


def _leave_out_killers(executor, windows, layers):
    """The windows without those at which workers die."""
    probe = partial(probe_hidden, layers=layers)

    def survives(first, stop, trials):
        return executor.apply(probe, (windows[first:stop],), trials) is not KILLED

    killers = find_killers(survives, len(windows), executor.job.progress)
    for _ in killers:
        logger.warning("a window is left out of the dictionary's sample: %s", REASON)
    return [window for number, window in enumerate(windows) if number not in killers]


# -- functions for executors -------------------------------------------------------------------------------


def find_candidates(
    context: Context, items: Iterable[tuple[int, int]], *, seed: int, most: int
) -> Generator[list[tuple[int, tuple[str, int], Window]], None, None]:
    """Windows of units for the sample; items are (number of a unit, bound).

    most    windows in the sample. No unit can have more in it, though it may be a document of many gigabytes
    Yields  the unit's windows with the smallest hashes, if below the bound: triples (hash, (unit's id, number in the
            unit), window). The hash is counter-based, of (seed, unit, number)
    """
    for unit_number, bound in items:
        unit = context.job.plan.units[unit_number]
        hashed = (
            (int(hash_u64(seed, int(unit.id[:16], 16), number)), (unit.id, number), window)
            for number, window in enumerate(context.windows(unit))
        )
        yield nsmallest(most, (found for found in hashed if found[0] < bound))


def read_hidden(
    context: Context,
    items: Iterable[tuple[int, list[list[Window]]]],
    *,
    layers: Sequence[int],
    place: Path,
    expected: tuple[str, str],
) -> Generator[list[np.ndarray | Path], None, None]:
    """The hidden states of some batches, as the sample holds them.

    items     pairs (number, list of batches, which are lists of windows)
    expected  fingerprint and precision of the driver's teacher
    Yields    lists of rows, packed, one for a layer
    """
    job = context.job
    teacher = context.keep("teacher", partial(load_teacher, job))
    check_same_teacher(teacher, *expected)
    dtype = sample_dtype(job, teacher).base
    for _, batches in items:
        rows = [read_batch(job, teacher, layers, windows) for windows in batches]
        yield [
            context.pack(np.concatenate([of_layer[i] for of_layer in rows]).astype(dtype), place)
            for i in range(len(layers))
        ]


def probe_hidden(
    context: Context, items: Iterable[tuple[list[Window]]], *, layers: Sequence[int]
) -> Generator[None, None, None]:
    """Read the hidden states of some windows and drop them, to test whether the process survives it."""
    for (windows,) in items:
        try:
            read_batch(context.job, context.keep("teacher", partial(load_teacher, context.job)), layers, windows)
        except Exception:
            logger.debug("raises, and so does not kill", exc_info=True)
        yield None


# -- one batch ---------------------------------------------------------------------------------------------


def read_batch(job: Job, teacher: "Teacher", layers: Sequence[int], windows: list[Window]) -> list[np.ndarray]:
    """Hidden states of the windows of one forward pass, without those at which the teacher fails.

    Returns  list of (n, d) float32, one for a layer; with --center list of (n) records as `sample_dtype` has them
    Raises   EncodeError when the teacher fails at most of the windows
    """
    form, raw = InputFormat.of(job.config, teacher), job.config.center != "none"
    batch, dtype = job.config.windows_at_once(), sample_dtype(job, teacher)
    no_rows = np.zeros((0, *dtype.shape), np.float32 if dtype.shape else dtype)

    def read(windows):
        rows = hidden_rows(teacher, windows, batch, job.config.max_length, job.special_ids, layers, form, raw)
        return [_as_records(found, dtype) if raw else found for found in rows]

    if not windows:
        return [no_rows] * len(layers)
    if len(layers) > 1:
        try:
            return read(windows)
        except Exception as error:
            if not may_be_the_texts_fault(error):
                raise
        # If only one layer failed, the samples of the other layers must not show it.
        return [read_batch(job, teacher, (layer,), windows)[0] for layer in layers]
    parts, failing = [], 0
    for _, rows, reason in isolate(windows, read):
        if reason is None:
            parts += rows
        else:
            logger.warning("a window is left out of the dictionary's sample: %s", describe(reason))
            failing += 1
    if failing > max(SOME_WINDOWS, len(windows) // 2):
        raise EncodeError(f"{teacher.name}, layer {layers[0]}, fails at most of a batch; see the log")
    return parts if len(parts) == 1 else [np.concatenate(parts or [no_rows])]


def _as_records(found, dtype):
    """TeacherRows as an array of records."""
    records_n = np.empty(len(found.rows_Nd), dtype)
    records_n["row"], records_n["position"] = found.rows_Nd, found.position_N
    return records_n
