"""Sparse coding against what else one could take: tokens a second at equal objective, for several widths and k.

    python -m benchmarks.rivals_solvers [--quick] [--k 1536 3072 6144 12288] [--mpnet DIRECTORY]

Rows: the bench test vectors (MiniLM's, 384 wide). With --mpnet, the directory that `benchmarks.real_teachers mpnet`
fills, also hidden states of MPNet after layer 10 (768 wide) on the Wikipedia text of the evaluation data. For each k a
dictionary is learned from other rows of that teacher in one pass, lambda 0.05. --quick: k = 3,072, three rounds.

All solve 1/2 ||h - a D||^2 + lambda sum(a), a >= 0, on all cores; Gram matrix and other preparation are outside the
clock where the library lets one hand them over. Each setting of a rival is tried on a few rows. Timed is the fastest
whose mean objective (float64) is within 1e-5 of the optimum, relative, and where none is, the nearest. Ours is timed as
it encodes, which is nearer than that. The optimum is that of ours at a KKT violation of 1e-6; `optimum_within` bounds
how far it is above the true one (its duality gap). All take turns in every round; a slow one gets fewer rows. Ratios
are taken within a round.

- ours          nonneg_lasso, KKT violation 1e-4, float32
- SPAMS         lasso (LARS, C++) in float64, all threads; with D, or with our Gram matrix and the correlations
- scikit-learn  sparse_encode, positive=True: coordinate descent of so many passes, float64 or float32, in threads, the
                Gram matrix given; LARS in float64, in processes, up to k = 3,072 (the Gram matrix is copied)
- skglm         AndersonCD (working sets), row after row, in processes; float64 or float32
- celer         celer_path at one penalty, likewise
- FISTA         the official code's 100 steps, in torch, 1 / L given, whatever its gap
- TopK encoder  of a sparse autoencoder: the n largest of relu(h W + b), n the mean number of non-zeros of ours. W and b
                are trained for this dictionary on the objective itself: 200 steps of Adam from centred rows times D',
                scaled. It solves nothing: its gap says how far off one product and a cut are

Packages that are missing are left out, with the command that installs them. Prints a table in Markdown, and JSON as its
last line.

Shapes: N tokens, d hidden width, K atoms.
"""

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import scipy.sparse
import torch

from benchmarks.data import (
    SPAMS_REQUIREMENT,
    conditions,
    data_file,
    find_module,
    has_bench_data,
    unit_rows,
    with_quartiles,
)
from benchmarks.hidden_states import sample_rows
from benchmarks.official_step import fista_by_onednn
from benchmarks.sparse_coding import spams_lasso
from benchmarks.sparse_coding_scaling import vectors
from pipeline.config import LearnConfig
from pipeline.dictionary import DictionarySettings, LearningSchedule, learn_dictionary
from pipeline.solvers import nonneg_lasso, prepare
from pipeline.solvers.fista import STEPS, fista_steps
from pipeline.solvers.parallel import thread_count
from pipeline.solvers.problem import duality_gap, objective

