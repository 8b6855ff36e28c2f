"""Measure the effect of a low-precision teacher against float32, on the first windows of every unit.

Not handled here: numbers that float16 cannot hold, which end the run (failures.py).
"""

import logging
from typing import Any

import numpy as np
import torch

from pipeline.batch import TeacherBatch, add_amounts
from pipeline.failures import ran_out_of_memory

COMPARED_WINDOWS = 8  # windows to compare in every unit
logger = logging.getLogger(__name__)


class PrecisionCheck:
    """Compares the teacher of a Coder with itself in float32, which it loads when it first needs it.

    wanted  whether to compare: the teacher is not in float32, and memory suffices for both
    """

    def __init__(self, coder: Any):
        self._coder, self._in_float32 = coder, None
        self.wanted = coder.teacher.dtype != torch.float32 and hasattr(coder.teacher, "in_float32")  # not for a store

    @torch.inference_mode()
    def compare(self, batch: TeacherBatch) -> None:
        """Add to the block's statistics what the teacher's dtype changes in the first windows of a batch.

        Sums over their coded tokens: dtype_tokens; dtype_tv, total variation of the distributions; dtype_hidden,
        distance of the hidden states relative to the length of those in float32.
        """
        windows = batch.not_known_to_fail()[:COMPARED_WINDOWS]
        if not windows:
            return
        sample, output, coder = batch.alone(windows), batch.block.output, self._coder
        try:
            with coder.alone_on_device():
                if self._in_float32 is None:
                    self._in_float32 = coder.teacher.in_float32()
                teachers = coder.teacher, self._in_float32
                rows_Nd, exact_Nd = (coder.states(each, sample, [output])[0].rows_Nd for each in teachers)
                lengths_N = torch.linalg.vector_norm(exact_Nd, dim=1).clamp_min(1e-12)
                distance_N = (torch.linalg.vector_norm(rows_Nd - exact_Nd, dim=1) / lengths_N).cpu()
                variation_N = coder.targets[output].variation(rows_Nd, exact_Nd, self._in_float32)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            logger.warning(
                "the device has too little memory for a second teacher, in float32: the effect of --dtype is not "
                "measured"
            )
            self.wanted, self._in_float32 = False, None
            return
        figures = {
            "dtype_tokens": len(rows_Nd),
            "dtype_hidden": float(distance_N.sum(dtype=torch.float64)),
        }
        if variation_N is not None:
            figures["dtype_tv"] = float(variation_N.sum())
        add_amounts(batch.block.statistics, figures)


def total_variation(left_NK: np.ndarray, right_NK: np.ndarray) -> np.ndarray:
    """Half the sum of |P - Q| of each pair of rows, scaled to sum to one; 1 if only one of the two is all zeros."""
    sums = [rows_NK.sum(1, keepdims=True) for rows_NK in (left_NK, right_NK)]
    left_NK, right_NK = (rows / np.maximum(total, 1e-30) for rows, total in zip((left_NK, right_NK), sums, strict=True))
    only_one_N = ((sums[0] > 0) != (sums[1] > 0))[:, 0]
    return np.where(only_one_N, 1.0, 0.5 * np.abs(left_NK - right_NK).sum(1))
