"""Fine-tuning runs of a model on a task: the facts that identify them, and their records.

    model = PreparedTrial(Trial(candidate, task, data), settings)
    records.write(output, model.record(seed, device))

If the settings have several learning rates, a run first chooses one on a tenth of its examples. The choice is part of
the run and of its record. Not handled here: the loop over batches (training.py), which runs are to be done (suite.py).
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from mlsm.common.device import environment
from mlsm.common.errors import StudyError
from mlsm.common.progress import silent
from mlsm.evaluation import records
from mlsm.evaluation.models import load_fitting_tokenizer
from mlsm.evaluation.tasks.finetuning import metrics, training
from mlsm.evaluation.tasks.finetuning.batches import EncodedExamples, order_digest, tokenise
from mlsm.evaluation.tasks.finetuning.config import FinetuneConfig
from mlsm.evaluation.tasks.finetuning.data import TaskData, hold_out_tenth
from mlsm.evaluation.tasks.finetuning.heads import Backbone, positions_of, takes_types
from mlsm.evaluation.tasks.finetuning.tasks import Task
from student.memory import peak_memory

logger = logging.getLogger(__name__)

LONGEST = 512  # tokens: the longest pre-training input of stock encoders, even if they have more positions
UNREAD_WORDS = {"unread_words": "errors"}  # in records of tasks whose words have labels


class Candidate(NamedTuple):
    """A model to fine-tune."""

    directory: Path
    facts: dict
    """its facts in records, from records.describe_model"""
    config: PretrainedConfig

    @property
    def trained_length(self) -> int:
        """The longest window that it was pre-trained on, in tokens; without a lineage, its number of positions, up to
        512.
        """
        known = (self.facts["identity"] or {}).get("windowing", {}).get("max_length")
        return known or min(LONGEST, positions_of(self.config))

    @property
    def has_trained_segments(self) -> bool:
        """Whether its lineage says that its second segment was trained."""
        return (self.facts["identity"] or {}).get("settings", {}).get("segments", False) is True


def check_length(candidates: Sequence[Candidate], length: int) -> None:
    """Refuse inputs longer than a model has positions, since it would read less than the others. Warn of positions that
    a model's pre-training did not reach.

    Raises  StudyError
    """
    for candidate in candidates:
        if length > (most := positions_of(candidate.config)):
            raise StudyError(
                f"{candidate.facts['model']} reads at most {most} tokens; found --max-length {length}. Take a smaller "
                "one for all models."
            )
    trained = [(candidate.facts["model"], candidate.trained_length) for candidate in candidates]
    if short := [f"{name} ({most})" for name, most in trained if most < length]:
        logger.warning(
            "--max-length %d is longer than the windows that these models were pre-trained on: %s. Tokens beyond "
            "that have positions that were never trained.",
            length,
            ", ".join(short),
        )


class Trial(NamedTuple):
    """A model, a task and its data: everything that determines a record except settings and seed."""

    candidate: Candidate
    task: Task
    data: TaskData

    def facts(self, settings: FinetuneConfig) -> dict:
        """The fields of its record that identify the run; an existing record is kept only if they are equal.

        settings  as returned by `settle`
        """
        order = order_digest(self.task.name, settings.epochs, len(self.data.train))
        more: dict[str, Any] = {
            "weight_decay": training.WEIGHT_DECAY,
            "segments": self.gets_segments(settings.segments),
        }
        steps = training.steps_of(len(self.data.train), settings)
        if steps < training.steps_of(len(self.data.train), replace(settings, max_steps=None)):
            more |= {"max_steps": steps}
        if settings.split != "validation":
            more |= {"split": settings.split}
        return {
            **{name: self.candidate.facts[name] for name in records.CONTENT},
            "data": self.data.facts() | {"order": order},
            "settings": settings.recipe() | more | (UNREAD_WORDS if self.task.labels_words else {}),
        }

    def gets_segments(self, segments: str) -> bool:
        """Whether the model sees the segments of this task's pairs; a single sentence is always segment 0."""
        return segments == "always" and self.task.has_pairs and takes_types(self.candidate.config)

    def key(self, seed: int) -> dict:
        """The fields in the name of its record's file."""
        return self.candidate.facts | {"suite": "finetune", "task": self.task.name, "seed": seed}


def load(directory: Path) -> tuple[Backbone, PreTrainedTokenizerFast]:
    """The encoder of a directory and its tokenizer.

    Raises  ModelError, TeacherError if they cannot be loaded or do not fit together
    """
    backbone = Backbone(directory)
    return backbone, load_fitting_tokenizer(directory, backbone.encoder, pads=True)


class Examples(NamedTuple):
    """The tokenised training and evaluation examples of a run."""

    train: EncodedExamples
    evaluation: dict[str, EncodedExamples]
    gold: dict[str, list]


class Trained(NamedTuple):
    """The result of a run."""

    figures: list[dict]
    predicted: dict[str, Any]
    bad_step: int | None
    """the first step whose loss was not finite"""
    head: str
    step_seconds: float
    rows: int
    """rows of its token embeddings"""


