"""Arms and stores follow a study's recipe, and contradictions are reported before any work."""

import copy
import json
import re
from collections import Counter

import pytest
import yaml

from mlsm.evaluation.studies.protocol.description import read_study
from mlsm.evaluation.studies.protocol.parts import plan

RECIPE = {
    "study": {
        "title": "A title",
        "question": "A question?",
        "primary": ["mlsm", "mlm"],
        "seeds": [0, 1],
        "stores": {"lsp": {"command": "encode-lsp"}},
        "arms": {"mlsm": {"store": "lsp"}, "mlm": {"store": "lsp", "objective": "mlm", "seeds": [1, 2]}},
    },
    "encode-lsp": {"teacher": "bundled", "corpus": ["$MLSM_TEST_TEXT/a.txt"], "layer": 10, "k": 64, "max-length": 32},
    "train-student": {"encoder": "bert-2x32", "dropout": 0.0, "max-steps": 10, "batch-windows": 8, "lr": 1e-3},
}

COMPOSITE = {"measures": ["stsb/cosine"], "untrained": "mlm", "teacher": "bundled"}


@pytest.fixture
def read(tmp_path):
    """Changes the recipe and reads it: a dict of dotted names to values, None to take a name away."""

    def change(changes=()):
        recipe = copy.deepcopy(RECIPE)
        for name, value in dict(changes).items():
            *parents, last = name.split(".")
            place = recipe
            for parent in parents:
                place = place[parent]
            if value is None:
                del place[last]
            else:
                place[last] = value
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe, sort_keys=False))
        return read_study(str(path))

    return change


def test_arms_have_the_common_settings_and_their_own(read):
    study = read()
    assert list(study.arms) == ["mlsm", "mlm"]
    mlm = study.arms["mlm"]
    common = {"encoder": "bert-2x32", "dropout": 0.0, "max_steps": 10, "batch_windows": 8, "lr": 1e-3}
    assert mlm.settings == common | {"objective": "mlm"}
    assert (mlm.layer, mlm.k, mlm.seeds) == (10, 64, (1, 2)) and study.arms["mlsm"].seeds == (0, 1)
    assert study.seeds == (1,) and study.window == 32


def test_lists_make_an_arm_of_each_value(read):
    arms = {"mlsm": {"store": "lsp"}, "mtl": {"store": "lsp", "objective": "mtl", "kappa": [0.1, 1]}}
    study = read({"study.arms": arms, "study.primary": ["mlsm", "mtl-kappa1"]})
    assert {name: arm.settings.get("kappa") for name, arm in study.arms.items()} == {
        "mlsm": None, "mtl-kappa0.1": 0.1, "mtl-kappa1": 1.0,
    }  # fmt: skip


def test_a_store_of_several_layers_and_k_makes_an_arm_of_each(read):
    arms = {"mlsm": {"store": "lsp"}}
    both = ["mlsm-l4-k32", "mlsm-l8-k64"]
    study = read({"encode-lsp.layer": [4, 8], "encode-lsp.k": [32, 64], "study.arms": arms, "study.primary": both})
    assert {name: (arm.layer, arm.k) for name, arm in study.arms.items()} == {
        "mlsm-l4-k32": (4, 32), "mlsm-l4-k64": (4, 64), "mlsm-l8-k32": (8, 32), "mlsm-l8-k64": (8, 64),
    }  # fmt: skip
    assert len(study.stores) == 1  # one pass of the teacher for all


def test_a_student_of_words_is_one_on_a_store_of_several_layers(read):
    both = ["mlsm-l4", "mlm"]
    study = read({"encode-lsp.layer": [4, 8], "study.primary": both})
    assert {name: arm.layer for name, arm in study.arms.items()} == {"mlsm-l4": 4, "mlsm-l8": 8, "mlm": 4}
    supersense = {"store": "lsp", "objective": "supersense", "wordnet": "index.sense"}
    both, arms = ["mlsm-l4", "senses"], {"mlsm": {"store": "lsp"}, "senses": supersense}
    study = read({"encode-lsp.layer": [4, 8], "study.primary": both, "study.arms": arms})
    assert {name: arm.layer for name, arm in study.arms.items()} == {"mlsm-l4": 4, "mlsm-l8": 8, "senses": 4}


