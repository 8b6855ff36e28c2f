"""Dictionary learning: the algorithm against plain NumPy, what it promises, and its files."""

import json
import logging
import os
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from data import bench_file

from pipeline import learning_checkpoint
from pipeline.dictionary import Dictionary, DictionaryError, learn_dictionary
from pipeline.learner_cpu import CpuLearner
from pipeline.solvers import nonneg_lasso
from pipeline.solvers.problem import objective

ROOT = Path(__file__).resolve().parents[2]


def unit_rows(array):
    return (array / np.linalg.norm(array, axis=1, keepdims=True)).astype(np.float32)


def planted(vectors=3000, width=24, atoms=40, seed=0):
    """Vectors that are sums of three of the planted atoms with a little noise, and these atoms."""
    rng = np.random.default_rng(seed)
    truth = unit_rows(rng.normal(size=(atoms, width)))
    chosen = np.array([rng.choice(atoms, 3, replace=False) for _ in range(vectors)])
    hidden = (rng.uniform(0.3, 1, (vectors, 3, 1)) * truth[chosen]).sum(1)
    return unit_rows(hidden + 0.01 * rng.normal(size=(vectors, width))), truth


@pytest.fixture(scope="module")
def learned():
    hidden, _ = planted()
    return learn_dictionary(hidden, 40, 0.05, seed=1, epochs=8, batch=256)


def test_objective_falls_and_atoms_stay_in_the_unit_ball(learned):
    values = [entry["objective"] for entry in learned.history]
    assert values[-1] < values[0] < 0.5
    assert learned.atoms_Kd.dtype == np.float32 and learned.atoms_Kd.shape == (40, 24)
    assert np.linalg.norm(learned.atoms_Kd, axis=1).max() <= 1 + 1e-6
    assert all(set(entry) == {"vectors", "epoch", "objective", "nnz", "explained_variance", "dead_atoms"}
               for entry in learned.history)


def test_planted_atoms_are_nearly_found(learned):
    hidden, truth = planted(500, seed=0)
    found, best = (objective(hidden, atoms, nonneg_lasso(hidden, atoms, 0.05), 0.05).mean()
                   for atoms in (learned.atoms_Kd, truth))
    assert found < 1.1 * best


def test_history_says_what_the_returned_atoms_reach():
    hidden, _ = planted()
    held_out, _ = planted(200, seed=5)
    found = learn_dictionary(hidden, 30, 0.05, seed=0, held_out_Hd=3 * held_out, epochs=2, batch=256)
    codes = nonneg_lasso(held_out, found.atoms_Kd, 0.05)
    best = min(found.history, key=lambda entry: entry["objective"])
    reached = objective(held_out, found.atoms_Kd, codes, 0.05).mean()
    assert best["objective"] == pytest.approx(reached, rel=1e-5)
    residual = held_out - codes.dense(30) @ found.atoms_Kd
    explained = 1 - (residual ** 2).sum() / ((held_out - held_out.mean(0)) ** 2).sum()
    assert best["explained_variance"] == pytest.approx(explained, rel=1e-3)
    assert best["nnz"] == pytest.approx(len(codes.values) / 200)
    assert found.settings["vectors"] == 3000 and found.settings["held_out"] == 200


def test_same_seed_same_bytes_another_seed_another_dictionary(learned):
    hidden, _ = planted()
    again = learn_dictionary(hidden, 40, 0.05, seed=1, epochs=8, batch=256)
    assert again.fingerprint == learned.fingerprint and again.history == learned.history
    other = learn_dictionary(hidden, 40, 0.05, seed=2, epochs=8, batch=256)
    assert other.fingerprint != learned.fingerprint


def test_kmeans_start():
    hidden, _ = planted()
    found = learn_dictionary(hidden, 40, 0.05, seed=1, epochs=1, batch=256, init="kmeans")
    again = learn_dictionary(hidden, 40, 0.05, seed=1, epochs=1, batch=256, init="kmeans")
    assert found.fingerprint == again.fingerprint
    assert found.history[0]["objective"] < 0.2


def test_file_of_half_floats_is_read_as_it_is_needed(tmp_path):
    hidden = np.random.default_rng(0).normal(size=(60_000, 128)).astype(np.float16)
    np.save(tmp_path / "hidden.npy", hidden)
    from_array = learn_dictionary(hidden, 16, 0.2, seed=0, epochs=0.1, batch=512)
    del hidden
    tracemalloc.start()
    from_file = learn_dictionary(tmp_path / "hidden.npy", 16, 0.2, seed=0, epochs=0.1, batch=512)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert from_file.fingerprint == from_array.fingerprint
    assert peak < (tmp_path / "hidden.npy").stat().st_size / 2


