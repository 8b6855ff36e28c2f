"""A derived store equals one that was encoded with the smaller n, up to what 8 bits can tell."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from http_store import serving
from make_store import make_store, random_block

from mlsm.common.errors import RequestError, ShardError, StoreError
from pipeline.targets.distributions import distributions
from shards.derive import derive
from shards.files import StoreFiles
from shards.manifest import Plan, PlannedUnit, fingerprint
from shards.reader import Store
from shards.schema import LSP_OCTAVES, ShardMeta
from shards.shard_file import blocks
from shards.verify import verify
from shards.writer import UnitWriter

K, LENGTH, WINDOWS = 300, 32, 40
UNITS = ("train", "train", "held_out")


def encoded(path, top_n):
    """A store of the same random codes at any n, through the pipeline's own cut."""
    rng = np.random.default_rng(3)
    settings = {"kind": "lsp", "k": K, "top_n": top_n}
    special = {"pad": 0, "cls": 1, "sep": 2, "mask": 3, "all": [0, 1, 2, 3]}
    target = {
        "target": fingerprint(settings),
        "settings": settings,
        "lineage": {"teacher_name": "none"},
        "k": K,
        "vocab_size": 1000,
        "max_length": LENGTH,
        "weight_octaves": LSP_OCTAVES,
        "special_ids": special,
    }
    files = StoreFiles(path)
    files.create(target)
    units = tuple(PlannedUnit(f"{number:032}", split, "text", 0, 9) for number, split in enumerate(UNITS))
    files.publish_plan(Plan({}, units))
    for unit in units:
        with UnitWriter(files, ShardMeta(target["target"], unit.id, K, 1000, LENGTH)) as writer:
            for _ in range(2):
                block = random_block(rng, windows=WINDOWS, max_length=LENGTH, vocab_size=1000, k=0)
                nnz = np.where(block["ids"] < 4, 0, rng.integers(0, 60, len(block["ids"])))
                indptr = np.concatenate(([0], np.cumsum(nnz)))
                indices = np.concatenate([np.sort(rng.choice(K, n, replace=False)) for n in nnz]).astype(np.int32)
                values = (rng.gamma(0.7, size=len(indices)) + 1e-3).astype(np.float32)
                rows = distributions(SimpleNamespace(indptr=indptr, indices=indices, values=values), top_n)
                writer.write_block(
                    **block, nnz=np.diff(rows.indptr), indices=rows.indices, weights=rows.weights, tail=rows.tail
                )
    return Store.open(path)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return encoded(tmp_path_factory.mktemp("stores") / "lsp-source", 32)


def columns_of(store):
    return [
        {name: array.copy() for name, array in columns.items()}
        for record in store.records()
        for _, columns in blocks(store.files, record)
    ]


def test_it_equals_encoding_with_the_smaller_n(source, tmp_path):
    report = derive(source.path, 8, tmp_path)
    ours, direct = Store.open(report["store"]), encoded(tmp_path / "direct", 8)
    rows = tied = 0
    for derived, encoded_8, stored in zip(*map(columns_of, (ours, direct, source)), strict=True):
        for name in ("ids", "lengths", "run_starts", "run_records", "nnz", "layout"):
            assert np.array_equal(derived[name], encoded_8[name])
        step = derived["tail"].astype(int) - encoded_8["tail"]
        assert np.abs(step[encoded_8["tail"] < 160]).max() <= 1  # mass of 1e-3 and more, in 16ths of an octave
        assert np.abs(derived["tail"] != encoded_8["tail"]).mean() < 0.2
        starts = [np.concatenate(([0], np.cumsum(columns["nnz"], dtype=np.int64))) for columns in (derived, stored)]
        atoms = [unpacked(columns) for columns in (derived, encoded_8)]
        for t in range(len(derived["nnz"])):
            kept = slice(*starts[0][t : t + 2])
            before = np.sort(stored["weights"][slice(*starts[1][t : t + 2])])
            rows += 1
            if len(before) > 8 and before[7] == before[8]:  # 8 bits cannot tell which is larger
                tied += 1
                assert np.array_equal(np.sort(derived["weights"][kept]), np.sort(encoded_8["weights"][kept]))
            else:
                assert np.array_equal(atoms[0][kept], atoms[1][kept])
                assert np.array_equal(derived["weights"][kept], encoded_8["weights"][kept])  # the very codes
    assert rows > 5000 and tied < rows / 4


def unpacked(columns):
    from shards.codec import unpack_indices

    return unpack_indices(columns["atoms"], np.arange(len(columns["weights"])), 12)


