"""The page agrees with the files, whatever the names contain; with given scores, and with trained students."""

import csv
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from statistics import fmean
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest
from tiny_records import a_blimp_record, digest, store
from tiny_store import write_store
from tiny_study import arm, pair, write_log

from mlsm.common.progress import silent
from mlsm.evaluation.comparison import compare as comparing
from mlsm.evaluation.comparison import figures
from mlsm.evaluation.comparison.arms import find_arms
from mlsm.evaluation.comparison.compare import compare
from mlsm.evaluation.comparison.conclusion import points
from mlsm.evaluation.comparison.config import CompareConfig, Spent, StudyFacts
from mlsm.evaluation.comparison.curves import quiet_step_seconds, read_courses
from mlsm.evaluation.comparison.effects import ArmScores
from mlsm.evaluation.comparison.significance import Interval
from mlsm.evaluation.comparison.tables import escape_latex, table_of_parts, table_of_scores
from mlsm.evaluation.tasks.finetuning.config import FinetuneConfig
from mlsm.evaluation.tasks.finetuning.miniature import write_miniatures
from mlsm.evaluation.tasks.finetuning.suite import finetune
from mlsm.terminal.comparison import comparison
from student.config import StudentConfig
from student.train import train

HOSTILE = '<script>alert("x")</script> $\\frac{1}$ & "q" \u202e_'
DIFFERENCES = [[0.02, 0.01, 0.00], [0.01, 0.03, 0.02], [0.03, -0.01, 0.01], [0.02, 0.02, 0.03]]
EARLY = {seed: {"cola": 0.3, "mrpc": 0.4, "rte": 0.5 + seed / 100} for seed in range(4)}
LOSSES = {5: 3.0, 10: 2.0, 20: 1.0}
STUDY = StudyFacts(
    title=f"Title {HOSTILE}",
    question=f"Question {HOSTILE}?",
    primary=("mlsm", "mlm"),
    secondary=(("mlsm at 50%", "mlm"), ("mlsm", "kd")),
    exploratory=("Held-out loss.",),
    seeds=(0, 1, 2, 3),
    parts=(Spent(name=HOSTILE, predicted_seconds=7200, measured_seconds=90, bytes=2_000_000),),
    accounts={"MLSM": {"encoding": 100.0, "the teacher's training": 1000.0}, "MLM": {}},
    not_run=(f"No {HOSTILE}.",),
)


class Page(HTMLParser):
    """The text of a page, its tags and addresses."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.addresses, self.said = [], [], []
        self.feed(path.read_text(encoding="utf-8"))
        self.text = re.sub(r"\s+", " ", "".join(self.said))

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in ("href", "src", "xlink:href")]

    def handle_data(self, data):
        self.said.append(data)


def table(path):
    return list(csv.DictReader(Path(path).open(encoding="utf-8")))


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """(page, directory of all, result) of a study with hostile names, checkpoints, logs, floor and ceiling."""
    directory = tmp_path_factory.mktemp("study")
    found = pair(DIFFERENCES) + arm("mlsm", EARLY, fraction=0.5) + arm("mlm", EARLY, fraction=0.5)
    found = [record | {"path": str(directory / record["path"]), "model": record["model"]} for record in found]
    teacher = {"objective": None, "teacher": None, "model": found[0]["teacher"]}
    untrained = {"step": 0, "fraction": 0.0, "model": "untrained", "objective": "untrained"}
    for base, facts in ((0.2, untrained), (0.8, teacher)):
        ends = arm("mlsm", {0: dict.fromkeys(("cola", "mrpc", "rte"), base)}, name=facts["model"])
        found += [record | {"identity": None, "path": facts["model"]} | facts for record in ends]
    mtl = arm("mtl", {9: {"rte": 0.4}}, name="other")
    found += [record | {"model": f"{HOSTILE}{record['model']}"} for record in mtl]
    for objective in ("mlsm", "mlm"):
        for seed in range(4):
            losses = {step * 50: loss + seed / 10 for step, loss in LOSSES.items()}
            write_log(directory / "runs" / f"{objective}-seed{seed}", losses)
    store(directory, found)
    result = write(directory)
    return Path(result.report), directory, result


def write(directory, study=STUDY):
    """Compare the records of a directory into its `report`, without the paper's figures, which take time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparing, "draw_paper_figures", lambda *_: [])
        settings = CompareConfig(results=(directory / "evaluations",), output=directory / "report")
        return compare(settings, silent, study)


