"""type: the average LSP distribution of all occurrences of a masked token in the training text.

Compared with mlsm it shows what the context adds to a target, as both are distributions over the same LSPs.

Shapes: V vocabulary, k LSPs.
"""

from functools import cached_property
from pathlib import Path

import numpy as np
from scipy import sparse

from mlsm.common.arrays import keep_npz, read_npz
from mlsm.common.gains import mass_by_group
from shards.manifest import fingerprint
from shards.reader import Store
from shards.windows import WindowReader
from student.objectives.token_tables import TokenTable

TOKENS_AT_ONCE = 131_072  # of windows that are read together


class TypeAverage(TokenTable):
    """KL(P || Q) to the average LSP distribution P of the token's type: of all its occurrences in the training split.

    A token that has no coded occurrence there carries no loss.
    """

    name = "type"
    learns = "predicting the average LSP distribution of the masked token's type, whatever its context"
    loss_name, reference = "held-out KL", "the average LSP distribution"
    coverage = "tokens_with_a_type"

    def set_up(self, store: Store) -> None:
        self.outputs, self.lsp_columns, self._store = store.k, slice(0, store.k), store

    @cached_property
    def table_VK(self) -> sparse.csr_array:
        """The table that `average_by_token` makes from the store's training split; an export needs none."""
        return average_by_token(self._store.split("train"))

    def prepare(self, train: WindowReader, directory: Path | None) -> None:
        self.table_VK = average_by_token(train, directory)


def average_by_token(windows: WindowReader, directory: Path | None = None) -> sparse.csr_array:
    """Average stored distribution of each token id over a split: float32 CSR (V, k); ids never coded have empty rows.

    directory  where the table is kept for other runs on the same shards, whose hash its name follows from. If the file
               is damaged, holds anything but distributions, or cannot be written, the shards are read again
    """
    store = windows.store
    name = fingerprint({"target": store.target_id, "plan": store.plan_id, "shards": windows.digest, "by": "token"})
    path = directory and directory / f"{name[:12]}.npz"
    shape = (store.vocab_size, store.k)
    if path and (kept := _load(path, shape)) is not None:
        return kept
    # As in a binary counter, sums of equally many blocks are added, so few additions are to one as large as the table.
    sums: list[sparse.csr_array] = []
    tokens_V = np.zeros(shape[0])
    at_once = max(1, TOKENS_AT_ONCE // store.max_length)
    for block, start in enumerate(range(0, len(windows), at_once), 1):
        read = windows.read(np.arange(start, min(start + at_once, len(windows))))
        window_N, position_N = np.nonzero(read.documents >= 0)
        rows = windows.targets(read, window_N, position_N)
        found = mass_by_group(read.ids[window_N, position_N], rows.indptr, rows.indices, rows.weights, *shape)
        sums.append(found.mass_GK)
        tokens_V += found.tokens_G
        while block % 2 == 0:
            sums[-2:] = [sums[-2] + sums[-1]]
            block //= 2
    sums_VK = sum(reversed(sums), start=sparse.csr_array(shape))
    table_VK = (sparse.diags_array(1 / np.maximum(tokens_V, 1)) @ sums_VK).tocsr().astype(np.float32)
    if path:
        parts = {"data": table_VK.data, "indices": table_VK.indices, "indptr": table_VK.indptr}
        keep_npz(path, "the averages by token", **parts)
    return table_VK


def _load(path, shape):
    """The table kept in a file; None if the file is missing or does not hold distributions."""
    try:
        kept = read_npz(path)
        table_VK = sparse.csr_array((kept["data"], kept["indices"], kept["indptr"]), shape=shape)
        table_VK.check_format(full_check=True)  # SciPy's product would write outside its memory
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if table_VK.dtype != np.float32 or not (table_VK.data >= 0).all():
        return None
    is_one_V = np.abs(table_VK.sum(1, dtype=np.float64) - 1) < 1e-3
    return table_VK if (is_one_V | (np.diff(table_VK.indptr) == 0)).all() else None