REQUIREMENTS = {
    "spams": SPAMS_REQUIREMENT,
    "sklearn": "scikit-learn",
    "skglm": "skglm==0.5",
    "celer": "celer==0.7.4",
}
ATOMS, QUICK_ATOMS, LAM, SEED, CLOSE = (1536, 3072, 6144, 12_288), (3072,), 0.05, 0, 1e-5
ROUNDS, QUICK_ROUNDS, TRIED, MOST_ROWS, ROUND_SECONDS = 5, 3, 32, 2048, 0.5
OURS, TIGHT = 1e-4, 1e-6  # KKT violations
MPNET_LAYER, MPNET_ROWS, MPNET_TEXT = 10, 20_480, 200_000  # rows in all, from a sample of so many tokens
FISTA_ROWS, SKLEARN, MOST_ATOMS_OF_LARS = 1024, (30, 100, 300, 1000), 3072
SKGLM, CELER = (1e-3, 3e-4, 1e-4, 1e-5, 1e-6), (1e-3, 1e-4, 1e-5, 1e-6, 1e-7)  # KKT violation; duality gap, relative
SAE_STEPS, SAE_ROWS, SAE_RATE = 200, 256, 1e-3


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="k = 3,072 and three rounds")
    parser.add_argument("--k", type=int, nargs="+", help="atoms")
    parser.add_argument("--mpnet", type=Path, help="directory of the teacher that is 768 wide")
    given = parser.parse_args()
    left_out = {name: f"pip install {wanted}" for name, wanted in REQUIREMENTS.items() if not find_module(name, wanted)}
    if not given.mpnet:
        left_out["MPNet"] = "python -m benchmarks.real_teachers mpnet DIRECTORY, then --mpnet DIRECTORY"
        print(f"MPNet is left out: {left_out['MPNet']}")
    rows = []
    for source, (train_Nd, test_Nd) in sources(given.mpnet):
        for k in given.k or (QUICK_ATOMS if given.quick else ATOMS):
            atoms_Kd = learn_dictionary(train_Nd, DictionarySettings(k, LAM, SEED), LearningSchedule(1.0)).atoms_Kd
            figures = measure(train_Nd, test_Nd[:MOST_ROWS], atoms_Kd, QUICK_ROUNDS if given.quick else ROUNDS)
            rows.append({"source": source, "d": train_Nd.shape[1], "k": k} | figures)
    result = {"benchmark": "rivals_solvers", "rows": rows, "left_out": left_out, "threads": thread_count()}
    print(markdown(result))
    print(json.dumps(result | conditions("spams-bin", "scikit-learn", "skglm", "celer")))


def sources(mpnet):
    """Training and test rows of unit length, float32, of each teacher that is at hand."""
    if has_bench_data():
        yield "MiniLM", vectors(384)
    if mpnet:
        text = str(data_file("text/wiki_en_2014/wiki_en_2014_small.txt.xz"))
        config = LearnConfig(
            teacher=str(mpnet), layer=MPNET_LAYER, k=1, corpus=text, max_tokens=MPNET_TEXT, device="cpu"
        )
        rows_Nd = sample_rows(config, MPNET_ROWS, SEED)
        yield "MPNet", (rows_Nd[MOST_ROWS:], rows_Nd[:MOST_ROWS])


# -- measuring -------------------------------------------------------------------------------------------


class Problem(NamedTuple):
    """Rows and atoms, the atoms also as a file for processes, and what may be prepared of them."""

    hidden_Nd: np.ndarray
    """float32, unit rows"""
    exact_Nd: np.ndarray
    """The same in float64, unit rows again"""
    atoms_Kd: np.ndarray
    """float32"""
    path: Path
    """Of the atoms"""


class Coder(NamedTuple):
    """One setting of one rival."""

    setting: str
    code: Callable
    """From the first n rows to codes: Codes, or an array (n, K)"""
    gap: float
    rate: float
    """Rows a second"""


def measure(train_Nd, test_Nd, atoms_Kd, rounds):
    """Rates and gaps of everybody on one dictionary."""
    with tempfile.TemporaryDirectory() as directory:
        np.save(Path(directory) / "atoms.npy", atoms_Kd)
        problem = Problem(test_Nd, unit_rows(test_Nd), atoms_Kd, Path(directory) / "atoms.npy")
        tight = nonneg_lasso(test_Nd, atoms_Kd, LAM, tol=TIGHT)
        tight_N = objective(problem.exact_Nd, atoms_Kd, tight, LAM)
        within = duality_gap(problem.exact_Nd, atoms_Kd, tight, LAM).mean() / tight_N.mean()
        coders = {
            name: choose(problem, settings, tight_N) for name, settings in rivals(problem, train_Nd, tight).items()
        }
        rates = take_turns(coders, rounds)
        gaps = {
            name: gap(problem, coder.code(rows_of_a_round(coder)), tight_N) for name, coder in coders.items()
        }  # of the rows of a round
    figures = {
        name: {
            "setting": coder.setting,
            **with_quartiles("tokens_per_s", rates[name]),
            **with_quartiles("ours_over_it", np.array(rates["ours"]) / rates[name]),
            "gap": gaps[name],
        }
        for name, coder in coders.items()
    }
    return {"optimum_within": float(within), "non_zeros": len(tight.values) / len(tight), "solvers": figures}


