"""`--packing pairs` against the official code's loop over lines, and the tokenizer's own truncation."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kinds import write
from transformers import AutoTokenizer

from pipeline import plan as planning
from pipeline.commands import encode_ids
from pipeline.config import EncodeIdsConfig
from pipeline.corpus import Window
from pipeline.corpus.source import PIECE_CHARACTERS, Piece, parts
from pipeline.corpus.windows import pair_windows, windows
from pipeline.teacher import load_tokenizer
from shards.reader import Store


def official_pairs(lines):
    """What szegedai/MLSM's pretrainer.py feeds to the tokenizer, from the lines of a file."""
    first, second, begin = [], [], True
    for line in lines:
        line = line.rstrip()
        if len(line) < 5 and begin:
            continue
        if begin:
            first.append(line)
            begin = False
        else:
            second.append(line)
            begin = True
            if len(second[-1]) < 5 or len(first[-1].split()) + len(second[-1].split()) < 5:
                first.pop()
                second.pop()
    return list(zip(first, second, strict=False))


@pytest.fixture(scope="module")
def tokenizer(teacher_directory):
    return load_tokenizer(teacher_directory)


@pytest.fixture(scope="module")
def truncated(teacher_directory):
    """Function from two sentences to ids by transformers alone; truncating is a state of a tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(teacher_directory)
    return lambda one, two, length: tokenizer(one, two, truncation=True, max_length=length)["input_ids"]


def special_ids(tokenizer):
    return {"cls": tokenizer.cls_token_id, "sep": tokenizer.sep_token_id}


def pair_rules(max_length=16):
    return planning.windowing("t", max_length, "pairs")


words = st.lists(st.sampled_from(["a", "the", "module", "returns", "value", "of", "an"]), max_size=14).map(" ".join)


@given(st.lists(st.lists(words.filter(str.strip), min_size=1, max_size=6), max_size=6), st.integers(8, 24))
def test_pairs_are_those_of_the_official_code(tokenizer, truncated, texts, max_length):
    lines = [line for text in texts for line in [*text, ""]]
    pieces = [
        Piece(record, 0, line + "\n") for record, text in enumerate(texts) for line in text
    ]  # a line each, as TextFile gives them
    found = list(windows(iter(pieces), tokenizer, special_ids(tokenizer), pair_rules(max_length)))
    pairs = official_pairs(lines)
    expected = [truncated(one, two, max_length) for one, two in pairs]
    assert [window.ids for window in found] == expected
    assert all(window.run_starts == [0] for window in found)


def test_sentences_of_different_documents_never_meet(tokenizer, truncated):
    lines = ["one sentence of this document", "its second sentence is here", "a third one is left over"]
    pieces = [Piece(record, 0, "\n".join(lines)) for record in range(3)]
    found = list(windows(iter(pieces), tokenizer, special_ids(tokenizer), pair_rules(64)))
    assert [window.run_records for window in found] == [[0], [1], [2]]
    assert len({tuple(window.ids) for window in found}) == 1
    assert found[0].ids == truncated(lines[0], lines[1], 64)


def test_lines_that_pieces_cut_are_one_sentence(tokenizer, truncated):
    """JSON texts are cut in pieces wherever a space is; blank lines inside a document are no sentence."""
    line = "some words of a rather long sentence " * 3
    text = "\n\n".join([line] * (2 * PIECE_CHARACTERS // len(line)))
    cut = [Piece(0, 0, part) for part in parts(text)]
    assert len(cut) > 1
    found = list(windows(iter(cut), tokenizer, special_ids(tokenizer), pair_rules(64)))
    assert len(found) == text.count("\n\n") // 2 + 1 - (text.count("\n\n") % 2 == 0)
    assert {tuple(window.ids) for window in found} == {tuple(truncated(line, line, 64))}


def test_a_very_long_line_is_a_sentence_too(tokenizer):
    pieces = (Piece(0, 0, part) for part in parts("word after word " * 500_000 + "\nand another sentence after it"))
    (window,) = windows(pieces, tokenizer, special_ids(tokenizer), pair_rules(32))
    assert len(window.ids) == 32


@pytest.mark.parametrize("first", range(1, 24, 3))
@pytest.mark.parametrize("second", range(1, 24, 3))
def test_the_longer_sentence_is_cut_first(tokenizer, truncated, first, second):
    one, two = " ".join(["a"] * first), " ".join(["the"] * second)
    tokens = ((7, tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (one, two))
    (window,) = pair_windows(tokens, 16, tokenizer.cls_token_id, tokenizer.sep_token_id)
    assert window == Window(truncated(one, two, 16), [0], [7])


def test_pairs_are_another_plan_and_store(teacher_directory, tmp_path):
    texts = ["\n".join(f"sentence {n} of document {d} is this one" for n in range(6)) for d in range(80)]
    given = {"tokenizer": str(teacher_directory), "output": tmp_path / "runs", "max_length": 32}
    path = write(tmp_path, "a.txt", texts)
    (packed,) = encode_ids(EncodeIdsConfig(corpus=(str(path),), **given))
    (pairs,) = encode_ids(EncodeIdsConfig(corpus=(str(path),), packing="pairs", **given))
    assert pairs["store"] != packed["store"] and pairs["plan"] != packed["plan"]
    store = Store.open(pairs["store"])
    assert json.loads((store.path / "target.json").read_text())["settings"]["windowing"]["packing"] == "pairs"
    assert pairs["windows"] == 3 * 80 and pairs["documents"] == 80
