"""The suite in the background of a shell, or under nohup: signals work in its processes and in what they start."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from preloaded import Preloaded, Python

ROOT = Path(__file__).resolve().parent.parent
PRINT = "import signal; print(*(signal.getsignal(n) == signal.SIG_IGN for n in (signal.SIGINT, signal.SIGHUP)))"


@pytest.mark.parametrize("process", [Python, Preloaded])
def test_no_signal_is_ignored_here_nor_in_what_is_started(process):
    assert signal.getsignal(signal.SIGINT) != signal.SIG_IGN != signal.getsignal(signal.SIGHUP)
    with process(["-c", PRINT], stdout=subprocess.PIPE, text=True) as started:
        assert started.communicate(timeout=120)[0] == "False False\n"
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_suite_that_was_started_with_signals_ignored(tmp_path):
    """Its processes, which its first one starts, and with that what they start."""
    test = f"{__file__}::{test_no_signal_is_ignored_here_nor_in_what_is_started.__name__}[Python]"
    suite = [sys.executable, "-m", "pytest", "-n", "1", "-p", "no:cacheprovider", f"--basetemp={tmp_path}", test]
    shell = ["sh", "-c", "trap '' INT HUP; exec \"$@\"", "sh", *suite]
    run = subprocess.run(shell, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
    assert run.returncode == 0 and "1 passed" in run.stdout, run.stdout
