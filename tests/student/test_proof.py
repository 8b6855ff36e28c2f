"""What a GPU trains in: the decision as a table, real children that crash, hang or err, and what a run makes of it."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from preloaded import SUBPROCESS, Hanging, standing_in
from tiny_store import write_store

from mlsm.common import proofs
from mlsm.common.errors import RunError
from shards.reader import Store
from student import proof
from student.config import ProbeConfig, StudentConfig
from student.probe import train_probe
from student.resolve import resolve
from student.task import student_task
from student.train import train

sys.path.append(str(Path(__file__).resolve().parent))  # where a child finds planted_ways.py

EXACT = {"losses": [4.0, 3.9, 3.8], "seconds": 0.03}
HALF = {"losses": [4.01, 3.92, 3.79], "seconds": 0.02}
FAST = {"losses": [4.01, 3.92, 3.79], "seconds": 0.01}
FULL = {"error": "OutOfMemoryError: CUDA out of memory", "lacks_memory": True}
RAISED = {"error": "RuntimeError: no C compiler"}
DIED, HUNG = "it ended with signal SIGSEGV: it printed nothing", "it had not ended after 300 seconds"
B, F = "bfloat16", "float32"


@pytest.mark.parametrize(
    ("half", "compiled", "trouble", "asked", "way", "says", "keep"),
    [
        (
            HALF,
            FAST,
            None,
            ("auto", None),
            "bfloat16, compiled",
            r"right and faster \(20 ms.* \(10 ms a step, 20 ms",
            True,
        ),
        (HALF, RAISED, None, ("auto", None), B, "torch.compile cannot be used: RuntimeError: no C compiler", True),
        (HALF, {}, DIED, ("auto", None), B, "torch.compile cannot be used: the child process failed .*SIGSEGV", True),
        (HALF, {}, HUNG, ("auto", None), B, "had not ended after 300 seconds", False),
        ({}, None, DIED, ("auto", None), F, "bfloat16 cannot.*SIGSEGV.*; torch.compile cannot.*did not come", True),
        (HALF | {"losses": [4.0, 4.0, 3.8]}, None, None, ("auto", False), F, "its loss differs by 2.56%", True),
        (HALF | {"losses": [4.0, float("nan"), 3.8]}, None, None, ("auto", False), F, "not a number", True),
        (HALF | {"seconds": 0.03}, None, None, ("auto", False), F, "bfloat16 is not faster", True),
        (HALF, FAST | {"seconds": 0.02}, None, ("auto", None), B, "torch.compile is not faster", True),
        (
            HALF,
            FAST | {"losses": [4.0, 3.9, 4.0]},
            None,
            ("auto", None),
            B,
            "torch.compile cannot be used: its loss",
            True,
        ),
        (HALF, None, None, ("auto", True), "bfloat16, compiled", "bfloat16 is right and faster", True),
        (HALF, FAST, None, (B, None), "bfloat16, compiled", "torch.compile is right", True),
        (FULL, None, None, ("auto", False), F, "OutOfMemory", False),
    ],
)
def test_the_decision(half, compiled, trouble, asked, way, says, keep):
    trials = {F: EXACT, B: half, "bfloat16, compiled": compiled}
    choice = proof.decide_arithmetic(
        {name: trial for name, trial in trials.items() if trial is not None}, trouble, *asked, trouble == HUNG
    )
    assert (proof.name_of(choice.dtype, choice.compile), choice.keep) == (way, keep)
    assert re.search(says, choice.line), choice.line
    assert choice.line.startswith(way) and "\n" not in choice.line


@pytest.mark.parametrize(("dtype", "losses", "right"), [(F, 3.803, True), (F, 3.81, False), (B, 3.81, True)])
def test_compiled_float32_is_held_closer_than_bfloat16(dtype, losses, right):
    trial = {"losses": [4.0, 3.9, losses], "seconds": 0.001}
    assert proof.decide_arithmetic({F: EXACT, f"{dtype}, compiled": trial}, None, dtype, None).compile == right


@pytest.mark.parametrize("exact", [None, {}, RAISED, FULL, {"losses": [float("inf")], "seconds": 1.0}])
def test_without_float32_nothing_is_turned_on_and_nothing_is_kept(exact):
    trials = {F: exact} if exact is not None else {}
    choice = proof.decide_arithmetic(trials | {B: HALF, "bfloat16, compiled": FAST}, DIED)
    assert (choice.dtype, choice.compile, choice.keep, choice.right) == (F, False, False, ())
    assert proof.decide_arithmetic(trials, DIED, B, True)[:2] == (B, True), "what was asked for by name stays"


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Trains where arithmetic is proven first, by a child in which ways to train do what is planted."""
    monkeypatch.setattr(proof, "is_needed", lambda asked, device: asked.dtype == "auto" or asked.compile is None)
    monkeypatch.setattr(proof, "TRIAL", "planted_ways")
    monkeypatch.setattr(proofs, "subprocess", SUBPROCESS)
    monkeypatch.setattr(proof, "_said", set())
    monkeypatch.setattr("student.train.Stepper.__init__", uncompiled(train.__globals__["Stepper"].__init__))
    monkeypatch.chdir(tmp_path)  # where runs/students is
    store = write_store(tmp_path / "store", k=24, held_out_windows=0)

    def run(does, cache="cache", **more):
        monkeypatch.setenv("MLSM_PLANTED", does)
        monkeypatch.setenv("MLSM_CACHE", str(tmp_path / cache))
        usual = {"encoder": "bert-1x32", "batch_windows": 6, "micro_batch": 3, "max_steps": 2, "lr": 1e-3}
        usual |= {"device": "cpu", "eval_every": 0}
        return train(StudentConfig(store=store.path, **usual | more))

    return run


