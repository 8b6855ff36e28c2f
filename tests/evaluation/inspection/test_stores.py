"""Views of a store against the columns that were written, and what is printed of them."""

import json
import re

import numpy as np
import pytest
from make_store import SPECIAL, make_store, truth_windows
from tiny_store import write_store

from mlsm.commands import show_shards as stores
from mlsm.common.errors import StoreError
from mlsm.evaluation.inspection import stores as inspection
from shards.config import ShowConfig
from shards.files import StoreFiles
from shards.manifest import Plan, PlannedUnit, fingerprint
from shards.reader import Store
from shards.schema import LSP_OCTAVES, ShardMeta
from shards.writer import UnitWriter


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    files, _, truth = make_store(tmp_path_factory.mktemp("stores") / "lsp", max_length=512)
    return Store.open(files.path), truth


def test_statistics_equal_plain_sums(made):
    store, truth = made
    figures = inspection.statistics(store)
    blocks = [block for split in truth.values() for block in split]
    nnz = np.concatenate([block["nnz"] for block in blocks])
    assert figures["nnz_histogram"] == np.bincount(nnz[nnz > 0], minlength=256).tolist()
    mass = np.zeros(300)
    entropy = tail = 0
    for block in blocks:
        share = block["weights"] / np.repeat(1 - block["tail"], block["nnz"])
        np.add.at(mass, block["indices"], share)
        entropy -= (share * np.log(share)).sum()
        tail += block["tail"][block["nnz"] > 0].sum()
    coded = (nnz > 0).sum()
    assert figures["entropy_nats"] == pytest.approx(entropy / coded)
    assert figures["tail_mass"] == pytest.approx(tail / coded)
    mean = mass / mass.sum()
    assert figures["mean_entropy_nats"] == pytest.approx(-(mean * np.log(mean)).sum())
    assert [atom for atom, _ in figures["most_used"]] == np.argsort(-mean)[:10].tolist()
    assert figures["most_used"][0][1] == pytest.approx(mean.max())
    assert figures["dead_atoms"] == 0
    assert figures["splits"]["train"]["units"] == 2 and figures["splits"]["held_out"]["units"] == 1
    assert json.loads(json.dumps(figures)) == figures
    text = stores.show(figures, None)
    for words in ("dead atoms", "entropy", "most used", "4 to 7", "held_out"):
        assert words in text


def test_records_are_read_one_by_one_and_few_times(made, monkeypatch):
    """All of a large store would fill the memory."""
    store, read = Store.open(made[0].path), []
    monkeypatch.setattr(
        StoreFiles, "record", lambda files, unit, real=StoreFiles.record: read.append(unit) or real(files, unit)
    )
    monkeypatch.setattr(Store, "records", lambda *_: pytest.fail("a list of all records"))
    inspection.statistics(store)
    assert max(read.count(unit.id) for unit in store.plan.units) <= 3
    inspection.document_tokens(store, "train", 1, 3)


def test_atoms_without_mass_are_dead(tmp_path):
    store = write_store(tmp_path / "s", k=40, words=3)  # few words use few atoms
    mean = store.split("train").mean_distribution() + store.split("held_out").mean_distribution()
    assert inspection.statistics(store)["dead_atoms"] == int((mean == 0).sum()) > 0


def test_a_window_with_its_largest_lsps(made):
    store, truth = made
    number, top = 5, 3
    ids, rows = list(truth_windows(truth["train"]))[number]
    shown = inspection.window_tokens(store, "train", number, top)
    assert [token["id"] for token in shown["tokens"]] == ids.tolist()
    for token, (indices, weights, tail) in zip(shown["tokens"], rows, strict=True):
        assert token["nnz"] == len(indices) and token["tail"] == pytest.approx(tail, rel=0.03, abs=2e-5)
        largest = sorted(weights, reverse=True)[:top]
        assert [weight for _, weight in token["lsps"]] == pytest.approx(np.divide(largest, sum(weights)), rel=0.03)
        of_atom = dict(zip(indices.tolist(), weights / weights.sum() if len(weights) else weights, strict=True))
        assert all(weight == pytest.approx(of_atom[atom], rel=0.03) for atom, weight in token["lsps"])
    assert "no code" in stores.show(shown, None)


