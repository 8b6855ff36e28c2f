"""The annotated words of training and test sets as arrays: their synsets, candidates and sets.

    data = WsdData.read(root)
    data.sentences                      # of SemCor, then of the test sets in the order of TEST_SETS
    data.training_words, data.training_rows, data.questions

Not handled here: their vectors (word_vectors.py).
"""

import hashlib
import warnings
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mlsm.common.disk import file_sha256
from mlsm.common.wordnet import WordNet
from mlsm.evaluation.studies.word_senses.config import EXPECTED
from mlsm.evaluation.studies.word_senses.framework import (
    SEMCOR,
    SENSE_INDEX,
    TEST_SETS,
    Sentence,
    data_files,
    read_annotated,
)
from mlsm.evaluation.studies.word_senses.sense_scores import Questions


class WsdData(NamedTuple):
    """Shapes: Q test words, which come after the T training words; S synsets seen in training.

    training_words, training_rows  int64: pairs of a training word and the row of one of its synsets
    synsets        names of the rows
    questions      the test words, as Questions
    groups         name of a set, a part of speech, or ALL -> bool (Q)
    """

    wordnet: WordNet
    sentences: list[Sentence]
    training: int
    training_words: np.ndarray
    training_rows: np.ndarray
    synsets: list[str]
    questions: Questions
    groups: dict[str, np.ndarray]

    @classmethod
    def read(cls, root: Path, progress: Callable[..., None], limit: int | None = None) -> "WsdData":
        """Read and check everything.

        limit   number of sentences of SemCor to use, evenly spread; None: all. Test sets are always used whole
        Raises  WsdDataError
        """
        wordnet = WordNet.load(root / SENSE_INDEX)
        sets = []
        for done, folder in enumerate([SEMCOR, *TEST_SETS.values()]):
            progress("annotated text", done, 1 + len(TEST_SETS), unit="sets")
            sets.append(read_annotated(root, folder, wordnet))
        sets[0] = spread(sets[0], limit)
        return cls.of(wordnet, *sets)

    @classmethod
    def of(cls, wordnet: WordNet, training: list[Sentence], *tests: list[Sentence]) -> "WsdData":
        """Turn the sentences of a training set, and of test sets in the order of TEST_SETS, into numbers."""
        words = [[instance for sentence in found for instance in sentence.instances] for found in (training, *tests)]
        test = list(chain(*words[1:]))
        pairs = [(word, wordnet.synset_of[key]) for word, instance in enumerate(words[0]) for key in instance.gold]
        synsets = sorted({synset for _, synset in pairs})
        row_of = {synset: row for row, synset in enumerate(synsets)}
        return cls(
            wordnet,
            list(chain(training, *tests)),
            len(words[0]),
            np.array([word for word, _ in pairs]),
            np.array([row_of[synset] for _, synset in pairs]),
            synsets,
            _questions(test, wordnet, row_of),
            _groups(test, [len(found) for found in words[1:]]),
        )

    def counts(self) -> dict[str, int]:
        """The sizes of the data, for the result."""
        return {
            "training_words": self.training,
            "test_words": len(self.groups["ALL"]),
            "synsets_seen": len(self.synsets),
            "sentences": len(self.sentences),
        }

    def warn_of_differences(self) -> None:
        """Warn if the data's counts differ from those published by the framework's authors."""
        first_sense = self.questions.first_sense_Q().mean()
        found = {
            "training": self.training,
            "test": len(self.groups["ALL"]),
            "first sense F1": round(100 * first_sense, 1),
        }
        for name, expected in EXPECTED.items():
            if found[name] != expected:
                warnings.warn(
                    f"{name}: {found[name]:,} in this data, {expected:,} in the published framework. The results "
                    "cannot be compared with published ones.",
                    stacklevel=2,
                )


def spread(sentences: list[Sentence], limit: int | None) -> list[Sentence]:
    """At most `limit` of the sentences, evenly spread and always the same ones; all of them if it is None."""
    if limit is None or limit >= len(sentences):
        return sentences
    return [sentences[n * len(sentences) // limit] for n in range(limit)]


def _questions(test, wordnet, row_of):
    candidates = [wordnet.candidates(instance.lemma, instance.pos) for instance in test]
    pairs = [
        (key in instance.gold, row_of.get(synset, -1))
        for instance, senses in zip(test, candidates, strict=True)
        for key, synset in senses
    ]
    starts_Q = np.concatenate([[0], np.cumsum([len(senses) for senses in candidates])]).astype(np.int64)
    return Questions(starts_Q, np.array([row for _, row in pairs], np.int64), np.array([right for right, _ in pairs]))


def _groups(test, sizes):
    set_Q, pos_Q = np.repeat(list(TEST_SETS), sizes), np.array([instance.pos for instance in test])
    groups = {"ALL": np.ones(len(test), bool)} | {name: set_Q == name for name in TEST_SETS}
    return groups | {pos: pos_Q == pos for pos in ("NOUN", "VERB", "ADJ", "ADV")}


def data_fingerprint(root: Path) -> str:
    """A hash of the content of every file that is read. Raises WsdDataError if one is missing."""
    digest = hashlib.sha256()
    for file in data_files(root):
        digest.update(bytes.fromhex(file_sha256(file)))
    return digest.hexdigest()
