"""mlm: the identity of a masked token.

Shapes: M masked tokens, K outputs, V vocabulary.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shards.reader import Store
from shards.windows import WindowReader
from student.objectives.base import MaskedTokens, Objective, with_perplexity
from student.objectives.losses import label_cross_entropy


class TokenTargets(NamedTuple):
    """The ids of M masked tokens."""

    counts: tuple[int]
    labels_M: Tensor
    """int64"""


class Mlm(Objective):
    """Masked language modeling: cross-entropy over the vocabulary, output matrix tied to the embeddings by default."""

    name = "mlm"
    tied = True
    learns = "predicting masked tokens"
    loss_name, reference = "held-out loss", "unigram frequencies"

    def set_up(self, store: Store) -> None:
        self.tied, self.outputs = not self.untied, store.vocab_size
        self.token_columns = slice(0, self.outputs)

    def read_targets(self, masked: MaskedTokens) -> TokenTargets:
        labels_M = masked.ids()
        return TokenTargets(counts=(len(labels_M),), labels_M=torch.from_numpy(labels_M))

    def loss_sums(self, logits_MK: Tensor, targets: TokenTargets) -> Tensor:
        return label_cross_entropy(logits_MK, targets.labels_M)[None]

    def token_losses(self, logits_MK: Tensor, targets: TokenTargets) -> tuple[Tensor, Tensor]:
        losses_M = F.cross_entropy(logits_MK.float(), targets.labels_M, reduction="none")
        return losses_M[None], torch.ones_like(losses_M)[None]

    def measure(self, logits_MK: Tensor, targets: TokenTargets) -> dict:
        correct = (logits_MK.argmax(dim=1) == targets.labels_M).sum()
        return {"loss": self.loss_sums(logits_MK, targets)[0], "accuracy": correct}

    def figures(self, sums: dict, counts: tuple) -> dict:
        return with_perplexity(super().figures(sums, counts), "loss")

    def baseline(self, train: WindowReader, held_out: list[TokenTargets], directory: Path | None = None) -> dict:
        """Unigram cross-entropy, and accuracy of always guessing the most frequent token.

        Counts are of the training split without special tokens, which are never masked, with add-one smoothing.
        """
        return with_perplexity(unigram_figures(train, held_out), "loss")


def unigram_figures(train_windows: WindowReader, held_out: list[TokenTargets]) -> dict:
    """Cross-entropy of the training split's token frequencies, accuracy of its most frequent token."""
    counts_V = train_windows.ordinary_counts()
    log_unigram_V = np.log((counts_V + 1) / (counts_V + 1).sum())
    labels = np.concatenate([targets.labels_M.numpy() for targets in held_out])
    count = max(len(labels), 1)
    return {
        "loss": -float(log_unigram_V[labels].sum()) / count,
        "accuracy": float((labels == counts_V.argmax()).sum()) / count,
    }
