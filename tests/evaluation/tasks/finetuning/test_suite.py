"""The fine-tuning suite: paired, resumable, reports records made with other settings; as a command and from Python."""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from data import ROOT
from preloaded import Preloaded, run_command
from tiny_families import edit_weights, tiny_model
from tiny_store import write_store
from transformers import AutoConfig, AutoModel, AutoTokenizer

from mlsm.commands.finetune import show as summary
from mlsm.common.errors import DataError, MissingPackageError, ModelError, RecordError, StudyError, TeacherError
from mlsm.common.progress import silent
from mlsm.evaluation import records
from mlsm.evaluation.comparison.compare import compare
from mlsm.evaluation.comparison.config import CompareConfig
from mlsm.evaluation.comparison.identity import differences
from mlsm.evaluation.comparison.models import match_trainings, models_of
from mlsm.evaluation.tasks.finetuning import training
from mlsm.evaluation.tasks.finetuning.config import TASKS, FinetuneConfig
from mlsm.evaluation.tasks.finetuning.suite import finetune
from student.config import StudentConfig
from student.train import train


@pytest.fixture
def settings(teacher_directory, miniatures, tmp_path):
    """One model, two tasks, two seeds, one epoch."""
    return FinetuneConfig(
        models=(str(teacher_directory),),
        tasks=("mrpc", "conll2003"),
        seeds=2,
        data_dir=miniatures,
        output=tmp_path,
        epochs=1,
        lr=1e-3,
        device="cpu",
    )


def command(settings):
    """The same as arguments of Python."""
    flags = {"seeds": settings.seeds, "data-dir": settings.data_dir, "output": settings.output, "lr": settings.lr}
    flags |= {"epochs": settings.epochs, "device": "cpu"}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [ROOT / "cli.py", "finetune", *settings.models, *words, "--tasks", *settings.tasks]


def compared(output):
    """What two studies must share, by file."""
    found = {}
    for record in records.read([output / "evaluations"]):
        kept = {name: record[name] for name in ("figures", "head", "data", "settings", "diverged", "weights")}
        found[record["model"], record["task"], record["seed"]] = kept
    return found


def test_two_models_see_the_same_batches_and_heads(settings, other_directory):
    result = finetune(replace(settings, models=(*settings.models, str(other_directory))))
    assert result["made"] == 8 and not result["finished_before"]
    by_trial = {}
    for record in records.read([settings.output / "evaluations"]):
        by_trial.setdefault((record["task"], record["seed"]), []).append(record)
    assert len(by_trial) == 4
    for first, second in by_trial.values():
        assert first["data"]["order"] == second["data"]["order"] and first["head"] == second["head"]
        assert first["weights"] != second["weights"] and first["settings"] == second["settings"]
    heads = {pair[0]["head"] for pair in by_trial.values()}
    assert len(heads) == 4  # by task and seed
    said = summary(result, settings)
    assert "tiny" in said and "other" in said and "mrpc f1" in said and "compare" in said


@pytest.mark.parametrize("family", ["deberta", "deberta-v2", "distilbert", "electra", "modernbert", "roberta"])
def test_every_family_trains_with_a_words_tokenizer(settings, teacher_directory, tmp_path, family):
    """RoBERTa has one sentence type, DistilBERT and ModernBERT take none: a tokenizer's second must not reach them."""
    directory = tmp_path / family
    sizes = {"vocab_size": 600, "max_position_embeddings": 60, "pad_token_id": 0}
    sizes |= {"type_vocab_size": 1} if family == "roberta" else {}
    tiny_model(family, "masked-lm", **sizes).save_pretrained(directory)
    AutoTokenizer.from_pretrained(teacher_directory).save_pretrained(directory)
    result = finetune(replace(settings, models=(str(directory),), seeds=1))
    assert result["made"] == 2
    said = [record["diverged"] or "" for record in records.read([settings.output / "evaluations"])]
    assert not any("finite" in sentence for sentence in said)


def test_a_run_that_another_process_has_made_is_not_made_again(settings, monkeypatch):
    settings = replace(settings, tasks=("mrpc",))
    other = replace(settings, output=settings.output / "other")
    finetune(other)
    write = records.write

    def beside_another(output, record):
        if record["seed"] == 0:
            for file in other.output.rglob("mrpc-seed1*.json"):
                place = output / file.relative_to(other.output)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, place)
        return write(output, record)

    monkeypatch.setattr(records, "write", beside_another)
    found = finetune(settings)
    assert (found["made"], found["kept"]) == (1, 1) and compared(settings.output) == compared(other.output)


