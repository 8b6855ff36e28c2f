"""The fine-tuning suite: every model on every task for every seed, one record each.

    finetune(FinetuneConfig(models=("runs/students/<run>",), data_dir="../shared/data"))

A training depends on its model, task, seed and settings alone, so the records of an interrupted study are those of an
unbroken one, and several processes may share the work (--tasks) and an output. Task by task, all models on one, so
that a task's data is read once. Left out: a training (training.py), comparing models (evaluation/comparison).
"""

import time
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from evaluation import records
from evaluation.finetuning import metrics, training
from evaluation.finetuning.batches import encode, order_digest
from evaluation.finetuning.config import FinetuneConfig
from evaluation.finetuning.data import load_task
from evaluation.finetuning.heads import Backbone
from evaluation.finetuning.miniature import write_miniatures
from evaluation.finetuning.tasks import TASKS
from evaluation.models import ModelError, directories
from pipeline.corpus import silent
from pipeline.device import choose_device
from pipeline.teacher import load_tokenizer


class StudyError(ValueError):
    """Records that were made with other settings, or one model given twice."""


class Candidate(NamedTuple):
    """A model of the study."""

    directory: Path
    facts: dict
    """what its records say of it: records.describe"""


class Trial(NamedTuple):
    """What one record is made from, but for the seed."""

    candidate: Candidate
    task: NamedTuple
    data: NamedTuple

    def facts(self, settings):
        """Fields of its record that say what was trained: an older record must have the same."""
        order = order_digest(self.task.name, settings.epochs, len(self.data.train))
        return {
            "weights": self.candidate.facts["weights"],
            "data": self.data.facts() | {"order": order},
            "settings": settings.recipe() | {"weight_decay": training.WEIGHT_DECAY},
        }

    def key(self, seed):
        """Fields that name its record's file."""
        return self.candidate.facts | {"suite": "finetune", "task": self.task.name, "seed": seed}


def finetune(settings: FinetuneConfig, progress=silent):
    """Train what has no record yet.

    progress  called as progress(task, steps, steps in all, unit="steps", model=..., seed=..., loss=...)
    Returns   models: [{"model", "directory", "weights", "figures": metric of a task -> values by seed, "average": of
              all fourteen or None, "diverged": sentences}], made, kept: counts of records, differing: files of records
              made with other settings, finished_before: whether there was nothing to do
    Raises    StudyError, DataError, ModelError, RecordError, TeacherError, RunError, DeviceError: all ValueErrors
    """
    settings = settings.smoked()
    device = choose_device(settings.device)
    candidates = _candidates(settings)
    tally = {"made": 0, "kept": 0, "differing": []}
    with _data_dir(settings) as data_dir:
        # all that can be wrong with data, older records and models is said before hours are spent
        plan = {name: _plan(TASKS[name], candidates, data_dir, settings, tally) for name in settings.chosen_tasks()}
        waiting = [candidate for candidate, *seeds in zip(candidates, *plan.values(), strict=True) if any(seeds)]
        for candidate in waiting if len(waiting) > 1 else ():
            load(candidate.directory)
        for name, seeds in plan.items():
            if any(seeds):
                _run_task(TASKS[name], zip(candidates, seeds, strict=True), data_dir, settings, device, progress, tally)
    return {
        "models": [_report(candidate, settings) for candidate in candidates],
        "output": str(settings.output),
        "finished_before": tally["made"] == 0,
    } | tally


def _data_dir(settings):
    """A context that gives the data directory; of --smoke, one that is written now and removed afterwards."""
    if not settings.smoke:
        return nullcontext(settings.data_dir)
    temporary = TemporaryDirectory()
    write_miniatures(temporary.name)
    return temporary


def _candidates(settings):
    found = []
    for directory in directories(settings.models, settings.step):
        facts = records.describe(directory)
        if twice := [other.directory for other in found if other.facts["weights"] == facts["weights"]]:
            raise StudyError(f"{twice[0]} and {directory} are one model: the same weights. Give it once.")
        found.append(Candidate(directory, facts))
    return found


def _plan(task, candidates, data_dir, settings, tally):
    """The seeds that are to be trained of every candidate."""
    data = load_task(task, data_dir)
    return [_seeds_to_do(Trial(candidate, task, data), settings, tally) for candidate in candidates]


def _run_task(task, wanted, data_dir, settings, device, progress, tally):
    """All trainings of a task that are to be done.

    wanted  (candidate, its seeds) of every candidate
    """
    data = load_task(task, data_dir)
    wanted = [(Trial(candidate, task, data), seeds) for candidate, seeds in wanted]
    steps = training.steps_of(len(data.train), settings)
    total, done = steps * sum(len(seeds) for _, seeds in wanted), 0
    for trial, seeds in wanted:
        if not seeds:
            continue
        model = Prepared(trial, settings)
        for seed in seeds:
            facts = {"unit": "steps", "model": trial.candidate.facts["model"], "seed": seed}

            def report(step, loss, begun=done, facts=facts):
                progress(task.name, begun + step, total, **facts, loss=loss)

            records.write(settings.output, model.record(seed, device, report))
            tally["made"] += 1
            done += steps
            progress(task.name, done, total, **facts)


