"""Stores behind a URL: the same bytes as on disk, whatever the network does, or an error in bounded time."""

import errno
import fcntl
import hashlib
import json
import multiprocessing
import os
import pickle
import re
import resource
import shutil
import signal
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import fsspec
import numpy as np
import pytest
import torch
import webdataset as wds
from http_store import serving
from make_store import make_store
from tiny_store import write_store
from torch.utils.data import DataLoader
from webdataset.gopen import gopen_schemes

from mlsm.common import disk
from mlsm.common.durable import replace_json
from mlsm.common.errors import RemoteError, ShardError, StoreError, WriteError
from shards.clean import clean
from shards.codec import block_windows
from shards.derive import derive
from shards.manifest import with_checksum
from shards.reader import Store
from shards.remote import TEMPORARY, Remote, RemoteFiles, Server, gopen
from shards.torch_dataset import LspDataset
from shards.verify import verify

pytestmark = [
    pytest.mark.promise(
        "a block changed in the cache is found; processes that fetch at once fetch once; a full disk; names that "
        "are paths elsewhere",
        cases="1 each",
    ),
    pytest.mark.promise("27 a remote store that stalls, drops, is cut or wrong"),
]

FAULTS = ["truncate", "stall", "500", "wrong", "short", "drop"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(directory, plan) of a store with two training units of three blocks."""
    files, plan, _ = make_store(tmp_path_factory.mktemp("served") / "lsp", k=64, max_length=256, blocks=3)
    tokenizer = files.path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text('{"model": 1}')
    return files.path, plan


@pytest.fixture
def web(made):
    with serving(made[0].parent) as server:
        yield server


@pytest.fixture
def options(tmp_path):
    return Remote(cache=tmp_path / "cache", attempts=3, delay=0.01, timeout=0.3)


def in_memory(directory):
    """The store at a memory:// address."""
    url, memory = f"memory://{uuid.uuid4().hex}/lsp", fsspec.filesystem("memory")
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            memory.pipe_file(f"{url}/{path.relative_to(directory)}", path.read_bytes())
    return url


def rows_of(windows, numbers):
    batch = windows.read(numbers)
    rows = windows.targets(batch, *np.nonzero(batch.documents >= 0))
    return [batch.ids, batch.lengths, batch.documents, rows.indptr, rows.indices, rows.weights, rows.tail]


def assert_same(ours, theirs):
    """Everything a student takes from a store is byte for byte the same."""
    assert ours.plan_id == theirs.plan_id and ours.target_id == theirs.target_id
    assert ours.report() == theirs.report()
    for split in ("train", "held_out"):
        one, other = ours.split(split), theirs.split(split)
        order = one.order(7, 1, 0, len(one))
        assert np.array_equal(order, other.order(7, 1, 0, len(other)))
        for mine, yours in zip(rows_of(one, order), rows_of(other, order), strict=True):
            assert mine.dtype == yours.dtype and mine.tobytes() == yours.tobytes()
        assert one.token_counts().tobytes() == other.token_counts().tobytes()
        assert one.mean_distribution().tobytes() == other.mean_distribution().tobytes()


def cached_shards(options):
    return sorted((options.directory / "stores").glob("*/units/*.tar"))


def assert_cache_is_sound(options, directory):
    """Every file in the cache is one of the store, and nothing is half written."""
    assert not list(options.directory.rglob("*.tmp"))
    for kind in ("units/*.tar", "units/*.json", "plans/*.json"):
        for path in (options.directory / "stores").glob(f"*/{kind}"):
            assert path.read_bytes() == (directory / path.parent.name / path.name).read_bytes()


# -- the same as a local store ----------------------------------------------------------------------------


def test_a_store_over_http_is_the_local_one(made, web, options):
    store = Store.open(f"{web.url}/lsp", remote=options)
    assert_same(store, Store.open(made[0]))
    assert (store.tokenizer_dir / "tokenizer.json").read_text() == '{"model": 1}'
    assert_cache_is_sound(options, made[0])
    asked = len(web.requests)
    assert_same(Store.open(f"{web.url}/lsp", remote=options), Store.open(made[0]))
    assert web.requests[asked:] == ["/lsp/target.json", "/lsp/plans/"]


@pytest.mark.parametrize("attempts", [1, 3])
def test_a_store_in_memory_is_the_local_one(made, options, attempts):
    assert_same(Store.open(in_memory(made[0]), remote=replace(options, attempts=attempts)), Store.open(made[0]))


def test_each_shard_that_is_read_is_fetched_once_and_no_other(made, web, options):
    windows = Store.open(f"{web.url}/lsp", remote=options).split("train")
    windows.read([0, 1])
    assert [path.name for path in cached_shards(options)] == [Store.open(made[0]).records("train")[0].file]
    assert_same(Store.open(f"{web.url}/lsp", remote=options), Store.open(made[0]))
    shards = [path for path in web.requests if path.endswith(".tar")]
    assert len(shards) == len(set(shards)) == 3


@pytest.mark.parametrize("refusal", [404, 403])
def test_a_plan_is_named_where_directories_are_not_listed(made, options, refusal):
    with serving(made[0].parent, lists=False, refusal=refusal) as web:
        with pytest.raises(StoreError, match=r"lists no plans.*Pass the address of a plan: .*/plans/<plan>.json"):
            Store.open(f"{web.url}/lsp", remote=options)
        url = f"{web.url}/lsp/plans/{made[1].id}.json"
        store = Store.open(url, remote=options)
        assert_same(store, Store.open(made[0]))
        assert (store.tokenizer_dir / "tokenizer.json").is_file() and not store.files.dictionary.exists()
        assert not verify(url)["damaged"]
        told = {404: "has no plan 0000", 403: "403.*asked once.*access rights"}[refusal]
        with pytest.raises(StoreError, match=told):
            Store.open(url.replace(made[1].id, "0" * 32), remote=options)


@pytest.mark.promise(
    "a tokenizer or dictionary of which a file is refused or lost is not kept in part; web pages are not kept "
    "as files, nor called a damaged store",
    cases="2, 2, 1, 1",
)
def test_a_tokenizer_is_kept_whole_or_not_at_all(made, options, tmp_path):
    """Where directories are not listed, 403 may mean that there is no such file, and may pass."""
    directory = tmp_path / "lsp"
    shutil.copytree(made[0], directory)
    (directory / "tokenizer" / "tokenizer_config.json").write_text("{}")
    with serving(tmp_path, lists=False, refusal=403) as web:
        store = Store.open(f"{web.url}/lsp/plans/{made[1].id}.json", remote=options)
        web.faults.append(("tokenizer.json", "403", False))
        with pytest.raises(RemoteError, match=r"lsp/tokenizer: tokenizer.json is not there.*Run the same command"):
            store.tokenizer_dir  # noqa: B018
        assert sorted(os.listdir(store.tokenizer_dir)) == ["tokenizer.json", "tokenizer_config.json"]
        (store.tokenizer_dir / "tokenizer.json").unlink()  # as older versions left it
        assert sorted(os.listdir(store.tokenizer_dir)) == ["tokenizer.json", "tokenizer_config.json"]
        (directory / "dictionary").mkdir()
        (directory / "dictionary" / "dictionary.json").write_text("{}")
        with pytest.raises(RemoteError, match=r"lsp/dictionary: atoms.npy is not there"):
            store.files.dictionary  # noqa: B018


def test_a_plan_may_be_large(made, options, tmp_path, monkeypatch):
    """The plan of a million small files takes 300 MB."""
    monkeypatch.setattr("shards.remote._SMALL", 10_000)
    store = Store.open(shutil.copytree(made[0], tmp_path / "lsp"))
    with open(tmp_path / "lsp" / "plans" / f"{store.plan_id}.json", "ab") as file:
        file.write(b" " * 20_000)
    with serving(tmp_path) as web:
        assert len(Store.open(f"{web.url}/lsp", remote=options).split("train")) == len(store.split("train"))


@pytest.mark.promise("a tokenizer or dictionary …")
def test_atoms_may_be_large(made, options, tmp_path, monkeypatch):
    """32 KiB for each of the 64 atoms, where a small file may have 10,000 bytes here."""
    monkeypatch.setattr("shards.remote._SMALL", 10_000)
    for size in (64 * 4 * 8192, 64 * 4 * 8192 + 1):
        directory = shutil.copytree(made[0], tmp_path / str(size))
        (directory / "dictionary").mkdir()
        (directory / "dictionary" / "dictionary.json").write_text("{}")
        (directory / "dictionary" / "atoms.npy").write_bytes(bytes(size))
        with serving(tmp_path) as web:
            store = Store.open(f"{web.url}/{size}", remote=replace(options, cache=tmp_path / f"cache-{size}"))
            if size > 64 * 4 * 8192:
                with pytest.raises(RemoteError, match="longer than the 2,097,152 bytes"):
                    store.files.dictionary  # noqa: B018
            else:
                assert (store.files.dictionary / "atoms.npy").stat().st_size == size


@pytest.mark.promise("a tokenizer or dictionary …")
@pytest.mark.parametrize("fault, error", [("403", "asked once.*access rights"), ("drop", "asked 3 times")])
def test_a_listed_file_of_a_tokenizer_must_come(made, web, options, fault, error):
    store = Store.open(f"{web.url}/lsp", remote=options)
    web.faults.append(("tokenizer.json", fault, True))
    with pytest.raises(RemoteError, match=error):
        store.tokenizer_dir  # noqa: B018
    web.faults.clear()
    assert os.listdir(store.tokenizer_dir) == ["tokenizer.json"]


@pytest.mark.promise("a tokenizer or dictionary …")
def test_other_links_of_a_listing_are_no_files_of_a_tokenizer(made, web, options, monkeypatch):
    """Some servers name themselves, and their home page, at the foot of a listing."""
    names = Server.names
    monkeypatch.setattr(Server, "names", lambda server, directory: [*names(server, directory), "http-server"])
    assert os.listdir(Store.open(f"{web.url}/lsp", remote=options).tokenizer_dir) == ["tokenizer.json"]


@pytest.mark.promise("a tokenizer or dictionary …")
def test_web_pages_are_not_kept_as_files(made, options):
    with serving(made[0].parent, lists=False, refusal=200) as web:
        store = Store.open(f"{web.url}/lsp/plans/{made[1].id}.json", remote=options)
        assert os.listdir(store.tokenizer_dir) == ["tokenizer.json"]
        assert not store.files.dictionary.exists()


@pytest.mark.promise("a tokenizer or dictionary …")
def test_an_address_of_something_else_is_told_from_a_damaged_store(web, options):
    web.refusal = 200
    with pytest.raises(StoreError, match=r"nowhere/target.json is not a .*DOCTYPE.*the address of a store\?"):
        Store.open(f"{web.url}/nowhere", remote=options)
    assert len(web.requests) == 1


@pytest.mark.parametrize("workers, context", [(0, None), (2, "fork")])
def test_a_torch_dataset_reads_it_in_any_number_of_workers(made, web, options, workers, context):
    def batches(store):
        dataset = LspDataset(store, seed=3, batch_size=16)
        return list(DataLoader(dataset, batch_size=None, num_workers=workers, multiprocessing_context=context))

    store = pickle.loads(pickle.dumps(Store.open(f"{web.url}/lsp", remote=options)))  # as a spawned worker gets it
    store.split("held_out").read([0])  # the parent's connections are open when it forks
    for mine, yours in zip(batches(store), batches(Store.open(made[0])), strict=True):
        assert all(torch.equal(mine[name], yours[name]) for name in yours)
    assert_cache_is_sound(options, made[0])


@pytest.mark.parametrize("scheme", ["curl", "fsspec"])
def test_plain_webdataset_gives_the_same_windows(made, web, options, scheme, monkeypatch):
    if scheme == "fsspec":
        monkeypatch.setitem(gopen_schemes, "http", gopen)
    store = Store.open(f"{web.url}/lsp", remote=options)
    streams = [
        wds.WebDataset(urls, shardshuffle=False).compose(block_windows)
        for urls in (store.urls("train"), Store.open(made[0]).urls("train"))
    ]
    count = 0
    for mine, yours in zip(*streams, strict=True):
        count += 1
        arrays = [name for name in yours if isinstance(yours[name], np.ndarray)]
        assert all(np.array_equal(mine[name], yours[name]) and mine[name].flags.writeable for name in arrays)
    assert count == len(store.split("train"))


def test_a_smaller_store_is_derived_from_a_remote_one(made, options, tmp_path, monkeypatch):
    monkeypatch.setenv("MLSM_CACHE", str(options.cache))
    url = in_memory(made[0])
    with pytest.raises(StoreError, match="choose with --output"):
        derive(url, top_n=4)
    ours, theirs = derive(url, 4, tmp_path / "a"), derive(made[0], 4, tmp_path / "b")
    assert_same(Store.open(ours["store"]), Store.open(theirs["store"]))


# -- faults -----------------------------------------------------------------------------------------------


@pytest.mark.promise(
    "a remote read that stalls, drops, is cut, of wrong bytes or length, 5xx; on target, plan, record, block: "
    "passes unseen, or a typed error in bounded time, and nothing bad in the cache",
    cases="6, 6 × 4",
)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_passes_is_not_seen(made, web, options, fault):
    once = ["target", r"plans/\w", r"units/.*json", r"\.tar", "tokenizer/t"]
    web.faults += [(pattern, fault, False) for pattern in once]
    store = Store.open(f"{web.url}/lsp", remote=options)
    windows, local = store.split("train"), Store.open(made[0]).split("train")
    assert all(np.array_equal(*pair) for pair in zip(rows_of(windows, [0, 300]), rows_of(local, [0, 300]), strict=True))
    if fault not in ("wrong", "short"):  # the store has no checksum of these
        assert (store.tokenizer_dir / "tokenizer.json").is_file() and not web.faults
    assert_cache_is_sound(options, made[0])


@pytest.mark.promise("a remote read that …")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("where", ["target", r"plans/\w", r"units/.*json", r"\.tar"])
def test_a_fault_that_lasts_is_a_clear_error_in_bounded_time(made, web, options, fault, where):
    web.faults.append((where, fault, True))
    began = time.monotonic()
    with pytest.raises(RemoteError, match=rf"{web.url}/lsp/\S*({where}).*asked 3 times in .*") as caught:
        Store.open(f"{web.url}/lsp", remote=options).split("train").read([0])
    assert time.monotonic() - began < 3
    assert ("The remote copy is damaged" if fault in ("wrong", "short") else "run the same command again") in str(
        caught.value
    )
    assert_cache_is_sound(options, made[0])


def test_what_is_wrong_is_named(made, web, options):
    web.faults += [(r"\.tar", "short", True)]
    with pytest.raises(RemoteError, match=r"\.tar: [\d,]+ bytes, the record says [\d,]+; asked"):
        Store.open(f"{web.url}/lsp", remote=options).split("train").read([0])
    web.faults[:] = [(r"\.tar", "wrong", True)]
    with pytest.raises(RemoteError, match=r"\.tar: it does not match the hash in its record"):
        Store.open(f"{web.url}/lsp", remote=options).split("train").read([0])


def test_no_store_no_server_no_protocol(web, options, tmp_path):
    with pytest.raises(StoreError, match="nowhere is not a store: it has no target.json"):
        Store.open(f"{web.url}/nowhere", remote=options)
    with pytest.raises(RemoteError, match="Connect.*asked 3 times"):
        Store.open("http://127.0.0.1:9/lsp", remote=options)
    with pytest.raises(StoreError, match="nonsense"):
        Store.open("nonsense://host/lsp", remote=options)
    with pytest.raises(StoreError, match="has a query, but a store's files") as caught:
        Store.open(f"{web.url}/lsp?sig=secret", remote=options)
    assert "secret" not in str(caught.value)


def test_what_a_server_names_never_becomes_a_path_elsewhere(tmp_path, options):
    files, plan, _ = make_store(tmp_path / "lsp", k=0, blocks=1, units=("train",))
    url, memory = in_memory(files.path), fsspec.filesystem("memory")
    unit = plan.units[0]
    record = json.loads(files.record_file(unit.id).read_text())
    for change in (
        {"file": ".."},
        {"file": "../../x"},
        {"groups": [record["groups"][0] | {"name": "../../x"}, *record["groups"][1:]]},
    ):
        memory.pipe_file(f"{url}/units/{unit.id}.json", json.dumps(with_checksum(record | change)).encode())
        with pytest.raises(RemoteError, match="outside its own directory"):
            Store.open(url, remote=options)
    evil = replace(plan, units=(replace(unit, id="../../../evil"),))
    memory.pipe_file(f"{url}/plans/{evil.id}.json", json.dumps(evil.as_dict()).encode())
    with pytest.raises(RemoteError, match=r"field units\[0\].id: .* outside its own directory, found '../../../evil'"):
        Store.open(f"{url}/plans/{evil.id}.json", remote=options)
    assert "outside its own directory" in verify(f"{url}/plans/{evil.id}.json")["damaged"][0]["problem"]
    assert not list(tmp_path.rglob("*evil*")) and not list(tmp_path.rglob("x"))


def read_on_a_full_disk(url, options, most, results):
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    try:
        Store.open(url, remote=options).split("train").read([0])
    except OSError as error:
        results.put(str(error))


def test_a_full_disk_leaves_nothing_half_written(made, web, options):
    """The system refuses to make the file longer: small files fit, a shard does not."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    process = context.Process(target=read_on_a_full_disk, args=(f"{web.url}/lsp", options, 50_000, results))
    process.start()
    assert re.search(r"\.tar could not be written: File too large. MLSM_CACHE moves the cache", results.get(timeout=60))
    process.join()
    assert sum(path.endswith(".tar") for path in web.requests) == 1 and not cached_shards(options)
    assert_cache_is_sound(options, made[0])
    Store.open(f"{web.url}/lsp", remote=options).split("train").read([0])


def test_a_full_directory_of_temporary_files_is_not_called_the_cache(made, web, options, monkeypatch):
    """target.json, shards for plain WebDataset and those of a verification are not fetched into the cache."""
    create = disk.create

    def refuse(path):
        if path.is_relative_to(options.directory):
            return create(path)
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    shard = Store.open(f"{web.url}/lsp", remote=options).urls()[0]
    monkeypatch.setattr(disk, "create", refuse)
    for use in (lambda: read_once(f"{web.url}/lsp", options), lambda: gopen(shard), lambda: verify(f"{web.url}/lsp")):
        with pytest.raises(WriteError, match=r"No space left on device. TMPDIR names another directory") as caught:
            use()
        assert "MLSM_CACHE" not in str(caught.value)
    monkeypatch.undo()
    read_once(f"{web.url}/lsp", options)


def read_only(path, *arguments, **others):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))


def read_once(url, options):
    Store.open(url, remote=options).split("train").read([0])


@pytest.mark.promise("a fetching process …")
def test_a_download_that_is_killed_leaves_no_shard_and_is_made_again(made, web, options):
    web.faults.append((r"\.tar", "stall", False))
    process = multiprocessing.get_context("fork").Process(
        target=read_once, args=(f"{web.url}/lsp", replace(options, timeout=20))
    )
    process.start()
    until = time.monotonic() + 60
    while not (halves := [path for path in options.directory.rglob("*.tar.*.tmp") if path.stat().st_size]):
        assert time.monotonic() < until
        time.sleep(0.01)
    process.kill()
    process.join()
    assert not cached_shards(options) and disk.writer_of_temporary(halves[0].name) == process.pid
    began = time.monotonic()
    read_once(f"{web.url}/lsp", replace(options, timeout=20))
    assert time.monotonic() - began < 18, "the lock ended with its holder"
    report = clean(options.directory, everything=True)
    assert len(report["removed"]) == 1
    assert_cache_is_sound(options, made[0])


def test_an_unfinished_store_is_refused(made, options):
    url = in_memory(made[0])
    fsspec.filesystem("memory").rm(f"{url}/units/{made[1].units[1].id}.json")
    with pytest.raises(StoreError, match="is unfinished: 1 of 3 units"):
        Store.open(url, remote=options)


def test_the_newest_finished_plan_is_taken(tmp_path, options):
    files, old, _ = make_store(tmp_path / "lsp", k=0, blocks=1, units=("train",))
    _, new, _ = make_store(tmp_path / "lsp", k=0, blocks=1, units=("train", "train"))
    times = [1_000_000_000, 1_100_000_000]
    for plans, expected in (((old, new), new), ((new, old), old)):
        for plan, when in zip(plans, times, strict=True):
            os.utime(files.plans / f"{plan.id}.json", (when, when))
        with serving(tmp_path) as web:
            assert Store.open(f"{web.url}/lsp", remote=options).plan_id == expected.id
        url = in_memory(files.path)
        memory = fsspec.filesystem("memory")
        for plan in plans:
            memory.pipe_file(f"{url}/plans/{plan.id}.json", (files.plans / f"{plan.id}.json").read_bytes())
            time.sleep(0.01)
        assert Store.open(url, remote=options).plan_id == expected.id
    os.utime(files.plans / f"{new.id}.json", (when, when))  # as a careless copy leaves them
    with serving(tmp_path) as web, pytest.raises(StoreError, match="does not say which of its plans is the newest"):
        Store.open(f"{web.url}/lsp", remote=options)


def test_a_byte_that_changes_in_the_cache_is_found_and_the_next_run_heals(made, web, options, monkeypatch):
    def read():
        return Store.open(f"{web.url}/lsp", remote=options).split("train").read([0])

    whole = read().ids
    (path,) = cached_shards(options)
    raw = bytearray(path.read_bytes())
    raw[5000] ^= 1
    path.write_bytes(raw)
    with monkeypatch.context() as patch, pytest.raises(ShardError, match="hash.*cannot be removed .Read-only file"):
        patch.setattr(Path, "unlink", read_only)
        read()
    with pytest.raises(ShardError, match="does not match its hash.*is removed: run the same command again"):
        read()
    assert np.array_equal(read().ids, whole)
    path.write_bytes(b"")
    for small in (options.directory / "stores").glob("*/*/*.json"):
        small.write_bytes(small.read_bytes().replace(b"1", b"2"))
    assert np.array_equal(read().ids, whole)
    Store.open(f"{web.url}/lsp", remote=options).report()
    assert_cache_is_sound(options, made[0])


def test_a_shard_that_was_encoded_again_since_is_fetched_under_its_new_record(tmp_path, options):
    """Retried quarantine: another record and shard of the same unit."""
    files, plan, _ = make_store(tmp_path / "lsp", k=64, blocks=1, units=("train",))
    memory, url = fsspec.filesystem("memory"), in_memory(files.path)
    Store.open(url, remote=options)  # the record is in the cache
    old = files.record(plan.units[0].id).file
    for path in (files.record_file(plan.units[0].id), files.units / old):
        path.unlink()
    with mock.patch("make_store.random_rows", other_rows):
        make_store(tmp_path / "lsp", k=64, blocks=1, units=("train",))
    record = files.record(plan.units[0].id)
    assert record.file != old
    memory.rm(f"{url}/units/{old}")
    for name in (f"{record.unit}.json", record.file):
        memory.pipe_file(f"{url}/units/{name}", (files.units / name).read_bytes())
    with pytest.raises(RemoteError, match="no longer the one.*run the same command again"):
        Store.open(url, remote=options).split("train").read([0])
    ours, theirs = Store.open(url, remote=options).split("train"), Store.open(files.path).split("train")
    assert all(np.array_equal(*pair) for pair in zip(rows_of(ours, [0, 9]), rows_of(theirs, [0, 9]), strict=True))


def other_rows(rng, special, k):
    """Other rows than make_store's."""
    nnz = np.where(special, 0, 1)
    return {"nnz": nnz, "indices": np.full(nnz.sum(), k - 1), "weights": np.ones(nnz.sum()), "tail": np.zeros(len(nnz))}


def read_all(url, options, results):
    windows = Store.open(url, remote=options).split("train")
    batch = windows.read(np.arange(len(windows)))
    results.put(hashlib.sha256(batch.ids.tobytes()).hexdigest())


def test_processes_that_fetch_at_once_fetch_once(made, web, options):
    context, options = multiprocessing.get_context("fork"), replace(options, timeout=20)
    results = context.Queue()
    processes = [
        context.Process(target=read_all, args=(f"{web.url}/lsp", options, results), daemon=True) for _ in range(3)
    ]
    for process in processes:
        process.start()
    windows = Store.open(made[0]).split("train")
    expected = hashlib.sha256(windows.read(np.arange(len(windows))).ids.tobytes()).hexdigest()
    assert [results.get(timeout=20) for _ in processes] == [expected] * 3
    for process in processes:
        process.join()
    assert sum(path.endswith(".tar") for path in web.requests) == 2
    assert_cache_is_sound(options, made[0])


def seconds_to_fail(url, options):
    windows = Store.open(url, remote=options).split("train")
    began = time.monotonic()
    with pytest.raises(RemoteError, match="asked 3 times"):
        windows.read([0])
    return time.monotonic() - began


@pytest.mark.promise(
    "a fetching process that is stopped, or whose server stalls, holds the others up once, for one time limit; one "
    "that is killed not at all",
    cases="3 readers, 1, 1",
)
def test_readers_do_not_wait_one_after_the_other_for_a_server_that_stalls(made, web, options):
    """Three attempts of 0.6 s; one after the other, the third reader would end after 5.4 s."""
    options = replace(options, timeout=0.6)
    web.faults.append((r"\.tar", "stall", True))
    with ThreadPoolExecutor(3) as pool:
        took = list(pool.map(seconds_to_fail, [f"{web.url}/lsp"] * 3, [options] * 3))
    assert max(took) < 5
    assert_cache_is_sound(options, made[0])


@pytest.mark.promise("a fetching process …")
def test_a_stopped_process_that_holds_the_lock_is_waited_for_once(made, web, options):
    options = replace(options, timeout=2.0)
    windows = Store.open(f"{web.url}/lsp", remote=options).split("train")
    files, wait = windows.store.files, options.timeout
    with open(files.units.parent / "lock", "a") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        began = time.monotonic()
        windows.read([0])
        assert wait <= time.monotonic() - began < 20
        began = time.monotonic()
        windows.read([len(windows) - 1])
        assert time.monotonic() - began < wait
    assert_cache_is_sound(options, made[0])


def test_a_cache_of_another_user_is_read(made, web, options, monkeypatch):
    read_once(f"{web.url}/lsp", options)
    utime = os.utime

    def refuse(file, times=None, *, ns=None):
        if ns:
            raise PermissionError(errno.EPERM, "Operation not permitted")
        utime(file, times)

    monkeypatch.setattr(os, "utime", refuse)
    asked = len(web.requests)
    read_once(f"{web.url}/lsp", options)
    assert not [path for path in web.requests[asked:] if path.endswith(".tar")]


def test_a_cache_that_cannot_be_written_is_not_called_a_damaged_store(made, web, options, monkeypatch):
    windows = Store.open(f"{web.url}/lsp", remote=options).split("train")

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    for call, name in (("append", "lock"), ("create", r"\.tar")):
        with monkeypatch.context() as patch, pytest.raises(WriteError) as caught:
            patch.setattr(disk, call, refuse)
            windows.read([0])
        assert re.search(name + " could not be written: Permission denied. MLSM_CACHE moves", str(caught.value))
    store = Store.open(f"{web.url}/lsp", remote=options)
    with monkeypatch.context() as patch:
        patch.setattr(disk, "create", refuse)
        assert store.command == {}  # it is not needed, and was not fetched
    assert len(windows.read([0]).ids) == 1


@pytest.mark.parametrize("cache, error", [("/proc/nowhere", "No such file"), ("file", "Not a directory")])
def test_a_cache_that_cannot_be_made_says_which_setting_names_it(web, tmp_path, cache, error):
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match=f"{cache}/stores/.*units could not be written: {error}.*MLSM_CACHE moves"):
        Store.open(f"{web.url}/lsp", remote=Remote(cache=tmp_path / cache))


