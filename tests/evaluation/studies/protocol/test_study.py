"""A study at toy size: its parts are commands, each finds finished work, and killing it changes no record."""

import csv
import inspect
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from preloaded import ROOT, Preloaded, run_command
from tiny_records import a_record
from tiny_store import log_of

from mlsm.cli.settings import parse
from mlsm.commands import load
from mlsm.commands.study import exit_code as code_of_study
from mlsm.commands.study import show as summary
from mlsm.common.errors import EXIT_QUARANTINE, StudyError
from mlsm.common.progress import silent
from mlsm.evaluation import records
from mlsm.evaluation.studies.flops.stores import store_flops
from mlsm.evaluation.studies.protocol.config import StudyConfig
from mlsm.evaluation.studies.protocol.costs import is_finished
from mlsm.evaluation.studies.protocol.description import SETTINGS, read_study
from mlsm.evaluation.studies.protocol.facts import facts_of
from mlsm.evaluation.studies.protocol.parts import FUNCTIONS, Made, Part, plan
from mlsm.evaluation.studies.protocol.printing import command_line
from mlsm.evaluation.studies.protocol.students import write_students
from mlsm.evaluation.studies.protocol.study import _refuse_other_records, study
from pipeline.commands import encode_lsp
from shards.reader import Store
from student.config import StudentConfig

PLACE_AND_TIME = ("path", "file", "wall", "cost", "env")  # of a record


