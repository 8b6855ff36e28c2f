import functools
import json
import os
import re
import signal
import subprocess
import textwrap
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from http_store import serving
from preloaded import Preloaded, run_python
from safetensors.torch import load_file
from tiny_store import curve, log_of, write_store
from transformers import AutoModel, get_scheduler, get_wsd_schedule

import student.masks.masking
import student.train
from mlsm.common.disk import temporary_name
from mlsm.common.errors import DeviceError, Interrupted, RunError, TrainingError
from mlsm.evaluation.lineage import lineage
from mlsm.evaluation.models import directories
from student.config import StudentConfig
from student.encoders.build import weights_fingerprint
from student.encoders.model import build_student
from student.objectives import OBJECTIVES
from student.objectives.mlm import Mlm
from student.optimizer import build_optimizer, learning_rate
from student.train import seed_dropout, train


def weights(run):
    return load_file(run / "export" / "model.safetensors")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Function of a store, an objective and the settings of all tests: the directory of their run, trained once."""
    runs = {}

    def run(store, objective, settings, checkpoints=StudentConfig.checkpoints):
        which = objective, checkpoints
        if which not in runs:
            runs[which] = tmp_path_factory.mktemp("unbroken") / "run"
            own = {"checkpoints": checkpoints, "run_dir": runs[which]}
            train(StudentConfig(store=store.path, objective=objective, **settings | own))
        return runs[which]

    return run


@pytest.fixture(scope="module")
def course(store_for, needed_by, tmp_path_factory):
    """Objective -> the result of a run that is long enough to learn, trained once."""
    size = {"encoder": "bert-1x64", "dropout": 0.0, "batch_windows": 24, "micro_batch": 24, "seed": 1, "device": "cpu"}
    steps = {"max_steps": 120, "lr": 5e-3, "mask_rate": 0.3, "save_every": 0, "eval_every": 0, "eval_windows": 20}

    @functools.cache
    def run(objective):
        paired = {"store": store_for(objective).path, "objective": objective} | needed_by(objective)
        return train(StudentConfig(**size | steps | paired | {"run_dir": tmp_path_factory.mktemp("course") / "run"}))

    return run


def assert_same_run(one, other):
    assert curve(one) == curve(other)
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_student_beats_the_marginal_baseline_and_says_so(lsp_store, settings):
    seen = []
    config = StudentConfig(**settings | {"store": lsp_store.path, "max_steps": 60, "lr": 5e-3})
    result = train(config, lambda stage, done, total, **figures: seen.append((stage, done, total, figures)))
    assert result["improvement"] > 0.05
    assert result["held_out_loss"] == pytest.approx(result["baseline_loss"] * (1 - result["improvement"]))
    assert result["steps"] == 60 and not result["finished_before"]
    assert 0 < result["seconds_to_first_step"] < 60 and result["tokens_per_second"] > 0
    assert json.loads((config.run_dir / "result.json").read_text()).items() <= result.items()
    stage, done, total, figures = seen[-1]
    assert stage == "train-student" and done == total
    assert figures["unit"] == "tokens" and figures["held_out"] == result["held_out_loss"]


def test_what_a_run_says_first_are_values_as_one_writes_them(lsp_store, settings, caplog):
    config = StudentConfig(**settings | {"store": lsp_store.path, "max_steps": 1, "checkpoints": (0.5, 1.0)})
    object.__setattr__(config, "origins", {"checkpoints": "flag"})  # as the command line does
    with caplog.at_level("INFO", "student"):
        train(config)
    assert "also           checkpoints 0.5 1.0 (flag)" in caplog.text


def test_the_log_tells_what_happened(ids_store, settings):
    config = StudentConfig(store=ids_store.path, objective="mlm", **settings | {"eval_every": 4})
    train(config)
    log = log_of(config.run_dir)
    assert sorted(log) == list(range(1, 9))
    for line in log.values():
        assert line["tokens_per_second"] > 0 and line["data_wait_seconds"] >= 0 and line["grad_norm"] > 0
    assert [step for step, line in log.items() if "held_out" in line] == [1, 2, 4, 8]
    assert log[8]["held_out"].keys() == {"loss", "accuracy", "perplexity"}
    read = ids_store.split("train").read(range(150))
    assert log[8]["tokens"] == log[7]["tokens"] + sum(
        int(read.lengths[i]) for i in ids_store.split("train").order(1, 0, 84, 96)
    )


def test_the_untrained_student_is_a_checkpoint_like_any_other(lsp_store, settings, unbroken):
    config = StudentConfig(store=lsp_store.path, **settings | {"checkpoints": (0, 1)})
    train(config)
    (floor,) = directories((str(config.run_dir),), step="0")
    start = json.loads((config.run_dir / "log.jsonl").read_text().splitlines()[0])
    assert weights_fingerprint(AutoModel.from_pretrained(floor, add_pooling_layer=False)) == start["initial_encoder"]
    known = lineage(floor)
    assert (known["step"], known["fraction"], known["objective"]) == (0, 0.0, "untrained") and known["k"] is None
    assert (
        known["flops"] == {"pretraining": 0, "teacher": 0}
        and known["identity"] == lineage(config.run_dir / "export")["identity"]
    )
    assert_same_run(config.run_dir, unbroken(lsp_store, "mlsm", settings, checkpoints=(1,)))


def test_checkpoints_that_a_run_has_passed_are_named(lsp_store, settings, caplog):
    config = StudentConfig(store=lsp_store.path, **settings)
    train(config)
    train(replace(config, checkpoints=(0, 0.4, 1)))
    assert "no model is kept of step 0, 3, which the run has passed" in caplog.text


def test_a_run_goes_on_from_the_untrained_student(lsp_store, settings, unbroken, monkeypatch):
    usual = unbroken(lsp_store, "mlsm", settings, checkpoints=(1,))
    config = StudentConfig(store=lsp_store.path, **settings | {"checkpoints": (0, 1)})
    monkeypatch.setattr(student.train.Stepper, "update", lambda *_: (_ for _ in ()).throw(OSError("power cut")))
    with pytest.raises(OSError, match="power cut"):
        train(config)
    monkeypatch.undo()
    assert [path.name for path in (config.run_dir / "checkpoints").iterdir()] == ["step-00000000"]
    train(config)
    assert_same_run(config.run_dir, usual)


def test_a_finished_run_is_reported_and_not_repeated(ids_store, settings, monkeypatch):
    config = StudentConfig(store=ids_store.path, objective="mlm", **settings)
    first = train(config)
    monkeypatch.setattr(student.train, "Trainer", None)
    assert train(config) == first | {"finished_before": True}


def test_batches_masks_and_encoder_are_the_same_for_every_objective(course):
    batches, encoders = set(), set()
    for objective in OBJECTIVES:
        directory = Path(course(objective)["run"])
        batches.add(tuple(line["batch"] for line in log_of(directory).values()))
        encoders.add(json.loads((directory / "log.jsonl").read_text().splitlines()[0])["initial_encoder"])
    assert len(batches) == len(encoders) == 1
    assert len(set(batches.pop())) == 120


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_beats_its_constant_prediction(course, objective):
    result = course(objective)
    assert result["improvement"] > 0.05
    names = {name.removesuffix("_by_position").removesuffix("_by_type") for name in result["baseline"]}
    assert names <= result["held_out"].keys()


def test_an_ids_store_and_an_lsp_store_of_one_plan_pair(lsp_store, ids_store, settings, unbroken):
    config = StudentConfig(store=lsp_store.path, objective="mlm", **settings)
    train(config)
    assert curve(config.run_dir) == curve(unbroken(ids_store, "mlm", settings))


def test_all_settings_of_masking_train_and_decide_the_batches(ids_store, settings, tmp_path):
    common = settings | {"store": ids_store.path, "objective": "mlm", "micro_batch": 12, "save_every": 0}
    masks = {
        "plain": {},
        "words": {"mask_unit": "word"},
        "spans": {"mask_unit": "span"},
        "corrupt": {"corruption": "80-10-10"},
        "falling": {"mask_rate": 0.3, "mask_rate_end": 0.15},
    }
    for name, changes in masks.items():
        train(StudentConfig(**common | changes | {"run_dir": tmp_path / name}))
    batches = {name: [line["batch"] for line in log_of(tmp_path / name).values()] for name in masks}
    assert batches["words"] == batches["plain"]  # in this store every word is one token
    assert len({tuple(digests) for digests in batches.values()}) == 4
    assert batches["falling"][-1] == batches["plain"][-1]  # once the rate is the same


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_without_dropout_the_micro_batch_does_not_matter(store_for, needed_by, settings, tmp_path, objective):
    curves = []
    for micro_batch in (12, 5, 1):
        few = {"max_steps": 3, "eval_windows": 6, "save_every": 0}
        changes = few | {"micro_batch": micro_batch, "dropout": 0.0, "run_dir": tmp_path / str(micro_batch)}
        changes |= needed_by(objective)
        train(StudentConfig(store=store_for(objective).path, objective=objective, **settings | changes))
        curves.append(log_of(changes["run_dir"]))
    for step, line in curves[0].items():
        for other in curves[1:]:
            assert other[step]["batch"] == line["batch"]
            assert other[step]["loss"] == pytest.approx(line["loss"], rel=1e-5)
            assert other[step]["grad_norm"] == pytest.approx(line["grad_norm"], rel=1e-4)


def test_the_seed_decides_and_global_randomness_is_left_alone(ids_store, settings, tmp_path, unbroken):
    usual = unbroken(ids_store, "mlm", settings)
    torch.random.manual_seed(5)
    before = torch.random.get_rng_state()
    for name, seed in (("same", 1), ("other", 2)):
        paths = {"store": ids_store.path, "run_dir": tmp_path / name}
        train(StudentConfig(objective="mlm", **settings | paths | {"seed": seed}))
    assert torch.equal(before, torch.random.get_rng_state())
    assert_same_run(usual, tmp_path / "same")
    assert curve(usual) != curve(tmp_path / "other")


KILLED = """
    import json, os, signal, sys
    import torch
    import student.runs.checkpoint
    from student.config import StudentConfig
    from student.train import train

    settings, kill_in_save = json.loads(sys.argv[1]), sys.argv[2] == "save"
    torch.set_num_threads(1)

    def die(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    def kill_at_step_5(stage, done, total, *, step=0, **figures):
        if step == 5:
            if not kill_in_save:
                die()
            student.runs.checkpoint.torch.save = die    # weights are written, the optimiser is not

    train(StudentConfig(**settings), kill_at_step_5)
"""


@pytest.mark.promise("17 trainer killed …")
@pytest.mark.parametrize("moment", ["step", "save"])
def test_killed_and_resumed_equals_unbroken_bit_for_bit(lsp_store, settings, unbroken, moment):
    killed = StudentConfig(store=lsp_store.path, **settings)
    arguments = [json.dumps(killed.to_json()), moment]
    child = run_python(["-c", textwrap.dedent(KILLED), *arguments], env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert child.returncode == -signal.SIGKILL
    assert sorted(path.name for path in (killed.run_dir / "checkpoints").glob("step-*"))[-1] < "step-00000005"
    steps = []
    train(killed, lambda *args, step, **figures: steps.append(step))
    assert steps == [4, 5, 6, 7, 8]  # the checkpoint of step 4, reported, and what was left to do
    assert_same_run(unbroken(lsp_store, "mlsm", settings), killed.run_dir)
    assert not list(killed.run_dir.rglob("*.tmp"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_stops_at_the_next_step(ids_store, settings, unbroken, number):
    config = StudentConfig(store=ids_store.path, objective="mlm", **settings | {"save_every": 0})

    def interrupt(*args, step, **figures):
        if step == 5:
            os.kill(os.getpid(), number)

    handler = signal.getsignal(number)
    with pytest.raises(Interrupted, match="step 5 of 8"):
        train(config, interrupt)
    assert signal.getsignal(number) is handler
    steps = []
    train(config, lambda *args, step, **figures: steps.append(step))
    assert steps == [5, 6, 7, 8]
    assert_same_run(unbroken(ids_store, "mlm", settings), config.run_dir)


@pytest.mark.promise("31 damaged checkpoints")
def test_a_damaged_checkpoint_is_passed_over(ids_store, settings, unbroken, caplog):
    config = StudentConfig(store=ids_store.path, objective="mlm", **settings)
    train(config)
    (config.run_dir / "result.json").unlink()
    newest = config.run_dir / "checkpoints" / "step-00000008"
    optimizer = newest / "resume" / "optimizer.pt"
    optimizer.write_bytes(optimizer.read_bytes()[:-100])
    steps = []
    train(config, lambda *args, step, **figures: steps.append(step))
    assert steps == [4, 5, 6, 7, 8]
    assert "optimizer.pt was cut or changed" in caplog.text
    assert_same_run(unbroken(ids_store, "mlm", settings), config.run_dir)


def test_held_out_and_baseline_are_of_the_same_windows(ids_store, settings, tmp_path):
    """Also if only the end of a run was lost, and the command is repeated with other --eval-windows."""
    config = StudentConfig(store=ids_store.path, objective="mlm", **settings)
    train(config)
    (config.run_dir / "result.json").unlink()
    again = train(replace(config, eval_windows=1))
    other = train(replace(config, eval_windows=1, run_dir=tmp_path / "other"))
    assert not again["finished_before"] and again["held_out"] == other["held_out"] != {}
    assert again["baseline"] == other["baseline"] and again["improvement"] == other["improvement"]


@pytest.mark.promise("22 no non-zero code …")
def test_a_loss_that_is_not_finite_stops_with_all_one_needs(ids_store, settings, monkeypatch):
    config = StudentConfig(store=ids_store.path, objective="mlm", **settings)
    honest, calls = Mlm.loss_sums, []

    def poisoned(self, logits, targets):
        calls.append(1)
        return honest(self, logits, targets) * (float("nan") if len(calls) == 20 else 1)

    monkeypatch.setattr(Mlm, "loss_sums", poisoned)
    with pytest.raises(TrainingError, match="loss nan") as caught:
        train(config)
    assert "step-" in str(caught.value) and "\n" not in str(caught.value)
    failed = int(str(caught.value).split()[1].rstrip(":"))
    assert max(log_of(config.run_dir)) == failed - 1
    monkeypatch.setattr(Mlm, "loss_sums", honest)
    assert train(config)["steps"] == 8


def test_a_held_out_figure_that_is_not_finite_stops_before_anything_is_written(ids_store, settings, monkeypatch):
    config = StudentConfig(store=ids_store.path, objective="mlm", **settings)
    monkeypatch.setattr(Mlm, "measure", lambda self, logits, targets: {"loss": logits.new_tensor(float("inf"))})
    with pytest.raises(TrainingError, match="a held-out figure is not finite"):
        train(config)
    monkeypatch.undo()
    assert train(config)["steps"] == 8


def test_a_gradient_that_is_not_finite_stops(ids_store, settings, monkeypatch):
    honest = Mlm.loss_sums

    def poisoned(self, logits, targets):
        return honest(self, logits, targets) + BadGradient.apply(logits)

    monkeypatch.setattr(Mlm, "loss_sums", poisoned)
    with pytest.raises(TrainingError, match="gradient norm (nan|inf)"):
        train(StudentConfig(store=ids_store.path, objective="mlm", **settings))


class BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        ctx.shape = logits.shape
        return logits.new_zeros(())

    @staticmethod
    def backward(ctx, gradient):
        return torch.full(ctx.shape, float("inf"))


def test_bfloat16_trains_with_float32_weights(ids_store, settings):
    config = StudentConfig(store=ids_store.path, objective="mlm", **settings | {"dtype": "bfloat16"})
    train(config)
    assert {tensor.dtype for tensor in weights(config.run_dir).values()} == {torch.float32}
    assert log_of(config.run_dir)[8]["loss"] < 5


def test_a_store_without_held_out_windows_still_trains(settings, tmp_path):
    store = write_store(tmp_path / "store", k=0, held_out_windows=0)
    result = train(StudentConfig(store=store.path, objective="mlm", **settings))
    assert result["held_out"] == {} and result["improvement"] is None


def test_whole_words_that_are_longer_than_what_may_be_masked_are_told(ids_store, settings, monkeypatch, caplog):
    words = settings | {"mask_unit": "word", "max_steps": 1}
    train(StudentConfig(store=ids_store.path, objective="mlm", **words))
    assert "--mask-unit word masks" not in caplog.text
    monkeypatch.setattr(
        student.masks.masking, "continuation_flags", lambda _, vocab_size: np.arange(vocab_size) % 9 > 0
    )
    train(
        StudentConfig(
            store=ids_store.path, objective="mlm", **words | {"seed": 2, "run_dir": settings["run_dir"] / "2"}
        )
    )
    assert "of the tokens instead of 1" in caplog.text and "use --mask-unit token or span" in caplog.text


def test_what_follows_from_the_machine_is_not_called_given(ids_store, settings, caplog):
    with caplog.at_level("INFO", "student"):
        train(StudentConfig(store=ids_store.path, objective="mlm", **settings | {"max_steps": 1}))
    assert "seed 1 (given)" in caplog.text and not re.search(r"(dtype|compile) \w+ \(given\)", caplog.text)


def test_held_out_windows_without_a_token_to_predict_are_told(ids_store, settings, caplog):
    result = train(
        StudentConfig(store=ids_store.path, objective="mlm", **settings | {"mask_rate": 0.5, "mask_rate_end": 0.03})
    )
    assert (
        result["held_out"] == {} and "no evaluation: in 8 held-out windows no masked token has a target" in caplog.text
    )


@pytest.mark.promise("24 no documents …")
@pytest.mark.parametrize(("objective", "k"), [("mlm", 0), ("mlsm", 24)])
def test_a_store_without_training_windows_is_one_clear_line(settings, tmp_path, objective, k):
    store = write_store(tmp_path / "store", k=k, train_windows=0)
    with pytest.raises(RunError, match="no training windows.*Encode more text"):
        train(StudentConfig(store=store.path, objective=objective, **settings))


@pytest.mark.promise("24 no documents …")
def test_an_epoch_smaller_than_the_batch_fills_up_from_the_next(settings, tmp_path):
    store = write_store(tmp_path / "store", k=0, train_windows=5)
    config = StudentConfig(store=store.path, objective="mlm", **settings)
    assert train(config)["tokens"] > 8 * 12 * 10
    assert len({line["batch"] for line in log_of(config.run_dir).values()}) == 8


def test_norms_and_biases_decay_if_asked_for(ids_store):
    for decay_all, expected in ((False, 0.0), (True, 0.01)):
        config = StudentConfig(encoder="bert-2x32", lr=1e-4, decay_all=decay_all)
        model = build_student(config, ids_store, Mlm(ids_store))
        matrices, rest = build_optimizer(model, config).param_groups
        assert matrices["weight_decay"] == 0.01 and rest["weight_decay"] == expected
        assert {weight.ndim for weight in rest["params"]} == {1}


TRAINED_ELSEWHERE = """
    import json, sys, time
    import torch
    from student.config import StudentConfig
    from student.train import train

    torch.set_num_threads(1)

    def wait_at_step_3(stage, done, total, *, step=0, **figures):
        if step == 3:
            print("waiting", flush=True)
            sys.stdin.readline()

    train(StudentConfig(**json.loads(sys.argv[1])), wait_at_step_3)
"""


def test_a_second_start_of_a_run_leaves_the_first_alone(ids_store, settings, unbroken):
    config = StudentConfig(store=ids_store.path, objective="mlm", **settings)
    command = ["-c", textwrap.dedent(TRAINED_ELSEWHERE), json.dumps(config.to_json())]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with Preloaded(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes) as first:
        assert first.stdout.readline() == "waiting\n"
        begun = temporary_name(config.run_dir / "checkpoints", "step-00000009")  # a save under way
        begun.mkdir(parents=True)
        with pytest.raises(RunError, match="another process is training.*Wait for it"):
            train(config)
        assert begun.exists()
        first.communicate("go on\n")
    assert first.returncode == 0
    assert_same_run(unbroken(ids_store, "mlm", settings), config.run_dir)


def test_learning_rate_rises_and_falls_linearly():
    config = StudentConfig(max_steps=100, warmup=0.1, lr=1.0)
    rates = [learning_rate(config, step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10:] == pytest.approx([(100 - i) / 90 for i in range(10, 100)])
    assert learning_rate(StudentConfig(max_steps=5, warmup=0.0, lr=1.0), 0) == 1.0
    config = StudentConfig(max_steps=777, warmup=0.02, lr=3e-4)
    for step in range(16, 777):
        assert learning_rate(config, step) == 3e-4 * (777 - step) / 761, (
            "another order of the operations has other last bits"
        )


def test_a_decay_that_would_begin_in_the_warm_up_begins_behind_it():
    config = StudentConfig(max_steps=100, warmup=0.5, lr=1.0, schedule="wsd", decay_share=0.8)
    rates = [learning_rate(config, step) for step in range(100)]
    assert rates[49] == rates[50] == 1.0 and rates[50:] == pytest.approx([(100 - i) / 50 for i in range(50, 100)])


@pytest.mark.parametrize(("decay_share", "falling"), [(1e-9, 1), (0.02, 1), (0.04, 2), (0.1, 5), (1.0, 50)])
def test_a_decay_is_of_whole_steps_and_of_one_at_least(decay_share, falling):
    config = StudentConfig(max_steps=50, warmup=0.0, lr=1.0, schedule="wsd", decay_share=decay_share)
    expected = [1.0] * (50 - falling) + [(falling - step) / falling for step in range(falling)]
    assert [learning_rate(config, step) for step in range(50)] == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_schedules_are_those_of_transformers_one_step_later(schedule):
    config = StudentConfig(max_steps=100, warmup=0.1, lr=1.0, schedule=schedule, decay_share=0.3)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    if schedule == "wsd":
        theirs = get_wsd_schedule(optimizer, 10, 30, num_stable_steps=60, decay_type="linear")
    else:
        theirs = get_scheduler(schedule, optimizer, 10, 100)
    [rate] = theirs.lr_lambdas
    expected = [rate(step + 1) for step in range(10)] + [rate(step) for step in range(10, 100)]
    assert [learning_rate(config, step) for step in range(100)] == pytest.approx(expected)


def test_dropout_is_another_at_every_step_seed_and_micro_batch():
    def drawn(*of):
        with torch.random.fork_rng():
            seed_dropout(torch.device("cpu"), *of)
            return tuple(torch.rand(3).tolist())

    times = list(product((0, 1), (0, 1, 1000), (0, 1, 7)))
    draws = [drawn(*of) for of in times]
    assert len({*draws}) == len(draws) and [drawn(*of) for of in times] == draws


def test_no_store_and_no_device_are_one_clear_line(settings, ids_store):
    with pytest.raises(RunError, match="no store given"):
        train(StudentConfig(**settings))
    with pytest.raises(DeviceError, match="device abacus"):
        train(StudentConfig(store=ids_store.path, objective="mlm", **settings | {"device": "abacus"}))


def test_training_goes_on_from_an_export(ids_store, settings, tmp_path):
    common = settings | {"store": ids_store.path, "objective": "mlm"}
    first = train(StudentConfig(**common))
    again = common | {"continue_from": Path(first["export"]), "run_dir": tmp_path / "again", "max_steps": 1}
    train(StudentConfig(**again))
    of_run = StudentConfig(**again | {"continue_from": first["run"], "encoder": "bert-base"})
    assert train(of_run)["finished_before"], "a run means its export, and leaves no choice of encoder"
    start = json.loads((tmp_path / "again" / "log.jsonl").read_text().splitlines()[0])
    exported = AutoModel.from_pretrained(first["export"], dtype=torch.float32, add_pooling_layer=False)
    assert start["initial_encoder"] == weights_fingerprint(exported)
    with pytest.raises(RunError, match="nothing.*Pass"):
        train(StudentConfig(**again | {"continue_from": tmp_path / "nothing", "run_dir": tmp_path / "third"}))


def test_a_store_behind_a_url_trains_the_same_student(lsp_store, settings, tmp_path, unbroken, monkeypatch):
    monkeypatch.setenv("MLSM_CACHE", str(tmp_path / "cache"))
    with serving(lsp_store.path.parent) as web:
        url = f"{web.url}/{lsp_store.path.name}"
        result = train(StudentConfig(store=url, **settings))
    assert result["store"] == url
    assert_same_run(settings["run_dir"], unbroken(lsp_store, "mlsm", settings))
