"""Settings of `finetune`. Imports tyro, whose marker makes MODEL a word without a flag."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

TASKS = ("cola", "conll2003", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb", "wic")
SMOKE_MODEL = "bundled"


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """Fine-tune models on ten tasks and record fourteen figures for every seed (MLSM paper, section 4.2).

    What is trained is the paper's unless said otherwise: AdamW, learning rate falling linearly to zero without
    warm-up, weight decay 0.01 on everything, no clipping, float32, figures after the last epoch.
    """

    models: Positional[tuple[str, ...]] = ()
    """Runs of train-student, their exports or kept checkpoints, directories or Hub ids of other encoders, or
    `bundled`."""
    step: str | None = None
    """Of every run, not its final export but the kept checkpoint of this optimiser step; `all`: every kept one."""
    tasks: tuple[Literal["all", *TASKS], ...] = ("all",)
    """Which tasks."""
    seeds: int = 5
    """How many trainings of each task and model; seed n has the same head and the same dropout seed for all models."""
    data_dir: Path | None = None
    """Directory with the tasks' upstream files (docs/finetuning.md); what it lacks comes from the Hub."""
    output: Path = Path("runs")
    """Directory whose `evaluations` gets the records, and `heads` the heads."""
    overwrite: Literal["missing", "always", "never"] = "missing"
    """missing: train what has no record; a record made with other settings is an error. always: train all again.
    never: as missing, but records made with other settings stay, are reported, and do not stop the rest."""
    mark_target: bool = False
    """WiC: put quotation marks around the target word in both sentences."""
    epochs: int = 3
    """Passes over the training set."""
    lr: float = 2e-5
    """Learning rate of the first step."""
    batch: int = 32
    """Examples in an optimiser step."""
    max_length: int = 128
    """Longest input in tokens, special ones included; longer ones are cut."""
    device: str = "auto"
    """auto (a GPU where there is one), cpu, cuda, cuda:1."""
    smoke: bool = False
    """Does everything work here? Built-in miniature data, one seed, into <output>/smoke; needs no model or network."""
    json: bool = False
    """Print the result as JSON."""

    def __post_init__(self):
        for name, least in (("seeds", 1), ("epochs", 1), ("batch", 1), ("max_length", 8)):
            if getattr(self, name) < least:
                raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, found {getattr(self, name)}")
        if not (self.lr > 0 and math.isfinite(self.lr)):
            raise ValueError(f"--lr must be a positive number, found {self.lr}")
        if unknown := sorted(set(self.tasks) - {"all", *TASKS}):
            raise ValueError(f"no task {', '.join(unknown)}. There are: all, {', '.join(TASKS)}")

    def chosen_tasks(self):
        """The tasks' names, in the table's order."""
        return [task for task in TASKS if "all" in self.tasks or task in self.tasks]

    def recipe(self):
        """The settings that decide a training's outcome, as a record keeps them."""
        return {name: getattr(self, name) for name in ("epochs", "lr", "batch", "max_length", "mark_target")}

    def smoked(self):
        """The settings that --smoke stands for; without it, these. ValueError where no model is given."""
        if not self.smoke and not self.models:
            raise ValueError("no model given. Name runs, exports, directories or Hub ids:  mlsm finetune MODEL ...")
        if not self.smoke:
            return self
        return replace(self, models=self.models or (SMOKE_MODEL,), seeds=1, output=self.output / "smoke")
