"""The command choose-layer: its output, repeated runs, kills, and errors."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
from preloaded import run_python
from scipy import sparse
from tiny_senses import SETS, all_instances, plain_vectors, slow_candidates, slow_phi, write_miniature

from mlsm.cli.settings import parse
from mlsm.commands import load
from mlsm.commands.choose_layer import show as layers
from mlsm.common.errors import TeacherError, WsdDataError
from mlsm.common.progress import silent
from mlsm.common.workplaces import is_part, read_mark
from mlsm.evaluation.studies.word_senses import choose_layer as module
from mlsm.evaluation.studies.word_senses.choose_layer import choose_layer
from mlsm.evaluation.studies.word_senses.conclusions import is_conclusive
from mlsm.evaluation.studies.word_senses.config import ChooseLayerConfig
from mlsm.evaluation.studies.word_senses.data import WsdData
from pipeline.config import DictionaryConfig
from pipeline.dictionary import Dictionary
from pipeline.solvers import nonneg_lasso

pytestmark = pytest.mark.filterwarnings("ignore:.* in this data")


@pytest.fixture(scope="module")
def settings(tmp_path_factory, teacher_directory, english_text):
    """Of a command that takes a second: three layers, two k."""
    directory = tmp_path_factory.mktemp("senses")
    return {
        "data_dir": write_miniature(directory / "wsd"),
        "teacher": str(teacher_directory),
        "corpus": (str(english_text),),
        "k": (16, 24),
        "lam": 0.1,
        "max_length": 32,
        "max_tokens": 20_000,
        "dictionary_tokens": 1000,
        "dictionary_epochs": 1.0,
        "batch_tokens": 64,
        "output": directory / "runs",
    }


@pytest.fixture(scope="module")
def result(settings):
    return choose_layer(ChooseLayerConfig(**settings))


def test_what_is_written(settings, result):
    directory = Path(result["directory"])
    assert directory.parent == settings["output"] / "diagnostics" and re.fullmatch(r"tiny-[0-9a-f]{12}", directory.name)
    assert json.loads((directory / "result.json").read_text())["layers"] == result["layers"]
    kept = {f"layer-{layer}-k{k}" for layer in (1, 2, 3) for k in (16, 24)}
    figures = {f"layers-k{k}.{end}" for k in (16, 24) for end in ("svg", "png", "csv")}
    assert {path.name for path in directory.iterdir()} == kept | figures | {"result.json", "table.csv"}
    assert [(entry["layer"], entry["k"]) for entry in result["layers"]] == [
        (layer, k) for layer in (1, 2, 3) for k in (16, 24)
    ]
    for entry in result["layers"]:
        assert set(entry["scores"]["raw-npmi0"]) == {"ALL", *SETS, "NOUN", "VERB", "ADJ", "ADV", "back_off"}
        assert entry["scores"]["raw-npmi0"]["VERB"] == 1.0 and 0 < entry["costs"]["relative_encoding"] <= 1
        assert entry["costs"]["coded_words"] == 15 and entry["costs"]["dictionary_seconds"] > 0
    assert result["first_sense"]["ALL"] == 6 / 8 and result["first_sense"]["senseval2"] == 0.5


def test_the_files_of_a_layer(settings, result):
    entry = result["layers"][3]
    directory = Path(result["directory"]) / "layer-2-k24"
    labels = json.loads((directory / "labels.json").read_text())
    assert {name: labels[name] for name in ("layer", "k", "teacher", "dictionary")} == {
        "layer": 2,
        "k": 24,
        "teacher": result["teacher"]["fingerprint"],
        "dictionary": entry["dictionary"],
    }
    (atoms,) = (d for d in (settings["output"] / "dictionaries").glob("*-l2-k24-*"))
    assert Dictionary.load(atoms).fingerprint == labels["dictionary"]
    phi = sparse.load_npz(directory / "phi.npz").toarray()
    synsets = json.loads((directory / "synsets.json").read_text())
    assert phi.shape == (len(synsets), 24) == (6, 24) and len(labels["lsps"]) == 24
    lexname_of = WsdData.read(settings["data_dir"], silent).wordnet.lexname
    usual = {}
    for synset, mass in zip(synsets, phi.sum(1), strict=True):
        usual[lexname_of(synset)] = usual.get(lexname_of(synset), 0) + mass / phi.sum()
    for column, label in zip(phi.T, labels["lsps"], strict=True):
        shares = {synset: mass / column.sum() for synset, mass in zip(synsets, column, strict=True) if mass > 0}
        for entry in label["synsets"]:
            assert entry["mass"] == pytest.approx(shares[entry["synset"]], abs=1e-4)
            assert entry["npmi"] >= 0  # those above it alone are listed, rounded
            assert entry["lemmas"] and entry["lexname"] == lexname_of(entry["synset"])
        files = {}
        for synset, share in shares.items():
            files[lexname_of(synset)] = files.get(lexname_of(synset), 0) + share
        telling = sorted(files, key=lambda name: -files[name] * np.log(files[name] / usual[name]))
        assert [name for name, _ in label["lexnames"]] == telling[:3]
        assert all(files[name] == pytest.approx(share, abs=1e-4) for name, share in label["lexnames"])
    assert any(label["synsets"] for label in labels["lsps"])


def test_finished_layers_are_found_and_new_ones_added(settings, result, monkeypatch):
    made = []
    real = module.diagnose_layer
    monkeypatch.setattr(module, "diagnose_layer", lambda *a: made.append(a[1]) or real(*a))
    again = choose_layer(ChooseLayerConfig(**settings))
    assert again["finished_before"] and not made and again["layers"] == result["layers"]
    other = choose_layer(ChooseLayerConfig(**settings | {"layer": (1, 3), "k": 20}))
    assert made == [1, 3] and not other["finished_before"] and other["directory"] == result["directory"]
    changed = choose_layer(ChooseLayerConfig(**settings | {"layer": 1, "k": 16, "tolerance": 1e-2}))
    assert made == [1, 3, 1] and changed["directory"] != result["directory"]
    assert changed["layers"][0]["costs"]["dictionary_seconds"] is None  # it was there


KILLED = """
import os, signal, sys
from pathlib import Path
from mlsm.evaluation.studies.word_senses import choose_layer as module
from mlsm.evaluation.studies.word_senses.config import ChooseLayerConfig