@pytest.fixture
def page_alone(monkeypatch):
    """The figures of the paper, which `compare` draws as well, are the matter of other tests, and take time."""
    monkeypatch.setattr(comparing, "draw_paper_figures", lambda *_: [])


def test_the_page_answers_its_question(reported):
    page = Page(reported[0])
    effect = table(reported[1] / "report" / "report-hypotheses.csv")[0]
    assert effect["pairs"] == "4" and float(effect["difference"]) == pytest.approx(fmean(map(fmean, DIFFERENCES)))
    shown = f"{100 * float(effect['difference']):.2f} points higher than MLM (95 % interval +"
    assert f"MLSM scores {shown}{100 * float(effect['low']):.2f}" in page.text
    for words in ("Secondary hypotheses", "there are no records of fine-tunings of kd", "treats scores as independent"):
        assert words in page.text
    for words in ("floor", "ceiling", "What training cost", "90 s", "2 h", "2 MB", "Held-out loss.", "exploratory"):
        assert words in page.text


def test_the_page_needs_nothing_but_itself(reported):
    page = Page(reported[0])
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert page.tags.count("svg") == len(list(reported[0].parent.glob("*.svg"))) == 1 + 4 + 4
    text = reported[0].read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in text and "@media print" in text and 'name="viewport"' in text
    outside = [a for a in page.addresses if not a.startswith("#")]
    assert outside and all((reported[0].parent / unquote(address)).is_file() for address in outside)
    assert not re.findall(r"url\((?!#)|@import|http-equiv", text)
    assert str(reported[1]) not in text  # no machine's paths


def test_names_are_text_and_not_markup(reported):
    text = reported[0].read_text(encoding="utf-8")
    assert "<script" not in text and "\u202e" not in text
    assert "&lt;script&gt;alert(&#34;x&#34;)&lt;/script&gt;" in text
    page = Page(reported[0])
    assert f"Title {HOSTILE}".replace("\u202e", r"\u202e") in page.text


def test_a_dollar_in_a_name_or_setting_is_no_mathematics(tmp_path):
    """Where matplotlib reads mathematics, an unpaired brace after two of them ends the command."""
    found = [
        record
        for name, wordnet in (("a", "x_{1$/$"), ("b", "w"))
        for fraction in (0.5, 1.0)
        for record in arm("mlsm", {1: {"rte": 0.5}}, name, fraction, of_identity={"wordnet": wordnet})
    ]
    result = compare(CompareConfig(results=(store(tmp_path, found),), output=tmp_path / "out"), silent)
    figure = next(figure for figure in result.figures if figure.figure == 6)
    drawn = " ".join(ElementTree.parse(figure.files[0]).getroot().itertext())
    assert drawn.count("x_{1$/$") == 2, "in the legend and in the caption"


def test_figures_in_the_page_share_no_id(reported):
    ids = re.findall(r'\sid="([^"]+)"', reported[0].read_text(encoding="utf-8"))
    assert len(ids) == len(set(ids)) > 50
    used = {a[1:] for a in Page(reported[0]).addresses if a.startswith("#")}
    used |= set(re.findall(r"url\(#([^)]+)\)", reported[0].read_text(encoding="utf-8")))
    assert used <= set(ids)


def test_csv_files_hold_what_is_drawn(reported, tmp_path, monkeypatch):
    drawn = {}
    monkeypatch.setattr(
        figures, "save_figure", lambda figure, stem, header, rows, png: drawn.update({stem.name: (figure, rows)}) or []
    )
    _, directory, result = reported
    figures.draw_page_figures(result, tmp_path)
    assert len(drawn) == 9
    for name, (_, rows) in drawn.items():
        saved = table(directory / "report" / f"{name}.csv")
        assert [[str(x) if x is not None else "" for x in row] for row in rows] == [list(row.values()) for row in saved]
    for axis in ("steps", "tokens", "flops", "seconds"):
        for what in ("held-out-loss", "scores"):
            _check_lines(*drawn[f"report-{what}-by-{axis}"])
    _check_effect(*drawn["report-differences"])


