"""gpu_check: every item runs at toy size on a CPU, as far as it can; what becomes of items that hang or fail."""

import functools
import json
import subprocess
import sys
from importlib.metadata import version
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from preloaded import Preloaded

from benchmarks.gpu_check import __main__ as gpu_check
from benchmarks.gpu_check.items import ITEMS, PARTS, Item, Setting, Skip
from benchmarks.lifted import available_problem, bundled_problem, toy_problem
from pipeline.solvers import nonneg_lasso

TOY = Setting(torch.device("cpu"), toy=True)
WHOLE_ON_A_CPU = {"coder_vs_teacher", "fista"}


@pytest.fixture(scope="module")
def toy_run(tmp_path_factory):
    """Runs an item once for all tests; returns its exit code and what it found."""

    @functools.cache
    def run(name):
        file = tmp_path_factory.mktemp("toy") / "found.json"
        return gpu_check.run_here(name, TOY, file), json.loads(file.read_text())

    return run


@pytest.mark.parametrize("name", ITEMS)
def test_an_item_runs_at_toy_size(name, toy_run, one_thread):
    code, found = toy_run(name)
    assert code == 0
    assert found["status"] == ("ok" if name in WHOLE_ON_A_CPU else "skipped: needs a GPU")
    assert found["measurement"] or name in ("memcheck", "racecheck", "synccheck")


def test_figures_of_a_toy_run_are_right(toy_run, one_thread):
    """Where both sides of a comparison are the same CPU, nothing may differ."""
    figures = {name: toy_run(name)[1]["measurement"] for name in ("losses", "learner", "trainer", "fista")}
    assert figures["losses"]["float32_differs_by"] == 0 < figures["losses"]["bfloat16_differs_by"] < 0.02
    assert figures["learner"]["atoms_differ_by"] <= figures["learner"]["at_most"] < 1e-4
    assert figures["trainer"]["resumed_differs_by"] == 0
    assert figures["fista"]["32"]["compiled_differs_by"] < 1e-5
    assert figures["fista"]["32"]["fista_above_ours"] > 0  # three steps are too few


def test_without_the_bench_data_the_bundled_teachers_states_are_used(monkeypatch, tmp_path):
    monkeypatch.setattr("benchmarks.data.ROOT", tmp_path / "repository")
    monkeypatch.delenv("MLSM_DATA", raising=False)
    monkeypatch.setattr("benchmarks.lifted.bundled_problem", lambda: bundled_problem(tokens=64, atoms=32))
    problem = available_problem().lifted(256)
    assert problem.hidden_Nd.shape == (64, 256) and problem.atoms_Kd.shape == (32, 256)
    assert np.linalg.norm(problem.atoms_Kd.astype(float), axis=1).max() <= 1
    assert gpu_check.machine()["states"] == "bundled teacher"
    assert 0.1 < (problem.hidden_Nd @ problem.atoms_Kd.T).max(1).mean() < 0.99, "states that are alike, not equal"


def test_a_lifted_problem_is_the_same_one():
    narrow, wide = toy_problem(), toy_problem().lifted(48)
    assert wide.hidden_Nd.shape == (96, 48) and wide.atoms_Kd.dtype == np.float32
    assert np.linalg.norm(wide.atoms_Kd.astype(float), axis=1).max() <= 1
    np.testing.assert_allclose(wide.atoms_Kd @ wide.atoms_Kd.T, narrow.atoms_Kd @ narrow.atoms_Kd.T, atol=1e-6)
    codes = [nonneg_lasso(p.hidden_Nd.astype(np.float32), p.atoms_Kd, 0.05, tol=1e-5).dense(40) for p in (narrow, wide)]
    np.testing.assert_allclose(*codes, atol=1e-3)


def test_each_part_fits_into_nine_minutes():
    for part in PARTS:
        assert sum(entry.seconds for entry in ITEMS.values() if entry.part == part) <= gpu_check.PART_SECONDS


def test_an_item_has_a_process_of_its_own_and_a_limit(monkeypatch):
    processes = []

    def start(command, **settings):  # forked from a process that has imported the libraries
        processes.append(Preloaded(command[1:], **settings))
        return processes[-1]

    preloaded = SimpleNamespace(Popen=start, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(gpu_check, "subprocess", preloaded)
    found = gpu_check.run_alone("synccheck", TOY, 120)
    assert found["status"] == "skipped: needs a GPU" and found["measurement"] == {}
    found = gpu_check.run_alone("synccheck", TOY, gpu_check.LEAST_SECONDS / 100)
    assert found["status"] == "skipped: the time of the part is over"
    assert [process.returncode for process in processes] == [0]


def test_what_hangs_is_ended_and_what_it_measured_stays(monkeypatch):
    def hang(command, **settings):
        into = command[command.index("--child") + 1]
        found = json.dumps({"measurement": {"a": 1}, "status": None})
        program = f"import time; open({into!r}, 'w').write({found!r}); time.sleep(60)"
        return popen([sys.executable, "-c", program], **settings)

    popen = subprocess.Popen
    monkeypatch.setattr(gpu_check.subprocess, "Popen", hang)
    found = gpu_check.run_alone("ceilings", TOY, gpu_check.LEAST_SECONDS)
    assert found["status"] == "timed out after 5 s" and found["measurement"] == {"a": 1} and found["seconds"] < 30


def test_what_crashes_says_its_last_line(monkeypatch):
    popen = subprocess.Popen
    crash = [sys.executable, "-c", "import os, sys; print('out of luck', file=sys.stderr, flush=True); os._exit(7)"]
    monkeypatch.setattr(gpu_check.subprocess, "Popen", lambda command, **settings: popen(crash, **settings))
    found = gpu_check.run_alone("ceilings", TOY, 60)
    assert found["status"] == "failed: it ended with code 7: out of luck" and found["measurement"] == {}


def test_an_entry_is_replaced_and_others_stay(tmp_path, monkeypatch):
    def work(setting):
        yield {"one": 1}
        yield {"two": 2}
        raise AssertionError("three is\nmissing") if setting.toy else Skip("enough")

    monkeypatch.setitem(ITEMS, "made_up", Item("solve", 1, {"one": 2}, work))
    output = tmp_path / "figures.json"
    for toy, status, code in ((True, "failed: AssertionError: three is missing", 1), (False, "skipped: enough", 0)):
        assert gpu_check.run_here("made_up", Setting(TOY.device, toy), tmp_path / "found.json") == code
        found = json.loads((tmp_path / "found.json").read_text())
        assert found == {"measurement": {"one": 1, "two": 2}, "status": status}
        gpu_check.record(output, "made_up", found | {"seconds": 0.5})
        gpu_check.record(output, "fista", found | {"seconds": 0.5})
    whole = json.loads(output.read_text())
    assert whole["items"].keys() == {"made_up", "fista"} and whole["items"]["made_up"]["status"] == "skipped: enough"
    assert whole["items"]["made_up"]["prediction"] == {"one": 2}
    assert whole["items"]["made_up"]["conditions"]["torch"] == version("torch")


def test_without_a_gpu_everything_is_skipped_at_once(tmp_path, capsys):
    names = [name for name, entry in ITEMS.items() if entry.part == "train"]
    statuses = gpu_check.run_part(names, Setting(TOY.device, toy=False), tmp_path / "figures.json")
    assert statuses == dict.fromkeys(names, "skipped: needs a GPU")
    assert json.loads((tmp_path / "figures.json").read_text())["items"].keys() == statuses.keys()
    assert len(capsys.readouterr().out.splitlines()) == len(names)
