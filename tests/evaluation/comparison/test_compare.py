"""The command compare: tables and figures have the right numbers, missing data is reported, errors name their file."""

import csv
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from test_cli import error_line, mlsm
from tiny_records import a_blimp_record, a_record, digest, layer_study, paper_study, store
from tiny_study import pair

from mlsm.common.errors import ComparisonError, RecordError, WsdDataError
from mlsm.common.progress import silent
from mlsm.evaluation.comparison import published
from mlsm.evaluation.comparison.compare import compare
from mlsm.evaluation.comparison.config import CompareConfig
from mlsm.evaluation.comparison.models import SUITE
from mlsm.evaluation.comparison.paper import correlations, tick_values
from mlsm.evaluation.comparison.result import FrozenScore
from mlsm.evaluation.plots import new_figure
from mlsm.evaluation.records import METRICS
from mlsm.terminal.comparison import comparison

TEACHER = {"name": "a teacher", "fingerprint": "f"}
F1 = {8: 0.60, 10: 0.66, 12: 0.64}


def compared(directory, records, **settings):
    """(result, settings) of a comparison of records in a directory."""
    settings = CompareConfig(results=(store(directory, records),), output=directory / "out", **settings)
    return compare(settings, silent), settings


def table(path):
    return list(csv.DictReader(Path(path).open()))


@pytest.fixture(scope="module")
def layers(tmp_path_factory):
    """Three finished models that differ in layer alone, with a diagnostic."""
    directory = tmp_path_factory.mktemp("layers")
    entries = [{"layer": layer, "k": 3072, "f1": f1} for layer, f1 in F1.items()]
    entries.append({"layer": 8, "k": 12, "f1": 0.1})
    (directory / "result.json").write_text(json.dumps({"teacher": TEACHER, "layers": entries}))
    return compared(directory, layer_study(list(F1)), paper=True, diagnostic=directory / "result.json")


def test_tables_hold_averages_tasks_and_tests(layers):
    result, settings = layers
    models = {row["model"]: row for row in table(settings.output / "models.csv")}
    assert list(models) == ["mlsm-l8", "mlsm-l10", "mlsm-l12"]
    assert float(models["mlsm-l10"]["average"]) == pytest.approx(sum(published.scores(1)[10].values()) / 14)
    assert models["mlsm-l10"]["n"] == "70" and models["mlsm-l10"]["pretraining_flops"] == "9000000000000.0"
    tasks = {(row["model"], row["task"], row["metric"]): row for row in table(settings.output / "tasks.csv")}
    assert len(tasks) == 3 * 14 and float(tasks["mlsm-l8", "rte", "accuracy"]["mean"]) == pytest.approx(0.584)
    tests = {(row["level"], row["model"], row["against"]): row for row in table(settings.output / "significance.csv")}
    x, y = published.scores(1)[10], published.scores(1)[12]
    d = [round(x[figure] - y[figure], 9) for figure in SUITE for _ in range(5)]
    expected = stats.wilcoxon(d, correction=False, alternative="greater", method="asymptotic").pvalue
    row = tests["scores", "mlsm-l10", "mlsm-l12"]
    assert float(row["p"]) == pytest.approx(expected) and (row["n"], row["of"], row["wins"]) == ("70", "70", "60")
    assert tests["tasks", "mlsm-l10", "mlsm-l12"]["n"] == "10" and len(tests) == 3 * 6
    assert json.loads(json.dumps(result.as_report()))["significance"]["scores"]["wins"][1][2] == 60


def test_figure_3_draws_the_tables_numbers(layers):
    result, settings = layers
    rows = table(settings.output / "figure-03-layers.csv")
    means = [row for row in rows if row["series"] == "mean"]
    drawn = {float(row["x"]): float(row["value"]) for row in means if row["source"] == "measured"}
    averages = {of.model.facts["layer"]: of.average for of in result.summaries}
    assert drawn == averages and len([row for row in rows if row["series"].startswith("seed")]) == 15
    paper = {float(row["x"]): float(row["value"]) for row in rows if row["source"] == "paper"}
    assert paper == published.printed_averages(1)
    cells = result.significance["scores"]
    matrix = {(row["panel"], row["x"], row["against"]): row["value"] for row in rows if row["against"]}
    assert float(matrix["p", "10", "12"]) == cells.p[1][2] and int(matrix["wins", "12", "10"]) == cells.wins[2][1]
    svg = (settings.output / "figure-03-layers.svg").read_text()
    assert "n = 70 of 70" in svg and "against layer" in svg


