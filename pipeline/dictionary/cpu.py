"""One minibatch of online dictionary learning on all CPU cores (NumPy and Numba).

A step codes a minibatch, scales A and B down, adds the codes to A = sum a a' and B = sum h a', and does one pass of
block coordinate descent over the atoms, each projected on the unit ball (Mairal et al. 2009, algorithms 1 and 2). Every
product is cut into the same pieces for any number of threads, so its bits do not depend on that number.
Not handled here: order, evaluation and stopping (learning.py), the same on a GPU (torch.py), replacing atoms (near.py).

Shapes: n vectors of a minibatch, d width, K atoms, g atoms of a group.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np

from pipeline.dictionary.near import KKT_TOLERANCE, Replacing
from pipeline.solvers import nonneg_lasso
from pipeline.solvers.parallel import kernel, one_blas_thread, run_in_threads, thread_count
from pipeline.solvers.problem import Codes

ATOMS_PER_UPDATE = 64  # atoms per group, whose common term is one matrix product
COLUMNS_AT_ONCE = 64  # columns of such a product per thread
GRAM_ROWS = 128  # rows of the Gram matrix per thread


class CpuLearner(Replacing):
    """Atoms and the sums from which they are updated.

    atoms_Kd        float32, row norms <= 1
    gram_KK         atoms_Kd @ atoms_Kd.T
    code_code_KK    A of the paper; code_hidden_Kd is its B, transposed
    uses_K          codes that used each atom since the last `replace_unused`
    steps           minibatches so far
    """

    def __init__(self, atoms_Kd: np.ndarray, lam: float, forgetting: float):
        k, _ = atoms_Kd.shape
        self.lam, self.forgetting, self.steps = lam, forgetting, 0
        self.atoms_Kd = atoms_Kd
        self.code_code_KK = np.zeros((k, k), np.float32)
        self.code_hidden_Kd = np.zeros_like(atoms_Kd)
        self.uses_K = np.zeros(k, np.int64)
        self.gram_KK = np.empty((k, k), np.float32)
        self._refresh_gram()

    def state(self) -> dict[str, np.ndarray]:
        """Everything that the next step depends on, as NumPy arrays by name.

        It may be called at any time. uses_K is included, although it is zero when learning.py calls this,
        after `replace_unused`.
        """
        return {
            "atoms_Kd": self.atoms_Kd,
            "code_code_KK": self.code_code_KK,
            "steps": np.array(self.steps),
            "code_hidden_Kd": self.code_hidden_Kd,
            "uses_K": self.uses_K,
        }

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Restore a `state`. This learner must have been made with the atoms of that state."""
        self.code_code_KK, self.code_hidden_Kd = state["code_code_KK"], state["code_hidden_Kd"]
        self.uses_K, self.steps = state["uses_K"], int(state["steps"])

    def atoms(self) -> np.ndarray:
        """The current atoms, as a new NumPy array."""
        return self.atoms_Kd.copy()

    def gram(self) -> np.ndarray:
        """The Gram matrix of the current atoms, not to be changed."""
        return self.gram_KK

    def _own(self, array):
        return array

    def code(self, hidden_Nd: np.ndarray, tol: float = 1e-3) -> Codes:
        """Codes of vectors with the current atoms."""
        return nonneg_lasso(hidden_Nd, self.atoms_Kd, self.lam, gram_KK=self.gram_KK, tol=tol)

    def step(self, hidden_nd: np.ndarray) -> None:
        """Code a minibatch and update the atoms."""
        codes = self.code(hidden_nd, KKT_TOLERANCE)
        self.uses_K += np.bincount(codes.indices, minlength=len(self.uses_K))
        self.steps += 1
        self._accumulate(hidden_nd, codes, np.float32(kept_share(self.steps, self.forgetting)))
        self._update_atoms()
        self._refresh_gram()

    def _accumulate(self, hidden_nd, codes, keep):
        """Each thread owns a range of atoms, so the order of summation does not depend on the number of threads."""
        threads = thread_count()
        bounds = np.linspace(0, len(self.atoms_Kd), 4 * threads + 1).astype(int)

        def work(ranges):
            for first, last in ranges:
                _add_codes(
                    self.code_code_KK,
                    self.code_hidden_Kd,
                    hidden_nd,
                    codes.indptr,
                    codes.indices,
                    codes.values,
                    keep,
                    first,
                    last,
                )

        run_in_threads(work, zip(bounds[:-1], bounds[1:], strict=True), threads)

    def _update_atoms(self):
        """One pass of block coordinate descent (algorithm 2): d_j += (b_j - a_j D) / a_jj, projected.

        b - a D is one matrix product for ATOMS_PER_UPDATE atoms at a time. Inside such a group, the kernel corrects it
        for the atoms that were already updated, so the result is that of one atom after the other.
        """
        k, width = self.atoms_Kd.shape
        pieces = [slice(first, first + COLUMNS_AT_ONCE) for first in range(0, width, COLUMNS_AT_ONCE)]
        with worker_threads() as each:
            for first in range(0, k, ATOMS_PER_UPDATE):
                group = slice(first, first + ATOMS_PER_UPDATE)
                descent_gd = self.code_hidden_Kd[group].copy()

                def subtract_fit(columns, group=group, descent_gd=descent_gd):
                    descent_gd[:, columns] -= self.code_code_KK[group] @ self.atoms_Kd[:, columns]

                each(subtract_fit, pieces)
                _descend_group(self.atoms_Kd[group], descent_gd, self.code_code_KK[group, group])

    def _refresh_gram(self):
        """gram = D D', half of it by products in blocks of rows, the other half mirrored."""

        def fill(first):
            stop = first + GRAM_ROWS
            rows = self.atoms_Kd[first:stop] @ self.atoms_Kd[first:].T
            self.gram_KK[first:stop, first:] = rows
            self.gram_KK[stop:, first:stop] = rows[:, GRAM_ROWS:].T

        with worker_threads() as each:
            each(fill, range(0, len(self.atoms_Kd), GRAM_ROWS))


