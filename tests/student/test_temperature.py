"""Tempered targets p^(1/T). The oracle is the dense formula, and a run without the setting."""

import json

import numpy as np
import pytest
import torch
from masked_half import read_half
from tiny_store import log_of

from shards.codec import SparseRows
from shards.schema import LSP_OCTAVES
from student.config import LOWEST_TEMPERATURE, StudentConfig
from student.objectives import OBJECTIVES
from student.objectives.mlsm import Mlsm
from student.objectives.sparse_rows import temper
from student.runs.identity import find_description
from student.train import train

LSPS = 24
TEMPERATURES = (0.5, 3.0)


def dense(entries_E, weights_E, tokens):
    target_Mk = torch.zeros(tokens, LSPS, dtype=torch.float64)
    target_Mk.view(-1)[entries_E] = weights_E.double()
    return target_Mk


def dense_tempered(target_Mk, temperature):
    powers = torch.where(target_Mk > 0, target_Mk ** (1 / temperature), 0.0)
    return powers / powers.sum(dim=1, keepdim=True).clamp(min=1e-300)


def dense_kl(target_Mk, logits_Mk):
    terms = target_Mk * (target_Mk.clamp(min=1e-300).log() - logits_Mk.double().log_softmax(dim=1))
    return terms[target_Mk.sum(dim=1) > 0].sum()


def lsps_of(targets):
    return getattr(targets, "lsps", targets)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("name", ["mlsm", "naive-mlsm", "mtl"])
def test_loss_gradient_and_figures_are_those_of_the_dense_formula(name, temperature, lsp_store):
    plain, tempered = OBJECTIVES[name](lsp_store), OBJECTIVES[name](lsp_store, target_temperature=temperature)
    stored, targets = lsps_of(read_half(lsp_store, plain)), read_half(lsp_store, tempered)
    tokens = len(stored.coded_M)
    p = dense(stored.entries_E, stored.weights_E, tokens)
    expected_p = dense_tempered(p, temperature)
    found_p = dense(lsps_of(targets).entries_E, lsps_of(targets).weights_E, tokens)
    assert torch.allclose(found_p, expected_p, atol=1e-6) and not torch.allclose(found_p, p, atol=1e-2)
    generator = torch.Generator().manual_seed(0)
    logits = (2 * torch.randn(tokens, tempered.outputs, generator=generator)).requires_grad_()
    logits_Mk = logits[:, tempered.lsp_columns]
    kl, *_ = tempered.loss_sums(logits, targets)
    expected = dense_kl(expected_p, logits_Mk)
    assert kl.item() == pytest.approx(expected.item(), rel=1e-4)
    (gradient,) = torch.autograd.grad(kl, logits, retain_graph=True)
    assert torch.allclose(gradient, torch.autograd.grad(expected, logits, retain_graph=True)[0], atol=1e-5)
    with torch.no_grad():
        figures = tempered.figures(tempered.measure(logits, targets), targets.counts)
    coded = int(stored.coded_M.sum())
    assert figures["kl_untempered"] == pytest.approx(dense_kl(p, logits_Mk).item() / coded, rel=1e-4)
    back = dense_kl(p, logits_Mk * temperature).item() / coded
    assert figures["kl_untempered_back"] == pytest.approx(back, rel=1e-4)
    assert figures["loss" if name != "mtl" else "kl"] == pytest.approx(expected.item() / coded, rel=1e-4)


def test_figures_against_the_stored_distributions_are_kl_whatever_loss_is_derived(lsp_store):
    class Doubled(Mlsm):
        def loss_sums(self, logits_MK, targets):
            return 2 * super().loss_sums(logits_MK, targets)

    mlsm, doubled = (cls(lsp_store, target_temperature=2.0) for cls in (Mlsm, Doubled))
    targets = read_half(lsp_store, mlsm)
    logits = torch.randn(len(targets.coded_M), mlsm.outputs, generator=torch.Generator().manual_seed(0))
    once, twice = (objective.measure(logits, targets) for objective in (mlsm, doubled))
    assert twice["loss"] == 2 * once["loss"] and once.keys() == {"loss", "kl_untempered", "kl_untempered_back"}
    assert all(twice[name] == once[name] for name in ("kl_untempered", "kl_untempered_back"))


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_perfect_student_of_tempered_targets_takes_the_temperature_back(temperature, lsp_store):
    mlsm = Mlsm(lsp_store, target_temperature=temperature)
    targets = read_half(lsp_store, mlsm)
    logits = dense(targets.entries_E, targets.weights_E, len(targets.coded_M)).clamp(min=1e-30).log().float()
    figures = mlsm.figures(mlsm.measure(logits, targets), targets.counts)
    assert figures["loss"] == pytest.approx(0, abs=1e-5) and figures["kl_untempered_back"] == pytest.approx(0, abs=1e-4)
    assert figures["kl_untempered"] > 0.01


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_the_baseline_is_the_average_of_the_tempered_targets(temperature, lsp_store):
    train_windows = lsp_store.split("train")
    plain, mlsm = Mlsm(lsp_store), Mlsm(lsp_store, target_temperature=temperature)
    held_out = read_half(lsp_store, mlsm)
    found = mlsm.baseline(train_windows, [held_out])
    read = train_windows.read(np.arange(len(train_windows)))
    rows = train_windows.targets(read, *np.nonzero(read.documents >= 0))
    starts = rows.indptr[:-1][np.diff(rows.indptr) > 0]
    stops = rows.indptr[1:][np.diff(rows.indptr) > 0]
    mean = np.full(LSPS, 1 / LSPS)
    for start, stop in zip(starts, stops, strict=True):
        powers = rows.weights[start:stop].astype(np.float64) ** (1 / temperature)
        mean[rows.indices[start:stop]] += powers / powers.sum()
    logits = torch.from_numpy(np.log(mean / mean.sum())).expand(len(held_out.coded_M), LSPS)
    p = dense(held_out.entries_E, held_out.weights_E, len(held_out.coded_M))
    assert found["loss"] == pytest.approx(dense_kl(p, logits).item() / held_out.counts[0], rel=1e-5)
    usual = plain.baseline(train_windows, [read_half(lsp_store, plain)])["loss"]
    assert found["kl_untempered"] == found["kl_untempered_back"] == usual != found["loss"]


