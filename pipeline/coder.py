"""Windows to the columns of blocks: teacher, then unit length, sparse codes, distributions.

    LspCoder(teacher, outputs, config, special_ids).stages()

`TeacherCoder` is what every coder with a teacher has in common; `LspCoder` adds the sparse codes, `LogitsCoder`
(logits.py) the vocabulary's distributions in their place.

An output is one store in the making: a layer and a dictionary. All share one pass of the teacher, each batch of which
is coded for one output after the other; what an output gets is, bit for bit, what it would get alone. (Only where the
teacher raises in a layer beyond an output's own does that output lose the window as well.)

The stages are generators, each over the items of the one before. What runs beside what is one table,
`LAYOUTS`: how many items each stage may have ready for the next, 0 meaning that both share a thread.

- On a GPU teacher and solver (or the vocabulary's head) have a thread and a stream each. Hidden states and codes
  stay on the device; the codes come to the host on a third stream. Not run on a GPU yet.
- On a CPU every kernel of teacher and solver uses all cores, so the two take turns in one thread; only work
  that runs on one core or waits for the disk goes on beside them, reading ahead and writing behind.

A window at which the coding fails is found by halving its batch, and keeps its place without entries. The batch is
then coded once more without the failing windows, so its bytes follow from the text and from which failed. Windows
that are known to fail from the start never reach the teacher.

A batch that a GPU has no memory for is coded in smaller ones, and the batches to come are as small: the results are
equal within tolerance, and the unit's record counts it (`out_of_memory`).

A teacher in another precision than float32 is compared with itself in float32 on the first windows of every unit; the
unit's record says how far the codes and the hidden states of the two are from each other. Numbers that float16 cannot
hold end the run: they are the fault of the precision, not of the document in which they turn up.

Left out: reading windows, writing blocks (encode.py), threads (stages.py), streams (lanes.py).

Shapes: W windows, L window length, T tokens end to end, N coded tokens, d hidden width, K atoms.
"""

import logging
import threading
import time
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from common.documents import positions_in_documents
from common.errors import EncodeError, PrecisionError
from pipeline.centering import centred_unit_rows
from pipeline.corpus import join_windows
from pipeline.lanes import open_lane
from pipeline.lsp import distributions
from pipeline.solvers import nonneg_lasso
from pipeline.solvers.parallel import one_blas_thread
from shards.segments import segment_ids

logger = logging.getLogger(__name__)

LAYOUTS = {
    "cpu": {"read": 4, "teach": 0, "solve": 0, "finish": 2},
    "cuda": {"read": 4, "teach": 2, "solve": 2, "finish": 2},
}
COMPARED_WINDOWS = 8  # of every unit, on which a teacher of low precision is compared with float32
COMPARED_TOLERANCE = {"cpu": 1e-5, "cuda": 1e-4}  # of the solver then, so that it is not its error that is seen
SOME_WINDOWS = 4  # may fail in any batch; beyond half of a batch's windows the fault is not theirs
MACHINE_SIGNS = ("allocate memory", "ALLOC_FAILED", "CUDA error", "OUT_OF_MEMORY")  # in errors of no class of their own
UNIT_END = object()  # comes after the blocks of a unit


class Reading(NamedTuple):
    """What a teacher is told about a window beside its ids.

    documents_apart  which tokens belong to one document: each is read as if it stood alone
    segments         which of the two sentences of a pair each token belongs to
    """

    documents_apart: bool = False
    segments: bool = False

    @classmethod
    def of(cls, config, teacher):
        """How a command reads: with segments where windows are pairs and the teacher has two token types, unless the
        settings say never."""
        tells_segments = config.segments == "auto" and config.packing == "pairs" and teacher.segments >= 2
        return cls(config.documents_apart, tells_segments)

    def settings(self):
        """What it adds to the settings that name a store or a dictionary; nothing for windows read as one text."""
        return {name: True for name, value in self._asdict().items() if value}


AS_ONE_TEXT = Reading()


class Output(NamedTuple):
    """What a store wants of the hidden states."""

    layer: int
    dictionary: object


