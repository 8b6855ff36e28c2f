"""Stores of hidden states against transformers' own model, and what is learned and coded from them against the teacher.

Columns, reader and damage are tested in tests/shards/test_hidden.py.
"""

import os
import shlex
import shutil
import signal
import warnings
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import faiss
import numpy as np
import pytest
import torch
import yaml
from http_store import serving
from preloaded import run_command, run_python
from stored import shards
from tiny_teacher import random_dictionary
from transformers import AutoModel

from mlsm.common.errors import EncodeError, RequestError, RunError, StoreError
from pipeline.commands import encode_hidden, encode_lsp
from pipeline.config import EncodeConfig, EncodeHiddenConfig, LearnConfig
from pipeline.dictionary import Dictionary
from pipeline.encode import LAYOUTS
from pipeline.executor import Inline
from pipeline.job import load_teacher, open_job, teacher_job
from pipeline.learn import learn_dictionary
from pipeline.precision import total_variation
from pipeline.sample import sample_hidden, sample_windows
from pipeline.solvers import nonneg_lasso
from pipeline.targets.hidden import Codebook
from pipeline.teacher import Teacher
from shards.derive import derive
from shards.reader import Store
from shards.verify import verify
from shards.windows import WindowReader
from student.objectives.kd import Kd
from student.objectives.mlm import Mlm
from student.objectives.mlsm import Mlsm

K, LAM = 48, 0.1


@pytest.fixture(scope="module")
def place(tmp_path_factory, english_text, teacher_directory):
    return EncodeHiddenConfig(
        teacher=str(teacher_directory),
        layer=(1, 2),
        corpus=(str(english_text),),
        max_length=32,
        max_tokens=40_000,
        unit_tokens=10_000,
        batch_tokens=2048,
        dictionary_tokens=6_000,
        device="cpu",
        output=tmp_path_factory.mktemp("hidden") / "runs",
    )


@pytest.fixture(scope="module")
def reports(place):
    return encode_hidden(place)


@pytest.fixture(scope="module")
def store(reports):
    """Of layer 2."""
    return Store.open(reports[1]["store"])


@pytest.fixture(scope="module")
def pq(place):
    return Store.open(encode_hidden(replace(place, layer=2, quantise="pq", bytes=16))[0]["store"])


@pytest.fixture(scope="module")
def dictionary(place):
    directory = place.output.parent / "dictionary"
    random_dictionary(K).save(directory)
    return directory


def codes_of(place, dictionary, **settings):
    """Settings that code with the dictionary."""
    common = {name: getattr(place, name) for name in ("batch_tokens", "device", "output")}
    return EncodeConfig(**common | {"dictionary": dictionary, "lam": LAM, "top_n": "all"} | settings)


def exact_rows(place, store, split="train", layer=2):
    """Unit-length hidden states of transformers' full model at the coded tokens, their places, and the reader."""
    reader = store.split(split)
    batch = reader.read(range(len(reader)))
    model = AutoModel.from_pretrained(place.teacher, dtype=torch.float32).eval()
    real_WL = batch.documents >= 0
    with torch.no_grad():
        states = model(
            torch.from_numpy(batch.ids).long(), torch.from_numpy(real_WL).long(), output_hidden_states=True
        ).hidden_states[layer]
    tokens = np.nonzero(real_WL & ~np.isin(batch.ids, store.special_ids["all"]))
    rows_Md = states.numpy()[tokens]
    return rows_Md / np.linalg.norm(rows_Md, axis=1, keepdims=True), tokens, batch, reader


def dense_rows(store, split="train"):
    reader = store.split(split)
    batch = reader.read(range(len(reader)))
    tokens = np.nonzero((batch.documents >= 0) & ~np.isin(batch.ids, store.special_ids["all"]))
    rows = reader.targets(batch, *tokens)
    dense_MK = np.zeros((len(tokens[0]), store.k))
    dense_MK[np.repeat(np.arange(len(rows.tail)), np.diff(rows.indptr)), rows.indices] = rows.weights
    return dense_MK


# ---- the states


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("split", ["train", "held_out"])
def test_they_are_transformers_own_within_half_a_step(place, reports, layer, split):
    exact_Md, tokens, batch, reader = exact_rows(place, Store.open(reports[layer - 1]["store"]), split, layer)
    found = reader.hidden(batch, *tokens)
    step_M = np.abs(exact_Md).max(1, keepdims=True) / 127
    assert found.coded_M.all() and (np.abs(found.rows_Md - exact_Md) <= step_M * 0.51 + 1e-5).all()
    assert len(exact_Md) > 100 and np.abs(exact_Md).mean() > 0.05
    specials = np.nonzero((batch.documents >= 0) & np.isin(batch.ids, reader.store.special_ids["all"]))
    assert not reader.hidden(batch, *specials).coded_M.any()