def test_the_cache_may_be_removed_while_it_is_read(made, web, options, monkeypatch):
    local, store = Store.open(made[0]), Store.open(f"{web.url}/lsp", remote=options)
    windows, theirs = store.split("train"), local.split("train")
    windows.read([0])
    shutil.rmtree(options.directory)
    assert np.array_equal(windows.read([len(windows) - 1]).ids, theirs.read([len(windows) - 1]).ids)
    shutil.rmtree(options.directory)
    assert (store.tokenizer_dir / "tokenizer.json").exists() and store.report() == local.report()
    assert_cache_is_sound(options, made[0])


@pytest.mark.parametrize("times", [1, 100])
def test_the_cache_may_be_removed_during_a_download(made, web, options, monkeypatch, times):
    windows, sha256, removed = Store.open(f"{web.url}/lsp", remote=options).split("train"), disk.file_sha256, []

    def remove(path):
        if len(removed) < times:
            removed.append(path)
            shutil.rmtree(options.directory)
        return sha256(path)

    monkeypatch.setattr(disk, "file_sha256", remove)
    if times == 1:
        assert len(windows.read([0]).ids) == 1
    else:
        with pytest.raises(RemoteError, match="units was removed meanwhile; asked 3 times"):
            windows.read([0])


# -- the cache's limit ------------------------------------------------------------------------------------


