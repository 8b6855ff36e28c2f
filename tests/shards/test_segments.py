"""Segments derived from [SEP] equal the token types that a tokenizer gives to pairs."""

import numpy as np

from pipeline.teacher import load_tokenizer
from shards.segments import segment_ids


def test_segments_are_the_types_of_the_tokenizer(teacher_directory):
    tokenizer = load_tokenizer(teacher_directory)
    pairs = [("a short one", "another"), ("the first sentence", "and a much longer second sentence"), ("a", "b")]
    expected = tokenizer(pairs, padding="longest", return_token_type_ids=True)
    found = segment_ids(expected["input_ids"], np.sum(expected["attention_mask"], axis=1), tokenizer.sep_token_id)
    np.testing.assert_array_equal(found, expected["token_type_ids"])


def test_a_window_of_one_sentence_has_one_segment():
    ids_WL = [[2, 7, 8, 3, 0, 0], [2, 7, 3, 8, 9, 3]]
    np.testing.assert_array_equal(segment_ids(ids_WL, [4, 6], sep_id=3), [[0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1]])


def test_padding_is_segment_0_even_where_the_padding_id_is_the_separator():
    np.testing.assert_array_equal(segment_ids([[2, 7, 3, 3, 3]], [3], sep_id=3), [[0, 0, 0, 0, 0]])
