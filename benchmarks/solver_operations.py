"""Operations of the solver's coordinate updates on real hidden states.

The constants of mlsm/evaluation/studies/flops/solver.py are these.

    python -m benchmarks.solver_operations

The correlations are a matrix product of a known size. The coordinate updates depend on the data, so their operations
are counted: the kernels of cd_cpu.py run as Python, with NumPy in place of the hot loops, each adding what it computes
to a tally. The codes are compared with those of the compiled solver. Time is measured in sparse_coding.py.
"""

import json
import os
import subprocess
import sys

import numpy as np

from benchmarks.data import bench_atoms, bench_states, conditions, unit_rows
from pipeline.solvers.vectors import LANES

TOKENS, LAM, TOL = 400, 0.05, 1e-3
COUNTING = "MLSM_COUNTING"


def main():
    """Count in a process whose kernels are not compiled, check against this one, print JSON."""
    if COUNTING in os.environ:
        print(json.dumps(_counted(*_vectors())))
        return
    environment = os.environ | {"NUMBA_DISABLE_JIT": "1", COUNTING: "1"}
    counting = [sys.executable, "-m", "benchmarks.solver_operations"]
    counted = json.loads(subprocess.run(counting, env=environment, capture_output=True, text=True, check=True).stdout)
    from pipeline.solvers import nonneg_lasso

    hidden_Nd, atoms_Kd = _vectors()
    codes = nonneg_lasso(hidden_Nd, atoms_Kd, LAM, tol=TOL)
    total = float(codes.values.sum(dtype=np.float64))
    difference = abs(total - counted.pop("sum")) / total
    if difference > 1e-4:
        sys.exit(f"the counted solver's codes differ from the compiled one's by {difference:.1e}")
    sizes = {
        "tokens": TOKENS,
        "d": hidden_Nd.shape[1],
        "k": len(atoms_Kd),
        "lam": LAM,
        "tol": TOL,
        "nnz_per_token": len(codes.values) / TOKENS,
    }
    found = {"benchmark": "solver_operations"} | sizes | {"codes_differ_by": difference} | counted
    print(json.dumps(found | conditions()))


def _vectors():
    states_Nd = bench_states()
    return unit_rows(states_Nd[:: len(states_Nd) // TOKENS][:TOKENS], np.float32), bench_atoms()


def _counted(hidden_Nd, atoms_Kd):
    from pipeline.solvers import cd_cpu, working_set

    tally = {"updated_rows": 0, "inner": 0}
    for name, function in _loops(tally).items():
        for module in (cd_cpu, working_set):
            if hasattr(module, name):
                setattr(module, name, function)
    gram_KK = atoms_Kd @ atoms_Kd.T
    codes = cd_cpu.solve(hidden_Nd, atoms_Kd, gram_KK, LAM, TOL)
    tokens = len(hidden_Nd)
    return {
        "updated_rows_per_token": tally["updated_rows"] / tokens,
        "inner_operations_per_token": tally["inner"] / tokens,
        "sum": float(codes.values.sum(dtype=np.float64)),
    }


def _loops(tally):
    """vectors.py in NumPy. `updated_rows` counts rows of the Gram matrix taken off all k correlations."""

    def combine(out, weights, rows_mw, count, width):
        out[:width] = weights[:count] @ rows_mw[:count, :width]
        tally["inner"] += 2 * count * width

    def subtract_rows(grad_K, weights, matrix_KK, rows, count):
        grad_K[: matrix_KK.shape[1]] -= weights[:count] @ matrix_KK[rows[:count]]
        if matrix_KK.dtype == np.int16:  # the Gram matrix; atoms and main directions are float32
            tally["updated_rows"] += int(count)
        else:
            tally["inner"] += 2 * int(count) * matrix_KK.shape[1]

    def row_products(out, vector, matrix_Kd, rows, count):
        out[:count] = matrix_Kd[rows[:count]] @ vector
        tally["inner"] += 2 * int(count) * matrix_Kd.shape[1]

    def lanes_above(grad_K, factor, sizes_K, place, cut):
        lanes = slice(place, place + LANES)
        above = np.flatnonzero(grad_K[lanes] + factor * np.abs(sizes_K[lanes]) > cut)
        return sum(1 << lane for lane in above.tolist())

    def lowest_bit(bits):
        return (bits & -bits).bit_length() - 1

    def widen(out, matrix_nK, row):
        values = matrix_nK[row]
        if values.dtype == np.int16:
            values = (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        out[: len(values)] = values

    def block_maxima(grad_K, block_max):
        whole = len(grad_K) // len(block_max) * len(block_max)
        block_max[:] = grad_K[:whole].reshape(-1, len(block_max)).max(0)
        rest = grad_K[whole:]
        block_max[: len(rest)] = np.maximum(block_max[: len(rest)], rest)

    def dot(left, right, width):
        tally["inner"] += 2 * width
        return left[:width] @ right[:width]

    def add_scaled(out, left, factor, right, width):
        out[:width] = left[:width] + np.float32(factor) * right[:width]
        tally["inner"] += 2 * width

    def residual_on_support(residual, excess, code, width):
        residual[:width] = np.where(code[:width] > 0, excess[:width], 0)
        tally["inner"] += 2 * width
        return residual[:width] @ residual[:width]

    def step_to_zero(code, direction, width):
        falls = direction[:width] < 0
        tally["inner"] += width
        return np.min(-code[:width][falls] / direction[:width][falls], initial=np.float32(1e30))

    return {
        "combine": combine,
        "subtract_rows": subtract_rows,
        "row_products": row_products,
        "lanes_above": lanes_above,
        "lowest_bit": lowest_bit,
        "widen": widen,
        "prefetch_row": lambda matrix_Kd, row: None,
        "block_maxima": block_maxima,
        "largest": np.max,
        "dot": dot,
        "add_scaled": add_scaled,
        "residual_on_support": residual_on_support,
        "step_to_zero": step_to_zero,
    }


if __name__ == "__main__":
    main()
