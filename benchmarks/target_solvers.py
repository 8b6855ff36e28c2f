"""How the official code's targets, 100 unconverged FISTA steps, differ from the exact ones.

    python -m benchmarks.target_solvers [--every 1] [--steps 100]

Real hidden states and atoms of the bench data, lambda = 0.05. Both solvers code the same rows; of the distributions
P = a / sum(a) it says how many non-zeros they have, their entropy, how much of their mass 32 entries keep, how far the
two are from each other (total variation), and for how many tokens the same atom is the largest. Nothing is timed
(benchmarks.sparse_coding does that), and no students are trained.

Shapes: N tokens, K atoms.
"""

import argparse
import json

import numpy as np

from benchmarks.data import bench_atoms, bench_states, conditions, unit_rows
from pipeline.solvers import nonneg_lasso

LAM, TOP = 0.05, 32


def compared(hidden_Nd, atoms_Kd, lam, steps):
    """Figures of both solvers' distributions: means over the tokens. Both have rows of unit length."""
    codes = {
        "fista": nonneg_lasso(hidden_Nd, atoms_Kd, lam, backend="fista", steps=steps, tol=None),
        "cd": nonneg_lasso(hidden_Nd, atoms_Kd, lam, tol=1e-5),
    }
    dense = {name: each.dense(len(atoms_Kd)) for name, each in codes.items()}
    for codes_NK in dense.values():
        codes_NK /= codes_NK.sum(1, keepdims=True)
    return {
        **{name: _figures(dense[name]) | {"kkt": float(codes[name].kkt.mean())} for name in codes},
        "total_variation": float(0.5 * np.abs(dense["fista"] - dense["cd"]).sum(1).mean()),
        "same_top_atom": float((dense["fista"].argmax(1) == dense["cd"].argmax(1)).mean()),
    }


def _figures(probability_NK):
    logarithm_NK = np.log(probability_NK, out=np.zeros_like(probability_NK), where=probability_NK > 0)
    counts_N = (probability_NK > 0).sum(1)
    return {
        "non_zeros": float(counts_N.mean()),
        "most_non_zeros": int(counts_N.max()),
        "entropy_nats": float(-(probability_NK * logarithm_NK).sum(1).mean()),
        "top_32_mass": float(np.partition(probability_NK, -TOP, axis=1)[:, -TOP:].sum(1).mean()),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1, help="take every n-th of the 8,192 vectors")
    parser.add_argument("--steps", type=int, default=100, help="of FISTA")
    settings = parser.parse_args()
    hidden_Nd = unit_rows(bench_states()[:: settings.every], np.float32)
    figures = compared(hidden_Nd, bench_atoms(), LAM, settings.steps)
    print(
        json.dumps(
            {
                "benchmark": "target_solvers",
                "tokens": len(hidden_Nd),
                "steps": settings.steps,
                **figures,
                "conditions": conditions(),
            }
        )
    )


if __name__ == "__main__":
    main()
