"""What a run trains, as far as the trainer need not know: a student (here) or a probe of one (probe.py).

Left out: the training itself (trainer.py).
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from student.config import StudentConfig
from student.encoders import build_encoder, encoder_config
from student.export import export_student
from student.model import Student
from student.objectives import OBJECTIVES, Objective


class Task(NamedTuple):
    """The parts of a run that depend on what is trained."""

    name: str
    """of its command, for the progress display"""
    objective: Objective
    architecture: dict
    """JSON values that decide what is built, beside the settings; part of the run's identity"""
    build: Callable[[], nn.Module]
    """() -> the untrained model, float32, on the CPU; it has an `encoder`, and `forward` as a Student's"""
    export: Callable[..., None]
    """(model, directory, objective, store, lineage) -> None: writes what a user loads into an existing directory"""


def student_task(config: StudentConfig, store) -> Task:
    """Train an encoder by one objective. Raises RunError where settings and store do not belong together."""
    objective = OBJECTIVES[config.objective](store, config.kappa)
    hf_config = encoder_config(config, store)

    def build() -> Student:
        encoder = build_encoder(hf_config, config.seed, config.initial_weights)
        return Student(encoder, objective.outputs, tied=objective.tied, seed=config.seed)

    return Task("train-student", objective, hf_config.to_diff_dict(), build, export_student)
