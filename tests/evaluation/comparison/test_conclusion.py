"""The sentence of a conclusion is right in every case and claims no more than its interval."""

import pytest
from tiny_study import arm, pair

from mlsm.evaluation.comparison.arms import find_arms
from mlsm.evaluation.comparison.conclusion import conclude, p_value, points
from mlsm.evaluation.comparison.effects import Effect, judge_hypothesis
from mlsm.evaluation.comparison.identity import differences
from mlsm.evaluation.comparison.models import models_of

SPREAD = (-0.01, -0.005, 0.0, 0.005, 0.01)


def of(rows, sign=1, planned=0, **settings):
    """The conclusion on mlsm > mlm from differences by pre-training seed and task."""
    rows = [[sign * value for value in row] for row in rows]
    return conclude(judge_hypothesis(find_arms(models_of(pair(rows))[0]), ("mlsm", "mlm")), planned, **settings)


def around(mean, pairs=5):
    """Differences around a mean, the same in all three tasks."""
    return [[mean + spread] * 3 for spread in SPREAD[:pairs]]


def test_significant_for():
    said = of(around(0.02))
    assert said.verdict == "for"
    assert said.sentence == (
        "MLSM scores 2.00 points higher than MLM (95 % interval +1.02 to +2.98 points; mean of 3 tasks over 5 pairs "
        "of pre-training runs; p = 0.005)."
    )
    assert said.beside == ("The 95 % interval of a bootstrap over tasks and seeds is +1.40 to +2.60 points.",)


def test_significant_against():
    said = of(around(0.02), sign=-1)
    assert said.verdict == "against"
    assert (
        "MLSM scores 2.00 points lower than MLM, contrary to the hypothesis (95 % interval −2.98 to −1.02"
        in said.sentence
    )


def test_undecided_says_what_could_have_been_found():
    said = of(around(0.005))
    assert said.verdict == "undecided"
    assert said.sentence == (
        "It is unclear whether MLSM is better than MLM: it scores 0.50 points higher than MLM, and the 95 % interval "
        "−0.48 to +1.48 points includes 0 (mean of 3 tasks over 5 pairs of pre-training runs). With 5 pairs and this "
        "variance, a true difference of 1.33 points would be detected with 80 % power."
    )


@pytest.mark.parametrize("pairs", [1, 2])
def test_too_few_pairs_to_say_anything(pairs):
    said = of([[0.02] * 3, [0.0200001] * 3][:pairs])  # two so alike that Student would call them significant
    assert said.verdict == "too few" and "interval" not in " ".join((said.sentence, *said.beside))
    few = "One pair of pre-training runs is" if pairs == 1 else "2 pairs of pre-training runs are"
    assert said.sentence.startswith(f"{few} too few to tell whether MLSM is better than MLM: MLSM scores 2.00 points")


def test_missing_records():
    lacking = Effect("mlsm", "kd", lacks="there are no records of fine-tunings of kd")
    said = conclude(lacking, planned=5)
    assert said.verdict == "missing"
    assert said.sentence == (
        "It is not known whether mlsm is better than kd: there are no records of fine-tunings of kd."
    )


@pytest.mark.parametrize(
    ("difference", "words"), [(0.0, "scores the same as MLM"), (0.03, "scores 3.00 points higher than MLM")]
)
def test_differences_that_do_not_vary_have_no_interval(difference, words):
    said = of([[difference] * 3] * 4)
    assert said.verdict == "equal" and f"MLSM {words} in every one of 4 pairs" in said.sentence
    assert "p " not in said.sentence


def test_before_all_planned_pairs_are_there_it_says_so_far():
    said = of(around(0.02, 4), planned=5)
    assert said.verdict == "for" and said.sentence.startswith("So far, MLSM scores")
    assert said.beside[0].startswith("4 of the 5 planned pairs are available.") and said.label == "supported, so far"
    assert of(around(0.02), planned=5).label == "supported"
    assert not of(around(0.02), planned=5).sentence.startswith("So far")


