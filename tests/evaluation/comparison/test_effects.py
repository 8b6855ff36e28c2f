"""Paired over pre-training seeds: against scipy, against simulation, against a bootstrap drawn one by one."""

from statistics import fmean

import numpy as np
import pytest
from scipy import stats
from tiny_records import a_blimp_record, digest
from tiny_study import TARGETS, arm, identity, pair

from mlsm.evaluation.comparison.arms import find_arms
from mlsm.evaluation.comparison.effects import adjust, blimp_effect, judge_hypothesis, scores_of_arms
from mlsm.evaluation.comparison.models import SUITE, models_of
from mlsm.evaluation.comparison.significance import bootstrap, interval, smallest_detectable

DIFFERENCES = [[0.02, 0.01, 0.00], [0.01, 0.03, 0.02], [0.03, -0.01, 0.01], [0.02, 0.02, 0.03], [0.00, 0.01, 0.01]]
HYPOTHESIS = ("mlsm", "mlm")


def found(records):
    return find_arms(models_of(records)[0])


def effect_of(records, hypothesis=HYPOTHESIS, tasks=()):
    return judge_hypothesis(found(records), hypothesis, tasks)


def test_the_mean_difference_has_students_interval_over_pretraining_seeds():
    effect = effect_of(pair(DIFFERENCES))
    assert effect.tasks == ("cola", "mrpc", "rte") and effect.seeds == (0, 1, 2, 3, 4)
    assert effect.differences_ST == tuple(pytest.approx(row) for row in DIFFERENCES)
    means = [fmean(row) for row in DIFFERENCES]
    of_scipy = stats.ttest_rel([0.5 + mean for mean in means], [0.5] * 5)
    assert effect.mean.n == 5 and effect.mean.mean == pytest.approx(fmean(means))
    assert effect.mean.p == pytest.approx(of_scipy.pvalue)
    assert (effect.mean.low, effect.mean.high) == pytest.approx(tuple(of_scipy.confidence_interval()))
    assert of_scipy.df == 4


def test_one_task_has_an_interval_of_its_own():
    of_scipy = stats.ttest_1samp([row[1] for row in DIFFERENCES], 0)
    assert effect_of(pair(DIFFERENCES)).of_task("mrpc").p == pytest.approx(of_scipy.pvalue)


@pytest.mark.parametrize("values", [[0.1], [0.1, 0.1], [0.3, 0.1 + 0.2]])
def test_what_does_not_vary_has_no_interval(values):
    known = interval(values)
    assert (known.low, known.high, known.p, known.detectable) == (None,) * 4 and known.mean == pytest.approx(values[0])


@pytest.mark.parametrize("n", [2, 3, 5, 12, 60])
def test_the_smallest_detectable_difference_is_found_four_times_in_five(n):
    """By simulation with scipy's own test."""
    truth = smallest_detectable(1 / n**0.5, n)  # of differences whose standard deviation is 1
    drawn = np.random.default_rng(n).normal(truth, 1, (20_000, n))
    # The error that the power is computed from is the true one, as in any calculation of power.
    assert np.mean(stats.ttest_1samp(drawn, 0, axis=1).pvalue < 0.05) == pytest.approx(0.8, abs=0.01)


def test_the_bootstrap_draws_tasks_and_seeds():
    generator = np.random.default_rng(7)
    d_ST = generator.normal(0.02, 0.01, (5, 1)) + generator.normal(0, 0.03, (1, 7)) + generator.normal(0, 0.01, (5, 7))
    means = []
    for _ in range(20_000):  # one by one
        rows, columns = generator.integers(0, 5, 5), generator.integers(0, 7, 7)
        means.append(d_ST[np.ix_(rows, columns)].mean())
    assert bootstrap(d_ST) == pytest.approx(np.quantile(means, (0.025, 0.975)), abs=6e-4)


