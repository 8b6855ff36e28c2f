"""Ids to readable text and words, for the three ways in which vocabularies mark where words begin."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from mlsm.evaluation.inspection.lsps.vocabulary import Vocabulary

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


def test_a_store_without_a_tokenizer_shows_numbers(tmp_path):
    vocabulary = Vocabulary(tmp_path / "none", 5)
    assert vocabulary.join(np.array([3, 1])) == "#3 #1" and vocabulary.begins_word(np.array([3, 1])).all()
