"""Settings of evaluate-blimp. Imports nothing heavy."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlsm.common.settings import Positional, check, require_at_least


@dataclass(frozen=True, kw_only=True)
class BlimpConfig:
    """Which models to score on which minimal pairs, and how.

    A special token written out in a sentence ("[MASK]") is text, and is split like any other.
    """

    models: Positional[tuple[str, ...]] = ()
    """Masked language models: a run of train-student or train-probe, an export, a kept checkpoint, any directory or Hub
    id that AutoModelForMaskedLM loads, or `bundled`."""
    data_dir: Path | None = None
    """Directory of BLiMP's 67 files, <paradigm>.jsonl; unset: from the Hub (nyu-mll/blimp)."""
    step: str | None = None
    """Use the kept checkpoint of this optimiser step of every run instead of its final export; `all`: every kept
    one."""
    metric: Literal["original", "within-word-l2r"] = "original"
    """What to mask while a token is predicted: `original` masks that token (Salazar et al. 2020); `within-word-l2r`
    also the later tokens of its word (Kauf and Ivanova 2023)."""
    tasks: tuple[str, ...] = ()
    """Score only these paradigms (wh_island) or phenomena ("island effects"); unset: all 67 paradigms."""
    per_paradigm: int | None = None
    """Score only this many pairs of every paradigm, always the same ones; unset: all 1,000."""
    output: Path = Path("runs")
    """Directory whose `evaluations` gets the records."""
    batch_tokens: int | None = None
    """Tokens in a forward pass; unset: 1,024 on a CPU and 32,768 on a GPU."""
    device: str = "auto"
    """`auto` (a GPU if there is one), cpu, cuda or cuda:1."""

    def __post_init__(self):
        check(self)
        require_at_least(self, 1, "per_paradigm", "batch_tokens")