def test_hypotheses_have_the_seeds_that_their_arms_share(read):
    arms = {"mlsm": {"store": "lsp"}, "mlm": {"store": "lsp", "objective": "mlm"}}
    few = arms | {"mtl": {"store": "lsp", "objective": "mtl", "seeds": [1, 5]}}
    study = read({"study.arms": few, "study.secondary": [["mtl", "mlm"]]})
    assert study.seeds == (0, 1) and study.seeds_of(("mtl", "mlm")) == (1,)
    none = arms | {"mtl": {"store": "lsp", "objective": "mtl", "seeds": [5]}}
    with pytest.raises(ValueError, match="mtl and mlm have no seed in common"):
        read({"study.arms": none, "study.secondary": [["mtl", "mlm"]]})


def test_a_tuple_of_checkpoints_is_no_list_of_arms(read):
    study = read({"study.arms.mlsm": {"store": "lsp", "checkpoints": [0.5, 1.0]}})
    assert study.arms["mlsm"].settings["checkpoints"] == (0.5, 1.0)


def test_the_arm_that_says_which_tasks_count_has_a_curve_from_the_untrained_student_on(read):
    mlm = {"store": "lsp", "objective": "mlm", "checkpoints": [0, 1.0]}
    study = read({"study.arms.mlm": mlm, "study.curves": ["mlm"], "study.learned-by": "mlm"})
    assert study.learned_by == "mlm" and read().learned_by is None


def test_the_window_is_that_of_what_was_encoded_whatever_is_derived_from_it(read):
    """A derived store says no length; taken for the default of 128, it would cut what fine-tuning reads."""
    study = read({"encode-lsp.max-length": 512, "study.stores.few": {"command": "derive-shards", "store": "lsp"}})
    assert study.window == 512


def test_a_store_of_each_seed_is_coded_from_hidden_states_with_a_dictionary_of_that_seed(read, tmp_path):
    """Text and teacher are those of the hidden states; what the section says of them is not for such a store."""
    hidden = {"command": "encode-hidden", "corpus": ["a.txt"], "layer": 4, "max-length": 32, "teacher": "bundled"}
    stores = {"hidden": hidden, "lsp": {"hidden": "hidden", "seed": "each"}}
    arms = {"mlsm": {"store": "lsp"}, "regress": {"store": "hidden", "objective": "regress", "seeds": [1, 2]}}
    study = read({"study.stores": stores, "study.arms": arms, "study.primary": ["mlsm", "regress"]})
    assert study.window == 32 and study.stores["lsp"].settings == {"k": (64,)}
    parts = {part.name: part for part in plan(study, tmp_path, None).parts}
    lsp = parts["encode-lsp/lsp-seed1"]
    assert lsp.values["seed"] == 1 and lsp.needs == ("encode-hidden/hidden",)
    assert lsp.values["hidden"].pattern == tmp_path / "stores/hidden/stores/*"
    assert parts["train-student/mlsm-seed1"].values["store"].pattern == (
        tmp_path / "stores/lsp-seed1/stores/lsp-*-l*-k64-*"
    )
    assert parts["train-student/mlsm-seed1"].needs == ("encode-lsp/lsp-seed1",)
    assert parts["train-student/regress-seed2"].values["store"].pattern.name == "hidden-*-l4-" + 12 * "[0-9a-f]"
    assert list(parts)[:4] == [
        "encode-hidden/hidden", "encode-lsp/lsp-seed1", "train-student/mlsm-seed1", "train-student/regress-seed1",
    ]  # fmt: skip


def test_a_layer_in_the_name_of_a_teacher_is_not_that_of_the_store(read, tmp_path):
    hidden = {"command": "encode-hidden", "corpus": ["a.txt"], "layer": [4, 6], "teacher": "all-minilm-l6-v2"}
    stores = {"lsp": {"command": "encode-lsp"}, "hidden": hidden, "pq": hidden | {"layer": 6, "quantise": "pq"}}
    arms = RECIPE["study"]["arms"] | {
        "regress": {"store": "hidden", "objective": "regress"},
        "small": {"store": "pq", "objective": "regress"},
    }
    parts = {p.name: p for p in plan(read({"study.stores": stores, "study.arms": arms}), tmp_path, None).parts}
    for name in ("l4-ef70fa4e6f10", "l6-0123456789ab"):
        (tmp_path / "stores/hidden/stores" / f"hidden-all-minilm-l6-v2-{name}").mkdir(parents=True)
    (tmp_path / "stores/pq/stores/hidden-all-minilm-l6-v2-l6-pq64-0123456789ab").mkdir(parents=True)
    for arm, ending in {
        "regress-l4": "l4-ef70fa4e6f10",
        "regress-l6": "v2-l6-0123456789ab",
        "small": "pq64-0123456789ab",
    }.items():
        assert parts[f"train-student/{arm}-seed0"].values["store"].find().name.endswith(ending)


