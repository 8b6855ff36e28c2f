"""Are stored codes the only ones? Nearly equal atoms, and how far codes are from a much exacter solution.

    python -m benchmarks.real_teachers mpnet DIRECTORY
    python -m benchmarks.unique_codes --teacher DIRECTORY --layers 9 10 --k 512 1536 3072 --states CACHE

For each layer and k a dictionary is learned from 60,000 hidden states of English Wikipedia with the usual settings.
`pairs_098` and `pairs_0999` are the pairs of atoms whose cosine is above 0.98 and 0.999, `largest_gram` is the largest
cosine of two atoms. 10,000 hidden states of other text are coded at the default tolerance (1e-4): `objective`, `nnz`
(non-zeros per token), and `mass_N`, the mean share of a distribution that its N largest entries hold. `tv_dot` and
`tv_all` compare these codes, as distributions, with those of 1e-6: total variation, as mean and largest value, for the
tokens "." and for 1,000 tokens of any kind.

Hidden states are computed once and kept in --states. Prints readable lines, then one of JSON.
"""

import argparse
import itertools
import json
import time
from pathlib import Path

import numpy as np

from benchmarks.data import conditions, data_file
from pipeline.batch import hidden_rows
from pipeline.config import EncodeConfig
from pipeline.corpus import open_corpus
from pipeline.corpus.windows import packed_windows, tokenise
from pipeline.dictionary import DictionarySettings, learn_dictionary
from pipeline.dictionary.vectors import unit_length
from pipeline.precision import total_variation
from pipeline.solvers import nonneg_lasso
from pipeline.solvers.problem import objective
from pipeline.teacher import Teacher, load_tokenizer, special_ids

LAM, MAX_LENGTH, BATCH = 0.05, 128, 16
TRAINING, NEW, EVERY = 60_000, 10_000, 16  # vectors; every 16th window of the text is read
DOTS, OTHERS = 500, 1000  # tokens that are compared
TOLERANCE, EXACT = EncodeConfig.tolerance, 1e-6
MASSES = (16, 24, 32, 40, 48, 64, 96, 128)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--teacher", default="bundled")
    parser.add_argument("--layers", type=int, nargs="+", default=[10])
    parser.add_argument("--k", type=int, nargs="+", default=[512, 1536, 3072])
    parser.add_argument("--states", type=Path, required=True)
    arguments = parser.parse_args()
    states, tokens = read_states(arguments.teacher, arguments.layers, arguments.states)
    dot = load_tokenizer(arguments.teacher).convert_tokens_to_ids(".")
    rows = []
    for layer, k in itertools.product(arguments.layers, arguments.k):
        rows.append({"layer": layer, "k": k, **measure(states[layer], tokens, dot, k)})
        print("  ".join(f"{name} {value:.5g}" for name, value in rows[-1].items() if name != "seconds"), flush=True)
    print(json.dumps({"benchmark": "unique_codes", "teacher": arguments.teacher, "rows": rows, **conditions()}))


def read_states(name, layers, directory):
    """Unit-length hidden states by layer, training vectors first, and the ids of their tokens."""
    directory.mkdir(parents=True, exist_ok=True)
    prefix = Path(name).name
    paths = {layer: directory / f"{prefix}-l{layer}.npy" for layer in layers}
    if not all(path.is_file() for path in paths.values()):
        teacher, tokenizer = Teacher.load(name, max(layers)), load_tokenizer(name)
        special = special_ids(tokenizer)
        (text,) = open_corpus([str(data_file("text/wiki_en_2014/wiki_en_2014_train_00.txt.xz"))])
        windows = packed_windows(tokenise(text.pieces(), tokenizer), MAX_LENGTH, special["cls"], special["sep"])
        windows = itertools.islice(windows, 0, None, EVERY)
        found, ids, count = {layer: [] for layer in layers}, [], 0
        while count < TRAINING + NEW:
            batch = list(itertools.islice(windows, BATCH))
            rows = hidden_rows(teacher, batch, BATCH, MAX_LENGTH, special, layers)
            for layer, rows_nd in zip(layers, rows, strict=True):
                found[layer].append(rows_nd.astype(np.float16))
            ids_T = np.concatenate([window.ids for window in batch])
            ids.append(ids_T[~np.isin(ids_T, special["all"])])
            count += len(ids[-1])
            print(f"hidden states: {count:,} of {TRAINING + NEW:,}", flush=True)
        for layer, path in paths.items():
            np.save(path, np.concatenate(found[layer])[: TRAINING + NEW])
        np.save(directory / f"{prefix}-ids.npy", np.concatenate(ids)[: TRAINING + NEW])
    return {layer: np.load(path) for layer, path in paths.items()}, np.load(directory / f"{prefix}-ids.npy")


def measure(hidden_Nd, tokens_N, dot, k):
    """The figures of one dictionary."""
    clock = time.perf_counter()
    dictionary = learn_dictionary(hidden_Nd[:TRAINING], DictionarySettings(k, LAM, seed=0))
    atoms_Kd, seconds = dictionary.atoms_Kd, time.perf_counter() - clock
    gram_KK = atoms_Kd @ atoms_Kd.T
    above = gram_KK[np.triu_indices(k, 1)]
    new_Nd, ids_N = unit_length(hidden_Nd[TRAINING:], np.arange(NEW)), tokens_N[TRAINING:]
    codes = nonneg_lasso(new_Nd, atoms_Kd, LAM, gram_KK=gram_KK, tol=TOLERANCE)
    sorted_NK = -np.sort(-codes.dense(k), axis=1)
    mass_N = np.maximum(sorted_NK.sum(1), 1e-12)
    variation = {
        name: variation_of(new_Nd[rows], atoms_Kd, gram_KK)
        for name, rows in (("tv_dot", np.flatnonzero(ids_N == dot)[:DOTS]), ("tv_all", np.arange(OTHERS)))
    }
    return {
        "pairs_098": int((above > 0.98).sum()),
        "pairs_0999": int((above > 0.999).sum()),
        "largest_gram": float(above.max()),
        "objective": float(objective(new_Nd, atoms_Kd, codes, LAM).mean()),
        "nnz": len(codes.values) / len(codes),
        "training_vectors": dictionary.history[-1]["vectors"],
        **{f"{name}_mean": float(values.mean()) for name, values in variation.items()},
        **{f"{name}_max": float(values.max()) for name, values in variation.items()},
        "dots": int((ids_N == dot).sum()),
        **{f"mass_{n}": float((sorted_NK[:, :n].sum(1) / mass_N).mean()) for n in MASSES},
        "seconds": seconds,
    }


def variation_of(rows_Nd, atoms_Kd, gram_KK):
    """Total variation between the distributions at the default tolerance and at 1e-6, of each row."""
    usual, exact = (
        nonneg_lasso(rows_Nd, atoms_Kd, LAM, gram_KK=gram_KK, tol=tol).dense(len(atoms_Kd))
        for tol in (TOLERANCE, EXACT)
    )
    return total_variation(usual, exact)


if __name__ == "__main__":
    main()
