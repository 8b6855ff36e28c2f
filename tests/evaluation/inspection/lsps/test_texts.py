"""Texts: the teacher's LSPs against what the store holds of the same text, the student's, and their distance."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.sparse import csr_array
from scipy.stats import entropy
from tiny_exports import exported

from mlsm.commands.show_lsp import show as summary
from mlsm.common.errors import InspectionError, TeacherError
from mlsm.common.progress import silent
from mlsm.evaluation.inspection.lsps import texts
from mlsm.evaluation.inspection.lsps.config import ShowLspConfig
from mlsm.evaluation.inspection.lsps.show import show
from pipeline.dictionary import Dictionary
from student.lsp_model import lsp_facts, save_lsp_head
from student.objectives.mlsm import Mlsm


@pytest.fixture(scope="module")
def dictionary(coded_store):
    return Dictionary.load(coded_store.files.dictionary)


@pytest.fixture(scope="module")
def export(coded_store, tmp_path_factory):
    return exported("bert-1x32", Mlsm(coded_store), coded_store, tmp_path_factory.mktemp("student") / "export")[1]


def test_a_stored_window_has_the_stored_lsps(coded_store):
    """Of windows whose words survive being written out and read again. The store rounds weights to 3 %, and another
    batch rounds hidden states otherwise, so rows are compared by their total variation."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(coded_store.tokenizer_dir)
    reader, compared = coded_store.split("train"), 0
    for window in range(0, len(reader), 3):
        batch = reader.read([window])
        ids = batch.ids[0, 1 : batch.lengths[0] - 1]
        text = tokenizer.decode(ids)
        if tokenizer(text, add_special_tokens=False)["input_ids"] != ids.tolist() or np.isin(ids, [1]).any():
            continue
        found = texts.teacher_lsps(coded_store, text)
        stored = reader.targets(batch, np.zeros(len(ids), np.int64), np.arange(1, len(ids) + 1))
        assert found.ids_T.tolist() == ids.tolist()
        variation = abs(dense(found.rows, coded_store.k) - dense(stored, coded_store.k)).sum(1) / 2
        assert variation.max() < 0.03 and stored.indptr[-1] > 3 * len(ids)
        compared += 1
        if compared == 3:
            return
    pytest.fail(f"only {compared} windows survive being read again")


def dense(rows, k):
    return csr_array((rows.weights, rows.indices, rows.indptr), (len(rows.indptr) - 1, k)).toarray()


def test_teacher_and_student_with_their_distance(coded_store, export, dictionary):
    text = "The function returns a list [MASK] values."
    rows = texts.teacher_lsps(coded_store, text)
    model = texts.load_student(export, dictionary.fingerprint)
    tokens, predicted = texts.compare_tokens(model, text, rows), model.lsp([text])[0]
    assert [token["text"] for token in tokens] == predicted.tokens and "[MASK]" in predicted.tokens
    for t, token in enumerate(tokens):
        p_K = np.zeros(coded_store.k)
        p_K[rows.row(t)[0]] = rows.row(t)[1]
        q_K = predicted.distributions_Tk[t].double().numpy()
        assert [lsp for lsp, _ in token["student"]] == np.argsort(-q_K, kind="stable")[:5].tolist()
        if token["text"] == "[MASK]":
            assert token["teacher"] == [] and token["kl"] is None
        else:
            assert p_K.sum() == pytest.approx(1, abs=1e-5)
            assert token["kl"] == pytest.approx(entropy(p_K, q_K), rel=1e-4)


