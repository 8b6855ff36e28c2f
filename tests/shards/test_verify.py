"""verify finds every kind of damage, names it, and its repair lets the same encoding make the store whole."""

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import time
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make_store import make_store

from mlsm.commands.verify_shards import show
from mlsm.common import disk
from mlsm.common.durable import replace_json
from mlsm.common.errors import ShardError, StoreError
from shards import block_check, codec, verify
from shards.config import DeriveConfig, VerifyConfig, store_of
from shards.files import StoreFiles
from shards.manifest import fingerprint, with_checksum
from shards.reader import Store
from shards.schema import ShardMeta

UNITS = ("train", "train", "held_out")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("stores") / "lsp", max_length=512)[0].path


@pytest.fixture
def store(whole, tmp_path):
    """A copy that a test may damage."""
    return StoreFiles(shutil.copytree(whole, tmp_path / "lsp"))


def record_of(files, number=0):
    return files.record(Store.open(files.path).plan.units[number].id)


@pytest.mark.parametrize("settings", [VerifyConfig, DeriveConfig])
def test_a_tool_without_a_store_says_so(settings):
    with pytest.raises(ValueError, match="STORE is missing"):
        store_of(settings())


@pytest.mark.parametrize("k", [0, 300, 5000, 70_000])
def test_a_whole_store_of_any_index_width(tmp_path, k):
    files, *_ = make_store(tmp_path / "s", k=k, blocks=1, units=UNITS)
    for full in (False, True):
        begun = time.perf_counter()
        report = verify.verify(files.path, full=full)
        assert 0 < report["seconds"] <= time.perf_counter() - begun
        assert not report["damaged"] and not report["missing"] and not report["stray"]
        assert report["units"] == 3 and report["plans"][0]["missing"] == 0
    assert json.loads(json.dumps(report)) == report


def test_records_are_not_kept(store, monkeypatch):
    read, check, seen, alive = verify._read_record, verify._damage_in, [], []

    def watch(*args):
        record = read(*args)
        seen.append(weakref.ref(record))
        return record

    def count(*args):
        alive.append(sum(record() is not None for record in seen))
        return check(*args)

    monkeypatch.setattr(verify, "_read_record", watch)
    monkeypatch.setattr(verify, "_damage_in", count)
    assert not verify.verify(store.path, full=True, threads=1)["damaged"]
    assert alive == [1] * len(UNITS)


def test_a_record_that_is_lost_or_damaged_during_the_check(store, monkeypatch):
    survey, paths = verify._survey, sorted(store.units.glob("*.json"))

    def spoil_after(*args):
        found = survey(*args)
        paths[0].unlink()
        paths[1].write_text("{}")
        return found

    monkeypatch.setattr(verify, "_survey", spoil_after)
    report = verify.verify(store.path, full=True)
    assert [entry["file"] for entry in report["damaged"]] == [f"units/{paths[1].name}"]
    assert [entry["unit"] for entry in report["missing"]] == [paths[0].stem]


@pytest.mark.promise("4 one flipped bit")
@pytest.mark.promise("one flipped bit in a header …")
def test_every_byte_of_a_shard_is_covered(store):
    """A bit flipped anywhere, headers, padding and end mark included, is found in its block."""
    record = record_of(store)
    path = store.units / record.file
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    ends = [group["offset"] + group["length"] for group in record.groups]
    chosen = [*rng.integers(0, record.bytes, 30), 0, *ends, record.bytes - 1, record.bytes - 1025, ends[-1] + 300]
    for offset in map(int, chosen):
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ (1 << rng.integers(8))]) + whole[offset + 1 :])
        (damage,) = verify.verify(store.path, full=True)["damaged"]
        assert damage["unit"] == record.unit and damage["file"] == f"units/{record.file}"
        assert damage["offset"] <= offset < damage["offset"] + damage["length"]
    path.write_bytes(whole)
    assert not verify.verify(store.path, full=True)["damaged"]


def cut(files, record):
    path = files.units / record.file
    path.write_bytes(path.read_bytes()[:-1024])


def lose(files, record):
    (files.units / record.file).unlink()


def lose_the_end(files, record):
    path = files.units / record.file
    path.write_bytes(path.read_bytes()[:-3072] + bytes(3072))


def change_the_record(files, record):
    path = files.record_file(record.unit)
    path.write_text(path.read_text().replace('"windows"', '"window"'))


def cut_the_record(files, record):
    path = files.record_file(record.unit)
    path.write_text(path.read_text()[:-20])


