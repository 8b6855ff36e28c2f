"""Measures of a frozen encoder: one class per kind of task, from the files to the scores.

    measure = read_measure("conll2003", data_dir, limit=4000)
    measure.data, measure.settings                          # fields of its record
    figures, chosen = measure.score(encoder, place, report)

Every choice (a penalty, a layer) is made on the tuning split, a tenth of the training set selected by a hash of the
text. Then the model is fitted to the whole training set and scored on the development set, and for conll2003 and wsd on
the test set. Not handled here: features (features.py), linear models (linear.py), word senses (senses.py), records
(suite.py).
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, Protocol

import numpy as np

from mlsm.common.disk import file_sha256
from mlsm.common.errors import DataError
from mlsm.evaluation.tasks.finetuning import metrics
from mlsm.evaluation.tasks.finetuning.batches import take_examples
from mlsm.evaluation.tasks.finetuning.data import choose_file, find_directory, load_task, split_tenth
from mlsm.evaluation.tasks.finetuning.formats import Example, conll_columns
from mlsm.evaluation.tasks.finetuning.tasks import TASKS, Task, TaskFile
from mlsm.evaluation.tasks.frozen.features import FeatureExtractor, WordFeatures, in_blocks, kept
from mlsm.evaluation.tasks.frozen.linear import (
    INVERSE_PENALTIES,
    MOST_ITERATIONS,
    RIDGE_PENALTIES,
    TOLERANCE,
    tune_and_fit,
)
from mlsm.evaluation.tasks.frozen.senses import Senses

Report = Callable[[int], None]
LINEAR = {"inverse_penalties": list(INVERSE_PENALTIES), "iterations": MOST_ITERATIONS, "tolerance": TOLERANCE}


class Measure(Protocol):
    """A task with its data read.

    data      the `data` of its record
    settings  settings in its record that are specific to this measure
    total     number of texts that it reads
    """

    data: dict
    settings: dict
    total: int

    def score(self, encoder: FeatureExtractor, place: Path, report: Report) -> tuple[list[dict], dict]:
        """The scores for a record, and the choices on the tuning split. Features are stored in `place`."""


def read_measure(name: str, data_dir: Path | None, limit: int) -> Measure:
    """Read and check a task's data.

    limit   number of training examples to use, always the same ones
    Raises  DataError, WsdDataError
    """
    if name == "wsd":
        return Senses(data_dir)
    if name == "conll2003":
        return Tags(data_dir, limit)
    return Texts(TASKS[name], data_dir, limit)


def figure(metric: str, part: str, value: float, n: int) -> dict:
    """One score of a record."""
    return {"metric": f"{metric}_{part}", "value": float(value), "n": int(n)}


class Tags:
    """CoNLL-2003: F1 of entity spans and of chunk spans, and accuracy of parts of speech."""

    COLUMNS = ("pos", "chunks", "entities")

    def __init__(self, data_dir: Path | None, limit: int):
        task = TASKS["conll2003"]
        metrics.check_installed(task)
        directory = None if data_dir is None else find_directory(task, data_dir)
        if directory is None:
            raise DataError(
                "--frozen reads conll2003 from files with parts of speech and chunks: put train.txt and dev.txt into "
                f"{' or '.join(task.directories)} under --data-dir (mlsm docs evaluation-data)."
            )
        files: dict[str, str] = {}
        self._tags: list[list[list[str]]] = []  # an example's label is its index in this list

        def read(alternatives: Sequence[TaskFile]) -> list[Example]:
            (name,) = choose_file(task, directory, tuple(alternatives)).names
            files[name] = file_sha256(directory / name)
            sentences = [columns for columns, _ in conll_columns(directory / name)]
            if not sentences:
                raise DataError(f"{directory / name}: expected examples of {task.name}, found none. Fetch it again.")
            first = len(self._tags)
            self._tags += [tags for _, *tags in sentences]
            return [Example(words, None, first + row) for row, (words, *_) in enumerate(sentences)]

        train = read(task.train)
        self.parts = {"dev": read(task.evaluation["validation"])}
        if any((directory / name).is_file() for file in task.test["test"] for name in file.names):
            self.parts["test"] = read(task.test["test"])
        self.nine, self.parts["tuning"] = split_tenth(task.name, take_examples(task.name, train, limit))
        n_train = len(self.nine) + len(self.parts["tuning"])
        n_eval = {part: len(examples) for part, examples in self.parts.items()}
        self.data = {"name": f"{task.name}, local", "files": files, "n_train": n_train, "n_eval": sum(n_eval.values())}
        self.settings = {"words": "first piece"} | LINEAR
        self.total = len(self.nine) + sum(n_eval.values())

    def score(self, encoder: FeatureExtractor, place: Path, report: Report) -> tuple[list[dict], dict]:
        """See Measure."""
        done = 0
        words: dict[str, WordFeatures] = {}
        for part, examples in {"nine": self.nine, **self.parts}.items():
            sentences = [list(example.first) for example in examples]
            words[part] = _words(encoder, place / f"{part}.npz", sentences, done, report)
            done += len(examples)
        figures: list[dict] = []
        chosen: dict[str, dict] = {}
        for metric in ("entities", "pos", "chunks"):
            found, chosen[metric] = self._score(metric, words)
            figures += found
        return figures, chosen

    def _tags_of(self, example: Example) -> list[list[str]]:
        assert isinstance(example.label, int)
        return self._tags[example.label]

    def _score(self, metric, words: dict[str, WordFeatures]) -> tuple[list[dict], dict]:
        gold = {
            part: [self._tags_of(example)[self.COLUMNS.index(metric)] for example in examples]
            for part, examples in {"nine": self.nine, **self.parts}.items()
        }
        train_tags = [_read_tags(gold[part], words[part]) for part in ("nine", "tuning")]
        names, y_T = np.unique(np.concatenate(train_tags), return_inverse=True)
        value = _accuracy if metric == "pos" else metrics.span_f1

        def worth(part, said_T):
            return value(gold[part], _by_sentence(names[said_T], words[part]))

        x_TD = np.concatenate([words["nine"].states_TD, words["tuning"].states_TD])
        parts = [part for part in ("dev", "test") if part in words]
        predictions, chosen = tune_and_fit(
            x_TD,
            y_T,
            len(train_tags[1]),
            partial(worth, "tuning"),
            [in_blocks(words[part].states_TD) for part in parts],
        )
        figures = [
            figure(metric, part, worth(part, said), len(words[part].all_read if metric == "pos" else gold[part]))
            for part, said in zip(("tuning", *parts), predictions, strict=True)
        ]
        return figures, chosen


def _words(encoder: FeatureExtractor, file: Path, sentences, done: int, report: Report) -> WordFeatures:
    """Features of the sentences' words, cached in a file."""

    def make():
        words = encoder.words(sentences, lambda number: report(done + number))
        return {"states": words.states_TD, "read": words.all_read}

    arrays = kept(file, make)
    ends = np.cumsum([len(words) for words in sentences])
    return WordFeatures(arrays["states"], np.split(arrays["read"], ends[:-1]))


