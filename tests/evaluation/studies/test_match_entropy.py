"""match-entropy: the entropies of its results are computed again, densely, and on a store with that penalty."""

import json
import shlex
from dataclasses import replace

import numpy as np
import pytest
import torch
from preloaded import run_command

from mlsm.cli.settings import parse
from mlsm.commands import load
from mlsm.commands.match_entropy import show as entropies
from mlsm.common.errors import InspectionError
from mlsm.evaluation.studies.targets.config import MatchEntropyConfig
from mlsm.evaluation.studies.targets.entropy import _solve, match_entropy
from pipeline.commands import encode_hidden, encode_lsp
from pipeline.config import EncodeConfig, EncodeHiddenConfig
from pipeline.teacher import Teacher
from shards.reader import Store


@pytest.fixture(scope="module")
def place(tmp_path_factory, english_text, teacher_directory):
    return EncodeConfig(
        teacher=str(teacher_directory),
        layer=(2,),
        corpus=(str(english_text),),
        k=64,
        lam=0.1,
        center="mean",
        top_n="all",
        max_length=48,
        max_tokens=6_000,
        unit_tokens=3_000,
        batch_tokens=1024,
        dictionary_tokens=3_000,
        dictionary_epochs=1,
        device="cpu",
        output=tmp_path_factory.mktemp("entropy"),
    )


@pytest.fixture(scope="module")
def exact(place):
    return encode_lsp(place)[0]["store"]


@pytest.fixture(scope="module")
def fista(place):
    return encode_lsp(replace(place, solver="fista", solver_steps=5))[0]["store"]


@pytest.fixture(scope="module")
def found(exact, fista):
    return match_entropy(MatchEntropyConfig(store=exact, against=fista))


def dense_entropy(path, temperature=1.0):
    """Mean entropy of all training tokens of a store, tempered, by dense formulas."""
    store = Store.open(path)
    reader = store.split("train")
    batch = reader.read(np.arange(len(reader)))
    rows = reader.targets(batch, *np.nonzero(batch.documents >= 0))
    dense_MK = np.zeros((len(rows.tail), store.k))
    dense_MK[np.repeat(np.arange(len(rows.tail)), np.diff(rows.indptr)), rows.indices] = rows.weights
    powers_MK = dense_MK[dense_MK.any(1)] ** (1 / temperature)
    powers_MK /= powers_MK.sum(1, keepdims=True)
    return float(-(powers_MK * np.log(np.where(powers_MK > 0, powers_MK, 1))).sum(1).mean())


def test_stores_of_other_text_are_refused(place, exact, english_text, tmp_path):
    other = encode_lsp(replace(place, max_tokens=4_000, output=tmp_path))[0]["store"]
    with pytest.raises(InspectionError, match="do not hold the same windows"):
        match_entropy(MatchEntropyConfig(store=exact, against=other))


def test_tempered_targets_have_the_entropy_of_the_others(exact, fista, found):
    assert found["entropy_nats"] == pytest.approx(dense_entropy(exact), rel=1e-4)
    assert found["wanted_nats"] == pytest.approx(dense_entropy(fista), rel=1e-4)
    assert found["wanted_nats"] > found["entropy_nats"] + 0.2 and found["temperature"] > 1.1
    assert dense_entropy(exact, found["temperature"]) == pytest.approx(found["wanted_nats"], abs=0.002)
    assert not found["unreachable"]


def test_a_store_of_the_printed_flags_has_the_entropy_of_the_others(place, exact, fista, found):
    assert 0 < found["lam"] < place.lam
    printed = entropies(found, MatchEntropyConfig(store=exact, against=fista)).splitlines()[-1]
    words = ["--teacher", place.teacher, "--layer", "2", "--corpus", *place.corpus]
    for name in ("center", "max_length", "max_tokens", "unit_tokens", "batch_tokens", "device", "output"):
        words += [f"--{name.replace('_', '-')}", str(getattr(place, name))]
    matched = encode_lsp(parse(load("encode-lsp"), [*words, *shlex.split(printed)]).settings)[0]["store"]
    assert Store.open(matched).settings["dictionary"] == Store.open(exact).settings["dictionary"]
    assert dense_entropy(matched) == pytest.approx(found["wanted_nats"], abs=0.005)