def test_a_limited_cache_keeps_to_it_and_what_is_mapped_stays_readable(made, web, options):
    local = Store.open(made[0])
    largest = max(record.bytes for record in local.records())
    options = replace(options, cache_gb=1.2 * largest / 1e9)
    windows, theirs = Store.open(f"{web.url}/lsp", remote=options).split("train"), local.split("train")
    everything = [0, len(windows) - 1, 1, len(windows) - 2]
    for number in everything:
        assert np.array_equal(windows.read([number]).ids, theirs.read([number]).ids)
        assert len(cached_shards(options)) == 1
    assert sum(path.endswith(".tar") for path in web.requests) == 2, "both shards stay mapped"
    assert np.array_equal(windows.read(everything).ids, theirs.read(everything).ids)
    assert_cache_is_sound(options, made[0])


def test_the_least_recently_used_go_first(tmp_path):
    units = tmp_path / "stores" / "0123456789ab-01234567" / "units"
    units.mkdir(parents=True)
    for age, name in enumerate(("a.tar", "b.tar", "c.tar")):
        (units / name).write_bytes(bytes(100))
        os.utime(units / name, (10**9 - age, 10**9 - age))
    files = SimpleNamespace(options=Remote(cache=tmp_path, cache_gb=300e-9), units=units)
    RemoteFiles._make_room(files, 100)
    assert sorted(path.name for path in units.iterdir()) == ["a.tar", "b.tar"]