def kept_share(steps: int, forgetting: float) -> float:
    """The factor by which A and B are scaled before minibatch `steps` is added: section 3.4 of the paper."""
    return (1 - 1 / steps) ** forgetting


@contextmanager
def worker_threads() -> Iterator[Callable]:
    """Yields a function each(work, items) that calls work(item) for all items in threads. BLAS then uses one thread."""
    threads = thread_count()
    with one_blas_thread():
        if threads == 1:
            yield lambda work, items: [work(item) for item in items]
        else:
            with ThreadPoolExecutor(threads) as pool:
                yield lambda work, items: list(pool.map(work, items))


@kernel
def _add_codes(code_code_KK, code_hidden_Kd, hidden_nd, indptr, indices, values, keep, first, last):
    """A = keep A + sum a a', B = keep B + sum h a', for the rows first to last of both."""
    for j in range(first, last):
        for i in range(code_code_KK.shape[1]):
            code_code_KK[j, i] *= keep
        for i in range(code_hidden_Kd.shape[1]):
            code_hidden_Kd[j, i] *= keep
    for n in range(len(hidden_nd)):
        for entry in range(indptr[n], indptr[n + 1]):
            j, value = indices[entry], values[entry]
            if j < first or j >= last:
                continue
            for other in range(indptr[n], indptr[n + 1]):
                code_code_KK[j, indices[other]] += value * values[other]
            for i in range(hidden_nd.shape[1]):
                code_hidden_Kd[j, i] += value * hidden_nd[n, i]


@kernel
def _descend_group(atoms_gd, descent_gd, code_code_gg):
    """Update some atoms in turn; descent_gd is b - a D for the atoms before the update."""
    for j in range(len(atoms_gd)):
        curvature = code_code_gg[j, j]
        if curvature <= np.float32(1e-10):  # not used recently: nothing to learn from
            continue
        squared = np.float32(0)
        for i in range(atoms_gd.shape[1]):
            new = atoms_gd[j, i] + descent_gd[j, i] / curvature
            squared += new * new
        scale = 1 / np.sqrt(max(squared, np.float32(1)))
        for i in range(atoms_gd.shape[1]):
            change = (atoms_gd[j, i] + descent_gd[j, i] / curvature) * scale - atoms_gd[j, i]
            atoms_gd[j, i] += change
            descent_gd[j, i] = change
        for later in range(j + 1, len(atoms_gd)):
            for i in range(atoms_gd.shape[1]):
                descent_gd[later, i] -= code_code_gg[later, j] * descent_gd[j, i]
