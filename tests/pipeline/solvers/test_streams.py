"""Streams and lifetimes of memory, on a GPU that is as late as it may be; each precaution shows when it is missing.

The checks are functions of stream_checks.py, all in one process, since a process simulates a GPU or does not.
"""

import functools
import json
import os
import re
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

pytestmark = kernels_changed.only_if_changed("streams")
NAMES = re.findall(r"^@check\ndef (\w+)", (HERE / "stream_checks.py").read_text(), re.M)


@functools.cache
def results():
    run = subprocess.run(
        [sys.executable, HERE / "stream_checks.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_ENABLE_CUDASIM": "1", "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", NAMES)
def test_results_are_right_however_late_the_device_is(name):
    assert results()["checks"][name] is None, results()["checks"][name]


def test_what_is_missing_shows():
    taken_away = results()["taken away"]
    assert len(taken_away) >= 4 and [name for name, failure in taken_away.items() if failure is None] == []
