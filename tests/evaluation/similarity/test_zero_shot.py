"""Correlations, thresholds and the tables of both sets, with a source whose similarities are known."""

import math

import numpy as np
import pytest
from scipy import stats

from mlsm.commands.similarity import show as summary
from mlsm.evaluation.similarity.scores import mean_distribution, text_scores, word_at, word_scores
from mlsm.evaluation.similarity.sources import Tokens
from mlsm.evaluation.similarity.zero_shot import best_threshold, correlation, evaluate_table

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
ATOMS = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)


class Known:
    """Every word has an LSP of its own, its hidden state is its atom; `Word` is its `word` with a little of LSP 7."""

    atoms_Ke = ATOMS

    def read(self, texts):
        return [self.tokens(text) for text in texts]

    def tokens(self, text):
        names, lsps, spans, begin = text.split(), [], [], 0
        for name in names:
            weights = np.eye(8, dtype=np.float32)[WORDS.index(name.lower())]
            lsps.append(0.9 * weights + 0.1 * np.eye(8)[7] if name[0].isupper() else weights)
            spans.append((begin, begin + len(name)))
            begin += len(name) + 1
        lsps_TK = np.array(lsps, np.float32)
        return Tokens(names, spans, lsps_TK, {"layer 1": lsps_TK @ ATOMS})


def test_texts_by_hand():
    a, b = Known().read(["alpha beta", "beta gamma delta"])
    found = text_scores(a, b, ATOMS)
    assert found["overlap, matching"] == pytest.approx(2 * 1 / 5)  # beta alone
    assert found["jensen-shannon, matching"] == pytest.approx(2 * 1 / 5)
    least, most = 1 / 3, 1 / 2 + 1 / 2 + 1 / 3 + 1 / 3
    assert found["overlap, mean"] == pytest.approx(least / most)
    p, q = np.zeros(8), np.zeros(8)
    p[:2], q[1:4] = 1 / 2, 1 / 3
    r, s = p @ ATOMS, q @ ATOMS
    cosine = r @ s / np.linalg.norm(r) / np.linalg.norm(s)
    assert found["reconstruction, mean"] == pytest.approx(cosine) == pytest.approx(found["layer 1, mean"])
    assert found["spelling, overlap"] == 1 / 4
    same = text_scores(a, a, ATOMS)
    assert list(same.values()) == pytest.approx([1] * len(same))
    nothing = Tokens([], [], np.zeros((0, 8), np.float32), {"layer 1": np.zeros((0, 5), np.float32)})
    assert set(text_scores(a, nothing, ATOMS).values()) == {0}


def test_a_word_is_the_mean_of_its_tokens():
    tokens = Known().tokens("alpha beta gamma")
    both = word_at(tokens, 0, 10)  # alpha beta
    assert both.lsps_TK[0] == pytest.approx(np.array([0.5, 0.5, 0, 0, 0, 0, 0, 0]))
    assert word_scores(both, word_at(tokens, 6, 10), ATOMS)["overlap"] == pytest.approx(0.5 / 1.5)
    none = word_at(tokens, 16, 18)
    assert not mean_distribution(none).any() and word_scores(none, both, ATOMS)["layer 1"] == 0


def test_tokens_without_lsps_do_not_count_in_the_mean():
    lsps_TK = np.array([[0.5, 0.5, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0], [0.5, 0, 0.5]], np.float32)
    tokens = Tokens(list("abcde"), [(place, place + 1) for place in range(5)], lsps_TK, {})
    coded = lsps_TK[lsps_TK.any(1)]
    assert mean_distribution(tokens) == pytest.approx(coded.mean(0)) and coded.mean(0).sum() == pytest.approx(1)
    assert word_at(tokens, 1, 3).lsps_TK[0].tolist() == [0, 0, 1]
    assert mean_distribution(word_at(tokens, 3, 4)).tolist() == [0, 0, 0]