def test_two_commands_do_not_train_one_model_on_one_task(settings, monkeypatch):
    settings, write = replace(settings, tasks=("mrpc",), seeds=1), records.write

    def beside_another(output, record):
        monkeypatch.setattr(records, "write", write)
        with pytest.raises(ValueError, match="another process is working in .*mrpc"):
            finetune(settings)
        return write(output, record)

    monkeypatch.setattr(records, "write", beside_another)
    assert finetune(settings)["made"] == 1 and finetune(settings)["finished_before"]
    assert not list(settings.output.rglob(".mrpc"))


def test_a_second_time_it_is_finished(settings):
    first = finetune(settings)
    files = {file: file.stat().st_mtime_ns for file in settings.output.rglob("*") if file.is_file()}
    second = finetune(settings)
    assert (second["made"], second["kept"], second["finished_before"]) == (0, 4, True)
    assert second["models"] == first["models"] and "was finished already" in summary(second, settings)
    assert files == {file: file.stat().st_mtime_ns for file in settings.output.rglob("*") if file.is_file()}
    (model,) = first["models"]
    assert {name: len(values) for name, values in model["figures"].items()} == {
        "conll2003 f1": 2,
        "mrpc accuracy": 2,
        "mrpc f1": 2,
    }
    assert model["average"] is None  # of fourteen figures only


def test_killed_and_continued_it_equals_the_unbroken(settings, tmp_path_factory):
    settings = replace(settings, seeds=3)
    unbroken = replace(settings, output=tmp_path_factory.mktemp("unbroken"))
    process = Preloaded(
        command(settings),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 120
    while not (kept := list(settings.output.glob("evaluations/*/finetune/*.json"))):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)
    process.kill()
    process.wait()
    assert 0 < len(kept) < 6
    result = finetune(settings)
    assert result["kept"] >= len(kept) and result["made"] + result["kept"] == 6 and result["made"] > 0
    finetune(unbroken)
    assert compared(settings.output) == compared(unbroken.output)


def test_a_record_made_otherwise_is_not_taken_silently(settings):
    settings = replace(settings, tasks=("mrpc",))
    finetune(settings)
    changed = replace(settings, lr=2e-3)
    before = compared(settings.output)
    with pytest.raises(
        StudyError, match=r"mrpc-seed0.json was made with other.*: settings lr \(there 0.001, now 0.002\)"
    ):
        finetune(changed)
    left = finetune(replace(changed, overwrite="never", seeds=3))
    assert len(left["differing"]) == 2 and left["made"] == 1
    assert "Made with other settings" in summary(left, changed)
    assert before.items() <= compared(settings.output).items()
    again = finetune(replace(changed, overwrite="always"))
    assert again["made"] == 2
    values = {record["settings"]["lr"] for record in records.read([settings.output / "evaluations"])}
    assert values == {2e-3}


def test_other_data_or_weights_are_noticed(settings, tmp_path, miniatures):
    settings = replace(settings, tasks=("mrpc",), seeds=1)
    finetune(settings)
    data_dir = tmp_path / "data"
    (data_dir / "MRPC").mkdir(parents=True)
    for part in ("train", "dev"):
        (data_dir / "MRPC" / f"{part}.tsv").write_bytes((miniatures / "glue/MRPC" / f"{part}.tsv").read_bytes())
    assert finetune(replace(settings, data_dir=data_dir))["finished_before"]  # a place is no content
    with open(data_dir / "MRPC" / "dev.tsv", "a") as file:
        file.write("1\t0\t0\tSo it is .\tIt is so .\n")
    with pytest.raises(StudyError, match=r"settings: data files dev.tsv \(there .*, data n_eval \(there 16, now 17\)"):
        finetune(replace(settings, data_dir=data_dir))
    (file,) = settings.output.glob("evaluations/*/finetune/*.json")
    record = json.loads(file.read_text())
    file.write_text(json.dumps(record | {"weights": record["weights"][:8] + "0" * 56}))
    with pytest.raises(StudyError, match="weights"):
        finetune(settings)
    file.write_text("{")
    with pytest.raises(RecordError, match="mrpc-seed0.json: expected a record"):
        finetune(settings)


def test_a_diverged_training_is_recorded(settings):
    result = finetune(replace(settings, tasks=("mrpc", "stsb"), seeds=1, lr=1e38, warmup=0.0))
    said = {record["task"]: record for record in records.read([settings.output / "evaluations"])}
    assert "the loss was not finite at step 2" == said["mrpc"]["diverged"] == said["stsb"]["diverged"]
    assert [figure["value"] for figure in said["stsb"]["figures"]] == [0.0, 0.0]
    assert len(result["models"][0]["diverged"]) == 2 and "Diverged" in summary(result, settings)


