import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

import student.objectives
from student.config import StudentConfig
from student.encoders.build import named_size
from student.objectives import OBJECTIVES, OWN_SETTINGS
from student.resolve import without_rivals


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_steps": 0},
        {"batch_windows": 0},
        {"micro_batch": -1},
        {"lr": 0.0},
        {"lr": float("inf")},
        {"mask_rate": 0.0},
        {"mask_rate": 1.0},
        {"mask_rate_end": 1.0},
        {"warmup": 1.0},
        {"dropout": 1.0},
        {"seed": -1},
        {"checkpoints": (-0.1,)},
        {"checkpoints": (1.5,)},
        {"objective": "nsp"},
        {"mask_unit": "line"},
        {"corruption": "noise"},
        {"dtype": "float16"},
        {"grad_clip": 0.0},
        {"weight_decay": -0.1},
        {"save_every": -1},
    ],
)
def test_contradictions_are_refused_in_one_line(wrong):
    flag = f"--{next(iter(wrong)).replace('_', '-')} "
    with pytest.raises(ValueError, match=f"^{flag}") as caught:
        StudentConfig(**wrong)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_weight_of_words_is_refused_where_it_would_do_nothing(name, needed_by):
    given = {"objective": name, "kappa": 0.5} | needed_by(name)
    if OBJECTIVES[name].kappa is not None:
        assert StudentConfig(**given).word_weight == 0.5
        assert without_rivals({"objective": name, "kappa": 0.5}, {}) == {"objective": name, "kappa": 0.5}
        return
    with pytest.raises(ValueError, match=rf"^--kappa 0.5 is only for .* \(mtl, regress\), found {name}. Omit it."):
        StudentConfig(**given)
    assert "kappa" not in without_rivals({"objective": "mtl", "kappa": 0.5}, {"objective": name})


def test_named_sizes():
    assert named_size("bert-12x768") == (12, 768)
    assert named_size("bert-2x32") == (2, 32)
    assert named_size("modernbert-2x128") == (2, 128)
    assert named_size("bert-mini") == (4, 256)
    assert named_size("microsoft/deberta-base") is None
    for wrong in ("bert-0x128", "bert-2x200"):
        with pytest.raises(ValueError, match=wrong):
            named_size(wrong)


def test_the_last_step_is_always_kept():
    config = StudentConfig(max_steps=1000, checkpoints=(0.1, 0.25))
    assert config.checkpoint_steps(1000) == [100, 250, 1000]


def test_the_untrained_student_is_kept_only_where_its_share_is_zero():
    assert StudentConfig(checkpoints=(0, 0.001, 1)).checkpoint_steps(100) == [0, 1, 100]
    assert StudentConfig(checkpoints=(0.001, 1)).checkpoint_steps(100) == [1, 100]
    with pytest.raises(ValueError, match="--checkpoints must be shares of the steps from 0 to 1, found"):
        StudentConfig(checkpoints=(-0.1,))


def test_identity_leaves_out_what_may_change_on_resume():
    identity = StudentConfig(micro_batch=8, device="cpu", run_dir="x").identity()
    assert identity == StudentConfig().identity()
    assert identity != StudentConfig(seed=7).identity()


def test_settings_import_nothing_heavy():
    code = "import sys, student.config; print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_flags_choices_are_the_objectives_there_are():
    (objective,) = (field for field in fields(StudentConfig) if field.name == "objective")
    assert get_args(objective.type) == tuple(objective.metadata["choices"]) == tuple(OBJECTIVES)


def test_every_file_of_an_objective_is_in_the_list():
    files = {path.stem for path in Path(student.objectives.__file__).parent.glob("*.py")}
    shared = {
        "__init__",
        "base",
        "losses",
        "position_marginals",
        "several_stores",
        "sparse_rows",
        "token_tables",
        "vectors",
    }
    assert files - shared == {name.replace("-", "_") for name in OBJECTIVES}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_facts_of_an_objective_are_what_its_class_does(name, store_for):
    facts, store = OBJECTIVES[name], store_for(name)
    plain = facts(store)
    assert type(plain).__name__ == facts.cls and plain.name == name and plain.kinds == facts.kinds
    own_rows = facts(store, untied=True)
    others = {"supersense": 45, "regress": 12, "recon": 12}.get(name, 0)
    assert plain.outputs == store.k * facts.lsps + store.vocab_size * facts.vocabulary + others
    assert plain.tied == facts.vocabulary and not own_rows.tied
    assert (plain.lsp_columns is not None) == facts.lsps
    assert (plain.token_columns is not None) == facts.words
    for setting in OWN_SETTINGS:
        if setting in facts.settings:
            assert getattr(plain, setting) == getattr(StudentConfig, setting)
        else:
            with pytest.raises(TypeError, match=f"objective {name} has no setting {setting}"):
                facts(store, **{setting: getattr(StudentConfig, setting)})
    if facts.several_stores:
        assert plain.lsp_columns == slice(0, plain.outputs)
    assert len(facts(store, kappa=0.5).term_weights) == 1 + (facts.kappa is not None)
