"""`export-student`: a checkpoint of a run as an export; the run's kept checkpoints as revisions on the Hub.

A kept checkpoint already contains its export, which is copied. Other checkpoints only contain the weights to resume
from: the model is built from the run's config.json, which needs the run's store. Not handled here: the files of
an export (export.py, probe.py), the Hub (hub.py).
"""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import load as load_safetensors
from transformers import MODEL_MAPPING, AutoConfig

from mlsm.common.disk import read_file
from mlsm.common.durable import publish_directory
from mlsm.common.errors import RunError, ShardError, StoreError, describe
from mlsm.common.invocation import program
from mlsm.common.json_checks import is_number, parse_json
from mlsm.common.json_lines import damage, stream_json_lines
from mlsm.common.model_checks import check_counts, check_size, without_pooler
from mlsm.common.progress import silent
from mlsm.common.settings import settable
from shards.copies import write_files
from shards.reader import Store
from student.config import ProbeConfig, StudentConfig
from student.encoders.build import build_encoder
from student.encoders.libraries import libraries_record, recorded_libraries
from student.encoders.model import Student
from student.objectives import is_untied
from student.objectives.several_stores import build_objective
from student.probe import probe_task
from student.runs.checkpoint import Checkpoints, checkpoints_in, load_weights
from student.runs.config import ExportConfig
from student.runs.export import (
    AUTO_MAP,
    CODE_FILE,
    KNOWN_CODE,
    LINEAGE_FILE,
    OTHER_OUTPUT,
    check_export_place,
    export_student,
    is_export_file,
    writing,
)
from student.runs.hub import Revision, push
from student.runs.identity import find_description
from student.runs.probed import recorded_store
from student.task import TrainingTask

logger = logging.getLogger(__name__)

EXPORTS = Path("runs/exports")


def export_run(config: ExportConfig, progress: Callable[..., None] = silent, api: Any = None) -> dict:
    """Export a checkpoint, and push it if the settings say so.

    api      huggingface_hub.HfApi, or a stand-in
    Returns  run, step, kept (whether it is kept for good), export, dry_run; if it is pushed also repository,
             address (None before the push) and revisions: {branch, directory, files: name -> bytes}
    Raises   RunError if there is no such run or checkpoint, the output is in use, or the Hub refuses; WriteError
             if the output cannot be written
    """
    run = config.run or runs_with_checkpoints()[0]
    checkpoints, description = _open_run(run)
    path, state = _find(checkpoints, config.step)
    output = config.output or EXPORTS / f"{run.resolve().name}-{path.name}"
    if output.resolve().is_relative_to(run.resolve()):
        raise RunError(f"{output} is inside the run {run}, whose files must not change. {OTHER_OUTPUT}")
    check_export_place(output)
    if config.output is None:
        _refuse_another_run(output, description)
    report = {"run": str(run), "step": state["step"], "kept": _is_kept(path), "export": str(output)}
    with _reading(path):
        write = _with_terms(_writer(run, description, path, state, config.store), config)
        if not config.dry_run:
            with writing(output):
                publish_directory(output, write)
    if config.push_to_hub is not None:
        as_it_is = _is_kept(path) and config.license is None and not config.language
        main = Revision("main", path if config.dry_run and as_it_is else output, f"Step {state['step']}")
        kept = [path for path in checkpoints_in(checkpoints.directory) if _is_kept(path)]
        branches = [Revision(path.name, path, f"Step {int(path.name[5:])}") for path in kept]
        for branch in branches:
            if (found := checkpoints.whole(int(branch.branch[5:]))) is None:
                raise RunError(
                    f"{branch.directory} is damaged, so nothing was pushed. Put back a copy of it, or remove it."
                )
            if foreign := branch.files().keys() - _exported_files(*found).keys():
                raise RunError(
                    f"{branch.directory / min(foreign)} is no file of the export that was saved there, so nothing was"
                    f" pushed. Move it elsewhere."
                )
        if config.dry_run:
            report |= _rehearse(config.push_to_hub, branches, main, write)
        else:
            address = push(config.push_to_hub, [*branches, main], private=config.private, progress=progress, api=api)
            rows = [_row(revision) for revision in [*branches, main]]
            report |= {"repository": config.push_to_hub, "address": address, "revisions": rows}
    return report | {"dry_run": config.dry_run}


def runs_with_checkpoints() -> list[Path]:
    """All runs that have saved a checkpoint, the one with the newest first; RunError if there is none."""
    roots = (StudentConfig.root, ProbeConfig.root)
    found = [path for root in roots for path in Path(root).glob("*/checkpoints/step-*")]
    if not found:
        places = " or ".join(roots)
        raise RunError(f"no run with a checkpoint under {places}. Train one:  {program()} train-student")
    found.sort(key=lambda path: path.lstat().st_mtime_ns, reverse=True)
    return list(dict.fromkeys(path.parent.parent for path in found))


