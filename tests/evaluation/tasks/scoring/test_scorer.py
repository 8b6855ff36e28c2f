"""Token scores against their definition, one row at a time through the whole model, and against minicons."""

import copy
import json
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_exports import exported
from tiny_families import SIZES, tiny_model
from tiny_store import write_store, write_tokenizer
from tokenizers import normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForMaskedLM

from mlsm.common.errors import ScoringError
from mlsm.evaluation.tasks.scoring import scorer as scorer_module
from mlsm.evaluation.tasks.scoring.scorer import ProbedMaskedLm, Scorer, StockMaskedLm
from pipeline.teacher import BUNDLED, FAMILIES, load_tokenizer
from student.lsp_model import LspModel
from student.objectives.mlsm import Mlsm
from student.probe import ProbedLspModel, ProbedStudent

SENTENCES = ["w1 w2 w3", "w1 w9 w3", "w4", "w7 w8 w9 w10 w11 w7 w3", "w1 w2 w3", "w58 w0 w5 w5"]
HERE = Path(__file__).parent
RECORDED = json.loads((HERE / "minicons_scores.json").read_text(encoding="utf-8"))
pytestmark = pytest.mark.usefixtures("one_thread")  # what watches a model watches one


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, SIZES["vocab_size"] - 5)
    return load_tokenizer(directory)


@torch.no_grad()
def by_definition(model, rows):
    """ln p of a token at a place, in float64, of rows (ids, place, token)."""
    logits = (model(input_ids=torch.tensor([ids])).logits[0, place] for ids, place, _ in rows)
    return [float(row.double().log_softmax(0)[token]) for row, (_, _, token) in zip(logits, rows, strict=True)]


def rows_of(ids, hide):
    """Rows of a sentence whose first and last ids are special; hide(place) lists the places to mask."""
    return [
        ([4 if at in hide(place) else id for at, id in enumerate(ids)], place, ids[place])
        for place in range(1, len(ids) - 1)
    ]


def framed(sentence):
    return [2, *(int(word[1:]) + 5 for word in sentence.split()), 3]


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_of_every_family_are_those_of_whole_rows_one_at_a_time(family, tokenizer):
    model = StockMaskedLm(tiny_model(family, "masked-lm"))
    assert model.is_gathered
    whole = tiny_model(family, "masked-lm")
    found = Scorer(model, tokenizer).score(SENTENCES)
    for sentence, scores in zip(SENTENCES, found, strict=True):
        expected = by_definition(whole, rows_of(framed(sentence), lambda place: [place]))
        assert scores.dtype == np.float32
        np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-4)


class Mixing(torch.nn.Module):
    """A head that looks at the position before, too."""

    def __init__(self, head):
        super().__init__()
        self.head = head

    def forward(self, hidden_WLd):
        return self.head(hidden_WLd + hidden_WLd.roll(1, dims=1))


def test_a_head_that_mixes_positions_is_computed_whole(tokenizer):
    models = [tiny_model("bert", "masked-lm") for _ in range(2)]
    for model in models:
        model.cls = Mixing(model.cls)
    ours = StockMaskedLm(models[0])
    assert not ours.is_gathered
    (scores,) = Scorer(ours, tokenizer).score(SENTENCES[3:4])
    expected = by_definition(models[1], rows_of(framed(SENTENCES[3]), lambda place: [place]))
    np.testing.assert_allclose(scores, expected, atol=1e-4)


@pytest.fixture(scope="module")
def english(teacher_directory):
    """A random BERT with a WordPiece vocabulary of 600, in which most words fall apart."""
    tokenizer = load_tokenizer(teacher_directory)
    model = AutoModelForMaskedLM.from_pretrained(teacher_directory)
    with torch.no_grad():
        model.get_output_embeddings().bias.normal_(generator=torch.Generator().manual_seed(0))
    return model.eval(), tokenizer


