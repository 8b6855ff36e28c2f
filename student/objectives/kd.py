"""kd: a teacher's stored distribution over the vocabulary.

Shapes: M masked tokens, K outputs, V vocabulary, E stored entries of M sparse rows.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shards.reader import Store
from shards.windows import WindowReader
from student.objectives.base import MaskedTokens, Objective, smoothed_mean, with_perplexity
from student.objectives.losses import divergence_by_token, sparse_cross_entropy
from student.objectives.sparse_rows import negative_entropy, row_of_entry

ENOUGH_TEACHER_MASS = 0.98  # average mass of the stored entries, below which there is a warning


class TeacherTargets(NamedTuple):
    """The teacher's distributions: its most probable entries and one bucket for all others; and the true tokens."""

    counts: tuple[int]
    """rows that are not empty"""
    entries_E: Tensor
    """int64 positions of the stored entries in the flattened (M V) logits"""
    weights_E: Tensor
    """float32 probabilities; every non-empty row sums to one together with its tail"""
    tail_M: Tensor
    """float32 probability of the bucket"""
    coded_M: Tensor
    """float32, 1 if the row is not empty"""
    negative_entropy: float
    """sum of P log P over entries and buckets, nats"""
    labels_M: Tensor
    """int64"""


class Kd(Objective):
    """Knowledge distillation at temperature 1: KL(P || Q) to the teacher's stored distribution over the vocabulary.

    The entries that are not stored share one bucket: sum P log(P / Q) + R log(R / S), with R the teacher's tail and S
    the student's mass outside the stored entries; a lower bound of the full KL, with the same minimum.
    """

    name = "kd"
    tied = True
    learns = "predicting a teacher's distribution over the vocabulary at masked tokens"
    loss_name, reference = "held-out KL", "the teacher's average distribution"

    def set_up(self, store: Store) -> None:
        self.tied, self.outputs = not self.untied, store.vocab_size
        self.token_columns = slice(0, self.outputs)
        self._check_mass(store, ENOUGH_TEACHER_MASS, "the teacher's probability on average, the rest is one bucket")

    def read_targets(self, masked: MaskedTokens) -> TeacherTargets:
        rows = masked.rows()
        coded_M = np.diff(rows.indptr) > 0
        row_E, inside_E = row_of_entry(rows), rows.indices < self.outputs  # padded outputs have more columns
        weights_E = rows.weights.astype(np.float64) * (1 - rows.tail.astype(np.float64))[row_E]
        outside_M = np.bincount(row_E[~inside_E], weights_E[~inside_E], len(coded_M))
        tail_M = np.where(coded_M, rows.tail + outside_M, 0.0)
        weights_E, row_E = weights_E[inside_E], row_E[inside_E]
        return TeacherTargets(
            counts=(int(coded_M.sum()),),
            entries_E=torch.from_numpy(row_E * self.outputs + rows.indices[inside_E]),
            weights_E=torch.from_numpy(weights_E.astype(np.float32)),
            tail_M=torch.from_numpy(tail_M.astype(np.float32)),
            coded_M=torch.from_numpy(coded_M.astype(np.float32)),
            negative_entropy=negative_entropy(weights_E) + negative_entropy(tail_M),
            labels_M=torch.from_numpy(masked.ids()),
        )

    def loss_sums(self, logits_MK: Tensor, targets: TeacherTargets) -> Tensor:
        entries_E, weights_E = targets.entries_E, targets.weights_E
        cross_entropy = sparse_cross_entropy(logits_MK, entries_E, weights_E, targets.coded_M, targets.tail_M)
        return (cross_entropy + targets.negative_entropy)[None]

    def token_losses(self, logits_MK: Tensor, targets: TeacherTargets) -> tuple[Tensor, Tensor]:
        divergence_M = divergence_by_token(logits_MK, targets.entries_E, targets.weights_E, targets.tail_M)
        return divergence_M[None], targets.coded_M[None]

    def measure(self, logits_MK: Tensor, targets: TeacherTargets) -> dict:
        cross_entropy = F.cross_entropy(logits_MK.float(), targets.labels_M, reduction="none") @ targets.coded_M
        return {
            "loss": self.loss_sums(logits_MK, targets)[0],
            "cross_entropy": cross_entropy,
            "accuracy": ((logits_MK.argmax(dim=1) == targets.labels_M) * targets.coded_M).sum(),
        }

    def figures(self, sums: dict, counts: tuple) -> dict:
        return with_perplexity(super().figures(sums, counts), "cross_entropy")

    def baseline(self, train: WindowReader, held_out: list[TeacherTargets], directory: Path | None = None) -> dict:
        """KL of the teacher's held-out distributions, with their buckets, to the constant average of the training
        split's stored entries, smoothed."""
        mean_V = smoothed_mean(train, train.store.k)[: self.outputs]  # a teacher's padded output layer has more
        count, loss = sum(targets.counts[0] for targets in held_out), 0.0
        for targets in held_out:
            row_E, column_E = np.divmod(targets.entries_E.numpy(), self.outputs)
            outside_M = 1 - np.bincount(row_E, mean_V[column_E], len(targets.tail_M))
            log_outside_M = np.log(outside_M.clip(min=np.finfo(np.float64).tiny))
            expected = targets.weights_E.double().numpy() @ np.log(mean_V[column_E])
            loss += targets.negative_entropy - expected - targets.tail_M.double().numpy() @ log_outside_M
        return {"loss": float(loss) / max(count, 1)}
