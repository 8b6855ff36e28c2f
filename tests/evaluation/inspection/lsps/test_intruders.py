"""The test of intruders: it finds LSPs that mean something, and is not fooled by what any dictionary would show."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModel, AutoTokenizer

from mlsm.commands.show_lsp import show as summary
from mlsm.common.errors import InspectionError
from mlsm.common.progress import silent
from mlsm.evaluation.inspection.lsps.config import ShowLspConfig
from mlsm.evaluation.inspection.lsps.intruders import TOP, IntruderTest, summarise_judged
from mlsm.evaluation.inspection.lsps.sample import Sample, by_lsp
from mlsm.evaluation.inspection.lsps.show import show
from mlsm.evaluation.inspection.lsps.texts import embed, load_judge
from pipeline.teacher import Teacher

TOKENS, ENTRIES, TOPICS, WIDTH = 40_000, 600, 12, 24


@pytest.fixture(scope="module")
def language():
    """Ids by a law of Zipf; a topic for every entry, and every third entry continues a word."""
    rng = np.random.default_rng(0)
    ids_N = rng.choice(ENTRIES, TOKENS, p=(share := 1 / (20 + np.arange(ENTRIES))) / share.sum())
    topic_V, continues_V = rng.integers(0, TOPICS, ENTRIES), np.arange(ENTRIES) % 3 == 0
    vocabulary = SimpleNamespace(
        texts=[f"w{number}" for number in range(ENTRIES)],
        continues_V=continues_V,
        is_symbol_V=np.zeros(ENTRIES, bool),
        begins_word=lambda ids: ~continues_V[ids],
    )
    return ids_N, topic_V, vocabulary


def judge(language, fires_NK, embeddings_Vd):
    """Every LSP judged that fires where the bool matrix says, with random weights."""
    ids_N, _, vocabulary = language
    rng, none_N = np.random.default_rng(1), np.zeros(TOKENS, np.int32)
    token_E, lsp_E = np.nonzero(fires_NK)
    indptr = np.concatenate(([0], np.cumsum(fires_NK.sum(1))))
    rows = (indptr, lsp_E.astype(np.uint16), rng.random(len(lsp_E)).astype(np.float32) + 0.1)
    places = (np.arange(TOKENS, dtype=np.int32) // 100, none_N, none_N.astype(np.int64))
    sample = Sample(ids_N.astype(np.int32), *places, *rows, k=fires_NK.shape[1], of=TOKENS)
    test = IntruderTest(sample, by_lsp(sample), vocabulary, embeddings_Vd)
    return [test.lsp(lsp) for lsp in range(sample.k)]


def vectors(language, seed=2):
    """A direction for each topic, and noise."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(TOPICS, WIDTH))[language[1]] + 0.7 * rng.normal(size=(ENTRIES, WIDTH))


def test_lsps_of_a_topic_are_told_from_lsps_of_nothing(language):
    ids_N, topic_V, _ = language
    rng, of_topic_NK = np.random.default_rng(3), topic_V[ids_N][:, None] == np.arange(TOPICS)
    half_NK = of_topic_NK & (rng.random(of_topic_NK.shape) < 0.5)
    nothing_NK = rng.random((TOKENS, 120)) < 0.03
    found = judge(language, np.concatenate([half_NK, nothing_NK], axis=1), vectors(language))
    meant, by_chance = summarise_judged(found[:TOPICS]), summarise_judged(found[TOPICS:])
    assert meant["judged"] == TOPICS and meant["auc"] > 0.9
    assert by_chance["judged"] > 110 and abs(by_chance["auc"] - 0.5) < 0.05
    assert by_chance["interval"][1] < 0.6 < meant["interval"][0]
    assert all(len(set(one.members)) == TOP for one in found)
    for one in found[:TOPICS]:
        assert {int(topic_V[member]) for member in one.members} == {int(topic_V[one.members[0]])}
        assert one.interval[0] <= one.auc <= one.interval[1]


@pytest.mark.parametrize("tell", ["frequency", "continuation"])
def test_frequency_and_pieces_do_not_give_intruders_away(language, tell):
    """LSPs of some of the frequent entries, or of the continuations, and embeddings that say little else."""
    ids_N, _, vocabulary = language
    rng, counts_V = np.random.default_rng(4), np.bincount(ids_N, minlength=ENTRIES)
    property_V = np.log(counts_V + 1.0) if tell == "frequency" else vocabulary.continues_V.astype(float)
    has_V = counts_V > 60 if tell == "frequency" else vocabulary.continues_V
    fires_NK = (has_V[:, None] & (rng.random((ENTRIES, 80)) < 0.4))[ids_N]
    shown = 5 * np.outer(property_V - property_V.mean(), rng.normal(size=WIDTH))
    embeddings_Vd = shown / property_V.std() + rng.normal(size=(ENTRIES, WIDTH))
    found = summarise_judged(judge(language, fires_NK, embeddings_Vd))
    assert found["judged"] > 60 and abs(found["auc"] - 0.5) < 0.06
    assert abs(found["by_frequency"] - 0.5) < 0.06


