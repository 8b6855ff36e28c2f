"""How fast training is next to one busy process, relative to training on an idle machine.

    python -m benchmarks.neighbour

The command `train-student` on the store of benchmarks.student_step (BERT 2 x 128, whose many short products end in many
barriers), alone and next to a process that keeps one core busy, in turns. `busy_share` is the speed next to the busy
process over the speed alone; `busy_share_spinning` is the same with OpenMP's default, by which threads spin while they
wait for one another. Rates are medians over the steps of a run, from its log.

Prints readable lines, then one of JSON.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.data import ROOT, conditions, log_of, with_range
from benchmarks.student_step import write_store

ROUNDS, STEPS, WARM_UP = 2, 30, 5
WAITING = {"": {}, "_spinning": {"GOMP_SPINCOUNT": "300000"}}  # the default of GNU's OpenMP


def main() -> None:
    rates: dict = {}
    with tempfile.TemporaryDirectory() as directory:
        store = write_store(Path(directory)).path
        for number in range(ROUNDS):
            for kind, environment in WAITING.items():
                for state, neighbour in {"alone": contextlib.nullcontext(), "busy": busy_process()}.items():
                    output = Path(directory) / f"{state}{kind}-{number}"
                    with neighbour:
                        rates.setdefault(f"{state}{kind}", []).append(train(store, output, environment))
                    print(f"{state}{kind:<12} {rates[f'{state}{kind}'][-1]:8.0f} tokens/s")
    result: dict = {"benchmark": "neighbour"}
    for kind in WAITING:
        pairs = zip(rates[f"busy{kind}"], rates[f"alone{kind}"], strict=True)
        result |= with_range(f"busy_share{kind}", [busy / alone for busy, alone in pairs])
    result["alone_vs_alone_spinning"] = statistics.median(rates["alone"]) / statistics.median(rates["alone_spinning"])
    print(json.dumps(result | {"tokens_per_second": rates} | conditions()))


@contextlib.contextmanager
def busy_process():
    """A process that computes without end in one thread."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def train(store: Path, output: Path, environment: dict) -> float:
    """Tokens per second of the median step of a short run."""
    settings = ["--encoder", "bert-2x128", "--batch-windows", "32", "--micro-batch", "32", "--max-steps", str(STEPS)]
    settings += ["--save-every", "0", "--eval-every", "0", "--eval-windows", "1", "--device", "cpu"]
    command = [sys.executable, str(ROOT / "cli.py"), "train-student", "--store", str(store), "--run-dir", str(output)]
    kept = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    subprocess.run([*command, *settings], env=kept | environment, check=True, capture_output=True)
    return statistics.median(
        line["tokens_per_second"] for line in log_of(output) if line["step"] > WARM_UP and "loss" in line
    )


if __name__ == "__main__":
    main()
