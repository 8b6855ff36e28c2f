"""The fine-tuning suite: every model on every task for every seed, one record each.

    finetune(FinetuneConfig(models=("runs/students/<run>",), data_dir="../shared/data"))

A fine-tuning run depends only on its model, task, seed and settings. So an interrupted command ends with the same
records as an uninterrupted one, and several processes may share the work (--tasks) and an output. All models are
trained on one task before the next, so that a task's data is read once.

Some settings must be the same for all models of a command: dropout, longest input, and the use of segments. They are
fixed before training (`settle`).

Not handled here: a single run (trials.py), comparing models (mlsm/evaluation/comparison).
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from mlsm.common.device import choose_device
from mlsm.common.durable import refuse_what_is_in_the_way
from mlsm.common.errors import StudyError
from mlsm.common.progress import silent
from mlsm.common.workplaces import workplace
from mlsm.evaluation import records
from mlsm.evaluation.models import directories
from mlsm.evaluation.tasks.finetuning.batches import take_examples
from mlsm.evaluation.tasks.finetuning.config import TENTH, FinetuneConfig
from mlsm.evaluation.tasks.finetuning.data import hold_out_tenth, load_task
from mlsm.evaluation.tasks.finetuning.heads import read_config, takes_types
from mlsm.evaluation.tasks.finetuning.metrics import check_installed
from mlsm.evaluation.tasks.finetuning.miniature import write_miniatures
from mlsm.evaluation.tasks.finetuning.tasks import TASKS
from mlsm.evaluation.tasks.finetuning.trials import (
    Candidate,
    PreparedTrial,
    Trial,
    check_length,
    load,
)
from mlsm.evaluation.tasks.frozen.suite import measure_frozen
from student.memory import forget_peak

logger = logging.getLogger(__name__)


def finetune(settings: FinetuneConfig, progress: Callable[..., None] = silent) -> dict:
    """Fine-tune for every model, task and seed without a record.

    progress  called as progress(task, steps, steps in all, unit="steps", model=..., seed=..., loss=...)
    Returns   models: [{"model", "directory", "weights", "figures": metric of a task -> values by seed, "average": over
              all fourteen or None, "diverged", "collapsed": sentences, "cut": task -> fraction of the development
              examples that were longer than the longest input, "chosen_lr": task -> seed -> learning rate, if there
              were several}], settings: those that were the same for all models, made, kept: numbers of records,
              differing: files of records made with other settings, finished_before: whether nothing had to be done
    Raises    StudyError, DataError, ModelError, RecordError, TeacherError, RunError, DeviceError: all ValueErrors
    """
    progress("read data and models", 0, None)
    settings = settings.apply_smoke()
    device = choose_device(settings.device)
    candidates = _find_candidates(settings)
    with _data_dir(settings) as data_dir:
        if settings.frozen:
            return measure_frozen(settings, candidates, data_dir, device, progress)
        settings = settle(settings, candidates)
        tally = {"made": 0, "kept": 0, "differing": []}
        # first report everything wrong with data, older records and models, before hours of training
        plan = {}
        for name in settings.chosen_tasks():
            check_installed(TASKS[name])
            data = _load_data(TASKS[name], data_dir, settings)
            if len(settings.rates()) > 1:
                hold_out_tenth(TASKS[name], data)  # raises if it is impossible
            trials = [Trial(candidate, TASKS[name], data) for candidate in candidates]
            plan[name] = [_find_missing(trial, settings, tally) for trial in trials]
        waiting = [candidate for candidate, *seeds in zip(candidates, *plan.values(), strict=True) if any(seeds)]
        for candidate in waiting if len(waiting) > 1 else ():
            load(candidate.directory)
        for name, seeds in plan.items():
            if any(seeds):
                _run_task(TASKS[name], zip(candidates, seeds, strict=True), data_dir, settings, device, progress, tally)
    return {
        "models": [_report(candidate, settings) for candidate in candidates],
        "output": str(settings.output),
        "settings": {name: getattr(settings, name) for name in ("max_length", "dropout", "segments")},
        "finished_before": tally["made"] == 0,
    } | tally


@contextmanager
def _data_dir(settings):
    """The data directory; with --smoke, a temporary one."""
    if not settings.smoke:
        yield settings.data_dir
        return
    with TemporaryDirectory() as place:
        yield write_miniatures(Path(place))


def _find_candidates(settings):
    found: list[Candidate] = []
    for directory in directories(settings.models, settings.step):
        facts = records.describe_model(directory)
        if twice := [one.directory for one in found if _content(one.facts) == _content(facts)]:
            if facts["step"] == 0:  # several runs may start with the same weights
                logger.info("%s has the same weights as %s and is trained once", directory, twice[0])
                continue
            same = "is listed twice" if twice[0] == directory else f"is the same model as {twice[0]}"
            raise StudyError(f"{directory} {same}. List it only once.")
        found.append(Candidate(directory, facts, read_config(directory)))
    records.refuse_shared_names(candidate.facts for candidate in found)
    return found


def _content(facts):
    return [facts[name] for name in records.CONTENT]


def settle(settings: FinetuneConfig, candidates: Sequence[Candidate]) -> FinetuneConfig:
    """The settings with those values that must be the same for all models: a number for max_length, never or always for
    segments.

    Logs a note if inputs reach positions that a model's pre-training did not, or if segments are not used although a
    model has them.
    """
    length = settings.max_length or min(candidate.trained_length for candidate in candidates)
    check_length(candidates, length)
    segments = settings.segments
    if segments == "auto":
        segments = "always" if all(candidate.has_trained_segments for candidate in candidates) else "never"
        paired = any(TASKS[name].has_pairs for name in settings.chosen_tasks())
        if segments == "never" and paired and any(takes_types(candidate.config) for candidate in candidates):
            untrained = [c.facts["model"] for c in candidates if not c.has_trained_segments]
            logger.info(
                "segments are not used for any model, because no lineage says that the second segment of %s was "
                "trained. To use them for all models that have them:  --segments always",
                ", ".join(untrained),
            )
    return replace(settings, max_length=length, segments=segments)


def _load_data(task, data_dir, settings):
    """The examples of a task, with at most the requested number of training examples (n_train in records)."""
    data = load_task(task, data_dir, settings.split)
    data = data._replace(train=take_examples(task.name, data.train, settings.limit_train))
    return hold_out_tenth(task, data) if settings.split == TENTH else data


def _run_task(task, wanted, data_dir, settings, device, progress, tally):
    """Do all missing runs of a task.

    wanted  (candidate, its missing seeds) for every candidate
    """
    progress(f"prepare {task.name}", 0, None)
    data = _load_data(task, data_dir, settings)
    wanted = [(Trial(candidate, task, data), seeds) for candidate, seeds in wanted]
    trainings, done = sum(len(seeds) for _, seeds in wanted), 0
    for trial, seeds in wanted:
        if not seeds:
            continue
        forget_peak(device)
        model = PreparedTrial(trial, settings)
        place = records.directory_of(settings.output, trial.key(0)) / f".{task.name}"
        with refuse_what_is_in_the_way(), workplace(place, ()):  # for its lock
            for seed in seeds:
                file = records.path_of(settings.output, trial.key(seed))
                if records.is_kept(file, trial.facts(settings), settings.overwrite, tally):  # another process made it
                    done += model.steps
                    continue
                facts = {"unit": "steps", "model": trial.candidate.facts["model"], "seed": seed}

                def report(step, loss, begun=done, total=model.steps * trainings, facts=facts):
                    progress(task.name, begun + step, total, **facts, loss=loss)

                records.write(settings.output, model.record(seed, device, report))
                tally["made"] += 1
                done += model.steps
                progress(task.name, done, model.steps * trainings, **facts)


def _find_missing(trial, settings, tally):
    """The seeds without a record, or all if records are to be made again; others are counted in `tally`."""
    facts = trial.facts(settings)
    files = [records.path_of(settings.output, trial.key(seed)) for seed in range(settings.seeds)]
    return [seed for seed, file in enumerate(files) if not records.is_kept(file, facts, settings.overwrite, tally)]


def _report(candidate, settings):
    """Summarise a model's records over the requested seeds and tasks."""
    figures: dict[str, list[float]] = {}
    chosen: dict[str, dict[int, float]] = {}
    failed: dict[str, list[str]] = {"diverged": [], "collapsed": []}
    cut = {}
    for task in settings.chosen_tasks():
        for seed in range(settings.seeds):
            key = candidate.facts | {"suite": "finetune", "task": task, "seed": seed}
            record = records.read_file(records.path_of(settings.output, key))
            for figure in record["figures"]:
                figures.setdefault(f"{task} {figure['metric']}", []).append(figure["value"])
            for how, sentences in failed.items():
                if record[how]:
                    sentences.append(f"{task}, seed {seed}: {record[how]}")
            if "lr_choice" in record:
                chosen.setdefault(task, {})[seed] = record["lr_choice"]["lr"]
            if "cut" in record:
                cut[task] = record["cut"]["evaluation"]
    means = [sum(values) / len(values) for values in figures.values()]
    complete = len(means) == sum(map(len, records.METRICS.values()))
    return {
        "model": candidate.facts["model"],
        "weights": candidate.facts["weights"],
        "directory": str(records.directory_of(settings.output, candidate.facts | {"suite": "finetune"})),
        "figures": figures,
        "average": sum(means) / len(means) if complete else None,
        "chosen_lr": chosen,
        "cut": cut,
    } | failed
