"""Settings of evaluate-blimp. Imports nothing heavy."""

from dataclasses import dataclass
from pathlib import Path

from mlsm.common.settings import require_at_least
from mlsm.evaluation.tasks.scoring.config import ScoringConfig


@dataclass(frozen=True, kw_only=True)
class BlimpConfig(ScoringConfig):
    """Which models to score on which minimal pairs, and how.

    A special token written out in a sentence ("[MASK]") is text, and is split like any other.
    """

    data_dir: Path | None = None
    """Directory of BLiMP's 67 files, <paradigm>.jsonl; unset: from the Hub (nyu-mll/blimp)."""
    tasks: tuple[str, ...] = ()
    """Score only these paradigms (wh_island) or phenomena ("island effects"); unset: all 67 paradigms."""
    per_paradigm: int | None = None
    """Score only this many pairs of every paradigm, always the same ones; unset: all 1,000."""
    output: Path = Path("runs")
    """Directory whose `evaluations` gets the records."""

    def __post_init__(self):
        super().__post_init__()
        require_at_least(self, 1, "per_paradigm")