def test_the_bootstrap_over_one_task_is_that_over_seeds():
    d = [0.01, 0.03, -0.01, 0.02, 0.02, 0.05]
    of_scipy = stats.bootstrap((d,), np.mean, n_resamples=20_000, method="percentile", rng=0).confidence_interval
    assert bootstrap([[x] for x in d]) == pytest.approx((of_scipy.low, of_scipy.high), abs=5e-4)
    assert bootstrap([[0.01, 0.02]]) is None
    assert bootstrap([[0.01], [0.02]]) == pytest.approx((0.01, 0.02))


def test_the_papers_test_counts_each_score_once_whatever_the_seeds():
    tasks = tuple(dict.fromkeys(task for task, _ in SUITE))
    rows = [[0.01 * (seed + 1) * (-1 if task == "rte" else 1) for task in tasks] for seed in range(3)]
    scores = effect_of(pair(rows, tasks)).scores
    d = [-0.02 if task == "rte" else 0.02 for task, _ in SUITE for _ in range(2)]  # two fine-tunings each
    assert (scores.n, scores.wins, scores.losses) == (28, 26, 2)
    expected = stats.wilcoxon(d, correction=False, alternative="greater", method="asymptotic").pvalue
    assert scores.p == pytest.approx(expected)


def test_holm_counts_hypotheses_that_cannot_be_tested_yet():
    effects = [effect_of(pair(DIFFERENCES)), effect_of(pair(DIFFERENCES), ("mlsm", "kd"))]
    p = effects[0].mean.p
    assert adjust(effects) == [pytest.approx(2 * p), None]
    assert adjust(effects[:1]) == [pytest.approx(p)]


def test_a_pair_that_lacks_a_planned_task_is_left_out():
    records = pair(DIFFERENCES)
    lacking = [record for record in records if (record["model"], record["task"]) != ("mlm-seed2", "rte")]
    planned = effect_of(lacking, tasks=("cola", "mrpc", "rte"))
    assert planned.seeds == (0, 1, 3, 4) and planned.incomplete == (2,)
    whole = effect_of(lacking)  # nothing planned: the tasks that all pairs have
    assert whole.tasks == ("cola", "mrpc") and whole.seeds == (0, 1, 2, 3, 4)
    none = effect_of(lacking, tasks=("sst2",))
    assert "no pair of their pre-trainings has fine-tunings of all the planned tasks (sst2)" in none.lacks


def test_seeds_that_nobody_planned_are_not_tested():
    effect = judge_hypothesis(found(pair(DIFFERENCES)), HYPOTHESIS, (), (1, 2, 3, 9))
    assert effect.seeds == (1, 2, 3) and effect.unplanned == (0, 4)
    assert judge_hypothesis(found(pair(DIFFERENCES)), HYPOTHESIS, (), (9,)).lacks.endswith(
        "no planned pre-training seed in common"
    )


def test_fine_tunings_that_do_not_agree_are_no_pair():
    records = pair(DIFFERENCES)
    for record in records:
        if record["model"] == "mlm-seed1":
            record["head"] = digest("another")
    for tasks in (("cola", "mrpc", "rte"), ()):  # planned or not, one such pair does not end the comparison
        effect = effect_of(records, tasks=tasks)
        assert effect.tasks == ("cola", "mrpc", "rte")
        assert effect.seeds == (0, 2, 3, 4) and effect.incomplete == (1,)
    for record in records:
        record["head"] = digest(record["model"])
    assert effect_of(records).lacks == "no pair of their pre-trainings has fine-tunings of a task that agree"


def test_pairs_without_a_common_task_are_said_to_be_so():
    first, second = ([record for record in pair(DIFFERENCES[:2]) if record["task"] == task] for task in ("cola", "rte"))
    records = [record for record in first if "seed0" in record["model"]]
    records += [record for record in second if "seed1" in record["model"]]
    assert effect_of(records).lacks == "their pairs of pre-trainings have no task in common"


def test_data_of_the_hub_at_another_commit_are_other_data():
    records = pair(DIFFERENCES)
    for record in records:
        commit = "b" * 40 if record["model"] == "mlm-seed3" else "a" * 40
        record["data"] = record["data"] | {"name": f"owner/set@{commit}", "files": {}}
    assert effect_of(records).incomplete == (3,)


