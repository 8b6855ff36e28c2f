"""The baseline by position: against plain loops, kept in a file, found in logs, summaries and cards."""

import json

import numpy as np
import pytest
from tiny_store import LENGTH, SPECIAL, WORDS, write_tokenizer

from mlsm.commands.train_student import show as training
from mlsm.common.arrays import read_npz
from mlsm.common.gains import NO_GAIN, cross_fitted_gain, mass_by_group, shrunk_marginals
from shards.files import StoreFiles
from shards.manifest import Plan, PlannedUnit, fingerprint
from shards.reader import Store
from shards.schema import LSP_OCTAVES, ShardMeta
from shards.writer import UnitWriter
from student.batches import Loader
from student.config import StudentConfig
from student.held_out import HeldOut
from student.masks.masking import build_masking
from student.objectives import position_marginals as module
from student.objectives.mlsm import Mlsm
from student.objectives.mtl import Mtl
from student.objectives.position_marginals import position_marginals, teacher_positions
from student.train import train

K = 8


def positional_store(path, windows=(300, 40), first=LENGTH, apart=False, made="by position"):
    """Targets that follow from the position alone, but for noise: LSP position % K has 0.7, another one 0.3.

    first  tokens of the first of two documents in every window, in each of which positions count from 0
    apart  whether the store says that its teacher read documents apart
    """
    rng = np.random.default_rng(5)
    files, specials = StoreFiles(path), SPECIAL | {"all": sorted(SPECIAL.values())}
    settings = {"teacher": "none", "k": K, "made": made} | ({"documents_apart": True} if apart else {})
    files.create(
        {
            "settings": settings,
            "target": fingerprint(settings),
            "lineage": {},
            "k": K,
            "vocab_size": len(SPECIAL) + WORDS,
            "max_length": LENGTH,
            "special_ids": specials,
            "weight_octaves": LSP_OCTAVES,
        }
    )
    write_tokenizer(files.tokenizer, WORDS)
    units = []
    for split, count in zip(("train", "held_out"), windows, strict=True):
        unit = PlannedUnit(f"{split}-{count}", split, "made up", 0, count)
        with UnitWriter(files, ShardMeta(fingerprint(settings), unit.id, K, len(SPECIAL) + WORDS, LENGTH)) as writer:
            writer.write_block(**columns(rng, count, first))
        units.append(unit)
    files.publish_plan(Plan({"length": LENGTH}, tuple(units)))
    return Store.open(path)


def columns(rng, windows, first):
    words = rng.integers(len(SPECIAL), len(SPECIAL) + WORDS, (windows, LENGTH))
    words[:, 0], words[:, -1] = SPECIAL["cls"], SPECIAL["sep"]
    nnz, indices, weights = [], [], []
    for _ in range(windows):
        for place in range(LENGTH):
            position = place % first
            row = {} if place in (0, LENGTH - 1) else {position % K: 0.7, (position + rng.integers(1, K)) % K: 0.3}
            nnz.append(len(row))
            indices += sorted(row)
            weights += [row[lsp] for lsp in sorted(row)]
    starts = (np.arange(windows)[:, None] * LENGTH + np.arange(0, LENGTH, first)).ravel()
    return {
        "ids": words.ravel(),
        "lengths": np.full(windows, LENGTH),
        "run_starts": starts,
        "run_records": np.arange(len(starts)),
        "nnz": np.array(nnz),
        "indices": np.array(indices),
        "weights": np.array(weights),
        "tail": np.zeros(words.size, np.float32),
    }


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return positional_store(tmp_path_factory.mktemp("stores") / "positional")


def all_rows(split):
    read = split.read(np.arange(len(split)))
    window, position = np.nonzero(read.documents >= 0)
    return read, window, position, split.targets(read, window, position)


def held_out_of(store, objective, **given):
    masking = build_masking(StudentConfig(), store)
    loader = Loader(store.split("train"), masking, objective.read_targets, micro_batch=16)
    return HeldOut(store, loader, objective, windows=99, **given)


def test_the_marginals_are_means_shrunk_towards_the_mean_of_all(store):
    found = position_marginals(store.split("train"))
    _, window, position, rows = all_rows(store.split("train"))
    sums, tokens = np.zeros((LENGTH, K)), np.zeros(LENGTH)
    for token in range(len(position)):
        row = slice(rows.indptr[token], rows.indptr[token + 1])
        sums[position[token], rows.indices[row]] += rows.weights[row]
        tokens[position[token]] += row.stop > row.start
    assert found.shape == (LENGTH, K) and found.sum(1) == pytest.approx(1)
    mean = sums.sum(0) / tokens.sum()
    for p in range(1, LENGTH - 1):
        assert found[p] == pytest.approx(sums[p] / tokens[p], abs=0.02) and found[p].argmax() == p % K
    assert found[0] == pytest.approx(mean, abs=1e-3), "no token is there: the mean of all"


