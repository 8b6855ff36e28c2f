"""Hidden states to distributions over latent semantic properties: sparse codes over a dictionary's atoms, normalised.

Left out: the solver (solvers/), what a code becomes (distributions.py).

Shapes: N coded tokens, d hidden width, K atoms.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from common.errors import EncodeError
from pipeline.coding.batch import Batch, Output, add_amounts
from pipeline.coding.coder import TeacherCoder
from pipeline.coding.distributions import distributions
from pipeline.coding.hidden import Hidden, center_on, centred_rows
from pipeline.coding.kept import entries_kept
from pipeline.coding.precision import total_variation
from pipeline.config import EncodeConfig
from pipeline.solvers import choose_backend, nonneg_lasso, onednn, prepare
from pipeline.solvers.nearest import nearest_atoms
from pipeline.solvers.parallel import one_blas_thread

if TYPE_CHECKING:
    from pipeline.teacher import Teacher

# Of the solver where precisions are compared, so that its own error does not show.
COMPARED_TOLERANCE = {"cpu": 1e-5, "cuda": 1e-4}


class LspCoder(TeacherCoder):
    """Blocks of windows to blocks with the LSPs of every token."""

    WORK = "solver"
    config: EncodeConfig

    def __init__(self, teacher: "Teacher", outputs: Sequence[Output], config: EncodeConfig, special_ids: dict):
        super().__init__(teacher, outputs, config, special_ids)
        asked = config.solver_backend if config.solver == "cd" else config.solver
        self._backend = choose_backend(teacher.device) if asked == "auto" else asked
        self._dictionaries = [
            _load_dictionary(teacher.device, output.dictionary.atoms_Kd, self._backend) for output in outputs
        ]
        if self._backend == "cpu":
            self.environment["correlations"] = "bfloat16" if onednn.multiplies_bfloat16() else "float32"
        elif self._backend == "torch":
            self.environment["solver_backend"] = "torch"
        self._top_n = [entries_kept(config, output.dictionary) for output in outputs]
        self._centers = [center_on(teacher.device, output.dictionary) for output in outputs]
        self._checked: set[int] = set()  # outputs of which some token is known to have a code

    def read_states(self, teacher: "Teacher", batch: Batch, outputs: Sequence[int]) -> dict[int, Hidden]:
        wanted = [(self.outputs[output].layer, self._centers[output]) for output in outputs]
        return dict(zip(outputs, centred_rows(teacher, batch, wanted), strict=True))

    def _code(self, rows_Nd, output, tolerance=None):
        atoms_Kd, gram_KK = self._dictionaries[output]
        config = self.config
        if config.solver == "nearest":
            return nearest_atoms(rows_Nd, atoms_Kd)
        how = {"gram_KK": gram_KK, "tol": tolerance or config.tolerance, "backend": self._backend}
        if config.solver == "fista":
            how = {"backend": "fista", "steps": config.solver_steps, "tol": None}
        rows_Nd = rows_Nd if rows_Nd.is_cuda else rows_Nd.numpy()
        return nonneg_lasso(rows_Nd, atoms_Kd, config.lam, **how)

    def measure_variation(
        self, rows_Nd: torch.Tensor, exact_Nd: torch.Tensor, exact_teacher: "Teacher", output: int
    ) -> np.ndarray:
        count = len(self.outputs[output].dictionary.atoms_Kd)
        tolerance = min(self.config.tolerance, COMPARED_TOLERANCE[rows_Nd.device.type])
        codes = (self._code(rows, output, tolerance).to_host().dense(count) for rows in (rows_Nd, exact_Nd))
        return total_variation(*codes)

    def _arrays(self, codes):
        return codes.indptr, codes.indices, codes.values, codes.kkt

    def _rows(self, codes, block):
        rows = distributions(codes, self._top_n[block.output])
        tokens, empty = len(rows), int((np.diff(rows.indptr) == 0).sum())
        add_amounts(block.statistics, {"empty_codes": empty})
        if self.config.solver != "nearest":
            largest = float(codes.kkt.max()) if tokens else 0.0
            block.statistics["max_kkt"] = max(block.statistics.get("max_kkt", 0.0), largest)
        if tokens and block.output not in self._checked:
            self._checked.add(block.output)
            if empty == tokens:
                output = self.outputs[block.output]
                raise EncodeError(
                    f"--lam {self.config.lam} empties the code of every one of the first {tokens:,} tokens, at layer "
                    f"{output.layer} and k {len(output.dictionary.atoms_Kd)}. Use a smaller one; 0.05 is usual."
                )
        return rows


def _load_dictionary(device, atoms_Kd, backend):
    """Atoms and their Gram matrix, as the solver takes them."""
    with one_blas_thread():  # how a product is cut up for threads changes how its sums round
        gram_KK = atoms_Kd @ atoms_Kd.T
        if device.type == "cpu":
            return atoms_Kd, prepare(atoms_Kd, gram_KK) if backend == "cpu" else gram_KK
    atoms_Kd = torch.from_numpy(atoms_Kd).to(device)
    prepared = prepare(atoms_Kd, gram_KK)
    torch.cuda.synchronize(device)  # once, so that no lane has to wait for them
    return atoms_Kd, prepared
