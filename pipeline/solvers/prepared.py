"""Atoms and their Gram matrix in the forms that the solver on a CPU reads, and the correlations that it starts from.

The solver (cd_cpu.py) reads two things that are not exact. Both say how far off they may be, so that its certificate
can look at every atom that the errors might hide:

- Gram entries as 16-bit integers: half the memory traffic, each wrong by at most half of `scale`.
- Correlations of all atoms with a token, by a product of bfloat16 where the processor multiplies those itself (twice as
  fast as float32 on Zen 4). The main directions of the atoms are taken out before and added in float32: what
  is rounded is then much smaller, 0.03 instead of 0.18 on MiniLM's hidden states.

Elsewhere the correlations are a product in float32 (onednn.py). Left out: the solver's rounds (cd_cpu.py).

Shapes: N tokens, n tokens of a task, d hidden width, K atoms, r main directions; K and d are filled up with zeros to a
multiple of LANES where vectors.py reads them.
"""

from typing import NamedTuple

import numpy as np
import torch

from mlsm.common.onednn import multiply
from pipeline.solvers import onednn
from pipeline.solvers.parallel import kernel, run_in_threads, thread_count
from pipeline.solvers.problem import Array, check_gram, numpy_rows, some_rows
from pipeline.solvers.vectors import LANES, SUBTRACTED_ROWS

DIRECTIONS = SUBTRACTED_ROWS  # main directions of the atoms: as many as one pass over a token's gradient adds
ITERATIONS = 4  # of the subspace iteration that finds them
SAMPLE = 1024  # atoms that it looks at, about
ROWS_AT_ONCE = 256  # of the Gram matrix, by one thread
LARGEST_INTEGER = 32767
OUTPUT_ROUNDING = np.float32(0.002)  # a little above 2^-9: bfloat16 has 8 bits
LEAST_SQUARE = 1e-30  # squared norms below it count as zero
SMALL = 3000  # squared norms in units of the scale below which 16 bits are too coarse: norms below 0.3


class View(NamedTuple):
    """What the kernels read."""

    atoms_Kd: np.ndarray  # float32
    gram_KK: np.ndarray  # int16, in units of scale
    scale: np.float32
    square_K: np.ndarray  # float32, squared norms
    main_rK: np.ndarray  # float32, the atoms along the main directions
    has_small: bool  # some atom is so small that its Gram entries need more than 16 bits


class PreparedAtoms(NamedTuple):
    """Atoms and Gram matrix as the solver on a CPU reads them: made once for any number of calls."""

    view: View
    weight_Kd: torch.Tensor  # for the product: without the main directions if it is bfloat16
    weight_rounding: float  # the largest norm of what rounding took off an atom
    norm: float  # the largest of an atom
    basis_rd: np.ndarray  # the main directions, orthonormal; zeros fill up the rows

    def fits(self, atoms_Kd: Array) -> bool:
        """Whether it was made of these atoms, as they are now."""
        atoms_Kd = numpy_rows(atoms_Kd, slice(None), np.float32)
        return np.array_equal(self.view.atoms_Kd[:, : self.weight_Kd.shape[1]], atoms_Kd)


class Correlations(NamedTuple):
    """Correlations of all atoms with the tokens of a task, and how far off they may be.

    Exact ones are within margin_n + relative * abs(rounded_nK) of rounded_nK - along_nr @ main_rK.
    """

    rounded_nK: np.ndarray  # float32, or the bits of bfloat16 as int16
    along_nr: np.ndarray  # float32: minus the tokens along the main directions
    margin_n: np.ndarray  # float32
    relative: np.float32