def test_a_position_says_what_it_should_and_shuffled_ones_say_nothing(store):
    _, window, position, rows = all_rows(store.split("train"))
    arrays = rows.indptr, rows.indices, rows.weights

    def gain_of(position):
        halves = []
        for half in (0, 1):
            masked = np.where((window % 2 == half), position, LENGTH)  # the others to a group of their own, dropped
            found = mass_by_group(masked, *arrays, LENGTH + 1, K)
            halves.append(found._replace(mass_GK=found.mass_GK[:LENGTH], tokens_G=found.tokens_G[:LENGTH]))
        return cross_fitted_gain(*halves)

    gain_K, pseudo_count = gain_of(position)
    expected = 0.7 * np.log(0.7) + 0.3 * np.log(0.3 / 7) - np.log(1 / K)
    assert gain_K.sum() == pytest.approx(expected, abs=0.05) and pseudo_count < 100
    null_K, pseudo_count = gain_of(np.random.default_rng(0).permutation(position))
    assert abs(null_K.sum()) < 0.003 and pseudo_count >= 1000, "shrunk to nothing"


def test_rare_groups_do_not_overfit():
    rng, count = np.random.default_rng(1), 400
    columns = rng.integers(0, 50, count)
    halves = [
        mass_by_group(rng.integers(0, 200, count), np.arange(count + 1), columns, np.ones(count), 200, 50)
        for _ in range(2)
    ]
    gain_K, pseudo_count = cross_fitted_gain(*halves)
    assert gain_K.sum() > -1e-3 and pseudo_count > 30
    unshrunk = cross_fitted_gain(*halves, pseudo_counts=(0.1,))[0].sum()
    assert unshrunk < -0.5
    marginals = shrunk_marginals(halves[0] + halves[1], NO_GAIN)
    assert marginals == pytest.approx(np.broadcast_to((halves[0] + halves[1]).mean_K, (200, 50)))


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_baseline_by_position_equals_a_dense_computation(store, temperature):
    mlsm = Mlsm(store, target_temperature=temperature)
    found = held_out_of(store, mlsm)
    batch = found.batch
    marginals = position_marginals(store.split("train"))
    total, count = 0.0, 0
    for micro in batch.micro:
        _, position = np.divmod(micro.where_M.numpy(), LENGTH)
        targets = micro.targets
        row, lsp = np.divmod(targets.entries_E.numpy(), K)
        weights = (targets.weights_E if temperature == 1 else targets.untempered_E).double().numpy()
        total += float(weights @ (np.log(weights) - np.log(marginals[position[row], lsp])))
        count += targets.counts[0]
    name = "loss" if temperature == 1 else "kl_untempered"
    assert found.baseline[f"{name}_by_position"] == pytest.approx(total / count, rel=1e-6)
    assert found.baseline["loss_by_position"] < 0.6 * found.baseline["loss"], "these targets are positional"


def test_of_several_terms_the_lsps_alone_are_known_by_position(store):
    alone, joint = (held_out_of(store, make(store)).baseline for make in (Mlsm, Mtl))
    assert joint["kl_by_position"] == pytest.approx(alone["loss_by_position"])
    assert joint["loss_by_position"] == pytest.approx(joint["kl_by_position"] + joint["cross_entropy"])
    assert joint["loss"] == pytest.approx(joint["kl"] + joint["cross_entropy"])


def test_the_sums_are_kept_for_the_next_run(store, tmp_path, monkeypatch):
    windows = store.split("train")
    first = position_marginals(windows, tmp_path / "kept")
    (path,) = (tmp_path / "kept").iterdir()
    assert path.suffix == ".npz" and not path.name.startswith(".")
    with monkeypatch.context() as patched:
        patched.setattr(module, "_sums", lambda *_: pytest.fail("read again"))
        assert (position_marginals(windows, tmp_path / "kept") == first).all()
    path.write_bytes(path.read_bytes()[:100])  # a damaged file costs the reading
    assert (position_marginals(windows, tmp_path / "kept") == first).all()
    (tmp_path / "file").touch()  # and one that cannot be written
    assert (position_marginals(windows, tmp_path / "file") == first).all()


@pytest.mark.parametrize("name, factor", [
    ("mass", -1), ("mass", 3), ("mass", np.nan), ("mass", np.inf), ("mass", 1j), ("tokens", -1), ("tokens", 0.5),
    ("tokens", np.nan), ("tokens", np.inf),
])  # fmt: skip
def test_kept_sums_that_can_be_of_no_tokens_are_made_again(name, factor, store, tmp_path):
    windows = store.split("train")
    first = position_marginals(windows, tmp_path)
    (path,) = tmp_path.iterdir()
    kept = read_npz(path)
    np.savez_compressed(path, **kept | {name: factor * kept[name].clip(1e-9)})
    assert (position_marginals(windows, tmp_path) == first).all()


