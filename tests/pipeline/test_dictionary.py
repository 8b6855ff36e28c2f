"""Dictionary learning: the algorithm against plain NumPy, what it promises, and its files."""

import json
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from data import bench_file
from planted import planted, unit_rows

from mlsm.common.errors import DictionaryError
from pipeline.dictionary import Dictionary, DictionarySettings, LearningSchedule, learn_dictionary
from pipeline.dictionary.vectors import refuse_unusable, unit_length
from pipeline.solvers import nonneg_lasso
from pipeline.solvers.problem import objective

EIGHT_EPOCHS = LearningSchedule(epochs=8, batch=256)


@pytest.fixture(scope="module")
def learned():
    hidden, _ = planted()
    return learn_dictionary(hidden, DictionarySettings(40, 0.05, seed=1), EIGHT_EPOCHS)


def test_objective_falls_and_atoms_stay_in_the_unit_ball(learned):
    values = [entry["objective"] for entry in learned.history]
    assert values[-1] < values[0] < 0.5
    assert learned.atoms_Kd.dtype == np.float32 and learned.atoms_Kd.shape == (40, 24)
    assert np.linalg.norm(learned.atoms_Kd, axis=1).max() <= 1 + 1e-6
    assert all(
        set(entry)
        == {
            "vectors",
            "epoch",
            "objective",
            "nnz",
            "explained_variance",
            "dead_atoms",
            "near_atoms",
            "largest_cosine",
            "kept_mass",
        }
        for entry in learned.history
    )


def test_planted_atoms_are_nearly_found(learned):
    hidden, truth = planted(500, seed=0)
    found, best = (
        objective(hidden, atoms, nonneg_lasso(hidden, atoms, 0.05), 0.05).mean() for atoms in (learned.atoms_Kd, truth)
    )
    assert found < 1.1 * best


def test_history_says_what_the_returned_atoms_reach():
    hidden, _ = planted()
    held_out, _ = planted(200, seed=5)
    schedule = LearningSchedule(epochs=2, batch=256)
    found = learn_dictionary(hidden, DictionarySettings(30, 0.05, seed=0), schedule, held_out_Hd=3 * held_out)
    codes = nonneg_lasso(held_out, found.atoms_Kd, 0.05)
    best = min(found.history, key=lambda entry: entry["objective"])
    reached = objective(held_out, found.atoms_Kd, codes, 0.05).mean()
    assert best["objective"] == pytest.approx(reached, rel=1e-5)
    residual = held_out - codes.dense(30) @ found.atoms_Kd
    explained = 1 - (residual**2).sum() / ((held_out - held_out.mean(0)) ** 2).sum()
    assert best["explained_variance"] == pytest.approx(explained, rel=1e-3)
    assert best["nnz"] == pytest.approx(len(codes.values) / 200)
    assert found.settings["vectors"] == 3000 and found.settings["held_out"] == 200


def test_same_seed_same_bytes_another_seed_another_dictionary(learned):
    hidden, _ = planted()
    again = learn_dictionary(hidden, DictionarySettings(40, 0.05, seed=1), EIGHT_EPOCHS)
    assert again.fingerprint == learned.fingerprint and again.history == learned.history
    other = learn_dictionary(hidden, DictionarySettings(40, 0.05, seed=2), EIGHT_EPOCHS)
    assert other.fingerprint != learned.fingerprint


def test_kmeans_start():
    hidden, _ = planted()
    settings, schedule = DictionarySettings(40, 0.05, seed=1, init="kmeans"), LearningSchedule(epochs=1, batch=256)
    found, again = (learn_dictionary(hidden, settings, schedule) for _ in range(2))
    assert found.fingerprint == again.fingerprint
    assert found.history[0]["objective"] < 0.2


def test_file_of_half_floats_is_read_as_it_is_needed(tmp_path):
    hidden = np.random.default_rng(0).normal(size=(60_000, 128)).astype(np.float16)
    np.save(tmp_path / "hidden.npy", hidden)
    settings, schedule = DictionarySettings(16, 0.2, seed=0), LearningSchedule(epochs=0.1, batch=512)
    from_array = learn_dictionary(hidden, settings, schedule)
    del hidden
    tracemalloc.start()
    from_file = learn_dictionary(tmp_path / "hidden.npy", settings, schedule)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert from_file.fingerprint == from_array.fingerprint
    assert peak < (tmp_path / "hidden.npy").stat().st_size / 2


def test_unused_atoms_are_replaced_and_counted():
    """Rows of zeros can never be used. A few stay among the first atoms, as two thirds of the sample are zeros."""
    hidden, _ = planted()
    hidden[1000:] = 0
    schedule = LearningSchedule(epochs=4, batch=256, min_improvement=0)
    found = learn_dictionary(hidden, DictionarySettings(40, 0.05, seed=0), schedule)
    dead = [entry["dead_atoms"] for entry in found.history]
    assert dead[0] > 10 and dead[-1] <= 2
    assert found.history[-1]["objective"] < 0.8 * found.history[0]["objective"]
    assert np.linalg.norm(found.atoms_Kd, axis=1).min() > 0.5