def test_figure_4_correlates_with_the_diagnostic_of_the_same_k(layers):
    result, settings = layers
    rows = table(settings.output / "figure-04-word-senses.csv")
    averages = [of.average for of in result.summaries]
    found = [row for row in rows if row["panel"] == "correlation"]
    measured = {row["series"]: float(row["value"]) for row in found if row["source"] == "measured"}
    assert measured["pearson"] == pytest.approx(stats.pearsonr(list(F1.values()), averages)[0])
    assert measured["spearman"] == pytest.approx(stats.spearmanr(list(F1.values()), averages)[0])
    assert {float(row["x"]): float(row["value"]) for row in rows if row["series"] == "F1"} == F1


def test_correlations_raw_and_rounded():
    """By the paper's formulas, and as its figures are, with ties."""
    f1, averages = [0.5, 0.6101, 0.6099], [0.7012, 0.7249, 0.7251]
    found = correlations(f1, averages)
    assert found["spearman"][0] == pytest.approx(0.5)  # ranks 1 2 3 and 1 3 2
    assert found["spearman, rounded"][0] == pytest.approx(1.0)  # 72.5 twice, 61.0 twice
    left, right = np.array(f1), np.array(averages)
    plain = ((left - left.mean()) * (right - right.mean())).sum() / (3 * left.std() * right.std())
    assert found["pearson"][0] == pytest.approx(plain)
    assert correlations([0.5, 0.5, 0.5], averages) == {}


def test_figures_that_cannot_be_drawn_say_what_they_need(layers):
    result, settings = layers
    lacking = {figure.figure: figure.lacks for figure in result.figures if figure.lacks}
    assert set(lacking) == {5, 6, 7, 8, 9, 10}
    assert "differ only in k; found k: [3072]" in lacking[5] and "BLiMP records" in lacking[9]
    assert not list(settings.output.glob("figure-05*"))
    said = comparison(result, settings)
    assert all(f"{reason}" in said for reason in lacking.values())


