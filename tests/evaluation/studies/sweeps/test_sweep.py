"""A sweep: one teacher pass, students that differ in their store alone, whatever kills it; and full scale's cost."""

import csv
import json
import math
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from preloaded import run_command, run_python
from tiny_store import log_of

from mlsm.commands.sweep import exit_code as code_of_sweep
from mlsm.commands.sweep import show as summary
from mlsm.common.errors import EXIT_QUARANTINE, SweepError, TeacherError, WsdDataError
from mlsm.common.progress import silent
from mlsm.evaluation.inspection.lsps.config import LspConfig
from mlsm.evaluation.inspection.lsps.show import show
from mlsm.evaluation.studies.sweeps import sweep as sweeping
from mlsm.evaluation.studies.sweeps.config import SweepConfig
from mlsm.evaluation.studies.sweeps.full_scale import full_scale
from mlsm.evaluation.studies.sweeps.sweep import sweep
from pipeline.teacher import Teacher, teacher_fingerprint
from shards.reader import Store

VARYING = ("store", "run", "tokens_per_second", "finished_before")


@pytest.fixture(scope="module")
def settings(tmp_path_factory, english_text, teacher_directory):
    return SweepConfig(
        layer=(1, 3), k=(40,), teacher=str(teacher_directory), corpus=(str(english_text),), lam=0.1, max_length=32,
        max_tokens=40_000, unit_tokens=8_000, dictionary_tokens=2_000, encoder="bert-2x32", max_steps=12,
        batch_windows=8, micro_batch=8, save_every=2, device="cpu", output=tmp_path_factory.mktemp("sweep"),
    )  # fmt: skip


@pytest.fixture(scope="module")
def result(settings):
    return sweep(settings)


def figures(result):
    """What does not depend on place, time and interruptions."""
    return [{name: value for name, value in row.items() if name not in VARYING} for row in result["rows"]]


def test_students_differ_in_their_store_alone(settings, result):
    first, second = result["rows"]
    stores = [Store.open(row["store"]) for row in (first, second)]
    assert stores[0].plan_id == stores[1].plan_id and stores[0].target_id != stores[1].target_id
    assert [store.settings["layer"] for store in stores] == [1, 3]
    logs = [log_of(Path(row["run"])) for row in (first, second)]
    assert list(logs[0]) == list(range(1, 13))
    for one, other in zip(*(log.values() for log in logs), strict=True):
        assert all(one[name] == other[name] for name in ("batch", "tokens", "lr")) and one["loss"] != other["loss"]
    starts = [json.loads((Path(row["run"]) / "log.jsonl").read_text().splitlines()[0]) for row in (first, second)]
    assert starts[0]["event"] == "start" and starts[0]["initial_encoder"] == starts[1]["initial_encoder"]
    configs = [json.loads((Path(row["run"]) / "config.json").read_text())["settings"] for row in (first, second)]
    assert configs[0] == configs[1]


def test_figures_are_those_of_the_runs(result):
    for row in result["rows"]:
        kept = json.loads((Path(row["run"]) / "result.json").read_text())
        assert row["held_out_kl"] == kept["held_out_loss"] and row["student_flops"] == kept["flops"] > 0
        assert row["improvement"] == pytest.approx(1 - row["held_out_kl"] / row["marginal_kl"])
    one, three = (row["encoding_flops"] for row in result["rows"])
    windows = Store.open(result["rows"][0]["store"]).report()["windows"]
    a_layer = 2 * (4 * 32 * 32 + 2 * 32 * 64) + 4 * 32 * 32  # of a token: products with weights; scores and means
    assert three - one == pytest.approx(2 * a_layer * windows * 32)


def test_table_note_and_files(settings, result):
    text = summary(result, settings)
    assert "not comparable across layers or k" in text and "At full scale" in text and "is finished" in text
    directory = Path(result["directory"])
    assert {path.name for path in directory.iterdir()} == {"sweep.json", "sweep.csv", "sweep.svg", "sweep.png"}
    with open(directory / "sweep.csv") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["held_out_kl"]) for row in rows] == [row["held_out_kl"] for row in result["rows"]]
    assert json.loads((directory / "sweep.json").read_text())["rows"] == result["rows"]


def test_the_mass_that_top_n_keeps_stands_beside_each_student(settings, tmp_path):
    """Cut to two entries, layers and k lose different shares: the table and the caption say so."""
    cut = replace(settings, layer=(1,), k=(8, 200), top_n=2, max_steps=2, output=tmp_path)
    result = sweep(cut)
    kept = [Store.open(row["store"]).report()["mass_kept"] for row in result["rows"]]
    assert [row["mass_kept"] for row in result["rows"]] == kept and kept[0] - kept[1] > 0.01
    with open(Path(result["directory"]) / "sweep.csv") as file:
        assert [float(row["mass_kept"]) for row in csv.DictReader(file)] == kept
    text = summary(result, cut)
    assert f"and in how much of the targets' mass --top-n 2 keeps: {kept[0]:.1%} at 8, {kept[1]:.1%} at 200" in text
    assert "--top-n 2 keeps" in (Path(result["directory"]) / "sweep.svg").read_text()
    rows = [row | {"mass_kept": 1.0} for row in result["rows"]]
    assert sweeping.caption_of(cut, rows) == "The students differ in k alone."


