"""Progress on a terminal says what it was given to say."""

import io

from terminal.progress import Progress

HOSTILE = "[Errno 2] runs/[v2]/x :smile: [MASK] [/bold]"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_text_on_a_terminal_is_never_markup(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    stream = Terminal()
    with Progress(stream) as progress:
        progress.note(HOSTILE)
        progress(HOSTILE, 1, 2, best=HOSTILE)
    assert stream.getvalue().count(HOSTILE) >= 3


def test_a_slow_stage_does_not_say_zero_a_second(monkeypatch):
    stream, clock = io.StringIO(), iter([0.0, 141.0])
    monkeypatch.setattr("terminal.progress.time.monotonic", lambda: next(clock))
    with Progress(stream) as progress:
        for done in (0, 1):
            progress("layers", done, 2, unit="layers")
    assert stream.getvalue().splitlines()[-1] == "layers: 1 of 2 layers, 2 min 21 s left, 0.0071 layers/s"
