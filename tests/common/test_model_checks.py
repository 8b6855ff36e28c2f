"""Which tokenizers a model can read: spare rows of embeddings and gaps between ids are no reason to refuse one."""

import json
import os
import resource
import shutil
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordPiece
from tokenizers.processors import TemplateProcessing
from transformers import (
    MODEL_MAPPING,
    AutoModel,
    BertConfig,
    BertModel,
    DebertaConfig,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaModel,
)
from transformers.utils import logging

from mlsm.common.model_checks import (
    check_counts,
    check_size,
    describe_unfit_tokenizer,
    open_config,
    open_tokenizer,
    quiet_transformers,
    refuse_irregular,
)

BUNDLED = Path(__file__).resolve().parents[2] / "pipeline" / "bundled_teacher"
TINY = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8, "vocab_size": 16}
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
    assert "ids go up to 6, but the model has 6 words" in describe_unfit_tokenizer(tokenizer(known | {"b": 6}), bert(6))
    added = tokenizer(known)
    added.add_tokens([AddedToken("[NEW]", special=True)])  # a text that spells it gets its id
    assert added("a [NEW]")["input_ids"][-2] == 6
    assert "ids go up to 6" in describe_unfit_tokenizer(added, bert(6))
    assert describe_unfit_tokenizer(added, bert(7)) is None


def test_segments_are_compared_where_the_model_has_more_than_one():
    known = ids(*SPECIAL, "a")
    assert "segments go up to 2, but the model has 2" in describe_unfit_tokenizer(tokenizer(known, 2), bert(8))
    assert describe_unfit_tokenizer(tokenizer(known, 2), bert(8, kinds=3)) is None
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    roberta = RobertaModel(RobertaConfig(vocab_size=8, type_vocab_size=1, **sizes))
    assert describe_unfit_tokenizer(tokenizer(known), roberta) is None  # it is never told segments


# -- configurations of somebody else -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"num_labels": 10**7},
        {"num_labels": 1e9},
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 10**6},
        {"inner_config": {"num_hidden_layers": 10**9}},
        {"inner_config": {"num_labels": 10**7}},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_a_configuration_asks_for_no_more_than_its_weights_can_be(kind, change, tmp_path):
    """ModernBERT's class makes a list of its layers' kinds; every class makes names of its labels."""
    bert(30).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | change | {"model_type": kind}
    (tmp_path / "config.json").write_text(json.dumps(config))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=r"config.json (says|has) .* (layers|labels)"):
        open_config(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KB


def test_as_many_layers_as_tensors_and_many_labels_are_read(tmp_path):
    bert(30).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_labels": 30_000, "num_hidden_layers": 100}))
    assert open_config(tmp_path).num_labels == 30_000
    assert check_counts(config, tmp_path) is None and check_size(BertModel, BertConfig(**config), tmp_path) is None


def test_a_model_with_a_pipe_is_refused_and_links_to_files_are_not(tmp_path):
    bert(30).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").rename(tmp_path / "blob")
    (tmp_path / "model" / "config.json").symlink_to(tmp_path / "blob")  # as the Hub's cache does
    (tmp_path / "model" / "dangling").symlink_to("nowhere")
    assert open_config(tmp_path / "model").vocab_size == 30
    os.mkfifo(tmp_path / "model" / "generation_config.json")
    with pytest.raises(OSError, match="it is a pipe, not a file"):
        refuse_irregular(tmp_path / "model")


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("config.json", {"configuration_files": ["config.4.0.0.json"]}, "leaves its settings to other files"),
        ("tokenizer_config.json", {"vocab": "../private.txt"}, "names files or arguments of its own .vocab"),
        ("tokenizer_config.json", {"init_inputs": ["../private.txt"]}, "of its own .init_inputs"),
        ("model.safetensors.index.json", {"weight_map": {"w": "../other/model.safetensors"}}, "not a file of this"),
    ],
)
def test_a_model_whose_files_name_others_is_refused(name, change, says, tmp_path):
    directory = tmp_path / "model"
    shutil.copytree(BUNDLED, directory)
    open_config(directory)
    open_tokenizer(directory)
    file = directory / name
    file.write_text(json.dumps((json.loads(file.read_text()) if file.is_file() else {}) | change))
    for read in (open_config, open_tokenizer):
        with pytest.raises(ValueError, match=says):
            read(directory)


def test_buffers_that_only_a_configuration_makes_large_are_refused(tmp_path):
    config = DebertaConfig(**TINY, position_biased_input=False, max_position_embeddings=10**8)
    AutoModel.from_config(DebertaConfig(**TINY)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="buffers of 100,000,000 values"):
        check_size(MODEL_MAPPING[DebertaConfig], config, tmp_path)


def test_blocks_that_overlap_leave_transformers_as_they_found_it():
    """As those of two threads do: the first to begin is the first to end."""
    logging.set_verbosity_info()
    try:
        first, second = quiet_transformers(), quiet_transformers()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert logging.get_verbosity() == logging.ERROR and not logging.is_progress_bar_enabled()
        second.__exit__(None, None, None)
        assert logging.get_verbosity() == logging.INFO and logging.is_progress_bar_enabled()
    finally:
        logging.set_verbosity_warning()
