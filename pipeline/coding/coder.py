"""Windows to the columns of blocks: the stages of a coder.

    LspCoder(teacher, outputs, config, special_ids).stages()

`TeacherCoder` is what every coder with a teacher has in common; `LspCoder` (lsp.py) adds the sparse codes,
`LogitsCoder` (logits.py) the vocabulary's distributions in their place.

An output is one store in the making: a layer and a dictionary. All share one pass of the teacher, each batch of which
is coded for one output after the other; what an output gets is, bit for bit, what it would get alone. (Only where the
teacher raises in a layer beyond an output's own does that output lose the window as well.)

The stages are generators, each over the items of the one before. What runs beside what is one table, `LAYOUTS`:

- On a GPU teacher and solver (or the vocabulary's head) have a thread and a stream each. Hidden states and codes
  stay on the device; a third stream makes distributions of the codes, which come to the host. Not run on a GPU yet.
- On a CPU every kernel of teacher and solver uses all cores, so the two take turns in one thread; only work
  that runs on one core or waits for the disk goes on beside them, reading ahead and writing behind.

A stage marks a batch with the error that it meets, and goes on; failures.py says what follows. Windows that are known
to fail from the start never reach the teacher.

Left out: reading windows, writing blocks (units.py), threads (stages.py), streams (lanes.py).

Shapes: W windows, L window length, T tokens end to end, N coded tokens, d hidden width.
"""

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pipeline.coding.batch import UNIT_END, Batch, Block, Output, Reading, add_amounts, documents_of, make_batch
from pipeline.coding.failures import mend
from pipeline.coding.hidden import Hidden
from pipeline.coding.lanes import open_lane
from pipeline.coding.precision import Comparison
from pipeline.config import TeacherConfig

if TYPE_CHECKING:
    from pipeline.teacher import Teacher

# How many items each stage may have ready for the next; 0 means that both share a thread.
LAYOUTS = {
    "cpu": {"read": 4, "teach": 0, "solve": 0, "mend": 0, "finish": 2},
    "cuda": {"read": 4, "teach": 2, "solve": 0, "mend": 2, "finish": 2},
}


class IdsCoder:
    """Blocks keep their ids and get nothing else."""

    layout = {"read": 2}
    environment: dict = {}

    def stages(self) -> tuple:
        return (("read", lambda items: (item if item is UNIT_END else item[0] for item in items)),)


