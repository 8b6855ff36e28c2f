"""The data between text and shard: blocks of windows, batches for a forward pass, and their hidden states.

Hidden states are those of the coded tokens: raw from the teacher, or centred and scaled to unit length.

Shapes: W windows, L window length, T tokens end to end, N coded tokens, d hidden width, P positions.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from mlsm.common.documents import positions_in_documents
from mlsm.common.errors import EncodeError, PrecisionError
from pipeline.config import TeacherConfig
from pipeline.corpus import Window, join_windows
from pipeline.dictionary import Dictionary
from pipeline.dictionary.centering import centred_unit_rows
from pipeline.stored import StoredHidden
from shards.segments import segment_ids

if TYPE_CHECKING:
    from pipeline.teacher import Teacher

UNIT_END = object()  # comes after the blocks of a unit


class InputFormat(NamedTuple):
    """What a teacher reads in addition to a window's ids.

    documents_apart  which tokens belong to one document: each document is read by itself
    segments         which of the two sentences of a pair each token belongs to
    """

    documents_apart: bool = False
    segments: bool = False

    @classmethod
    def of(cls, config: TeacherConfig, teacher: "Teacher") -> "InputFormat":
        """How a command reads: with segments if windows are pairs and the teacher has two token types."""
        return cls(config.documents_apart, config.packing == "pairs" and teacher.segments >= 2)

    def settings(self) -> dict[str, bool]:
        """The settings that this adds to the name of a store or a dictionary; none for windows read as one text."""
        return {name: True for name, value in self._asdict().items() if value}


AS_ONE_TEXT = InputFormat()


@dataclass(eq=False)
class Block:
    """Windows that become one block of a shard.

    columns     name to array, as `UnitWriter.write_block` takes them; complete after the last stage
    output      number of the block's target
    batches     number of its forward passes
    parts       columns of the finished batches; only the last stage changes this and the following fields
    statistics  sums over the block, for the unit's statistics, and its largest KKT violation
    seconds     busy time of teacher, solver and distributions, for the unit's environment
    facts       entries for the unit's environment that are known only after something was coded
    failed      windows without entries because coding them failed, or is known to fail: number in the block -> reason
    sums        sums of arrays over the block, for the unit's sums
    number_W    int64, the windows' numbers in a store of hidden states; None if a teacher reads the text
    """

    columns: dict
    output: int = 0
    batches: int = 0
    parts: list = field(default_factory=list)
    statistics: dict = field(default_factory=dict)
    seconds: dict = field(default_factory=dict)
    facts: dict = field(default_factory=dict)
    failed: dict = field(default_factory=dict)
    sums: dict = field(default_factory=dict)
    number_W: np.ndarray | None = None

    @classmethod
    def of(cls, windows: Sequence[Window], output: int = 0, failed: dict | None = None) -> "Block":
        """The block of some windows, with their ids alone."""
        number_W = None if windows[0].number is None else np.array([window.number for window in windows])
        return cls(join_windows(windows), output, failed=dict(failed or {}), number_W=number_W)

    @property
    def tokens(self) -> int:
        return len(self.columns["ids"])

    def add_to(self, statistics: dict, environment: dict, sums: dict) -> None:
        """Add the block's figures to those of its unit."""
        largest = max(statistics.get("max_kkt", 0.0), self.statistics.get("max_kkt", 0.0))
        add_amounts(statistics, self.statistics)
        add_amounts(environment, self.seconds)
        environment.update(self.facts)
        add_amounts(sums, self.sums)
        if "max_kkt" in self.statistics:
            statistics["max_kkt"] = largest