def _check_lines(figure, rows):
    """Every line on the axes is one arm's and seed's rows."""
    lines = [tuple(zip(*line.get_data(), strict=True)) for line in figure.axes[0].get_lines()]
    series = {}
    for name, seed, _, x, y in rows:
        series.setdefault((name, seed), []).append((x, y))
    ends = [points for (name, _), points in series.items() if name in ("floor", "ceiling")]
    levels = [line[0][1] for line in lines if len({y for _, y in line}) == 1 and len(line) == 2 and line[0][0] == 0]
    assert sorted(levels) == sorted(y for ((_, y),) in ends)
    expected = [tuple(points) for (name, _), points in series.items() if name not in ("floor", "ceiling")]
    assert len(lines) == len(expected) + len(ends) and all(points in lines for points in expected)


def _check_effect(figure, rows):
    means = [100 * mean for _, seed, mean, *_ in rows if seed == "mean"]
    points = [line.get_xdata()[0] for line in figure.axes[0].get_lines() if len(line.get_xdata()) == 1]
    bounds = [tuple(line.get_xdata()) for line in figure.axes[0].get_lines() if line.get_linewidth() == 2]
    assert points == pytest.approx(means)
    assert bounds == [(100 * low, 100 * high) for _, seed, _, low, high in rows if seed == "mean"]


def test_seconds_are_those_of_a_quiet_machine(reported):
    """The fastest tenth of the steps take half a second each, all others ten seconds."""
    (course, *others) = read_courses(find_arms(reported[2].models, STUDY).arms)
    assert course.step_seconds == pytest.approx(0.5) and len(others) == 7
    rows = table(reported[1] / "report" / "report-held-out-loss-by-seconds.csv")
    first = [row for row in rows if (row["arm"], row["pre-training seed"]) == ("MLSM", "1")]
    assert [float(row["seconds"]) for row in first] == pytest.approx([125, 250, 500])
    assert [float(row["held-out-loss"]) for row in first] == pytest.approx([3.1 / 4, 2.1 / 4, 1.1 / 4])
    scores = table(reported[1] / "report" / "report-scores-by-seconds.csv")
    mean = [row for row in scores if (row["arm"], row["pre-training seed"]) == ("MLM", "mean")]
    assert [float(row["seconds"]) for row in mean] == pytest.approx([250, 500])
    assert float(mean[0]["scores"]) == pytest.approx(fmean((0.3 + 0.4 + 0.5 + seed / 100) / 3 for seed in range(4)))


def test_steps_that_differ_in_operations_count_by_these():
    """Ten steps of 0.5 s and ten of twice the operations and 1 s, two of three on a busy machine."""
    lines, flops = [], 0
    for step in range(1, 21):
        own = 100 if step <= 10 else 200
        flops += own
        lines.append({"step": step, "flops": flops, "flops_per_second": 200 if step % 3 == 0 else 100})
    assert quiet_step_seconds(lines) == pytest.approx((10 * 0.5 + 10 * 1.0) / 20)
    assert quiet_step_seconds([{"step": 1, "loss": 3.0}]) is None


def test_the_page_says_what_was_the_same_and_what_was_measured(reported):
    page, directory, _ = reported
    same = {row["setting"]: row["value"] for row in table(directory / "report" / "report-same.csv")}
    assert (same["encoder"], same["layer"], same["window max_length"]) == ("bert-2x32", "10", "128")
    assert not {"objective", "run_seed", "step"} & same.keys()  # they differ
    rows = {row["task"]: row for row in table(directory / "report" / "report-measures.csv")}
    assert [rows["RTE"][name] for name in ("encoder", "split", "n_train", "n")] == ["fine-tuned", "dev", "1000", "100"]
    text = Page(page).text
    assert text.index("What differs between") < text.index("What was the same") < text.index("What was measured")


def test_costs_have_accounts_that_add_up(reported):
    rows = {(row["arm"], row["pre-training seed"]): row for row in table(reported[0].parent / "report-costs.csv")}
    mlsm, mlm = rows["MLSM", "2"], rows["MLM", "2"]
    accounts = ("seconds", "with encoding", "with the teacher's training")
    assert [float(mlsm[name]) for name in accounts] == pytest.approx([500, 600, 1600])
    assert [float(mlm[name]) for name in accounts] == pytest.approx([500, 500, 500])
    other = rows["MLSM+MLM", "9"]  # without a log, and of an arm that no account names
    assert [other[name] for name in accounts] == ["", "", ""] and other["FLOPs"] == "9000000000000.0"
    assert (mlm["steps"], mlm["tokens"], mlm["held-out loss"]) == ("1000", "64000", "1.2")
    assert mlm["log"] == "../runs/mlm-seed2/log.jsonl" and len(rows) == 4 + 4 + 1
    assert "Seconds of encoding are predicted" in Page(reported[0]).text