def _read_tags(tags_N: Sequence[Sequence[str]], words: WordFeatures) -> np.ndarray:
    """The tags of the words that were read."""
    return np.concatenate([np.array(tags)[read] for tags, read in zip(tags_N, words.read_N, strict=True)])


def _by_sentence(said_T: np.ndarray, words: WordFeatures) -> list[list[str]]:
    """Predicted tags of every sentence's words; those that were not read have a tag that is always wrong."""
    all_read = words.all_read
    tags = np.full(len(all_read), metrics.UNREAD_TAG, dtype=object)
    tags[all_read] = said_T
    return [part.tolist() for part in np.split(tags, np.cumsum([len(read) for read in words.read_N])[:-1])]


def _accuracy(gold: list[list[str]], said: list[list[str]]) -> float:
    return mean(a == b for one, other in zip(gold, said, strict=True) for a, b in zip(one, other, strict=True))


class Texts:
    """Tasks with a label or score for a text, a pair of texts, or a word in two texts.

    A text's features are the mean over its tokens; those of WiC's word are its first token's. A pair u, v has the
    features u, v, |u - v|, u v. STS-B is also measured without training: Spearman's correlation with the cosines of
    means, at the layer that is best on the whole training set and at the last one, as sentence-transformers reads it.
    """

    def __init__(self, task: Task, data_dir: Path | None, limit: int):
        data = load_task(task, data_dir)
        self.task, self.evaluation = task, data.evaluation
        self.nine, self.tenth = split_tenth(task.name, take_examples(task.name, data.train, limit))
        self.data = data._replace(train=[*self.nine, *self.tenth]).facts()
        shape = "pair: u, v, |u-v|, uv; " if task.has_pairs else ""
        penalties = LINEAR if task.labels else {"ridge_penalties": list(RIDGE_PENALTIES)}
        self.settings = {"texts": shape + ("first piece of the target" if task.name == "wic" else "mean")} | penalties
        self.total = (len(self.nine) + len(self.tenth) + self.data["n_eval"]) * (2 if task.has_pairs else 1)

    def score(self, encoder: FeatureExtractor, place: Path, report: Report) -> tuple[list[dict], dict]:
        """See Measure."""
        done, sides = 0, {}
        for part, examples in {"train": [*self.nine, *self.tenth], **self.evaluation}.items():
            arrays = kept(place / f"{part}.npz", partial(self._sides, encoder, examples, done, report))
            sides[part] = [arrays[name] for name in sorted(arrays)]
            done += len(examples) * len(sides[part])
        gold = {part: [example.label for example in examples] for part, examples in self.evaluation.items()}
        tuning = [example.label for example in self.tenth]

        def figures_of(gold, said):
            return metrics.figures(self.task, gold, said)

        def worth(said):
            found = figures_of(dict.fromkeys(gold, tuning), dict.fromkeys(gold, said))
            return mean(one["value"] for one in found)

        labels = [example.label for example in (*self.nine, *self.tenth)]
        y_N = np.array(labels, np.int64 if self.task.labels else np.float64)
        (said, *predictions), chosen = tune_and_fit(
            np.concatenate([*in_blocks(*sides["train"])]),
            y_N,
            len(tuning),
            worth,
            [in_blocks(*sides[part]) for part in gold],
        )
        predicted: dict[str, metrics.Predictions] = dict(zip(gold, predictions, strict=True))
        by_part = {
            "tuning": figures_of(dict.fromkeys(gold, tuning), dict.fromkeys(gold, said)),
            "dev": figures_of(gold, predicted),
        }
        figures = [figure(one["metric"], part, one["value"], one["n"]) for part in by_part for one in by_part[part]]
        result: dict[str, Any] = {self.task.name: chosen}
        if constant := metrics.constant(self.task, predicted):
            result["constant"] = constant
        if self.task.name == "stsb":
            cosines, result["cosine"] = self._cosines(encoder, sides)
            figures += cosines
        return figures, result

    def _sides(
        self, encoder: FeatureExtractor, examples: list[Example], done: int, report: Report
    ) -> dict[str, np.ndarray]:
        """Vectors of the texts of each side, in the order of the examples."""

        def report_side(number, side):
            report(done + side * len(examples) + number)

        if self.task.name == "wic":
            return {str(side): _targets(encoder, examples, side, partial(report_side, side=side)) for side in (0, 1)}
        sides = (0, 1) if self.task.has_pairs else (0,)
        return {
            str(side): encoder.means([_text(e, side) for e in examples], partial(report_side, side=side))
            for side in sides
        }

    def _cosines(self, encoder: FeatureExtractor, sides) -> tuple[list[dict], dict]:
        """Scores of cosines at the layer that is best on the training set and at the last, and the scores of all."""
        train, dev = [*self.nine, *self.tenth], self.evaluation["validation"]
        by_layer = []
        for number, layer in enumerate(encoder.layers):
            columns = slice(number * encoder.teacher.hidden_size, (number + 1) * encoder.teacher.hidden_size)
            values = [
                metrics.spearman(
                    np.array([e.label for e in examples]), _cosine(*(side[:, columns] for side in sides[part]))
                )
                for part, examples in (("train", train), ("validation", dev))
            ]
            by_layer.append({"layer": layer, "tuning": values[0], "dev": values[1]})
        best = max(by_layer, key=lambda found: found["tuning"])
        figures = [
            figure(name, part, found[part], count)
            for name, found in (("cosine", best), ("cosine_last", by_layer[-1]))
            for part, count in (("tuning", len(train)), ("dev", len(dev)))
        ]
        return figures, {"layer": best["layer"], "layers": by_layer}