def test_learning_stops_for_a_reason_that_is_kept():
    hidden, _ = planted()
    settings = DictionarySettings(10, 0.05, seed=0)
    done = learn_dictionary(hidden, settings, LearningSchedule(epochs=1.5, min_improvement=0))
    assert done.stopped == "epochs: 1.5 passes over 2,700 vectors are done"
    assert [entry["vectors"] for entry in done.history] == [2400, 4050], (
        "two of equal length, rounded up to minibatches"
    )
    early = learn_dictionary(hidden, settings, LearningSchedule(epochs=50, min_improvement=0.01))
    assert early.stopped.startswith("converged") and early.history[-1]["epoch"] < 50


def test_progress_reports_vectors_and_figures():
    calls = []
    hidden, _ = planted()
    learn_dictionary(
        hidden,
        DictionarySettings(10, 0.05, seed=0),
        LearningSchedule(epochs=2, batch=900, evaluate_every=900),
        progress=lambda *args, **figures: calls.append((args, figures)),
    )
    assert [args for args, _ in calls] == [("dictionary", done, 5400) for done in range(900, 5401, 900)]
    assert all(figures["unit"] == "vectors" and figures["objective"] > 0 for _, figures in calls)


def test_double_precision_vectors_are_accepted():
    hidden, _ = planted(500)
    settings, schedule = DictionarySettings(20, 0.05, seed=0), LearningSchedule(batch=256)
    double = learn_dictionary(hidden.astype(np.float64), settings, schedule)
    single = learn_dictionary(hidden, settings, schedule)
    np.testing.assert_allclose(double.atoms_Kd, single.atoms_Kd, atol=1e-3)
    large = learn_dictionary(1e30 * hidden.astype(np.float64), settings, schedule)
    assert large.atoms_Kd.dtype == np.float32
    assert large.history[-1]["objective"] == pytest.approx(double.history[-1]["objective"], rel=1e-2)
    with pytest.raises(ValueError, match="must be float16, float32, float64; found int64"):
        learn_dictionary(np.ones((50, 4), int), DictionarySettings(5, 0.05, seed=0))


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        (np.float32, 1e30),
        (np.float32, 1e-30),
        (np.float32, 1e-44),
        (np.float64, 1e300),
        (np.float64, 1e-320),
        (np.float16, 6e-8),
    ],
)
def test_huge_and_tiny_rows_have_a_direction_too(dtype, scale):
    rows = np.array([[3, -4, 0], [0, 0, 0], [0, 0, 1]]) * scale
    found = unit_length(rows.astype(dtype), np.arange(3))
    exact = rows.astype(dtype).astype(np.longdouble)  # as far as such numbers can say it
    exact /= np.maximum(np.sqrt((exact**2).sum(1)), np.finfo(np.longdouble).tiny)[:, None]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, exact.astype(float), atol=1e-6)


def test_ordinary_rows_keep_the_bits_of_plain_division():
    hidden = np.random.default_rng(0).normal(size=(100, 24)).astype(np.float32)
    assert (unit_length(hidden, np.arange(100)) == hidden / np.linalg.norm(hidden, axis=1, keepdims=True)).all()


def test_a_file_of_zeros_is_refused():
    with pytest.raises(ValueError, match="zeros.npy: training vectors: all 50 rows are zero"):
        refuse_unusable(np.zeros((50, 4), np.float16), "zeros.npy", rows_at_once=20)
    refuse_unusable(np.eye(50, dtype=np.float16)[::-1], "one.npy", rows_at_once=20)


def test_a_file_with_a_row_that_is_not_finite_is_refused():
    spoilt = np.ones((50, 4), np.float16)
    spoilt[30, 2] = np.inf
    with pytest.raises(ValueError, match=r"spoilt.npy: .*\b30\b"):
        refuse_unusable(spoilt, "spoilt.npy", rows_at_once=20)


def test_atoms_that_the_held_out_vectors_do_not_use_are_dead():
    hidden, _ = planted()
    sampled = DictionarySettings(300, 0.05, seed=0, atoms="sampled")
    (found,) = learn_dictionary(hidden, sampled, held_out_Hd=hidden[:1]).history
    assert 0 < found["nnz"] < 30 and found["dead_atoms"] == 300 - found["nnz"]


def test_equal_vectors_have_no_variance_to_explain(tmp_path):
    found = learn_dictionary(np.ones((50, 4), np.float32), DictionarySettings(5, 0.05, seed=0))
    assert all(entry["explained_variance"] is None for entry in found.history)
    found.save(tmp_path / "atoms")
    assert f"{Dictionary.load(tmp_path / 'atoms').report()['explained_variance']:.1%}" == "nan%"


def test_real_vectors_beat_sampled_atoms_soon():
    hidden = np.load(bench_file("hidden_train_32768x384_f16.npy"), mmap_mode="r")[:8192]
    held_out = np.load(bench_file("hidden_test_8192x384_f16.npy"))[:256]
    settings, schedule = DictionarySettings(512, 0.05, seed=0), LearningSchedule(epochs=2, batch=1024)
    found = learn_dictionary(hidden, settings, schedule, held_out_Hd=held_out)
    start = unit_rows(hidden[:512].astype(np.float32))
    unit = unit_rows(held_out.astype(np.float32))
    sampled = objective(unit, start, nonneg_lasso(unit, start, 0.05), 0.05).mean()
    assert found.history[-1]["objective"] < 0.85 * sampled


