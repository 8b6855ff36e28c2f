"""Loaders that accelerate has prepared would share the windows of LspDataset a second time: they are refused."""

import json
from pathlib import Path

import pytest
from make_store import make_store
from preloaded import start_ranks

TRAIN, BATCH = 3 * 37, 8
"""windows of the store's training split; windows of a batch"""


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    files, *_ = make_store(tmp_path_factory.mktemp("torch") / "lsp", blocks=1, units=("train",) * 3)
    return files.path


def read_by(ranks, store, directory):
    """What that many processes found, which meet over gloo if there are several."""
    started = start_ranks([Path(__file__).with_name("read_by_accelerate.py"), store, directory], ranks)
    said = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0] * ranks, "\n".join(said)
    return [json.loads((directory / f"found-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_accelerate_is_refused_and_plain_loaders_read_everything_once(store, tmp_path, ranks):
    """Oracle of the second: all ranks together read every window of an epoch once, with all of its rows."""
    found = read_by(ranks, store, tmp_path)
    for said in found:
        assert len(said["refused"]) == 3 * 2 * 4 + (ranks == 1)  # dispatch_batches, kinds of loaders, loaders
        for loader, (batches, message) in said["refused"].items():
            assert batches == 0 and "Use mlsm.LspWindows with mlsm.LspCollator" in message, loader
        assert "Use mlsm.LspWindows with mlsm.LspCollator" in said["trainer"]
        windows, cut = said["own loader"]
        assert len(windows) == len(set(windows)) == 3 * BATCH and cut == 0
        whole, rest = said["skipped"]
        assert whole - rest == BATCH
    for parts in zip(*(said["plain"] for said in found), strict=True):
        assert sorted(window for part in parts for window in part) == list(range(TRAIN))
    assert len({window for said in found for window in said["own loader"][0]}) == ranks * 3 * BATCH
