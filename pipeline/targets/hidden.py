"""Turn hidden states into a shard's columns: int8 codes with a scale per row, or product quantisation.

Product quantisation (Jégou, Douze and Schmid 2011) cuts a row into pieces of equal length and stores for each piece the
number of the nearest of 256 centroids. Not handled here: the bytes of int8 codes (shards/codec.py), the sample for
learning centroids (learn.py).

Shapes: N coded tokens, T tokens end to end, d hidden width, b bytes of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from mlsm.common.disk import read_file
from mlsm.common.errors import EncodeError, describe
from pipeline.batch import Hidden, InputFormat, TeacherBatch, add_amounts, centred_rows
from pipeline.config import EncodeHiddenConfig
from pipeline.job import Job, load_teacher, name_of_dtype
from pipeline.stores import keep_copy
from shards import codec, copies
from shards.files import StoreFiles
from shards.members import read_array
from shards.schema import FORMAT_VERSION, HiddenLayout

if TYPE_CHECKING:
    from pipeline.teacher import Teacher

CENTROIDS = 256  # per piece, so that a centroid's number is one byte
VECTORS_A_CENTROID = 256  # most sample vectors per centroid, as faiss advises


@dataclass(frozen=True, eq=False)
class Codebook:
    """The centroids of product quantisation: float32 (b, 256, d / b)."""

    centroids: np.ndarray

    @property
    def fingerprint(self) -> str:
        return copies.codebook_fingerprint(self.centroids)

    @classmethod
    def train(cls, hidden_Nd: np.ndarray, pieces: int, seed: int) -> Self:
        """Centroids by faiss's k-means over the pieces of a sample, of which the first 65,536 rows are used.

        Raises  EncodeError when the sample has fewer rows than there are centroids
        """
        import faiss

        rows_Nd = np.ascontiguousarray(hidden_Nd[: CENTROIDS * VECTORS_A_CENTROID], np.float32)
        if len(rows_Nd) < CENTROIDS:
            raise EncodeError(
                f"--quantise pq needs {CENTROIDS} hidden states to learn as many centroids, but the sample has "
                f"{len(rows_Nd):,}. Give more text, or --quantise int8."
            )
        quantiser = faiss.ProductQuantizer(rows_Nd.shape[1], pieces, 8)
        quantiser.cp.seed, quantiser.cp.min_points_per_centroid = seed, 1
        quantiser.train(rows_Nd)
        return cls(faiss.vector_to_array(quantiser.centroids).reshape(pieces, CENTROIDS, -1))

    def encode(self, rows_Nd: np.ndarray) -> np.ndarray:
        """The numbers of the nearest centroids, uint8 (N, b)."""
        import faiss

        pieces, _, length = self.centroids.shape
        quantiser = faiss.ProductQuantizer(pieces * length, pieces, 8)
        faiss.copy_array_to_vector(self.centroids.ravel(), quantiser.centroids)
        return quantiser.compute_codes(np.ascontiguousarray(rows_Nd, np.float32))

    def save(self, directory: Path) -> None:
        np.save(directory / "centroids.npy", self.centroids)

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Load a codebook. Raises EncodeError when the directory has none."""
        path = directory / "centroids.npy"
        try:
            return cls(read_array(path, read_file(path), 3).copy())
        except (OSError, ValueError) as error:
            raise EncodeError(f"{directory} is not a codebook of product quantisation ({describe(error)})") from None


