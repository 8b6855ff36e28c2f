"""What the student learns at a masked token: one small class per objective, and the table of them.

An objective says which stores it learns from, how many outputs it has, which targets it reads, its loss terms
*summed* over tokens, and what a constant prediction would score. The trainer divides every sum by the count of its
term over the whole effective batch, so that a mean does not depend on micro-batches or ranks. Losses are in nats.

To add one: a class here, its entry in OBJECTIVES, its name among the flag's choices (config.py).
Left out: what is masked (masking.py), the arithmetic of the gradient (losses.py).

Shapes: M masked tokens, K outputs, V vocabulary, k LSPs, E stored entries of M sparse rows, T loss terms.
"""

import logging
import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from student.errors import RunError
from student.losses import sparse_cross_entropy

logger = logging.getLogger(__name__)

ENOUGH_MASS = 0.98    # of a teacher's distribution, below which distillation warns
_HOLDS = {
    "ids": "token ids only",
    "lsp": "LSP distributions",
    "logits": "a teacher's distributions over its vocabulary (encode-logits)",
}


class SparseTargets(NamedTuple):
    """Sparse target distributions of M tokens, the stored entries renormalised to one by the reader."""

    counts: tuple[int]
    """rows that are not empty"""
    entries_E: torch.Tensor
    """int64 positions of the stored entries in the flattened (M k) logits of the LSPs"""
    weights_E: torch.Tensor
    """float32 probabilities; every non-empty row sums to one"""
    coded_M: torch.Tensor
    """float32, 1 where the row is not empty"""
    negative_entropy: float
    """sum of P log P over all entries, nats"""


class TokenTargets(NamedTuple):
    """The ids of M masked tokens."""

    counts: tuple[int]
    labels_M: torch.Tensor
    """int64"""


class TeacherTargets(NamedTuple):
    """The teacher's distributions: its most probable entries and one bucket for all others; and the true tokens."""

    counts: tuple[int]
    """rows that are not empty"""
    entries_E: torch.Tensor
    """int64 positions of the stored entries in the flattened (M V) logits"""
    weights_E: torch.Tensor
    """float32 probabilities; with its tail every non-empty row sums to one"""
    tail_M: torch.Tensor
    """float32 probability of the bucket"""
    coded_M: torch.Tensor
    """float32, 1 where the row is not empty"""
    negative_entropy: float
    """sum of P log P over entries and buckets, nats"""
    labels_M: torch.Tensor
    """int64"""


class JointTargets(NamedTuple):
    """Both targets of the multi-task objective."""

    counts: tuple[int, int]
    lsps: SparseTargets
    tokens: TokenTargets


class Objective:
    """What all objectives share.

    store   an open Store; RunError where it does not hold what the objective needs
    kappa   weight of mtl's second term; the others ignore it
    """

    name: str
    kinds: tuple[str, ...]
    """kinds of store that it learns from, the plainest first: encode-<kind> makes them"""
    tied = False
    """whether the output matrix is the encoder's token embedding"""
    term_weights: tuple[float, ...] = (1.0,)
    """the loss is the sum over terms of weight x (summed loss / count)"""
    learns: str
    """what the encoder was trained by, for people"""
    loss_name: str
    """what its held-out loss is called"""
    reference: str
    """the constant prediction that `baseline` scores"""
    outputs: int
    token_columns: slice | None = None
    """the outputs that are logits of the vocabulary, if any"""
    lsp_columns: slice | None = None
    """the outputs that are logits of the LSPs, if any"""

    def __init__(self, store, kappa: float = 1.0):
        self.facts: dict = {}    # of the targets, for the log
        if store.kind not in self.kinds:
            raise RunError(
                f"objective {self.name} needs a store of {_HOLDS[self.kinds[0]]}, {store.path} holds"
                f" {_HOLDS[store.kind]}. Make one:  python cli.py encode-{self.kinds[0]}   or train with another"
                f" --objective."
            )

    def read_targets(self, windows, read, window_M, position_M):
        """Targets of the tokens read.ids[window_M, position_M], with a tuple `counts` of tokens, one for every term."""
        raise NotImplementedError

    def loss_sums(self, logits_MK, targets):
        """Every term's loss summed over tokens: float32 (T)."""
        raise NotImplementedError

    def measure(self, logits_MK, targets) -> dict:
        """Held-out figures summed over tokens: name -> scalar tensor."""
        raise NotImplementedError

    def figures(self, sums: dict, counts: tuple) -> dict:
        """The means of what `measure` summed, plain numbers; `loss` is among them."""
        return {name: float(total) / max(counts[0], 1) for name, total in sums.items()}

    def baseline(self, train_windows, special_ids, held_out: list) -> dict:
        """The figures of a constant prediction, learned from the training split, on the held-out targets."""
        raise NotImplementedError


