"""LSPs of vectors that belong to no text: patches of images (encode-images), or the rows of any .npy file.

    view = VectorView(dictionary, Path("vectors.npy"), most=2_000_000, progress)
    view.overview(16, 3), view.lsp(7)

The vectors are coded with the dictionary, at the λ that it was learned with and as exactly as encode-lsp codes tokens,
and each code is divided by its sum. All that is said about LSPs follows from that sample: a patch takes the place of a
token and an image that of its document. Not handled here: the pages (vector_pages.py).

Shapes: N sampled vectors, K LSPs, d width.
"""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import numpy as np

from mlsm.common.disk import read_file
from mlsm.common.errors import InspectionError, describe
from mlsm.common.invocation import program
from mlsm.common.json_checks import parse_json
from mlsm.common.text import printable, shell_quote
from mlsm.evaluation.inspection.lsps import statistics
from mlsm.evaluation.inspection.lsps.neighbours import describe_nearest, nearest_atoms
from mlsm.evaluation.inspection.lsps.sample import Sample
from pipeline.config import EncodeConfig
from pipeline.dictionary import Dictionary
from pipeline.dictionary.vectors import open_vectors, refuse_unusable, unit_length
from pipeline.images import INDEX
from pipeline.solvers import nonneg_lasso, prepare

HEAVIEST_IMAGES = 8
ROWS_AT_ONCE = 16_384


def _read_index(file):
    """The grid and the images in the index that encode-images wrote next to its vectors."""
    try:
        index = parse_json(read_file(file), file)
        (rows, columns), images = index["grid"], index["images"]
        if not all(type(count) is int and count > 0 for count in (rows, columns)):
            raise ValueError("its grid is not two counts")
        if not (isinstance(images, list) and all(isinstance(name, str) for name in images)):
            raise ValueError("its images are not a list of names")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InspectionError(f"{file} is damaged ({describe(error)}). Encode the images again.") from None
    return (rows, columns), images