@dataclass(eq=False)
class TeacherBatch:
    """Windows of one forward pass; each stage replaces the data of the stage before.

    ids_WL     int64 tensor, padded, in pinned memory if there is a GPU
    real_WL    bool tensor, True at tokens; None if every window is full
    tokens_N   int64 tensor, the indices among the W * L positions that are coded
    coded_T    bool, for all tokens in sequence, whether each is coded
    windows    how many of the W windows are real; the others are copies
    first      number of the first window in its block
    blocks     the blocks that it is part of, one per target; after the teacher, each target has a batch of its own
    hidden     the hidden states, from the teacher until the solver takes them
    codes      the target's result from the hidden states
    marks      start and end times of "teacher" and of "solver", or of its replacement
    sharing    number of batches that share the teacher's pass
    documents_WL, segments_WL  int64 tensors as `Teacher` takes them, or None: see InputFormat
    rows_Nd    stored hidden states, float32 tensor on the host, if a store replaces the teacher; else None
    compared   whether the effect of the teacher's dtype is measured on it (precision.py)
    error      the error that teacher or solver raised; failures.py handles it
    idle       whether there is nothing to code because all of its windows are known to fail
    """

    ids_WL: torch.Tensor
    real_WL: torch.Tensor | None
    tokens_N: torch.Tensor
    coded_T: np.ndarray
    windows: int
    first: int = 0
    blocks: list = field(default_factory=list)
    hidden: Any = None
    codes: Any = None
    marks: dict = field(default_factory=dict)
    sharing: int = 1
    documents_WL: torch.Tensor | None = None
    segments_WL: torch.Tensor | None = None
    rows_Nd: torch.Tensor | None = None
    compared: bool = False
    error: Exception | None = None
    idle: bool = False

    @property
    def block(self) -> Block:
        """Its block, if it is part of only one."""
        (block,) = self.blocks
        return block

    def only(self, windows: Sequence[int] | np.ndarray) -> "TeacherBatch":
        """The batch with only these windows, in their places; all others become copies of the first of these."""
        chosen_W = np.zeros(len(self.ids_WL), bool)
        chosen_W[windows] = True
        source_W = torch.from_numpy(np.where(chosen_W, np.arange(len(chosen_W)), windows[0]))
        kept_N = chosen_W[self.tokens_N.numpy() // self.ids_WL.shape[1]]
        coded_T = self.coded_T.copy()
        coded_T[coded_T] = kept_N
        return replace(
            self,
            **self._rows(source_W),
            tokens_N=self.tokens_N[torch.from_numpy(kept_N)],
            rows_Nd=None if self.rows_Nd is None else self.rows_Nd[torch.from_numpy(kept_N)],
            coded_T=coded_T,
            hidden=None,
            codes=None,
            marks={},
            error=None,
        )

    def not_known_to_fail(self) -> list[int]:
        """Numbers of the windows that the batch's blocks do not name as failed."""
        return [window for window in range(self.windows) if self.first + window not in self.blocks[0].failed]

    def without_known_failures(self) -> "TeacherBatch":
        """The batch without the windows that are known to fail; idle if that leaves none."""
        whole = self.not_known_to_fail()
        if len(whole) == self.windows:
            return self
        return self.only(whole) if whole else replace(self, coded_T=np.zeros_like(self.coded_T), idle=True)

    def alone(self, windows: list[int]) -> "TeacherBatch":
        """A smaller batch of these windows, in increasing order; its `coded_T` is not adapted to them."""
        length, source_W = self.ids_WL.shape[1], torch.tensor(windows)
        window_N, place_N = self.tokens_N // length, self.tokens_N % length
        kept_N = torch.isin(window_N, source_W)
        tokens_N = torch.searchsorted(source_W, window_N[kept_N]) * length + place_N[kept_N]
        rows_Nd = None if self.rows_Nd is None else self.rows_Nd[kept_N]
        return replace(self, **self._rows(source_W), tokens_N=tokens_N, rows_Nd=rows_Nd, windows=len(windows), marks={})

    def _rows(self, source_W):
        names = ("ids_WL", "real_WL", "documents_WL", "segments_WL")
        return {name: None if (rows := getattr(self, name)) is None else rows[source_W] for name in names}

    @property
    def extra_inputs(self) -> dict[str, torch.Tensor]:
        """The teacher's inputs in addition to ids and padding, as keyword arguments."""
        given = {"documents_WL": self.documents_WL, "segments_WL": self.segments_WL, "rows_Nd": self.rows_Nd}
        return {name: tensor for name, tensor in given.items() if tensor is not None}

    @property
    def position_N(self) -> torch.Tensor:
        """The positions of the coded tokens as the teacher counts them, from 0; int64 tensor on the host."""
        if self.documents_WL is None:
            return self.tokens_N % self.ids_WL.shape[1]
        return positions_in_documents(self.documents_WL).flatten()[self.tokens_N]


def make_batch(
    ids_T: np.ndarray,
    lengths_W: np.ndarray,
    windows: int,
    max_length: int,
    special_ids: dict,
    pinned: bool = False,
    documents_T: np.ndarray | None = None,
    segments: bool = False,
) -> TeacherBatch:
    """The batch of some windows, given end to end.

    windows      windows in a forward pass; if there are fewer, copies of the first fill it up, so shapes are fixed
    pinned       whether to use memory that a GPU can copy from by itself
    documents_T  as from `documents_of`, if documents are kept apart
    segments     whether windows are sentence pairs for which the teacher gets token types
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
    return TeacherBatch(
        ids_WL, mask_WL, tokens_N, coded_T, len(lengths_W), documents_WL=documents_WL, segments_WL=segments_WL
    )


def documents_of(columns: dict[str, np.ndarray]) -> np.ndarray:
    """The number of each token's document inside its window, int64 (T,), from the columns of a block.

    The numbers equal the student's (shards/codec.py): [CLS] belongs to the first document, a [SEP] to the one it ends.
    """
    lengths_W = columns["lengths"]
    runs_T = np.searchsorted(columns["run_starts"], np.arange(lengths_W.sum()), side="right")
    return runs_T - np.repeat(runs_T[np.cumsum(lengths_W) - lengths_W], lengths_W)


def add_amounts(totals: dict[str, Any], amounts: dict[str, Any]) -> None:
    """Add numbers or arrays to those with the same names."""
    for name, amount in amounts.items():
        totals[name] = totals.get(name, 0) + amount


# -- hidden states -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Hidden:
    """Hidden states of a layer as its target codes them (unit length, or raw), on the teacher's device.

    layer       its number
    rows_Nd     float32 tensor
    not_finite  int64 tensor without axes: rows that hold NaN or infinity
    """

    layer: int
    rows_Nd: torch.Tensor
    not_finite: torch.Tensor

    def check(self, teacher: "Teacher") -> None:
        """Raise EncodeError if a row is not finite. Waits for the device."""
        if count := int(self.not_finite):
            raise not_finite(teacher, f"{teacher.name}, layer {self.layer}: {count} hidden states")


@torch.inference_mode()
def raw_rows(teacher: "Teacher", batch: TeacherBatch, layers: Iterable[int]) -> dict[int, torch.Tensor]:
    """Hidden states of a batch's coded tokens as the teacher gives them: dict of layer to a new (N, d) tensor."""
    wanted = sorted(set(layers))
    inputs, extra = (batch.ids_WL, batch.real_WL, batch.tokens_N), batch.extra_inputs
    last_alone = wanted == [teacher.layer]
    states = [teacher(*inputs, **extra)] if last_alone else teacher(*inputs, layers=wanted, **extra)
    return dict(zip(wanted, states, strict=True))


@torch.inference_mode()
def centred_rows(
    teacher: "Teacher", batch: TeacherBatch, wanted: Sequence[tuple[int, torch.Tensor | None]]
) -> list[Hidden]:
    """Hidden states of a batch's coded tokens, centred and scaled to unit length.

    wanted   pairs (layer, result of `center_on` for the dictionary that codes these states)
    Returns  list of Hidden, one for each pair; pairs of one layer without a centre share one Hidden
    """
    raw, found = raw_rows(teacher, batch, [layer for layer, _ in wanted]), {}
    if any(center_Pd is not None for _, center_Pd in wanted):
        position_N = batch.position_N.to(teacher.device, non_blocking=True)
    for number, (layer, center_Pd) in enumerate(wanted):
        if center_Pd is not None:
            found[number] = Hidden(layer, *centred_unit_rows(raw[layer].clone(), center_Pd, position_N))
    uncentred = {layer for layer, center_Pd in wanted if center_Pd is None}  # last: scaled in place
    plain = {layer: Hidden(layer, *centred_unit_rows(raw[layer], None, None)) for layer in uncentred}
    return [found.get(number) or plain[layer] for number, (layer, _) in enumerate(wanted)]


class TeacherRows(NamedTuple):
    """Raw hidden states with the positions of their tokens, as the teacher counts them."""

    rows_Nd: np.ndarray
    position_N: np.ndarray


def hidden_rows(
    teacher: Any,
    windows: Sequence,
    batch: int,
    max_length: int,
    special_ids: dict,
    layers: Sequence[int],
    form: InputFormat = AS_ONE_TEXT,
    raw: bool = False,
) -> list:
    """Unit-length hidden states of the non-special tokens of some windows, on the host.

    batch    windows in a forward pass; if there are fewer, copies of the first fill it up, so shapes are fixed
    raw      return the teacher's raw hidden states instead, with their positions
    Returns  list of hidden_Nd float32 (raw: of TeacherRows), one for every layer
    Raises   EncodeError on a hidden state that is not finite
    """
    columns = join_windows(windows)
    documents_T = documents_of(columns) if form.documents_apart else None
    prepared = make_batch(
        columns["ids"],
        columns["lengths"],
        batch,
        max_length,
        special_ids,
        documents_T=documents_T,
        segments=form.segments,
    )
    if windows[0].number is not None:
        prepared.rows_Nd = teacher.read(prepared, np.array([window.number for window in windows]))
    if raw:
        rows_of = raw_rows(teacher, prepared, layers)
        found = [Hidden(layer, rows_of[layer], (~rows_of[layer].isfinite().all(1)).sum()) for layer in layers]
    else:
        found = centred_rows(teacher, prepared, [(layer, None) for layer in layers])
    for hidden in found:
        hidden.check(teacher)
    rows = [hidden.rows_Nd.cpu().numpy() for hidden in found]
    return [TeacherRows(rows_Nd, prepared.position_N.numpy()) for rows_Nd in rows] if raw else rows


def center_on(device: torch.device | str, dictionary: Dictionary) -> torch.Tensor | None:
    """The rows that a dictionary subtracts at each position, on a device; None for one that is not centred."""
    return None if dictionary.center is None else torch.from_numpy(dictionary.center.rows_Pd).to(device)


def not_finite(teacher: "Teacher", what: str) -> EncodeError:
    """The error for values that are not finite; for a teacher in float16 it says that the dtype cannot hold them."""
    if isinstance(teacher, StoredHidden):
        return EncodeError(f"{what} are not finite in {teacher.store.path}, or not stored for this window.")
    if teacher.dtype != torch.float16:
        return EncodeError(f"{what} are not finite. Try --dtype float32.")
    return PrecisionError(
        f"{what} are not finite in float16, which holds numbers up to 65,504. Use --dtype bfloat16, which has the "
        "range of float32, or --dtype float32; either makes a separate store."
    )
