"""What a constant prediction scores on the held-out tokens: the references that a student's loss is compared with.

Each is learned from the training split, by counts and sums that its store keeps. Left out: averages by position
(position_marginals.py), which of these an objective reports (objectives.py).

Shapes: M masked tokens, P positions, K outputs, V vocabulary, E stored entries of M sparse rows.
"""

import math
from pathlib import Path

import numpy as np

from shards.windows import WindowReader
from student.position_marginals import position_marginals, position_sums, shrink
from student.sparse_rows import temper
from student.targets import SparseTargets, TeacherTargets, TokenTargets


def smoothed_mean(train_windows: WindowReader, outputs: int) -> np.ndarray:
    """Average stored distribution of a split, smoothed by one uniform token; float64 (outputs)."""
    tokens = train_windows.tokens
    mean_K = np.asarray(train_windows.mean_distribution(), dtype=np.float64)
    return (mean_K * tokens + 1 / outputs) / (tokens + 1)


def unigram_figures(train_windows: WindowReader, held_out: list[TokenTargets]) -> dict:
    """Cross-entropy of the training split's token frequencies, accuracy of its most frequent token."""
    counts_V = np.asarray(train_windows.token_counts(), dtype=np.float64).copy()
    counts_V[train_windows.store.special_ids["all"]] = 0
    log_unigram_V = np.log((counts_V + 1) / (counts_V + 1).sum())
    labels = np.concatenate([targets.labels_M.numpy() for targets in held_out])
    count = max(len(labels), 1)
    return {
        "loss": -float(log_unigram_V[labels].sum()) / count,
        "accuracy": float((labels == counts_V.argmax()).sum()) / count,
    }


def average_lsp_figures(
    train_windows: WindowReader, held_out: list[SparseTargets], directory: Path | None, *, lsps: int, temperature: float
) -> dict:
    """KL (nats per token) of held-out rows to the average LSP distribution, of all tokens and by position.

    The former is smoothed by one uniform token, so that an LSP that was never seen in training costs some nats and not
    infinitely many. A store has no sums of tempered distributions: both averages of those are over the tokens that
    position_marginals.py reads. At temperature 0, where one LSP of a token has all the mass, there is also the accuracy
    of the LSP that most often has it.

    directory  where averages by position are kept for the next run; None: nowhere
    """
    mean_K, mean_PK = smoothed_mean(train_windows, lsps), position_marginals(train_windows, directory)
    if temperature == 1:
        return kl_to_averages(mean_K, mean_PK, held_out, "loss")
    stored = [targets.as_stored() for targets in held_out]
    halves = position_sums(train_windows, directory, temperature=temperature, temper=temper)
    tempered_K = (halves[0] + halves[1]).mean_K
    figures = kl_to_averages(tempered_K, shrink(halves), held_out, "loss")
    figures |= kl_to_averages(mean_K, mean_PK, stored, "kl_untempered")
    if temperature > 0:
        return figures | kl_to_averages(mean_K, mean_PK, stored, "kl_untempered_back")
    guess = tempered_K.argmax()
    correct = sum(float(targets.weights_E[targets.entries_E % lsps == guess].sum()) for targets in held_out)
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


def average_teacher_figures(train_windows: WindowReader, held_out: list[TeacherTargets], outputs: int) -> dict:
    """KL (nats per token) of the teacher's held-out distributions, with their buckets, to its average in training.

    outputs  of the student, as many as the teacher's vocabulary: entries index its flattened logits (M, outputs)
    """
    mean_V = smoothed_mean(train_windows, train_windows.store.k)[:outputs]  # a padded head has more
    count, loss = sum(targets.counts[0] for targets in held_out), 0.0
    for targets in held_out:
        row_E, column_E = np.divmod(targets.entries_E.numpy(), outputs)
        outside_M = 1 - np.bincount(row_E, mean_V[column_E], len(targets.tail_M))
        log_outside_M = np.log(outside_M.clip(min=np.finfo(np.float64).tiny))
        expected = targets.weights_E.double().numpy() @ np.log(mean_V[column_E])
        loss += targets.negative_entropy - expected - targets.tail_M.double().numpy() @ log_outside_M
    return {"loss": float(loss) / max(count, 1)}


def with_perplexity(figures: dict, cross_entropy: str) -> dict:
    """Add the perplexity of a cross-entropy; exp overflows beyond 700."""
    return figures | {"perplexity": math.exp(min(figures[cross_entropy], 700.0))}