@pytest.fixture(scope="module", autouse=True)
def no_data():
    """Without evaluation data, wherever the suite runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLSM_DATA", raising=False)
        yield


@pytest.fixture
def without_figures(monkeypatch):
    """Those of the paper, which every end of a study draws anew, are the matter of other tests, and take time."""
    monkeypatch.setattr("mlsm.evaluation.comparison.compare.draw_paper_figures", lambda *_: [])


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, english_text, teacher_directory):
    """A recipe of two arms with two seeds, one task on miniature data."""
    path = tmp_path_factory.mktemp("recipe") / "toy.yaml"
    described = {
        "study": {
            "title": "A toy",
            "question": "Does it run?",
            "primary": ["mlsm", "mlm"],
            "seeds": [0, 1],
            "curves": ["mlsm", "mlm"],
            "models": [str(teacher_directory)],
            "stores": {
                "lsp": {"command": "encode-lsp"},
                "fewer": {"command": "derive-shards", "store": "lsp", "top-n": 2},
            },
            "arms": {
                "mlsm": {"store": "lsp"},
                "mlm": {"store": "lsp", "objective": "mlm"},
                "few": {"store": "fewer", "seeds": [0]},
            },
            "secondary": [["few", "mlm"]],
        },
        "encode-lsp": {
            "teacher": str(teacher_directory), "corpus": [str(english_text)], "layer": 2, "k": 40, "lam": 0.1,
            "max-length": 32, "max-tokens": 20_000, "unit-tokens": 8_000, "dictionary-tokens": 2_000, "device": "cpu",
        },
        "train-student": {
            "encoder": "bert-2x32", "dropout": 0.1, "max-steps": 6, "batch-windows": 8, "micro-batch": 8, "lr": 1e-3,
            "save-every": 2, "checkpoints": [0.5, 1.0], "device": "cpu",
        },
        "train-probe": {"max-steps": 4, "batch-windows": 8, "micro-batch": 8, "device": "cpu"},
        "finetune": {"tasks": ["mrpc"], "seeds": 1, "epochs": 1, "device": "cpu"},
        "evaluate-blimp": {"per-paradigm": 1, "device": "cpu"},
    }  # fmt: skip
    path.write_text(yaml.safe_dump(described, sort_keys=False))
    return str(path)


@pytest.fixture(scope="module")
def finished(recipe, tmp_path_factory):
    """The settings and the result of the study, unbroken."""
    settings = StudyConfig(recipe=recipe, output=tmp_path_factory.mktemp("study"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mlsm.evaluation.comparison.compare.draw_paper_figures", lambda *_: [])  # as `without_figures`
        return settings, study(settings)


def figures(directory):
    """The records of a study without what depends on place and time, by file."""
    found = {}
    for path in sorted(Path(directory).glob("smoke/evaluations/*/*/*.json")):
        (record,) = records.read([path])
        kept = {name: value for name, value in record.items() if name not in PLACE_AND_TIME}
        found["/".join(path.parts[-3:])] = json.dumps(kept, sort_keys=True, default=str)
    return found


def test_the_table_of_parts_is_that_of_the_commands():
    assert FUNCTIONS.keys() == SETTINGS.keys()
    for verb, settings_class in SETTINGS.items():
        command = load(verb)
        assert command.settings is settings_class
        ours = f"from {FUNCTIONS[verb].__module__} import {FUNCTIONS[verb].__name__}"
        assert ours in inspect.getsource(command.run)


def test_what_is_printed_are_the_commands_that_are_run(recipe, tmp_path):
    """Read again by the command line, every printed command has the settings of its part."""
    for data in (None, tmp_path):
        for folder in ("blimp/data", "wsd"):
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for part in plan(read_study(recipe), tmp_path / "made", data).parts:
            words = shlex.split(command_line(part))
            assert words[0] == "mlsm" and words[1] == part.verb
            found = parse(load(part.verb), words[2:]).settings
            known = {k: str(v.pattern) if isinstance(v, Made) else v for k, v in part.values.items()}
            wanted = SETTINGS[part.verb](**known)
            assert {name: getattr(found, name) for name in known} == {name: getattr(wanted, name) for name in known}
            if part.verb == "train-student":
                assert found.identity() == wanted.identity()


def test_a_printed_command_without_material_is_not_the_demonstration(tmp_path):
    part = Part("encode-lsp/lsp", "encode-lsp", {"layer": (4,), "k": (64,), "output": tmp_path}, ())
    found = parse(load("encode-lsp"), shlex.split(command_line(part))[2:]).settings
    assert found == SETTINGS["encode-lsp"](**part.values)


def test_the_first_conclusion_comes_before_the_rest(recipe, tmp_path):
    planned = plan(read_study(recipe), tmp_path, None)
    names = [part.name for part in planned.parts]
    assert names[: planned.first] == [
        "encode-lsp/lsp",
        "train-student/mlsm-seed0", "finetune/mlsm-seed0", "train-student/mlm-seed0", "finetune/mlm-seed0",
        "train-student/mlsm-seed1", "finetune/mlsm-seed1", "train-student/mlm-seed1", "finetune/mlm-seed1",
    ]  # fmt: skip
    assert "derive-shards/fewer" in names[planned.first :] and len(set(names)) == len(names)
    done = set()
    for part in planned.parts:
        assert done.issuperset(part.needs)
        done.add(part.name)


@pytest.mark.usefixtures("without_figures")
def test_a_study_that_goes_on_does_not_measure_again(recipe, tmp_path, monkeypatch):
    settings = StudyConfig(recipe=recipe, output=tmp_path, only=("encode-lsp/lsp", "train-student/mlm-seed0"))
    first = {cost["part"]: cost["seconds"] for cost in study(settings)["parts"]}
    (settings.directory / "students" / "mlm-seed0" / "result.json").unlink()  # as if it had been interrupted

    def measured_again(*_):
        raise AssertionError("measured again")

    monkeypatch.setattr("mlsm.evaluation.studies.protocol.costs._measure", measured_again)
    again = {cost["part"]: cost["seconds"] for cost in study(settings)["parts"]}
    assert again == {"encode-lsp/lsp": 0.0, "train-student/mlm-seed0": first["train-student/mlm-seed0"]}
    assert first["train-student/mlm-seed0"] > 0
    (settings.directory / "students" / "mlm-seed0" / "result.json").unlink()
    preview = study(StudyConfig(**vars(settings) | {"dry_run": True}))["parts"]
    assert {cost["part"]: cost["seconds"] for cost in preview} == again


@pytest.mark.usefixtures("without_figures")
def test_records_alone_carry_a_study_on(finished, recipe, tmp_path):
    """On another machine: what is scored is not made again, and what is not scored is made with all that it needs."""
    settings, whole = finished
    for name in ("smoke/evaluations", "cells"):
        shutil.copytree(settings.directory / name, tmp_path / name)
    moved = replace(settings, output=tmp_path)
    before = figures(moved.directory)
    again = study(moved)
    assert before == figures(moved.directory) == figures(settings.directory)
    assert not list(moved.directory.glob("students/*")) and not list(moved.directory.glob("stores/*"))
    states = {part["part"]: (part["state"], part["commit"]) for part in whole["parts"]}
    assert {part["part"]: (part["state"], part["commit"]) for part in again["parts"]} == states
    assert again["comparison"]["conclusion"] == whole["comparison"]["conclusion"]
    for name, value, said in (
        ("warmup", 0.25, r"warmup \S+, and the recipe says 0.25"),
        ("mask-weights", "frequency", "mask-weights None, and the recipe says frequency"),
        ("mask-rate-end", 0.05, "mask-rate-end None, and the recipe says 0.05"),
    ):
        changed = yaml.safe_load(Path(recipe).read_text())
        changed["train-student"][name] = value
        (tmp_path / "changed.yaml").write_text(yaml.safe_dump(changed, sort_keys=False))
        with pytest.raises(StudyError, match=f"records of a student with {said}"):
            study(replace(moved, recipe=str(tmp_path / "changed.yaml")))

    (gone,) = moved.directory.glob("smoke/evaluations/mlm-seed1-step-00000003-*/finetune/mrpc-seed0.json")
    gone.unlink()
    study(replace(moved, only=("*lsp", "*mlm-seed1")))
    assert [path.name for path in moved.directory.glob("students/*")] == ["mlm-seed1"]
    assert before == figures(moved.directory)


def test_parts_of_one_name_are_refused(recipe, tmp_path):
    described = read_study(recipe)
    for models in (("here/bert", "there/bert"), ("elsewhere/mlm-seed0",)):
        with pytest.raises(StudyError, match="two parts of the study are called finetune/"):
            plan(described._replace(models=models), tmp_path, None)


@pytest.mark.parametrize("model", ["bundled", "google-bert/bert-base-cased", "some where/tiny model/"])
def test_records_of_models_beside_are_found(model, recipe, tmp_path):
    name = {"bundled": "bundled_teacher"}.get(model, model)
    name = "tiny model" if "tiny" in model else name
    parts = plan(read_study(recipe)._replace(models=(model,)), tmp_path, None).parts
    (part,) = (part for part in parts if part.values.get("models") == (model,))
    assert not is_finished(part, parts)
    record = {"model": name, "weights": "0123456789", "suite": "finetune", "task": "mrpc", "seed": 0}
    file = records.path_of(tmp_path / "smoke", record)
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    assert is_finished(part, parts)


def test_a_run_keeps_its_last_checkpoint_though_no_share_says_so(recipe, tmp_path):
    described = read_study(recipe)
    arm = described.arms["mlm"]
    shares = arm._replace(settings=arm.settings | {"checkpoints": (0.5,)})
    parts = plan(described._replace(arms=described.arms | {"mlm": shares}), tmp_path, None).parts
    (part,) = (part for part in parts if part.name == "finetune/mlm-seed0")
    for step, is_whole in ((3, False), (6, True)):
        record = {"model": f"mlm-seed0-step-{step:08}", "weights": "0123456789", "suite": "finetune"}
        file = records.path_of(tmp_path / "smoke", record | {"task": "mrpc", "seed": 0})
        file.parent.mkdir(parents=True)
        file.write_text("{}")
        assert is_finished(part, parts) == is_whole


def test_make_runs_the_study_and_ends_with_its_report(recipe, tmp_path):
    """Also where the directory's name has what the shell and make read as their own."""
    place = tmp_path / "it's a $(study) #1"
    settings = StudyConfig(recipe=recipe, output=place, only=("encode-lsp/lsp", "*mlm-seed0"), print_commands="make")
    ((command, lines),) = study(settings).items()
    assert command == "commands"
    asked = ["study", "--recipe", recipe, "--output", str(place), "--only", "encode-lsp/lsp", "*mlm-seed0"]
    printed = run_command([*asked, "--print-commands", "make"]).stdout
    assert printed.count("\n") == lines.count("\n") + 1 and "\n\t@mkdir" in printed  # as lines, with their tabs
    (tmp_path / "study.mk").write_text(lines)
    (tmp_path / "mlsm").write_text(
        f"#!/bin/sh\nfor word; do printf '%s|' \"$word\"; done >> {tmp_path}/said\necho >> {tmp_path}/said\n"
    )
    (tmp_path / "mlsm").chmod(0o755)
    run = ["make", "-f", str(tmp_path / "study.mk")]
    for _ in range(2):  # the second time, the parts have their stamps, and the report is written again
        made = subprocess.run(
            run, env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}, capture_output=True, text=True
        )
        assert made.returncode == 0, made.stderr
    said = [line.split("|")[:-1] for line in (tmp_path / "said").read_text().splitlines()]
    assert [words[0] for words in said] == ["encode-lsp", "train-student", "finetune", "study", "study"]
    assert said[-1] == ["study", "--recipe", recipe, "--output", str(place), "--only", "encode-lsp/lsp", "*mlm-seed0"]
    assert str(place / "students" / "mlm-seed0") in said[1]