def test_too_few_vectors_are_refused_with_the_numbers():
    hidden, _ = planted(100)
    numbers = "k = 95 atoms need at least as many training vectors; found 90, with 10 more held out"
    with pytest.raises(ValueError, match=numbers):
        learn_dictionary(hidden, DictionarySettings(95, 0.05, seed=0))
    with pytest.raises(ValueError, match="found 0"):
        learn_dictionary(hidden[:0], DictionarySettings(5, 0.05, seed=0))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused_with_their_rows(value):
    hidden, _ = planted(200)
    hidden[[17, 130], 3] = value
    with pytest.raises(ValueError, match="vectors: NaN or infinity in row (17|130)"):
        learn_dictionary(hidden, DictionarySettings(20, 0.05, seed=0))


def test_held_out_vectors_may_have_any_order_in_memory(tmp_path):
    hidden, _ = planted(300)
    settings, schedule = DictionarySettings(20, 0.05, seed=0), LearningSchedule(1, 100)
    orders = (np.ascontiguousarray, np.asfortranarray)
    first, second = (
        learn_dictionary(
            hidden, settings, schedule, held_out_Hd=order(hidden[:50]), checkpoint=tmp_path / "learning.npz"
        )
        for order in orders
    )
    assert first.fingerprint == second.fingerprint


def test_other_nonsense_is_refused():
    hidden, _ = planted(200)
    good, usual = DictionarySettings(20, 0.05, seed=0), LearningSchedule()
    for settings, schedule, held_out, message in [
        (replace(good, lam=0), usual, None, "lam must be positive"),
        (replace(good, k=2.5), usual, None, "k must be a whole number; found 2.5"),
        (replace(good, k=np.inf), usual, None, "k must be a whole number; found inf"),
        (good, LearningSchedule(batch=10.5), None, "batch must be a whole number; found 10.5"),
        (good, LearningSchedule(epochs=np.inf), None, "epochs must be positive and finite; found inf"),
        (replace(good, init="zeros"), usual, None, "init must be"),
        (good, LearningSchedule(epochs=-1), None, "epochs must be positive"),
        (good, LearningSchedule(batch=0), None, "batch must be positive"),
        (good, LearningSchedule(evaluate_every=0), None, "evaluate_every must be positive"),
        (good, usual, hidden[:0], "held-out vectors"),
        (good, usual, hidden[:, :3], "held-out vectors"),
    ]:
        with pytest.raises(ValueError, match=message):
            learn_dictionary(hidden, settings, schedule, held_out_Hd=held_out)
    with pytest.raises(ValueError, match="shape"):
        learn_dictionary(hidden[0], good)


# -- files ---------------------------------------------------------------------------------------------------


def test_what_is_saved_is_what_is_loaded(learned, tmp_path):
    learned.save(tmp_path / "deep" / "atoms")
    loaded = Dictionary.load(tmp_path / "deep" / "atoms")
    assert (loaded.atoms_Kd == learned.atoms_Kd).all() and loaded.fingerprint == learned.fingerprint
    assert (loaded.history, loaded.stopped) == (learned.history, learned.stopped)
    assert loaded.settings == learned.settings
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["atoms"]
    learned.save(tmp_path / "deep" / "atoms")  # the same again is fine


def test_another_dictionary_is_not_overwritten(learned, tmp_path):
    learned.save(tmp_path / "atoms")
    other = Dictionary(np.eye(3, dtype=np.float32), [], "by hand", {})
    with pytest.raises(DictionaryError, match="exists and is not this dictionary"):
        other.save(tmp_path / "atoms")
    assert Dictionary.load(tmp_path / "atoms").fingerprint == learned.fingerprint
    assert [path.name for path in tmp_path.iterdir()] == ["atoms"]


def test_a_failed_save_leaves_nothing(learned, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(OSError, match="No space"):
        learned.save(tmp_path / "atoms")
    assert not list(tmp_path.iterdir())


def test_fingerprint_sees_bytes_and_shape():
    atoms = np.arange(6, dtype=np.float32)
    arrays = atoms.reshape(2, 3), atoms.reshape(3, 2), -atoms[None]
    assert len({Dictionary(array, [], "", {}).fingerprint for array in arrays}) == 3


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: flip_a_byte(d / "atoms.npy"),
        lambda d: (d / "atoms.npy").write_bytes((d / "atoms.npy").read_bytes()[:-100]),
        lambda d: (d / "atoms.npy").write_bytes(b""),
        lambda d: (d / "dictionary.json").write_text((d / "dictionary.json").read_text()[:-30]),
        lambda d: (d / "dictionary.json").write_text(json.dumps({"format": 1})),
        lambda d: (d / "dictionary.json").write_text("[]"),
        lambda d: np.save(d / "atoms.npy", np.array([{}], object), allow_pickle=True),
    ],
)
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