def test_only_the_cache_s_own_stores_are_trimmed(made, web, options):
    """MLSM_CACHE may be the user's output directory, whose stores are not copies of anything."""
    own = {make_store(options.cache / "stores" / name, k=64)[0].units for name in ("lsp-own", "0123456789ab-01234567")}
    before = {units: sorted(units.iterdir()) for units in own}
    windows = Store.open(f"{web.url}/lsp", remote=replace(options, cache_gb=0)).split("train")
    windows.read([0, len(windows) - 1])
    (theirs,) = set((options.cache / "stores").glob("*/units")) - own
    assert len(list(theirs.glob("*.tar"))) == 1, "the cache's own are trimmed"
    assert {units: sorted(units.iterdir()) for units in own} == before


def test_settings_come_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("MLSM_CACHE", str(tmp_path / "there"))
    monkeypatch.setenv("MLSM_CACHE_GB", "1.5")
    assert Remote().directory == tmp_path / "there" and Remote().budget == 1_500_000_000
    for wrong in ("10GB", "nan", "-1"):
        monkeypatch.setenv("MLSM_CACHE_GB", wrong)
        with pytest.raises(ValueError, match=f"MLSM_CACHE_GB must be a number of gigabytes.*found '{wrong}'"):
            _ = Remote().budget
    monkeypatch.delenv("MLSM_CACHE_GB")
    with pytest.raises(ValueError, match="cache_gb must be a number of gigabytes.*found '-1'"):
        _ = Remote(cache_gb=-1).budget
    assert Remote().budget is None and Remote(cache=tmp_path, cache_gb=0).budget == 0


