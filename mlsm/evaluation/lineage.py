"""The origin of a model, from its export and the run around it, as the fields of a record.

An export carries lineage.json (student/runs/export.py). The lineage of a probe is that of its student; its identity
holds the settings of both. Nothing is known of a stock model.

A checkpoint of step 0 is of no objective yet: runs of one encoder and seed begin with the same weights, whatever they
learn. So its objective is `untrained`, and of targets it has none; its identity is that of the run it is from.

    lineage("runs/students/<run>/checkpoints/step-00000010")    # {"objective": "mlsm", "step": 10, ...}

Not handled here: counting a student's operations (student/encoders/flops.py does, while it trains).
"""

import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlsm.common.disk import read_file
from mlsm.common.errors import LineageError
from mlsm.common.json_checks import Count, Number, find_problem, object_of, optional
from mlsm.common.json_lines import damage, read_json_lines
from mlsm.common.model_checks import open_config
from student import objectives

logger = logging.getLogger(__name__)

FIELDS = (
    "objective",
    "kappa",
    "run_seed",
    "step",
    "fraction",
    "layer",
    "k",
    "lambda",
    "dictionary",
    "encoder",
    "teacher",
)
UNTRAINED = "untrained"
WITHOUT_TARGETS = (*objectives.WITHOUT_TARGETS, UNTRAINED)  # objectives that learn none of a store's distributions


def _table(fields: dict[str, Any]) -> Any:
    """The type of objects whose fields may be absent or null."""
    return object_of({name: optional(kind | None) for name, kind in fields.items()})


_SETTINGS = {"kappa": Number, "seed": Count, "max_steps": Count, "encoder": str}
_OF_TARGET = {
    "layer": Count,
    "k": Count,
    "lam": Number,
    "dictionary": str,
    "teacher": str,
    "teacher_name": str,
    "masked_passes": Count,
    "windowing": object_of({"max_length": optional(Count)}),
}
TAIL = object_of({"mass_kept": Number | None}) | None
_STORE = object_of(
    {
        "plan": optional(str | None),
        "target": optional(str | None),
        "windowing": optional(dict),
        "settings": optional(_table(_OF_TARGET)),
        "tail": optional(TAIL),
    }
)
LINEAGE = object_of(  # the fields of lineage.json that are read here
    {
        "objective": optional(str | None),
        "step": optional(Count | None),
        "tokens": optional(Count | None),
        "flops": optional(Number | None),
        "settings": optional(_table(_SETTINGS)),
        "store": optional(_STORE),
        "other_stores": optional(list[_STORE]),  # type: ignore[valid-type]
    }
)


def read_lineage(file: Path) -> dict:
    """Read a lineage.json. Raises LineageError if it is damaged or is not a lineage."""
    try:
        known = json.loads(read_file(file))
    except (OSError, ValueError, RecursionError) as error:
        raise LineageError(f"{file} cannot be read ({error}). Export or download the student again.") from None
    if problem := _find_problem(known):
        raise LineageError(f"{file}: {problem}. Export or download the student again.")
    return known


def _find_problem(known: Any, depth: int = 0) -> str | None:
    """What is wrong with a lineage, including the student's inside a probe's; None if nothing is."""
    if (problem := find_problem(known, LINEAGE)) or "student" not in known:
        return problem
    inner = known["student"]
    if depth or not isinstance(inner, dict) or not isinstance(inner.get("name", ""), str):
        return "field student: expected the lineage of a student"
    return _find_problem(inner, depth + 1)


def lineage(directory: Path | str) -> dict:
    """Fields of a record that say how a model was pre-trained.

    directory  of an export, a kept checkpoint or a stock model
    Returns    objective, kappa (of mtl), run_seed (of pre-training), step (optimiser steps), fraction (of the run's
               steps), layer (of the teacher), k, lambda, dictionary (its fingerprint), encoder, teacher: None if
               unknown, or, of an mlm student or an untrained one, not used; flops, see `flops_until`; and identity, see
               `identity`, None for a model without our lineage
    Raises     LineageError if there is a lineage.json that cannot be read
    """
    export = directory = Path(directory)
    file = export / "lineage.json"
    if not file.exists():
        return dict.fromkeys(FIELDS) | {"flops": {"pretraining": None, "teacher": None}, "identity": None}
    known = whole = read_lineage(file)
    probing = 0.0
    if "student" in known:  # a probe
        probing, known = known.get("flops") or 0.0, known["student"]
    _fill_in_dropout(known, export)  # that of a probe, too: it holds its student's encoder, which lies elsewhere
    settings, target = known.get("settings", {}), known.get("store", {}).get("settings", {})
    step, steps = known.get("step"), settings.get("max_steps")
    objective = UNTRAINED if step == 0 and settings.get("continue_from") is None else known.get("objective")
    if objective in WITHOUT_TARGETS:  # reads the words of a store, whatever targets that holds
        target = {}
    return {
        "objective": objective,
        "kappa": settings.get("kappa") if objective in ("mtl", "regress") else None,
        "run_seed": settings.get("seed"),
        "step": step,
        "fraction": step / steps if step is not None and steps else None,
        "layer": target.get("layer"),
        "k": target.get("k"),
        "lambda": target.get("lam"),
        "dictionary": target.get("dictionary"),
        "encoder": settings.get("encoder"),
        "teacher": target.get("teacher_name"),
        "flops": flops_until(known, probing),
        "identity": identity(whole),
    }


