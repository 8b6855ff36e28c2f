"""After a signal, a command says at once that it stops, and ends as it promises."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from preloaded import ROOT, Preloaded, run_python

from mlsm.common.durable import naming
from mlsm.common.errors import PeerError
from mlsm.terminal.process import Terminated, end_on_signals, one_line, passing_on_notes
from mlsm.terminal.progress import Progress

SLOW = """
import sys, time
import pipeline.encode as coder
from mlsm.terminal.progress import Progress
Progress.SECONDS_OF_SILENCE, Progress.SECONDS_BETWEEN_LOOKS = 0.3, 0.05
teach = coder.Coder._teach
def slowly(self, batches):
    if not hasattr(self, "slow"):
        self.slow = True
        print("the slow batch", file=sys.stderr, flush=True)
        time.sleep(2.5)  # as a forward pass of a large teacher; Python's sleep in a thread is not interrupted
    return teach(self, batches)
coder.Coder._teach = slowly
from mlsm import __main__ as cli
cli.main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_it_says_at_once_that_it_stops(english_text, teacher_directory, tmp_path, number):
    flags = [
        *("encode-lsp", "--teacher", teacher_directory, "--layer", 2, "--corpus", english_text, "--k", 48),
        *("--lam", 0.1, "--max-length", 32, "--dictionary-tokens", 2_000, "--batch-tokens", 2048, "--device", "cpu"),
        *("--max-tokens", 20_000, "--dictionary-epochs", 1, "--output", tmp_path),
    ]
    process = Preloaded(["-c", SLOW, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    lines = iter(process.stderr)
    for line in lines:
        if line == "the slow batch\n":
            break
    process.send_signal(number)
    sent, said = time.monotonic(), []
    for line in lines:
        said.append((time.monotonic() - sent, line))
    assert process.wait() == 128 + number, said
    first = next(when for when, line in said if line.startswith(f"{number.name}: the command stops; "))
    last = next(when for when, line in said if line.startswith("mlsm: error: interrupted"))
    assert first < last - 0.5, "before the batch is finished"
    waiting = [line for _, line in said if line.startswith(f"{number.name}: still stopping, for ")]
    assert waiting, "and again while it lasts"


HELD = """
import sys, time
import mlsm.__main__ as cli
from mlsm.terminal.process import passing_on_notes
from mlsm.terminal.progress import Progress
def work(argv):
    with Progress(sys.stderr) as progress, passing_on_notes(progress):
        for number in range(10_000):
            progress("work", number, 10_000)
            time.sleep(0.01)
cli.run = work
cli.main(["x"])
"""


@pytest.mark.parametrize("gap", [0.002, 0.03])
def test_ctrl_c_that_is_held_down_ends_as_one_does(gap):
    """On a terminal: one line, and the cursor is back."""
    reading, terminal = os.openpty()
    process = Preloaded(
        ["-c", HELD], stdin=terminal, stdout=terminal, stderr=terminal, env=os.environ | {"TERM": "xterm"}
    )
    os.close(terminal)
    said = b""
    while b"work" not in said:
        said += os.read(reading, 4096)
    reader = threading.Thread(target=lambda: shown.append(read_all(reading)))
    shown = []
    reader.start()
    while process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        time.sleep(gap)
    reader.join()
    os.close(reading)
    said += shown[0]
    assert process.returncode in (130, -signal.SIGINT)  # for a shell both are 130
    assert said.count(b"mlsm: error: interrupted") == 1 and b"Traceback" not in said
    assert said.rfind(b"\x1b[?25h") > said.rfind(b"\x1b[?25l") >= 0


def read_all(descriptor):
    """What is written to a terminal until all its writers have ended."""
    said = b""
    with contextlib.suppress(OSError):
        while part := os.read(descriptor, 4096):
            said += part
    return said


def test_ctrl_c_that_a_shell_has_ignored_stays_ignored():
    """As for a background job; SIGTERM ends it all the same."""
    code = "from signal import *; from mlsm.terminal.process import end_on_signals as f; f()\n"
    code += "print(getsignal(SIGINT) == SIG_IGN, getsignal(SIGTERM) == SIG_IGN)"
    shell = ["sh", "-c", "trap '' INT HUP TERM; exec \"$@\"", "sh", sys.executable, "-c", code]
    run = subprocess.run(shell, cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout == "True False\n"


DESTRUCTORS = """
import signal, time, weakref
from mlsm.common import signals
from mlsm.terminal.process import Terminated, end_on_signals
signals.SAME_REQUEST_SECONDS = signals.REPEAT_SECONDS = 0

class Destroyed:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)

class Watched(set):
    pass

end_on_signals()
for dropping in (Destroyed, Watched):
    try:
        thing = dropping()
        if dropping is Watched:
            watch = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
        del thing
        time.sleep(30)
    except Terminated as stop:
        print(stop.number)
time.sleep(0.1)
class Broken:
    def __del__(self):
        raise ZeroDivisionError
Broken()
"""


def test_a_signal_in_a_destructor_or_a_weak_reference_is_not_lost():
    began = time.monotonic()
    run = run_python(["-c", DESTRUCTORS])
    assert run.stdout.split() == ["15", "2"] and time.monotonic() - began < 60
    assert run.stderr.count("ignored") == 1 and "ZeroDivisionError" in run.stderr, "other exceptions are reported"


def test_a_signal_while_nothing_is_shown_raises_at_once(monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setattr("mlsm.common.signals.SAME_REQUEST_SECONDS", 0)
    monkeypatch.setattr("mlsm.common.signals.REPEAT_SECONDS", 0)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        end_on_signals()
        stream = io.StringIO()
        with pytest.raises(Terminated), Progress(stream) as progress, passing_on_notes(progress):
            os.kill(os.getpid(), signal.SIGINT)
        assert stream.getvalue() == "SIGINT: the command stops; work that is finished is kept\n"
        with pytest.raises(Terminated):
            os.kill(os.getpid(), signal.SIGINT)
        assert stream.getvalue().count("SIGINT") == 1, "the display is gone"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_an_error_of_the_file_system_says_what_to_do():
    end = ", and run the same command: finished work is kept (run again with --debug for the traceback)"
    refused = one_line(PermissionError(13, "Permission denied", "runs"))
    assert refused == f"PermissionError: runs: Permission denied. Check its permissions, or name another place{end}"
    full = one_line(OSError(28, "No space left on device"))
    assert full == f"OSError: No space left on device. Make room{end}"
    with pytest.raises(OSError, match="No space left") as caught, naming(Path("runs/units")):
        raise OSError(28, "No space left on device")
    assert one_line(caught.value) == f"OSError: runs/units: No space left on device. Make room{end}"
    with pytest.raises(ConnectionResetError) as caught, naming(Path("runs/units")):
        raise ConnectionResetError(104, "reset")
    assert caught.value.filename is None
    no_place = one_line(FileNotFoundError(2, "No usable temporary directory found in ['/tmp', '/']"))
    assert "found in ['/tmp', '/']. Let TMPDIR name a directory that can be written (run" in no_place
    assert one_line(PeerError("another process ended")) == "another process ended"
    assert one_line(KeyError("x")) == "KeyError: 'x' (run again with --debug for the traceback)"
