"""Adaptive masks: tokens that the student predicts badly are masked more often (`--mask-weights adaptive`).

After Edman and Fraser (2025, "Mask and You Shall Receive", BabyLM): the weight of a token type, that is of an entry of
the vocabulary, follows the student's loss at the masked positions of that type, and changes every E optimiser steps.
The formula is ours. At an update, for each type v and each term t of the objective's loss,

    S_tv, N_tv   summed loss and number of the masked tokens of type v that carry that term. Those of the E steps before
                 the update count in full, those of the E steps before them half, those before a quarter, and so on
    l_t          the mean over all types, (sum of S_tv over v) / (sum of N_tv over v)
    w_v          (sum over t of weight_t (S_tv + PRIOR l_t) / (N_tv + PRIOR)) / (sum over t of weight_t l_t)

So a type that was never masked has the average weight, 1, and rare types are near it. If a type is hardly masked any
more, its counts are halved again and again and its weight returns to 1, so no type drops out for good. Until the first
update all tokens have the same weight.

Losses and numbers are counted as integers, in units of 2^-20 nat and 2^-20 token, so that halves are exact enough. Sums
of integers do not depend on their order, so not on micro-batches or on how processes share a batch, and a checkpoint
holds them exactly. A batch is masked ahead of its step, but never across an update: the batch of the first step after
an update is only read once the update is done (`waits`). Not handled here: how weights decide a mask (masking.py), how
the loss of a token is computed (objectives/).

Shapes: V vocabulary, M masked tokens, T loss terms.
"""

import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mlsm.common.model_checks import load_tensors
from shards.reader import Store
from student.batches import MicroBatch
from student.masks.table import LONGEST, MaskTable, vocabulary_fingerprint
from student.objectives.base import Objective
from student.ranks import Ranks

PARTS = 2**20  # of a nat or a token
PRIOR = 10  # every type starts with so many masked tokens of average loss


class AdaptiveWeights:
    """The counts of one run, and the table of weights that follows from them.

    every   optimiser steps between two updates
    device  where the student computes its logits
    """

    def __init__(self, store: Store, objective: Objective, every: int, device: torch.device):
        self.objective, self.every = objective, every
        self.vocabulary = vocabulary_fingerprint(store)
        shape = (2, len(objective.term_weights), store.vocab_size)  # summed losses, numbers of tokens
        self._earlier_2TV = np.zeros(shape, np.int64)  # up to the last update, halved at each
        self._recent_2TV = np.zeros(shape, np.int64)  # since then, of all processes
        self._own_2TV = torch.zeros(shape, dtype=torch.int64, device=device)  # of this process, not yet among these
        self._updates = 0
        self._table: MaskTable | None = None

    def waits(self, step: int) -> bool:
        """Whether a step, counted from 0, comes right after an update, so that it cannot be masked earlier."""
        return step > 0 and step % self.every == 0

    def table_at(self, step: int) -> MaskTable | None:
        """The weights for masking the steps until the next update; None: all tokens have the same weight."""
        assert step // self.every == self._updates, f"step {step} is of another period than {self._updates} updates"
        return self._table

    def count(self, micro: MicroBatch, logits_MK: Tensor) -> None:
        """Add the losses of a micro-batch on the device to the counts."""
        with torch.no_grad():
            losses_TM, carries_TM = self.objective.token_losses(logits_MK.detach(), micro.targets)
            parts_TM = (losses_TM.double() * PARTS).round().long()
        assert micro.ids_M is not None, "the loader is set to provide them"
        self._own_2TV[0].index_add_(1, micro.ids_M, parts_TM)
        self._own_2TV[1].index_add_(1, micro.ids_M, PARTS * carries_TM.long())

    def finish_step(self, steps: int, ranks: Ranks) -> None:
        """Update the weights if it is time, after this many steps in all; every process must call this."""
        if self.waits(steps):
            self._gather(ranks)
            self._earlier_2TV = self._earlier_2TV // 2 + self._recent_2TV
            self._recent_2TV[:] = 0
            self._set_table(steps)

    def state(self, ranks: Ranks) -> dict[str, Tensor]:
        """The state for a checkpoint, the same in every process; every process must call this."""
        self._gather(ranks)
        return {"earlier": torch.from_numpy(self._earlier_2TV), "recent": torch.from_numpy(self._recent_2TV)}

    def restore(self, file: Path, steps: int) -> None:
        """Restore the state from a file. Raises ValueError if the file is from another step."""
        state = {name: tensor.numpy() for name, tensor in load_tensors(file).items()}
        expected = dict.fromkeys(("earlier", "recent"), (self._earlier_2TV.shape, self._earlier_2TV.dtype))
        if (found := {name: (array.shape, array.dtype) for name, array in state.items()}) != expected:
            raise ValueError(f"{file.name} holds {found}, expected {expected}")
        self._earlier_2TV, self._recent_2TV = state["earlier"].copy(), state["recent"].copy()
        self._own_2TV.zero_()
        self._set_table(steps)

    def _gather(self, ranks: Ranks) -> None:
        self._recent_2TV += ranks.sum_exactly(self._own_2TV.cpu()).numpy()
        self._own_2TV.zero_()

    def _set_table(self, steps: int) -> None:
        self._updates = steps // self.every
        losses_TV, counts_TV = self._earlier_2TV / PARTS
        losses_TV = np.maximum(losses_TV, 0)  # a divergence of nearly 0 may have been rounded below it
        total_T, count_T = losses_TV.sum(axis=1), counts_TV.sum(axis=1)
        mean_T1 = (total_T / np.maximum(count_T, 1))[:, None]
        weight_T1 = np.array(self.objective.term_weights)[:, None]
        average = (weight_T1 * mean_T1).sum()
        if self._updates == 0 or average == 0:
            self._table = None
            return
        smoothed_TV = (losses_TV + PRIOR * mean_T1) / (counts_TV + PRIOR)
        weights_V = ((weight_T1 * smoothed_TV).sum(axis=0) / average).astype(np.float32)
        origin = json.dumps({"kind": "adaptive", "objective": self.objective.name, "steps": steps, "every": self.every})
        self._table = MaskTable("adaptive", self.vocabulary, weights_V, np.zeros((0, LONGEST), np.int32), origin)
