"""regress: the teacher's stored hidden state at a masked token.

Shapes: M masked tokens, V vocabulary, K outputs, d values of a vector.
"""

from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shards.reader import Store
from shards.windows import WindowReader
from student.objectives.base import MaskedTokens, with_perplexity
from student.objectives.losses import label_cross_entropy
from student.objectives.mlm import TokenTargets, unigram_figures
from student.objectives.vectors import Vectors, VectorTargets


class Regress(Vectors):
    """Predict the teacher's stored hidden state, centred and standardised, by a linear output of d values.

    With kappa above 0 words are learned as well, as in mtl: cross-entropy over V outputs, which are tied to the token
    embedding and come before the d values, with its own mean.
    """

    name = "regress"
    learns = "predicting a teacher's hidden states at masked tokens"
    regress_loss = "cosine"  # or "mse"

    def set_up(self, store: Store) -> None:
        assert store.hidden is not None, "its kind says so"
        self.width = store.hidden.width
        self.outputs, self.squared = self.width, self.regress_loss == "mse"
        if self.kappa > 0:
            self.outputs += store.vocab_size
            self.tied, self.token_columns = True, slice(0, store.vocab_size)
            self.term_weights = (1.0, self.kappa)
            self.learns += ", and the tokens themselves"
        self._store = store

    @cached_property
    def _statistics(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation of every value over the training split, float32 (d)."""
        mean_d, deviation_d = self._store.split("train").hidden_statistics()
        return mean_d.astype(np.float32), np.where(deviation_d > 0, deviation_d, 1).astype(np.float32)

    def read_vectors(self, masked: MaskedTokens) -> tuple[np.ndarray, np.ndarray]:
        mean_d, deviation_d = self._statistics
        rows = masked.hidden()
        vectors_Md = rows.rows_Md  # changed in place: new arrays of this size cost more than the arithmetic
        vectors_Md -= mean_d
        vectors_Md /= deviation_d
        vectors_Md[~rows.coded_M] = 0
        return vectors_Md, rows.coded_M

    def _counts(self, coded, tokens):
        return (coded, tokens) if self.kappa > 0 else (coded,)

    def loss_sums(self, logits_MK: Tensor, targets: VectorTargets) -> Tensor:
        found = super().loss_sums(logits_MK, targets)
        if self.token_columns is None:
            return found
        of_words = label_cross_entropy(logits_MK[:, self.token_columns], targets.labels_M)
        return torch.cat((found, of_words[None]))

    @torch.no_grad()
    def token_losses(self, logits_MK: Tensor, targets: VectorTargets) -> tuple[Tensor, Tensor]:
        losses, coded = super().token_losses(logits_MK, targets)
        if self.token_columns is None:
            return losses, coded
        words_M = F.cross_entropy(logits_MK[:, self.token_columns].float(), targets.labels_M, reduction="none")
        return torch.cat((losses, words_M[None])), torch.cat((coded, torch.ones_like(coded)))

    def measure(self, logits_MK: Tensor, targets: VectorTargets) -> dict:
        found = super().measure(logits_MK, targets)
        if self.token_columns is None:
            return found
        correct = (logits_MK[:, self.token_columns].argmax(dim=1) == targets.labels_M).sum()
        regression, cross_entropy = self.loss_sums(logits_MK, targets)
        return {
            "regression": regression,
            "cosine": found["cosine"],
            "cross_entropy": cross_entropy,
            "accuracy": correct,
        }

    def figures(self, sums: dict, counts: tuple) -> dict:
        if self.token_columns is None:
            return super().figures(sums, counts)
        of_tokens = ("cross_entropy", "accuracy")
        return self._add_loss({name: float(sums[name]) / max(counts[name in of_tokens], 1) for name in sums})

    def baseline(self, train: WindowReader, held_out: list[VectorTargets], directory: Path | None = None) -> dict:
        found = super().baseline(train, held_out, directory)
        if self.token_columns is None:
            return found
        words = unigram_figures(train, [TokenTargets((len(one.labels_M),), one.labels_M) for one in held_out])
        words = {"cross_entropy": words["loss"], "accuracy": words["accuracy"]}
        by_type = found["loss_by_type"] + self.kappa * words["cross_entropy"]
        means = {"regression": found["loss"], "cosine": found["cosine"], "cosine_by_type": found["cosine_by_type"]}
        return self._add_loss(means | words) | {"loss_by_type": by_type}

    def _add_loss(self, figures: dict) -> dict:
        loss = figures["regression"] + self.kappa * figures["cross_entropy"]
        return with_perplexity({"loss": loss} | figures, "cross_entropy")
