"""hard-mlsm: only the largest of a masked token's stored LSPs."""

from pathlib import Path

from torch import Tensor

from shards.reader import Store
from shards.windows import WindowReader
from student.objectives.base import with_perplexity
from student.objectives.mlsm import Mlsm, SparseTargets


class HardMlsm(Mlsm):
    """Only the largest LSP: cross-entropy to the arg-max of the stored distribution. If several entries are equal, the
    one with the lowest number.

    This is the official code's loss with its KL switched off (`--not-kl_loss`). There a token without a code gets LSP
    0, the arg-max of zeros; here it carries no loss, as in mlsm. It is mlsm in the limit of a target temperature of 0,
    and is computed like this. Only `kl_untempered`, the KL to the stored distributions, can be compared with mlsm's
    loss.
    """

    name = "hard-mlsm"
    learns = "predicting the most probable latent semantic property (LSP) of masked tokens"
    loss_name, reference = "held-out loss", "the frequencies of LSPs as a token's largest"
    reference_by_position = "the frequencies of LSPs as a token's largest, by position"
    guess = "most frequent largest LSP"
    enough_mass = 0.0  # the largest entry is always kept

    def set_up(self, store: Store) -> None:
        super().set_up(store)
        self.target_temperature = 0.0

    def measure(self, logits_MK: Tensor, targets: SparseTargets) -> dict:
        largest_C = targets.entries_E[targets.weights_E == 1]  # one for each of C coded tokens
        predicted_M = logits_MK[:, self.lsp_columns].argmax(dim=1)
        correct = (predicted_M[largest_C // self.lsps] == largest_C % self.lsps).sum()
        return super().measure(logits_MK, targets) | {"accuracy": correct}

    def figures(self, sums: dict, counts: tuple) -> dict:
        return with_perplexity(super().figures(sums, counts), "loss")

    def baseline(self, train: WindowReader, held_out: list[SparseTargets], directory: Path | None = None) -> dict:
        """Cross-entropy of the training split's frequencies of largest LSPs: over all tokens, and (`_by_position`) over
        tokens at the same position; and the accuracy of always predicting the most frequent one."""
        return with_perplexity(super().baseline(train, held_out, directory), "loss")