def test_the_report_says_how_near_they_are(place, store, reports):
    exact_Md, tokens, batch, reader = exact_rows(place, store)
    other_Md, other_tokens, other_batch, other_reader = exact_rows(place, store, "held_out")
    stored_Md = np.concatenate(
        [reader.hidden(batch, *tokens).rows_Md, other_reader.hidden(other_batch, *other_tokens).rows_Md]
    )
    all_Md = np.concatenate([exact_Md, other_Md])
    report = store.report()
    cosine_M = (stored_Md * all_Md).sum(1) / np.linalg.norm(stored_Md, axis=1)
    assert report["coded_tokens"] == len(all_Md) and report["kind"] == "hidden"
    assert report["cosine"] == pytest.approx(cosine_M.mean(), abs=1e-6) and 0.9999 < report["cosine"] < 1
    assert report["squared_error"] == pytest.approx(((stored_Md - all_Md) ** 2).sum(1).mean(), rel=0.01)
    mean_d, deviation_d = reader.hidden_statistics()
    np.testing.assert_allclose(mean_d, exact_Md.mean(0), atol=1e-5)
    np.testing.assert_allclose(deviation_d, exact_Md.std(0), atol=1e-5)
    assert reports[1]["teacher_seconds"] > 0 and reports[1]["bytes_per_token"] < 32 + 4 + 2 + 12


def test_every_layer_is_as_if_it_had_been_made_alone(place, reports, tmp_path):
    for layer, report in zip(place.layer, reports, strict=True):
        (alone,) = encode_hidden(replace(place, layer=layer, output=tmp_path / str(layer)))
        assert (
            shards(alone["store"]) == shards(report["store"])
            and Path(alone["store"]).name == Path(report["store"]).name
        )


def test_the_target_says_what_it_is(place, store, pq, reports):
    settings = store.fingerprinted
    assert settings["kind"] == "hidden" and settings["layer"] == 2 and settings["width"] == 32 and store.k == 0
    assert settings["quantise"] == {"name": "int8"} and "hidden" not in settings
    assert pq.fingerprinted["quantise"].keys() == {"name", "bytes", "codebook"} and pq.plan_id == store.plan_id
    assert store.path.name.startswith("hidden-") and pq.path.name.rpartition("-")[0].endswith("-l2-pq16")
    assert all(report["finished_before"] for report in encode_hidden(place))
    for one in (store, pq):
        assert verify(one.path, full=True)["damaged"] == [] == verify(one.path)["stray"]


def test_layouts_do_not_show_in_the_bytes(place, reports, tmp_path, monkeypatch):
    for name, layout in {"alone": dict.fromkeys(LAYOUTS["cpu"], 0), "gpu": LAYOUTS["cuda"]}.items():
        monkeypatch.setitem(LAYOUTS, "cpu", layout)
        again = encode_hidden(replace(place, output=tmp_path / name))
        assert [shards(one["store"]) for one in again] == [shards(one["store"]) for one in reports]


# ---- product quantisation


def test_product_quantised_states_are_faiss_own(place, pq):
    exact_Md, tokens, batch, reader = exact_rows(place, pq)
    quantiser = faiss.ProductQuantizer(32, 16, 8)
    faiss.copy_array_to_vector(pq.codebook.ravel(), quantiser.centroids)
    expected_Md = quantiser.decode(quantiser.compute_codes(exact_Md))
    found_Md = reader.hidden(batch, *tokens).rows_Md
    same_M = (found_Md == expected_Md).all(1)  # a tie may fall otherwise where the last bit of a state differs
    assert same_M.mean() > 0.999
    error = ((found_Md - exact_Md) ** 2).sum(1).mean()
    assert pq.report()["squared_error"] == pytest.approx(error, rel=0.05) and 0.001 < error < 0.3