def test_sums_of_other_targets_windows_temperatures_or_bounds_are_not_reused(store, tmp_path, monkeypatch):
    """All of one shape, so that only the name of the file tells them apart."""
    other_target = positional_store(tmp_path / "target", made="by position, once more")
    other_plan = positional_store(tmp_path / "plan", windows=(200, 40))
    assert other_target.plan_id == store.plan_id and other_target.target_id != store.target_id
    assert other_plan.target_id == store.target_id and other_plan.plan_id != store.plan_id
    cases = [(one, temperature) for one in (store, other_target, other_plan) for temperature in (1.0, 2.0, 0.5)]
    for _ in range(2):  # the second time everything is found
        for one, temperature in cases:
            places = (tmp_path / "kept", None)
            kept, read = (module.position_sums(one.split("train"), at, temperature=temperature) for at in places)
            for ours, theirs in zip(kept, read, strict=True):
                assert np.array_equal(ours.mass_GK.toarray(), theirs.mass_GK.toarray()), (one.path.name, temperature)
                assert np.array_equal(ours.tokens_G, theirs.tokens_G)
    assert len(list((tmp_path / "kept").iterdir())) == len(cases)
    monkeypatch.setattr(module, "TOKENS", 50 * LENGTH)
    few = position_marginals(store.split("train"), tmp_path / "kept")
    assert np.array_equal(few, position_marginals(store.split("train")))


def test_no_more_is_read_than_a_bound(store, monkeypatch):
    windows, read = store.split("train"), []
    monkeypatch.setattr(module, "TOKENS", 50 * LENGTH)
    monkeypatch.setattr(windows, "read", lambda ids, real=windows.read: read.append(len(ids)) or real(ids))
    position_marginals(windows)
    assert sum(read) == 50


def test_the_sums_are_the_same_however_many_windows_are_read_at_once(store, monkeypatch):
    windows, read = store.split("train"), []
    at_once = module.position_sums(windows)
    monkeypatch.setattr(module, "TOKENS_AT_ONCE", 7 * LENGTH + 1)  # odd: chunks start in either half
    monkeypatch.setattr(windows, "read", lambda ids, real=windows.read: read.append(len(ids)) or real(ids))
    for ours, theirs in zip(module.position_sums(windows), at_once, strict=True):
        assert ours.mass_GK.toarray() == pytest.approx(theirs.mass_GK.toarray(), rel=1e-12)
        assert np.array_equal(ours.tokens_G, theirs.tokens_G)
    assert max(read) == 7 and sum(read) == len(windows)


def test_positions_begin_anew_where_the_teacher_read_documents_apart(store):
    read = type("Read", (), {"ids": np.zeros((1, 8)), "documents": np.array([[0, 0, 0, 1, 1, 2, -1, -1]])})
    assert teacher_positions(read, {}).tolist() == [list(range(8))]
    assert teacher_positions(read, {"documents_apart": True})[0, :6].tolist() == [0, 1, 2, 0, 1, 0]


@pytest.mark.parametrize("apart", [True, False])
def test_the_baseline_counts_positions_as_the_teacher_did(tmp_path, apart):
    """Targets follow from the position in the document; both documents of a window have so much of it in common."""
    first = LENGTH // 2 + 1  # no multiple of K
    mlsm = Mlsm(store := positional_store(tmp_path / "store", first=first, apart=apart))
    found = held_out_of(store, mlsm)
    for micro in found.batch.micro:
        place = micro.where_M.numpy() % LENGTH
        row = micro.targets.entries_E.numpy() // K
        expected = (place % first if apart else place)[row]
        assert np.array_equal(micro.targets.position_E.numpy(), expected)
    best = -(0.7 * np.log(0.7) + 0.3 * np.log(0.3 / (K - 1)))
    entropy = -(0.7 * np.log(0.7) + 0.3 * np.log(0.3))
    assert found.baseline["loss_by_position"] == pytest.approx(best - entropy, abs=0.05)


def test_logs_summaries_and_cards_tell_both(store, tmp_path, settings):
    config = StudentConfig(**settings | {"store": store.path, "run_dir": tmp_path / "students" / "run"})
    result = train(config)
    assert result["baseline"]["loss_by_position"] == result["baseline_loss_by_position"] < result["baseline_loss"]
    assert result["improvement"] == pytest.approx(1 - result["held_out_loss"] / result["baseline_loss"])
    by_position = 1 - result["held_out_loss"] / result["baseline_loss_by_position"]
    assert result["improvement_by_position"] == pytest.approx(by_position)
    lines = [json.loads(line) for line in (config.run_dir / "log.jsonl").read_text().splitlines()]
    assert lines[0]["baseline"] == result["baseline"]
    last = lines[-1]
    share = last["held_out"]["loss"] / result["baseline_loss_by_position"]
    assert last["held_out_vs_baseline_by_position"] == pytest.approx(share)
    text = training(result, config)
    first = text.index(f"{result['baseline_loss_by_position']:.4f} of the marginal by position")
    assert first < text.index(f"{result['baseline_loss']:.4f} of the marginal (a constant")
    card = (config.run_dir / "export" / "README.md").read_text()
    figures = [f"{value:.4f}" for value in (result["held_out_loss"], *result["baseline"].values())]
    assert f"| `loss` | {' | '.join(figures)} |" in card and "constant at each position" in card
    assert list((tmp_path / "students" / ".marginals").glob("*.npz"))