def test_unused_atoms_are_replaced_and_counted():
    """Rows of zeros that are sampled as atoms can never be used."""
    hidden, _ = planted()
    hidden[1000:] = 0
    found = learn_dictionary(hidden, 40, 0.05, seed=0, epochs=4, batch=256, min_improvement=0)
    dead = [entry["dead_atoms"] for entry in found.history]
    assert dead[0] > 20 and dead[-1] <= 2
    assert found.history[-1]["objective"] < 0.8 * found.history[0]["objective"]
    assert np.linalg.norm(found.atoms_Kd, axis=1).min() > 0.5


def test_learning_stops_for_a_reason_that_is_kept():
    hidden, _ = planted()
    done = learn_dictionary(hidden, 10, 0.05, seed=0, epochs=1.5, min_improvement=0)
    assert done.stopped == "epochs: 1.5 passes over 2,700 vectors are done"
    assert done.history[-1]["vectors"] == 4050
    early = learn_dictionary(hidden, 10, 0.05, seed=0, epochs=50, min_improvement=0.01)
    assert early.stopped.startswith("converged") and early.history[-1]["epoch"] < 50


def test_progress_reports_vectors_and_figures():
    calls = []
    hidden, _ = planted()
    learn_dictionary(hidden, 10, 0.05, seed=0, epochs=2, batch=900, evaluate_every=900,
                     progress=lambda *args, **figures: calls.append((args, figures)))
    assert [args for args, _ in calls] == [("dictionary", done, 5400) for done in range(900, 5401, 900)]
    assert all(figures["unit"] == "vectors" and figures["objective"] > 0 for _, figures in calls)


def test_atom_update_is_one_atom_after_the_other():
    """Algorithm 2 of the paper, against its plain form; the groups are an implementation detail."""
    rng = np.random.default_rng(0)
    learner = CpuLearner(unit_rows(rng.normal(size=(150, 20))), 0.05, 1.0)
    codes = np.abs(rng.normal(size=(400, 150))) * (rng.random((400, 150)) < 0.1)
    codes[:, 7] = 0                                             # an atom without a use stays as it is
    learner.code_code_KK[:] = codes.T @ codes
    learner.code_hidden_Kd[:] = codes.T @ unit_rows(rng.normal(size=(400, 20)))
    expected = learner.atoms_Kd.astype(float)
    for j in range(150):
        if codes[:, j].any():
            step = learner.code_hidden_Kd[j] - learner.code_code_KK[j] @ expected
            new = expected[j] + step / learner.code_code_KK[j, j]
            expected[j] = new / max(1, np.linalg.norm(new))
    learner._update_atoms()
    np.testing.assert_allclose(learner.atoms_Kd, expected, atol=1e-4)