def test_the_threshold_is_the_best_one():
    draw = np.random.default_rng(5)
    for count in (2, 7, 40):
        values, is_same = draw.integers(0, 10, count) / 10, draw.random(count) < 0.5
        threshold, share = best_threshold(values, is_same)
        shares = [((values > t) == is_same).mean() for t in np.linspace(-0.55, 1.05, 33)]
        assert share == pytest.approx(max(shares)) == pytest.approx(((values > threshold) == is_same).mean())


def test_correlations_have_the_interval_of_bonett_and_wright():
    draw = np.random.default_rng(6)
    labels = draw.normal(size=60)
    values = labels + draw.normal(size=60)
    found = correlation(values, labels)
    assert found["spearman"] == pytest.approx(stats.pearsonr(stats.rankdata(values), stats.rankdata(labels))[0])
    half = 1.959963984540054 * math.sqrt((1 + found["spearman"] ** 2 / 2) / 57)
    assert np.arctanh([found["low"], found["high"]]) == pytest.approx(np.arctanh(found["spearman"]) + [-half, half])
    assert correlation(labels, labels)["high"] == pytest.approx(1)
    assert [*correlation(np.ones(10), np.arange(10.0)).values()] == [0.0, 0.0, -1.0, 1.0]  # as of fine-tuned models


def write_sets(directory):
    """STS-B whose score is how many words are shared; WiC whose senses are told apart by capitals, which the training
    set puts at other values than a threshold that was chosen on the development set would be."""
    (directory / "STS-B").mkdir()
    shared = [("alpha beta", "alpha beta", 5), ("alpha beta", "alpha gamma", 3), ("alpha beta", "gamma delta", 0)]
    lines = ["sentence1\tsentence2\tscore", *(f"{a}\t{b}\t{score}" for a, b, score in shared * 2)]
    for name in ("train.tsv", "dev.tsv"):
        (directory / "STS-B" / name).write_text("\n".join(lines) + "\n")
    parts = {
        "train": [("alpha", "alpha", "T"), ("alpha", "Alpha", "F"), ("beta", "beta", "T"), ("Beta", "beta", "F")],
        "dev": [("gamma", "gamma", "T"), ("gamma", "Gamma", "F"), ("Delta", "delta", "T"), ("zeta", "zeta", "T")],
    }
    for part, rows in parts.items():
        place = directory / "wic" / part
        place.mkdir(parents=True)
        data = "".join(f"{a.lower()}\tN\t1-1\teta {a}\ttheta {b}\n" for a, b, _ in rows)
        (place / f"{part}.data.txt").write_text(data)
        (place / f"{part}.gold.txt").write_text("".join(f"{label}\n" for *_, label in rows))


def test_tables_of_both_sets(tmp_path):
    write_sets(tmp_path)
    calls = []
    table = evaluate_table(Known(), "stsb", tmp_path, lambda *how, **_: calls.append(how))
    rows = {row["measure"]: row for row in table["rows"]}
    assert rows["overlap, matching"]["spearman"] == pytest.approx(1)
    assert rows["overlap, matching"]["pearson"] == pytest.approx(stats.pearsonr([1, 0.5, 0], [5, 3, 0])[0])
    assert table["data"]["n_eval"] == 6 and calls[-1] == ("similarity stsb", 6, 6)
    of_texts, table = table, evaluate_table(Known(), "wic", tmp_path, lambda *how, **_: None)
    row = next(row for row in table["rows"] if row["measure"] == "overlap")
    assert row["train"] == 1 and row["accuracy"] == 0.75 and 0.9 / 1.1 < row["threshold"] < 1
    assert table["majority"] == 0.75 and table["data"]["n_train"] == 4
    text = summary({"student": "a student", "positions": "masked", "cut": 2, "tables": [of_texts, table]}, None)
    for said in ("STS-B, 6 pairs", "WiC, 4 pairs", "(the larger class: 75.0)", "cut to a window: 2"):
        assert said in text
    assert f"75.0      {100 * row['low']:.1f} to {100 * row['high']:.1f}" in text
