"""Replace a learner's atoms that no code uses or that are nearly equal to another one.

If two atoms are nearly equal, a code can move weight from one to the other at almost no cost. All such codes meet the
tolerance, so the distribution that a student learns from would be arbitrary. Learning therefore keeps the cosine of any
two atoms at NEAR or below, unless the vectors are too similar to give others. A code with a KKT violation of e can then
move about e / (1 - NEAR) of weight between two atoms: 0.005 at the default tolerance.

Shapes: N vectors, n of a minibatch, d width, K atoms.
"""

from typing import Any

import numpy as np

from pipeline.solvers.problem import Codes, objective

ATOMS_AT_ONCE = 1024
NEAR = 0.98  # two atoms with a larger cosine are nearly equal
KKT_TOLERANCE = 1e-2  # for codes in training: 1e-3 takes 20 % longer for the same objective


class Replacing:
    """The work between two steps that CpuLearner and TorchLearner share; the attributes are explained there."""

    atoms_Kd: Any
    code_code_KK: Any
    code_hidden_Kd: Any
    uses_K: np.ndarray
    lam: float

    def replace_near(self, hidden_nd: np.ndarray) -> int:
        """Merge nearly equal atoms, and fill the free places with a minibatch's worst reconstructed vectors.

        Returns  the number of atoms replaced; the others stay if the minibatch has too few different vectors
        """
        given_up = near_atoms(self.gram(), self.uses_K)
        if not given_up:
            return 0
        rows = self._worst_rows(hidden_nd, list(given_up))
        for atom, kept in list(given_up.items())[: len(rows)]:  # as if all codes had used the kept atom
            self.code_code_KK[kept] += self.code_code_KK[atom]
            self.code_code_KK[:, kept] += self.code_code_KK[:, atom]
            self.code_hidden_Kd[kept] += self.code_hidden_Kd[atom]
            self.uses_K[kept] += self.uses_K[atom]
            self.uses_K[atom] = 1  # so that `replace_unused` keeps the new atom
        self._replace(list(given_up)[: len(rows)], hidden_nd[rows])
        return len(rows)

    def replace_unused(self, hidden_nd: np.ndarray) -> None:
        """Replace unused atoms by the worst reconstructed vectors of a minibatch, as long as it has vectors that are
        not nearly equal to an atom or to each other."""
        unused = np.flatnonzero(self.uses_K == 0).tolist()
        self.uses_K[:] = 0
        if unused:
            rows = self._worst_rows(hidden_nd, unused)
            self._replace(unused[: len(rows)], hidden_nd[rows])

    def _worst_rows(self, hidden_nd, atoms):
        """Numbers of the vectors that replace some atoms, worst first."""
        atoms_Kd = self.atoms()
        worst_n = np.argsort(
            -objective(hidden_nd, atoms_Kd, self.code(hidden_nd, KKT_TOLERANCE), self.lam), kind="stable"
        )
        return worst_n[far_rows(hidden_nd[worst_n], np.delete(atoms_Kd, atoms, axis=0), len(atoms))]

    def _replace(self, atoms, hidden_md):
        self.atoms_Kd[atoms] = self._own(hidden_md)
        self.code_code_KK[atoms] = 0
        self.code_code_KK[:, atoms] = 0
        self.code_hidden_Kd[atoms] = 0
        self._refresh_gram()

    def atoms(self) -> np.ndarray:
        """The current atoms, as a new NumPy array."""
        raise NotImplementedError

    def gram(self) -> np.ndarray:
        """The Gram matrix of the current atoms, NumPy."""
        raise NotImplementedError

    def code(self, hidden_Nd: np.ndarray, tol: float = 1e-3) -> Codes:
        """Codes (NumPy) of vectors with the current atoms."""
        raise NotImplementedError

    def _own(self, array: np.ndarray) -> Any:
        """Convert an array to the learner's kind (NumPy, or a tensor on its device)."""
        raise NotImplementedError

    def _refresh_gram(self) -> None:
        raise NotImplementedError


def cosines(gram_KK: np.ndarray) -> np.ndarray:
    """Cosines of every two atoms, from their Gram matrix; 0 for an atom with itself and for an atom of zeros."""
    norms_K = np.sqrt(np.maximum(gram_KK.diagonal(), np.float32(1e-30)))
    cosine_KK = gram_KK / norms_K
    cosine_KK /= norms_K[:, None]
    np.fill_diagonal(cosine_KK, 0)
    return cosine_KK


def count_near(atoms_Kd: np.ndarray) -> tuple[int, float]:
    """How many atoms are nearly equal to another one, and the largest cosine of two atoms."""
    unit_Kd = atoms_Kd / np.maximum(np.linalg.norm(atoms_Kd, axis=1, keepdims=True), np.float32(1e-15))
    near, largest = 0, 0.0
    for first in range(0, len(unit_Kd), ATOMS_AT_ONCE):
        cosine_aK = unit_Kd[first : first + ATOMS_AT_ONCE] @ unit_Kd.T
        np.fill_diagonal(cosine_aK[:, first:], 0)  # of an atom with itself
        near += int((cosine_aK > NEAR).any(1).sum())
        largest = max(largest, float(cosine_aK.max()))
    return near, largest


def near_atoms(gram_KK: np.ndarray, uses_K: np.ndarray) -> dict[int, int]:
    """Atom to remove -> the nearly equal atom that is kept. Of two such atoms, the one with more uses is kept.

    No two of the atoms that are kept are nearly equal.
    """
    near_KK = cosines(gram_KK) > NEAR
    concerned = np.flatnonzero(near_KK.any(1))
    kept: list[int] = []
    given_up: dict[int, int] = {}
    for atom in concerned[np.argsort(-uses_K[concerned], kind="stable")].tolist():
        equal = [other for other in kept if near_KK[atom, other]]
        if equal:
            given_up[atom] = equal[0]
        else:
            kept.append(atom)
    return given_up


def far_rows(rows_Nd: np.ndarray, atoms_Kd: np.ndarray, count: int) -> list[int]:
    """Numbers of the first rows, at most `count`, that are nearly equal neither to an atom nor to one before them.

    rows_Nd  rows of unit length, or of zeros, which are left out
    """
    norms_K = np.maximum(np.linalg.norm(atoms_Kd, axis=1), 1e-15)
    candidates = np.flatnonzero(((rows_Nd @ atoms_Kd.T) / norms_K <= NEAR).all(1) & rows_Nd.any(1))
    found: list[int] = []
    for row in candidates.tolist():
        if len(found) == count:
            break
        if not found or (rows_Nd[found] @ rows_Nd[row]).max() <= NEAR:
            found.append(row)
    return found
