"""Hidden states of a frozen encoder as features of words, texts and pairs of texts.

    encoder = FeatureExtractor(directory, layers=(0, 1, 2), max_length=128, device=device)
    words = encoder.words(sentences, report)    # the first piece of every word, float32 (T, D)

Layer 0 is the output of the embeddings; the states are transformers' own `hidden_states`, float32, without dropout.
Each text is read separately, with the special tokens of the model's tokenizer. A text's mean is over all of its tokens
including [CLS] and [SEP], as in sentence-transformers' mean pooling. Not handled here: the use of the features
(linear.py, measures.py), vectors of annotated words (senses.py).

Shapes: N texts, T words that were read, L tokens, D = layers x d.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from mlsm.common.arrays import read_npz
from mlsm.common.durable import appearing_whole
from mlsm.common.errors import ModelError
from mlsm.evaluation.models import load_fitting_tokenizer
from mlsm.evaluation.tasks.finetuning.batches import EncodedExamples, batches_by_length, tokenise
from mlsm.evaluation.tasks.finetuning.formats import Example
from pipeline.teacher import Teacher, read_config

AT_ONCE = 64  # texts in a forward pass
ROWS = 4096  # examples in a block of features


class WordFeatures(NamedTuple):
    """The words of some sentences.

    states_TD  features of the words that were read, in order
    read_N     bool arrays, one per sentence: which words were read; the others are beyond the longest input
    """

    states_TD: np.ndarray
    read_N: list[np.ndarray]

    @property
    def all_read(self) -> np.ndarray:
        """read_N of all sentences, concatenated."""
        return np.concatenate(self.read_N)


class FeatureExtractor:
    """A frozen encoder and its tokenizer.

    layers      numbers of the layers whose hidden states are concatenated; None: all, including the embeddings
    max_length  longest input in tokens, limited by the encoder; longer ones are cut
    Raises      ModelError, TeacherError if the model cannot be loaded or has no such layer
    """

    def __init__(self, directory: Path, layers: Sequence[int] | None, max_length: int, device: torch.device):
        depth = read_config(directory, directory).num_hidden_layers
        self.layers = tuple(range(depth + 1)) if layers is None else tuple(layers)
        if wrong := [layer for layer in self.layers if not 0 <= layer <= depth]:
            raise ModelError(f"{directory} has layers 0 (its embeddings) to {depth}, found --layer {wrong[0]}.")
        self.teacher = Teacher.load(directory, depth, device=device)
        self.tokenizer = load_fitting_tokenizer(directory, self.teacher._model, pads=True)
        self.max_length = int(min(max_length, self.teacher.max_positions))

    @property
    def width(self) -> int:
        """D, the width of the features."""
        return len(self.layers) * self.teacher.hidden_size

    def words(self, sentences: Sequence[list[str]], report: Callable[[int], None]) -> WordFeatures:
        """The states of every word's first token. `report` gets the number of finished sentences."""
        encoded = self._encode(sentences, labels_words=True)
        assert encoded.words_N is not None
        read_N = [places >= 0 for places in encoded.words_N]
        starts = np.concatenate([[0], np.cumsum([read.sum() for read in read_N])])
        states_TD = np.empty((starts[-1], self.width), np.float32)
        for row, states_LD in self._read(encoded, report):
            places = encoded.words_N[row]
            states_TD[starts[row] : starts[row + 1]] = states_LD[places[places >= 0]]
        return WordFeatures(states_TD, read_N)

    def means(self, texts: Sequence[str], report: Callable[[int], None]) -> np.ndarray:
        """The mean state of every text, (N, D)."""
        encoded = self._encode(texts, labels_words=False)
        means_ND = np.empty((len(texts), self.width), np.float32)
        for row, states_LD in self._read(encoded, report):
            means_ND[row] = states_LD.mean(0)
        return means_ND

    def _encode(self, texts, labels_words) -> EncodedExamples:
        examples = [Example(text, None, [0] * len(text) if labels_words else 0) for text in texts]
        return tokenise(self.tokenizer, examples, labels_words, max_length=self.max_length, takes_types=False)

    def _read(self, encoded: EncodedExamples, report) -> Iterator[tuple[int, np.ndarray]]:
        """(number of a text, its hidden states (L, D)), the longest texts first."""
        done = 0
        for rows in batches_by_length(encoded, AT_ONCE):
            inputs, _ = encoded.batch(rows)
            states = self.teacher(inputs["input_ids"], inputs["attention_mask"].bool(), layers=self.layers)
            states_WLD = torch.cat(states, dim=-1).cpu().numpy()
            if not np.isfinite(states_WLD[inputs["attention_mask"].numpy() > 0]).all():
                raise ModelError(f"{self.teacher.name}: a hidden state is not finite, so nothing can be measured.")
            for states_LD, row in zip(states_WLD, rows, strict=True):
                yield int(row), states_LD[: encoded.lengths_N[row]]
            report(done := done + len(rows))


def pair_features(first_ND: np.ndarray, second_ND: np.ndarray) -> np.ndarray:
    """u, v, |u - v| and u v of every pair, (N, 4 D): Conneau and Kiela 2018 (SentEval)."""
    return np.hstack([first_ND, second_ND, np.abs(first_ND - second_ND), first_ND * second_ND])


def in_blocks(*sides_ND: np.ndarray) -> Iterator[np.ndarray]:
    """The features of examples with one side or two, ROWS examples at a time."""
    for start in range(0, max(1, len(sides_ND[0])), ROWS):
        block = [side_ND[start : start + ROWS] for side_ND in sides_ND]
        yield pair_features(*block) if len(block) == 2 else block[0]


def kept(file: Path, make: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The arrays in a file of a working directory. `make` computes them first if the file is missing or damaged."""
    with suppress(OSError, ValueError):
        return read_npz(file)
    made: dict[str, Any] = make()
    with appearing_whole(file) as out:
        np.savez(out, **made)
    return made
