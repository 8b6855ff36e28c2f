"""Records of evaluations: one JSON file for one suite, task and seed of one model.

    <output>/evaluations/<model>-<first 8 digits of its weights>/<suite>/<task>-seed<seed>.json   (blimp: blimp.json)

    {"schema": "mlsm-record-2", "suite": "finetune", "task": "mrpc", "seed": 0, "wall": 61.3,
     "diverged": false, or a sentence where the loss was not finite,
     "collapsed": false, or a sentence if all predictions are the same, or the score is near the most frequent answer's,
     "figures": [{"metric": "accuracy", "value": 0.86, "n": 408}, {"metric": "f1", "value": 0.9, "n": 408}],
     "model": "mlsm-bert-mini", "path": ..., "weights": sha256, "head": sha256 or null, "objective": "mlsm",
     "kappa", "run_seed", "step", "fraction", "layer", "k", "lambda", "dictionary", "encoder", "teacher": its lineage,
     null where unknown,
     "identity": all that decided its pre-training (lineage.identity), null where unknown,
     "flops": {"pretraining": 4.3e12, "teacher": 1.1e12}, "data": {"name", "files", "n_train", "n_eval"},
     "settings": {...}, "env": {...},
     "cost": of a fine-tuning {"embedding_rows": 30522, "peak_memory_bytes": 8.1e8, "step_seconds": 0.3}, else missing,
     "lr_choice": of a fine-tuning with several rates {"lr": 3e-4, "tried": [{"lr": 3e-4, "score": 0.71}, ...]}, null
                  for the score of one that diverged; else missing}

A record of `finetune --frozen` has the suite `frozen`, the seed null and the metrics of FROZEN, each with the part that
it was scored on: `entities_tuning`, `entities_dev`, `entities_test`. Its settings say `"frozen": true`, and `chosen`
holds what the tuning split decided.

Values are fractions: 0.86, not 86. A record is written as a whole and stands for itself, so files may be moved and
mixed. Records of schema mlsm-record-1 are converted while they are read: they lack the identity, which becomes null,
and they call a training diverged if all its predictions are the same, which is now called collapsed.
Left out: where a model comes from (lineage.py), what is measured, comparing.
"""

import hashlib
import json
import platform
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import disk
from common.disk import file_sha256
from common.durable import make_directories, replace_json
from common.errors import LineageError, RecordError
from common.invocation import program
from common.json_checks import Number, find_problem, is_number, object_of, optional
from evaluation.lineage import TAIL, lineage
from shards.manifest import canonical_json

if TYPE_CHECKING:
    import torch

SCHEMA = "mlsm-record-2"
_FIRST_SCHEMA = "mlsm-record-1"

# The fourteen figures of the fine-tuning suite (MLSM paper, section 4.2): task -> metrics, in a record's order.
METRICS = {
    "cola": ("matthews",),
    "conll2003": ("f1",),
    "mnli": ("accuracy_matched", "accuracy_mismatched"),
    "mrpc": ("accuracy", "f1"),
    "qnli": ("accuracy",),
    "qqp": ("accuracy", "f1"),
    "rte": ("accuracy",),
    "sst2": ("accuracy",),
    "stsb": ("pearson", "spearman"),
    "wic": ("accuracy",),
}

# What `finetune --frozen` measures: task -> metrics, each on the parts `tuning`, `dev` and `test` that the task has.
FROZEN = METRICS | {
    "conll2003": ("entities", "pos", "chunks"),
    "stsb": (*METRICS["stsb"], "cosine"),
    "wsd": ("f1",),
}
PARTS = ("tuning", "dev", "test")


def describe(path: Path | str, name: str | None = None) -> dict:
    """What a record says of a model: model, path, weights and its lineage.

    path  directory of an export, a kept checkpoint or any stock model
    name  shown to people; when not given, the name of the run (of a checkpoint, with its step) or of the directory
    Raises  RecordError where its weights or its lineage cannot be read
    """
    path = Path(path)
    try:
        known = lineage(path)
    except LineageError as error:
        raise RecordError(str(error)) from None
    return {"model": name or shown_name(path), "path": str(path), "weights": weights_sha256(path)} | known


def weights_sha256(directory: Path | str) -> str:
    """SHA-256 over names and contents of all safetensors files of a directory, hexadecimal.

    Raises  RecordError where there is none, or one cannot be read
    """
    files = sorted(Path(directory).glob("*.safetensors"))
    if not files:
        raise RecordError(f"{directory} holds no safetensors file. Expected an export, a kept checkpoint or a model.")
    try:
        content = {path.name: file_sha256(path) for path in files}
    except OSError as error:
        raise RecordError(f"{error.filename} cannot be read: {error.strerror}. Export the model again.") from None
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()


def environment(device: "torch.device | str" = "cpu") -> dict[str, str | int]:
    """Versions, device and threads that a record's figures were made with."""
    import torch
    import transformers

    kind = torch.device(device).type
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(device) if kind == "cuda" else kind,
        "threads": torch.get_num_threads(),
    }