def test_slurm_writes_the_report_when_all_have_ended_well(recipe, tmp_path):
    settings = StudyConfig(
        recipe=recipe, output=tmp_path, only=("encode-lsp/lsp", "*mlm-seed0"), print_commands="slurm"
    )
    *_, encode, train, _, last = study(settings)["commands"].splitlines()
    assert "--dependency=afterok:$job1:$job2:$job3 --wrap='mlsm study --recipe" in last
    assert encode.endswith("|| test $? -eq 5')"), "a store without some documents is one to train on"
    assert "--dependency=afterok:$job1" in train and "|| test" not in train


@pytest.mark.parametrize(("ended", "made"), [(0, True), (5, True), (2, False)])
def test_make_goes_on_with_a_store_that_lacks_some_documents(ended, made, recipe, tmp_path):
    settings = StudyConfig(recipe=recipe, output=tmp_path / "made", only=("encode-lsp/lsp",), print_commands="make")
    (tmp_path / "study.mk").write_text(study(settings)["commands"])
    (tmp_path / "mlsm").write_text(f'#!/bin/sh\ntest "$1" = study || exit {ended}\n')
    (tmp_path / "mlsm").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    run = subprocess.run(["make", "-f", str(tmp_path / "study.mk")], env=environment, capture_output=True, text=True)
    assert (run.returncode == 0) == made == (tmp_path / "made/done/encode-lsp/lsp").is_file(), run.stderr