def rename_the_record(files, record):
    path = files.record_file(record.unit)
    path.rename(path.with_name(f"{0:032}.json"))


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (cut, "bytes, its record says"),
        (lose, "shard is missing"),
        (lose_the_end, "end mark"),
        (change_the_record, "checksum"),
        (cut_the_record, "not readable as JSON"),
        (rename_the_record, "this is the record of unit"),
    ],
)
def test_damage_that_a_quick_look_finds_and_repair_removes(store, tmp_path, damage, problem):
    record = record_of(store)
    damage(store, record)
    report = verify.verify(store.path)
    assert len(report["damaged"]) == 1 and problem in report["damaged"][0]["problem"]
    others = {path: path.read_bytes() for path in store.units.glob("*.tar") if path.name != record.file}
    removed = verify.verify(store.path, repair=True)["repaired"]
    assert removed or damage is lose
    assert all(path.read_bytes() == content for path, content in others.items())
    assert not verify.verify(store.path, full=True)["damaged"]
    make_store(store.path, max_length=512)
    report = verify.verify(store.path, full=True)
    assert not report["damaged"] and not report["missing"]
    assert len(Store.open(store.path).split("train")) > 0


@pytest.mark.promise("5 zeroed page, swapped …")
def test_two_blocks_swapped_and_one_zeroed(store):
    record = record_of(store)
    path = store.units / record.file
    raw = bytearray(path.read_bytes())
    first, second = record.blocks[:2]
    length = min(first["length"], second["length"])
    a, b = (slice(group["offset"], group["offset"] + length) for group in (first, second))
    raw[a], raw[b] = raw[b], raw[a]
    path.write_bytes(raw)
    report = verify.verify(store.path, full=True)
    assert [entry["block"] for entry in report["damaged"]] == ["000000", "000001"]
    assert len(report["commands"]) == 1


def test_a_damaged_plan_is_named_and_removed(store):
    (plan,) = store.plans.glob("*.json")
    plan.write_text(plan.read_text().replace('"train"', '"held_out"', 1))
    (damage,) = verify.verify(store.path)["damaged"]
    assert damage["file"] == f"plans/{plan.name}" and damage["unit"] is None
    report = verify.verify(store.path, repair=True)
    assert report["repaired"] == [f"plans/{plan.name}"] and len(report["commands"]) == 1
    make_store(store.path, max_length=512)
    assert not verify.verify(store.path)["damaged"] and Store.open(store.path)


@pytest.mark.parametrize("spoil", [lambda raw: raw[:-20], lambda raw: raw.replace(b"k: 3", b"k: 5", 1)])
def test_a_damaged_command_is_named_and_stays(store, spoil, caplog):
    """From it follow defaults of training: a changed one must not be used in silence."""
    (plan,) = store.plans.glob("*.json")
    kept = plan.with_suffix(".yaml")
    replace_json(kept, with_checksum({"encode-lsp": {"note": "k: 3"}, "recipe": "small-encoder"}))
    assert not verify.verify(store.path)["damaged"] and store.command(plan.stem)["recipe"] == "small-encoder"
    kept.write_bytes(spoil(kept.read_bytes()))
    (damage,) = verify.verify(store.path)["damaged"]
    assert damage["file"] == f"plans/{kept.name}" and damage["unit"] is None
    assert store.command(plan.stem) == {} and f"{kept.name}: " in caplog.text
    assert "The encoding command restores it" in caplog.text
    report = verify.verify(store.path, repair=True)  # without it, other defaults would be taken in silence
    assert kept.exists() and not report["repaired"] and not report["commands"]
    assert [entry["file"] for entry in report["not_repaired"]] == [f"plans/{kept.name}"]
    lose(store, record_of(store))
    (command,) = verify.verify(store.path)["commands"]
    assert "--recipe" not in command


@pytest.mark.promise("6 missing shard …")
def test_what_is_missing_and_what_is_stray(store):
    record = record_of(store)
    store.record_file(record.unit).unlink()
    (store.units / ".unit.12.0123456789ab.tmp").write_bytes(b"x")
    (store.units / "notes.txt").write_text("mine")
    (store.units / "*.json").write_text("mine, too")
    (store.plans / ".p.12.0123456789ab.tmp").write_text("x")
    report = verify.verify(store.path, full=True)
    assert not report["damaged"] and [entry["unit"] for entry in report["missing"]] == [record.unit]
    kinds = {entry["file"].split("/")[1]: entry["kind"] for entry in report["stray"]}
    assert kinds == {
        record.file: "shard without a record",
        ".unit.12.0123456789ab.tmp": "temporary",
        ".p.12.0123456789ab.tmp": "temporary",
        "notes.txt": "not of a store",
        "*.json": "not of a store",
    }


