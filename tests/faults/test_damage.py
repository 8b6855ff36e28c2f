"""Damaged stores: every cut, flipped bit, zeroed page and exchanged block is an error, or changes nothing.

The oracle is the whole store, read once before anything is damaged: whatever a damaged store still gives must equal
it. hypothesis chooses where the damage is.
"""

import hashlib
import io
import json
import os
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from make_store import make_store
from test_commit import write

from mlsm.common.errors import ShardError, StoreError
from shards.files import StoreFiles
from shards.manifest import UnitRecord
from shards.reader import Store, finished_stores

CASES = int(os.environ.get("MLSM_FAULT_CASES", 60))  # `make faults` asks for more
thorough = settings(
    max_examples=CASES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)


def everything(path):
    """All that a reader can get from a store, as one hash a part."""
    store = Store.open(path)
    parts = {
        "settings": store.settings,
        "target": [store.k, store.vocab_size, store.max_length, store.special_ids, store.weight_octaves],
        "plan": [[unit.id, unit.split] for unit in store.plan.units],
        "report": store.report(),
    }
    for split in ("train", "held_out"):
        windows = store.split(split)
        batch = windows.read(windows.order(1, 0, 0, len(windows)))
        tokens = np.nonzero(batch.documents >= 0)
        arrays = [batch.ids, batch.documents, batch.lengths]
        if store.hidden:
            hidden = windows.hidden(batch, *tokens)
            arrays += [hidden.rows_Md, hidden.coded_M, windows.token_counts(), *windows.hidden_statistics()]
        else:
            rows = windows.targets(batch, *tokens)
            arrays += [rows.indptr, rows.indices, rows.weights, rows.tail]
            arrays += [windows.token_counts(), windows.mean_distribution()]
        parts[split] = hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()
    return parts


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A whole store and what it holds."""
    path = tmp_path_factory.mktemp("damage") / "store"
    write(path)
    return path, everything(path)


@pytest.fixture
def copy(store, tmp_path):
    """A function that puts the store back as it was."""

    def whole():
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
        shutil.copytree(store[0], tmp_path / "store")
        return tmp_path / "store"

    return whole


def found_or_harmless(path, truth):
    """True when reading fails with one of our errors; False when all that is read is as it was."""
    try:
        read = everything(path)
    except (ShardError, StoreError) as error:
        assert str(path) in str(error) or ".tar" in str(error), error
        return True
    assert read == truth
    return False


def first_record(path):
    files = StoreFiles(path)
    return files, files.record("unit0")


def member_ranges(shard):
    """Byte ranges of a shard by kind: header name, size field, rest of the header, payload, padding, end."""
    ranges = {"name": [], "size": [], "header": [], "payload": [], "padding": []}
    with tarfile.open(shard) as tar:
        for member in tar.getmembers():
            start, data = member.offset, member.offset_data
            ranges["name"].append((start, start + 100))
            ranges["size"].append((start + 124, start + 136))
            ranges["header"].append((start + 100, data))
            ranges["payload"].append((data, data + member.size))
            padded = data + -(-member.size // 512) * 512
            ranges["padding"].append((data + member.size, padded))
    ranges["end of archive"] = [(padded, shard.stat().st_size)]
    return {kind: [r for r in found if r[1] > r[0]] for kind, found in ranges.items()}


def flip(path, offset, bit):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << bit]))


@pytest.mark.promise(
    "one flipped bit in a header name, size, other header, payload, padding: found at the first read of that "
    "block; anywhere: found by a full verification",
    cases="6 × 60",
)
@pytest.mark.promise("4 one flipped bit")
@pytest.mark.parametrize("kind", ["name", "size", "header", "payload", "padding", "end of archive"])
def test_one_flipped_bit_in_a_shard(store, copy, kind):
    _, record = first_record(store[0])
    ranges = member_ranges(store[0] / "units" / record.file)[kind]
    last_hashed = record.groups[-1]["offset"] + record.groups[-1]["length"]
    begin_hashed = record.groups[1]["offset"]  # the reader needs nothing of __meta__: the record says more

    @thorough
    @given(st.data())
    def prove(data):
        start, stop = data.draw(st.sampled_from(ranges))
        offset, bit = data.draw(st.integers(start, stop - 1)), data.draw(st.integers(0, 7))
        path = copy()
        shard = path / "units" / record.file
        flip(shard, offset, bit)
        assert found_or_harmless(path, store[1]) or not begin_hashed <= offset < last_hashed

    prove()


@pytest.mark.promise("a shard cut anywhere, at member boundaries above all", cases="60")
@pytest.mark.promise("3 shard cut")
def test_a_shard_cut_anywhere(store, copy):
    _, record = first_record(store[0])
    kinds = member_ranges(store[0] / "units" / record.file).values()
    edges = sorted({edge for ranges in kinds for both in ranges for edge in both if edge < record.bytes})

    @thorough
    @given(st.one_of(st.integers(0, record.bytes - 1), st.sampled_from(edges)))
    def prove(length):
        path = copy()
        os.truncate(path / "units" / record.file, length)
        assert found_or_harmless(path, store[1])

    prove()


@pytest.mark.promise("3 shard cut")
def test_a_shard_with_something_behind_it(store, copy):
    _, record = first_record(store[0])
    path = copy()
    with open(path / "units" / record.file, "ab") as file:
        file.write(bytes(512))
    assert found_or_harmless(path, store[1])


@pytest.mark.promise(
    "record, plan and target: one flipped bit or a cut is an error, or changes no value",
    cases="6 × 240",
)
@pytest.mark.promise("4 one flipped bit")
@pytest.mark.parametrize("kind", ["record", "plan", "target"])
@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_damaged_json(store, copy, kind, damage):
    """An error, or the same values (a bit in the 17th digit of a number need not change it)."""
    pick = {"record": "units/unit0.json", "plan": "plans/*.json", "target": "target.json"}[kind]
    source = next(store[0].glob(pick))
    raw, values = source.read_bytes(), json.loads(source.read_bytes())
    found = []

    @settings(thorough, max_examples=4 * CASES)
    @given(st.integers(0, len(raw) - 1), st.integers(0, 7))
    def prove(offset, bit):
        path = copy()
        victim = path / source.relative_to(store[0])
        if damage == "flip":
            flip(victim, offset, bit)
        else:
            os.truncate(victim, offset)
        if found_or_harmless(path, store[1]):
            found.append(offset)
        else:
            assert json.loads(victim.read_bytes()) == values

    prove()
    assert len(found) > 2 * CASES


@pytest.mark.promise(
    "zeroed page, blocks swapped or twice; shards or records of two units exchanged; a record of another store",
    cases="60, 3",
)
@pytest.mark.promise("5 zeroed page, swapped or doubled blocks")
@thorough
@given(st.data())
def test_zeroed_pages_and_exchanged_blocks(store, copy, data):
    path = copy()
    files, record = first_record(path)
    shard = files.units / record.file
    raw = bytearray(shard.read_bytes())
    one, other = record.blocks
    how = data.draw(st.sampled_from(["page", "swap", "twice"]))
    if how == "page":  # of 4096 bytes, wherever the file system may put the file's begin
        last = record.groups[-1]["offset"] + record.groups[-1]["length"]
        page = data.draw(st.integers(one["offset"], last - 4096))
        raw[page : page + 4096] = bytes(4096)
    else:
        parts = [raw[block["offset"] : block["offset"] + block["length"]] for block in (one, other)]
        both = [parts[1], parts[0]] if how == "swap" else [parts[0], parts[0]]
        begin, end = one["offset"], other["offset"] + other["length"]
        raw[begin:end] = b"".join(both).ljust(end - begin, b"\0")[: end - begin]
    shard.write_bytes(raw)
    assert found_or_harmless(path, store[1])


@pytest.mark.promise("zeroed page, blocks …")
@pytest.mark.promise("5 zeroed page, swapped …")
def test_shards_of_two_units_exchanged(store, copy):
    path = copy()
    one, other = sorted((path / "units").glob("*.tar"))
    one.rename(path / "x")
    other.rename(one)
    (path / "x").rename(other)
    assert found_or_harmless(path, store[1])


@pytest.mark.promise("zeroed page, blocks …")
@pytest.mark.promise("5 zeroed page, swapped …")
def test_records_of_two_units_exchanged(store, copy):
    """Each fits its checksum, but not its name."""
    path = copy()
    one, other = (path / "units" / f"unit{n}.json" for n in (0, 1))
    one.rename(path / "x")
    other.rename(one)
    (path / "x").rename(other)
    assert found_or_harmless(path, store[1])


@pytest.mark.promise("zeroed page, blocks …")
def test_a_record_of_another_store(store, copy, tmp_path):
    make_store(tmp_path / "other", blocks=1, units=("train", "held_out"))
    files = StoreFiles(tmp_path / "other")
    path = copy()
    foreign = next(files.units.glob("*.json"))
    shutil.copy(foreign, path / "units" / "unit0.json")
    shutil.copy(files.units / UnitRecord.parse(foreign.read_bytes(), foreign).file, path / "units")
    assert found_or_harmless(path, store[1])


@pytest.mark.promise("a missing shard is refused, strays and left-overs are ignored", cases="2")
@pytest.mark.promise("6 missing shard, stray tar")
def test_a_missing_shard_is_refused_and_a_stray_one_ignored(store, copy):
    path = copy()
    _, record = first_record(path)
    (path / "units" / "unit0-000000000000.tar").write_bytes(b"stray")
    (path / "units" / ".unit0.1.ffffffffffff.tmp").write_bytes(b"left over")
    assert everything(path) == store[1]
    (path / "units" / record.file).unlink()
    with pytest.raises(ShardError, match="is missing although its record exists"):
        everything(path)


def test_the_newest_store_passes_over_a_damaged_one(store, tmp_path):
    for name in ("a", "b"):
        shutil.copytree(store[0], tmp_path / name)
    plan = next((tmp_path / "b").glob("plans/*.json"))
    os.utime(plan, (plan.stat().st_mtime + 100,) * 2)
    assert finished_stores(tmp_path)[0] == tmp_path / "b"
    flip(plan, 40, 0)
    assert finished_stores(tmp_path)[0] == tmp_path / "a"


@pytest.mark.promise("a newer format is refused, format 1 stays readable", cases="4, 1, 1")
@pytest.mark.promise("29 older and newer …")
@pytest.mark.parametrize("version", [2, 9, "x", None])
def test_a_newer_format_is_refused_clearly(copy, version):
    path = copy()
    values = json.loads((path / "target.json").read_text())
    values["settings"]["format"] = version
    (path / "target.json").write_text(json.dumps(values))
    with pytest.raises(ShardError, match=r"of shard format .*, this version reads 1\. Install"):
        Store.open(path)


@pytest.mark.promise("`../` in a member's …")
def test_a_record_cannot_name_a_file_outside_its_store(store, copy):
    """Somebody who forges a record, checksum and all, still reads no file of ours."""
    path = copy()
    files, record = first_record(path)
    shutil.copy(files.units / record.file, path.parent / "outside.tar")
    for name in ("../../outside.tar", str(path.parent / "outside.tar")):
        forged = UnitRecord(**{**vars(record), "file": name})
        files.record_file("unit0").write_text(json.dumps(forged.as_dict()))
        with pytest.raises(ShardError, match="outside"):
            everything(path)


def forged(path, member, payload):
    """Put a member of this name and payload first in a block, with hashes and a record that fit."""
    files, record = first_record(path)
    raw = (files.units / record.file).read_bytes()
    block = record.blocks[0]
    evil = io.BytesIO()
    with tarfile.open(fileobj=evil, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        header = tarfile.TarInfo(member)
        header.size = len(payload)
        tar.addfile(header, io.BytesIO(payload))
        length = tar.offset
    begin, end = block["offset"], block["offset"] + block["length"]
    with_evil = evil.getvalue()[:length] + raw[begin:end]
    changed = raw[:begin] + with_evil + raw[end:]
    groups = []
    for group in record.groups:
        shifted = group["offset"] + (length if group["offset"] > begin else 0)
        groups.append(group | {"offset": shifted})
    groups[1] |= {"length": len(with_evil), "sha256": hashlib.sha256(with_evil).hexdigest()}
    values = {**vars(record), "groups": groups, "bytes": len(changed), "sha256": hashlib.sha256(changed).hexdigest()}
    (files.units / record.file).write_bytes(changed)
    files.record_file("unit0").write_text(json.dumps(UnitRecord(**values).as_dict()))


@pytest.mark.promise(
    "`../` in a member's or a record's name, a pickle in a member: nothing is written or run",
    cases="2, 2, 1",
)
@pytest.mark.promise("32 pickles, `../`")
@pytest.mark.parametrize("member", ["../../../evil.ids.npy", "/tmp/mlsm-evil.ids.npy"])
def test_a_member_that_points_elsewhere_writes_nothing(store, copy, member):
    path = copy()
    before = sorted(path.parent.rglob("*"))
    forged(path, member, (np.lib.format.magic(1, 0)))
    with pytest.raises(ValueError):
        everything(path)
    assert sorted(path.parent.rglob("*")) == before and not os.path.exists("/tmp/mlsm-evil.ids.npy")


@pytest.mark.promise("`../` in a member's …")
@pytest.mark.promise("32 pickles, `../`")
def test_a_pickle_in_a_shard_is_not_loaded(store, copy, tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "evil"),)

    payload = io.BytesIO()
    np.save(payload, np.array([Evil()], object), allow_pickle=True)
    path = copy()
    forged(path, "000000.ids.npy", payload.getvalue())
    with pytest.raises(ValueError):
        everything(path)
    assert not (tmp_path / "evil").exists()


@pytest.mark.promise("a newer format is …")
@pytest.mark.promise("29 older and newer formats")
@pytest.mark.parametrize("version", ["v1", "v1-int8", "v1-pq"])
def test_golden_stores_stay_readable(version):
    golden = Path(__file__).with_name("golden") / version
    read = json.loads(json.dumps(everything(golden / "store")))
    expected = json.loads((golden / "content.json").read_text())
    assert all(read["report"][name] == value for name, value in expected.pop("report").items())
    assert all(read[name] == value for name, value in expected.items())