def _targets(encoder: FeatureExtractor, examples: list[Example], side: int, report: Report) -> np.ndarray:
    """The state of the target word's first token on one side of every example; zeros if it was not read."""
    texts, starts_of_words = zip(*(_begin_word(example, side) for example in examples), strict=True)
    words = encoder.words([text.split(" ") for text in texts], report)
    found_ND = np.zeros((len(examples), encoder.width), np.float32)
    starts = np.concatenate([[0], np.cumsum([read.sum() for read in words.read_N])])
    for row, (text, start, read) in enumerate(zip(texts, starts_of_words, words.read_N, strict=True)):
        place = text[:start].count(" ")
        if read[place]:
            found_ND[row] = words.states_TD[starts[row] + read[:place].sum()]
    return found_ND


def _begin_word(example: Example, side: int) -> tuple[str, int]:
    """A text in which the target begins a word (a quotation mark may stand before it), and where it starts."""
    assert example.targets is not None
    text, start = _text(example, side), example.targets[side][0]
    inside = text[:start] and not text[:start].endswith(" ")
    return (f"{text[:start]} {text[start:]}", start + 1) if inside else (text, start)


def _text(example: Example, side: int) -> str:
    text = example.second if side else example.first
    assert isinstance(text, str)
    return text


def _cosine(first_Nd: np.ndarray, second_Nd: np.ndarray) -> np.ndarray:
    norms_N = np.linalg.norm(first_Nd, axis=1) * np.linalg.norm(second_Nd, axis=1)
    return (first_Nd * second_Nd).sum(1) / np.maximum(norms_N, 1e-12)
