"""Models and their scores, from evaluation records, and which scores of two models can be paired.

    models = models_of(records.read(paths))
    trainings, left_out = match_trainings(models[0], models[1])

A model is identified by the hashes of its weights, configuration and tokenizer: a run's export and its last checkpoint
are one model. Two scores are paired if they have the same task, metric and seed, and their head, data and fine-tuning
settings agree. Runs of the same task and seed that do not agree are reported. Not handled here: in which settings of
pre-training models differ (identity.py), which of them are checkpoints or seeds of one arm (arms.py), tests
(effects.py).

A training is (task, seed). A figure of the suite is (task, metric); there are 14. A score is (task, metric, seed).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from mlsm.common.errors import ComparisonError
from mlsm.evaluation.comparison.identity import text
from mlsm.evaluation.lineage import FIELDS, WITHOUT_TARGETS
from mlsm.evaluation.records import CONTENT, FROZEN, METRICS, contents_of, path_of
from student import objectives

SEEDS = 5  # the paper's fine-tuning runs per task
SUITE = tuple((task, metric) for task, metrics in METRICS.items() for metric in metrics)
PARADIGMS = 67
TITLES = {
    "cola": "CoLA",
    "conll2003": "CoNLL-2003",
    "mnli": "MNLI",
    "mrpc": "MRPC",
    "qnli": "QNLI",
    "qqp": "QQP",
    "rte": "RTE",
    "sst2": "SST-2",
    "stsb": "STS-B",
    "wic": "WiC",
}
OBJECTIVES = {name: facts.label for name, facts in objectives.OBJECTIVES.items()}
Training = tuple[str, int]  # task, seed
SuiteFigure = tuple[str, str]  # task, metric
ScoreKey = tuple[str, str, int]  # task, metric, seed


@dataclass
class Model:
    """One model: what its records say about it, and the records by (task, seed); scores are read after all records are
    added.

    label  its name, with digits of its hashes if two models share the name
    facts  of the pre-training (lineage.FIELDS, and its whole identity, None if unknown), and flops, path, and the
           hashes of CONTENT, None where unknown
    frozen records of `finetune --frozen` by task, which are never paired with those of fine-tuning
    blimp  its BLiMP record with the settings that most models of the comparison have
    """

    label: str
    facts: dict
    trainings: dict[Training, dict] = field(default_factory=dict)
    blimps: dict = field(default_factory=dict)
    frozen: dict[tuple[str, int | None], dict] = field(default_factory=dict)
    blimp: dict | None = None

    @cached_property
    def scores(self) -> dict[ScoreKey, float]:
        """(task, metric, seed) -> value."""
        return {
            (task, figure["metric"], seed): figure["value"]
            for (task, seed), record in self.trainings.items()
            for figure in record["figures"]
        }

    @cached_property
    def values(self) -> dict[SuiteFigure, list[float]]:
        """(task, metric) -> its values of the available seeds, in the suite's order."""
        by_figure: dict[SuiteFigure, list[float]] = {figure: [] for figure in SUITE}
        for (task, metric, _), value in self.scores.items():
            by_figure[task, metric].append(value)
        return {figure: values for figure, values in by_figure.items() if values}

    @cached_property
    def figures(self) -> dict[SuiteFigure, float]:
        """(task, metric) -> mean over the available seeds, in the suite's order."""
        return {figure: fmean(values) for figure, values in self.values.items()}

    @property
    def accuracies(self) -> dict[str, float]:
        """BLiMP paradigm -> accuracy; empty without a BLiMP record."""
        return {figure["metric"]: figure["value"] for figure in self.blimp["figures"]} if self.blimp else {}

    @property
    def failed(self) -> dict[Training, str]:
        """(task, seed) -> reason, for fine-tuning runs that diverged or collapsed. Their scores are included."""
        return {
            key: f"{how}: {record[how]}"
            for key, record in self.trainings.items()
            for how in ("diverged", "collapsed")
            if record[how]
        }

    @property
    def kept(self) -> float | None:
        """Mean probability mass of the targets that top-n kept, a fraction; None if unknown or without targets."""
        identity = self.facts["identity"] or {}
        tail = identity.get("tail") if self.facts["objective"] not in WITHOUT_TARGETS else None
        return tail["mass_kept"] if tail else None

    @property
    def target(self) -> str | None:
        """The target of the store whose LSPs it learned (the first of several); None if unknown or without LSPs."""
        learned = self.facts["identity"] and self.facts["objective"] not in WITHOUT_TARGETS
        return self.facts["identity"]["target"] if learned else None

    @property
    def cost(self) -> float | None:
        """Floating-point operations of pre-training and teacher, None if one of them is not known."""
        spent = self.facts["flops"]
        return None if None in (spent["pretraining"], spent["teacher"]) else spent["pretraining"] + spent["teacher"]


def out_of(counts: Collection[int], full: int) -> str:
    """Write how complete something is: its counts, and the number in the paper."""
    least, most = min(counts, default=0), max(counts, default=0)
    n = f"n = {most}" if least == most else f"n = {least} to {most}"
    return f"{n} (paper: {full})" if most > full else f"{n} of {full}"