def test_stores_are_compared_with_that_of_the_first_student_also_when_done_alone(finished, recipe, tmp_path):
    described = yaml.safe_load(Path(recipe).read_text())
    described["study"]["stores"]["short"] = {"command": "encode-lsp", "max-tokens": 10_000}
    described["study"]["arms"]["other"] = {"store": "short", "seeds": [0]}
    path = tmp_path / "toy.yaml"
    path.write_text(yaml.safe_dump(described, sort_keys=False))
    only = ("encode-lsp/short", "train-student/other-*")
    with pytest.raises(StudyError, match="train-student/other-seed0: the store .* has another plan"):
        study(StudyConfig(recipe=str(path), output=finished[0].directory, only=only))


@pytest.mark.parametrize("folder", ["blimp", "blimp/data"])  # made by prepare-data; a clone of BLiMP's repository
def test_words_are_probed_where_the_student_has_none(recipe, tmp_path, folder):
    (tmp_path / folder).mkdir(parents=True)
    names = {part.name for part in plan(read_study(recipe), tmp_path / "made", tmp_path).parts}
    assert {
        "evaluate-blimp/mlm-seed0",
        "evaluate-blimp/softmax-mlsm-seed0",
        "evaluate-blimp/logits-mlsm-seed0",
    } <= names
    assert "evaluate-blimp/mlsm-seed0" not in names and "train-probe/softmax-mlm-seed0" not in names