class Mlsm(Objective):
    """Masked latent semantic modeling: KL(P || Q) to the stored LSP distribution P (MLSM paper, section 3).

    Per token, over the stored entries of P: sum P log P - sum P log Q, Q being the softmax of the k logits.
    A token without a code carries no loss.
    """

    name = "mlsm"
    kinds = ("lsp",)
    learns = "predicting the distribution over latent semantic properties (LSPs) of masked tokens"
    loss_name, reference = "held-out KL", "the marginal (a constant average LSP distribution)"

    def __init__(self, store, kappa: float = 1.0, first_lsp: int = 0):
        super().__init__(store)
        self.lsps, self.outputs = store.k, first_lsp + store.k
        self.lsp_columns = slice(first_lsp, self.outputs)

    def read_targets(self, windows, read, window_M, position_M) -> SparseTargets:
        rows = windows.targets(read, window_M, position_M)
        coded_M = np.diff(rows.indptr) > 0
        weights_E = rows.weights.astype(np.float64)
        return SparseTargets(
            counts=(int(coded_M.sum()),),
            entries_E=torch.from_numpy(_row_of_entry(rows) * self.lsps + rows.indices),
            weights_E=torch.from_numpy(np.ascontiguousarray(rows.weights)),
            coded_M=torch.from_numpy(coded_M.astype(np.float32)),
            negative_entropy=_negative_entropy(weights_E),
        )

    def loss_sums(self, logits_MK, targets: SparseTargets):
        logits_Mk = logits_MK[:, self.lsp_columns]
        cross_entropy = sparse_cross_entropy(logits_Mk, targets.entries_E, targets.weights_E, targets.coded_M)
        return (cross_entropy + targets.negative_entropy)[None]

    def measure(self, logits_MK, targets: SparseTargets) -> dict:
        return {"loss": self.loss_sums(logits_MK, targets)[0]}

    def baseline(self, train_windows, special_ids, held_out: list[SparseTargets]) -> dict:
        """KL of the held-out rows against the constant average LSP distribution of the training split.

        Smoothed by one uniform token, so that an LSP never seen in training costs nats, not infinity.
        """
        mean_K = _smoothed_mean(train_windows, self.lsps)
        count = sum(targets.counts[0] for targets in held_out)
        cross_entropy = -sum(
            float(targets.weights_E.double().numpy() @ np.log(mean_K[targets.entries_E.numpy() % self.lsps]))
            for targets in held_out
        )
        negative_entropy = sum(targets.negative_entropy for targets in held_out)
        return {"loss": (negative_entropy + cross_entropy) / max(count, 1)}


class NaiveMlsm(Mlsm):
    """MLSM as a slice of an output layer of V + k columns, the others computed and not used: for comparing costs."""

    name = "naive-mlsm"

    def __init__(self, store, kappa: float = 1.0):
        super().__init__(store, first_lsp=store.vocab_size)


