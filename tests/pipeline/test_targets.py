"""What targets are made of: the solver, documents apart, segments, the teacher's precision, every non-zero.

Each against transformers' own model and an independent computation; a setting that is not used does not change any
name.
"""

import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from planted import unit_rows
from solvers.test_fista import numpy_fista
from stored import shards
from tiny_families import tiny_model
from tiny_teacher import lsp_settings
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

from mlsm.commands.show_shards import show as view
from mlsm.common.errors import EncodeError, PrecisionError, TeacherError
from mlsm.evaluation.inspection.lsps.texts import teacher_lsps
from mlsm.evaluation.inspection.stores import statistics
from mlsm.evaluation.studies.flops.solver import fista_flops, solver_flops
from mlsm.evaluation.studies.flops.stores import store_flops
from mlsm.terminal.encoding import encoding
from pipeline import estimate as estimating
from pipeline.commands import encode_logits, encode_lsp
from pipeline.config import EncodeConfig, EncodeLogitsConfig, LearnConfig
from pipeline.dictionary import Dictionary
from pipeline.encode import open_coder
from pipeline.executor import Context
from pipeline.job import teacher_job
from pipeline.learn import learn_dictionary
from pipeline.precision import total_variation
from pipeline.solvers import nonneg_lasso
from pipeline.solvers.prepared import prepare
from pipeline.solvers.problem import kkt_violation
from pipeline.targets import lsp
from pipeline.teacher.cut import Teacher, torch_dtype
from shards.derive import derive
from shards.reader import Store
from shards.verify import verify
from student.config import StudentConfig
from student.task import student_task

COMMON = ("teacher", "corpus", "max_length", "max_tokens", "unit_tokens", "batch_tokens", "device", "output")


@pytest.fixture(scope="module")
def place(tmp_path_factory, english_text, teacher_directory):
    """Settings with a dictionary of 300 random atoms."""
    directory = tmp_path_factory.mktemp("targets")
    return lsp_settings(
        directory,
        teacher_directory,
        english_text,
        directory / "runs",
        atoms=300,
        k=300,
        top_n="all",
        max_length=48,
        max_tokens=4_000,
        unit_tokens=2_000,
        batch_tokens=1024,
    )


@pytest.fixture(scope="module")
def plain(place):
    return Store.open(encode_lsp(place)[0]["store"])


def rows_of(store, windows=20):
    """Windows, where their coded tokens are, and those tokens' distributions as float64 (M, K)."""
    reader = store.split("train")
    batch = reader.read(np.arange(min(windows, len(reader))))
    coded_WL = (batch.documents >= 0) & ~np.isin(batch.ids, store.special_ids["all"])
    rows = reader.targets(batch, *np.nonzero(coded_WL))
    dense_MK = np.zeros((len(rows.tail), store.k))
    dense_MK[np.repeat(np.arange(len(rows.tail)), np.diff(rows.indptr)), rows.indices] = rows.weights
    return batch, coded_WL, dense_MK, rows


def hidden_of(place, batch, coded_WL, layer=2, **inputs):
    """Unit-length hidden states of transformers' full model at the coded tokens."""
    model = AutoModel.from_pretrained(place.teacher, dtype=torch.float32).eval()
    with torch.no_grad():
        states = model(
            torch.from_numpy(batch.ids).long(),
            torch.from_numpy(batch.documents >= 0).long(),
            output_hidden_states=True,
            **inputs,
        ).hidden_states[layer]
    hidden_Md = states.numpy()[coded_WL]
    return hidden_Md / np.linalg.norm(hidden_Md, axis=1, keepdims=True)


def distributions_of(place, hidden_Md):
    codes = nonneg_lasso(hidden_Md, Dictionary.load(place.dictionary).atoms_Kd, place.lam, tol=1e-5).dense(300)
    return codes / codes.sum(1, keepdims=True)


def common(place):
    return {name: getattr(place, name) for name in COMMON}