def test_a_training_that_ends_at_one_class_is_collapsed_not_diverged(settings):
    result = finetune(replace(settings, tasks=("rte",), seeds=1, lr=1e-9))
    (record,) = records.read([settings.output / "evaluations"])
    assert record["diverged"] is False
    assert record["collapsed"] in ("every prediction is entailment", "every prediction is not_entailment")
    said = summary(result, settings)
    assert "Collapsed, but included in the means" in said and "Diverged" not in said


def test_what_is_wrong_is_said_before_anything_is_trained(
    settings, miniatures, teacher_directory, tmp_path, monkeypatch
):
    """Of the last task, the last model, the last record: not after the days that the others take."""

    def nothing_is_trained(error, match, **changes):
        with pytest.raises(error, match=match):
            finetune(replace(settings, **{"output": tmp_path / "out"} | changes))
        assert len(list((tmp_path / "out").rglob("evaluations/*/*/*.json"))) == before

    before = 0
    incomplete = shutil.copytree(miniatures, tmp_path / "data")
    (incomplete / "wic/dev/dev.gold.txt").unlink()
    nothing_is_trained(DataError, "wic needs .*dev.gold.txt", data_dir=incomplete, tasks=("mrpc", "wic"))
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "seqeval", None)
        lacking = r"conll2003 needs seqeval, which is not installed. .*mlsm-pretrain\[eval\]"
        nothing_is_trained(MissingPackageError, lacking, tasks=("mrpc", "conll2003"))
    broken = shutil.copytree(teacher_directory, tmp_path / "broken")
    edit_weights(broken, lambda weights: {"x" + name if "layer.1" in name else name: w for name, w in weights.items()})
    nothing_is_trained(TeacherError, "the checkpoint lacks", models=(*settings.models, str(broken)))
    smaller = shutil.copytree(teacher_directory, tmp_path / "smaller")
    AutoModel.from_config(AutoConfig.from_pretrained(smaller, vocab_size=100)).save_pretrained(smaller)
    nothing_is_trained(ModelError, "but the model has 100 words", models=(*settings.models, str(smaller)))
    finetune(replace(settings, output=tmp_path / "out", tasks=("wic",), seeds=1))
    before = 1
    differs = "wic-seed0.json was made with other settings.*A study has no --overwrite"
    nothing_is_trained(StudyError, differs, lr=0.1, tasks=("mrpc", "wic"))


def test_a_tenth_of_train_is_scored_and_its_records_stay_apart(settings):
    settings = replace(settings, tasks=("mnli",), seeds=1, limit_train=40)
    finetune(settings)
    tenth = replace(settings, split="train-tenth")
    result = finetune(tenth)
    said = summary(result, tenth)
    assert "Scored on the held-out tenth of the training examples" in said
    assert "limited by --limit-train 40: compare these scores only with others of the same limit" in said
    assert "was limited by" not in summary(result, replace(tenth, limit_train=None))
    (usual,) = records.read([settings.output / "evaluations"])
    (record,) = records.read([settings.output / "train-tenth" / "evaluations"])
    assert record["settings"] == usual["settings"] | {"split": "train-tenth"}
    assert record["data"]["n_train"] + record["figures"][0]["n"] == 40 == usual["data"]["n_train"]
    assert record["head"] == usual["head"], "the same head as the training that the rate is for"
    assert finetune(tenth)["finished_before"]


RATES = (1e-5, 3e-3)


