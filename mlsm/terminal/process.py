"""The process of a command: signals that end it, warnings, notes, and the one line that says what went wrong.

Not handled here: the streams themselves, which survive a display that goes away (mlsm/common/streams.py).
"""

import contextlib
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator

from mlsm.common.errors import EXIT_INPUT, EXIT_STORE, PeerError
from mlsm.common.text import printable, redacted
from mlsm.terminal.progress import Progress

SAME_REQUEST_SECONDS = 1.0  # a closed terminal's kernel and shell both send SIGHUP


def is_follower() -> bool:
    """Say whether this process leaves writing and printing to another one of its torchrun or `accelerate launch`."""
    return int(os.environ.get("RANK", 0)) > 0


_displays: list[Progress] = []  # of the command that is running


class Terminated(KeyboardInterrupt):
    """A signal: SIGTERM and SIGHUP end the work under way exactly as Ctrl-C does."""

    def __init__(self, number: int):
        super().__init__()
        self.number = number


def end_on_signals() -> None:
    """Let SIGTERM, SIGHUP and Ctrl-C say that the command ends, and raise Terminated.

    SIGHUP stays ignored under nohup, and SIGINT in the background of a shell.
    """
    noted: list[float] = []  # when the last signal came

    def terminate(number, _):
        if number == signal.SIGINT or not noted or time.monotonic() - noted[0] >= SAME_REQUEST_SECONDS:
            noted[:] = [time.monotonic()]
            for display in _displays:
                display.end(signal.Signals(number).name)
            raise Terminated(number)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) != signal.SIG_IGN or number == signal.SIGTERM:
            signal.signal(number, terminate)


def wait_without_spinning() -> None:
    """Let OpenMP's threads sleep soon when they wait for one another. To be called before torch is loaded.

    By default they spin for about a millisecond at every barrier. Beside one busy process on two cores, that took
    a training step to 2.4 times its time; with a short spin it takes 1.1 times, and alone as long as before
    (benchmarks/neighbour.py). What the environment says already has precedence. The functions of `mlsm` do not do this,
    since the process is their caller's (docs/python.md).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def quiet_libraries(downloads: bool) -> None:
    """Let libraries speak through our errors only; their chatter would bury the summary.

    downloads  whether the command may fetch a model, whose progress bar is wanted
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    if not downloads:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.simplefilter("default", UserWarning)
    if is_follower():
        warnings.simplefilter("ignore")
    warnings.showwarning = lambda message, *_: warn(message)


class _Notes(logging.Handler):
    """Hands log messages to a display."""

    def __init__(self, progress: Progress):
        super().__init__()
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        self._progress.note(record.getMessage())


@contextlib.contextmanager
def passing_on_notes(progress: Progress) -> Iterator[None]:
    """Turn what our packages log, such as a resume or a damaged checkpoint passed over, into lines that stay.

    Signals that end the command are reported there as well.
    """
    handler = _Notes(progress)
    packages = ("mlsm", "pipeline", "shards", "student")
    loggers = [logging.getLogger(package) for package in packages]
    for logger in loggers:
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
    _displays.append(progress)
    try:
        yield
    finally:
        _displays.remove(progress)
        for logger in loggers:
            logger.setLevel(logging.NOTSET)
            logger.removeHandler(handler)


def warn(message: object) -> None:
    """Print a warning, with control characters and passwords taken out."""
    print(f"warning: {printable(redacted(message))}", file=sys.stderr)


def complain(message: object, code: int) -> int:
    """Print the one line that says what went wrong, and return the exit code."""
    print(f"mlsm: error: {printable(redacted(message), keep='')}", file=sys.stderr)
    return code


def one_line(error: Exception) -> str:
    """Put an error on one line. One that is not due to bad input gets its class and the way to its traceback."""
    text = " ".join(str(error).split())
    if isinstance(error, ValueError):
        return text
    return f"{type(error).__name__}: {text} (run again with --debug for the traceback)"


def is_reported_by_another(error: Exception, code: int) -> bool:
    """Say whether another process reports the same error, so that this one does not have to."""
    same_for_all = code in (EXIT_INPUT, EXIT_STORE) and int(os.environ.get("LOCAL_RANK", 0)) > 0
    return is_follower() and (same_for_all or isinstance(error, PeerError))
