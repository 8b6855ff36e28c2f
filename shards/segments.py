"""Which sentence of a pair each token belongs to, derived from the positions of [SEP].

A window of `--packing pairs` reads [CLS] A [SEP] B [SEP]. BERT numbers its segments 0 for [CLS] A [SEP] and 1 for
B [SEP] (Devlin et al. 2019, figure 2; `token_type_ids` in transformers). The numbers follow from the ids, so shards
store no byte for them. Teacher and student both read them from here.

Not handled here: whether an encoder has segment embeddings and whether they are used (pipeline/, student/).

Shapes: W windows, L positions.
"""

import numpy as np


def segment_ids(ids_WL: np.ndarray, lengths_W: np.ndarray, sep_id: int) -> np.ndarray:
    """Segment numbers of windows of sentence pairs.

    ids_WL     integer token ids
    lengths_W  number of real tokens in each window, special tokens included
    sep_id     id of the token that ends a sentence
    Returns    int64 (W, L): 0 up to and including the first `sep_id`, 1 after it, and 0 again at padding
    """
    ids_WL = np.asarray(ids_WL)
    real_WL = np.arange(ids_WL.shape[1]) < np.asarray(lengths_W)[:, None]
    separators_WL = (ids_WL == sep_id) & real_WL
    ended_before_WL = np.cumsum(separators_WL, axis=1) > separators_WL
    return (ended_before_WL & real_WL).astype(np.int64)
