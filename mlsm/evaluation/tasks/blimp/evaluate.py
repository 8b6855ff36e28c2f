"""The command evaluate-blimp: does a masked language model prefer the acceptable sentence of each minimal pair?

    evaluate_blimp(config)["records"]

A sentence's score is the sum of ln p of its tokens (scoring/scorer.py). A pair is correct if the acceptable sentence
scores strictly higher. Equal scores are wrong and are counted as ties. The main score is the unweighted mean of the
paradigms' accuracies; a phenomenon's score is the mean over its paradigms.

The scores of a paradigm are written to a file as soon as it is scored:
<output>/evaluations/<model>/blimp/<task>-scores/<paradigm>.npz So an interrupted command continues after the last of
them; the record is written at the end. The task is `blimp`; if only a part is scored, or in another way, it is
`blimp-100`, `blimp-within-word-l2r`, `blimp-of-2-<digits>` and so on. With another tokenizer or configuration the same
weights are scored again, and the record is replaced.
"""

import logging
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from mlsm.common.arrays import read_npz
from mlsm.common.device import choose_device, environment
from mlsm.common.durable import appearing_whole, make_directories, refuse_what_is_in_the_way
from mlsm.common.errors import BlimpError
from mlsm.common.invocation import program
from mlsm.common.progress import silent
from mlsm.evaluation import records
from mlsm.evaluation.models import directories
from mlsm.evaluation.tasks.blimp.config import BlimpConfig
from mlsm.evaluation.tasks.blimp.data import PHENOMENA, Paradigm, choose_paradigms, read, subset
from mlsm.evaluation.tasks.scoring.models import check_family, load
from mlsm.evaluation.tasks.scoring.scorer import Scorer
from shards.manifest import fingerprint

logger = logging.getLogger(__name__)


class Scores(NamedTuple):
    """Scores of a paradigm's sentences, in nats, pair by pair."""

    good_N: np.ndarray
    bad_N: np.ndarray
    seconds: float

    def figure(self, paradigm: str) -> dict:
        """The paradigm's entry in a record: accuracy, pairs, ties."""
        right, ties = int((self.good_N > self.bad_N).sum()), int((self.good_N == self.bad_N).sum())
        return {"metric": paradigm, "value": right / len(self.good_N), "n": len(self.good_N), "ties": ties}


def evaluate_blimp(config: BlimpConfig, progress: Callable[..., None] = silent) -> dict:
    """Score every model that has not been scored in this way before.

    Returns  records: one for every model, as described in records.py, with `averages`; finished_before (for each
             record, whether an earlier command scored it), paths and output
    Raises   BlimpError, ModelError, RunError, RecordError, DeviceError, TeacherError (a tokenizer): if data or a model
             cannot be used
    """
    progress("read data and models", 0, None)
    device = choose_device(config.device)
    places = _find_models(config)
    paradigms = read(config.data_dir)
    files = {paradigm.name: paradigm.digest for paradigm in paradigms}
    chosen = choose_paradigms(config.tasks)
    paradigms = [paradigm for paradigm in paradigms if paradigm.name in chosen]
    if config.per_paradigm is not None:
        paradigms = [subset(paradigm, config.per_paradigm) for paradigm in paradigms]
    headings = [_begin_record(directory, config, paradigms, files) for directory in places]
    records.refuse_shared_names(headings)
    known = [_find_finished(heading, config) for heading in headings]
    waiting = [heading for heading, there in zip(headings, known, strict=True) if there is None]
    if len(waiting) > 1:
        for heading in waiting:  # so that a model that cannot be loaded is found before the first is scored
            load(Path(heading["path"]), device)
    found = []
    for number, (heading, there) in enumerate(zip(headings, known, strict=True), 1):
        stage = "blimp" if len(headings) == 1 else f"blimp {number}/{len(headings)}"
        found.append(there or _evaluate(heading, paradigms, config, device, stage, progress))
    return {
        "records": [record for _, record in found],
        "finished_before": [there is not None for there in known],
        "paths": [str(path) for path, _ in found],
        "output": str(config.output),
    }


def averages(figures: list[dict]) -> dict:
    """The keys headline and phenomena, unweighted means of the scored paradigms' accuracies, and ties, a count."""
    accuracy = {figure["metric"]: figure["value"] for figure in figures}
    scored = {name: [accuracy[member] for member in PHENOMENA[name] if member in accuracy] for name in PHENOMENA}
    phenomena = {name: statistics.fmean(values) for name, values in scored.items() if values}
    ties = sum(figure["ties"] for figure in figures)
    return {"headline": statistics.fmean(accuracy.values()), "phenomena": phenomena, "ties": ties}