def test_settings_of_before_name_what_they_named(plain):
    """At its usual value, a setting that was added later is in neither the target's settings nor the plan's."""
    assert set(plain.fingerprinted) == {
        "kind",
        "format",
        "windowing",
        "teacher",
        "layer",
        "dictionary",
        "k",
        "lam",
        "top_n",
        "tolerance",
        "dtype",
    }
    assert set(plain.fingerprinted["windowing"]) <= {"tokenizer", "packing", "max_length", "held_out", "version"}


# ---- the solver


@pytest.fixture(scope="module")
def fista(place):
    return encode_lsp(replace(place, solver="fista", solver_steps=20))[0]


def test_fista_targets_are_those_of_plain_numpy(place, plain, fista):
    store = Store.open(fista["store"])
    assert store.plan_id == plain.plan_id and store.fingerprinted["solver"] == {"name": "fista", "steps": 20}
    assert "tolerance" not in store.fingerprinted and store.target_id != plain.target_id
    batch, coded_WL, found_MK, rows = rows_of(store, windows=4)
    atoms_Kd = Dictionary.load(place.dictionary).atoms_Kd
    codes_MK = numpy_fista(hidden_of(place, batch, coded_WL), atoms_Kd, place.lam, 20)
    expected_MK = codes_MK / codes_MK.sum(1, keepdims=True)
    assert np.abs(found_MK - expected_MK).sum(1).max() < 0.06, "8-bit weights apart, these are the same"
    exact_MK = distributions_of(place, hidden_of(place, batch, coded_WL))
    assert total_variation(found_MK, exact_MK).mean() > 0.1, "and not the exact ones"
    assert not rows.tail.any()


def test_the_record_says_how_far_fista_stopped_from_the_optimum(place, fista):
    store = Store.open(fista["store"])
    batch, coded_WL, *_ = rows_of(store, windows=len(store.split("train")))
    hidden_Md, atoms_Kd = hidden_of(place, batch, coded_WL), Dictionary.load(place.dictionary).atoms_Kd
    codes = nonneg_lasso(hidden_Md, atoms_Kd, place.lam, backend="fista", steps=20, tol=None)
    reached = kkt_violation(hidden_Md, atoms_Kd, codes, place.lam).max()
    recorded = max(record.statistics["max_kkt"] for record in store.records("train"))
    assert recorded == pytest.approx(reached, rel=1e-3) and recorded > 0.01
    assert fista["solver"] == {"name": "fista", "steps": 20}
    said = encoding([fista], place) + view(statistics(store), None)
    assert said.count("not optimal: 20 FISTA steps leave KKT violations up to") == 2 and "no KKT violation" not in said
    assert "name fista, steps 20" in said