def test_models_that_are_no_longer_in_the_recipe_are_left_out_with_one_note(tmp_path):
    """Of two equal models, one of an arm that was renamed and trained again, the one in the recipe is shown."""
    found, rows = pair(DIFFERENCES), {seed: {"rte": 0.5} for seed in range(2)}
    found += arm("mtl", rows, "both") + arm("mtl", rows, "both", fraction=0.5)
    found += [record | {"model": f"a-{record['model']}"} for record in found if record["model"] == "mlm-seed0"]
    beside = {"objective": None, "identity": None, "teacher": None, "run_seed": None, "step": None, "fraction": None}
    found += [record | beside for name in ("minilm", "gone") for record in arm("mlm", {3: {"rte": 0.6}}, name)]
    store(tmp_path, found)
    arms = {name: tuple(f"{name}-seed{seed}" for seed in range(4)) for name in ("mlsm", "mlm")}
    study = StudyFacts(title="", question="", primary=("mlsm", "mlm"), arms=arms, models=("minilm-seed3",))
    result = write(tmp_path, study)
    names = {model.label for model in result.models}
    assert names == {*arms["mlsm"], *arms["mlm"], "minilm-seed3"}
    assert [arm.name for arm in result.arms.arms] == ["mlsm", "mlm", "minilm-seed3"]
    (note,) = (note for note in result.notes if "recipe" in note)
    assert note == "Not in the recipe, so not shown: both-seed0, both-seed1, gone-seed3."
    assert note in Page(tmp_path / "report" / "report.html").text


@pytest.mark.usefixtures("page_alone")
def test_equal_records_give_equal_bytes_and_nothing_old_stays(reported, tmp_path):
    page, directory, _ = reported
    before = {path.name: path.read_bytes() for path in page.parent.iterdir()}
    (page.parent / "mine.csv").write_text("kept")
    write(directory)
    assert {path.name: path.read_bytes() for path in page.parent.iterdir()} == before | {"mine.csv": b"kept"}
    (page.parent / "mine.csv").unlink()
    few = store(tmp_path, pair([[0.01]], ("rte",)))
    compare(CompareConfig(results=(few,), output=page.parent), silent)
    assert not list(page.parent.glob("report-*by-*")) and not (page.parent / "report-parts.csv").exists()
    write(directory)
    assert {path.name: path.read_bytes() for path in page.parent.iterdir()} == before


def test_latex_tables_are_tabulars(reported):
    for path in reported[0].parent.glob("*.tex"):
        lines = path.read_text(encoding="utf-8").splitlines()
        assert lines[0].startswith("% ") and r"\toprule" in lines and r"\bottomrule" in lines
        columns = lines[1].count("r") - lines[1].count("tabular") + 1
        body = [line for line in lines[3:] if line.endswith(r"\\")]
        assert all(line.startswith("{}") for line in body), "the line before would take [ or * as its own"
        assert body and all(len(re.findall(r"(?<!\\)&", line)) == columns - 1 for line in body)
    assert escape_latex(("50_% & {x}", "|−1 \\ ^~$#")) == (
        r"50\_\% \& \{x\} [\textbar{}$-$1 \textbackslash{} \textasciicircum{}\textasciitilde{}\$\#]"
    )


def test_compare_writes_the_page_and_says_where(tmp_path):
    settings = CompareConfig(results=(store(tmp_path, pair(DIFFERENCES)),), output=tmp_path / "out")
    result = compare(settings, silent)
    assert result.report == str(tmp_path / "out" / "report.html")
    assert f"Report:   {result.report}" in comparison(result, settings)
    page = Page(Path(result.report))
    assert "MLSM scores 1.58 points higher than MLM" in page.text
    assert "No hypothesis was written down before the scores were seen" in page.text
    assert "There are no records of a lower bound" in page.text and "No curves of held-out loss" in page.text
    assert result.conclusion and all(sentence in page.text for sentence in result.conclusion)


