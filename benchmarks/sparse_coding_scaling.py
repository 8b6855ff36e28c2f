"""How the time of sparse coding grows with the number of atoms, the width and the penalty.

    python -m benchmarks.sparse_coding_scaling

Around the setting of benchmarks.sparse_coding (k = 3072, d = 384, lambda = 0.05) one of the three is changed at
a time. For every setting a dictionary is learned from the 32,768 bench vectors (one pass), then 4,096 test
vectors are coded ROUNDS times.
Narrower vectors are the leading principal components, scaled to unit length; wider ones two unrelated vectors side by
side, since no real ones of that width are at hand: read their row as cost, not as sparsity to expect.
Gram matrix given; compilation left out. Prints a table in Markdown, and JSON as its last line.
"""

import json
import statistics
import time

import numpy as np

from benchmarks.data import bench_states, conditions, unit_rows
from pipeline.dictionary import DictionarySettings, LearningSchedule, learn_dictionary
from pipeline.solvers import nonneg_lasso
from pipeline.solvers.parallel import thread_count

ATOMS, WIDTHS, PENALTIES = (768, 1536, 3072, 6144, 12_288), (128, 256, 384, 768), (0.02, 0.05, 0.1, 0.2)
BASE = {"k": 3072, "d": 384, "lam": 0.05}
TOKENS, ROUNDS, SEED = 4096, 5, 0


def main():
    settings = [BASE | {"k": k} for k in ATOMS]
    settings += [BASE | {"d": d} for d in WIDTHS if d != BASE["d"]]
    settings += [BASE | {"lam": lam} for lam in PENALTIES if lam != BASE["lam"]]
    print("| k | d | lambda | microseconds a token | spread | non-zeros |\n|---|---|---|---|---|---|")
    rows = [show(measure(**setting)) for setting in settings]
    print(
        json.dumps(
            {
                "benchmark": "sparse_coding_scaling",
                "rows": rows,
                "tokens": TOKENS,
                "rounds": ROUNDS,
                "threads": thread_count(),
                **conditions(),
            }
        )
    )


def measure(k, d, lam):
    train_Nd, test_Nd = vectors(d)
    dictionary = learn_dictionary(train_Nd, DictionarySettings(k, lam, seed=SEED), LearningSchedule(epochs=1.0))
    atoms_Kd = dictionary.atoms_Kd
    gram_KK = atoms_Kd @ atoms_Kd.T
    seconds = []
    for round_number in range(ROUNDS + 1):
        clock = time.perf_counter()
        codes = nonneg_lasso(test_Nd, atoms_Kd, lam, gram_KK=gram_KK)
        if round_number:
            seconds.append(time.perf_counter() - clock)
    micro = [value / len(test_Nd) * 1e6 for value in seconds]
    return {
        "k": k,
        "d": d,
        "lam": lam,
        "us_per_token": statistics.median(micro),
        "spread": [min(micro), max(micro)],
        "nonzeros": len(codes.values) / len(codes),
        "kkt_max": float(codes.kkt.max()),
    }


def vectors(width):
    """Training and test vectors of a width, unit length, float32."""
    train_Nd, test_Nd = (bench_states(part).astype(np.float32) for part in ("train", "test"))
    if width < train_Nd.shape[1]:
        _, components = np.linalg.eigh(train_Nd.T @ train_Nd)
        train_Nd, test_Nd = (rows @ components[:, ::-1][:, :width] for rows in (train_Nd, test_Nd))
    elif width > train_Nd.shape[1]:
        train_Nd, test_Nd = (
            np.hstack([unit_rows(rows), unit_rows(np.roll(rows, 1, axis=0))])[:, :width] for rows in (train_Nd, test_Nd)
        )
    return unit_rows(train_Nd, np.float32), unit_rows(test_Nd[:TOKENS], np.float32)


def show(row):
    print(
        f"| {row['k']:,} | {row['d']} | {row['lam']} | {row['us_per_token']:.1f} | {row['spread'][0]:.1f} to "
        f"{row['spread'][1]:.1f} | {row['nonzeros']:.1f} |",
        flush=True,
    )
    return row


if __name__ == "__main__":
    main()