@dataclass(eq=False)
class Block:
    """What becomes one block of a shard.

    columns     name to array, as `UnitWriter.write_block` takes them; complete when the last stage is done
    output      number of the output that it is for
    batches     how many forward passes it takes
    parts       columns of the batches that are done; this and what follows belongs to the last stage
    statistics  sums over the block, for the unit's statistics, and its largest KKT violation
    seconds     for which teacher, solver and distributions were busy, for the unit's environment
    failed      windows without entries because coding them failed, or is known to: number in the block to the reason
    """

    columns: dict
    output: int = 0
    batches: int = 0
    parts: list = field(default_factory=list)
    statistics: dict = field(default_factory=dict)
    seconds: dict = field(default_factory=dict)
    failed: dict = field(default_factory=dict)

    @property
    def tokens(self):
        return len(self.columns["ids"])

    def add_to(self, statistics, environment):
        """Add the block's figures to those of its unit."""
        largest = max(statistics.get("max_kkt", 0.0), self.statistics.get("max_kkt", 0.0))
        _add(statistics, self.statistics)
        _add(environment, self.seconds)
        if "max_kkt" in self.statistics:
            statistics["max_kkt"] = largest


@dataclass(eq=False)
class Batch:
    """Windows of one forward pass; each stage replaces what the one before it made.

    ids_WL     int64 tensor, padded, in pinned memory where there is a GPU
    real_WL    bool tensor, True at tokens; None when every window is full
    tokens_N   int64 tensor, which of the W * L places are coded
    coded_T    bool, which of the tokens end to end are coded
    windows    how many of the W count, the others being copies
    first      number of the first window in its block
    blocks     those that it is part of, one an output; from the teacher on, each has a Batch of its own
    codes      what the coder made of the hidden states: Codes, or MostProbable of logits.py
    marks      beginning and end of "teacher" and of "solver", or what stands in the solver's place
    sharing    how many batches share the teacher's pass
    documents_WL, segments_WL  int64 tensors as `Teacher` takes them, or None: see Reading
    compared   whether it is to say what the teacher's dtype changes
    error      what the teacher raised
    idle       whether there is nothing to code, because all of its windows are known to fail
    """

    ids_WL: torch.Tensor
    real_WL: torch.Tensor | None
    tokens_N: torch.Tensor
    coded_T: np.ndarray
    windows: int
    first: int = 0
    blocks: list = field(default_factory=list)
    hidden: "Hidden | None" = None
    codes: object = None
    marks: dict = field(default_factory=dict)
    sharing: int = 1
    documents_WL: torch.Tensor | None = None
    segments_WL: torch.Tensor | None = None
    compared: bool = False
    error: Exception | None = None
    idle: bool = False

    @property
    def block(self):
        """The one block that it is part of."""
        (block,) = self.blocks
        return block

    def only(self, windows):
        """The batch with these windows alone, in their places; the others become copies of the first of them."""
        chosen_W = np.zeros(len(self.ids_WL), bool)
        chosen_W[windows] = True
        source_W = torch.from_numpy(np.where(chosen_W, np.arange(len(chosen_W)), windows[0]))
        kept_N = chosen_W[self.tokens_N.numpy() // self.ids_WL.shape[1]]
        coded_T = self.coded_T.copy()
        coded_T[coded_T] = kept_N
        return replace(
            self, **self._rows(source_W), tokens_N=self.tokens_N[torch.from_numpy(kept_N)], coded_T=coded_T,
            hidden=None, codes=None, marks={}, error=None,
        )  # fmt: skip

    def alone(self, windows):
        """A smaller batch of these windows, in increasing order; its `coded_T` says nothing."""
        length, source_W = self.ids_WL.shape[1], torch.tensor(windows)
        window_N, place_N = self.tokens_N // length, self.tokens_N % length
        kept_N = torch.isin(window_N, source_W)
        tokens_N = torch.searchsorted(source_W, window_N[kept_N]) * length + place_N[kept_N]
        return replace(self, **self._rows(source_W), tokens_N=tokens_N, windows=len(windows), marks={})

    def _rows(self, source_W):
        names = ("ids_WL", "real_WL", "documents_WL", "segments_WL")
        return {name: None if (rows := getattr(self, name)) is None else rows[source_W] for name in names}

    @property
    def reading(self):
        """What the teacher is told beside ids and padding, as keyword arguments."""
        given = {"documents_WL": self.documents_WL, "segments_WL": self.segments_WL}
        return {name: tensor for name, tensor in given.items() if tensor is not None}

    @property
    def position_N(self):
        """The positions of the coded tokens as the teacher counts them, from 0; int64 tensor on the host."""
        if self.documents_WL is None:
            return self.tokens_N % self.ids_WL.shape[1]
        return positions_in_documents(self.documents_WL).flatten()[self.tokens_N]


@dataclass(frozen=True, eq=False)
class Hidden:
    """Unit-length hidden states of a layer, on the teacher's device.

    layer       its number
    rows_Nd     float32 tensor
    not_finite  int64 tensor without axes: rows that hold NaN or infinity
    """

    layer: int
    rows_Nd: torch.Tensor
    not_finite: torch.Tensor

    def check(self, teacher):
        """Raise EncodeError if a row is not finite. Waits for the device."""
        if count := int(self.not_finite):
            raise not_finite(teacher, f"{teacher.name}, layer {self.layer}: {count} hidden states")


class IdsCoder:
    """Nothing but the ids."""

    layout, environment = {"read": 2}, {}

    def stages(self):
        return (("read", lambda items: (item if item is UNIT_END else item[0] for item in items)),)


class TeacherCoder:
    """Blocks of windows to blocks with a sparse distribution for every token; for one chain of stages at a time.

    outputs  list of Output, which blocks name by their number; none deeper than the teacher is cut

    A subclass says what becomes of the hidden states: `_states`, `_code`, `_arrays`, `_rows` and `_variation`,
    described there, and

    WORK  what `_code` is called in a unit's environment
    """

    WORK = None

    def __init__(self, teacher, outputs, config, special_ids):
        self.teacher, self.outputs, self.config, self.special_ids = teacher, outputs, config, special_ids
        self._reading = Reading.of(config, teacher)
        self._compares, self._in_float32 = teacher.dtype != torch.float32, None
        self._on_gpu = teacher.device.type == "cuda"
        self.layout = LAYOUTS[teacher.device.type]
        self.environment = {"device": str(teacher.device), **_library_versions()}
        self._lanes = {stage: open_lane(teacher.device) for stage in ("teach", "solve", "finish")}
        self._teaching, self._most_windows = threading.Lock(), max(1, config.batch_tokens // config.max_length)

    def _states(self, teacher, batch, outputs):
        """Hidden states of a batch's coded tokens, as `_code` takes them: dict of an output's number to Hidden."""
        raise NotImplementedError

    def _code(self, rows_Nd, output):
        """The codes of hidden states, on the teacher's device; they have `to_host()`."""
        raise NotImplementedError

    def _arrays(self, codes):
        """The tensors of codes that are on a GPU, for the lane that takes them over."""
        raise NotImplementedError

    def _rows(self, codes, block):
        """Distributions of codes that are on the host; a block's statistics get what they say."""
        raise NotImplementedError

    def _variation(self, rows_Nd, exact_Nd, exact_teacher, output):
        """Total variation between the distributions that two teachers' hidden states give, on the host: (N,)."""
        raise NotImplementedError

    def stages(self):
        """Pairs of a stage's name and its generator; the first takes blocks with their ids."""
        return ("read", self.batches), ("teach", self.teach), ("solve", self.solve), ("finish", self.finish)

    def batches(self, items):
        """Lists of the blocks of one text, one block an output, to batches of all of them."""
        begins_unit = True
        for blocks in items:
            if blocks is UNIT_END:
                yield blocks
                begins_unit = True
                continue
            columns, size = blocks[0].columns, self._most_windows
            windows = len(columns["lengths"])
            for block in blocks:
                block.batches = -(-windows // size)
            for start in range(0, windows, size):
                batch = self._batch(columns, start, min(start + size, windows), size)
                batch.blocks, batch.first = blocks, start
                batch.compared, begins_unit = self._compares and begins_unit, False
                yield _without_known_failures(batch)

    def _batch(self, columns, start, stop, size):
        """The Batch of a block's windows from `start` to `stop`."""
        ends_W = np.cumsum(columns["lengths"])
        tokens = slice(ends_W[start] - columns["lengths"][start], ends_W[stop - 1])
        documents_t = documents_of(columns)[tokens] if self._reading.documents_apart else None
        return make_batch(columns["ids"][tokens], columns["lengths"][start:stop], size, self.config.max_length,
                          self.special_ids, self._on_gpu, documents_t, self._reading.segments)  # fmt: skip

    def teach(self, batches):
        """Batches to one for every block of theirs, with its hidden states or the error that the teacher met."""
        for batch in batches:
            if batch is UNIT_END:
                yield batch
                continue
            alone = [replace(batch, blocks=[block], marks={}, sharing=len(batch.blocks)) for block in batch.blocks]
            try:
                if not batch.idle and len(batch.ids_WL) <= self._most_windows:
                    self._teach(alone)
            except Exception as error:
                for one in alone:
                    one.error = error
            while alone:
                yield alone.pop(0)

    def _teach(self, batches):
        """Give batches of the same windows, each for another output, their hidden states."""
        with self._teaching, self._lanes["teach"] as lane:  # the solver's thread, too, comes here after an error
            begin = lane.mark()
            outputs = [batch.block.output for batch in batches]
            found = self._states(self.teacher, batches[0], outputs)
            end = lane.mark()
        for batch, output in zip(batches, outputs, strict=True):
            batch.hidden, batch.marks["teacher"] = found[output], (begin, end)

    def solve(self, batches):
        """Batches with their codes, without the hidden states."""
        for batch in batches:
            if batch is UNIT_END:
                yield batch
            else:
                yield from self._solved(batch)

    def _solved(self, batch):
        """The batch with its codes, or several smaller ones when the device has too little memory for it."""
        if batch.idle or batch.hidden is not None or batch.error is not None:
            try:
                done = self._solve_or_isolate(batch)
            except Exception as error:
                if len(batch.ids_WL) == 1 or not ran_out_of_memory(error):
                    raise
                self._note_lack_of_memory(batch)
            else:
                if done.compared:
                    self._compare_with_float32(done)
                yield done
                return
        batch.hidden = batch.codes = batch.error = None
        for smaller in self.teach(self._divided(batch)):
            yield from self._solved(smaller)

    def _note_lack_of_memory(self, batch):
        size = len(batch.ids_WL)  # with the copies that fill it up
        self._most_windows = min(self._most_windows, -(-size // 2))
        _add(batch.block.statistics, {"out_of_memory": 1})
        logger.warning("the device has too little memory for %d windows at once: going on with %d", size,
                       self._most_windows)  # fmt: skip
        if self._on_gpu:
            torch.cuda.empty_cache()

    def _divided(self, batch):
        """The windows of a batch as batches of the size that the device had memory for last."""
        size, block, stop = self._most_windows, batch.block, batch.first + batch.windows
        block.batches += -(-batch.windows // size) - 1
        for start in range(batch.first, stop, size):
            part = self._batch(block.columns, start, min(start + size, stop), size)
            part.blocks, part.first, part.compared = batch.blocks, start, batch.compared and start == batch.first
            yield _without_known_failures(part)

    @torch.inference_mode()
    def _compare_with_float32(self, batch):
        """Let the block's statistics say what the teacher's dtype changes in the first windows of a batch.

        Sums over their coded tokens: dtype_tokens; dtype_tv, total variation of the distributions; dtype_hidden,
        distance of the hidden states relative to the length of those in float32.
        """
        windows = _not_known_to_fail(batch)[:COMPARED_WINDOWS]
        if not windows:
            return
        sample, output = batch.alone(windows), batch.block.output
        try:
            with self._teaching, self._lanes["solve"]:
                if self._in_float32 is None:
                    self._in_float32 = self.teacher.in_float32()
                teachers = self.teacher, self._in_float32
                rows_Nd, exact_Nd = (self._states(teacher, sample, [output])[output].rows_Nd for teacher in teachers)
                lengths_N = torch.linalg.vector_norm(exact_Nd, dim=1).clamp_min(1e-12)
                distance_N = (torch.linalg.vector_norm(rows_Nd - exact_Nd, dim=1) / lengths_N).cpu()
                variation_N = self._variation(rows_Nd, exact_Nd, self._in_float32, output)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            logger.warning("the device has too little memory for a second teacher, in float32: what --dtype changes is "
                           "not measured")  # fmt: skip
            self._compares, self._in_float32 = False, None
            return
        _add(batch.block.statistics, {"dtype_tokens": len(rows_Nd), "dtype_tv": float(variation_N.sum()),
                                      "dtype_hidden": float(distance_N.sum(dtype=torch.float64))})  # fmt: skip

    def _solve_or_isolate(self, batch):
        if batch.idle:
            return batch
        try:
            if batch.error is not None:
                raise batch.error
            return self._solve(batch)
        except Exception as error:
            return self._without_failing(batch, error)

    def _without_failing(self, batch, error):
        """The batch coded without the windows at which its coding fails, which its block notes.

        Raises the error if it is not the text's fault, for example because most windows fail
        """
        if not may_be_the_texts_fault(error):
            raise error
        failing, tried = {}, _not_known_to_fail(batch)
        for window, reason in self._failing(batch, np.array(tried)):
            failing[window] = reason
            if len(failing) > max(SOME_WINDOWS, batch.windows // 2):
                raise error
        if not failing:
            logger.warning("a batch failed once and not again: %s", describe(error))
        batch.block.failed |= {batch.first + window: reason for window, reason in failing.items()}
        whole = [window for window in tried if window not in failing]
        if not whole:
            return replace(batch, coded_T=np.zeros_like(batch.coded_T), codes=None, hidden=None, marks={})
        return self._teach_and_solve(batch.only(whole) if failing else batch)

    def _teach_and_solve(self, batch):
        batch.sharing = 1
        self._teach([batch])
        return self._solve(batch)

    def _failing(self, batch, windows):
        """Pairs (window, reason) of those at which coding fails, found by halving."""
        try:
            self._teach_and_solve(batch.only(windows))
        except Exception as error:
            if not may_be_the_texts_fault(error):
                raise
            if len(windows) == 1:
                yield int(windows[0]), describe(error)
                return
        else:
            return
        half = len(windows) // 2
        yield from self._failing(batch, windows[:half])
        yield from self._failing(batch, windows[half:])

    @torch.inference_mode()
    def _solve(self, batch):
        hidden, batch.hidden = batch.hidden, None
        with self._lanes["solve"] as lane:
            lane.after(batch.marks["teacher"][1], hidden.rows_Nd, hidden.not_finite)
            hidden.check(self.teacher)  # waits for the teacher, but the teacher's thread goes on
            begin = lane.mark()
            batch.codes = self._code(hidden.rows_Nd, batch.block.output)
            batch.marks[self.WORK] = begin, lane.mark()
        return batch

    def finish(self, batches):
        """Blocks with all their columns, each when its last batch is done."""
        for batch in batches:
            if batch is UNIT_END:
                yield batch
                continue
            block = batch.block
            block.parts.append(self._finish(batch))
            if len(block.parts) == block.batches:
                names = ("nnz", "indices", "weights", "tail")
                block.columns |= {name: np.concatenate([part[name] for part in block.parts]) for name in names}
                yield block

    def _finish(self, batch):
        if batch.codes is None:  # none of its windows can be coded
            nothing = np.zeros(len(batch.coded_T))
            return {"nnz": nothing.astype(np.int64), "indices": np.zeros(0, np.int32),
                    "weights": np.zeros(0, np.float32), "tail": nothing.astype(np.float32)}  # fmt: skip
        with self._lanes["finish"] as lane:
            codes = self._fetch(batch.codes, batch.marks[self.WORK][1])
            seconds = {name: lane.seconds(*marks) for name, marks in batch.marks.items()}
        seconds["teacher"] /= batch.sharing
        clock = time.perf_counter()
        rows = self._rows(codes, batch.block)
        seconds["distributions"] = time.perf_counter() - clock
        _add(batch.block.seconds, {f"{name}_seconds": amount for name, amount in seconds.items()})
        _add(batch.block.statistics, {"truncated_tokens": int(rows.truncated_tokens)})
        return _spread(rows, batch.coded_T)

    def _fetch(self, codes, solved):
        """Codes on the host."""
        self._lanes["finish"].after(solved, *self._arrays(codes))
        return codes.to_host() if self._on_gpu else codes


class LspCoder(TeacherCoder):
    """Blocks of windows to blocks with the LSPs of every token."""

    WORK = "solver"

    def __init__(self, teacher, outputs, config, special_ids):
        super().__init__(teacher, outputs, config, special_ids)
        self._dictionaries = [_dictionary_on(teacher.device, output.dictionary.atoms_Kd) for output in outputs]
        self._centers = [center_on(teacher.device, output.dictionary) for output in outputs]
        self._checked = set()

    def _states(self, teacher, batch, outputs):
        wanted = [(self.outputs[output].layer, self._centers[output]) for output in outputs]
        return dict(zip(outputs, centred_rows(teacher, batch, wanted), strict=True))

    def _code(self, rows_Nd, output, tolerance=None):
        atoms_Kd, gram_KK = self._dictionaries[output]
        config = self.config
        how = {"gram_KK": gram_KK, "tol": tolerance or config.tolerance}
        if config.solver == "fista":
            how = {"backend": "fista", "steps": config.solver_steps, "tol": None}
        return nonneg_lasso(_as_array(rows_Nd), atoms_Kd, config.lam, **how)

    def _variation(self, rows_Nd, exact_Nd, exact_teacher, output):
        count = len(self.outputs[output].dictionary.atoms_Kd)
        tolerance = min(self.config.tolerance, COMPARED_TOLERANCE[rows_Nd.device.type])
        codes = (self._code(rows, output, tolerance).to_host().dense(count) for rows in (rows_Nd, exact_Nd))
        return total_variation(*codes)

    def _arrays(self, codes):
        return codes.indptr, codes.indices, codes.values, codes.kkt

    def _rows(self, codes, block):
        rows = distributions(codes, self.config.top_n)
        self._count(block, codes)
        return rows

    def _count(self, block, codes):
        statistics, empty = block.statistics, int((np.diff(codes.indptr) == 0).sum())
        _add(statistics, {"empty_codes": empty})
        statistics["max_kkt"] = max(statistics.get("max_kkt", 0.0), float(codes.kkt.max(initial=0)))
        if block.output not in self._checked and len(codes.kkt):
            self._refuse_empty_codes(empty, len(codes.kkt), self.outputs[block.output])
            self._checked.add(block.output)

    def _refuse_empty_codes(self, empty, tokens, output):
        if empty == tokens:
            raise EncodeError(
                f"--lam {self.config.lam} empties the code of every one of the first {tokens:,} tokens, at layer "
                f"{output.layer} and k {len(output.dictionary.atoms_Kd)}. Use a smaller one; 0.05 is usual."
            )


# -- batches and hidden states -----------------------------------------------------------------------------


def make_batch(ids_T, lengths_W, windows, max_length, special_ids, pinned=False, documents_T=None, segments=False):
    """The Batch of some windows, given end to end.

    windows      in a forward pass; fewer are filled up with copies of the first, so that shapes are fixed
    pinned       in memory from which a GPU copies by itself
    documents_T  as `documents_of` gives it, where documents are kept apart
    segments     whether the windows are pairs of sentences that the teacher shall tell apart
    """
    real_WL = np.zeros((windows, max_length), bool)
    real_WL[: len(lengths_W)] = np.arange(max_length) < lengths_W[:, None]
    ids_WL = torch.full((windows, max_length), special_ids["pad"], dtype=torch.int64, pin_memory=pinned)
    ids_WL.numpy()[real_WL] = ids_T
    coded_T = ~np.isin(ids_T, special_ids["all"])
    tokens_N = torch.from_numpy(np.flatnonzero(real_WL)[coded_T])
    ids_WL[len(lengths_W) :], real_WL[len(lengths_W) :] = ids_WL[0], real_WL[0]
    mask_WL = None if real_WL.all() else torch.from_numpy(real_WL)
    documents_WL = segments_WL = None
    if documents_T is not None:
        documents_WL = torch.full((windows, max_length), -1)
        documents_WL.numpy()[: len(lengths_W)][real_WL[: len(lengths_W)]] = documents_T
        documents_WL[len(lengths_W) :] = documents_WL[0]
    if segments:
        segments_WL = torch.from_numpy(segment_ids(ids_WL.numpy(), real_WL.sum(1), special_ids["sep"]))
    if pinned:
        tokens_N = tokens_N.pin_memory()
        mask_WL, documents_WL, segments_WL = (
            tensor if tensor is None else tensor.pin_memory() for tensor in (mask_WL, documents_WL, segments_WL)
        )
    return Batch(ids_WL, mask_WL, tokens_N, coded_T, len(lengths_W), documents_WL=documents_WL, segments_WL=segments_WL)


def documents_of(columns):
    """The number of each token's document inside its window, int64 (T,), from the columns of a block.

    As the student counts them (shards/codec.py): [CLS] belongs to the first document, a [SEP] to the one that it ends.
    """
    lengths_W = columns["lengths"]
    runs_T = np.searchsorted(columns["run_starts"], np.arange(lengths_W.sum()), side="right")
    return runs_T - np.repeat(runs_T[np.cumsum(lengths_W) - lengths_W], lengths_W)


def _not_known_to_fail(batch):
    """Numbers of the batch's windows that its blocks do not name as failed."""
    return [window for window in range(batch.windows) if batch.first + window not in batch.blocks[0].failed]


def _without_known_failures(batch):
    """The batch as `_without_failing` leaves it."""
    whole = _not_known_to_fail(batch)
    if len(whole) == batch.windows:
        return batch
    return batch.only(whole) if whole else replace(batch, coded_T=np.zeros_like(batch.coded_T), idle=True)


@torch.inference_mode()
def raw_rows(teacher, batch, layers):
    """Hidden states of a batch's coded tokens as the teacher gives them: dict of layer to a new (N, d) tensor."""
    wanted = sorted(set(layers))
    inputs, reading = (batch.ids_WL, batch.real_WL, batch.tokens_N), batch.reading
    last_alone = wanted == [teacher.layer]
    states = [teacher(*inputs, **reading)] if last_alone else teacher(*inputs, layers=wanted, **reading)
    return dict(zip(wanted, states, strict=True))


def unit_rows(teacher, batch, layers):
    """Unit-length hidden states of a batch's coded tokens, without a centre: dict of layer to Hidden."""
    return dict(zip(layers, centred_rows(teacher, batch, [(layer, None) for layer in layers]), strict=True))


@torch.inference_mode()
def centred_rows(teacher, batch, wanted):
    """Hidden states of a batch's coded tokens, centred and scaled to unit length.

    wanted   pairs (layer, what `center_on` gives for the dictionary that they are coded with)
    Returns  list of Hidden, one for each pair; those of one layer without a centre are the same
    """
    raw, found = raw_rows(teacher, batch, [layer for layer, _ in wanted]), {}
    if any(center_Pd is not None for _, center_Pd in wanted):
        position_N = batch.position_N.to(teacher.device, non_blocking=True)
    for number, (layer, center_Pd) in enumerate(wanted):
        if center_Pd is not None:
            found[number] = Hidden(layer, *centred_unit_rows(raw[layer].clone(), center_Pd, position_N))
    plain = {layer for layer, center_Pd in wanted if center_Pd is None}  # last: these are scaled in place
    plain = {layer: Hidden(layer, *centred_unit_rows(raw[layer], None, None)) for layer in plain}
    return [found.get(number) or plain[layer] for number, (layer, _) in enumerate(wanted)]


class HiddenRows(NamedTuple):
    """Raw hidden states with the positions of their tokens, as the teacher counts them."""

    rows_Nd: np.ndarray
    position_N: np.ndarray


def hidden_rows(teacher, windows, batch, max_length, special_ids, layers, reading=AS_ONE_TEXT, raw=False):
    """Unit-length hidden states of the non-special tokens of some windows, on the host.

    batch    windows in a forward pass; fewer are filled up with copies of the first, so that shapes are fixed
    raw      as the teacher gives them instead, with their positions
    Returns  list of hidden_Nd float32 (raw: of HiddenRows), one for every layer; coded_T bool over the windows' tokens
             end to end
    Raises   EncodeError on a hidden state that is not finite
    """
    columns = join_windows(windows)
    documents_T = documents_of(columns) if reading.documents_apart else None
    prepared = make_batch(columns["ids"], columns["lengths"], batch, max_length, special_ids,
                          documents_T=documents_T, segments=reading.segments)  # fmt: skip
    if raw:
        found = raw_rows(teacher, prepared, layers)
        for layer, rows_Nd in found.items():
            Hidden(layer, rows_Nd, (~rows_Nd.isfinite().all(1)).sum()).check(teacher)
        position_N = prepared.position_N.numpy()
        return [HiddenRows(found[layer].cpu().numpy(), position_N) for layer in layers], prepared.coded_T
    found = unit_rows(teacher, prepared, layers)
    for hidden in found.values():
        hidden.check(teacher)
    return [found[layer].rows_Nd.cpu().numpy() for layer in layers], prepared.coded_T


def center_on(device, dictionary):
    """The rows that a dictionary subtracts at each position, on a device; None of one that is not centred."""
    return None if dictionary.center is None else torch.from_numpy(dictionary.center.rows_Pd).to(device)


def not_finite(teacher, what):
    """The error that says that something is not finite; of float16, that the dtype cannot hold it."""
    if teacher.dtype != torch.float16:
        return EncodeError(f"{what} are not finite. Try --dtype float32.")
    return PrecisionError(
        f"{what} are not finite in float16, which holds numbers up to 65,504. Give --dtype bfloat16, which has the "
        "range of float32, or --dtype float32; either makes a store of its own."
    )


def total_variation(left_NK, right_NK):
    """Half the sum of |P - Q| of each pair of rows, scaled to sum to one; 1 where only one of the two is all zeros."""
    sums = [rows_NK.sum(1, keepdims=True) for rows_NK in (left_NK, right_NK)]
    left_NK, right_NK = (rows / np.maximum(total, 1e-30) for rows, total in zip((left_NK, right_NK), sums, strict=True))
    only_one_N = ((sums[0] > 0) != (sums[1] > 0))[:, 0]
    return np.where(only_one_N, 1.0, 0.5 * np.abs(left_NK - right_NK).sum(1))


def may_be_the_texts_fault(error):
    """Whether an error may come from the windows at hand, and not from disk, device, dtype or a lack of memory."""
    machine = isinstance(error, OSError | MemoryError | torch.OutOfMemoryError | PrecisionError)
    return not machine and not any(sign in str(error) for sign in MACHINE_SIGNS)


def ran_out_of_memory(error):
    """Whether an error says that the memory of a GPU is full."""
    return isinstance(error, torch.OutOfMemoryError) or "OUT_OF_MEMORY" in str(error)


def describe(error):
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _as_array(rows_Nd):
    """What the solver takes: a NumPy array, or a tensor where that is on a GPU."""
    return rows_Nd if rows_Nd.is_cuda else rows_Nd.numpy()


def _dictionary_on(device, atoms_Kd):
    """Atoms and their Gram matrix, as the solver takes them."""
    with one_blas_thread():  # how a product is cut up for threads changes how its sums round
        gram_KK = atoms_Kd @ atoms_Kd.T
    if device.type == "cpu":
        return atoms_Kd, gram_KK
    pair = torch.from_numpy(atoms_Kd).to(device), torch.from_numpy(gram_KK).to(device)
    torch.cuda.synchronize(device)  # once, so that no lane has to wait for them
    return pair


def _spread(rows, coded_T):
    """Rows of the coded tokens to columns over all tokens; special tokens get none."""
    nnz, tail = np.zeros(len(coded_T), np.int64), np.zeros(len(coded_T), np.float32)
    nnz[coded_T] = np.diff(rows.indptr)
    tail[coded_T] = rows.tail
    return {"nnz": nnz, "indices": rows.indices, "weights": rows.weights, "tail": tail}


def _add(totals, amounts):
    for name, amount in amounts.items():
        totals[name] = totals.get(name, 0) + amount


def _library_versions():
    import numba
    import transformers

    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numba": numba.__version__,
        "threads": torch.get_num_threads(),
    }
