import json

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from mlsm.common.errors import RunError
from student.masks.words import continuation_flags

TEXT = ["the lowest newest widest rivers", "lower new wide rivers flowing slowly", "banking bankers bank the slow"]
SPECIAL = ["[PAD]", "[MASK]"]


def wordpiece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer, trainers.WordPieceTrainer(vocab_size=60, special_tokens=SPECIAL, show_progress=False)


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return tokenizer, trainers.BpeTrainer(vocab_size=35, special_tokens=SPECIAL, show_progress=False)


def sentencepiece():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer, trainers.UnigramTrainer(
        vocab_size=60, special_tokens=SPECIAL, unk_token="[PAD]", show_progress=False
    )


def llama_like():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Replace("▁", " ")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    return tokenizer, trainers.BpeTrainer(vocab_size=35, special_tokens=SPECIAL, show_progress=False)


@pytest.mark.parametrize("kind", [wordpiece, byte_level, sentencepiece, llama_like])
def test_flags_agree_with_where_the_tokenizer_itself_splits_words(tmp_path, kind):
    tokenizer, trainer = kind()
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    flags = continuation_flags(tmp_path, tokenizer.get_vocab_size() + 5)
    assert not flags[[tokenizer.token_to_id(token) for token in SPECIAL]].any() and not flags[-5:].any()
    several = 0
    for text in TEXT:
        encoding = tokenizer.encode(text)
        words = np.array(encoding.word_ids)
        continues = flags[encoding.ids][1:]
        assert np.array_equal(continues, words[1:] == words[:-1])
        several += continues.sum()
    assert several > 3


def test_whole_words_are_words(ids_store):
    assert not continuation_flags(ids_store.tokenizer_dir, ids_store.vocab_size).any()


def test_a_tokenizer_whose_kind_cannot_be_told_is_one_clear_line(tmp_path):
    with pytest.raises(RunError, match="tokenizer.json cannot be read.*--mask-unit token"):
        continuation_flags(tmp_path, 10)
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(RunError, match="expected WordPiece.*Use --mask-unit token or span") as caught:
        continuation_flags(tmp_path, 10)
    assert "\n" not in str(caught.value)
    (tmp_path / "tokenizer.json").write_text(json.dumps(["?"])[:-1])
    with pytest.raises(RunError, match="cannot be read"):
        continuation_flags(tmp_path, 10)
