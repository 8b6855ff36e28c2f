"""Train one model on one task, and predict with it.

As in the paper (section 4.2), the learning rate falls linearly to zero. As in the official code, AdamW has torch's
betas and decays all parameters, in float32, and the last incomplete batch is used. Unlike in both, the learning rate
first rises linearly for a fraction of the steps, and gradients are clipped by norm; settings of 0 switch this off. The
loss is the mean over a batch: cross-entropy (on first tokens if words have labels), or squared error for a score.
Dropout masks depend on (task, seed). Not handled here: which model and data (suite.py), figures (metrics.py).

Shapes: N examples, W of a batch, L positions, C outputs.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from mlsm.common.device import DRAWS, own_randomness
from mlsm.evaluation.tasks.finetuning.batches import IGNORED, EncodedExamples, batches_by_length, order, task_number
from mlsm.evaluation.tasks.finetuning.config import FinetuneConfig
from mlsm.evaluation.tasks.finetuning.metrics import UNREAD, Predictions
from mlsm.evaluation.tasks.finetuning.tasks import Task
from shards.counter import hash_u64

WEIGHT_DECAY = 0.01
EVALUATED_AT_ONCE = 64
_DROPOUT_PURPOSE = 0x66744470  # "ftDp"
_SECONDS_BETWEEN_REPORTS = 0.5


def train(
    model: PreTrainedModel,
    encoded: EncodedExamples,
    task: Task,
    seed: int,
    settings: FinetuneConfig,
    report: Callable[[int, float], None],
) -> int | None:
    """Train a model in place.

    encoded   the tokenised training part
    settings  with epochs, one lr, warmup, grad_clip, batch and max_steps
    report    called as report(steps, loss) from time to time
    Returns   the first step, counted from 1, whose loss was not finite; None if there was none
    """
    device, (lr,) = next(model.parameters()).device, settings.rates()
    batches = [rows for epoch in range(settings.epochs) for rows in epoch_batches(task.name, epoch, encoded, settings)]
    batches = batches[: settings.max_steps]
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=WEIGHT_DECAY, fused=True)
    model.train()
    losses, reported = [], 0.0
    with dropout_of(device, task.name, seed):
        for step, rows in enumerate(batches):
            optimizer.zero_grad(set_to_none=True)
            with DRAWS:
                loss = _loss(model, *encoded.batch(rows, device))
                loss.backward()
            if settings.grad_clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip)
            for group in optimizer.param_groups:
                group["lr"] = lr * rate_factor(step, len(batches), settings.warmup)
            optimizer.step()
            losses.append(loss.detach())  # without waiting for a GPU
            if time.monotonic() - reported > _SECONDS_BETWEEN_REPORTS:
                report(step + 1, losses[-1].item())
                reported = time.monotonic()
    finite = torch.isfinite(torch.stack(losses)).tolist()
    return None if all(finite) else finite.index(False) + 1


def rate_factor(step: int, steps: int, warmup: float) -> float:
    """The learning rate of a step, counted from 0, as a fraction of the peak."""
    rising = min(math.ceil(warmup * steps), steps - 1)  # a single step has the peak, not a rate of 0
    return step / rising if step < rising else (steps - step) / (steps - rising)


def epoch_batches(task: str, epoch: int, encoded: EncodedExamples, settings: FinetuneConfig) -> list[np.ndarray]:
    """Rows of the batches of an epoch."""
    rows_N = order(task, epoch, len(encoded))
    return [rows_N[begin : begin + settings.batch] for begin in range(0, len(rows_N), settings.batch)]


def steps_of(count: int, settings: FinetuneConfig) -> int:
    """Optimiser steps of a run on `count` examples."""
    steps = settings.epochs * -(-count // settings.batch)
    return steps if settings.max_steps is None else min(steps, settings.max_steps)


def _loss(model, inputs, labels):
    logits = model(**inputs).logits
    if labels.is_floating_point():
        return F.mse_loss(logits.squeeze(-1), labels)
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED)


@torch.inference_mode()
def predict(model: PreTrainedModel, encoded: EncodedExamples, task: Task) -> Predictions:
    """A model's predictions for all examples, in order.

    Returns  int labels or float scores (N); if words have labels, for every example the list of its words' labels,
             metrics.UNREAD for words that the model did not read (cut off, or without a token)
    """
    device = next(model.parameters()).device
    model.eval()
    predictions: list[Any] = [None] * len(encoded)
    for rows in batches_by_length(encoded, EVALUATED_AT_ONCE):
        logits = model(**encoded.batch(rows, device)[0]).logits.float().cpu().numpy()
        said = logits.argmax(-1) if task.labels else logits.squeeze(-1)
        for row, values in zip(rows, said, strict=True):
            predictions[row] = values
    if encoded.words_N is None:
        return np.array(predictions)
    pairs = zip(predictions, encoded.words_N, strict=True)
    return [np.where(words >= 0, values[words], UNREAD).tolist() for values, words in pairs]


@contextmanager
def dropout_of(device: torch.device, task: str, seed: int) -> Iterator[None]:
    """Seed torch's generators by task and seed; their state is restored afterwards."""
    key = int(hash_u64(_DROPOUT_PURPOSE, task_number(task), seed) >> 1)
    with own_randomness(device):
        with DRAWS:
            torch.manual_seed(key)
        yield
