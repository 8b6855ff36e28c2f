"""Stores: what is written is read, in an order that is counted, and damage is never silent."""

import io
import json
import os
import pickle
import subprocess
from pathlib import Path

import numpy as np
import pytest
import webdataset as wds
from make_store import make_store, truth_windows

from mlsm.common.errors import ShardError, StoreError
from shards import codec, writer
from shards.manifest import with_checksum
from shards.members import decode_block, group_columns
from shards.reader import Store
from shards.verify import verify
from shards.writer import FIDELITY_STRIDE


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("stores") / "lsp")


def test_every_window_and_row_comes_back(made):
    files, _, truth = made
    windows = Store.open(files.path).split("train")
    expected = list(truth_windows(truth["train"]))
    assert len(windows) == len(expected)
    chosen = np.random.default_rng(1).permutation(len(windows))[:60]
    batch = windows.read(chosen)
    window_M, position_M = np.nonzero(batch.documents >= 0)
    rows = windows.targets(batch, window_M, position_M)
    for m, (window, position) in enumerate(zip(window_M, position_M, strict=True)):
        ids, tokens = expected[chosen[window]]
        indices, weights, tail = tokens[position]
        got = slice(rows.indptr[m], rows.indptr[m + 1])
        assert batch.ids[window, position] == ids[position]
        assert np.array_equal(rows.indices[got], indices)
        assert np.allclose(rows.weights[got] * weights.sum(), weights, rtol=0.03, atol=1e-3)
        assert rows.tail[m] == pytest.approx(tail, rel=0.03, abs=2e-5)


def test_order_visits_every_window_once_and_any_part_of_it_follows(made):
    windows = Store.open(made[0].path).split("train")
    whole = windows.order(42, 0, 0, len(windows))
    assert np.array_equal(np.sort(whole), np.arange(len(windows)))
    assert np.array_equal(windows.order(42, 0, 700, 1500), whole[700:1500])
    assert not np.array_equal(windows.order(42, 1, 0, len(windows)), whole)
    assert not np.array_equal(windows.order(43, 0, 0, len(windows)), whole)
    with pytest.raises(ValueError, match="leave the epoch"):
        windows.order(42, 0, 0, len(windows) + 1)


def test_order_across_shuffle_groups(tmp_path, monkeypatch):
    monkeypatch.setattr("shards.windows.SHUFFLE_BLOCKS", 3)
    files, *_ = make_store(tmp_path / "s", k=0, blocks=4, max_length=1024, units=("train", "train"))
    windows = Store.open(files.path).split("train")
    whole = windows.order(1, 0, 0, len(windows))
    assert np.array_equal(np.sort(whole), np.arange(len(windows)))
    assert all(np.array_equal(windows.order(1, 0, i, i + 50), whole[i : i + 50]) for i in range(0, len(whole) - 50, 17))


@pytest.mark.promise("24 no documents …")
def test_a_unit_without_windows_is_an_empty_split(tmp_path):
    files, *_ = make_store(tmp_path / "s", blocks=0, units=("train",))
    windows = Store.open(files.path).split("train")
    assert len(windows) == 0 and len(windows.order(1, 0, 0, 0)) == 0


def test_plain_webdataset_gives_the_same_windows(made):
    files, _, truth = made
    store = Store.open(files.path)
    blocks = list(wds.WebDataset(store.urls("train"), shardshuffle=False).map(decode_block))
    assert all(isinstance(block["ids.npy"], np.ndarray) for block in blocks)
    assert len(blocks) == len(truth["train"])
    stream = wds.WebDataset(store.urls("train"), shardshuffle=False).compose(codec.block_windows)
    windows = store.split("train")
    for number, window in enumerate(stream):
        batch = windows.read([number])
        length = batch.lengths[0]
        rows = windows.targets(batch, np.zeros(length, int), np.arange(length))
        assert np.array_equal(window["ids"], batch.ids[0, :length])
        assert np.array_equal(window["documents"], batch.documents[0, :length])
        assert np.array_equal(window["atoms"], rows.indices) and np.array_equal(window["nnz"], np.diff(rows.indptr))
        assert np.array_equal(window["weights"], rows.weights) and np.array_equal(window["tail"], rows.tail)
    assert number + 1 == len(windows)


def test_marginal_and_counts_equal_the_plain_sums(made):
    files, _, truth = made
    windows = Store.open(files.path).split("train")
    mean = np.zeros(300)
    for block in truth["train"]:
        weights = block["weights"] / np.repeat(1 - block["tail"], block["nnz"])
        np.add.at(mean, block["indices"], weights)
    assert np.allclose(windows.mean_distribution(), mean / mean.sum(), rtol=1e-9)
    counts = np.bincount(np.concatenate([block["ids"] for block in truth["train"]]), minlength=1000)
    assert np.array_equal(windows.token_counts(), counts)