@pytest.mark.usefixtures("page_alone")
def test_only_tasks_that_are_learned_count(tmp_path):
    """mlm is above the untrained student in cola for certain, in mrpc by little, and in rte by chance."""
    floors = {seed: {"cola": 0.2, "mrpc": 0.49 + seed / 100, "rte": 0.50 + 0.1 * (-1) ** seed} for seed in range(4)}
    study = StudyFacts(title="", question="", primary=("mlsm", "mlm"), seeds=(0, 1, 2, 3), learned_by="mlm")
    for untrained, counted in ((False, "cola mrpc rte"), (True, "cola mrpc")):
        out = tmp_path / str(untrained)
        found = pair(DIFFERENCES) + (arm("mlm", floors, fraction=0) if untrained else [])
        compare(CompareConfig(results=(store(out, found),), output=out), silent, study)
        text = Page(out / "report.html").text
        (row,) = table(out / "report-hypotheses.csv")
        assert row["tasks"] == counted
        assert ("so all tasks are included for now" in text) is not untrained
        assert (
            "The means are over the tasks in which mlm is above" in text and "Shown, but part of no mean: rte." in text
        ) is untrained


@pytest.mark.usefixtures("page_alone")
def test_a_row_names_the_tasks_of_its_mean_and_those_of_its_test(tmp_path):
    """The plan averages two tasks of three; the paper's test has the scores of all three."""
    study = StudyFacts(title="", question="", primary=("mlsm", "mlm"), seeds=(0, 1, 2, 3), tasks=("cola", "mrpc"))
    compare(CompareConfig(results=(store(tmp_path, pair(DIFFERENCES)),), output=tmp_path / "out"), silent, study)
    (row,) = table(tmp_path / "out" / "report-hypotheses.csv")
    wins = {(row["model"], row["against"]): row for row in table(tmp_path / "out" / "report-wins.csv")}
    means_of_task = [fmean(task) for task in zip(*DIFFERENCES, strict=True)]
    for found in (row, wins["MLSM", "MLM"]):
        assert found["tasks"] == "cola mrpc" and found["scores_tasks"] == "cola mrpc rte"
        assert float(found["difference"]) == pytest.approx(fmean(means_of_task[:2]))
        assert int(found["scores"]) == 2 * (1 + 2 + 1)  # fine-tunings, metrics of the tasks
        assert int(found["wins"]) == 2 * sum(
            metrics for metrics, mean in zip((1, 2, 1), means_of_task, strict=True) if mean > 0
        )
    assert means_of_task[2] != 0 and "CoLA, MRPC" in (tmp_path / "out" / "report-hypotheses.tex").read_text()
    text = Page(tmp_path / "out" / "report.html").text
    assert text.count(f"{row['wins']} of 8 in 3 tasks") == 2 and "Mean: over CoLA, MRPC. Below:" in text


@pytest.mark.usefixtures("page_alone")
@pytest.mark.parametrize("rows", [DIFFERENCES[:2], [[0.05] * 3] * 4], ids=["two pairs", "no variation"])
def test_tables_show_no_interval_that_the_conclusion_does_not_claim(tmp_path, rows):
    compare(CompareConfig(results=(store(tmp_path, pair(rows)),), output=tmp_path / "out"), silent)
    shown = (tmp_path / "out" / "report-hypotheses.tex").read_text()
    assert f"CoLA, MRPC, RTE & {points(fmean(map(fmean, rows)))} [--] & {len(rows)} & -- & -- & -- & -- &" in shown
    assert f", n = {len(rows)} [" in (tmp_path / "out" / "report-wins.tex").read_text()


@pytest.mark.usefixtures("page_alone")
def test_one_seed_does_not_tell_what_is_learned(tmp_path):
    floor = arm("mlm", {0: {"cola": 0.2, "mrpc": 0.9, "rte": 0.2}}, fraction=0)
    study = StudyFacts(title="", question="", primary=("mlsm", "mlm"), seeds=(0,), learned_by="mlm")
    found = store(tmp_path, pair(DIFFERENCES[:1]) + floor)
    compare(CompareConfig(results=(found,), output=tmp_path / "out"), silent, study)
    text = Page(tmp_path / "out" / "report.html").text
    assert "more than two standard errors (it has one pre-training seed), so all tasks are included for now" in text
    assert "The means are over the tasks" not in text


def test_each_encoder_has_a_lower_bound_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr("mlsm.evaluation.comparison.compare.draw_paper_figures", lambda *_: [])
    found = pair(DIFFERENCES) + arm("mlsm", EARLY, fraction=0.5) + arm("mlm", EARLY, fraction=0.5)
    tasks = EARLY[next(iter(EARLY))]
    for name, value in (("bert-2x32", 0.3), ("bert-4x256", 0.4)):
        scores = {1: dict.fromkeys(tasks, value)}
        found += arm("mlm", scores, f"untrained-{name}", fraction=0, encoder=name, weights=digest(name))
    compare(CompareConfig(results=(store(tmp_path, found),), output=tmp_path / "out"), silent)
    drawn = {row["arm"]: float(row["scores"]) for row in table(tmp_path / "out" / "report-scores-by-steps.csv")}
    assert drawn["floor, bert-2x32"] == pytest.approx(0.3) and drawn["floor, bert-4x256"] == pytest.approx(0.4)


