"""The announcement of a run before its first step: the work, its approximate duration, the origin of each setting.

Not handled here: how the settings are chosen (resolve.py), what a step costs (meter.py).
"""

import functools
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from mlsm.common.onednn import multiplies_bfloat16
from mlsm.common.text import also_row, settings_table
from shards.reader import Store
from student.batches import Loader
from student.config import ResolvedConfig
from student.encoders.build import own_dropout
from student.meter import Meter
from student.objectives import OBJECTIVES
from student.task import TrainingTask

# Roughly the share of a plain matrix product's speed that a whole training step reaches. On a CPU small encoders
# reach less and large ones more. Encoders of BERT-base's size usually reach 40 % of a GPU's published peak.
SHARE_OF_MEASURED, SHARE_OF_PEAK = 0.45, 0.4
WORTH_BFLOAT16 = 1.5  # speed-up of matrix products; a whole step gains less (docs/benchmark-details.md)
_WIDTH = 768  # of the matrices whose product is timed: a base encoder's
_SHOWN = (
    "encoder",
    "continue_from",
    "objective",
    "batch_windows",
    "micro_batch",
    "max_steps",
    "epochs",
    "lr",
    "warmup",
    "dropout",
    "short_windows",
    "short_share",
    "positions",
    "store",
    "store_weights",
    "run_dir",
)


def announcement(
    config: ResolvedConfig,
    origins: Mapping[str, str],
    task: TrainingTask,
    store: Store,
    model: nn.Module,
    loader: Loader,
    meter: Meter,
    *,
    run: Path,
    steps: int,
    held_out: int,
    processes: int,
) -> str:
    """The block of lines for a run that starts or is resumed, before it does a step.

    origins    setting -> where its value comes from
    run        its directory
    steps      optimiser steps that are done already
    held_out   windows in an evaluation
    processes  that share every step
    """
    windows = loader.windows
    rows: list[tuple[str, str, str | None]] = [
        ("run", str(run), None),
        (
            "windows",
            f"{len(windows):,} to train on, of up to {store.max_length} tokens, {windows.tokens:,} in all;"
            f" {held_out:,} held out",
            None,
        ),
    ]
    if loader.short_steps:
        pieces = (
            f"steps 1 to {loader.short_steps:,} read each window as {loader.pieces} pieces of {config.short_windows}"
            " tokens that do not see each other; held-out windows are always whole"
        )
        rows.append(("pieces", pieces, origins.get("short_windows")))
    if OBJECTIVES[config.objective].all_positions:
        predicted = {
            "masked": "masked: only masked tokens are predicted",
            "all": "all: every token is predicted, none is masked",
        }
        rows.append(("positions", predicted[config.positions], origins.get("positions", "default")))
    if others := task.objective.other_stores:
        for one, weight in zip((store, *others), task.objective.term_weights, strict=True):
            text = f"{one.k:,} LSPs of {one.path}, weight {weight:g}"
            rows.append(("targets" if one is store else "", text, None))
    parameters = sum(weight.numel() for weight in model.parameters())
    trained = f"{config.encoder_source}, {parameters:,} parameters are trained"
    if task.name == "train-probe":
        rows.append(("probe", f"of {trained}", None))
    else:
        source = "encoder" if config.continue_from is None else "continue_from"
        dropout = config.dropout if config.dropout is not None else own_dropout(model.encoder.config)
        rate = "several rates" if dropout is None else f"{dropout:g}"
        rows += [
            ("encoder", trained, origins.get(source, "default; --encoder bert-2x128 is a small one, for a try")),
            ("objective", config.objective, origins.get("objective", "default")),
            ("dropout", rate, origins.get("dropout", "the encoder's own")),
        ]
    each = min(config.micro_batch, -(-config.batch_windows // processes))
    batch = f"{config.batch_windows:,} windows, {each:,} at a time" + " in each process" * (processes > 1)
    epochs = config.max_steps * config.batch_windows / len(windows)
    length = f"{config.max_steps:,} = {_plural(f'{epochs:,.3g}', 'epoch')}"
    length += f", {config.max_steps - steps:,} to go" * (steps > 0)
    tokens = windows.tokens / len(windows) * config.batch_windows * config.max_steps
    learning_rate = f"{config.lr:g}, reached after {config.warmup:.0%} of the steps, then falling to zero"
    if config.schedule == "wsd":
        learning_rate += f" in the last {min(config.decay_share, 1 - config.warmup):.0%}"
    rows += [
        ("batch", batch, origins.get("batch_windows", "default")),
        ("steps", length, origins.get("max_steps", "default")),
        ("tokens", f"about {_count(tokens)}", None),
        ("learning rate", learning_rate, origins.get("lr", "default")),
    ]
    if config.compile:
        rows.append(("compiled", "the first step takes a minute or more; --no-compile: not at all", None))
    if steps == 0 and config.dtype == "float32" and meter.device.type == "cpu" and _pays_in_bfloat16(meter.device):
        # The gain itself is not printed: it was timed for a moment, perhaps while other processes were running.
        hint = "float32; this processor multiplies bfloat16 itself, which can be faster: --dtype bfloat16, another run"
        rows.append(("arithmetic", hint, None))
    flops = meter.flops_after(config.max_steps) - meter.flops_after(steps)
    if meter.peak_flops is not None:
        seconds = flops / (SHARE_OF_PEAK * meter.peak_flops)
    else:
        speed = processes * matrix_product_rate(meter.device, getattr(torch, config.dtype))
        seconds = flops / (SHARE_OF_MEASURED * speed)
    rows.append(("time", f"about {_hours(seconds)}, from the operations of a step", None))
    return settings_table(f"{task.name} on {store.path}", rows + also_row(config, origins, _SHOWN))


def _pays_in_bfloat16(device: torch.device) -> bool:
    """Whether a processor multiplies bfloat16 itself, and much faster than float32."""
    if not multiplies_bfloat16():
        return False
    gain = matrix_product_rate(device, torch.bfloat16) / matrix_product_rate(device, torch.float32)
    return gain >= WORTH_BFLOAT16


@functools.cache  # a process may train many runs
def matrix_product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a matrix product as in a base encoder, measured once for a twentieth of a second.

    If a product is slow, as bfloat16 is on a processor without support for it, a product of fewer rows is timed.
    """

    def seconds(rows, repeats=1):
        left, right = (torch.ones(many, _WIDTH, device=device, dtype=dtype) for many in (rows, _WIDTH))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begun = time.perf_counter()
        for _ in range(repeats):
            product = left @ right
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        del product
        return time.perf_counter() - begun

    rows = 64
    seconds(rows)  # warm-up: the first product also allocates memory
    while (once := max(seconds(rows), 1e-6)) < 0.01 and rows < 4096:
        rows *= 2
    repeats = max(1, min(100, round(0.05 / once)))
    return 2 * rows * _WIDTH * _WIDTH * repeats / seconds(rows, repeats)


def _count(number: float) -> str:
    for unit, name in ((1e9, "billion"), (1e6, "million")):
        if number >= unit:
            return f"{number / unit:,.3g} {name}" if number < 1000 * unit else f"{number / unit:,.0f} {name}"
    return f"{number:,.0f}"


def _plural(count: str, noun: str) -> str:
    return f"{count} {noun}" if count == "1" else f"{count} {noun}s"


def _hours(seconds: float) -> str:
    if seconds < 90:
        return _plural(f"{max(1, seconds):.0f}", "second")
    if seconds < 5400:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:,.1f} hours"
