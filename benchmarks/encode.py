"""Stage A end to end against only its teacher: how much coding and writing add to the forward pass.

    python -m benchmarks.encode

On a CPU MiniLM (6 layers, 384 wide) cut after layer 5, the reference dictionary of 3072 atoms, lambda 0.05, top 32,
windows of 128 tokens of the bundled text. On a GPU, where MiniLM takes less time than packing its codes: a random
BERT-base cut after layer 10 in float16, random ids, and the bench data mapped to its width (benchmarks/lifted.py). Two
things are timed in turn: only the forward passes, and the work of `encode-lsp` after making windows (its stages with
normalisation, solver, distributions, packing, hashing, fsync). Each is timed over a block of 65,536 tokens on a CPU,
and over 16 blocks on a GPU, so that all stages run at the same time. Numba's compilation and reading text are not
timed. `encode_vs_teacher` is the ratio of tokens per second; the stages' own seconds may overlap. Prints JSON as its
last line.
"""

import statistics
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import torch
from transformers import BertConfig

from benchmarks.data import bench_atoms, conditions, minilm_directory, report
from benchmarks.lifted import LiftedTeacher, Problem, bench_problem
from benchmarks.student_step import SPECIAL_IDS
from pipeline.batch import make_batch
from pipeline.config import EncodeConfig
from pipeline.corpus import BUNDLED_TEXT, TextFile, Window, join_windows
from pipeline.corpus.windows import packed_windows, tokenise
from pipeline.dictionary import Dictionary
from pipeline.encode import Coder, write_units
from pipeline.targets.lsp import Lsp
from pipeline.teacher import Teacher, load_tokenizer, special_ids
from shards.files import StoreFiles
from shards.manifest import PlannedUnit
from shards.schema import ShardMeta, windows_per_block
from shards.writer import UnitWriter

LAYER, LAM, TOP_N, MAX_LENGTH, REPEATS = 5, 0.05, 32, 128, 5
BLOCKS = {"cpu": 1, "cuda": 16}  # of one measurement


def main():
    if torch.cuda.is_available():
        coder = big_coder(bench_problem().lifted(768), BertConfig(num_hidden_layers=10), "cuda", torch.float16)
        runs = [random_windows(coder.teacher.vocab_size, BLOCKS["cuda"] * windows_per_block(MAX_LENGTH))] * (
            REPEATS + 1
        )
    else:
        coder = minilm_coder()
        runs = real_windows(load_tokenizer(minilm_directory()), coder.special_ids, BLOCKS["cpu"])
    result = figures(coder, runs) | {"blocks": BLOCKS[coder.teacher.device.type]} | conditions()
    report(result)


def figures(coder, runs) -> dict:
    """Medians over the runs but the first, each a list of windows."""
    teacher = coder.teacher
    with tempfile.TemporaryDirectory() as directory:
        rows = [measure(run, coder, Path(directory) / f"store{i}") for i, run in enumerate(runs)][1:]
    ratios = [row["encode"] / row["teacher"] for row in rows]
    return {
        "encode_vs_teacher": statistics.median(ratios),
        "spread": [min(ratios), max(ratios)],
        **{f"{name}_tokens_per_s": median(rows, name) for name in ("encode", "teacher", "solver", "distributions")},
        "nnz_per_token": statistics.mean(row["nnz"] for row in rows),
        "dtype": str(teacher.dtype).removeprefix("torch."),
        "gpu": torch.cuda.get_device_name(teacher.device) if teacher.device.type == "cuda" else None,
        "repeats": len(rows),
    }


def minilm_coder() -> Coder:
    """The coder of a CPU."""
    teacher = Teacher.load(minilm_directory(), LAYER, device="cpu")
    return coder_of(teacher, bench_atoms(), special_ids(load_tokenizer(minilm_directory())))


