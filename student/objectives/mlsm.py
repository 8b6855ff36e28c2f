"""mlsm: the stored distribution over latent semantic properties (LSPs) of a masked token (MLSM paper, section 3).

Its relatives hard-mlsm, naive-mlsm and mtl are built on the class here.

Shapes: M masked tokens, K outputs, k LSPs, P positions, E stored entries of M sparse rows.
"""

import logging
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shards.reader import Store
from shards.windows import WindowReader
from student.objectives.base import MaskedTokens, Objective, smoothed_mean
from student.objectives.losses import divergence_by_token, sparse_cross_entropy
from student.objectives.position_marginals import position_marginals, position_sums, shrink, teacher_positions
from student.objectives.sparse_rows import negative_entropy, row_of_entry, temper

logger = logging.getLogger(__name__)


class SparseTargets(NamedTuple):
    """Sparse target distributions of M tokens. The reader renormalises the stored entries; then they are tempered."""

    counts: tuple[int]
    """rows that are not empty"""
    entries_E: Tensor
    """int64 positions of the stored entries in the flattened (M k) logits of the LSPs"""
    weights_E: Tensor
    """float32 probabilities; every non-empty row sums to one"""
    coded_M: Tensor
    """float32, 1 if the row is not empty"""
    negative_entropy: float
    """sum of P log P over all entries, nats"""
    position_E: Tensor
    """int64, for each entry the position of its token in the teacher's input, for the baseline by position"""
    untempered_E: Tensor | None = None
    """float32 probabilities as stored; None if they were not tempered"""
    untempered_negative_entropy: float = 0.0

    def as_stored(self) -> "SparseTargets":
        """The targets without their tempering."""
        if self.untempered_E is None:
            return self
        return self._replace(weights_E=self.untempered_E, negative_entropy=self.untempered_negative_entropy)


class Mlsm(Objective):
    """Masked latent semantic modeling: KL(P || Q) to the stored LSP distribution P (MLSM paper, section 3).

    Per token, over the stored entries of P: sum P log P - sum P log Q, Q being the softmax of the k logits.
    A token without a code carries no loss.

    With a target temperature T other than 1, P is the stored distribution to the power 1/T, renormalised over the
    stored entries. Losses of different T cannot be compared. Two held-out figures can, as both are KL to the stored
    distributions: `kl_untempered` of Q, and `kl_untempered_back` of Q^T renormalised, the softmax of T times the
    logits. For a student that predicts P exactly, the latter is 0.
    """

    name = "mlsm"
    learns = "predicting the distribution over latent semantic properties (LSPs) of masked tokens"
    loss_name, reference = "held-out KL", "the marginal (a constant average LSP distribution)"
    reference_by_position = "the marginal by position (the average LSP distribution at the token's position)"

    target_temperature = 1.0
    """T of the learned distribution P^(1/T)"""
    behind_vocabulary = False
    """whether the LSPs are the last k of V + k outputs, not all outputs"""
    enough_mass = 0.95
    """average mass that the store should keep of a distribution; below it there is a warning"""

    def set_up(self, store: Store) -> None:
        first_lsp = store.vocab_size if self.behind_vocabulary else 0
        self.lsps, self.outputs = store.k, first_lsp + store.k
        self.lsp_columns = slice(first_lsp, self.outputs)
        self._settings_of_store = store.settings
        self._check_mass(
            store, self.enough_mass, "an LSP distribution on average, and what it keeps is learned as if it were all"
        )
        if self.target_temperature != 1:
            self.facts["target_temperature"] = self.target_temperature
            logger.info(
                "targets are p^(1/%g): loss and baseline cannot be compared with those of another "
                "--target-temperature, but kl_untempered and kl_untempered_back can",
                self.target_temperature,
            )

    def read_targets(self, masked: MaskedTokens) -> SparseTargets:
        rows = masked.rows()
        coded_M = np.diff(rows.indptr) > 0
        weights_E = np.ascontiguousarray(rows.weights)
        position_M = teacher_positions(masked.read, self._settings_of_store)[masked.window_M, masked.position_M]
        targets = SparseTargets(
            counts=(int(coded_M.sum()),),
            entries_E=torch.from_numpy(row_of_entry(rows) * self.lsps + rows.indices),
            weights_E=torch.from_numpy(weights_E),
            coded_M=torch.from_numpy(coded_M.astype(np.float32)),
            negative_entropy=negative_entropy(weights_E.astype(np.float64)),
            position_E=torch.from_numpy(np.repeat(position_M, np.diff(rows.indptr))),
        )
        if self.target_temperature == 1:
            return targets
        tempered_E = temper(rows, self.target_temperature)
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
        """The figures against the stored distributions; empty if the targets were not tempered."""
        if targets.untempered_E is None:
            return {}
        logits = {"kl_untempered": logits_MK}
        if self.target_temperature > 0:
            logits["kl_untempered_back"] = logits_MK.float() * self.target_temperature
        return {name: Mlsm.loss_sums(self, logits_MK, targets.as_stored())[0] for name, logits_MK in logits.items()}

    def baseline(self, train: WindowReader, held_out: list[SparseTargets], directory: Path | None = None) -> dict:
        """KL (nats per token) of the held-out rows to the average LSP distribution of the training split: of all
        tokens, and (`_by_position`) of the tokens at the same position.

        The former is smoothed by one uniform token, so that an LSP that never occurs in training costs some nats
        instead of infinitely many. A store has no sums of tempered distributions: for these, both averages are over the
        tokens that position_marginals.py reads. At temperature 0, where one LSP of a token has all the mass, the result
        also has the accuracy of always predicting the most frequent LSP.
        """
        mean_K, mean_PK = smoothed_mean(train, self.lsps), position_marginals(train, directory)
        if self.target_temperature == 1:
            return kl_to_averages(mean_K, mean_PK, held_out, "loss")
        stored = [targets.as_stored() for targets in held_out]
        halves = position_sums(train, directory, temperature=self.target_temperature)
        tempered_K = (halves[0] + halves[1]).mean_K
        figures = kl_to_averages(tempered_K, shrink(halves), held_out, "loss")
        figures |= kl_to_averages(mean_K, mean_PK, stored, "kl_untempered")
        if self.target_temperature > 0:
            return figures | kl_to_averages(mean_K, mean_PK, stored, "kl_untempered_back")
        guess = tempered_K.argmax()
        correct = sum(float(targets.weights_E[targets.entries_E % self.lsps == guess].sum()) for targets in held_out)
        return figures | {"accuracy": correct / max(sum(targets.counts[0] for targets in held_out), 1)}


def kl_to_averages(mean_K: np.ndarray, mean_PK: np.ndarray, held_out: list[SparseTargets], name: str) -> dict:
    """KL (nats per token) of held-out LSP distributions to two averages: figures `name` and `<name>_by_position`.

    mean_K   float64, the average of all tokens
    mean_PK  float64, the average at every position
    """
    count = max(sum(targets.counts[0] for targets in held_out), 1)
    negative_entropy = sum(targets.negative_entropy for targets in held_out)
    plain = by_position = 0.0
    for targets in held_out:
        weights_E, lsps_E = targets.weights_E.double().numpy(), targets.entries_E.numpy() % len(mean_K)
        plain -= float(weights_E @ np.log(mean_K[lsps_E]))
        by_position -= float(weights_E @ np.log(mean_PK[targets.position_E.numpy(), lsps_E]))
    figures = {name: plain, f"{name}_by_position": by_position}
    return {name: (negative_entropy + cross_entropy) / count for name, cross_entropy in figures.items()}