def test_equal_input_gives_equal_bytes(tmp_path):
    first, *_ = make_store(tmp_path / "a", blocks=1)
    second, *_ = make_store(tmp_path / "b", blocks=1)
    assert sorted(p.name for p in first.units.glob("*.tar")) == sorted(p.name for p in second.units.glob("*.tar"))


def test_system_tar_reads_a_shard(made):
    listing = subprocess.run(
        ["tar", "tf", Store.open(made[0].path).urls()[0]], capture_output=True, text=True, check=True
    )
    names = listing.stdout.split()
    assert names[0] == "__meta__/meta.json" and names[-1] == "__end__/end.json" and "000000.ids.npy" in names


def test_ids_only_store(tmp_path):
    files, _, truth = make_store(tmp_path / "ids", k=0)
    store = Store.open(files.path)
    windows = store.split("held_out")
    expected = list(truth_windows(truth["held_out"]))
    batch = windows.read(np.arange(len(windows)))
    assert all(np.array_equal(batch.ids[i, : len(ids)], ids) for i, (ids, _) in enumerate(expected))
    assert "nnz_per_token" not in store.report()


@pytest.mark.parametrize("where", ["payload", "header", "stats"])
def test_one_flipped_bit_is_found_at_the_first_read(tmp_path, where):
    files, *_ = make_store(tmp_path / "s", units=("train", "held_out"))
    store = Store.open(files.path)
    record = store.records("train")[0]
    group = record.groups[{"payload": 1, "header": 1, "stats": -1}[where]]
    offset = group["offset"] + {"payload": 2000, "header": 5, "stats": 700}[where]
    _flip(files.units / record.file, offset)
    windows = store.split("train")
    with pytest.raises(ShardError, match=rf"block {group['name']} .* encoding command that it names"):
        windows.token_counts() if where == "stats" else windows.read(np.arange(3))


@pytest.mark.parametrize("how", ["in place", "replaced", "in place, by another process's reader"])
def test_a_block_that_was_verified_is_verified_again_after_its_file_changed(tmp_path, how):
    """The bytes stay well formed, so only the hash can tell that they are others."""
    files, *_ = make_store(tmp_path / "s", units=("train",))
    windows = Store.open(files.path).split("train")
    [record] = windows.store.records("train")
    group, path = record.groups[1], files.units / record.file
    raw = path.read_bytes()[group["offset"] : group["offset"] + group["length"]]
    ids = group_columns(np.frombuffer(raw, np.uint8), group["name"])["ids"]
    place = group["offset"] + raw.index(ids.tobytes()) + 2 * ids.itemsize
    expected = windows.read([0]).ids
    assert np.array_equal(windows.read([0]).ids, expected), "read twice, so verified before it changes"
    if how == "replaced":
        (tmp_path / "copy").write_bytes(path.read_bytes())
        os.replace(tmp_path / "copy", path)
        windows._make_caches()  # as when so many other blocks were read meanwhile that the file is mapped again
    elif how != "in place":
        windows = pickle.loads(pickle.dumps(windows))
    _flip(path, place)
    with pytest.raises(ShardError, match=rf"block {group['name']} .* does not match its hash"):
        windows.read([0])
    _flip(path, place)  # back
    assert np.array_equal(windows.read([0]).ids, expected), "a block that is whole again is read again"


@pytest.mark.parametrize(("added", "refused"), [(0, False), (1, False), (2, True)])
@pytest.mark.parametrize("name", ["mass", "token_counts"])
def test_sums_that_a_unit_of_so_few_tokens_cannot_have_are_refused(tmp_path, monkeypatch, name, added, refused):
    """Hashes are right, as a faulty writer would leave them. One LSP or id can have all tokens, and one by rounding."""

    def wrong(self, columns, block):
        tokens = len(columns["ids"])
        self._token_counts[7], self.sums["mass"][7] = (
            tokens + added if name == one else 1 for one in ("token_counts", "mass")
        )

    monkeypatch.setattr(writer.UnitWriter, "_count", wrong)
    files, *_ = make_store(tmp_path / "s", blocks=1, units=("train",))
    windows = Store.open(files.path).split("train")
    read = windows.mean_distribution if name == "mass" else windows.token_counts
    if refused:
        with pytest.raises(ShardError, match=rf"sums called {name} are larger than its [\d,]+ tokens"):
            read()
    else:
        assert read()[7] > 0


def test_a_missing_shard_and_a_missing_record(tmp_path):
    files, plan, _ = make_store(tmp_path / "s", units=("train", "held_out"))
    store = Store.open(files.path)
    (files.units / store.records("train")[0].file).unlink()
    with pytest.raises(ShardError, match="is missing"):
        store.split("train").read([0])
    files.record_file(plan.units[0].id).unlink()
    with pytest.raises(StoreError, match="unfinished: 1 of 2"):
        Store.open(files.path)
    with pytest.raises(StoreError, match="not a store"):
        Store.open(tmp_path)