def test_torch_as_the_solvers_backend_adds_to_the_same_store(place, plain, tmp_path):
    (report,) = encode_lsp(replace(place, solver_backend="torch", output=tmp_path / "torch"))
    store = Store.open(report["store"])
    assert store.target_id == plain.target_id and Path(store.path).name == Path(plain.path).name
    assert total_variation(rows_of(store)[2], rows_of(plain)[2]).max() < 0.03, "8-bit weights apart"
    said = [record.environment for record in (*store.records("train"), *plain.records("train"))]
    assert [one.get("solver_backend") for one in said] == ["torch"] * (len(said) // 2) + [None] * (len(said) // 2)
    product = prepare(Dictionary.load(place.dictionary).atoms_Kd).weight_Kd.dtype
    products = [one.get("correlations") for one in said]
    assert products == [None] * (len(said) // 2) + [str(product).removeprefix("torch.")] * (len(said) // 2)
    assert max(record.statistics["max_kkt"] for record in store.records("train")) <= place.tolerance


def test_a_penalty_that_leaves_every_code_empty_is_told_at_once(place, tmp_path):
    with pytest.raises(EncodeError, match="--lam 0.999 leaves every one of the first .* tokens with an empty code"):
        encode_lsp(replace(place, lam=0.999, tolerance=0.9, output=tmp_path))


def test_fista_has_no_other_backend(place):
    with pytest.raises(ValueError, match="--solver-backend torch belongs to --solver cd"):
        replace(place, solver="fista", solver_backend="torch")


def test_fista_works_on_workers(place, forked_workers, tmp_path):
    """Every new setting on two workers: the bytes of one process."""
    given = replace(place, solver="fista", solver_steps=3, documents_apart=True, dtype="bfloat16")
    (alone,) = encode_lsp(replace(given, output=tmp_path / "alone"))
    (together,) = encode_lsp(replace(given, output=tmp_path / "workers", workers=2))
    assert Path(alone["store"]).name == Path(together["store"]).name
    assert shards(alone["store"]) == shards(together["store"])
    assert alone["dtype_effect"] == pytest.approx(together["dtype_effect"])


def test_fista_of_several_layers_and_k_goes_on_where_it_stopped(place, tmp_path):
    given = replace(
        place,
        solver="fista",
        solver_steps=3,
        layer=(1, 2),
        k=(36, 40),
        dictionary=None,
        dictionary_tokens=500,
        dictionary_epochs=0.5,
        output=tmp_path,
    )
    first = encode_lsp(given)
    before = [shards(report["store"]) for report in first]
    assert len({report["store"] for report in first}) == 4
    next(Path(first[3]["store"]).glob("units/*.json")).unlink()
    again = encode_lsp(given)
    assert [report["new_units"] for report in again] == [0, 0, 0, 1]
    assert [shards(report["store"]) for report in again] == before


def test_an_estimate_encodes_as_the_command_would(place, monkeypatch):
    monkeypatch.setattr(estimating, "SECONDS", 0.1)
    given = replace(place, documents_apart=True, dtype="float16")
    cd, fista = (
        encode_lsp(replace(given, dry_run=True, **solver))[0] for solver in ({}, {"solver": "fista", "solver_steps": 3})
    )
    assert fista["bytes_per_token"] > 1.2 * cd["bytes_per_token"]


def test_the_dictionary_does_not_depend_on_the_solver(place, tmp_path):
    given = replace(place, dictionary=None, k=40, dictionary_tokens=2_000, dictionary_epochs=1, output=tmp_path)
    (cd,) = encode_lsp(given)
    (fista,) = encode_lsp(replace(given, solver="fista", solver_steps=3))
    assert fista["dictionary"] == cd["dictionary"] and fista["store"] != cd["store"]


def test_the_command_of_a_fista_store_can_be_given_again(fista):
    (path,) = Path(fista["store"]).glob("plans/*.yaml")
    settings = json.loads(path.read_text())["encode-lsp"]
    assert settings["solver_steps"] == 20 and "tolerance" not in settings
    path.rename(path.with_suffix(".away"))
    (unit,) = list(Path(fista["store"]).glob("units/*.json"))[:1]
    away = unit.rename(unit.with_suffix(".away"))
    (command,) = verify(fista["store"])["commands"]
    away.rename(unit)
    path.with_suffix(".away").rename(path)
    assert "--solver=fista --solver-steps=20" in command and "tolerance" not in command


def test_a_text_is_coded_as_the_store_was(place, fista):
    """What show-lsp --text and count-flops say of a store made with FISTA."""
    store, dictionary = Store.open(fista["store"]), Dictionary.load(place.dictionary)
    found = teacher_lsps(store, "the module returns a value")
    ids = torch.tensor([[store.special_ids["cls"], *found.ids_T, store.special_ids["sep"]]])
    model = AutoModel.from_pretrained(place.teacher, dtype=torch.float32).eval()
    with torch.no_grad():
        hidden = model(ids, output_hidden_states=True).hidden_states[2][0, 1:-1].numpy()
    codes = numpy_fista(hidden / np.linalg.norm(hidden, axis=1, keepdims=True), dictionary.atoms_Kd, place.lam, 20)
    for token, code_K in enumerate(codes):
        lsps, weights = found.row(token)
        np.testing.assert_allclose(weights, (code_K / code_K.sum())[lsps], atol=1e-4)
    coded = fista["coded_tokens"] + fista["empty_codes"]
    exact = Store.open(fista["store"])
    del exact.settings["solver"]
    difference = store_flops(store) - store_flops(exact)
    assert difference == pytest.approx(fista_flops(coded, 300, 32, 20) - solver_flops(coded, 300, 32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"solver_steps": 50}, "--solver-steps 50 belongs to --solver fista"),
        ({"solver": "fista", "tolerance": 1e-5}, "--tolerance 1e-05 belongs to --solver cd"),
        ({"solver": "fista", "solver_steps": 0}, "--solver-steps must be at least 1, found 0"),
        ({"packing": "pairs", "documents_apart": True}, "with --packing pairs a window holds two sentences"),
        ({"top_n": 300}, "between 1 and 255, or be `all`, found 300"),
    ],
)
def test_settings_that_contradict_each_other(place, change, message):
    with pytest.raises(ValueError, match=message):
        replace(place, **change)
    EncodeConfig(solver="fista", lam=1e-4)  # below the tolerance, which is not used


