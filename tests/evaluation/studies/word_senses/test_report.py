"""Which layer is recommended, what is shown without matplotlib."""

import json
import sys

import numpy as np
import pytest

from mlsm.commands.choose_layer import show as layers
from mlsm.evaluation.studies.word_senses.conclusions import (
    GROUPS,
    mcnemar,
    recommend,
    write_report,
)

QUESTIONS = 400


def answers(share, flipped=0, seed=0):
    """Right answers at a share of the questions, and wrong ones at some of these instead."""
    right_Q = np.random.default_rng(seed).permutation(QUESTIONS) < share * QUESTIONS
    right_Q[np.flatnonzero(right_Q)[:flipped]] = False
    return right_Q


def entries(correct):
    return [{"layer": layer, "k": k, "f1": float(right_Q.mean())} for (layer, k), right_Q in correct.items()]


def test_the_exact_test_by_hand():
    left_Q, right_Q = np.zeros((2, 20), bool)
    left_Q[:5] = True
    assert mcnemar(left_Q, left_Q) == 1.0
    assert mcnemar(left_Q, right_Q) == 2 * 0.5**5  # five against none
    right_Q[4:6] = True  # four against one
    assert mcnemar(left_Q, right_Q) == pytest.approx(2 * (1 + 5) / 2**5)


def test_the_best_layer_and_the_cheapest_that_is_not_worse():
    best = answers(0.7)
    correct = {(2, 8): answers(0.7, 40), (4, 8): answers(0.7, 3), (9, 8): best, (11, 8): best.copy()}
    found = recommend(entries(correct), correct)
    assert found["layer"] == 9  # the shallower of two equals
    assert found["cheapest_not_worse"] == {"layer": 4, "f1": pytest.approx(0.7 - 3 / 400), "p": 0.25}
    assert found["standard_error"] == pytest.approx(np.sqrt(0.7 * 0.3 / QUESTIONS))
    del correct[4, 8]
    assert recommend(entries(correct), correct)["cheapest_not_worse"]["layer"] == 9


def test_without_matplotlib_a_note_and_no_failure(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    groups = dict.fromkeys((*GROUPS, "back_off"), 0.5) | {"VERB": None}
    result = {
        "directory": str(tmp_path), "teacher": {"name": "t"}, "first_sense": groups,
        "counts": {"ALL": 9, "training_words": 226_036}, "conclusive": True,
        "layers": [{"layer": 1, "k": 8, "f1": 0.5, "scores": {"raw-npmi0": groups},
                    "best_on_development": {"variant": "raw-npmi0", "f1": 0.5},
                    "costs": {"relative_encoding": 1.0, "nnz_per_word": 3.0}}],
        "recommended": [{"k": 8, "layer": 1, "f1": 0.5, "standard_error": 0.1,
                         "cheapest_not_worse": {"layer": 1, "f1": 0.5, "p": 1.0}}],
        "finished_before": False, "seconds": 61.0,
    }  # fmt: skip

    with caplog.at_level("INFO"):
        write_report(result, tmp_path)
    assert "no figure: a figure needs matplotlib" in caplog.text
    assert json.loads((tmp_path / "result.json").read_text())["files"] == ["result.json", "table.csv"]
    shown = layers(result, None)
    assert "Recommended:  --layer 1  (F1 50.0%" in shown and "Cheapest" not in shown
    assert "No layer is above it" in shown  # 50 % both
    assert "1 min 01 s" in shown
    assert (tmp_path / "table.csv").read_text().splitlines()[1].startswith("1,8,raw-npmi0,0.5,0.5")