def directory_of(output: Path | str, record: Mapping) -> Path:
    """Where the records of one model and suite lie. `record`: its model, weights and suite suffice."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", record["model"]).strip(".-") or "model"
    return Path(output) / "evaluations" / f"{name}-{record['weights'][:8]}" / record["suite"]


def path_of(output: Path | str, record: Mapping) -> Path:
    """The file of a record; of its fields model, weights, suite, task and seed are needed."""
    seed = "" if record["seed"] is None else f"-seed{record['seed']}"
    return directory_of(output, record) / f"{record['task']}{seed}.json"


def write(output: Path | str, record: dict) -> Path:
    """Write a record, whole, in place of an earlier one. Returns its path; RecordError where it is malformed."""
    path = path_of(output, check(record, "this record"))
    make_directories(path.parent)
    replace_json(path, record)
    return path


def read(paths: Iterable[Path | str]) -> list[dict]:
    """The records in some files and directories, which are searched recursively.

    Returns  list of dicts, in the order of the arguments, within a directory by path; `file` says where each was read
    Raises   RecordError naming file and field of what is malformed, or that there are none
    """
    files = [file for path in paths for file in _find_files(Path(path))]
    if not files:
        raise RecordError(f"no records in {', '.join(map(str, paths))}. Make some:  {program()} finetune MODEL")
    return [read_file(file) | {"file": str(file)} for file in dict.fromkeys(files)]


def read_file(file: Path) -> dict:
    """One record; RecordError where it is malformed."""
    try:
        record = json.loads(disk.read_file(file))
    except (OSError, ValueError, RecursionError) as error:
        raise RecordError(f"{file}: expected a record as JSON: {error}. Delete it and evaluate again.") from None
    return _fill_in(check(_convert_first_schema(record), file))


def _fill_in(record):
    """Settings of fine-tuning that earlier versions did not record, as they were: no warm-up, no clipping."""
    if record["suite"] == "finetune":
        record["settings"] = {"warmup": 0.0, "grad_clip": 0.0} | record["settings"]
    return record


def _convert_first_schema(record):
    """Convert a record of the first schema to the second; return any other as it is."""
    if not isinstance(record, dict) or record.get("schema") != _FIRST_SCHEMA:
        return record
    why = record.get("diverged")
    collapsed = why if isinstance(why, str) and why.startswith("every prediction is ") else False
    failed = {"diverged": False, "collapsed": collapsed} if collapsed else {"collapsed": False}
    return record | failed | {"schema": SCHEMA, "identity": None}


def _find_files(path):
    if path.is_dir():  # a hidden file is the temporary file of another process
        return sorted(file for file in path.rglob("*.json") if not file.name.startswith("."))
    if not path.is_file():
        raise RecordError(f"no such file or directory: {path}. Give records or directories of them.")
    return [path]


def check(record: Any, where: Path | str) -> dict:
    """Return the record unchanged, or raise a RecordError that says what is wrong with it.

    where  what the message begins with: the record's file
    """
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        found = record.get("schema") if isinstance(record, dict) else type(record).__name__
        raise RecordError(
            f"{where}: field schema: expected {SCHEMA!r}, found {found!r}. Give records that finetune or"
            " evaluate-blimp wrote."
        )
    for name, (holds, expected) in _FIELDS.items():
        if name not in record:
            raise RecordError(f"{where}: field {name} is missing, expected {expected}. Evaluate again.")
        _require(holds(record[name]), where, name, expected, record[name])
    for place, figure in enumerate(record["figures"]):
        field = f"figures[{place}]"
        _require(isinstance(figure, dict), where, field, "an object with metric, value and n", figure)
        for name, (holds, expected) in _FIGURE_FIELDS.items():
            _require(holds(figure.get(name)), where, f"{field}.{name}", expected, figure.get(name))
        _require(_is_count(figure.get("ties", 0)), where, f"{field}.ties", "a whole number", figure.get("ties"))
    if record["suite"] == "finetune":
        task = record["task"]
        _require(task in METRICS, where, "task", f"one of {', '.join(METRICS)}", task)
        metrics = [figure["metric"] for figure in record["figures"]]
        _require(metrics == list(METRICS[task]), where, "figures", f"the metrics {', '.join(METRICS[task])}", metrics)
        _require(record["seed"] is not None, where, "seed", "a whole number", record["seed"])
    if record["suite"] == "frozen":
        task = record["task"]
        _require(task in FROZEN, where, "task", f"one of {', '.join(FROZEN)}", task)
        names = [f"{metric}_{part}" for metric in FROZEN[task] for part in PARTS]
        metrics = [figure["metric"] for figure in record["figures"]]
        unknown = set(metrics) - set(names) or len(set(metrics)) < len(metrics)
        _require(not unknown, where, "figures", f"each once, some of {', '.join(names)}", metrics)
        _require(record["settings"].get("frozen") is True, where, "settings.frozen", "true", record["settings"])
    if "lr_choice" in record and (problem := find_problem(record["lr_choice"], _LR_CHOICE, "lr_choice.")):
        raise RecordError(f"{where}: {problem}. Evaluate again.")
    if record["identity"] is not None and (problem := find_problem(record["identity"], _IDENTITY, "identity.")):
        raise RecordError(f"{where}: {problem}. Evaluate again.")
    return record


def _require(holds, where, field, expected, found):
    if not holds:
        raise RecordError(f"{where}: field {field}: expected {expected}, found {found!r}. Evaluate again.")


def _is_count(value):
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_digest(value):
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def _or_null(holds, expected):
    return lambda value: value is None or holds(value), f"{expected} or null"


def _is_data(value):
    files = value.get("files", {}) if isinstance(value, dict) else None
    return isinstance(files, dict) and all(isinstance(digest, str) for digest in files.values())


def _are_flops(value):
    return isinstance(value, dict) and all(
        name in value and (value[name] is None or is_number(value[name]) and value[name] >= 0)
        for name in ("pretraining", "teacher")
    )


_TEXT = (lambda value: isinstance(value, str) and value != "", "text")
_OBJECT = (lambda value: isinstance(value, dict), "an object")
_IDENTITY = object_of(  # lineage.identity
    {
        "objective": str | None,
        "settings": dict,
        "plan": str | None,
        "windowing": dict,
        "target": str | None,
        "target_settings": object_of({"dictionary_settings": optional(dict)}),
        "tail": TAIL,
        "other_targets": optional(list[dict]),
        "probe": optional(object_of({"settings": dict})),
    }
)
_FIELDS = {
    "suite": (lambda value: value in ("finetune", "frozen", "blimp"), "finetune, frozen or blimp"),
    "task": _TEXT,
    "seed": _or_null(_is_count, "a whole number"),
    "figures": (lambda value: isinstance(value, list) and len(value) > 0, "a list of figures"),
    "diverged": (lambda value: value is False or _TEXT[0](value), "false or a sentence"),
    "collapsed": (lambda value: value is False or _TEXT[0](value), "false or a sentence"),
    "model": _TEXT,
    "path": _TEXT,
    "weights": (_is_digest, "64 hexadecimal digits"),
    "objective": _or_null(*_TEXT),
    "kappa": _or_null(is_number, "a number"),
    "run_seed": _or_null(_is_count, "a whole number"),
    "step": _or_null(_is_count, "a whole number"),
    "fraction": _or_null(lambda value: is_number(value) and 0 <= value <= 1, "a number from 0 to 1"),
    "layer": _or_null(_is_count, "a whole number"),
    "k": _or_null(_is_count, "a whole number"),
    "lambda": _or_null(is_number, "a number"),
    "dictionary": _or_null(*_TEXT),
    "encoder": _or_null(*_TEXT),
    "teacher": _or_null(*_TEXT),
    "identity": _or_null(*_OBJECT),
    "flops": (_are_flops, "an object with pretraining and teacher, each a number or null"),
    "head": _or_null(_is_digest, "64 hexadecimal digits"),
    "data": (_is_data, "an object whose files, if it has them, are an object of names and hashes"),
    "settings": _OBJECT,
    "env": _OBJECT,
    "wall": (lambda value: is_number(value) and value >= 0, "seconds"),
}
_LR_CHOICE = object_of({"lr": Number, "tried": list[object_of({"lr": Number})]})  # type: ignore[misc]
_FIGURE_FIELDS = {
    "metric": _TEXT,
    "value": (lambda value: is_number(value) and -1 <= value <= 1, "a fraction in [-1, 1]"),
    "n": (_is_count, "a whole number"),
}


def describe_differences(record: Mapping, facts: Mapping, prefix: str = "") -> str:
    """In what a record differs from the facts that one made now would have, as text; empty if they agree."""
    said = []
    for name in {**facts, **(record if prefix else {})}:  # a record has more fields than these, but no other settings
        found, value, full_name = record.get(name), facts.get(name), f"{prefix}{name}"
        if isinstance(value, dict) and isinstance(found, dict):
            said.append(describe_differences(found, value, f"{full_name} "))
        elif found != value:
            said.append(f"{full_name} (there {found}, now {value})")
    return ", ".join(filter(None, said))


def shown_name(path: Path) -> str:
    """What records call the model of a directory, unless they are told another name."""
    path = path.resolve()
    if path.name == "export" and (path.parent / "log.jsonl").is_file():
        return path.parent.name
    if path.parent.name == "checkpoints":
        return f"{path.parent.parent.name}-{path.name}"
    if path.parent.name == "snapshots":  # of the Hub's cache: models--<owner>--<name>/snapshots/<commit>
        return path.parent.parent.name.removeprefix("models--").replace("--", "/")
    return path.name
