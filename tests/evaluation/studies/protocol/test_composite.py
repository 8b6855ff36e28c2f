"""The composite is the mean of scores between two anchors; hypotheses are tested as scipy tests them; nothing of the
primary arms is shown before all of their seeds are scored, neither in print nor on the page."""

import csv
import html
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from scipy import stats
from tiny_records import a_record, digest
from tiny_study import identity

from mlsm.commands.study import _composite as shown
from mlsm.commands.study import show as summary
from mlsm.common.errors import ComparisonError, StudyError
from mlsm.common.progress import silent
from mlsm.evaluation import records
from mlsm.evaluation.comparison.compare import compare, keep_withheld
from mlsm.evaluation.comparison.conclusion import conclude_contrasts
from mlsm.evaluation.comparison.config import CompareConfig
from mlsm.evaluation.studies.protocol.composite import compose
from mlsm.evaluation.studies.protocol.config import StudyConfig
from mlsm.evaluation.studies.protocol.description import read_study
from mlsm.evaluation.studies.protocol.facts import facts_of, find_changes, keep_plan
from mlsm.evaluation.studies.protocol.parts import plan
from mlsm.evaluation.studies.protocol.study import study

SEEDS = (0, 1, 2)
STEPS = 10
TEACHER = {"pos": 0.9, "entities": 0.7, "cosine": 0.8}
UNTRAINED = {"pos": 0.5, "entities": 0.1, "cosine": 0.4}


@pytest.fixture
def described(tmp_path):
    """A study of three arms."""
    recipe = {
        "study": {
            "title": "A title", "question": "A question?", "primary": ["mlsm", "regress"],
            "secondary": [["mlsm", "mlm"], ["regress", "mlm"]], "seeds": list(SEEDS), "curves": ["mlm"],
            "models": ["/models/teacher"],
            "composite": {
                "measures": ["conll2003/pos", "conll2003/entities", "stsb/cosine"], "part": "test", "untrained": "mlm",
                "teacher": "/models/teacher", "margin": 5,
            },
            "stores": {"hidden": {"command": "encode-hidden"}, "lsp": {"hidden": "hidden", "seed": "each"}},
            "arms": {
                "mlsm": {"store": "lsp"}, "regress": {"store": "hidden", "objective": "regress"},
                "mlm": {"store": "hidden", "objective": "mlm", "checkpoints": [0, 1.0]},
            },
        },
        "encode-hidden": {"layer": 4}, "encode-lsp": {"k": 64},
        "train-student": {
            "encoder": "bert-2x32", "dropout": 0.0, "max-steps": STEPS, "batch-windows": 8, "lr": 1e-3,
        },
        "frozen": {"tasks": ["conll2003", "stsb"]},
    }  # fmt: skip
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    return read_study(str(path))


def seed_of(name):
    """The pre-training seed in a student's name."""
    found = re.search(r"-seed(\d+)", name)
    return int(found[1]) if found else None


def score(directory, name, scores):
    """Write the frozen records of a model: scores by metric, on dev for STS-B, which has no test set, else on test."""
    for task, metrics in (("conll2003", ("entities", "pos", "chunks")), ("stsb", ("cosine",))):
        part = "dev" if task == "stsb" else "test"
        figures = [
            {"metric": f"{metric}_{one}", "value": scores.get(metric, 0.3) - (one == "tuning") / 100, "n": 9}
            for metric in metrics
            for one in ("tuning", part)
        ]
        fields = {"suite": "frozen", "seed": None, "figures": figures, "weights": digest(name), "chosen": {}}
        fields |= {"run_seed": seed_of(name)}
        record = a_record(name, "cola", 0, [0.0]) | {"task": task, "settings": {"frozen": True}, "model": name}
        records.write(directory, record | fields)


def between(share, jitter=0.0):
    """Scores that lie at a share of the way from the untrained encoder to the teacher."""
    return {name: low + (share + jitter) * (TEACHER[name] - low) for name, low in UNTRAINED.items()}


def fill(directory, mlsm=(0.6, 0.7, 0.65), regress=(0.5, 0.52, 0.58), mlm=(0.3, 0.2, 0.25)):
    score(directory, "teacher", TEACHER)
    for seed in SEEDS:
        score(directory, f"mlm-seed{seed}-step-{0:08}", between(0.0, (seed - 1) / 100))
        score(directory, f"mlm-seed{seed}-step-{STEPS:08}", between(mlm[seed]))
        for name, values in (("mlsm", mlsm), ("regress", regress)):
            if values[seed] is not None:
                score(directory, f"{name}-seed{seed}", between(values[seed]))