def choose(problem, settings, best_N):
    """The fastest setting that is close to the optimum of a few rows; where none is, the nearest.

    settings  for each variant its settings, from loose to tight: the first that is close counts, and none is tried
              behind one that is slower than a close one of another variant already
    """
    tried = []
    for variant in settings:
        for setting, code in variant:
            code(TRIED)  # compiles in every process
            clock = time.perf_counter()
            codes = code(TRIED)
            rate = TRIED / (time.perf_counter() - clock)
            tried.append(Coder(setting, code, gap(problem, codes, best_N), rate))
            if tried[-1].gap <= CLOSE or any(other.gap <= CLOSE and other.rate > rate for other in tried):
                break
    close = [coder for coder in tried if coder.gap <= CLOSE]
    return max(close, key=lambda coder: coder.rate) if close else min(tried, key=lambda coder: coder.gap)


def gap(problem, codes, best_N):
    """Mean objective of the first rows over that of the best codes, minus 1."""
    codes = codes.toarray() if scipy.sparse.issparse(codes) else codes
    found_N = objective(problem.exact_Nd[: len(codes)], problem.atoms_Kd, codes, LAM)
    return float(found_N.mean() / best_N[: len(codes)].mean() - 1)


def take_turns(coders, rounds):
    """Rows a second of everybody in every round."""
    rates = {name: [] for name in coders}
    for _ in range(rounds):
        for name, coder in coders.items():
            count, coded, clock = rows_of_a_round(coder), 0, time.perf_counter()
            while coded == 0 or time.perf_counter() - clock < ROUND_SECONDS / 2:
                coder.code(count)
                coded += count
            rates[name].append(coded / (time.perf_counter() - clock))
    return rates


def rows_of_a_round(coder):
    return int(min(max(coder.rate * ROUND_SECONDS, TRIED), MOST_ROWS))


# -- rivals ----------------------------------------------------------------------------------------------


def rivals(problem, train_Nd, tight):
    """For every rival its variants, each with its settings from loose to tight."""
    prepared, gram_KK = prepare(problem.atoms_Kd), problem.atoms_Kd @ problem.atoms_Kd.T
    ours = partial(code_ours, problem, prepared)
    step = 1 / torch.linalg.eigvalsh(torch.from_numpy(problem.atoms_Kd.T.astype(float) @ problem.atoms_Kd))[-1].item()
    fista = partial(code_with_fista, *(torch.from_numpy(x) for x in (problem.hidden_Nd, problem.atoms_Kd)), step)
    found = {
        "ours": [[(f"KKT {OURS:g}", ours)]],
        "FISTA": [
            [(f"{STEPS} steps, products by {library}", partial(fista, solve, STEPS))]
            for library, solve in (("torch", fista_steps), ("oneDNN", fista_by_onednn))
        ],
    }
    if find_module("spams"):
        found["SPAMS"] = spams_variants(problem, gram_KK)
    if find_module("sklearn"):
        found["scikit-learn"] = sklearn_variants(problem, gram_KK)
    for name, rows_coder, tolerances in (("skglm", skglm_rows, SKGLM), ("celer", celer_rows, CELER)):
        if find_module(name):
            found[name] = [
                [
                    (f"tol {tol:g}, {dtype}", partial(in_processes, rows_coder, problem, dtype, tol))
                    for tol in tolerances
                ]
                for dtype in ("float64", "float32")
            ]
    kept = round(len(tight.values) / len(tight))
    found["TopK encoder"] = [[(f"{kept} kept", TopK(problem, train_Nd, kept))]]
    return found


def code_ours(problem, prepared, count):
    return nonneg_lasso(problem.hidden_Nd[:count], problem.atoms_Kd, LAM, gram_KK=prepared, tol=OURS)


