# ruff: noqa: E402
"""Kill encoding at random times, resume, compare with an unbroken run; again until the time is over.

    python tests/faults/soak.py --seconds 600 --seed 0

Every attempt is a process, sometimes two on the same plan, forked from one that has imported everything; SIGKILL
comes after a seeded random time. When a store is finished its shards must equal those of the unbroken run byte for
byte, and the next store is begun. Prints JSON as its last line; exit code 1 on a difference.
"""

import argparse
import collections
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parents[1]), str(HERE.parent)]
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NUMBA_NUM_THREADS", "1")

import torch  # noqa: F401  (imported once, for all the children)
import transformers.models.bert.modeling_bert  # noqa: F401
from faulty_disk import forked
from tiny_teacher import random_dictionary, standard_text, tiny_teacher

from mlsm.common.disk import file_sha256
from pipeline import teacher  # noqa: F401
from pipeline.commands import encode_lsp
from pipeline.config import EncodeConfig
from pipeline.encode import LAYOUTS
from shards.files import StoreFiles


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        outcome = soak(Path(directory), given.seconds, random.Random(given.seed))
    print(json.dumps({"seed": given.seed, **outcome}))


def soak(directory, seconds, dice):
    """Counts of a soak that found no difference; AssertionError otherwise."""
    prepared = directory / "prepared"
    assert forked(lambda: prepare(prepared)) == 0
    whole = shards(prepared / "runs")
    times = measure(prepared, directory / "measured")
    counts = collections.Counter()
    deadline, number, began = time.monotonic() + seconds, 0, time.monotonic()
    while time.monotonic() < deadline:
        output = directory / f"runs-{number}"
        finish(prepared, output, dice, deadline, counts, times)
        assert shards(output) == whole, f"store {number} differs from the unbroken run"
        counts["stores finished and equal"] += 1
        number += 1
    return dict(counts) | {"shards each": len(whole), "seconds": round(time.monotonic() - began)}


def prepare(directory):
    """Text, teacher, dictionary and the unbroken run."""
    directory.mkdir()
    text = standard_text(directory)
    tiny_teacher(directory, text)
    random_dictionary().save(directory / "dictionary")
    encode(directory, directory / "runs")


def encode(prepared, output):
    encode_lsp(
        EncodeConfig(
            teacher=str(prepared / "tiny"),
            layer=(2,),
            corpus=(str(prepared / "text.txt"),),
            dictionary=prepared / "dictionary",
            lam=0.1,
            top_n=8,
            max_length=32,
            max_tokens=120_000,
            unit_tokens=6_000,
            batch_tokens=2048,
            device="cpu",
            output=output,
        )
    )


def measure(prepared, output):
    """Seconds until the first unit is finished, and until the last is, of an attempt that nobody kills."""
    began, first = time.monotonic(), None
    child = start(prepared, output, "cpu")
    while not wait([child], 0.005):
        if first is None and list(output.glob("stores/*/units/*.json")):
            first = time.monotonic() - began
    return first, time.monotonic() - began


def finish(prepared, output, dice, deadline, counts, times):
    """Attempts on one store until one of them ends by itself."""
    while True:
        last = time.monotonic() >= deadline  # then nothing is killed any more
        layout = dice.choice(["cpu", "cuda"])
        children = [start(prepared, output, layout) for _ in range(dice.choice([1, 1, 2]))]
        begin = times[0] * (0.7 if dice.random() < 0.9 else 0)  # most of them once it writes
        pause = dice.uniform(begin, times[0] + (times[1] - times[0]) / 2) * len(children)
        ended = wait(children, 120 if last else pause)
        for child in set(children) - ended.keys():
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            counts["kills"] += 1
            assert not last, "an attempt hangs"
        assert all(code == 0 for code in ended.values()), ended
        counts["attempts"] += len(children)
        check_visible(output, counts)
        if ended:
            return


def start(prepared, output, layout):
    child = os.fork()
    if child == 0:
        code = 70
        try:
            LAYOUTS["cpu"] = LAYOUTS[layout]
            encode(prepared, output)
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    return child


def wait(children, seconds):
    """Exit codes of the children that end by themselves in time."""
    ended, deadline = {}, time.monotonic() + seconds
    while len(ended) < len(children) and time.monotonic() < deadline:
        for child in set(children) - ended.keys():
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                ended[child] = os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    return ended


def check_visible(output, counts):
    """What a killed attempt left: every record's shard is whole."""
    for path in output.glob("stores/*/units/*.json"):
        record = StoreFiles(path.parent.parent).record(path.stem)
        assert file_sha256(path.parent / record.file) == record.sha256
        counts["units checked"] += 1
    left = len(list(output.rglob(".*.tmp")))
    counts["temporaries seen at most"] = max(counts["temporaries seen at most"], left)


def shards(output):
    return {path.name: path.read_bytes() for path in output.glob("stores/*/units/*.tar")}


if __name__ == "__main__":
    main()
