"""The kinds of targets that stores can hold. A target describes one store: its name, and how a batch becomes rows.

    target = Lsp(config, teacher, layer, dictionary)
    name, target_json = target.describe_store(job)  # first part of its directory's name, content of its target.json
    target.prepare()
    hidden, = target.states(teacher, batch, [target])
    codes = target.code(hidden.rows_Nd)             # on the teacher's device
    columns = target.columns(codes, batch)          # on the host, as a shard holds them

To add a kind of store, write a class with what `Target` and `CodedTarget` name; docs/ARCHITECTURE.md lists the other
places. Not handled here: the stages in which this happens (encode.py), the commands (commands.py), the stores
themselves (stores.py).

Shapes: N coded tokens, d hidden width.
"""

from collections.abc import Sequence
from typing import Any, Protocol, Self

import numpy as np
import torch

from pipeline.batch import Hidden, TeacherBatch
from pipeline.job import Job
from shards.files import StoreFiles


class Target(Protocol):
    """The interface of every target: how it is made, and what names its store."""

    @staticmethod
    def load_teacher(job: Job) -> Any:
        """The teacher that reads the text, or None."""

    @classmethod
    def open(cls, job: Job, teacher: Any, files: StoreFiles, settings: dict) -> Self:
        """The target that a store was made for.

        settings  of its target.json
        Raises    StoreError when the store holds another dictionary or codebook than these name
        """

    def describe_store(self, job: Job) -> tuple[str, dict]:
        """The first part of the name of its store's directory, and the content of the store's target.json."""

    def save_copies(self, files: StoreFiles) -> None:
        """Keep a copy of its dictionary or codebook in its store."""


class CodedTarget(Target, Protocol):
    """The further interface of a target that needs a teacher.

    layer        layer of the teacher
    work         name of the `code` step in a unit's environment
    environment  entries for a unit's environment
    """

    layer: int
    work: str
    environment: dict

    def prepare(self) -> None:
        """Move the data for coding to the device, before the first batch."""

    @staticmethod
    def states(teacher: Any, batch: TeacherBatch, targets: Sequence[Any]) -> list[Hidden]:
        """The hidden states for `code`, for several targets of this class, from one pass of the teacher."""

    def code(self, rows_Nd: torch.Tensor) -> Any:
        """The codes of hidden states, on the teacher's device."""

    def tensors(self, codes: Any) -> tuple:
        """The tensors of codes on a GPU, for the stream that uses them next."""

    def columns(self, codes: Any, batch: TeacherBatch) -> dict[str, np.ndarray]:
        """Columns over all tokens of a batch, on the host. Statistics of the codes are added to the batch's block.

        codes  may be on a GPU; None if none of the batch's windows is coded
        """

    def variation(self, rows_Nd: torch.Tensor, exact_Nd: torch.Tensor, exact_teacher: Any) -> np.ndarray | None:
        """Total variation between the distributions that two teachers' hidden states give, on the host: (N,)."""
