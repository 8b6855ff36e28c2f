"""Settings of track. Imports nothing heavy."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlsm.common.settings import Positional, check, require_at_least


@dataclass(frozen=True, kw_only=True)
class TrackConfig:
    """Match the LSPs of two or more stores of the same text by the correlation of their weights over tokens, and say
    which are kept, drift, split, merge, vanish and appear from each store to the next."""

    stores: Positional[tuple[str, ...]] = ()
    """Two or more stores of LSPs (directories or URLs) of one plan, in order: before and after fine-tuning, the
    checkpoints of a run, layers, seeds or dictionaries."""
    matching: Literal["hungarian", "mutual-best"] = "hungarian"
    """How LSPs are paired. hungarian: one to one, with the largest sum of correlations. mutual-best: two LSPs, each of
    which correlates most with the other."""
    samples: int = 2_000_000
    """Most tokens to read of the stores' training split, in windows spread over it."""
    output: Path = Path("runs/tracking")
    """Directory of tracking.json, lsps.csv, paths.csv and the figure. Files of these names are replaced."""

    def __post_init__(self):
        check(self)
        if len(self.stores) < 2:
            raise ValueError(f"STORES takes two stores or more, found {len(self.stores)}: name them in order.")
        require_at_least(self, 2, "samples")