@torch.inference_mode()
def code_with_fista(hidden_Nd, atoms_Kd, step, solve, steps, count):
    parts = [solve(rows_nd, atoms_Kd, LAM, step, steps) for rows_nd in hidden_Nd[:count].split(FISTA_ROWS)]
    return torch.cat(parts).numpy()


def spams_variants(problem, gram_KK):
    variants = []
    for dtype in (np.float64, np.float32):
        fortran_dN = np.asfortranarray(problem.exact_Nd.T, dtype)
        fortran_dK, fortran_KK = np.asfortranarray(problem.atoms_Kd.T, dtype), np.asfortranarray(gram_KK, dtype)

        def alone(count, fortran_dN=fortran_dN, fortran_dK=fortran_dK):
            return spams_lasso(np.asfortranarray(fortran_dN[:, :count]), LAM, D=fortran_dK).T

        def prepared(count, fortran_dN=fortran_dN, fortran_dK=fortran_dK, fortran_KK=fortran_KK):
            rows_dN = np.asfortranarray(fortran_dN[:, :count])
            return spams_lasso(rows_dN, LAM, Q=fortran_KK, q=np.asfortranarray(fortran_dK.T @ rows_dN)).T

        variants += [[(f"with D, {dtype.__name__}", alone)], [(f"Gram matrix given, {dtype.__name__}", prepared)]]
    return variants


def sklearn_variants(problem, gram_KK):
    from joblib import parallel_backend
    from sklearn.decomposition import sparse_encode

    def code(algorithm, backend, rows_Nd, atoms_Kd, gram_KK, passes, count):
        with parallel_backend(backend), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # every row that misses its tolerance of 1e-8 warns
            return sparse_encode(
                rows_Nd[:count],
                atoms_Kd,
                gram=gram_KK,
                algorithm=algorithm,
                alpha=LAM,
                max_iter=passes,
                n_jobs=thread_count(),
                check_input=False,
                positive=True,
            )

    variants = []
    for dtype in (np.float64, np.float32):
        given = [array.astype(dtype) for array in (problem.exact_Nd, problem.atoms_Kd, gram_KK)]
        descent = partial(code, "lasso_cd", "threading", *given)
        variants.append([(f"{passes} passes, {dtype.__name__}", partial(descent, passes)) for passes in SKLEARN])
    if len(problem.atoms_Kd) <= MOST_ATOMS_OF_LARS:
        given = problem.exact_Nd, problem.atoms_Kd.astype(np.float64), gram_KK.astype(np.float64)
        variants.append([("LARS", partial(code, "lasso_lars", "loky", *given, 1000))])
    return variants


def in_processes(rows_coder, problem, dtype, tolerance, count):
    """Codes of the first rows, in as many processes as there are threads; each has read the atoms before."""
    from joblib import Parallel, delayed

    parts = np.array_split(problem.exact_Nd[:count].astype(dtype), thread_count())
    work = (delayed(rows_coder)(str(problem.path), rows_nd, tolerance) for rows_nd in parts)
    return scipy.sparse.vstack(Parallel(n_jobs=thread_count())(work)).tocsr()


@lru_cache(maxsize=2)
def design(path, dtype):
    """The atoms as columns, as Fortran lays them out."""
    return np.asfortranarray(np.load(path).T, dtype)


