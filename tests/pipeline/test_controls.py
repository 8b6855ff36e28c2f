"""Controls for what learned atoms and sparse codes add: sampled atoms, the centroids of a k-means, one label per token.

Against plain NumPy and scikit-learn; a setting that is not used does not change any name.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from planted import planted, unit_rows
from sklearn.cluster import KMeans
from test_targets import hidden_of, rows_of

from mlsm.commands.show_shards import show as view
from mlsm.evaluation.inspection.lsps.texts import teacher_lsps
from mlsm.evaluation.inspection.stores import statistics
from mlsm.evaluation.studies.flops.solver import correlation_flops
from mlsm.evaluation.studies.flops.stores import store_flops
from mlsm.terminal.encoding import encoding
from pipeline import estimate as estimating
from pipeline.commands import encode_lsp
from pipeline.config import EncodeConfig, LearnConfig
from pipeline.dictionary import Dictionary, DictionarySettings, LearningSchedule, learn_dictionary
from pipeline.dictionary.near import count_near
from pipeline.dictionary.vectors import TrainingVectors
from pipeline.learn import learn_dictionary as learn_dictionaries
from pipeline.solvers import nonneg_lasso
from pipeline.solvers.nearest import ROWS, nearest_atoms
from pipeline.solvers.problem import objective
from shards.reader import Store
from shards.verify import verify
from student.config import StudentConfig
from student.train import train

# -- atoms ------------------------------------------------------------------------------------------------------


def test_sampled_atoms_are_training_vectors_of_unit_length_by_seed():
    hidden = planted()[0] * np.linspace(1, 3, 3000, dtype=np.float32)[:, None]
    found, again, other = (
        learn_dictionary(hidden, DictionarySettings(40, 0.05, seed, atoms="sampled")) for seed in (1, 1, 2)
    )
    np.testing.assert_allclose(np.linalg.norm(found.atoms_Kd, axis=1), 1, rtol=1e-6)
    nearest = found.atoms_Kd @ (hidden / np.linalg.norm(hidden, axis=1, keepdims=True)).T
    assert np.allclose(nearest.max(1), 1, atol=1e-6) and len(set(nearest.argmax(1))) == 40
    assert found.fingerprint == again.fingerprint != other.fingerprint
    held_out_Hd = TrainingVectors(hidden, None, 1).held_out_Hd
    codes = nonneg_lasso(held_out_Hd, found.atoms_Kd, 0.05)
    (figures,) = found.history
    assert figures["objective"] == pytest.approx(objective(held_out_Hd, found.atoms_Kd, codes, 0.05).mean(), rel=1e-5)
    assert figures["dead_atoms"] == 40 - len(np.unique(codes.indices))
    assert found.settings["atoms"] == "sampled" and found.stopped == "sampled: not learned"


def test_clusters_are_as_tight_as_those_of_scikit_learn():
    hidden, _ = planted()
    found = learn_dictionary(hidden, DictionarySettings(30, 0.05, seed=1, atoms="clusters"))
    np.testing.assert_allclose(np.linalg.norm(found.atoms_Kd, axis=1), 1, rtol=1e-5)
    centres = KMeans(30, n_init=1, random_state=0).fit(hidden).cluster_centers_
    ours, theirs = ((hidden @ unit_rows(atoms).T).max(1).mean() for atoms in (found.atoms_Kd, centres))
    assert ours > theirs - 0.01
    sampled = learn_dictionary(hidden, DictionarySettings(30, 0.05, seed=1, atoms="sampled"))
    assert ours > (hidden @ sampled.atoms_Kd.T).max(1).mean() + 0.02
    with pytest.raises(ValueError, match="atoms must be 'learned', 'sampled' or 'clusters'; found 'drawn'"):
        learn_dictionary(hidden, DictionarySettings(30, 0.05, seed=1, atoms="drawn"))


def test_each_kind_of_atoms_has_a_dictionary_of_its_own(tmp_path):
    np.save(tmp_path / "hidden.npy", planted()[0])
    config = LearnConfig(hidden=tmp_path / "hidden.npy", k=24, dictionary_epochs=1, output=tmp_path)
    reports = [learn_dictionaries(replace(config, atoms=atoms))[0] for atoms in ("learned", "sampled", "clusters")]
    names = [Path(report["dictionary"]).name.rpartition("-")[0] for report in reports]
    assert names == ["hidden-k24", "hidden-k24-sampled", "hidden-k24-clusters"]
    learned, sampled, clusters = (Dictionary.load(report["dictionary"]) for report in reports)
    assert "atoms" not in learned.settings and len({d.fingerprint for d in (learned, sampled, clusters)}) == 3
    assert reports[0]["objective"] < reports[1]["objective"], "learning is better than its start"
    assert learn_dictionaries(replace(config, atoms="clusters"))[0]["finished_before"]


# -- the nearest atom -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, ROWS, ROWS + 7])
def test_the_nearest_atom_is_the_largest_correlation(count):
    rng = np.random.default_rng(0)
    hidden, atoms = unit_rows(rng.normal(size=(count, 16))), unit_rows(rng.normal(size=(50, 16)))
    atoms[30] = atoms[7]
    codes = nearest_atoms(hidden.astype(np.float16), atoms)
    correlations = hidden.astype(np.float16).astype(np.float64) @ atoms.astype(np.float64).T
    assert np.array_equal(codes.indices, correlations.argmax(1)) and 30 not in codes.indices
    assert np.array_equal(codes.indptr, np.arange(count + 1)) and np.array_equal(codes.values, np.ones(count))
    assert np.array_equal(nearest_atoms(torch.from_numpy(hidden).half(), atoms).indices, codes.indices)


def test_a_row_of_zeros_has_no_nearest_atom():
    codes = nearest_atoms(np.diag([1.0, 0.0, -1.0, 0.0]), np.eye(4)[::-1])
    assert codes.indptr.tolist() == [0, 1, 1, 2, 2] and codes.values.tolist() == [1, 1]
    assert codes.indices[0] == 3 and codes.indices[1] != 1 and len(codes.kkt) == 4


def test_sampled_atoms_are_not_nearly_equal_if_most_of_the_sample_is():
    """One slice of the sample, as many vectors as atoms, does not hold enough others."""
    rng = np.random.default_rng(0)
    same = unit_rows(rng.normal(size=(1, 48))) + 1e-4 * rng.normal(size=(8_000, 48))
    found = learn_dictionary(
        np.concatenate([same, rng.normal(size=(2_000, 48))]).astype(np.float32),
        DictionarySettings(256, 0.1, 0, atoms="sampled"),
        LearningSchedule(1, 256),
    )
    assert count_near(found.atoms_Kd)[0] == 0


@pytest.fixture(scope="module")
def place(tmp_path_factory, english_text, teacher_directory):
    return EncodeConfig(
        teacher=str(teacher_directory),
        layer=(2,),
        corpus=(str(english_text),),
        k=40,
        lam=0.1,
        atoms="clusters",
        solver="nearest",
        max_length=48,
        max_tokens=8_000,
        unit_tokens=4_000,
        batch_tokens=1024,
        dictionary_tokens=3_000,
        device="cpu",
        output=tmp_path_factory.mktemp("controls"),
    )


@pytest.fixture(scope="module")
def clusters(place):
    return encode_lsp(place)[0]


def test_a_store_of_clusters_has_one_label_a_token(place, clusters):
    store = Store.open(clusters["store"])
    assert store.path.name.startswith("lsp-tiny-l2-k40-clusters-nearest-")
    settings = store.fingerprinted
    assert settings["solver"] == {"name": "nearest"} and settings["top_n"] == 1
    assert not {"lam", "tolerance"} & set(settings)
    batch, coded_WL, dense_MK, rows = rows_of(store)
    atoms_Kd = Dictionary.load(clusters["dictionary"]).atoms_Kd
    labels = (hidden_of(place, batch, coded_WL) @ atoms_Kd.T).argmax(1)
    assert np.array_equal(np.diff(rows.indptr), np.ones(len(labels))) and not rows.tail.any()
    assert (rows.indices == labels).mean() > 0.999 and (dense_MK.max(1) == 1).all()
    assert clusters["entropy_nats"] == 0 and clusters["mass_kept"] == 1 and "max_kkt" not in clusters
    said = encoding([clusters], place) + view(statistics(store), None)
    assert said.count("the nearest atom of each token, with weight 1") == 2 and "KKT" not in said
    assert verify(store.path, full=True)["damaged"] == [] and encode_lsp(place)[0]["finished_before"]


def test_its_cost_its_text_and_its_command_are_of_the_same_store(place, clusters):
    store = Store.open(clusters["store"])
    coded = store.report()["coded_tokens"]
    sparse = Store.open(encode_lsp(replace(place, solver="cd"))[0]["store"])
    assert sparse.fingerprinted["dictionary"] == store.fingerprinted["dictionary"] and sparse.plan_id == store.plan_id
    assert sparse.path.name.startswith("lsp-tiny-l2-k40-clusters-")
    assert store_flops(sparse) - store_flops(store) > 0
    assert correlation_flops(coded, 40, 32) < store_flops(store)
    text = teacher_lsps(store, "the module returns a value")
    assert np.array_equal(np.diff(text.rows.indptr), np.ones(len(text.ids_T)))
    (path,) = store.path.glob("plans/*.yaml")
    kept = json.loads(path.read_text())["encode-lsp"]
    assert (kept["atoms"], kept["solver"]) == ("clusters", "nearest") and not {"tolerance", "solver_steps"} & set(kept)


def test_a_student_learns_clusters(clusters, tmp_path):
    config = StudentConfig(
        store=clusters["store"],
        encoder="bert-1x32",
        max_steps=30,
        batch_windows=8,
        lr=5e-3,
        eval_windows=8,
        save_every=0,
        eval_every=0,
        device="cpu",
        run_dir=tmp_path / "run",
    )
    result = train(config)
    assert result["held_out_loss"] < 3.6 < np.log(40), "of 40 labels, with no entropy of their own"


def test_an_estimate_of_a_control_learns_nothing(place, tmp_path, monkeypatch):
    monkeypatch.setattr(estimating, "SECONDS", 0.1)
    given = replace(place, dry_run=True, solver="cd", output=tmp_path)
    seconds = {
        atoms: encode_lsp(replace(given, atoms=atoms))[0]["learning_seconds"] for atoms in ("learned", "sampled")
    }
    assert 0 < seconds["sampled"] < seconds["learned"]


def test_what_belongs_to_another_solver_is_refused():
    with pytest.raises(ValueError, match="--tolerance 0.001 belongs to --solver cd; nearest solves nothing"):
        EncodeConfig(solver="nearest", tolerance=1e-3)
    with pytest.raises(ValueError, match="--solver-steps 5 belongs to --solver fista; nearest takes none"):
        EncodeConfig(solver="nearest", solver_steps=5)
