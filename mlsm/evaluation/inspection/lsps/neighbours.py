"""Nearest atoms of a dictionary, and tokens that share an LSP profile, by faiss.

    near = nearest_atoms(atoms_Kd, top=8)
    index = TokenIndex(sample, atoms_Kd)
    index.search(lsps, weights, top=20)

A row of thousands of LSPs is searched for as its product with the dictionary, d numbers scaled to unit length. That is
faithful: up to a factor the product is the hidden state as the code reconstructs it, and the inner product of two of
them is p G q with G the atoms' Gram matrix, so that two tokens with different but nearly parallel atoms count as alike,
which an inner product of the rows themselves would call orthogonal. Not handled here: the part of the hidden state that
the code does not reconstruct.

Shapes: N sampled tokens, R indexed rows, d hidden width, K atoms.
"""

from collections.abc import Callable

import numpy as np
from scipy.sparse import csr_array

from mlsm.common import faiss_gpu
from mlsm.common.device import choose_device
from mlsm.evaluation.inspection.lsps.sample import Sample

INDEX_BYTES = 500_000_000  # of the indexed rows, two bytes a number: 650,000 tokens at d = 384
ROWS_AT_ONCE = 16_384
CANDIDATES = 8  # times as many as asked for are ranked again in float32


def scale_to_unit(rows: np.ndarray) -> np.ndarray:
    """Rows scaled to unit length, float32; a row of zeros stays as it is."""
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.ascontiguousarray(rows / np.maximum(norms, 1e-12), np.float32)


def nearest_atoms(atoms_Kd: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
    """For every atom, the other atoms nearest to it by cosine: int64 (K, top) and float32 (K, top), nearest first.

    On a GPU if faiss was proven there and there are tens of thousands of atoms.
    """
    import faiss

    rows, top = scale_to_unit(atoms_Kd), min(top, len(atoms_Kd) - 1)
    index = faiss_gpu.place(faiss.IndexFlatIP(rows.shape[1]), choose_device("auto"), products=len(rows) * rows.size)
    index.add(rows)
    cosines, found = index.search(rows, top + 1)
    others = found != np.arange(len(rows))[:, None]
    others[others.all(1), -1] = False  # an atom with equals may be missing from its own neighbours
    return found[others].reshape(len(rows), top), cosines[others].reshape(len(rows), top)


def describe_nearest(near: tuple[np.ndarray, np.ndarray], lsp: int) -> list[dict]:
    """The atoms nearest to one, from `nearest_atoms`: number and cosine."""
    others_T, cosines_T = (part[lsp] for part in near)
    return [{"lsp": int(other), "cosine": float(c)} for other, c in zip(others_T, cosines_T, strict=True)]


def project(indptr: np.ndarray, lsps_E: np.ndarray, weights_E: np.ndarray, atoms_Kd: np.ndarray) -> np.ndarray:
    """CSR rows times the dictionary, scaled to unit length."""
    rows = csr_array((weights_E, lsps_E.astype(np.int32), indptr), (len(indptr) - 1, len(atoms_Kd)))
    return scale_to_unit(rows @ atoms_Kd)


class TokenIndex:
    """Tokens of a sample by the direction of their LSPs, in half precision.

    Every row is compared: at a million of them an inverted file (IVF) saves 30 ms a query and takes 12 s more to build,
    while a command asks one question. A GPU would not answer it sooner either, because the rows must first be copied to
    it.

    tokens  numbers of the indexed tokens: evenly over the sample, only tokens with a code
    """

    def __init__(self, sample: Sample, atoms_Kd: np.ndarray, progress: Callable[..., None]):
        import faiss

        self._sample, self._atoms_Kd = sample, atoms_Kd
        width = atoms_Kd.shape[1]
        tokens = sample.spread(INDEX_BYTES // (2 * width))
        self.tokens = tokens[np.diff(sample.indptr)[tokens] > 0]
        self._index = faiss.index_factory(width, "SQfp16", faiss.METRIC_INNER_PRODUCT)
        for start in range(0, len(self.tokens), ROWS_AT_ONCE):
            self._index.add(self.rows(self.tokens[start : start + ROWS_AT_ONCE]))
            progress("index", min(start + ROWS_AT_ONCE, len(self.tokens)), len(self.tokens))

    def rows(self, tokens: np.ndarray) -> np.ndarray:
        """Projected rows of sampled tokens, float32 (R, d)."""
        return project(*self._sample.rows(tokens), self._atoms_Kd)

    def search(self, lsps: np.ndarray, weights: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
        """Sampled tokens whose rows point most nearly where this one does.

        Returns  token numbers and cosines, nearest first
        """
        query = project(np.array([0, len(lsps)]), lsps, weights, self._atoms_Kd)
        _, found = self._index.search(query, min(len(self.tokens), CANDIDATES * top))
        tokens = np.sort(self.tokens[found[0][found[0] >= 0]])
        cosines = self.rows(tokens) @ query[0]  # the index rounds to half precision
        nearest = np.argsort(-cosines, kind="stable")[:top]
        return tokens[nearest], cosines[nearest]
