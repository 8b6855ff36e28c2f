"""The positions of tokens, counted as in the encoder that made their targets.

Not handled here: how positions are used. The same on tensors: mlsm/common/documents.py.

Shapes: W windows, L window length.
"""

from collections.abc import Mapping

import numpy as np

from shards.codec import Windows


def teacher_positions(batch: Windows, settings: Mapping) -> np.ndarray:
    """Position of every token in its window, int64 (W, L). Values at padding are meaningless.

    settings  of a store. If its teacher read the documents of a window apart, positions start again from 0 at each
              document
    """
    if settings.get("documents_apart", False):
        return positions_in_documents(batch.documents)
    return np.broadcast_to(np.arange(batch.ids.shape[1]), batch.ids.shape)


def positions_in_documents(documents_WL: np.ndarray) -> np.ndarray:
    """Positions of tokens, int64 (W, L), counted from 0 in every run of equal document numbers."""
    places_WL = np.broadcast_to(np.arange(documents_WL.shape[1]), documents_WL.shape)
    begins_WL = np.ones(documents_WL.shape, bool)
    begins_WL[:, 1:] = documents_WL[:, 1:] != documents_WL[:, :-1]
    return places_WL - np.maximum.accumulate(np.where(begins_WL, places_WL, 0), axis=1)
