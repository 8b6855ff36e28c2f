"""Encode eight layers in one pass of the teacher, compared with the teacher and solvers only, and with eight runs.

    python -m benchmarks.layers

The bundled teacher (12 layers, 144 wide), layers 2, 4, 6, 8, 9, 10, 11, 12, for each 1,024 atoms learned here in one
pass over 20,000 of its hidden states, lambda 0.05, top 32; one block of 65,536 tokens of the bundled text a
repeat. Four things are timed in turn on the same windows: only the forward passes through all layers; only the solver,
layer by layer; the work of `encode-lsp` with eight layers, from windows to eight committed shards; and the same work
eight times with one layer, its teacher cut there. `one_pass_vs_teacher_and_solvers` is the time of the eight layers
over the sum of the first two, so that distributions, packing, hashing and fsync of eight stores are what it adds to 1
(target 1.15); `one_pass_vs_separate_runs` is its time over that of the eight runs. `cpu_...` are the same ratios of
processor time, the ones to read on a machine that others use; threads that wait by spinning are in them. Numba's
compilation and reading text are not timed. Prints JSON as its last line.

Shapes: N coded tokens, d hidden width, K atoms.
"""

import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.data import conditions, report, with_range
from benchmarks.encode import MAX_LENGTH, real_windows, time_encoding, time_teacher
from pipeline.batch import hidden_rows
from pipeline.config import EncodeConfig
from pipeline.dictionary import DictionarySettings, LearningSchedule, learn_dictionary
from pipeline.encode import Coder
from pipeline.solvers import nonneg_lasso
from pipeline.targets.lsp import Lsp
from pipeline.teacher import Teacher, load_tokenizer, special_ids

LAYERS, K, LAM, TOP_N = (2, 4, 6, 8, 9, 10, 11, 12), 1024, 0.05, 32
TRAINING_WINDOWS, REPEATS = 160, 3


def main():
    teacher = Teacher.load("bundled", LAYERS[-1])
    tokenizer = load_tokenizer("bundled")
    special = special_ids(tokenizer)
    config = EncodeConfig(layer=LAYERS, lam=LAM, top_n=TOP_N, max_length=MAX_LENGTH)
    with tempfile.TemporaryDirectory() as directory:
        warm_up, *runs = real_windows(tokenizer, special, 1)[: REPEATS + 1]
        learned = learn(teacher, warm_up[:TRAINING_WINDOWS], special)
        together = Coder(teacher, [Lsp(config, teacher, *found) for found in learned], config, special)
        alone = []
        for layer, dictionary in learned:
            cut = Teacher.load("bundled", layer)
            alone.append(Coder(cut, [Lsp(config, cut, layer, dictionary)], config, special))
        measure(warm_up[:64], together, alone, Path(directory) / "warm-up")
        rows = [measure(run, together, alone, Path(directory) / f"run{i}") for i, run in enumerate(runs)]
    result = {
        **with_range("one_pass_vs_teacher_and_solvers", [r["one_pass"] / (r["teacher"] + r["solvers"]) for r in rows]),
        **with_range("one_pass_vs_separate_runs", [r["one_pass"] / r["separate"] for r in rows]),
        **with_range(
            "cpu_vs_teacher_and_solvers", [r["cpu_one_pass"] / (r["cpu_teacher"] + r["cpu_solvers"]) for r in rows]
        ),
        **with_range("cpu_vs_separate_runs", [r["cpu_one_pass"] / r["cpu_separate"] for r in rows]),
        **{f"{name}_seconds": statistics.median(row[name] for row in rows) for name in rows[0]},
        "tokens": sum(len(window.ids) for window in runs[0]),
        "layers": LAYERS,
        "k": K,
        "repeats": len(rows),
        **conditions(),
    }
    report(result)


def learn(teacher, windows, special):
    """Pairs of every layer and its dictionary, learned from these windows."""
    hidden = hidden_rows(teacher, windows, len(windows), MAX_LENGTH, special, LAYERS)
    settings, schedule = DictionarySettings(K, LAM, seed=0), LearningSchedule(epochs=1)
    return [
        (layer, learn_dictionary(hidden_Nd, settings, schedule))
        for layer, hidden_Nd in zip(LAYERS, hidden, strict=True)
    ]


def measure(windows, together, alone, directory):
    """Seconds of the teacher, of the solvers, of one pass for all and of a run for each, on the same windows; and
    those of the processor in all threads (`cpu_`), which other processes hardly change."""
    works = {
        "teacher": lambda: time_teacher(windows, together),
        "solvers": lambda: time_solvers(windows, together),
        "one_pass": lambda: time_encoding(windows, together, directory / "together")[0],
        "separate": lambda: sum(time_encoding(windows, coder, directory / str(n))[0] for n, coder in enumerate(alone)),
    }
    row = {}
    for name, work in works.items():
        begin = time.process_time()
        row[name] = work()
        row[f"cpu_{name}"] = time.process_time() - begin
    row["cpu_solvers"] -= row["cpu_teacher"]  # it makes the hidden states again; what stays of that is unit length
    return row


def time_solvers(windows, coder):
    """Seconds of the solver on the hidden states of every layer, batch by batch; making these is not counted."""
    size, config, seconds = coder.most_windows, coder.config, 0.0
    grams = [output.dictionary.atoms_Kd @ output.dictionary.atoms_Kd.T for output in coder.targets]
    for start in range(0, len(windows), size):
        batch = windows[start : start + size]
        hidden = hidden_rows(coder.teacher, batch, size, MAX_LENGTH, coder.special_ids, LAYERS)
        clock = time.perf_counter()
        for hidden_Nd, output, gram_KK in zip(hidden, coder.targets, grams, strict=True):
            nonneg_lasso(hidden_Nd, output.dictionary.atoms_Kd, config.lam, gram_KK=gram_KK, tol=config.tolerance)
        seconds += time.perf_counter() - clock
    return seconds


if __name__ == "__main__":
    main()