def test_a_rate_is_chosen_as_by_hand_and_the_training_is_that_with_this_rate_alone(settings, tmp_path, other_directory):
    """The oracle: a training with each rate alone, scored on the tenth, and one on all examples with the best."""
    settings = replace(settings, models=(*settings.models, str(other_directory)), seeds=1, limit_train=60)
    seen = []
    grid = replace(settings, lr=RATES, output=tmp_path / "grid")
    result = finetune(grid, lambda task, done, total, **_: seen.append((task, done, total)))
    for task in settings.tasks:  # the bar never goes back, and ends where it says
        done, totals = zip(*(at[1:] for at in seen if at[0] == task), strict=True)
        assert sorted(done) == list(done) and {done[-1]} == set(totals)
    by_hand = {}
    for lr in RATES:
        finetune(replace(settings, lr=lr, split="train-tenth", output=tmp_path / f"{lr}"))
        for record in records.read([tmp_path / f"{lr}" / "train-tenth" / "evaluations"]):
            scores = by_hand.setdefault((record["model"], record["task"]), [])
            scores.append(sum(figure["value"] for figure in record["figures"]) / len(record["figures"]))
        finetune(replace(settings, lr=lr, output=tmp_path / f"{lr}"))
    chosen = set()
    for record in records.read([grid.output / "evaluations"]):
        scores = by_hand[record["model"], record["task"]]
        assert [tried["score"] for tried in record["lr_choice"]["tried"]] == pytest.approx(scores, abs=1e-12)
        lr = record["lr_choice"]["lr"]
        assert lr == RATES[scores.index(max(scores))] and record["settings"]["lr"] == list(RATES)
        name = records.path_of(Path("."), record)
        alone = records.read_file(tmp_path / f"{lr}" / name)
        assert (record["figures"], record["head"]) == (alone["figures"], alone["head"])
        assert record["settings"] | {"lr": lr} == alone["settings"] and "lr_choice" not in alone
        chosen.add(lr)
    assert chosen, "something was compared"
    assert "Learning rates chosen on a tenth" in summary(result, grid) and finetune(grid)["finished_before"]
    said = compare(CompareConfig(results=(grid.output / "evaluations",), output=tmp_path / "compared"), silent).notes
    assert sum("Learning rates chosen by the fine-tuning runs of" in note and "out of 2:" in note for note in said) == 2
    damaged = record | {"lr_choice": {"lr": None, "tried": []}}
    with pytest.raises(RecordError, match="lr_choice.lr"):
        records.check_record(damaged, "a file")
    first, second = models_of(records.read([grid.output / "evaluations"]))[0]
    assert len(match_trainings(first, second)[0]) == 2, "trainings with the same rates to choose from are pairs"


def test_a_rate_that_diverges_is_not_chosen(settings):
    with pytest.MonkeyPatch.context() as patch:
        alone = training.train

        def diverge(model, encoded, task, seed, settings, report):
            return 1 if settings.lr == RATES[0] else alone(model, encoded, task, seed, settings, report)

        patch.setattr(training, "train", diverge)
        finetune(replace(settings, tasks=("mrpc",), seeds=1, lr=RATES))
    (record,) = records.read([settings.output / "evaluations"])
    assert record["lr_choice"]["tried"][0] == {"lr": RATES[0], "score": None}
    assert record["lr_choice"]["lr"] == RATES[1] and not record["diverged"]


def test_one_rate_is_a_number_and_senseless_ones_are_refused(settings):
    assert replace(settings, lr=(1e-3,)) == settings
    assert replace(settings, lr=RATES[::-1]) == replace(settings, lr=RATES), "their order is no setting"
    for rates in ((), (1e-3, 1e-3), (1e-3, 0.0), (1e-3, float("nan"))):
        with pytest.raises(ValueError, match="--lr takes positive numbers, each once"):
            replace(settings, lr=rates)
    with pytest.raises(ValueError, match="--split train-tenth scores one --lr, found 2"):
        finetune(replace(settings, lr=RATES, split="train-tenth"))


def test_one_model_twice_is_refused(settings):
    with pytest.raises(StudyError, match="only once"):
        finetune(replace(settings, models=settings.models * 2))


def test_kept_checkpoints_of_a_run_are_candidates_the_last_of_them_its_export(settings, tmp_path):
    run = tmp_path / "run"
    train(
        StudentConfig(
            store=write_store(tmp_path / "store", k=24).path,
            encoder="bert-2x32",
            max_steps=2,
            batch_windows=2,
            micro_batch=2,
            eval_every=0,
            eval_windows=2,
            checkpoints=(0.5, 1.0),
            save_every=0,
            device="cpu",
            run_dir=run,
        )
    )
    settings = replace(settings, tasks=("rte",), seeds=1, output=tmp_path / "out", max_length=16)
    every = finetune(replace(settings, models=(str(run), *settings.models), step="all"))
    assert [model["model"] for model in every["models"]] == ["run-step-00000001", "run-step-00000002", "tiny"]
    assert finetune(replace(settings, models=(str(run),), step="2"))["finished_before"]
    with pytest.raises(StudyError, match="step-00000002 is the same model as .*run/export. List"):
        finetune(replace(settings, models=(str(run), str(run / "checkpoints/step-00000002"))))