def prepare(atoms_Kd: Array, gram_KK: Array | None = None) -> PreparedAtoms:
    """Prepare atoms (K, d) for `nonneg_lasso` on a CPU.

    gram_KK  atoms_Kd @ atoms_Kd.T, float32, computed if not given
    """
    atoms_Kd = numpy_rows(atoms_Kd, slice(None), np.float32)
    given = gram_KK is not None
    gram_KK = numpy_rows(gram_KK, slice(None), np.float32) if given else atoms_Kd @ atoms_Kd.T
    num_atoms, width = atoms_Kd.shape
    square_K = gram_KK.diagonal().copy()
    largest = max(float(gram_KK.max()), -float(gram_KK.min()), LEAST_SQUARE)  # a rounded matrix may exceed its diagonal
    if not np.isfinite(largest):
        raise ValueError("the atoms or their Gram matrix hold numbers that are not finite")
    if given:
        exact_K, some = np.einsum("kd,kd->k", atoms_Kd, atoms_Kd), some_rows(num_atoms)
        off_of_rows = np.abs(gram_KK[some] - atoms_Kd[some] @ atoms_Kd.T).max()
        check_gram(float(exact_K.max()), float(max(np.abs(square_K - exact_K).max(), off_of_rows)), largest)
    square_K[square_K < LEAST_SQUARE] = 0  # atoms that never join: 1 / their squared norms would overflow
    integers_KK = aligned_zeros(num_atoms, num_atoms, np.int16)

    def quantise(starts):
        for start in starts:
            rows = slice(start, start + ROWS_AT_ONCE)
            _quantise(gram_KK[rows], np.float32(LARGEST_INTEGER / largest), integers_KK[rows])

    run_in_threads(quantise, range(0, num_atoms, ROWS_AT_ONCE), thread_count())
    basis_rd, main_rK = np.zeros((DIRECTIONS, width), np.float32), aligned_zeros(DIRECTIONS, num_atoms)
    weight_Kd, rounding = torch.from_numpy(atoms_Kd.copy()), 0.0  # the caller may change theirs
    if onednn.multiplies_bfloat16():
        found_rd = _main_directions(atoms_Kd)
        basis_rd[: len(found_rd)] = found_rd
        along_rK = basis_rd @ atoms_Kd.T
        main_rK[:, :num_atoms] = along_rK
        exact_Kd = torch.from_numpy(atoms_Kd - along_rK.T @ basis_rd)
        weight_Kd = exact_Kd.bfloat16()
        rounding = float((weight_Kd.float() - exact_Kd).norm(dim=1).max())
    padded_Kd = aligned_zeros(num_atoms, width)
    padded_Kd[:, :width] = atoms_Kd
    scale = np.float32(largest / LARGEST_INTEGER)
    has_small = bool((square_K[square_K > 0] < SMALL * scale).any())
    view = View(padded_Kd, integers_KK, scale, square_K, main_rK, has_small)
    return PreparedAtoms(view, weight_Kd, rounding, largest**0.5 * (1 + 1e-6), basis_rd)


def correlate_atoms(prepared: PreparedAtoms, hidden_nd: np.ndarray) -> Correlations:
    """Correlations of all atoms with some tokens, in this thread."""
    hidden = torch.from_numpy(hidden_nd)
    norm_n = hidden.norm(dim=1)
    margin_n = norm_n * (hidden_nd.shape[1] * 2.0**-24 * prepared.norm)  # of a sum in float32, at most
    if prepared.weight_Kd.dtype == torch.float32:
        product_nK = onednn.product(hidden, prepared.weight_Kd).numpy()
        return Correlations(product_nK, np.empty((len(hidden), 0), np.float32), margin_n.numpy(), np.float32(0))
    along_nr, rest_nd = _take_out(hidden, prepared.basis_rd)
    rounded_nd = rest_nd.bfloat16()
    lost_n, rest_n = (rounded_nd.float() - rest_nd).norm(dim=1), rest_nd.norm(dim=1)
    # Cauchy-Schwarz, once for each rounded factor; the last term is float32's share of taking directions out
    margin_n += (
        lost_n * prepared.norm + rest_n * (1.01 * prepared.weight_rounding) + norm_n * (1e-6 * max(1.0, prepared.norm))
    )
    product_nK = multiply(rounded_nd, prepared.weight_Kd).view(torch.int16).numpy()
    return Correlations(product_nK, along_nr.numpy(), margin_n.numpy(), OUTPUT_ROUNDING)


def _take_out(hidden_nd, basis_rd):
    """Tokens along the main directions, negated, and what is left of the tokens, in float32.

    By NumPy where torch may round the factors, as torch.set_float32_matmul_precision allows it: the margin of
    `correlate` would not cover that.
    """
    if onednn.is_exact():
        along_nr = -hidden_nd @ torch.from_numpy(basis_rd).T
        return along_nr, torch.addmm(hidden_nd, along_nr, torch.from_numpy(basis_rd))
    along_nr = -(hidden_nd.numpy() @ basis_rd.T)
    return torch.from_numpy(along_nr), torch.from_numpy(hidden_nd.numpy() + along_nr @ basis_rd)


def aligned_zeros(rows: int, columns: int, dtype: type = np.float32) -> np.ndarray:
    """Zeros (rows, columns up to a multiple of LANES) that begin with a cache line: others take two reads a vector."""
    columns = -(-columns // LANES) * LANES
    memory = np.zeros(rows * columns * np.dtype(dtype).itemsize + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : len(memory) - 64 + start].view(dtype).reshape(rows, columns)


def _main_directions(atoms_Kd):
    """The leading right singular vectors of the atoms, nearly, by subspace iteration from a fixed start."""
    some_nd = atoms_Kd[:: max(1, len(atoms_Kd) // SAMPLE)]
    count = min(DIRECTIONS, *atoms_Kd.shape)
    basis_rd = np.random.default_rng(0).normal(size=(count, atoms_Kd.shape[1])).astype(np.float32)
    for _ in range(ITERATIONS):
        basis_rd = np.linalg.qr((basis_rd @ some_nd.T @ some_nd).T)[0].T
    return basis_rd


@kernel
def _quantise(gram_nK, factor, integers_nK):
    for i in range(gram_nK.shape[0]):
        for j in range(gram_nK.shape[1]):
            integers_nK[i, j] = np.int16(np.rint(gram_nK[i, j] * factor))
