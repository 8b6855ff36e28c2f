"""One minibatch of online dictionary learning in torch operations: for a GPU, the same method as cpu.py.

Atoms are updated in groups. Inside a group one atom is updated after the other, since each is projected before the next
one is computed. But every new atom is a sum of the same g vectors, so only its g coefficients are found in turn. For
these the inner products of the vectors suffice. The host computes them in float64 and waits for the device once per
group, 48 times per minibatch at k = 3072. (Updating single atoms on the device took eight small launches each, 25,000
per minibatch.) Tests compare it with cpu.py on CPU tensors, benchmarks/gpu_check on a GPU.

Shapes: n vectors of a minibatch, d width, K atoms, g atoms of a group.
"""

import numpy as np
import torch

from pipeline.dictionary.cpu import ATOMS_PER_UPDATE, kept_share
from pipeline.dictionary.near import KKT_TOLERANCE, Replacing
from pipeline.solvers import nonneg_lasso
from pipeline.solvers.parallel import kernel
from pipeline.solvers.problem import Codes

SMALLEST_CURVATURE = 1e-10  # below it, an atom was not used recently: nothing to learn from


class TorchLearner(Replacing):
    """CpuLearner with tensors on `device`; vectors come in, and atoms and codes go out, as NumPy arrays.

    backend  of nonneg_lasso, for the codes
    """

    def __init__(
        self, atoms_Kd: np.ndarray, lam: float, forgetting: float, device: str | torch.device, backend: str = "auto"
    ):
        self.backend = backend
        self.lam, self.forgetting, self.steps = lam, forgetting, 0
        self.device = torch.device(device)
        self.atoms_Kd = self._tensor(atoms_Kd).clone()
        k = len(self.atoms_Kd)
        self.code_code_KK = self.atoms_Kd.new_zeros(k, k)
        self.code_hidden_Kd = torch.zeros_like(self.atoms_Kd)
        self.uses_K = np.zeros(k, np.int64)
        self.gram_KK = self.atoms_Kd @ self.atoms_Kd.T

    def state(self) -> dict[str, np.ndarray]:
        """See CpuLearner.state."""
        tensors = {
            "atoms_Kd": self.atoms_Kd,
            "code_code_KK": self.code_code_KK,
            "code_hidden_Kd": self.code_hidden_Kd,
        }
        arrays = {name: tensor.cpu().numpy() for name, tensor in tensors.items()}
        return arrays | {"uses_K": self.uses_K, "steps": np.array(self.steps)}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Restore a `state`. This learner must have been made with the atoms of that state."""
        self.code_code_KK = self._tensor(state["code_code_KK"])
        self.code_hidden_Kd = self._tensor(state["code_hidden_Kd"])
        self.uses_K, self.steps = state["uses_K"], int(state["steps"])

    def atoms(self) -> np.ndarray:
        """The current atoms, as a new NumPy array."""
        return self.atoms_Kd.cpu().numpy().copy()

    def gram(self) -> np.ndarray:
        """The Gram matrix of the current atoms, NumPy."""
        return self.gram_KK.cpu().numpy()

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
        self._refresh_gram()

    def _code(self, hidden_nd, tol):
        how = {"gram_KK": self.gram_KK, "tol": tol, "backend": self.backend}
        return nonneg_lasso(hidden_nd, self.atoms_Kd, self.lam, **how)

    def _accumulate(self, hidden_nd, codes, keep):
        """A = keep A + a' a, B = keep B + a' h: dense products, which a GPU does faster than sparse sums."""
        counts_n, entries = self._tensor(codes.indptr).diff(), len(codes.indices)
        rows = torch.arange(len(counts_n), device=self.device).repeat_interleave(counts_n, output_size=entries)
        codes_nK = self.atoms_Kd.new_zeros(len(counts_n), len(self.atoms_Kd))
        codes_nK[rows, self._tensor(codes.indices).long()] = self._tensor(codes.values)
        self.uses_K += (codes_nK > 0).sum(0).cpu().numpy()
        self.code_code_KK.addmm_(codes_nK.T, codes_nK, beta=keep)
        self.code_hidden_Kd.addmm_(codes_nK.T, hidden_nd, beta=keep)

    def _update_atoms(self):
        """One pass of block coordinate descent in groups, as CpuLearner._update_atoms."""
        for first in range(0, len(self.atoms_Kd), ATOMS_PER_UPDATE):
            group = slice(first, first + ATOMS_PER_UPDATE)
            descent_gd = self.code_hidden_Kd[group] - self.code_code_KK[group] @ self.atoms_Kd
            self.atoms_Kd[group] = descend_group(self.atoms_Kd[group], descent_gd, self.code_code_KK[group, group])

    def _refresh_gram(self):
        torch.matmul(self.atoms_Kd, self.atoms_Kd.T, out=self.gram_KK)

    def _own(self, array):
        return self._tensor(array)

    def _tensor(self, array):
        return torch.as_tensor(array, device=self.device)


def descend_group(atoms_gd: torch.Tensor, descent_gd: torch.Tensor, code_code_gg: torch.Tensor) -> torch.Tensor:
    """Update some atoms in turn; descent_gd is b - a D for the atoms before the update. Waits for the device once.

    Atom j becomes r_j - sum over i < j of c_ji times the new atom i, projected, where c_ji = a_ji / a_jj and
    r_j = old_j + descent_j / a_jj + sum over i < j of c_ji old_i. So the new atoms are S R with a lower triangular S.
    """
    atoms_gd, descent_gd, code_code_gg = atoms_gd.double(), descent_gd.double(), code_code_gg.double()
    curvature_g = code_code_gg.diagonal()
    learns_g = curvature_g > SMALLEST_CURVATURE
    inverse_g1 = torch.where(learns_g, 1 / curvature_g, 0)[:, None]
    coupling_gg = (inverse_g1 * code_code_gg).tril(-1)
    start_gd = atoms_gd + inverse_g1 * descent_gd + coupling_gg @ atoms_gd
    asked = torch.stack([coupling_gg, start_gd @ start_gd.T, learns_g.double().diag()])
    shares_gg = torch.from_numpy(_project_in_turn(*asked.cpu().numpy()))
    return shares_gg.to(atoms_gd.device) @ start_gd


@kernel
def _project_in_turn(coupling_gg, inner_gg, learns_gg):
    """S: the coefficients of the new atoms over the rows of R; inner_gg = R R'. Only atoms that learn are projected."""
    shares_gg = np.zeros_like(coupling_gg)
    for j in range(len(shares_gg)):
        shares_gg[j, j] = 1
        for i in range(j):
            for m in range(i + 1):
                shares_gg[j, m] -= coupling_gg[j, i] * shares_gg[i, m]
        squared = 0.0
        for m in range(j + 1):
            for n in range(j + 1):
                squared += shares_gg[j, m] * inner_gg[m, n] * shares_gg[j, n]
        if learns_gg[j, j] > 0 and squared > 1:
            for m in range(j + 1):
                shares_gg[j, m] /= np.sqrt(squared)
    return shares_gg
