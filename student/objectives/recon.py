"""recon: the hidden state reconstructed from a masked token's stored LSP distribution."""

import numpy as np
from scipy import sparse

from shards import copies
from shards.reader import Store
from student.objectives.base import MaskedTokens
from student.objectives.vectors import Vectors


class Recon(Vectors):
    """The direction of the sum of the dictionary's atoms, weighted by the stored LSP distribution."""

    name = "recon"
    learns = "predicting the hidden states that stored LSP distributions rebuild, at masked tokens"

    def set_up(self, store: Store) -> None:
        self._atoms_Kd = copies.read_atoms(store.files)
        self.width = self.outputs = self._atoms_Kd.shape[1]

    def read_vectors(self, masked: MaskedTokens) -> tuple[np.ndarray, np.ndarray]:
        rows = masked.rows()
        shape = (len(rows.tail), len(self._atoms_Kd))
        vectors_Md = sparse.csr_array((rows.weights, rows.indices, rows.indptr), shape=shape) @ self._atoms_Kd
        return vectors_Md, np.diff(rows.indptr) > 0
