"""Objectives that learn a vector per token: the teacher's hidden state, or its reconstruction from the stored code.

    regress   the stored hidden state h, centred and standardised: t = (h - mean) / standard deviation, value by value
              over the training split. The natural alternative to mlsm: the same teacher without a dictionary
    recon     D a, the sum of the dictionary's atoms weighted by the stored LSP distribution a: the same stored bytes as
              mlsm's targets, learned as a vector as in regress

The loss of a token is 1 - cos(z, t) of the outputs z, between 0 and 2. With `--regress-loss mse` it is the mean squared
difference over the values, about 1 for the best constant prediction, less if product quantisation has narrowed the
values. Neither loss is in nats, and the two cannot be compared; the held-out figure `cosine` can. A token without a
target carries no loss.

Shapes: M masked tokens, V vocabulary, K outputs, d values of a vector.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from scipy import sparse
from torch import Tensor

from shards.windows import WindowReader
from student.objectives.base import MaskedTokens, Objective

TOKENS = 2_000_000  # at most so many training tokens are read for the mean vectors of the baselines
TOKENS_AT_ONCE = 65_536  # that are read together
SMALLEST = 1e-12  # a vector that is shorter has no direction


class VectorTargets(NamedTuple):
    """A vector for each of M tokens."""

    counts: tuple[int, ...]
    """number of tokens with a target; if words are learned too, also the number of all tokens"""
    vectors_Md: Tensor
    """float32; zeros for tokens without one"""
    coded_M: Tensor
    """float32, 1 if a token has one"""
    labels_M: Tensor
    """int64 ids of the tokens"""


class Vectors(Objective):
    """The base of objectives whose target is one vector per token, which `read_vectors` returns."""

    loss_name = "held-out loss"
    reference, reference_by_type = (
        "the mean vector",
        "the mean vector of each word, seen without context",
    )
    unit = "per predicted token"
    width: int
    """d"""
    squared = False
    """whether the loss is the mean squared error"""

    def read_vectors(self, masked: MaskedTokens) -> tuple[np.ndarray, np.ndarray]:
        """New arrays: the vectors of these tokens, float32 (M, d), and whether a token has one; zeros if not."""
        raise NotImplementedError

    def read_targets(self, masked: MaskedTokens) -> VectorTargets:
        vectors_Md, coded_M = map(torch.from_numpy, self.read_vectors(masked))
        if not self.squared:
            vectors_Md /= vectors_Md.norm(dim=1, keepdim=True).clamp_min(SMALLEST)  # as F.normalize, in place
        return VectorTargets(
            self._counts(int(coded_M.sum()), len(coded_M)), vectors_Md, coded_M.float(), torch.from_numpy(masked.ids())
        )

    def _counts(self, coded: int, tokens: int) -> tuple[int, ...]:
        return (coded,)

    def _vector_losses(self, outputs_Md: Tensor, targets: VectorTargets) -> Tensor:
        """The loss of each token, float32 (M), 0 without a target."""
        outputs_Md = outputs_Md.float()
        if self.squared:
            return ((outputs_Md - targets.vectors_Md) ** 2).mean(dim=1) * targets.coded_M
        return targets.coded_M - self._cosines(outputs_Md, targets)

    @staticmethod
    def _cosines(outputs_Md: Tensor, targets: VectorTargets) -> Tensor:
        """Cosine of each token's outputs and target, float32 (M), 0 without a target."""
        return F.cosine_similarity(outputs_Md.float(), targets.vectors_Md, dim=1, eps=SMALLEST) * targets.coded_M

    def loss_sums(self, logits_MK: Tensor, targets: VectorTargets) -> Tensor:
        return self._vector_losses(logits_MK[:, -self.width :], targets).sum()[None]

    @torch.no_grad()
    def token_losses(self, logits_MK: Tensor, targets: VectorTargets) -> tuple[Tensor, Tensor]:
        return self._vector_losses(logits_MK[:, -self.width :], targets)[None], targets.coded_M[None]

    def measure(self, logits_MK: Tensor, targets: VectorTargets) -> dict:
        outputs_Md = logits_MK[:, -self.width :]
        cosine = self._cosines(outputs_Md, targets).sum()
        return {"loss": self._vector_losses(outputs_Md, targets).sum(), "cosine": cosine}

    def baseline(self, train: WindowReader, held_out: list[VectorTargets], directory: Path | None = None) -> dict:
        """Figures of predicting the mean training target for every token, and (`_by_type`) the mean target of its id.

        Means are over the first TOKENS training tokens of the seed-0 order: the best constants for both losses on
        these tokens. There the cosine loss of the mean is at most 1. On the held-out tokens it can be slightly above 1,
        and `cosine` below 0: the mean of centred vectors is short, and from few tokens its direction is chance.
        """
        mean_d, mean_by_id = mean_vectors(train, self)
        totals: dict[str, float] = {}
        for targets in held_out:
            if not len(targets.labels_M):  # a short window may have no masked token
                continue
            constant_Md = mean_d.expand(len(targets.coded_M), -1)
            by_type_Md = torch.stack([mean_by_id.get(id, mean_d) for id in targets.labels_M.tolist()])
            for suffix, outputs_Md in (("", constant_Md), ("_by_type", by_type_Md)):
                for name, value in Vectors.measure(self, outputs_Md, targets).items():
                    totals[name + suffix] = totals.get(name + suffix, 0.0) + float(value)
        count = max(1, sum(targets.counts[0] for targets in held_out))
        return {name: total / count for name, total in totals.items()}


def mean_vectors(train: WindowReader, objective: Vectors) -> tuple[Tensor, dict[int, Tensor]]:
    """The mean target of a split's tokens, float32 (d), and the mean target for each token id."""
    windows = min(len(train), -(-TOKENS * len(train) // max(1, train.tokens)))
    special, vocabulary = train.store.special_ids["all"], train.store.vocab_size
    sums_Vd, counts_V = np.zeros((vocabulary, objective.width)), np.zeros(vocabulary)
    at_once = max(1, TOKENS_AT_ONCE // train.store.max_length)
    for start in range(0, windows, at_once):
        read = train.read(train.order(0, 0, start, min(start + at_once, windows)))
        window_N, position_N = np.nonzero((read.documents >= 0) & ~np.isin(read.ids, special))
        targets = objective.read_targets(MaskedTokens(train, read, window_N, position_N))
        ids_N, coded_N = targets.labels_M.numpy(), targets.coded_M.numpy().astype(np.float64)
        one_of_each = sparse.csr_array((coded_N, (ids_N, np.arange(len(ids_N)))), shape=(vocabulary, len(ids_N)))
        present_U = np.unique(ids_N)
        sums_Vd[present_U] += one_of_each[present_U] @ targets.vectors_Md.numpy()
        counts_V += np.bincount(ids_N, coded_N, vocabulary)
    mean_d = sums_Vd.sum(axis=0) / max(1.0, counts_V.sum())
    found = {int(id): torch.from_numpy(sums_Vd[id] / counts_V[id]).float() for id in np.flatnonzero(counts_V)}
    return torch.from_numpy(mean_d).float(), found
