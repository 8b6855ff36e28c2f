"""Build small stores of random but well-formed windows for tests, with the truth beside them."""

import numpy as np

from shards import codec
from shards.copies import codebook_fingerprint
from shards.files import StoreFiles
from shards.manifest import Plan, PlannedUnit, fingerprint
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


def random_hidden(rng, ids, width=24, codebook=None):
    """Stored rows of unit-length vectors for all but the special tokens, and those vectors (T, d) as they are read.

    With a codebook of shape (b, 256, d / b) the codes are drawn at random.
    """
    coded = ~np.isin(ids, SPECIAL["all"])
    if codebook is not None:
        codes = rng.integers(0, 256, (len(ids), len(codebook))).astype(np.uint8)
        codes[~coded] = 0
        rows = np.concatenate([codebook[m][codes[:, m]] for m in range(len(codebook))], axis=1) * coded[:, None]
        return {"hidden": codes, "marks": coded}, rows
    rows = rng.normal(size=(len(ids), width)).astype(np.float32)
    rows *= (coded / np.linalg.norm(rows, axis=1))[:, None].astype(np.float32)
    codes, scales = codec.encode_hidden(rows)
    return {"hidden": codes, "marks": scales}, codes * scales[:, None]


def hidden_settings(quantise, seed=0, width=24):
    """Settings of a store of hidden states, and its codebook if it has one."""
    settings = {"format": FORMAT_VERSION, "kind": "hidden", "width": width, "quantise": {"name": quantise}}
    if quantise == "int8":
        return settings, None
    codebook = np.random.default_rng(seed).normal(0, 0.1, (8, 256, width // 8)).astype(np.float32)
    settings["quantise"] |= {"bytes": 8, "codebook": codebook_fingerprint(codebook)}
    return settings, codebook


def keep_codebook(files, codebook):
    files.codebook.mkdir(exist_ok=True)
    np.save(files.codebook / "centroids.npy", codebook)


def make_store(
    path,
    *,
    k=300,
    vocab_size=1000,
    max_length=32,
    blocks=2,
    seed=0,
    units=("train", "train", "held_out"),
    quantise=None,
):
    """Write a finished store; returns (StoreFiles, Plan, {split: list of blocks' columns}).

    quantise  "int8" or "pq" for a store of hidden states: a block's `rows` are then what is to be read
    """
    rng = np.random.default_rng(seed)
    files = StoreFiles(path)
    settings = {"format": FORMAT_VERSION, "kind": "lsp" if k else "ids", "k": k, "seed": seed, "max_length": max_length}
    codebook = None
    if quantise:
        settings, codebook = hidden_settings(quantise, seed)
        k = 0
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
    if codebook is not None:
        keep_codebook(files, codebook)
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
        with UnitWriter(files, ShardMeta.of_unit(target, unit.id)) as writer:
            for number in range(blocks):
                windows = windows_per_block(max_length) if number < blocks - 1 else 37
                block = random_block(rng, windows=windows, max_length=max_length, vocab_size=vocab_size, k=k)
                stored, rows = random_hidden(rng, block["ids"], codebook=codebook) if quantise else ({}, None)
                writer.write_block(**block | stored)
                if quantise:
                    block["rows"] = rows
                    writer.sums["hidden_sum"] += rows.sum(0, dtype=np.float64)
                    writer.sums["hidden_squares"] += (rows.astype(np.float64) ** 2).sum(0)
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