def _open_run(run: Path) -> tuple[Checkpoints, dict]:
    if not (run / "config.json").is_file() or not (run / "checkpoints").is_dir():
        raise RunError(
            f"{run} is not a run with checkpoints (config.json and checkpoints/). Give a directory under"
            f" {StudentConfig.root} or {ProbeConfig.root}."
        )
    if (description := find_description(run)) is None:
        raise RunError(
            f"{run / 'config.json'} is damaged; the checkpoints were not touched. Run the command that trains this run"
            " once more: it writes the file again."
        )
    return Checkpoints(run / "checkpoints"), description


def _refuse_another_run(output: Path, description: dict) -> None:
    """Raises RunError if an export is there whose run is another one of the same name, such as one of another study."""
    if not (output / LINEAGE_FILE).is_file():
        return
    held = parse_json(read_file(output / LINEAGE_FILE), output / LINEAGE_FILE)
    store = held.get("store") or {}
    of_run = (description["settings"], *(description["store"][name] for name in ("target", "plan")))
    if (held.get("settings"), store.get("target"), store.get("plan")) != of_run:
        raise RunError(f"{output} holds an export of another run. Nothing was changed. Give another --output.")


def _find(checkpoints: Checkpoints, wanted: str) -> tuple[Path, dict]:
    found = checkpoints.newest_whole() if wanted == "latest" else checkpoints.whole(int(wanted))
    if found is None:
        there = ", ".join(str(int(path.name[5:])) for path in checkpoints_in(checkpoints.directory)) or "none"
        raise RunError(
            f"{checkpoints.directory} has no whole checkpoint {wanted}; those there are: {there}."
            f" Give one of them, or `latest`."
        )
    return found


@contextmanager
def _reading(checkpoint: Path):
    """Raises RunError if a checkpoint disappears while it is read."""
    try:
        yield
    except OSError:
        if checkpoint.exists():
            raise
        raise RunError(f"the run replaced {checkpoint} while it was read. Run the same command again.") from None


def _is_kept(path: Path) -> bool:
    return (path / "config.json").is_file()


def _writer(run: Path, description: dict, path: Path, state: dict, places: Sequence[str] | None):
    """A function that writes the export into an existing directory. All that it needs is read before it is called."""
    if _is_kept(path):
        contents = _exported_files(path, state)
        return lambda directory: write_files(directory, contents)
    with _belonging(run, path):
        stores = _open_stores(run, description, places)
        task = _task(run, description, stores, path)
        model = task.build()
        load_weights(path, model)
    lineage = {name: state[name] for name in ("step", "tokens", "flops", "held_out", "held_out_step")}
    lineage |= {"settings": description["settings"], "baseline": _baseline(run, state["held_out_step"])}
    lineage |= libraries_record(recorded_libraries(description))
    if (start := description["operational"].get("continued_from")) is not None:
        lineage["continued_from"] = start
    return lambda directory: task.export(model.eval(), directory, task.objective, stores[0], lineage)


def _with_terms(write, config: ExportConfig):
    """A function that writes an export like `write`, and adds licence and languages from the settings to its card."""
    terms = {"license": config.license, "language": list(config.language)}
    # Values of JSON are values of YAML; without its quotes, Norwegian (no) would be false.
    lines = "".join(f"{name}: {json.dumps(value)}\n" for name, value in terms.items() if value)

    def write_all(directory):
        write(directory)
        card = directory / "README.md"
        text = card.read_bytes() if card.is_file() else b""
        if not text.startswith(b"---\n"):
            raise RunError(
                f"{config.run} exports a model card without metadata, so --license and --language cannot be added."
                f" Nothing was changed. Leave them out, or give the step of another checkpoint."
            )
        card.write_bytes(b"---\n" + lines.encode() + text[4:])

    return write_all if lines else write


def _exported_files(path: Path, state: dict) -> dict[str, bytes]:
    """The export in a kept checkpoint, name -> bytes, without files that were added to the directory later.

    Raises  RunError if a file has changed since the checkpoint was looked at, weights or settings cannot be read, or
            the code that transformers may run was not written by this package
    """
    contents = {}
    for name, expected in state["files"].items():
        if is_export_file(name):
            contents[name] = read_file(path / name)
            if hashlib.sha256(contents[name]).hexdigest() != expected:
                raise RunError(f"{path / name} changed while it was read. Run the same command again.")
            if name == CODE_FILE and expected not in KNOWN_CODE:
                raise RunError(
                    f"{path / name} is not the code that any version up to this one exports, so nothing was exported."
                    f" Upgrade mlsm if a later version trained the run; else do not trust it, and take another run."
                )
            if name in ("config.json", "tokenizer_config.json"):
                try:
                    described = parse_json(contents[name], path / name)
                except ShardError as error:
                    raise RunError(f"{error}. Nothing was exported. Give the step of another checkpoint.") from None
                named = described.get("auto_map") if isinstance(described, dict) else None
                if named is not None and not (isinstance(named, dict) and named.items() <= AUTO_MAP.items()):
                    raise RunError(
                        f"{path / name} names code that this package did not write (auto_map), so nothing was exported."
                        f" Do not trust the run, and use another one."
                    )
            if name.endswith(".safetensors"):
                try:
                    if not load_safetensors(contents[name]):
                        raise ValueError("it is empty")
                except Exception as error:  # of safetensors, which raises KeyError, too
                    raise RunError(
                        f"{path / name} has the right hash, but holds no weights ({describe(error)}). Nothing was"
                        f" exported. Give the step of another checkpoint."
                    ) from error
    return contents


