"""Wilcoxon's test, Holm's adjustment, wins: against the paper's table, scipy on its own, and hand calculation."""

import csv
from itertools import permutations
from statistics import fmean

import numpy as np
import pytest
from data import data_path
from scipy import stats
from tiny_records import a_record, layer_study, of_table

from mlsm.evaluation.comparison import published
from mlsm.evaluation.comparison.effects import LEVELS, matrices, win_rates
from mlsm.evaluation.comparison.figures import p_text
from mlsm.evaluation.comparison.models import SUITE, models_of
from mlsm.evaluation.comparison.significance import bootstrap, holm, wilcoxon
from mlsm.evaluation.records import METRICS


def random_study(models=3, seeds=5, decimals=3):
    """Models whose scores are random to some decimals, so that with few of them there are ties."""
    generator = np.random.default_rng(7)
    records = []
    for i in range(models):
        for task, metrics in METRICS.items():
            for seed in range(seeds):
                values = generator.normal(0.7 + i / 100, 0.02, len(metrics)).round(decimals).tolist()
                records.append(a_record(f"model-{i}", task, seed, values, layer=i))
    return models_of(records)[0]


def test_layer_10_over_12_of_the_papers_table_1():
    table = published.scores(1)
    p = wilcoxon([table[10][figure] - table[12][figure] for figure in SUITE])
    assert round(p, 4) == 0.0049 and p == pytest.approx(0.00491893, abs=1e-8)


def test_the_same_from_records_of_one_seed():
    models, _ = models_of(layer_study((10, 12), seeds=1))
    cells = matrices(models)[0]["scores"]
    assert round(cells.p[0][1], 4) == 0.0049 and cells.n[0][1] == 14
    assert (cells.wins[0][1], cells.losses[0][1], cells.ties[0][1]) == (12, 2, 0)


@pytest.mark.parametrize(("table", "varied"), [(1, "layer"), (2, "k"), (4, "kappa")])
def test_the_published_numbers_are_those_of_the_tables(table, varied):
    header, *rows, last = csv.reader(data_path("../paper").joinpath(f"table{table}.csv").open())
    for column, value in enumerate(map(float, header[1:]), 1):
        assert sorted(published.scores(table)[value].values()) == sorted(float(row[column]) for row in rows)
        assert published.printed_averages(table)[value] == float(last[column])


def test_the_published_scores_belong_to_their_tasks():
    scores = published.scores(1)[10]
    assert scores["cola", "matthews"] == 0.405 and scores["mnli", "accuracy_mismatched"] == 0.831
    assert scores["stsb", "spearman"] == 0.857 and list(scores) != [] and set(scores) == set(SUITE)
    assert published.pretraining_cost()["MLM"] == pytest.approx(1.13e13 * 8 * 100_000)


@pytest.mark.parametrize("decimals", [2, 6])
def test_every_level_is_what_scipy_says_of_pairs_put_together_by_hand(decimals):
    models = random_study(decimals=decimals)
    result, left_out = matrices(models)
    assert left_out == []
    for i, j in permutations(range(3), 2):
        x, y = models[i].scores, models[j].scores
        trainings = [(task, seed) for task in METRICS for seed in range(5)]
        by_hand = {
            "scores": [x[key] - y[key] for key in x],
            "trainings": [
                fmean(x[t, m, s] for m in METRICS[t]) - fmean(y[t, m, s] for m in METRICS[t]) for t, s in trainings
            ],
            "tasks": [
                fmean(x[t, m, s] for m in METRICS[t] for s in range(5))
                - fmean(y[t, m, s] for m in METRICS[t] for s in range(5))
                for t in METRICS
            ],
        }
        for level in LEVELS:
            d = np.round(by_hand[level.name], 9)
            cells = result[level.name]
            assert cells.n[i][j] == len(d) == level.full
            assert cells.wins[i][j] == (d > 0).sum() and cells.ties[i][j] == (d == 0).sum()
            for name, alternative in (("p", "greater"), ("two_sided", "two-sided")):
                expected = stats.wilcoxon(d, correction=False, alternative=alternative, method="asymptotic").pvalue
                assert getattr(cells, name)[i][j] == pytest.approx(expected, rel=1e-9)


