"""What a student learns at masked tokens: which tokens these are, and a record of tensors for every kind of target.

Left out: how they are read from a store (objectives.py, sparse_rows.py), the losses (losses.py).

Shapes: M masked tokens, V vocabulary, k LSPs, K outputs, E stored entries of M sparse rows.
"""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from shards.codec import HiddenRows, SparseRows
from shards.windows import WindowBatch, WindowReader


class MaskedTokens(NamedTuple):
    """M tokens of windows that were read, read.ids[window_M, position_M]."""

    windows: WindowReader
    read: WindowBatch
    window_M: np.ndarray
    position_M: np.ndarray

    def ids(self) -> np.ndarray:
        """Their token ids, int64 (M)."""
        return self.read.ids[self.window_M, self.position_M].astype(np.int64)

    def rows(self) -> SparseRows:
        """Their distributions as the store keeps them."""
        return self.windows.targets(self.read, self.window_M, self.position_M)

    def hidden(self) -> HiddenRows:
        """Their hidden states as the store keeps them."""
        return self.windows.hidden(self.read, self.window_M, self.position_M)


class SparseTargets(NamedTuple):
    """Sparse target distributions of M tokens, the stored entries renormalised to one by the reader, then tempered."""

    counts: tuple[int]
    """rows that are not empty"""
    entries_E: Tensor
    """int64 positions of the stored entries in the flattened (M k) logits of the LSPs"""
    weights_E: Tensor
    """float32 probabilities; every non-empty row sums to one"""
    coded_M: Tensor
    """float32, 1 where the row is not empty"""
    negative_entropy: float
    """sum of P log P over all entries, nats"""
    position_E: Tensor
    """int64, of each entry the position of its token as the teacher counted it: what a baseline may know"""
    untempered_E: Tensor | None = None
    """float32 probabilities as stored; None where they were not tempered"""
    untempered_negative_entropy: float = 0.0

    def as_stored(self) -> "SparseTargets":
        """The targets without their tempering."""
        if self.untempered_E is None:
            return self
        return self._replace(weights_E=self.untempered_E, negative_entropy=self.untempered_negative_entropy)


class TokenTargets(NamedTuple):
    """The ids of M masked tokens."""

    counts: tuple[int]
    labels_M: Tensor
    """int64"""


class TeacherTargets(NamedTuple):
    """The teacher's distributions: its most probable entries and one bucket for all others; and the true tokens."""

    counts: tuple[int]
    """rows that are not empty"""
    entries_E: Tensor
    """int64 positions of the stored entries in the flattened (M V) logits"""
    weights_E: Tensor
    """float32 probabilities; with its tail every non-empty row sums to one"""
    tail_M: Tensor
    """float32 probability of the bucket"""
    coded_M: Tensor
    """float32, 1 where the row is not empty"""
    negative_entropy: float
    """sum of P log P over entries and buckets, nats"""
    labels_M: Tensor
    """int64"""


class TableTargets(NamedTuple):
    """Distributions of M tokens that follow from their ids."""

    counts: tuple[int]
    """tokens that have one"""
    shares_MK: Tensor
    """float32 probabilities; the rows of other tokens are zero"""
    coded_M: Tensor
    """float32, 1 where a token has one"""


class VectorTargets(NamedTuple):
    """A vector for each of M tokens."""

    counts: tuple[int, ...]
    """tokens that have one; where words are learned too, all tokens"""
    vectors_Md: Tensor
    """float32; zeros for tokens without one"""
    coded_M: Tensor
    """float32, 1 where a token has one"""
    labels_M: Tensor
    """int64 ids of the tokens"""


class SeveralTargets(NamedTuple):
    """The targets of the same tokens from several stores."""

    counts: tuple[int, ...]
    """rows that are not empty, of each store"""
    of_stores: tuple
    """a record of each store"""


class JointTargets(NamedTuple):
    """Both targets of the multi-task objective."""

    counts: tuple[int, int]
    lsps: SparseTargets
    tokens: TokenTargets
