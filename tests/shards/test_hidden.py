"""Stores of hidden states, int8 and product-quantised: rows against dense NumPy and faiss, damage, URLs, datasets."""

import json
import shutil
import subprocess
import sys

import faiss
import numpy as np
import pytest
import torch
import webdataset as wds
from http_store import serving
from hypothesis import given
from hypothesis import strategies as st
from make_store import make_store

from mlsm.common.errors import RequestError, ShardError, StoreError
from shards import codec
from shards.derive import derive
from shards.manifest import fingerprint, with_checksum
from shards.reader import Store
from shards.remote import Remote
from shards.schema import HiddenLayout, ShardMeta
from shards.torch_dataset import LspDataset
from shards.verify import verify

KINDS = ("int8", "pq")


@pytest.fixture(scope="module", params=KINDS)
def made(request, tmp_path_factory):
    """(path, {split: blocks with the `rows` that are to be read}) of a store of 24 values a token."""
    place = tmp_path_factory.mktemp("hidden") / "s"
    files, _, truth = make_store(place, quantise=request.param, max_length=64)
    return files.path, truth


def dense(blocks):
    """Every window's rows (L, d), to the end of its padding."""
    found = []
    for block in blocks:
        ends = np.cumsum(block["lengths"])
        found += [block["rows"][end - length : end] for length, end in zip(block["lengths"], ends, strict=True)]
    return found


@given(st.integers(0, 2**32 - 1), st.floats(1e-30, 1e6))
def test_int8_is_within_half_a_step(seed, size):
    rows_Nd = np.random.default_rng(seed).normal(size=(5, 17)).astype(np.float32) * np.float32(size)
    rows_Nd[2] = 0
    codes_Nd, scales_N = codec.encode_hidden(rows_Nd)
    assert codes_Nd.dtype == np.int8 and scales_N.dtype == np.float32 and codes_Nd.min() >= -127
    assert scales_N[2] == 0 and not codes_Nd[2].any()
    error_Nd = np.abs(codes_Nd.astype(np.float64) * scales_N[:, None] - rows_Nd)
    assert (error_Nd <= scales_N[:, None] * 0.5001).all()
    assert (np.abs(codes_Nd).max(1) == np.where(np.arange(5) == 2, 0, 127)).all()


def test_golden_bytes():
    columns = {"ids": np.array([101, 7, 102]), "lengths": np.array([3]), "run_starts": np.array([0])}
    columns["run_records"] = np.array([4])
    codes, scales = codec.encode_hidden(np.array([[0, 0], [0.6, -0.8], [0, 0]]))
    meta = ShardMeta("t", "u", 0, 30_000, 8, hidden=HiddenLayout(2, "int8", 2))
    block = codec.pack_block(meta, **columns, hidden=codes, marks=scales)
    assert {name: block[name].tobytes().hex() for name in ("hidden", "scales")} == {
        "hidden": "00005f810000",
        "scales": "00000000a069ce3b00000000",
    }
    meta = ShardMeta("t", "u", 0, 30_000, 8, hidden=HiddenLayout(6, "pq", 2))
    codes = np.array([[0, 0], [255, 3], [0, 0]], np.uint8)
    block = codec.pack_block(meta, **columns, hidden=codes, marks=np.array([0, 1, 0]))
    assert {name: block[name].tobytes().hex() for name in ("hidden", "coded")} == {
        "hidden": "0000ff030000",
        "coded": "000100",
    }
    assert "hidden" not in ShardMeta("t", "u", 3072, 30_000, 8).as_dict(), "meta.json of other kinds has not changed"


def test_rows_that_break_the_contract_are_refused():
    columns = {"ids": np.array([5, 6]), "lengths": np.array([2]), "run_starts": np.array([0])}
    columns["run_records"] = np.array([0])
    meta = ShardMeta("t", "u", 0, 100, 8, hidden=HiddenLayout(3, "int8", 3))
    rows = np.zeros((2, 3), np.int8)
    for given_ in ({}, {"hidden": rows}, {"hidden": rows[:1], "marks": np.zeros(2)}):
        with pytest.raises(ValueError, match=r"must be int8 of shape \(2, 3\) with a mark for each"):
            codec.pack_block(meta, **columns, **given_)
    with pytest.raises(ValueError, match="found uint8"):
        codec.pack_block(meta, **columns, hidden=rows.astype(np.uint8), marks=np.zeros(2))


def test_the_reader_gives_the_rows_of_the_tokens_that_are_asked_for(made):
    path, truth = made
    reader = Store.open(path).split("train")
    rows, rng = dense(truth["train"]), np.random.default_rng(3)
    batch = reader.read(rng.permutation(len(reader))[:100])
    window_M = rng.integers(0, 100, 500)
    position_M = rng.integers(0, batch.lengths[window_M])
    found = reader.hidden(batch, window_M, position_M)
    expected_Md = np.stack([rows[batch.window_ids[w]][p] for w, p in zip(window_M, position_M, strict=True)])
    assert found.rows_Md.dtype == np.float32 and np.array_equal(found.rows_Md, expected_Md.astype(np.float32))
    ids_M = batch.ids[window_M, position_M]
    assert np.array_equal(found.coded_M, ids_M >= 4) and not found.rows_Md[~found.coded_M].any()
    nothing = reader.hidden(batch, window_M[:0], position_M[:0])
    assert nothing.rows_Md.shape == (0, 24) and nothing.coded_M.shape == (0,)


