"""Arithmetic on a store's sparse distributions: CSR rows with only the largest entries.

Shapes: M rows, E stored entries.
"""

import numpy as np

from shards.codec import SparseRows


def row_of_entry(rows: SparseRows) -> np.ndarray:
    """int64 (E), the row that each entry of a CSR matrix is in."""
    return np.repeat(np.arange(len(rows.indptr) - 1), np.diff(rows.indptr))


def negative_entropy(weights: np.ndarray) -> float:
    positive = weights[weights > 0]
    return float(positive @ np.log(positive))


def temper(rows: SparseRows, temperature: float) -> np.ndarray:
    """The weights of sparse rows to the power 1 / temperature, every non-empty row renormalised to one: float64 (E).

    temperature  0 means the limit: weight 1 for the first of a row's largest entries, 0 for the others
    """
    row_E = row_of_entry(rows)
    if temperature == 0:
        largest_M = np.zeros(len(rows.indptr) - 1, rows.weights.dtype)
        np.maximum.at(largest_M, row_E, rows.weights)
        largest_E = np.flatnonzero(rows.weights == largest_M[row_E])
        powers_E = np.zeros(len(row_E))
        powers_E[largest_E[np.unique(row_E[largest_E], return_index=True)[1]]] = 1.0
        return powers_E
    with np.errstate(divide="ignore"):
        log_E = np.log(rows.weights.astype(np.float64)) / temperature
    largest_M = np.full(len(rows.indptr) - 1, -np.inf)
    np.maximum.at(largest_M, row_E, log_E)
    powers_E = np.exp(log_E - largest_M[row_E])  # each row's largest becomes 1, so no row underflows even at a small T
    return powers_E / np.bincount(row_E, powers_E, len(largest_M))[row_E]
