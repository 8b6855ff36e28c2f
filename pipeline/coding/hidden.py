"""Hidden states of batches: as the teacher gives them, or centred and scaled to unit length.

Shapes: N coded tokens, d hidden width, P positions.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from common.errors import EncodeError, PrecisionError
from pipeline.coding.batch import AS_ONE_TEXT, Batch, Reading, documents_of, make_batch
from pipeline.corpus import join_windows
from pipeline.dictionary import Dictionary
from pipeline.dictionary.centering import centred_unit_rows

if TYPE_CHECKING:
    from pipeline.teacher import Teacher


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

    def check(self, teacher: "Teacher") -> None:
        """Raise EncodeError if a row is not finite. Waits for the device."""
        if count := int(self.not_finite):
            raise not_finite(teacher, f"{teacher.name}, layer {self.layer}: {count} hidden states")


@torch.inference_mode()
def raw_rows(teacher: "Teacher", batch: Batch, layers: Iterable[int]) -> dict[int, torch.Tensor]:
    """Hidden states of a batch's coded tokens as the teacher gives them: dict of layer to a new (N, d) tensor."""
    wanted = sorted(set(layers))
    inputs, reading = (batch.ids_WL, batch.real_WL, batch.tokens_N), batch.reading
    last_alone = wanted == [teacher.layer]
    states = [teacher(*inputs, **reading)] if last_alone else teacher(*inputs, layers=wanted, **reading)
    return dict(zip(wanted, states, strict=True))


@torch.inference_mode()
def centred_rows(teacher: "Teacher", batch: Batch, wanted: Sequence[tuple[int, torch.Tensor | None]]) -> list[Hidden]:
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
    uncentred = {layer for layer, center_Pd in wanted if center_Pd is None}  # last: these are scaled in place
    plain = {layer: Hidden(layer, *centred_unit_rows(raw[layer], None, None)) for layer in uncentred}
    return [found.get(number) or plain[layer] for number, (layer, _) in enumerate(wanted)]


class HiddenRows(NamedTuple):
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
    reading: Reading = AS_ONE_TEXT,
    raw: bool = False,
) -> tuple[list, np.ndarray]:
    """Unit-length hidden states of the non-special tokens of some windows, on the host.

    batch    windows in a forward pass; fewer are filled up with copies of the first, so that shapes are fixed
    raw      as the teacher gives them instead, with their positions
    Returns  list of hidden_Nd float32 (raw: of HiddenRows), one for every layer; coded_T bool over the windows' tokens
             end to end
    Raises   EncodeError on a hidden state that is not finite
    """
    columns = join_windows(windows)
    documents_T = documents_of(columns) if reading.documents_apart else None
    prepared = make_batch(
        columns["ids"],
        columns["lengths"],
        batch,
        max_length,
        special_ids,
        documents_T=documents_T,
        segments=reading.segments,
    )
    if windows[0].number is not None:
        prepared.rows_Nd = teacher.read(prepared, np.array([window.number for window in windows]))
    if raw:
        found = raw_rows(teacher, prepared, layers)
        for layer, rows_Nd in found.items():
            Hidden(layer, rows_Nd, (~rows_Nd.isfinite().all(1)).sum()).check(teacher)
        position_N = prepared.position_N.numpy()
        return [HiddenRows(found[layer].cpu().numpy(), position_N) for layer in layers], prepared.coded_T
    found = dict(zip(layers, centred_rows(teacher, prepared, [(layer, None) for layer in layers]), strict=True))
    for hidden in found.values():
        hidden.check(teacher)
    return [found[layer].rows_Nd.cpu().numpy() for layer in layers], prepared.coded_T


def center_on(device: torch.device | str, dictionary: Dictionary) -> torch.Tensor | None:
    """The rows that a dictionary subtracts at each position, on a device; None for one that is not centred."""
    return None if dictionary.center is None else torch.from_numpy(dictionary.center.rows_Pd).to(device)


def not_finite(teacher: "Teacher", what: str) -> EncodeError:
    """The error that says that something is not finite; of float16, that the dtype cannot hold it."""
    if teacher.dtype != torch.float16:
        return EncodeError(f"{what} are not finite. Try --dtype float32.")
    return PrecisionError(
        f"{what} are not finite in float16, which holds numbers up to 65,504. Give --dtype bfloat16, which has the "
        "range of float32, or --dtype float32; either makes a store of its own."
    )
