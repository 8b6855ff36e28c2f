"""Settings of score-text. Imports nothing heavy."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlsm.common.settings import Positional, check, require_at_least

TEXT_FIELD = "text"


@dataclass(frozen=True, kw_only=True)
class ScoringConfig:
    """What score-text and evaluate-blimp share."""

    models: Positional[tuple[str, ...]] = ()
    """Masked language models: a run of train-student or train-probe, an export, a kept checkpoint, any directory or Hub
    id that AutoModelForMaskedLM loads, or `bundled`."""
    step: str | None = None
    """Use the kept checkpoint of this optimiser step of every run instead of its final export; `all`: every kept
    one."""
    metric: Literal["original", "within-word-l2r"] = "original"
    """What to mask while a token is predicted: `original` masks that token (Salazar et al. 2020); `within-word-l2r`
    also the later tokens of its word (Kauf and Ivanova 2023)."""
    batch_tokens: int | None = None
    """Tokens in a forward pass; unset: 1,024 on a CPU and 32,768 on a GPU."""
    device: str = "auto"
    """`auto` (a GPU if there is one), cpu, cuda or cuda:1."""

    def __post_init__(self):
        check(self)
        require_at_least(self, 1, "batch_tokens")


@dataclass(frozen=True, kw_only=True)
class ScoreTextConfig(ScoringConfig):
    """Score the sentences, or the minimal pairs, of files with masked language models: how likely each token is when
    it is masked.

    A special token written out in a sentence ("[MASK]") is text, and is split like any other.
    """

    sentences: tuple[Path, ...] = ()
    """Files of sentences: text with one per line, CSV with a header, or JSON lines; also compressed (.gz, .xz, .bz2,
    .zst)."""
    pairs: tuple[Path, ...] = ()
    """Files of minimal pairs instead, CSV or JSON lines, with the columns `good` and `bad`, `sentence_good` and
    `sentence_bad` (as in BLiMP), or `sent_more` and `sent_less` (CrowS-Pairs)."""
    text_field: str = TEXT_FIELD
    """Column of a CSV file, or field of JSON lines, that contains the sentence."""
    output: Path = Path("runs")
    """Directory whose `scores` gets a file of scores for each model and file."""

    def __post_init__(self):
        super().__post_init__()
        if bool(self.sentences) == bool(self.pairs):
            given = "both were given" if self.pairs else "neither was given"
            raise ValueError(f"score-text reads files of either --sentences or --pairs; {given}. Pass one of them")
