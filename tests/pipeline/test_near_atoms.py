"""Nearly equal atoms are replaced while a dictionary is learned, so that a code has one distribution.

The oracles are plain NumPy, loops over pairs, and a much exacter solution of the same problem.
"""

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from planted import planted, unit_rows

from mlsm.commands.learn_dictionary import show
from pipeline.commands import encode_lsp
from pipeline.config import EncodeConfig, LearnConfig
from pipeline.dictionary import Dictionary, DictionarySettings, LearningSchedule, learn_dictionary, learning, near
from pipeline.dictionary import checkpoint as learning_checkpoint
from pipeline.dictionary.cpu import CpuLearner, kept_share
from pipeline.dictionary.near import NEAR, count_near, far_rows, near_atoms
from pipeline.dictionary.torch import TorchLearner
from pipeline.learn import learn_dictionary as learn_dictionaries
from pipeline.precision import total_variation
from pipeline.solvers import nonneg_lasso
from pipeline.solvers.problem import objective

SETTINGS = DictionarySettings(120, 0.05, seed=1)
SCHEDULE = LearningSchedule(epochs=4, batch=256, min_improvement=0, evaluate_every=1024)


def with_a_frequent_token(vectors=3000, width=24, seed=0):
    """Planted vectors of which every fifth is nearly the same, as the hidden states of "." are."""
    hidden, _ = planted(vectors, width, seed=seed)
    noise = np.random.default_rng(seed + 1).normal(size=hidden[::5].shape)
    hidden[::5] = unit_rows(hidden[0] + 0.002 * noise)
    return hidden


def largest_cosine(atoms_Kd):
    """By a loop over pairs, in float64."""
    rows = [row / (np.linalg.norm(row) or 1) for row in atoms_Kd.astype(np.float64)]
    return max(rows[i] @ rows[j] for i in range(len(rows)) for j in range(i))


def at_angles(*angles):
    """Vectors in the plane of the first two axes of 16."""
    rows = np.zeros((len(angles), 16), np.float32)
    rows[:, 0], rows[:, 1] = np.cos(angles), np.sin(angles)
    return rows


# -- which atoms are given up, which vectors replace them -------------------------------------------------------


@pytest.mark.parametrize("length", [1, 0.3])
def test_of_nearly_equal_atoms_the_most_used_is_kept(length):
    # 0.15 is an angle of cosine 0.989, 0.3 one of 0.955; the last two atoms are zero and equal to nothing
    atoms = np.concatenate([length * at_angles(0, 0.15, 0.3, 1, 1, 1.001, 2), np.zeros((2, 16), np.float32)])
    gram = atoms @ atoms.T
    assert near_atoms(gram, np.array([1, 9, 1, 2, 3, 4, 1, 0, 0])) == {0: 1, 2: 1, 3: 5, 4: 5}
    assert near_atoms(gram, np.array([9, 1, 8, 4, 3, 2, 1, 0, 0])) == {1: 0, 4: 3, 5: 3}
    assert count_near(atoms) == (6, pytest.approx(1))
    assert near_atoms(gram[6:, 6:], np.zeros(3)) == {} and count_near(atoms[6:]) == (0, 0)


@pytest.mark.parametrize("at_once", [1, 3, 1024])
def test_blocks_of_atoms_count_as_all_at_once(monkeypatch, at_once):
    monkeypatch.setattr(near, "ATOMS_AT_ONCE", at_once)
    atoms = at_angles(0, 0.15, 0.3, 1, 1.001, 2)
    assert count_near(atoms) == (5, pytest.approx(largest_cosine(atoms)))


def test_without_the_atoms_given_up_none_are_nearly_equal():
    rng = np.random.default_rng(0)
    atoms = unit_rows(np.repeat(rng.normal(size=(20, 16)), 5, axis=0) + 0.1 * rng.normal(size=(100, 16)))
    given_up = near_atoms(atoms @ atoms.T, rng.integers(0, 9, 100))
    assert largest_cosine(np.delete(atoms, list(given_up), axis=0)) <= NEAR < largest_cosine(atoms)
    for atom, kept in given_up.items():
        assert atoms[atom] @ atoms[kept] > NEAR and kept not in given_up


