"""What a stored token costs and what it loses: bytes per token, distance from the entropy bound, KL.

    python -m benchmarks.shard_bytes

Real codes: the bench hidden states, the reference dictionary of 3072 atoms, lambda 0.05, top 32. A unit is
written and read back with the project's own writer and reader. Bound: non-zeros x (H(gap) + H(weight code))
/ 8 + 3 raw bytes (id and counts), order 0. Fidelity is KL(stored || exact) in nats, of the 8-bit code alone
and of the cut at n as well. Prints JSON as its last line.
"""

import tempfile
from pathlib import Path

import numpy as np

from benchmarks.data import conditions, report
from benchmarks.stores import TOP_N, real_codes, row_columns, window_columns, write_store
from pipeline.targets.distributions import distributions
from shards.reader import Store


def main():
    codes = real_codes()
    rows, exact = distributions(codes, TOP_N), distributions(codes, "all")
    with tempfile.TemporaryDirectory() as directory:
        columns = window_columns(len(rows)) | row_columns(rows)
        store = Store.open(write_store(Path(directory) / "store", columns, units=1, blocks=1).path)
        stored, size, tokens = read_rows(store), size_of_columns(store), len(rows)
        weight_codes = weight_bytes(store)
    nnz = np.diff(rows.indptr)
    bound = nnz.mean() * (entropy(gaps(rows)) + entropy(weight_codes)) / 8 + 3
    result = {
        "bytes_per_token": size / tokens,
        "entropy_bound_bytes_per_token": bound,
        "vs_entropy_bound": size / tokens / bound,
        "kl_quantisation": divergence(stored, rows),
        "kl_stored_exact": divergence(stored, exact),
        "mass_kept": float(1 - rows.tail.mean()),
        "nnz_per_token": float(nnz.mean()),
        "nnz_per_token_exact": float(np.diff(codes.indptr).mean()),
        "top_n": TOP_N,
        "tokens": tokens,
        **conditions(),
    }
    report(result)


def read_rows(store):
    """Every stored row."""
    windows = store.split("train")
    batch = windows.read(np.arange(len(windows)))
    return windows.targets(batch, *np.nonzero(batch.documents >= 0))


def size_of_columns(store):
    """Bytes of the token columns of the first unit; its sums count as in a unit of a million tokens."""
    record = store.records()[0]
    fixed = sum(group["length"] for group in record.groups if "windows" not in group)
    per_unit = fixed * record.tokens / 1_048_576  # a real unit holds a million tokens
    return sum(block["length"] for block in record.blocks) + per_unit


def weight_bytes(store):
    """The 8-bit weight codes as they stand in the shard."""
    reader = store.split("train")
    return reader._block(0).columns["weights"]


def gaps(rows):
    """Differences between neighbouring atom indices of a row; the first counts from -1."""
    before = np.concatenate(([-1], rows.indices[:-1]))
    before[rows.indptr[:-1][np.diff(rows.indptr) > 0]] = -1
    return rows.indices - before


def entropy(symbols):
    """Order-0 entropy in bits."""
    counts = np.unique(symbols, return_counts=True)[1] / len(symbols)
    return float(-(counts * np.log2(counts)).sum())


def divergence(rows, others):
    """Mean KL(rows || others) in nats over the tokens, of sparse rows that are divided by their sums; infinite where
    the others lack an entry."""
    row_E, row_F = (np.repeat(np.arange(len(each.indptr) - 1), np.diff(each.indptr)) for each in (rows, others))
    width = int(max(rows.indices.max(), others.indices.max())) + 1
    place_E, place_F = row_E * width + rows.indices, row_F * width + others.indices
    at_E = np.searchsorted(place_F, place_E).clip(max=len(place_F) - 1)
    p_E, q_F = (
        weights / np.bincount(row, weights)[row]
        for row, weights in ((row_E, rows.weights.astype(float)), (row_F, others.weights.astype(float)))
    )
    q_E = np.where(place_F[at_E] == place_E, q_F[at_E], 0)
    with np.errstate(divide="ignore"):
        return float((p_E * np.log(p_E / q_E)).sum() / (len(rows.indptr) - 1))


if __name__ == "__main__":
    main()
