"""The position of a reader, and which rank and loader worker delivers which windows.

All ranks together deliver one endless sequence of windows: position p is window p mod N of epoch p div N, in
that epoch's order (N windows in the split). It is divided into items (samples, or batches of `batch` windows):

    item i       positions [start + i batch, start + (i + 1) batch)
    rank r of R  items r, r + R, r + 2 R, ...
    worker w of W in that rank   items number w, w + W, w + 2 W, ... of the rank's items

So once every rank has had n items, the positions [start, start + n R batch) are delivered, each once, for any R, W and
batch. This one number is the state, and a run with another R, W or batch can continue from it. A DataLoader asks its
workers in turn, so the order of items does not depend on W either.

The state is a small JSON object, of constant size. Not handled here: reading windows (windows.py), torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from mlsm.common.errors import StoreError
from shards.manifest import differing
from shards.windows import StoreFacts

STATE_FORMAT = "mlsm-position-1"


@dataclass(frozen=True)
class Share:
    """The share of one loader worker of one rank."""

    rank: int = 0
    ranks: int = 1
    worker: int = 0
    workers: int = 1

    def __post_init__(self):
        if not (0 <= self.rank < self.ranks and 0 <= self.worker < self.workers):
            raise ValueError(f"rank {self.rank} of {self.ranks} and worker {self.worker} of {self.workers} cannot be")

    def item(self, number: int) -> int:
        """The number of this worker's item `number` when counted over all ranks and workers."""
        return (self.worker + number * self.workers) * self.ranks + self.rank

    def items_before(self, total: int) -> int:
        """How many of the first `total` items are this worker's."""
        step = self.ranks * self.workers
        return max(0, -(-(total - self.item(0)) // step))


def sequence_identity(store: StoreFacts, split: str, seed: int, shuffle: bool) -> dict:
    """The identity of the sequence that a position counts in. A position is only valid for the same identity."""
    return {
        "format": STATE_FORMAT,
        "store": store.target_id,
        "settings": store.fingerprinted,
        "plan": store.plan_id,
        "split": split,
        "seed": seed,
        "shuffle": shuffle,
    }


def check_identity(state: Mapping, expected: Mapping) -> None:
    """Refuse the state of another store, plan, split, seed or order.

    Raises  StoreError that names what differs
    """
    ours, theirs = ({name: part.get(name) for name in expected if name != "settings"} for part in (expected, state))
    if ours == theirs:
        return
    difference = differing(theirs, ours)
    if theirs["store"] != ours["store"]:
        settings = differing(state.get("settings") or {}, expected["settings"])
        difference = f"{difference}; of the store's settings {settings or 'none that the state knows'}"
    raise StoreError(
        f"the saved position belongs to other data or another order: {difference}. Open what it was saved from "
        "(a grown corpus keeps the older plan: give plans/<plan>.json), or start without it."
    )
