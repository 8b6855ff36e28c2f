"""The command with a real store and a student: LSPs against what show-lsp says of a text, hidden states against
transformers, what is shared, and what cannot be compared."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array
from tiny_exports import exported
from transformers import AutoModel

import mlsm
from mlsm.commands.similarity import show as summary
from mlsm.common.errors import InspectionError
from mlsm.evaluation.inspection.lsps.texts import teacher_lsps
from mlsm.evaluation.similarity.compare import compare_texts
from mlsm.evaluation.similarity.config import SimilarityConfig
from mlsm.evaluation.similarity.sources import open_source
from shards.copies import load_tokenizer
from student.lsp_model import LspModel
from student.objectives.mlsm import Mlsm

TEXTS = ["The function returns a list of values.", "A list is returned.", "Raises an error if it is not found."]


@pytest.fixture(scope="module")
def source(coded_store):
    return open_source(str(coded_store.path))


@pytest.fixture(scope="module")
def export(coded_store, tmp_path_factory):
    return exported("bert-1x32", Mlsm(coded_store), coded_store, tmp_path_factory.mktemp("student") / "export")[1]


def test_a_dictionary_reads_no_texts(coded_store):
    with pytest.raises(InspectionError, match="is a dictionary. Pass a store"):
        open_source(str(coded_store.files.dictionary))


def test_lsps_are_those_of_the_text_alone(coded_store, source):
    for text, tokens in zip(TEXTS, source.read(TEXTS), strict=True):
        alone = teacher_lsps(coded_store, text)
        entries, shape = (alone.rows.weights, alone.rows.indices, alone.rows.indptr), (len(alone.texts), coded_store.k)
        expected = csr_array(entries, shape).toarray()
        coded = expected.any(1)
        assert tokens.names == [name for name, is_coded in zip(alone.texts, coded, strict=True) if is_coded]
        np.testing.assert_allclose(tokens.lsps_TK, expected[coded], atol=5e-3)
        assert [text[begin:end].lower() for begin, end in tokens.spans] == [
            name.removeprefix("##").lower() for name in tokens.names
        ]


def test_hidden_states_are_those_of_the_whole_model(coded_store, source):
    model = AutoModel.from_pretrained(coded_store.settings["teacher_name"]).eval()
    tokenizer = load_tokenizer(coded_store.read_tokenizer())
    for text, tokens in zip(TEXTS, source.read(TEXTS), strict=True):
        inputs = tokenizer(text, return_tensors="pt")
        kept = ~np.isin(inputs["input_ids"][0].numpy(), coded_store.special_ids["all"])
        with torch.no_grad():
            states = model(**inputs, output_hidden_states=True).hidden_states
        for name, rows_Td in tokens.hidden.items():
            np.testing.assert_allclose(rows_Td, states[int(name.split()[1])][0, kept].numpy(), atol=1e-4)


def test_a_student_is_compared_by_what_it_predicts(export):
    source, model = open_source(str(export)), LspModel.from_pretrained(export)
    for text, tokens in zip(TEXTS, source.read(TEXTS), strict=True):
        (expected,) = model.lsp([text])
        assert tokens.names == expected.tokens
        np.testing.assert_allclose(tokens.lsps_TK, expected.distributions_Tk.numpy(), atol=1e-6)
        assert tokens.hidden["last layer"].shape == (len(expected.tokens), 32)
    result = compare_texts(SimilarityConfig(store=str(export), texts_a=TEXTS[:1], texts_b=TEXTS[1:2]))
    assert "every token masked in turn" in summary(result, None)


def test_what_two_texts_share(coded_store, source):
    texts = {"texts_a": TEXTS[:2], "texts_b": (TEXTS[0], TEXTS[2])}
    config = SimilarityConfig(store=str(coded_store.path), samples=2000, **texts)
    result = compare_texts(config)
    same, other = result["pairs"]
    assert all(value == pytest.approx(1, abs=1e-5) for value in same["scores"].values())
    assert [first for first, *_ in same["matches"]] == [second for _, second, *_ in same["matches"]]
    a, b = (sums_K / sums_K.sum() for sums_K in (tokens.lsps_TK.sum(0) for tokens in source.read(TEXTS[1:])))
    common = np.minimum(a, b)
    for lsp, share, in_a, in_b, _ in other["shared"]:
        assert (share, in_a, in_b) == pytest.approx((common[lsp], a[lsp], b[lsp]), abs=1e-4)
    shares = [row[1] for row in other["shared"]]
    assert shares == sorted(shares, reverse=True) and shares[0] == pytest.approx(common.max(), abs=1e-4)
    assert any(row[4] for row in other["shared"]), "LSPs have names"
    assert json.loads(json.dumps(result)) == result
    text = summary(result, config)
    assert TEXTS[2] in text and f"{other['scores']['overlap, matching']:.3f}" in text
    (pair,) = mlsm.similarity(TEXTS[1], TEXTS[2], coded_store.path, samples=0)["pairs"]
    assert pair["scores"] == pytest.approx(other["scores"], abs=1e-5)


def test_long_texts_are_cut_and_counted(coded_store, export):
    long = "values " * 300
    config = SimilarityConfig(store=str(coded_store.path), texts_a=(long,), texts_b=TEXTS[:1], samples=0)
    for store in (coded_store.path, export):
        result = compare_texts(replace(config, store=str(store)))
        assert result["cut"] == 1 and "cut to a window: 1" in summary(result, config)
        assert len(open_source(str(store)).read((long,))[0].names) == coded_store.max_length - 2


def test_a_plan_of_a_store_and_a_home_directory_are_found(coded_store, export, monkeypatch):
    """As the note on several plans says, and as recipes name places."""
    monkeypatch.setenv("HOME", str(coded_store.path.parent))
    plan = coded_store.path / "plans" / f"{coded_store.plan_id}.json"
    for place in (plan, f"~/{coded_store.path.name}", f"~/{coded_store.path.name}/plans/{plan.name}"):
        assert open_source(str(place)).facts()["k"] == coded_store.k
    monkeypatch.setenv("HOME", str(export.parent))
    assert "student" in open_source(f"~/{export.name}").facts()


def test_what_cannot_be_compared_is_said(coded_store, export):
    texts = {"texts_a": ("",), "texts_b": TEXTS[:1], "samples": 0}
    with pytest.raises(InspectionError, match="the text '' has no tokens"):
        compare_texts(SimilarityConfig(store=str(coded_store.path), **texts))
    with pytest.raises(InspectionError, match="--teacher applies only to stores"):
        compare_texts(SimilarityConfig(store=str(export), teacher="bundled", **texts))
    for wrong in ({"texts_a": "a"}, {"tasks": "wic", "texts_a": "a", "texts_b": "b"}, {}):
        with pytest.raises(ValueError, match="expected either --tasks, or as many --texts-a as --texts-b"):
            SimilarityConfig(**wrong)