@pytest.mark.parametrize("metric", ["original", "within-word-l2r"])
def test_a_word_is_hidden_from_the_token_on_to_its_end(metric, english, teacher_directory):
    model, tokenizer = english
    sentence = "Incomprehensible documentation, isn't it?"
    ids = tokenizer(sentence)["input_ids"]
    continues = [token.startswith("##") for token in tokenizer.convert_ids_to_tokens(ids)]
    assert sum(continues) > 5

    def hide(place):
        stop = place + 1
        while metric != "original" and continues[stop]:
            stop += 1
        return range(place, stop)

    mask = tokenizer.mask_token_id
    rows = [
        ([mask if at in hide(place) else id for at, id in enumerate(ids)], place, ids[place])
        for place in range(1, len(ids) - 1)
    ]
    expected = by_definition(model, rows)
    ours = StockMaskedLm(AutoModelForMaskedLM.from_pretrained(teacher_directory))
    ours._model.get_output_embeddings().bias.data.copy_(model.get_output_embeddings().bias)
    (scores,) = Scorer(ours, tokenizer, metric).score([sentence])
    np.testing.assert_allclose(scores, expected, atol=1e-5)


def test_a_tokenizer_that_does_not_tell_words_apart_has_no_rest_of_a_word(english):
    model, tokenizer = english
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    with pytest.raises(ScoringError, match="does not say where words begin.*--metric original"):
        Scorer(StockMaskedLm(model), tokenizer, "within-word-l2r")
    Scorer(StockMaskedLm(model), tokenizer)


def test_a_probed_student_is_scored_like_any_other(tmp_path):
    store = write_store(tmp_path / "store", k=24)
    _, export = exported("bert-2x32", Mlsm(store), store, tmp_path / "export")
    probed = ProbedStudent(LspModel.from_pretrained(export).student, store.vocab_size, "softmax")
    with torch.no_grad():
        probed.probe_Vk.normal_(generator=torch.Generator().manual_seed(2))
    tokenizer = load_tokenizer(export)
    model = ProbedLspModel(probed, tokenizer)
    for sentence, scores in zip(SENTENCES, Scorer(ProbedMaskedLm(model), tokenizer).score(SENTENCES), strict=True):
        expected = by_definition(model, rows_of(framed(sentence), lambda place: [place]))
        np.testing.assert_allclose(scores, expected, atol=1e-5)


def test_special_tokens_written_out_in_a_sentence_are_split(tokenizer):
    (encoded,) = Scorer(StockMaskedLm(tiny_model("bert", "masked-lm")), tokenizer).encode(["w1 [MASK] w2"])
    pieces = ["w1", "[", "MASK", "]", "w2"]
    assert encoded.ids[1:-1] == tokenizer.convert_tokens_to_ids(pieces) and len(encoded.places) == 5
    assert tokenizer.mask_token_id not in encoded.ids


class Watched(StockMaskedLm):
    """Remembers the rows that it is asked."""

    def __init__(self, model):
        super().__init__(model)
        self.batches = []

    def logits(self, ids_WL, where_W):
        self.batches.append([(*ids, place) for ids, place in zip(ids_WL.tolist(), where_W.tolist(), strict=True)])
        return super().logits(ids_WL, where_W)


