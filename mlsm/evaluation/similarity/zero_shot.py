"""Evaluate similarity measures on STS-B and WiC without training.

STS-B: Pearson's and Spearman's correlation of a measure with the human scores of the development set, with the interval
of Bonett and Wright (2000) for the latter. WiC: two contexts count as the same sense if the measure is above a
threshold, the best one on the training set; the score is the accuracy on the development set with Wilson's interval.
Both intervals are at 95 %, over pairs. Only the threshold is fitted.

Not handled here: reading the files (tasks/finetuning/data.py), measures (scores.py).
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from mlsm.evaluation.similarity.scores import text_scores, word_at, word_scores
from mlsm.evaluation.similarity.sources import StudentSource, TeacherSource
from mlsm.evaluation.tasks.finetuning.data import load_task
from mlsm.evaluation.tasks.finetuning.formats import Example
from mlsm.evaluation.tasks.finetuning.tasks import TASKS

CHUNK = 256  # pairs per pass


def evaluate_table(
    source: TeacherSource | StudentSource, task: str, data_dir: Path | None, progress: Callable[..., None]
) -> dict:
    """Make the table of one task.

    task     stsb or wic
    Returns  task, data (name, files, n_train, n_eval) and rows: for stsb {"measure", "pearson", "spearman", "low",
             "high"}, for wic {"measure", "accuracy", "low", "high", "train", "threshold"}, and the share of the
             development set's larger class, `majority`
    Raises   DataError if the set is missing
    """
    data = load_task(TASKS[task], data_dir)
    dev = data.evaluation["validation"]
    found = {"task": task, "data": data.facts()}
    if task == "stsb":
        scores, labels = _score(source, dev, task, progress), np.array([example.label for example in dev])
        return found | {"rows": [{"measure": name} | correlation(values, labels) for name, values in scores.items()]}
    train_scores, dev_scores = (_score(source, part, task, progress) for part in (data.train, dev))
    is_same, is_same_dev = (np.array([bool(example.label) for example in part]) for part in (data.train, dev))
    rows = []
    for name, values in dev_scores.items():
        threshold, train = best_threshold(train_scores[name], is_same)
        rows.append({"measure": name} | accuracy(values > threshold, is_same_dev))
        rows[-1] |= {"train": train, "threshold": threshold}
    return found | {"majority": float(max(is_same_dev.mean(), 1 - is_same_dev.mean())), "rows": rows}


def correlation(values: Sequence[float] | np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Pearson's and Spearman's correlation, and the latter's 95 % interval; 0 (-1 to 1) of equal values."""
    from scipy import stats

    if np.ptp(values) == 0:
        return {"pearson": 0.0, "spearman": 0.0, "low": -1.0, "high": 1.0}
    rho = float(stats.spearmanr(values, labels).statistic)
    half = stats.norm.ppf(0.975) * math.sqrt((1 + rho**2 / 2) / (len(labels) - 3))
    low, high = (math.tanh(math.atanh(min(max(rho, -1 + 1e-12), 1 - 1e-12)) + side * half) for side in (-1, 1))
    return {"pearson": float(stats.pearsonr(values, labels).statistic), "spearman": rho, "low": low, "high": high}


def best_threshold(values: np.ndarray, is_positive: np.ndarray) -> tuple[float, float]:
    """The threshold with the highest accuracy, if values above it are called positive, and this accuracy.

    It lies half-way between two values, or below or above all; of equally good thresholds the lowest is returned.
    """
    distinct, number = np.unique(values, return_inverse=True)
    won = np.bincount(number, weights=np.where(is_positive, -1.0, 1.0))  # if these values are called negative
    right = is_positive.sum() + np.concatenate([[0], np.cumsum(won)])
    thresholds = [distinct[0] - 1, *((distinct[1:] + distinct[:-1]) / 2), distinct[-1]]
    best = int(right.argmax())
    return float(thresholds[best]), float(right[best] / len(values))


def accuracy(said: np.ndarray, is_positive: np.ndarray) -> dict[str, float]:
    """The accuracy and its 95 % interval."""
    from scipy.stats import binomtest

    right = int((said == is_positive).sum())
    low, high = binomtest(right, len(said)).proportion_ci(method="wilson")
    return {"accuracy": right / len(said), "low": float(low), "high": float(high)}


def _score(
    source: TeacherSource | StudentSource, examples: list[Example], task: str, progress: Callable[..., None]
) -> dict[str, np.ndarray]:
    """The scores of all examples, {measure: (N)}."""
    rows: list[dict[str, float]] = []
    for start in range(0, len(examples), CHUNK):
        progress(f"similarity {task}", start, len(examples), unit="pairs")
        part = examples[start : start + CHUNK]
        firsts = source.read([str(example.first) for example in part])
        seconds = source.read([str(example.second) for example in part])
        for example, a, b in zip(part, firsts, seconds, strict=True):
            if task == "stsb":
                rows.append(text_scores(a, b, source.atoms_Ke))
            else:
                assert example.targets is not None
                first, second = example.targets
                rows.append(word_scores(word_at(a, *first), word_at(b, *second), source.atoms_Ke))
    progress(f"similarity {task}", len(examples), len(examples), unit="pairs")
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}
