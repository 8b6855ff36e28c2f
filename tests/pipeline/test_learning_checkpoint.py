"""Interrupted dictionary learning resumes with the same bits, or starts again and reports it."""

import json
import logging
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from planted import planted
from preloaded import Python, run_python

from mlsm.common import disk
from pipeline.dictionary import DictionarySettings, LearningSchedule, learn_dictionary, learning
from pipeline.dictionary import checkpoint as learning_checkpoint

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = DictionarySettings(k=40, lam=0.05, seed=1)
LONG = LearningSchedule(epochs=6, batch=256, min_improvement=0, evaluate_every=1024)


def fail_after(vectors):
    def progress(stage, done, total, **figures):
        if done >= vectors:
            raise KeyboardInterrupt

    return progress


@pytest.fixture
def save_always(monkeypatch):
    monkeypatch.setattr(learning_checkpoint, "SECONDS_BETWEEN", 0)


@pytest.fixture
def interrupted(save_always, tmp_path):
    """The checkpoint of a learning that was interrupted between two evaluations."""
    hidden, _ = planted()
    with pytest.raises(KeyboardInterrupt):
        learn_dictionary(hidden, SETTINGS, LONG, checkpoint=tmp_path / "work", progress=fail_after(8000))
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["learning.npz"]
    return tmp_path / "work"


@pytest.fixture(scope="module")
def unbroken():
    return learn_dictionary(planted()[0], SETTINGS, LONG)


def first_position(checkpoint, settings=SETTINGS, schedule=LONG, hidden=None, **rest):
    """Vectors done at the first report of a learning with this checkpoint, and what it learned."""
    calls = []
    found = learn_dictionary(
        planted()[0] if hidden is None else hidden,
        settings,
        schedule,
        checkpoint=checkpoint,
        **rest,
        progress=lambda stage, done, *_, **figures: calls.append(done),
    )
    return calls[0] if calls else None, found


@pytest.mark.parametrize(
    ("schedule", "batch", "epochs", "evaluate_every", "min_improvement"),
    [(LearningSchedule(), "400", "2.0", "65536", "0.0003"), (replace(LONG, epochs=1), "256", "1", "1024", "0")],
)
def test_what_a_learning_is_known_by_has_the_same_bytes_as_ever(
    tmp_path, schedule, batch, epochs, evaluate_every, min_improvement
):
    """Checkpoints and dictionary.json of earlier versions are told apart by these."""
    found = learn_dictionary(planted(500)[0], SETTINGS, schedule, checkpoint=tmp_path)
    assert json.dumps(found.settings) == (
        f'{{"k": 40, "lam": 0.05, "seed": 1, "epochs": {epochs}, "init": "sample", "batch": {batch}, '
        f'"forgetting": 4.0, "min_improvement": {min_improvement}, "evaluate_every": {evaluate_every}, '
        '"vectors": 450, "held_out": 50}'
    )
    with np.load(tmp_path / "learning.npz") as stored:
        request = str(stored["request"])
    assert request.startswith(
        f'{{"algorithm": 2, "device": "cpu", "format": 1, "settings": {{"batch": {batch}, "epochs": {epochs}, '
        f'"evaluate_every": {evaluate_every}, "forgetting": 4.0, "init": "sample", "k": 40, "lam": 0.05, '
        f'"min_improvement": {min_improvement}, "seed": 1}}, "vectors": "'
    )


def test_interrupted_and_resumed_equals_unbroken(interrupted, unbroken):
    position, found = first_position(interrupted)
    assert 6000 < position <= 8000 + 256
    assert found.fingerprint == unbroken.fingerprint
    assert (found.history, found.stopped, found.settings) == (unbroken.history, unbroken.stopped, unbroken.settings)


def test_a_finished_learning_is_not_done_again(interrupted, unbroken):
    first_position(interrupted)
    position, found = first_position(interrupted)
    assert position is None and found.fingerprint == unbroken.fingerprint and found.stopped == unbroken.stopped


def test_killed_and_resumed_equals_unbroken(tmp_path):
    np.save(tmp_path / "hidden.npy", planted()[0])
    code = """
import os, signal, sys
from mlsm.common import disk
from pipeline.dictionary import checkpoint as learning_checkpoint
from pipeline.dictionary import DictionarySettings, LearningSchedule, learn_dictionary
learning_checkpoint.SECONDS_BETWEEN = 0
def progress(stage, done, *_, **figures):
    print(done, flush=True)
    if done > int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
schedule = LearningSchedule(epochs=6, batch=256, min_improvement=0, evaluate_every=1024)
print(learn_dictionary(sys.argv[1] + "/hidden.npy", DictionarySettings(40, 0.05, seed=1), schedule,
                       checkpoint=sys.argv[1] + "/" + sys.argv[3], progress=progress).fingerprint)
"""

    def learn(kill_after, place, **how):
        return run_python(["-c", code, tmp_path, kill_after, place], **how)

    assert learn(5000, "a").returncode == -signal.SIGKILL
    resumed, unbroken = learn(10**9, "a"), learn(10**9, "b", process=Python)
    assert int(resumed.stdout.split()[0]) > 4000 and int(unbroken.stdout.split()[0]) == 256
    assert resumed.stdout.split()[-1] == unbroken.stdout.split()[-1] and len(resumed.stdout.split()[-1]) == 64