def test_students_are_pairs(finished):
    settings, _ = finished
    starts = {}
    for run in (settings.directory / "students").glob("*-seed*"):
        starts[run.name] = json.loads((run / "log.jsonl").read_text().splitlines()[0])["initial_encoder"]
    assert starts["mlsm-seed0"] == starts["mlm-seed0"] == starts["few-seed0"] != starts["mlm-seed1"]
    assert starts["mlsm-seed1"] == starts["mlm-seed1"]
    one, other, unlike = (
        log_of(settings.directory / "students" / name) for name in ("mlsm-seed0", "few-seed0", "mlsm-seed1")
    )
    assert list(one) == list(range(1, 7))
    for name in ("batch", "tokens", "lr"):
        assert [row[name] for row in one.values()] == [row[name] for row in other.values()]
    assert [row["batch"] for row in one.values()] != [row["batch"] for row in unlike.values()]
    assert all(one[step]["loss"] != other[step]["loss"] for step in one)


def test_what_students_learned_of_their_targets_is_that_of_their_runs(finished):
    settings, result = finished
    rows = {f"{row['arm']}-seed{row['seed']}": row for row in result["students"]}
    assert rows.keys() == {"mlsm-seed0", "mlsm-seed1", "mlm-seed0", "mlm-seed1", "few-seed0"}
    for name, row in rows.items():
        kept = json.loads((settings.directory / "students" / name / "result.json").read_text())
        for figure in ("held_out_loss", "baseline_loss", "improvement", "tokens_per_second", "flops"):
            assert row[figure] == kept[figure] is not None
        assert row["improvement"] == pytest.approx(1 - row["held_out_loss"] / row["baseline_loss"])
    whole, cut = (
        Store.open(*(settings.directory / "stores" / name / "stores").glob("*-*")) for name in ("lsp", "fewer")
    )
    assert rows["mlsm-seed0"]["mass_kept"] == whole.report()["mass_kept"]
    assert rows["few-seed0"]["mass_kept"] == cut.report()["mass_kept"] < whole.report()["mass_kept"]
    assert rows["mlsm-seed0"]["encoding_flops"] == store_flops(whole)
    assert (rows["mlsm-seed0"]["layer"], rows["mlsm-seed0"]["k"]) == (2, 40)
    of_words = rows["mlm-seed0"]
    assert all(of_words[name] is None for name in ("layer", "k", "mass_kept", "encoding_flops"))
    file = settings.directory / "students.csv"
    with file.open() as stream:
        assert [row["held_out_loss"] for row in csv.DictReader(stream)] == [
            str(row["held_out_loss"]) for row in rows.values()
        ]
    described = read_study(settings.recipe)
    gone, before = plan(described, settings.directory / "deleted", None).parts, file.read_bytes()
    assert write_students(described, gone, file) == list(rows.values()) and file.read_bytes() == before
    text = summary(result, settings)
    assert (
        f"{rows['few-seed0']['improvement']:.1%}" in text
        and "cannot be compared across objectives, layers or k" in text
    )


@pytest.mark.usefixtures("without_figures")
def test_nothing_is_said_of_students_that_are_withheld(finished, recipe, tmp_path):
    """Of the primary arms, until the composite of all their seeds is there."""
    described = yaml.safe_load(Path(recipe).read_text())
    described["study"]["arms"]["mlm"]["checkpoints"] = [0, 1.0]
    described["study"]["composite"] = {
        "measures": ["conll2003/pos"], "part": "test", "untrained": "mlm", "teacher": described["study"]["models"][0],
        "margin": 4,
    }  # fmt: skip
    described["frozen"] = {"tasks": ["conll2003"]}
    path = tmp_path / "toy.yaml"
    path.write_text(yaml.safe_dump(described, sort_keys=False))
    for name in ("stores", "students"):
        shutil.copytree(finished[0].directory / name, tmp_path / "made" / name)
    result = study(StudyConfig(recipe=str(path), output=tmp_path / "made", only=("encode-lsp/lsp",)))
    assert [row["arm"] for row in result["students"]] == ["few"]
    assert "mlsm," not in (tmp_path / "made" / "students.csv").read_text()