def task_of(config: BlimpConfig) -> str:
    """The task's name in records: `blimp` and the settings that differ from their defaults."""
    parts: list[str | int | None] = [config.metric if config.metric != "original" else None, config.per_paradigm]
    if config.tasks:
        names = choose_paradigms(config.tasks)
        parts.append(f"of-{len(names)}-{fingerprint(names)[:8]}")
    return "-".join(["blimp", *(str(part) for part in parts if part is not None)])


def _find_models(config: BlimpConfig) -> list[Path]:
    if not config.models:
        raise BlimpError(f"no model to score. Name one or more:  {program()} evaluate-blimp MODEL --data-dir DIR")
    found = directories(config.models, config.step)
    for directory in found:
        check_family(directory)
    return found


def _begin_record(directory: Path, config: BlimpConfig, paradigms: list[Paradigm], files: dict) -> dict:
    """The fields of a record that are known before anything is scored."""
    settings: dict[str, Any] = {"metric": config.metric, "per_paradigm": config.per_paradigm}
    if config.tasks:  # omitted in a record of all 67
        settings |= {"paradigms": [paradigm.name for paradigm in paradigms]}
    return {
        "schema": records.SCHEMA,
        "suite": "blimp",
        "seed": None,
        "diverged": False,
        "collapsed": False,
        "head": None,
        "settings": settings,
        "task": task_of(config),
        "data": {"name": "blimp", "files": files, "n_train": 0, "n_eval": sum(len(p.pairs) for p in paradigms)},
    } | records.describe_model(directory)


def _find_finished(record: dict, config: BlimpConfig) -> tuple[Path, dict] | None:
    """Path and record of an earlier command with the same model, settings and data; None if there is none."""
    path = records.path_of(config.output, record)
    if not path.is_file():
        return None
    there = records.read_file(path)
    differing = [
        name for name in (*records.CONTENT, "settings", "data") if there.get(name, record[name]) != record[name]
    ]
    if differing:
        logger.warning(
            "%s will be scored again: its %s differ from those of now",
            path,
            ", ".join(differing),
        )
    return (path, there) if not differing and "averages" in there else None


def _evaluate(
    record: dict,
    paradigms: list[Paradigm],
    config: BlimpConfig,
    device: torch.device,
    stage: str,
    progress: Callable[..., None],
) -> tuple[Path, dict]:
    """Score a model, writing each paradigm's scores and then the record. Returns its path and the record."""
    place = records.directory_of(config.output, record) / f"{record['task']}-scores"
    with refuse_what_is_in_the_way():
        make_directories(place)
    total = 2 * record["data"]["n_eval"]
    scorer, done, figures, wall = None, 0, [], 0.0
    for paradigm in paradigms:
        file, identity = place / f"{paradigm.name}.npz", _identity(record, paradigm)
        scores = _read(file, identity)
        if scores is None:
            progress(stage, done, total, unit="sentences", model=record["model"])
            scorer = scorer or Scorer(*load(Path(record["path"]), device), config.metric, config.batch_tokens)
            scores = _score(scorer, paradigm, record["model"])
            _write(file, identity, scores)
        done += 2 * len(paradigm.pairs)
        wall += scores.seconds
        figures.append(scores.figure(paradigm.name))
    progress(stage, done, total, unit="sentences", model=record["model"])
    record |= {"figures": figures, "averages": averages(figures), "env": environment(device), "wall": wall}
    return records.write(config.output, record), record


def _score(scorer: Scorer, paradigm: Paradigm, model: str) -> Scores:
    clock = time.perf_counter()
    tokens = scorer.score([sentence for pair in paradigm.pairs for sentence in pair])
    # fsum rounds once, so the sum does not depend on the order of the scores
    sums_N2 = np.array([math.fsum(row) for row in tokens]).reshape(-1, 2)
    if not np.isfinite(sums_N2).all():
        raise BlimpError(f"{model}: scores of {paradigm.name} are not finite: its weights, or its logits, are not.")
    return Scores(sums_N2[:, 0], sums_N2[:, 1], time.perf_counter() - clock)


def _identity(record: dict, paradigm: Paradigm) -> str:
    """A key that is equal if two commands compute the same scores for a paradigm."""
    content = [record[name] for name in records.CONTENT]
    return fingerprint([*content, record["settings"]["metric"], paradigm.digest])


def _write(file: Path, identity: str, scores: Scores) -> None:
    with appearing_whole(file) as stream:
        np.savez(stream, identity=identity, **scores._asdict())


def _read(file: Path, identity: str) -> Scores | None:
    """The scores in a file; None if it has none, or if they are for other pairs, weights or another metric."""
    try:
        arrays = read_npz(file)
        if str(arrays["identity"]) != identity:
            return None
        return Scores(arrays["good_N"], arrays["bad_N"], float(arrays["seconds"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