def test_a_composite_is_the_mean_of_shares_of_the_way_to_the_teacher(described, tmp_path):
    fill(tmp_path)
    found = compose(described, tmp_path)
    assert found["arms"]["mlsm"]["composite"] == pytest.approx(65.0)
    assert found["arms"]["mlm"]["composite"] == pytest.approx(25.0)
    assert found["arms"]["mlsm"]["deviation"] == pytest.approx(np.std([60, 70, 65], ddof=1))
    assert found["arms"]["regress"]["measures"]["conll2003/pos"] == pytest.approx(
        100 * np.mean([0.5 + 0.4 * share for share in (0.5, 0.52, 0.58)])
    )
    assert found["anchors"]["untrained_seeds"] == 3
    assert found["anchors"]["untrained"]["conll2003/entities"] == pytest.approx(10.0)


def test_hypotheses_are_tested_as_scipy_does(described, tmp_path):
    fill(tmp_path)
    primary, *secondary = compose(described, tmp_path)["contrasts"]
    first, second = 100 * np.array([0.6, 0.7, 0.65]), 100 * np.array([0.5, 0.52, 0.58])
    difference = first - second
    low, high = stats.t.interval(0.95, 2, difference.mean(), stats.sem(difference))
    assert primary["difference"] == pytest.approx(difference.mean())
    assert (primary["paired"]["low"], primary["paired"]["high"]) == pytest.approx((low, high))
    assert primary["paired"]["p"] == pytest.approx(stats.ttest_1samp(difference, 0).pvalue)
    welch = stats.ttest_ind(first, second, equal_var=False)
    assert primary["unpaired"]["p"] == pytest.approx(welch.pvalue)
    plain = [one["paired"]["p"] for one in secondary]
    assert min(one["paired"]["p_adjusted"] for one in secondary) == pytest.approx(min(1, 2 * min(plain)))
    assert max(one["paired"]["p_adjusted"] for one in secondary) == pytest.approx(max(2 * min(plain), max(plain)))
    assert primary["measures"]["conll2003/pos"] == pytest.approx(0.4 * difference.mean())


@pytest.mark.parametrize(
    ("apart", "spread", "equivalent"),
    [(0.0, 0.002, True), (0.2, 0.002, False), (0.0, 0.025, True), (0.0, 0.035, False)],
    ids=["alike", "apart", "at 90 and not at 95 %", "too noisy"],
)
def test_equivalence_is_two_one_sided_tests(described, tmp_path, apart, spread, equivalent):
    """By the p values of both one-sided tests, which the interval stands for."""
    regress = (0.5, 0.52, 0.58)
    mlsm = tuple(value + apart + jitter for value, jitter in zip(regress, (spread, -spread, 0), strict=True))
    fill(tmp_path, mlsm=mlsm, regress=regress)
    found = compose(described, tmp_path)["contrasts"][0]["equivalence"]
    difference = 100 * (np.array(mlsm) - np.array(regress))
    below = stats.ttest_1samp(difference, 5, alternative="less").pvalue
    above = stats.ttest_1samp(difference, -5, alternative="greater").pvalue
    assert found["equivalent"] == (max(below, above) < 0.05) == equivalent
    bounds = stats.t.interval(0.90, 2, difference.mean(), stats.sem(difference))
    assert (found["low"], found["high"]) == pytest.approx(bounds)


def test_the_primary_arms_are_withheld_until_all_of_their_seeds_are_scored(described, tmp_path):
    fill(tmp_path, regress=(0.5, None, 0.58))
    found = compose(described, tmp_path)
    assert found["arms"]["mlsm"] is None and found["arms"]["regress"] is None and found["arms"]["mlm"]
    assert found["contrasts"][0] == {
        "pair": ("mlsm", "regress"), "role": "primary", "withheld": "3 of 3 of mlsm, 2 of 3 of regress",
    }  # fmt: skip
    assert all("withheld" in one for one in found["contrasts"])  # each names an arm of the primary hypothesis
    assert found["contrasts"][1]["withheld"] == "3 of 3 of mlsm, 3 of 3 of mlm, 2 of 3 of regress"
    said = "\n".join(shown(found))
    assert "65.0" not in said and "withheld" in said
    fill(tmp_path)
    assert all("paired" in one for one in compose(described, tmp_path)["contrasts"])


