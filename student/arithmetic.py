"""How a run computes what could be computed in several ways that round differently.

It is decided when a run begins, written into its config.json and checkpoints, and kept to its end, so that a run that
is resumed, on another machine too, equals one that was never interrupted. What earlier versions did is not written
down: their records lack the keys, and mean that. Left out: the dtype, which is a setting.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from common.products import TORCH, USUAL, Shape, measure_products
from student.config import ResolvedConfig

_STRAYING = (0.8, 1.25)  # how far the number of masked tokens in a micro-batch strays from its mean, generously


class Arithmetic(NamedTuple):
    """What is decided once for a run.

    norm_in_blocks  the gradient's norm is that of the norms of blocks; False: one float32 sum
    products        which library computes which product of linear layers (common/products.py)
    """

    norm_in_blocks: bool = True
    products: Mapping[str, str] = USUAL

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Arithmetic":
        """That of a run's config.json or a checkpoint's state."""
        found = record.get("products")
        products = {name: str(way) for name, way in found.items()} if isinstance(found, dict) else USUAL
        return cls(record.get("gradient_norm") == "blocks", products)

    def contradicts(self, config: ResolvedConfig, device: torch.device) -> bool:
        """Whether `--products` names a library, and this is not what a run that begins with it has."""
        asked = {"onednn": USUAL, "torch": TORCH}.get(config.products)
        return asked is not None and _has_choice(config, device) and self.products != asked

    def to_json(self) -> dict:
        """What `of` reads; empty for the arithmetic of the first versions."""
        return ({"gradient_norm": "blocks"} if self.norm_in_blocks else {}) | (
            {"products": dict(self.products)} if self.products else {}
        )


def choose_arithmetic(
    config: ResolvedConfig, model: Any, max_length: int, device: torch.device, ranks: int = 1
) -> Arithmetic:
    """The arithmetic of a run that begins, as `--products` says.

    model       a Student or what stands in for it: its linear layers and `output_shapes` count
    max_length  L, tokens of a window
    ranks       processes that share a batch
    """
    if not _has_choice(config, device) or config.products == "onednn":
        return Arithmetic()
    if config.products == "torch":
        return Arithmetic(products=TORCH)
    tokens = min(config.micro_batch, -(-config.batch_windows // ranks)) * max_length
    rates = set(config.predicted)
    masked = {round(near * rate * tokens) for rate in rates for near in _STRAYING}
    layers = {
        (layer.in_features, layer.out_features) for layer in model.modules() if isinstance(layer, torch.nn.Linear)
    }
    packed = {round((1 - rate) * tokens) for rate in rates} if config.mask_later > 0 else set()
    shapes: set[Shape] = {(rows, *layer) for rows in (tokens, *masked, *packed) for layer in layers}
    shapes |= {(rows, *output) for rows in masked for output in model.output_shapes}
    return Arithmetic(products=measure_products(shapes))


def _has_choice(config, device) -> bool:
    return device.type == "cpu" and config.dtype == "float32" and not config.compile