def test_the_codebook_is_learned_once_from_training_documents(place, pq, tmp_path, monkeypatch):
    trained, works = [], Codebook.train.__func__
    monkeypatch.setattr(Codebook, "train", classmethod(lambda *given: trained.append(given[1]) or works(*given)))
    config = replace(place, layer=2, quantise="pq", bytes=16)
    assert encode_hidden(config)[0]["finished_before"] and not trained
    assert not list(place.output.glob("codebooks/.*"))
    (again,) = encode_hidden(replace(config, output=tmp_path))
    assert shards(again["store"]) == shards(pq.path) and len(trained) == 1
    train_Md, *_ = exact_rows(place, pq)
    held_Md, *_ = exact_rows(place, pq, "held_out")
    sample_Md = trained[0].astype(np.float32)
    sample_Md /= np.linalg.norm(sample_Md, axis=1, keepdims=True)
    near = [(sample_Md @ rows_Md.T).max(1) for rows_Md in (train_Md, held_Md)]
    assert (near[0] > 0.99999).all() and (near[1] < 0.99999).mean() > 0.8 and 5_500 < len(sample_Md) <= 6_000
    (given,) = encode_hidden(replace(config, output=tmp_path / "other", codebook=pq.files.codebook))
    assert shards(given["store"]) == shards(pq.path) and len(trained) == 1


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"bytes": 16}, "--bytes belongs to --quantise pq"),
        ({"quantise": "pq", "bytes": 12}, "--bytes must be 16, 32 or 64, found 12"),
        ({"codebook": "x"}, "--codebook belongs to --quantise pq"),
        ({"quantise": "pq", "codebook": "x"}, "--codebook fits one layer, but --layer names 2"),
        ({"layer": (2, 2)}, "--layer needs different numbers"),
    ],
)
def test_settings_that_do_not_belong_together(place, settings, problem):
    with pytest.raises(ValueError, match=problem):
        replace(place, **settings)


def test_what_a_codebook_does_not_fit(place, pq, tmp_path):
    config = replace(place, layer=2, quantise="pq", bytes=32, output=tmp_path)
    with pytest.raises(EncodeError, match="--bytes 64 does not divide the 32 values"):
        encode_hidden(replace(config, bytes=64))
    with pytest.raises(EncodeError, match="--bytes 64 does not divide the 32 values"):
        encode_hidden(replace(config, bytes=64, dry_run=True))
    with pytest.raises(EncodeError, match="quantises 32 values to 16 bytes, but --bytes is 32"):
        encode_hidden(replace(config, codebook=pq.files.codebook))
    with pytest.raises(EncodeError, match="not a codebook of product quantisation"):
        encode_hidden(replace(config, codebook=tmp_path))
    with pytest.raises(EncodeError, match="needs 256 hidden states .* has 200"):
        encode_hidden(replace(config, dictionary_tokens=200))


def test_a_damaged_codebook_is_not_advised_and_not_used(place, pq, tmp_path):
    damaged = tmp_path / "stores" / pq.path.name
    shutil.copytree(pq.path, damaged)
    file = damaged / "codebook" / "centroids.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    found = verify(damaged, repair=True)
    assert found["damaged"] and all("--codebook" not in command for command in found["commands"])
    with pytest.raises(StoreError, match="is not the codebook of this store"):
        encode_hidden(replace(place, layer=2, quantise="pq", bytes=16, codebook=file.parent, output=tmp_path))


# ---- coded without the teacher


@pytest.fixture(scope="module")
def coded(place, store, dictionary):
    return encode_lsp(codes_of(place, dictionary, hidden=str(store.path)))[0]


def test_codes_are_those_of_the_stored_states_and_near_the_teachers(place, store, coded, dictionary):
    lsps = Store.open(coded["store"])
    exact_Md, tokens, batch, reader = exact_rows(place, store)
    stored_Md = reader.hidden(batch, *tokens).rows_Md
    stored_Md = stored_Md / np.linalg.norm(stored_Md, axis=1, keepdims=True)
    atoms_Kd = Dictionary.load(dictionary).atoms_Kd
    found_MK = dense_rows(lsps)
    of_stored, of_exact = (nonneg_lasso(rows, atoms_Kd, LAM, tol=1e-5).dense(K) for rows in (stored_Md, exact_Md))
    assert total_variation(found_MK, of_stored).mean() < 0.004, "8-bit weights apart, these are the same"
    assert 0 < total_variation(of_stored, of_exact).mean() < 0.05
    common = {name: getattr(place, name) for name in ("teacher", "corpus", "max_length", "max_tokens", "unit_tokens")}
    taught = Store.open(encode_lsp(codes_of(place, dictionary, layer=2, **common))[0]["store"])
    assert taught.plan_id == lsps.plan_id == store.plan_id and taught.target_id != lsps.target_id
    assert total_variation(found_MK, dense_rows(taught)).mean() < 0.05
    expected = taught.fingerprinted | {"hidden": {"target": store.target_id, "quantise": {"name": "int8"}}}
    assert lsps.fingerprinted == expected and lsps.path.name.rpartition("-")[0].endswith(f"-l2-k{K}-of-int8")
    assert np.array_equal(lsps.split("train").read([3]).ids, store.split("train").read([3]).ids)
    assert lsps.read_tokenizer() == store.read_tokenizer()