def test_compare_refuses_records_that_a_study_withholds(described, tmp_path, monkeypatch):
    fill(tmp_path)
    keep_withheld(tmp_path / "evaluations", described.primary)
    settings = CompareConfig(results=(tmp_path / "evaluations",), output=tmp_path / "comparison")
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in (tmp_path / "evaluations", Path("~/evaluations")):
        with pytest.raises(ComparisonError, match="withholds its primary hypothesis until all seeds are scored"):
            compare(replace(settings, results=(path,)), silent)
    keep_withheld(tmp_path / "evaluations", None)
    assert len(compare(settings, silent).models) == 13


def test_compare_refuses_them_from_a_directory_above_too(described, tmp_path):
    fill(tmp_path, regress=(0.5, None, 0.58))
    keep_withheld(tmp_path / "evaluations", described.primary)
    with pytest.raises(ComparisonError, match="withholds its primary hypothesis"):
        compare(CompareConfig(results=(tmp_path.parent,), output=tmp_path / "c"), silent)
    with pytest.raises(ComparisonError, match=r"has more than records. Pass its records: .*evaluations"):
        compare(CompareConfig(results=(tmp_path,), output=tmp_path / "c"), silent)


def test_compare_refuses_models_that_are_withheld_unless_it_is_one(described, tmp_path):
    """A pattern of the shell gives the same models as their directory."""
    fill(tmp_path)
    keep_withheld(tmp_path / "evaluations", described.primary)
    places = sorted((tmp_path / "evaluations").glob("*-seed0-*"))
    with pytest.raises(ComparisonError, match="withholds its primary hypothesis until all seeds are scored"):
        compare(CompareConfig(results=tuple(places), output=tmp_path / "comparison"), silent)
    single = compare(CompareConfig(results=(places[0], places[0] / "frozen"), output=tmp_path / "comparison"), silent)
    assert len(single.models) == 1


def test_the_gate_withholds_a_primary_arm_too(described, tmp_path):
    described = described._replace(primary=("mlsm", "mlm"), secondary=())
    fill(tmp_path, mlsm=(0.6, None, 0.65))
    found = compose(described, tmp_path)
    assert found["arms"]["mlm"] is None
    assert all((row["trained"], row["stays"]) == (None, None) for row in found["gate"])
    assert "gate" not in "\n".join(shown(found))
    fill(tmp_path)
    assert all(row["stays"] is not None for row in compose(described, tmp_path)["gate"])


def test_nothing_is_concluded_before_all_untrained_students_are_scored(described, tmp_path):
    """The lower anchor is their mean, by which every composite would change."""
    fill(tmp_path)
    for place in (tmp_path / "evaluations").glob(f"mlm-seed2-step-{0:08}-*"):
        shutil.rmtree(place)
    found = compose(described, tmp_path)
    assert found["arms"]["mlsm"] is None and found["arms"]["mlm"]
    assert found["contrasts"][0]["withheld"] == "3 of 3 of mlsm, 3 of 3 of regress, 2 of 3 untrained students"
    assert all("withheld" in one for one in found["contrasts"])


def test_a_hypothesis_that_waits_counts_among_those_that_are_adjusted(described, tmp_path):
    described = described._replace(secondary=(("regress", "mlm"), ("few", "mlm")))
    few = described.arms["mlm"]._replace(name="few")
    described = described._replace(arms=described.arms | {"few": few})
    fill(tmp_path)
    tested, waiting = compose(described, tmp_path)["contrasts"][1:]
    assert "withheld" in waiting
    assert tested["paired"]["p_adjusted"] == pytest.approx(2 * tested["paired"]["p"])


def test_a_hypothesis_with_one_seed_counts_before_and_after_it_is_scored(described, tmp_path):
    described = described._replace(secondary=(("regress", "mlm"), ("few", "mlm")))
    few = described.arms["mlm"]._replace(name="few", seeds=(0,))
    described = described._replace(arms=described.arms | {"few": few})
    fill(tmp_path)
    waiting = compose(described, tmp_path)["contrasts"]
    score(tmp_path, "few-seed0", between(0.4))
    scored = compose(described, tmp_path)["contrasts"]
    assert "withheld" in waiting[2] and "withheld" not in scored[2] and "paired" not in scored[2]
    assert scored[1]["paired"]["p_adjusted"] == waiting[1]["paired"]["p_adjusted"]
    assert scored[1]["paired"]["p_adjusted"] == pytest.approx(2 * scored[1]["paired"]["p"])


