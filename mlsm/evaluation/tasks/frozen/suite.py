"""`finetune --frozen`: evaluate every model on every task without fine-tuning, one record each.

A record depends only on the model, the task and the settings. Existing records are kept, so an interrupted command
resumes with the next task. Features are stored in <output>/features until their record is written, in a directory named
after the model, its tokenizer, the data and the settings. Not handled here: the measures (measures.py).
"""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from mlsm.common.device import environment
from mlsm.common.workplaces import workplace
from mlsm.evaluation import records
from mlsm.evaluation.tasks.finetuning.config import FROZEN_EXAMPLES, FROZEN_LENGTH, FinetuneConfig
from mlsm.evaluation.tasks.finetuning.trials import Candidate, check_length
from mlsm.evaluation.tasks.frozen.features import FeatureExtractor
from mlsm.evaluation.tasks.frozen.measures import Measure, read_measure
from mlsm.evaluation.tasks.frozen.senses import check_reads_senses


def measure_frozen(
    settings: FinetuneConfig,
    candidates: Sequence[Candidate],
    data_dir: Path | None,
    device: torch.device,
    progress: Callable[..., None],
) -> dict:
    """Measure every model on every task that has no record yet.

    Returns  as `finetune`, with one value per score, and `chosen`: task -> choices made on the tuning split
    Raises   as `finetune`; WsdDataError
    """
    length = settings.max_length or min(FROZEN_LENGTH, *(candidate.trained_length for candidate in candidates))
    check_length(candidates, length)
    tally: dict[str, Any] = {"made": 0, "kept": 0, "differing": []}
    plan = []
    for name in settings.chosen_tasks():
        measure = read_measure(name, data_dir, settings.limit_train or FROZEN_EXAMPLES)
        trials = [(candidate, facts_of(candidate, measure, settings, length)) for candidate in candidates]
        plan.append((name, measure, [one for one in trials if _is_missing(*one, name, settings, tally)]))
    for candidate in candidates:  # so that what cannot be measured is found before hours of work
        if names := [name for name, _, trials in plan if any(one is candidate for one, _ in trials)]:
            encoder = FeatureExtractor(candidate.directory, settings.layer, length, device)
            if "wsd" in names:
                check_reads_senses(encoder)
    for name, measure, trials in plan:
        for candidate, facts in trials:
            encoder = FeatureExtractor(candidate.directory, settings.layer, length, device)
            record_scores(encoder, candidate, name, measure, facts, settings, progress)
            tally["made"] += 1
    return {
        "models": [_report(candidate, settings) for candidate in candidates],
        "output": str(settings.output),
        "settings": {"frozen": True, "max_length": length, "layers": _layers(settings)},
        "finished_before": tally["made"] == 0,
    } | tally


def _layers(settings):
    return "all" if settings.layer is None else list(settings.layer)


def facts_of(candidate: Candidate, measure: Measure, settings: FinetuneConfig, length: int) -> dict:
    """The fields of a record that identify the measurement."""
    common = {"frozen": True, "max_length": length, "layers": _layers(settings)}
    return {
        **{name: candidate.facts[name] for name in records.CONTENT},
        "data": measure.data,
        "settings": common | measure.settings,
    }


def _key(candidate, name):
    return candidate.facts | {"suite": "frozen", "task": name, "seed": None}


def _is_missing(candidate, facts, name, settings, tally):
    file = records.path_of(settings.output, _key(candidate, name))
    return not records.is_kept(file, facts, settings.overwrite, tally)


def record_scores(
    encoder: FeatureExtractor,
    candidate: Candidate,
    name: str,
    measure: Measure,
    facts: dict,
    settings: FinetuneConfig,
    progress: Callable[..., None],
) -> None:
    """Measure a model on a task and write the record.

    encoder  of the candidate
    facts    from `facts_of`
    """
    began = time.monotonic()
    digits = hashlib.sha256(json.dumps(facts | {"task": name}, sort_keys=True).encode()).hexdigest()

    def report(done):
        progress(f"frozen {name}", done, measure.total, unit="texts", model=candidate.facts["model"])

    with workplace(settings.output / "features" / digits, files=("*.npz",)) as place:
        figures, chosen = measure.score(encoder, place, report)
        record = {
            "schema": records.SCHEMA,
            **_key(candidate, name),
            **facts,
            "figures": figures,
            "diverged": False,
            "collapsed": chosen.pop("constant", False),
            "chosen": chosen,
            "head": None,
            "env": environment(encoder.teacher.device),
            "wall": time.monotonic() - began,
        }
        records.write(settings.output, record)  # before what it was computed from goes


def _report(candidate, settings) -> dict:
    figures: dict[str, float] = {}
    chosen: dict[str, dict] = {}
    for name in settings.chosen_tasks():
        record = records.read_file(records.path_of(settings.output, _key(candidate, name)))
        figures |= {f"{name} {figure['metric']}": figure["value"] for figure in record["figures"]}
        chosen[name] = record["chosen"]
    return {
        "model": candidate.facts["model"],
        "weights": candidate.facts["weights"],
        "directory": str(records.directory_of(settings.output, candidate.facts | {"suite": "frozen"})),
        "figures": figures,
        "chosen": chosen,
    }
