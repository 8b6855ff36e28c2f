"""Models sorted into arms by their settings or by a study, with floor and ceiling apart."""

import pytest
from tiny_records import a_blimp_record, digest
from tiny_study import arm

from mlsm.evaluation.comparison.arms import find_arms
from mlsm.evaluation.comparison.config import StudyFacts
from mlsm.evaluation.comparison.effects import judge_hypothesis
from mlsm.evaluation.comparison.models import models_of
from pipeline.teacher import BUNDLED

SCORES = {1: {"rte": 0.5}, 2: {"rte": 0.6}}


def found(records, **facts):
    study = StudyFacts(title="", question="", primary=("a", "b"), **facts) if facts else None
    return find_arms(models_of(records)[0], study)


def labels(arm):
    return [model.label for model in arm.models]


def test_an_arm_is_all_settings_but_seed_and_step():
    records = (
        arm("mlsm", SCORES) + arm("mlsm", SCORES, fraction=0.5) + arm("mlsm", SCORES, "fast", of_identity={"lr": 1})
    )
    known = found(records)
    assert [one.name for one in known.arms] == ["MLSM, lr 0.001", "MLSM, lr 1"]
    assert set(labels(known.arms[0])) == {f"mlsm-seed{s}{step}" for s in (1, 2) for step in ("", "-step-00000500")}
    assert known.arms[0].fractions == [0.5, 1.0] and list(known.arms[0].at(0.5).by_seed) == [1, 2]
    assert known.at("mlsm") is None  # two arms have this objective
    assert known.at("MLSM, lr 1").by_seed[2].label == "fast-seed2"
    assert known.at("MLSM, lr 0.001 at 50%").by_seed[1].label == "mlsm-seed1-step-00000500"
    assert known.at("MLSM, lr 0.001 at 25%") is None


def test_a_study_names_its_arms_in_its_order():
    records = arm("mlsm", SCORES) + arm("mlsm", SCORES, fraction=0.5) + arm("mlm", SCORES, "words")
    runs = {"b": ("words-seed1", "words-seed2"), "none": ("x",), "a": ("mlsm-seed1",)}
    known = found(records, arms=runs)
    assert [one.name for one in known.arms] == ["b", "a", "mlsm-seed2-step-00000500", "mlsm-seed2"]
    assert labels(known.arms[1]) == ["mlsm-seed1-step-00000500", "mlsm-seed1"]


def test_another_arm_does_not_stand_for_one_without_records():
    """An objective's name is also that of a planned arm, which has not been scored yet."""
    records = arm("mlsm", SCORES, "deep") + arm("mlm", SCORES, "words")
    known = found(
        records, arms={"mlsm": (), "deep": ("deep-seed1", "deep-seed2"), "mlm": ("words-seed1", "words-seed2")}
    )
    assert known.arm("mlsm") is None and known.arm("deep").name == "deep"
    assert judge_hypothesis(known, ("mlsm", "mlm")).lacks == "there are no records of fine-tunings of mlsm"
    assert found(records).arm("mlsm").name == "MLSM"  # without a study, the only arm of this objective


def test_a_run_that_died_is_told():
    records = arm("mlsm", {1: {"rte": 0.5}}) + arm("mlsm", {2: {"rte": 0.6}}, fraction=0.8)
    (note,) = found(records).notes
    assert "pre-training seed 2, is fine-tuned only after 80 % of its steps" in note
    dead = found(arm("mlsm", SCORES, fraction=0.8))
    lacks = judge_hypothesis(dead, ("mlsm", "mlm")).lacks
    assert lacks == "there are no records of fine-tunings of mlsm (only of unfinished checkpoints) and of mlm"


def test_floor_and_ceiling_are_recognised():
    """An encoder of step 0; the model that the others name as their teacher."""
    facts = {"teacher": "bundled", "identity": None}
    records = arm("mlsm", {1: {"rte": 0.5}}, **facts)
    records += arm("mlsm", {2: {"rte": 0.5}}, "raw", fraction=0, **facts)
    for name, path in (("x", str(BUNDLED)), ("y", "elsewhere")):
        stock = {"run_seed": None, "step": None, "fraction": None, "identity": None, "teacher": None, "path": path}
        records += [record | stock | {"objective": None} for record in arm("mlsm", {3: {"rte": 0.5}}, name)]
    known = found(records)
    (floor,) = known.floors
    assert labels(floor) == ["raw-seed2-step-00000000"] and labels(known.ceiling) == ["x-seed3"]
    assert [labels(one) for one in known.arms] == [["mlsm-seed1"], ["y-seed3"]]
    assert labels(floor.at()) == ["raw-seed2-step-00000000"]
    records += arm("mlsm", {2: {"rte": 0.6}}, "large", fraction=0, **facts | {"encoder": "bert-4x256"})
    known = found(records)
    assert [one.name for one in known.floors] == [f"floor, {floor.facts['encoder']}", "floor, bert-4x256"]
    assert [one.name for one in known.with_ends()] == [*(one.name for one in (*known.floors, *known.arms)), "ceiling"]