def celer_rows(path, rows_nd, tolerance):
    from celer import celer_path

    atoms_dK, codes = design(path, rows_nd.dtype.name), []
    alphas = np.array([LAM / len(atoms_dK)], rows_nd.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rows that miss their tolerance
        for row_d in rows_nd:
            _, code_K1, _ = celer_path(atoms_dK, row_d, "lasso", alphas=alphas, tol=tolerance, positive=True)
            codes.append(scipy.sparse.csr_matrix(code_K1.T))
    return scipy.sparse.vstack(codes) if codes else scipy.sparse.csr_matrix((0, atoms_dK.shape[1]))


def skglm_rows(path, rows_nd, tolerance):
    atoms_dK, codes = design(path, rows_nd.dtype.name), []
    datafit, penalty, solver = skglm_parts(len(atoms_dK), rows_nd.dtype == np.float32, tolerance)
    zeros_d, zeros_K = (np.zeros(size, rows_nd.dtype) for size in atoms_dK.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for row_d in rows_nd:
            found = solver.solve(atoms_dK, row_d, datafit, penalty, w_init=zeros_K.copy(), Xw_init=zeros_d.copy())
            codes.append(scipy.sparse.csr_matrix(found[0]))
    return scipy.sparse.vstack(codes) if codes else scipy.sparse.csr_matrix((0, atoms_dK.shape[1]))


@lru_cache
def skglm_parts(width, narrow, tolerance):
    from skglm.datafits import Quadratic
    from skglm.penalties import L1
    from skglm.solvers import AndersonCD
    from skglm.utils.jit_compilation import compiled_clone

    parts = (compiled_clone(part, to_float32=narrow) for part in (Quadratic(), L1(LAM / width, positive=True)))
    return *parts, AndersonCD(tol=tolerance / width, fit_intercept=False)


class TopK:
    """The encoder of a TopK autoencoder whose decoder is the dictionary."""

    def __init__(self, problem, train_Nd, kept):
        self.hidden_Nd, self.atoms_Kd, self.kept = *map(torch.from_numpy, (problem.hidden_Nd, problem.atoms_Kd)), kept
        train_Nd = torch.from_numpy(train_Nd)
        self.weight_Kd, self.bias_K = self.atoms_Kd.clone(), -self.atoms_Kd @ train_Nd.mean(0) - LAM
        values, decoded_nd = self.decode(train_Nd[:1024])
        best = (decoded_nd * train_Nd[:1024]).sum() - LAM * values.sum()  # of all codes times one factor
        scale = best.clamp_min(1e-3 * decoded_nd.square().sum()) / decoded_nd.square().sum()
        self.weight_Kd, self.bias_K = ((scale * part).requires_grad_() for part in (self.weight_Kd, self.bias_K))
        optimizer = torch.optim.Adam([self.weight_Kd, self.bias_K], SAE_RATE)
        torch.manual_seed(SEED)
        for _ in range(SAE_STEPS):
            rows_nd = train_Nd[torch.randint(len(train_Nd), (SAE_ROWS,))]
            values, decoded_nd = self.decode(rows_nd)
            loss = ((rows_nd - decoded_nd).square().sum(1) / 2 + LAM * values.sum(1)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def decode(self, rows_nd):
        values, atoms = self.encode(rows_nd)
        return values, torch.einsum("nk,nkd->nd", values, self.atoms_Kd[atoms])

    def encode(self, rows_nd):
        return torch.relu(torch.nn.functional.linear(rows_nd, self.weight_Kd, self.bias_K)).topk(
            self.kept, sorted=False
        )

    @torch.inference_mode()
    def __call__(self, count):
        values, atoms = self.encode(self.hidden_Nd[:count])
        indptr = np.arange(0, values.numel() + 1, self.kept)
        return scipy.sparse.csr_matrix(
            (values.numpy().ravel(), atoms.numpy().ravel(), indptr), (len(values), len(self.weight_Kd))
        )


def markdown(result):
    """The table of a result, for docs/benchmarks.md: of every solver tokens a second, how many times as fast ours is,
    and its gap."""
    rows = result["rows"]
    if not rows:
        return "no data: set MLSM_DATA to the directory that contains bench/"
    lines = ["| | " + " | ".join(f"{row['source']}, d = {row['d']}, k = {row['k']:,}" for row in rows) + " |"]
    lines.append("|---" * (len(rows) + 1) + "|")
    for name in rows[0]["solvers"]:
        found = (row["solvers"][name] for row in rows)
        cells = (f"{each['tokens_per_s']:,.0f}; {each['ours_over_it']:.3g} ×; {each['gap']:.0e}" for each in found)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    from benchmarks import rivals_solvers  # so that processes find its functions by name

    rivals_solvers.main()
