"""Compute a task's scores from labels and predictions.

The metrics are from scikit-learn, SciPy and seqeval. If all predictions are equal, or there is only one, a correlation
is undefined and counts as 0. Not handled here: predicting (training.py). Which metrics a task has is in
records.METRICS.
"""

import math
import warnings
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from statistics import mean
from typing import Any

import numpy as np
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from mlsm.common.extras import name_extras
from mlsm.evaluation.records import METRICS
from mlsm.evaluation.tasks.finetuning.tasks import Task

Predictions = np.ndarray | list[list[int]]  # for every example; if words have labels, for every example's words
NEAR = 0.01  # a run whose score is at most this much above always giving the most frequent answer has collapsed
UNREAD, UNREAD_TAG = -1, "I-unread"  # predicted "label" of a word that the model did not read, and its tag


def figures(task: Task, gold: dict[str, list], predicted: dict[str, Predictions]) -> list[dict]:
    """The scores of a task, as in a record.

    gold, predicted  development set -> labels, scores, or lists of labels of every sentence's words; the predicted
                     label of a word that the model did not read is UNREAD
    Returns          [{"metric", "value", "n"}], in the order of records.METRICS; MNLI's metrics have the set in their
                     names
    """
    found = {}
    for part in gold:
        _, _, suffix = part.partition("_")  # in validation_matched
        for metric in dict.fromkeys(name.partition("_")[0] for name in METRICS[task.name]):
            value = _FUNCTIONS[metric](task, gold[part], predicted[part])
            found["_".join(filter(None, (metric, suffix)))] = {"value": value, "n": len(gold[part])}
    return [{"metric": metric} | found[metric] for metric in METRICS[task.name]]


def constant(task: Task, predicted: dict[str, Predictions]) -> str | None:
    """If all predictions are equal, a sentence that says what they are; otherwise None."""
    parts = [np.concatenate([np.ravel(values) for values in part]) for part in predicted.values()]
    values = np.unique(np.concatenate(parts))
    if task.labels_words:
        values = values[values != UNREAD]  # without words that were not read
    if len(values) != 1:
        return None
    said = task.labels[int(values[0])] if task.labels else f"{values[0]:.3g}"
    return f"every prediction is {said}"


def uninformed(task: Task, train: Sequence[Any], gold: dict[str, list], found: list[dict]) -> str | None:
    """A sentence if the scores are not clearly above those of always giving the most frequent training label.

    found  the scores, of which the mean is compared. For correlations the constant answer counts as 0
    """
    labels = [label for of_words in train for label in of_words] if task.labels_words else train
    answer = int(Counter(labels).most_common(1)[0][0]) if task.labels else 0
    predicted: dict[str, Predictions] = {
        part: [[answer] * len(words) for words in of_part] if task.labels_words else np.full(len(of_part), answer)
        for part, of_part in gold.items()
    }
    score, trivial = (mean(figure["value"] for figure in these) for these in (found, figures(task, gold, predicted)))
    if score > trivial + NEAR:
        return None
    said = f"always answering {task.labels[answer]}" if task.labels else "a constant"
    return f"the score is {score:.3f}, that of {said} {trivial:.3f}"


def check_installed(task: Task) -> None:
    """Raises MissingPackageError if the task's metrics need seqeval, and it is missing."""
    if task.labels_words:
        with name_extras(task.name):
            import_module("seqeval")


def _f1(task, gold, predicted):
    """F1 of the label 1; if words have labels, F1 of entities over all sentences (CoNLL's: type and both ends right).

    Words that the model did not read always count as errors: neighbouring ones become one wrong entity of a type that
    does not exist. So an entity among them is missed, and the wrong entity lowers precision even if their gold label is
    O. If they counted as O, a model with shorter inputs would be correct on words that it did not read.
    """
    if not task.labels_words:
        return float(f1_score(gold, predicted, zero_division=0.0))
    tags = dict(enumerate(task.labels)) | {UNREAD: UNREAD_TAG}
    names = [[[tags[int(label)] for label in sentence] for sentence in part] for part in (gold, predicted)]
    return span_f1(*names)


def span_f1(gold: list[list[str]], said: list[list[str]]) -> float:
    """F1 of the spans of IOB2 tags over all sentences; 0 if there are none."""
    import seqeval.metrics

    return float(seqeval.metrics.f1_score(gold, said, zero_division=0))


def spearman(gold: np.ndarray, predicted: np.ndarray) -> float:
    """Spearman's correlation, 0 if there is none."""
    return _correlation(spearmanr, gold, predicted)


def _correlation(function, gold, predicted):
    if len(predicted) < 2 or not np.all(np.isfinite(predicted)):
        return 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns for constant input
        value = float(function(gold, predicted)[0])
    return value if math.isfinite(value) else 0.0


_FUNCTIONS = {
    "matthews": lambda task, gold, predicted: float(matthews_corrcoef(gold, predicted)),
    "accuracy": lambda task, gold, predicted: float(accuracy_score(gold, predicted)),
    "f1": _f1,
    "pearson": lambda task, gold, predicted: _correlation(pearsonr, gold, predicted),
    "spearman": lambda task, gold, predicted: spearman(gold, predicted),
}