def test_a_resume_with_other_settings_is_refused(place, plain):
    """As a worker would find it that was given other settings than the store's."""

    for change in ({"solver": "fista"}, {"documents_apart": True}, {"lam": 0.2}, {"top_n": 4}, {"tolerance": 1e-5}):
        job = teacher_job(replace(place, **change), lambda *_, **__: None)
        with pytest.raises(EncodeError, match="made with other settings than those of this command: "):
            open_coder(Context(job), [plain.files.path], lsp.Lsp)


# ---- every non-zero


def test_of_more_than_255_non_zeros_the_largest_stay_and_tokens_are_counted(place, tmp_path):
    """One FISTA step with a small penalty leaves about half of the atoms: of 600 more than the format holds."""
    atoms = np.random.default_rng(1).normal(size=(600, 32)).astype(np.float32)
    atoms /= np.linalg.norm(atoms, axis=1, keepdims=True)
    Dictionary(atoms, [], "test", {}).save(tmp_path / "dictionary")
    given = replace(place, k=600, lam=1e-4, solver="fista", solver_steps=1, dictionary=tmp_path / "dictionary")
    (report,) = encode_lsp(replace(given, output=tmp_path / "runs"))
    store = Store.open(report["store"])
    batch, coded_WL, found_MK, rows = rows_of(store)
    codes_MK = numpy_fista(hidden_of(place, batch, coded_WL), atoms, 1e-4, 1)
    exact_MK = codes_MK / codes_MK.sum(1, keepdims=True)
    count_M = (exact_MK > 0).sum(1)
    assert (count_M > 255).mean() > 0.5 and np.diff(rows.indptr).max() == 255
    largest_MK = -np.sort(-exact_MK, axis=1)
    np.testing.assert_allclose(rows.tail, largest_MK[:, 255:].sum(1), rtol=0.1, atol=1e-4)
    for found_K, exact_K, last in zip(found_MK, exact_MK, largest_MK[:, 254], strict=True):
        assert exact_K[found_K > 0].min() >= last * 0.999 - 1e-9
    recorded = [record.statistics["truncated_tokens"] for record in store.records()]
    assert report["truncated_tokens"] == sum(recorded) > len(count_M) / 2
    assert f"{sum(recorded):,} tokens have more non-zeros than are stored" in encoding([report], given)


def test_all_logits_are_the_255_that_the_format_holds(place):
    given = EncodeLogitsConfig(**common(place), top_n="all")
    (every,) = encode_logits(given)
    (most,) = encode_logits(replace(given, top_n=255))
    store = Store.open(every["store"])
    assert most["finished_before"] and most["store"] == every["store"] and store.fingerprinted["top_n"] == 255
    assert every["nnz_per_token"] == 255 and every["mass_kept"] < 1


# ---- documents apart