def test_statistics_and_lineage(source, tmp_path):
    report = derive(source.path, 8, tmp_path)
    ours, direct = Store.open(report["store"]), encoded(tmp_path / "direct", 8)
    assert ours.settings["derived_from"] == source.target_id and ours.settings["top_n"] == 8
    assert ours.plan_id == source.plan_id and ours.target_id not in (source.target_id, direct.target_id)
    assert "-n8-" in report["store"] and report["store"].endswith(ours.target_id[:12])
    for mine, its in zip(ours.records(), direct.records(), strict=True):
        for name in ("documents", "entries", "coded_tokens", "nnz_histogram"):
            assert mine.statistics[name] == its.statistics[name]
        for name in ("kept_mass", "entropy_nats"):
            assert mine.statistics[name] == pytest.approx(its.statistics[name], rel=2e-3)
    assert np.allclose(
        ours.split("train").mean_distribution(), direct.split("train").mean_distribution(), rtol=0.05, atol=1e-4
    )
    assert not verify(ours.path, full=True)["damaged"]


def test_running_again_finishes_what_is_missing_with_equal_bytes(source, tmp_path):
    report = derive(source.path, 8, tmp_path)
    files = StoreFiles(report["store"])
    before = {path.name: path.read_bytes() for path in files.units.iterdir()}
    assert not report["finished_before"] and report["new_units"] == 3
    victim = files.record(source.plan.units[1].id)
    files.record_file(victim.unit).unlink()
    (files.units / victim.file).unlink()
    again = derive(source.path, 8, tmp_path)
    assert again["new_units"] == 1 and again["new_tokens"] == victim.tokens
    assert {path.name: path.read_bytes() for path in files.units.iterdir()} == before
    assert derive(source.path, 8, tmp_path)["finished_before"]


def test_a_source_that_changed_without_effect_is_derived_once(source, tmp_path):
    """Its record then names the new source: otherwise every later command would derive the unit again."""
    files = StoreFiles(derive(source.path, 8, tmp_path)["store"])
    record = files.record(source.plan.units[1].id)
    earlier = replace(record, environment=record.environment | {"source_sha256": "0" * 64})
    files.record_file(record.unit).write_text(json.dumps(earlier.as_dict()))
    assert derive(source.path, 8, tmp_path)["new_units"] == 1
    assert derive(source.path, 8, tmp_path)["finished_before"] and not verify(files.path, full=True)["damaged"]


def test_what_is_missing_is_derived_from_the_plan_that_lacks_it(source, tmp_path):
    stores = tmp_path / "stores"
    shutil.copytree(source.path, stores / f"lsp-{source.target_id[:12]}")
    files = StoreFiles(derive(stores / f"lsp-{source.target_id[:12]}", 8, tmp_path)["store"])
    files.record_file(source.plan.units[1].id).unlink()
    (command,) = verify(files.path)["commands"]
    assert f"{source.target_id[:12]}/plans/{source.plan_id}.json" in command


def test_a_store_with_a_lost_shard_is_not_finished(source, tmp_path):
    made = Store.open(derive(source.path, 8, tmp_path)["store"])
    (made.files.units / next(iter(made.iter_records())).file).unlink()
    with pytest.raises(ShardError, match="is missing; its record says .* --repair"):
        derive(source.path, 8, tmp_path)


def test_what_cannot_be_derived_is_refused(source, tmp_path):
    for top_n in (32, 40):
        with pytest.raises(StoreError, match=f"keeps 32 entries .* --top-n {top_n} cannot be derived.*encode-lsp comm"):
            derive(source.path, top_n, tmp_path)
    ids, *_ = make_store(tmp_path / "ids", k=0, blocks=1)
    with pytest.raises(StoreError, match="only token ids"):
        derive(ids.path, 8)
    assert not (tmp_path / "stores").exists()


def test_a_derived_store_is_put_beside_the_directory_one_is_in(source, tmp_path, monkeypatch):
    shutil.copytree(source.path, tmp_path / "stores" / "lsp")
    monkeypatch.chdir(tmp_path / "stores" / "lsp")
    made = derive(".", 8)["store"]
    assert Path(made).resolve().parent == tmp_path / "stores" and Path(made).name.startswith("lsp-n8-")
    monkeypatch.chdir(tmp_path)
    assert derive("stores/lsp", 7)["store"].startswith("stores/lsp-n7-"), "the path is that of the command"


def test_a_store_is_not_derived_into_a_store(source):
    with pytest.raises(StoreError, match="is a store itself"):
        derive(source.path, 8, source.path)
    assert not (Path(source.path) / "stores").exists()


def test_a_remote_store_needs_a_place(source):
    with serving(Path(source.path).parent) as web, pytest.raises(RequestError, match="is remote: choose with --output"):
        derive(f"{web.url}/{Path(source.path).name}", 8)


def test_damage_in_the_source_publishes_nothing(source, tmp_path):
    files = StoreFiles(shutil.copytree(source.path, tmp_path / "lsp"))
    record = files.record(source.plan.units[1].id)
    path = files.units / record.file
    raw = bytearray(path.read_bytes())
    raw[record.blocks[1]["offset"] + 3000] ^= 4
    path.write_bytes(raw)
    with pytest.raises(ShardError, match=r"block 000001: does not match its hash.*verify-shards"):
        derive(files.path, 8, tmp_path)
    (made,) = (tmp_path / "stores").iterdir()
    assert [path.stem for path in (made / "units").glob("*.json")] == [source.plan.units[0].id]
    assert not list((made / "units").glob(".*"))
