"""The process of a command: the signals that end it, warnings, notes, and the one-line error message.

Not handled here: standard output and error, which survive the loss of the terminal (mlsm/common/streams.py).
"""

import contextlib
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator

from mlsm.common import disk
from mlsm.common.durable import REMEDIES, remedy_for
from mlsm.common.errors import EXIT_INPUT, EXIT_STORE, MlsmError, PeerError
from mlsm.common.signals import requests
from mlsm.common.text import printable, redacted
from mlsm.terminal.progress import Progress

ENDING = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)  # the signals that end a command
DROPPED_SECONDS = 0.01  # long enough for the destructor that dropped a signal to return


def is_follower() -> bool:
    """Whether another process of this torchrun or `accelerate launch` does the writing and printing.

    Ask only for commands that train: other commands are one process each, whatever their environment says.
    """
    return _of_launcher("WORLD_SIZE", 1) > 1 and _of_launcher("RANK", 0) > 0


def _of_launcher(name, otherwise):
    """A number that a launcher sets in the environment, or `otherwise`. Training itself refuses other texts."""
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else otherwise


_displays: list[Progress] = []  # of the command that is running


class Terminated(KeyboardInterrupt):
    """A signal: SIGTERM and SIGHUP end the work under way exactly as Ctrl-C does."""

    def __init__(self, number: int):
        super().__init__()
        self.number = number


def end_on_signals() -> None:
    """Make SIGTERM, SIGHUP and Ctrl-C print that the command ends, and raise Terminated.

    SIGHUP stays ignored under nohup, and SIGINT in the background of a shell.

    Python drops an exception that is raised in a destructor or in the callback of a weak reference, and only reports it
    to `sys.unraisablehook`. A Terminated that is dropped there is raised again.
    """
    dropped = False

    def terminate(number, _):
        nonlocal dropped
        if dropped:
            dropped = False
            raise Terminated(number)
        if requests.is_new():
            for display in _displays:
                display.end(signal.Signals(number).name)
            raise Terminated(number)

    def note_dropped(exception):
        nonlocal dropped
        if not isinstance(exception.exc_value, Terminated):
            return report(exception)
        dropped = True  # a signal sent from here would be handled here, and dropped again
        again = (threading.main_thread().ident, exception.exc_value.number)
        threading.Timer(DROPPED_SECONDS, signal.pthread_kill, again).start()

    report, sys.unraisablehook = sys.unraisablehook, note_dropped
    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN or number == signal.SIGTERM:
            signal.signal(number, terminate)


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """Ignore further signals while an interrupted command says how it ended; afterwards they kill it."""
    heeded = [number for number in ENDING if signal.getsignal(number) != signal.SIG_IGN]
    for number in heeded:
        while signal.getsignal(number) != signal.SIG_IGN:
            with contextlib.suppress(Terminated):  # of keys that are held down
                signal.signal(number, signal.SIG_IGN)
    yield
    disk.end_writing()
    for number in heeded:
        signal.signal(number, signal.SIG_DFL)


def wait_without_spinning() -> None:
    """Let waiting OpenMP threads sleep soon instead of spinning. Call this before torch is loaded.

    By default they spin for about a millisecond at every barrier. With one other busy process on two cores, a training
    step then took 2.4 times as long; with a short spin it takes 1.1 times as long. On an idle machine the time does not
    change (benchmarks/neighbour.py). Environment variables that are already set have precedence. The Python functions
    of `mlsm` do not do this, since the process belongs to their caller (docs/python.md).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def quiet_libraries(downloads: bool) -> None:
    """Silence libraries: their errors reach the user through ours, and other messages would bury the summary.

    downloads  whether the command may download a model; its progress bar is kept
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    if not downloads:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.simplefilter("default", UserWarning)
    warnings.showwarning = lambda message, *_: warn(message)


class _Notes(logging.Handler):
    """Passes log messages to a progress display."""

    def __init__(self, progress: Progress):
        super().__init__()
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        self._progress.note(record.getMessage())


@contextlib.contextmanager
def passing_on_notes(progress: Progress) -> Iterator[None]:
    """Show log messages of our packages, such as a resume or a skipped damaged checkpoint, as permanent lines.

    Signals that end the command are also reported this way.
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
    """Print a warning without control characters and passwords."""
    print(f"warning: {printable(redacted(message))}", file=sys.stderr)


def complain(message: object, code: int) -> int:
    """Print the one-line error message and return the exit code."""
    print(f"mlsm: error: {printable(redacted(message), keep='')}", file=sys.stderr)
    return code


def one_line(error: Exception) -> str:
    """Put an error on one line. If this program did not expect it, add its class and how to get the traceback."""
    text = " ".join(str(error).split())
    if isinstance(error, ValueError | MlsmError):
        return text
    if isinstance(error, OSError) and error.errno in REMEDIES:
        place = f"{error.filename}: " if error.filename else ""
        text = f"{place}{error.strerror}. {remedy_for(error)}, and run the same command: finished work is kept"
    elif "No usable temporary directory" in text:
        text += ". Let TMPDIR name a directory that can be written"
    return f"{type(error).__name__}: {text} (run again with --debug for the traceback)"


def is_reported_by_another(error: Exception, code: int) -> bool:
    """Whether another process reports the same error, so that this one need not.

    Until the processes have joined, all meet the same wrong settings and stores. Then what all meet is a PeerError.
    """
    distributed = sys.modules.get("torch.distributed")  # not imported for this
    joined = distributed is not None and distributed.is_initialized()
    same_for_all = code in (EXIT_INPUT, EXIT_STORE) and _of_launcher("LOCAL_RANK", 0) > 0 and not joined
    return is_follower() and (same_for_all or isinstance(error, PeerError))