@pytest.mark.usefixtures("without_figures")
def test_documents_that_could_not_be_coded_are_told(finished, monkeypatch, capsys):
    settings, result = finished
    assert result["quarantined"] == [] and code_of_study(result) == 0

    def lack(*given):
        return [report | {"quarantined": 2} for report in encode_lsp(*given)]

    monkeypatch.setitem(FUNCTIONS, "encode-lsp", lack)
    damaged = study(replace(settings, only=("encode-lsp/lsp",)))
    assert code_of_study(damaged) == EXIT_QUARANTINE
    (place,) = (settings.directory / "stores/lsp/stores").glob("lsp-*")
    assert (
        f"2 documents could not be coded and have no targets; the records in {place}/units" in capsys.readouterr().err
    )
    assert code_of_study(study(replace(settings, dry_run=True))) == 0


def test_all_models_are_compared_and_the_data_are_said_to_mean_nothing(finished):
    settings, result = finished
    labels = {model["model"] for model in result["comparison"]["models"]}
    assert len(labels) == 2 * 4 + 1 + 1  # two checkpoints of four students, another student, and the teacher
    text = summary(result, settings)
    assert "scores mean nothing" in text and "A toy" in text
    page = Path(result["comparison"]["report"]).read_text()
    assert page.index("scores mean nothing") < page.index('class="sentence"')  # above the conclusion
    assert "Not run yet" not in page
    assert result["comparison"]["conclusion"][0] in text and "whether mlsm is better than mlm" in text
    (few,) = (
        row
        for row in csv.DictReader((settings.directory / "comparison/report-hypotheses.csv").open())
        if row["better"] == "few"
    )
    assert few["verdict"] == "too few" and "1 of the 2 planned pairs" not in page  # one was planned


@pytest.mark.usefixtures("without_figures")
def test_a_finished_study_is_found(finished, recipe):
    settings, before = finished
    parts = plan(read_study(recipe), settings.directory, None).parts
    assert all(is_finished(part, parts) for part in parts)
    made = [*settings.directory.glob("students/**/*"), *settings.directory.glob("smoke/**/*.json")]
    stamps = {path: path.stat().st_mtime_ns for path in made if path.is_file()}
    again = study(settings)
    assert all(part["finished"] and not part["seconds"] for part in again["parts"])
    assert stamps == {path: path.stat().st_mtime_ns for path in stamps}


