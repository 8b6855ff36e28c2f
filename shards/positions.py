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
    places_WL = np.broadcast_to(np.arange(batch.ids.shape[1]), batch.ids.shape)
    if not settings.get("documents_apart", False):
        return places_WL
    begins_WL = np.ones(batch.ids.shape, bool)
    begins_WL[:, 1:] = batch.documents[:, 1:] != batch.documents[:, :-1]
    return places_WL - np.maximum.accumulate(np.where(begins_WL, places_WL, 0), axis=1)
