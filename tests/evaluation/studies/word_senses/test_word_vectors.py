"""Word vectors against plain computations: one sentence at a time, the full model, transformers' own word numbers."""

import numpy as np
import pytest
import torch
from minilm import minilm_dir
from tiny_senses import plain_vectors

from mlsm.common.errors import EncodeError
from mlsm.evaluation.studies.word_senses.framework import Instance, Sentence
from mlsm.evaluation.studies.word_senses.word_vectors import Readings, batches, word_vectors
from pipeline.teacher import Teacher, load_tokenizer, special_ids

SENTENCES = [
    ["The", "Fulton County Grand Jury", "said", "an", "investigation", "of", "Atlanta", "'s", "recent", "vote", "."],
    ["change-ringing", "is", "peculiar", "to", "the", "English", ",", "and", "naïve", "don't", "…"],
    ["He", "sat", "down", "by", "the", "bank", "of", "the", "very", "long", "river", "that", "he", "knew", "well"],
    ["Nothing", "annotated"],
    ["\x00\u200b", "", "odd", "words"],
    ["Wait", "!"],
]
ANNOTATED = [(1, 2, 9), (0, 2, 8, 9), (5, 14), (), (0, 1, 2), (0, 1)]


def annotated(sentences, places):
    return [
        Sentence(words, [Instance(f"s{s}.{place}", place, "x", "NOUN", ("x%1",)) for place in chosen])
        for s, (words, chosen) in enumerate(zip(sentences, places, strict=True))
    ]


def ours(directory, sentences, layers, depth, batch_tokens=40, chunk=30, max_positions=None):
    """Vectors (layers, words, d) in the order of the words."""
    teacher, tokenizer = Teacher.load(directory, depth), load_tokenizer(directory)
    special = special_ids(tokenizer)
    text = Readings(sentences, tokenizer, special, max_positions or teacher.max_positions)
    centers = {layer: (layer, None) for layer in layers}
    found = np.full((len(layers), text.words, teacher.hidden_size), np.nan, np.float32)
    for words, readings in text.chunks(chunk):
        vectors = word_vectors(teacher, len(words), readings, centers, batch_tokens, special["pad"])
        for i, layer in enumerate(layers):
            found[i, words] = vectors[layer]
    return found


def test_minilm_equals_the_full_model_sentence_by_sentence():
    sentences = annotated(SENTENCES, ANNOTATED)
    found = ours(minilm_dir(), sentences, [2, 5, 6], 6)
    expected = plain_vectors(minilm_dir(), sentences, [2, 5, 6])
    assert found == pytest.approx(expected, abs=2e-5)
    norms = np.linalg.norm(found, axis=2)
    empty = [9, 10]  # the characters that the tokenizer drops, and the word without any
    assert (norms[:, empty] == 0).all() and np.delete(norms, empty, 1) == pytest.approx(1.0, abs=1e-5)


def test_a_teacher_cut_there_gives_the_same_as_one_pass_for_all(teacher_directory):
    sentences = annotated(SENTENCES, ANNOTATED)
    together = ours(teacher_directory, sentences, [1, 3], 3)
    assert ours(teacher_directory, sentences, [1], 1) == pytest.approx(together[:1], abs=1e-5)
    assert together == pytest.approx(plain_vectors(teacher_directory, sentences, [1, 3]), abs=2e-5)


def test_long_sentences_are_read_in_windows(teacher_directory):
    """Every subtoken counts once, in the window where it is farthest from an end."""
    words = [f"word{i}" if i % 3 else "of" for i in range(150)]
    sentences = annotated([words, ["short"]], [range(0, 150, 2), (0,)])
    found = ours(teacher_directory, sentences, [2], 3, batch_tokens=256, max_positions=32)
    tokenizer, room = load_tokenizer(teacher_directory), 30
    teacher, special = Teacher.load(teacher_directory, 2), special_ids(load_tokenizer(teacher_directory))
    encoding = tokenizer(words, is_split_into_words=True, add_special_tokens=False)
    ids, last = encoding.input_ids, len(encoding.input_ids) - room
    assert last > 3 * room
    starts = [*range(0, last, room // 2), last]
    states = {s: teacher(torch.tensor([[special["cls"], *ids[s : s + room], special["sep"]]]))[0, 1:-1] for s in starts}
    for n, place in enumerate(range(0, 150, 2)):
        total = 0
        for i in (i for i, word in enumerate(encoding.word_ids()) if word == place):
            start = max(starts, key=lambda s: min(i - s, s + room - 1 - i))
            total = total + states[start][i - start]
        assert found[0, n] == pytest.approx((total / total.norm()).numpy(), abs=2e-5), place


def test_batches_are_full_and_have_little_padding(teacher_directory, english_text):
    lines = [line.split()[:40] for line in english_text.read_text().splitlines() if line.strip()][:400]
    sentences = annotated(lines, [(0,)] * len(lines))
    tokenizer = load_tokenizer(teacher_directory)
    special = special_ids(tokenizer)
    text = Readings(sentences, tokenizer, special, 128)
    chunks = list(text.chunks(10**9))
    assert sorted(chunks[0][0]) == list(range(len(lines)))
    made = list(batches(chunks[0][1], 512, special["pad"]))
    assert sum(int(batch.real_WL.sum()) for batch in made) == text.tokens
    assert all(batch.ids_WL.numel() <= 512 for batch in made)
    assert sum(batch.ids_WL.numel() for batch in made) < 1.15 * text.tokens


def test_a_hidden_state_that_is_not_finite_is_refused(teacher_directory):
    teacher, tokenizer = Teacher.load(teacher_directory, 1), load_tokenizer(teacher_directory)
    special = special_ids(tokenizer)
    teacher._model.get_input_embeddings().weight.data.fill_(float("nan"))
    words, readings = next(Readings(annotated(SENTENCES, ANNOTATED), tokenizer, special, 128).chunks(100))
    with pytest.raises(EncodeError, match="not finite. Try --dtype float32"):
        word_vectors(teacher, len(words), readings, {1: (1, None)}, 512, special["pad"])