def stock(name, path):
    """Records of a model without a lineage."""
    facts = dict.fromkeys(("run_seed", "step", "fraction", "identity", "teacher", "objective"))
    return [record | facts | {"model": name, "path": path} for record in arm("mlsm", {3: {"rte": 0.5}}, name + path)]


MINILM = "sentence-transformers/all-MiniLM-L6-v2"


@pytest.mark.parametrize(
    ("recorded", "paths", "expected"),
    [
        ("/data/models/minilm", ["models/minilm"], "models/minilm"),
        (MINILM, ["models/all-MiniLM-L6-v2"], "models/all-MiniLM-L6-v2"),
        ("models/minilm", ["/data/models/minilm"], "/data/models/minilm"),
        ("/data/models/minilm", ["a/minilm", "b/minilm"], None),
        ("a/minilm", ["./a/../a/minilm", "b/minilm"], "./a/../a/minilm"),
        ("/data/models/minilm", ["models/minilm-v2"], None),
    ],
)
def test_a_teacher_is_recognised_under_another_path(recorded, paths, expected):
    records = arm("mlsm", {1: {"rte": 0.5}}, teacher=recorded)
    records += [record for path in paths for record in stock(path.rpartition("/")[2], path)]
    ceiling = found(records).ceiling
    assert [model.facts["path"] for model in ceiling.models] == [expected] if expected else ceiling is None


def test_a_teacher_that_was_trained_here_is_no_arm_unless_it_was_planned_as_one():
    records = arm("mlsm", SCORES, teacher="./runs/mlm-seed1/export") + arm("mlm", {1: {"rte": 0.5}})
    known = found(records)
    assert labels(known.ceiling) == ["mlm-seed1"] and [one.name for one in known.arms] == ["MLSM"]
    planned = found(records, arms={"a": ("mlsm-seed1", "mlsm-seed2"), "b": ("mlm-seed1",)})
    assert planned.ceiling is None and [one.name for one in planned.arms] == ["a", "b"]


def test_models_of_the_hub_with_other_owners_are_other_models():
    snapshot = "hub/models--nreimers--all-MiniLM-L6-v2/snapshots/0123"
    records = arm("mlsm", {1: {"rte": 0.5}}, teacher=MINILM) + stock("nreimers/all-MiniLM-L6-v2", snapshot)
    assert found(records).ceiling is None


def test_runs_of_different_targets_may_start_with_the_same_weights():
    """Two students continue one encoder with the same seed, and both are evaluated before their first step."""
    both = {"fraction": 0, "weights": digest("the encoder"), "identity": None}
    records = arm("mlsm", {1: {"rte": 0.5}}, **both) + arm("hard-mlsm", {1: {"rte": 0.5}}, layer=4, **both)
    (floor,) = models_of(records)[0]
    assert floor.facts["step"] == 0 and floor.label == "mlsm-seed1-step-00000000"


def test_an_arm_is_compared_with_untrained_students_of_its_own_encoder():
    records = []
    for encoder in ("bert-1x64", "bert-2x64"):
        for fraction in (0, 1):
            name = f"{encoder}-{fraction}"
            records += arm("mlsm", {1: {"rte": 0.5}}, name, fraction=fraction, encoder=encoder, identity=None)
    known = found(records)
    assert len(known.arms) == 2 and not known.notes
    for one in known.arms:
        assert labels(known.floor_of(one)) == [f"{one.facts['encoder']}-0-seed1-step-00000000"]


def test_two_models_of_one_arm_seed_and_step_are_told():
    records = arm("mlsm", {1: {"rte": 0.5}}) + arm("mlsm", {1: {"rte": 0.6}}, "twin")
    known = found(records)
    assert known.arms[0].at().by_seed[1].label == "mlsm-seed1"
    assert known.notes == ["twin-seed1 has the same arm, seed and step as mlsm-seed1, which is shown instead."]


def test_two_models_of_one_seed_with_scores_on_blimp_are_told():
    records = []
    for name in ("mlm", "twin"):
        (record, _) = arm("mlm", {1: {"rte": 0.5}}, name)
        facts = {name: record[name] for name in ("objective", "run_seed", "identity", "encoder", "weights", "path")}
        records.append(a_blimp_record(record["model"], {"x": 0.5}, **facts))
    assert found(records).notes == ["twin-seed1 has the same arm, seed and step as mlm-seed1, which is shown instead."]


def test_trained_weights_that_a_run_continues_are_no_floor():
    records = arm("mlsm", {1: {"rte": 0.5}}, "new", fraction=0)
    records += arm("mlsm", {1: {"rte": 0.7}}, "continued", fraction=0, of_identity={"continue_from": "1234"})
    known = found(records)
    assert [labels(floor) for floor in known.floors] == [["new-seed1-step-00000000"]]
    (continued,) = known.arms
    assert continued.fractions == [0.0] and not continued.at().models, "its training has not begun"


def test_two_untrained_models_of_one_seed_are_told():
    records = arm("mlsm", {1: {"rte": 0.5}}, "small", fraction=0)
    records += arm("mlsm", {1: {"rte": 0.6}}, "large", fraction=0, of_identity={"encoder": "bert-12x768"})
    (note,) = found(records).notes
    assert "has the same arm, seed and step as" in note