# -- tools ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("full", [False, True])
def test_verification_reads_the_server_and_not_the_cache(made, options, tmp_path, monkeypatch, full):
    monkeypatch.setenv("MLSM_CACHE", str(options.cache))
    with serving(made[0].parent) as web:
        url = f"{web.url}/lsp"
        windows = Store.open(url).split("train")
        windows.read(np.arange(len(windows)))
        asked = len(web.requests)
        report = verify(url, full=full)
        shards = [path for path in web.requests[asked:] if path.endswith(".tar")]
        assert len(shards) == len(set(shards)) == (3 if full else 0), "without --full it asks for sizes only"
        assert not (report["damaged"] or report["missing"] or report["stray"] or report["commands"])
        assert report["units"] == 3 and report["store"] == url and report["full"] == full


def test_verification_names_what_is_damaged_there(tmp_path, options, monkeypatch):
    monkeypatch.setenv("MLSM_CACHE", str(options.cache))
    files, plan, _ = make_store(tmp_path / "lsp", k=64, blocks=1, units=("train",) * 4)
    records = [files.record(unit.id) for unit in plan.units]
    with serving(tmp_path) as web:
        url = f"{web.url}/lsp"
        Store.open(url).split("train").read([0, 40, 80, 120])
        raw = bytearray((files.units / records[0].file).read_bytes())
        raw[5000] ^= 1
        (files.units / records[0].file).write_bytes(raw)
        os.truncate(files.units / records[1].file, 5000)
        (files.units / records[2].file).unlink()
        files.record_file(records[3].unit).write_text("{}")
        quick, full = verify(url), verify(url, full=True)
    problems = {entry["unit"]: entry["problem"] for entry in full["damaged"]}
    assert problems.keys() == {record.unit for record in records}
    expected = ["does not match its hash", "has 5,000 bytes", "is missing", "checksum"]
    for record, words in zip(records, expected, strict=True):
        assert words in problems[record.unit]
    assert {entry["unit"] for entry in quick["damaged"]} == {record.unit for record in records[1:]}


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("fault", ["503", "drop"])
def test_verification_does_not_call_a_server_that_does_not_answer_damaged(made, web, monkeypatch, full, fault):
    monkeypatch.setattr("shards.remote.Remote", lambda **cache: Remote(attempts=3, delay=0.01, timeout=0.3, **cache))
    url = f"{web.url}/lsp"
    for record in Store.open(made[0]).iter_records():
        web.faults += [(record.file, fault, False)] * 2
    assert verify(url, full=full)["damaged"] == [] and not web.faults
    web.faults.append((r"\.tar", fault, True))
    with pytest.raises(RemoteError, match="asked 3 times"):
        verify(url, full=full)


