"""Settings of evaluate-blimp. Imports tyro, whose marker makes MODEL a word without a flag."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

METRICS = ("original", "within-word-l2r")


@dataclass(frozen=True, kw_only=True)
class BlimpConfig:
    """Which models to score on which minimal pairs, and how."""

    models: Positional[tuple[str, ...]] = ()
    """Masked language models: a run of train-student or train-probe, an export, a kept checkpoint, any directory or Hub
    id that AutoModelForMaskedLM loads, or `bundled`."""
    data_dir: Path | None = None
    """Directory of BLiMP's 67 files, <paradigm>.jsonl; from the Hub (nyu-mll/blimp) when not given."""
    step: str | None = None
    """Of every run, not its final export but the kept checkpoint of this optimiser step; `all`: every kept one."""
    metric: Literal[METRICS] = "original"
    """What is hidden while a token is predicted: `original` that token (Salazar et al. 2020); `within-word-l2r` also
    the later tokens of its word (Kauf and Ivanova 2023)."""
    per_paradigm: int | None = None
    """Score only so many pairs of every paradigm, always the same ones; all 1,000 when not given."""
    output: Path = Path("runs")
    """Directory whose `evaluations` gets the records."""
    batch_tokens: int | None = None
    """Tokens in a forward pass; 1,024 on a CPU and 32,768 on a GPU when not given."""
    device: str = "auto"
    """auto (a GPU where there is one), cpu, cuda, cuda:1."""
    json: bool = False
    """Print the records as JSON."""

    def __post_init__(self):
        for name in ("per_paradigm", "batch_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, found {value}")
