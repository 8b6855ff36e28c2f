"""mtl: the stored LSP distribution and the identity of a masked token at once."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from shards.reader import Store
from shards.windows import WindowReader
from student.objectives.base import MaskedTokens, Objective, with_perplexity
from student.objectives.mlm import Mlm, TokenTargets, unigram_figures
from student.objectives.mlsm import SparseTargets
from student.objectives.naive_mlsm import NaiveMlsm


class JointTargets(NamedTuple):
    """The two targets of the multi-task objective: tokens and their LSP distributions."""

    counts: tuple[int, int]
    lsps: SparseTargets
    tokens: TokenTargets


class Mtl(Objective):
    """Multi-task: KL over the k LSPs + kappa x cross-entropy over the V words, each with its own softmax and mean.

    One output layer of V + k columns, the vocabulary first. The vocabulary's rows of the output matrix are the token
    embedding. The official code does the same in another way: `resize_token_embeddings(V + k)` adds k rows to the
    embedding and keeps the decoder tied to all V + k of them. No input is one of the k new tokens, so only the output
    layer uses these rows. Here they are kept separate from the embedding, which stays at V rows. With `untied` the
    output layer also has its own V rows.
    """

    name = "mtl"
    learns = "predicting masked tokens and their distributions over latent semantic properties (LSPs)"
    loss_name, reference = "held-out loss", "the marginal and unigram frequencies"
    reference_by_position = "the marginal by position and unigram frequencies"
    tied = True
    target_temperature = 1.0  # as of mlsm

    def set_up(self, store: Store) -> None:
        self.tied = not self.untied
        self.lsp_part, self.token_part = NaiveMlsm(store, target_temperature=self.target_temperature), Mlm(store)
        self.facts = self.lsp_part.facts
        self.outputs = self.lsp_part.outputs
        self.token_columns, self.lsp_columns = self.token_part.token_columns, self.lsp_part.lsp_columns
        self.term_weights = (1.0, self.kappa)

    def read_targets(self, masked: MaskedTokens) -> JointTargets:
        lsps, tokens = self.lsp_part.read_targets(masked), self.token_part.read_targets(masked)
        return JointTargets(lsps.counts + tokens.counts, lsps, tokens)

    def loss_sums(self, logits_MK: Tensor, targets: JointTargets) -> Tensor:
        kl = self.lsp_part.loss_sums(logits_MK, targets.lsps)
        cross_entropy = self.token_part.loss_sums(logits_MK[:, self.token_columns], targets.tokens)
        return torch.cat((kl, cross_entropy))

    def token_losses(self, logits_MK: Tensor, targets: JointTargets) -> tuple[Tensor, Tensor]:
        kl, coded = self.lsp_part.token_losses(logits_MK, targets.lsps)
        cross_entropy, tokens = self.token_part.token_losses(logits_MK[:, self.token_columns], targets.tokens)
        return torch.cat((kl, cross_entropy)), torch.cat((coded, tokens))

    def measure(self, logits_MK: Tensor, targets: JointTargets) -> dict:
        kl, cross_entropy = self.loss_sums(logits_MK, targets)
        correct = (logits_MK[:, self.token_columns].argmax(dim=1) == targets.tokens.labels_M).sum()
        untempered = self.lsp_part.measure_untempered(logits_MK, targets.lsps)
        return {"kl": kl, "cross_entropy": cross_entropy, "accuracy": correct} | untempered

    def figures(self, sums: dict, counts: tuple) -> dict:
        of_tokens = ("cross_entropy", "accuracy")
        means = {name: float(total) / max(counts[1 if name in of_tokens else 0], 1) for name, total in sums.items()}
        return self._add_loss(means)

    def baseline(self, train: WindowReader, held_out: list[JointTargets], directory: Path | None = None) -> dict:
        of_lsps = [targets.lsps for targets in held_out]
        kl = self.lsp_part.baseline(train, of_lsps, directory)
        tokens = unigram_figures(train, [targets.tokens for targets in held_out])
        means = {"kl": kl.pop("loss"), "kl_by_position": kl.pop("loss_by_position")}
        figures = self._add_loss(means | {"cross_entropy": tokens["loss"], "accuracy": tokens["accuracy"]} | kl)
        loss = self._loss(figures["kl_by_position"], figures["cross_entropy"])
        return figures | {"loss_by_position": loss}

    def _loss(self, kl: float, cross_entropy: float) -> float:
        return kl + self.term_weights[1] * cross_entropy

    def _add_loss(self, figures: dict) -> dict:
        loss = self._loss(figures["kl"], figures["cross_entropy"])
        return with_perplexity({"loss": loss} | figures, "cross_entropy")