@pytest.mark.parametrize(("ahead", "said"), [(0.0, "the same as"), (0.1, "10.00 points higher than")])
def test_pairs_that_all_differ_by_as_much_are_no_evidence(ahead, said, described, tmp_path):
    """A t test would divide by zero, and its NaN would raise the p of the other hypotheses to 1."""
    same = (0.5, 0.52, 0.58)
    fill(tmp_path, mlsm=[share + ahead for share in same], regress=same)
    composite = compose(described, tmp_path)
    primary, *secondary = composite["contrasts"]
    assert primary["difference"] == pytest.approx(100 * ahead)
    assert not {"paired", "unpaired", "equivalence"} & primary.keys()
    (_, conclusion), *_ = conclude_contrasts(composite)
    assert conclusion.verdict == "equal"
    assert f"mlsm scores {said} regress in every one of 3 pairs" in conclusion.sentence
    assert secondary and all(one["paired"]["p"] <= one["paired"]["p_adjusted"] < 1 for one in secondary)


def test_one_secondary_hypothesis_is_adjusted_for_nothing(described, tmp_path):
    fill(tmp_path)
    _, (_, one) = conclude_contrasts(compose(described._replace(secondary=(("mlsm", "mlm"),)), tmp_path))
    several = conclude_contrasts(compose(described, tmp_path))[1][1]
    assert "Holm" not in one.sentence and "after Holm's adjustment for 2 hypotheses" in several.sentence


def test_in_what_else_the_arms_of_a_contrast_differ_is_said(described, tmp_path):
    fill(tmp_path)
    for path in (tmp_path / "evaluations").glob("*/frozen/*.json"):
        record = records.read_file(path)
        name, lr = record["model"].partition("-")[0], 2e-3 if record["model"].startswith("mlm-") else 1e-3
        known = identity(name, record["run_seed"], lr=lr) if name != "teacher" else None
        records.write(tmp_path, record | {"identity": known, "objective": name if known else None})
    (_, primary), (_, secondary), *_ = conclude_contrasts(compose(described, tmp_path))
    assert not any("differ" in sentence for sentence in primary.beside)
    assert "The two differ in lr, objective, so the difference in score cannot be attributed" in secondary.beside[-1]


@pytest.mark.parametrize(("given", "recorded"), [("bundled", "bundled_teacher"), ("owner/model", "owner/model")])
def test_a_teacher_that_is_no_directory_is_found_in_the_records(given, recorded, described, tmp_path):
    fill(tmp_path)
    score(tmp_path, recorded, TEACHER)
    described = described._replace(models=(given,), composite=described.composite._replace(teacher=given))
    assert compose(described, tmp_path)["anchors"]["teacher"]["conll2003/pos"] == pytest.approx(90.0)


@pytest.mark.parametrize(
    ("trained", "stays"),
    [
        ((0.30, 0.31, 0.32), True),
        ((0.99, 0.985, 0.995), False),
        ((0.0, 0.02, 0.01), False),
        ((-0.1, 0.9, 0.3), False),
        ((0.95, 0.951, 0.952), False),  # 2 points below the teacher, with an error of 0.02
        ((0.85, 0.90, 0.95), False),  # 4 points below it, with an error of 1.2
    ],
    ids=["between", "at the teacher", "untrained", "all over the place", "too few points", "too few errors"],
)
def test_a_measure_stays_if_it_tells_a_trained_student_from_both_anchors(described, tmp_path, trained, stays):
    fill(tmp_path, mlm=trained)
    rows = {row["measure"]: row for row in compose(described, tmp_path)["gate"]}
    row = rows["conll2003/pos"]
    error = np.std([0.4 * share * 100 for share in trained], ddof=1) / math.sqrt(3)
    assert row["standard_error"] == pytest.approx(error)
    assert row["stays"] is stays


def test_two_models_of_one_name_are_refused(described, tmp_path):
    fill(tmp_path)
    before = digest("mlsm-seed0")
    for path in (tmp_path / "evaluations").glob(f"mlsm-seed0-{before[:8]}/frozen/*.json"):
        record = records.read_file(path) | {"weights": digest("another")}
        records.write(tmp_path, record)
    with pytest.raises(StudyError, match="2 models called mlsm-seed0"):
        compose(described, tmp_path)


