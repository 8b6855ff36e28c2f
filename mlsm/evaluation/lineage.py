"""The origin of a model, read from its export, as the fields of a record.

An export carries lineage.json (student/runs/export.py). The lineage of a probe is that of its student; its identity has
the settings of both. For a stock model nothing is known.

A checkpoint of step 0 has no objective yet: runs with the same encoder and seed start with the same weights, whatever
they learn. So its objective is `untrained`, and it has no targets; its identity is that of its run.

    lineage("runs/students/<run>/checkpoints/step-00000010")    # {"objective": "mlsm", "step": 10, ...}

Not handled here: counting a student's operations (student/encoders/flops.py does, while it trains).
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlsm.common.disk import read_file
from mlsm.common.errors import LineageError
from mlsm.common.json_checks import Count, Number, find_problem, object_of, optional
from mlsm.common.model_checks import open_config, without_pooler
from student import objectives

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
WITHOUT_TARGETS = (*objectives.WITHOUT_TARGETS, UNTRAINED)  # objectives that do not learn a store's distributions


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
    """Say what is wrong with a lineage, including that of a probe's student; None if it is valid."""
    if (problem := find_problem(known, LINEAGE)) or "student" not in known:
        return problem
    inner = known["student"]
    if depth or not isinstance(inner, dict) or not isinstance(inner.get("name", ""), str):
        return "field student: expected the lineage of a student"
    return _find_problem(inner, depth + 1)


def lineage(directory: Path | str) -> dict:
    """Fields of a record that say how a model was pre-trained.

    directory  of an export, a kept checkpoint or a stock model
    Returns    objective, kappa (of mtl and regress), run_seed (of pre-training), step (optimiser steps), fraction (of
               the run's steps), layer (of the teacher), k, lambda, dictionary (its fingerprint), encoder, teacher: None
               if unknown, or if not used (for an mlm or an untrained student); flops, see `flops_until`; and identity,
               see `identity`, None for a model without our lineage
    Raises     LineageError if there is a lineage.json that cannot be read
    """
    directory = Path(directory)
    file = directory / "lineage.json"
    if not file.exists():
        return dict.fromkeys(FIELDS) | {"flops": {"pretraining": None, "teacher": None}, "identity": None}
    known = whole = read_lineage(file)
    probing = 0.0
    if "student" in known:  # a probe
        probing, known = known.get("flops") or 0.0, known["student"]
    _fill_in_dropout(known, directory)  # also a probe's: it has its student's encoder, which is elsewhere
    settings, target = known.get("settings", {}), known.get("store", {}).get("settings", {})
    step, steps = known.get("step"), settings.get("max_steps")
    objective = UNTRAINED if step == 0 and settings.get("continue_from") is None else known.get("objective")
    if objective in WITHOUT_TARGETS:  # learns only words, whatever targets the store has
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
    """If the settings have no dropout, fill in the encoder's own from the export's config.json."""
    settings = known.get("settings", {})
    if settings.get("dropout", "open") is None and (directory / "config.json").is_file():
        from student.encoders.build import own_dropout

        with suppress(Exception):  # transformers raises many classes for a damaged configuration
            settings["dropout"] = own_dropout(open_config(directory))


def identity(known: dict) -> dict:
    """All settings that determined a model's pre-training, from its lineage.json.

    known    a whole lineage.json
    Returns  objective; settings (those of the run that are part of its name); plan (fingerprint of the text as
             windows); windowing; target (fingerprint of the store's targets) and target_settings (teacher, layer, dtype
             and so on, with the store's facts about its dictionary); tail (mean mass kept and dropped, None if the
             store drops none). For a student of several stores these are those of its first store, and `other_targets`
             has the target and settings of each other store. For a probe these are those of its student, and `probe`
             has its own
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


def flops_until(known: dict, probing: float) -> dict[str, float | None]:
    """Floating-point operations spent up to a checkpoint.

    known    its lineage.json
    probing  those of the probe, if there is one
    Returns  pretraining: of the student, including its probe. teacher: of its forward passes over the tokens that the
             student was trained on, as if they were encoded only for this student; 0 without a teacher. None if
             unknown, as the former is if the student continues another encoder, whose operations are not recorded
    """
    flops, continued = known.get("flops"), (known.get("settings") or {}).get("continue_from") is not None
    return {
        "pretraining": None if flops is None or continued else flops + probing,
        "teacher": _count_teacher(known),
    }


def _count_teacher(known):
    tokens = known.get("tokens")
    if known.get("objective") in WITHOUT_TARGETS or tokens == 0:
        return 0.0
    total = 0.0
    for store in (known.get("store", {}), *known.get("other_stores", [])):  # each had its own pass of the teacher
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
    """The directory of a teacher on this machine, if it still has this fingerprint."""
    from huggingface_hub import snapshot_download

    from pipeline.teacher import BUNDLED, teacher_fingerprint

    if not name:
        return None
    directory = BUNDLED if name == "bundled" else Path(name)
    with suppress(Exception):  # three libraries raise: no Hub id, not in the cache, not a model
        if not directory.is_dir():
            directory = Path(snapshot_download(name, local_files_only=True))
        if teacher_fingerprint(directory) == fingerprint:
            return directory
    return None


def _window_flops(directory, layer, length, passes):
    """Operations of a teacher, cut after a layer, on one window. If the layer is None: of the whole teacher with its
    head, which reads every token once, even if the encoder makes several passes.
    """
    import torch
    from transformers import AutoModel, AutoModelForMaskedLM

    from pipeline.teacher import cut_config, read_config
    from student.encoders.flops import count_operations

    config = read_config(directory, directory)
    with torch.device("meta"):
        if layer is None:
            model = AutoModelForMaskedLM.from_config(config)
        else:
            model = AutoModel.from_config(cut_config(config, layer), **without_pooler(config))
    once = count_operations(model, input_ids=(1, length))
    return once if passes == 1 else once + (passes - 1) * count_operations(model.base_model, input_ids=(1, length))
