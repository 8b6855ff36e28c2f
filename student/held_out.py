"""Evaluate how well the student predicts unseen text, compared with predictions that do not read the text.

The predictions are the average target of the training split and also, for LSPs, the average at the token's position,
for vectors that of the token's id.

The windows are read and masked once, with a fixed seed and without mask weights. So all runs on one plan with the same
masking unit and final mask rate are evaluated on the same tokens. With mask weights, every run would be evaluated on
other tokens: rare tokens are harder, whatever the student has learned. Not handled here: computing the figures
(objectives/).
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from mlsm.common.errors import StoreError
from shards.reader import Store
from shards.windows import WindowBatch
from student.batches import Batch, Loader, MicroBatch, to_device
from student.masks.masking import Masking, begins_run, budget, maskable_positions, words
from student.objectives.base import Objective
from student.ranks import Ranks

logger = logging.getLogger(__name__)

FEW_MASKED = 0.75  # share of the mask rate below which whole words are said to mask too little
MANY_LONG = 0.05  # share of the tokens in words that are never masked, above which the same is said
MASK_SEED = 0  # seed of the evaluation's masks, regardless of the run's seed


class HeldOut:
    """Evaluation on the first windows of the held-out split's epoch 0.

    loader     the run's, of the training split. Held-out windows are read as it reads, but whole, at the final mask
               rate and without weights
    windows    the largest number of windows to read; if the split is empty, all results are empty dicts
    marginals  directory in which averages of the training split are kept for the next run; None: not kept
    """

    def __init__(
        self,
        store: Store,
        loader: Loader,
        objective: Objective,
        *,
        windows: int,
        marginals: Path | None = None,
    ):
        self.objective = objective
        self.batch = _read(store, loader, windows)
        self.baseline: dict = {}
        if self.batch is not None:
            targets = [micro.targets for micro in self.batch.micro]
            self.baseline = objective.baseline(loader.windows, targets, marginals)

    def evaluate(self, model: nn.Module, forward: Callable[[MicroBatch], Tensor], ranks: Ranks) -> dict:
        """Held-out figures: loss (nats per token that carries loss), and what else the objective measures.

        forward  micro-batch on the model's device -> logits
        ranks    the processes that share the work; all get the figures
        """
        if self.batch is None:
            return {}
        parts = ranks.gather(self._sums(model, forward, self.batch.micro[ranks.rank :: ranks.size]))
        sums = {name: sum(part.get(name, 0.0) for part in parts) for name in parts[0]}
        return self.objective.figures(sums, self.batch.counts)

    def _sums(self, model: nn.Module, forward: Callable[[MicroBatch], Tensor], micro_batches: list[MicroBatch]) -> dict:
        device = next(model.parameters()).device
        sums: dict[str, Tensor] = {}
        model.eval()
        with torch.no_grad():
            for micro in micro_batches:
                micro = to_device(micro, device)
                for name, value in self.objective.measure(forward(micro), micro.targets).items():
                    sums[name] = sums.get(name, 0.0) + value.double()
        model.train()
        return {name: value.item() for name, value in sums.items()}


def _read(store: Store, loader: Loader, windows: int) -> Batch | None:
    try:
        split = store.split("held_out")
    except StoreError as error:
        logger.warning("no evaluation: %s", error)
        return None
    count = min(windows, len(split))
    if count == 0:
        return None
    masking = loader.masking
    order = split.order(MASK_SEED, 0, 0, count)
    held_out = replace(loader, windows=split, by_token=False)
    batch = held_out.load(order, np.zeros(count, np.int64), MASK_SEED, masking.final_rate)
    if masking.unit == "word":
        _warn_of_few_masked(split.read(order), batch, masking)
    if not all(batch.counts):
        logger.warning("no evaluation: in %d held-out windows no masked token has a target", count)
        return None
    return batch


def _warn_of_few_masked(read: WindowBatch, batch: Batch, masking: Masking) -> None:
    maskable_WL = maskable_positions(read.ids, read.lengths, masking.special_ids["all"])
    wanted = budget(maskable_WL, masking.final_rate).sum()
    masked = sum(len(micro.where_M) - micro.fillers for micro in batch.micro)
    begins_WL = begins_run(maskable_WL, read.documents) | maskable_WL & ~masking.continues_V[read.ids]
    word_WL, sizes_WL = words(maskable_WL, begins_WL)
    size_WL = np.take_along_axis(sizes_WL, word_WL, axis=1)
    long = (maskable_WL & (size_WL > budget(maskable_WL, masking.final_rate)[:, None])).sum()
    if masked < FEW_MASKED * wanted or long > MANY_LONG * maskable_WL.sum():
        logger.warning(
            "--mask-unit word masks %.1f %% of the tokens instead of %.1f %%: %.0f %% are in words longer than all "
            "that is masked of a window, and are never masked. In languages without spaces a word is a clause; use "
            "--mask-unit token or span.",
            100 * masked / maskable_WL.sum(),
            100 * wanted / maskable_WL.sum(),
            100 * long / maskable_WL.sum(),
        )
