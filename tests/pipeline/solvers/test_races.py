"""The kernels have no races, and each of their barriers is there for one that races.py would find without it.

Also the detector itself, on small kernels. All in two processes, since a process simulates a GPU or does not.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from data import ROOT

pytest.importorskip("cuda.bindings", reason='no numba-cuda: pip install "mlsm-pretrain[test]"')
pytest.importorskip("numba.cuda")

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE))

import kernels_changed  # noqa: E402

pytestmark = kernels_changed.only_if_changed("races")
# Barriers that may go without a race, and why they are there, or that they should not be.
REDUNDANT = {
    "cuda_kernels.select #1": "keeps thread 0 from changing a token's size and status before all threads have "
    "read them, which the barrier of _take_members does as well",
}
FOUND = {  # in race_cases.py, with a piece of what is said; the other kernels there have no race
    "no_barrier": "thread 1 of block 0 read at race_cases.py",
    "writing_again_too_early": "in writing_again_too_early (`shared[cuda.threadIdx.x] = i`)",
    "barrier_of_the_warp_across_warps": "thread 63 of block 0 wrote",
    "shuffles_order_no_memory": "shared memory[1] (shared): thread 0 of block 0 reads",
    "blocks_of_a_launch": "thread 0 of block 1 writes",
    "writing_the_same": "out[0]: thread 1 of block 0 writes",
    "atomic_and_plain": "writes atomically",
    "types_that_overlap": "thread 1 of block 0 writes",
    "slices": "out[4]: thread 1 of block 0 reads",
    "indices_below_zero": "index -1 of out",
    "different_barriers": "threads wait for others that do not come: at syncthreads",
}


@functools.cache
def results(script):
    run = subprocess.run(
        [sys.executable, HERE / script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_ENABLE_CUDASIM": "1", "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_what_is_a_race_and_what_is_not():
    found = results("race_cases.py")
    assert FOUND.keys() == {name for name, race in found.items() if race}
    for name, words in FOUND.items():
        assert words in found[name], found[name]


def test_the_kernels_have_no_races():
    assert results("races.py")["whole"] is None


def test_without_a_barrier_there_is_a_race():
    """One barrier after the other is taken out of the kernels; for those that are REDUNDANT nothing changes."""
    found = results("races.py")
    barriers = found.keys() - {"whole"}
    assert len(barriers) >= len(REDUNDANT) + 1
    assert {name for name in barriers if not found[name]} == REDUNDANT.keys()


def test_a_race_is_reported_by_both_lines_and_threads():
    race = next(race for name, race in results("races.py").items() if race)
    sides = race.split(" what ")
    assert len(sides) == 2 and all("thread " in side and ".py:" in side and "`" in side for side in sides), race