def test_far_rows_are_near_no_atom_and_not_one_another():
    atoms = 0.5 * at_angles(0, 1)
    rows = at_angles(0.1, 0.5, 0.55, 1.9, 0.9, 0.75, 1.95, 2.5)
    assert far_rows(rows, atoms, 9) == [1, 3, 5, 7]
    assert far_rows(rows, atoms, 2) == [1, 3]
    assert far_rows(rows[:1], atoms, 2) == [] and far_rows(rows[:0], atoms, 2) == []


# -- one replacement --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("atoms", ["sampled", "learned"])
def test_rows_of_zeros_do_not_become_atoms(atoms):
    hidden = unit_rows(np.random.default_rng(0).normal(size=(600, 24)))
    hidden[np.random.default_rng(1).random(600) < 0.4] = 0  # padding in a file of vectors
    found = learn_dictionary(hidden, replace(SETTINGS, atoms=atoms), SCHEDULE)
    assert found.atoms_Kd.any(1).all()


def learner_with_sums(kind, atoms, hidden):
    """A learner whose sums are those of codes of these vectors; and these codes."""
    codes = nonneg_lasso(hidden, atoms, 0.05, tol=1e-6).dense(len(atoms))
    learner = CpuLearner(atoms.copy(), 0.05, 4.0) if kind == "numba" else TorchLearner(atoms, 0.05, 4.0, "cpu")
    state = {
        "code_code_KK": codes.T @ codes,
        "code_hidden_Kd": codes.T @ hidden,
        "uses_K": (codes > 0).sum(0),
        "steps": np.array(3),
    }
    learner.restore(state)
    return learner, codes


