"""Settings of prepare-data. Imports nothing heavy."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlsm.common.invocation import program
from mlsm.common.settings import Positional, check


@dataclass(frozen=True, kw_only=True)
class PrepareDataConfig:
    """Put evaluation data as they are published into the layout that evaluate-blimp, choose-layer and finetune read."""

    dataset: Positional[Literal["blimp", "wsd", "glue", "wic", "conll"] | None] = None
    """What to prepare: blimp (for evaluate-blimp), wsd (for choose-layer), glue, wic or conll (for finetune)."""
    from_: Path | None = None
    """Directory with the published files, unpacked or as archives (.zip, .tar.gz and the like), or one archive."""
    output: Path = Path("data")
    """Directory that gets blimp, wsd, glue/CoLA and so on, wic and conll2003."""

    def __post_init__(self):
        check(self)
        if self.dataset is None:
            raise ValueError("DATASET is missing: one of blimp, wsd, glue, wic, conll")
        if self.from_ is None:
            raise ValueError(
                f"--from is missing: the directory that contains the published files or archives. {program()} docs "
                "evaluation-data lists where each set is published"
            )