def test_no_teacher_is_loaded(place, store, dictionary, tmp_path, monkeypatch, coded):
    monkeypatch.setattr(Teacher, "load", lambda *given, **how: pytest.fail("a teacher was loaded"))
    again = encode_lsp(codes_of(place, dictionary, hidden=str(store.path), output=tmp_path))[0]
    assert shards(again["store"]) == shards(coded["store"])
    for settings in ({"solver": "fista", "solver_steps": 10}, {"solver": "nearest"}, {"lam": 0.2}, {"top_n": 4}):
        (report,) = encode_lsp(
            codes_of(place, dictionary, **{"hidden": str(store.path), "output": tmp_path} | settings)
        )
        assert report["plan"] == store.plan_id and not report["finished_before"]
    (estimate,) = encode_lsp(codes_of(place, None, hidden=str(store.path), k=K, dry_run=True))
    assert estimate["lacking"] == 1 and estimate["tokens"] == sum(record.tokens for record in store.iter_records())


def test_product_quantised_states_are_coded_too_and_name_another_store(place, pq, coded, dictionary):
    (report,) = encode_lsp(codes_of(place, dictionary, hidden=str(pq.path)))
    lsps = Store.open(report["store"])
    assert lsps.fingerprinted["hidden"]["quantise"] == pq.fingerprinted["quantise"]
    assert "-of-pq16-" in lsps.path.name and report["store"] != coded["store"]
    assert 0.001 < total_variation(dense_rows(lsps), dense_rows(Store.open(coded["store"]))).mean() < 0.9


def test_a_url_serves_as_well(place, store, coded, dictionary, tmp_path):
    with serving(store.path.parent) as server:
        url = f"{server.url}/{store.path.name}".replace("://", "://ann:secret@")
        (report,) = encode_lsp(codes_of(place, dictionary, hidden=url, output=tmp_path))
        with pytest.raises(ValueError, match=f"hidden states from {server.url}"):
            encode_lsp(codes_of(place, dictionary, hidden=url, output=tmp_path, max_length=16))
        Path(store.path.parent / "coded").symlink_to(coded["store"])
        with pytest.raises(RequestError, match=f"--hidden {server.url}/coded is a store of lsp"):
            encode_lsp(codes_of(place, dictionary, hidden=f"{url.rpartition('/')[0]}/coded", output=tmp_path))
    assert shards(report["store"]) == shards(coded["store"])
    written = [path for path in tmp_path.rglob("*") if path.is_file() and b"secret" in path.read_bytes()]
    assert written == [], "no password is written down"


def test_a_store_is_quantised_again(place, store, pq, tmp_path):
    config = EncodeHiddenConfig(
        hidden=str(store.path), quantise="pq", bytes=16, dictionary_tokens=6_000, device="cpu", output=tmp_path
    )
    again = Store.open(encode_hidden(config)[0]["store"])
    assert again.plan_id == store.plan_id and again.fingerprinted["hidden"]["target"] == store.target_id
    assert again.report()["cosine"] == pytest.approx(pq.report()["cosine"], abs=0.01)
    assert verify(again.path, full=True)["damaged"] == []


def test_a_smaller_n_is_derived(coded):
    derived = Store.open(derive(coded["store"], 3)["store"])
    assert derived.fingerprinted["hidden"] == Store.open(coded["store"]).fingerprinted["hidden"]


@pytest.mark.parametrize("kind", ["int8", "pq"])
def test_two_workers_make_the_same(place, store, pq, coded, dictionary, tmp_path, forked_workers, kind):
    quantise = {"quantise": "pq", "bytes": 16} if kind == "pq" else {}
    (report,) = encode_hidden(replace(place, layer=2, workers=2, output=tmp_path, **quantise))
    assert shards(report["store"]) == shards((pq if kind == "pq" else store).path)
    if kind == "int8":
        (lsps,) = encode_lsp(codes_of(place, dictionary, hidden=report["store"], workers=2, output=tmp_path))
        assert shards(lsps["store"]) == shards(coded["store"])


# ---- learned from


def learning(place, store, **settings):
    given = {"hidden": str(store.path), "k": 40, "lam": LAM, "dictionary_tokens": 5_000, "device": "cpu"}
    return LearnConfig(**given | {"output": place.output} | settings)