def average(model: Model, figures: Collection[SuiteFigure] | None = None) -> float:
    """Unweighted mean over the suite's figures, each a mean over seeds: over these, or over all that the model has.

    Raises  StatisticsError if there are none
    """
    values = model.figures
    return fmean(values[figure] for figure in (values if figures is None else figures))


def tasks_of(model: Model) -> set[str]:
    """The fine-tuning tasks for which a model has scores."""
    return {task for task, _ in model.figures}


def score_of_task(model: Model, task: str) -> float:
    """Mean over the metrics and fine-tuning seeds of a task."""
    return fmean(model.figures[task, metric] for metric in METRICS[task])


def mean_score(model: Model, tasks: Iterable[str]) -> float:
    """Mean over tasks."""
    return fmean(score_of_task(model, task) for task in tasks)


def common_figures(models: Sequence[Model]) -> list[SuiteFigure]:
    """The suite's figures that all these models have; only averages over these are comparable."""
    return [figure for figure in SUITE if all(figure in model.figures for model in models)]


def blimp_average(model: Model, paradigms: Collection[str] | None = None) -> float:
    """Unweighted mean accuracy over these paradigms, or over all that the model has."""
    values = model.accuracies
    return fmean(values[name] for name in (values if paradigms is None else paradigms))


def common_paradigms(models: Sequence[Model]) -> list[str]:
    """Names of the paradigms on which all these models were scored."""
    return sorted(set.intersection(*(set(model.accuracies) for model in models)))


def models_of(records: Iterable[dict]) -> tuple[list[Model], list[str]]:
    """Group records by model, in the order of `sort_key`.

    Returns  (models, notes): a note is a sentence on records that were read twice
    Raises   ComparisonError if two records of one model contradict each other, or some were scored on development sets
             and others on test sets or a tenth of train
    """
    models: dict[tuple, Model] = {}
    notes: list[str] = []
    splits: dict[str, dict] = {}
    records = list(records)
    for record, content in zip(records, contents_of(records), strict=True):
        _require_one_split(splits, record)
        facts = {name: record[name] for name in (*FIELDS, "identity", "flops", "path")}
        facts |= dict(zip(CONTENT, content, strict=True))
        model = models.setdefault(content, Model(record["model"], facts))
        _require_same_facts(model, facts)
        notes += _add(model, record)
    notes = list(dict.fromkeys(notes))
    ordered = sorted(models.values(), key=sort_key)
    for name in CONTENT:
        labels = [model.label for model in ordered]
        for model in ordered:
            if labels.count(model.label) > 1:
                digits = (model.facts[name] or "unknown")[:8]
                model.label += f" ({digits})" if name == "weights" else f" ({name} {digits})"
    _choose_blimp(ordered)
    return ordered, notes


def _require_one_split(splits, record):
    """Raise ComparisonError at the first fine-tuning record that was scored on another split than those before it."""
    if record["suite"] != "finetune":
        return
    splits.setdefault(record["settings"].get("split", "validation"), record)
    if len(splits) > 1:
        found = ", ".join(
            f"--split {split} (such as {first['task']} of {first['model']})" for split, first in splits.items()
        )
        raise ComparisonError(
            f"the records are of different examples: {found}. Compare each split separately: records of development "
            "sets are in runs/evaluations, others in runs/<split>/evaluations."
        )


def _require_same_facts(model, facts):
    if model.cost is None:  # on another machine the teacher may have been available
        model.facts["flops"] = facts["flops"]
    if facts["step"] == model.facts["step"] == 0:
        return  # before the first step nothing is learned: runs of different targets may start with these weights
    for name, value in facts.items():
        if name not in ("path", "flops", "identity") and value != model.facts[name]:
            raise ComparisonError(
                f"records of {model.label} ({model.facts['weights'][:8]}) contradict each other: {name} is "
                f"{model.facts[name]!r} in one and {value!r} in another. Evaluate that model again."
            )


def _add(model, record):
    """Add a record to a model, unless it already has that record under another name. Returns notes."""
    key = record["task"], record["seed"]
    kept = {"blimp": model.blimps, "frozen": model.frozen, "finetune": model.trainings}[record["suite"]]
    earlier = kept.setdefault(key, record)
    if record["model"] != earlier["model"]:
        return [
            f"{record['model']} is the same model as {model.label}: if both have a record, {earlier['model']}'s is "
            "used."
        ]
    if earlier is record:
        return []
    what = record["task"] if record["seed"] is None else f"{record['task']}, seed {record['seed']},"
    if earlier["figures"] != record["figures"] or find_disagreements(earlier, record):
        raise ComparisonError(
            f"two different records of {what} of {model.label}: the files called {path_of(Path(), record)}. Pass only "
            "one of them."
        )
    return [f"{what} of {model.label} was passed twice, with the same scores; one is used."]


