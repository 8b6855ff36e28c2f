"""show-lsp as a person uses it: stores, dictionaries, students; labels; errors of one line."""

import json
from dataclasses import replace

import numpy as np
import pytest
from http_store import serving
from lsp_pages import LspPage
from preloaded import run_command
from tiny_exports import exported
from tiny_store import write_store

from mlsm.commands.show_lsp import show as summary
from mlsm.common.errors import InspectionError
from mlsm.common.progress import silent
from mlsm.evaluation.inspection.lsps.config import ShowLspConfig
from mlsm.evaluation.inspection.lsps.labels import find_labels
from mlsm.evaluation.inspection.lsps.sample import sample_tokens
from mlsm.evaluation.inspection.lsps.show import show
from mlsm.evaluation.inspection.lsps.view import StoreView
from mlsm.evaluation.inspection.stores import show_shards
from pipeline.dictionary import Dictionary
from shards.config import ShowConfig
from shards.reader import Store
from student.objectives.mlsm import Mlsm


def shown(**settings):
    """Result and text of a view; the result survives JSON."""
    settings = ShowLspConfig(**settings)
    result = show(settings, silent)
    assert json.loads(json.dumps(result)) == result
    return result, summary(result, settings)


def mlsm(place, *arguments, code=0):
    return run_command(["show-lsp", *arguments], cwd=place, code=code)


def test_the_newest_store_is_shown_and_the_way_on(coded_store):
    run = mlsm(coded_store.path.parents[2])
    assert "(the only finished one that fits)" in run.stdout
    for words in ("LSPs", "special tokens included", "typical words", "--html lsps", "--word", "No word-sense labels"):
        assert words in run.stdout


def test_pages_of_a_store(coded_store, tmp_path):
    _, text = shown(store=str(coded_store.path), html=tmp_path / "lsps")
    assert "lsps/index.html" in text and len(LspPage(tmp_path / "lsps").lsps["tokens"]) == 48
    with pytest.raises(InspectionError, match="was not written by this version of show-lsp"):
        shown(store=str(coded_store.path), html=tmp_path)


def test_an_error_is_one_line(coded_store, tmp_path):
    errors = [
        line
        for line in mlsm(tmp_path, coded_store.path, "--word", "zyzzyva", code=2).stderr.splitlines()
        if line.startswith("mlsm: error:")
    ]
    assert len(errors) == 1 and "'zyzzyva' is not among" in errors[0] and "--samples" in errors[0]


def test_an_lsp_that_is_not_there_is_refused_before_the_store_is_read(coded_store, monkeypatch):
    monkeypatch.setattr("mlsm.evaluation.inspection.lsps.view.sample_tokens", None)
    with pytest.raises(InspectionError, match="no LSP 48: they are numbered from 0 to 47"):
        shown(store=str(coded_store.path), lsp=(3, 48))


def test_a_store_of_another_kind_is_refused_at_once(coded_store, tmp_path, monkeypatch):
    hidden = str(write_store(tmp_path / "hidden", k=0, kind="hidden").path)
    for settings in ({}, {"lsp": (1,)}, {"text": "the", "scale": ("1=0",)}):
        with pytest.raises(InspectionError, match="contains hidden, not LSPs"):
            shown(store=hidden, **settings)
    monkeypatch.setattr("mlsm.evaluation.inspection.lsps.texts.load_judge", None)
    with pytest.raises(InspectionError, match="contains hidden, not LSPs"):
        shown(store=str(coded_store.path), intruders=True, against=(hidden,))