def test_only_the_tokens_that_are_asked_for_are_decoded(made, monkeypatch):
    reader = Store.open(made[0]).split("train")
    decoded, decode = [], codec.decode_hidden
    monkeypatch.setattr(codec, "decode_hidden", lambda *given_: decoded.append(len(given_[1])) or decode(*given_))
    reader.hidden(reader.read(range(40)), np.arange(40), np.arange(40) % 5)
    assert decoded == [40]


def test_product_quantised_rows_are_those_of_faiss(tmp_path):
    """A codebook, codes and decoded rows by faiss alone."""
    files, _, truth = make_store(tmp_path / "s", quantise="pq", blocks=1)
    store = Store.open(files.path)
    pq = faiss.ProductQuantizer(24, 8, 8)
    faiss.copy_array_to_vector(np.load(files.codebook / "centroids.npy").ravel(), pq.centroids)
    block = truth["train"][0]
    rows = block["rows"][block["ids"] >= 4].astype(np.float32)
    expected_Md = pq.decode(pq.compute_codes(rows))
    reader = store.split("train")
    batch = reader.read(range(37))
    found = reader.hidden(batch, *np.nonzero((batch.documents >= 0) & (batch.ids >= 4)))
    assert np.array_equal(found.rows_Md, expected_Md)