@pytest.mark.usefixtures("page_alone")
def test_many_arms_have_no_conclusion(tmp_path):
    found = [r for i in range(4) for r in arm("mlsm", {0: {"rte": 0.5 + i / 10}}, name=f"m{i}", layer=i, identity=None)]
    compare(CompareConfig(results=(store(tmp_path, found),), output=tmp_path / "out"), silent)
    page = Page(tmp_path / "out" / "report.html")
    assert "No conclusion: without a study" in page.text
    wins = {(row["model"], row["against"]): row for row in table(tmp_path / "out" / "report-wins.csv")}
    assert len(wins) == 12 and float(wins["MLSM, l 3", "MLSM, l 0"]["difference"]) == pytest.approx(0.3)


def test_records_of_blimp_alone_have_a_page(tmp_path):
    found = [a_blimp_record(name, {"x": score}, objective=name) for name, score in (("mlm", 0.6), ("kd", 0.7))]
    compare(CompareConfig(results=(store(tmp_path, found),), output=tmp_path / "out"), silent)
    text = Page(tmp_path / "out" / "report.html").text
    assert "there are no records of fine-tunings of MLM and of KD" in text and "BLiMP" in text and "60.0" in text


@pytest.mark.usefixtures("page_alone")
def test_scores_of_frozen_encoders_are_named_on_the_page(tmp_path):
    figures = [{"metric": f"accuracy_{part}", "value": 0.5, "n": 10} for part in ("dev", "tuning")]
    frozen = {"suite": "frozen", "seed": None, "head": None, "figures": figures}
    frozen |= {"chosen": {}, "settings": {"frozen": True}}
    found = [record | frozen for record in pair([[0.01]] * 2, ("rte",))[::2]]
    compare(CompareConfig(results=(store(tmp_path, found),), output=tmp_path / "out"), silent)
    text = Page(tmp_path / "out" / "report.html").text
    assert "Scores of frozen encoders are not on this page but in frozen.csv." in text
    assert "no pairs" in text and "not known whether MLSM is better than MLM: there are no records" in text


@pytest.mark.usefixtures("page_alone")
def test_an_untrained_encoder_alone_has_a_page(tmp_path):
    found = arm("mlsm", {1: {"rte": 0.5}}, fraction=0)
    compare(CompareConfig(results=(store(tmp_path, found),), output=tmp_path / "out"), silent)
    text = Page(tmp_path / "out" / "report.html").text
    assert "floor" in text and "50.0" in text and "No conclusion: there are no two arms to compare." in text


@pytest.mark.usefixtures("page_alone")
def test_means_over_several_ways_to_fine_tune_say_so(tmp_path):
    """Both models of seeds 2 and 3 are fine-tuned with other settings; then only one model, with further seeds."""
    found, longer = pair([row[:1] for row in DIFFERENCES], ("rte",)), {"settings": {"learning_rate": 2e-5, "epochs": 9}}
    pooled = [record | longer if record["run_seed"] > 1 else record for record in found]
    further = [record | longer | {"seed": record["seed"] + 2} for record in found if record["model"] == "mlsm-seed1"]
    why = "(rte: settings differ (epochs: 3 and 9))"
    note = f"were not all made in one way {why}, so its averages cannot be compared."
    result = compare(CompareConfig(results=(store(tmp_path / "pooled", pooled),), output=tmp_path / "out"), silent)
    assert f"The pairs were fine-tuned in different ways {why}, so their mean mixes" in " ".join(result.conclusion)
    assert [one for one in result.notes if note in one] == [
        f"The fine-tuning runs of {name} {note}" for name in ("MLSM", "MLM")
    ]
    records = store(tmp_path / "further", [*found, *further])
    result = compare(CompareConfig(results=(records,), output=tmp_path / "out"), silent)
    assert "different ways" not in " ".join(result.conclusion)
    assert f"The fine-tuning runs of MLSM {note}" in result.notes