def test_killed_at_random_moments_its_records_are_those_of_an_unbroken_one(finished, recipe, tmp_path):
    settings, _ = finished
    dice = random.Random(0)
    command = ["study", "--recipe", recipe, "--output", str(tmp_path)]
    for _ in range(3):
        with Preloaded([ROOT / "cli.py", *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            time.sleep(dice.uniform(0.5, 4))
            process.kill()
    run_command(command, code=0)
    assert figures(tmp_path) == figures(settings.directory) != {}


def test_a_dry_run_says_what_is_left_and_makes_nothing(recipe, tmp_path):
    settings = StudyConfig(recipe=recipe, output=tmp_path / "made", dry_run=True)
    result = study(settings)
    assert not settings.directory.exists()
    by_name = {part["part"]: part for part in result["parts"]}
    assert by_name["train-student/mlm-seed0"]["seconds"] > 0 and by_name["train-student/mlm-seed0"]["bytes"] > 0
    assert by_name["encode-lsp/lsp"]["bytes"] > 20_000 and not by_name["encode-lsp/lsp"]["finished"]
    assert "everything left" in summary(result, settings)


@pytest.mark.parametrize("dry_run", [True, False])
def test_an_encoder_that_is_nowhere_is_refused_before_anything_is_made(dry_run, recipe, tmp_path):
    described = yaml.safe_load(Path(recipe).read_text())
    described["train-student"]["encoder"] = "/nowhere/bert"
    path = tmp_path / "toy.yaml"
    path.write_text(yaml.safe_dump(described, sort_keys=False))
    with pytest.raises(ValueError, match="no configuration found"):
        study(StudyConfig(recipe=str(path), output=tmp_path / "made", dry_run=dry_run))
    assert not (tmp_path / "made").exists()


def test_what_was_not_run_is_what_can_be_run_next(recipe, tmp_path):
    described = read_study(recipe)
    facts = facts_of(described, plan(described, tmp_path, None), {})
    (sentence,) = [text for text in facts.not_run if "Not run yet" in text]
    assert "encode-lsp/lsp" in sentence and "train-student" not in sentence
    assert int(re.search(r"and (\d+) parts that depend", sentence)[1]) >= 8
    assert not facts.tasks  # the miniature tasks are those that there are
    for folder in ("blimp/data", "wsd"):
        (tmp_path / folder).mkdir(parents=True)
    assert facts_of(described, plan(described, tmp_path, tmp_path), {}).tasks == ("mrpc",)


@pytest.mark.usefixtures("without_figures")
def test_one_part_alone(recipe, finished, tmp_path):
    settings, _ = finished
    with pytest.raises(StudyError, match=r"there is no .* yet. Run first:  --only encode-lsp/lsp"):
        study(StudyConfig(recipe=recipe, output=tmp_path, only=("train-student/mlm-*",)))
    result = study(StudyConfig(recipe=recipe, output=settings.directory, only=("train-student/mlm-*",)))
    assert [part["part"] for part in result["parts"]] == ["train-student/mlm-seed0", "train-student/mlm-seed1"]
    with pytest.raises(StudyError, match=r"--only encode/lsp: no part has this name.*are: encode-lsp/lsp, "):
        study(StudyConfig(recipe=recipe, output=tmp_path, only=("encode/lsp",)))


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"lam": 0.2}, "lam 0.1, and the recipe says 0.2"),
        ({"solver": "fista"}, "solver cd, and the recipe says fista"),
        ({"atoms": "sampled"}, "atoms learned, and the recipe says sampled"),
        ({"corpus": ["another.txt"]}, r"corpus \['.*'\], and the recipe says \['another.txt'\]"),
    ],
)
def test_a_store_of_other_settings_stops_the_study_and_changes_nothing(other, told, recipe, finished, tmp_path):
    settings, _ = finished
    changed = yaml.safe_load(Path(recipe).read_text())
    changed["encode-lsp"] |= other
    (tmp_path / "changed.yaml").write_text(yaml.safe_dump(changed))
    before = sorted(settings.directory.glob("stores/*/*/*"))
    with pytest.raises(StudyError, match=rf"made with {told}. Nothing was changed"):
        study(StudyConfig(recipe=str(tmp_path / "changed.yaml"), output=settings.directory))
    assert sorted(settings.directory.glob("stores/*/*/*")) == before


@pytest.mark.usefixtures("without_figures")
def test_stores_of_hidden_states_are_found_again(recipe, tmp_path):
    described = yaml.safe_load(Path(recipe).read_text())
    described["study"]["stores"] = {
        "hidden": {"command": "encode-hidden", "layer": 2},
        "pq": {"command": "encode-hidden", "hidden": "hidden", "quantise": "pq", "bytes": 16},
        "lsp": {"command": "encode-lsp", "hidden": "hidden"},
    }
    described["study"]["arms"] = {"mlsm": {"store": "lsp"}, "mlm": {"store": "pq", "objective": "mlm"}}
    del described["study"]["secondary"]
    encoding = described["encode-lsp"]
    described["encode-lsp"] = {name: encoding.pop(name) for name in ("k", "lam", "dictionary-tokens")} | {
        "device": "cpu"
    }
    described["encode-hidden"] = encoding | {"dictionary-tokens": 2_000}
    (tmp_path / "hidden.yaml").write_text(yaml.safe_dump(described))
    settings = StudyConfig(recipe=str(tmp_path / "hidden.yaml"), output=tmp_path / "made", only=("encode-*",))
    parts = [[part["finished"] for part in study(settings)["parts"]] for _ in range(2)]
    assert parts == [[True] * 3] * 2