@pytest.mark.parametrize("other", [{"settings": {"frozen": True, "max_length": 16}}, {"data": {"n_train": 1}}])
def test_records_of_other_settings_or_data_are_refused(other, described, tmp_path):
    fill(tmp_path)
    for path in (tmp_path / "evaluations").glob("mlsm-seed0-*/frozen/stsb.json"):
        record = records.read_file(path)
        records.write(tmp_path, record | {name: record[name] | value for name, value in other.items()})
    why = f"{next(iter(other))} differ"
    with pytest.raises(StudyError, match=f"the frozen record of stsb of mlsm-seed0 cannot be compared with .*: {why}"):
        compose(described, tmp_path)
    for path in (tmp_path / "evaluations").glob("mlsm-seed0-*"):
        path.rename(path.with_name("another"))
    for path in (tmp_path / "evaluations" / "another").glob("frozen/*.json"):
        path.write_text(path.read_text().replace("mlsm-seed0", "another"))
    compose(described, tmp_path)  # a model that is not of the study may be scored in any way


def test_a_teacher_below_an_untrained_student_is_said(described, tmp_path):
    fill(tmp_path)
    score(tmp_path, "teacher", TEACHER | {"cosine": 0.39})
    with pytest.raises(StudyError, match="stsb/cosine: the teacher has 39.0, an untrained student 40.0"):
        compose(described, tmp_path)


# -- the page ---------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def without_the_papers_figures(monkeypatch):
    """They take time, and nothing here looks at them."""
    monkeypatch.setattr("mlsm.evaluation.comparison.compare.draw_paper_figures", lambda *_: [])


def report(described, directory, **rest):
    """Write the page of a study. Returns its text without tags.

    rest  other settings of `compare`
    """
    facts = facts_of(described, plan(described, directory, None), {}, compose(described, directory))
    settings = CompareConfig(results=(directory / "evaluations",), output=directory / "comparison", **rest)
    return text_of(compare(settings, silent, facts).report)


def text_of(page):
    """The words of a page, from its conclusion on."""
    with open(page, encoding="utf-8") as file:
        text = file.read().partition("<main>")[2]
    return " ".join(html.unescape(re.sub("<[^>]*>", " ", text)).split())


