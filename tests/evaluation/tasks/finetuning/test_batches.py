"""The order of batches depends only on task and epoch, and a model's inputs are those of its tokenizer."""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mlsm.evaluation.tasks.finetuning.batches import IGNORED, batches_by_length, order, order_digest, tokenise
from mlsm.evaluation.tasks.finetuning.data import load_task
from mlsm.evaluation.tasks.finetuning.tasks import TASKS
from pipeline.teacher import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(teacher_directory):
    return load_tokenizer(teacher_directory)


def test_the_order_is_of_task_and_epoch_and_complete():
    orders = {(task, epoch): tuple(order(task, epoch, 100)) for task in ("rte", "mrpc") for epoch in range(3)}
    assert len(set(orders.values())) == 6
    assert all(sorted(rows) == list(range(100)) for rows in orders.values())
    assert order("rte", 1, 100).tolist() == list(orders["rte", 1])
    digests = {order_digest(*what) for what in (("rte", 3, 100), ("rte", 2, 100), ("mrpc", 3, 100), ("rte", 3, 99))}
    assert len(digests) == 4


def test_batches_are_what_the_tokenizer_pads(tokenizer, teacher_directory, miniatures):
    examples = load_task(TASKS["mrpc"], miniatures).train
    encoded = tokenise(tokenizer, examples, False, max_length=20, takes_types=True)
    rows = np.array([5, 0, 17])
    inputs, labels = encoded.batch(rows)
    oracle = AutoTokenizer.from_pretrained(teacher_directory)(
        [examples[row].first for row in rows],
        [examples[row].second for row in rows],
        truncation="longest_first",
        max_length=20,
        padding=True,
        return_token_type_ids=True,
        return_tensors="pt",
    )
    assert inputs.keys() == oracle.keys()
    assert all(torch.equal(inputs[name], oracle[name]) for name in oracle)
    assert labels.tolist() == [examples[row].label for row in rows] and labels.dtype == torch.int64
    assert inputs["input_ids"].shape[1] <= 20


def test_a_model_without_sentence_types_gets_none(tokenizer, miniatures):
    examples = load_task(TASKS["stsb"], miniatures).train
    inputs, labels = tokenise(tokenizer, examples, False, max_length=64, takes_types=False).batch(np.arange(4))
    assert inputs.keys() == {"input_ids", "attention_mask"} and labels.dtype == torch.float32


@pytest.mark.parametrize("processor", [None, TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])])
@pytest.mark.parametrize("task", ["conll2003", "cola", "mrpc"])
def test_a_tokenizer_that_adds_no_special_tokens_gets_them(task, processor, tokenizer, teacher_directory, miniatures):
    """As the scorer, choose-layer and stores frame its texts."""
    bare = load_tokenizer(teacher_directory)
    bare.backend_tokenizer.post_processor = processor
    examples, labels_words = load_task(TASKS[task], miniatures).train, TASKS[task].labels_words
    found, expected = (
        tokenise(one, examples, labels_words, max_length=8, takes_types=True) for one in (bare, tokenizer)
    )
    assert found.ids_T.tolist() == expected.ids_T.tolist() and found.types_T.tolist() == expected.types_T.tolist()
    assert found.starts.tolist() == expected.starts.tolist() and found.cut == expected.cut > 0
    if labels_words:
        assert [places.tolist() for places in found.words_N] == [places.tolist() for places in expected.words_N]
    assert not any(bare.backend_tokenizer.encode("a").special_tokens_mask), "the tokenizer is left as it was"


def test_first_tokens_are_those_of_word_ids(tokenizer, teacher_directory, miniatures):
    examples = load_task(TASKS["conll2003"], miniatures).train
    examples[3] = examples[3]._replace(first=["U.N.", "\u200b", "o'clock-ish", "Xyzzyqwfp"], label=[3, 0, 5, 6])
    encoded = tokenise(tokenizer, examples, True, max_length=16, takes_types=False)
    splitting = AutoTokenizer.from_pretrained(teacher_directory)
    inputs, labels = encoded.batch(np.arange(8))
    for row, example in enumerate(examples[:8]):
        words = splitting(example.first, is_split_into_words=True, truncation=True, max_length=16).word_ids()
        first = [words.index(word) if word in words else -1 for word in range(len(example.first))]
        assert encoded.words_N[row].tolist() == first
        expected = np.full(labels.shape[1], IGNORED)
        for word, place in enumerate(first):
            if place >= 0:
                expected[place] = example.label[word]
        assert labels[row].tolist() == expected.tolist()
    assert -1 in encoded.words_N[3]  # one was cut off, or has no token


def test_the_space_before_a_word_is_its_first_token_only_if_nothing_follows(miniatures):
    vocabulary = [("[UNK]", 0.0), ("[CLS]", 0.0), ("[SEP]", 0.0), ("▁", -5.0), ("▁a", -1.0), ("東京", -2.0)]
    backend = Tokenizer(models.Unigram(vocabulary, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    names = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[UNK]"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    examples = [load_task(TASKS["conll2003"], miniatures).train[0]._replace(first=["a", "東京", "a"], label=[0, 1, 2])]
    encoded = tokenise(tokenizer, examples, True, max_length=16, takes_types=False)
    tokens = tokenizer.convert_ids_to_tokens(encoded.ids_T.tolist())
    assert tokens == ["[CLS]", "▁a", "▁", "東京", "▁a", "[SEP]"] and encoded.words_N[0].tolist() == [1, 3, 4]


def test_evaluation_takes_every_example_once_the_longest_first(tokenizer, miniatures):
    encoded = tokenise(tokenizer, load_task(TASKS["rte"], miniatures).train, False, max_length=64, takes_types=False)
    batches = batches_by_length(encoded, 10)
    assert sorted(np.concatenate(batches)) == list(range(len(encoded)))
    assert encoded.lengths_N[batches[0][0]] == encoded.lengths_N.max()
    assert (np.diff(encoded.lengths_N[np.concatenate(batches)]) <= 0).all()