def test_matrices_are_consistent_with_themselves():
    for cells in matrices(random_study(decimals=6))[0].values():
        for i, j in permutations(range(3), 2):
            assert cells.wins[i][j] == cells.losses[j][i]
            assert cells.wins[i][j] + cells.losses[i][j] + cells.ties[i][j] == cells.n[i][j]
            assert cells.p[i][j] + cells.p[j][i] == pytest.approx(1)
            assert cells.two_sided[i][j] == pytest.approx(2 * min(cells.p[i][j], cells.p[j][i]))
            assert cells.holm[i][j] >= cells.p[i][j]
            assert cells.two_sided_holm[i][j] == cells.two_sided_holm[j][i] >= cells.two_sided[i][j]
        assert all(cell[i][i] is None for cell in cells for i in range(3))


def test_equal_scores_are_ties_and_give_no_p():
    scores = published.scores(1)[10]
    models, _ = models_of(of_table("a", scores) + of_table("b", scores))
    cells = matrices(models)[0]["scores"]
    assert cells.p[0][1] is None and cells.two_sided[1][0] is None and cells.ties[0][1] == 70
    assert cells.holm[0][1] is None
    assert wilcoxon([0.1 + 0.2 - 0.3, 0.0]) is None and wilcoxon([]) is None


@pytest.mark.parametrize("count", [5, 67])
def test_the_bootstrap_interval_is_scipys_of_95_per_cent(count):
    d = np.random.default_rng(count).gamma(2, 0.01, count) - 0.015  # skewed
    of_scipy = stats.bootstrap((d,), np.mean, n_resamples=20_000, method="percentile", rng=1, confidence_level=0.95)
    interval, width = of_scipy.confidence_interval, np.ptp(of_scipy.confidence_interval)
    assert bootstrap([[x] for x in d]) == pytest.approx((interval.low, interval.high), abs=0.03 * width)
    of_fewer = stats.bootstrap((d,), np.mean, n_resamples=20_000, method="percentile", rng=1, confidence_level=0.9)
    assert np.ptp(of_fewer.confidence_interval) < 0.9 * width, "90 % would be told from it"


def test_holm_by_hand():
    # 0.005 x 4, 0.01 x 3, 0.03 x 2, then 0.04 x 1, which may not fall below its predecessor
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, None, 0.6]) == pytest.approx([1.0, None, 1.0])
    assert holm([]) == []


def test_win_rates_by_hand():
    mine = [a_record("a", "mrpc", 0, [0.9, 0.8]), a_record("a", "mrpc", 1, [0.7, 0.8]), a_record("a", "rte", 0, [0.5])]
    other = {"objective": "mlm", "layer": None, "k": None}
    theirs = [
        a_record("b", "mrpc", 0, [0.8, 0.8], **other),
        a_record("b", "mrpc", 1, [0.9, 0.7], **other),
        a_record("b", "rte", 0, [0.4], **other),
        a_record("later", "rte", 0, [0.4], **other | {"step": 2000}),
    ]
    rates = {(row.model, row.task): row for row in win_rates(models_of(mine + theirs)[0])}
    assert {key: (row.wins, row.losses, row.ties) for key, row in rates.items()} == {
        ("a", "mrpc"): (2, 1, 1),
        ("a", "rte"): (1, 0, 0),
        ("a", "all"): (3, 1, 1),
        ("b", "mrpc"): (1, 2, 1),
        ("b", "rte"): (0, 1, 0),
        ("b", "all"): (1, 3, 1),
    }
    assert rates["a", "all"].rate == 0.7 and rates["a", "all"].step == 1000


def test_p_values_are_starred_at_the_papers_level():
    assert [p_text(p) for p in (0.0001, 0.0099, 0.01, 0.015, 0.9999)] == ["<.001*", ".010*", ".010", ".015", "1"]