def sort_key(model: Model) -> tuple:
    """The order of models: by objective and its targets, then by step and name."""
    facts, known = model.facts, list(OBJECTIVES)
    rank = known.index(facts["objective"]) if facts["objective"] in known else len(known)
    numbers = [facts[name] if facts[name] is not None else -1 for name in ("layer", "k", "kappa", "step")]
    return rank, facts["encoder"] or "", *numbers, model.label, facts["weights"]


def _choose_blimp(models):
    """For each model, the record with the data and settings that most models have; in a tie, the one of most pairs."""
    keys = [key for model in models for key in model.blimps]
    pairs = {key: record["data"]["n_eval"] for model in models for key, record in model.blimps.items()}
    ranked = sorted(set(keys), key=lambda key: (-keys.count(key), -pairs[key], len(key[0]), key[0]))
    for model in models:
        model.blimp = next((model.blimps[key] for key in ranked if key in model.blimps), None)


# -- pairs ------------------------------------------------------------------------------------------------


def match_trainings(model: Model, other: Model) -> tuple[list[Training], dict[str, list[Training]]]:
    """The fine-tuning runs of two models that can be paired.

    Returns  (sorted (task, seed) of the pairs, {why: (task, seed) of those that both have but that do not agree})
    """
    pairs: list[Training] = []
    left_out: dict[str, list[Training]] = {}
    for key in sorted(model.trainings.keys() & other.trainings.keys()):
        mine, theirs = model.trainings[key], other.trainings[key]
        why = find_disagreements(mine, theirs)
        if why:
            left_out.setdefault(why, []).append(key)
        else:
            pairs.append(key)
    return pairs, left_out


def find_disagreements(record: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Why two records of one task and seed cannot be paired, in words; empty if they can."""
    reasons = []
    if record["head"] != other["head"]:
        reasons.append("heads differ")
    if _content(record["data"]) != _content(other["data"]):
        reasons.append("data differ")
    names = record["settings"].keys() | other["settings"].keys()
    differing = sorted(name for name in names if record["settings"].get(name) != other["settings"].get(name))
    if differing:
        reasons.append(f"settings differ ({', '.join(_describe_setting(name, record, other) for name in differing)})")
    return ", ".join(reasons)


def find_mixture(records: Iterable[Mapping[str, Any]]) -> str:
    """Why a mean over fine-tuning records mixes several ways to fine-tune, in words; empty if it does not. Heads may
    differ, because they depend on the seed.
    """
    firsts: dict[str, Mapping[str, Any]] = {}
    for record in records:
        first = firsts.setdefault(record["task"], record)
        if why := find_disagreements({**first, "head": None}, {**record, "head": None}):
            return f"{record['task']}: {why}"
    return ""


def _describe_setting(name, record, other):
    """Describe a setting that two records do not agree on."""
    values = [found["settings"].get(name, "not recorded") for found in (record, other)]
    return f"{name}: {text(values[0])} and {text(values[1])}"


def _content(data):
    """The data that was read: files count by their content, not by their path and name, data of the Hub by theirs."""
    files = sorted(data.get("files", {}).values())
    return files, {key: data[key] for key in data if key not in (("name", "files") if files else ("files",))}


def largest_alike(records: Mapping[str, Mapping]) -> list[str]:
    """The most names whose records have the same data and settings; of several such sets the first."""
    sets = [
        [name for name, other in records.items() if not find_disagreements(record, other)]
        for record in records.values()
    ]
    return max(sets, key=len, default=[])


def scored_alike(models: Iterable[Model]) -> tuple[list[Model], dict[str, str]]:
    """The largest set of models whose BLiMP records have the same data and settings; others are not comparable.

    Returns  (models, {label of one left out: why})
    """
    models = list(models)
    scored = {model.label: model.blimp for model in models if model.blimp}
    alike = largest_alike(scored)
    return [model for model in models if model.label in alike], {
        label: find_disagreements(record, scored[alike[0]]) for label, record in scored.items() if label not in alike
    }


def frozen_alike(models: Sequence[Model]) -> tuple[dict[str, dict[str, dict]], list[str]]:
    """For each task of `finetune --frozen`, the records of the largest set of models that agree in data and settings.

    Returns  (task -> label of a model -> its record, a sentence for each model that is left out)
    """
    found, notes = {}, []
    for task in FROZEN:
        records = {model.label: model.frozen[task, None] for model in models if (task, None) in model.frozen}
        alike = largest_alike(records)
        found[task] = {label: records[label] for label in alike}
        notes += [
            f"The frozen scores of {task} of {label} cannot be compared with the others:"
            f" {find_disagreements(record, records[alike[0]])}"
            for label, record in records.items()
            if label not in alike
        ]
    return found, notes


def checkpoint_name(model: Model) -> str:
    """A checkpoint's name in tables: a fraction of the run's steps, a step, or final."""
    fraction, step = model.facts["fraction"], model.facts["step"]
    if fraction is not None:
        return f"{100 * fraction:.4g}%"
    return "final" if step is None else f"step {step:,}"
