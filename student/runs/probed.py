"""Find the student that a probe reads, and its store, without loading either, so that --help answers at once.

    with_student_and_store(ProbeConfig())    # the newest finished student with LSPs, and the store it learned from

Not handled here: the probe (student/probe.py), loading a student (student/lsp_model.py).
"""

import logging
import os
import re
from pathlib import Path

from mlsm.common.errors import RunError
from mlsm.common.invocation import program
from mlsm.common.settings import revise
from mlsm.common.text import shell_quote
from shards.reader import is_url
from student.config import ProbeConfig, StudentConfig
from student.runs.identity import find_description

logger = logging.getLogger(__name__)

LSP_HEAD = "lsp_head.safetensors"  # HEAD_FILE of student/encoders/modeling_mlsm.py, which imports torch


def with_student_and_store(config: ProbeConfig) -> ProbeConfig:
    """Fill in the settings' student (by default the newest) and store (by default the student's own).

    Raises  RunError if one is missing
    """
    student, store = config.student, config.store
    if student is None:
        student = str(finished_students()[0])
        logger.info("student %s (the newest finished run)", student)
    student = os.path.expanduser(student)
    export_of(student)  # an error of the student comes before one of the store
    if store is None:
        store = _store_of(Path(student))
        logger.info("store %s (the student's own)", store)
    return revise(config, student=student, store=store)


def finished_students() -> list[Path]:
    """The finished runs that have LSP outputs, the newest first.

    Raises  RunError if there is none
    """
    root = StudentConfig.root
    found = [head.parent.parent for head in Path(root).glob(f"*/export/{LSP_HEAD}")]
    if not found:
        raise RunError(f"no finished student with LSP outputs under {root}. Train one:  {program()} train-student")
    return sorted(found, key=lambda run: (run / "export" / LSP_HEAD).stat().st_mtime_ns, reverse=True)


def _store_of(student: Path) -> str:
    """The store that a run, or the run of an export or a checkpoint, was trained on."""
    for directory in (student, *student.absolute().parents[:2]):
        store = (find_description(directory) or {}).get("operational", {}).get("store")
        if store:
            return recorded_store(directory, store)
    if not student.exists():
        raise RunError(
            f"there is no {student} here: pass the directory of a student's run. If it is a student on the Hub, name a"
            " store with its tokenizer: --store"
        )
    raise RunError(f"{student} is not inside a run that names its store. Name a store with its tokenizer: --store")


def recorded_store(run: Path, place: str) -> str:
    """The store that a run's config.json names. Raises RunError if it is not there."""
    if is_url(place) or os.path.exists(place):
        return place
    why = "which is not there" if Path(place).is_absolute() else "relative to another directory"
    raise RunError(f"{run} was trained on {place}, {why}: name that store with --store.")


def export_of(source: str | Path) -> str | Path:
    """The export in a finished run's directory; any other source is returned as it is.

    Raises RunError if a run is unfinished, or there is no such directory and the name cannot be one on the Hub
    """
    path = Path(os.path.expanduser(source))
    if (path / "export").is_dir():
        return path / "export"
    if (path / "checkpoints").is_dir() or (path / "log.jsonl").is_file():
        what = (
            "has no export; run its command again" if (path / "result.json").is_file() else "is unfinished; finish it"
        )
        raise RunError(
            f"{source} {what}, or pass the directory that this writes:  {program()} export-student"
            f" {shell_quote(source)}"
        )
    if path.is_dir():
        return path if str(source).startswith("~") else source
    has_hub_form = re.fullmatch(r"(\w[\w.-]*/)?\w[\w.-]*", str(source)) is not None  # NAME or SOMEONE/NAME
    is_below_a_directory = "/" in str(source) and path.parent.is_dir()
    if not has_hub_form or is_below_a_directory:
        raise RunError(
            f"no such directory: {source}. Expected a finished run, its export, a kept checkpoint or a Hub id."
        )
    return source