def test_seeds_that_only_one_arm_has_are_no_pair():
    mlsm = arm("mlsm", {seed: {"rte": 0.5 + seed / 100} for seed in (1, 2, 3)})
    mlm = arm("mlm", {seed: {"rte": 0.5} for seed in (2, 3, 4)})
    assert effect_of(mlsm + mlm).seeds == (2, 3)
    mlm = arm("mlm", {seed: {"rte": 0.5} for seed in (7, 8)})
    assert effect_of(mlsm + mlm).lacks == "they have no pre-training seed in common"


def test_an_arm_without_records_is_named():
    assert effect_of(pair(DIFFERENCES), ("mlsm", "kd")).lacks == "there are no records of fine-tunings of kd"
    assert effect_of(pair(DIFFERENCES), ("mlsm", "mlm at 50%")).lacks.endswith("of mlm at 50%")


def test_an_earlier_checkpoint_against_a_finished_model():
    records = pair(DIFFERENCES) + arm("mlsm", {seed: {"rte": 0.7} for seed in range(5)}, fraction=0.5)
    effect = effect_of(records, ("mlsm at 50%", "mlm"))
    assert effect.better == "MLSM at 50%" and effect.tasks == ("rte",)
    assert [row[0] for row in effect.differences_ST] == pytest.approx([0.2, 0.19, 0.18, 0.17, 0.16])


def test_blimp_is_paired_by_seed_and_a_probe_belongs_to_its_student():
    records = pair(DIFFERENCES)
    for seed, (probed, words) in {1: (0.7, 0.6), 2: (0.8, 0.6)}.items():
        known = identity("mlsm", seed)
        probe = known | {"probe": identity("mlm", 0)}
        facts = {"objective": "mlsm", "run_seed": seed, "encoder": "bert-2x32", "identity": probe}
        records.append(a_blimp_record(f"probe-{seed}", {"x": probed, "y": 0.5}, **facts))
        facts = {"objective": "mlm", "run_seed": seed, "encoder": "bert-2x32", "identity": identity("mlm", seed)}
        weights = {"weights": digest(f"mlm-seed{seed}"), "path": f"runs/mlm-seed{seed}/export"}
        records.append(a_blimp_record(f"mlm-seed{seed}", {"x": words, "y": 0.5}, **facts, **weights, **TARGETS["mlm"]))
    known = found(records)
    assert [arm.name for arm in known.arms] == ["MLSM", "MLM"]
    effect = blimp_effect(*known.arms)
    assert effect.n == 2 and effect.mean == pytest.approx((0.1 + 0.2) / 4)
    assert blimp_effect(known.arms[0], known.arms[0]).mean == 0


def test_of_several_scorings_on_blimp_that_of_most_pairs_is_shown():
    records = []
    for name in ("a", "b"):
        for pairs, score in ((50, 0.9), (20, 0.5)):
            few = a_blimp_record(name, {"x": score})
            data, settings = few["data"] | {"n_eval": pairs}, {"per_paradigm": pairs}
            records.append(few | {"task": f"blimp-{pairs}", "data": data, "settings": settings})
    models, _ = models_of(records)
    assert [model.accuracies for model in models] == [{"x": 0.9}] * 2


def test_the_column_of_blimp_has_only_models_that_were_scored_alike():
    """A model of which one paradigm was scored, or a hundred pairs of each, changes no mean."""
    subset, records = {"task": "blimp-100", "settings": {"per_paradigm": 100}}, []
    for seed, more in ((0, {}), (1, {}), (2, subset)):
        facts = {"objective": "mlm", "run_seed": seed, "encoder": "bert-2x32", "identity": identity("mlm", seed)}
        facts |= {"weights": digest(f"mlm-seed{seed}"), "path": f"runs/mlm-seed{seed}/export"} | TARGETS["mlm"] | more
        scores = {"x": 0.9} if more else {"x": 0.5 + seed / 10, "y": 0.7}
        records.append(a_blimp_record(f"mlm-seed{seed}", scores, **facts))
    (row,) = scores_of_arms(found(records).arms, ())
    assert row.scores["blimp"].mean == pytest.approx((0.6 + 0.65) / 2)
