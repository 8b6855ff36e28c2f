"""hard-mlsm: the largest of a masked token's stored LSPs alone."""

from pathlib import Path

from torch import Tensor

from shards.reader import Store
from shards.windows import WindowReader
from student.objectives.base import with_perplexity
from student.objectives.mlsm import Mlsm, SparseTargets


class HardMlsm(Mlsm):
    """Only the largest LSP: cross-entropy to the arg-max of the stored distribution; among equal ones, the lowest
    number.

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