def documents_store(path, k):
    """Three units of which the second has documents over windows and blocks; returns the store and its documents."""
    rng = np.random.default_rng(1)
    files, length = StoreFiles(path), 16
    settings = {"k": k}
    target = {
        "target": fingerprint(settings),
        "settings": settings,
        "lineage": {},
        "k": k,
        "vocab_size": 200,
        "max_length": length,
        "weight_octaves": LSP_OCTAVES,
        "special_ids": SPECIAL,
    }
    files.create(target)
    units = tuple(PlannedUnit(f"{number:032}", "train", "text.txt", 100 * number, 100) for number in range(3))
    files.publish_plan(Plan({}, units))
    documents = []
    for unit in units:
        # records 0, 2, 3 and 7; the others were held out or empty
        sizes = {0: 20, 2: 100, 3: 1, 7: 33}
        texts = {record: rng.integers(4, 200, size) for record, size in sizes.items()}
        documents += [(unit.start + record, text.tolist()) for record, text in texts.items()]
        stream = [(record, token) for record, text in texts.items() for token in text]
        windows = [stream[i : i + length - 2] for i in range(0, len(stream), length - 2)]
        with UnitWriter(files, ShardMeta(target["target"], unit.id, k, 200, length)) as writer:
            for i in range(0, len(windows), 4):
                writer.write_block(**block_of(windows[i : i + 4], k))
    return Store.open(path), documents


def block_of(windows, k):
    """Columns of windows of (record, token); a token's only LSP is its id modulo k."""
    ids, starts, records, lengths = [], [], [], []
    for window in windows:
        lengths.append(len(window) + 2)
        last = None
        for position, (record, token) in enumerate(window):
            if record != last:
                starts.append(len(ids))
                records.append(record)
                last = record
            if position == 0:
                ids.append(SPECIAL["cls"])
            ids.append(int(token))
        ids.append(SPECIAL["sep"])
    columns = {
        "ids": np.array(ids),
        "lengths": np.array(lengths),
        "run_starts": np.array(starts),
        "run_records": np.array(records),
    }
    if not k:
        return columns
    coded = columns["ids"] >= 4
    return columns | {
        "nnz": coded.astype(int),
        "indices": columns["ids"][coded] % k,
        "weights": np.ones(coded.sum()),
        "tail": np.zeros(len(ids)),
    }


@pytest.mark.parametrize("k", [0, 30])
def test_documents_across_windows_and_blocks(tmp_path, k):
    store, documents = documents_store(tmp_path / "s", k)
    assert store.report()["documents"] == len(documents)
    for number, (record, ids) in enumerate(documents):
        shown = inspection.document_tokens(store, "train", number, top=2)
        assert [token["id"] for token in shown["tokens"]] == ids
        assert f"record {record} of text.txt, {len(ids)} tokens" in shown["heading"]
        if k:
            assert [token["lsps"] for token in shown["tokens"]] == [[[token % k, 1.0]] for token in ids]
    short = inspection.document_tokens(store, "train", 1, top=2, limit=7)
    assert len(short["tokens"]) == 7 and "the first 7" in short["heading"]
    for number in (-1, len(documents)):
        with pytest.raises(StoreError, match="12 train documents, counted from 0"):
            inspection.document_tokens(store, "train", number, top=2)


def test_tokens_are_written_by_the_stores_tokenizer(tmp_path):
    store = write_store(tmp_path / "s", k=24)
    shown = inspection.show_shards(ShowConfig(store=str(store.path), window=0, split="held_out"))
    words = [token["text"] for token in shown["tokens"]]
    assert words[0] == "[CLS]" and words[-1] == "[SEP]" and all(re.fullmatch(r"w\d+", word) for word in words[1:-1])
    assert shown["tokens"][1]["id"] == int(words[1][1:]) + 5


def test_the_settings_in_which_two_stores_differ(tmp_path):
    lsp, other, ids = (write_store(tmp_path / name, k=k) for name, k in (("a", 24), ("b", 30), ("c", 0)))
    shown = inspection.show_shards(ShowConfig(store=str(lsp.path), against=str(other.path)))
    assert shown["differing"] == {"k": [24, 30]} and shown["same_plan"] and not shown["same_target"]
    assert "24  |  30" in stores.show(shown, None)
    assert inspection.show_shards(ShowConfig(store=str(ids.path), against=str(ids.path)))["differing"] == {}


def test_histogram_bars():
    lines = stores.histogram([0, 10, 0, 5, *[0] * 252]).splitlines()
    assert [line.split() for line in lines] == [
        ["0", "0.0%"],
        ["1", "66.7%", "#" * 40],
        ["2", "0.0%"],
        ["3", "33.3%", "#" * 20],
    ]
    assert len(stores.histogram([1] * 256).splitlines()) == 10
    assert "0.0%" in stores.histogram([0] * 256)
    kept_32 = stores.histogram([*[1] * 33, *[0] * 223]).splitlines()
    assert kept_32[-1].split()[0] == "32", "nothing above --top-n is stored, so no bar may say 32 to 35"