def alone_states(place, batch, coded_WL, family=AutoModel, what=lambda out: out.hidden_states[2]):
    """What transformers' full model gives at the coded tokens, each document of a window in a pass of its own."""
    model, parts = family.from_pretrained(place.teacher, dtype=torch.float32).eval(), []
    for window in range(len(batch.ids)):
        for document in range(batch.documents[window].max() + 1):
            mine = batch.documents[window] == document
            with torch.no_grad():
                out = model(torch.from_numpy(batch.ids[window, mine])[None].long(), output_hidden_states=True)
            parts.append(what(out)[0].numpy()[coded_WL[window, mine]])
    return np.concatenate(parts)


def test_targets_of_documents_apart_are_those_of_separate_passes(place, plain):
    (report,) = encode_lsp(replace(place, documents_apart=True))
    store = Store.open(report["store"])
    assert store.fingerprinted == plain.fingerprinted | {"documents_apart": True} and store.plan_id == plain.plan_id
    batch, coded_WL, found_MK, _ = rows_of(store)
    several_W = batch.documents.max(1) > 0
    assert several_W.any() and not several_W.all()
    hidden_Md = alone_states(place, batch, coded_WL)
    expected_MK = distributions_of(place, hidden_Md / np.linalg.norm(hidden_Md, axis=1, keepdims=True))
    assert total_variation(found_MK, expected_MK).max() < 0.06
    in_several_M = np.broadcast_to(several_W[:, None], coded_WL.shape)[coded_WL]
    differ_M = total_variation(found_MK, rows_of(plain)[2])
    assert differ_M[in_several_M].mean() > 10 * differ_M[~in_several_M].mean()
    assert encode_lsp(replace(place, documents_apart=True))[0]["finished_before"]
    assert "documents apart" in view(statistics(store), None)


def test_logits_of_documents_apart_are_those_of_separate_passes(place):
    given = EncodeLogitsConfig(**common(place), top_n=20)
    (as_one,), (apart,) = encode_logits(given), encode_logits(replace(given, documents_apart=True))
    store = Store.open(apart["store"])
    assert store.fingerprinted == Store.open(as_one["store"]).fingerprinted | {"documents_apart": True}
    batch, coded_WL, found_MV, rows = rows_of(store)
    logits_MV = alone_states(place, batch, coded_WL, AutoModelForMaskedLM, lambda out: out.logits)
    exact_MV = torch.from_numpy(logits_MV).double().softmax(1).numpy()
    kept_MV = np.where(found_MV > 0, exact_MV, 0)
    np.testing.assert_allclose(rows.tail, 1 - kept_MV.sum(1), rtol=0.05, atol=1e-4)
    assert total_variation(found_MV, kept_MV).max() < 0.05


def test_the_dictionary_is_learned_from_documents_apart(place, tmp_path):
    given = LearnConfig(
        **common(place) | {"output": tmp_path}, layer=2, k=40, dictionary_tokens=2_000, dictionary_epochs=1
    )
    (as_one,), (apart,) = learn_dictionary(given), learn_dictionary(replace(given, documents_apart=True))
    assert as_one["dictionary"] != apart["dictionary"] and as_one["objective"] != apart["objective"]


def test_a_teacher_that_cannot_keep_documents_apart_is_refused_before_the_corpus_is_read(place, tmp_path):
    tiny_model("deberta-v2", "masked-lm").save_pretrained(tmp_path / "teacher")
    for command, config in ((encode_lsp, place), (encode_logits, EncodeLogitsConfig(**common(place)))):
        given = replace(config, teacher=str(tmp_path / "teacher"), corpus=("/nowhere",), documents_apart=True)
        with pytest.raises(TeacherError, match="--documents-apart: .* convolution"):
            command(given)