def test_a_dictionary_is_learned_from_the_windows_that_a_teacher_would_read(place, store, tmp_path):
    common = {name: getattr(place, name) for name in ("teacher", "corpus", "max_length", "max_tokens", "unit_tokens")}
    of_text = teacher_job(LearnConfig(layer=2, output=tmp_path, **common), lambda *_, **__: None)
    of_store = open_job(learning(place, store), lambda *_, **__: None)
    chosen = [sample_windows(Inline(job), 5_000, 42) for job in (of_text, of_store)]
    assert [window[:3] for window in chosen[0]] == [window[:3] for window in chosen[1]] and len(chosen[0]) > 100
    training = len(store.split("train"))
    numbers = {window.number for window in chosen[1]}
    units, first = store.plan.units, 0
    for unit in units:
        count = store.record(unit.id).windows
        if unit.split == "held_out":
            assert not numbers & set(range(first, first + count))
        first += count
    assert first > training


def test_the_sample_is_the_stored_states_of_those_windows(place, store, tmp_path):
    """And what is learned from it is what is learned from the same rows in a file."""
    (report,) = learn_dictionary(learning(place, store))
    assert report["layer"] == 2 and learn_dictionary(learning(place, store))[0]["finished_before"]
    job = open_job(learning(place, store, output=tmp_path), lambda *_, **__: None)
    windows, rows = sample_windows(Inline(job), 5_000, 42), []
    reader = WindowReader(store, store.iter_records(), "whole")
    for window in windows:
        inside = np.flatnonzero(~np.isin(window.ids, store.special_ids["all"]))
        rows.append(reader.hidden_at(np.full(len(inside), window.number), inside).rows_Md)
    expected_Nd = np.concatenate(rows)[:5_000]
    (found_Nd,) = sample_hidden(Inline(job), load_teacher(job), [(2, tmp_path)])
    expected_Nd = expected_Nd / np.linalg.norm(expected_Nd, axis=1, keepdims=True)
    np.testing.assert_allclose(found_Nd, expected_Nd, atol=1e-3)
    given = {"k": 40, "lam": LAM, "device": "cpu", "output": tmp_path}
    (of_file,) = learn_dictionary(LearnConfig(hidden=str(tmp_path / "sample.npy"), **given))
    assert Dictionary.load(report["dictionary"]).fingerprint == Dictionary.load(of_file["dictionary"]).fingerprint


def test_a_dictionary_of_another_layer_is_mentioned(place, store, tmp_path):
    path = learn_dictionary(learning(place, store, output=tmp_path))[0]["dictionary"]
    assert {"layer": 2, "teacher": store.settings["teacher"]}.items() <= Dictionary.load(path).settings.items()
    common = {name: getattr(place, name) for name in ("teacher", "corpus", "max_length", "max_tokens", "unit_tokens")}
    for layer, said in ((1, 1), (2, 0)):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            encode_lsp(codes_of(place, path, layer=layer, output=tmp_path, dry_run=True, **common))
        named = [w for w in found if "learned from layer 2, but codes hidden states of layer 1" in str(w.message)]
        assert len(named) == said
    other = tmp_path / "of no layer"  # as one of vectors of a file
    random_dictionary().save(other)
    encode_lsp(codes_of(place, other, layer=1, output=tmp_path, dry_run=True, **common))


def test_encoding_learns_the_dictionary_that_learn_dictionary_does(place, store):
    (report,) = learn_dictionary(learning(place, store))
    config = codes_of(place, None, hidden=str(store.path), k=40, dictionary_tokens=5_000)
    (encoded,) = encode_lsp(config)
    assert encoded["dictionary"] == report["dictionary"] and encoded["layer"] == 2


# ---- what is refused


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"center": "mean"}, "--center mean applies only when a teacher reads text"),
        ({"layer": 1}, "--layer 1 applies only when .*, whose layer is 2. Omit"),
        ({"corpus": "x.txt"}, "--corpus x.txt applies only"),
        ({"max_length": 64}, "--max-length 64 applies only .* whose max-length is 32"),
        ({"max_tokens": 500}, "--max-tokens 500 applies only"),
        ({"documents_apart": True}, "--documents-apart True applies only"),
        ({"dtype": "bfloat16"}, "--dtype bfloat16 .* whose dtype is float32"),
        ({"teacher": "bundled"}, "--teacher bundled applies only"),
        ({"batch_tokens": 31, "max_length": 16}, "applies only"),
    ],
)
def test_settings_of_text_and_teacher_are_refused_in_one_line(place, store, dictionary, settings, problem):
    config = codes_of(place, dictionary, **{"hidden": str(store.path)} | settings)
    with pytest.raises(ValueError, match=problem) as caught:
        encode_lsp(config)
    assert "\n" not in str(caught.value) and "Omit it" in str(caught.value)


