"""How much of the targets follows from positions in the window, and what centring, or dropping LSPs, changes.

    python -m benchmarks.positions --teacher MINILM --layer 5 --k 768 --corpus 'text/*.txt' --tokens 300000

One pass of the teacher gives raw hidden states; each --center is then applied to them as encode-lsp does, with a
dictionary of its own, at a penalty at which codes have as many non-zeros as those without a centre at 0.05. Gains are
cross-fitted between every other window and the others (mlsm/common/gains.py), in nats a token, special tokens left out:

    position, shuffled   knowing the position; knowing a permutation of the positions of all tokens (the null)
    word                 knowing the id of the token;  word_and_position: both, as a product of the two
    total                the mean divergence of a token's distribution from the marginal: what a perfect one gains
    entropy, conditional of the marginal, and the mean of the tokens' distributions; total is their difference

`dropped` are the targets without a centre whose positional LSPs (mlsm/evaluation/inspection/lsps/positions.py) were
taken away and whose rows were renormalised. Prints JSON last. Left out: word senses (mlsm choose-layer --center).
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from mlsm.common.gains import cross_fitted_gain, gain, mass_by_group, shrunk_marginals
from mlsm.evaluation.inspection.lsps.positions import position_profiles
from mlsm.evaluation.inspection.lsps.sample import Sample
from pipeline.batch import InputFormat, hidden_rows
from pipeline.config import LearnConfig
from pipeline.dictionary import DictionarySettings, LearningSchedule, learn_dictionary
from pipeline.dictionary.centering import HiddenSums
from pipeline.job import load_teacher, teacher_job
from pipeline.solvers import nonneg_lasso
from pipeline.targets.distributions import distributions

LAM, TOLERANCE, TOP_N = 0.05, 1e-3, 32
WINDOWS_AT_ONCE, ROWS_AT_ONCE = 64, 16_384
TUNED_ON = 4_000  # vectors
DENSEST = 12


def main():
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as directory:
        config = LearnConfig(
            teacher=arguments.teacher,
            layer=(arguments.layer,),
            k=(arguments.k,),
            device="cpu",
            corpus=tuple(arguments.corpus),
            max_tokens=arguments.tokens,
            output=Path(directory),
        )
        result = measure(config, arguments.vectors, arguments.epochs)
    print(json.dumps(result))


def _arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--teacher", default="bundled")
    parser.add_argument("--layer", type=int, default=10)
    parser.add_argument("--k", type=int, default=1024)
    parser.add_argument("--corpus", nargs="+", default=["bundled"])
    parser.add_argument("--tokens", type=int, default=300_000)
    parser.add_argument("--vectors", type=int, default=60_000, help="that a dictionary is learned from")
    parser.add_argument("--epochs", type=float, default=2.0)
    return parser.parse_args()


def measure(config, vectors, epochs):
    """All figures of a teacher and a corpus, as JSON holds them."""
    job = teacher_job(config, lambda *_, **__: None)
    tokens = _Tokens(job, load_teacher(job))
    say(f"{len(tokens.ids_N):,} tokens in {tokens.windows:,} windows")
    found, wanted = {}, None
    for center in ("none", "mean", "position"):
        clock = time.perf_counter()
        rows_Nd = tokens.centred(center)
        lam = LAM if center == "none" else _tuned(_learn(rows_Nd, config, LAM, vectors // 4, 1.0), rows_Nd, wanted)
        atoms_Kd = _learn(rows_Nd, config, lam, vectors, epochs)
        lam = LAM if center == "none" else _tuned(atoms_Kd, rows_Nd, wanted)
        if center == "none":
            wanted = _nnz(rows_Nd[_some(rows_Nd)], atoms_Kd, lam)
        sample = tokens.coded(rows_Nd, atoms_Kd, lam)
        profiles = position_profiles(sample)
        found[center] = {"lam": lam, **figures(sample, profiles, tokens)}
        say(f"{center} in {time.perf_counter() - clock:.0f} s: " + json.dumps(found[center]))
        if center == "none":
            found["dropped"] = figures(without(sample, profiles.positional_K), None, tokens)
            say("dropped: " + json.dumps(found["dropped"]))
    settings = {
        "teacher": Path(config.teacher).name,
        "layer": config.layer[0],
        "k": config.k[0],
        "vectors": vectors,
        "epochs": epochs,
        "tokens": len(tokens.ids_N),
        "windows": tokens.windows,
    }
    return settings | {"centers": found}


class _Tokens:
    """Coded tokens of the training windows of a plan with their raw hidden states, read once."""

    def __init__(self, job, teacher):
        (layer,), rows, positions, ids, numbers = job.config.layer, [], [], [], []
        windows = [window for unit in job.plan.units if unit.split == "train" for window in job.windows(unit)]
        special = np.array(job.special_ids["all"])
        for start in range(0, len(windows), WINDOWS_AT_ONCE):
            chunk = windows[start : start + WINDOWS_AT_ONCE]
            form = InputFormat.of(job.config, teacher)
            (raw,) = hidden_rows(
                teacher, chunk, WINDOWS_AT_ONCE, job.config.max_length, job.special_ids, (layer,), form, raw=True
            )
            rows.append(raw.rows_Nd)
            positions.append(raw.position_N)
            ids_T = np.concatenate([window.ids for window in chunk])
            ids.append(ids_T[~np.isin(ids_T, special)])
            lengths = [int((~np.isin(window.ids, special)).sum()) for window in chunk]
            numbers.append(np.repeat(np.arange(start, start + len(chunk)), lengths))
        self.windows, self.tokenizer = len(windows), job.tokenizer
        self.rows_Nd = np.concatenate(rows)
        self.position_N, self.ids_N, self.window_N = map(np.concatenate, (positions, ids, numbers))
        self.vocabulary = max(job.tokenizer.get_vocab().values()) + 1

    def centred(self, kind):
        """Unit-length rows, float32."""
        rows_Nd = self.rows_Nd
        if kind != "none":
            sums = HiddenSums(rows_Nd.shape[1])
            for start in range(0, len(rows_Nd), ROWS_AT_ONCE):
                part = slice(start, start + ROWS_AT_ONCE)
                sums.add(self.position_N[part], rows_Nd[part])
            rows_Nd = sums.center(kind).subtract_from(rows_Nd, self.position_N)
        return rows_Nd / np.linalg.norm(rows_Nd, axis=1, keepdims=True)

    def coded(self, rows_Nd, atoms_Kd, lam):
        """A Sample of what a store would hold of these rows."""
        nnz, lsps, weights, gram_KK = [], [], [], atoms_Kd @ atoms_Kd.T
        for start in range(0, len(rows_Nd), ROWS_AT_ONCE):
            chunk_Nd = rows_Nd[start : start + ROWS_AT_ONCE]
            rows = distributions(nonneg_lasso(chunk_Nd, atoms_Kd, lam, gram_KK=gram_KK, tol=TOLERANCE), TOP_N)
            count = np.diff(rows.indptr)
            nnz.append(count)
            lsps.append(rows.indices)
            weights.append(rows.weights / np.repeat(1 - rows.tail, count))
        indptr = np.concatenate(([0], np.cumsum(np.concatenate(nnz))))
        return Sample(
            self.ids_N,
            self.window_N,
            self.position_N,
            self.window_N,
            indptr,
            np.concatenate(lsps),
            np.concatenate(weights),
            len(atoms_Kd),
            len(self.ids_N),
        )


def _some(rows_Nd):
    return np.random.default_rng(1).choice(len(rows_Nd), min(TUNED_ON, len(rows_Nd)), replace=False)


def _learn(rows_Nd, config, lam, vectors, epochs):
    chosen = np.sort(np.random.default_rng(0).choice(len(rows_Nd), min(vectors, len(rows_Nd)), replace=False))
    settings = DictionarySettings(config.k[0], lam, seed=config.seed)
    return learn_dictionary(rows_Nd[chosen], settings, LearningSchedule(epochs=epochs)).atoms_Kd


def _nnz(rows_Nd, atoms_Kd, lam):
    codes = nonneg_lasso(rows_Nd, atoms_Kd, lam, tol=TOLERANCE)
    return len(codes.values) / len(codes)


def _tuned(atoms_Kd, rows_Nd, wanted):
    """The penalty at which codes have as many non-zeros as wanted, by bisection of its logarithm."""
    low, high, rows_nd = np.log(0.01), np.log(0.3), rows_Nd[_some(rows_Nd)]
    for _ in range(9):
        middle = (low + high) / 2
        low, high = (middle, high) if _nnz(rows_nd, atoms_Kd, np.exp(middle)) > wanted else (low, middle)
    return float(np.exp((low + high) / 2))


def without(sample, dropped_K):
    """The sample without some LSPs, rows renormalised."""
    kept_E = ~dropped_K[sample.lsps_E]
    token_E = np.repeat(np.arange(len(sample)), np.diff(sample.indptr))[kept_E]
    weights_E = sample.weights_E[kept_E].astype(np.float64)
    weights_E /= np.bincount(token_E, weights_E, len(sample))[token_E]
    indptr = np.concatenate(([0], np.cumsum(np.bincount(token_E, minlength=len(sample)))))
    return replace(sample, indptr=indptr, lsps_E=sample.lsps_E[kept_E], weights_E=weights_E.astype(np.float32))


def figures(sample, profiles, tokens):
    """Gains, entropies and positional LSPs of coded tokens; the last only with profiles."""
    shuffled_N = np.random.default_rng(2).permutation(sample.position_N)
    positions = int(sample.position_N.max()) + 1
    by_position = _halves(sample, sample.position_N, positions)
    by_word = _halves(sample, sample.ids_N, tokens.vocabulary)
    gain_K, pseudo_position = cross_fitted_gain(*by_position)
    word_K, pseudo_word = cross_fitted_gain(*by_word)
    mean_K = (by_position[0] + by_position[1]).mean_K
    entropy = -float(mean_K @ np.log(mean_K))
    weights_E = sample.weights_E.astype(np.float64)
    conditional = -float(weights_E @ np.log(weights_E)) / sample.coded
    found = {
        "nnz": len(weights_E) / sample.coded,
        "empty": len(sample) - sample.coded,
        "position": float(gain_K.sum()),
        "position_in_sample": float(gain(sum_of(by_position), sum_of(by_position), 1e-3).sum()),
        "shuffled": float(cross_fitted_gain(*_halves(sample, shuffled_N, positions))[0].sum()),
        "shuffled_unshrunk": float(
            cross_fitted_gain(*_halves(sample, shuffled_N, positions), pseudo_counts=(1.0,))[0].sum()
        ),
        "word": float(word_K.sum()),
        "word_and_position": joint_gain(sample, by_word, pseudo_word, by_position, pseudo_position),
        "total": entropy - conditional,
        "entropy": entropy,
        "conditional_entropy": conditional,
    }
    if profiles is None:
        return found
    positional_K, densities_K = profiles.positional_K, np.bincount(sample.lsps_E, minlength=sample.k) / sample.coded
    densest = np.argsort(-densities_K, kind="stable")[:DENSEST]
    return found | {
        "positional_lsps": int(positional_K.sum()),
        "positional_mass": float(mean_K[positional_K].sum()),
        "densest": [
            [
                int(lsp),
                round(float(densities_K[lsp]), 4),
                round(float(profiles.nats_K[lsp]), 3),
                bool(positional_K[lsp]),
                _words(sum_of(by_word), lsp, tokens),
            ]
            for lsp in densest
        ],
    }


def sum_of(halves):
    return halves[0] + halves[1]


def _halves(sample, group_N, groups):
    found = []
    for half in (0, 1):
        chosen = np.flatnonzero(sample.window_N % 2 == half)
        found.append(mass_by_group(group_N[chosen], *sample.rows(chosen), groups, sample.k))
    return found


def _words(by_word, lsp, tokens):
    """The ids with most of an LSP's mass, as text."""
    mass_V = by_word.mass_GK[:, [int(lsp)]].toarray().ravel()
    return tokens.tokenizer.convert_ids_to_tokens(np.argsort(-mass_V)[:4].tolist())


def joint_gain(sample, by_word, pseudo_word, by_position, pseudo_position):
    """Cross-fitted gain of q(j | word) q(j | position) / q(j), normalised: what word and position say together."""
    total = 0.0
    for half in (0, 1):
        known_word, known_position = by_word[1 - half], by_position[1 - half]
        mean_K = known_word.mean_K
        ratio_PK = shrunk_marginals(known_position, pseudo_position) / mean_K
        chosen = np.flatnonzero(sample.window_N % 2 == half)
        for start in range(0, len(chosen), 4096):
            some = chosen[start : start + 4096]
            indptr, lsps_E, weights_E = sample.rows(some)
            words_nK = known_word.mass_GK[sample.ids_N[some]].toarray() + pseudo_word * mean_K
            both_nK = words_nK * ratio_PK[sample.position_N[some]]
            both_nK /= both_nK.sum(1, keepdims=True)
            row_E = np.repeat(np.arange(len(some)), np.diff(indptr))
            total += float(weights_E @ (np.log(both_nK[row_E, lsps_E]) - np.log(mean_K[lsps_E])))
    return total / sample.coded


def say(text):
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
