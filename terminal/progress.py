"""How far long work has come: bars on a terminal, lines elsewhere.

    with Progress(sys.stderr) as progress:
        progress("solver", done, total, unit="tokens", objective=0.31)

A display that fails (a terminal that was closed, a pipe whose reader died) is dropped, and the work goes on. Foreign
text in stages, figures and notes cannot control the terminal. Left out: results (the other modules of terminal/).
"""

import time
from typing import Any, TextIO

from common.text import printable, redacted
from terminal.tables import duration


class Progress:
    """Renders `progress(stage, done, total, unit=..., **figures)`: bars on a terminal, lines elsewhere."""

    SECONDS_BETWEEN_LINES = 10

    def __init__(self, stream: TextIO | None):
        self._stream = stream
        self._bars: Any = None  # rich's Progress, on a terminal
        self._tasks: dict[str, Any] = {}  # its bars, by stage
        self._stage: str | None = None
        self._began, self._first, self._last_line = 0.0, 0, 0.0
        if stream is not None and stream.isatty():
            self._bars = _rich_bars(stream)

    def __enter__(self):
        if self._bars:
            self._display(self._bars.start)
        return self

    def __exit__(self, *_):
        if self._bars:
            self._display(self._bars.stop)

    def note(self, text: str) -> None:
        """Print a line that stays."""
        text = printable(redacted(text))
        if self._bars:
            self._display(self._bars.console.print, text, highlight=False, markup=False, emoji=False)
        elif self._stream is not None:
            self._display(print, text, file=self._stream, flush=True)

    def _display(self, action, *args, **kwargs):
        try:
            action(*args, **kwargs)
        except (OSError, ValueError):  # the latter is what a closed stream raises, and one of another encoding
            self._stream = self._bars = None

    def __call__(self, stage: str, done: int, total: int | None, unit: str = "tokens", **figures: Any) -> None:
        now, stage = time.monotonic(), printable(stage, keep="")
        if stage != self._stage:
            self._stage, self._began, self._first, self._last_line = stage, now, done, 0.0
        rate = (done - self._first) / max(1e-9, now - self._began)
        facts = [f"{rate:,.0f} {unit}/s" if rate >= 9.5 else f"{rate:.2g} {unit}/s"] if rate else []
        facts += [f"{name} {_figure(value)}" for name, value in figures.items()]
        if self._bars:
            self._display(self._bar, stage, done, total, printable(redacted(", ".join(facts)), keep=""))
        elif now - self._last_line >= self.SECONDS_BETWEEN_LINES:
            self._last_line = now
            of_total, left = "", []
            if total is not None and total > done:
                of_total = f" of {total:,}"
                left = [f"{duration((total - done) / rate)} left"] if rate else []
            self.note(", ".join([f"{stage}: {done:,}{of_total} {unit}", *left, *facts]))

    def _bar(self, stage, done, total, facts):
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total, facts="")
        self._bars.update(self._tasks[stage], completed=done, total=max(done, total) if total else None, facts=facts)


def _figure(value):
    """Write a figure for people: whole numbers in full, others to four digits."""
    if isinstance(value, float) and abs(value) < 1000:
        return f"{value:.4g}"
    return f"{value:,.0f}" if isinstance(value, float | int) else str(value)


def _rich_bars(stream):
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description:>10}", markup=False),
        BarColumn(bar_width=30),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[facts]}", markup=False),
        console=Console(file=stream),
    )