def big_coder(problem: Problem, model: BertConfig, device: str, dtype: torch.dtype) -> Coder:
    """The coder of a GPU: a random teacher, and states and atoms of its width."""
    return coder_of(LiftedTeacher.build(problem, model, device, dtype), problem.atoms_Kd, SPECIAL_IDS)


def coder_of(teacher: Teacher, atoms_Kd: np.ndarray, special: dict) -> Coder:
    """The coder of a teacher's last layer."""
    config = EncodeConfig(layer=(teacher.layer,), lam=LAM, top_n=TOP_N, max_length=MAX_LENGTH)
    target = Lsp(config, teacher, teacher.layer, Dictionary(atoms_Kd, [], "given", {}))
    return Coder(teacher, [target], config, special)


def median(rows, name):
    return statistics.median(row[name] for row in rows)


def real_windows(tokenizer, special, blocks):
    """Windows of one measurement for the warm-up and of one for each repeat; the text repeats where it ends."""
    pieces = TextFile(BUNDLED_TEXT).pieces()
    windows = packed_windows(tokenise(pieces, tokenizer), MAX_LENGTH, special["cls"], special["sep"])
    size = blocks * windows_per_block(MAX_LENGTH)
    windows = cycle(islice(windows, (REPEATS + 1) * size))
    return [list(islice(windows, size)) for _ in range(REPEATS + 1)]


def random_windows(vocabulary: int, count: int) -> list[Window]:
    """Full windows of random ids."""
    rng, first = np.random.default_rng(0), max(SPECIAL_IDS["all"]) + 1
    ids_WL = rng.integers(first, vocabulary, (count, MAX_LENGTH))
    ids_WL[:, 0], ids_WL[:, -1] = SPECIAL_IDS["cls"], SPECIAL_IDS["sep"]
    return [Window(ids, [0], [0]) for ids in ids_WL.tolist()]


def measure(windows, coder, directory):
    """Tokens per second of the bare teacher and of the whole path on the same windows."""
    tokens = sum(len(window.ids) for window in windows)
    teacher_seconds = time_teacher(windows, coder)
    encode_seconds, (record,) = time_encoding(windows, coder, directory)
    return {
        "teacher": tokens / teacher_seconds,
        "encode": tokens / encode_seconds,
        "solver": tokens / record.environment["solver_seconds"],
        "distributions": tokens / record.environment["distributions_seconds"],
        "nnz": record.statistics["entries"] / record.statistics["coded_tokens"],
    }


def time_encoding(windows, coder, directory):
    """Seconds from windows to committed shards, one for every target of the coder; and the shards' records."""
    writers = []
    for number, target in enumerate(coder.targets):
        files = StoreFiles(directory / str(number))
        files.units.mkdir(parents=True)
        k = len(target.dictionary.atoms_Kd)
        writers.append(UnitWriter(files, ShardMeta("bench", "unit", k, coder.teacher.vocab_size, MAX_LENGTH)))
    clock = time.perf_counter()
    tasks = [(PlannedUnit("unit", "train", "bundled", 0, 1), list(range(len(writers))))]
    for _ in write_units(tasks, lambda _: iter(windows), coder, MAX_LENGTH, lambda unit, output: writers[output]):
        pass
    return time.perf_counter() - clock, [writer.record for writer in writers]


def time_teacher(windows, coder):
    """Seconds of the forward passes, their ids prepared before."""
    teacher, size = coder.teacher, coder.most_windows
    batches = []
    for start in range(0, len(windows), size):
        columns = join_windows(windows[start : start + size])
        pinned = teacher.device.type == "cuda"
        batches.append(make_batch(columns["ids"], columns["lengths"], size, MAX_LENGTH, coder.special_ids, pinned))
    synchronise(teacher.device)
    clock = time.perf_counter()
    for batch in batches:
        teacher(batch.ids_WL, batch.real_WL)
    synchronise(teacher.device)
    return time.perf_counter() - clock


def synchronise(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
