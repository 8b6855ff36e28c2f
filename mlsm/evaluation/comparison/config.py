"""Settings of `compare`. Imports nothing heavy."""

from dataclasses import dataclass
from pathlib import Path

from mlsm.common.settings import Positional, check


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Compare models by the records of finetune and evaluate-blimp."""

    results: Positional[tuple[Path, ...]] = ()
    """Records, or directories that are searched for them; runs/evaluations when not given."""
    output: Path = Path("runs/comparison")
    """Directory of the page (report.html), the tables (CSV, LaTeX) and the figures (SVG, PNG, CSV). Files of these
    names that are there already are replaced."""
    paper: bool = False
    """Draw the numbers of the paper's tables 1 to 4 beside one's own."""
    diagnostic: Path | None = None
    """result.json of choose-layer, for figure 4: word-sense F1 beside the fine-tuning averages."""
    intruders: tuple[Path, ...] = ()
    """What `show-lsp --intruders --json` printed: how interpretable the LSPs are that each model learned goes into the
    table of models."""

    def __post_init__(self):
        check(self)