def test_small_temperatures_keep_the_largest_entry():
    rows = type("Rows", (), {"indptr": np.array([0, 3, 3, 4]), "weights": np.array([0.2, 0.5, 0.3, 1.0], np.float32)})
    assert temper(rows, 1e-3).tolist() == pytest.approx([0.0, 1.0, 0.0, 1.0])
    assert temper(rows, 1e6).tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1.0], abs=1e-5)
    assert temper(rows, 1.0).tolist() == pytest.approx(rows.weights.tolist(), rel=1e-6)


def test_a_run_names_its_temperature_and_without_one_is_what_it_was(lsp_store, settings, tmp_path):
    runs = {}
    for temperature in (None, 1.0, 2.0):
        given = {} if temperature is None else {"target_temperature": temperature}
        runs[temperature] = tmp_path / str(temperature)
        train(StudentConfig(**settings | given | {"store": lsp_store.path, "run_dir": runs[temperature]}))
    logs = {temperature: log_of(run) for temperature, run in runs.items()}
    described = {temperature: find_description(run)["settings"] for temperature, run in runs.items()}
    for name in ("loss", "grad_norm", "batch"):
        plain, one = ([line[name] for line in logs[temperature].values()] for temperature in (None, 1.0))
        assert plain == one
    assert logs[1.0][8]["held_out"].keys() == {"loss"} and "target_temperature" not in described[None]
    assert described[2.0] == described[1.0] | {"target_temperature": 2.0}
    assert logs[2.0][8]["held_out"].keys() == {"loss", "kl_untempered", "kl_untempered_back"}
    assert logs[2.0][1]["batch"] == logs[1.0][1]["batch"] and logs[2.0][1]["loss"] != logs[1.0][1]["loss"]
    start = json.loads((runs[2.0] / "log.jsonl").read_text().splitlines()[0])
    assert start["targets"] == {"mass_kept": pytest.approx(1), "target_temperature": 2.0}
    names = {"loss", "kl_untempered", "kl_untempered_back"}
    assert start["baseline"].keys() == names | {f"{name}_by_position" for name in names}
    lineage = json.loads((runs[2.0] / "export" / "lineage.json").read_text())
    assert lineage["settings"]["target_temperature"] == 2.0


@pytest.mark.parametrize("objective", ["mlm", "kd"])
def test_objectives_without_lsps_refuse_a_temperature(objective):
    with pytest.raises(ValueError, match=f"mlsm, mtl, naive-mlsm.*found {objective}") as caught:
        StudentConfig(objective=objective, target_temperature=2.0)
    assert "\n" not in str(caught.value)
    assert StudentConfig(objective=objective, target_temperature=1.0)
    with pytest.raises(ValueError, match="--target-temperature must be a positive number, found 0"):
        StudentConfig(target_temperature=0)


def test_temperatures_that_float32_cannot_bear_are_refused_with_the_limit(lsp_store):
    for temperature in (1e-320, 1e-40, 9e-5, 2e9, 1e300):
        with pytest.raises(ValueError, match="from 0.0001 to 1e\\+09, found .* hard-mlsm; above") as caught:
            StudentConfig(target_temperature=temperature)
        assert "\n" not in str(caught.value)
    for temperature in (1e-4, 1e9):
        mlsm = Mlsm(lsp_store, target_temperature=StudentConfig(target_temperature=temperature).target_temperature)
        targets = read_half(lsp_store, mlsm)
        logits = torch.randn(len(targets.coded_M), mlsm.outputs, requires_grad=True)
        figures = mlsm.measure(logits, targets)
        figures["loss"].sum().backward()
        assert all(torch.isfinite(figure).all() for figure in (*figures.values(), logits.grad))


def test_at_the_lowest_temperature_only_the_largest_stored_weights_are_left():
    """Rows of two neighbouring weights of the format: beyond the limit a smaller temperature changes no float32."""
    step = np.exp(-LSP_OCTAVES * np.log(2) / 254)
    pair = SparseRows(np.array([0, 2]), np.array([0, 1]), np.array([1, step]) / (1 + step), np.zeros(1, np.float32))
    weights = temper(pair, LOWEST_TEMPERATURE).astype(np.float32)
    assert weights.tolist() == [1, 0] and temper(pair, 10 * LOWEST_TEMPERATURE).astype(np.float32)[1] > 0


@pytest.mark.parametrize("name", ["mlsm", "naive-mlsm", "mtl"])
def test_a_store_that_keeps_too_little_of_its_lsps_is_warned_of(name, lsp_store, caplog, monkeypatch):
    assert OBJECTIVES[name](lsp_store).facts["mass_kept"] == pytest.approx(1) and not caplog.text
    report = lsp_store.report() | {"mass_kept": 0.949}
    monkeypatch.setattr(lsp_store, "report", lambda: report)
    assert OBJECTIVES[name](lsp_store).facts["mass_kept"] == 0.949
    assert caplog.text.count("keeps 94.9 % of an LSP distribution") == 1
    assert "at least 95 % is advised: encode-lsp with a larger --top-n" in caplog.text
    caplog.clear()
    OBJECTIVES["mlm"](lsp_store)
    assert not caplog.text
