"""Hidden states to what a shard keeps of them: int8 codes with a scale per row, or product-quantised.

Product quantisation (Jégou, Douze and Schmid 2011) cuts a row into pieces of equal length and keeps of each the number
of the nearest of 256 centroids. Left out: how the codes become columns (shards/codec.py), the sample that centroids are
learned from (codebooks.py).

Shapes: N coded tokens, T tokens end to end, d hidden width, b bytes of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import torch

from common.disk import read_file
from common.errors import EncodeError, describe
from pipeline.coding.batch import Batch, Output, add_amounts
from pipeline.coding.coder import TeacherCoder
from pipeline.coding.hidden import Hidden, centred_rows
from pipeline.config import EncodeHiddenConfig
from shards import codec, copies
from shards.members import read_array
from shards.schema import HiddenLayout

if TYPE_CHECKING:
    from pipeline.teacher import Teacher

CENTROIDS = 256  # of a piece: its number is one byte
VECTORS_A_CENTROID = 256  # of the sample, at most: what faiss itself advises


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
                f"--quantise pq needs {CENTROIDS} hidden states to learn as many centroids from, but the sample has "
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
        """Raises EncodeError when the directory holds none."""
        path = directory / "centroids.npy"
        try:
            return cls(read_array(path, read_file(path), "<f4", 3).copy())
        except (OSError, ValueError) as error:
            raise EncodeError(f"{directory} is no codebook of product quantisation ({describe(error)})") from None


def provisional_codebook(config: EncodeHiddenConfig, width: int) -> Codebook | None:
    """Centroids without meaning, to measure with; None for int8."""
    if config.quantise == "int8":
        return None
    assert config.bytes is not None
    return Codebook(np.zeros((config.bytes, CENTROIDS, width // config.bytes), np.float32))


class HiddenCoder(TeacherCoder):
    """Blocks of windows to blocks with the hidden state of every token; an Output's dictionary is its Codebook, or
    None for int8."""

    WORK = "quantise"
    config: EncodeHiddenConfig

    def read_states(self, teacher: "Teacher", batch: Batch, outputs: Sequence[int]) -> dict[int, Hidden]:
        wanted = [(self.outputs[output].layer, None) for output in outputs]
        return dict(zip(outputs, centred_rows(teacher, batch, wanted), strict=True))

    def _code(self, rows_Nd, output):
        return rows_Nd

    def _arrays(self, codes):
        return (codes,)

    def measure_variation(
        self, rows_Nd: torch.Tensor, exact_Nd: torch.Tensor, exact_teacher: "Teacher", output: int
    ) -> None:
        return None  # there are no distributions; how far the states differ is measured in any case

    def _rows(self, codes, block):
        rows_Nd = codes.cpu().numpy()
        layout = layout_of(self.outputs[block.output], rows_Nd.shape[1])
        if layout.quantise == "int8":
            found, marks_N, codebook = *codec.encode_hidden(rows_Nd), None
        else:
            codebook = self.outputs[block.output].dictionary
            found, marks_N = codebook.encode(rows_Nd), np.ones(len(rows_Nd), np.uint8)
            codebook = codebook.centroids
        stored_Nd = codec.decode_hidden(layout, found, marks_N, codebook).rows_Md
        norms_N = np.linalg.norm(stored_Nd, axis=1)
        cosine_N = np.einsum("nd,nd->n", stored_Nd, rows_Nd) / np.maximum(norms_N, 1e-12)
        error = float(((stored_Nd - rows_Nd) ** 2).sum(dtype=np.float64))
        add_amounts(block.statistics, {"cosine": float(cosine_N.sum(dtype=np.float64)), "squared_error": error})
        sums = {"hidden_sum": rows_Nd.sum(0, dtype=np.float64)}
        sums["hidden_squares"] = np.einsum("nd,nd->d", rows_Nd, rows_Nd, dtype=np.float64)
        add_amounts(block.sums, sums)
        return found, marks_N

    def _columns(self, rows, batch):
        layout = layout_of(self.outputs[batch.block.output], self.teacher.hidden_size)
        hidden_Tb = np.zeros((len(batch.coded_T), layout.bytes), layout.dtype)
        marks_T = np.zeros(len(batch.coded_T), np.float32)
        if rows is not None:
            hidden_Tb[batch.coded_T], marks_T[batch.coded_T] = rows
        return {"hidden": hidden_Tb, "marks": marks_T}


def layout_of(output: Output, width: int) -> HiddenLayout:
    """How the states of an output are stored."""
    if output.dictionary is None:
        return HiddenLayout(width, "int8", width)
    return HiddenLayout(width, "pq", len(output.dictionary.centroids))
