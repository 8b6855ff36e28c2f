"""Objectives whose target follows only from the masked token's id, regardless of its context: a table of distributions.

These are `type` (type.py) and `supersense` (supersense.py).

Shapes: M masked tokens, V vocabulary, K outputs.
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


class TableTargets(NamedTuple):
    """Distributions of M tokens that follow from their ids."""

    counts: tuple[int]
    """number of tokens with a distribution, per loss term"""
    shares_MK: Tensor
    """float32 probabilities; the rows of other tokens are zero"""
    coded_M: Tensor
    """float32, 1 if a token has one"""


class TokenTable(Objective):
    """KL(P || Q) to the distribution P of the token's id; a token without a distribution carries no loss.

    table_VK  float32 CSR; the row of an id sums to one or is empty
    """

    table_VK: sparse.csr_array
    coverage: str
    """what the log calls the share of the training split's tokens that have a distribution"""

    def read_targets(self, masked: MaskedTokens) -> TableTargets:
        shares_MK = torch.from_numpy(self.table_VK[masked.ids()].toarray())
        coded_M = shares_MK.any(dim=1)
        return TableTargets((int(coded_M.sum()),), shares_MK, coded_M.float())

    def loss_sums(self, logits_MK: Tensor, targets: TableTargets) -> Tensor:
        return F.kl_div(F.log_softmax(logits_MK.float(), dim=1), targets.shares_MK, reduction="sum")[None]

    @torch.no_grad()
    def token_losses(self, logits_MK: Tensor, targets: TableTargets) -> tuple[Tensor, Tensor]:
        losses_MK = F.kl_div(F.log_softmax(logits_MK.float(), dim=1), targets.shares_MK, reduction="none")
        return losses_MK.sum(dim=1)[None], targets.coded_M[None]

    def measure(self, logits_MK: Tensor, targets: TableTargets) -> dict:
        return {"loss": self.loss_sums(logits_MK, targets)[0]}

    def baseline(self, train: WindowReader, held_out: list[TableTargets], directory: Path | None = None) -> dict:
        """KL of the held-out rows to the average row of the training split's tokens, smoothed by one uniform row."""
        counts_V = train.ordinary_counts()
        sums_K = torch.from_numpy(self.table_VK.T.astype(np.float64) @ counts_V)
        self.facts[self.coverage] = float(sums_K.sum() / max(1, counts_V.sum()))
        logits_K = (sums_K + 1 / self.outputs).log()  # log of the average up to a constant: its softmax is the average
        losses = [self.loss_sums(logits_K.expand(targets.shares_MK.shape), targets) for targets in held_out]
        return {"loss": float(sum(losses)) / max(1, sum(targets.counts[0] for targets in held_out))}
