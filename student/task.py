"""What a run trains: a student (here) or a probe of one (probe.py). The trainer is the same for both.

Not handled here: the training itself (train.py).
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, cast

from torch import nn

from mlsm.common.errors import RunError
from mlsm.common.model_checks import token_types
from shards.reader import Store
from student.batches import store_has_pairs
from student.config import StudentConfig
from student.encoders.build import encoder_config
from student.encoders.model import Student, build_student
from student.encoders.stock import copy_head, has_known_head, ignores_activation
from student.masks.config import UNIFORM
from student.masks.table import MaskTable
from student.objectives import OBJECTIVES
from student.objectives.base import Objective
from student.objectives.several_stores import build_objective, open_beside
from student.runs.export import export_student

logger = logging.getLogger(__name__)
_WHOLE_WINDOW_TARGETS = (
    "--documents-apart: the store was encoded without it, so the targets come from a teacher that saw the whole window,"
    " while the student sees one document at a time. Encode with --documents-apart for targets of each document alone."
)
_APART_TARGETS = (
    "the store was encoded with --documents-apart, so the targets come from a teacher that saw each document alone,"
    " while the student sees the whole window. Give --documents-apart to let it see what the teacher saw."
)
_MASKED_TARGETS = (
    "--positions all: the store was encoded with --masked, so the teacher saw each token hidden, while the student sees"
    " all. Encode without --masked for targets of the text as the student sees it."
)


class TrainingTask(NamedTuple):
    """The parts of a run that depend on what is trained."""

    name: str
    """name of its command, for the progress display"""
    objective: Objective
    architecture: dict
    """JSON values that, with the settings, determine the model; part of the run's identity"""
    build: Callable[[], nn.Module]
    """() -> the untrained model, float32, on the CPU; it has an `encoder`, and `forward` as a Student's"""
    export: Callable[..., None]
    """(model, directory, objective, store, lineage) -> None: writes the export into an existing directory"""
    segments: bool = False
    """whether the encoder reads which sentence of a pair a token belongs to"""

    def settings(self, config: StudentConfig, tables: Sequence[MaskTable | None]) -> dict:
        """The settings that determine what is trained: those of the configuration, and those decided here.

        tables  of mask weights, in the order in which the run uses them: content identifies them, not their paths
        """
        found = config.identity() | self.objective.identity()
        if self.segments:
            found["segments"] = True
        if self.objective.other_stores:
            found["other_targets"] = [store.target_id for store in self.objective.other_stores]
        if any(tables):
            names = [UNIFORM if table is None else table.name for table in tables]
            found["mask_weights"] = names if len(names) > 1 else names[0]
        return found


def student_task(config: StudentConfig, store: Store) -> TrainingTask:
    """Train an encoder by one objective. Raises RunError if settings and stores do not belong together.

    store  the first store to learn from; the others are opened here
    """
    stores = [store, *open_beside(store, config.stores[1:])]
    objective = build_objective(
        config.objective,
        stores,
        config.weights,
        kappa=config.kappa,
        untied=config.untied,
        **{name: getattr(config, name) for name in OBJECTIVES[config.objective].settings},
    )
    for one in stores if "ids" not in objective.kinds else ():  # only stored targets have a teacher
        if config.documents_apart != one.settings.get("documents_apart", False):
            logger.info(_WHOLE_WINDOW_TARGETS if config.documents_apart else _APART_TARGETS)
        if config.positions == "all" and one.settings.get("masked_passes"):
            logger.info(_MASKED_TARGETS)
    hf_config = encoder_config(config, store)
    if objective.token_columns is not None and ignores_activation(hf_config):
        raise RunError(
            f"{config.encoder_source}: its hidden_act is {hf_config.hidden_act}, but transformers always computes gelu"
            f" in the masked-LM head of a {hf_config.model_type}, so an export would not predict what the student does."
            " Set hidden_act to gelu in its config.json, or use an encoder of another family, such as bert."
        )

    if objective.token_columns is not None and not has_known_head(hf_config):
        logger.warning(
            "the export will have no head that predicts words: the layout of transformers' head of a %s is not known"
            " (mlsm docs exports)",
            hf_config.model_type,
        )

    def build() -> Student:
        student = build_student(config, store, objective)
        if config.continue_head:
            copy_head(student, cast(Path, config.initial_weights), objective.token_columns)
        return student

    segments = config.segments == "auto" and store_has_pairs(store) and token_types(hf_config) >= 2
    return TrainingTask("train-student", objective, hf_config.to_diff_dict(), build, export_student, segments)
