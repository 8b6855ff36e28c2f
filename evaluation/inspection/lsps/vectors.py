"""LSPs of vectors that belong to no text: patches of images (encode-images), or the rows of any .npy file.

    view = VectorView(dictionary, Path("runs/vectors/..."), most=2_000_000, progress)
    view.overview(), view.lsp(7)

The vectors are coded with the dictionary at the λ that it was learned with, and their codes divided by their sums, as
those of tokens are. All that is said of LSPs follows from that sample: a patch takes the place of a token, an image
that of a window and of its document. Left out: the pages (vector_pages.py).

Shapes: N sampled vectors, K LSPs, d width, R x C patches of an image.
"""

import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import numpy as np

from common.errors import InspectionError
from evaluation.inspection.lsps import statistics
from evaluation.inspection.lsps.neighbours import nearest_atoms
from evaluation.inspection.lsps.sample import Entries, Sample, by_lsp
from pipeline.dictionary import Dictionary
from pipeline.dictionary.vectors import open_vectors, refuse_unusable, unit_length
from pipeline.images import INDEX_FILE, VECTORS_FILE

NEIGHBOURS = 8  # nearest atoms, co-firing LSPs
HEAVIEST_IMAGES = 8
ROWS_AT_ONCE = 16_384


class VectorView:
    """The LSPs of vectors.

    place  a directory of encode-images, or a .npy file
    most   vectors to read: whole images, evenly over all
    Raises InspectionError where the vectors do not fit the dictionary; ValueError where they are no numbers
    """

    def __init__(self, dictionary: Dictionary, place: Path, most: int, progress: Callable[..., None]):
        self.dictionary, self.place, self.progress = dictionary, place, progress
        self.grid, self.images = (1, 1), None  # names of the images; None: rows are known by their numbers alone
        if place.is_dir():
            if not (place / INDEX_FILE).is_file():
                raise InspectionError(
                    f"--vectors {place} has no {INDEX_FILE}. Expected what encode-images made, or a .npy file."
                )
            index = json.loads((place / INDEX_FILE).read_text(encoding="utf-8"))
            self.grid, self.images = tuple(index["grid"]), index["images"]
        file = place / VECTORS_FILE if place.is_dir() else place
        vectors_Nd = open_vectors(file)
        refuse_unusable(vectors_Nd, file)
        if vectors_Nd.shape[1] != dictionary.atoms_Kd.shape[1]:
            raise InspectionError(
                f"--vectors {place}: vectors of width {vectors_Nd.shape[1]}, but the dictionary's atoms have width "
                f"{dictionary.atoms_Kd.shape[1]}. Give vectors of the encoder and layer that it was learned from."
            )
        self.sample = self._code(vectors_Nd, most)

    def _code(self, vectors_Nd, most):
        """The LSPs of whole images spread over the file, as a Sample."""
        from pipeline.solvers import nonneg_lasso, prepare

        patches = self.grid[0] * self.grid[1]
        images = len(vectors_Nd) // patches
        chosen = np.arange(0, images, max(1, -(-images * patches // most)))
        rows = (chosen[:, None] * patches + np.arange(patches)).ravel()
        atoms_Kd, lam = self.dictionary.atoms_Kd, self.dictionary.settings["lam"]
        prepared, parts = prepare(atoms_Kd), []
        for start in range(0, len(rows), ROWS_AT_ONCE):
            some = rows[start : start + ROWS_AT_ONCE]
            parts.append(nonneg_lasso(unit_length(vectors_Nd[some], some), atoms_Kd, lam, gram_KK=prepared))
            self.progress("codes", min(start + ROWS_AT_ONCE, len(rows)), len(rows), unit="vectors")
        nnz = np.concatenate([np.diff(codes.indptr) for codes in parts])
        indptr = np.concatenate(([0], np.cumsum(nnz)))
        weights = np.concatenate([codes.values for codes in parts]).astype(np.float64)
        sums_N = np.bincount(np.repeat(np.arange(len(rows)), nnz), weights, len(rows))
        return Sample(
            ids_N=rows.astype(np.int32),  # all different: no two vectors are shown as the same context
            window_N=(rows // patches).astype(np.int32),
            position_N=(rows % patches).astype(np.int32),
            document_N=rows // patches,
            indptr=indptr,
            lsps_E=np.concatenate([codes.indices for codes in parts]).astype(np.int32),
            weights_E=(weights / np.repeat(sums_N, nnz)).astype(np.float32),
            k=len(atoms_Kd),
            of=len(vectors_Nd),
        )

    @cached_property
    def entries(self) -> Entries:
        """The sample by LSP."""
        return by_lsp(self.sample)

    @cached_property
    def _together(self):
        return statistics.count_together(self.sample)

    @property
    def counted_together(self) -> int:
        """Coded vectors in which pairs of LSPs were counted."""
        return self._together[1]

    @cached_property
    def _nearest(self):
        return nearest_atoms(self.dictionary.atoms_Kd, NEIGHBOURS)

    def facts(self) -> dict:
        """What was read."""
        return {
            "vectors": str(self.place),
            "k": self.sample.k,
            "lam": self.dictionary.settings["lam"],
            "sampled": len(self.sample),
            "coded": self.sample.coded,
            "of": self.sample.of,
            "images": len(self.images) if self.images else None,
            "grid": list(self.grid),
            "dead": int((self.entries.counts == 0).sum()),
        }

    def row(self, lsp: int, count: int) -> dict:
        """An LSP in one line of a table, with the vectors on which it is heaviest, one of an image."""
        tokens, _ = self.entries.heaviest_first(lsp)
        return {
            "lsp": lsp,
            "density": float(self.entries.counts[lsp] / max(1, self.sample.coded)),
            "mean_weight": float(self.entries.mean_weights[lsp]),
            "tokens": int(self.entries.counts[lsp]),
            "top": [self._vector(token, lsp) for token in statistics.top_tokens(self.sample, tokens, count).tolist()],
        }

    def overview(self, rows: int, count: int) -> dict:
        """Facts, and the densest LSPs."""
        densest = np.argsort(-self.entries.counts, kind="stable")[:rows]
        return {**self.facts(), "rows": [self.row(int(lsp), count) for lsp in densest if self.entries.counts[lsp]]}

    def lsp(self, lsp: int) -> dict:
        """Everything of one LSP."""
        if not 0 <= lsp < self.sample.k:
            raise InspectionError(f"there is no LSP {lsp}: they are numbered from 0 to {self.sample.k - 1}")
        tokens, weights = self.entries.heaviest_first(lsp)
        found_Kn, cosines_Kn = self._nearest
        return {
            **self.row(lsp, statistics.TOP_CONTEXTS),
            "heaviest_images": self._heaviest_images(lsp) if self.images else [],
            "co_firing": [
                {"lsp": other, "npmi": npmi, "support": support}
                for other, npmi, support in statistics.co_firing(*self._together, lsp, NEIGHBOURS)
            ],
            "nearest": [
                {"lsp": int(other), "cosine": float(cosine)}
                for other, cosine in zip(found_Kn[lsp], cosines_Kn[lsp], strict=True)
            ],
            "quantiles": [
                {"from": least, "to": largest, "samples": [self._vector(token, lsp) for token in some.tolist()]}
                for least, largest, some in statistics.quantile_samples(tokens, weights, lsp)
            ],
        }

    def _vector(self, token, lsp):
        """A sampled vector: its row of the file; of a patch also its image, its place in the grid and every patch of
        that image with the LSP as [row, column, weight]."""
        sample, columns = self.sample, self.grid[1]
        lsps, weights = sample.row(token)
        found = {"row": int(sample.ids_N[token]), "weight": round(float(weights[lsps == lsp][0]), 4)}
        if self.images is None:
            return found
        image = int(sample.window_N[token])
        return (
            found
            | self._image(image)
            | {"at": list(divmod(int(sample.position_N[token]), columns))}
            | {"patches": self._patches(image, lsp)}
        )

    def _image(self, image):
        return {"image": image, "name": self.images[image]}

    def _patches(self, image, lsp):
        """[row, column, weight] of every patch of an image that has an LSP."""
        tokens, weights = self.entries.tokens(lsp), self.entries.weights(lsp)
        inside = slice(*np.searchsorted(self.sample.window_N[tokens], [image, image + 1]))  # tokens rise, and so images
        places = np.divmod(self.sample.position_N[tokens[inside]], self.grid[1])
        return [[int(r), int(c), round(float(w), 4)] for r, c, w in zip(*places, weights[inside], strict=True)]

    def _heaviest_images(self, lsp):
        """The images with the largest mean weight over all their patches."""
        tokens, weights = self.entries.tokens(lsp), self.entries.weights(lsp)
        mass = np.bincount(self.sample.window_N[tokens], weights, len(self.images)) / (self.grid[0] * self.grid[1])
        return [
            self._image(int(image)) | {"weight": float(mass[image]), "patches": self._patches(int(image), lsp)}
            for image in np.argsort(-mass, kind="stable")[:HEAVIEST_IMAGES]
            if mass[image] > 0
        ]
