"""What the student learns at a masked token: one small class per objective.

An objective says how many outputs it has, which targets it reads, the loss *summed* over tokens, and what a
constant prediction would score. The trainer divides by the token count of the whole effective batch, so a
mean does not depend on micro-batches. Losses are in nats.

Left out: kd, mtl, naive-mlsm (later); what is masked (masking.py).

Shapes: M masked tokens, K outputs, E stored entries of M sparse rows.
"""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from student.errors import RunError


class SparseTargets(NamedTuple):
    """Sparse target distributions of M tokens, the stored entries renormalised to one by the reader."""

    count: int
    """rows that are not empty"""
    entries_E: torch.Tensor
    """int64 positions of the stored entries in the flattened (M K) logits"""
    weights_E: torch.Tensor
    """float32 probabilities; every non-empty row sums to one"""
    coded_M: torch.Tensor
    """float32, 1 where the row is not empty"""
    negative_entropy: float
    """sum of P log P over all entries, nats"""


class TokenTargets(NamedTuple):
    """The ids of M masked tokens."""

    count: int
    labels_M: torch.Tensor
    """int64"""


class Mlsm:
    """Masked latent semantic modeling: KL(P || Q) to the stored LSP distribution P (MLSM paper, section 3).

    Per token, over the stored entries of P: sum P log P - sum P z + logsumexp(z), z being the k logits.
    A token without a code carries no loss.
    """

    name = "mlsm"
    tied = False
    """whether the output matrix is the encoder's token embedding"""

    def __init__(self, store):
        if store.kind != "lsp":
            found = {"ids": "token ids only", "logits": "a teacher's distributions over its vocabulary (encode-logits)"}
            raise RunError(
                f"objective mlsm needs stored LSP distributions, this store holds {found[store.kind]}. "
                "Train with --objective mlm, or make an LSP store:  python cli.py encode-lsp"
            )
        self.outputs = store.k

    def read_targets(self, windows, read, window_M, position_M) -> SparseTargets:
        rows = windows.targets(read, window_M, position_M)
        row_E = np.repeat(np.arange(len(rows.indptr) - 1), np.diff(rows.indptr))
        coded_M = np.diff(rows.indptr) > 0
        weights_E = rows.weights.astype(np.float64)
        return SparseTargets(
            count=int(coded_M.sum()),
            entries_E=torch.from_numpy(row_E * self.outputs + rows.indices),
            weights_E=torch.from_numpy(np.ascontiguousarray(rows.weights)),
            coded_M=torch.from_numpy(coded_M.astype(np.float32)),
            negative_entropy=float((weights_E * np.log(weights_E)).sum()),
        )

    def loss_sum(self, logits_MK, targets: SparseTargets):
        """Summed KL divergence; float32 scalar."""
        logits_MK = logits_MK.float()
        normaliser = torch.logsumexp(logits_MK, dim=1) @ targets.coded_M
        expected = logits_MK.flatten()[targets.entries_E] @ targets.weights_E
        return normaliser - expected + targets.negative_entropy

    def measure(self, logits_MK, targets: SparseTargets) -> dict:
        """Held-out figures, summed over tokens."""
        return {"loss": self.loss_sum(logits_MK, targets).item()}

    def baseline(self, train_windows, special_ids, held_out: list[SparseTargets]) -> dict:
        """KL of the held-out rows against the constant average LSP distribution of the training split.

        Smoothed by one uniform token, so that an LSP never seen in training costs nats, not infinity.
        """
        mean_K = np.asarray(train_windows.mean_distribution(), dtype=np.float64)
        tokens = train_windows.tokens
        log_mean_K = np.log((mean_K * tokens + 1 / self.outputs) / (tokens + 1))
        count = sum(targets.count for targets in held_out)
        cross_entropy = -sum(
            float(targets.weights_E.double().numpy() @ log_mean_K[targets.entries_E.numpy() % self.outputs])
            for targets in held_out
        )
        negative_entropy = sum(targets.negative_entropy for targets in held_out)
        return {"loss": (negative_entropy + cross_entropy) / max(count, 1)}


class Mlm:
    """Masked language modeling: cross-entropy over the vocabulary, output matrix tied to the embeddings."""

    name = "mlm"
    tied = True

    def __init__(self, store):
        self.outputs = store.vocab_size

    def read_targets(self, windows, read, window_M, position_M) -> TokenTargets:
        labels_M = read.ids[window_M, position_M].astype(np.int64)
        return TokenTargets(count=len(labels_M), labels_M=torch.from_numpy(labels_M))

    def loss_sum(self, logits_MK, targets: TokenTargets):
        """Summed cross-entropy; float32 scalar."""
        return F.cross_entropy(logits_MK.float(), targets.labels_M, reduction="sum")

    def measure(self, logits_MK, targets: TokenTargets) -> dict:
        """Held-out figures, summed over tokens."""
        correct = (logits_MK.argmax(dim=1) == targets.labels_M).sum().item()
        return {"loss": self.loss_sum(logits_MK, targets).item(), "accuracy": correct}

    def baseline(self, train_windows, special_ids, held_out: list[TokenTargets]) -> dict:
        """Unigram cross-entropy, and accuracy of always guessing the most frequent token.

        Counts of the training split without special tokens, which are never masked; add-one smoothing.
        """
        counts_K = np.asarray(train_windows.token_counts(), dtype=np.float64).copy()
        counts_K[special_ids["all"]] = 0
        log_unigram_K = np.log((counts_K + 1) / (counts_K + 1).sum())
        labels = np.concatenate([targets.labels_M.numpy() for targets in held_out])
        count = max(len(labels), 1)
        return {
            "loss": -float(log_unigram_K[labels].sum()) / count,
            "accuracy": float((labels == counts_K.argmax()).sum()) / count,
        }


OBJECTIVES = {objective.name: objective for objective in (Mlsm, Mlm)}