def test_training_says_when_store_and_student_do_not_see_alike(place, plain, caplog):
    (report,) = encode_lsp(replace(place, documents_apart=True))
    caplog.set_level(logging.INFO)
    for store, apart, objective, said in [
        (plain, True, "mlsm", "targets come from a teacher that saw the whole window"),
        (Store.open(report["store"]), False, "mtl", "a teacher that saw each document alone"),
        (plain, False, "mlsm", None),
        (Store.open(report["store"]), True, "mlsm", None),
        (plain, True, "mlm", None),  # words are of no teacher
        (Store.open(report["store"]), False, "mlm", None),
    ]:
        caplog.clear()
        known = {"store": store.path, "encoder": "bert-1x32", "objective": objective}
        student_task(StudentConfig(documents_apart=apart, **known), store)
        assert [said in record.message for record in caplog.records] == ([True] if said else [])


# ---- segments of pairs


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
    lines = [f"sentence {n} of the document {d} is about module {n * d}" for d in range(60) for n in range(4)]
    path = tmp_path_factory.mktemp("pairs") / "pairs.txt"
    path.write_text("\n".join("\n\n" * (i % 4 == 0) + line for i, line in enumerate(lines)))
    return str(path), lines


def test_a_pairs_second_sentence_is_segment_1_for_the_teacher(place, sentences):
    """Against transformers' tokenizer and model: ids and token_type_ids of two texts."""
    path, lines = sentences
    given = replace(place, corpus=(path,), packing="pairs", max_length=32, max_tokens=None)
    store = Store.open(encode_lsp(given)[0]["store"])
    assert store.fingerprinted["segments"] is True and "segments" not in store.fingerprinted["windowing"]
    batch, coded_WL, found_MK, _ = rows_of(store)
    tokenizer = AutoTokenizer.from_pretrained(place.teacher)
    cut = {"padding": "max_length", "truncation": True, "max_length": 32}
    pairs = tokenizer(lines[::2], lines[1::2], **cut, return_tensors="np", return_token_type_ids=True)
    types_of = {ids.tobytes(): types for ids, types in zip(pairs["input_ids"], pairs["token_type_ids"], strict=True)}
    types_WL = np.stack([types_of[ids.astype(np.int64).tobytes()] for ids in batch.ids])
    assert types_WL.any(1).all()
    told = {"token_type_ids": torch.from_numpy(types_WL)}
    expected_MK = distributions_of(place, hidden_of(place, batch, coded_WL, **told))
    assert total_variation(found_MK, expected_MK).max() < 0.06
    without_MK = distributions_of(place, hidden_of(place, batch, coded_WL))
    second_M = (types_WL == 1)[coded_WL]
    assert total_variation(found_MK, without_MK)[second_M].mean() > 0.02

    logits = EncodeLogitsConfig(**common(given), packing="pairs", top_n=20)
    store = Store.open(encode_logits(logits)[0]["store"])
    assert store.fingerprinted["segments"] is True
    model = AutoModelForMaskedLM.from_pretrained(place.teacher, dtype=torch.float32).eval()
    with torch.no_grad():
        ids, real = torch.from_numpy(batch.ids).long(), torch.from_numpy(batch.documents >= 0).long()
        exact_MV = model(ids, real, **told).logits.double().softmax(-1).numpy()[coded_WL]
    found_MV = rows_of(store)[2]
    assert total_variation(found_MV, np.where(found_MV > 0, exact_MV, 0)).max() < 0.05


def test_a_teacher_of_one_token_type_reads_pairs_as_before(place, sentences, tmp_path):
    teacher = tmp_path / "teacher"
    AutoTokenizer.from_pretrained(place.teacher).save_pretrained(teacher)
    tiny_model("bert", "masked-lm", type_vocab_size=1, vocab_size=600).save_pretrained(teacher)
    given = replace(
        place,
        teacher=str(teacher),
        corpus=(sentences[0],),
        packing="pairs",
        max_length=32,
        max_tokens=None,
        output=tmp_path,
    )
    assert "segments" not in Store.open(encode_lsp(given)[0]["store"]).fingerprinted


