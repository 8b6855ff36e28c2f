"""Token embeddings for only a part of the vocabulary: fine-tuning needs less memory and gives the same scores.

A task's examples use only some tokens of a vocabulary. The rows of other tokens get no gradient and are never read
(Williams and Aletras, RepL4NLP 2025, partial embedding matrix adaptation). Without them the table, its gradient and
AdamW's two moments are smaller. Tokens keep their ids, and this module maps ids to rows, because models also use ids
otherwise: RoBERTa counts positions from its padding id.

The only difference from training all rows is that missing rows get no weight decay. All other weights are computed from
the same numbers, on a CPU in the same order. Not handled here: which tokens a task uses (trials.py). Trained rows are
not written back into the whole table, because fine-tuned models are not saved.

Shapes: V tokens of the vocabulary, R rows.
"""

import torch
from torch import Tensor, nn


class PartialEmbedding(nn.Embedding):
    """Some rows of an embedding table, looked up by the ids of the whole table."""

    ids_R: Tensor
    """of the rows"""
    rows_V: Tensor
    """row of each id; -1 if it has none"""

    def __init__(self, whole: nn.Embedding, ids_R: Tensor):
        """whole: an nn.Embedding; ids_R: int64, ascending, the rows to keep, including its padding_idx."""
        super().__init__(len(ids_R), whole.embedding_dim, _weight=whole.weight.detach()[ids_R])
        rows_V = torch.full((whole.num_embeddings,), -1)  # no row: reading it raises an error
        rows_V[ids_R] = torch.arange(len(ids_R))
        self.padding_idx = None if whole.padding_idx is None else int(rows_V[whole.padding_idx])
        self.register_buffer("rows_V", rows_V, persistent=False)
        self.register_buffer("ids_R", ids_R, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(self.rows_V[ids])
