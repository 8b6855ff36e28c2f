"""Settings of match-entropy. Imports nothing heavy."""

import math
from dataclasses import dataclass

from mlsm.common.settings import Positional, check


@dataclass(frozen=True, kw_only=True)
class MatchEntropyConfig:
    """Find the temperature, and the penalty, at which a store's targets are as flat as those of another store."""

    store: Positional[str | None] = None
    """A store of LSPs (directory or URL); the newest finished one under ./runs when not given."""
    against: str | None = None
    """Another store of LSPs, whose mean entropy is to be reached: one of `--solver fista --top-n all`, say."""
    entropy: float | None = None
    """The mean entropy to be reached, in nats a token, in place of --against."""
    samples: int = 20_000
    """Most tokens to read of the stores' training split; of two stores of one plan they are the same ones."""
    teacher: str | None = None
    """Where the store's teacher lies now; where the store says by default."""

    def __post_init__(self):
        check(self)
        if (self.against is None) == (self.entropy is None):
            raise ValueError("Give either --against STORE or --entropy NATS: what the targets shall be as flat as.")
        if self.entropy is not None and not (self.entropy > 0 and math.isfinite(self.entropy)):
            raise ValueError(f"--entropy must be a positive number of nats, found {self.entropy}.")
        if self.samples < 1:
            raise ValueError(f"--samples must be at least one token, found {self.samples}.")
