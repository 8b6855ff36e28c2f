"""Child processes in which a GPU is tried, which end with the process that started them, and who waits for them."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from preloaded import Preloaded

from mlsm.common import proofs

CODE = "import sys; from mlsm.common import proofs; sys.path.append(sys.argv[1])\n"
CODE += "proofs.run_child('sleeper', {}, 60)"
SLEEPER = "import os, time; from pathlib import Path; here = Path(__file__).parent\n"
SLEEPER += "(here / 'part').write_text(str(os.getpid())); (here / 'part').rename(here / 'pid'); time.sleep(60)"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux ends a child with its parent")
def test_a_child_does_not_outlive_a_parent_that_is_killed(tmp_path):
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    with Preloaded(["-c", CODE, tmp_path]) as parent:
        until(lambda: (tmp_path / "pid").exists())
        child = int((tmp_path / "pid").read_text())
        assert is_running(child)
        parent.kill()
    try:
        until(lambda: not is_running(child))
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def test_what_is_known_does_not_wait_for_what_another_process_proves(monkeypatch, tmp_path):
    monkeypatch.setenv("MLSM_CACHE", str(tmp_path))
    with proofs.alone(), ThreadPoolExecutor() as others:
        assert others.submit(proofs.known_or_proven, lambda: 3, lambda: 4).result(20) == 3


def test_what_another_process_has_proven_meanwhile_is_not_proven_again(monkeypatch, tmp_path):
    monkeypatch.setenv("MLSM_CACHE", str(tmp_path))
    found = iter([None, 3])
    assert proofs.known_or_proven(lambda: next(found), lambda: 4) == 3
    assert proofs.known_or_proven(lambda: 3, lambda: 4, fresh=True) == 4


def is_running(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(holds, seconds=20.0):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)


def test_the_reason_is_the_last_error_whatever_is_printed_after_it(tmp_path, monkeypatch):
    code = "import atexit, sys\natexit.register(lambda: print('leaked 1 instance', file=sys.stderr))\n"
    (tmp_path / "failing.py").write_text(code + "raise ValueError('no device')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert proofs.run_child("failing", {}, 60).trouble == "it ended with code 1: ValueError: no device"