def rows_of(directory, table):
    with (directory / "comparison" / f"report-{table}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def signed(value):
    return f"{value:+.2f}".replace("-", "−")


def test_the_page_concludes_from_the_composite_as_scipy_does(described, tmp_path):
    described = described._replace(explored=(("mlm", "regress"),))
    fill(tmp_path)
    text = report(described, tmp_path)
    first, second, third = (100 * np.array(of) for of in ((0.6, 0.7, 0.65), (0.5, 0.52, 0.58), (0.3, 0.2, 0.25)))
    test = stats.ttest_rel(first, second)
    low, high = test.confidence_interval()
    assert text.startswith("inconclusive It is unclear whether mlsm is better than regress")
    conclusion = text[: text.index("Secondary hypotheses")]
    assert f"it scores {(first - second).mean():.2f} points higher" in conclusion
    assert f"95 % interval {signed(low)} to {signed(high)} points" in conclusion
    assert f"p = {test.pvalue:.3f}" in conclusion
    assert "no evidence of equivalence" in conclusion and "margin of 5 points" in conclusion
    assert "fine-tunings" not in text and "Fine-tuning scores" not in text

    primary, *secondary = rows_of(tmp_path, "composite-hypotheses")
    assert [float(primary[name]) for name in ("low", "high", "p")] == pytest.approx([low, high, test.pvalue])
    plain = [stats.ttest_rel(first, third).pvalue, stats.ttest_rel(second, third).pvalue]
    assert [float(row["p"]) for row in secondary] == pytest.approx(plain)
    assert min(float(row["p (Holm)"]) for row in secondary) == pytest.approx(2 * min(plain))  # of two, not of three
    (explored,) = rows_of(tmp_path, "composite-explored")
    bounds = stats.ttest_rel(third, second).confidence_interval()
    assert (explored["contrast"], float(explored["high"])) == ("mlm − regress", pytest.approx(bounds.high))
    assert not {"p", "p (Holm)", "role", "verdict"} & explored.keys()
    _, _, tables = text.partition("Hypotheses on the composite")
    planned, _, others = tables.partition("Exploratory contrasts of the composite")
    assert "regress − mlm" in planned and "mlm − regress" not in planned and "mlm − regress" in others

    arms = {row["arm"]: row for row in rows_of(tmp_path, "composites")}
    assert list(arms) == ["mlsm", "regress", "mlm", "untrained", "teacher"]
    assert float(arms["regress"]["composite"]) == pytest.approx(second.mean())
    assert float(arms["regress"]["conll2003/entities"]) == pytest.approx(10 + 0.6 * second.mean())
    assert arms["teacher"]["composite"] == "100" and float(arms["untrained"]["stsb/cosine"]) == pytest.approx(40)
    assert "points, on the test set (dev if a task has none)" in text
    measured = [tuple(row.values()) for row in rows_of(tmp_path, "measures")]
    assert measured == [
        ("pos", "CoNLL-2003", "frozen", "test", "1000", "9"),
        ("entities", "CoNLL-2003", "frozen", "test", "1000", "9"),
        ("cosine", "STS-B", "frozen", "dev", "1000", "9"),
    ]
    assert {row["measure"]: row["passes"] for row in rows_of(tmp_path, "gate")}["conll2003/pos"] == "True"
    drawn = rows_of(tmp_path, "composite-differences")
    assert [(row["contrast"], row["role"]) for row in drawn] == [
        ("mlsm − regress", "primary"), ("mlsm − mlm", "secondary"), ("regress − mlm", "secondary"),
        ("mlm − regress", "not planned"),
    ]  # fmt: skip


def test_the_page_says_that_two_arms_are_equivalent(described, tmp_path):
    fill(tmp_path, mlsm=(0.502, 0.518, 0.581), regress=(0.5, 0.52, 0.58))
    assert report(described, tmp_path).startswith("equivalent mlsm and regress are equivalent within 5 points")


def test_a_comparison_that_was_not_planned_is_exploratory_on_the_page(described, tmp_path):
    fill(tmp_path, mlsm=(0.8, 0.83, 0.87))
    text = report(described._replace(planned=False), tmp_path)
    assert text.startswith("higher, exploratory On the composite, mlsm scores 30.00 points higher than regress")
    assert (
        "No hypothesis was written down" in text
        and rows_of(tmp_path, "composite-hypotheses")[0]["role"] == "not planned"
    )


def test_what_was_changed_after_the_first_scores_is_said(described, tmp_path):
    (tmp_path / "data").mkdir()
    settings = StudyConfig(recipe=str(tmp_path / "recipe.yaml"), output=tmp_path, data_dir=tmp_path / "data")
    keep_plan(described._replace(primary=("mlm", "mlsm")), settings)  # no score was seen yet
    keep_plan(described, settings)
    fill(tmp_path)
    assert study(replace(settings, only=("frozen/mlm-seed0",)))["changed"] == ""
    recipe = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    recipe["study"] |= {"primary": ["mlsm", "mlm"], "secondary": [["regress", "mlm"]]}
    recipe["study"]["composite"]["margin"] = 1
    recipe["study"]["arms"]["mlsm"]["seeds"] = recipe["study"]["arms"]["mlm"]["seeds"] = [0, 1, 2, 3]
    recipe["study"]["arms"]["more"] = {"store": "lsp", "lr": 1e-4}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    found = study(replace(settings, only=("frozen/mlm-seed0",)))
    assert found["changed"] == (
        "Changed after the first scores: primary (was mlsm > regress), secondary (was mlsm > mlm, regress > mlm), "
        "margin (was 5), arm more (added), seeds 3 of mlm, mlsm (added)."
    )
    assert found["changed"] in text_of(found["comparison"]["report"]).partition("Composites")[0]
    assert found["changed"] in summary(found, settings)
    keep_plan(read_study(settings.recipe), settings)  # too late
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe | {"study": recipe["study"] | {"seeds": [0]}}))
    now = read_study(settings.recipe)
    assert "seeds 1, 2 of regress (removed)" in find_changes(now, settings)
    (tmp_path / "plan.json").write_text("{}")
    assert "plan.json cannot be read" in find_changes(now, settings)
    (tmp_path / "plan.json").unlink()
    assert find_changes(now, settings) == ""


