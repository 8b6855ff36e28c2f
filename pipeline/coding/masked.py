"""Hidden states of tokens that the teacher does not see: seven passes over a window with disjoint masks.

    rows_Nd = masked_rows(teacher, batch, mask_id)

Every coded token is hidden in exactly one pass, and its hidden state is that of this pass: the head then says what a
masked language model expects there, not what it reads there. One token in seven is hidden at once, 14.3 %, about as
many as the 15 % that masked language models are trained with. Which pass hides a token follows from the ids of its
window and its place among the coded tokens, so it depends on no other window; the student's own masks are others.
Left out: the distributions (logits.py).

Shapes: W windows, L window length, N coded tokens, n of them hidden in one pass, d hidden width.
"""

import zlib
from typing import TYPE_CHECKING

import numpy as np
import torch

from pipeline.coding.batch import Batch
from shards.counter import permutation

if TYPE_CHECKING:
    from pipeline.teacher import Teacher

PASSES = 7
_PURPOSE = 0x6C674D61  # "lgMa"


def assign_passes(ids_WL: np.ndarray, tokens_N: np.ndarray) -> np.ndarray:
    """The pass, 0 to PASSES - 1, in which each coded token is hidden: int64 (N).

    tokens_N  places in ids_WL counted row by row, increasing
    """
    windows, counts = np.unique(tokens_N // ids_WL.shape[1], return_counts=True)
    orders = [
        permutation(count, _PURPOSE, zlib.crc32(np.ascontiguousarray(ids_WL[window], "<i8").tobytes()))
        for window, count in zip(windows, counts, strict=True)
    ]
    return np.concatenate([np.zeros(0, np.int64), *orders]) % PASSES


@torch.inference_mode()
def masked_rows(teacher: "Teacher", batch: Batch, mask_id: int) -> torch.Tensor:
    """Hidden states (N, d) of a batch's coded tokens, each of the pass in which it is hidden; as `Teacher` gives them.

    All passes have the shape of the batch, so that what a window gets depends on no other window of it.
    """
    pass_N = torch.from_numpy(assign_passes(batch.ids_WL.numpy(), batch.tokens_N.numpy()))
    places, rows = [], []
    for number in pass_N.unique().tolist():
        place_n = (pass_N == number).nonzero().flatten()
        tokens_n, ids_WL = batch.tokens_N[place_n], batch.ids_WL.clone()
        ids_WL.view(-1)[tokens_n] = mask_id
        places.append(place_n)
        rows.append(teacher(ids_WL, batch.real_WL, tokens_n, **batch.reading))
    back_N = torch.cat(places).argsort()
    return torch.cat(rows).index_select(0, back_N.to(rows[0].device))