def test_sums_against_their_dense_formula():
    hidden, _ = planted(300)
    learner = CpuLearner(unit_rows(np.random.default_rng(0).normal(size=(50, 24))), 0.05, 1.0)
    codes = nonneg_lasso(hidden, learner.atoms_Kd, 0.05)
    learner._accumulate(hidden, codes, np.float32(0))
    learner._accumulate(hidden, codes, np.float32(0.25))
    dense = codes.dense(50)
    np.testing.assert_allclose(learner.code_code_KK, 1.25 * dense.T @ dense, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(learner.code_hidden_Kd, 1.25 * dense.T @ hidden, rtol=1e-4, atol=1e-5)


def test_gram_matrix_in_blocks_is_the_product():
    atoms = unit_rows(np.random.default_rng(0).normal(size=(300, 20)))
    np.testing.assert_allclose(CpuLearner(atoms, 0.05, 1.0).gram_KK, atoms @ atoms.T, atol=1e-6)


def test_thread_count_does_not_change_the_atoms(tmp_path):
    hidden, _ = planted(width=130)
    np.save(tmp_path / "hidden.npy", hidden)
    code = ("import sys; from pipeline.dictionary import learn_dictionary\n"
            "print(learn_dictionary(sys.argv[1], 300, 0.05, seed=0, epochs=1, batch=512).fingerprint)")
    prints = {subprocess.run([sys.executable, "-c", code, tmp_path / "hidden.npy"], cwd=ROOT, text=True, check=True,
                             env=os.environ | {"NUMBA_NUM_THREADS": threads}, capture_output=True).stdout
              for threads in ("1", "2", "3")}
    assert len(prints) == 1


def test_double_precision_vectors_are_accepted():
    hidden, _ = planted(500)
    double = learn_dictionary(hidden.astype(np.float64), 20, 0.05, seed=0, batch=256)
    single = learn_dictionary(hidden, 20, 0.05, seed=0, batch=256)
    np.testing.assert_allclose(double.atoms_Kd, single.atoms_Kd, atol=1e-3)
    large = learn_dictionary(1e30 * hidden.astype(np.float64), 20, 0.05, seed=0, batch=256)
    assert large.atoms_Kd.dtype == np.float32
    assert large.history[-1]["objective"] == pytest.approx(double.history[-1]["objective"], rel=1e-2)
    with pytest.raises(ValueError, match="must be float16, float32, float64; found int64"):
        learn_dictionary(np.ones((50, 4), int), 5, 0.05, seed=0)


def test_real_vectors_beat_sampled_atoms_soon():
    hidden = np.load(bench_file("hidden_train_32768x384_f16.npy"), mmap_mode="r")[:8192]
    held_out = np.load(bench_file("hidden_test_8192x384_f16.npy"))[:256]
    found = learn_dictionary(hidden, 512, 0.05, seed=0, held_out_Hd=held_out, epochs=2, batch=1024)
    start = unit_rows(hidden[:512].astype(np.float32))
    unit = unit_rows(held_out.astype(np.float32))
    sampled = objective(unit, start, nonneg_lasso(unit, start, 0.05), 0.05).mean()
    assert found.history[-1]["objective"] < 0.85 * sampled


def test_too_few_vectors_are_refused_with_the_numbers():
    hidden, _ = planted(100)
    numbers = "k = 95 atoms need at least as many training vectors; found 90, with 10 more held out"
    with pytest.raises(ValueError, match=numbers):
        learn_dictionary(hidden, 95, 0.05, seed=0)
    with pytest.raises(ValueError, match="found 0"):
        learn_dictionary(hidden[:0], 5, 0.05, seed=0)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused_with_their_rows(value):
    hidden, _ = planted(200)
    hidden[[17, 130], 3] = value
    with pytest.raises(ValueError, match="training vectors: NaN or infinity in row (17|130)"):
        learn_dictionary(hidden, 20, 0.05, seed=0)


def test_other_nonsense_is_refused():
    hidden, _ = planted(200)
    for wrong, message in [({"lam": 0}, "lam must be positive"), ({"epochs": -1}, "epochs must be positive"),
                           ({"init": "zeros"}, "init must be"),
                           ({"held_out_Hd": hidden[:0]}, "held-out vectors"),
                           ({"held_out_Hd": hidden[:, :3]}, "held-out vectors")]:
        with pytest.raises(ValueError, match=message):
            learn_dictionary(hidden, 20, **{"lam": 0.05, "seed": 0, **wrong})
    with pytest.raises(ValueError, match="shape"):
        learn_dictionary(hidden[0], 20, 0.05, seed=0)


# -- interruption --------------------------------------------------------------------------------------------


LONG = {"epochs": 6, "batch": 256, "evaluate_every": 1024, "min_improvement": 0}


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
        learn_dictionary(hidden, 40, 0.05, seed=1, checkpoint=tmp_path / "work", progress=fail_after(8000), **LONG)
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["learning.npz"]
    return tmp_path / "work"


@pytest.fixture(scope="module")
def unbroken():
    return learn_dictionary(planted()[0], 40, 0.05, seed=1, **LONG)


def first_position(checkpoint, hidden=None, **settings):
    """Vectors done at the first report of a learning with this checkpoint, and what it learned."""
    calls = []
    arguments = {"k": 40, "lam": 0.05, "seed": 1, **LONG, **settings}
    found = learn_dictionary(planted()[0] if hidden is None else hidden, checkpoint=checkpoint, **arguments,
                             progress=lambda stage, done, *_, **figures: calls.append(done))
    return calls[0] if calls else None, found


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
from pipeline import learning_checkpoint
from pipeline.dictionary import learn_dictionary
learning_checkpoint.SECONDS_BETWEEN = 0
def progress(stage, done, *_, **figures):
    print(done, flush=True)
    if done > int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
print(learn_dictionary(sys.argv[1] + "/hidden.npy", 40, 0.05, seed=1, checkpoint=sys.argv[1] + "/" + sys.argv[3],
                       progress=progress, epochs=6, batch=256, evaluate_every=1024, min_improvement=0).fingerprint)
"""
    def learn(kill_after, place):
        return subprocess.run([sys.executable, "-c", code, tmp_path, str(kill_after), place], cwd=ROOT, text=True,
                              capture_output=True)
    assert learn(5000, "a").returncode == -signal.SIGKILL
    resumed, unbroken = learn(10**9, "a"), learn(10**9, "b")
    assert int(resumed.stdout.split()[0]) > 4000 and int(unbroken.stdout.split()[0]) == 256
    assert resumed.stdout.split()[-1] == unbroken.stdout.split()[-1] and len(resumed.stdout.split()[-1]) == 64


@pytest.mark.parametrize("change", [{"lam": 0.06}, {"seed": 2}, {"k": 39}, {"epochs": 7}, {"init": "kmeans"},
                                    {"hidden": planted(seed=3)[0]}, {"hidden": planted(2999)[0]},
                                    {"held_out_Hd": planted(50)[0]}])
def test_another_request_starts_afresh(interrupted, change, caplog):
    caplog.set_level(logging.INFO, "pipeline")
    position, _ = first_position(interrupted, **change)
    assert position == 256 and "other settings or vectors" in caplog.text


@pytest.mark.parametrize("damage", [
    lambda path: path.write_bytes(path.read_bytes()[:-1000]),
    lambda path: path.write_bytes(b""),
    lambda path: path.write_bytes(b"no archive"),
    lambda path: path.write_bytes(path.read_bytes().replace(b"\0\0\x80\x3f", b"\0\0\x80\x40")
                                  [:5000] + b"garbage" + path.read_bytes()[5007:]),
    lambda path: np.savez(path, request=np.array("{}")),
])
def test_a_damaged_checkpoint_starts_afresh(interrupted, damage, unbroken, caplog):
    caplog.set_level(logging.INFO, "pipeline")
    damage(interrupted / "learning.npz")
    position, found = first_position(interrupted)
    assert position == 256 and "is damaged" in caplog.text and found.fingerprint == unbroken.fingerprint


def test_saves_are_rare(tmp_path, monkeypatch):
    saves = []
    monkeypatch.setattr(learning_checkpoint.Checkpoint, "save", lambda *_: saves.append(1))
    first_position(tmp_path / "work")
    assert len(saves) == 1                                      # the one at the end


def test_a_workplace_is_for_one_and_goes_when_done(tmp_path):
    place = tmp_path / "deep" / "place"
    with learning_checkpoint.workplace(place):
        (place / "something").touch()
        with pytest.raises(ValueError, match="another process is learning"), learning_checkpoint.workplace(place):
            pass
    assert not place.exists()
    with pytest.raises(KeyError), learning_checkpoint.workplace(place):
        (place / "something").touch()
        raise KeyError
    assert (place / "something").exists()


# -- in torch operations -------------------------------------------------------------------------------------


def copied(state):
    return {name: array.copy() for name, array in state.items()}


def test_torch_learner_equals_the_numba_learner(monkeypatch):
    from pipeline import learner_cpu, learner_torch
    from pipeline.learner_torch import TorchLearner

    for module in (learner_cpu, learner_torch):         # else codes may differ by their tolerance
        monkeypatch.setattr(module, "KKT_TOLERANCE", 1e-5)
    hidden, _ = planted(2000)
    atoms = unit_rows(np.random.default_rng(1).normal(size=(150, 24)))
    atoms[7] = 0                                                # never used, then replaced
    numba = CpuLearner(atoms, 0.05, 4.0)
    for start in range(0, 1500, 500):           # step by step: codes of many steps drift apart by rounding
        torch = TorchLearner.from_state(copied(numba.state()), 0.05, 4.0, "cpu")
        for learner in (numba, torch):
            learner.step(hidden[start:start + 500])
        for name, array in numba.state().items():
            np.testing.assert_allclose(torch.state()[name], array, atol=1e-3, err_msg=name)
    assert (numba.uses_K == 0).sum() == (torch.uses_K == 0).sum() >= 1
    for learner in (numba, torch):
        learner.replace_unused(hidden[1500:])
        assert (np.linalg.norm(learner.atoms(), axis=1) > 0.5).all() and not learner.uses_K.any()
    np.testing.assert_allclose(torch.atoms()[7], numba.atoms()[7], atol=1e-6)


def test_torch_update_is_one_atom_after_the_other():
    from pipeline.learner_torch import TorchLearner

    rng = np.random.default_rng(0)
    learner = CpuLearner(unit_rows(rng.normal(size=(150, 20))), 0.05, 1.0)
    codes = (np.abs(rng.normal(size=(400, 150))) * (rng.random((400, 150)) < 0.1)).astype(np.float32)
    codes[:, 7] = 0
    learner.code_code_KK[:] = codes.T @ codes
    learner.code_hidden_Kd[:] = codes.T @ unit_rows(rng.normal(size=(400, 20)))
    other = TorchLearner.from_state(copied(learner.state()), 0.05, 1.0, "cpu")
    learner._update_atoms()
    other._update_atoms()
    np.testing.assert_allclose(other.atoms(), learner.atoms(), atol=1e-5)


def test_torch_learner_goes_through_the_whole_loop_and_resumes(monkeypatch, save_always, tmp_path):
    from pipeline import dictionary as module
    from pipeline.learner_torch import TorchLearner

    hidden, _ = planted()
    reference = learn_dictionary(hidden, 40, 0.05, seed=1, **LONG)
    monkeypatch.setattr(module, "_device", lambda device: device)
    monkeypatch.setattr(TorchLearner, "__init__", on_cpu(TorchLearner.__init__))
    unbroken = learn_dictionary(hidden, 40, 0.05, seed=1, device="torch", **LONG)
    assert unbroken.history[-1]["objective"] == pytest.approx(reference.history[-1]["objective"], rel=0.02)
    with pytest.raises(KeyboardInterrupt):
        learn_dictionary(hidden, 40, 0.05, seed=1, device="torch", checkpoint=tmp_path, progress=fail_after(8000),
                         **LONG)
    position, found = first_position(tmp_path, hidden, device="torch")
    assert position > 6000 and found.fingerprint == unbroken.fingerprint


def on_cpu(initialise):
    return lambda self, atoms, lam, forgetting, device: initialise(self, atoms, lam, forgetting, "cpu")


# -- files ---------------------------------------------------------------------------------------------------


def test_what_is_saved_is_what_is_loaded(learned, tmp_path):
    learned.save(tmp_path / "deep" / "atoms")
    loaded = Dictionary.load(tmp_path / "deep" / "atoms")
    assert (loaded.atoms_Kd == learned.atoms_Kd).all() and loaded.fingerprint == learned.fingerprint
    assert (loaded.history, loaded.stopped) == (learned.history, learned.stopped)
    assert loaded.settings == learned.settings
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["atoms"]
    learned.save(tmp_path / "deep" / "atoms")                   # the same again is fine


def test_another_dictionary_is_not_overwritten(learned, tmp_path):
    learned.save(tmp_path / "atoms")
    other = Dictionary(np.eye(3, dtype=np.float32), [], "by hand", {})
    with pytest.raises(DictionaryError, match="exists and is not this dictionary"):
        other.save(tmp_path / "atoms")
    assert Dictionary.load(tmp_path / "atoms").fingerprint == learned.fingerprint
    assert [path.name for path in tmp_path.iterdir()] == ["atoms"]


def test_fingerprint_sees_bytes_and_shape():
    atoms = np.arange(6, dtype=np.float32)
    arrays = atoms.reshape(2, 3), atoms.reshape(3, 2), -atoms[None]
    assert len({Dictionary(array, [], "", {}).fingerprint for array in arrays}) == 3


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [
    lambda d: flip_a_byte(d / "atoms.npy"),
    lambda d: (d / "atoms.npy").write_bytes((d / "atoms.npy").read_bytes()[:-100]),
    lambda d: (d / "atoms.npy").write_bytes(b""),
    lambda d: (d / "dictionary.json").write_text((d / "dictionary.json").read_text()[:-30]),
    lambda d: (d / "dictionary.json").write_text(json.dumps({"format": 1})),
    lambda d: (d / "dictionary.json").write_text("[]"),
    lambda d: np.save(d / "atoms.npy", np.array([{}], object), allow_pickle=True),
])
def test_damaged_files_are_refused(learned, tmp_path, damage):
    learned.save(tmp_path / "atoms")
    damage(tmp_path / "atoms")
    with pytest.raises(DictionaryError, match="is damaged"):
        Dictionary.load(tmp_path / "atoms")


@pytest.mark.parametrize("name", ["atoms.npy", "dictionary.json"])
def test_missing_files_are_named(learned, tmp_path, name):
    learned.save(tmp_path / "atoms")
    (tmp_path / "atoms" / name).unlink()
    with pytest.raises(DictionaryError, match=f"is not a dictionary: it has no {name}"):
        Dictionary.load(tmp_path / "atoms")
