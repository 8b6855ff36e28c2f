"""How many entries of a token are kept by default, what the commands say about it, and a --k that is not the
dictionary's."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from planted import planted

from mlsm.cli.settings import parse
from mlsm.commands import load
from mlsm.common.errors import EncodeError
from mlsm.recipes.reading import recipe_settings
from mlsm.terminal.encoding import encoding
from pipeline.commands import encode_lsp
from pipeline.config import EncodeConfig
from pipeline.dictionary import Dictionary, DictionarySettings, learn_dictionary
from pipeline.dictionary.vectors import TrainingVectors
from pipeline.solvers import nonneg_lasso
from pipeline.targets import lsp as kept
from pipeline.targets.distributions import distributions
from pipeline.targets.lsp import CHOICES, entries_kept, expected_mass
from shards.reader import Store


def knowing(atoms, mass, lam=0.05):
    """A dictionary whose facts say which share of the mass n entries hold."""
    history = [{"objective": 0.2, "kept_mass": {"8": 0.1}}, {"objective": 0.1, "kept_mass": mass}]
    return Dictionary(atoms, history, "given", {"lam": lam})


def test_the_facts_say_which_share_of_the_mass_the_largest_entries_hold():
    hidden, _ = planted(3000, width=24, atoms=200)
    found = learn_dictionary(hidden, DictionarySettings(200, 0.01, seed=1))
    held_out_Hd = TrainingVectors(hidden, None, 1).held_out_Hd
    codes = nonneg_lasso(held_out_Hd, found.atoms_Kd, 0.01)
    assert found.best["nnz"] > 8
    for n in (8, 16, 255):
        expected = 1 - distributions(codes, n).tail.mean()
        assert found.best["kept_mass"][str(n)] == pytest.approx(expected, abs=2e-3)  # codes to 1e-3
    assert found.best["kept_mass"]["8"] < 0.97 < found.best["kept_mass"]["64"]
    assert "kept_mass" not in found.report()


@pytest.mark.parametrize(
    ("mass", "number", "expected"),
    [
        ({"32": 0.99, "48": 1.0}, 32, 0.99),
        ({"32": 0.933, "48": 0.98, "64": 0.995}, 48, 0.98),
        ({"32": 0.5, "255": 0.9}, 255, 0.9),
    ],
)
def test_the_default_is_the_smallest_number_that_keeps_enough(mass, number, expected):
    config, dictionary = EncodeConfig(), knowing(np.eye(4, dtype=np.float32), mass)
    assert entries_kept(config, dictionary) == number and expected_mass(config, dictionary) == pytest.approx(expected)
    assert entries_kept(replace(config, top_n=8), dictionary) == 8
    assert entries_kept(replace(config, top_n="all"), dictionary) == "all"
    assert entries_kept(replace(config, solver="nearest"), dictionary) == 1
    assert expected_mass(replace(config, top_n=40), knowing(np.eye(4), {"32": 0.9, "48": 1.0})) == pytest.approx(0.95)


@pytest.mark.parametrize(("width", "number"), [(128, 32), (384, 48), (768, 64), (1024, 64), (4096, 96)])
def test_a_dictionary_without_facts_is_judged_by_its_width(width, number):
    config, atoms = EncodeConfig(), np.eye(4, width, dtype=np.float32)
    for dictionary in (Dictionary(atoms, [], "imported", {}), knowing(atoms, {"32": 1.0}, lam=0.04)):
        assert entries_kept(config, dictionary) == number and expected_mass(config, dictionary) is None
    smaller_penalty = entries_kept(replace(config, lam=0.02), dictionary)
    fista = entries_kept(replace(config, solver="fista"), dictionary)
    assert number < smaller_penalty <= 255 and number < fista <= 255 and {smaller_penalty, fista} <= set(CHOICES)


# -- whole commands ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory, english_text, teacher_directory):
    """Codes of many entries, for a teacher 32 wide: of a small penalty 8 do not hold enough."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept, "CHOICES", (8, 12, 16, 24, 32))
        yield EncodeConfig(
            teacher=str(teacher_directory),
            layer=(2,),
            corpus=(str(english_text),),
            k=(150,),
            lam=0.002,
            tolerance=1e-4,
            max_length=48,
            max_tokens=10_000,
            unit_tokens=4_000,
            batch_tokens=1024,
            dictionary_tokens=4_000,
            device="cpu",
            output=tmp_path_factory.mktemp("kept"),
        )


@pytest.fixture(scope="module")
def made(place):
    return encode_lsp(place)[0]


def test_by_default_new_text_keeps_97_per_cent(place, made):
    store = Store.open(made["store"])
    top_n = store.fingerprinted["top_n"]
    assert top_n == made["top_n"] == entries_kept(place, Dictionary.load(made["dictionary"]))
    assert top_n > 8 and store.report()["mass_kept"] >= 0.97


def test_equal_explicit_settings_and_the_given_dictionary_find_the_same_store(place, made):
    given = replace(place, k=None, dictionary=Path(made["dictionary"]))
    for config in (place, given, replace(given, k=(150,)), replace(given, top_n=made["top_n"])):
        again = encode_lsp(config)[0]
        assert again["store"] == made["store"] and again["finished_before"]


def test_the_announcement_says_how_many_entries_and_which_mass(place, made, caplog):
    mass = expected_mass(place, Dictionary.load(made["dictionary"]))
    with caplog.at_level(logging.INFO, "pipeline"):
        encode_lsp(place)
        encode_lsp(replace(place, top_n=5))
    lines = [record.getMessage() for record in caplog.records if "entries of each token" in record.getMessage()]
    assert f"{made['top_n']} entries of each token are kept at most (by default), with {mass:.1%}" in lines[0]
    assert "5 entries of each token are kept at most (--top-n 5), with" in lines[1]


def test_a_dry_run_says_the_mass_that_it_measured(place, made):
    (report,) = encode_lsp(replace(place, dry_run=True))
    ((top_n, mass),) = report["kept"]
    assert top_n == made["top_n"] and mass == pytest.approx(Store.open(made["store"]).report()["mass_kept"], abs=0.01)
    assert f"{mass:.1%} of the mass in {top_n} entries per token" in encoding([report], replace(place, dry_run=True))


# -- a --k that is not the dictionary's -------------------------------------------------------------------------


def test_a_k_that_is_not_the_dictionarys_is_refused(place, made, tmp_path):
    given = replace(place, dictionary=Path(made["dictionary"]), output=tmp_path)
    for dry_run in (False, True):
        with pytest.raises(EncodeError, match=r"--k 151, but the dictionary .* has 150 atoms\. Omit --k"):
            encode_lsp(replace(given, k=(151,), dry_run=dry_run))
    assert not list(tmp_path.glob("stores/*"))


def test_the_k_of_a_recipe_does_not_count_beside_a_given_dictionary():
    verb = load("encode-lsp")
    assert recipe_settings("quickstart", "encode-lsp", EncodeConfig, True)["k"] == (1024,)
    assert parse(verb, []).settings.k == (1024,)
    assert parse(verb, ["--dictionary", "d"]).settings.k is None
    assert parse(verb, ["--dictionary", "d", "--k", "7"]).settings.k == (7,)
    assert EncodeConfig().k == (3072,) and json.dumps(EncodeConfig(dictionary=Path("d")).k) == "null"