@pytest.mark.parametrize("kind", ["numba", "torch"])
def test_a_merged_atom_has_the_sums_of_both_and_a_badly_coded_vector_takes_the_free_place(kind):
    hidden, truth = planted(2000)
    atoms = truth.copy()
    rng = np.random.default_rng(1)
    atoms[[11, 5, 30]] = unit_rows(atoms[[3, 3, 20]] + 0.01 * rng.normal(size=(3, 24)))
    learner, codes = learner_with_sums(kind, atoms, hidden)
    given_up = near_atoms(atoms @ atoms.T, learner.uses_K)
    assert {frozenset(pair) for pair in given_up.items()} <= {
        frozenset(p) for p in [(3, 5), (3, 11), (5, 11), (20, 30)]
    }
    assert len(given_up) == 3
    fresh = planted(300, seed=7)[0]  # of other atoms, so that many are badly coded
    order = np.argsort(-objective(fresh, atoms, nonneg_lasso(fresh, atoms, 0.05, tol=1e-2), 0.05), kind="stable")
    merged, uses = codes.copy(), learner.uses_K.copy()
    for atom, kept in given_up.items():
        merged[:, kept] += merged[:, atom]
        merged[:, atom] = 0
    assert learner.replace_near(fresh) == 3
    state = learner.state()
    np.testing.assert_allclose(state["code_code_KK"], merged.T @ merged, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(state["code_hidden_Kd"], merged.T @ hidden, rtol=1e-4, atol=1e-4)
    found, others = learner.atoms(), [j for j in range(40) if j not in given_up]
    assert np.array_equal(found[others], atoms[others])
    assert np.array_equal(found[list(given_up)], fresh[order[:3]]) and largest_cosine(found) <= NEAR
    np.testing.assert_allclose(learner.gram(), found @ found.T, atol=1e-6)
    assert (learner.uses_K > 0).all() and learner.uses_K[given_up.get(30, 30)] >= uses[30]
    before = {name: np.copy(array) for name, array in state.items()}
    assert learner.replace_near(fresh) == 0
    assert all(np.array_equal(learner.state()[name], before[name]) for name in before)


@pytest.mark.parametrize("kind", ["numba", "torch"])
def test_an_unused_atom_is_replaced_with_its_sums_forgotten(kind):
    hidden, atoms = planted(2000)
    learner, _ = learner_with_sums(kind, atoms, hidden)
    learner.uses_K[[4, 9]] = 0
    fresh = planted(300, seed=7)[0]
    order = np.argsort(-objective(fresh, atoms, nonneg_lasso(fresh, atoms, 0.05, tol=1e-2), 0.05), kind="stable")
    fresh[order[1]] = fresh[order[0]]  # two equal vectors must not become two atoms
    learner.replace_unused(fresh)
    state, found = learner.state(), learner.atoms()
    assert np.array_equal(found[[4, 9]], fresh[order[[0, 2]]]) and largest_cosine(found) <= NEAR
    assert not state["code_code_KK"][[4, 9]].any() and not state["code_code_KK"][:, [4, 9]].any()
    assert not state["code_hidden_Kd"][[4, 9]].any() and not learner.uses_K.any()
    others = [j for j in range(40) if j not in (4, 9)]
    assert state["code_hidden_Kd"][others].any(1).all() and state["code_code_KK"].diagonal()[others].all()


def test_old_minibatches_weigh_as_the_paper_says():
    """Section 3.4: minibatch s of t weighs (s / t) ** forgetting, a product of the shares that are kept."""
    assert kept_share(1, 4.0) == 0
    for forgetting in (1.0, 4.0):
        weight = np.prod([kept_share(step, forgetting) for step in range(4, 11)])
        assert weight == pytest.approx((3 / 10) ** forgetting)
    hidden, atoms = planted(600)
    learner = CpuLearner(atoms, 0.05, 4.0)
    parts = [hidden[:300], hidden[300:]]
    dense = []
    for part in parts:
        dense.append(nonneg_lasso(part, learner.atoms(), 0.05, tol=1e-2, gram_KK=learner.gram_KK).dense(40))
        learner.step(part)
    expected = (1 / 2) ** 4 * dense[0].T @ parts[0] + dense[1].T @ parts[1]
    np.testing.assert_allclose(learner.code_hidden_Kd, expected, rtol=1e-4, atol=1e-4)


# -- a whole learning -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [{}, {"init": "kmeans"}, {"atoms": "sampled"}], ids=["learned", "kmeans", "sampled"]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_dictionary_has_no_nearly_equal_atoms(changes, seed):
    hidden = with_a_frequent_token(seed=seed)
    found = learn_dictionary(hidden, replace(SETTINGS, seed=seed, **changes), SCHEDULE)
    assert largest_cosine(found.atoms_Kd) <= NEAR
    best = min(found.history, key=lambda entry: entry["objective"])
    assert largest_cosine(found.atoms_Kd) == pytest.approx(best["largest_cosine"], abs=1e-5)
    report = found.report()
    assert report["largest_cosine"] == best["largest_cosine"]
    assert report["near_atoms"] == sum(entry["near_atoms"] for entry in found.history)


def test_codes_of_a_frequent_token_are_unique():
    """Total variation between the default tolerance and an exact solution."""
    hidden = with_a_frequent_token()
    atoms = learn_dictionary(hidden, SETTINGS, SCHEDULE).atoms_Kd
    usual, exact = (nonneg_lasso(hidden[::5], atoms, 0.05, tol=tol).dense(120) for tol in (1e-4, 1e-6))
    assert total_variation(usual, exact).max() <= 0.01


def start_with_near_atoms(monkeypatch):
    """Leave the near vectors of the sample among the first atoms: learning has to find them."""
    monkeypatch.setattr(learning, "_without_near_ones", lambda atoms_Kd, vectors, whole_sample: atoms_Kd)


def test_atoms_that_are_near_later_are_replaced_and_interruptions_change_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(learning_checkpoint, "SECONDS_BETWEEN", 0)
    start_with_near_atoms(monkeypatch)
    hidden = with_a_frequent_token()
    unbroken = learn_dictionary(hidden, SETTINGS, SCHEDULE)
    replaced = [entry["near_atoms"] for entry in unbroken.history]
    assert sum(replaced) > 0 and largest_cosine(unbroken.atoms_Kd) <= NEAR
    assert all(entry["largest_cosine"] <= NEAR for entry in unbroken.history)

    def interrupt(stage, done, total, **figures):
        if done >= 3000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learn_dictionary(hidden, SETTINGS, SCHEDULE, checkpoint=tmp_path, progress=interrupt)
    again = learn_dictionary(hidden, SETTINGS, SCHEDULE, checkpoint=tmp_path)
    assert again.fingerprint == unbroken.fingerprint and again.history == unbroken.history


@pytest.fixture(params=["cpu", "cpu:0"], ids=["numba", "torch"])
def device(request, monkeypatch):
    """A device for each learner; both compute on this CPU."""
    monkeypatch.setattr(learning, "_device", lambda device: device)
    return request.param


@pytest.mark.parametrize("tail", [1, 12])
def test_the_last_minibatch_of_an_epoch_may_have_too_few_vectors(device, tail, tmp_path, monkeypatch):
    """It has `tail`, and more atoms than that are nearly equal, or there are not as many of its vectors that fit."""
    monkeypatch.setattr(learning_checkpoint, "SECONDS_BETWEEN", 0)
    rng = np.random.default_rng(0)
    centres = unit_rows(rng.normal(size=(100, 64)))
    hidden = unit_rows(centres[rng.integers(0, 100, 4300)] + 0.025 * rng.normal(size=(4300, 64)))
    settings, schedule = DictionarySettings(150, 0.3, seed=0), LearningSchedule(2, 400)
    how = {"held_out_Hd": hidden[4000 + tail :], "device": device}
    found = learn_dictionary(hidden[: 4000 + tail], settings, schedule, **how)
    assert count_near(found.atoms_Kd)[0] == 0 and found.history[0]["near_atoms"] > 3

    def interrupt(stage, done, total, **figures):
        if done > 5000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learn_dictionary(hidden[: 4000 + tail], settings, schedule, checkpoint=tmp_path, progress=interrupt, **how)
    again = learn_dictionary(hidden[: 4000 + tail], settings, schedule, checkpoint=tmp_path, **how)
    assert again.fingerprint == found.fingerprint and again.history == found.history


@pytest.mark.parametrize("unused", [11, 12, 13])
def test_unused_atoms_are_replaced_from_enough_vectors(device, unused, monkeypatch):
    """With 12 vectors in an epoch's last minibatch, 12 unused atoms are replaced from these, 13 from the last 400."""
    seen = []
    hidden, atoms = planted(812)
    monkeypatch.setattr(learning, "_initial_atoms", lambda *_: np.pad(atoms, ((0, unused), (0, 0))))
    monkeypatch.setattr(near.Replacing, "replace_unused", lambda learner, hidden_nd: seen.append(hidden_nd))
    how = {"held_out_Hd": hidden[:9], "device": device}
    learn_dictionary(hidden, DictionarySettings(40 + unused, 0.3, seed=0), LearningSchedule(1, 400), **how)
    order = np.random.default_rng([0, 1, 0]).permutation(812)
    expected = hidden[np.sort(order[-400 if unused > 12 else -12 :])]
    assert len(seen) == 1 and np.allclose(seen[0], expected, atol=1e-6)


def test_both_learners_replace_about_as_many(monkeypatch):
    start_with_near_atoms(monkeypatch)
    monkeypatch.setattr(learning, "_device", lambda device: device)  # otherwise "cpu:0" would be CpuLearner, too
    hidden = with_a_frequent_token()
    found = [learn_dictionary(hidden, SETTINGS, SCHEDULE, device=device) for device in ("cpu", "cpu:0")]
    first, second = (one.history[0]["near_atoms"] for one in found)
    assert min(first, second) > 5 and abs(first - second) <= 3  # codes are within a tolerance, so some cosines differ
    assert all(largest_cosine(one.atoms_Kd) <= NEAR for one in found)
    objectives = [one.report()["objective"] for one in found]
    assert objectives[0] == pytest.approx(objectives[1], rel=0.02)


def test_vectors_that_are_all_nearly_equal_still_give_a_dictionary():
    rng = np.random.default_rng(0)
    hidden = unit_rows(rng.normal(size=24) + 0.01 * rng.normal(size=(500, 24)))
    found = learn_dictionary(hidden, SETTINGS, SCHEDULE)
    assert found.report()["largest_cosine"] > NEAR and np.isfinite(found.atoms_Kd).all()


# -- names, and what encode-lsp says ----------------------------------------------------------------------------


def test_another_way_of_learning_has_another_name(tmp_path, monkeypatch):
    np.save(tmp_path / "hidden.npy", planted(500)[0])
    config = LearnConfig(hidden=tmp_path / "hidden.npy", k=24, dictionary_epochs=1, output=tmp_path)
    first = learn_dictionaries(config)[0]
    monkeypatch.setattr(learning, "ALGORITHM", learning.ALGORITHM + 1)
    second = learn_dictionaries(config)[0]
    assert first["dictionary"] != second["dictionary"] and not second["finished_before"]


@pytest.fixture
def given(tmp_path, english_text, teacher_directory):
    return EncodeConfig(
        teacher=str(teacher_directory),
        layer=(2,),
        corpus=(str(english_text),),
        k=(40,),
        lam=0.1,
        max_length=48,
        max_tokens=4_000,
        batch_tokens=1024,
        dictionary=tmp_path / "given",
        device="cpu",
        output=tmp_path,
    )


def test_a_given_dictionary_with_nearly_equal_atoms_is_warned_of_in_one_line(given, monkeypatch):
    atoms = unit_rows(np.random.default_rng(0).normal(size=(40, 32)))
    atoms[7] = atoms[8]
    Dictionary(atoms, [], "given", {}).save(given.dictionary)
    with pytest.warns(
        UserWarning, match=r"given: 2 of 40 atoms have a cosine above 0\.98 .* at most 1\.0000\."
    ) as all_of:
        first = encode_lsp(given)[0]
    near = [str(one.message) for one in all_of if "cosine" in str(one.message)]
    assert len(near) == 1 and "\n" not in near[0]
    monkeypatch.setattr(learning, "ALGORITHM", learning.ALGORITHM + 1)
    with pytest.warns(UserWarning, match="cosine"):
        again = encode_lsp(given)[0]
    assert again["store"] == first["store"] and again["finished_before"], "a given dictionary keeps the store's name"


def test_atoms_that_learning_cannot_tell_apart_are_told_with_the_way_out(tmp_path, given):
    """Advice to learn another dictionary would lead in a circle."""
    rng = np.random.default_rng(0)
    np.save(tmp_path / "hidden.npy", (rng.normal(size=32) + 0.01 * rng.normal(size=(500, 32))).astype(np.float32))
    config = LearnConfig(hidden=tmp_path / "hidden.npy", k=40, dictionary_epochs=1, output=tmp_path)
    found = learn_dictionaries(config)[0]
    assert "others are left, because the vectors are too similar" in show([found], config)
    with pytest.warns(UserWarning, match="too similar. Subtract their mean: .*learn-dictionary --center mean$"):
        encode_lsp(replace(given, dictionary=Path(found["dictionary"])))


def test_a_given_dictionary_of_distinct_atoms_is_not_warned_of(given):
    atoms = unit_rows(np.random.default_rng(0).normal(size=(40, 32)))
    Dictionary(atoms, [], "given", {}).save(given.dictionary)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*cosine.*")
        report = encode_lsp(given)[0]
    assert Path(report["store"]).is_dir()
