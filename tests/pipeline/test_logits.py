"""Vocabulary distributions against the dense softmax of the full model in float64, and what they share with LSPs."""

import shutil
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from minilm import minilm_dir
from preloaded import run_command, run_python
from safetensors.torch import load_file, save_file
from stored import shards
from tiny_families import LAYERS, edit_weights, tiny_model, windows
from transformers import AutoModelForMaskedLM

from mlsm.common.errors import EncodeError, RunError, TeacherError
from pipeline.commands import encode_logits
from pipeline.config import EncodeLogitsConfig
from pipeline.encode import LAYOUTS
from pipeline.targets import logits as logits_module
from pipeline.targets.logits import PASSES, assign_passes, most_probable
from pipeline.teacher import FAMILIES, Teacher, teacher_fingerprint
from pipeline.teacher.masked_lm import MaskedLm
from shards.derive import derive
from shards.reader import Store
from shards.schema import LOGITS_OCTAVES
from shards.verify import verify
from student.objectives.mlsm import Mlsm

pytestmark = pytest.mark.promise("a checkpoint of which …")

ROOT = Path(__file__).resolve().parents[2]


# ---- the head


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_full_model(family, tmp_path):
    model = tiny_model(family, "masked-lm")
    model.save_pretrained(tmp_path)
    teacher = MaskedLm.load(tmp_path)
    assert (teacher.layer, teacher.num_layers) == (LAYERS, LAYERS)
    for ids, attention in windows():
        with torch.no_grad():
            expected = model(input_ids=ids, attention_mask=attention.long()).logits[attention]
        states = teacher(ids, attention)[attention]
        found = teacher.logits(states)
        assert found.dtype == torch.float32 and found.shape == (len(states), teacher.vocabulary) == expected.shape
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)
        assert expected.std() > 0.1


def test_the_encoder_is_the_one_that_encode_lsp_cuts(tmp_path):
    tiny_model("modernbert", "masked-lm").save_pretrained(tmp_path)
    ids, attention = windows()[1]
    whole, cut = MaskedLm.load(tmp_path), Teacher.load(tmp_path, LAYERS)
    assert torch.equal(whole(ids, attention)[attention], cut(ids, attention)[attention])
    assert whole.fingerprint == cut.fingerprint == teacher_fingerprint(tmp_path)


def test_low_precision_gives_float32_logits(tmp_path):
    tiny_model("bert", "masked-lm").save_pretrained(tmp_path)
    exact, rough = MaskedLm.load(tmp_path), MaskedLm.load(tmp_path, dtype="bfloat16")
    states = torch.randn(8, 32, generator=torch.Generator().manual_seed(3))
    found = rough.logits(states)
    assert rough.dtype == torch.bfloat16 and found.dtype == torch.float32
    torch.testing.assert_close(found, exact.logits(states), rtol=0.1, atol=0.2)


def test_a_teacher_without_a_head_is_refused(tmp_path):
    tiny_model("bert").save_pretrained(tmp_path)
    for name in (tmp_path, minilm_dir()):
        with pytest.raises(TeacherError, match="no masked-LM head.*lacks cls.predictions.*mlsm encode-lsp") as caught:
            MaskedLm.load(name)
        assert "\n" not in str(caught.value)


def test_a_model_that_transformers_would_compute_as_another_is_refused(tmp_path):
    tiny_model("bert", "masked-lm").save_pretrained(tmp_path)
    name = f"bert.encoder.layer.{LAYERS - 1}.output.adapter.weight"
    edit_weights(tmp_path, lambda weights: weights | {name: torch.ones(2)})
    with pytest.raises(TeacherError, match=f"no place for .{name}"):
        MaskedLm.load(tmp_path)


