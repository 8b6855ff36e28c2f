"""The positions of tokens as the encoder that made their targets counted them.

Not handled here: what is done with them. The same on tensors: mlsm/common/documents.py.

Shapes: W windows, L window length.
"""

from collections.abc import Mapping

import numpy as np

from shards.codec import Windows


def teacher_positions(batch: Windows, settings: Mapping) -> np.ndarray:
    """Position of every token of a batch, int64 (W, L): its place in the window. Numbers at padding mean nothing.

    settings  of a store; where its teacher read the documents of a window apart, positions begin again with each
              document
    """
    if settings.get("documents_apart", False):
        return positions_in_documents(batch.documents)
    return np.broadcast_to(np.arange(batch.ids.shape[1]), batch.ids.shape)


def positions_in_documents(documents_WL: np.ndarray) -> np.ndarray:
    """Positions of tokens, int64 (W, L), that count from 0 in every run of equal document numbers."""
    places_WL = np.broadcast_to(np.arange(documents_WL.shape[1]), documents_WL.shape)
    begins_WL = np.ones(documents_WL.shape, bool)
    begins_WL[:, 1:] = documents_WL[:, 1:] != documents_WL[:, :-1]
    return places_WL - np.maximum.accumulate(np.where(begins_WL, places_WL, 0), axis=1)
