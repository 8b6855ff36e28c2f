"""The parts of a study as command lines: a makefile, or a script that hands them to Slurm with what each waits for.

    print(as_make(parts, directory))        # make -j4 -f study.mk
    print(as_slurm(parts))                  # bash study.sh

A name that another part makes and that ends with digits stands in a command as a pattern, which the shell that runs the
command completes. Left out: what a job needs of a cluster (partition, time, GPUs): Slurm takes it from the environment,
SBATCH_PARTITION and the like.
"""

import dataclasses
import shlex
from pathlib import Path
from typing import Any

from common.invocation import program
from common.settings import is_word
from evaluation.studies.protocol.description import SETTINGS
from evaluation.studies.protocol.parts import Made, Part
from student.config import OPERATIONAL

TRAININGS = ("train-student", "train-probe")


def command_line(part: Part) -> str:
    """The command of a part as one types it."""
    fields = {field.name: field for field in dataclasses.fields(SETTINGS[part.verb]) if field.init}
    values = part.values
    if part.verb in TRAININGS:  # all that decides the outcome; otherwise the recipe that made the store says some of it
        values = {name: field.default for name, field in fields.items() if name not in OPERATIONAL} | values
    words, flags = [], []
    for name, value in values.items():
        field = fields[name]
        if value is None:
            continue
        if isinstance(value, bool):
            flags.append(f"--{'' if value else 'no-'}{name.replace('_', '-')}")
        elif is_word(field):
            words.append(_as_words(value))
        else:
            flags.append(f"--{name.replace('_', '-')} {_as_words(value)}")
    return " ".join([program(), part.verb, *words, *flags])


def as_make(parts: list[Part], directory: Path) -> str:
    """A makefile. A part that ended well leaves a stamp in the study's directory, and is not begun again."""
    done = directory / "done"
    stamps = {part.name: f"{done}/{part.name}" for part in parts}
    lines = [f"all: {' '.join(stamps.values())}", ""]
    for part in parts:
        needs = " ".join(stamps[name] for name in part.needs if name in stamps)
        lines += [
            f"{stamps[part.name]}: {needs}".rstrip(),
            "\t" + command_line(part).replace("$", "$$"),
            "\t@mkdir -p $(@D) && touch $@",
            "",
        ]
    return "\n".join([*lines, ".PHONY: all"])


def as_slurm(parts: list[Part]) -> str:
    """A shell script that gives every part to sbatch, to wait until those that it needs have ended well."""
    jobs = {part.name: f"job{number}" for number, part in enumerate(parts, 1)}
    lines = ["#!/bin/sh", "set -e"]
    for part in parts:
        waits = ":".join(f"${jobs[name]}" for name in part.needs if name in jobs)
        after = f" --dependency=afterok:{waits}" if waits else ""
        wrap = f"--wrap={shlex.quote(command_line(part))}"
        lines.append(f"{jobs[part.name]}=$(sbatch --parsable --job-name={shlex.quote(part.name)}{after} {wrap})")
    return "\n".join(lines)


def _as_words(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(_as_words, value))
    if isinstance(value, Made):
        return f"{shlex.quote(str(value.pattern.parent))}/{value.pattern.name}"  # not quoted: the shell completes it
    return shlex.quote(str(value))