def dying(function, name, times):
    def call(*arguments):
        global calls
        calls = globals().get("calls", 0) + 1
        if calls == times:
            print("killed in", name, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)
    return call

settings, where = eval(sys.argv[1], {"PosixPath": Path}), sys.argv[2]
module.PART_TOKENS = 24
if where == "vectors":
    module.word_vectors = dying(module.word_vectors, where, 3)
else:
    module.sparse.save_npz = dying(module.sparse.save_npz, where, 3)
module.choose_layer(ChooseLayerConfig(**settings))
"""


def killed(settings, where):
    run = run_python(["-c", KILLED, repr(settings), where])
    assert run.returncode == -9 and f"killed in {where}" in run.stdout, run.stderr


def test_a_teacher_that_reads_documents_apart_has_figures_of_its_own(settings, result, tmp_path):
    apart = settings | {"documents_apart": True, "layer": (1,), "k": (16,), "output": tmp_path / "runs"}
    together = apart | {"documents_apart": False}
    names = {Path(choose_layer(ChooseLayerConfig(**one))["directory"]).name for one in (apart, together)}
    assert len(names) == 2


def test_a_kill_costs_the_part_or_the_layer_at_hand(settings, result, tmp_path, monkeypatch):
    mine = settings | {"output": tmp_path / "runs"}
    killed(mine, "vectors")
    (directory,) = (tmp_path / "runs" / "diagnostics").iterdir()
    parts = {path.name: path.stat().st_mtime_ns for path in (directory / "vectors").glob("part-*.npz")}
    assert len(parts) == 2 and not list(directory.glob("layer-*"))
    assert all(is_part(path.name, read_mark(directory / "vectors")) for path in (directory / "vectors").iterdir())
    killed(mine, "layer")
    found = {path.name: path.stat().st_mtime_ns for path in (directory / "vectors").glob("part-*.npz")}
    assert len(found) > 3 and parts.items() <= found.items()
    assert len(list(directory.glob("layer-*"))) == 2
    last = sorted((directory / "vectors").glob("part-*.npz"))[-1]
    last.write_bytes(last.read_bytes()[:-40])  # as after a power cut
    made = []
    monkeypatch.setattr(module, "PART_TOKENS", 24)
    real = module.diagnose_layer
    monkeypatch.setattr(module, "diagnose_layer", lambda *a: made.append(a[1]) or real(*a))
    after = choose_layer(ChooseLayerConfig(**mine))
    assert made == [2, 2, 3, 3] and directory.name == Path(result["directory"]).name
    assert not (directory / "vectors").exists()
    for ours, theirs in zip(after["layers"], result["layers"], strict=True):
        assert {name: ours[name] for name in ("layer", "k", "scores", "dictionary", "lsps_used")} == {
            name: theirs[name] for name in ("layer", "k", "scores", "dictionary", "lsps_used")
        }
    for name in ("layer-1-k16", "layer-3-k24"):
        ours, theirs = (sparse.load_npz(d / name / "phi.npz") for d in (directory, Path(result["directory"])))
        assert ours.toarray() == pytest.approx(theirs.toarray(), rel=1e-3, abs=1e-5)  # batches of other shapes


@pytest.mark.parametrize("center", ["none", "mean", "position"])
def test_phi_of_the_command_is_that_of_the_plain_codes(settings, result, center, tmp_path):
    """From text to Φ: the slow sums of codes of the plain vectors, a sentence at a time."""
    if center != "none":
        settings = settings | {"center": center, "layer": (3,), "k": (16,), "dictionary_tokens": 6000}
        settings["output"] = tmp_path
        result = choose_layer(ChooseLayerConfig(**settings))
    data = WsdData.read(settings["data_dir"], silent)
    (atoms,) = (settings["output"] / "dictionaries").glob("*-l3-k16-*")
    dictionary = Dictionary.load(atoms)
    assert dictionary.centering == center
    center_Pd = None if center == "none" else dictionary.center.rows_Pd
    vectors_Nd = plain_vectors(settings["teacher"], data.sentences[:5], [3], center_Pd)[0]
    codes_NK = nonneg_lasso(vectors_Nd, dictionary.atoms_Kd, 0.1).dense(16)
    training, _ = all_instances(settings["data_dir"])
    phi = slow_phi(training, codes_NK, slow_candidates(settings["data_dir"])[1], False)
    directory = Path(result["directory"]) / "layer-3-k16"
    synsets, found = json.loads((directory / "synsets.json").read_text()), sparse.load_npz(directory / "phi.npz")
    expected = np.zeros(found.shape)
    for (synset, j), mass in phi.items():
        expected[synsets.index(synset), j] = mass
    assert found.toarray() == pytest.approx(expected, abs=5e-3)  # float16, and the solver's tolerance


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"data_dir": None}, WsdDataError, "needs --data-dir DIR"),
        ({"data_dir": Path("/nowhere")}, WsdDataError, "semcor.data.xml is missing"),
        ({"layer": (2, 7)}, TeacherError, "has 3 layers, no layer 7"),
        ({"layer": (2, 2)}, ValueError, "names a number twice"),
        ({"tolerance": 0.2}, ValueError, "--tolerance must lie between 0 and --lam 0.1"),
    ],
)
def test_what_is_refused(settings, change, error, message):
    with pytest.raises(error, match=message):
        choose_layer(ChooseLayerConfig(**settings | change))


def test_flags_and_the_summary(settings, result):
    given = [
        f"{name.replace('_', '-')} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"
        for name, value in settings.items()
    ]
    argv = f"--layer all --{' --'.join(given)}".split()
    config, _ = parse(load("choose-layer"), argv)[:2]
    assert config.layer == "all"
    found = choose_layer(config)
    assert found["conclusive"] is False
    shown = layers(found, config)
    for words in (
        "was finished already",
        "Best here at k = 16:  --layer",
        "first sense: 75.0%",
        result["directory"],
    ):
        assert words in shown
    assert "Recommended" not in shown
    demonstration, recipe = parse(load("choose-layer"), ["--layer", "2", "4"])[:2]
    assert recipe == "quickstart" and demonstration.layer == (2, 4) and demonstration.k == (1024,)


def test_below_half_of_semcor_nothing_is_concluded(result, settings):
    """The verdict repeats how much was covered; with most of it, layers below the first sense are a finding."""
    first = {"first_sense": result["first_sense"] | {"ALL": 1.0}}

    def said(training_words, **given):
        counts = result["counts"] | {"training_words": training_words}
        found = result | first | {"counts": counts, "conclusive": is_conclusive(counts)}
        return layers(found, ChooseLayerConfig(**settings, **given))

    part, most, whole = said(5_000), said(150_000), said(226_036)
    assert "5,000 annotated words, 2.2% of SemCor's 226,036" in part and "No layer is recommended" in part
    assert "without --limit-train" in said(5_000, limit_train=5_000) and "--limit-train" not in part
    assert "poorly" not in part and "Recommended" not in part
    for text in (most, whole):
        assert (
            "distinguish senses poorly" in text
            and "Recommended at k = 16" in text
            and "No layer is recommended" not in text
        )
    assert "150,000 annotated words, 66.4%" in most and "of SemCor" not in whole


def test_a_part_of_semcor_is_a_diagnostic_of_its_own(settings, result):
    part = choose_layer(ChooseLayerConfig(**settings, layer=(1,), limit_train=2))
    assert part["directory"] != result["directory"] and not part["finished_before"]
    assert part["counts"]["test_words"] == result["counts"]["test_words"]
    assert 0 < part["counts"]["training_words"] < result["counts"]["training_words"] == 7
    assert choose_layer(ChooseLayerConfig(**settings, layer=(1,)))["directory"] == result["directory"]
    with pytest.raises(ValueError, match="--limit-train must be at least 1"):
        ChooseLayerConfig(**settings, limit_train=0)


@pytest.mark.parametrize("recipe", ["quickstart", "paper"])
def test_the_recipes_dictionaries_are_those_of_encode_lsp(recipe):
    verbs = ("choose-layer", "encode-lsp")
    chosen, encoded = (parse(load(name), [], recipe)[0] for name in verbs)
    names = [field.name for field in dataclasses.fields(DictionaryConfig) if field.name != "layer"]
    assert {name: getattr(chosen, name) for name in names} == {name: getattr(encoded, name) for name in names}