class Mlm(Objective):
    """Masked language modeling: cross-entropy over the vocabulary, output matrix tied to the embeddings."""

    name = "mlm"
    kinds = ("ids", "lsp", "logits")
    tied = True
    learns = "predicting masked tokens"
    loss_name, reference = "held-out loss", "unigram frequencies"

    def __init__(self, store, kappa: float = 1.0):
        super().__init__(store)
        self.outputs = store.vocab_size
        self.token_columns = slice(0, self.outputs)

    def read_targets(self, windows, read, window_M, position_M) -> TokenTargets:
        labels_M = read.ids[window_M, position_M].astype(np.int64)
        return TokenTargets(counts=(len(labels_M),), labels_M=torch.from_numpy(labels_M))

    def loss_sums(self, logits_MK, targets: TokenTargets):
        labels_M = targets.labels_M
        entries_M = labels_M + self.outputs * torch.arange(len(labels_M), device=labels_M.device)
        ones_M = torch.ones(len(labels_M), device=labels_M.device)
        return sparse_cross_entropy(logits_MK, entries_M, ones_M, ones_M)[None]

    def measure(self, logits_MK, targets: TokenTargets) -> dict:
        return {"loss": self.loss_sums(logits_MK, targets)[0], "accuracy": _correct(logits_MK, targets.labels_M)}

    def figures(self, sums: dict, counts: tuple) -> dict:
        return _with_perplexity(super().figures(sums, counts), "loss")

    def baseline(self, train_windows, special_ids, held_out: list[TokenTargets]) -> dict:
        """Unigram cross-entropy, and accuracy of always guessing the most frequent token.

        Counts of the training split without special tokens, which are never masked; add-one smoothing.
        """
        return _with_perplexity(_unigram(train_windows, special_ids, held_out), "loss")


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

    def __init__(self, store, kappa: float = 1.0):
        super().__init__(store)
        self.outputs = store.vocab_size
        self.token_columns = slice(0, self.outputs)
        self.facts = {"mass_kept": store.report()["mass_kept"]}
        if self.facts["mass_kept"] < ENOUGH_MASS:
            logger.warning(
                "the store keeps %.1f %% of the teacher's probability on average, the rest is one bucket; at least"
                " %.0f %% is advised: encode-logits with a larger --top-n",
                100 * self.facts["mass_kept"], 100 * ENOUGH_MASS,
            )

    def read_targets(self, windows, read, window_M, position_M) -> TeacherTargets:
        rows = windows.targets(read, window_M, position_M)
        coded_M = np.diff(rows.indptr) > 0
        row_E, inside_E = _row_of_entry(rows), rows.indices < self.outputs    # a padded head has more
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
            negative_entropy=_negative_entropy(weights_E) + _negative_entropy(tail_M),
            labels_M=torch.from_numpy(read.ids[window_M, position_M].astype(np.int64)),
        )

    def loss_sums(self, logits_MK, targets: TeacherTargets):
        entries_E, weights_E = targets.entries_E, targets.weights_E
        cross_entropy = sparse_cross_entropy(logits_MK, entries_E, weights_E, targets.coded_M, targets.tail_M)
        return (cross_entropy + targets.negative_entropy)[None]

    def measure(self, logits_MK, targets: TeacherTargets) -> dict:
        cross_entropy = F.cross_entropy(logits_MK.float(), targets.labels_M, reduction="none") @ targets.coded_M
        return {
            "loss": self.loss_sums(logits_MK, targets)[0],
            "cross_entropy": cross_entropy,
            "accuracy": ((logits_MK.argmax(dim=1) == targets.labels_M) * targets.coded_M).sum(),
        }

    def figures(self, sums: dict, counts: tuple) -> dict:
        return _with_perplexity(super().figures(sums, counts), "cross_entropy")

    def baseline(self, train_windows, special_ids, held_out: list[TeacherTargets]) -> dict:
        """KL of the held-out rows against the constant average of the training split's stored entries, smoothed."""
        mean_V = _smoothed_mean(train_windows, train_windows.store.k)[: self.outputs]
        count, loss = sum(targets.counts[0] for targets in held_out), 0.0
        for targets in held_out:
            row_E, column_E = np.divmod(targets.entries_E.numpy(), self.outputs)
            outside_M = 1 - np.bincount(row_E, mean_V[column_E], len(targets.tail_M))
            log_outside_M = np.log(outside_M.clip(min=np.finfo(np.float64).tiny))
            expected = targets.weights_E.double().numpy() @ np.log(mean_V[column_E])
            loss += targets.negative_entropy - expected - targets.tail_M.double().numpy() @ log_outside_M
        return {"loss": float(loss) / max(count, 1)}


