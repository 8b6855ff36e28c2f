"""The rules that a student must beat, on examples small enough to do by hand."""

import numpy as np

from benchmarks.simple_rules import constant, lookup, overlap, words
from mlsm.evaluation.tasks.finetuning.formats import Example
from mlsm.evaluation.tasks.finetuning.tasks import ENTITIES


def tags(*names):
    return [ENTITIES.index(name) for name in names]


def sentence(text, *names):
    return Example(text.split(), None, tags(*names))


def test_the_longest_entity_of_the_training_sentences_of_its_usual_type():
    seen = [
        sentence("New York Times reports", "B-ORG", "I-ORG", "I-ORG", "O"),
        sentence("New York won", "B-LOC", "I-LOC", "O"),
        sentence("New York lost", "B-ORG", "I-ORG", "O"),
        sentence("from New York", "O", "B-LOC", "I-LOC"),
    ]
    longest, usual = lookup(seen)([sentence("The New York Times of New York"), sentence("to New York")])
    assert longest == tags("O", "B-ORG", "I-ORG", "I-ORG", "O", "B-LOC", "I-LOC")
    assert usual == tags("O", "B-LOC", "I-LOC")


def test_what_two_sentences_share():
    assert overlap(Example("A dog, a cat", "the cat", 1)) == [3, 2, 1, 1 / 3, 1 / 2, 1 / 4]


def test_the_most_frequent_answer_and_a_linear_model():
    pairs = [Example("a b c", "a b c" if same else "d e", same) for same in (1, 1, 0) * 10]
    assert constant(pairs)(pairs).tolist() == [1] * 30
    assert words(pairs)(pairs).tolist() == [example.label for example in pairs]
    scores = [example._replace(label=float(example.label)) for example in pairs]
    assert np.allclose(constant(scores)(scores), 2 / 3)
