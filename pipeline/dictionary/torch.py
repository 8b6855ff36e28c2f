"""One minibatch of online dictionary learning in torch operations: for a GPU, the same method as cpu.py.

Nothing in the update of the atoms waits for the device or depends on its values, and shapes are fixed, so that it
can be captured in a CUDA graph; it is not yet, and its K short steps are several thousand small launches a
minibatch. A solver for all atoms of a group at once does not exist: the projection comes between them.
Not run on a GPU yet; on CPU tensors the tests hold it against cpu.py.

Shapes: n vectors of a minibatch, d width, K atoms, g atoms of a group.
"""

import numpy as np
import torch

from pipeline.dictionary.cpu import ATOMS_PER_UPDATE, KKT_TOLERANCE, kept_share, worst_rows
from pipeline.solvers import nonneg_lasso
from pipeline.solvers.problem import Codes

SMALLEST_CURVATURE = 1e-10  # below, an atom was not used lately: nothing to learn from


class TorchLearner:
    """As CpuLearner, with tensors on `device`; vectors come in, atoms and codes go out as NumPy arrays."""

    def __init__(self, atoms_Kd: np.ndarray, lam: float, forgetting: float, device: str | torch.device):
        self.lam, self.forgetting, self.steps = lam, forgetting, 0
        self.device = torch.device(device)
        self.atoms_Kd = self._tensor(atoms_Kd).clone()
        k = len(self.atoms_Kd)
        self.code_code_KK = self.atoms_Kd.new_zeros(k, k)
        self.code_hidden_Kd = torch.zeros_like(self.atoms_Kd)
        self.used_K = torch.zeros(k, dtype=torch.int64, device=self.device)
        self.gram_KK = self.atoms_Kd @ self.atoms_Kd.T

    @property
    def uses_K(self) -> np.ndarray:
        return self.used_K.cpu().numpy()

    def state(self) -> dict[str, np.ndarray]:
        """As CpuLearner.state."""
        tensors = {
            "atoms_Kd": self.atoms_Kd,
            "code_code_KK": self.code_code_KK,
            "code_hidden_Kd": self.code_hidden_Kd,
            "uses_K": self.used_K,
        }
        return {name: tensor.cpu().numpy() for name, tensor in tensors.items()} | {"steps": np.array(self.steps)}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Go on where the learner was that gave `state`; this one was made with the atoms of that state."""
        self.code_code_KK = self._tensor(state["code_code_KK"])
        self.code_hidden_Kd = self._tensor(state["code_hidden_Kd"])
        self.used_K, self.steps = self._tensor(state["uses_K"]), int(state["steps"])

    def atoms(self) -> np.ndarray:
        """The current atoms, a NumPy array of its own."""
        return self.atoms_Kd.cpu().numpy().copy()

    def code(self, hidden_Nd: np.ndarray, tol: float = 1e-3) -> Codes:
        """Codes (NumPy) of vectors with the current atoms."""
        return self._code(self._tensor(hidden_Nd), tol).to_host()

    def step(self, hidden_nd: np.ndarray) -> None:
        """Code a minibatch and update the atoms."""
        hidden_nd = self._tensor(hidden_nd)
        codes = self._code(hidden_nd, KKT_TOLERANCE)
        self.steps += 1
        self._accumulate(hidden_nd, codes, kept_share(self.steps, self.forgetting))
        self._update_atoms()
        torch.matmul(self.atoms_Kd, self.atoms_Kd.T, out=self.gram_KK)

    def _code(self, hidden_nd, tol):
        return nonneg_lasso(hidden_nd, self.atoms_Kd, self.lam, gram_KK=self.gram_KK, tol=tol)

    def _accumulate(self, hidden_nd, codes, keep):
        """A = keep A + a' a, B = keep B + a' h: dense products, which a GPU does faster than sparse sums."""
        counts_n = self._tensor(codes.indptr).diff()
        rows = torch.repeat_interleave(torch.arange(len(counts_n), device=self.device), counts_n)
        codes_nK = self.atoms_Kd.new_zeros(len(counts_n), len(self.atoms_Kd))
        codes_nK[rows, self._tensor(codes.indices).long()] = self._tensor(codes.values)
        self.used_K += (codes_nK > 0).sum(0)
        self.code_code_KK.addmm_(codes_nK.T, codes_nK, beta=keep)
        self.code_hidden_Kd.addmm_(codes_nK.T, hidden_nd, beta=keep)

    def _update_atoms(self):
        """One pass of block coordinate descent in groups, as CpuLearner._update_atoms."""
        for first in range(0, len(self.atoms_Kd), ATOMS_PER_UPDATE):
            group = slice(first, first + ATOMS_PER_UPDATE)
            descent_gd = self.code_hidden_Kd[group] - self.code_code_KK[group] @ self.atoms_Kd
            descend_group(self.atoms_Kd[group], descent_gd, self.code_code_KK[group, group])

    def replace_unused(self, hidden_nd: np.ndarray) -> None:
        """Put the worst reconstructed vectors of a minibatch in the place of atoms without a use."""
        unused = np.flatnonzero(self.uses_K == 0)[: len(hidden_nd)]
        self.used_K.zero_()
        if len(unused) == 0:
            return
        worst = worst_rows(hidden_nd, self.atoms(), self.code(hidden_nd, KKT_TOLERANCE), self.lam, len(unused))
        unused = self._tensor(unused)
        self.atoms_Kd[unused] = self._tensor(hidden_nd[worst])
        self.code_code_KK[unused] = 0
        self.code_code_KK[:, unused] = 0
        self.code_hidden_Kd[unused] = 0
        torch.matmul(self.atoms_Kd, self.atoms_Kd.T, out=self.gram_KK)

    def _tensor(self, array):
        return torch.as_tensor(array, device=self.device)


def descend_group(atoms_gd: torch.Tensor, descent_gd: torch.Tensor, code_code_gg: torch.Tensor) -> None:
    """Update some atoms in turn, in place; descent_gd is b - a D for the atoms as they come in."""
    change_gd = torch.zeros_like(atoms_gd)
    curvature_g = code_code_gg.diagonal()
    inverse_g = torch.where(curvature_g > SMALLEST_CURVATURE, 1 / curvature_g, 0)
    learns_g = (curvature_g > SMALLEST_CURVATURE).to(atoms_gd.dtype)
    for j in range(len(atoms_gd)):
        descent_d = torch.addmv(descent_gd[j], change_gd.T, code_code_gg[j], alpha=-1)
        new_d = torch.addcmul(atoms_gd[j], descent_d, inverse_g[j])
        new_d = new_d / torch.linalg.vector_norm(new_d).clamp_min(1)
        change_gd[j] = (new_d - atoms_gd[j]) * learns_g[j]
    atoms_gd += change_gd
