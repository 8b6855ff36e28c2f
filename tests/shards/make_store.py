"""Build small stores of random but well-formed windows for tests, with the truth beside them."""

import numpy as np

from shards.manifest import Plan, PlannedUnit, StoreFiles, fingerprint
from shards.schema import FORMAT_VERSION, LSP_OCTAVES, ShardMeta, windows_per_block
from shards.writer import UnitWriter

SPECIAL = {"pad": 0, "cls": 1, "sep": 2, "mask": 3, "all": [0, 1, 2, 3]}


def random_block(rng, *, windows, max_length, vocab_size, k):
    """Columns of one block: a short last window, tokens without a code, documents that span windows."""
    lengths = np.full(windows, max_length)
    lengths[-1] = max(3, max_length // 3)
    tokens = int(lengths.sum())
    starts = np.cumsum(lengths) - lengths
    run_starts = np.union1d(starts, rng.choice(tokens, windows // 2 + 1, replace=False))
    columns = {
        "ids": rng.integers(4, vocab_size, tokens),
        "lengths": lengths,
        "run_starts": run_starts,
        "run_records": np.arange(len(run_starts)) // 2,
    }
    ids = columns["ids"]
    ids[starts], ids[starts + lengths - 1] = SPECIAL["cls"], SPECIAL["sep"]
    return columns | random_rows(rng, np.isin(ids, SPECIAL["all"]), k) if k else columns


def random_rows(rng, special, k):
    """Rows with 0 to 32 entries; weights sum to 1 - tail."""
    nnz = np.where(special, 0, rng.integers(0, min(32, k) + 1, len(special)))
    rows = np.repeat(np.arange(len(nnz)), nnz)
    indices = rng.integers(0, k - nnz[rows] + 1)  # sorted in each row, then a place further for each one before it
    indices = indices[np.lexsort((indices, rows))] + np.arange(len(rows)) - (np.cumsum(nnz) - nnz)[rows]
    weights = rng.gamma(0.7, size=len(indices)) + 1e-3
    tail = np.where(rng.random(len(nnz)) < 0.5, rng.random(len(nnz)) * 0.2, 0.0) * (nnz > 0)
    weights *= ((1 - tail) / np.maximum(np.bincount(rows, weights, len(nnz)), 1e-30))[rows]
    return {"nnz": nnz, "indices": indices, "weights": weights, "tail": tail}


def make_store(path, *, k=300, vocab_size=1000, max_length=32, blocks=2, seed=0, units=("train", "train", "held_out")):
    """Write a finished store; returns (StoreFiles, Plan, {split: list of blocks' columns})."""
    rng = np.random.default_rng(seed)
    files = StoreFiles(path)
    settings = {"format": FORMAT_VERSION, "kind": "lsp" if k else "ids", "k": k, "seed": seed, "max_length": max_length}
    target = {
        "target": fingerprint(settings),
        "settings": settings,
        "lineage": {},
        "k": k,
        "vocab_size": vocab_size,
        "max_length": max_length,
        "weight_octaves": LSP_OCTAVES,
        "special_ids": SPECIAL,
    }
    files.create(target)
    plan = Plan(
        {"max_length": max_length},
        tuple(
            PlannedUnit(fingerprint([seed, number]), split, "test", number, number + 1)
            for number, split in enumerate(units)
        ),
        {"bytes": 1},
    )
    files.publish_plan(plan)
    truth = {"train": [], "held_out": []}
    for unit in plan.units:
        with UnitWriter(files, ShardMeta(target["target"], unit.id, k, vocab_size, max_length)) as writer:
            for number in range(blocks):
                windows = windows_per_block(max_length) if number < blocks - 1 else 37
                block = random_block(rng, windows=windows, max_length=max_length, vocab_size=vocab_size, k=k)
                writer.write_block(**block)
                truth[unit.split].append(block)
    return files, plan, truth


def truth_windows(blocks):
    """The truth window by window: ids, and (indices, weights, tail) a token."""
    for block in blocks:
        starts = np.cumsum(block["lengths"]) - block["lengths"]
        entries = np.concatenate(([0], np.cumsum(block["nnz"]))) if "nnz" in block else None
        for start, length in zip(starts, block["lengths"], strict=True):
            tokens = range(start, start + length)
            rows = entries is not None and [
                (
                    block["indices"][entries[t] : entries[t + 1]],
                    block["weights"][entries[t] : entries[t + 1]],
                    block["tail"][t],
                )
                for t in tokens
            ]
            yield block["ids"][start : start + length], rows
