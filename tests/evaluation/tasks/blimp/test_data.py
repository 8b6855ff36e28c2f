"""BLiMP's files: what is there, what is missing or malformed, and which pairs a subset has."""

import json
import random
import shutil

import pytest
from data import data_path

from mlsm.common.errors import BlimpError
from mlsm.evaluation.tasks.blimp.data import PARADIGMS, PHENOMENA, Paradigm, read, subset


@pytest.fixture
def directory(tmp_path):
    """67 files of two pairs."""
    for name in PARADIGMS:
        lines = [{"sentence_good": f"{name} is {n}.", "sentence_bad": f"{name} are {n}."} for n in range(2)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_upstream_is_67_thousand_pairs_of_the_phenomena_that_it_names():
    directory = data_path("blimp")
    paradigms = read(directory)  # the checkout; its files are in data/
    assert [(paradigm.name, len(paradigm.pairs)) for paradigm in paradigms] == [(name, 1000) for name in PARADIGMS]
    assert len(PARADIGMS) == 67 and len(PHENOMENA) == 12
    assert sum(good == bad for paradigm in paradigms for good, bad in paradigm.pairs) == 7
    theirs = {"s_selection": "argument_structure", "filler_gap_dependency": "filler_gap"}
    for phenomenon, names in PHENOMENA.items():
        for name in names:
            with open(directory / "data" / f"{name}.jsonl") as file:
                term = json.loads(next(file))["linguistics_term"].replace("-", "_")
            assert theirs.get(term, term) == phenomenon.lower().translate(str.maketrans(" -/", "___"))


def test_a_subset_is_the_same_pairs_in_whatever_order_they_lie():
    pairs = [(f"good {n}", f"bad {n}") for n in range(50)]
    shuffled = random.Random(0).sample(pairs, 50)
    chosen = subset(Paradigm("wh_island", pairs), 10).pairs
    assert len(chosen) == 10 and chosen == sorted(chosen, key=pairs.index) != pairs[:10]
    other = subset(Paradigm("wh_island", shuffled), 10).pairs
    assert set(other) == set(chosen) and other == sorted(other, key=shuffled.index)
    assert set(subset(Paradigm("wh_island", pairs), 20).pairs) > set(chosen)
    with pytest.raises(BlimpError, match="--per-paradigm 51, but wh_island has 50 pairs"):
        subset(Paradigm("wh_island", pairs), 51)


@pytest.mark.parametrize(
    "line",
    [
        '{"sentence_good": "a"}',
        '{"sentence_good": "a", "sentence_bad": 1}',
        '["a", "b"]',
        '{"sentence_good": ',
        '{"sentence_good": "a", "sentence_bad": " "}',
        r'{"sentence_good": "\ud800", "sentence_bad": "a"}',
        pytest.param("[" * 200_000, id="deep"),
        "",
    ],
)
def test_a_malformed_line_is_named(line, directory):
    file = directory / "wh_island.jsonl"
    lines = file.read_text().splitlines()
    file.write_text(f"{lines[0]}\n{line}\n{lines[1]}\n")
    with pytest.raises(BlimpError, match=r"wh_island.jsonl, line 2: expected a JSON object .*sentence_bad"):
        read(directory)


def test_bytes_that_are_no_text_are_a_malformed_line(directory):
    (directory / "wh_island.jsonl").write_bytes(b'{"sentence_good": "\xff", "sentence_bad": "a"}\n')
    with pytest.raises(BlimpError, match="wh_island.jsonl, line 1"):
        read(directory)


def test_missing_and_empty_files_are_named(directory, tmp_path):
    (directory / "causative.jsonl").write_text("")
    with pytest.raises(BlimpError, match="causative.jsonl is empty"):
        read(directory)
    (directory / "causative.jsonl").unlink()
    shutil.move(directory / "wh_island.jsonl", directory / "island.jsonl")
    with pytest.raises(BlimpError, match="has no causative.jsonl and 1 more. Expected BLiMP's 67 files"):
        read(directory)
    with pytest.raises(BlimpError, match="nowhere is not a directory"):
        read(tmp_path / "nowhere")


def test_without_a_network_the_hub_is_one_clear_line(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    with pytest.raises(BlimpError, match="not in the cache and cannot be fetched from the Hub.*--data-dir"):
        read(None)


def test_the_hub_is_asked_for_every_paradigm_at_one_revision(monkeypatch):
    import datasets

    asked = []

    def load_dataset(repository, name, *, split, revision):
        asked.append((repository, name, split, len(revision)))
        return datasets.Dataset.from_dict({"sentence_good": [f"{name} is."], "sentence_bad": [f"{name} are."]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    paradigms = read(None)
    assert asked == [("nyu-mll/blimp", name, "train", 40) for name in PARADIGMS]
    assert paradigms[3].pairs == [(f"{PARADIGMS[3]} is.", f"{PARADIGMS[3]} are.")]