class Mtl(Objective):
    """Multi-task: KL over the k slice + kappa x cross-entropy over the V slice, each with its own softmax and mean.

    One output layer of V + k columns, the vocabulary first, not tied (as in the official code).
    """

    name = "mtl"
    kinds = ("lsp",)
    learns = "predicting masked tokens and their distributions over latent semantic properties (LSPs)"
    loss_name, reference = "held-out loss", "the marginal and unigram frequencies"

    def __init__(self, store, kappa: float = 1.0):
        super().__init__(store)
        self.lsp_part, self.token_part = NaiveMlsm(store), Mlm(store)
        self.outputs = self.lsp_part.outputs
        self.token_columns, self.lsp_columns = self.token_part.token_columns, self.lsp_part.lsp_columns
        self.term_weights = (1.0, kappa)

    def read_targets(self, windows, read, window_M, position_M) -> JointTargets:
        lsps = self.lsp_part.read_targets(windows, read, window_M, position_M)
        tokens = self.token_part.read_targets(windows, read, window_M, position_M)
        return JointTargets(lsps.counts + tokens.counts, lsps, tokens)

    def loss_sums(self, logits_MK, targets: JointTargets):
        kl = self.lsp_part.loss_sums(logits_MK, targets.lsps)
        cross_entropy = self.token_part.loss_sums(logits_MK[:, self.token_columns], targets.tokens)
        return torch.cat((kl, cross_entropy))

    def measure(self, logits_MK, targets: JointTargets) -> dict:
        kl, cross_entropy = self.loss_sums(logits_MK, targets)
        correct = _correct(logits_MK[:, self.token_columns], targets.tokens.labels_M)
        return {"kl": kl, "cross_entropy": cross_entropy, "accuracy": correct}

    def figures(self, sums: dict, counts: tuple) -> dict:
        kl = float(sums["kl"]) / max(counts[0], 1)
        rest = {name: float(sums[name]) / max(counts[1], 1) for name in ("cross_entropy", "accuracy")}
        return self._joined({"kl": kl} | rest)

    def baseline(self, train_windows, special_ids, held_out: list[JointTargets]) -> dict:
        kl = self.lsp_part.baseline(train_windows, special_ids, [targets.lsps for targets in held_out])
        tokens = _unigram(train_windows, special_ids, [targets.tokens for targets in held_out])
        return self._joined({"kl": kl["loss"], "cross_entropy": tokens["loss"], "accuracy": tokens["accuracy"]})

    def _joined(self, figures: dict) -> dict:
        loss = figures["kl"] + self.term_weights[1] * figures["cross_entropy"]
        return _with_perplexity({"loss": loss} | figures, "cross_entropy")


OBJECTIVES = {objective.name: objective for objective in (Mlsm, Mlm, Kd, Mtl, NaiveMlsm)}


def _row_of_entry(rows):
    """int64 (E), the row that each entry of a CSR matrix is in."""
    return np.repeat(np.arange(len(rows.indptr) - 1), np.diff(rows.indptr))


def _negative_entropy(weights) -> float:
    positive = weights[weights > 0]
    return float(positive @ np.log(positive))


def _smoothed_mean(train_windows, outputs: int):
    """Average stored distribution of a split, smoothed by one uniform token; float64 (outputs)."""
    tokens = train_windows.tokens
    mean_K = np.asarray(train_windows.mean_distribution(), dtype=np.float64)
    return (mean_K * tokens + 1 / outputs) / (tokens + 1)


def _unigram(train_windows, special_ids, held_out: list[TokenTargets]) -> dict:
    """Cross-entropy of the training split's token frequencies, accuracy of its most frequent token."""
    counts_V = np.asarray(train_windows.token_counts(), dtype=np.float64).copy()
    counts_V[special_ids["all"]] = 0
    log_unigram_V = np.log((counts_V + 1) / (counts_V + 1).sum())
    labels = np.concatenate([targets.labels_M.numpy() for targets in held_out])
    count = max(len(labels), 1)
    return {
        "loss": -float(log_unigram_V[labels].sum()) / count,
        "accuracy": float((labels == counts_V.argmax()).sum()) / count,
    }


def _correct(logits_MV, labels_M):
    return (logits_MV.argmax(dim=1) == labels_M).sum()


def _with_perplexity(figures: dict, cross_entropy: str) -> dict:
    """Add the perplexity of a cross-entropy; exp overflows beyond 700."""
    return figures | {"perplexity": math.exp(min(figures[cross_entropy], 700.0))}