def test_an_untrained_student_is_one_model_whatever_its_runs_learn(settings, tmp_path):
    store = write_store(tmp_path / "store", k=24)
    usual = {"store": store.path, "encoder": "bert-2x32", "max_steps": 1, "batch_windows": 2, "eval_every": 0}
    usual |= {"eval_windows": 2, "checkpoints": (0, 1), "save_every": 0, "device": "cpu"}
    runs = tuple(str(tmp_path / name) for name in ("usual", "faster"))
    train(StudentConfig(run_dir=runs[0], **usual))
    train(StudentConfig(run_dir=runs[1], lr=0.1, **usual))
    settings = replace(settings, tasks=("rte",), seeds=1, output=tmp_path / "out", models=runs)
    both = finetune(replace(settings, step="all"))
    assert [model["model"] for model in both["models"]] == [
        "usual-step-00000000", "usual-step-00000001", "faster-step-00000001"
    ]  # fmt: skip
    assert finetune(replace(settings, step="0", models=runs[1:]))["made"] == 1, "asked for by another run's name"
    models, notes = models_of(records.read([tmp_path / "out" / "evaluations"]))
    assert [model.facts["objective"] for model in models] == ["mlsm", "mlsm", "untrained"]
    assert any("is the same model" in note for note in notes)
    found = differences([model for model in models if model.label != "faster-step-00000001"])
    assert set(found.settings) == {"objective", "step"} and not found.unknown


def test_so_is_one_of_which_several_runs_go_on(settings, tmp_path):
    store = write_store(tmp_path / "store", k=24)
    usual = {"store": store.path, "encoder": "bert-2x32", "max_steps": 1, "batch_windows": 2, "eval_every": 0}
    usual |= {"eval_windows": 2, "checkpoints": (0, 1), "save_every": 0, "device": "cpu"}
    train(StudentConfig(run_dir=tmp_path / "start", **usual))
    runs = tuple(str(tmp_path / name) for name in ("usual", "faster"))
    for run, lr in zip(runs, (1e-3, 0.1), strict=True):
        train(StudentConfig(run_dir=run, lr=lr, continue_from=tmp_path / "start", **usual))
    settings = replace(settings, tasks=("rte",), seeds=1, output=tmp_path / "out", models=runs, step="all")
    assert [model["model"] for model in finetune(settings)["models"]] == [
        "usual-step-00000000", "usual-step-00000001", "faster-step-00000001"
    ]  # fmt: skip


def test_a_model_of_the_hub_brings_its_lineage(settings, monkeypatch, tmp_path):
    """What is fetched is the whole of an export, or the weights and lineage of its records are not those at home."""
    asked = {}

    def fetched(name, allow_patterns):
        asked[name] = allow_patterns
        return settings.models[0]

    monkeypatch.setattr("mlsm.evaluation.models.snapshot_download", fetched)
    finetune(replace(settings, models=("someone/student",), tasks=("rte",), seeds=1))
    assert {"lineage.json", "lsp_head.safetensors", "probe.safetensors"} <= set(asked["someone/student"])


def test_smoke_runs_all_tasks_as_a_command(teacher_directory, tmp_path):
    started = time.monotonic()
    run = run_command(["finetune", teacher_directory, "--smoke", "--json", "--output", tmp_path], code=0)
    assert time.monotonic() - started < 60 * max(1, os.getloadavg()[0] / os.cpu_count())
    result = json.loads(run.stdout)
    assert result["made"] == 10 and len(result["models"][0]["figures"]) == 14
    assert 0 <= result["models"][0]["average"] <= 1
    assert sorted(record["task"] for record in records.read([tmp_path / "smoke" / "evaluations"])) == sorted(TASKS)


MISTAKES = [
    ({"models": ()}, "no model given"),
    ({"data_dir": None}, "no conll2003: no --data-dir, and it cannot be fetched from the Hub"),
    ({"data_dir": Path("/nowhere")}, "/nowhere is not a directory"),
    ({"models": ("/nowhere/model",)}, "no such directory: /nowhere/model"),
    ({"models": (".",)}, "no safetensors"),
    ({"device": "tpu"}, "Use cpu, cuda or auto"),
    ({"tasks": ("boolq",)}, "--tasks takes a list, each one of all, cola"),
    ({"seeds": 0}, "--seeds must be at least 1, found 0"),
    ({"lr": float("nan")}, "--lr takes positive numbers, each once, found nan"),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES)
def test_mistakes_give_one_clear_line(settings, monkeypatch, changes, message):
    monkeypatch.chdir(settings.output)
    with pytest.raises(ValueError) as caught:
        finetune(replace(settings, **changes))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_mistake_as_a_command(tmp_path):
    run = run_command(["finetune", "bundled", "--tasks", "boolq"])
    assert run.returncode == 2 and run.stderr.count("error:") == 1 and "boolq" in run.stderr
