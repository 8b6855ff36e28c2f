"""How far long work has come: bars on a terminal, lines elsewhere.

    with Progress(sys.stderr) as progress:
        progress("solver", done, total, unit="tokens", objective=0.31)

Left out: results (summaries.py).
"""

import time

from evaluation.summaries import duration


class Progress:
    """Renders `progress(stage, done, total, unit=..., **figures)`: bars on a terminal, lines elsewhere."""

    SECONDS_BETWEEN_LINES = 10

    def __init__(self, stream):
        self._stream, self._bars, self._tasks = stream, None, {}
        self._stage, self._began, self._first, self._last_line = None, 0.0, 0, 0.0
        if stream.isatty():
            self._bars = _rich_bars(stream)

    def __enter__(self):
        if self._bars:
            self._bars.start()
        return self

    def __exit__(self, *_):
        if self._bars:
            self._bars.stop()

    def note(self, text):
        """A line that stays."""
        if self._bars:
            self._bars.console.print(text, highlight=False, markup=False, emoji=False)
        else:
            print(text, file=self._stream, flush=True)

    def __call__(self, stage, done, total, unit="tokens", **figures):
        now = time.monotonic()
        if stage != self._stage:
            self._stage, self._began, self._first, self._last_line = stage, now, done, 0.0
        rate = (done - self._first) / max(1e-9, now - self._began)
        facts = [f"{rate:,.0f} {unit}/s"] if rate else []
        facts += [
            f"{name} {value:,.4g}" if isinstance(value, float | int) else f"{name} {value}"
            for name, value in figures.items()
        ]
        if self._bars:
            self._bar(stage, done, total, ", ".join(facts))
        elif now - self._last_line >= self.SECONDS_BETWEEN_LINES:
            self._last_line = now
            left = f" of {total:,}, {duration((total - done) / rate)} left" if total and rate and total > done else ""
            self.note(", ".join([f"{stage}: {done:,}{left} {unit}", *facts]))

    def _bar(self, stage, done, total, facts):
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total, facts="")
        self._bars.update(self._tasks[stage], completed=done, total=max(done, total) if total else None, facts=facts)


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
