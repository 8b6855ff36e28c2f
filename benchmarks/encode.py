"""Stage A end to end against its bare teacher: what coding and writing add to the forward pass.

    python -m benchmarks.encode

MiniLM (6 layers, 384 wide) cut after layer 5, the reference dictionary of 3072 atoms, lambda 0.05, top 32,
windows of 128 tokens of the docstring corpus. In turn, block by block: the teacher alone, and the whole path
(teacher, unit length, solver, distributions, packing, hashing, fsync). Numba's compilation is left out.
`encode_vs_teacher` is the ratio of tokens per second. Prints JSON as its last line.
"""

import json
import statistics
import tempfile
import time
from itertools import islice
from pathlib import Path

import numpy as np

from benchmarks.data import bench_file, conditions, minilm_directory
from pipeline.config import EncodeConfig
from pipeline.corpus import TextFile, collect_docstrings, packed_windows, tokenised
from pipeline.dictionary import Dictionary
from pipeline.encode import LspCoder, hidden_rows
from pipeline.teacher import Teacher, load_tokenizer, special_ids
from shards.manifest import StoreFiles
from shards.schema import ShardMeta, windows_per_block
from shards.writer import UnitWriter

LAYER, LAM, TOP_N, MAX_LENGTH, REPEATS = 5, 0.05, 32, 128, 5


def main():
    teacher = Teacher.load(minilm_directory(), LAYER, device="auto", dtype="auto")
    tokenizer = load_tokenizer(minilm_directory())
    special = special_ids(tokenizer)
    dictionary = Dictionary(np.load(bench_file("spams_atoms_3072x384_f32.npy")), [], "given", {})
    config = EncodeConfig(layer=(LAYER,), lam=LAM, top_n=TOP_N, max_length=MAX_LENGTH)
    coder = LspCoder(teacher, dictionary, config, special)
    with tempfile.TemporaryDirectory() as directory:
        blocks = real_windows(Path(directory), tokenizer, special)
        rows = [measure(block, coder, special, config, Path(directory), i) for i, block in enumerate(blocks)][1:]
    ratios = [row["encode"] / row["teacher"] for row in rows]
    result = {
        "encode_vs_teacher": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        "encode_tokens_per_s": statistics.median(row["encode"] for row in rows),
        "teacher_tokens_per_s": statistics.median(row["teacher"] for row in rows),
        "solver_tokens_per_s": statistics.median(row["solver"] for row in rows),
        "nnz_per_token": coder_nnz(rows),
        "repeats": len(rows),
        **conditions(),
    }
    for name, value in result.items():
        print(f"{name:<24} {value}")
    print(json.dumps(result))


def real_windows(directory, tokenizer, special):
    """One block of windows for the warm-up and one for each repeat."""
    pieces = TextFile(collect_docstrings(directory)).pieces()
    windows = packed_windows(tokenised(pieces, tokenizer), MAX_LENGTH, special["cls"], special["sep"])
    return [list(islice(windows, windows_per_block(MAX_LENGTH))) for _ in range(REPEATS + 1)]


def measure(block, coder, special, config, directory, number):
    """Tokens per second of the bare teacher and of the whole path on one block."""
    tokens = sum(len(window.ids) for window in block)
    batch = config.batch_tokens // MAX_LENGTH
    clock = time.perf_counter()
    for i in range(0, len(block), batch):
        hidden_rows(coder.teacher, block[i : i + batch], batch, MAX_LENGTH, special)
    teacher_seconds = time.perf_counter() - clock
    files = StoreFiles(directory / f"store{number}")
    files.units.mkdir(parents=True)
    clock = time.perf_counter()
    with UnitWriter(files, ShardMeta("bench", "unit", len(coder.atoms_Kd), 30_522, MAX_LENGTH)) as writer:
        writer.write_block(**coder(block, writer))
    encode_seconds = time.perf_counter() - clock
    return {
        "teacher": tokens / teacher_seconds,
        "encode": tokens / encode_seconds,
        "solver": tokens / writer.record.environment["solver_seconds"],
        "nnz": writer.record.statistics["entries"] / writer.record.statistics["coded_tokens"],
    }


def coder_nnz(rows):
    return statistics.mean(row["nnz"] for row in rows)


if __name__ == "__main__":
    main()