def test_one_plan_is_checked_alone(store):
    """As every message advises for a store of several plans."""
    plan = Store.open(store.path).plan
    other = dataclasses.replace(plan, units=(*plan.units[:-1], dataclasses.replace(plan.units[-1], id="f" * 32)))
    store.publish_plan(other)
    lose(store, record_of(store, -1))
    of_one, of_other, of_both = (
        verify.verify(path) for path in (*(store.plans / f"{plan.id}.json" for plan in (plan, other)), store.path)
    )
    assert of_one["store"] == of_other["store"] == str(store.path) and not of_both["stray"]
    for report, lacking, units, damaged in ((of_one, 0, 3, 1), (of_other, 1, 2, 0), (of_both, 1, 3, 1)):
        assert (len(report["missing"]), report["units"], len(report["damaged"])) == (lacking, units, damaged)
        assert not report["stray"]
    assert [entry["plan"] for entry in of_other["plans"]] == [other.id]
    (store.plans / f"{other.id}.json").write_text("{}")
    assert not any("plans" in entry["file"] for entry in verify.verify(store.plans / f"{plan.id}.json")["damaged"])
    assert "plans" in verify.verify(store.plans / f"{other.id}.json")["damaged"][0]["file"]


def test_an_unfinished_plan_beside_a_finished_one_is_named(store, caplog):
    caplog.set_level("INFO")
    plan = Store.open(store.path).plan
    other = dataclasses.replace(plan, units=(*plan.units[:-1], dataclasses.replace(plan.units[-1], id="f" * 32)))
    store.publish_plan(other)
    assert Store.open(store.path).plan_id == plan.id
    for told in (f"The text of {plan.id} is read", f"Plan {other.id} is newer, but unfinished"):
        assert told in caplog.text
    verdict = show(verify.verify(store.path), VerifyConfig(store=str(store.path)))
    assert f"Readers use the newest finished plan; unfinished: {other.id}." in verdict


def test_the_plan_that_is_read_is_named_by_its_files(store, caplog):
    """The names come from the store: a line break in one must not look like a line of this program."""
    caplog.set_level("INFO")
    plan = Store.open(store.path).plan
    for path in store.plans.glob("*.json"):
        path.unlink()
    store.publish_plan(dataclasses.replace(plan, corpus={"files": {"a\nb.txt": {}, "c.txt": {}}}))
    (store.plans / f"{'0' * 32}.json").write_text("{}")
    os.utime(store.plans / f"{'0' * 32}.json", (1, 1))
    Store.open(store.path)
    assert rf"The text of {plan.id} (a\nb.txt and 1 more) is read, the newest that is finished." in caplog.text


def test_plans_older_than_the_newest_finished_one_are_not_read(store, caplog):
    caplog.set_level("INFO")
    plan, older = Store.open(store.path).plan, store.plans / f"{'0' * 32}.json"
    older.write_text("{}")
    os.utime(older, (1, 1))
    assert Store.open(store.path).plan_id == plan.id and f"has 2 plans. The text of {plan.id} is read" in caplog.text


def test_stray_files_are_listed_beside_a_damaged_plan_too(store):
    next(store.plans.glob("*.json")).write_text("{}")
    (store.units / "notes.txt").write_text("mine")
    report = verify.verify(store.path)
    assert report["damaged"] and {"kind": "not of a store"}.items() <= dict(report["stray"][0]).items()


def test_repair_leaves_what_was_encoded_anew_meanwhile(store, monkeypatch):
    record = record_of(store)
    path, shard = store.record_file(record.unit), store.units / record.file
    whole, check = shard.read_bytes(), verify._check_unit_again
    shard.write_bytes(whole[:-1])

    def encode_after(*args):
        damaged = check(*args)
        shard.write_bytes(whole)
        path.write_text(json.dumps(json.loads(path.read_text())))  # the same record in other bytes
        return damaged

    monkeypatch.setattr(verify, "_check_unit_again", encode_after)
    report = verify.verify(store.path, repair=True)
    assert report["damaged"] and report["repaired"] == [] and shard.exists() and path.exists()
    monkeypatch.undo()
    assert not verify.verify(store.path, full=True)["damaged"]


