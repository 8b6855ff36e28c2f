"""Checkpoints that appear whole or not at all, and the search for the newest whole one.

    checkpoints/step-00000100/
        state.json                  step, position, figures of the run, and the SHA-256 of every other file
        resume/student.safetensors  weights of encoder, head and output matrix
        resume/optimizer.pt         AdamW's state (loads with weights_only=True)
        resume/mask_statistics.safetensors    the student's losses by token, of a run with adaptive masks
        config.json, model.safetensors, tokenizer ...   in kept ones: what AutoModel loads (export.py)

Each is written under a temporary name, fsynced, renamed. The schedule, order, masks and dropout follow from the step,
so there is no generator and no reader to save. Not handled here: which steps are saved (train.py).
"""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save as safetensors_bytes
from torch import nn

from mlsm.common import disk
from mlsm.common.disk import file_sha256
from mlsm.common.durable import publish_directory, remedy_for
from mlsm.common.errors import RunError, WriteError, describe
from mlsm.common.json_checks import Count, Number, find_problem, object_of, parse_json
from mlsm.common.model_checks import load_tensors
from mlsm.common.paths import utf8
from shards.manifest import canonical_json

logger = logging.getLogger(__name__)

MASK_STATISTICS = "mask_statistics.safetensors"


def are_figures(values: dict) -> bool:
    """Whether these are names of held-out figures: none, or at least the loss, and accuracy only with perplexity."""
    return not values or ("loss" in values and ("accuracy" in values) == ("perplexity" in values))


STATE = object_of(  # the fields of state.json that are read
    {
        "step": Count,
        "tokens": Count,
        "seconds": Number,
        "held_out": dict[str, Number],
        "held_out_step": Count,
        "flops": Number,
        "run": str,
        "plan": str,
        "target": str,
        "shards": str,
        "environment": dict,
        "files": dict[str, str],
    }
)


class Checkpoints:
    """The checkpoints of one run.

    directory   the directory that contains them
    kept_steps  steps whose checkpoint is never removed and which AutoModel can load
    keep_last   how many of the newest checkpoints are kept in addition
    """

    def __init__(self, directory: Path, kept_steps: Iterable[int] = (), keep_last: int = 1):
        self.directory = directory
        self.kept_steps = set(kept_steps)
        self.keep_last = keep_last
        self._damaged: set[Path] = set()  # checkpoints that newest_whole passed over

    def path(self, step: int) -> Path:
        """The directory of the checkpoint of a step, once it is saved."""
        return self.directory / f"step-{step:08d}"

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: dict,
        export: Callable[[Path], None],
        mask_statistics: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """Write the checkpoint of a step, then remove old ones that were only kept to resume from.

        state   JSON values that are needed on resume
        export  writes what AutoModel loads into a directory; called for kept steps only
        mask_statistics    of a run with adaptive masks
        Raises  WriteError if it cannot be written; earlier checkpoints stay, and nothing is left of this one
        """
        final = self.path(step)

        def fill(directory: Path) -> None:
            disk.mkdir(directory / "resume")
            with _new_file(directory / "resume" / "student.safetensors") as file:
                weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
                file.write(safetensors_bytes(weights))
            with _new_file(directory / "resume" / "optimizer.pt") as file:
                torch.save(optimizer.state_dict(), file)
            if mask_statistics is not None:
                with _new_file(directory / "resume" / MASK_STATISTICS) as file:
                    file.write(safetensors_bytes(mask_statistics))
            if step in self.kept_steps:
                export(directory)
            files = sorted(path for path in directory.rglob("*") if path.is_file())
            hashes = {str(path.relative_to(directory)): file_sha256(path) for path in files}
            whole = {"step": step} | state | {"files": hashes}
            whole["checksum"] = _checksum(whole)
            with _new_file(directory / "state.json") as file:
                file.write((json.dumps(whole, indent=1, sort_keys=True) + "\n").encode())

        try:
            publish_directory(final, fill)
        except (OSError, SafetensorError) as error:  # save_pretrained raises SafetensorError on a full disk
            raise WriteError(
                f"{final} could not be written: {error}. Checkpoints before it were not touched. {remedy_for(error)},"
                f" and run the same command: it continues from the newest."
            ) from error
        self._prune(step)

    def newest_whole(self) -> tuple[Path, dict] | None:
        """Path and state of the newest checkpoint whose files are all unchanged; None if there is none.

        Raises  RunError if a checkpoint cannot be read now: it may be whole
        """
        for path in reversed(checkpoints_in(self.directory)):
            problem, state = _inspect(path)
            if problem is None:
                return path, state
            self._damaged.add(path)
            logger.warning("%s is damaged (%s); looking for the checkpoint before it", path, problem)
        return None

    def whole(self, step: int) -> tuple[Path, dict] | None:
        """Path and state of the checkpoint of one step; None if there is none, or its files have changed since.

        Raises  RunError if it cannot be read now: it may be whole
        """
        path = self.path(step)
        problem, state = _inspect(path)
        return None if problem else (path, state)

    def _prune(self, newest: int) -> None:
        found = [path for path in checkpoints_in(self.directory) if path.is_dir() and not path.is_symlink()]
        older = [path for path in found if path <= self.path(newest)]
        later = set(found).difference(older, self._damaged)  # the run did not start from them, but they may be whole
        keep = {self.path(step) for step in self.kept_steps} | set(older[-self.keep_last :]) | later
        for path in found:
            exported = (path / "config.json").exists()  # kept under earlier settings
            if path not in keep and not exported:
                disk.remove(path)


