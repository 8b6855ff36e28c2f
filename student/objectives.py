"""What the student learns at a masked token: one small class per objective, and the table of them.

To add one: docs/training.md, "Add an objective".
Left out: supersense (supersenses.py), type (token_tables.py), regress and recon (vectors.py), what all of them share
(objective.py), what is masked (masking.py), the records of targets (targets.py), the arithmetic of the gradient
(losses.py) and of constant predictions (baselines.py).

Shapes: M masked tokens, K outputs, V vocabulary, k LSPs, E stored entries of M sparse rows, T loss terms.
"""

import logging
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shards.positions import positions_in_documents
from shards.reader import Store
from shards.windows import WindowReader
from student.baselines import average_lsp_figures, average_teacher_figures, unigram_figures, with_perplexity
from student.losses import divergence_by_token, sparse_cross_entropy
from student.objective import Objective
from student.sparse_rows import negative_entropy, row_of_entry, temper
from student.supersenses import Supersense
from student.targets import JointTargets, MaskedTokens, SparseTargets, TeacherTargets, TokenTargets
from student.token_tables import TypeAverage
from student.vectors import Recon, Regress

logger = logging.getLogger(__name__)

# Average mass of the stored entries in the distributions that they were taken from, below which an objective warns.
ENOUGH_LSP_MASS, ENOUGH_TEACHER_MASS = 0.95, 0.98


class Mlsm(Objective):
    """Masked latent semantic modeling: KL(P || Q) to the stored LSP distribution P (MLSM paper, section 3).

    Per token, over the stored entries of P: sum P log P - sum P log Q, Q being the softmax of the k logits.
    A token without a code carries no loss.

    With a target temperature T other than 1, P is the stored distribution to the power 1/T, renormalised over the
    stored entries. Losses of different T do not compare. Two held-out figures do, as both are KL to the distributions
    as stored: `kl_untempered` of Q, and `kl_untempered_back` of Q^T renormalised, the softmax of T times the logits. A
    student that predicts P exactly has 0 in the latter.
    """

    name = "mlsm"
    kinds = ("lsp",)
    learns = "predicting the distribution over latent semantic properties (LSPs) of masked tokens"
    loss_name, reference = "held-out KL", "the marginal (a constant average LSP distribution)"
    reference_by_position = "the marginal by position (the average LSP distribution at the token's position)"

    behind_vocabulary = False
    """whether the LSPs are the last k of V + k outputs, not all outputs"""
    enough_mass = ENOUGH_LSP_MASS
    """average mass that the store should keep of a distribution; below it there is a warning"""

    def set_up(self, store: Store) -> None:
        first_lsp = store.vocab_size if self.behind_vocabulary else 0
        self.lsps, self.outputs = store.k, first_lsp + store.k
        self.lsp_columns = slice(first_lsp, self.outputs)
        self._documents_apart = store.settings.get("documents_apart", False)  # how the teacher counted positions
        self._check_mass(
            store, self.enough_mass, "an LSP distribution on average, and what it keeps is learned as if it were all"
        )
        if self.temperature != 1:
            self.facts["target_temperature"] = self.temperature
            logger.info(
                "targets are p^(1/%g): loss and baseline do not compare with those of another --target-temperature,"
                " kl_untempered and kl_untempered_back do",
                self.temperature,
            )

    def read_targets(self, masked: MaskedTokens) -> SparseTargets:
        rows = masked.rows()
        coded_M = np.diff(rows.indptr) > 0
        weights_E = np.ascontiguousarray(rows.weights)
        position_M = masked.position_M
        if self._documents_apart:
            position_M = positions_in_documents(masked.read.documents)[masked.window_M, position_M]
        targets = SparseTargets(
            counts=(int(coded_M.sum()),),
            entries_E=torch.from_numpy(row_of_entry(rows) * self.lsps + rows.indices),
            weights_E=torch.from_numpy(weights_E),
            coded_M=torch.from_numpy(coded_M.astype(np.float32)),
            negative_entropy=negative_entropy(weights_E.astype(np.float64)),
            position_E=torch.from_numpy(np.repeat(position_M, np.diff(rows.indptr))),
        )
        if self.temperature == 1:
            return targets
        tempered_E = temper(rows, self.temperature)
        return targets._replace(
            weights_E=torch.from_numpy(tempered_E.astype(np.float32)),
            negative_entropy=negative_entropy(tempered_E),
            untempered_E=targets.weights_E,
            untempered_negative_entropy=targets.negative_entropy,
        )

    def loss_sums(self, logits_MK: Tensor, targets: SparseTargets) -> Tensor:
        logits_Mk = logits_MK[:, self.lsp_columns]
        cross_entropy = sparse_cross_entropy(logits_Mk, targets.entries_E, targets.weights_E, targets.coded_M)
        return (cross_entropy + targets.negative_entropy)[None]

    def token_losses(self, logits_MK: Tensor, targets: SparseTargets) -> tuple[Tensor, Tensor]:
        logits_Mk = logits_MK[:, self.lsp_columns]
        return divergence_by_token(logits_Mk, targets.entries_E, targets.weights_E)[None], targets.coded_M[None]

    def measure(self, logits_MK: Tensor, targets: SparseTargets) -> dict:
        return {"loss": self.loss_sums(logits_MK, targets)[0]} | self.measure_untempered(logits_MK, targets)

    def measure_untempered(self, logits_MK: Tensor, targets: SparseTargets) -> dict:
        """The figures against the distributions as stored; none where the targets are these."""
        if targets.untempered_E is None:
            return {}
        logits = {"kl_untempered": logits_MK}
        if self.temperature > 0:
            logits["kl_untempered_back"] = logits_MK.float() * self.temperature
        return {name: self.loss_sums(logits_MK, targets.as_stored())[0] for name, logits_MK in logits.items()}

    def baseline(self, train: WindowReader, held_out: list[SparseTargets], directory: Path | None = None) -> dict:
        """KL of the held-out rows against the average LSP distribution of the training split: that of all tokens, and
        (`_by_position`) that of the tokens at the same position."""
        return average_lsp_figures(train, held_out, directory, lsps=self.lsps, temperature=self.temperature)


