"""Scores equal those of scikit-learn, SciPy and seqeval, or counts by hand."""

import numpy as np
import pytest
from scipy.stats import pearsonr, spearmanr
from seqeval.metrics import f1_score as entity_f1

from mlsm.evaluation import records
from mlsm.evaluation.tasks.finetuning.metrics import UNREAD, constant, figures, uninformed
from mlsm.evaluation.tasks.finetuning.tasks import ENTITIES, TASKS


def values(task, gold, predicted):
    found = figures(TASKS[task], {"validation": gold}, {"validation": predicted})
    assert all(figure["n"] == len(gold) for figure in found)
    return {figure["metric"]: figure["value"] for figure in found}


GOLD, SAID = np.array([1, 1, 1, 0, 0, 0, 1, 0]), np.array([1, 1, 0, 0, 1, 0, 1, 0])  # 3 of 4 each way right


def test_by_hand():
    assert values("mrpc", GOLD, SAID) == {"accuracy": 0.75, "f1": 0.75}
    assert values("cola", GOLD, SAID) == {"matthews": pytest.approx((3 * 3 - 1 * 1) / 16)}
    assert values("wic", GOLD, SAID) == {"accuracy": 0.75}
    scores = np.array([0.0, 1.5, 3.0, 5.0]), np.array([0.1, 2.0, 1.0, 4.0])
    expected = {"pearson": pearsonr(*scores)[0], "spearman": spearmanr(*scores)[0]}
    assert values("stsb", *scores) == pytest.approx(expected)


def test_one_example_has_no_correlation():
    assert values("stsb", np.array([2.5]), np.array([3.0])) == {"pearson": 0.0, "spearman": 0.0}


def test_mnli_is_scored_on_both_sets():
    gold = {"validation_matched": GOLD, "validation_mismatched": SAID}
    said = {"validation_matched": SAID, "validation_mismatched": SAID}
    matched, mismatched = figures(TASKS["mnli"], gold, said)
    assert (matched["metric"], matched["value"]) == ("accuracy_matched", 0.75)
    assert (mismatched["metric"], mismatched["value"]) == ("accuracy_mismatched", 1.0)


def test_entities_of_every_sentence_count():
    def labels(*tags):
        return [ENTITIES.index(tag) for tag in tags]

    gold = [labels("B-PER", "I-PER", "O"), labels("B-ORG", "B-ORG"), labels("O"), labels("B-LOC")]
    said = [labels("B-PER", "O", "O"), labels("B-ORG", "B-ORG"), labels("B-MISC"), labels("B-LOC")]
    names = [[[ENTITIES[label] for label in sentence] for sentence in part] for part in (gold, said)]
    assert values("conll2003", gold, said) == {"f1": pytest.approx(entity_f1(*names))}
    assert entity_f1(*names) == pytest.approx(2 * 3 / (4 + 5))  # 3 of 4 entities found, 5 said
    nothing = [[0] * len(sentence) for sentence in gold]
    assert values("conll2003", gold, nothing) == {"f1": 0.0}
    assert constant(TASKS["conll2003"], {"validation": nothing}) == "every prediction is O"


def test_words_that_were_not_read_are_errors():
    """By hand. Of the first sentence two words are cut off, of the second an entity and two words outside any."""
    o, person, inside, place = (ENTITIES.index(tag) for tag in ("O", "B-PER", "I-PER", "B-LOC"))
    gold = [[person, o, o], [person, inside, o, o, place]]
    said = [[person, UNREAD, UNREAD], [person, inside, UNREAD, UNREAD, UNREAD]]
    assert values("conll2003", gold, said) == {"f1": pytest.approx(2 * 2 / (3 + 4))}  # 2 right, 3 there, 4 said
    as_o = [[person, o, o], [person, inside, o, o, o]]
    assert values("conll2003", gold, as_o) == {"f1": pytest.approx(2 * 2 / (3 + 2))}
    across = [[person, UNREAD, UNREAD]]  # an entity that goes on behind the cut is not found
    assert values("conll2003", [[person, inside, o]], across) == {"f1": 0.0}
    assert constant(TASKS["conll2003"], {"validation": [[o, o, UNREAD]]}) == "every prediction is O"


def test_what_does_not_exist_is_zero():
    scores = np.arange(5.0)
    for said in (np.full(5, 2.5), np.full(5, np.nan), np.array([1.0, np.inf, 0, 0, 0])):
        assert values("stsb", scores, said) == {"pearson": 0.0, "spearman": 0.0}
    assert values("cola", GOLD, np.zeros(8, int)) == {"matthews": 0.0}
    assert values("qqp", GOLD, np.zeros(8, int)) == {"accuracy": 0.5, "f1": 0.0}


def test_constant_predictions_are_told():
    assert constant(TASKS["rte"], {"validation": np.zeros(4, int)}) == "every prediction is entailment"
    assert constant(TASKS["rte"], {"validation": np.array([0, 1])}) is None
    assert constant(TASKS["stsb"], {"validation": np.full(3, np.float32(2.5))}) == "every prediction is 2.5"
    assert constant(TASKS["stsb"], {"validation": np.full(3, np.nan)}) == "every prediction is nan"


def test_the_suite_has_fourteen_figures():
    assert sum(map(len, records.METRICS.values())) == 14 and list(records.METRICS) == list(TASKS)


def test_a_score_near_the_most_frequent_answers_is_said_to_be_so():
    """By hand: of training 60 % are entailment (0), of the development set 50 %."""
    train, gold, task = [0] * 6 + [1] * 4, {"validation": [0, 1] * 100}, TASKS["rte"]

    def said(right):
        return uninformed(task, train, gold, [{"metric": "accuracy", "value": right / 200, "n": 200}])

    for right in (90, 100, 102):  # below it, equal, and one point above
        assert said(right) == f"the score is {right / 200:.3f}, that of always answering entailment 0.500"
    assert said(103) is None
    nothing = [{"metric": "f1", "value": 0.0, "n": 1}]
    words = uninformed(TASKS["conll2003"], [[0, 0, 1]], {"validation": [[0, 1]]}, nothing)
    assert words == "the score is 0.000, that of always answering O 0.000"
    zero = [{"metric": name, "value": 0.005, "n": 9} for name in ("pearson", "spearman")]
    assert "a constant 0.000" in uninformed(TASKS["stsb"], [1.0, 2.0], {"validation": [1.0, 2.0, 3.0]}, zero)