def _fill_in_dropout(known, directory):
    """Fill in a dropout that the settings leave open: the encoder's own, which the export's config.json says."""
    settings = known.get("settings", {})
    if settings.get("dropout", "open") is None and (directory / "config.json").is_file():
        from student.encoders.build import own_dropout

        with suppress(Exception):  # of a damaged configuration transformers raises many classes; the dropout stays open
            settings["dropout"] = own_dropout(open_config(directory))


def identity(known: dict) -> dict:
    """Everything that decided the pre-training of a model, as its lineage.json says it.

    known    a whole lineage.json
    Returns  objective; settings (of the run, those that name it); plan (fingerprint of the text as windows); windowing;
             target (fingerprint of the store's targets) and target_settings (teacher, layer, dtype and so on, with what
             the store knows of its dictionary); tail (mean mass kept and dropped, None if the store
             drops none). A student of several stores has those of its first store here, and in `other_targets` the
             target and settings of each other one. A probe has those of its student here, and its own in `probe`
    """
    if "student" in known:
        own = {name: value for name, value in known.items() if name != "student"}
        return identity(known["student"]) | {"probe": identity(own)}
    store, others = known.get("store", {}), known.get("other_stores", [])
    found = {
        "objective": known.get("objective"),
        "settings": known.get("settings", {}),
        "plan": store.get("plan"),
        "windowing": store.get("windowing", {}),
        "target": store.get("target"),
        "target_settings": store.get("settings", {}),
        "tail": store.get("tail"),
    }
    if others:
        found["other_targets"] = [{"target": one.get("target"), **one.get("settings", {})} for one in others]
    return found


def flops_until(known: dict, probing: float = 0.0) -> dict[str, float | None]:
    """Floating-point operations spent up to a checkpoint.

    known    its lineage.json
    probing  those of the probe on top of it
    Returns  pretraining: of the student, its probe included. teacher: of its forward passes over the tokens that the
             student was trained on, as if all of them were encoded for this student alone; 0 without a teacher. None
             where unknown
    """
    flops = known.get("flops")
    return {
        "pretraining": None if flops is None else flops + probing,
        "teacher": _count_teacher(known),
    }


def find_log(directory: Path) -> Path | None:
    """The log of the run that an export or a checkpoint is in, if it is in one."""
    logs = (run / "log.jsonl" for run in directory.absolute().parents[:2])
    return next((log for log in logs if log.is_file()), None)


def read_log(log: Path) -> list[dict]:
    """The lines of a run's log, each with its step; warns of damaged ones, which are passed over."""
    lines, damaged = read_json_lines(log)
    if damaged:
        logger.warning(damage(log, damaged))
    return lines


def _count_teacher(known):
    tokens = known.get("tokens")
    if known.get("objective") in WITHOUT_TARGETS or tokens == 0:
        return 0.0
    total = 0.0
    for store in (known.get("store", {}), *known.get("other_stores", [])):  # each had its own pass
        target = store.get("settings", {})
        length = (target.get("windowing") or {}).get("max_length")
        has_teacher = tokens is not None and length and "teacher" in target
        directory = _find_teacher(target.get("teacher_name"), target["teacher"]) if has_teacher else None
        if directory is None:
            return None
        passes = target.get("masked_passes") or 1
        total += tokens / length * _window_flops(directory, target.get("layer"), length, passes)
    return total


def _find_teacher(name: str | None, fingerprint: str) -> Path | None:
    """The directory of a teacher on this machine, if it is still the one of this fingerprint."""
    from huggingface_hub import snapshot_download

    from pipeline.teacher import BUNDLED, teacher_fingerprint

    if not name:
        return None
    directory = BUNDLED if name == "bundled" else Path(name)
    with suppress(Exception):  # three libraries raise: no name of the Hub's, not in its cache, no longer a model
        if not directory.is_dir():
            directory = Path(snapshot_download(name, local_files_only=True))
        if teacher_fingerprint(directory) == fingerprint:
            return directory
    return None


def _window_flops(directory, layer, length, passes=1):
    """Operations of a teacher on one window, cut after a layer; None for the layer: the whole, with its head, which
    reads every token once however many passes the encoder takes."""
    import torch
    from transformers import AutoModel, AutoModelForMaskedLM

    from pipeline.teacher import cut_config, read_config
    from student.encoders.build import without_pooler
    from student.encoders.flops import count_operations

    config = read_config(directory, directory)
    with torch.device("meta"):
        if layer is None:
            model = AutoModelForMaskedLM.from_config(config)
        else:
            model = AutoModel.from_config(cut_config(config, layer), **without_pooler(config))
    once = count_operations(model, input_ids=(1, length))
    return once if passes == 1 else once + (passes - 1) * count_operations(model.base_model, input_ids=(1, length))