def test_an_entropy_that_cannot_be_reached_is_said(exact, fista):
    config = MatchEntropyConfig(store=exact, entropy=6.0)
    found = match_entropy(config)
    assert found["temperature"] is None and found["lam"] is None and set(found["unreachable"]) == {"temperature", "lam"}
    assert entropies(found, config).count("none: at ") == 2
    lower = match_entropy(MatchEntropyConfig(store=exact, entropy=0.5))
    assert lower["temperature"] < 1 and lower["lam"] > 0.1 and lower["lam_nats"] == pytest.approx(0.5, abs=0.02)
    of_fista = match_entropy(MatchEntropyConfig(store=fista, against=exact))
    assert "the store's solver is fista" in of_fista["unreachable"]["lam"] and of_fista["temperature"] < 1


def test_of_stored_hidden_states_only_the_temperature_is_found(place, tmp_path):
    """The store's codes are of pq's states, and would be compared with codes of the teacher's own."""
    text = {name: getattr(place, name) for name in ("teacher", "corpus", "layer", "max_length", "max_tokens")}
    states = EncodeHiddenConfig(**text, quantise="pq", bytes=16, device="cpu", output=tmp_path)
    config = EncodeConfig(hidden=encode_hidden(states)[0]["store"], k=64, lam=0.1, device="cpu", output=tmp_path)
    store = encode_lsp(replace(config, dictionary_tokens=3_000))[0]["store"]
    found = match_entropy(MatchEntropyConfig(store=store, entropy=dense_entropy(store) - 0.2))
    assert found["temperature"] < 1 and found["lam"] is None
    assert "codes are of quantised hidden states" in found["unreachable"]["lam"]


def test_the_limits_of_the_search_are_tried():
    """The measure is the argument itself, or its inverse."""
    for start, wanted in [(1.0, 30.0), (1.0, 1 / 31), (0.5, 0.89), (0.0018, 0.00105)]:
        limits = (1 / 32, 32.0) if start == 1.0 else (1e-3, 0.9)
        assert _solve(float, start, limits, wanted, rises=True) == pytest.approx((wanted, wanted), rel=2e-3)
        falling = _solve(lambda value: 1 / value, start, limits, 1 / wanted, rises=False)
        assert falling == pytest.approx((wanted, 1 / wanted), rel=2e-3)
    assert _solve(float, 0.5, (1e-3, 0.9), 0.91, rises=True).startswith("at 0.9 the mean entropy is 0.900 nats")
    assert _solve(float, 0.95, (1e-3, 0.9), 0.97, rises=True).startswith("at 0.95 the mean")


def test_windows_without_codes_are_left_out(place, exact, tmp_path, monkeypatch):
    """A teacher gives NaN for a word: the windows with it are in quarantine, and are not read for the penalty."""
    whole = Store.open(exact)
    ids_WL = whole.split("train").read(np.arange(len(whole.split("train")))).ids
    word = next(word for word in range(300, 600) if 0 < (ids_WL == word).any(1).sum() < 4)
    works = Teacher.__call__

    def teaches(teacher, ids_WL, real_WL, tokens_N, **more):
        hidden = works(teacher, ids_WL, real_WL, tokens_N, **more).clone()
        hidden[(ids_WL == word).any(1)[tokens_N // ids_WL.shape[1]]] = torch.nan
        return hidden

    monkeypatch.setattr(Teacher, "__call__", teaches)
    (report,) = encode_lsp(replace(place, dictionary=whole.files.dictionary, output=tmp_path))
    assert report["quarantined"]
    found = match_entropy(MatchEntropyConfig(store=report["store"], entropy=dense_entropy(exact) + 0.2))
    assert not found["unreachable"] and found["lam"] < place.lam
    assert found["lam_nats"] == pytest.approx(found["wanted_nats"], abs=0.01)


def test_the_command(exact, fista):
    run = run_command(["match-entropy", exact, "--against", fista, "--samples", 500, "--json"], code=0)
    assert json.loads(run.stdout)["tokens"] < 600
    run = run_command(["match-entropy", exact])
    assert run.returncode == 2 and "Pass either --against STORE or --entropy NATS" in run.stderr
