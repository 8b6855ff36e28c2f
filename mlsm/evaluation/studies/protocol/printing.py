"""The parts of a study as command lines: a makefile, or a script that submits them to Slurm with their dependencies.

    print(as_make(parts, settings))         # make -j4 -f study.mk
    print(as_slurm(parts, settings))        # bash study.sh

If a command needs a directory whose name ends in digits that are not known yet, it contains a pattern, which the shell
expands. The last command is the study itself, which finds all parts finished and writes the report. The scripts do not
set a job's resources (partition, time, GPUs): Slurm takes them from environment variables such as SBATCH_PARTITION.
"""

import re
import shlex
from typing import Any

from mlsm.common.errors import EXIT_QUARANTINE
from mlsm.common.invocation import program
from mlsm.common.settings import is_word, settable
from mlsm.evaluation.comparison.config import CompareConfig
from mlsm.evaluation.studies.protocol.config import StudyConfig
from mlsm.evaluation.studies.protocol.description import SETTINGS, TRAININGS
from mlsm.evaluation.studies.protocol.parts import Made, Part
from mlsm.recipes.reading import OWN_MATERIAL
from student.config import OPERATIONAL


def command_line(part: Part) -> str:
    """The command of a part, as typed in a shell."""
    fields = settable(SETTINGS[part.verb])
    values = part.values
    if part.verb in TRAININGS:  # all settings that matter; otherwise some would come from the store's recipe
        values = {name: field.default for name, field in fields.items() if name not in OPERATIONAL} | values
    elif "corpus" in fields and OWN_MATERIAL.isdisjoint(values):  # otherwise the demonstration's recipe would apply
        values = {"corpus": fields["corpus"].default} | values
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


def report_line(settings: StudyConfig) -> str:
    """The command that compares all results and writes the report."""
    words = ["study", "--recipe", settings.recipe, "--output", settings.directory]
    words += [] if settings.data is None else ["--data-dir", settings.data]
    words += ["--only", *settings.only] if settings.only else []
    return f"{program()} {_as_words(tuple(words))}"


def compare_line(settings: CompareConfig) -> str:
    """The command that prints the tables of the report."""
    words = ["compare", *settings.results, *(["--paper"] if settings.paper else [])]
    for flag, files in (("--diagnostic", [settings.diagnostic]), ("--intruders", settings.intruders)):
        words += [flag, *files] if any(files) else []
    return f"{program()} {_as_words(tuple(words))}"


def as_make(parts: list[Part], settings: StudyConfig) -> str:
    """A makefile. A part that succeeded leaves a stamp file in the study's directory and is not started again."""
    files = {part.name: settings.directory / "done" / part.name for part in parts}
    stamps = {name: re.sub(r"([\s#%:\\])", r"\\\1", str(file)).replace("$", "$$") for name, file in files.items()}
    lines = [f"all: {' '.join(stamps.values())}", _in_make(_tolerant(report_line(settings))), ""]
    for part in parts:
        file = files[part.name]
        needs = " ".join(stamps[name] for name in part.needs if name in stamps)
        stamp = f"@mkdir -p {shlex.quote(str(file.parent))} && touch {shlex.quote(str(file))}"
        lines += [f"{stamps[part.name]}: {needs}".rstrip(), _in_make(_command(part)), _in_make(stamp), ""]
    return "\n".join([*lines, ".PHONY: all"])


def _command(part):
    """The command of a part, for makefiles and scripts that continue only after a success."""
    return _tolerant(command_line(part)) if part.verb.startswith("encode-") else command_line(part)


def _tolerant(command):
    """A command whose exit for quarantined documents counts as success, as in `study`."""
    return f"{command} || test $? -eq {EXIT_QUARANTINE}"


def _in_make(command):
    return "\t" + command.replace("$", "$$")


def as_slurm(parts: list[Part], settings: StudyConfig) -> str:
    """A shell script that submits every part to sbatch, to start after the parts that it needs have succeeded."""
    jobs = {part.name: f"job{number}" for number, part in enumerate(parts, 1)}
    lines = [
        "#!/bin/sh",
        "# The jobs' partition, time and GPUs come from SBATCH_PARTITION, SBATCH_TIMELIMIT, SBATCH_GPUS and the like.",
        "# Run this again after a failure, when the jobs that wait in vain are cancelled: finished parts end at once.",
        "set -e",
    ]
    for part in parts:
        waits = ":".join(f"${jobs[name]}" for name in part.needs if name in jobs)
        after = f" --dependency=afterok:{waits}" if waits else ""
        wrap = f"--wrap={shlex.quote(_command(part))}"
        lines.append(f"{jobs[part.name]}=$(sbatch --parsable --job-name={shlex.quote(part.name)}{after} {wrap})")
    after = ":".join(f"${job}" for job in jobs.values())
    wrap = f"--wrap={shlex.quote(_tolerant(report_line(settings)))}"
    return "\n".join([*lines, f"sbatch --parsable --job-name=report --dependency=afterok:{after} {wrap}"])


def _as_words(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(_as_words, value))
    if isinstance(value, Made):
        return f"{shlex.quote(str(value.pattern.parent))}/{value.pattern.name}"  # not quoted: the shell expands it
    return shlex.quote(str(value))
