"""Objectives whose target follows from the masked token's id alone, whatever its context: a table of distributions.

`type` learns the average LSP distribution of the token in the training text. Compared with mlsm it shows what the
context adds to a target, as both are distributions over the same LSPs. Left out: supersense (supersenses.py).

Shapes: M masked tokens, V vocabulary, K outputs.
"""

import logging
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from scipy import sparse
from torch import Tensor

from common.arrays import read_npz
from common.durable import appearing_whole
from common.gains import mass_by_group
from shards.manifest import fingerprint
from shards.reader import Store
from shards.windows import WindowReader
from student.objective import Objective
from student.targets import MaskedTokens, TableTargets

logger = logging.getLogger(__name__)

WINDOWS_AT_ONCE = 1024


class TokenTable(Objective):
    """KL(P || Q) to the distribution P of the token's id; a token without one carries no loss.

    table_VK  float32 in CSR form, a row for every id, which sums to one or is empty
    """

    table_VK: sparse.csr_array
    coverage: str
    """what the log calls the share of the training split's tokens that have a distribution"""

    def read_targets(self, masked: MaskedTokens) -> TableTargets:
        shares_MK = torch.from_numpy(self.table_VK[masked.ids()].toarray())
        coded_M = shares_MK.any(dim=1)
        return TableTargets((int(coded_M.sum()),), shares_MK, coded_M.float())

    def loss_sums(self, logits_MK: Tensor, targets: TableTargets) -> Tensor:
        return F.kl_div(F.log_softmax(logits_MK.float(), dim=1), targets.shares_MK, reduction="sum")[None]

    @torch.no_grad()
    def token_losses(self, logits_MK: Tensor, targets: TableTargets) -> tuple[Tensor, Tensor]:
        losses_MK = F.kl_div(F.log_softmax(logits_MK.float(), dim=1), targets.shares_MK, reduction="none")
        return losses_MK.sum(dim=1)[None], targets.coded_M[None]

    def measure(self, logits_MK: Tensor, targets: TableTargets) -> dict:
        return {"loss": self.loss_sums(logits_MK, targets)[0]}

    def baseline(self, train: WindowReader, held_out: list[TableTargets], directory: Path | None = None) -> dict:
        """KL of the held-out rows to the average row of the training split's tokens, smoothed by one uniform row."""
        counts_V = np.asarray(train.token_counts(), dtype=np.float64)
        counts_V[train.store.special_ids["all"]] = 0
        sums_K = torch.from_numpy(self.table_VK.T.astype(np.float64) @ counts_V)
        self.facts[self.coverage] = float(sums_K.sum() / max(1, counts_V.sum()))
        logits_K = (sums_K + 1 / self.outputs).log()  # its softmax is the average
        losses = [self.loss_sums(logits_K.expand(targets.shares_MK.shape), targets) for targets in held_out]
        return {"loss": float(sum(losses)) / max(1, sum(targets.counts[0] for targets in held_out))}


class TypeAverage(TokenTable):
    """KL(P || Q) to the average LSP distribution P of the token's type: of all its occurrences in the training split.

    A token that has no coded occurrence there carries no loss.
    """

    name = "type"
    kinds = ("lsp",)
    learns = "predicting the average LSP distribution of the masked token's type, whatever its context"
    loss_name, reference = "held-out KL", "the average LSP distribution"
    coverage = "tokens_with_a_type"

    def set_up(self, store: Store) -> None:
        self.outputs, self.lsp_columns, self._store = store.k, slice(0, store.k), store

    @cached_property
    def table_VK(self) -> sparse.csr_array:
        """What `average_by_token` makes of the store's training split; an export needs none."""
        return average_by_token(self._store.split("train"))

    def prepare(self, train: WindowReader, directory: Path | None) -> None:
        self.table_VK = average_by_token(train, directory)


def average_by_token(windows: WindowReader, directory: Path | None = None) -> sparse.csr_array:
    """Average stored distribution of each token id over a split: float32 CSR (V, k); ids never coded have empty rows.

    directory  where it is kept for other runs on the same target and plan, under a name that follows from them; a file
               that is damaged or cannot be written costs another pass over the shards, no more
    """
    store = windows.store
    name = fingerprint({"target": store.target_id, "plan": store.plan_id, "split": windows.split, "by": "token"})
    path = directory and directory / f"{name[:12]}.npz"
    shape = (store.vocab_size, store.k)
    if path and (kept := _load(path, shape)) is not None:
        return kept
    sums_VK, tokens_V = sparse.csr_array(shape), np.zeros(shape[0])
    for start in range(0, len(windows), WINDOWS_AT_ONCE):
        read = windows.read(np.arange(start, min(start + WINDOWS_AT_ONCE, len(windows))))
        window_N, position_N = np.nonzero(read.documents >= 0)
        rows = windows.targets(read, window_N, position_N)
        found = mass_by_group(read.ids[window_N, position_N], rows.indptr, rows.indices, rows.weights, *shape)
        sums_VK, tokens_V = sums_VK + found.mass_GK, tokens_V + found.tokens_G
    table_VK = (sparse.diags_array(1 / np.maximum(tokens_V, 1)) @ sums_VK).tocsr().astype(np.float32)
    if path:
        _save(path, table_VK)
    return table_VK


def _load(path, shape):
    try:
        kept = read_npz(path)
        return sparse.csr_array((kept["data"], kept["indices"], kept["indptr"]), shape=shape)
    except (OSError, ValueError, KeyError):
        return None


def _save(path, table_VK):
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with appearing_whole(path) as file:
            np.savez(file, data=table_VK.data, indices=table_VK.indices, indptr=table_VK.indptr)
    except OSError as error:
        logger.info("the averages by token are not kept: %s could not be written (%s)", path, error)