def test_fine_tunings_that_failed_are_counted_beside_the_sentence():
    records = pair(around(0.02))
    for record in records[:3]:
        record["collapsed"] = "the score is 0.530, that of always answering entailment 0.530"
    records[3]["diverged"] = "the loss is not finite"
    said = conclude(judge_hypothesis(find_arms(models_of(records)[0]), ("mlsm", "mlm")), 5)
    assert said.beside[0].startswith(
        "4 of the 60 fine-tuning runs compared diverged, or scored hardly better than always giving one answer"
    )


def test_what_nobody_planned_is_exploratory_and_contradicts_no_hypothesis():
    said = of(around(0.02), sign=-1, planned=None)
    assert said.label == "lower, exploratory" and "contrary" not in said.sentence
    assert said.beside[0].startswith("No hypothesis was written down before")


def test_after_holm_an_interval_without_0_is_not_enough():
    said = of(around(0.02), adjusted=0.06, tests=3)
    assert said.verdict == "undecided"
    assert "excludes 0, but p = 0.060 after Holm's adjustment for 3 hypotheses is not below 0.05" in said.sentence
    assert of(around(0.02), adjusted=0.02, tests=3).verdict == "for"
    assert "power" not in said.sentence  # it would be that of a single test


def test_what_holds_for_these_tasks_only_is_said():
    rows = [[0.08 + spread, spread / 2, -0.001 + spread] for spread in SPREAD]  # one task of three
    said = of(rows)
    assert said.verdict == "for"
    assert "which includes 0: there is evidence of a difference on these tasks, but not on other" in said.beside[0]
    said = of(rows, adjusted=0.06, tests=3)
    assert said.verdict == "undecided" and "evidence" not in said.beside[0]


def test_what_else_differs_is_said():
    records = arm("mlsm", {1: {"rte": 0.6}}) + arm("mlm", {1: {"rte": 0.5}}, of_identity={"lr": 5e-4})
    models = models_of(records)[0]
    effect = judge_hypothesis(find_arms(models), ("mlsm", "mlm"))
    (said,) = conclude(effect, 0, beyond=differences(models)).beside
    assert said.startswith("The two differ in objective, lr, so the difference in score cannot be attributed to one")


def test_seeds_and_tasks_that_not_all_have_are_named():
    scores = {seed: {"cola": 0.5, "rte": 0.5 + seed / 100} for seed in range(1, 5)}
    records = arm("mlsm", {**scores, 4: {"rte": 0.6}}) + arm("mlm", scores | {6: {"rte": 0.5}, 7: {"rte": 0.5}})
    said = " ".join(conclude(judge_hypothesis(find_arms(models_of(records)[0]), ("mlsm", "mlm")), 0).beside)
    assert "Excluded because only one arm has it: pre-training seed 6, 7." in said
    assert "Not in the mean, because not all pairs have them: cola." in said
    planned = judge_hypothesis(find_arms(models_of(records)[0]), ("mlsm", "mlm"), ("rte",), (1, 2, 3, 4))
    assert (planned.unpaired, planned.dropped) == ((), ())


def test_two_single_models_of_different_seeds_are_said_not_to_be_paired_by_seed():
    models = models_of(arm("mlsm", {1: {"rte": 0.6}}) + arm("mlm", {2: {"rte": 0.5}}))[0]
    effect = judge_hypothesis(find_arms(models), ("mlsm", "mlm"))
    (said,) = conclude(effect, 0, beyond=differences(models)).beside
    assert said == "The two have different pre-training seeds, so they are not paired by seed."


@pytest.mark.parametrize(
    ("value", "text"), [(0.0123, "+1.23"), (-0.0123, "−1.23"), (0.00002, "+0.002"), (0.0, "0.00"), (-1e-9, "−1e-07")]
)
def test_points(value, text):
    assert points(value) == text


@pytest.mark.parametrize(
    ("p", "text"),
    [(1e-9, "< 0.001"), (0.0123, "= 0.012"), (0.04996, "= 0.049960"), (0.0500001, "= 0.050"), (0.7, "= 0.700")],
)
def test_p_values_are_not_rounded_across_the_level(p, text):
    assert p_value(p) == text
