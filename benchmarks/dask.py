"""Two workers against one, each with one thread, on the units of one plan.

    python -m benchmarks.dask

MiniLM (6 layers, 384 wide) cut after layer 5, k = 1536, lambda 0.05, top 32, windows of 128 tokens of the bundled
text; both sides use the command's own code with local workers of one thread, and write into empty stores. A repeat
encodes the same units with one worker and with two, in turn. `two_workers_vs_one` compares the steady state: from the
first finished unit of the worker that starts last, until a worker first has nothing left to do. So start-up (processes,
imports, teacher) and the last units, when some workers are idle, are not counted on either side. `with_start_up` is the
whole command's. Needs two idle cores. Prints JSON as its last line.

Run it as a module: as a script, this file would be imported instead of the package dask.
"""

import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS", "RAYON_NUM_THREADS")
LAYER, K, REPEATS = 5, 1536, 2
UNITS, UNIT_TOKENS = 12, 12_288


def main():
    for name in THREADS:  # those of the workers, which inherit them; before NumPy and torch are loaded
        os.environ[name] = "1"
    from benchmarks.data import conditions, minilm_directory, report, with_range
    from pipeline.config import EncodeConfig

    with tempfile.TemporaryDirectory() as directory:
        directory = Path(directory)
        save_dictionary(directory / "dictionary")
        settings = EncodeConfig(
            teacher=str(minilm_directory()),
            layer=LAYER,
            k=K,
            dictionary=directory / "dictionary",
            device="cpu",
            max_tokens=UNITS * UNIT_TOKENS,
            unit_tokens=UNIT_TOKENS,
            scheduler=None,
            output=directory,
        )
        rows = [measure(settings, directory / str(i)) for i in range(REPEATS)]
    ratios = [row["two"] / row["one"] for row in rows]
    result = {
        "two_workers_vs_one": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        **with_range("with_start_up", [row["whole_two"] / row["whole_one"] for row in rows]),
        "tokens_per_s_one": statistics.median(row["one"] for row in rows),
        "tokens_per_s_two": statistics.median(row["two"] for row in rows),
        "tokens": UNITS * UNIT_TOKENS,
        "repeats": len(rows),
        **conditions("dask", "distributed"),
    }
    report(result)


def save_dictionary(path):
    """Atoms of the reference dictionary, every other one: how well they fit does not matter here."""
    import numpy as np

    from benchmarks.data import bench_atoms
    from pipeline.dictionary import Dictionary

    atoms = bench_atoms()
    Dictionary(np.ascontiguousarray(atoms[:: len(atoms) // K]), [], "given", {}).save(path)


def measure(settings, directory):
    """Tokens per second of one worker and of two, in steady state and as a whole."""
    row = {}
    for name, workers in (("one", 1), ("two", 2)):
        began = time.perf_counter()
        answers = encode(replace(settings, output=directory / name), workers)
        row[f"whole_{name}"] = sum(tokens for _, tokens in answers) / (answers[-1][0] - began)
        row[name] = steady(answers, workers)
    return row


def encode(settings, workers):
    """Encode with so many workers; returns when every unit was answered, and its tokens."""
    from pipeline.commands import make_lsp_store
    from pipeline.dask_workers import WorkerPool
    from pipeline.encode import encode as encode_stores
    from pipeline.job import load_teacher, teacher_job
    from pipeline.learn import load_dictionary
    from pipeline.targets.lsp import Lsp

    answers = []

    def progress(stage, done, *_, **figures):
        if stage == "encode":
            answers.append((time.perf_counter(), done - sum(tokens for _, tokens in answers)))

    job = teacher_job(replace(settings, workers=workers), progress)
    teacher = load_teacher(job)
    dictionary = load_dictionary(settings, settings.dictionary, teacher)
    store = make_lsp_store(job, Lsp(settings, teacher, LAYER, dictionary))
    with WorkerPool(job) as pool:  # also of one worker, which the command would not start
        encode_stores(pool, [store], Lsp)
    return answers


def steady(answers, workers):
    """Tokens per second from each worker's first answers on, without the last ones."""
    first, last = 2 * workers - 1, len(answers) - workers
    tokens = sum(tokens for _, tokens in answers[first + 1 : last + 1])
    return tokens / (answers[last][0] - answers[first][0])


if __name__ == "__main__":
    main()