def test_lsps_words_and_places(coded_store):
    store = str(coded_store.path)
    result, text = shown(store=store, lsp=(3, 7))
    assert [lsp["lsp"] for lsp in result["lsps"]] == [3, 7]
    for words in ("Heaviest", "Fires together", "Nearest atoms", "From every tenth", "«"):
        assert words in text
    result, text = shown(store=store, word="Return")
    assert result["count"] == sum(count for _, count in result["forms"]) > 3 and "Some occurrences" in text
    place = f"{result['contexts'][0]['window']}:{result['contexts'][0]['position']}"
    assert "Tokens most like it" in shown(store=store, similar_to=place)[1]
    for wrong, said in (
        ("7", "is WINDOW:TOKEN"),
        ("999999:1", "windows, from 0 on"),
        ("0:77", "tokens, from 0 on"),
        ("0:0", "has no LSPs"),
    ):
        with pytest.raises(InspectionError, match=said):
            shown(store=store, similar_to=wrong)
    with pytest.raises(InspectionError, match="no LSP 48: they are numbered from 0 to 47"):
        shown(store=store, lsp=(48,))


def test_an_lsp_whose_weights_are_equal_is_heaviest_nowhere(coded_store, monkeypatch):
    result, text = shown(store=str(coded_store.path), lsp=(3,))
    assert result["lsps"][0]["quantiles"] and "random sample" not in text
    read = sample_tokens

    def read_equal(*given):
        sample = read(*given)
        return replace(sample, weights_E=np.where(sample.lsps_E == 3, np.float32(0.5), sample.weights_E))

    monkeypatch.setattr("mlsm.evaluation.inspection.lsps.view.sample_tokens", read_equal)
    result, text = shown(store=str(coded_store.path), lsp=(3,))
    assert result["lsps"][0]["quantiles"] == [] and len(result["lsps"][0]["top"]) == 20
    assert "All its weights are equal. Some of its tokens, at random:" in text
    assert "Heaviest" not in text and "From every tenth" not in text


def test_a_store_behind_a_url(coded_store, tmp_path, monkeypatch):
    monkeypatch.setenv("MLSM_CACHE", str(tmp_path / "cache"))
    with serving(coded_store.path.parent) as web:
        url = f"{web.url}/{coded_store.path.name}"
        (remote, _), (local, _) = shown(store=url, lsp=(3,)), shown(store=str(coded_store.path), lsp=(3,))
    assert remote == local | {"store": url} and remote["lsps"][0]["nearest"]


def test_labels_are_those_of_the_dictionary(coded_store, tmp_path, write_labels):
    fingerprint = coded_store.settings["dictionary"]
    write_labels(tmp_path / "diagnostics" / "one" / "layer-2-k48", "0" * 64, 48)
    (tmp_path / "diagnostics" / "two" / "layer-2-k48").mkdir(parents=True)
    (tmp_path / "diagnostics" / "two" / "layer-2-k48" / "labels.json").write_text("{broken")
    assert find_labels(fingerprint, 48, None, tmp_path) is None
    with pytest.raises(InspectionError, match="has no labels.json of this dictionary"):
        shown(store=str(coded_store.path), diagnostic=tmp_path)
    with pytest.raises(InspectionError, match=r"of this dictionary \(unknown\)"):  # a store need not name its own
        find_labels(None, 48, tmp_path, tmp_path)
    write_labels(tmp_path / "diagnostics" / "three" / "layer-2-k48", fingerprint, 48)
    for place in (tmp_path, tmp_path / "diagnostics" / "three", tmp_path / "diagnostics" / "three" / "layer-2-k48"):
        result, text = shown(store=str(coded_store.path), diagnostic=place, lsp=(3,))
        assert result["lsps"][0]["label"] == "depository, bank · noun.group"
        assert "depository.n.01" in text and "NPMI 0.41" in text
    dictionary = str(coded_store.files.dictionary)
    assert "depository" in shown(store=dictionary, diagnostic=tmp_path, lsp=(3,))[1]


SYNSET = {"synset": "x.n.01", "lemmas": ["x"], "lexname": "noun.act", "npmi": 0.1, "mass": 1}


