"""The cost of a training run in addition to its steps: waiting for data, and starting again when it is resumed.

    python -m benchmarks.student_run

The trainer itself on the store of benchmarks.student_step: BERT 6 x 256, k = 3072, 32 windows of 128 tokens a step.
`data_wait_share` is the median over steps of the time that a step waits for its batch, which a thread reads ahead.
Then the run's checkpoint is made that of step 1,000,000, and resumed: `ready_seconds` is the time from the built model
to the first batch, reading and checking the checkpoint apart (`restore_seconds`, which grows with the model, not with
the step). Prints JSON as its last line.
"""

import os
import signal
import statistics
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from benchmarks.data import conditions, log_of, report
from benchmarks.student_step import CONFIG, write_store
from mlsm.common.errors import Interrupted
from student.config import StudentConfig
from student.encoders.model import build_student
from student.objectives import OBJECTIVES
from student.optimizer import build_optimizer
from student.runs.checkpoint import Checkpoints, restore
from student.train import train

STEPS, FAR = 40, 1_000_000


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        store = write_store(Path(directory))
        config = replace(
            CONFIG,
            encoder="bert-6x256",
            store=str(store.path),
            run_dir=Path(directory) / "run",
            max_steps=2 * FAR,
            save_every=0,
            eval_every=0,
            device="cpu",
        )
        steps = run_until(config, STEPS)
        move_to(config, store, FAR)
        resumed = run_until(config, FAR + 5)
        start = [line for line in log_of(config.run_dir) if line.get("event") == "start"][-1]
    result = {
        "benchmark": "student_run",
        "data_wait_share": statistics.median(line["data_wait_share"] for line in steps[2:]),
        "data_wait_share_most": max(line["data_wait_share"] for line in steps[2:]),
        "tokens_per_second": statistics.median(line["tokens_per_second"] for line in steps[2:]),
        "resumed_at": start["step"],
        "ready_seconds": start["ready_seconds"],
        "restore_seconds": start["restore_seconds"],
        "first_wait_after_resume": resumed[-5]["data_wait_seconds"],
        **conditions(),
    }
    report(result)


def run_until(config: StudentConfig, last: int) -> list[dict]:
    """Train to a step, stop as by Ctrl-C; returns the log's lines of steps."""

    def stop(*args, step, **figures):
        if step >= last:
            os.kill(os.getpid(), signal.SIGINT)

    with suppress(Interrupted):
        train(config, stop)
    return [line for line in log_of(config.run_dir) if "loss" in line]


def move_to(config: StudentConfig, store, step: int) -> None:
    """Make the newest checkpoint of a run that of a later step."""
    checkpoints = Checkpoints(config.run_dir / "checkpoints")
    path, state = checkpoints.newest_whole()
    model = build_student(config, store, OBJECTIVES[config.objective](store))
    optimizer = build_optimizer(model, config)
    restore(path, model, optimizer)
    kept = {name: value for name, value in state.items() if name not in ("step", "files", "checksum")}
    checkpoints.save(step, model, optimizer, kept, None)


if __name__ == "__main__":
    main()