@pytest.mark.usefixtures("page_alone")
def test_arms_without_a_common_task_have_a_page(tmp_path):
    found = [
        record
        for layer, task in enumerate(("rte", "mrpc", "cola"))
        for fraction in (0.5, 1.0)
        for record in arm("mlsm", {1: {task: 0.5}}, name=task, fraction=fraction, layer=layer, identity=None)
    ]
    compare(CompareConfig(results=(store(tmp_path, found),), output=tmp_path / "out"), silent)
    rows = table(tmp_path / "out" / "report-scores.csv")
    assert [row["score"] for row in rows] == ["rte", "mrpc", "cola"]
    assert "no task" in Page(tmp_path / "out" / "report.html").text


@pytest.mark.usefixtures("page_alone")
@pytest.mark.parametrize("path", ["x" * 5000, "a\0b", "../" * 50, "~"])
def test_a_record_may_name_any_path(tmp_path, path):
    found = [record | {"path": path} for record in pair([[0.01]], ("rte",))]
    compare(CompareConfig(results=(store(tmp_path, found),), output=tmp_path / "out"), silent)
    assert "No curves of held-out loss" in Page(tmp_path / "out" / "report.html").text


def test_without_matplotlib_the_page_has_its_tables(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("matplotlib.")]:
        monkeypatch.delitem(sys.modules, name)  # an earlier test may have imported a part
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    compare(CompareConfig(results=(store(tmp_path, pair(DIFFERENCES)),), output=tmp_path / "out"), silent)
    page = Page(tmp_path / "out" / "report.html")
    assert "svg" not in page.tags and "MLSM scores 1.58 points higher" in page.text


def test_pages_of_lsps_are_linked_where_they_exist(reported):
    view = reported[1] / "lsps"
    view.mkdir()
    (view / "view.json").write_text(json.dumps({"made_by": "mlsm show-lsp", "files": {}}))
    (view / "index.html").write_text("")
    (reported[1] / "foreign").mkdir()
    (reported[1] / "foreign/view.json").write_text("{}")
    page = Page(Path(write(reported[1]).report))
    assert [a for a in page.addresses if a.endswith("index.html")] == ["../lsps/index.html"]


def test_what_a_damaged_log_holds_is_drawn(tmp_path):
    found = [record | {"path": str(tmp_path / record["path"])} for record in pair([[0.01]], ("rte",))]
    write_log(tmp_path / "runs/mlsm-seed0", {10: 2.0, 20: 1.0})
    log = tmp_path / "runs/mlsm-seed0/log.jsonl"
    lines = log.read_text().splitlines()
    lines[3], lines[4] = "{", json.dumps({"step": 4, "loss": "x", "tokens": "y", "flops": None, "held_out": 3})
    log.write_text("\n".join([*lines, json.dumps({"step": 21, "loss": 1.0, "held_out": {"loss": "no"}})]) + "\n")
    compare(CompareConfig(results=(store(tmp_path, found),), output=tmp_path / "out"), silent)
    rows = table(tmp_path / "out" / "report-held-out-loss-by-tokens.csv")
    assert [row["tokens"] for row in rows if row["pre-training seed"] == "0"] == ["640", "1280"]