def checkpoints_in(directory: Path) -> list[Path]:
    """All paths with a checkpoint's name, whole or not, in the order of the steps."""
    found = [path for path in directory.glob("step-*") if re.fullmatch(r"step-\d{8,15}", path.name)]
    return sorted(found, key=lambda path: int(path.name[5:]))


def load_weights(path: Path, model: nn.Module) -> None:
    """Load the weights of a whole checkpoint in place."""
    model.load_state_dict(load_tensors(path / "resume" / "student.safetensors"), strict=True)


def restore(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    restore_statistics: Callable[[Path], None] | None = None,
) -> None:
    """Load weights and optimiser state of a whole checkpoint in place.

    restore_statistics  reads the file of mask statistics, if the run has adaptive masks
    Raises  RunError if the files belong to another model or optimiser; do not use the model after that
    """
    device = next(model.parameters()).device
    try:
        load_weights(path, model)
        state = torch.load(path / "resume" / "optimizer.pt", map_location=device, weights_only=True)
        options = [{name: group[name] for name in group if name != "params"} for group in optimizer.param_groups]
        optimizer.load_state_dict(state)
        for group, own in zip(optimizer.param_groups, options, strict=True):
            group.update(own)  # the file's options are the same, unless somebody changed them
        if path.name != "step-00000000":  # before the first step AdamW has no moments
            _check_state(optimizer)
        if restore_statistics is not None:
            restore_statistics(path / "resume" / MASK_STATISTICS)
    except Exception as error:  # of torch, its unpickler and safetensors, of many classes
        raise RunError(
            f"{path} is as it was written, but does not fit this run ({describe(error)}). Nothing was changed. Move it"
            " elsewhere: the same command continues from the one before it."
        ) from error


def _check_state(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError if an optimiser state is missing after some steps, or its moments do not fit a weight."""
    if not any(optimizer.state.values()):
        raise ValueError("the optimiser's state is empty")
    for group in optimizer.param_groups:
        for weight in group["params"]:
            moments = optimizer.state.get(weight)
            if not moments:
                continue
            shapes = {name: moment.shape for name, moment in moments.items()}
            names = ("momentum",) if group.get("orthogonal") else ("exp_avg", "exp_avg_sq")
            if shapes != {"step": torch.Size([])} | dict.fromkeys(names, weight.shape):
                raise ValueError(f"the optimiser's state of a weight of shape {tuple(weight.shape)} has {shapes}")
            if not moments["step"].item() >= 1:
                raise ValueError(f"the optimiser's state counts {moments['step'].item():g} steps")


class _DiskFile:
    """A file for torch.save that is written through mlsm/common/disk.py, whose calls tests can make fail."""

    def __init__(self, file):
        self.file, self.error = file, None

    def write(self, raw) -> int:
        try:
            disk.write(self.file, raw)
        except OSError as error:
            self.error = error
            raise
        return len(raw)

    def flush(self) -> None:
        """Do nothing: writes are not buffered."""


@contextmanager
def _new_file(path: Path):
    file = _DiskFile(disk.create(path))
    try:
        yield file
    except RuntimeError:  # torch finds its archive too short on closing, and hides the disk's error
        if file.error is not None:
            raise file.error from None
        raise
    finally:
        disk.close(file.file)


def _inspect(path: Path) -> tuple[str | None, dict]:
    """What is wrong with a checkpoint (None: nothing), and its state.

    Raises  RunError if a file cannot be read for a reason that may pass. If it counted as damaged, the run would start
            again from an older checkpoint
    """
    try:
        state = parse_json(disk.read_file(path / "state.json"), "state.json")
        if not isinstance(state, dict) or state.get("checksum") != _checksum(state):
            return "state.json was changed", {}
        if problem := find_problem(state, STATE):
            return f"state.json: {problem}", {}
        if not are_figures(state.get("held_out", {})):
            return "state.json: field held_out: expected an object of numbers, loss among them", {}
        if path.name != f"step-{state['step']:08d}":
            return f"state.json is of step {state['step']}", {}
        for name, expected in state["files"].items():
            if file_sha256(path / name) != expected:
                return f"{name} was cut or changed", {}
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and not disk.is_of_the_file(error):
            raise RunError(
                f"{path} cannot be read: {error}. Nothing was changed. Run the same command again; if this does not"
                f" pass, move {path.name} elsewhere: the same command continues from the one before it."
            ) from error
        return f"{type(error).__name__}: {error}", {}
    return None, state


def _checksum(state: dict) -> str:
    rest = {name: value for name, value in state.items() if name != "checksum"}
    return hashlib.sha256(utf8(canonical_json(rest))).hexdigest()
