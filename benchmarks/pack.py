"""How fast distributions become committed shards on one core: top-n, quantise, pack, hash, write.

    taskset -c 0 python -m benchmarks.pack

Codes as stage A gets them from the solver: on average 46 non-zeros a token of k = 3072 atoms, of which the 32
largest are kept; made up from a seed, so that the benchmark needs no data. One unit of blocks of 65,536 tokens is
written with the project's own writer, fsync included, to --directory (a disk; the default is /tmp). Baseline: the
same rows to an uncompressed .npz, with one fsync. `pack_vs_npz` is the ratio of the two rates, top-n in both, median
of the repetitions; on a shared machine, the ratio per second of processor time is more reliable. Prints JSON as its
last line.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.data import conditions, report, with_range
from benchmarks.stores import MAX_LENGTH, TOP_N, VOCABULARY, K, make_store, row_columns, write_unit
from pipeline.solvers import Codes
from pipeline.targets.distributions import distributions
from shards.schema import BLOCK_TOKENS


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--directory", default=None)
    given = parser.parse_args()
    codes, columns = made_up(np.random.default_rng(0))
    tokens = given.blocks * BLOCK_TOKENS
    seconds = {"pack": [], "top_n": [], "npz": [], "cpu": []}
    for repeat in range(given.repeats + 1):
        with tempfile.TemporaryDirectory(dir=given.directory) as directory:
            busy = time.process_time()
            began = time.perf_counter()
            for _ in range(given.blocks):
                rows = distributions(codes, TOP_N)
            top_n = time.perf_counter() - began
            began = time.perf_counter()
            size = write(Path(directory), rows, columns, given.blocks)
            pack = time.perf_counter() - began
            busy = time.process_time() - busy
            baseline = write_npz(Path(directory), rows, columns, given.blocks)
        if repeat:  # the first compiles and warms up
            for name, value in (("pack", pack), ("top_n", top_n), ("npz", baseline), ("cpu", busy)):
                seconds[name].append(value)
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    both, npz = (np.array(seconds[name]) + seconds["top_n"] for name in ("pack", "npz"))
    result = {
        "pack_tokens_per_second": tokens / statistics.median(both),
        **with_range("pack_vs_npz", npz / both, "range"),
        "pack_tokens_per_cpu_second": tokens / middle["cpu"],
        "spread": (max(both) - min(both)) / statistics.median(both),
        "writer_alone_tokens_per_second": tokens / middle["pack"],
        "top_n_alone_tokens_per_second": tokens / middle["top_n"],
        "npz_tokens_per_second": tokens / statistics.median(npz),
        "bytes_per_token": size / tokens,
        "nnz_per_token": len(rows.indices) / BLOCK_TOKENS,
        "tokens": tokens,
        **conditions(),
    }
    report(result)


def made_up(rng):
    """Codes of one block with 32 to 60 non-zeros a token, and the block's other columns."""
    found_N = rng.integers(32, 61, BLOCK_TOKENS)
    indptr = np.concatenate(([0], np.cumsum(found_N)))
    gaps = rng.integers(1, K // 60, indptr[-1])
    sums = np.cumsum(gaps)
    before = np.repeat(sums[indptr[:-1]] - gaps[indptr[:-1]], found_N)
    indices = (sums - before - 1).astype(np.int32)
    values = rng.gamma(0.7, size=indptr[-1]).astype(np.float32) + np.float32(1e-4)
    starts = np.arange(0, BLOCK_TOKENS, MAX_LENGTH)
    columns = {
        "ids": rng.integers(4, VOCABULARY, BLOCK_TOKENS),
        "lengths": np.full(len(starts), MAX_LENGTH),
        "run_starts": starts,
        "run_records": np.arange(len(starts)),
    }
    return Codes(indptr, indices, values, np.zeros(BLOCK_TOKENS, np.float32)), columns


def write(directory, rows, columns, blocks):
    """The rows `blocks` times as one committed unit; returns its size in bytes."""
    files, target = make_store(directory / "store")
    return write_unit(files, target, "unit", [columns | row_columns(rows)] * blocks).bytes


def write_npz(directory, rows, columns, blocks):
    began = time.perf_counter()
    with open(directory / "rows.npz", "wb") as file:
        arrays = columns | row_columns(rows)
        np.savez(file, **{f"{name}{i}": array for i in range(blocks) for name, array in arrays.items()})
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