def test_a_flag_with_the_default_value_contradicts_the_store_too_and_a_recipe_does_not(store, dictionary, tmp_path):
    command = ["encode-lsp", "--hidden", store.path, "--dictionary", dictionary, "--output", tmp_path, "--dry-run"]
    for flag, problem in (("--layer=10", "whose layer is 2. Omit it"), ("--max-length=128", "whose max-length is 32")):
        refused = run_command([*command, flag], tmp_path)
        assert refused.returncode == 2 and problem in refused.stderr
    refused = run_command([*command, "--seed", 7], tmp_path)
    assert refused.returncode == 2 and "--seed says how a dictionary is learned, but --dictionary" in refused.stderr
    accepted = run_command([*command, "--recipe", "quickstart"], tmp_path, code=0)
    said = " ".join(accepted.stderr.split())
    assert f"text that of {store.path}: " in said and "layer 2 [store]" in said


def test_settings_that_are_the_stores_own_may_be_given(place, store, coded, dictionary):
    own = {"layer": 2, "max_length": 32, "dtype": "float32", "teacher": place.teacher}
    assert encode_lsp(codes_of(place, dictionary, hidden=str(store.path), **own))[0]["store"] == coded["store"]


def test_other_things_than_stores_of_hidden_states_are_refused(place, store, coded, dictionary, tmp_path):
    with pytest.raises(RequestError, match="is a store of lsp, not of hidden states. Make one:  .* encode-hidden"):
        encode_lsp(codes_of(place, dictionary, hidden=coded["store"]))
    with pytest.raises(StoreError, match="there is no such directory"):
        encode_lsp(codes_of(place, dictionary, hidden=str(tmp_path / "nothing")))
    with pytest.raises(ValueError, match="--center mean needs a teacher's hidden states at their own length"):
        learning(place, store, center="mean")
    centred = tmp_path / "centred"
    common = {name: getattr(place, name) for name in ("teacher", "corpus", "max_length", "max_tokens", "unit_tokens")}
    (report,) = learn_dictionary(
        LearnConfig(layer=2, k=40, center="mean", dictionary_tokens=5_000, device="cpu", output=centred, **common)
    )
    with pytest.raises(EncodeError, match="learned with --center mean, which needs hidden states of their own length"):
        encode_lsp(codes_of(place, report["dictionary"], hidden=str(store.path)))


def test_the_objectives_say_what_the_store_is_for(store):
    with pytest.raises(RunError, match="contains a teacher's hidden states .encode-hidden"):
        Mlsm(store)
    with pytest.raises(RunError, match="encode-hidden"):
        Kd(store)
    assert Mlm(store).outputs == store.vocab_size


# ---- what goes wrong