def test_a_decoder_that_is_not_tied_must_be_in_the_checkpoint(tmp_path):
    model = tiny_model("bert", "masked-lm", tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    states = torch.randn(8, 32, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        torch.testing.assert_close(MaskedLm.load(tmp_path).logits(states), model.cls(states), rtol=0, atol=2e-4)

    edit_weights(tmp_path, lambda weights: {k: v for k, v in weights.items() if k != "cls.predictions.decoder.weight"})
    with pytest.raises(TeacherError, match="lacks cls.predictions.decoder.weight"):
        MaskedLm.load(tmp_path)


def test_a_checkpoint_that_lacks_the_encoder_has_no_headless_teacher(tmp_path):
    tiny_model("bert", "masked-lm").save_pretrained(tmp_path)
    edit_weights(tmp_path, lambda weights: {f"other.{name}": tensor for name, tensor in weights.items()})
    with pytest.raises(TeacherError, match="the checkpoint lacks"):
        MaskedLm.load(tmp_path)


# ---- the n most probable


@pytest.mark.parametrize("n", [1, 3, 8, 19, 20])
@pytest.mark.parametrize("levels", [2, 5, 1000])
def test_the_most_probable_against_a_stable_sort(n, levels):
    """Few levels: many equal logits, of which the lower ids stay."""
    logits = torch.randint(levels, (200, 20), generator=torch.Generator().manual_seed(n)) * (10 / levels)
    ids, weights, tail, log_sum = most_probable(logits.clone(), n)
    exact = torch.softmax(logits.double(), 1).numpy()
    for row in range(200):
        kept = np.sort(np.argsort(-logits[row].numpy(), kind="stable")[:n])
        assert np.array_equal(ids[row], kept)
        np.testing.assert_allclose(weights[row], exact[row, kept], rtol=3e-6)
        np.testing.assert_allclose(tail[row], np.delete(exact[row], kept).sum(), rtol=3e-6)
    torch.testing.assert_close(log_sum, logits.logsumexp(1))


def test_a_tiny_tail_is_not_lost_in_rounding():
    logits = torch.full((1, 1000), -30.0, dtype=torch.float64)
    logits[0, 5] = 0.0
    exact = torch.softmax(logits, 1)[0]
    _, weights, tail, _ = most_probable(logits.float(), 4)
    assert tail[0].item() == pytest.approx(1 - exact[5].item() - 3 * exact[0].item(), rel=1e-5) and 0 < tail[0] < 1e-9
    assert weights[0, 0].item() == pytest.approx(exact[0].item(), rel=1e-5)


def test_logits_that_are_not_finite_show():
    logits = torch.zeros(3, 9)
    logits[1, 4], logits[2, 0] = torch.inf, torch.nan
    assert most_probable(logits, 2)[3].isfinite().tolist() == [True, False, False]


# ---- a store


@pytest.fixture(scope="module")
def peaked_teacher(tmp_path_factory, teacher_directory):
    """The tiny teacher with larger weights, so that its distributions differ from uniform and from each other."""
    directory = tmp_path_factory.mktemp("peaked")
    for file in Path(teacher_directory).iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    weights = load_file(directory / "model.safetensors")
    sharper = {name: tensor * 12 if "word_embeddings" in name else tensor for name, tensor in weights.items()}
    save_file(sharper, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def place(tmp_path_factory, english_text, peaked_teacher):
    return EncodeLogitsConfig(
        teacher=str(peaked_teacher),
        corpus=(str(english_text),),
        top_n=12,
        max_length=32,
        max_tokens=40_000,
        unit_tokens=10_000,
        batch_tokens=2048,
        device="cpu",
        output=tmp_path_factory.mktemp("logits"),
    )


@pytest.fixture(scope="module")
def report(place):
    return encode_logits(place)[0]


def exact_distributions(place, batch):
    """Dense softmax of the full model of transformers, computed in float64."""
    full = AutoModelForMaskedLM.from_pretrained(place.teacher, dtype=torch.float64).eval()
    with torch.no_grad():
        attention = torch.from_numpy(batch.documents >= 0).long()
        return torch.softmax(full(torch.from_numpy(batch.ids).long(), attention).logits, -1).numpy()


def test_stored_rows_are_the_exact_ones_to_eight_bits(place, report):
    store = Store.open(report["store"])
    reader = store.split("train")
    batch = reader.read(np.arange(len(reader)))
    window_M, position_M = np.nonzero((batch.documents >= 0) & ~np.isin(batch.ids, store.special_ids["all"]))
    rows = reader.targets(batch, window_M, position_M)
    exact_MV = exact_distributions(place, batch)[window_M, position_M]
    assert np.all(np.diff(rows.indptr) == 12) and len(window_M) > 20_000
    top_M = np.sort(np.argpartition(-exact_MV, 11, axis=1)[:, :12], axis=1)
    same_M = (rows.indices.reshape(-1, 12) == top_M).all(1)
    ends = -np.sort(-exact_MV, axis=1)[~same_M][:, 11:13]
    assert same_M.mean() > 0.999 and np.all(ends[:, 0] - ends[:, 1] < 1e-6), "near ties alone may differ"

    kept_M = np.take_along_axis(exact_MV, top_M, 1)[same_M]
    stored_M = rows.weights.reshape(-1, 12)[same_M].astype(np.float64)
    tail_M = 1 - kept_M.sum(1)
    assert 0.05 < tail_M.mean() < 0.9
    np.testing.assert_allclose(rows.tail[same_M], tail_M, rtol=0.03)
    code = (stored_M * np.log(stored_M / (kept_M / kept_M.sum(1, keepdims=True)))).sum(1)
    assert 0 <= code.mean() < 3e-4, "what the 8-bit weights cost, in nats"
    whole = (stored_M * np.log(stored_M / kept_M)).sum(1).mean()
    fidelity = report["fidelity"]
    assert fidelity["tokens"] > 100 and fidelity["kl"] == pytest.approx(whole, rel=0.05)
    assert fidelity["tail"] == pytest.approx(tail_M.mean(), rel=0.05)
    assert report["mass_kept"] == pytest.approx(1 - tail_M.mean(), rel=0.01)


@pytest.fixture(scope="module")
def masked(place, tmp_path_factory):
    """A store of the same text with every token hidden from the teacher, and its settings."""
    config = replace(place, masked=True, max_tokens=8_000, output=tmp_path_factory.mktemp("masked"))
    return Store.open(encode_logits(config)[0]["store"]), config


def test_every_token_is_hidden_in_one_pass_whatever_stands_in_other_windows(masked):
    store, _ = masked
    batch = store.split("train").read(np.arange(50))
    ids_WL = batch.ids.astype(np.int64)
    tokens_N = np.flatnonzero((batch.documents >= 0) & ~np.isin(ids_WL, store.special_ids["all"]))
    pass_N, window_N = assign_passes(ids_WL, tokens_N), tokens_N // ids_WL.shape[1]
    shares = [np.bincount(pass_N[window_N == window], minlength=PASSES) for window in range(50)]
    assert all(counts.max() - counts.min() <= 1 for counts in shares) and sum(counts.sum() for counts in shares) > 1000
    alone = [assign_passes(ids_WL[[w]], tokens_N[window_N == w] % ids_WL.shape[1]) for w in range(50)]
    assert np.array_equal(np.concatenate(alone), pass_N)
    full = [tuple(one) for one in alone if len(one) == 30]
    assert len(set(full)) == len(full) > 30, "no fixed pattern of places"


def test_a_batch_without_coded_tokens_has_no_masked_rows(masked):
    """Such as a window of unknown words only."""
    _, config = masked
    teacher, ids_WL = MaskedLm.load(config.teacher), torch.ones((1, 8), dtype=torch.int64)
    nowhere = torch.empty(0, dtype=torch.int64)
    none = SimpleNamespace(ids_WL=ids_WL, real_WL=None, tokens_N=nowhere, extra_inputs={})
    assert logits_module.masked_rows(teacher, none, 4).shape == (0, teacher.hidden_size)


def test_masked_rows_are_those_of_a_plain_loop_over_the_passes(masked, report):
    """Each window alone through the full model of transformers, in float64, once a pass."""
    store, config = masked
    reader = store.split("train")
    batch = reader.read(np.arange(len(reader)))
    full = AutoModelForMaskedLM.from_pretrained(config.teacher, dtype=torch.float64).eval()
    coded_WL = (batch.documents >= 0) & ~np.isin(batch.ids, store.special_ids["all"])
    exact_WLV = np.zeros((*batch.ids.shape, full.config.vocab_size))
    for window, ids_L in enumerate(batch.ids.astype(np.int64)):
        places = np.flatnonzero(coded_WL[window])
        passes = assign_passes(ids_L[None], places)
        for number in range(7):
            hidden = places[passes == number]
            text = torch.from_numpy(ids_L).clone()[None]
            text[0, hidden] = store.special_ids["mask"]
            with torch.no_grad():
                logits = full(text, torch.from_numpy(batch.documents[window] >= 0).long()[None]).logits[0, hidden]
            exact_WLV[window, hidden] = torch.softmax(logits, -1).numpy()
    window_M, position_M = np.nonzero(coded_WL)
    rows, exact_MV = reader.targets(batch, window_M, position_M), exact_WLV[window_M, position_M]
    assert len(window_M) > 4_000 and np.allclose(exact_MV.sum(1), 1)
    top_M = np.sort(np.argpartition(-exact_MV, 11, axis=1)[:, :12], axis=1)
    same_M = (rows.indices.reshape(-1, 12) == top_M).all(1)
    assert same_M.mean() > 0.999
    kept_M = np.take_along_axis(exact_MV, top_M, 1)[same_M]
    np.testing.assert_allclose(rows.weights.reshape(-1, 12)[same_M] * kept_M.sum(1, keepdims=True), kept_M, rtol=0.05)
    np.testing.assert_allclose(rows.tail[same_M], 1 - kept_M.sum(1), rtol=0.03)
    seen_MV = exact_distributions(config, batch)[window_M, position_M]
    assert np.abs(exact_MV - seen_MV).sum(1).mean() > 0.1, "and not those of a teacher that sees the tokens"


def test_a_masked_store_is_another_one_and_says_so(masked, report):
    store, config = masked
    unmasked = Store.open(report["store"])
    assert store.path.name.startswith(f"logits-{Path(config.teacher).name}-masked-")
    settings, usual = store.fingerprinted, unmasked.fingerprinted
    assert settings == usual | {"masked_passes": 7} and "masked_passes" not in usual
    command, *_ = (yaml.safe_load(path.read_text()) for path in store.path.glob("plans/*.yaml"))
    before, *_ = (yaml.safe_load(path.read_text()) for path in unmasked.path.glob("plans/*.yaml"))
    assert command["encode-logits"]["masked"] is True and "masked" not in before["encode-logits"]
    assert encode_logits(config)[0]["finished_before"]


def test_the_target_says_what_it_is(place, report):
    store = Store.open(report["store"])
    assert store.path.name.startswith(f"logits-{Path(place.teacher).name}-") and store.kind == "logits"
    settings = store.fingerprinted
    assert settings["teacher"] == teacher_fingerprint(place.teacher) and settings["top_n"] == 12
    assert settings["octaves"] == store.weight_octaves == LOGITS_OCTAVES == 24 and settings["dtype"] == "float32"
    assert store.k == settings["k"] == 600 and store.settings["teacher_name"] == place.teacher
    assert report["head_seconds"] > 0 and report["teacher_seconds"] > 0 and not report["solver_seconds"]
    assert verify(store.path, full=True)["damaged"] == []
    assert encode_logits(place)[0]["finished_before"]


def test_chunks_and_layouts_do_not_show_in_the_bytes(place, report, tmp_path, monkeypatch):
    """The head on 128 tokens at a time, and each stage in a thread of its own."""
    monkeypatch.setattr(logits_module, "LOGITS_BYTES", 128 * 4 * 600)
    seen, works = set(), MaskedLm.logits

    def watched(teacher, rows_Cd):
        seen.add(len(rows_Cd))
        return works(teacher, rows_Cd)

    monkeypatch.setattr(MaskedLm, "logits", watched)
    for name, layout in {"alone": dict.fromkeys(LAYOUTS["cpu"], 0), "gpu": LAYOUTS["cuda"]}.items():
        monkeypatch.setitem(LAYOUTS, "cpu", layout)
        again = encode_logits(replace(place, output=tmp_path / name))[0]
        assert shards(again["store"]) == shards(report["store"])
    assert seen == {1, 128}, "the 1 is how the vocabulary is counted"


def test_a_smaller_n_is_derived(place, report):
    derived = Store.open(derive(report["store"], 5)["store"])
    alone = Store.open(encode_logits(replace(place, top_n=5))[0]["store"])
    assert derived.kind == "logits" and derived.weight_octaves == 24 and derived.plan_id == alone.plan_id
    first, second = (store.split("train") for store in (derived, alone))
    batch = first.read(np.arange(40))
    window_M, position_M = np.nonzero(batch.documents >= 0)
    one, other = (reader.targets(batch, window_M, position_M) for reader in (first, second))
    assert np.array_equal(one.indptr, other.indptr)
    assert (one.indices == other.indices).mean() > 0.9, "entries of one 8-bit code, 7 % wide, may change places"
    np.testing.assert_allclose(one.tail, other.tail, rtol=0.06)


def test_a_student_of_lsps_refuses_the_store(report):
    with pytest.raises(RunError, match="its? vocabulary .encode-logits.*encode-lsp"):
        Mlsm(Store.open(report["store"]))


# ---- what goes wrong


def test_more_entries_than_words(place, tmp_path, peaked_teacher, monkeypatch):
    for top_n in (0, 256):
        with pytest.raises(ValueError, match=f"--top-n must lie between 1 and 255, or be `all`, found {top_n}"):
            replace(place, top_n=top_n)
    monkeypatch.setattr(MaskedLm, "logits", lambda teacher, rows: torch.zeros(len(rows), 10))
    with pytest.raises(EncodeError, match="--top-n 12, but .* a vocabulary of 10. Use --top-n 10"):
        encode_logits(replace(place, output=tmp_path))


def test_no_head_is_found_out_before_the_corpus_is_read(place, tmp_path):
    with pytest.raises(TeacherError, match="no masked-LM head"):
        encode_logits(replace(place, teacher=str(minilm_dir()), corpus=("/nowhere/*.txt",), output=tmp_path))


def test_a_teacher_that_masks_enter_later_is_not_asked_with_masks(tmp_path):
    model = tiny_model("bert", "masked-lm")
    model.config.mask_later = {"layer": 2, "mask_token_id": 4}
    model.save_pretrained(tmp_path)
    config = EncodeLogitsConfig(teacher=str(tmp_path), corpus=("/nowhere/*.txt",), masked=True, output=tmp_path)
    with pytest.raises(TeacherError, match="--masked: .* trained with --mask-later.*or omit --masked") as caught:
        encode_logits(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("how", ["teacher", "head"])
def test_failing_windows_lose_their_rows_and_nothing_else_changes(place, report, tmp_path, monkeypatch, how):
    """Hidden states or logits that are not finite, planted by the content of a window."""
    clean = Store.open(report["store"]).split("train")
    expected = clean.read(np.arange(len(clean)))
    chosen = [3, 40, 41]
    keys = {np.ascontiguousarray(expected.ids[number], np.int64).tobytes() for number in chosen}
    works, predicts = Teacher.__call__, MaskedLm.logits

    def teaches(teacher, ids_WL, real_WL, tokens_N):
        hidden_Nd = works(teacher, ids_WL, real_WL, tokens_N).clone()
        bad_W = np.array([row.tobytes() in keys for row in ids_WL.numpy()])
        hidden_Nd[torch.from_numpy(bad_W[tokens_N.numpy() // ids_WL.shape[1]])] = torch.nan if how == "teacher" else 1e9
        return hidden_Nd

    def heads(teacher, rows_Cd):
        logits_CV = predicts(teacher, rows_Cd).clone()
        logits_CV[(rows_Cd == 1e9).all(1), 7] = torch.inf
        return logits_CV

    monkeypatch.setattr(Teacher, "__call__", teaches)
    monkeypatch.setattr(MaskedLm, "logits", heads)
    failed = encode_logits(replace(place, output=tmp_path))[0]
    store = Store.open(failed["store"])
    found = store.split("train")
    window_M, position_M = np.nonzero(expected.documents >= 0)
    rows, whole = (reader.targets(expected, window_M, position_M) for reader in (found, clean))
    lost_M = np.isin(window_M, chosen)
    assert not np.diff(rows.indptr)[lost_M].any() and failed["quarantined"] >= 2
    assert np.array_equal(np.diff(rows.indptr)[~lost_M], np.diff(whole.indptr)[~lost_M])
    kept_E = np.repeat(~lost_M, np.diff(whole.indptr))
    assert np.array_equal(rows.indices, whole.indices[kept_E]) and np.array_equal(rows.weights, whole.weights[kept_E])
    reasons = {entry["reason"] for record in store.records() for entry in record.quarantined}
    assert all(("hidden states" if how == "teacher" else "logits") in reason for reason in reasons)
    monkeypatch.undo()
    again = encode_logits(replace(place, output=tmp_path, retry_quarantine=True))[0]
    assert shards(again["store"]) == shards(report["store"]) and not again["quarantined"]


def test_a_killed_run_goes_on_to_the_same_bytes(place, report, tmp_path):
    """SIGKILL in the second or third unit: what was committed stays, and nothing of it is done again."""
    code = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from mlsm import __main__ as cli\nfrom pipeline.encode import Coder\n"
        "works, calls = Coder._finish, []\n"
        "def dies(coder, batch):\n"
        "    calls.append(1)\n"
        "    lives = len(calls) < 15 or not any(Path(sys.argv[-1]).glob('stores/*/units/*.json'))\n"
        "    return works(coder, batch) if lives else os.kill(os.getpid(), signal.SIGKILL)\n"
        "Coder._finish = dies\ncli.main(sys.argv[1:])"
    )
    flags = ["encode-logits", "--teacher", place.teacher, "--corpus", *place.corpus, "--top-n", 12, "--max-length", 32]
    flags += ["--max-tokens", 40_000, "--unit-tokens", 10_000, "--batch-tokens", 2048, "--device", "cpu"]
    flags += ["--output", tmp_path]
    run = run_python(["-c", code, *flags])
    assert run.returncode == -signal.SIGKILL, run.stderr
    units = next(tmp_path.glob("stores/*/units"))
    done = {path: path.stat().st_mtime_ns for path in units.glob("*.json")}
    assert 0 < len(done) < report["units"]
    again = encode_logits(replace(place, output=tmp_path))[0]
    assert again["new_units"] == report["units"] - len(done) and shards(again["store"]) == shards(report["store"])
    assert all(path.stat().st_mtime_ns == time_ns for path, time_ns in done.items())


# ---- the command line


def mlsm(*arguments, cwd, code=0):
    return run_command(arguments, cwd, code=code)


def test_the_command_and_the_tools_name_things_rightly(place, tmp_path):
    flags = ["--teacher", place.teacher, "--corpus", *place.corpus, "--top-n", 12, "--max-length", 32]
    encode = ["encode-logits", *flags, "--max-tokens", 20_000, "--unit-tokens", 8_000]
    texts = [mlsm(*encode, cwd=tmp_path).stdout]
    assert "is finished" in texts[0] and "entries stored" in texts[0] and "--objective kd" in texts[0]
    assert "was finished already" in mlsm(*encode, cwd=tmp_path).stdout
    texts.append(mlsm("show-shards", cwd=tmp_path).stdout)
    texts.append(mlsm("show-shards", "--document", 2, cwd=tmp_path).stdout)
    texts.append(mlsm("derive-shards", "--top-n", 4, cwd=tmp_path).stdout)
    texts.append(mlsm("verify-shards", "--full", cwd=tmp_path).stdout)
    for text in texts:
        assert not any(word in text for word in ("LSP", "KKT", "solver", "atom", "non-zeros")), text
    assert "dead words" in texts[1] and "head" in texts[1] and "(12 in all, tail" in texts[2]
    run = mlsm("train-student", "--max-steps", 1, cwd=tmp_path, code=2)
    assert "no finished store of lsp" in run.stderr and "encode-lsp" in run.stderr
    store = next((tmp_path / "runs" / "stores").glob("logits-*"))
    run = mlsm("train-student", "--store", store, "--max-steps", 1, cwd=tmp_path, code=2)
    assert "encode-logits" in run.stderr and "encode-lsp" in run.stderr and run.stderr.count("mlsm: error:") == 1


def test_damage_names_the_command_that_repairs_it(place, report, tmp_path):
    store = Path(shutil.copytree(report["store"], tmp_path / "stores" / Path(report["store"]).name))
    next(store.glob("units/*.tar")).unlink()
    (command,) = verify(store, repair=True)["commands"]
    assert command.startswith("mlsm encode-logits --recipe")