def test_the_dictionary_of_pairs_is_learned_with_segments(place, sentences, tmp_path, monkeypatch):
    given = LearnConfig(
        **common(place) | {"output": tmp_path, "corpus": (sentences[0],), "max_length": 32},
        packing="pairs",
        layer=2,
        k=40,
        dictionary_tokens=1_000,
        dictionary_epochs=1,
    )
    (with_segments,) = learn_dictionary(given)
    load = Teacher.load

    def load_without_segments(*arguments, **options):
        teacher = load(*arguments, **options)
        teacher.segments = 1
        return teacher

    monkeypatch.setattr(Teacher, "load", load_without_segments)
    (without,) = learn_dictionary(given)
    assert with_segments["dictionary"] != without["dictionary"]
    assert with_segments["objective"] != without["objective"]


# ---- precision


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_auto_is_float16_on_a_gpu_and_float32_elsewhere(device):
    assert torch_dtype("auto", torch.device(device)) == {"cpu": torch.float32, "cuda": torch.float16}[device]


@pytest.fixture(scope="module")
def halves(place):
    return {dtype: encode_lsp(replace(place, dtype=dtype))[0] for dtype in ("float16", "bfloat16")}


def test_the_record_says_what_the_dtype_changes(place, plain, halves):
    """Against transformers' own model in both precisions, on the first eight windows of each unit."""
    assert "dtype_effect" not in plain.report()
    for dtype, report in halves.items():
        store = Store.open(report["store"])
        record = store.records("train")[0]
        batch, coded_WL, *_ = rows_of(store, windows=8)
        states = {}
        for name in (dtype, "float32"):
            model = AutoModel.from_pretrained(place.teacher, dtype=getattr(torch, name)).eval()
            with torch.no_grad():
                ids, real = torch.from_numpy(batch.ids).long(), torch.from_numpy(batch.documents >= 0).long()
                rows = model(ids, real, output_hidden_states=True).hidden_states[2].float().numpy()[coded_WL]
            states[name] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        tv_M = total_variation(*(distributions_of(place, rows) for rows in states.values()))
        apart = np.linalg.norm(states[dtype] - states["float32"], axis=1)
        found = record.statistics
        assert found["dtype_tokens"] == len(tv_M)
        assert found["dtype_hidden"] / len(tv_M) == pytest.approx(apart.mean(), rel=0.1)
        assert found["dtype_tv"] / len(tv_M) == pytest.approx(tv_M.mean(), rel=0.25)
        effect = report["dtype_effect"]
        assert effect["tokens"] == sum(r.statistics["dtype_tokens"] for r in store.records())
        assert f"against float32: total variation {effect['tv']:.4f}" in encoding([report], place)
        assert "against float32" in view(statistics(store), None)
    fine, coarse = (halves[dtype]["dtype_effect"] for dtype in ("float16", "bfloat16"))
    assert 0 < fine["tv"] < coarse["tv"] / 2 and 0 < fine["hidden"] < coarse["hidden"] / 2
    derived = Store.open(derive(halves["float16"]["store"], 4)["store"]).report()
    assert derived["dtype_effect"] == pytest.approx(fine)


@pytest.mark.parametrize(("tolerance", "used"), [(1e-3, 1e-5), (1e-6, 1e-6)])
def test_precisions_are_compared_by_codes_more_exact_than_the_stored_ones(place, monkeypatch, tolerance, used):
    """Otherwise the figure would be the solver's own error: two codes of one row may differ by the tolerance."""
    found = []

    def record(*arguments, tol, **options):
        found.append(tol)
        return nonneg_lasso(*arguments, tol=tol, **options)

    monkeypatch.setattr(lsp, "nonneg_lasso", record)
    rng = np.random.default_rng(0)
    atoms, rows = unit_rows(rng.normal(size=(64, 32))), unit_rows(rng.normal(size=(20, 32)))
    teacher = Teacher.load(place.teacher, 2)
    config = replace(place, tolerance=tolerance)
    target = lsp.Lsp(config, teacher, 2, Dictionary(atoms, [], "given", {}))
    target.prepare()
    pair = rows, unit_rows(rows + 1e-3 * rng.normal(size=rows.shape))
    variation = target.variation(*map(torch.from_numpy, pair), teacher)
    assert found == [used, used]
    exact = (nonneg_lasso(of, atoms, config.lam, tol=1e-6).dense(64) for of in pair)
    np.testing.assert_allclose(variation, total_variation(*exact), atol=1e-3)