@pytest.mark.usefixtures("without_figures")
def test_a_later_store_of_another_plan_is_refused_though_the_first_is_gone(recipe, finished, tmp_path):
    there = finished[0]
    shutil.copytree(there.evaluations, tmp_path / "made" / there.evaluations.relative_to(there.directory))
    described = yaml.safe_load(Path(recipe).read_text())
    described["study"]["stores"]["later"] = {"command": "encode-lsp", "max-tokens": 8_000}
    described["study"]["arms"]["later"] = {"store": "later", "seeds": [0]}
    (tmp_path / "more.yaml").write_text(yaml.safe_dump(described))
    settings = StudyConfig(recipe=str(tmp_path / "more.yaml"), output=tmp_path / "made", only=("*/later*",))
    with pytest.raises(StudyError, match="has another plan than those of the study's other students"):
        study(settings)


def test_stores_of_controls_are_found_by_their_longer_names(recipe, tmp_path):
    described = yaml.safe_load(Path(recipe).read_text())
    controls = {"sampled": {"atoms": "sampled"}, "cluster": {"atoms": "clusters", "solver": "nearest"}}
    for name, settings in controls.items():
        described["study"]["stores"][name] = settings
        described["study"]["arms"][name] = {"store": name, "seeds": [0]}
    path = tmp_path / "toy.yaml"
    path.write_text(yaml.safe_dump(described, sort_keys=False))
    parts = {part.name: part for part in plan(read_study(str(path)), tmp_path / "made", None).parts}
    for name in controls:
        (report,) = parts[f"encode-lsp/{name}"].run(silent)
        assert parts[f"train-student/{name}-seed0"].settings().store == report["store"]


@pytest.mark.parametrize(
    ("asked", "recorded", "differs"),
    [
        ({"mask_weights": "frequency"}, {"mask_weights": "frequency 5e6dcbc6de62b185"}, False),
        (
            {"mask_weights": ("uniform", "pmi")},
            {"mask_weights": ["uniform", "pmi 5e6dcbc6de62b185"], "mask_weight_steps": [0.5]},
            False,
        ),
        ({"mask_weights": "my/weights.npz"}, {"mask_weights": "mine 5e6dcbc6de62b185"}, False),
        ({}, {"mask_weights": "frequency 5e6dcbc6de62b185"}, True),
        ({}, {"continue_from": "75a4d1b0"}, False),  # by its content, which a recipe does not say
        ({}, {"mask_rate_end": 0.05}, True),
        ({}, {"untied": True}, True),
        ({"compile": None, "dtype": "auto"}, {"compile": True, "dtype": "bfloat16"}, False),
    ],
)
def test_settings_of_a_student_that_is_gone_are_compared_as_runs_record_them(tmp_path, asked, recorded, differs):
    settings = {"objective": "mlm", "lr": 1e-3, "max_steps": 9, "batch_windows": 8, "dropout": 0.0}
    trained = StudentConfig(**settings).identity() | recorded
    record = a_record("mlm-seed0", "rte", 0, [0.5], run_seed=0)
    identity = {"objective": "mlm", "plan": "p", "target": "t", "target_settings": {}, "windowing": {}, "tail": None}
    records.write(tmp_path, record | {"identity": identity | {"settings": trained}})
    values = settings | asked | {"store": "a store", "run_dir": tmp_path / "mlm-seed0"}
    part = Part("train-student/mlm-seed0", "train-student", values, ())
    found = pytest.raises(StudyError, match="records of a student with") if differs else nullcontext()
    with found:
        _refuse_other_records(part, tmp_path / "evaluations")