def test_the_view_of_a_text_says_what_its_lsps_stand_for(coded_store, export, tmp_path, monkeypatch):
    settings = ShowLspConfig(store=str(coded_store.path), text="The function returns [MASK].", student=str(export))
    result = show(settings, silent)
    assert json.loads(json.dumps(result)) == result
    printed = summary(result, settings)
    for words in ("KL (nats)", "Mean KL(teacher || student)", "[MASK]", "no code", "Typical words"):
        assert words in printed
    monkeypatch.chdir(tmp_path)
    alone = show(ShowLspConfig(store=str(export), text="The function"), silent)
    assert "teacher" not in alone["tokens"][0] and "student" in summary(alone, settings)
    assert "names" not in alone, "no store of these LSPs is here"
    Path("runs/stores").mkdir(parents=True)
    Path("runs/stores", Path(coded_store.path).name).symlink_to(coded_store.path)
    named = show(ShowLspConfig(store=str(export), text="The function"), silent)
    assert named["tokens"] == alone["tokens"] and json.loads(json.dumps(named)) == named
    shown = {lsp for token in named["tokens"] for lsp, _ in token["student"][:2]}
    words = {lsp: word for lsp, word, _ in result["names"]}
    assert {lsp for lsp, *_ in named["names"]} == shown
    assert all(word == words[lsp] for lsp, word, _ in named["names"] if lsp in words)
    assert "Typical words" in summary(named, settings)


def test_tokens_of_a_text_find_their_like(coded_store):
    settings = ShowLspConfig(store=str(coded_store.path), text="Return the list of values.", similar_to="2")
    result = show(settings, silent)
    assert result["token"] == "list" and len(result["similar"]) > 5
    assert "«" in summary(result, settings)
    with pytest.raises(InspectionError, match="found '99'; they are 0:"):
        show(ShowLspConfig(store=str(coded_store.path), text="Return the list", similar_to="99"), silent)


def test_of_a_student_of_several_stores_the_lsps_of_this_one_are_taken(coded_store, dictionary, tmp_path):
    model, place = exported("bert-1x32", Mlsm(coded_store), coded_store, tmp_path / "student")
    save_lsp_head(model, slice(0, 7), lsp_facts(coded_store, "masked") | {"dictionary": "1" * 64}, place, head=2)
    for fingerprint, lsps in (("1" * 64, 7), (dictionary.fingerprint, coded_store.k), (None, coded_store.k)):
        assert texts.load_student(place, fingerprint).facts["lsps"] == lsps
    with pytest.raises(InspectionError, match="numbers mean different things"):
        texts.load_student(place, "0" * 64)


def test_a_teacher_that_is_not_here_is_asked_for_by_its_flag(monkeypatch):
    monkeypatch.setattr("pipeline.teacher.location.snapshot_download", None)
    settings = {"teacher_name": "/home/ann/secret/bert", "layer": 1, "dtype": "float32", "teacher": "0" * 64}
    store = SimpleNamespace(settings=settings, path="runs/stores/lsp")
    message = (
        "runs/stores/lsp names a teacher that is not available here: no such directory: /home/ann/.*Pass the present"
    )
    with pytest.raises(TeacherError, match=message):
        texts.load_store_teacher(store, None)


def test_a_student_that_names_no_dictionary_is_compared_with_a_warning(coded_store, dictionary, tmp_path, caplog):
    """An imported one does not: nothing but the number of its LSPs can be checked."""
    model, place = exported("bert-1x32", Mlsm(coded_store), coded_store, tmp_path / "imported")
    save_lsp_head(model, slice(0, 7), lsp_facts(coded_store, "masked") | {"dictionary": None}, place)
    assert texts.load_student(place, dictionary.fingerprint, 7).facts["lsps"] == 7
    assert "does not say from which dictionary" in caplog.text
    with pytest.raises(InspectionError, match="predicts 7 LSPs, and the store has 48"):
        texts.load_student(place, dictionary.fingerprint, coded_store.k)


def test_what_cannot_be_compared_is_refused(coded_store, dictionary, export, tmp_path, teacher_directory):
    for text in ("", "word " * 31):
        with pytest.raises(InspectionError, match="expected 1 to 30, one window"):
            texts.teacher_lsps(coded_store, text)
    with pytest.raises(InspectionError, match="numbers mean different things"):
        texts.load_student(export, "0" * 64)
    with pytest.raises(InspectionError, match=f"predicts {coded_store.k} LSPs, and the store has 3,072"):
        texts.load_student(export, dictionary.fingerprint, 3072)
    other = tmp_path / "other"
    shutil.copytree(teacher_directory, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"layer_norm_eps": 1e-5}))
    with pytest.raises(InspectionError, match="is not the teacher of"):
        texts.teacher_lsps(coded_store, "a text", teacher=str(other))