def test_logits_say_it_too(place):
    given = EncodeLogitsConfig(**common(place), top_n=20, dtype="bfloat16")
    (report,) = encode_logits(given)
    store = Store.open(report["store"])
    batch, coded_WL, *_ = rows_of(store, windows=8)
    exact = []
    for dtype in (torch.bfloat16, torch.float32):
        model = AutoModelForMaskedLM.from_pretrained(place.teacher, dtype=dtype).eval()
        with torch.no_grad():
            ids, real = torch.from_numpy(batch.ids).long(), torch.from_numpy(batch.documents >= 0).long()
            exact.append(model(ids, real).logits.float().softmax(-1).double().numpy()[coded_WL])
    statistics = store.records("train")[0].statistics
    assert statistics["dtype_tokens"] == coded_WL.sum()
    assert statistics["dtype_tv"] / coded_WL.sum() == pytest.approx(total_variation(*exact).mean(), rel=0.25)


@pytest.fixture
def overflowing(place, tmp_path):
    """The teacher with numbers in layer 2 that float16 cannot hold, float32 and bfloat16 can."""
    model = AutoModelForMaskedLM.from_pretrained(place.teacher)
    with torch.no_grad():
        model.base_model.encoder.layer[1].output.dense.weight *= 1e7
    model.save_pretrained(tmp_path / "teacher")
    AutoTokenizer.from_pretrained(place.teacher).save_pretrained(tmp_path / "teacher")
    return {"teacher": str(tmp_path / "teacher"), "output": tmp_path / "runs"}


def test_an_overflow_of_float16_ends_the_run_and_quarantines_nothing(place, overflowing):
    logits = replace(EncodeLogitsConfig(**common(place)), **overflowing)
    dictionary = LearnConfig(**common(place) | overflowing, layer=2, k=40, dictionary_tokens=1_000)
    for command, config in (
        (encode_lsp, replace(place, **overflowing)),
        (encode_logits, logits),
        (learn_dictionary, dictionary),
    ):
        with pytest.raises(PrecisionError, match="not finite in float16.*--dtype bfloat16.*--dtype float32"):
            command(replace(config, dtype="float16"))
    assert not list(overflowing["output"].glob("stores/*/units/*"))
    for dtype in ("bfloat16", "float32"):
        (report,) = encode_lsp(replace(place, **overflowing, dtype=dtype))
        assert report["quarantined"] == 0 and report["coded_tokens"] > 0


def test_auto_points_to_the_stores_of_another_dtype(place, plain, halves, caplog, tmp_path):
    caplog.set_level(logging.INFO)
    (made,) = encode_lsp(replace(place, dtype="bfloat16", output=tmp_path))
    assert not [record for record in caplog.records if "a new store, not" in record.message]
    encode_lsp(replace(place, dtype="auto", output=tmp_path))
    (said,) = [record.message for record in caplog.records if "a new store, not" in record.message]
    assert "computes in float32" in said and made["store"] in said and "--dtype bfloat16 would add to that one" in said
    assert encode_lsp(replace(place, dtype="bfloat16", output=tmp_path))[0]["finished_before"]
    caplog.clear()
    encode_lsp(replace(place, dtype="auto", output=tmp_path))
    assert not [record for record in caplog.records if "a new store, not" in record.message]


def test_a_repair_command_names_the_dtype_of_the_store(halves):
    (unit,) = list(Path(halves["float16"]["store"]).glob("units/*.json"))[:1]
    away = unit.rename(unit.with_suffix(".away"))
    (command,) = verify(halves["float16"]["store"])["commands"]
    away.rename(unit)
    assert "--recipe" in command and "--dtype float16" in command
