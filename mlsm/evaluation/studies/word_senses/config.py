"""Settings of choose-layer, frozen, with units. Imports nothing heavy, so that `--help` answers at once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlsm.common.settings import require_at_least
from pipeline.config import DictionaryConfig, refuse_tolerance

HEADLINE, DEVELOPMENT = "raw-npmi0", "semeval2007"
LEAST_COVERAGE = 0.5  # of SemCor's annotated words: with fewer the diagnostic judges the data, not the layers
EXPECTED = {"training": 226_036, "test": 7_253, "first sense F1": 65.2}  # Raganato et al. 2017, tables 1, 2 and 4


@dataclass(frozen=True, kw_only=True)
class ChooseLayerConfig(DictionaryConfig):
    """Compare the layers of a teacher by word-sense disambiguation with their LSPs."""

    layer: tuple[int, ...] | Literal["all"] = "all"  # type: ignore[assignment]  # a word more than elsewhere
    """Layers of the teacher to compare, 1 to its depth, or `all`; each gets its own dictionary, and all share one pass
    of the teacher over the annotated text."""
    data_dir: Path | None = None
    """Directory of the unified evaluation framework of Raganato et al. 2017, with WordNet's sense index:
    Training_Corpora/SemCor, Evaluation_Datasets/<set>, wordnet3.0/index.sense."""
    limit_train: int | None = None
    """Learn senses from this many sentences of SemCor, evenly spread over its 37,176, for a first look; the test sets
    stay whole. Below half of SemCor's annotated words no layer is recommended. Unset: all."""
    tolerance: float = 1e-3
    """Largest KKT violation that a code may keep, in units of a correlation."""

    def __post_init__(self):
        every = self.layer in ("all", ("all",))  # a recipe's single value comes as a tuple
        if every:
            object.__setattr__(self, "layer", (1,))  # what the checks of numbers accept
        super().__post_init__()
        if every:
            object.__setattr__(self, "layer", "all")
        refuse_tolerance(self.tolerance, self.lam)
        require_at_least(self, 1, "limit_train")
