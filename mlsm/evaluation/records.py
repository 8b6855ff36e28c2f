"""Records of evaluations: one JSON file for one suite, task and seed of one model.

    <output>/evaluations/<model>-<first 8 digits of its weights>/<suite>/<task>-seed<seed>.json   (blimp: blimp.json)

    {"schema": "mlsm-record-2", "suite": "finetune", "task": "mrpc", "seed": 0, "wall": 61.3,
     "diverged": false, or a sentence where the loss was not finite,
     "collapsed": false, or a sentence if all predictions are the same, or the score is near the most frequent answer's,
     "figures": [{"metric": "accuracy", "value": 0.86, "n": 408}, {"metric": "f1", "value": 0.9, "n": 408}],
     "model": "mlsm-bert-mini", "path": ..., "weights": sha256, "config": sha256, "tokenizer": sha256,
     "head": sha256 or null, "objective": "mlsm", "kappa", "run_seed", "step", "fraction", "layer", "k", "lambda",
     "dictionary", "encoder", "teacher": its lineage, null where unknown,
     "identity": all that decided its pre-training (lineage.identity), null where unknown,
     "flops": {"pretraining": 4.3e12, "teacher": 1.1e12}, "data": {"name", "files", "n_train", "n_eval"},
     "settings": {...}, "env": {...},
     "cost": of a fine-tuning {"embedding_rows": 30522, "peak_memory_bytes": 8.1e8, "step_seconds": 0.3}, else missing,
     "lr_choice": of a fine-tuning with several rates {"lr": 3e-4, "tried": [{"lr": 3e-4, "score": 0.71}, ...]}, null
                  for the score of one that diverged; else missing}

A record of `finetune --frozen` has the suite `frozen`, the seed null and the metrics of FROZEN, each with the part that
it was scored on: `entities_tuning`, `entities_dev`, `entities_test`. Its settings have `"frozen": true`, and `chosen`
has the choices that were made on the tuning split.

Values are fractions: 0.86, not 86. A record is written in one step and is self-contained, so files may be moved and
mixed. Not handled here: a model's origin (lineage.py), measuring, comparing.
"""

import hashlib
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from mlsm.common import disk
from mlsm.common.disk import file_sha256
from mlsm.common.durable import make_directories, refuse_what_is_in_the_way, replace_json
from mlsm.common.errors import LineageError, RecordError, StudyError, describe
from mlsm.common.invocation import program
from mlsm.common.json_checks import Count, Digest, Number, Text, find_problem, object_of, one_of, optional
from mlsm.common.model_checks import open_config
from mlsm.evaluation.lineage import TAIL, lineage
from shards.manifest import canonical_json

if TYPE_CHECKING:
    pass

SCHEMA = "mlsm-record-2"

# What decides what a model computes from a text. Old records lack some of these, and match any value of those.
CONTENT = ("weights", "config", "tokenizer")

# Settings of a config.json that change no output: evaluations read weights as float32, and make heads of their own.
_WITHOUT_EFFECT = frozenset(
    ("_name_or_path", "architectures", "auto_map", "dtype", "gradient_checkpointing", "id2label", "initializer_range")
    + ("label2id", "output_attentions", "output_hidden_states", "problem_type", "return_dict", "tokenizer_class")
    + ("torch_dtype", "torchscript", "transformers_version", "use_cache")
)

# The fourteen scores of the fine-tuning suite (MLSM paper, section 4.2): task -> metrics, in a record's order.
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

# The metrics of `finetune --frozen`: task -> metrics, each for those of `tuning`, `dev` and `test` that the task has.
FROZEN = METRICS | {
    "conll2003": ("entities", "pos", "chunks"),
    "stsb": (*METRICS["stsb"], "cosine", "cosine_last"),
    "wsd": ("f1",),
}
PARTS = ("tuning", "dev", "test")


def describe_model(path: Path | str) -> dict:
    """The facts about a model in a record: model, path, CONTENT and its lineage.

    path  directory of an export, a kept checkpoint or any stock model
    Raises  RecordError if its weights, configuration or lineage cannot be read, TeacherError if its tokenizer cannot
    """
    from pipeline.teacher import load_tokenizer
    from shards.copies import tokenizer_fingerprint

    path = Path(path)
    try:
        known = lineage(path)
    except LineageError as error:
        raise RecordError(str(error)) from None
    content = {
        "weights": weights_sha256(path),
        "config": config_sha256(path),
        "tokenizer": tokenizer_fingerprint(load_tokenizer(path)),
    }
    return {"model": shown_name(path), "path": str(path)} | content | known


def weights_sha256(directory: Path | str) -> str:
    """SHA-256 over names and contents of all safetensors files of a directory, hexadecimal.

    Raises  RecordError if there is none, or one cannot be read
    """
    files = sorted(Path(directory).glob("*.safetensors"))
    if not files:
        below = f" For its runs, pass each, such as {directory}/*." if any(Path(directory).glob("*/export")) else ""
        raise RecordError(
            f"{directory} has no safetensors file. Expected an export, a kept checkpoint or a model.{below}"
        )
    try:
        content = {path.name: file_sha256(path) for path in files}
    except OSError as error:
        raise RecordError(f"{error.filename} cannot be read: {error.strerror}. Export the model again.") from None
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()