def test_its_settings_are_passed_on(settings):
    encoding, training = replace(settings, top_n="all", seed=7).encoding(), settings.training("a store")
    assert (encoding.layer, encoding.top_n, encoding.seed, encoding.output) == ((1, 3), "all", 7, settings.output)
    assert (training.store, training.max_steps, training.eval_every, training.run_dir) == ("a store", 12, 0, None)


def write_diagnostic(path, k, teacher):
    """A result of choose-layer as far as it is read here."""
    entries = [{"layer": layer, "k": k, "f1": 0.6 + layer / 100} for layer in (1, 2, 3)]
    named = {"name": "a teacher", "fingerprint": teacher_fingerprint(teacher)}
    path.write_text(json.dumps({"teacher": named, "layers": entries}))
    return path


def test_given_again_it_is_finished_and_the_diagnostic_goes_beside(settings, result, tmp_path, monkeypatch):
    diagnostic = write_diagnostic(tmp_path / "result.json", 40, settings.teacher)
    monkeypatch.setattr(Teacher, "__call__", None)
    again = sweep(replace(settings, diagnostic=diagnostic))
    assert again["finished_before"] and again["directory"] == result["directory"]
    assert [row["f1"] for row in again["rows"]] == [0.61, 0.63]
    assert [row | {"f1": None} for row in figures(again)] == figures(result)
    text = summary(again, settings)
    assert "63.0%" in text and "was finished already" in text


def test_intruders_are_judged_in_every_store_as_show_lsp_does(settings, result, tmp_path, monkeypatch):
    monkeypatch.setattr("mlsm.evaluation.inspection.lsps.intruders.LEAST_TAKEN_OUT", 1)
    monkeypatch.setattr("mlsm.evaluation.inspection.lsps.intruders.NEAR", 1)
    judged = sweep(replace(settings, intruders=True))
    assert judged["directory"] == result["directory"] and judged["finished_before"]
    first, second = (row["store"] for row in judged["rows"])
    shown = show(LspConfig(store=first, intruders=True, against=(second,)), silent)
    assert [judged[name] for name in ("judge", "samples")] == [shown[name] for name in ("judge", "samples")]
    for row, found, expected in zip(judged["rows"], judged["dictionaries"], shown["dictionaries"], strict=True):
        assert found == {name: value for name, value in expected.items() if name not in ("lsps", "p")}
        assert [row["intruder_low"], row["intruder_high"]] == expected["interval"] and expected["judged"] > 5
        assert (row["intruder_auc"], row["intruder_by_spelling"]) == (expected["auc"], expected["by_spelling"])
    assert judged["rows"][0]["intruder_auc"] != judged["rows"][1]["intruder_auc"]
    with open(Path(judged["directory"]) / "sweep.csv") as file:
        assert [float(row["intruder_auc"]) for row in csv.DictReader(file)] == [
            row["intruder_auc"] for row in judged["rows"]
        ]
    assert "intruders detected" in (Path(judged["directory"]) / "sweep.svg").read_text()
    text = summary(judged, settings)
    assert f"{judged['rows'][1]['intruder_auc']:.1%}" in text and f"50% by chance, by {judged['judge']}." in text
    by_another = sweep(replace(settings, intruders=True, judge=settings.teacher))
    assert by_another["judge"] == settings.teacher
    assert by_another["rows"][0]["intruder_auc"] != judged["rows"][0]["intruder_auc"]
    with pytest.raises(TeacherError, match="nowhere"):
        sweep(replace(settings, intruders=True, judge=str(tmp_path / "nowhere"), output=tmp_path / "none"))
    assert not (tmp_path / "none").exists()
    with pytest.raises(ValueError, match="Add --intruders"):
        replace(settings, judge="an encoder")


