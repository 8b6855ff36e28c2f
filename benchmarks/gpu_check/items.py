"""What an item of gpu_check is: a generator that yields what it has measured so far, with a limit and a prediction."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

PARTS = ("solve", "train")


class Setting(NamedTuple):
    """Where an item runs, and at which size."""

    device: torch.device
    toy: bool
    """tiny sizes, on whatever there is: shows that the code runs, not what it costs"""

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def size(self, real: Any, toy: Any) -> Any:
        """One of two sizes."""
        return toy if self.toy else real


class Skip(Exception):
    """Ends an item whose rest cannot be measured here; the message says why. What it yielded stays."""


class Item(NamedTuple):
    """One thing to measure.

    seconds     it may take
    prediction  figures that were expected before any GPU had run it, or are wanted, by name
    """

    part: str
    seconds: int
    prediction: dict[str, Any]
    work: Callable[[Setting], Iterator[dict]]


ITEMS: dict[str, Item] = {}


def item(part: str, seconds: int, **prediction: Any) -> Callable:
    """Enter a generator function into ITEMS under its own name; those of a part run in the order of the file."""

    def enter(work: Callable[[Setting], Iterator[dict]]) -> Callable[[Setting], Iterator[dict]]:
        ITEMS[work.__name__] = Item(part, seconds, prediction, work)
        return work

    return enter


def needs_gpu(setting: Setting) -> None:
    """End the item here where there is no GPU."""
    if not setting.on_gpu:
        raise Skip("needs a GPU")