class HardMlsm(Mlsm):
    """The largest LSP alone: cross-entropy to the arg-max of the stored distribution, of equal ones the lowest number.

    The official code's loss where its KL is switched off (`--not-kl_loss`). There a token without a code is taught
    LSP 0, the arg-max of nothing; here it carries no loss, as in mlsm. It is mlsm in the limit of a target temperature
    of 0, and is computed as that. `kl_untempered`, the KL to the distributions as stored, compares with mlsm's loss.
    """

    name = "hard-mlsm"
    learns = "predicting the most probable latent semantic property (LSP) of masked tokens"
    loss_name, reference = "held-out loss", "the frequencies of LSPs as a token's largest"
    reference_by_position = "the frequencies of LSPs as a token's largest, by position"
    guess = "most frequent largest LSP"
    enough_mass = 0.0  # the largest entry is always kept

    def set_up(self, store: Store) -> None:
        super().set_up(store)
        self.temperature = 0.0

    def measure(self, logits_MK: Tensor, targets: SparseTargets) -> dict:
        largest_C = targets.entries_E[targets.weights_E == 1]  # one for each of C coded tokens
        predicted_M = logits_MK[:, self.lsp_columns].argmax(dim=1)
        correct = (predicted_M[largest_C // self.lsps] == largest_C % self.lsps).sum()
        return super().measure(logits_MK, targets) | {"accuracy": correct}

    def figures(self, sums: dict, counts: tuple) -> dict:
        return with_perplexity(super().figures(sums, counts), "loss")

    def baseline(self, train: WindowReader, held_out: list[SparseTargets], directory: Path | None = None) -> dict:
        """Cross-entropy of the training split's frequencies of largest LSPs: over all tokens, and (`_by_position`) over
        those at the same position; accuracy of the most frequent one."""
        return with_perplexity(super().baseline(train, held_out, directory), "loss")


class NaiveMlsm(Mlsm):
    """MLSM as a slice of an output layer of V + k columns, the others computed and not used: for comparing costs.

    The output layer is that of mtl, tied or not.
    """

    name = "naive-mlsm"
    behind_vocabulary = True
    tied = True

    def set_up(self, store: Store) -> None:
        super().set_up(store)
        self.tied = not self.untied


class Mlm(Objective):
    """Masked language modeling: cross-entropy over the vocabulary, output matrix tied to the embeddings by default."""

    name = "mlm"
    kinds = ("ids", "lsp", "logits", "hidden")
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
        labels_M = targets.labels_M
        entries_M = labels_M + self.outputs * torch.arange(len(labels_M), device=labels_M.device)
        ones_M = torch.ones(len(labels_M), device=labels_M.device)
        return sparse_cross_entropy(logits_MK, entries_M, ones_M, ones_M)[None]

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

        Counts of the training split without special tokens, which are never masked; add-one smoothing.
        """
        return with_perplexity(unigram_figures(train, held_out), "loss")


class Kd(Objective):
    """Knowledge distillation at temperature 1: KL(P || Q) to the teacher's stored distribution over the vocabulary.

    The entries that are not stored share one bucket: sum P log(P / Q) + R log(R / S), with R the teacher's tail and S
    the student's mass outside the stored entries; a lower bound of the full KL, with the same minimum.
    """

    name = "kd"
    kinds = ("logits",)
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
        row_E, inside_E = row_of_entry(rows), rows.indices < self.outputs  # a padded head has more
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
        """KL of the held-out rows against the constant average of the training split's stored entries, smoothed."""
        return average_teacher_figures(train, held_out, self.outputs)


class Mtl(Objective):
    """Multi-task: KL over the k slice + kappa x cross-entropy over the V slice, each with its own softmax and mean.

    One output layer of V + k columns, the vocabulary first. The vocabulary's rows of the output matrix are the token
    embedding. The official code comes to the same in another way: `resize_token_embeddings(V + k)` adds k rows to the
    embedding and keeps the decoder tied to all V + k of them; as no input is one of the k new tokens, these rows are
    parameters of the output layer alone. Here they are kept beside the embedding, which stays at V rows.
    With `untied` the V rows are parameters of the output layer, too.
    """

    name = "mtl"
    kinds = ("lsp",)
    learns = "predicting masked tokens and their distributions over latent semantic properties (LSPs)"
    loss_name, reference = "held-out loss", "the marginal and unigram frequencies"
    reference_by_position = "the marginal by position and unigram frequencies"
    tied = True

    def set_up(self, store: Store) -> None:
        self.tied = not self.untied
        self.lsp_part, self.token_part = NaiveMlsm(store, target_temperature=self.temperature), Mlm(store)
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


_ALL = (Mlsm, Mlm, Kd, Mtl, HardMlsm, NaiveMlsm, Supersense, TypeAverage, Regress, Recon)
OBJECTIVES = {objective.name: objective for objective in _ALL}
