"""Show the progress of long work: bars on a terminal, lines elsewhere.

    with Progress(sys.stderr) as progress:
        progress("load teacher", 0, None)    # a stage that counts nothing
        progress("solver", done, total, unit="tokens", objective=0.31)

While the work reports nothing, a thread writes a line from time to time, so that no command is silent for more than 20
seconds. On a terminal the bars show the elapsed time.

If the display fails (a closed terminal, a pipe without a reader), it is dropped and the work continues. Untrusted text
in stages, figures and notes cannot control the terminal. Not handled here: results (the other modules of
mlsm/terminal/).
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from mlsm.common.text import printable, redacted
from mlsm.terminal.tables import duration, quantity


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C, which repeats while its keys are held down."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is None:  # None: a handler that is not Python's
        yield
        return
    pending = None
    while True:
        try:
            before = signal.signal(signal.SIGINT, signal.SIG_IGN)
            break
        except KeyboardInterrupt as interrupt:  # one that came before
            pending = interrupt
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pending is not None:
        raise pending


class Progress:
    """Renders `progress(stage, done, total, unit=..., **figures)`: bars on a terminal, lines elsewhere."""

    SECONDS_BETWEEN_LINES = 10
    SECONDS_OF_SILENCE, SECONDS_BETWEEN_LOOKS = 15.0, 1.0

    def __init__(self, stream: TextIO | None):
        self._stream = stream
        self._bars: Any = None  # rich's Progress, on a terminal
        self._tasks: dict[str, Any] = {}  # its bars, by stage
        self._stage: str | None = None
        self._began, self._first, self._last_line = 0.0, 0, 0.0
        self._is_counted = self._is_complete = False  # whether the stage counts anything, and has reached its total
        self._last_report = self._last_shown = time.monotonic()
        self._signal: str | None = None
        self._is_over = threading.Event()
        self._watch = threading.Thread(target=self._break_silence, name="progress", daemon=True)
        if _is_terminal(stream):
            self._bars = _rich_bars(stream)  # None on a terminal that cannot move its cursor

    def __enter__(self):
        if self._bars:
            self._display(self._bars.start)
        self._watch.start()
        return self

    def __exit__(self, *_):
        with _without_interrupts():  # or the cursor would stay hidden
            self._is_over.set()
            self._watch.join()
            if self._bars:
                self._display(self._bars.stop)

    def end(self, signal_name: str) -> None:
        """Print that a signal ends the command. Called by the signal's handler."""
        self._signal, self._last_report = signal_name, time.monotonic()
        self.note(f"{signal_name}: the command stops; work that is finished is kept")

    def _break_silence(self):
        while not self._is_over.wait(self.SECONDS_BETWEEN_LOOKS):
            now = time.monotonic()
            if now - self._last_shown >= self.SECONDS_OF_SILENCE and not (self._bars and self._tasks):
                self.note(self._describe_silence(duration(now - self._last_report)))

    def _describe_silence(self, elapsed):
        if self._signal is not None:
            return f"{self._signal}: still stopping, for {elapsed}"
        if self._stage is None:
            return f"starting, for {elapsed}"
        if self._is_complete:
            return f"{self._stage}: done; the next step has been running for {elapsed}"
        if not self._is_counted:
            return f"{self._stage}: running for {elapsed}"
        return f"{self._stage}: still running, last progress {elapsed} ago"

    def note(self, text: str) -> None:
        """Print a line that stays."""
        text, self._last_shown = printable(redacted(text)), time.monotonic()
        if self._bars:
            self._display(self._bars.console.print, text, highlight=False, markup=False, emoji=False)
        elif self._stream is not None:
            self._display(print, text, file=self._stream, flush=True)

    def _display(self, action, *args, **kwargs):
        try:
            action(*args, **kwargs)
        except (AttributeError, OSError, ValueError):  # a stream without flush; a closed one, or its encoding
            self._stream = self._bars = None
        except RuntimeError:  # a signal handler interrupted this thread's write; the line is lost
            pass

    def __call__(self, stage: str, done: int, total: int | None, unit: str = "tokens", **figures: Any) -> None:
        now, stage = time.monotonic(), printable(stage, keep="")
        if stage != self._stage:
            self._finish_bar()
            self._stage, self._began, self._first, self._last_line = stage, now, done, -self.SECONDS_BETWEEN_LINES
        self._last_report = now
        self._is_counted, self._is_complete = bool(done or total), total is not None and done >= total
        rate = (done - self._first) / max(1e-9, now - self._began)
        facts = [f"{rate:,.0f} {unit}/s" if rate >= 9.5 else f"{rate:.2g} {unit}/s"] if rate else []
        facts += [f"{name} {_figure(value)}" for name, value in figures.items()]
        if self._bars:
            self._display(self._bar, stage, done, total, printable(redacted(", ".join(facts)), keep=""))
        elif now - self._last_line >= self.SECONDS_BETWEEN_LINES:
            self._last_line = now
            count, left = quantity(done, unit.removesuffix("s")), []
            if total is not None and total > done:
                count = f"{done:,} of {quantity(total, unit.removesuffix('s'))}"
                left = [f"{duration((total - done) / rate)} left"] if rate else []
            counted = f"{stage}: {count}" if self._is_counted else stage
            self.note(", ".join([counted, *left, *facts]))

    def _finish_bar(self):
        """Stop the moving bar of a stage without a total when the next stage starts."""
        if self._bars and self._stage in self._tasks:
            task = self._tasks[self._stage]
            if self._bars.tasks[task].total is None:
                self._display(self._bars.update, task, total=1, completed=1)

    def _bar(self, stage, done, total, facts):
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total, facts="")
        self._bars.update(self._tasks[stage], completed=done, total=max(done, total) if total else None, facts=facts)


def _is_terminal(stream):
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, OSError, ValueError):  # a stand-in for stderr without isatty, or a closed stream
        return False


def _figure(value):
    """Format a number: whole numbers in full, others with four digits."""
    if isinstance(value, float) and abs(value) < 1000:
        return f"{value:.4g}"
    return f"{value:,.0f}" if isinstance(value, float | int) else str(value)


def _rich_bars(stream):
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(file=stream)
    if console.is_dumb_terminal:
        return None
    return Progress(
        TextColumn("{task.description:>10}", markup=False),
        BarColumn(bar_width=30),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[facts]}", markup=False),
        console=console,
    )