@pytest.mark.parametrize("lsp", [
    "text", {}, {"synsets": [], "lexnames": 3}, {"synsets": [{"lemmas": ["x"]}], "lexnames": []},
    {"synsets": [SYNSET | {"lemmas": 3}], "lexnames": []}, {"synsets": [SYNSET | {"npmi": None}], "lexnames": []},
    {"synsets": [], "lexnames": [["noun.act"]]}, {"synsets": [], "lexnames": [["\ud800", 1.0]]},
])  # fmt: skip
def test_labels_of_another_form_are_taken_for_none(lsp, tmp_path, write_labels):
    place = tmp_path / "labels"
    write_labels(place, "0" * 64, 48)
    whole = json.loads((place / "labels.json").read_text())
    assert len(find_labels("0" * 64, 48, None, place)) == 48 and find_labels("0" * 64, 49, None, place) is None
    (place / "labels.json").write_text(json.dumps(whole | {"lsps": [*whole["lsps"][1:], lsp]}))
    assert find_labels("0" * 64, 48, None, place) is None


def test_settings_without_a_store_say_so():
    for look in (shown, lambda: show_shards(ShowConfig())):
        with pytest.raises(ValueError, match="STORE is missing"):
            look()


def test_labels_are_found_from_a_directory_inside(hostile_store, monkeypatch):
    monkeypatch.chdir(hostile_store.path.parent)
    store = Store.open(hostile_store.path.name)
    store.settings["dictionary"] = hostile_store.settings["dictionary"]
    assert StoreView(store, 2000, None, silent).labels[3]["synsets"]


def test_a_dictionary_of_one_atom_has_no_neighbours(tmp_path):
    Dictionary(np.array([[0.6, 0.8]], np.float32), [], "made up", {}).save(tmp_path / "one")
    result, text = shown(store=str(tmp_path / "one"), lsp=(0,))
    assert result["closest"] == [] and result["lsps"][0]["nearest"] == [] and "nearest_cosines" not in result
    assert "norms" in text


def test_labels_beside_the_store_are_found(hostile_view):
    assert hostile_view.row(3)["label"] == "depository, bank · noun.group" and hostile_view.row(4)["label"] == ""


def test_a_dictionary_alone(coded_store):
    path = coded_store.files.dictionary
    result, text = shown(store=str(path))
    atoms = Dictionary.load(path).atoms_Kd
    unit = atoms / np.linalg.norm(atoms, axis=1, keepdims=True)
    cosines = np.tril(unit @ unit.T, -1)
    assert result["norms"] == pytest.approx(np.quantile(np.linalg.norm(atoms, axis=1), [0, 0.5, 1]), abs=1e-5)
    assert result["closest"][0][2] == pytest.approx(cosines.max(), abs=1e-5)
    assert sorted(result["closest"][0][:2]) == sorted(np.unravel_index(cosines.argmax(), cosines.shape))
    assert "explained variance" in text and "Closest pairs" in text
    assert "Nearest atoms" in shown(store=str(path), lsp=(1,))[1]
    with pytest.raises(InspectionError, match="is a dictionary, which --word cannot be used with"):
        shown(store=str(path), word="bank")


def test_a_student_alone(coded_store, tmp_path):
    _, export = exported("bert-1x32", Mlsm(coded_store), coded_store, tmp_path / "export")
    result, text = shown(store=str(export))
    assert result["k"] == 48 and result["dictionary"] == coded_store.settings["dictionary"] and "Closest pairs" in text
    mask = coded_store.load_tokenizer().mask_token
    assert result["mask_token"] == mask and f'"The {mask} raised its rates."' in text
    assert "Nearest atoms" in shown(store=str(export), lsp=(1,))[1]
    with pytest.raises(InspectionError, match="is a student, which --html cannot be used with"):
        shown(store=str(export), html=tmp_path / "pages")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"word": "a", "lsp": (1,)}, "different things to show"),
        ({"text": "caf\udce9"}, "--text must be text in UTF-8"),
        ({"student": "x"}, "are for a text"),
        ({"student": "x", "text": "a", "similar_to": "0"}, "Omit --student"),
        ({"samples": 0}, "--samples must be at least 1"),
    ],
)
def test_settings_that_contradict_each_other(settings, said):
    with pytest.raises(ValueError, match=said):
        ShowLspConfig(**settings)
