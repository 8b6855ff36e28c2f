"""Find the directories of the models that the user names for an evaluation, and load their tokenizers.

    for directory in directories(("runs/students/<run>", "bundled"), step="all"):
        ...

All evaluations use this module, so that a model has the same files, digest and lineage in the records of each. Not
handled here: loading weights (tasks/scoring/models.py, tasks/finetuning/heads.py).
"""

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import snapshot_download
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from mlsm.common.errors import ModelError
from mlsm.common.invocation import program
from mlsm.common.model_checks import describe_unfit_tokenizer
from mlsm.common.text import shell_quote
from pipeline.teacher import BUNDLED, load_tokenizer
from student.runs.checkpoint import checkpoints_in
from student.runs.export import EXPORT_FILES
from student.runs.probed import export_of


def directories(names: Sequence[str], step: str | None = None) -> list[Path]:
    """The directories of the named models, in order.

    names   runs, exports, kept checkpoints, any models' directories, `bundled`, Hub ids
    step    for every run, use the kept checkpoint of this optimiser step, or `all` kept ones, instead of its export;
            other names are not affected
    Raises  ModelError if there is no such model or checkpoint; RunError if a run is not finished
    """
    if step is not None and step != "all" and not step.isdecimal():
        raise ModelError(f"--step is an optimiser step or `all`, found {step}")
    if step is not None and not any(_is_run(Path(name).expanduser()) for name in names):
        raise ModelError(
            f"--step {step} chooses a checkpoint of a run of train-student or train-probe, but {', '.join(names)} is "
            "not such a run. Pass the run's directory."
        )
    return [directory for name in names for directory in _find(name, step)]


def load_fitting_tokenizer(directory: Path, model: PreTrainedModel, pads: bool = False) -> PreTrainedTokenizerFast:
    """The tokenizer of a model that was loaded from a directory.

    pads    whether it must have a padding token, because texts of different lengths are read together
    Raises  TeacherError if it cannot be loaded, ModelError if it does not fit
    """
    tokenizer = load_tokenizer(directory)
    if trouble := describe_unfit_tokenizer(tokenizer, model):
        raise ModelError(f"{directory}: {trouble} Use a model with the tokenizer that it was trained with.")
    if pads and tokenizer.pad_token_id is None:
        raise ModelError(f"{directory}: its tokenizer has no padding token. Add one, and save it.")
    return tokenizer


def _find(name: str, step: str | None) -> list[Path]:
    path = Path(name).expanduser()
    if name == "bundled" and not path.is_dir():
        return [BUNDLED]
    if step is not None and _is_run(path):
        return _choose_checkpoints(path, step)
    directory = Path(export_of(path if path.exists() else name))
    return [directory if directory.is_dir() else _from_hub(name)]


def _is_run(path: Path) -> bool:
    return (path / "checkpoints").is_dir()


def _choose_checkpoints(run: Path, step: str) -> list[Path]:
    """The kept checkpoints of a run that --step asks for."""
    found = checkpoints_in(run / "checkpoints")
    kept = {int(path.name[5:]): path for path in found if (path / "config.json").is_file()}
    if step == "all" and kept:
        return list(kept.values())
    if step != "all" and int(step) in kept:
        return [kept[int(step)]]
    if step != "all" and int(step) in {int(path.name[5:]) for path in found}:
        raise ModelError(
            f"{run}: the checkpoint of step {step} can only be resumed from. Export it, and pass the export:  "
            f"{program()} export-student {shell_quote(run)} --step {step}"
        )
    there = ", ".join(map(str, kept)) or "none"
    raise ModelError(f"{run} has no checkpoint of step {step}; those kept are: {there}. Pass one of them as --step.")


def _from_hub(name: str) -> Path:
    try:
        return Path(snapshot_download(name, allow_patterns=list(EXPORT_FILES)))
    except Exception as error:  # the classes differ between versions of huggingface_hub
        raise ModelError(
            f"no such model: {name} is not a directory, and neither the Hub nor its cache has it "
            f"({type(error).__name__}). Pass a directory, or download it on a machine with a network: hf download "
            f"{name}"
        ) from error
