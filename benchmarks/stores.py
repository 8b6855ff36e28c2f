"""The store that the benchmarks of shards write: its target, its rows, its blocks.

Real rows are the codes of the 8,192 bench states against the reference dictionary of 3072 atoms, lambda 0.05, of which
the 32 largest are kept. The measurements are in pack, shard_bytes, shard_reader and verify.
"""

import numpy as np

from benchmarks.data import bench_atoms, bench_states, unit_rows
from pipeline.solvers import nonneg_lasso
from pipeline.targets.distributions import distributions
from shards.files import StoreFiles
from shards.manifest import Plan, PlannedUnit, fingerprint
from shards.schema import FORMAT_VERSION, LOGITS_OCTAVES, LSP_OCTAVES, ShardMeta
from shards.writer import UnitWriter

K, LAM, TOP_N, MAX_LENGTH, VOCABULARY = 3072, 0.05, 32, 128, 30_522
SPECIAL = {"pad": 0, "cls": 1, "sep": 2, "mask": 3, "all": [0, 1, 2, 3]}


def real_codes():
    """Codes of the bench test set against the reference dictionary."""
    return nonneg_lasso(unit_rows(bench_states(), np.float32), bench_atoms(), LAM)


def window_columns(tokens):
    """The columns of a block of random ids in full windows (the last one may be shorter), each its own document's."""
    starts = np.arange(0, tokens, MAX_LENGTH)
    return {
        "ids": np.random.default_rng(0).integers(4, VOCABULARY, tokens),
        "lengths": np.diff(np.append(starts, tokens)),
        "run_starts": starts,
        "run_records": np.zeros(len(starts), np.int64),
    }


def row_columns(rows, copies=1):
    """The columns of the distributions, so many times over."""
    columns = {"nnz": np.diff(rows.indptr), "indices": rows.indices, "weights": rows.weights, "tail": rows.tail}
    return {name: np.tile(column, copies) for name, column in columns.items()}


def real_columns(tokens):
    """The columns of a block that holds the real rows again and again."""
    rows = distributions(real_codes(), TOP_N)
    return window_columns(tokens) | row_columns(rows, tokens // len(rows))


def make_store(path, kind="lsp", k=K, top_n=TOP_N, vocabulary=VOCABULARY, special=SPECIAL):
    """An empty store of LSPs or logits at a path: its StoreFiles, and its target. Of logits k is the vocabulary."""
    files = StoreFiles(path)
    settings = {"kind": kind, "format": FORMAT_VERSION, "k": k, "top_n": top_n}
    target = {
        "target": fingerprint(settings),
        "settings": settings,
        "lineage": {},
        "k": k,
        "vocab_size": k if kind == "logits" else vocabulary,
        "max_length": MAX_LENGTH,
        "weight_octaves": LOGITS_OCTAVES if kind == "logits" else LSP_OCTAVES,
        "special_ids": special,
    }
    files.create(target)
    return files, target


def write_unit(files, target, unit, blocks):
    """One committed unit of some blocks, the columns of each; returns its record."""
    with UnitWriter(files, ShardMeta.of_unit(target, unit)) as writer:
        for columns in blocks:
            writer.write_block(**columns)
    return writer.record


def write_store(path, columns, units, blocks, **target):
    """StoreFiles of a finished store of so many units, each of which holds a block so many times."""
    files, target = make_store(path, **target)
    plan = Plan({}, tuple(PlannedUnit(f"{n:032}", "train", "bench", n, n + 1) for n in range(units)), {})
    for unit in plan.units:
        write_unit(files, target, unit.id, [columns] * blocks)
    files.publish_plan(plan)
    return files