def test_trained_students_end_to_end(tmp_path, one_thread, caplog):
    """Two objectives and two seeds, really trained, fine-tuned at two checkpoints."""
    runs = []
    lsps = write_store(tmp_path / "store", k=24)
    for objective in ("mlsm", "mlm"):
        for seed in (0, 1):
            runs.append(str(tmp_path / "runs" / f"{objective}-{seed}"))
            small = {"encoder": "bert-2x32", "batch_windows": 2, "micro_batch": 2, "device": "cpu", "save_every": 0}
            checkpoints = {"max_steps": 4, "checkpoints": (0.5, 1.0), "eval_every": 1, "eval_windows": 2}
            named = {"store": lsps.path, "objective": objective, "seed": seed, "run_dir": runs[-1]}
            train(StudentConfig(**named, **small, **checkpoints))
    data = write_miniatures(tmp_path / "data")
    tuning = FinetuneConfig(
        models=tuple(runs), step="all", tasks=("rte",), seeds=1, data_dir=data, output=tmp_path, epochs=1,
        lr=1e-3, device="cpu", max_length=16,
    )  # fmt: skip
    finetune(tuning)
    result = compare(CompareConfig(results=(tmp_path / "evaluations",), output=tmp_path / "out"), silent)
    page = Page(Path(result.report))
    assert "2 pairs of pre-training runs are too few to tell whether MLSM is better than MLM" in page.text
    assert page.tags.count("svg") == 9 + 2  # the paper's figures 6 and 7
    ElementTree.parse(tmp_path / "out" / "report-scores-by-flops.svg")
    logged = [json.loads(line) for line in (tmp_path / "runs/mlsm-1/log.jsonl").read_text().splitlines()]
    expected = [(line["tokens"], line["held_out_vs_baseline"]) for line in logged if "held_out" in line]
    rows = table(tmp_path / "out" / "report-held-out-loss-by-tokens.csv")
    drawn = [row for row in rows if (row["arm"], row["pre-training seed"]) == ("MLSM", "1")]
    assert [(int(row["tokens"]), float(row["held-out-loss"])) for row in drawn] == expected
    costs = table(tmp_path / "out" / "report-costs.csv")
    assert {row["arm"] for row in costs} == {"MLSM", "MLM"} and all(float(row["s a step"]) > 0 for row in costs)
    (tmp_path / "runs/mlsm-1").rename(tmp_path / "runs/moved")
    (tmp_path / "runs/mlm-1").rename(tmp_path / "runs/mlsm-1")  # another run where the record's was
    compare(CompareConfig(results=(tmp_path / "evaluations",), output=tmp_path / "again"), silent)
    rows = table(tmp_path / "again" / "report-held-out-loss-by-tokens.csv")
    drawn = {(row["arm"], row["pre-training seed"]) for row in rows if row["pre-training seed"] != "mean"}
    assert drawn == {("MLSM", "0"), ("MLM", "0")}
    assert "the run there is not that of the record: objective" in caplog.text


# -- in a browser -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_phones_and_desks_in_light_and_dark(reported, browser, scheme):
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    for width in (1400, 1000, 390):
        metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width == 390}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        browser.get(reported[0].as_uri())
        assert browser.get_log("browser") == []
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    style = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
    paper, ink = (
        browser.execute_script(style, "body", "backgroundColor"),
        browser.execute_script(style, "body", "color"),
    )
    assert browser.execute_script(style, "figure svg text", "fill") == ink != paper
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})  # other tests share the browser
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    brightness = [sum(map(int, re.findall(r"\d+", color)[:3])) for color in (paper, ink)]
    assert (brightness[0] > brightness[1]) == (scheme == "light")


def test_scores_below_zero_have_a_minus_and_words_between_their_bounds():
    scores = [ArmScores("a", 3, {"cola": Interval(3, -0.0001, -0.02, 0.01)}), ArmScores("b", 3, {"cola": None})]
    assert table_of_scores(scores, ()).rows == [["a", "3", ("0.0", "−2.0 to 1.0")], ["b", "3", "–"]]


def test_a_score_that_not_all_seeds_have_says_how_many_have_it():
    found = {"cola": Interval(3, 0.5, 0.4, 0.6), "rte": Interval(2, 0.5, 0.4, 0.6), "wic": Interval(1, 0.5)}
    (row,) = table_of_scores([ArmScores("a", 3, found)], ()).rows
    assert row[2:] == [("50.0", "40.0 to 60.0"), ("50.0", "40.0 to 60.0, n = 2"), ("50.0", "n = 1")]


def test_large_amounts_are_shown_in_full_or_with_one_digit_before_the_point():
    """As %.3g would not: 1.23e+04 h, 1e+03 MB."""
    found = table_of_parts([
        Spent(name="days", predicted_seconds=12_345 * 3600, bytes=999_700_000),
        Spent(name="centuries", predicted_seconds=9_999_000 * 3600, bytes=1_234 * 10**9),
    ])  # fmt: skip
    assert [(row[2], row[4]) for row in found.rows] == [("12,345 h", "1,000 MB"), ("1.00e7 h", "1,234 GB")]


def test_seeds_of_an_arm_share_a_row_of_costs():
    measured = [Spent(name=f"train-student/mlm-seed{seed}", measured_seconds=60.0 + seed) for seed in (0, 10)]
    guessed = Spent(name="train-student/mlm-seed2", predicted_seconds=90.0, bytes=500)
    table = table_of_parts((*measured, Spent(name="finetune/mlm-seed0"), guessed))
    assert table.rows == [["train-student/mlm", "3", "90 s", "2.17 min", "500 bytes"]]
    assert len(table.data[1]) == 4, "the file has every part"
