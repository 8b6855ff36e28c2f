"""Settings of match-entropy. Imports nothing heavy."""

import math
from dataclasses import dataclass

from mlsm.common.settings import Positional, check, require, require_at_least


@dataclass(frozen=True, kw_only=True)
class MatchEntropyConfig:
    """Find the temperature, and the penalty, at which a store's targets are as flat as those of another store."""

    store: Positional[str | None] = None
    """A store of LSPs (directory or URL); unset: the newest finished one under ./runs."""
    against: str | None = None
    """Reach the mean entropy of this store of LSPs of the same text, such as one of `--solver fista --top-n all`."""
    entropy: float | None = None
    """Reach this mean entropy instead, in nats per token."""
    samples: int = 20_000
    """Most tokens to read of the training split; of two stores they are the same ones."""
    teacher: str | None = None
    """Where the store's teacher is now; unset: where the store says."""

    def __post_init__(self):
        check(self)
        if (self.against is None) == (self.entropy is None):
            raise ValueError("Pass either --against STORE or --entropy NATS: the entropy that the targets should have.")
        require(self, "entropy", lambda value: 0 < value < math.inf, "a positive number of nats")
        require_at_least(self, 1, "samples")
