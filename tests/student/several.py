"""Trains the runs of a JSON file one after the other; to be started as torchrun starts it.

    torchrun --nproc-per-node 2 several.py jobs.json

A job is {"settings": {...}} and what happens to it: "differs": settings of rank 1 alone, "signal": [rank, step],
"poison": [rank, step] (a loss that is not a number), "fail": [rank, step], "hang": [rank, step], "slow_save": seconds
before each checkpoint. Every process writes what came of each job beside the file.
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import student.ranks
from mlsm.common.errors import Interrupted
from student.config import StudentConfig
from student.runs.checkpoint import Checkpoints
from student.train import Stepper, train

RANK = int(os.environ["RANK"])
update, save = Stepper.update, Checkpoints.save


def main(jobs_file):
    for number, job in enumerate(json.loads(jobs_file.read_text())):
        Stepper.update, Checkpoints.save = happening(job), saved_late(job.get("slow_save", 0))
        begun = time.monotonic()
        try:
            differs = job.get("differs", {}) if RANK == 1 else {}
            outcome = {"steps": train(config_of(job["settings"] | differs))["steps"]}
        except (Exception, Interrupted) as error:
            outcome = {"error": type(error).__name__, "message": str(error)}
            kept = Path(job["settings"]["run_dir"], "checkpoints").glob("*")
            outcome["checkpoints"] = sorted(path.name for path in kept)
        outcome["seconds"] = time.monotonic() - begun
        (jobs_file.parent / f"job-{number}-rank-{RANK}.json").write_text(json.dumps(outcome))
    sys.exit("error" in outcome)  # of the last one; the launcher then ends the others


def config_of(settings):
    return StudentConfig(**settings | {"run_dir": Path(settings["run_dir"])})


def saved_late(seconds):
    def slowly(*arguments):
        time.sleep(seconds)
        return save(*arguments)

    return slowly


def happening(job):
    def stepped(stepper, step, batch):
        happens = {name for name in ("signal", "poison", "fail", "hang") if job.get(name) == [RANK, step + 1]}
        if "fail" in happens:
            sys.exit("rank fails")
        if "hang" in happens:
            time.sleep(1000)
        if "poison" in happens:
            batch = batch._replace(counts=(float("nan"),) * len(batch.counts))
        if "signal" in happens:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(stepper, step, batch)

    student.ranks.TIMEOUT = timedelta(seconds=job.get("timeout", 60))
    return stepped


if __name__ == "__main__":
    main(Path(sys.argv[1]))