class TeacherCoder:
    """Blocks of windows to blocks with a sparse distribution for every token; for one chain of stages at a time.

    outputs       list of Output, which blocks name by their number; none deeper than the teacher is cut
    most_windows  of a forward pass; fewer once the device had too little memory

    A subclass says what becomes of the hidden states: `read_states`, `_code`, `_arrays`, `_rows` and
    `measure_variation`, described there, and

    WORK  what `_code` is called in a unit's environment
    """

    WORK: str

    def __init__(self, teacher: Any, outputs: Sequence[Output], config: TeacherConfig, special_ids: dict):
        self.teacher, self.outputs, self.config, self.special_ids = teacher, outputs, config, special_ids
        self._reading = Reading.of(config, teacher)
        self._on_gpu = teacher.device.type == "cuda"
        self.layout = LAYOUTS[teacher.device.type]
        self.environment = {"device": str(teacher.device), **_library_versions()}
        if teacher.products:
            self.environment["products"] = dict(teacher.products)
        self._lanes = {stage: open_lane(teacher.device) for stage in ("teach", "solve", "finish")}
        self._teaching, self._solving = threading.Lock(), threading.Lock()  # `mend` does both, in its own thread
        self.most_windows = max(1, config.batch_tokens // config.max_length)
        self._comparison = Comparison(self)

    def read_states(self, teacher: "Teacher", batch: Batch, outputs: Sequence[int]) -> dict[int, Hidden]:
        """Hidden states of a batch's coded tokens, as `_code` takes them: dict of an output's number to Hidden."""
        raise NotImplementedError

    def _code(self, rows_Nd, output):
        """The codes of hidden states, on the teacher's device; they have `to_host()`."""
        raise NotImplementedError

    def _arrays(self, codes):
        """The tensors of codes that are on a GPU, for the lane that takes them over."""
        raise NotImplementedError

    def _rows(self, codes, block):
        """Distributions, on the host, of codes that may be on a GPU; a block's statistics get what they say."""
        raise NotImplementedError

    def measure_variation(
        self, rows_Nd: torch.Tensor, exact_Nd: torch.Tensor, exact_teacher: Any, output: int
    ) -> np.ndarray | None:
        """Total variation between the distributions that two teachers' hidden states give, on the host: (N,)."""
        raise NotImplementedError

    def stages(self) -> tuple:
        """Pairs of a stage's name and its generator; the first takes blocks with their ids."""
        return (
            ("read", self.batches),
            ("teach", self.teach),
            ("solve", self.solve),
            ("mend", self.mend),
            ("finish", self.finish),
        )

    # -- read ----------------------------------------------------------------------------------------------

    def batches(self, items: Iterable) -> Iterator:
        """Lists of the blocks of one text, one block an output, to batches of all of them."""
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
                batch = self.cut(blocks[0], start, min(start + size, windows), size)
                batch.blocks, batch.first = blocks, start
                batch.compared, begins_unit = self._comparison.wanted and begins_unit, False
                yield batch.without_known_failures()

    def cut(self, block: Block, start: int, stop: int, size: int) -> Batch:
        """The Batch of a block's windows from `start` to `stop`, filled up to `size` windows."""
        columns = block.columns
        ends_W = np.cumsum(columns["lengths"])
        tokens = slice(ends_W[start] - columns["lengths"][start], ends_W[stop - 1])
        documents_t = documents_of(columns)[tokens] if self._reading.documents_apart else None
        batch = make_batch(
            columns["ids"][tokens],
            columns["lengths"][start:stop],
            size,
            self.config.max_length,
            self.special_ids,
            self._on_gpu,
            documents_t,
            self._reading.segments,
        )
        if block.number_W is not None:
            batch.rows_Nd = self.teacher.read(batch, block.number_W[start:stop])
        return batch

    # -- teach ---------------------------------------------------------------------------------------------

    def teach(self, batches: Iterable) -> Iterator:
        """Batches to one for every block of theirs, with its hidden states or the error that the teacher met.

        One that is larger than `most_windows`, which fell since it was read, is passed on without either.
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
        """Give batches of the same windows, each for another output, their hidden states."""
        with self._teaching, self._lanes["teach"] as lane:
            begin = lane.mark()
            outputs = [batch.block.output for batch in batches]
            found = self.read_states(self.teacher, batches[0], outputs)
            end = lane.mark()
        for batch, output in zip(batches, outputs, strict=True):
            batch.hidden, batch.marks["teacher"] = found[output], (begin, end)

    # -- solve ---------------------------------------------------------------------------------------------

    def solve(self, batches: Iterable) -> Iterator:
        """Batches with their codes, without the hidden states, or with the error that the solver met."""
        for batch in batches:
            if batch is not UNIT_END and batch.hidden is not None:
                try:
                    self._solve(batch)
                except Exception as error:
                    batch.error = error
            yield batch

    @torch.inference_mode()
    def _solve(self, batch):
        hidden, batch.hidden = batch.hidden, None
        with self._solving, self._lanes["solve"] as lane:
            lane.after(batch.marks["teacher"][1], hidden.rows_Nd, hidden.not_finite)
            hidden.check(self.teacher)  # waits for the teacher, but the teacher's thread goes on
            begin = lane.mark()
            batch.codes = self._code(hidden.rows_Nd, batch.block.output)
            batch.marks[self.WORK] = begin, lane.mark()
        return batch

    # -- mend ----------------------------------------------------------------------------------------------

    def mend(self, batches: Iterable) -> Iterator:
        """Batches with their codes, whatever failed (failures.py); the first of a unit is compared with float32."""
        for batch in mend(self, batches):
            if batch is not UNIT_END and batch.compared:
                self._comparison.compare(batch)
            yield batch

    def code_again(self, batch: Batch) -> Batch:
        """The batch with its codes, from a pass of the teacher of its own."""
        batch.sharing = 1
        self._teach([batch])
        return self._solve(batch)

    @contextmanager
    def alone_on_device(self) -> Iterator[None]:
        """Keep teacher and solver to this thread, for work on the solver's lane."""
        with self._teaching, self._solving, self._lanes["solve"]:
            yield

    # -- finish --------------------------------------------------------------------------------------------

    def finish(self, batches: Iterable) -> Iterator:
        """Blocks with all their columns, each when its last batch is done."""
        for batch in batches:
            if batch is UNIT_END:
                yield batch
                continue
            block = batch.block
            block.parts.append(self._finish(batch))
            if len(block.parts) == block.batches:
                names = {name: None for part in block.parts for name in part}
                block.columns |= {name: _join(block.parts, name) for name in names}
                yield block

    def _finish(self, batch):
        if batch.codes is None:  # none of its windows can be coded
            return self._columns(None, batch)
        with self._lanes["finish"] as lane:
            lane.after(batch.marks[self.WORK][1], *self._arrays(batch.codes))
            seconds = {name: lane.seconds(*marks) for name, marks in batch.marks.items()}
            clock = time.perf_counter()
            rows = self._rows(batch.codes, batch.block)
            seconds["distributions"] = time.perf_counter() - clock
        seconds["teacher"] /= batch.sharing
        add_amounts(batch.block.seconds, {f"{name}_seconds": amount for name, amount in seconds.items()})
        return self._columns(rows, batch)

    def _columns(self, rows, batch):
        """Columns over all tokens of a batch from what `_rows` made; from None where none of its windows is coded."""
        if rows is None:
            nothing = np.zeros(len(batch.coded_T))
            return {
                "nnz": nothing.astype(np.int64),
                "indices": np.zeros(0, np.int32),
                "weights": np.zeros(0, np.float32),
                "tail": nothing.astype(np.float32),
            }
        add_amounts(batch.block.statistics, {"truncated_tokens": int(rows.truncated_tokens)})
        return _spread(rows, batch.coded_T)


def _spread(rows, coded_T):
    """Rows of the coded tokens to columns over all tokens; special tokens get none."""
    nnz, tail = np.zeros(len(coded_T), np.int64), np.zeros(len(coded_T), np.float32)
    nnz[coded_T] = np.diff(rows.indptr)
    tail[coded_T] = rows.tail
    columns = {"nnz": nnz, "indices": rows.indices, "weights": rows.weights, "tail": tail}
    return columns if rows.lsp_codes is None else columns | {"lsp_codes": rows.lsp_codes}


def _join(parts, name):
    """A column of a block; parts without entries may lack one."""
    return np.concatenate([part[name] for part in parts if name in part])


def _library_versions():
    import numba
    import transformers

    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numba": numba.__version__,
        "threads": torch.get_num_threads(),
    }
