"""Ids to readable text and words, for the three ways in which vocabularies mark where words begin."""

from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mlsm.evaluation.inspection.lsps.contexts import context
from mlsm.evaluation.inspection.lsps.vocabulary import Vocabulary
from mlsm.evaluation.inspection.stores import token_texts
from mlsm.evaluation.similarity.compare import _explain
from mlsm.evaluation.similarity.sources import Tokens
from student.masks.words import token_names

TEXT = "the bank raised its rates, and (as rates rise) the river's bank floods. naïve été"
SPECIAL = ["[PAD]", "[UNK]", "[MASK]"]


def word_piece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return tokenizer, trainers.WordPieceTrainer(vocab_size=75, special_tokens=SPECIAL)


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    return tokenizer, trainers.BpeTrainer(vocab_size=75, special_tokens=SPECIAL)


def sentence_piece():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return tokenizer, trainers.UnigramTrainer(vocab_size=75, special_tokens=SPECIAL, unk_token="[UNK]")


@pytest.mark.parametrize("kind", [word_piece, byte_level, sentence_piece])
def test_text_and_words_come_back(kind, tmp_path):
    tokenizer, trainer = kind()
    tokenizer.train_from_iterator([TEXT] * 20, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocabulary = Vocabulary(tmp_path, tokenizer.get_vocab_size())
    ids = np.array(tokenizer.encode(TEXT).ids)
    begins = vocabulary.begins_word(ids)
    words = ["".join(vocabulary.texts[i] for i in run) for run in np.split(ids, np.flatnonzero(begins))[1:]]
    for word in ("the", "bank", "raised", "rates", "rise", "floods", ",", "("):
        assert words.count(word) == TEXT.replace(",", " ,").replace("(", "( ").replace(")", " ) ").replace(
            ".", " ."
        ).split().count(word)
    if kind is word_piece:  # where é and ï are whole tokens
        assert vocabulary.join(ids).replace(" ' ", "'") == TEXT
    assert "the bank raised its rates, and (as rates rise)" in vocabulary.join(ids)
    assert vocabulary.is_symbol_V[tokenizer.token_to_id(",")] and not vocabulary.is_symbol_V[ids[0]]


def words_of(tokenizer, text, place):
    """The text and the words that come back."""
    tokenizer.save(str(place / "tokenizer.json"))
    vocabulary = Vocabulary(place, tokenizer.get_vocab_size())
    ids = np.array(tokenizer.encode(text).ids)
    runs = np.split(ids, np.flatnonzero(vocabulary.begins_word(ids))[1:])
    assert "".join(vocabulary.pieces(ids)) == vocabulary.join(ids)
    return vocabulary.join(ids), [vocabulary.join(run) for run in runs]


@pytest.mark.parametrize("merges", [0, 40])
def test_bytes_are_read_as_the_characters_that_they_are_parts_of(merges, tmp_path):
    text = "The bank rose.\nThe bank fell.\n\n\tBank 😁 北京 ñandú संस्कृति “rates” ##"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([text] * 9, trainers.BpeTrainer(vocab_size=256 + merges, initial_alphabet=alphabet))
    joined, words = words_of(tokenizer, text, tmp_path)
    plain = "The bank rose. ↵The bank fell. ↵ ↵ ⇥ Bank 😁 北京 ñandú संस्कृति “rates” ##"
    shown = joined.replace("⇥Bank", "⇥ Bank")
    assert shown in (plain, plain.replace("↵ ↵", "↵")), shown  # the latter is one token
    wanted = "The bank rose . The bank fell . Bank 😁 北京 ñandú संस्कृति “ rates ”"
    wanted = wanted if merges else wanted.replace("北京", "北 京")  # of a script without spaces, each token is a word
    assert [word for word in words if word.strip("↵⇥#")] == wanted.split()


def test_the_mark_is_on_the_character_that_a_token_is_a_part_of(tmp_path):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(["a"], trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = np.array(tokenizer.encode("a’b").ids)  # a space, which ByteLevel adds; ’ is three bytes
    sample = SimpleNamespace(ids_N=ids, window_N=ids * 0, position_N=np.arange(6), bounds=lambda token, reach: (0, 6))
    vocabulary = Vocabulary(tmp_path, 256)
    assert vocabulary.shown_at(ids).tolist() == [0, 1, 2, 2, 2, 5]
    for token in (2, 3, 4):
        found = context(sample, vocabulary, token)
        assert found["text"][found["at"]][0] == "’" and "".join(text for text, _ in found["text"]).strip() == "a’b"


def test_tokens_in_lists_are_named_as_text(tmp_path):
    """By every view of them. Of a character in several tokens each has its bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=268, initial_alphabet=alphabet, special_tokens=["<mask>"])
    tokenizer.train_from_iterator(["été the"] * 9, trainer)
    ids, expected = (
        tokenizer.encode("été the 北\n<mask>").ids,
        ["été", "the", "␣", r"\xe5", r"\x8c", r"\x97", "↵", "<mask>"],
    )
    assert token_names(tokenizer, ids) == expected
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert token_names(fast, ids) == expected
    written = {"tokenizer.json": tokenizer.to_str().encode()}
    store = SimpleNamespace(files=None, read_tokenizer=lambda: written)
    assert token_texts(store, np.array(ids)) == expected
    text = Tokens(fast.convert_ids_to_tokens(ids), [], np.eye(len(ids)), {})
    assert [name for name, *_ in _explain(text, text, fast)["matches"]] == expected


def test_pieces_of_words_are_named_as_such_and_other_alphabets_are_left_as_they_are():
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    assert token_names(tokenizer, [0, 1, 2, 9]) == ["[UNK]", "play", "##ing", "#9"]
    tokenizer = Tokenizer(models.BPE({"ÃŃ北": 0}, []))
    tokenizer.decoder = decoders.ByteLevel()
    assert token_names(tokenizer, [0]) in (["ÃŃ北"], ["\ufffd"])


def test_bytes_that_a_sentencepiece_vocabulary_falls_back_to(tmp_path):
    text = "a 北京 b"
    tokens = ["a", "b", "▁", "▁a", "▁b", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "a"), ("▁", "b")], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    assert words_of(tokenizer, text, tmp_path) == (text, ["a", "北", "京", "b"])


def test_accents_belong_to_words_and_letters_are_no_marks(tmp_path):
    """Vowel signs of Hindi are pieces of their own. The mark of byte-level vocabularies is a letter of Maltese."""
    tokens = ["[UNK]", "स", "##ं", "##स", "##्", "##क", "##ृ", "##त", "##ि", "Ġ", "##o", "Ġorġ", "#", "."]
    tokenizer = Tokenizer(models.WordPiece({token: number for number, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    assert words_of(tokenizer, "संस्कृति Ġorġ Ġo # .", tmp_path)[1] == ["संस्कृति", "Ġorġ", "Ġo", "#", "."]


def test_tokens_of_scripts_without_spaces_are_words_and_joiners_are_none(tmp_path):
    text = "北京的银行很大 می\u200cکند the bank"
    tokenizer, trainer = sentence_piece()
    tokenizer.train_from_iterator([text, "北京 银行", "می\u200cکند"] * 20, trainer)
    _, words = words_of(tokenizer, text, tmp_path)
    assert "می\u200cکند" in words and "bank" in words
    assert len([word for word in words if "\u4e00" <= word[:1] <= "\u9fff"]) > 1, "a clause is not one word"
    assert "".join(words) == text.replace(" ", "")


def test_a_store_without_a_tokenizer_shows_numbers(tmp_path):
    vocabulary = Vocabulary(tmp_path / "none", 5)
    assert vocabulary.join(np.array([3, 1])) == "#3 #1" and vocabulary.begins_word(np.array([3, 1])).all()
