"""Half the held-out tokens of a store, masked as in training."""

import numpy as np

from student.batches import Loader
from student.masks.masking import Masking


def mask_half(store, objective):
    """These tokens with their ids and targets, in one micro-batch."""
    windows, masking = store.split("held_out"), Masking(store.special_ids, store.vocab_size, 0.5)
    loader = Loader(windows, masking, objective.read_targets, micro_batch=999, by_token=True)
    (micro,) = loader.load(np.arange(len(windows)), np.zeros(len(windows), np.int64), 0, 0.5).micro
    return micro


def read_half(store, objective):
    """The targets of these tokens."""
    return mask_half(store, objective).targets
