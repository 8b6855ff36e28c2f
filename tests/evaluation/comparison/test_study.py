"""Which models are compared and which scores are paired: groups, averages; disagreeing records are named."""

import numpy as np
import pytest
from scipy import stats
from tiny_records import a_blimp_record, a_record, digest, of_table

from mlsm.common.errors import ComparisonError
from mlsm.evaluation.comparison import published
from mlsm.evaluation.comparison.arms import CHECKPOINTS, sort_into_arms
from mlsm.evaluation.comparison.effects import LeftOut, compare_on_blimp, matrices
from mlsm.evaluation.comparison.models import (
    SUITE,
    average,
    blimp_average,
    checkpoint_name,
    common_figures,
    common_paradigms,
    match_trainings,
    models_of,
    out_of,
    scored_alike,
)

SCORES = published.scores(1)[10]


def test_the_average_is_unweighted_over_figures_each_the_mean_over_its_seeds():
    records = [
        a_record("a", "mrpc", 0, [0.8, 0.9]),
        a_record("a", "mrpc", 1, [0.6, 0.7]),
        a_record("a", "rte", 0, [0.5]),
    ]
    (model,), _ = models_of(records)
    assert model.figures == pytest.approx({("mrpc", "accuracy"): 0.7, ("mrpc", "f1"): 0.8, ("rte", "accuracy"): 0.5})
    assert average(model) == pytest.approx(2 / 3)


def test_fourteen_figures_average_to_the_papers():
    for layer, scores in published.scores(1).items():
        (model,), _ = models_of(of_table("m", scores))
        assert average(model) == pytest.approx(published.printed_averages(1)[layer], abs=0.00051)


def test_averages_are_compared_over_what_all_have():
    whole = of_table("a", SCORES)
    part = [record for record in of_table("b", SCORES) if record["task"] in ("rte", "wic")]
    models, _ = models_of(whole + part)
    assert common_figures(models) == [("rte", "accuracy"), ("wic", "accuracy")]
    assert average(models[0], common_figures(models)) == pytest.approx(average(models[1]))


def test_pairs_where_seeds_are_missing():
    theirs = [record for record in of_table("b", SCORES) if (record["task"], record["seed"]) != ("mrpc", 3)]
    models, _ = models_of(of_table("a", SCORES) + theirs)
    pairs, left_out = match_trainings(*models)
    assert len(pairs) == 49 and ("mrpc", 3) not in pairs and left_out == {}
    cells = matrices(models)[0]
    assert [cells[level].n[0][1] for level in ("scores", "trainings", "tasks")] == [68, 49, 10]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"head": digest("other")}, "heads differ"),
        ({"head": None}, "heads differ"),
        ({"data": {"name": "rte", "files": {"train.tsv": digest("more")}, "n_train": 9, "n_eval": 9}}, "data differ"),
        ({"settings": {"learning_rate": 1e-5, "epochs": 3}}, "settings differ (learning_rate: 2e-05 and 1e-05)"),
        ({"settings": {"learning_rate": 2e-5, "epochs": 3, "batch": 8}}, "settings differ (batch: not recorded and 8)"),
    ],
)
def test_what_does_not_agree_is_named_and_no_pair(fields, why):
    records = [a_record("a", "rte", seed, [0.5]) for seed in range(3)]
    records += [a_record("b", "rte", seed, [0.6], **fields if seed == 1 else {}) for seed in range(3)]
    models, _ = models_of(records)
    assert match_trainings(*models) == ([("rte", 0), ("rte", 2)], {why: [("rte", 1)]})
    cells, left_out = matrices(models)
    assert cells["scores"].n[0][1] == 2
    assert left_out == [LeftOut("a", "b", why, [("rte", 1)])]


def test_data_agree_wherever_they_lay():
    data = {"name": "elsewhere", "files": {"dev/RTE.tsv": digest("rte")}, "n_train": 1000, "n_eval": 100}
    models, _ = models_of([a_record("a", "rte", 0, [0.5]), a_record("b", "rte", 0, [0.5], data=data)])
    assert match_trainings(*models) == ([("rte", 0)], {})


