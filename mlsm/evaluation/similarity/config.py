"""Settings of similarity. Imports nothing heavy."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlsm.common.settings import Positional, check, require_at_least, require_utf8


@dataclass(frozen=True, kw_only=True)
class SimilarityConfig:
    """Measure how similar texts are by the LSPs of their tokens: pairs of texts of your own with what they share, or
    zero-shot on STS-B and WiC next to the same measures of hidden states."""

    store: Positional[str | None] = None
    """A store of LSPs, whose teacher reads the texts and whose dictionary codes them, or a student that predicts LSPs
    (run or export); unset: the newest finished store under ./runs."""
    texts_a: tuple[str, ...] = ()
    """The first text of each pair."""
    texts_b: tuple[str, ...] = ()
    """The second text of each pair, as many as --texts-a."""
    tasks: tuple[Literal["stsb", "wic"], ...] = ()
    """Sets to evaluate on, instead of texts: stsb, sentence similarity; wic, one word in two contexts."""
    data_dir: Path | None = None
    """Directory of the sets' upstream files, as `finetune` reads them; what it lacks comes from the Hub."""
    teacher: str | None = None
    """Where the store's teacher is now; unset: where the store says."""
    samples: int = 300_000
    """Most tokens to read of the store to name the LSPs that texts share; 0 leaves them without names."""

    def __post_init__(self):
        check(self)
        if bool(self.texts_a) == bool(self.tasks) or len(self.texts_a) != len(self.texts_b):
            raise ValueError(
                f"expected either --tasks, or as many --texts-a as --texts-b; found {len(self.tasks)} tasks, "
                f"{len(self.texts_a)} and {len(self.texts_b)} texts"
            )
        require_utf8(self, "texts_a", "texts_b")
        require_at_least(self, 0, "samples")