def test_without_matplotlib_there_is_a_table(result, tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with caplog.at_level("INFO"):
        sweeping._write(result, tmp_path / "new")
    assert sorted(file.name for file in (tmp_path / "new").iterdir()) == ["sweep.csv", "sweep.json"]
    assert "no figure: figures need matplotlib" in caplog.text


def test_documents_that_could_not_be_coded_are_told(result, capsys):
    assert [row["quarantined"] for row in result["rows"]] == [0, 0]
    assert code_of_sweep(result) == 0
    first, second = result["rows"]
    damaged = result | {"rows": [first, second | {"quarantined": 2}]}
    assert code_of_sweep(damaged) == EXIT_QUARANTINE
    assert f"2 documents could not be coded and carry no targets; the records in {second['store']}/units" in (
        capsys.readouterr().err
    )


def test_a_figure_that_is_not_there_is_a_gap_and_a_zero_is_a_zero(result, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        sweeping,
        "save_figure",
        lambda figure, *_: drawn.extend(axes.lines[0].get_ydata().tolist() for axes in figure.axes),
    )
    first, second = result["rows"]
    rows = [first | {"improvement": None, "f1": 0.0}, second | {"improvement": 0.25, "f1": None}]
    sweeping._write(result | {"rows": rows}, tmp_path)
    assert drawn == [pytest.approx([math.nan, 25.0], nan_ok=True), pytest.approx([0.0, math.nan], nan_ok=True)]


def test_other_sizes_share_the_plan_and_the_pass(settings, tmp_path):
    found = sweep(replace(settings, layer=(1,), k=(40, 48), max_steps=2, output=tmp_path))
    assert found["over"] == "k" and [Store.open(row["store"]).k for row in found["rows"]] == [40, 48]
    assert len({Store.open(row["store"]).plan_id for row in found["rows"]}) == 1


KILLED = """
import os, signal
from pathlib import Path
from mlsm.evaluation.studies.sweeps.config import SweepConfig
from mlsm.evaluation.studies.sweeps.sweep import sweep

def kill(stage, done, total, **figures):
    if stage.startswith({stage!r}) and {when}:
        os.kill(os.getpid(), signal.SIGKILL)

sweep(SweepConfig(**{values!r} | {{"output": Path({output!r})}}), kill)
"""


def test_killed_while_encoding_and_while_training_it_goes_on(settings, result, tmp_path):
    values = {name: value for name, value in vars(settings).items() if name != "output"}
    for stage, when in (("encode", "done > 10_000"), ("train-student l3", "figures['step'] == 7")):
        code = KILLED.format(stage=stage, when=when, values=values, output=str(tmp_path))
        killed = run_python(["-c", code])
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    (first,) = tmp_path.glob("students/sweep-l1-*/result.json")
    before = first.stat().st_mtime_ns
    resumed = sweep(replace(settings, output=tmp_path))
    assert figures(resumed) == figures(result)
    assert first.stat().st_mtime_ns == before


def test_full_scale_by_hand():
    layers, sizes = (full_scale(over, "NVIDIA H100 80GB HBM3") for over in ("layer", "k"))
    windows, a_layer = 100_000 * 1024, 128 * (24 * 768**2 + 4 * 128 * 768)
    flops = layers["flops"]
    assert flops["teacher_shared"] == 12 * a_layer * windows and flops["teacher_apart"] == 62 * a_layer * windows
    assert flops["apart"] - flops["shared"] == 50 * a_layer * windows
    assert layers["hours"]["shared"] == pytest.approx(flops["shared"] / (0.4 * 989.5e12) / 3600)
    assert flops["shared"] < flops["apart"] < flops["online"]
    assert sizes["flops"]["teacher_apart"] == 5 * sizes["flops"]["teacher_shared"] == 50 * a_layer * windows
    assert len(layers["values"]) == 8 and sizes["values"] == [768, 1536, 3072, 6144, 12288]


def test_a_dry_run_does_nothing_but_say_it(settings, tmp_path):
    text = summary(sweep(replace(settings, dry_run=True, output=tmp_path)), settings)
    assert "Nothing was done" in text and "At full scale" in text and not list(tmp_path.iterdir())


def test_the_cost_is_said_before_it_starts(settings, tmp_path, monkeypatch, caplog):
    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(sweeping, "_rows", stop)
    with caplog.at_level("INFO", logger="mlsm.evaluation"), pytest.raises(KeyboardInterrupt):
        sweep(settings)
    assert "At full scale" in caplog.text and "hours" in caplog.text


def test_what_cannot_be_swept_says_so(settings, tmp_path):
    with pytest.raises(ValueError, match="over --layer or over --k"):
        replace(settings, k=(40, 48))
    with pytest.raises(SweepError, match="its peak is not known"):
        sweep(replace(settings, gpu="abacus"))
    with pytest.raises(SweepError, match="--recipe sweep-layers"):
        sweep(SweepConfig())
    write_diagnostic(tmp_path / "other.json", 99, settings.teacher)
    write_diagnostic(tmp_path / "foreign.json", 40, "bundled")
    for name, message in (
        ("other.json", "layer 1 k 99, .*none of this"),
        ("none.json", "no result of choose-layer"),
        ("foreign.json", "is of the teacher a teacher, not "),
    ):
        with pytest.raises((SweepError, WsdDataError), match=message):
            sweep(replace(settings, diagnostic=tmp_path / name))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lr": -1.0}, "lr must be a positive number"),
        ({"encoder": "/nowhere/bert"}, "no configuration found"),
        ({"lam": -1.0}, "lam"),
    ],
)
@pytest.mark.parametrize("dry_run", [True, False])
def test_students_that_cannot_be_trained_are_refused_before_encoding(settings, tmp_path, wrong, message, dry_run):
    with pytest.raises(ValueError, match=message):
        sweep(replace(settings, output=tmp_path, dry_run=dry_run, **wrong))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("recipe", ["sweep-layers", "sweep_k"])
def test_recipes_resolve(recipe):
    run = run_command(["sweep", "--recipe", recipe, "--print-config"])
    assert run.returncode == 0, run.stderr
    assert "max_steps: 300" in run.stdout and "max_tokens: 1000000" in run.stdout