class PreparedTrial:
    """A loaded model and the tokenised examples of a task, ready for any seed."""

    def __init__(self, trial: Trial, settings: FinetuneConfig):
        self.trial, self.settings = trial, settings
        self.backbone, tokenizer = load(trial.candidate.directory)
        self.backbone.set_dropout(settings.dropout)
        assert settings.max_length is not None, "of `settle`"
        max_length = settings.max_length

        def read(data: TaskData) -> Examples:
            train, *evaluation = (
                tokenise(
                    tokenizer,
                    examples,
                    trial.task.labels_words,
                    max_length=max_length,
                    takes_types=trial.gets_segments(settings.segments),
                )
                for examples in (data.train, *data.evaluation.values())
            )
            gold = {part: [example.label for example in examples] for part, examples in data.evaluation.items()}
            return Examples(train, dict(zip(gold, evaluation, strict=True)), gold)

        self.examples = read(trial.data)
        self.tenth = read(hold_out_tenth(trial.task, trial.data)) if len(settings.rates()) > 1 else None
        parts = (self.examples.train, *self.examples.evaluation.values())
        self.backbone.keep_rows(tokenizer.all_special_ids, *(part.ids_T for part in parts))

    @property
    def steps(self) -> int:
        """Optimiser steps for one seed, including those for choosing a learning rate."""
        steps = training.steps_of(len(self.examples.train), self.settings)
        if self.tenth:
            steps += training.steps_of(len(self.tenth.train), self.settings) * len(self.settings.rates())
        return steps

    def record(self, seed: int, device: torch.device, report: Callable[[int, float], None] = silent) -> dict:
        """Train with a seed and evaluate. Returns the record without writing it."""
        began, task = time.monotonic(), self.trial.task
        lr, choice, done = self.choose_rate(seed, device, report)
        found = self._train(self.examples, lr, seed, device, report, done)
        labels = [example.label for example in self.trial.data.train]
        diverged = False if found.bad_step is None else f"the loss was not finite at step {found.bad_step}"
        return {
            "schema": records.SCHEMA,
            **self.trial.key(seed),
            **self.trial.facts(self.settings),
            **choice,
            "figures": found.figures,
            "diverged": diverged,
            "collapsed": not diverged
            and (
                metrics.constant(task, found.predicted)
                or metrics.uninformed(task, labels, self.examples.gold, found.figures)
            )
            or False,
            "cut": self.cut(),
            "head": found.head,
            "env": environment(device),
            "cost": {
                "embedding_rows": found.rows,
                "peak_memory_bytes": peak_memory(device),
                "step_seconds": found.step_seconds,
            },
            "wall": time.monotonic() - began,
        }

    def choose_rate(
        self, seed: int, device: torch.device, report: Callable[[int, float], None]
    ) -> tuple[float, dict, int]:
        """Choose the learning rate of a seed. Returns it, the record's entry on the choice, and the number of steps
        used.
        """
        rates = self.settings.rates()
        if self.tenth is None:
            return rates[0], {}, 0
        steps = training.steps_of(len(self.tenth.train), self.settings)
        tried, best, best_score = [], rates[0], -math.inf
        for number, lr in enumerate(rates):
            found = self._train(self.tenth, lr, seed, device, report, number * steps)
            score = mean(figure["value"] for figure in found.figures) if found.bad_step is None else None
            tried.append({"lr": lr, "score": score})
            if score is not None and score > best_score:
                best, best_score = lr, score
        return best, {"lr_choice": {"lr": best, "tried": tried}}, steps * len(rates)

    def _train(self, examples, lr, seed, device, report, done):
        """Train with a new head and one learning rate, and predict. Steps are reported as following `done` others."""
        task, settings = self.trial.task, replace(self.settings, lr=lr)
        model, head = self.backbone.with_head(task, seed, settings.output / "heads")
        model = model.to(device)
        began = time.monotonic()
        bad_step = training.train(
            model, examples.train, task, seed, settings, lambda step, loss: report(done + step, loss)
        )
        seconds = (time.monotonic() - began) / training.steps_of(len(examples.train), settings)
        predicted = {part: training.predict(model, encoded, task) for part, encoded in examples.evaluation.items()}
        figures = metrics.figures(task, examples.gold, predicted)
        rows = model.base_model.get_input_embeddings().num_embeddings
        return Trained(figures, predicted, bad_step, head, seconds, rows)

    def cut(self) -> dict[str, float]:
        """By set: the fraction of examples longer than the longest input; if words have labels, of words not read."""
        parts = self.examples.evaluation.values()
        cut = {
            "train": self.examples.train.cut,
            "evaluation": sum(part.cut * len(part) for part in parts) / sum(map(len, parts)),
        }
        unread = [part.unread for part in parts if part.unread is not None]
        return cut | ({"words": max(unread)} if unread else {})