def test_a_record_given_twice_is_used_once_and_noted():
    records = [a_record("a", "rte", 0, [0.5]), a_record("a", "rte", 0, [0.5], path="moved", wall=2.0)]
    (model,), notes = models_of(records)
    assert notes == ["rte, seed 0, of a was passed twice, with the same scores; one is used."]
    assert len(model.trainings) == 1


@pytest.mark.parametrize("fields", [{}, {"settings": {"epochs": 1}}])
def test_two_different_records_of_one_training_name_their_file(fields):
    score = 0.5 if fields else 0.6
    records = [a_record("a", "rte", 0, [0.5]), a_record("a", "rte", 0, [score], **fields)]
    with pytest.raises(
        ComparisonError, match=rf"evaluations/a-{digest('a')[:8]}/finetune/rte-seed0.json. Pass only one"
    ):
        models_of(records)


def test_the_same_weights_under_two_names_are_one_model():
    """A run and its last checkpoint, both fine-tuned: figures by step have one model a step."""
    records = [a_record("a", "rte", seed, [0.5], weights=digest("a")) for seed in range(2)]
    records += [a_record("a-step-1000", "rte", seed, [0.6], weights=digest("a")) for seed in range(3)]
    (model,), notes = models_of(records)
    assert model.label == "a" and list(model.scores.values()) == [0.5, 0.5, 0.6]
    assert notes == ["a-step-1000 is the same model as a: if both have a record, a's is used."]


def test_a_record_without_configuration_is_of_the_only_model_with_its_weights():
    old, new = a_record("a", "rte", 0, [0.5]), a_record("a", "wic", 0, [0.6], config=digest(1), tokenizer=digest(2))
    for records in ([old, new], [new, old]):
        (model,), notes = models_of(records)
        assert model.label == "a" and len(model.trainings) == 2 and not notes
        assert (model.facts["config"], model.facts["tokenizer"]) == (digest(1), digest(2))
    other = a_record("a", "cola", 0, [0.7], config=digest(3), tokenizer=digest(2))
    models, _ = models_of([old, new, other])
    told = {f"a ({digest('a')[:8]}) (config {config})" for config in (digest(1)[:8], digest(3)[:8], "unknown")}
    assert {model.label for model in models} == told


def test_records_that_contradict_each_other_on_their_model():
    with pytest.raises(ComparisonError, match="layer is 10 in one and 9 in another"):
        models_of([a_record("a", "rte", 0, [0.5]), a_record("a", "rte", 1, [0.5], layer=9)])


def test_the_cost_that_any_record_knows():
    unknown = {"pretraining": 9e12, "teacher": None}
    records = [a_record("a", "rte", 0, [0.5], flops=unknown), a_record("a", "rte", 1, [0.5])]
    for given in (records, records[::-1]):
        (model,), _ = models_of(given)
        assert model.cost == 11e12


def test_models_of_one_name_are_told_apart_by_their_weights():
    records = [a_record("a", "rte", 0, [0.5], weights=digest(i)) for i in range(2)]
    models, _ = models_of(records)
    assert sorted(model.label for model in models) == sorted(f"a ({digest(i)[:8]})" for i in range(2))


def test_runs_that_diverged_or_collapsed_count_and_are_told_apart():
    records = [a_record("a", "rte", 0, [0.5]), a_record("a", "rte", 1, [0.1], diverged="the loss is not finite")]
    records.append(a_record("a", "rte", 2, [0.3], collapsed="every prediction is entailment"))
    (model,), _ = models_of(records)
    assert model.failed == {
        ("rte", 1): "diverged: the loss is not finite",
        ("rte", 2): "collapsed: every prediction is entailment",
    }
    assert average(model) == pytest.approx(0.3)


def test_checkpoints_are_one_arm_and_names_say_what_differs():
    records = [
        a_record(f"l{layer}-{step}", "rte", 0, [0.5], layer=layer, step=step)
        for layer in (8, 10)
        for step in (200, 100)
    ]
    records += [a_record("mlm", "rte", 0, [0.5], objective="mlm", layer=None, k=None)]
    records += [a_record(name, "rte", 0, [0.5], objective=None) for name in ("bert", "roberta")]
    arms = sort_into_arms(models_of(records)[0], CHECKPOINTS)
    found = {arm.name: [model.label for model in arm.models] for arm in arms}
    assert found == {
        "MLSM, l 8": ["l8-100", "l8-200"],
        "MLSM, l 10": ["l10-100", "l10-200"],
        "MLM": ["mlm"],
        "bert": ["bert"],
        "roberta": ["roberta"],
    }