@pytest.mark.promise("26 an exception inside …")
def test_an_exception_inside_the_writer_publishes_nothing(tmp_path):
    from shards.schema import ShardMeta
    from shards.writer import UnitWriter

    files, *_ = make_store(tmp_path / "s", units=("train",))
    before = sorted(files.units.iterdir())
    with pytest.raises(RuntimeError), UnitWriter(files, ShardMeta("t", "unit9", 0, 100, 8)):
        raise RuntimeError
    assert sorted(files.units.iterdir()) == before


def test_two_writers_of_one_unit_leave_one_shard(tmp_path):
    files, _, truth = make_store(tmp_path / "s", blocks=1, units=("train",))
    make_store(tmp_path / "s", blocks=1, units=("train",))
    assert len(list(files.units.glob("*.tar"))) == 1 and len(list(files.units.glob("*.json"))) == 1


def test_another_target_in_the_same_directory_is_refused(tmp_path):
    make_store(tmp_path / "s", blocks=1)
    with pytest.raises(StoreError, match="max_length is 32, not 64"):
        make_store(tmp_path / "s", blocks=1, max_length=64)


def _edit(path, change):
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


@pytest.mark.parametrize(("id", "refused"), [(999, False), (1000, True), (-1, True), ([0, 1000], True), (1.0, True)])
def test_special_ids_are_ids_of_the_vocabulary(tmp_path, id, refused):
    files, *_ = make_store(tmp_path / "s", blocks=1, vocab_size=1000)
    name = "all" if isinstance(id, list) else "mask"
    target = json.loads(files.target_file.read_text())
    target["special_ids"][name] = id
    files.target_file.write_text(json.dumps(with_checksum({key: target[key] for key in target.keys() - {"checksum"}})))
    if refused:
        with pytest.raises(ShardError, match="json: (field )?special_ids.*ncode again elsewhere"):
            Store.open(files.path)
    else:
        assert Store.open(files.path).special_ids["mask"] == id


def test_changed_numbers_in_small_files_are_found(tmp_path):
    files, plan, _ = make_store(tmp_path / "s", blocks=1)
    for path, change, message in [
        (files.target_file, lambda values: values["settings"].update(k=7), "does not match its fingerprint"),
        (files.target_file, lambda values: values.clear(), "does not match its fingerprint"),
        (files.plans / f"{plan.id}.json", lambda values: values["units"].pop(), "holds plan"),
        (files.record_file(plan.units[0].id), lambda values: values["groups"][1].update(windows=3), "checksum"),
    ]:
        whole = path.read_bytes()
        _edit(path, change)
        with pytest.raises(ShardError, match=message):
            len(Store.open(files.path).split("train"))
        path.write_bytes(whole)


@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_following_the_hint_repairs_a_damaged_shard(tmp_path, damage):
    files, plan, _ = make_store(tmp_path / "s", blocks=1, units=("train",))
    shard = files.units / files.record(plan.units[0].id).file
    if damage == "flipped":
        _flip(shard, 5000)
    else:
        os.truncate(shard, 4000)
    with pytest.raises(ShardError, match=r"mlsm verify-shards .* --repair, and run the encoding command that it names"):
        Store.open(files.path).split("train").read([0])
    verify(files.path, repair=True)
    make_store(tmp_path / "s", blocks=1, units=("train",))
    Store.open(files.path).split("train").read([0])


def _environment():
    here = Path(__file__).resolve()
    return os.environ | {"PYTHONPATH": f"{here.parents[2]}{os.pathsep}{here.parent}"}


def _flip(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_fidelity_is_sampled_over_all_blocks_and_reported(tmp_path):
    files, plan, truth = make_store(tmp_path / "s", max_length=512, blocks=2)
    fidelity = Store.open(files.path).report()["fidelity"]
    tokens = tails = 0
    for split in truth.values():
        for first in range(0, len(split), 2):  # two blocks a unit
            pair = split[first : first + 2]
            nnz, tail = (np.concatenate([block[name] for block in pair]) for name in ("nnz", "tail"))
            sampled = np.arange(0, len(nnz), FIDELITY_STRIDE)
            tokens += (nnz[sampled] > 0).sum()
            tails += tail[sampled][nnz[sampled] > 0].sum()
    assert fidelity["tokens"] == tokens > 100 and fidelity["tail"] == pytest.approx(tails / tokens, rel=1e-6)
    assert 0 < fidelity["kl"] < 0.2 and 0 < fidelity["tv"] < 0.2


def test_members_are_those_that_webdataset_writes():
    samples = {"000000": {"ids.npy": bytes(range(200)) * 7, "nnz.npy": b"", "atoms.npy": bytes(1024)}}
    buffer = io.BytesIO()
    with wds.TarWriter(buffer, encoder=False, mtime=0, user="mlsm", group="mlsm") as tar:
        for key, members in samples.items():
            tar.write({"__key__": key, **members})
        length = tar.tarstream.offset
    assert writer._tar_members(samples) == buffer.getvalue()[:length]