@contextmanager
def _belonging(run: Path, path: Path):
    """Raises RunError if the libraries cannot build what config.json describes, or the weights do not fit it."""
    try:
        yield
    except (RunError, StoreError, ShardError):
        raise
    except Exception as error:  # of transformers, safetensors and torch, of many classes
        if isinstance(error, OSError) and not path.exists():
            raise  # see _reading
        raise RunError(
            f"{run / 'config.json'} and {path} do not belong together, or one is damaged ({describe(error)}). Nothing"
            " was changed. Put back copies of them, or give the step of a kept checkpoint."
        ) from error


def _task(run: Path, description: dict, stores: list[Store], path: Path) -> TrainingTask:
    """The model that the run trains, built from its own description and the checkpoint's sizes, without the Hub."""
    settings, architecture = description["settings"], description["architecture"]
    if "probe_input" in settings:
        return _probe_task(run, description, stores[0])
    weights, kappa = settings.get("store_weights", ()), settings.get("kappa")
    objective = build_objective(settings["objective"], stores, weights, kappa=kappa, untied=is_untied(settings))

    def build() -> Student:
        check_counts(architecture, path / "resume")
        hf_config = AutoConfig.for_model(**architecture)
        check_size(MODEL_MAPPING[type(hf_config)], hf_config, path / "resume", **without_pooler(hf_config))
        encoder = build_encoder(hf_config, settings["seed"])
        return Student(encoder, objective.outputs, tied=objective.tied, seed=settings["seed"])

    return TrainingTask("export-student", objective, architecture, build, export_student)


def _probe_task(run: Path, description: dict, store) -> TrainingTask:
    settings = description["settings"] | {"student": description["operational"]["student"]}
    settings["segments"] = "auto" if "segments" in settings else "never"
    known = settable(ProbeConfig)
    config = ProbeConfig(**{name: value for name, value in settings.items() if name in known})
    task = probe_task(config, store)
    if task.architecture != description["architecture"]:
        raise RunError(f"{config.student} is no longer the student that {run} probes: its weights have changed since.")
    return task


def _open_stores(run: Path, description: dict, places: Sequence[str] | None) -> list[Store]:
    recorded, expected = description["operational"], description["store"]
    if places is None:
        places = [recorded_store(run, place) for place in (recorded["store"], *recorded.get("other_stores", ()))]
    stores = [Store.open(place, expected["plan"]) for place in places]
    targets = [expected["target"], *description["settings"].get("other_targets", ())]
    if [store.target_id for store in stores] != targets:
        which, those = (
            ("is not the store", "that") if len(targets) == 1 else ("are not the stores", "those, in its order,")
        )
        raise RunError(
            f"{', '.join(places)} {which} of {run}. Give {those} as --store, or the step of a kept checkpoint."
        )
    stores[0].read_tokenizer()  # refuses another one before anything is built
    return stores


def _baseline(run: Path, evaluated: int) -> dict:
    """Held-out figures of the constant prediction; empty if the run's log does not have them.

    evaluated  the step after which the student's figures were measured. Those of the newest process that started before
               it are returned: they are of the same windows, and a later process may have other --eval-windows
    """
    log, newest = run / "log.jsonl", {}
    damaged: dict[int, bytes] = {}
    for line in stream_json_lines(log, damaged) if log.is_file() else ():
        figures = line.get("baseline")
        is_before = line["step"] <= max(0, evaluated - 1)
        if is_before and isinstance(figures, dict) and all(map(is_number, figures.values())):
            newest = figures
    if damaged:
        logger.warning(damage(log, damaged))
    return newest


def _rehearse(repository: str, branches: list[Revision], main: Revision, write) -> dict:
    """A list of what would be pushed. If `main` is not a kept checkpoint, it is written to learn its sizes, and
    removed."""
    rows = [*map(_row, branches), _row(main)]
    if main.directory not in [branch.directory for branch in branches]:
        with TemporaryDirectory() as temporary:
            with writing(Path(temporary)):
                write(Path(temporary))
            rows[-1]["files"] = main._replace(directory=Path(temporary)).files()
    return {"repository": repository, "address": None, "revisions": rows}


def _row(revision: Revision) -> dict:
    return {"branch": revision.branch, "directory": str(revision.directory), "files": revision.files()}