def test_verification_names_the_address_of_a_damaged_dictionary(tmp_path):
    path = write_store(tmp_path / "lsp", k=24, atoms=True).path
    (path / "dictionary" / "atoms.npy").write_bytes(b"damaged")
    (path / "tokenizer" / "tokenizer.json").write_bytes(b"{}")
    with serving(tmp_path) as web:
        problems = [entry["problem"] for entry in verify(f"{web.url}/lsp")["damaged"]]
    assert len(problems) == 1 and problems[0].startswith(f"{web.url}/lsp/dictionary/atoms.npy")
    assert problems[0].endswith("Copy the store there again.") and TEMPORARY not in problems[0]


@pytest.mark.parametrize("fault", ["stall", "a byte a time"])
@pytest.mark.parametrize("where", [r"units/.*json", r"\.tar"])
def test_an_interrupt_stops_downloads_in_threads(made, web, options, tmp_path, monkeypatch, fault, where):
    """Without it, twenty attempts of 0.3 s, or a download of a minute."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    options = replace(options, attempts=20, delay=0.0, rate=1.0)
    monkeypatch.setattr("shards.remote.Remote", lambda **cache: replace(options, **cache))
    web.faults.append((where, fault, True))
    began = time.monotonic()
    interrupt = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        verify(f"{web.url}/lsp", full=True)
    assert interrupt.finished.is_set() and time.monotonic() - began < 5.5
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.parametrize("where", ["target", r"plans/\w", r"units/.*json", r"\.tar", "tokenizer/t"])
def test_a_file_that_is_served_compressed_is_not_called_damaged(made, web, options, where):
    web.faults.append((where, "gzip", True))
    with pytest.raises(RemoteError, match=rf"{web.url}/lsp/\S*({where})\S*: the server sends it compressed"):
        store = Store.open(f"{web.url}/lsp", remote=options)
        store.split("train").read([0])
        store.tokenizer_dir  # noqa: B018
    assert_cache_is_sound(options, made[0])


@pytest.mark.parametrize("where", [r"plans/\w", r"units/.*json", r"\.tar"])
def test_a_file_that_is_served_compressed_is_not_called_damaged_by_a_verification(made, web, where):
    web.faults.append((where, "gzip", True))
    with pytest.raises(RemoteError, match=rf"{web.url}/lsp/\S*({where})\S*: the server sends it compressed"):
        verify(f"{web.url}/lsp", full=True)


def test_the_newest_plan_is_not_guessed_if_a_server_does_not_answer(made, web, options):
    server, plan = Server(f"{web.url}/lsp", options), f"plans/{made[1].id}.json"
    web.faults += [("plans/", "503", False)] * 2
    assert server.changed(plan) is not None and server.changed("plans/other.json") is None
    web.faults.append(("plans/", "503", True))
    with pytest.raises(RemoteError, match="503"):
        server.changed(plan)


def test_a_tokenizer_of_other_files_is_fetched_once(made, options, tmp_path):
    """As tokenizers without tokenizer.json are stored: a word list and their settings."""
    tokenizer = shutil.copytree(made[0], tmp_path / "lsp") / "tokenizer"
    (tokenizer / "tokenizer.json").rename(tokenizer / "vocab.txt")
    (tokenizer / "tokenizer_config.json").write_text("{}")
    with serving(tmp_path) as web:
        for _ in range(2):
            store = Store.open(f"{web.url}/lsp", remote=options)
            assert sorted(os.listdir(store.tokenizer_dir)) == ["tokenizer_config.json", "vocab.txt"]
        assert web.requests.count("/lsp/tokenizer/vocab.txt") == 1


def test_a_remote_store_is_not_repaired_and_an_absent_one_not_verified(web):
    with pytest.raises(StoreError, match="cannot be repaired from here"):
        verify(f"{web.url}/lsp", repair=True)
    with pytest.raises(StoreError, match="not a store"):
        verify(f"{web.url}/nowhere")


def test_a_server_that_stalls_does_not_hold_a_reader_for_ever(web, options):
    web.faults.append(("target", "stall", True))
    began = time.monotonic()
    with pytest.raises(RemoteError, match="imeout"):
        Server(f"{web.url}/lsp", options).read("target.json", 1 << 20)
    assert time.monotonic() - began < 2


def test_the_lock_is_free_after_an_error(made, web, options):
    web.faults.append((r"\.tar", "500", True))
    windows = Store.open(f"{web.url}/lsp", remote=options).split("train")
    with pytest.raises(RemoteError):
        windows.read([0])
    web.faults.clear()
    assert len(windows.read([0]).ids) == 1


def test_damaged_settings_in_the_cache_are_fetched_again(tmp_path, caplog):
    files, *_ = make_store(tmp_path / "there" / "lsp")
    (plan,) = files.plans.glob("*.json")
    replace_json(plan.with_suffix(".yaml"), with_checksum({"encode-lsp": {}, "recipe": "small-encoder"}))
    with serving(tmp_path / "there") as server:
        options = Remote(cache=tmp_path / "cache", attempts=1)
        assert Store.open(f"{server.url}/lsp", remote=options).command["recipe"] == "small-encoder"
        (cached,) = (tmp_path / "cache").rglob("plans/*.yaml")
        cached.write_bytes(cached.read_bytes()[:-9])
        assert Store.open(f"{server.url}/lsp", remote=options).command["recipe"] == "small-encoder"
        assert cached.name not in caplog.text  # no warning
        plan.with_suffix(".yaml").write_bytes(b"{")
        (damage,) = verify(f"{server.url}/lsp")["damaged"]
        assert damage["file"] == f"plans/{plan.stem}.yaml"