def _seeds_to_do(trial, settings, tally):
    """Seeds without a record, or all where records are to be made anew; counts the others."""
    if settings.overwrite == "always":
        return list(range(settings.seeds))
    missing, facts = [], trial.facts(settings)
    for seed in range(settings.seeds):
        file = records.path_of(settings.output, trial.key(seed))
        if not file.is_file():
            missing.append(seed)
        elif differing := _differing(records.read_file(file), facts):
            _complain(file, differing, settings)
            tally["differing"].append(str(file))
        else:
            tally["kept"] += 1
    return missing


def _complain(file, differing, settings):
    if settings.overwrite == "missing":
        raise StudyError(
            f"{file} was made otherwise: {differing}. Nothing was changed. Give another --output, --overwrite always to"
            f" replace it, or --overwrite never to leave it and go on."
        )


def _differing(record, facts, prefix=""):
    """What a record says otherwise, as text; empty where it agrees."""
    said = []
    for name in facts:
        found, value, full_name = record.get(name), facts[name], f"{prefix}{name}"
        if isinstance(value, dict) and isinstance(found, dict):
            said.append(_differing(found, value, f"{full_name} "))
        elif found != value:
            said.append(f"{full_name} (there {found}, now {value})")
    return ", ".join(filter(None, said))


def load(directory):
    """The encoder of a directory and its tokenizer.

    Raises  ModelError, TeacherError where they cannot be loaded or do not belong together
    """
    backbone, tokenizer = Backbone(directory), load_tokenizer(directory)
    largest, known = max(tokenizer.get_vocab().values()), backbone.encoder.get_input_embeddings().num_embeddings
    if largest >= known:
        raise ModelError(
            f"{directory}: the tokenizer's ids go up to {largest}, but the model knows {known} words. Give a model with"
            f" the tokenizer that it was trained with."
        )
    if tokenizer.pad_token_id is None:
        raise ModelError(f"{directory}: its tokenizer has no token to pad with. Give it one, and save it.")
    return backbone, tokenizer


class Prepared:
    """A model and the examples of a task as it reads them, ready for any seed."""

    def __init__(self, trial, settings):
        self.trial, self.settings = trial, settings
        self.backbone, tokenizer = load(trial.candidate.directory)
        reading = {
            "max_length": min(settings.max_length, self.backbone.room()),
            "takes_types": self.backbone.takes_types(),
            "mark_target": settings.mark_target,
        }
        words = trial.task.labels_words
        self.train = encode(tokenizer, trial.data.train, words, **reading)
        self.evaluation = {
            part: encode(tokenizer, examples, words, **reading) for part, examples in trial.data.evaluation.items()
        }

    def record(self, seed, device, report=silent):
        """Train with a seed and evaluate; the record, which is not written."""
        began, task = time.monotonic(), self.trial.task
        model, head = self.backbone.with_head(task, seed, self.settings.output / "heads")
        model = model.to(device)
        bad_step = training.train(model, self.train, task, seed, self.settings, report)
        predicted = {part: training.predict(model, encoded, task) for part, encoded in self.evaluation.items()}
        gold = {part: [e.label for e in examples] for part, examples in self.trial.data.evaluation.items()}
        return {
            "schema": records.SCHEMA,
            **self.trial.key(seed),
            **self.trial.facts(self.settings),
            "figures": metrics.figures(task, gold, predicted),
            "diverged": _divergence(task, bad_step, predicted),
            "head": head,
            "env": records.environment(device),
            "wall": time.monotonic() - began,
        }


def _divergence(task, bad_step, predicted):
    """A sentence where a training failed, else False."""
    if bad_step is not None:
        return f"the loss was not finite at step {bad_step}"
    return metrics.constant(task, predicted) or False


def _report(candidate, settings):
    """Figures of a model in the records that there are, of the seeds and tasks that were asked for."""
    figures, diverged = {}, []
    for task in settings.chosen_tasks():
        for seed in range(settings.seeds):
            key = candidate.facts | {"suite": "finetune", "task": task, "seed": seed}
            record = records.read_file(records.path_of(settings.output, key))
            for figure in record["figures"]:
                figures.setdefault(f"{task} {figure['metric']}", []).append(figure["value"])
            if record["diverged"]:
                diverged.append(f"{task}, seed {seed}: {record['diverged']}")
    means = [sum(values) / len(values) for values in figures.values()]
    complete = len(means) == sum(map(len, records.METRICS.values()))
    return {
        "model": candidate.facts["model"],
        "weights": candidate.facts["weights"],
        "directory": str(records.directory_of(settings.output, candidate.facts | {"suite": "finetune"})),
        "figures": figures,
        "average": sum(means) / len(means) if complete else None,
        "diverged": diverged,
    }
