"""Stores and dictionaries whose solver is proven first, as on a GPU: what their records say, and what a resume does.

Played on the CPU: real children, in which solvers are right or crash; the CPU's solver stands in for the kernels.
"""

import json
import logging
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from planted import planted as vectors
from preloaded import SUBPROCESS
from tiny_teacher import lsp_settings

from mlsm.common import proofs
from pipeline.commands import encode_lsp
from pipeline.dictionary import DictionarySettings, LearningSchedule, learn_dictionary, learning
from pipeline.dictionary import checkpoint as learning_checkpoint
from pipeline.solvers import proof
from shards.reader import Store

sys.path.append(str(Path(__file__).resolve().parent / "solvers"))  # where a child finds planted_trial.py

RIGHT, CRASHES = "torch=right cuda=crash", "torch=crash cuda=crash"


@pytest.fixture
def prove(monkeypatch, tmp_path):
    """Lets solvers be proven on the CPU, by a child in which they do what is planted; each plan has its own cache."""
    monkeypatch.setattr(proof, "is_needed", lambda device: True)
    monkeypatch.setattr(proof, "TRIAL", "planted_trial")
    monkeypatch.setattr(proofs, "subprocess", SUBPROCESS)
    monkeypatch.setattr(proof, "ROWS", 32)
    monkeypatch.setattr(proof, "_said", set())

    def plant(does):
        monkeypatch.setattr(proof, "_proven", {})  # as in a new process
        monkeypatch.setenv("MLSM_PLANTED", does)
        monkeypatch.setenv("MLSM_CACHE", str(tmp_path / does.replace(" ", "-")))

    return plant


@pytest.fixture
def place(tmp_path, english_text, teacher_directory):
    return lsp_settings(
        tmp_path,
        teacher_directory,
        english_text,
        tmp_path / "runs",
        atoms=60,
        k=60,
        max_length=48,
        max_tokens=3_000,
        unit_tokens=1_000,
        batch_tokens=1024,
    )


def solvers(report):
    """What the records of a store's units name, by the ids of the units."""
    records = Store.open(report["store"]).iter_records()
    return [record.environment.get("solver_backend") for record in sorted(records, key=lambda record: record.unit)]


def remove_last_unit(report):
    units = Path(report["store"]) / "units"
    path = sorted(units.glob("*.json"))[-1]
    file = json.loads(path.read_text())["file"]
    path.unlink()
    (units / file).unlink()


def test_records_name_the_solver_that_was_proven_and_a_resume_keeps_it(prove, place, caplog):
    prove(CRASHES)
    with caplog.at_level(logging.INFO, "pipeline"):
        (report,) = encode_lsp(place)
    found = solvers(report)
    assert len(found) > 1 and set(found) == {"cpu"}
    (said,) = [text for text in caplog.messages if "sparse coding on" in text]
    assert "the CPU: neither the CUDA kernels" in said
    remove_last_unit(report)
    prove(RIGHT)
    assert solvers(encode_lsp(place)[0]) == found, "plain torch is right now, and not what the store was begun with"


def test_a_solver_taken_for_lack_of_memory_does_not_bind_the_store(prove, place):
    """Otherwise a GPU that was busy at its beginning would leave it with the slower solver for ever."""
    prove("torch=right cuda=lack_memory")
    (report,) = encode_lsp(place)
    found = solvers(report)
    assert set(found) == {"torch"}
    remove_last_unit(report)
    prove("torch=crash cuda=crash")
    assert solvers(encode_lsp(place)[0]) == [*found[:-1], "cpu"]
    remove_last_unit(report)
    prove(RIGHT)
    assert solvers(encode_lsp(place)[0]) == found, "the first unit still does not bind it"


def test_what_is_not_kept_is_proven_once_in_a_process(prove, caplog):
    """The first call's half a minute would otherwise be in the seconds that --dry-run measures of the second."""
    prove("torch=right cuda=lack_memory")
    hidden_Nd, atoms_Kd = vectors()
    with caplog.at_level(logging.INFO, "pipeline"):
        first, second = (proof.choose_solver(hidden_Nd[:32], atoms_Kd, 0.1, torch.device("cpu")) for _ in range(2))
    assert first == second and not first.keep and caplog.text.count("trying the solvers") == 1


def test_a_resume_on_a_gpu_that_cannot_go_on_says_so(prove, place, caplog):
    prove(RIGHT)
    (report,) = encode_lsp(place)
    assert set(solvers(report)) == {"torch"}
    remove_last_unit(report)
    prove(CRASHES)
    with caplog.at_level(logging.WARNING, "pipeline"):
        found = solvers(encode_lsp(place)[0])
    assert found[:-1] == ["torch"] * (len(found) - 1) and found[-1] == "cpu"
    assert [text for text in caplog.messages if "was begun with plain torch, which cannot be used here" in text]


def test_the_name_of_a_store_and_its_codes_do_not_depend_on_the_proof(prove, place, tmp_path):
    prove(RIGHT)
    (proven,) = encode_lsp(place)
    (usual,) = encode_lsp(replace(place, solver_backend="torch", output=tmp_path / "usual"))
    assert Path(proven["store"]).name == Path(usual["store"]).name
    theirs, ours = (Store.open(report["store"]) for report in (usual, proven))
    assert [record.sha256 for record in theirs.iter_records()] == [record.sha256 for record in ours.iter_records()]


def test_a_dictionary_is_learned_with_the_proven_solver_and_says_so(prove, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(learning, "_device", lambda device: "cpu:0")  # a device that is not called "cpu"
    monkeypatch.setattr(learning_checkpoint, "SECONDS_BETWEEN", 0)
    hidden, _ = vectors()
    settings, schedule = DictionarySettings(k=40, lam=0.05, seed=1), LearningSchedule(3, 256, 0, 1024)

    def interrupt(stage, done, total, **figures):
        if done >= 5000:
            raise KeyboardInterrupt

    prove(RIGHT)
    unbroken = learn_dictionary(hidden, settings, schedule)
    assert unbroken.settings["solver_backend"] == "torch"
    with pytest.raises(KeyboardInterrupt):
        learn_dictionary(hidden, settings, schedule, checkpoint=tmp_path / "work", progress=interrupt)
    prove("torch=right cuda=right")  # another answer may be found now; the checkpoint was begun with torch
    resumed = learn_dictionary(hidden, settings, schedule, checkpoint=tmp_path / "work")
    assert resumed.settings["solver_backend"] == "torch"
    np.testing.assert_array_equal(resumed.atoms_Kd, unbroken.atoms_Kd)