def test_training_reads_hidden_states_without_faiss(made):
    code = (
        "import sys; sys.modules['faiss'] = None\n"
        "import numpy as np\nfrom shards.reader import Store\n"
        f"reader = Store.open({str(made[0])!r}).split('train')\n"
        "print(reader.hidden(reader.read([3]), np.array([0]), np.array([1])).rows_Md.shape)\n"
        "assert not any(name.partition('.')[0] == 'pipeline' for name in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == "(1, 24)\n", run.stderr


def test_mean_and_deviation_are_those_of_the_split(made):
    path, truth = made
    rows = np.concatenate([block["rows"][block["ids"] >= 4] for block in truth["train"]]).astype(np.float64)
    mean_d, deviation_d = Store.open(path).split("train").hidden_statistics()
    np.testing.assert_allclose(mean_d, rows.mean(0), atol=1e-12)
    np.testing.assert_allclose(deviation_d, rows.std(0), rtol=1e-9)


def test_a_store_of_other_targets_has_no_hidden_states(tmp_path, made):
    files, *_ = make_store(tmp_path / "lsp", blocks=1, units=("train",))
    reader = Store.open(files.path).split("train")
    with pytest.raises(ValueError, match="a store of lsp and has no hidden states"):
        reader.hidden(reader.read([0]), np.array([0]), np.array([1]))
    with pytest.raises(RequestError, match="hidden states, which have no entries to cut.*--quantise pq"):
        derive(made[0], 4)


# ---- damage


def test_every_byte_is_covered(made, tmp_path):
    path = shutil.copytree(made[0], tmp_path / "s")
    report = verify(path, full=True)
    assert report["damaged"] == report["missing"] == report["stray"] == [] and json.dumps(report)
    store = Store.open(path)
    record = next(iter(store.iter_records("train")))
    shard = path / "units" / record.file
    whole, rng = shard.read_bytes(), np.random.default_rng(0)
    begin, length = record.groups[1]["offset"], record.groups[1]["length"]
    for place in [begin, *rng.integers(begin, begin + length, 8), len(whole) - 1500]:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << rng.integers(8)
        shard.write_bytes(damaged)
        (entry,) = verify(path, full=True)["damaged"]
        assert entry["unit"] == record.unit
        if begin <= place < begin + length:
            reader = Store.open(path).split("train")
            with pytest.raises(ShardError, match="does not match its hash"):
                reader.hidden(reader.read([0]), np.array([0]), np.array([1]))
    shard.write_bytes(whole)
    assert verify(path, full=True)["damaged"] == []


def test_another_codebook_is_refused_where_it_is_used(tmp_path):
    files, *_ = make_store(tmp_path / "s", quantise="pq", blocks=1, units=("train",))
    centroids, path = files.codebook / "centroids.npy", files.path
    whole = centroids.read_bytes()
    reads = [lambda store: store.codebook, lambda store: store.split("train").hidden_at(np.array([0]), np.array([1]))]

    def refused(message):
        for read in reads:
            with pytest.raises(StoreError, match=message):
                read(Store.open(path))
        assert message.partition(" ")[0] in verify(path)["damaged"][0]["problem"]

    np.save(centroids, np.load(centroids) + 1)
    refused("codebook is not the codebook of this store")
    np.save(centroids, np.zeros((4, 256, 6), np.float32))
    refused(r"centroids.npy holds centroids of shape \(4, 256, 6\)")
    np.save(centroids, np.zeros((8, 256, 3)))
    refused("centroids.npy holds float64")
    centroids.unlink()
    refused("centroids.npy is missing")
    centroids.write_bytes(whole)
    assert verify(path, full=True)["damaged"] == []


@pytest.mark.parametrize("change", [{"width": None}, {"quantise": None}, {"quantise": {"name": "pq", "bytes": 7}}])
def test_settings_that_describe_no_layout_are_refused(tmp_path, change):
    files, *_ = make_store(tmp_path / "s", quantise="pq", blocks=1, units=("train",))
    target = json.loads((files.path / "target.json").read_text())
    settings = {name: value for name, value in (target["settings"] | change).items() if value is not None}
    target |= {"settings": settings, "target": fingerprint(settings)}
    (files.path / "target.json").write_text(json.dumps(with_checksum(target)))
    with pytest.raises(ShardError, match="hidden states"):
        Store.open(files.path)


def forge(files, quantise, change):
    """A store of a faulty writer: its hashes are right, its columns are changed."""
    pack = codec.pack_block

    def changed(*given_, **columns):
        return change(pack(*given_, **columns))

    codec.pack_block = changed
    try:
        return make_store(files, quantise=quantise, blocks=1, units=("train",))[0]
    finally:
        codec.pack_block = pack


@pytest.mark.parametrize(
    ("quantise", "change", "problem"),
    [
        ("int8", lambda block: block | {"hidden": block["hidden"][:-1]}, "hidden states of"),
        ("pq", lambda block: block | {"hidden": block["hidden"].view(np.int8)}, "in uint8"),
        ("int8", lambda block: block | {"scales": block["scales"] * np.float32(np.nan)}, "scales is not"),
        ("int8", lambda block: block | {"scales": block["scales"][:-1]}, "scales is not"),
        ("pq", lambda block: block | {"coded": block["coded"] * 2}, "coded is not"),
        ("pq", lambda block: block | {"scales": block["coded"].astype(np.float32)}, "columns"),
    ],
)
def test_columns_that_break_the_format_are_refused(tmp_path, quantise, change, problem):
    files = forge(tmp_path / "s", quantise, change)
    with pytest.raises(ShardError, match=f"block 000000: .*{problem}.*--repair"):
        Store.open(files.path).split("train").hidden_at(np.array([0]), np.array([1]))
    assert any(problem in entry["problem"] for entry in verify(files.path, full=True)["damaged"])


# ---- elsewhere


def test_the_same_rows_from_a_url(made, tmp_path):
    path, _ = made
    local = Store.open(path).split("train")
    with serving(path.parent) as server:
        url = f"{server.url}/{path.name}"
        remote = Store.open(url, remote=Remote(cache=tmp_path / "cache", attempts=3, delay=0.01))
        reader = remote.split("train")
        for one, other in zip(reader.hidden_statistics(), local.hidden_statistics(), strict=True):
            assert np.array_equal(one, other)
        batch = local.read(range(0, len(local), 7))
        tokens = np.nonzero(batch.documents >= 0)
        found = reader.hidden(reader.read(batch.window_ids), *tokens)
        assert np.array_equal(found.rows_Md, local.hidden(batch, *tokens).rows_Md)
        assert verify(url, full=True)["damaged"] == []


def test_a_dataset_has_them_too(made):
    path, truth = made
    rows, dataset = dense(truth["train"]), LspDataset(path, shuffle=False)
    samples = [sample for sample, _ in zip(dataset, range(700), strict=False)]
    for sample in samples[::50]:
        number = int(sample["window_id"])
        np.testing.assert_array_equal(sample["hidden"].numpy(), rows[number].astype(np.float32))
        assert torch.equal(sample["hidden_mask"], sample["input_ids"] >= 4) and "lsp_indices" not in sample
    batch = next(iter(LspDataset(path, shuffle=False, batch_size=6)))
    collated = dataset.collate(samples[:6])
    assert batch.keys() == collated.keys() and batch["hidden"].shape == (6, 64, 24)
    assert all(torch.equal(batch[name], collated[name]) for name in batch)


def test_plain_webdataset_reads_them(made):
    path, truth = made
    store, rows = Store.open(path), dense(truth["train"])
    found = list(wds.WebDataset(store.urls(), shardshuffle=False).compose(codec.block_windows))
    assert len(found) == len(rows)
    for window, expected in zip(found[::40], rows[::40], strict=True):
        assert np.array_equal(window["coded"], window["ids"] >= 4)
        hidden = window["hidden"]
        if store.hidden.quantise == "pq":
            hidden = store.codebook[np.arange(8), hidden].reshape(-1, 24) * window["coded"][:, None]
        np.testing.assert_array_equal(hidden, expected.astype(np.float32))
