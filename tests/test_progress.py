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
