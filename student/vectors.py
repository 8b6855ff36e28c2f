"""Objectives that learn a vector at each token: the teacher's hidden state, or what a stored code rebuilds of it.

    regress   the stored hidden state h, centred and standardised: t = (h - mean) / standard deviation, value by value
              over the training split. The natural rival of mlsm: the same teacher without a dictionary
    recon     D a, the sum of the dictionary's atoms by the stored LSP distribution a: the bytes of mlsm's targets in
              the geometry of regress

The loss of a token is 1 - cos(z, t) of the outputs z, between 0 and 2; with `--regress-loss mse` it is the mean squared
difference over the values, which is about 1 for the best constant prediction. Neither is in nats, and the two do not
compare. The held-out figure `cosine` does. A token without a target carries no loss.

Shapes: M masked tokens, V vocabulary, K outputs, d values of a vector.
"""

from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from scipy import sparse
from torch import Tensor

from shards import copies
from shards.reader import Store
from shards.windows import WindowReader
from student.baselines import unigram_figures, with_perplexity
from student.losses import sparse_cross_entropy
from student.objective import Objective
from student.targets import MaskedTokens, TokenTargets, VectorTargets

TOKENS = 2_000_000  # at most so many training tokens are read for the mean vectors of the baselines
WINDOWS_AT_ONCE = 512
SMALLEST = 1e-12  # a vector that is shorter has no direction


class Vectors(Objective):
    """What objectives with a vector for each token share; `read_vectors` says which."""

    loss_name = "held-out loss (1 - cosine)"
    reference, reference_by_type = "the mean vector", "the mean vector of the token's type"
    unit = "per masked token"
    width: int
    """d"""
    squared = False
    """whether the loss is the mean squared error"""

    def read_vectors(self, masked: MaskedTokens) -> np.ndarray:
        """The vectors of these tokens, float32 (M, d); zeros for a token that has none."""
        raise NotImplementedError

    def read_targets(self, masked: MaskedTokens) -> VectorTargets:
        vectors_Md = torch.from_numpy(self.read_vectors(masked))
        coded_M = vectors_Md.any(dim=1)
        if not self.squared:
            vectors_Md = F.normalize(vectors_Md, dim=1, eps=SMALLEST)
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
        """Figures of the mean training target for every token, and (`_by_type`) of the mean target of its id.

        Means are over the first TOKENS training tokens of the seed-0 order. They are the best constants of both losses.
        """
        mean_d, mean_by_id = mean_vectors(train, self)
        totals: dict[str, float] = {}
        for targets in held_out:
            constant_Md = mean_d.expand(len(targets.coded_M), -1)
            by_type_Md = torch.stack([mean_by_id.get(id, mean_d) for id in targets.labels_M.tolist()])
            for suffix, outputs_Md in (("", constant_Md), ("_by_type", by_type_Md)):
                for name, value in Vectors.measure(self, outputs_Md, targets).items():
                    totals[name + suffix] = totals.get(name + suffix, 0.0) + float(value)
        count = max(1, sum(targets.counts[0] for targets in held_out))
        return {name: total / count for name, total in totals.items()}


def mean_vectors(train: WindowReader, objective: Vectors) -> tuple[Tensor, dict[int, Tensor]]:
    """The mean target of a split's tokens, float32 (d), and that of the tokens of each id, by id."""
    windows = min(len(train), -(-TOKENS * len(train) // max(1, train.tokens)))
    special, vocabulary = train.store.special_ids["all"], train.store.vocab_size
    sums_Vd, counts_V = np.zeros((vocabulary, objective.width)), np.zeros(vocabulary)
    for start in range(0, windows, WINDOWS_AT_ONCE):
        read = train.read(train.order(0, 0, start, min(start + WINDOWS_AT_ONCE, windows)))
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


class Regress(Vectors):
    """The teacher's stored hidden state, centred and standardised, through a linear output of d values.

    With kappa above 0 the words are learned beside it, as in mtl: cross-entropy over V outputs that are tied to the
    token embedding and stand before the d, with a mean of its own.
    """

    name = "regress"
    kinds = ("hidden",)
    learns = "predicting a teacher's hidden states at masked tokens"
    usual_kappa = 0.0

    def set_up(self, store: Store) -> None:
        assert store.hidden is not None, "its kind says so"
        self.width = store.hidden.width
        self.outputs, self.squared = self.width, self.regress_loss == "mse"
        if self.squared:
            self.loss_name = "held-out mean squared error"
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

    def read_vectors(self, masked: MaskedTokens) -> np.ndarray:
        mean_d, deviation_d = self._statistics
        rows = masked.hidden()
        return (rows.rows_Md - mean_d) / deviation_d * rows.coded_M[:, None]

    def _counts(self, coded, tokens):
        return (coded, tokens) if self.kappa > 0 else (coded,)

    def loss_sums(self, logits_MK: Tensor, targets: VectorTargets) -> Tensor:
        found = super().loss_sums(logits_MK, targets)
        if self.token_columns is None:
            return found
        logits_MV, labels_M = logits_MK[:, self.token_columns], targets.labels_M
        entries_M = labels_M + logits_MV.shape[1] * torch.arange(len(labels_M), device=labels_M.device)
        ones_M = torch.ones(len(labels_M), device=labels_M.device)
        return torch.cat((found, sparse_cross_entropy(logits_MV, entries_M, ones_M, ones_M)[None]))

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


class Recon(Vectors):
    """The vector that the stored LSP distribution rebuilds with the dictionary's atoms, up to its length."""

    name = "recon"
    kinds = ("lsp",)
    learns = "predicting the hidden states that stored LSP distributions rebuild, at masked tokens"

    def set_up(self, store: Store) -> None:
        self._atoms_Kd = copies.read_atoms(store.files)
        self.width = self.outputs = self._atoms_Kd.shape[1]

    def read_vectors(self, masked: MaskedTokens) -> np.ndarray:
        rows = masked.rows()
        shape = (len(rows.tail), len(self._atoms_Kd))
        return sparse.csr_array((rows.weights, rows.indices, rows.indptr), shape=shape) @ self._atoms_Kd
