"""The announcement of a run before its first step: the work, its approximate duration, the origin of each setting.

Not handled here: how the settings are chosen (resolve.py), what a step costs (meter.py).
"""

import functools
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mlsm.common.onednn import multiplies_bfloat16
from mlsm.common.text import also_row, settings_table
from shards.reader import Store
from student.batches import Loader
from student.config import ResolvedConfig
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


class Start(NamedTuple):
    """What is known about a run when it starts or is resumed, before it does a step."""

    config: ResolvedConfig
    origins: dict[str, str]
    task: TrainingTask
    store: Store
    model: Any
    loader: Loader
    meter: Meter
    autocast_dtype: torch.dtype | None
    steps: int
    """done already"""
    held_out: int
    """windows in an evaluation"""
    processes: int
    run: Path


def announcement(start: Start) -> str:
    """The block of lines for a run."""
    config, origins, windows = start.config, start.origins, start.loader.windows
    per_step = windows.tokens / len(windows) * config.batch_windows
    steps_left = config.max_steps - start.steps
    parameters = sum(weight.numel() for weight in start.model.parameters())
    each = min(config.micro_batch, -(-config.batch_windows // start.processes))
    batch = f"{config.batch_windows:,} windows, {each:,} at a time" + " in each process" * (start.processes > 1)
    epochs = config.max_steps * config.batch_windows / len(windows)
    falling = "falling to zero"
    if config.schedule == "wsd":
        falling += f" in the last {min(config.decay_share, 1 - config.warmup):.0%}"
    rate = f"{config.lr:g}, reached after {config.warmup:.0%} of the steps, then {falling}"
    rows = [
        ("run", str(start.run), None),
        (
            "windows",
            f"{len(windows):,} to train on, of up to {start.store.max_length} tokens,"
            f" {windows.tokens:,} in all; {start.held_out:,} held out",
            None,
        ),
        *_short_rows(start),
        *_position_rows(start),
        *_target_rows(start),
        *_model_rows(start, parameters),
        ("batch", batch, origins.get("batch_windows", "default")),
        (
            "steps",
            f"{config.max_steps:,} = {_plural(f'{epochs:,.3g}', 'epoch')}"
            + (f", {steps_left:,} to go" * bool(start.steps)),
            origins.get("max_steps", "default"),
        ),
        ("tokens", f"about {_count(per_step * config.max_steps)}", None),
        ("learning rate", rate, origins.get("lr", "default")),
        *([("compiled", "the first step takes a minute or more; --no-compile: not at all", None)] * config.compile),
        *_precision_rows(start),
        ("time", f"about {_hours(_seconds_left(start))}, from the operations of a step", None),
    ]
    return settings_table(f"{start.task.name} on {start.store.path}", rows + also_row(config, origins, _SHOWN))


def _model_rows(start: Start, parameters: int) -> list:
    config, origins = start.config, start.origins
    model = f"{config.encoder_source}, {parameters:,} parameters are trained"
    if start.task.name == "train-probe":
        return [("probe", f"of {model}", None)]
    from student.encoders.build import own_dropout

    dropout = config.dropout if config.dropout is not None else own_dropout(start.model.encoder.config)
    encoder = "encoder" if config.continue_from is None else "continue_from"
    return [
        ("encoder", model, origins.get(encoder, "default; --encoder bert-2x128 is a small one, for a try")),
        ("objective", config.objective, origins.get("objective", "default")),
        (
            "dropout",
            "several rates" if dropout is None else f"{dropout:g}",
            origins.get("dropout", "the encoder's own"),
        ),
    ]


def _short_rows(start: Start) -> list:
    """A line that says which steps read windows cut into pieces; for runs with `short_windows`."""
    config, loader = start.config, start.loader
    if not loader.short_steps:
        return []
    what = (
        f"steps 1 to {loader.short_steps:,} read each window as {loader.pieces} pieces of {config.short_windows} tokens"
        f" that do not see each other; held-out windows are always whole"
    )
    return [("pieces", what, start.origins.get("short_windows"))]


def _position_rows(start: Start) -> list:
    """A line that says which tokens are predicted, if the objective leaves a choice."""
    if not OBJECTIVES[start.config.objective].all_positions:
        return []
    what = {
        "masked": "masked: only masked tokens are predicted",
        "all": "all: every token is predicted, none is masked",
    }
    positions = start.config.positions
    return [("positions", what[positions], start.origins.get("positions", "default"))]


def _target_rows(start: Start) -> list:
    """Lines with the stores that the run learns from and the weights of their losses, if there are several."""
    if not (others := start.task.objective.other_stores):
        return []
    return [
        ("targets" if store is start.store else "", f"{store.k:,} LSPs of {store.path}, weight {weight:g}", None)
        for store, weight in zip((start.store, *others), start.task.objective.term_weights, strict=True)
    ]


def _precision_rows(start: Start) -> list:
    """A line that suggests bfloat16 if a float32 run starts on a processor that multiplies bfloat16 much faster."""
    device, is_new = start.meter.device, start.steps == 0
    if device.type != "cpu" or start.autocast_dtype is not None or not is_new or not multiplies_bfloat16():
        return []
    gain = matrix_product_rate(device, torch.bfloat16) / matrix_product_rate(device, torch.float32)
    if gain < WORTH_BFLOAT16:
        return []
    # The gain itself is not printed: it was timed for a moment, perhaps while other processes were running.
    hint = "float32; this processor multiplies bfloat16 itself, which can be faster: --dtype bfloat16, another run"
    return [("arithmetic", hint, None)]


def _seconds_left(start: Start) -> float:
    """About how long the remaining steps take: their operations divided by this machine's operations per second."""
    meter = start.meter
    flops = meter.flops_after(start.config.max_steps) - meter.flops_after(start.steps)
    if meter.peak_flops is not None:
        return flops / (SHARE_OF_PEAK * meter.peak_flops)
    rate = start.processes * matrix_product_rate(meter.device, start.autocast_dtype)
    return flops / (SHARE_OF_MEASURED * rate)


@functools.cache  # a process may train many runs
def matrix_product_rate(device: torch.device, dtype: torch.dtype | None) -> float:
    """Operations per second of a matrix product as in a base encoder, measured once for a twentieth of a second.

    If a product is slow, as bfloat16 is on a processor without support for it, a product of fewer rows is timed.
    """

    def seconds(rows, repeats=1):
        left, right = (torch.ones(many, _WIDTH, device=device, dtype=dtype or torch.float32) for many in (rows, _WIDTH))
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