@pytest.mark.parametrize(
    ("pattern", "times"),  # a record or a plan is read twice before it is called damaged
    [("units/*.tar", 1), ("units/*.json", 2), ("plans/*.json", 2)]
    + [(pattern, 1000) for pattern in ("units/*.tar", "units/*.json", "plans/*.json")],
)
def test_repair_leaves_what_could_not_be_read(store, monkeypatch, pattern, times):
    """A read error of a disk or its server, whether it passes or lasts, does not show that the bytes are wrong."""
    path, open_to_read, failures = next(store.path.glob(pattern)), disk.open_to_read, []

    def fail(wanted):
        if wanted == path and len(failures) < times:
            failures.append(wanted)
            raise OSError(errno.ESTALE, "Stale file handle", str(wanted))
        return open_to_read(wanted)

    before = {path: path.read_bytes() for path in store.path.rglob("*") if path.is_file()}
    monkeypatch.setattr(disk, "open_to_read", fail)
    report = verify.verify(store.path, repair=True)
    assert failures and report["repaired"] == report["commands"] == []
    (kept,) = report["not_repaired"]
    assert ("was whole" if times < 3 else "may be whole") in kept["reason"]
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("pattern", ["units/*.json", "units/*.tar", "plans/*.json"])
def test_repair_names_what_it_may_not_remove(store, monkeypatch, pattern):
    """A record that stays keeps its shard; a shard that stays is of a unit that must be encoded again."""
    path, unlink = min(store.path.glob(pattern)), disk.unlink
    path.write_bytes(path.read_bytes()[:-20])

    def refuse(wanted):
        if wanted == path:
            raise PermissionError(errno.EPERM, "Operation not permitted", str(wanted))
        unlink(wanted)

    monkeypatch.setattr(disk, "unlink", refuse)
    report = verify.verify(store.path, repair=True)
    name = str(path.relative_to(store.path))
    assert report["not_repaired"] == [{"file": name, "reason": "Operation not permitted"}] and path.exists()
    is_shard = path.suffix == ".tar"
    assert len(report["repaired"]) == len(report["commands"]) == is_shard
    assert len(list(store.units.glob("*.tar"))) == 3
    shown = show(report, VerifyConfig(repair=True))
    assert f"{name}: Operation not permitted" in shown and ("Next:" in shown) == is_shard


def test_repair_does_not_remove_through_a_link(store, tmp_path):
    lose_the_end(store, record_of(store))
    store.units.rename(tmp_path / "elsewhere")
    store.units.symlink_to(tmp_path / "elsewhere")
    report = verify.verify(store.path, repair=True)
    (kept,) = report["not_repaired"]
    assert kept["reason"] == "units is a link out of the store" and report["repaired"] == report["commands"] == []


def test_repair_names_a_directory_with_the_name_of_a_record(store):
    path = store.record_file(record_of(store).unit)
    path.unlink()
    path.mkdir()
    assert verify.verify(store.path, repair=True)["not_repaired"] == [
        {"file": f"units/{path.name}", "reason": "it is a directory"}
    ]


def test_repair_leaves_a_whole_store_alone(store):
    before = {path: path.read_bytes() for path in store.path.rglob("*") if path.is_file()}
    assert verify.verify(store.path, repair=True)["repaired"] == []
    assert {path: path.read_bytes() for path in store.path.rglob("*") if path.is_file()} == before


def test_not_a_store_and_another_format_are_refused_and_untouched(store, tmp_path):
    with pytest.raises(StoreError, match="not a store"):
        verify.verify(tmp_path, repair=True)
    target = json.loads(store.target_file.read_text())
    target["settings"]["format"] = 2
    store.target_file.write_text(json.dumps(target))
    with pytest.raises(ShardError, match="format 2"):
        verify.verify(store.path, repair=True)


def forge(files, record, change):
    """Change a record and give it the checksum that fits."""
    values = json.loads(files.record_file(record.unit).read_text())
    change(values)
    del values["checksum"]
    files.record_file(record.unit).write_text(json.dumps(values | {"checksum": fingerprint(values)}))


def claim_a_petabyte(values):
    values["groups"][-1]["length"] += 1 << 50
    values["bytes"] += 1 << 50


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda values: values.update(file=f"../../{values['file']}"), "field file: expected a plain name"),
        (lambda values: values.update(target="0" * 32), "of target 000"),
        (lambda values: values["groups"][-1].update(length=8), "__stats__ of 8 bytes cannot hold the sums"),
        (claim_a_petabyte, "its record says 1,125,899,9"),
        (lambda values: values["groups"].pop(1), "does not begin where"),
        (lambda values: values.update(tokens=values["tokens"] + 1), "its blocks hold"),
        (lambda values: values["statistics"].update(entries=7), "the record says 7"),
        (lambda values: values["groups"][1].update(sha256="0" * 64), "end mark differs"),
    ],
)
def test_a_record_that_contradicts_itself_or_its_shard(store, change, problem):
    forge(store, record_of(store), change)
    assert problem in verify.verify(store.path, full=True)["damaged"][0]["problem"]