def provisional_codebook(config: EncodeHiddenConfig, width: int) -> Codebook | None:
    """Arbitrary centroids for measuring time and size; None for int8."""
    if config.quantise == "int8":
        return None
    assert config.bytes is not None
    return Codebook(np.zeros((config.bytes, CENTROIDS, width // config.bytes), np.float32))


class HiddenStates:
    """The teacher's unit-length hidden states of one layer, quantised by a Codebook or, with None, to int8."""

    work = "quantise"

    def __init__(self, config: EncodeHiddenConfig, teacher: "Teacher", layer: int, codebook: Codebook | None):
        self.config, self.teacher, self.layer, self.codebook = config, teacher, layer, codebook
        self.environment: dict = {}
        width = teacher.hidden_size
        if codebook is None:
            self.layout = HiddenLayout(width, "int8", width)
        else:
            self.layout = HiddenLayout(width, "pq", len(codebook.centroids))

    @staticmethod
    def load_teacher(job: Job) -> "Teacher":
        return load_teacher(job)

    @classmethod
    def open(cls, job: Job, teacher: "Teacher", files: StoreFiles, settings: dict) -> Self:
        is_pq = settings["quantise"]["name"] == "pq"
        codebook = Codebook(copies.load_codebook(files)) if is_pq else None
        return cls(job.config, teacher, settings["layer"], codebook)

    def describe_store(self, job: Job) -> tuple[str, dict]:
        teacher, layout = self.teacher, self.layout
        quantise: dict[str, Any] = {"name": layout.quantise}
        name = f"hidden-{Path(teacher.name).name}-l{self.layer}"
        if self.codebook is not None:
            quantise |= {"bytes": layout.bytes, "codebook": self.codebook.fingerprint}
            name = f"{name}-pq{layout.bytes}"
        settings = {
            "kind": "hidden",
            "format": FORMAT_VERSION,
            "windowing": job.rules,
            "teacher": teacher.fingerprint,
            "layer": self.layer,
            "width": layout.width,
            "quantise": quantise,
            "dtype": name_of_dtype(teacher),
        } | InputFormat.of(self.config, teacher).settings()
        if job.stored is not None:
            settings["hidden"] = job.stored.identity()
        lineage = {"teacher_name": teacher.name, "teacher_layers": teacher.num_layers}
        return name, job.target_json(settings, lineage)

    def save_copies(self, files: StoreFiles) -> None:
        if self.codebook is not None:
            keep_copy(files.codebook, lambda: copies.read_codebook(files), self.codebook.save)

    def prepare(self) -> None:
        pass

    @staticmethod
    def states(teacher: "Teacher", batch: TeacherBatch, targets: Sequence["HiddenStates"]) -> list[Hidden]:
        return centred_rows(teacher, batch, [(target.layer, None) for target in targets])

    def code(self, rows_Nd: torch.Tensor) -> torch.Tensor:
        return rows_Nd

    def tensors(self, codes: torch.Tensor) -> tuple:
        return (codes,)

    def columns(self, codes: torch.Tensor | None, batch: TeacherBatch) -> dict[str, np.ndarray]:
        layout, block = self.layout, batch.block
        hidden_Tb = np.zeros((len(batch.coded_T), layout.bytes), layout.dtype)
        marks_T = np.zeros(len(batch.coded_T), np.float32)
        if codes is None:
            return {"hidden": hidden_Tb, "marks": marks_T}
        rows_Nd, centroids = codes.cpu().numpy(), None
        if self.codebook is None:
            found, marks_N = codec.encode_hidden(rows_Nd)
        else:
            found, marks_N = self.codebook.encode(rows_Nd), np.ones(len(rows_Nd), np.uint8)
            centroids = self.codebook.centroids
        stored_Nd = codec.decode_hidden(layout, found, marks_N, centroids).rows_Md
        norms_N = np.linalg.norm(stored_Nd, axis=1)
        cosine_N = np.einsum("nd,nd->n", stored_Nd, rows_Nd) / np.maximum(norms_N, 1e-12)
        error = float(((stored_Nd - rows_Nd) ** 2).sum(dtype=np.float64))
        add_amounts(block.statistics, {"cosine": float(cosine_N.sum(dtype=np.float64)), "squared_error": error})
        sums = {"hidden_sum": rows_Nd.sum(0, dtype=np.float64)}
        sums["hidden_squares"] = np.einsum("nd,nd->d", rows_Nd, rows_Nd, dtype=np.float64)
        add_amounts(block.sums, sums)
        hidden_Tb[batch.coded_T], marks_T[batch.coded_T] = found, marks_N
        return {"hidden": hidden_Tb, "marks": marks_T}

    def variation(self, rows_Nd: torch.Tensor, exact_Nd: torch.Tensor, exact_teacher: "Teacher") -> None:
        return None  # no distributions; the states' distance is measured anyway
