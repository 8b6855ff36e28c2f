"""Real hidden states at the width of BERT-base, and a teacher of its size that returns them.

The bench data are MiniLM's, 384 wide; where they are missing, states of the bundled teacher, 144 wide, take their
place. States and atoms, times one matrix with orthonormal rows, are wider and have the same inner products: codes, Gram
matrix and a solver's rounds are those of real data, and neither a teacher of that width nor learning its dictionary is
needed. `LiftedTeacher` does the whole work of its random model and then returns lifted states in place of the model's
own, since codes of random states are poor.

Shapes: N tokens, d hidden width, K atoms.
"""

from typing import NamedTuple

import numpy as np
import torch
from transformers import BertConfig, BertModel

from benchmarks.data import bench_atoms, bench_states, has_bench_data, unit_rows
from mlsm.evaluation.inspection.gpu import bundled_states
from pipeline.teacher import Teacher

LAM = 0.05


class Problem(NamedTuple):
    """States and atoms of one width."""

    hidden_Nd: np.ndarray
    """float64, unit rows"""
    atoms_Kd: np.ndarray
    """float32, row norms <= 1"""

    def lifted(self, width: int) -> "Problem":
        """The same problem in a wider space."""
        narrow = self.hidden_Nd.shape[1]
        basis_dw = np.linalg.qr(np.random.default_rng(0).normal(size=(width, narrow)))[0].T
        return self._replace(
            hidden_Nd=self.hidden_Nd @ basis_dw, atoms_Kd=_shortened(self.atoms_Kd @ basis_dw).astype(np.float32)
        )


def bench_problem() -> Problem:
    """The bench data: 8,192 states of width 384, 3,072 atoms."""
    return Problem(unit_rows(bench_states()), bench_atoms())


def bundled_problem(tokens: int = 8192, atoms: int = 3072) -> Problem:
    """States of the bundled teacher on the bundled text, of width 144; the first of them are the atoms."""
    states_Nd = bundled_states(atoms + tokens).astype(np.float64)
    return Problem(states_Nd[atoms:], _shortened(states_Nd[:atoms]).astype(np.float32))


def available_problem() -> Problem:
    """The bench data, or without them the bundled teacher's states."""
    return bench_problem() if has_bench_data() else bundled_problem()


def toy_problem() -> Problem:
    """Sums of a few of 40 atoms of width 16, for tests."""
    rng = np.random.default_rng(0)
    atoms_Kd = rng.normal(size=(40, 16))
    atoms_Kd /= np.linalg.norm(atoms_Kd, axis=1, keepdims=True)
    hidden_Nd = (rng.random((96, 40)) * (rng.random((96, 40)) < 0.1)) @ atoms_Kd + 0.01 * rng.normal(size=(96, 16))
    hidden_Nd /= np.linalg.norm(hidden_Nd, axis=1, keepdims=True)
    return Problem(hidden_Nd, _shortened(atoms_Kd).astype(np.float32))


def _shortened(atoms_Kd):
    """Atoms that are no longer than 1 after rounding to float32 either."""
    return atoms_Kd / np.maximum(np.linalg.norm(atoms_Kd, axis=1, keepdims=True) * (1 + 1e-7), 1)


class LiftedTeacher(Teacher):
    """A random BERT that returns other hidden states than it computes."""

    states_Nd: torch.Tensor

    @classmethod
    def build(cls, problem: Problem, config: BertConfig, device: str | torch.device, dtype: torch.dtype) -> Teacher:
        """A BERT of this configuration that returns the states of a problem of its width."""
        torch.manual_seed(0)
        model = BertModel(config, add_pooling_layer=False).to(device, dtype).eval()
        teacher = cls("random", config.num_hidden_layers, config.num_hidden_layers, model, fingerprint="")
        teacher.states_Nd = torch.from_numpy(problem.hidden_Nd).to(device, torch.float32)
        return teacher

    def _choose(self, hidden_WLd, tokens_N):
        computed = super()._choose(hidden_WLd, tokens_N)
        rows = torch.arange(computed.numel() // computed.shape[-1], device=computed.device) % len(self.states_Nd)
        return self.states_Nd[rows].view_as(computed)

    def in_float32(self) -> Teacher:
        """Itself: what it returns is float32 already."""
        return self
