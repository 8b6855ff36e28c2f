"""Settings of `finetune`. Imports nothing heavy."""

import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal, get_args

from mlsm.common.invocation import program
from mlsm.common.settings import Positional, check, require, require_at_least

TaskName = Literal["cola", "conll2003", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb", "wic"]
TASKS: tuple[str, ...] = get_args(TaskName)
SMOKE_MODEL = "bundled"
TENTH = "train-tenth"
FROZEN_EXAMPLES = 4_000  # training examples per task with --frozen, so that a student takes minutes
FROZEN_LENGTH = 128  # tokens

_OF_TRAINING = (  # settings that --frozen does not use
    *("seeds", "epochs", "lr", "warmup", "grad_clip", "batch", "dropout", "segments"),
    *("split", "max_steps"),
)


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """Fine-tune models on ten tasks and record fourteen scores per seed (MLSM paper, section 4.2).

    The settings are the paper's unless you change them: learning rate, falling linearly to zero, batch, epochs, scores
    after the last. Where it is silent they are the official code's: AdamW, weight decay 0.01 on everything, float32.
    Warm-up and clipping are added, as fine-tuning without them fails more often; `--warmup 0 --grad-clip 0` trains
    as the official code does.
    """

    models: Positional[tuple[str, ...]] = ()
    """Runs of train-student, their exports or kept checkpoints, directories or Hub ids of other encoders, or
    `bundled`."""
    step: str | None = None
    """Use the kept checkpoint of this optimiser step of every run instead of its final export; `all`: every kept
    one."""
    frozen: bool = False
    """Fit linear models on the encoder's hidden states (embeddings and all layers) instead of fine-tuning, with the
    penalty chosen on a tenth of the training set. CoNLL-2003 is also scored on parts of speech and chunks, STS-B also
    without training; word senses (wsd) are added. No seeds; the records are kept apart from those of fine-tuning."""
    tasks: tuple[Literal["all", TaskName, "wsd"], ...] = ("all",)
    """Tasks to train on; wsd, word senses, only with --frozen."""
    layer: tuple[int, ...] | None = None
    """With --frozen: the layers whose hidden states are used, 0 for the embeddings; unset: all."""
    seeds: int = 5
    """Training runs per task and model; seed n has the same head and the same dropout seed for all models."""
    data_dir: Path | None = None
    """Directory with the tasks' published files (mlsm docs finetuning); what is missing there comes from the Hub."""
    output: Path = Path("runs")
    """Directory whose `evaluations` gets the records, and `heads` the heads."""
    overwrite: Literal["missing", "always", "never"] = "missing"
    """`missing` trains what has no record; a record made with other settings is an error. `always` trains all again.
    `never` is like `missing`, but records made with other settings are kept and reported, and do not stop the rest."""
    epochs: int = 3
    """Passes over the training set."""
    lr: float | tuple[float, ...] = 2e-5
    """Peak learning rate, from which it falls linearly to zero. If there are several, each training run uses the one
    that does best when trained on nine tenths of its examples and scored on the other tenth (of equal ones the
    smallest), so no model is favoured by a learning rate that suits it. N learning rates take about N + 1 times as
    long. A grid by factors of two, such as 1e-4 2e-4 4e-4 8e-4, rarely misses the best by much."""
    warmup: float = 0.06
    """Share of the optimiser steps in which the learning rate rises linearly from zero; 0: none, as in the official
    code."""
    grad_clip: float = 1.0
    """Clip the gradient at this norm over all parameters; 0: no clipping, as in the official code."""
    batch: int = 32
    """Examples per optimiser step."""
    max_length: int | None = None
    """Longest input in tokens, special ones included; longer ones are cut, for all models in the same way. Unset: the
    longest window that all of the models were pre-trained on; for a model without a lineage.json, the positions that it
    has, up to 512; with --frozen at most 128. With 512, the official code's length, students read positions that their
    windows never trained."""
    dropout: float = 0.1
    """Probability of every dropout in the encoder, the same for all models whatever their config.json says (a student
    that was pre-trained without dropout says 0). BERT, RoBERTa and DeBERTa have 0.1 themselves, ModernBERT 0. The
    dropouts of the head stay those of the family."""
    segments: Literal["auto", "never", "always"] = "auto"
    """Whether encoders with segment embeddings (token_type_ids) see which sentence of a pair a token belongs to.
    `auto`: all models do if the lineage of each says that its second segment was trained; otherwise none does.
    `always`: all that have segments do, trained or not. `never`: none does."""
    split: Literal["validation", "test", "train-tenth"] = "validation"
    """Which examples to score: the development sets; `test`, the labelled test sets of the tasks that have one in files
    of --data-dir (conll2003, qqp); `train-tenth`, a tenth of the training examples, to choose a learning rate without
    the development sets. Records of the latter two are written to <output>/test and <output>/train-tenth."""
    limit_train: int | None = None
    """Train on this many examples of a task, always the same ones; unset: all, with --frozen 4,000. wsd always learns
    from all of its examples."""
    max_steps: int | None = None
    """Stop a training run after this many optimiser steps, with its learning rate then at zero; unset: after
    --epochs."""
    device: str = "auto"
    """`auto` (a GPU if there is one), cpu, cuda or cuda:1."""
    smoke: bool = False
    """Check that everything works here: built-in miniature data, one seed, into <output>/smoke; needs no model or
    network."""

    def __post_init__(self):
        check(self)
        require_at_least(self, 1, "seeds", "epochs", "batch", "limit_train", "max_steps")
        require_at_least(self, 8, "max_length")
        if self.frozen:
            self._check_frozen()
        elif "wsd" in self.tasks or self.layer is not None:
            raise ValueError(f"{'--tasks wsd' if 'wsd' in self.tasks else '--layer'} is only for --frozen")
        require(self, "warmup", lambda value: 0 <= value < 1, "a share of the steps from 0 to below 1")
        require(self, "grad_clip", lambda value: 0 <= value < math.inf, "a norm of at least 0 (0: no clipping)")
        require(self, "dropout", lambda value: 0 <= value < 1, "a probability from 0 to below 1")
        rates = self.rates()
        if not rates or len(set(rates)) < len(rates) or not all(lr > 0 and math.isfinite(lr) for lr in rates):
            raise ValueError(f"--lr takes positive numbers, each once, found {' '.join(map(str, rates)) or 'none'}")
        object.__setattr__(self, "lr", rates[0] if len(rates) == 1 else tuple(sorted(rates)))

    def _check_frozen(self) -> None:
        defaults = {entry.name: entry.default for entry in fields(self)}
        if given := [name for name in _OF_TRAINING if getattr(self, name) != defaults[name]]:
            raise ValueError(f"--frozen trains no encoder. Omit --{given[0].replace('_', '-')}.")
        if self.layer is not None and (not self.layer or len(set(self.layer)) < len(self.layer)):
            raise ValueError(f"--layer takes numbers, each once, found {' '.join(map(str, self.layer)) or 'none'}")

    def chosen_tasks(self) -> list[str]:
        """The tasks' names, in the table's order."""
        known = (*TASKS, "wsd") if self.frozen and not (self.smoke and "all" in self.tasks) else TASKS
        return [task for task in known if "all" in self.tasks or task in self.tasks]

    def rates(self) -> tuple[float, ...]:
        """The learning rates to choose from."""
        return self.lr if isinstance(self.lr, tuple) else (self.lr,)

    def recipe(self) -> dict:
        """The settings with the same effect on every fine-tuning run, as stored in a record.

        `segments` and `max_steps` are not included: their effect depends on model and task (suite.py).
        """
        names = ("epochs", "lr", "warmup", "grad_clip", "batch", "max_length", "dropout")
        found = {name: getattr(self, name) for name in names}
        found["mark_target"] = False  # of WiC, as earlier records say, so that they pair with new ones
        return found | ({"lr": list(self.lr)} if isinstance(self.lr, tuple) else {})

    def apply_smoke(self) -> "FinetuneConfig":
        """These settings, changed as --smoke and --split imply. ValueError without a model, or if they contradict."""
        if not self.smoke and not self.models:
            raise ValueError(
                f"no model given. Name runs, exports, directories or Hub ids:  {program()} finetune MODEL ..."
            )
        if self.smoke and self.split != "validation":
            raise ValueError(f"--smoke has only miniature development sets, found --split {self.split}. Omit --split.")
        if self.split == TENTH and isinstance(self.lr, tuple):
            raise ValueError(
                f"--split {TENTH} scores one --lr, found {len(self.lr)}: to choose among several for each training "
                "run, omit --split."
            )
        if not self.smoke:
            return self if self.split == "validation" else replace(self, output=self.output / self.split)
        seeds = self.seeds if self.frozen else 1
        return replace(self, models=self.models or (SMOKE_MODEL,), seeds=seeds, output=self.output / "smoke")
