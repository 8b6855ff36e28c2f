"""The command track on stores: what it writes, chains of stores, and stores that do not go together."""

import csv
import json

import numpy as np
import pytest
from preloaded import run_command
from scipy.sparse import csr_array
from tiny_store import write_store

from mlsm.commands.track import show as tracking
from mlsm.common.errors import InspectionError
from mlsm.common.progress import silent
from mlsm.evaluation.inspection.lsps.sample import sample_tokens
from mlsm.evaluation.inspection.tracking.config import TrackConfig
from mlsm.evaluation.inspection.tracking.correlation import LEAST_TOKENS
from mlsm.evaluation.inspection.tracking.track import COLUMNS, track
from shards.reader import Store

LEAST_BY_CHANCE = 0.05  # a correlation that some rotations of the small stores reach for more LSPs than others


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Three stores of one plan, of 24, 24 and 60 LSPs: in the second, other words have none."""
    root = tmp_path_factory.mktemp("tracked")
    stores = [write_store(root / name, k=k, bare=bare) for name, k, bare in (("a", 24, 7), ("b", 24, 5), ("c", 60, 7))]
    assert len({store.plan_id for store in stores}) == 1
    return [str(store.path) for store in stores]


def test_a_store_is_matched_with_itself(places, tmp_path):
    found = track(TrackConfig(stores=(places[0], places[0]), output=tmp_path / "out"))
    counts = found["steps"][0]["counts"]
    assert counts["kept"] == 24 - counts["rare"] > 12 and found["steps"][0]["counts_after"] == {
        "kept": counts["kept"], "drifted": 0, "split": 0, "merged": 0, "appeared": 0, "rare": counts["rare"]
    }  # fmt: skip
    assert found["steps"][0]["median_correlation"] == pytest.approx(1) and found["surviving"] == [counts["kept"]] * 2
    records = json.loads((tmp_path / "out" / "tracking.json").read_text())["lsps"]
    kept = [record for record in records if record["state"] == "kept"]
    assert all(record["correlation"] == pytest.approx(1) for record in kept)  # two LSPs may be alike on all tokens
    assert len({record["into"][0] for record in kept}) == len(kept) == counts["kept"]


def test_a_chain_of_stores_is_followed(places, tmp_path):
    config = TrackConfig(stores=tuple(places), output=tmp_path / "out", samples=1_500)
    found = track(config)
    assert found["tokens"] <= 1_500 and len(found["steps"]) == 2 and len(found["surviving"]) == 3
    assert json.loads(json.dumps(found)) == found
    names = [path.rpartition("/")[2] for path in found["files"]]
    assert names == ["tracking.json", "lsps.csv", "paths.csv", "tracking.svg", "tracking.png", "tracking.csv"]
    records = json.loads((tmp_path / "out" / "tracking.json").read_text())["lsps"]
    with (tmp_path / "out" / "lsps.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert tuple(header) == COLUMNS and len(rows) == len(records)
    for number, step in enumerate(found["steps"]):
        of_step = [record for record in records if record["from"] == number]
        assert sum(step["counts"].values()) == len([record for record in of_step if record["lsp"] is not None]) == 24
        assert sum(step["counts_after"].values()) == found["stores"][number + 1]["k"]
    with (tmp_path / "out" / "paths.csv").open(newline="") as file:
        _, *paths = csv.reader(file)
    assert [sum(path[store] != "" for path in paths) for store in range(3)] == found["surviving"]
    by_lsp = {(record["from"], record["lsp"]): record for record in records}
    for path in paths:
        for number in range(2):
            if path[number + 1]:
                assert by_lsp[number, int(path[number])]["into"][0] == int(path[number + 1])
    text = tracking(found, config)
    assert "0 to 1" in text and "1 to 2" in text and "paths.csv" in text
    left = ", ".join(map(str, found["surviving"]))
    assert f"LSPs of store 0 followed step by step to each store (merged ones share an LSP): {left}" in text


def test_chance_is_measured_with_several_shifts_and_for_each_lsp(places, tmp_path, monkeypatch):
    monkeypatch.setattr("mlsm.evaluation.inspection.tracking.track.MATCHED_FROM", LEAST_BY_CHANCE)
    found = track(TrackConfig(stores=tuple(places[:2]), output=tmp_path / "out"))
    dense = []
    for place in places[:2]:
        sample = sample_tokens(Store.open(place), 2_000_000, silent)
        entries = (sample.weights_E, sample.lsps_E, sample.indptr)
        dense.append(csr_array(entries, (len(sample), sample.k)).toarray().astype(float))
    total, rare = len(dense[0]), [(rows > 0).sum(0) < LEAST_TOKENS for rows in dense]
    by_shift = []
    for number in range(1, 6):
        with np.errstate(invalid="ignore"):
            r_KJ = np.corrcoef(np.roll(dense[0], total * number // 6, axis=0), dense[1], rowvar=False)[:24, 24:]
        r_KJ[rare[0]], r_KJ[:, rare[1]] = -np.inf, -np.inf
        by_shift.append(r_KJ)
    largest_KJ, counts = np.max(by_shift, axis=0), [int((r_KJ.max(1) >= LEAST_BY_CHANCE).sum()) for r_KJ in by_shift]
    assert len(set(counts)) > 1, "the shifts differ"
    chance = found["steps"][0]["chance"]
    assert chance == {"lsps": sorted(counts)[2], "largest": pytest.approx(largest_KJ.max())}
    records = json.loads((tmp_path / "out" / "tracking.json").read_text())["lsps"]
    for record in records:
        lsp = record["lsp"]
        expected = largest_KJ[:, record["into"][0]].max() if lsp is None else largest_KJ[lsp].max()
        assert record["chance"] == (None if record["state"] == "rare" else pytest.approx(expected))
    with (tmp_path / "out" / "lsps.csv").open(newline="") as file:
        cells = [row["chance"] for row in csv.DictReader(file)]
    assert cells == ["" if record["chance"] is None else f"{record['chance']:.6g}" for record in records]


def test_other_windows_are_refused(places, tmp_path):
    other = write_store(tmp_path / "other", k=24, train_windows=140)
    pairs = write_store(tmp_path / "pairs", k=24, pairs=True)
    for store, said in ((other, "different text or tokens"), (pairs, "packing is 'pairs'")):
        with pytest.raises(InspectionError, match=f"do not hold the same windows: .*{said}.* Encode the same corpus"):
            track(TrackConfig(stores=(places[0], str(store.path)), output=tmp_path / "out"))
    ids = write_store(tmp_path / "ids", k=0)
    with pytest.raises(InspectionError, match="contains ids, not LSPs"):
        track(TrackConfig(stores=(places[0], str(ids.path)), output=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_settings_that_say_nothing_are_refused():
    for given, said in (
        ({"stores": ("a",)}, "two stores or more, found 1"),
        ({"samples": 1}, "--samples must be at least 2"),
    ):
        with pytest.raises(ValueError, match=said):
            TrackConfig(**{"stores": ("a", "b")} | given)


def test_the_command(places, tmp_path):
    run = run_command(["track", *places[:2], "--matching", "mutual-best", "--json"], cwd=tmp_path, code=0)
    found = json.loads(run.stdout)
    assert found["matching"] == "mutual-best" and (tmp_path / "runs" / "tracking" / "tracking.svg").is_file()
    assert 0 <= found["steps"][0]["chance"]["largest"] < 1 and np.isfinite(found["steps"][0]["median_correlation"])
