"""What a student learns at masked tokens, as tensors: one record for every kind of target.

Left out: how they are read from a store (objectives.py, sparse_rows.py), the losses (losses.py).

Shapes: M masked tokens, V vocabulary, k LSPs, E stored entries of M sparse rows.
"""

from typing import NamedTuple

import torch


class SparseTargets(NamedTuple):
    """Sparse target distributions of M tokens, the stored entries renormalised to one by the reader, then tempered."""

    counts: tuple[int]
    """rows that are not empty"""
    entries_E: torch.Tensor
    """int64 positions of the stored entries in the flattened (M k) logits of the LSPs"""
    weights_E: torch.Tensor
    """float32 probabilities; every non-empty row sums to one"""
    coded_M: torch.Tensor
    """float32, 1 where the row is not empty"""
    negative_entropy: float
    """sum of P log P over all entries, nats"""
    untempered_E: torch.Tensor | None = None
    """float32 probabilities as stored; None where they were not tempered"""
    untempered_negative_entropy: float = 0.0
    position_E: torch.Tensor | None = None
    """int64, of each entry the position of its token as the teacher counted it: what a baseline may know"""

    def as_stored(self) -> "SparseTargets":
        """The targets without their tempering."""
        if self.untempered_E is None:
            return self
        return self._replace(weights_E=self.untempered_E, negative_entropy=self.untempered_negative_entropy)


class TokenTargets(NamedTuple):
    """The ids of M masked tokens."""

    counts: tuple[int]
    labels_M: torch.Tensor
    """int64"""


class TeacherTargets(NamedTuple):
    """The teacher's distributions: its most probable entries and one bucket for all others; and the true tokens."""

    counts: tuple[int]
    """rows that are not empty"""
    entries_E: torch.Tensor
    """int64 positions of the stored entries in the flattened (M V) logits"""
    weights_E: torch.Tensor
    """float32 probabilities; with its tail every non-empty row sums to one"""
    tail_M: torch.Tensor
    """float32 probability of the bucket"""
    coded_M: torch.Tensor
    """float32, 1 where the row is not empty"""
    negative_entropy: float
    """sum of P log P over entries and buckets, nats"""
    labels_M: torch.Tensor
    """int64"""


class JointTargets(NamedTuple):
    """Both targets of the multi-task objective."""

    counts: tuple[int, int]
    lsps: SparseTargets
    tokens: TokenTargets
