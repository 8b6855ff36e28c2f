"""Which tokenizers a model can read: spare rows of embeddings and gaps between ids are no reason to refuse one."""

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordPiece
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, RobertaConfig, RobertaModel

from common.model_checks import describe_unfit_tokenizer

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def tokenizer(vocabulary, segment_of_second=1):
    backend = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    second = f"$B:{segment_of_second} [SEP]:{segment_of_second}"
    frame = [(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")]
    backend.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair=f"[CLS] $A [SEP] {second}", special_tokens=frame
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", pad_token="[PAD]")


def bert(words, kinds=2):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    return BertModel(BertConfig(vocab_size=words, type_vocab_size=kinds, **sizes))


def ids(*words, first=0):
    return {word: first + place for place, word in enumerate(words)}


@pytest.mark.parametrize(
    "vocabulary",
    [
        ids(*SPECIAL, "a"),
        ids(*SPECIAL, "[unused0]", "[unused1]", "a", "[unused2]"),
        ids(*SPECIAL) | {"a": 31},  # nothing between them
        ids("a") | ids(*SPECIAL, first=27),
    ],
    ids=["spare rows", "unused words", "a gap", "special tokens last"],
)
def test_spare_rows_unused_words_and_gaps_fit(vocabulary):
    assert describe_unfit_tokenizer(tokenizer(vocabulary), bert(32)) is None


def test_ids_that_a_text_can_have_but_the_model_lacks_are_named():
    known = ids(*SPECIAL, "a")
    assert "ids go up to 6, but the model knows 6 words" in describe_unfit_tokenizer(
        tokenizer(known | {"b": 6}), bert(6)
    )
    added = tokenizer(known)
    added.add_tokens([AddedToken("[NEW]", special=True)])  # a text that spells it gets its id
    assert added("a [NEW]")["input_ids"][-2] == 6
    assert "ids go up to 6" in describe_unfit_tokenizer(added, bert(6))
    assert describe_unfit_tokenizer(added, bert(7)) is None


def test_segments_are_compared_where_the_model_has_more_than_one():
    known = ids(*SPECIAL, "a")
    assert "segments go up to 2, but the model knows 2" in describe_unfit_tokenizer(tokenizer(known, 2), bert(8))
    assert describe_unfit_tokenizer(tokenizer(known, 2), bert(8, kinds=3)) is None
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    roberta = RobertaModel(RobertaConfig(vocab_size=8, type_vocab_size=1, **sizes))
    assert describe_unfit_tokenizer(tokenizer(known), roberta) is None  # it is never told segments