def test_the_terminal_says_the_headline(layers, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    result, settings = layers
    said = comparison(result, settings)
    assert "Models: 3, from 150 records." in said and "n = 70 of 70" in said and "n = 10 of 10" in said
    assert "encoder deberta-base" in said and "0.8096" in said and "60 (0)" in said
    wins = said.partition("Pairs that the row wins (ties)")[2].splitlines()[2:5]
    assert wins[1].split() == ["2", "60", "(5)", "–", "60", "(0)"]


def test_records_of_different_splits_are_not_compared(tmp_path):
    records = [a_record("a", "rte", 0, [0.6])]
    records.append(a_record("b", "rte", 0, [0.7], settings=records[0]["settings"] | {"split": "train-tenth"}))
    both = r"different examples: --split validation \(such as rte of a\), --split train-tenth \(such as rte of b\)"
    with pytest.raises(ComparisonError, match=both):
        compared(tmp_path, records)
    result, _ = compared(tmp_path / "apart", records[1:])
    assert [model.label for model in result.models] == ["b"]


def test_every_figure_of_the_paper_from_a_whole_study(tmp_path):
    entries = [{"layer": layer, "k": 3072, "f1": layer / 100} for layer in range(13)]
    (tmp_path / "result.json").write_text(json.dumps({"teacher": TEACHER, "layers": entries}))
    result, settings = compared(tmp_path, paper_study(), paper=True, diagnostic=tmp_path / "result.json")
    assert [figure.figure for figure in result.figures if figure.lacks is None] == list(range(3, 11))
    assert all(Path(file).stat().st_size for figure in result.figures for file in figure.files)
    ks = {float(row["x"]) for row in table(settings.output / "figure-05-lsps.csv") if row["panel"] == "average"}
    assert ks == {768, 1536, 3072, 6144, 12288}  # with the paper's
    averages = {of.label: of.average for of in result.summaries}
    weights = {
        float(row["x"]): float(row["value"])
        for row in table(settings.output / "figure-08-mlm-weight.csv")
        if row["series"] == "mean" and row["source"] == "measured"
    }
    assert weights == {0.0: averages["mlsm-l10"]} | {k: averages[f"mtl-{k:g}"] for k in (1.0, 2.0)}
    _check_checkpoints(settings.output, averages)
    blimp = table(settings.output / "figure-09-blimp.csv")
    costs = [row for row in blimp if row["series"] == "KD" and row["source"] == "measured"]
    assert [float(row["x"]) for row in costs] == pytest.approx([2.975e18, 1.19e19])
    assert {row["series"] for row in blimp if row["panel"] == "blimp"} == {"MLSM + probe", "MLM", "KD"}
    assert float(costs[-1]["value"]) == pytest.approx((0.735 + 0.785) / 2) and costs[-1]["n"] == "2"


def _check_checkpoints(directory, averages):
    steps = table(directory / "figure-06-steps.csv")
    mlm = [row for row in steps if (row["panel"], row["series"]) == ("average", "MLM")]
    expected = [(step, averages[f"mlm-deberta-base-{step}"]) for step in (250, 1000)]
    assert [(float(row["x"]), float(row["value"])) for row in mlm] == expected
    assert {row["panel"] for row in steps} == {"average"} | {" ".join(figure) for figure in SUITE}
    others = {row["series"] for row in table(directory / "figure-10-another-encoder.csv")}
    assert others == {"MLSM", "MLM", "KD"}
    pairs = table(directory / "figure-07-pairs.csv")
    rate = next(row for row in pairs if row["panel"] == "win rate" and row["against"] == "kd-deberta-base-250")
    points = [row for row in pairs if row["panel"] != "win rate" and row["against"] == "kd-deberta-base-250"]
    assert len(points) == 28 == int(rate["n"])
    won = sum(round(float(row["value"]) - float(row["x"]), 9) > 0 for row in points)
    assert won == 26 and float(rate["value"]) == 27 / 28  # all but CoLA, where kd is as good: two ties


def figure_7(directory, records):
    """Its caption, the paired models, and the rows of win rates."""
    result, settings = compared(directory, records)
    caption = next(figure.caption for figure in result.figures if figure.figure == 7)
    rows = table(settings.output / "figure-07-pairs.csv")
    points = {(row["series"].partition(",")[0], row["against"]) for row in rows if row["panel"] != "win rate"}
    return caption, points, [row for row in rows if row["panel"] == "win rate"]


def test_figure_7_pairs_runs_of_one_seed(tmp_path):
    both = pair([[0.02], [0.01], [-0.03]], ["rte"])
    caption, points, rates = figure_7(tmp_path / "all", both)
    assert points == {(f"mlsm-seed{seed}", f"mlm-seed{seed}") for seed in range(3)}
    (rate,) = rates
    assert (float(rate["value"]), rate["n"]) == (pytest.approx(2 / 3), "6")
    assert caption.startswith("The models differ only in objective and run_seed.") and "not shown" not in caption
    some = [record for record in both if record["model"] != "mlm-seed2"]
    caption, points, _ = figure_7(tmp_path / "some", some)
    assert ("mlsm-seed1", "mlm-seed1") in points and "not shown: mlsm-seed2." in caption
    apart = [record for record in both if record["model"] in ("mlsm-seed0", "mlsm-seed1", "mlm-seed2")]
    caption, points, _ = figure_7(tmp_path / "apart", apart)
    assert points == {("mlsm-seed0", "mlm-seed2")} and "not shown: mlsm-seed1." in caption
    assert "also in run_seed" in caption


def test_a_study_of_two_tasks_has_no_empty_panels(tmp_path):
    tasks = ("rte", "mrpc")
    records = [record for record in paper_study(layers=(10,), ks=(), kappas=(), seeds=1) if record["task"] in tasks]
    drawn = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlsm.evaluation.comparison.paper.save_figure", lambda figure, *_: drawn.append(figure) or [])
        compared(tmp_path, records)
    panels = {len(figure.axes): [axes.get_title() for axes in figure.axes] for figure in drawn}
    assert {4} == {count for count, titles in panels.items() if "RTE (accuracy)" in titles}  # 3 figures and 1 more
    steps = next(figure for figure in drawn if "average" in figure.axes[0].get_title() and len(figure.axes) == 4)
    assert all(len(axes.get_xticks()) <= 7 for axes in steps.axes)


def test_a_figure_of_models_that_were_fine_tuned_in_several_ways_says_so(tmp_path):
    records = [
        record | {"settings": record["settings"] | {"epochs": record["layer"]}} for record in layer_study((2, 4), 1)
    ]
    result, _ = compared(tmp_path, records)
    caption = next(figure.caption for figure in result.figures if figure.figure == 3)
    assert "They were fine-tuned in different ways (cola: settings differ (epochs: 2 and 4)), so their" in caption


def test_labels_that_would_overlap_are_left_out():
    figure, axes = new_figure()
    axes.set_xscale("log", base=2)
    tick_values(axes, [768, 800, 1536, 3072, 6144, 12288])
    assert [label.get_text() for label in axes.get_xticklabels()] == ["768", "", "1536", "3072", "6144", "12288"]


def test_what_is_incomplete_left_out_or_diverged_is_said(tmp_path):
    records = [a_record("a", "mrpc", seed, [0.8, 0.9]) for seed in range(3)]
    records += [a_record("a", "rte", 0, [0.6], diverged="the loss became NaN at step 3")]
    other = {"objective": "mlm", "layer": None, "k": None}
    records += [a_record("b", "mrpc", seed, [0.7, 0.95], **other) for seed in range(2)]
    records += [a_record("b", "mrpc", 2, [0.7, 0.95], head=digest("another"), **other)]
    records += [a_blimp_record("b", {"x": 0.5}, **other)]
    result, settings = compared(tmp_path, records)
    said = comparison(result, settings)
    assert "1 and 2: heads differ: seeds of mrpc 2" in said
    assert "a: rte, seed 0 diverged: the loss became NaN at step 3" in said
    assert "n = 4 of 70" in said and "n = 2 of 50" in said and "n = 1 of 10" in said
    assert "0.800 (3)" in said and "0.600 (1)†" in said and "0.500 (1)" in said
    assert [row["seed"] for row in table(settings.output / "left-out.csv")] == ["2"]
    assert result.summaries[0].common_average == pytest.approx(0.85) != result.summaries[0].average
    (row,) = [row for row in table(settings.output / "win-rates.csv") if (row["model"], row["task"]) == ("b", "all")]
    assert (row["wins"], row["losses"], row["rate"]) == ("2", "2", "0.5")


def test_tables_of_p_that_can_show_nothing_are_left_out(tmp_path):
    """With one pair every p is 0.16 at best; the conclusion must not stand after six tables of them."""
    other = {"objective": "mlm", "layer": None, "k": None}
    one = [a_record("a", "rte", 0, [0.7]), a_record("b", "rte", 0, [0.6], **other)]
    said = comparison(*compared(tmp_path, one))
    assert "p, two-sided" not in said and "better than the column" not in said and "Pairs that the row" not in said
    lines = [line for line in said.splitlines() if line.startswith("No p over ")]
    assert len(lines) == 3 and all("n = 1 of " in line for line in lines)
    several = [a_record(*entry, seed, [score + seed / 100], **more) for seed in range(5) for *entry, score, more in
               [("a", "rte", 0.7, {}), ("b", "rte", 0.6, other)]]  # fmt: skip
    said = comparison(*compared(tmp_path / "several", several))
    assert said.count("better than the column") == 2, "single scores and trainings; of tasks there is still one"


def test_many_models_fit_a_narrow_terminal(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("mlsm.evaluation.comparison.compare.draw_paper_figures", lambda *_: [])
    records = [
        a_record(f"model-{i}", task, 0, [0.5 + i / 100] * len(METRICS[task]), layer=i)
        for i in range(15)
        for task in ("rte", "mrpc", "stsb")
    ]
    result, settings = compared(tmp_path, records)
    said = comparison(result, settings).partition("Tables:")[0]
    tables = [line for line in said.splitlines() if line.startswith("  ") and line.strip()[0].isdigit()]
    assert tables and max(map(len, tables)) <= 82
    assert "Matrices of the 12 models with the best averages; significance.csv has all." in said
    assert len(table(settings.output / "significance.csv")) == 3 * 15 * 14


def test_tables_of_very_many_models_are_cut_and_the_work_is_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")  # all columns in one block
    monkeypatch.setattr("mlsm.evaluation.comparison.compare.draw_paper_figures", lambda *_: [])
    records = [a_record(f"model-{i:02}", "rte", 0, [0.5 + i / 100], layer=i) for i in range(26)]
    settings = CompareConfig(results=(store(tmp_path, records),), output=tmp_path / "out")
    stages = []
    result = compare(settings, lambda stage, *_, **__: stages.append(stage))
    assert stages[:2] == ["read records", "test 26 fine-tuned models in pairs"]
    said = comparison(result, settings)
    tasks = said.partition("mean over seeds")[2].partition("rte accuracy")[0]
    columns = [word for line in tasks.splitlines() for word in line.split() if word.isdigit()]
    assert columns == [str(number) for number in range(3, 27)], "without the two worst"
    assert "Only the 24 models with the best averages; tasks.csv has all." in said
    assert len(table(settings.output / "tasks.csv")) == 26
    scores = [FrozenScore(label, "pos", "accuracy", 0.5, 9) for label in result.compared]
    assert "Only the first 24 models; frozen.csv has all." in comparison(replace(result, frozen=scores), settings)


def test_figures_of_an_earlier_comparison_do_not_stay(tmp_path):
    _, settings = compared(tmp_path, layer_study((8, 10), seeds=1))
    assert (settings.output / "figure-03-layers.png").is_file()
    compare(replace(settings, results=(next(settings.results[0].glob("mlsm-l8-*")),)), silent)
    assert not list(settings.output.glob("figure-*"))


def test_an_interrupted_comparison_leaves_the_files_of_the_earlier_page(tmp_path, monkeypatch):
    _, settings = compared(tmp_path, layer_study((8, 10), seeds=1))
    linked = {path.name for path in settings.output.iterdir()}
    assert {"report-scores.csv", "figure-03-layers.png"} <= linked

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("mlsm.evaluation.comparison.compare.write_tables", interrupted)
        compare(replace(settings, results=(next(settings.results[0].glob("mlsm-l8-*")),)), silent)
    assert linked <= {path.name for path in settings.output.iterdir()}


def test_without_matplotlib_there_are_tables(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result, settings = compared(tmp_path, layer_study((8, 10), seeds=1))
    assert "pip install" in result.figures[0].lacks and (settings.output / "models.csv").is_file()


def test_the_same_records_give_the_same_bytes(tmp_path):
    result, settings = compared(tmp_path, layer_study((8, 10), seeds=1))
    files = {path: path.read_bytes() for path in settings.output.iterdir()}
    assert compare(settings, silent).as_report() == result.as_report()
    assert files == {path: path.read_bytes() for path in settings.output.iterdir()}


def test_malformed_records_name_file_and_field(tmp_path):
    directory = store(tmp_path, [a_record("a", "rte", seed, [0.5]) for seed in range(2)])
    file = next(directory.rglob("rte-seed1.json"))
    whole = file.read_text()
    file.write_text(whole[:100])
    settings = CompareConfig(results=(directory,), output=tmp_path / "out")
    with pytest.raises(RecordError, match="rte-seed1.json"):
        compare(settings, silent)
    file.write_text(json.dumps(json.loads(whole) | {"layer": "ten"}))
    with pytest.raises(RecordError, match=r"rte-seed1.json: field layer"):
        compare(settings, silent)
    assert not (tmp_path / "out").exists()


def test_a_diagnostic_of_another_k_is_not_drawn(tmp_path):
    entries = [{"layer": layer, "k": 12, "f1": f1} for layer, f1 in F1.items()]
    (tmp_path / "result.json").write_text(json.dumps({"teacher": TEACHER, "layers": entries}))
    result, _ = compared(tmp_path, layer_study(list(F1), seeds=1), diagnostic=tmp_path / "result.json")
    (lacks,) = (figure.lacks for figure in result.figures if figure.figure == 4)
    assert "three layers or more of k 3072" in lacks


@pytest.mark.parametrize("content", ["{", "[]", '{"layers": 3}', '{"layers": [{"layer": 8}]}'])
def test_a_diagnostic_that_is_none_is_named(tmp_path, content):
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(WsdDataError, match=r"result.json is not a result of choose-layer"):
        compared(tmp_path, layer_study((8, 10), seeds=1), diagnostic=tmp_path / "result.json")


def test_the_command(tmp_path):
    store(tmp_path / "runs", layer_study((8, 10), seeds=1))
    run = mlsm("compare", "--json", cwd=tmp_path, check=0)
    assert json.loads(run.stdout)["compared"] == ["mlsm-l8", "mlsm-l10"]
    assert (tmp_path / "runs" / "comparison" / "tasks.csv").is_file()
    assert "nowhere" in error_line(mlsm("compare", "nowhere", cwd=tmp_path, check=2))
