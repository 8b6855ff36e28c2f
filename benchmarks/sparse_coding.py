"""Speed and quality of sparse coding on real hidden states, against SPAMS, FISTA and the bare matmul.

    python -m benchmarks.sparse_coding

Task: 8,192 unit-length hidden states of width 384, 3072 atoms, lambda 0.05 (the bench data). Rivals, in turn
in every round, so that a busy machine slows all alike; ratios are taken within a round:

- ours          nonneg_lasso to a KKT violation of 1e-3, float32; Gram matrix prepared, as when encoding
- SPAMS         lasso (LARS, C++) in float32 with its Gram matrix given, which reaches the optimum to 1e-8, 1.5 times as
                fast as float64; float32 with the dictionary given ends 7e-4 above it
- FISTA         100 steps, as in the official code, on the first 1,024 tokens, its step size given, with products of
                torch or oneDNN, whichever is faster in the round
- plain torch   nonneg_lasso with backend "torch", made for GPUs that cannot run kernels, here on the CPU, on the same
                tokens; its anchor is FISTA: `torch_solver_vs_fista100`
- matmul bound  the correlations of all atoms alone by NumPy, 1,024-row chunks into a kept buffer
- oneDNN bound  the same product by oneDNN, in the pieces and threads of ours
- torch bound   the same by torch's own linear layer (MKL), in one piece; `cpu_vs_best_matmul_bound` compares with the
                fastest of the three in the round

Compilation is left out. Gaps: mean objective in float64 over the optimum of the same tokens, minus 1; ours
against bench/reference.json. Peak memory is of coding 65,536 tokens, beyond inputs and Gram, result included.
"""

import json
import time
from functools import partial

import numpy as np
import torch

from benchmarks.data import (
    SPAMS_REQUIREMENT,
    bench_atoms,
    bench_reference,
    bench_states,
    conditions,
    forget_peak,
    memory_mb,
    require,
    unit_rows,
    with_quartiles,
)
from benchmarks.official_step import fista_by_onednn
from pipeline.solvers import nonneg_lasso, onednn, prepare
from pipeline.solvers.cd_cpu import TASK_ROWS
from pipeline.solvers.fista import STEPS, fista_steps
from pipeline.solvers.parallel import run_in_threads, thread_count
from pipeline.solvers.problem import kkt_violation, objective

ROUNDS, FISTA_TOKENS, MEMORY_TOKENS, CHUNK_ROWS = 5, 1024, 65_536, 1024


def main():
    require("spams", SPAMS_REQUIREMENT)
    task = Task()
    memory = peak_memory_mb(task)
    rates = measure(
        {
            "cpu": task.ours,
            "spams": task.spams,
            "fista100_torch": partial(task.fista, fista_steps),
            "fista100_onednn": partial(task.fista, fista_by_onednn),
            "torch_solver": task.torch_solver,
            "matmul_bound": task.matmul,
            "onednn_bound": task.onednn,
            "torch_bound": task.torch,
        }
    )
    result = {
        "benchmark": "sparse_coding",
        **speeds(rates),
        **task.quality(),
        "peak_memory_mb": memory,
        "threads": thread_count(),
        "rounds": ROUNDS,
        **conditions("spams-bin"),
    }
    show(result)
    print(json.dumps(result))


class Task:
    """The data, and one method for each rival that codes it and returns how many tokens it coded."""

    def __init__(self):
        self.reference = bench_reference()
        self.lam = self.reference["lambda"]
        self.atoms_Kd = bench_atoms()
        self.gram_KK, self.exact_gram_KK = prepare(self.atoms_Kd), self.atoms_Kd @ self.atoms_Kd.T
        self.exact_Nd = unit_rows(bench_states())
        self.hidden_Nd = self.exact_Nd.astype(np.float32)
        self.step = 1 / float(np.linalg.eigvalsh(self.atoms_Kd.T @ self.atoms_Kd)[-1])
        self.fortran_dN = np.asfortranarray(self.hidden_Nd.T)
        self.fortran_dK = np.asfortranarray(self.atoms_Kd.T)
        self.fortran_KK = np.asfortranarray(self.exact_gram_KK)
        self.correlations = np.empty((CHUNK_ROWS, len(self.atoms_Kd)), np.float32)

    def ours(self):
        self.our_codes = nonneg_lasso(self.hidden_Nd, self.atoms_Kd, self.lam, gram_KK=self.gram_KK)
        return len(self.hidden_Nd)

    def spams(self):
        correlations_KN = np.asfortranarray(self.fortran_dK.T @ self.fortran_dN)
        self.spams_codes = spams_lasso(self.fortran_dN, self.lam, Q=self.fortran_KK, q=correlations_KN)
        return len(self.hidden_Nd)

    def fista(self, solve):
        hidden_Nd, atoms_Kd = torch.from_numpy(self.hidden_Nd[:FISTA_TOKENS]), torch.from_numpy(self.atoms_Kd)
        self.fista_codes = solve(hidden_Nd, atoms_Kd, self.lam, self.step, STEPS).numpy()
        return FISTA_TOKENS

    def torch_solver(self):
        self.torch_codes = nonneg_lasso(
            self.hidden_Nd[:FISTA_TOKENS], self.atoms_Kd, self.lam, gram_KK=self.exact_gram_KK, backend="torch"
        )
        return FISTA_TOKENS

    def matmul(self):
        for start in range(0, len(self.hidden_Nd), CHUNK_ROWS):
            np.matmul(self.hidden_Nd[start : start + CHUNK_ROWS], self.atoms_Kd.T, out=self.correlations)
        return len(self.hidden_Nd)

    def onednn(self):
        correlate(self.hidden_Nd, self.atoms_Kd)
        return len(self.hidden_Nd)

    def torch(self):
        with torch.inference_mode():
            torch.nn.functional.linear(torch.from_numpy(self.hidden_Nd), torch.from_numpy(self.atoms_Kd))
        return len(self.hidden_Nd)

    def quality(self):
        """Gaps and certificates of the last codes, in float64."""
        ours_N = objective(self.exact_Nd, self.atoms_Kd, self.our_codes, self.lam)
        spams_N = objective(self.exact_Nd, self.atoms_Kd, self.spams_codes.T.toarray(), self.lam)
        fista_N = objective(self.exact_Nd[:FISTA_TOKENS], self.atoms_Kd, self.fista_codes, self.lam)
        torch_N = objective(self.exact_Nd[:FISTA_TOKENS], self.atoms_Kd, self.torch_codes, self.lam)
        optimum = self.reference["mean_objective_per_token"]
        return {
            "cpu_relative_objective_gap": ours_N.mean() / optimum - 1,
            "spams_relative_objective_gap": spams_N.mean() / optimum - 1,
            "fista100_relative_objective_gap": fista_N.mean() / spams_N[:FISTA_TOKENS].mean() - 1,
            "torch_solver_relative_objective_gap": torch_N.mean() / spams_N[:FISTA_TOKENS].mean() - 1,
            "torch_solver_kkt_max": kkt_violation(
                self.exact_Nd[:FISTA_TOKENS], self.atoms_Kd, self.torch_codes, self.lam
            ).max(),
            "kkt_max": kkt_violation(self.exact_Nd, self.atoms_Kd, self.our_codes, self.lam).max(),
            "nonzeros_per_token": len(self.our_codes.values) / len(self.our_codes),
        }


