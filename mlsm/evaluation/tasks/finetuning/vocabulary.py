"""Token embeddings with rows for a part of the vocabulary, so that fine-tuning takes less memory for the same scores.

A task's examples use some of a vocabulary's tokens; the rows of the others get no gradient, and nothing reads them
(Williams and Aletras, RepL4NLP 2025, partial embedding matrix adaptation). Without them the table, its gradient and
AdamW's two moments are smaller. Tokens keep their ids, and the row of an id is looked up here, because models do more
with ids than read rows: RoBERTa counts positions from its padding id, which may be any.

The only difference from training all rows is that missing rows are not decayed. All other weights are computed from the
same numbers, on a CPU in the same order. Not handled here: which tokens a task uses (trials.py), writing trained rows
back into the whole table: no model is kept.

Shapes: V tokens of the vocabulary, R rows.
"""

from typing import Any

import torch
from torch import Tensor, nn

from mlsm.common.errors import ModelError


class PartialEmbedding(nn.Embedding):
    """Some rows of a whole table of embeddings, read by the ids of the whole table."""

    ids_R: Tensor
    """of the rows"""
    rows_V: Tensor
    """of the ids; -1 if there is none"""

    def __init__(self, whole: nn.Embedding, ids_R: Tensor):
        """whole: an nn.Embedding; ids_R: int64, rising, the rows to keep, that of its padding_idx among them."""
        super().__init__(len(ids_R), whole.embedding_dim, _weight=whole.weight.detach()[ids_R])
        rows_V = torch.full((whole.num_embeddings,), -1)  # no row: an error where it is read
        rows_V[ids_R] = torch.arange(len(ids_R))
        self.padding_idx = None if whole.padding_idx is None else int(rows_V[whole.padding_idx])
        self.register_buffer("rows_V", rows_V, persistent=False)
        self.register_buffer("ids_R", ids_R, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(self.rows_V[ids])


def refuse_to_save(table: PartialEmbedding, *_: Any) -> None:
    """Raise ModelError: a hook before the state_dict of a fine-tuned model's table."""
    raise ModelError(
        f"this model has {table.num_embeddings} rows of token embeddings (those that its task uses) out of "
        f"{len(table.rows_V)}, so a saved copy could not be loaded again. To keep a model, fine-tune it with "
        "transformers."
    )