@contextmanager
def failing_at(place, store, chosen):
    """Hidden states that are not finite in these training windows."""
    batch = store.split("train").read(chosen)
    keys, works = {np.ascontiguousarray(row, np.int64).tobytes() for row in batch.ids}, Teacher.__call__

    def fails(teacher, ids_WL, real_WL, tokens_N, **how):
        states = works(teacher, ids_WL, real_WL, tokens_N, **how)
        bad_W = torch.tensor([row.tobytes() in keys for row in ids_WL.numpy()])
        for rows_Nd in states if isinstance(states, list | tuple) else [states]:
            rows_Nd[bad_W[tokens_N // ids_WL.shape[1]]] = torch.nan
        return states

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Teacher, "__call__", fails)
        yield


def test_documents_in_quarantine_stay_there_until_they_are_tried_again(place, store, coded, dictionary, tmp_path):
    chosen = [3, 40, 41]
    with failing_at(place, store, chosen):
        (report,) = encode_hidden(replace(place, layer=2, output=tmp_path))
    lacking = Store.open(report["store"])
    reader = lacking.split("train")
    batch = reader.read(range(len(reader)))
    tokens = np.nonzero((batch.documents >= 0) & ~np.isin(batch.ids, store.special_ids["all"]))
    lost_M = np.isin(tokens[0], chosen)
    assert np.array_equal(~lost_M, reader.hidden(batch, *tokens).coded_M) and report["quarantined"] >= 2
    config = codes_of(place, dictionary, hidden=report["store"], output=tmp_path)
    (lsps,) = encode_lsp(config)
    quarantined = [
        [record.quarantined for record in Store.open(one).records()] for one in (report["store"], lsps["store"])
    ]
    assert quarantined[0] == quarantined[1] and any(quarantined[0])
    found_MK, whole_MK = dense_rows(Store.open(lsps["store"])), dense_rows(Store.open(coded["store"]))
    assert not found_MK[lost_M].any() and np.array_equal(found_MK[~lost_M], whole_MK[~lost_M])
    (mended,) = encode_hidden(replace(place, layer=2, output=tmp_path, retry_quarantine=True))
    assert shards(mended["store"]) == shards(store.path)
    (again,) = encode_lsp(config)
    assert again["store"] == lsps["store"] and again["new_units"] == sum(map(bool, quarantined[0]))
    assert shards(again["store"]) == shards(coded["store"]) and not again["quarantined"]


def test_a_float16_store_with_windows_in_quarantine_is_learned_from(place, store, tmp_path, monkeypatch):
    """They are left out of the sample, as in other precisions: nothing of a store can be read in another one."""
    batch = store.split("train").read([3, 40])
    keys, works = {np.ascontiguousarray(row, np.int64).tobytes() for row in batch.ids}, Teacher.__call__

    def fails(teacher, ids_WL, *given, **how):
        if any(row.tobytes() in keys for row in ids_WL.numpy()):
            raise RuntimeError("this text is too much")
        return works(teacher, ids_WL, *given, **how)

    monkeypatch.setattr(Teacher, "__call__", fails)
    (report,) = encode_hidden(replace(place, layer=2, dtype="float16", output=tmp_path))
    assert report["quarantined"] >= 1
    learned = {"dictionary": None, "k": 40, "dictionary_tokens": 100_000}  # all of them
    codes = codes_of(place, **learned, hidden=report["store"], output=tmp_path)
    assert encode_lsp(replace(codes, dry_run=True))[0]["tokens"] == report["tokens"]
    (lsps,) = encode_lsp(codes)
    assert lsps["quarantined"] == report["quarantined"]


@pytest.mark.parametrize("verb", ["encode-hidden", "encode-lsp"])
def test_a_killed_run_goes_on_to_the_same_bytes(place, store, coded, dictionary, tmp_path, verb):
    code = (
        "import os, signal, sys\nfrom mlsm import __main__ as cli\nfrom shards.writer import UnitWriter\n"
        "writes = UnitWriter.write_block\n"
        "def dies(writer, **columns):\n"
        "    writes(writer, **columns)\n"
        "    if list(writer.files.units.glob('*.json')):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "UnitWriter.write_block = dies\ncli.main(sys.argv[1:])"
    )
    if verb == "encode-hidden":
        flags = ["--teacher", place.teacher, "--corpus", *place.corpus, "--layer", 2, "--max-length", 32]
        flags += ["--max-tokens", 40_000, "--unit-tokens", 10_000]
        again = lambda: encode_hidden(replace(place, layer=2, output=tmp_path))[0]  # noqa: E731
    else:
        flags = ["--hidden", store.path, "--dictionary", dictionary, "--lam", LAM, "--top-n", "all"]
        again = lambda: encode_lsp(codes_of(place, dictionary, hidden=str(store.path), output=tmp_path))[0]  # noqa: E731
    run = run_python(["-c", code, verb, *flags, "--batch-tokens", 2048, "--device", "cpu", "--output", tmp_path])
    assert run.returncode == -signal.SIGKILL, run.stderr
    units = next(tmp_path.glob("stores/*/units"))
    done = {path: path.stat().st_mtime_ns for path in units.glob("*.json")}
    report, whole = again(), store.path if verb == "encode-hidden" else coded["store"]
    assert 0 < len(done) < report["units"] and report["new_units"] == report["units"] - len(done)
    assert shards(report["store"]) == shards(whole)
    assert all(path.stat().st_mtime_ns == time_ns for path, time_ns in done.items())


@pytest.mark.parametrize("recipe", [True, False])
@pytest.mark.parametrize("kind", ["int8", "pq", "lsp"])
def test_damage_names_the_command_that_repairs_it(place, store, pq, coded, tmp_path, kind, recipe):
    whole = Path({"int8": store.path, "pq": pq.path, "lsp": coded["store"]}[kind])
    for path in {whole, store.path}:
        shutil.copytree(path, tmp_path / "runs" / "stores" / path.name)
    damaged = tmp_path / "runs" / "stores" / whole.name
    if not recipe:
        for path in damaged.glob("plans/*.yaml"):
            path.unlink()
    shard = sorted(damaged.glob("units/*.tar"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    (command,) = verify(damaged, repair=True)["commands"]
    assert command.startswith("mlsm encode-lsp" if kind == "lsp" else "mlsm encode-hidden")
    if kind == "lsp":
        hidden = tmp_path / "runs" / "stores" / store.path.name
        assert f"--hidden {hidden / 'plans' / store.plan_id}.json" in command
        hidden.rename(tmp_path / "elsewhere")
        (unknown,) = verify(damaged)["commands"]
        assert ("--hidden" in unknown) != recipe, "a recipe says where it was"
        (tmp_path / "elsewhere").rename(hidden)
    if not recipe and kind != "lsp":
        command += " --max-tokens 40000 --unit-tokens 10000"  # which it says are not known
    run_command([*shlex.split(command)[1:], "--batch-tokens", 2048], tmp_path, code=0)
    assert shards(damaged) == shards(whole) and verify(damaged, full=True)["damaged"] == []
    assert len(list((tmp_path / "runs" / "stores").iterdir())) == len({whole, store.path})


# ---- other ways to read


@pytest.mark.parametrize("how", [{"documents_apart": True}, {"packing": "pairs"}])
def test_the_way_of_reading_passes_on_to_the_codes(place, dictionary, tmp_path, how, teacher_directory):
    (report,) = encode_hidden(replace(place, layer=2, max_tokens=8_000, output=tmp_path, **how))
    (lsps,) = encode_lsp(codes_of(place, dictionary, hidden=report["store"], output=tmp_path))
    common = {name: getattr(place, name) for name in ("teacher", "corpus", "max_length", "unit_tokens")}
    config = codes_of(place, dictionary, layer=2, max_tokens=8_000, output=tmp_path, **common | how)
    taught = Store.open(encode_lsp(config)[0]["store"])
    found = dict(Store.open(lsps["store"]).fingerprinted)
    assert found.pop("hidden")["target"] == Store.open(report["store"]).target_id and found == taught.fingerprinted
    assert total_variation(dense_rows(Store.open(lsps["store"])), dense_rows(taught)).mean() < 0.05


def test_a_rough_teacher_says_so(place, tmp_path):
    (report,) = encode_hidden(replace(place, layer=2, dtype="bfloat16", max_tokens=5_000, output=tmp_path))
    effect = report["dtype_effect"]
    assert effect["tokens"] > 0 and 0 < effect["hidden"] < 0.1 and "tv" not in effect
    assert Store.open(report["store"]).fingerprinted["dtype"] == "bfloat16"


def test_the_commands_name_things_rightly(place, tmp_path):
    flags = ["--teacher", place.teacher, "--corpus", *place.corpus, "--max-length", 32, "--layer", 2]

    def mlsm(*words, code=0):
        return run_command(words, tmp_path, code=code)

    encode = ["encode-hidden", *flags, "--max-tokens", 20_000, "--unit-tokens", 8_000]
    said = mlsm(*encode).stdout
    assert "is finished" in said and "cosine 0.999" in said and "encode-lsp --hidden runs/stores/hidden-" in said
    assert "was finished already" in mlsm(*encode).stdout
    store = next((tmp_path / "runs" / "stores").glob("hidden-*"))
    shown = mlsm("show-shards").stdout
    assert "cosine" in shown and "LSP" not in shown and "dead" not in shown
    assert "tokens" in mlsm("show-shards", "--document", 2).stdout
    assert "about" in mlsm(*encode, "--dry-run").stdout
    assert "about" in mlsm(*encode, "--dry-run", "--quantise", "pq", "--bytes", 16).stdout
    learned = mlsm("learn-dictionary", "--hidden", store, "--k", 40, "--dictionary-tokens", 5_000).stdout
    assert f"--hidden {store}" in learned and "--teacher" not in learned and "--vectors" not in learned
    words = learned.strip().splitlines()[-1].split()
    assert "is finished" in mlsm(*words[words.index("encode-lsp") :]).stdout
    kept = [yaml.safe_load(path.read_text()) for path in (tmp_path / "runs" / "stores").glob("lsp-*/plans/*.yaml")]
    assert kept[0]["encode-lsp"]["hidden"] == str(store) and "corpus" not in kept[0]["encode-lsp"]
    assert "hidden states, which have no entries" in mlsm("derive-shards", store, "--top-n", 4, code=2).stderr
    train = ["train-student", "--store", store, "--objective", "mlm", "--max-steps", 1]
    assert "mlm" in mlsm(*train, "--encoder", "modernbert-2x128", "--batch-windows", 8).stdout


def test_a_pipe_in_the_place_of_centroids_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "centroids.npy")
    with pytest.raises(EncodeError, match=r"is not a codebook of product quantisation \(.*a pipe"):
        Codebook.load(tmp_path)