def test_what_says_how_a_machine_works_is_for_stores_made_from_a_store_too(read):
    hidden = {"command": "encode-hidden", "corpus": ["a.txt"], "layer": 4, "teacher": "bundled"}
    changes = {"encode-lsp.device": "cpu", "encode-lsp.workers": 2, "encode-lsp.max_tokens": 9_000}
    study = read({"study.stores": {"hidden": hidden, "lsp": {"command": "encode-lsp", "hidden": "hidden"}}} | changes)
    assert study.stores["lsp"].settings == {"k": (64,), "device": "cpu", "workers": 2}


def test_a_model_without_a_head_for_words_is_not_scored_on_them(read, tmp_path):
    (tmp_path / "blimp").mkdir()
    for name, architecture in {"words": "BertForMaskedLM", "none": "BertModel"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    models = [str(tmp_path / name) for name in ("words", "none")] + ["somebody/else"]
    planned = plan(read({"study.models": models, "evaluate-blimp": {}}), tmp_path / "made", tmp_path)
    scored = [part.name for part in planned.parts if part.verb == "evaluate-blimp" and not part.needs]
    assert scored == ["evaluate-blimp/words", "evaluate-blimp/else"]
    assert planned.left_out == ["none is not scored on BLiMP: by its config.json it does not predict words."]


def test_the_diagnostic_of_layers_waits_for_a_store_of_each_seed_that_there_is(read, tmp_path):
    """Its directory is that of the store, where the dictionary of the seed is."""
    (tmp_path / "wsd").mkdir()
    senses = {"teacher": "bundled", "corpus": ["a.txt"]}
    study = read({"study.stores": {"lsp": {"seed": "each"}}, "choose-layer": senses})
    parts = {part.name: part for part in plan(study, tmp_path, tmp_path).parts}
    assert parts["choose-layer"].needs == ("encode-lsp/lsp-seed1",)
    assert parts["choose-layer"].values["output"] == tmp_path / "stores/lsp-seed1"


def test_an_empty_k_or_teacher_is_one_that_is_not_given(read):
    study = read({"study.stores.lsp": {"command": "encode-lsp", "teacher": None, "k": None, "corpus": ["bundled"]}})
    assert study.arms["mlsm"].k == 3072


def test_frozen_measures_come_with_the_student_and_all_else_at_the_end(read, tmp_path):
    changes = {"frozen": {}, "finetune": {"tasks": ["cola"]}, "study.tuned": ["mlsm"], "study.models": ["bundled"]}
    study = read(changes)
    names = [part.name for part in plan(study, tmp_path, tmp_path).parts]
    assert names == [
        "encode-lsp/lsp", "train-student/mlsm-seed1", "frozen/mlsm-seed1", "train-student/mlm-seed1",
        "frozen/mlm-seed1", "frozen/bundled", "train-student/mlsm-seed0", "frozen/mlsm-seed0",
        "train-student/mlm-seed2", "frozen/mlm-seed2", "finetune/mlsm-seed0", "finetune/mlsm-seed1", "finetune/bundled",
    ]  # fmt: skip
    without = plan(study, tmp_path, None)
    assert not any(part.name.startswith("frozen/") for part in without.parts)
    assert any("frozen measures are not run" in sentence for sentence in without.left_out)


def test_what_is_left_empty_is_left_out(read):
    changes = dict.fromkeys(("study.secondary", "study.curves", "study.models"), [])
    assert read(changes).models == () and read(changes).secondary == ()


def test_the_corpus_may_be_named_by_an_environment_variable(read, monkeypatch):
    monkeypatch.setenv("MLSM_TEST_TEXT", "/somewhere")
    assert read().stores["lsp"].settings["corpus"] == ("/somewhere/a.txt",)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"study": None}, "no section `study`"),
        ({"study.title": None}, "study has no title"),
        ({"study.hypothesis": 1}, "study has no hypothesis"),
        ({"encode-logit": {}}, "has no encode-logit"),
        ({"study.primary": ["mlsm", "mml"]}, "mml of a comparison is not an arm"),
        ({"study.secondary": [["mlm", "mlsm"]]}, "the hypothesis mlm and mlsm is given twice"),
        ({"study.curves": ["kd"]}, "kd of `curves` is not an arm"),
        ({"study.learned-by": "kd"}, "only tasks in which the arm `learned-by`"),
        ({"study.learned-by": ["mlm"]}, "the arm `learned-by` is above"),
        ({"study.learned-by": "mlm"}, "have `checkpoints: \\[0, ...\\]`; found .mlm"),
        ({"study.primary": ["mlsm"]}, r"must name two arms, \[better, than\]"),
        ({"study.arms.mlm.seeds": [7]}, "no seed in common"),
        ({"study.arms.mlm.store": "ids"}, "store ids is not among lsp"),
        ({"study.arms.mlm.seed": 3}, "the study itself sets seed"),
        ({"train-student.run-dir": "here"}, "the study itself sets run-dir"),
        ({"train-student.lr": None}, "train-student lacks lr"),
        ({"train-student.lr": -1}, "--lr must be a positive number"),
        ({"train-student.learning-rate": 1}, "train-student has no setting learning-rate"),
        ({"study.stores.lsp.command": "finetune"}, "store lsp: finetune does not make stores"),
        ({"study.stores.small": {"command": "derive-shards", "top-n": 8}}, "`store` is only for derive-shards"),
        ({"study.stores.lsp.dictionary": "other"}, "needs other, which is not a store"),
        ({"study.stores.lsp.dictionary": "lsp"}, "store lsp is made from itself: lsp from lsp"),
        ({"study.stores.few": {"command": "derive-shards", "store": "few"}}, "store few is made from itself"),
        (
            {"study.stores.few": {"command": "encode-logits", "dictionary": "lsp"}},
            "`dictionary` is only for encode-lsp",
        ),
        (
            {"encode-lsp.k": [32, 64], "study.stores.few": {"command": "derive-shards", "store": "lsp"}},
            "lsp has several",
        ),
        ({"study.stores.lsp.k": [32, 64], "study.stores.all": {"dictionary": "lsp", "k": [32, 64]}}, "all has several"),
        ({"study": []}, "expected a mapping of settings"),
        ({"study.seeds": 3}, r"seeds must be different whole numbers of at least 0, such as \[0, 1, 2\], found 3"),
        ({"study.seeds": [0, 0]}, "seeds must be different"),
        ({"study.arms.mlm.seeds": [True]}, "arm mlm: seeds must be different"),
        ({"study.arms.mlm.seeds": None, "study.arms.mlm": {"store": "lsp", "seeds": None}}, "arm mlm: seeds must be"),
        ({"study.seeds": [[0], [1]]}, "seeds must be different"),
        ({"study.stores.lsp.command": ["encode-lsp"]}, r"store lsp: \['encode-lsp'\] does not make stores"),
        ({"study.stores.more": {"hidden": ["lsp"]}}, r"store more needs \['lsp'\], which is not a store"),
        ({"study.arms.mlm": {"store": "lsp", 5: 5}}, "train-student has no setting 5"),
        ({"study.primary": "mlsm"}, "a comparison must name two arms"),
        ({"study.primary": ["mlsm", "mlsm"]}, "must name two different arms"),
        ({"study.secondary": ["mlsm", "mlm"]}, "a comparison must name two arms"),
        ({"study.models": "bundled"}, r"models must be a list, found 'bundled'. Write \[bundled\]"),
        ({"study.curves": "mlm"}, "curves must be a list"),
        ({"study.stores": ["lsp"]}, "stores must be a mapping of names"),
        ({"study.arms": ["mlm"]}, "arms must be a mapping of names"),
        ({"study.arms.mlm": "lsp"}, "mlm must be a mapping of settings"),
        ({"study.arms.a/b": {"store": "lsp"}}, "'a/b' is not a valid name"),
        ({"study.stores.": {"command": "encode-lsp"}}, "'' is not a valid name"),
        ({"study.arms.mlm.encoder": ["a/b", "c"]}, "cannot be the name of an arm"),
        ({"study.arms.softmax-mlsm": {"store": "lsp"}}, "the names of probes begin with softmax- and logits-. Rename"),
        (
            {
                "study.arms.mtl": {"store": "lsp", "objective": "mtl", "kappa": [2]},
                "study.arms.mtl-kappa2": {"store": "lsp"},
            },
            "two arms are called mtl-kappa2",
        ),
        ({"study.arms.kd": {"store": "lsp", "objective": "kd"}}, "kd learns from a store of encode-logits, but lsp is"),
        ({"finetune": {"split": "test"}}, "the study itself sets split"),
        ({"train-probe": {"seed": 1, "max-steps": 4, "batch-windows": 8}}, "the study itself sets seed"),
        ({"train-probe": {"max-steps": 4}}, "train-probe lacks batch_windows. A study must set"),
        ({"compare": {"diagnostic": "result.json"}}, "the study itself sets diagnostic"),
        ({"compare": {"published": True}}, "compare has no setting published"),
        ({"frozen": {"frozen": True}}, "the study itself sets frozen"),
        ({"frozen": {"epochs": 2}}, "--frozen trains no encoder. Omit --epochs"),
        ({"study.tuned": ["kd"]}, "kd of `tuned` is not an arm"),
        (
            {"study.stores.lsp.seed": "each", "study.stores.n8": {"store": "lsp", "command": "derive-shards"}},
            "only arms can use",
        ),
        ({"study.stores.ids": {"command": "encode-ids", "seed": "each"}}, "`seed: each` is only for encode-lsp"),
        ({"study.stores.more": {"hidden": "lsp"}}, "`hidden` must name a store of encode-hidden"),
        ({"study.stores.more": {"hidden": "more"}}, "`hidden` must name a store of encode-hidden"),
        (
            {
                "study.stores.hidden": {"command": "encode-hidden", "layer": [4, 6]},
                "study.stores.more": {"hidden": "hidden"},
            },
            "hidden has several layers",
        ),
        ({"study.composite": {"measures": ["cola/f1"]}}, "no frozen measure is called 'cola/f1'"),
        ({"study.composite": {"measure": []}}, "study composite has no measure"),
        ({"study.composite": COMPOSITE | {"margin": 0}}, "margin must be a number of points above 0"),
        ({"study.composite": COMPOSITE | {"part": "dev"}}, "part must be `test` or `tuning`, found 'dev'"),
        ({"study.composite": COMPOSITE}, "add a section `frozen`"),
        ({"study.explored": [["mlsm", "mlm"]]}, "`explored` compares arms on the composite: add a section `composite`"),
        (
            {"study.explored": [["mlsm", "kd"]], "study.composite": COMPOSITE, "frozen": {}},
            "kd of a comparison is not an arm",
        ),
        ({"study.composite": COMPOSITE, "frozen": {"tasks": ["wsd"]}}, "stsb/cosine of the composite is not among"),
        ({"study.composite": COMPOSITE, "frozen": {}}, "teacher bundled is not one of the study's models"),
        (
            {"study.composite": COMPOSITE, "frozen": {}, "study.models": ["bundled"]},
            "the composite's lower anchor must be an arm of `curves`",
        ),
    ],
)
def test_what_does_not_belong_together_is_an_error_of_one_line(read, changes, said):
    with pytest.raises(ValueError, match=said) as error:
        read(changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "recipe",
    [
        "study-demo",
        "study-layers",
        "study-k",
        "study-cpu",
        "paper-objectives",
        "paper-layers",
        "paper-k",
        "paper-kappa",
    ],
)
def test_the_recipes_that_come_with_the_package_are_studies(recipe, tmp_path):
    study = read_study(recipe)
    assert study.seeds
    parts = plan(study, tmp_path, None).parts
    assert {part.verb for part in parts} >= {"encode-lsp", "train-student", "finetune"}


def test_the_pilot_gives_both_arms_of_the_question_equally_many_trials_of_layers_and_rates(tmp_path):
    study = read_study("study-2-pilot")
    trials = Counter(arm.split("-")[0] for arm in study.arms if re.match("(mlsm|regress)-l[46]-", arm))
    assert trials["mlsm"] == trials["regress"] == 8
    assert study.composite.part == "tuning"
    assert not set(study.seeds) & set(range(100))  # those of the study