def spams_lasso(hidden_dN, lam, **atoms):
    """Codes (K, N) by SPAMS on all cores. Arrays of one type, float64 or float32, as Fortran has them.

    atoms  D, or Q = D'D and q = D'X
    """
    import spams

    return spams.lasso(hidden_dN, lambda1=lam, mode=2, pos=True, numThreads=thread_count(), **atoms)


def correlate(hidden_Nd, atoms_Kd):
    """The correlations alone, by oneDNN in the pieces and threads of the solver."""
    atoms_Kd = torch.from_numpy(atoms_Kd)

    @onednn.one_thread()
    def work(tasks):
        for rows_nd in tasks:
            onednn.product(rows_nd, atoms_Kd)

    run_in_threads(work, torch.from_numpy(hidden_Nd).split(TASK_ROWS), thread_count())


def measure(rivals):
    """Tokens per second of every rival in every round, after one round that does not count."""
    rates = {name: [] for name in rivals}
    for round_number in range(ROUNDS + 1):
        for name, rival in rivals.items():
            clock = time.perf_counter()
            tokens = rival()
            if round_number:
                rates[name].append(tokens / (time.perf_counter() - clock))
    return rates


def speeds(rates):
    """Medians, and ratios of the same round with their quartiles."""
    fastest = {
        "fista100": ("fista100_torch", "fista100_onednn"),
        "best_matmul_bound": ("matmul_bound", "onednn_bound", "torch_bound"),
    }
    rates = rates | {name: np.max([rates[form] for form in forms], axis=0) for name, forms in fastest.items()}
    figures = {f"{name}_tokens_per_s": float(np.median(values)) for name, values in rates.items()}
    for rival in ("spams", "fista100", "matmul_bound", "onednn_bound", "torch_bound", "best_matmul_bound"):
        figures |= with_quartiles(f"cpu_vs_{rival}", np.array(rates["cpu"]) / rates[rival])
    return figures | with_quartiles("torch_solver_vs_fista100", np.array(rates["torch_solver"]) / rates["fista100"])


def peak_memory_mb(task):
    """Most memory that coding MEMORY_TOKENS adds to what the process has; None where Linux does not tell."""
    task.ours()  # compiled now
    hidden_Nd = np.resize(task.hidden_Nd, (MEMORY_TOKENS, task.hidden_Nd.shape[1]))
    try:
        forget_peak()
    except OSError:
        return None
    before = memory_mb("VmRSS")
    nonneg_lasso(hidden_Nd, task.atoms_Kd, task.lam, gram_KK=task.gram_KK)
    return round(memory_mb("VmHWM") - before, 1)


def show(result):
    print(
        f"ours          {result['cpu_tokens_per_s']:9,.0f} tokens/s, "
        f"objective {result['cpu_relative_objective_gap']:.1e} above the optimum, "
        f"largest KKT violation {result['kkt_max']:.1e}, {result['peak_memory_mb']} MB"
    )
    print(
        f"SPAMS         {result['spams_tokens_per_s']:9,.0f} tokens/s, "
        f"{result['spams_relative_objective_gap']:.1e}: ours is {result['cpu_vs_spams']:.1f} times as fast"
    )
    print(
        f"FISTA 100     {result['fista100_tokens_per_s']:9,.0f} tokens/s, "
        f"{result['fista100_relative_objective_gap']:.1e}: "
        f"ours is {result['cpu_vs_fista100']:.0f} times as fast"
    )
    print(
        f"plain torch   {result['torch_solver_tokens_per_s']:9,.0f} tokens/s, "
        f"{result['torch_solver_relative_objective_gap']:.1e}: "
        f"{result['torch_solver_vs_fista100']:.0f} times as fast as FISTA"
    )
    for name, bound in (
        ("matmul bound", "matmul_bound"),
        ("oneDNN bound", "onednn_bound"),
        ("torch bound ", "torch_bound"),
    ):
        print(
            f"{name}  {result[f'{bound}_tokens_per_s']:9,.0f} tokens/s: "
            f"ours reaches {result[f'cpu_vs_{bound}']:.2f} of it"
        )


if __name__ == "__main__":
    main()