class VectorView(statistics.SampleView):
    """The LSPs of vectors.

    file   a .npy file of vectors; a file made by encode-images has its index of the images next to it
    most   vectors to read, in whole images (at least one) evenly over all
    grid   rows and columns of patches of an image
    names  of the images, the last two parts of their paths; empty if the rows have only numbers
    Raises InspectionError if the vectors do not fit the dictionary; ValueError if they are no numbers
    """

    def __init__(self, dictionary: Dictionary, file: Path, most: int, progress: Callable[..., None]):
        self.dictionary, self.file, self.progress = dictionary, file, progress
        self.grid, self.names = (1, 1), list[str]()
        if (index_file := file.with_suffix(INDEX)).is_file():
            self.grid, images = _read_index(index_file)
            self.names = [printable("/".join(Path(image).parts[-2:])) for image in images]
        try:
            vectors_Nd = open_vectors(file)
            refuse_unusable(vectors_Nd, file)
        except ValueError as error:
            raise InspectionError(f"--vectors {error}") from None
        if self.names and len(self.names) * self.grid[0] * self.grid[1] != len(vectors_Nd):
            raise InspectionError(
                f"{index_file} names {len(self.names):,} images of {self.grid[0]} x {self.grid[1]} patches, and {file}"
                f" holds {len(vectors_Nd):,} vectors. Encode the images again."
            )
        if not len(vectors_Nd):
            raise InspectionError(f"--vectors {file} has no vectors. Pass a file that has some.")
        if vectors_Nd.shape[1] != dictionary.atoms_Kd.shape[1]:
            raise InspectionError(
                f"--vectors {file}: vectors of width {vectors_Nd.shape[1]}, but the dictionary's atoms have width "
                f"{dictionary.atoms_Kd.shape[1]}. Pass vectors of the encoder and layer that it was learned from."
            )
        if dictionary.center is not None:
            raise InspectionError(
                f"the dictionary was learned with --center {dictionary.centering} from a teacher's hidden states, but "
                f"the vectors in {file} are not centred in this way. Learn a dictionary from them:  "
                f"{program()} learn-dictionary --hidden {shell_quote(file)}"
            )
        self.lam = dictionary.settings.get("lam", EncodeConfig.lam)  # an imported one does not say
        self.sample = self._code(vectors_Nd, most)

    def _code(self, vectors_Nd, most):
        """The LSPs of whole images spread over the file, as a Sample."""
        patches = self.grid[0] * self.grid[1]
        chosen = np.arange(0, len(vectors_Nd) // patches, -(-len(vectors_Nd) // max(most, patches)))
        rows = (chosen[:, None] * patches + np.arange(patches)).ravel()
        atoms_Kd = self.dictionary.atoms_Kd
        how, parts = {"gram_KK": prepare(atoms_Kd), "tol": min(EncodeConfig.tolerance, self.lam / 2)}, []
        for start in range(0, len(rows), ROWS_AT_ONCE):
            some = rows[start : start + ROWS_AT_ONCE]
            parts.append(nonneg_lasso(unit_length(vectors_Nd[some], some), atoms_Kd, self.lam, **how))
            self.progress("codes", min(start + ROWS_AT_ONCE, len(rows)), len(rows), unit="vectors")
        nnz = np.concatenate([np.diff(codes.indptr) for codes in parts])
        weights = np.concatenate([codes.values for codes in parts]).astype(np.float64)
        sums_N = np.bincount(np.repeat(np.arange(len(rows)), nnz), weights, len(rows))
        return Sample(
            ids_N=rows,  # all different: no two vectors are shown as the same context
            window_N=rows,
            position_N=rows % patches,
            document_N=rows // patches,
            indptr=np.concatenate(([0], np.cumsum(nnz))),
            lsps_E=np.concatenate([codes.indices for codes in parts]).astype(np.int32),
            weights_E=(weights / np.repeat(sums_N, nnz)).astype(np.float32),
            k=len(atoms_Kd),
            of=len(vectors_Nd),
        )

    @cached_property
    def _nearest(self):
        return nearest_atoms(self.dictionary.atoms_Kd, statistics.NEIGHBOURS)

    def facts(self) -> dict:
        """The facts of what was read."""
        return {
            "vectors": str(self.file),
            "k": self.sample.k,
            "lam": self.lam,
            "sampled": len(self.sample),
            "coded": self.sample.coded,
            "of": self.sample.of,
            "images": len(self.names) or None,
            "grid": list(self.grid),
            "dead": int((self.entries.counts == 0).sum()),
        }

    def row(self, lsp: int, count: int) -> dict:
        """An LSP in one line of a table, with the vectors on which it is heaviest, one of an image or, where images
        are few, more."""
        tokens, _ = self.entries.heaviest_first(lsp)
        return {
            "lsp": lsp,
            "density": float(self.densities[lsp]),
            "mean_weight": float(self.entries.mean_weights[lsp]),
            "count": int(self.entries.counts[lsp]),
            "top": [self._vector(token, lsp) for token in statistics.top_tokens(self.sample, tokens, count).tolist()],
        }

    def overview(self, rows: int, count: int) -> dict:
        """Facts, and the densest LSPs with `count` vectors each."""
        densest = np.argsort(-self.entries.counts, kind="stable")[:rows]
        return {**self.facts(), "rows": [self.row(int(lsp), count) for lsp in densest if self.entries.counts[lsp]]}

    def lsp(self, lsp: int) -> dict:
        """Everything of one LSP. Where it is heaviest, an image's "patches" are all that have the LSP, each as
        [row, column, weight]."""
        tokens, weights = self.entries.heaviest_first(lsp)
        figures = self.row(lsp, statistics.TOP_CONTEXTS)
        for vector in figures["top"] if self.names else []:
            vector["patches"] = self._patches(vector["image"], lsp)
        return {
            **figures,
            "heaviest_images": self._heaviest_images(lsp) if self.names else [],
            "co_firing": self.co_firing(lsp),
            "nearest": describe_nearest(self._nearest, lsp),
            "quantiles": [
                {"from": least, "to": largest, "samples": [self._vector(token, lsp) for token in some.tolist()]}
                for least, largest, some in statistics.quantile_samples(tokens, weights, lsp)
            ],
        }

    def _vector(self, token, lsp):
        """A sampled vector: its row of the file and weight; of a patch also its image and its place in the grid."""
        lsps, weights = self.sample.row(token)
        found = {"row": int(self.sample.ids_N[token]), "weight": round(float(weights[lsps == lsp][0]), 4)}
        if not self.names:
            return found
        image = int(self.sample.document_N[token])
        at = list(divmod(int(self.sample.position_N[token]), self.grid[1]))
        return {**found, "image": image, "name": self.names[image], "at": at}

    def _patches(self, image, lsp):
        """[row, column, weight] of every patch of an image that has an LSP."""
        tokens, weights = self.entries.tokens(lsp), self.entries.weights(lsp)
        inside = slice(*np.searchsorted(self.sample.document_N[tokens], [image, image + 1]))  # both rise
        places = np.divmod(self.sample.position_N[tokens[inside]], self.grid[1])
        return [[int(r), int(c), round(float(w), 4)] for r, c, w in zip(*places, weights[inside], strict=True)]

    def _heaviest_images(self, lsp):
        """The images with the largest mean weight over all their patches."""
        tokens, weights = self.entries.tokens(lsp), self.entries.weights(lsp)
        mass = np.bincount(self.sample.document_N[tokens], weights, len(self.names)) / (self.grid[0] * self.grid[1])
        return [
            {
                "image": int(image),
                "name": self.names[image],
                "weight": float(mass[image]),
                "patches": self._patches(image, lsp),
            }
            for image in np.argsort(-mass, kind="stable")[:HEAVIEST_IMAGES]
            if mass[image] > 0
        ]
