"""The recipe small-encoder: two commands on one's own text, an encoder that sentence-transformers loads."""

import json

import pytest
import torch
from preloaded import run_command
from transformers import AutoModel, AutoTokenizer

from benchmarks import small_encoder
from benchmarks.instead import cut_teacher
from mlsm.recipes.reading import recipe_settings
from student.config import StudentConfig

SECOND = ("train-student", "--recipe", "small-encoder")


@pytest.fixture(scope="module")
def place(tmp_path_factory, english_text, teacher_directory):
    """Where a store of LSPs was encoded by the recipe."""
    directory = tmp_path_factory.mktemp("own")
    sizes = ["--layer", 2, "--max-tokens", 20_000, "--k", 16, "--dictionary-tokens", 2_000]
    text = ["--corpus", english_text, "--teacher", teacher_directory]
    run(directory, "encode-lsp", "--recipe", "small-encoder", *text, *sizes)
    return directory


@pytest.fixture(scope="module")
def place_of_states(tmp_path_factory, english_text, teacher_directory):
    """Where a store of hidden states was encoded by the recipe, whose number of atoms the next step must not change."""
    directory = tmp_path_factory.mktemp("states")
    text = ["--corpus", english_text, "--teacher", teacher_directory, "--layer", 2, "--max-tokens", 20_000]
    said = run(directory, "encode-hidden", "--recipe", "small-encoder", *text)
    assert "encode-lsp --hidden runs/stores/hidden-" in said and said.rstrip().endswith(" --recipe small-encoder")
    return directory


def run(place, *arguments):
    return run_command(arguments, cwd=place, code=0).stdout


def settings_of(place, *arguments):
    """Setting -> value, as --print-config prints them."""
    lines = run(place, "train-student", *arguments, "--print-config").splitlines()
    return dict(line.partition(" #")[0].strip().split(": ", 1) for line in lines if ": " in line)


def test_the_store_says_what_is_trained(place):
    for words in ((), SECOND[1:]):
        found = settings_of(place, *words)
        assert (found["objective"], found["positions"]) == ("mlsm", "all")
        assert (found["encoder"], found["optimizer"]) == ("modernbert-2x128", "muon")


def test_words_are_masked(place):
    """The command that docs/small-encoder.md shows for them."""
    for objective in ("mlm", "mtl"):
        found = settings_of(place, *SECOND[1:], "--objective", objective, "--lr", 0.004)
        assert (found["objective"], found["positions"], found["lr"]) == (objective, "masked", "0.004")


def test_a_setting_of_masks_means_masked_tokens(place):
    for words in ((), SECOND[1:]):
        assert settings_of(place, *words, "--mask-rate", 0.3)["positions"] == "masked"


def test_hidden_states_are_learned_from_their_store(place_of_states):
    (store,) = place_of_states.glob("runs/stores/hidden-*")
    for words in ((*SECOND[1:], "--objective", "regress"), ("--store", store)):  # which its recipe made
        found = settings_of(place_of_states, *words)
        assert (found["objective"], found["positions"], found["regress_loss"]) == ("regress", "all", "mse")
    with_words = settings_of(place_of_states, *SECOND[1:], "--objective", "regress", "--kappa", 1)
    assert with_words["positions"] == "masked"


def test_its_export_makes_a_sentence_transformers_model(place):
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="no part of this package needs it")
    made = json.loads(run(place, *SECOND, "--epochs", 0.05, "--encoder", "modernbert-2x32", "--json"))
    model = sentence_transformers.SentenceTransformer(str(place / made["export"]), device="cpu")
    texts = ["The object returns a list.", "File"]
    tokenizer = AutoTokenizer.from_pretrained(place / made["export"])
    encoder = AutoModel.from_pretrained(place / made["export"]).eval()
    for text, vector in zip(texts, model.encode(texts, convert_to_tensor=True), strict=True):
        with torch.no_grad():
            states = encoder(**tokenizer(text, return_tensors="pt")).last_hidden_state
        assert torch.allclose(vector, states.mean(dim=1)[0], atol=1e-5)


def test_a_student_begins_with_the_teachers_own_layers(place_of_states, teacher_directory, tmp_path):
    """As benchmarks/instead.py says that one is made."""
    (tmp_path / "cut").mkdir()
    cut_teacher(teacher_directory, tmp_path / "cut")
    first = ("--objective", "regress", "--continue-from", tmp_path / "cut", "--epochs", 0.05, "--checkpoints", 0, 1)
    made = json.loads(run(place_of_states, *SECOND, *first, "--run-dir", tmp_path / "from-teacher", "--json"))
    begun = AutoModel.from_pretrained(tmp_path / "from-teacher/checkpoints/step-00000000").state_dict()
    own = AutoModel.from_pretrained(tmp_path / "cut").state_dict()
    assert all(torch.equal(begun[name], own[name]) for name in own if not name.startswith("pooler."))
    assert made["objective"] == "regress" and made["export"].endswith("from-teacher/export")


@pytest.mark.parametrize(("objective", "positions"), [("regress", "masked"), ("mlsm", "all"), ("mlm", "masked")])
def test_the_rates_are_those_of_the_recipe(objective, positions, place, tmp_path, monkeypatch):
    """Only objective, positions and the loss of the hidden states differ."""
    trained = []
    monkeypatch.setattr(small_encoder, "train", trained.append)
    lines = [{"step": step, "tokens_per_second": 100.0 * step} for step in range(1, small_encoder.STEPS + 1)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    whole = {"tokens_per_second": 1_000.0, "bytes_per_token": 70.0, "learning_seconds": 36.0}
    found = small_encoder.measure(objective, positions, whole, "store", tmp_path)
    assert found["training_tokens_per_second"] == 9_050  # the median of steps 61 to 120
    assert found["hours"] == pytest.approx(17_300 / 3600 + 17_300_000 / 9_050 / 3600 + 0.01)
    (settings,) = trained
    recipe = recipe_settings("small-encoder", "train-student", StudentConfig, True)
    studied = ("objective", "positions", "regress_loss", "epochs")
    kept = {name: value for name, value in recipe.items() if name not in studied}
    assert kept == {name: getattr(settings, name) for name in kept}
    assert (settings.objective, settings.positions) == (objective, positions)