def test_lsps_without_enough_words_are_not_judged(language):
    ids_N, _, _ = language
    fires_NK = np.stack([np.zeros(TOKENS, bool), ids_N == 7], axis=1)
    found = judge(language, fires_NK, vectors(language))
    assert [one.auc for one in found] == [None, None] and [one.members for one in found] == [[], [7]]
    assert summarise_judged(found) == {
        "judged": 0, "auc": None, "interval": None, "by_frequency": None, "by_spelling": None
    }  # fmt: skip


def test_spelling_alone_finds_lsps_that_are_endings(language):
    ids_N, _, vocabulary = language
    rng = np.random.default_rng(5)
    ending_V = rng.integers(0, TOPICS, ENTRIES)
    texts = ["".join(rng.choice(list("abcdefgh"), 4)) + f"-{'klmnopqrstuv'[ending]}" for ending in ending_V]
    spelt = ids_N, ending_V, SimpleNamespace(**vars(vocabulary) | {"texts": texts})
    of_ending_NK = (ending_V[ids_N][:, None] == np.arange(TOPICS)) & (rng.random((TOKENS, TOPICS)) < 0.5)
    found = summarise_judged(judge(spelt, of_ending_NK, rng.normal(size=(ENTRIES, WIDTH))))
    assert found["by_spelling"] > 0.9 and abs(found["auc"] - 0.5) < 0.1


def test_a_judge_reads_each_text_alone(teacher_directory):
    """Against transformers, one text at a time."""
    model = AutoModel.from_pretrained(teacher_directory).eval()
    tokenizer = AutoTokenizer.from_pretrained(teacher_directory)
    texts = ["the", "a longer text of words", "bank"]
    with torch.inference_mode():
        expected = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0) for text in texts]
    np.testing.assert_allclose(embed(str(teacher_directory), texts), np.stack(expected), atol=1e-5)


def test_a_judge_without_special_tokens_says_nothing_of_an_empty_text(teacher_directory, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(teacher_directory)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    AutoModel.from_pretrained(teacher_directory).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    empty_d, word_d = embed(str(tmp_path), [" ", "bank"])
    assert not empty_d.any() and word_d.all()


def test_a_teacher_may_have_more_embeddings_than_the_vocabulary_has_words(teacher_directory, tmp_path):
    """As DeBERTa-v3 has, whose table is filled up to a round number."""
    model, tokenizer = AutoModel.from_pretrained(teacher_directory), AutoTokenizer.from_pretrained(teacher_directory)
    words = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    model.resize_token_embeddings(len(words) + 24)
    model.save_pretrained(tmp_path / "padded")
    tokenizer.save_pretrained(tmp_path / "padded")
    settings = {"teacher_name": str(tmp_path / "padded"), "layer": 1, "dtype": "float32"}
    fingerprint = Teacher.load(tmp_path / "padded", 1).fingerprint
    store = SimpleNamespace(path="store", settings=settings | {"teacher": fingerprint})
    _, embeddings_Vd = load_judge(store, words)
    expected_Vd = model.get_input_embeddings().weight.detach().numpy()[: len(words)]
    assert np.array_equal(embeddings_Vd, expected_Vd)


def test_the_view_of_a_store(coded_store, hostile_store, teacher_directory, monkeypatch):
    monkeypatch.setattr("mlsm.evaluation.inspection.lsps.intruders.LEAST_TAKEN_OUT", 1)
    monkeypatch.setattr("mlsm.evaluation.inspection.lsps.intruders.NEAR", 1)
    path = str(coded_store.path)
    settings = ShowLspConfig(store=path, intruders=True, against=(path, path), samples=8_000)
    result = show(settings, silent)
    assert json.loads(json.dumps(result)) == result
    first, again, third = result["dictionaries"]
    assert len(first["lsps"]) == 48 and first["judged"] > 10 and 0 < first["auc"] < 1
    assert first["target"] == coded_store.target_id and first["p"] is None
    assert again == third == first | {"p": again["p"]} and again["p"] > 0.9
    text = summary(result, settings)
    assert "by frequency only" in text and "Mann-Whitney" in text and "Intruders hardest" in text
    assert text.count(coded_store.path.name) == 4 and text.count(f"{first['auc']:.3f}") == 4
    by_another = show(ShowLspConfig(store=path, intruders=True, judge=str(teacher_directory), samples=8_000), silent)
    (other,) = by_another["dictionaries"]
    assert other["auc"] != first["auc"] and other["by_spelling"] == first["by_spelling"]
    assert by_another["judge"] == str(teacher_directory) != result["judge"]
    with pytest.raises(InspectionError, match="has another tokenizer"):
        show(ShowLspConfig(store=path, intruders=True, against=(path, str(hostile_store.path))), silent)


def test_a_store_of_which_nothing_can_be_judged_says_so(coded_store):
    settings = ShowLspConfig(store=str(coded_store.path), intruders=True, against=(str(coded_store.path),), samples=60)
    result = show(settings, silent)
    assert [one["judged"] for one in result["dictionaries"]] == [0, 0]
    assert "No LSP has enough words" in summary(result, settings)


def test_settings_that_do_not_go_together():
    with pytest.raises(ValueError, match="Add --intruders"):
        ShowLspConfig(against=("b",))
    with pytest.raises(ValueError, match="Pass either --judge or --teacher"):
        ShowLspConfig(intruders=True, judge="b", teacher="c")
    with pytest.raises(ValueError, match="are different things to show"):
        ShowLspConfig(intruders=True, word="bank")
