"""Where a model comes from: what its export and the run around it say, as the fields of a record.

An export carries lineage.json (student/export.py). Those of earlier versions lack the floating-point operations of
pre-training; then the log of the run that they lie in has them. A probe's lineage is its student's. Of a
stock model nothing is known.

    lineage("runs/students/<run>/checkpoints/step-00000010")    # {"objective": "mlsm", "step": 10, ...}

Left out: counting a student's operations (student/flops.py does, while it trains).
"""

import json
from contextlib import suppress
from pathlib import Path

FIELDS = (
    "objective", "kappa", "run_seed", "step", "fraction", "layer", "k", "lambda", "dictionary", "encoder", "teacher",
)  # fmt: skip


def lineage(directory):
    """Fields of a record that say how a model was pre-trained.

    directory  of an export, a kept checkpoint or a stock model
    Returns    objective, kappa (of mtl), run_seed (of pre-training), step (optimiser steps), fraction (of the run's
               steps), layer (of the teacher), k, lambda, dictionary (its fingerprint), encoder, teacher: None where
               unknown, or, of an mlm student, not used; and flops, see `flops_until`
    """
    directory = Path(directory)
    file = directory / "lineage.json"
    if not file.is_file():
        return dict.fromkeys(FIELDS) | {"flops": {"pretraining": None, "teacher": None}}
    known = json.loads(file.read_text(encoding="utf-8"))
    probing = 0.0
    if "student" in known:    # a probe
        probing, known = known.get("flops") or 0.0, known["student"]
        directory = Path(known.get("name", directory))
    settings, target = known.get("settings", {}), known.get("store", {}).get("settings", {})
    if known.get("objective") == "mlm":    # reads the words of a store, whatever targets that holds
        target = {}
    step, steps = known.get("step"), settings.get("max_steps")
    return {
        "objective": known.get("objective"),
        "kappa": settings.get("kappa") if known.get("objective") == "mtl" else None,
        "run_seed": settings.get("seed"),
        "step": step,
        "fraction": step / steps if step is not None and steps else None,
        "layer": target.get("layer"),
        "k": target.get("k"),
        "lambda": target.get("lam"),
        "dictionary": target.get("dictionary"),
        "encoder": settings.get("encoder"),
        "teacher": target.get("teacher_name"),
        "flops": flops_until(directory, known, probing),
    }


def flops_until(directory, known, probing=0.0):
    """Floating-point operations spent up to a checkpoint.

    known    its lineage.json
    probing  those of the probe on top of it
    Returns  pretraining: of the student, its probe included. teacher: of its forward passes over the tokens that the
             student was trained on, as if every one was encoded for it alone; 0 without a teacher. None where unknown
    """
    flops = known.get("flops")
    if flops is None:
        flops = _logged(directory, known.get("step"))
    return {
        "pretraining": None if flops is None else flops + probing,
        "teacher": _of_teacher(known),
    }


def _logged(directory, step):
    """From the log of the run that an export or a checkpoint lies in."""
    if step is None:
        return None
    for run in directory.absolute().parents[:2]:
        if (run / "log.jsonl").is_file():
            lines = (run / "log.jsonl").read_text(encoding="utf-8").splitlines()
            return next((flops / at * step for at, flops in map(_flops_of, lines) if flops), None)
    return None


def _flops_of(line):
    """Step and floating-point operations so far of a line; all steps of a run take the same."""
    with suppress(ValueError):    # cut by a kill
        values = json.loads(line)
        return values.get("step"), values.get("flops")
    return None, None


def _of_teacher(known):
    target, tokens = known.get("store", {}).get("settings", {}), known.get("tokens")
    if known.get("objective") == "mlm":
        return 0.0
    if tokens is None or "teacher" not in target:
        return None
    directory = _found_here(target.get("teacher_name"), target["teacher"])
    if directory is None:
        return None
    length = target["windowing"]["max_length"]
    return tokens / length * _window_flops(directory, target.get("layer"), length)


def _found_here(name, fingerprint):
    """The directory of a teacher on this machine, if it is still the one of this fingerprint."""
    from huggingface_hub import snapshot_download

    from pipeline.teacher import BUNDLED, teacher_fingerprint

    if not name:
        return None
    directory = BUNDLED if name == "bundled" else Path(name)
    with suppress(Exception):    # of three libraries: not a name of the Hub's, not in its cache, no model any more
        if not directory.is_dir():
            directory = Path(snapshot_download(name, local_files_only=True))
        if teacher_fingerprint(directory) == fingerprint:
            return directory
    return None


def _window_flops(directory, layer, length):
    """Operations of a teacher on one window, cut after a layer; None for the layer: the whole, with its head."""
    import torch
    from transformers import AutoModel, AutoModelForMaskedLM

    from pipeline.teacher import cut_config, read_config
    from student.encoders import without_pooler
    from student.flops import count_flops

    config = read_config(directory, directory)
    with torch.device("meta"):
        if layer is None:
            model = AutoModelForMaskedLM.from_config(config)
        else:
            model = AutoModel.from_config(cut_config(config, layer), **without_pooler(config))
    return count_flops(model, input_ids=(1, length))
