"""Settings of count-flops; where nothing is given, the setting of the paper's table 3. Imports nothing heavy."""

import math
from dataclasses import dataclass
from pathlib import Path

from mlsm.common.settings import check, require, require_at_least


@dataclass(frozen=True, kw_only=True)
class CountFlopsConfig:
    """Count the operations of pre-training, from configurations alone: no weights are read, nothing is computed."""

    encoder: str = "deberta-base"
    """Named encoder as of train-student (needs no network), directory with config.json, or Hub id."""
    teacher: str = "bert-base"
    """The teacher, given as `--encoder` is, or `bundled`."""
    vocab_size: int | None = None
    """Entries of the vocabulary; unset: the teacher's, or 28,996 (bert-base-cased's) for a named teacher."""
    k: int = 3072
    """Number of latent semantic properties."""
    layer: int = 10
    """Layer of the teacher whose hidden states are coded; layers above it are not computed."""
    mask_rate: float = 0.15
    """Share of tokens that are masked and predicted."""
    max_length: int = 128
    """Tokens of a window."""
    max_steps: int = 100_000
    """Optimiser steps of a run."""
    batch_windows: int = 1024
    """Windows of an optimiser step."""
    dictionary_tokens: int = 2_000_000
    """Hidden vectors that the dictionary is learned from."""
    dictionary_epochs: float = 2.0
    """Passes over the vectors that the dictionary is learned from."""
    output: Path = Path("runs")
    """Directory whose `flops` gets the plot, with its data."""

    def __post_init__(self):
        check(self)
        require_at_least(self, 1, "k", "layer", "max_steps", "batch_windows", "dictionary_tokens", "vocab_size")
        require_at_least(self, 3, "max_length")  # [CLS] text [SEP]
        require(self, "mask_rate", lambda value: 0 < value < 1, "a share between 0 and 1")
        require(self, "dictionary_epochs", lambda value: 0 < value < math.inf, "a positive number")
