"""Which library computes each matrix product of a run; two libraries round differently.

It is chosen when a run starts, written into its config.json and checkpoints, and kept to its end. So a run that is
resumed, even on another machine, equals an uninterrupted one. A record without this key means oneDNN for all products.
Not handled here: the dtype, which is a setting.
"""

from collections.abc import Mapping
from typing import Any

import torch

from mlsm.common.matrix_products import TORCH, USUAL, Shape, measure_libraries
from student.config import ResolvedConfig

_STRAYING = (0.8, 1.25)  # generous bounds on a micro-batch's number of masked tokens, relative to the mean


def recorded_libraries(record: Mapping[str, Any]) -> Mapping[str, str]:
    """The libraries of a run's config.json or of a checkpoint's state."""
    found = record.get("products")
    return {name: str(way) for name, way in found.items()} if isinstance(found, dict) else USUAL


def libraries_record(libraries: Mapping[str, str]) -> dict:
    """The libraries in the format that `recorded_libraries` reads."""
    return {"products": dict(libraries)} if libraries else {}


def contradicts(libraries: Mapping[str, str], config: ResolvedConfig, device: torch.device) -> bool:
    """Whether `--products` names a library, and a new run with it would get other libraries than these."""
    asked = {"onednn": USUAL, "torch": TORCH}.get(config.products)
    return asked is not None and _has_choice(config, device) and libraries != asked


def choose_libraries(
    config: ResolvedConfig, model: Any, max_length: int, device: torch.device, ranks: int = 1
) -> Mapping[str, str]:
    """The libraries of a new run, chosen as `--products` says.

    model       a Student or a stand-in: only its linear layers and `output_shapes` are used
    max_length  L, tokens of a window
    ranks       processes that share a batch
    """
    if not _has_choice(config, device) or config.products == "onednn":
        return USUAL
    if config.products == "torch":
        return TORCH
    tokens = min(config.micro_batch, -(-config.batch_windows // ranks)) * max_length
    rates = set(config.predicted)
    masked = {round(near * rate * tokens) for rate in rates for near in _STRAYING}
    layers = {
        (layer.in_features, layer.out_features) for layer in model.modules() if isinstance(layer, torch.nn.Linear)
    }
    packed = {round((1 - rate) * tokens) for rate in rates} if config.mask_later > 0 else set()
    shapes: set[Shape] = {(rows, *layer) for rows in (tokens, *masked, *packed) for layer in layers}
    shapes |= {(rows, *output) for rows in masked for output in model.output_shapes}
    return measure_libraries(shapes)


def _has_choice(config, device) -> bool:
    return device.type == "cpu" and config.dtype == "float32" and not config.compile