def test_a_shard_of_another_target_is_found_by_its_meta(store, tmp_path):
    other, *_ = make_store(tmp_path / "other", max_length=512, seed=1)
    record = record_of(other)
    shutil.copy(other.units / record.file, store.units)
    shutil.copy(other.record_file(record.unit), store.units)
    forge(store, record, lambda values: values.update(target=store.target()["target"]))
    assert not verify.verify(store.path)["damaged"]
    (damage,) = verify.verify(store.path, full=True)["damaged"]
    assert damage["block"] == "__meta__" and "another target" in damage["problem"]


@pytest.mark.parametrize(
    ("number", "problem"),
    [(0, "is not __meta__/meta.json"), (1, "not a whole plain file"), (-1, "not a whole plain file")],
)
def test_a_sparse_member_is_refused(store, number, problem):
    """tar and WebDataset would expand it to the 8 GB that its header claims, although all hashes fit."""
    record = record_of(store)
    path, group = store.units / record.file, record.groups[number]
    raw, begin = bytearray(path.read_bytes()), group["offset"]
    raw[begin + 156 : begin + 157], raw[begin + 483 : begin + 495] = b"S", b"77777777777\0"
    raw[begin + 148 : begin + 156] = b" " * 8
    raw[begin + 148 : begin + 156] = b"%06o\0 " % sum(raw[begin : begin + 512])
    digest = hashlib.sha256(raw[begin : begin + group["length"]]).hexdigest()
    path.write_bytes(raw.replace(group["sha256"].encode(), digest.encode()))  # also in the end mark
    forge(store, record, lambda values: values["groups"][number].update(sha256=digest))
    (damage,) = verify.verify(store.path, full=True)["damaged"]
    assert damage["block"] == group["name"] and problem in damage["problem"]
    if number == 1:
        with pytest.raises(ShardError, match=problem):
            Store.open(store.path).split("train").read([0])


META = ShardMeta("t", "u", k=300, vocab_size=1000, max_length=8)
BLOCK = {
    "ids": [5, 6, 7, 8],
    "lengths": [3, 1],
    "run_starts": [0, 2],
    "run_records": [0, 1],
    "nnz": [2, 0, 1, 3],
    "indices": [4, 9, 2, 0, 1, 299],
    "weights": [0.5, 0.5, 1, 0.5, 0.25, 0.25],
    "tail": [0, 0, 0, 0.0],
}


def packed(**changes):
    columns = codec.pack_block(META, **{name: np.array(values) for name, values in BLOCK.items()})
    return columns | {name: np.array(values, columns[name].dtype) for name, values in changes.items()}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"lengths": [3, 2]}, "windows of 4 tokens"),
        ({"lengths": [4]}, "1 windows"),
        ({"ids": [5, 6, 7, 1000]}, "vocabulary"),
        ({"run_starts": [1, 2]}, "document runs"),
        ({"run_starts": [0, 0]}, "document runs"),
        ({"run_starts": [0, 4]}, "document runs"),
        ({"nnz": [2, 0, 1, 2]}, "weights"),
        ({"nnz": [1, 2, 1, 2]}, "increasing"),
        ({"tail": [0]}, "no row"),
        ({"layout": [16, 12]}, "layout"),
        ({"atoms": codec.pack_indices(np.array([9, 4, 2, 0, 1, 299]), 12)}, "increasing"),
        ({"atoms": codec.pack_indices(np.array([4, 9, 2, 0, 299, 1]), 12)}, "increasing"),
        ({"atoms": codec.pack_indices(np.array([4, 9, 2, 0, 1, 300]), 12)}, "below k"),
    ],
)
def test_columns_that_fit_their_hash_but_not_the_format(changes, problem):
    group = {"windows": 2, "tokens": 4}
    block_check.check_block(packed(), group, META)
    with pytest.raises(ShardError, match=problem):
        block_check.check_block(packed(**changes), group, META)


@settings(max_examples=200)
@given(st.lists(st.integers(0, 4095), max_size=23), st.integers(1, 4))
def test_the_fast_unpacking_equals_the_plain_one(values, pairs):
    values = np.array(values, np.int64)
    before, block_check._PAIRS = block_check._PAIRS, pairs
    try:
        parts = [part.copy() for part in block_check._unpack_12(codec.pack_indices(values, 12), len(values))]
    finally:
        block_check._PAIRS = before
    assert np.array_equal(np.concatenate([*parts, []]), values)
    rising, largest = block_check._find_rising(parts, len(values))
    assert np.array_equal(rising, values[1:] > values[:-1]) and largest == values.max(initial=0)
