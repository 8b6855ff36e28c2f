"""Vectors of annotated words at several layers, from one pass of the teacher.

    text = Readings(sentences, tokenizer, special, teacher.max_positions)
    for numbers, readings in text.chunks(65_536):
        vectors = word_vectors(teacher, len(numbers), readings, {10: (10, None)}, batch_tokens, special["pad"])
        vectors[10]                                                                     # (n, d), of layer 10

The context is one sentence, its words in order with single spaces between them. The vector of a word is the mean over
its subtokens, scaled to unit length. Sentences of about equal length share a forward pass, so that there is little
padding. A sentence that is too long for the teacher is read in windows that overlap by half; each subtoken's vector is
from the window in which it is farthest from an end. A word without subtokens (the tokenizer drops its characters) gets
a vector of zeros. Not handled here: codes (choose_layer.py).

Shapes: W windows, L ids of a window, N chosen subtokens, n words of a chunk, d hidden width.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from mlsm.common.errors import EncodeError
from mlsm.common.progress import silent
from mlsm.evaluation.studies.word_senses.framework import Sentence
from pipeline.teacher import Teacher

Centers = Mapping[int | str, tuple[int, torch.Tensor | None]]
WIDTHS = 4  # windows are padded to a multiple of this, for fewer shapes: oneDNN compiles for each


class WordWindow(NamedTuple):
    """One window of a sentence.

    ids     with [CLS] and [SEP]
    places  positions in the window of the annotated words' subtokens
    words   the word of each place
    """

    ids: list[int]
    places: list[int]
    words: list[int]


class Readings:
    """Sentences cut into windows for the teacher, longest first.

    Annotated words are numbered from 0 in the order of the sentences; sentences without any are not read.
    words  how many there are;  tokens  how many ids all windows hold
    """

    def __init__(self, sentences: list[Sentence], tokenizer: Any, special: dict, max_positions: float):
        sentences = [sentence for sentence in sentences if sentence.instances]
        room, first, found = max_positions - 2, 0, []
        for sentence, (ids, word_of) in zip(sentences, _tokenise(sentences, tokenizer), strict=True):
            number = {instance.place: first + i for i, instance in enumerate(sentence.instances)}
            numbers = [number.get(word, -1) for word in word_of]
            found.append((list(number.values()), _windows(ids, numbers, room, special)))
            first += len(sentence.instances)
        self.words = first
        self._sentences = sorted(found, key=lambda words_and_windows: -_length(words_and_windows))
        self.tokens = sum(map(_length, found))

    def chunks(self, tokens: int) -> Iterator[tuple[np.ndarray, list[WordWindow]]]:
        """Yield chunks of about this many ids: (numbers of words (n), list of windows with words counted from 0)."""
        words: list[int] = []
        readings: list[WordWindow] = []
        size = 0
        for numbers, windows in self._sentences:
            shift = len(words)
            local = {number: shift + i for i, number in enumerate(numbers)}
            words += numbers
            readings += [window._replace(words=[local[number] for number in window.words]) for window in windows]
            size += sum(len(window.ids) for window in windows)
            if size >= tokens:
                yield np.array(words), readings
                words, readings, size = [], [], 0
        if words:
            yield np.array(words), readings


def _length(words_and_windows):
    return sum(len(window.ids) for window in words_and_windows[1])


def _tokenise(sentences, tokenizer, at_once=4096):
    """Ids of every sentence without special ones, and for each id the number of its word in the sentence, or -1.

    The tokenizer gets the sentence as text, because some tokenizers mark spaces. A subtoken belongs to the word of its
    last character.
    """
    for start in range(0, len(sentences), at_once):
        part = sentences[start : start + at_once]
        texts = [" ".join(word for word in sentence.words if word) for sentence in part]
        encodings = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
        for sentence, encoding in zip(part, encodings, strict=True):
            word_of_character = _word_of_character(sentence.words)
            yield encoding.ids, [word_of_character[end - 1] if end > begin else -1 for begin, end in encoding.offsets]


def _word_of_character(words):
    """For every character of the text, the number of its word; a space belongs to the word after it."""
    found: list[int] = []
    for number, word in enumerate(words):
        if word:
            found += [number] * (len(word) + bool(found))
    return found


def _windows(ids, numbers, room, special):
    """The windows of a sentence; `numbers` has the annotated word of each subtoken, -1 for other subtokens."""
    last = max(0, len(ids) - room)
    starts = sorted({min(start, last) for start in range(0, last + room // 2, max(1, room // 2))}) if last else [0]
    nearest = [min(starts, key=lambda start: abs(2 * (i - start) - room)) for i in range(len(ids))] if last else None
    found = []
    for start in starts:
        inside = range(start, min(start + room, len(ids)))
        chosen = [i for i in inside if numbers[i] >= 0 and (nearest is None or nearest[i] == start)]
        window = [special["cls"], *ids[inside.start : inside.stop], special["sep"]]
        found.append(WordWindow(window, [1 + i - start for i in chosen], [numbers[i] for i in chosen]))
    return found


class WordBatch(NamedTuple):
    """One forward pass.

    tokens_N  places of the chosen subtokens, counted row by row;  words_N  the word of each subtoken
    """

    ids_WL: torch.Tensor
    real_WL: torch.Tensor
    tokens_N: torch.Tensor
    words_N: torch.Tensor


def batches(readings: list[WordWindow], batch_tokens: int, pad: int) -> Iterator[WordBatch]:
    """Batches of windows, longest first, each of at most `batch_tokens` ids including padding."""
    ordered = sorted(readings, key=lambda reading: -len(reading.ids))
    start = 0
    while start < len(ordered):
        width = -(-len(ordered[start].ids) // WIDTHS) * WIDTHS
        part = ordered[start : start + max(1, batch_tokens // width)]
        start += len(part)
        yield _batch(part, width, pad)


def _batch(readings, width, pad):
    lengths_W = np.array([len(reading.ids) for reading in readings])
    real_WL = np.arange(width) < lengths_W[:, None]
    ids_WL = np.full(real_WL.shape, pad, np.int64)
    ids_WL[real_WL] = [i for reading in readings for i in reading.ids]
    tokens = [row * width + place for row, reading in enumerate(readings) for place in reading.places]
    words = [word for reading in readings for word in reading.words]
    return WordBatch(*map(torch.from_numpy, (ids_WL, real_WL, np.array(tokens, np.int64), np.array(words, np.int64))))


@torch.inference_mode()
def word_vectors(
    teacher: Teacher,
    words: int,
    readings: list[WordWindow],
    centers: Centers,
    batch_tokens: int,
    pad: int,
    report: Callable[[int], None] = silent,
) -> dict[int | str, np.ndarray]:
    """Unit-length vectors of the words of a chunk.

    centers  name -> (layer, rows to subtract at each position, see dictionary/centering.py, or None)
    report   called after each forward pass with the number of tokens read
    Returns  dict of name to (words, d) float32
    Raises   EncodeError on a hidden state that is not finite
    """
    layers = sorted({layer for layer, _ in centers.values()})
    sums = {name: torch.zeros(words, teacher.hidden_size) for name in centers}
    read = 0
    for batch in batches(readings, batch_tokens, pad):
        inputs = batch.ids_WL, batch.real_WL, batch.tokens_N
        position_N = batch.tokens_N % batch.ids_WL.shape[1]
        states = [teacher(*inputs)] if layers == [teacher.layer] else teacher(*inputs, layers=layers)
        rows_of = dict(zip(layers, (rows_Nd.cpu() for rows_Nd in states), strict=True))
        for name, (layer, center_Pd) in centers.items():
            rows_Nd = rows_of[layer]
            if center_Pd is not None:
                rows_Nd = rows_Nd - center_Pd[position_N.clamp(max=len(center_Pd) - 1)]
            sums[name].index_add_(0, batch.words_N, rows_Nd)
        report(read := read + int(batch.real_WL.sum()))
    return {name: _unit_length(teacher, centers[name][0], sums_nd) for name, sums_nd in sums.items()}


def _unit_length(teacher, layer, sums_nd):
    norms_n = torch.linalg.vector_norm(sums_nd, dim=1, keepdim=True)
    if count := int((~norms_n.isfinite()).sum()):
        raise EncodeError(f"{teacher.name}, layer {layer}: {count} word vectors are not finite. Try --dtype float32.")
    return (sums_nd / norms_n.clamp(min=1e-12)).numpy()