def test_nothing_that_is_withheld_is_in_any_file_of_the_report(described, tmp_path):
    """Its files are the same bytes whatever the two arms score. Those of an earlier report are gone."""
    described = described._replace(explored=(("mlm", "regress"), ("mlm", "mlsm")))
    written = []
    for number, mlsm in enumerate([(0.6, 0.7, 0.65), (0.1, 0.9, 0.3)]):
        directory = tmp_path / str(number)
        fill(directory, mlsm=mlsm)
        report(described, directory)
        (gone,) = (directory / "evaluations").glob("regress-seed1-*")
        shutil.rmtree(gone)
        keep_withheld(directory / "evaluations", described.primary)
        text = report(described, directory)
        files = {path.name: path.read_bytes() for path in (directory / "comparison").iterdir()}
        written.append(files | {"report.html": text.encode()})  # the links to other files differ
    assert written[0] == written[1] and "report-composite-explored.csv" not in written[0]
    assert text.startswith(
        "withheld Whether mlsm is better than regress is withheld until all planned seeds are scored"
    )
    assert "Scored so far: 3 of 3 of mlsm, 2 of 3 of regress." in text
    assert "mlm − regress (3 of 3 of mlm, 2 of 3 of regress, 3 of 3 of mlsm)" in text
    arms = {row["arm"]: row for row in rows_of(directory, "composites")}
    assert arms["mlsm"]["composite"] == arms["regress"]["composite"] == "withheld"
    assert float(arms["mlm"]["composite"]) == pytest.approx(25)
    assert "No recorded setting" not in text and "no records of" not in text


def test_judgements_of_lsps_are_no_hindrance_while_the_records_are_withheld(described, tmp_path):
    fill(tmp_path, regress=(0.5, None, 0.58))
    judged = tmp_path / "judged.json"
    judged.write_text(json.dumps({"judge": "a judge", "samples": 10, "dictionaries": [{"target": "0f1e", "auc": 0.7}]}))
    text = report(described, tmp_path, intruders=(judged,))
    assert text.startswith("withheld Whether") and "a judge" not in text


def test_the_page_names_what_is_missing(described, tmp_path):
    few = described.arms["mlm"]._replace(name="few")
    described = described._replace(arms=described.arms | {"few": few}, explored=(("few", "mlm"),))
    fill(tmp_path)
    text = report(described, tmp_path)
    assert "Arms without a scored student: few." in text and "few − mlm (0 of 3 of few, 3 of 3 of mlm)" in text
    for place in (tmp_path / "evaluations").glob("teacher-*"):
        shutil.rmtree(place)
    assert report(described, tmp_path).startswith(
        "withheld There is no composite yet: the teacher must be scored first."
    )


def test_fine_tuning_scores_come_after_the_composite_and_are_exploratory(described, tmp_path):
    fill(tmp_path)
    for seed in SEEDS:
        for name, value in (("mlsm", 0.7 + seed / 50), ("regress", 0.6)):
            records.write(tmp_path, a_record(f"{name}-seed{seed}", "rte", 0, [value], run_seed=seed))
    text = report(described, tmp_path)
    assert text.startswith("inconclusive It is unclear whether mlsm is better than regress: on the composite")
    tuned = text[text.index("Fine-tuning scores") :]
    assert 'Every p value and interval outside the table "Hypotheses on the composite".' in tuned
    assert "exploratory" in tuned[:60] and "are about the composite, so this is exploratory" in tuned
    (row,) = rows_of(tmp_path, "hypotheses")  # mlm is not fine-tuned
    assert (row["better"], row["than"], row["role"], row["holm"]) == ("mlsm", "regress", "not planned", "")
    assert float(row["difference"]) == pytest.approx(0.12)


@pytest.mark.parametrize("scored", [True, False])
def test_a_study_ends_with_its_page_even_if_its_hypothesis_is_withheld(scored, described, tmp_path):
    """From records only."""
    fill(tmp_path, regress=(0.5, 0.52 if scored else None, 0.58))
    (tmp_path / "data").mkdir()
    recipe = str(tmp_path / "recipe.yaml")
    found = study(StudyConfig(recipe=recipe, output=tmp_path, data_dir=tmp_path / "data", only=("frozen/mlm-seed0",)))
    text = text_of(found["comparison"]["report"])
    assert text.startswith("inconclusive It is" if scored else "withheld Whether mlsm is better than regress")
    assert (found["tables"] is None) == found["composite"]["withheld"] == (not scored)
    said = summary(found, StudyConfig(recipe=recipe, output=tmp_path))
    assert f"Report:  {tmp_path}" in said and ("Tables here" in said) == scored