def test_equal_rows_are_computed_once_and_batches_keep_to_the_budgets(tokenizer, monkeypatch):
    model = Watched(tiny_model("bert", "masked-lm"))
    expected = Scorer(model, tokenizer).score(SENTENCES)
    rows = [row for batch in model.batches for row in batch]
    # w1 w2 w3 and w1 w9 w3 share the row with the second word hidden, and the former comes twice
    assert len(rows) == len(set(rows)) == 3 + 2 + 1 + 7 + 4
    monkeypatch.setitem(scorer_module.MOST_LOGITS, "cpu", 3 * SIZES["vocab_size"])
    for batch_tokens, most in ((12, 3), (10_000, 3), (1, 1)):
        model.batches.clear()
        found = Scorer(model, tokenizer, batch_tokens=batch_tokens).score(SENTENCES)
        assert sorted(row for batch in model.batches for row in batch) == sorted(rows)
        for batch in model.batches:
            length = len(batch[0]) - 1
            assert len({len(row) for row in batch}) == 1 and (len(batch) * length <= max(batch_tokens, length))
            assert len(batch) <= most
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "mpnet", "modernbert"])
def test_scores_are_the_same_bits_in_several_threads_and_weights_are_shared(family, tokenizer):
    model = StockMaskedLm(tiny_model(family, "masked-lm"))
    alone = Scorer(model, tokenizer, batch_tokens=10).score(SENTENCES)
    torch.set_num_threads(3)
    scorer = Scorer(model, tokenizer, batch_tokens=10)
    places = [{tensor.data_ptr() for tensor in lane._model.parameters()} for lane in scorer._models]
    assert len(places) == 3 and places[0] == places[1] == places[2]
    for _ in range(5):
        for ours, theirs in zip(scorer.score(SENTENCES), alone, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_an_error_in_a_thread_comes_out(tokenizer):
    torch.set_num_threads(2)
    with pytest.raises(IndexError):
        Scorer(StockMaskedLm(tiny_model("bert", "masked-lm", vocab_size=40)), tokenizer).score(SENTENCES)


def test_the_order_of_sentences_does_not_matter(tokenizer):
    scorer = Scorer(StockMaskedLm(tiny_model("roberta", "masked-lm")), tokenizer)
    forward, backward = scorer.score(SENTENCES), scorer.score(SENTENCES[::-1])[::-1]
    for ours, theirs in zip(forward, backward, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_a_sentence_that_does_not_fit_is_said_to_be_too_long(tokenizer):
    scorer = Scorer(StockMaskedLm(tiny_model("roberta", "masked-lm")), tokenizer)
    with pytest.raises(ValueError, match="40 tokens.*reads at most 38"):
        scorer.score(["w1 " * 38])
    with pytest.raises(ValueError, match="39 tokens.*reads at most 38"):
        scorer.score(["w3", "w1 " * 37])


@pytest.mark.parametrize("family", ["roberta", "bert"])
def test_a_sentence_that_just_fits_is_scored(family, tokenizer):
    whole = tiny_model(family, "masked-lm")
    positions = whole.config.max_position_embeddings - (whole.config.pad_token_id + 1 if family == "roberta" else 0)
    sentence = " ".join(f"w{number % 50}" for number in range(positions - 2))
    (scores,) = Scorer(StockMaskedLm(tiny_model(family, "masked-lm")), tokenizer).score([sentence])
    expected = by_definition(whole, rows_of(framed(sentence), lambda place: [place]))
    assert len(expected) == positions - 2
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def bundled():
    return StockMaskedLm(AutoModelForMaskedLM.from_pretrained(BUNDLED, dtype=torch.float32)), load_tokenizer("bundled")


@pytest.mark.parametrize("metric", ["original", "within-word-l2r"])
def test_tokens_score_as_minicons_recorded_them(metric, bundled):
    entries = RECORDED["scores"][metric]
    found = Scorer(*bundled, metric).score([entry["sentence"] for entry in entries])
    assert sum(len(scores) for scores in found) > 100
    for entry, scores in zip(entries, found, strict=True):
        np.testing.assert_allclose(scores, entry["tokens"], rtol=0, atol=1e-4)


def test_the_last_word_is_hidden_to_its_end_where_no_special_token_follows(bundled):
    model, tokenizer = bundled[0], copy.deepcopy(bundled[1])
    cls = tokenizer.cls_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{cls} $A", special_tokens=[(cls, tokenizer.cls_token_id)]
    )
    ids = tokenizer("unquestionably")["input_ids"]
    assert len(ids) > 3 and ids[-1] != tokenizer.sep_token_id
    rows = [(ids[:at] + [tokenizer.mask_token_id] * (len(ids) - at), at, ids[at]) for at in range(1, len(ids))]
    whole = AutoModelForMaskedLM.from_pretrained(BUNDLED, dtype=torch.float32).eval()
    (scores,) = Scorer(model, tokenizer, "within-word-l2r").score(["unquestionably"])
    np.testing.assert_allclose(scores, by_definition(whole, rows), rtol=0, atol=1e-4)


def test_the_recorded_sentences_tell_the_metrics_apart():
    original, l2r = (
        np.concatenate([entry["tokens"] for entry in RECORDED["scores"][metric]])
        for metric in ("original", "within-word-l2r")
    )
    assert (np.abs(original - l2r) > 0.1).sum() > 10


@pytest.mark.parametrize("metric", ["original", "within-word-l2r"])
def test_tokens_score_as_minicons_scores_them_now(metric, bundled):
    pytest.importorskip("minicons")
    recorder = runpy.run_path(str(HERE / "record_minicons.py"))
    theirs = recorder["minicons_scores"](BUNDLED, recorder["SENTENCES"], metric)
    for ours, scores in zip(Scorer(*bundled, metric).score(recorder["SENTENCES"]), theirs, strict=True):
        np.testing.assert_allclose(ours, scores, rtol=0, atol=1e-4)