@pytest.mark.parametrize(
    "change",
    [
        {"settings": replace(SETTINGS, lam=0.06)},
        {"settings": replace(SETTINGS, seed=2)},
        {"settings": replace(SETTINGS, k=39)},
        {"settings": replace(SETTINGS, init="kmeans")},
        {"schedule": replace(LONG, epochs=7)},
        {"hidden": planted(seed=3)[0]},
        {"hidden": planted(2999)[0]},
        {"held_out_Hd": planted(50)[0]},
    ],
)
def test_another_request_starts_afresh(interrupted, change, caplog):
    caplog.set_level(logging.INFO, "pipeline")
    position, _ = first_position(interrupted, **change)
    assert position == 256 and "other settings or vectors" in caplog.text


def test_another_algorithm_starts_afresh(interrupted, monkeypatch):
    monkeypatch.setattr(learning, "ALGORITHM", -1)
    assert first_position(interrupted)[0] == 256


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1000]),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"no archive"),
        lambda path: path.write_bytes(
            path.read_bytes().replace(b"\0\0\x80\x3f", b"\0\0\x80\x40")[:5000] + b"garbage" + path.read_bytes()[5007:]
        ),
        lambda path: np.savez(path, request=np.array("{}")),
    ],
)
def test_a_damaged_checkpoint_starts_afresh(interrupted, damage, unbroken, caplog):
    caplog.set_level(logging.INFO, "pipeline")
    damage(interrupted / "learning.npz")
    position, found = first_position(interrupted)
    assert position == 256 and "is damaged" in caplog.text and found.fingerprint == unbroken.fingerprint


def test_saves_are_rare(tmp_path, monkeypatch):
    saves = []
    monkeypatch.setattr(learning_checkpoint.Checkpoint, "save", lambda *_: saves.append(1))
    first_position(tmp_path / "work")
    assert len(saves) == 1  # the one at the end


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(("seconds", "left"), [(0, ["learning.npz"]), (60, [])])  # 60: only the one at the end
def test_a_full_disk_costs_the_checkpoint_not_the_learning(tmp_path, unbroken, caplog, monkeypatch, seconds, left):
    monkeypatch.setattr(learning_checkpoint, "SECONDS_BETWEEN", seconds)
    caplog.set_level(logging.INFO, "pipeline")

    full = []  # the next file is on a full disk

    def fill_the_disk(*_, **figures):
        full[:] = [True]

    def create(path):
        if not full:
            return open(path, "xb", buffering=0)
        full.clear()
        path.symlink_to("/dev/full")
        return open(path, "wb", buffering=0)

    monkeypatch.setattr(disk, "create", create)
    found = learn_dictionary(planted()[0], SETTINGS, LONG, checkpoint=tmp_path, progress=fill_the_disk)
    assert found.fingerprint == unbroken.fingerprint and [path.name for path in tmp_path.iterdir()] == left
    assert caplog.text.count("could not be written (No space left") == (1 if seconds else len(found.history))


def test_torch_learner_goes_through_the_whole_loop_and_resumes(monkeypatch, save_always, tmp_path):
    from pipeline.dictionary import learning as module
    from pipeline.dictionary.torch import TorchLearner
    from pipeline.solvers import proof

    hidden, _ = planted()
    reference = learn_dictionary(hidden, SETTINGS, LONG)
    monkeypatch.setattr(module, "_device", lambda device: device)
    monkeypatch.setattr(proof, "is_needed", lambda device: False)
    monkeypatch.setattr(TorchLearner, "__init__", on_cpu(TorchLearner.__init__))
    unbroken = learn_dictionary(hidden, SETTINGS, LONG, device="cpu:0")
    assert unbroken.history[-1]["objective"] == pytest.approx(reference.history[-1]["objective"], rel=0.02)
    with pytest.raises(KeyboardInterrupt):
        learn_dictionary(hidden, SETTINGS, LONG, device="cpu:0", checkpoint=tmp_path, progress=fail_after(8000))
    position, found = first_position(tmp_path, hidden=hidden, device="cpu:0")
    assert position > 6000 and found.fingerprint == unbroken.fingerprint


def on_cpu(initialise):
    return lambda self, atoms, lam, forgetting, device, backend: initialise(self, atoms, lam, forgetting, "cpu")