def test_blimp_is_averaged_over_paradigms_that_all_have():
    records = [a_blimp_record("a", {"x": 0.5, "y": 0.9}), a_blimp_record("b", {"y": 0.8})]
    models, _ = models_of(records)
    assert common_paradigms(models) == ["y"]
    assert [blimp_average(model, ["y"]) for model in models] == [0.9, 0.8] and blimp_average(models[0]) == 0.7


def test_blimp_scored_in_several_ways():
    subset = {"task": "blimp-100", "settings": {"per_paradigm": 100}}
    records = [a_blimp_record("a", {"x": 0.9}), a_blimp_record("a", {"x": 0.5}, **subset)]
    records += [a_blimp_record("b", {"x": 0.6}, **subset), a_blimp_record("c", {"x": 0.8})]
    models, _ = models_of(records)
    assert [blimp_average(model) for model in models] == [0.9, 0.6, 0.8]
    chosen, others = scored_alike(models)
    assert [model.label for model in chosen] == ["a", "c"] and list(others) == ["b"]
    assert "settings differ" in others["b"] and "per_paradigm" in others["b"]
    models, _ = models_of([*records[:3], a_blimp_record("c", {"x": 0.7}, **subset)])
    assert [blimp_average(model) for model in models] == [0.5, 0.6, 0.7] and scored_alike(models)[1] == {}


def test_how_far_and_how_many():
    (model,), _ = models_of([a_record("a", "rte", 0, [0.5], fraction=0.125)])
    assert checkpoint_name(model) == "12.5%"
    assert [out_of(*case) for case in (([70, 70], 70), ([42, 70], 70), ([98], 70), ([], 70))] == [
        "n = 70 of 70",
        "n = 42 to 70 of 70",
        "n = 98 (paper: 70)",
        "n = 0 of 70",
    ]
    assert len(SUITE) == 14


# -- BLiMP ------------------------------------------------------------------------------------------------


def test_two_models_are_paired_by_paradigm():
    """Against SciPy's own bootstrap and test; the better model first; a model scored otherwise is no pair."""
    rng = np.random.default_rng(5)
    names = [f"paradigm_{number}" for number in range(67)]
    worse = dict(zip(names, rng.uniform(0.4, 0.8, 67).round(3).tolist(), strict=True))
    gains = rng.normal(0.03, 0.05, 67).round(3)
    better = {name: round(worse[name] + float(gain), 3) for name, gain in zip(names, gains, strict=True)}
    other_data = {"data": {"name": "blimp", "files": {"x": "y"}, "n_train": 0, "n_eval": 1}}
    records = [a_blimp_record("a", worse), a_blimp_record("b", better), a_blimp_record("c", worse, **other_data)]
    (row,) = compare_on_blimp(models_of(records)[0])
    d = np.array([better[name] - worse[name] for name in names])
    assert (row.model, row.against, row.paradigms) == ("b", "a", 67)
    assert (row.wins, row.losses, row.ties) == ((gains > 0).sum(), (gains < 0).sum(), (gains == 0).sum())
    assert row.difference == pytest.approx(d.mean())
    expected = stats.bootstrap((d,), np.mean, method="percentile", n_resamples=20_000, rng=1).confidence_interval
    assert (row.low, row.high) == pytest.approx(tuple(expected), abs=6e-4)
    assert row.p == row.holm == pytest.approx(stats.wilcoxon(d.round(9), method="asymptotic").pvalue)
    assert compare_on_blimp(models_of(records)[0]) == [row]  # no chance in it


def test_one_paradigm_has_no_interval_and_equal_models_no_test():
    (row,) = compare_on_blimp(models_of([a_blimp_record("a", {"x": 0.5}), a_blimp_record("b", {"x": 0.5})])[0])
    assert (row.low, row.high, row.p, row.holm, row.ties) == (None, None, None, None, 1)
    assert compare_on_blimp(models_of([a_blimp_record("a", {"x": 0.5})])[0]) == []
