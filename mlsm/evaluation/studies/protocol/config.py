"""Settings of `study`. Imports nothing heavy."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlsm.common.settings import check


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """Run the parts of a study that are not finished, from the corpus to the report."""

    recipe: str = "study-demo"
    """Recipe of the study: study-demo, study-layers, study-k, study-cpu, study-cpu-pilot, study-2, study-2-pilot,
    study-2-screen, study-masks, paper-objectives, paper-layers, paper-k, paper-kappa, or a YAML file of your own
    (mlsm docs study)."""
    output: Path | None = None
    """Directory of everything that the study makes; unset: runs/studies/<recipe>."""
    data_dir: Path | None = None
    """Directory of evaluation data, with glue/, wic/, conll2003/, blimp/ and wsd/; unset: $MLSM_DATA/data. Without it,
    models are fine-tuned on miniature data, whose scores mean nothing."""
    only: tuple[str, ...] = ()
    """Run only these parts, by name or pattern, such as train-student/mlm-seed0 or 'finetune/*'. What they need must be
    there. --dry-run lists the names."""
    dry_run: bool = False
    """Show what would be done and what it would cost, from short measurements, and stop."""
    print_commands: Literal["make", "slurm"] | None = None
    """Print the commands of all parts and what each needs, as a makefile or as a script for Slurm, and stop."""

    def __post_init__(self):
        check(self)

    @property
    def directory(self) -> Path:
        """The directory of the study's stores, students and records."""
        return self.output or Path("runs/studies") / Path(self.recipe).stem

    @property
    def evaluations(self) -> Path:
        """The directory of the records; records of miniature data have their own."""
        return (self.directory if self.data is not None else self.directory / "smoke") / "evaluations"

    @property
    def data(self) -> Path | None:
        """The directory of evaluation data, None if there is none."""
        if self.data_dir is not None:
            return self.data_dir
        root = os.environ.get("MLSM_DATA")
        return Path(root) / "data" if root and (Path(root) / "data").is_dir() else None