def uncompiled(initialise):
    """A stepper that does not compile, which takes a minute; that is tried for itself, below."""
    return lambda self, config, *given: initialise(self, replace(config, compile=False), *given)


def trained_in(result):
    settings = json.loads((Path(result["run"]) / "config.json").read_text())["settings"]
    return proof.name_of(settings["dtype"], settings["compile"])


@pytest.mark.parametrize(
    ("does", "way", "says"),
    [
        ("", "bfloat16, compiled", "torch.compile is right and faster"),
        ("compiled=crash", B, "SIGSEGV"),
        ("compiled=fail", B, "Failed to find a C compiler"),
        ("bfloat16=wrong compiled=slow", F, "its loss differs by"),
    ],
)
def test_a_run_takes_what_is_right_and_says_so(run, caplog, does, way, says):
    with caplog.at_level("INFO", "student"):
        assert trained_in(run(does)) == way
    (said,) = [text for text in caplog.messages if "training on" in text]
    assert says in said
    caplog.clear()
    with caplog.at_level("INFO", "student"):
        assert trained_in(run("float32=crash", seed=2)) == way
    assert not [text for text in caplog.messages if "training on" in text], "it is kept, and no child starts"


def test_a_run_is_warned_where_nothing_could_be_tried(run, caplog):
    assert trained_in(run("float32=lack_memory")) == F
    [record] = [record for record in caplog.records if "training on" in record.getMessage()]
    assert record.levelname == "WARNING" and "nothing could be tried" in record.getMessage()


def test_a_child_that_hangs_costs_the_time_limit(run, monkeypatch):
    monkeypatch.setattr(proofs, "subprocess", standing_in(Hanging))
    assert trained_in(run("compiled=hang")) == B
    assert trained_in(run("", seed=2)) == "bfloat16, compiled", "it is not kept"


def test_a_run_keeps_what_it_was_begun_with(run):
    first = run("bfloat16=slow compiled=slow", max_steps=1)
    assert trained_in(first) == F
    (Path(first["run"]) / "result.json").unlink()  # as if it had not ended
    again = run("", cache="another")
    assert trained_in(again) == "bfloat16, compiled" and again["run"] != first["run"], "of two steps, it is another run"
    again = run("", cache="another", max_steps=1)
    assert again["run"] == first["run"] and trained_in(again) == F, (
        "bfloat16 is faster now, and not what it was begun with"
    )