def config_sha256(directory: Path | str) -> str:
    """SHA-256 of a model's configuration without the settings that change no output, hexadecimal.

    Settings with transformers' defaults are left out, so a model keeps its hash if it is saved again, or if a newer
    transformers has further settings.
    Raises  RecordError if it cannot be read
    """
    try:
        config = open_config(directory, local_files_only=True)
        usual = {"position_embedding_type": "absolute"} | type(config)().to_dict()  # transformers 4 wrote the former
    except Exception as error:  # transformers raises many classes for a damaged file
        raise RecordError(
            f"{directory}/config.json cannot be read: {describe(error)}. Export or download the model again."
        ) from None
    kept = {
        name: value
        for name, value in config.to_dict().items()
        if name == "model_type" or (name not in _WITHOUT_EFFECT and (name not in usual or value != usual[name]))
    }
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()


def directory_of(output: Path | str, record: Mapping) -> Path:
    """The directory of the records of one model and suite; `record` needs only model, weights and suite."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", record["model"]).strip(".-") or "model"
    return Path(output) / "evaluations" / f"{name}-{record['weights'][:8]}" / record["suite"]


def refuse_shared_names(models: Iterable[Mapping]) -> None:
    """Raise RecordError if different models would have their records in one directory.

    models  from `describe_model`
    """
    by_directory: dict[Path, Mapping] = {}
    for model in models:
        first = by_directory.setdefault(directory_of("", {**model, "suite": ""}), model)
        if any(first[name] != model[name] for name in CONTENT):
            raise RecordError(
                f"{first['path']} and {model['path']} have the same name and weights, so their records would be the "
                "same files. Copy one of them into a directory of another name (of A-Z, a-z, 0-9, dots, _ and -)."
            )


def path_of(output: Path | str, record: Mapping) -> Path:
    """The file of a record, from its fields model, weights, suite, task and seed."""
    seed = "" if record["seed"] is None else f"-seed{record['seed']}"
    return directory_of(output, record) / f"{record['task']}{seed}.json"


@refuse_what_is_in_the_way()
def write(output: Path | str, record: dict) -> Path:
    """Write a record in one step, replacing an earlier one. Returns its path. Raises RecordError if it is malformed."""
    path = path_of(output, check_record(record, "this record"))
    make_directories(path.parent)
    replace_json(path, record)
    return path


def read(paths: Iterable[str | PathLike[str]]) -> list[dict]:
    """The records in some files and directories, which are searched recursively.

    Returns  list of dicts, in the order of the arguments, within a directory by path; `file` is the file of each
    Raises   RecordError, which names a malformed file and field, or says that there are no records
    """
    names = [fspath(path) for path in paths]
    files = [file for name in names for file in _find_files(Path(name).expanduser())]
    if not files:
        raise RecordError(f"no records in {', '.join(names)}. Make some:  {program()} finetune MODEL")
    return [read_file(file) | {"file": str(file)} for file in dict.fromkeys(files)]


def read_file(file: Path) -> dict:
    """One record; RecordError if it is malformed."""
    try:
        record = json.loads(disk.read_file(file))
    except (OSError, ValueError, RecursionError) as error:
        raise RecordError(f"{file}: expected a record as JSON: {error}. Delete it and evaluate again.") from None
    check_record(record, file)
    if record["suite"] == "finetune":  # a record that lacks these was made without warm-up and clipping
        record["settings"] = {"warmup": 0.0, "grad_clip": 0.0} | record["settings"]
    return record


def _find_files(path):
    if path.is_dir():  # a hidden file is another process's temporary file
        return sorted(file for file in path.rglob("*.json") if not file.name.startswith("."))
    if not path.is_file():
        raise RecordError(f"no such file or directory: {path}. Pass records or directories of them.")
    return [path]


def check_record(record: Any, where: Path | str) -> dict:
    """Return the record unchanged, or raise a RecordError that says what is wrong with it.

    where  start of the message: the record's file
    """
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        found = record.get("schema") if isinstance(record, dict) else type(record).__name__
        raise RecordError(
            f"{where}: field schema: expected {SCHEMA!r}, found {found!r}. Pass records written by finetune or "
            "evaluate-blimp."
        )
    if problem := find_problem(record, _RECORD) or _find_contradiction(record):
        raise RecordError(f"{where}: {problem}. Evaluate again.")
    return record


def _find_contradiction(record: dict) -> str | None:
    """Find a contradiction between fields of a record that are each valid on their own."""
    for name in ("diverged", "collapsed"):
        if record[name] is True:
            return f"field {name}: expected false or a sentence, found True"
    suite, task, metrics = record["suite"], record["task"], [figure["metric"] for figure in record["figures"]]
    known = {"finetune": METRICS, "frozen": FROZEN}.get(suite)
    if known is not None and task not in known:
        return f"field task: expected one of {', '.join(known)}, found {task!r}"
    if suite == "finetune":
        if metrics != list(METRICS[task]):
            return f"field figures: expected the metrics {', '.join(METRICS[task])}, found {metrics}"
        if record["seed"] is None:
            return "field seed: expected a whole number, found None"
    if suite == "frozen":
        names = [f"{metric}_{part}" for metric in FROZEN[task] for part in PARTS]
        if set(metrics) - set(names) or len(set(metrics)) < len(metrics):
            return f"field figures: expected each once, some of {', '.join(names)}, found {metrics}"
        if record["settings"].get("frozen") is not True:
            return f"field settings.frozen: expected true, found {record['settings'].get('frozen')!r}"
    return None


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
_Positive = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
_Figure = object_of({"metric": Text, "value": Annotated[float, Meta(ge=-1, le=1)], "n": Count, "ties": optional(Count)})
_RECORD = object_of(
    {
        "suite": one_of("finetune", "frozen", "blimp"),
        "task": Text,
        "seed": Count | None,
        "figures": Annotated[list[_Figure], Meta(min_length=1)],  # type: ignore[valid-type]
        "diverged": bool | Text,  # false or a sentence
        "collapsed": bool | Text,
        "model": Text,
        "path": Text,
        "weights": Digest,
        "config": optional(Digest),
        "tokenizer": optional(Digest),
        "objective": Text | None,
        "kappa": Number | None,
        "run_seed": Count | None,
        "step": Count | None,
        "fraction": Annotated[float, Meta(ge=0, le=1)] | None,
        "layer": Count | None,
        "k": Count | None,
        "lambda": Number | None,
        "dictionary": Text | None,
        "encoder": Text | None,
        "teacher": Text | None,
        "identity": _IDENTITY | None,
        "flops": object_of({"pretraining": _Positive | None, "teacher": _Positive | None}),
        "head": Digest | None,
        "data": object_of({"files": optional(dict[str, str])}),
        "settings": dict,
        "env": dict,
        "wall": _Positive,
        "lr_choice": optional(object_of({"lr": Number, "tried": list[object_of({"lr": Number})]})),  # type: ignore[misc]
    }
)


def is_kept(file: Path, facts: Mapping, overwrite: str, tally: dict[str, Any]) -> bool:
    """Whether a record exists and stays, which is counted in `tally`: as kept, or as made with other settings.

    facts   of a record that would be made now
    Raises  StudyError on other settings if `overwrite` is "missing"
    """
    if overwrite == "always" or not file.is_file():
        return False
    record = read_file(file)
    known = {name: value for name, value in facts.items() if name in record or name not in CONTENT}
    if not (differing := _describe_differences(record, known)):
        tally["kept"] += 1
    elif overwrite == "missing":
        raise StudyError(
            f"{file} was made with other settings: {differing}. Nothing was changed. Use the settings that it was made "
            "with, another --output, --overwrite always to replace it, or --overwrite never to keep it and continue. "
            "(A study has no --overwrite: to replace the record there, move it away.)"
        )
    else:
        tally["differing"].append(str(file))
    return True


def contents_of(found: Sequence[Mapping]) -> list[tuple[str | None, ...]]:
    """The CONTENT of the model of each record. What a record lacks is taken from others with the same weights if they
    agree, and is None otherwise.
    """
    known: dict[tuple[str, str], set[str]] = {}
    for record in found:
        for name in CONTENT:
            values = known.setdefault((record["weights"], name), set())
            if record.get(name) is not None:
                values.add(record[name])

    def value(record, name):
        others = known[record["weights"], name]
        return record.get(name) or (next(iter(others)) if len(others) == 1 else None)

    return [tuple(value(record, name) for name in CONTENT) for record in found]


def _describe_differences(record: Mapping, facts: Mapping, prefix: str = "") -> str:
    """The differences between a record and the facts of one made now, as text; empty if they agree."""
    said = []
    for name in {**facts, **(record if prefix else {})}:  # a record has other fields, but not other settings
        found, value, full_name = record.get(name), facts.get(name), f"{prefix}{name}"
        if isinstance(value, dict) and isinstance(found, dict):
            said.append(_describe_differences(found, value, f"{full_name} "))
        elif found != value:
            said.append(f"{full_name} (there {found}, now {value})")
    return ", ".join(filter(None, said))


def shown_name(path: Path) -> str:
    """The name in records of the model in a directory, unless another name is passed."""
    path = path.resolve()
    if path.name == "export" and (path.parent / "log.jsonl").is_file():
        return path.parent.name
    if path.parent.name == "checkpoints":
        return f"{path.parent.parent.name}-{path.name}"
    if path.parent.name == "snapshots":  # of the Hub's cache: models--<owner>--<name>/snapshots/<commit>
        return path.parent.parent.name.removeprefix("models--").replace("--", "/")
    return path.name