def test_a_run_whose_way_fails_now_ends_with_a_line(run):
    first = run("")
    (Path(first["run"]) / "result.json").unlink()
    with pytest.raises(
        RunError, match=r"started in bfloat16, compiled, which does not work .*SIGSEGV.*--dtype bfloat16 --comp"
    ):
        run("compiled=crash", cache="another")
    assert run("", cache="another", dtype="bfloat16", compile=True)["run"] == first["run"], "as the line says"


@pytest.mark.parametrize("fault", ["lack_memory", "be_killed"])
def test_a_run_goes_on_where_its_way_could_not_be_tried_now(run, fault):
    first = run("")
    (Path(first["run"]) / "result.json").unlink()
    again = run(f"compiled={fault}", cache="another")
    assert again["run"] == first["run"] and trained_in(again) == "bfloat16, compiled"


def test_a_finished_run_is_found_without_a_proof(run):
    first = run("")
    assert run("float32=crash", cache="another")["run"] == first["run"]


def test_the_real_child_tries_every_way(run, monkeypatch):
    monkeypatch.setattr(proof, "TRIAL", "student.trial")
    monkeypatch.setattr(proofs, "subprocess", subprocess)
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")  # which takes a minute, see test_compile.py
    kept = []
    monkeypatch.setattr("mlsm.common.proofs.keep", lambda key, answer: kept.append(answer))
    run("")
    [answer] = kept
    compiled = next(trial for name, trial in answer["trials"].items() if "compiled" in name)
    assert set(answer["right"]) >= {F, B}, answer["line"]
    assert compiled["losses"] == pytest.approx(answer["trials"][F]["losses"], rel=0.02)
    assert len(compiled["losses"]) == 9


def test_a_probe_is_tried_with_the_settings_that_it_has(run, monkeypatch):
    """Of a student's settings most are fixed for a probe, dropout among them."""
    student = run("", dtype="float32", compile=False)["run"]
    monkeypatch.setattr(proof, "TRIAL", "student.trial")
    monkeypatch.setattr(proofs, "subprocess", subprocess)
    tried = []
    monkeypatch.setattr("mlsm.common.proofs.keep", lambda key, answer: tried.append(answer))
    usual = {"batch_windows": 6, "micro_batch": 3, "max_steps": 2, "eval_every": 0, "device": "cpu", "compile": False}
    train_probe(ProbeConfig(student=student, probe_input="logits", **usual))
    [answer] = tried
    assert {F, B} <= set(answer["right"]), answer["line"]


def test_an_answer_is_of_all_that_changes_what_is_compiled(tmp_path):
    store, cpu = Store.open(write_store(tmp_path / "store", k=24).path), torch.device("cpu")
    plain = resolve(StudentConfig(store=store.path, encoder="bert-1x32", micro_batch=3), store).config
    task = student_task(plain, store)
    keys = {proof.key_of(plain, replace(plain, **one), store, task, cpu) for one in ({}, {"lr": 0.5}, {"seed": 7})}
    assert len(keys) == 1
    changes = {"objective": "mlm", "micro_batch": 4, "documents_apart": True, "short_windows": 8}
    changes |= {"positions": "all", "optimizer": "muon", "mask_rate": 0.4, "mask_rate_end": 0.1}
    for name, value in (changes | {"activation_checkpointing": True}).items():
        keys.add(proof.key_of(plain, replace(plain, **{name: value}), store, task, cpu))
    other = Store.open(write_store(tmp_path / "other", k=25).path)
    keys.add(proof.key_of(plain, plain, other, task, cpu))
    assert len(keys) == 11
    for untied in (False, True):  # of multi-task training, whose outputs are LSPs and words
        mtl = student_task(replace(plain, objective="mtl", untied=untied), store)
        keys.add(proof.key_of(plain, plain, store, mtl, cpu))
    assert len(keys) == 13
    probes = [resolve(ProbeConfig(probe_input=read), store).config for read in ("logits", "softmax")]
    assert len({proof.key_of(one, one, store, task, cpu) for one in probes}) == 2


def test_only_what_a_gpu_leaves_open_is_proven():
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    asked = [StudentConfig(), StudentConfig(dtype="float32"), StudentConfig(dtype="float32", compile=False)]
    assert [proof.is_needed(one, gpu) for one in asked] == [True, True, False]
    assert not any(proof.is_needed(one, cpu) for one in asked)
