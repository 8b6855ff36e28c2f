"""Progress shows what it was passed and is never silent for long."""

import io
import re
import time

import pytest

from mlsm.terminal.progress import Progress

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


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    with Progress(stream) as progress:
        progress("train", 1, 2, unit="steps")
        assert stream.getvalue() == "train: 1 of 2 steps\n"


class OnlyWrites:
    """What some notebooks and servers put in the place of stderr."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text


def test_a_stream_that_only_writes_or_is_closed_does_not_end_the_work():
    closed, stream = io.StringIO(), OnlyWrites()
    closed.close()
    for each in (closed, stream):
        with Progress(each) as progress:
            progress("train", 1, 2, unit="steps")
            progress("train", 2, 2, unit="steps")
    assert stream.text == "train: 1 of 2 steps\n"


def test_a_slow_stage_does_not_say_zero_a_second():
    stream = io.StringIO()
    with Progress(stream) as progress:
        progress("layers", 0, 2, unit="layers")
        progress._began -= 141
        progress._last_line -= 141
        progress("layers", 1, 2, unit="layers")
    last = stream.getvalue().splitlines()[-1]
    assert re.fullmatch(r"layers: 1 of 2 layers, 2 min 2[12] s left, 0\.0071 layers/s", last), last


@pytest.mark.parametrize(
    ("done", "total", "unit", "said"),
    [
        (1, 1, "units", "choose: 1 unit"),
        (0, 1, "units", "choose: 0 of 1 unit"),
        (1, 2, "LSPs", "choose: 1 of 2 LSPs"),
        (1, None, "bytes", "choose: 1 byte"),
        (0, None, "tokens", "choose"),
    ],
)
def test_one_thing_has_no_plural(done, total, unit, said):
    stream = io.StringIO()
    with Progress(stream) as progress:
        progress("choose", done, total, unit=unit)
    assert stream.getvalue() == f"{said}\n"


STAGES = [
    (None, "starting, for "),
    (("load teacher", 0, None), "load teacher: running for "),
    (("dictionary", 0, 100), "dictionary: still running, last progress "),
    (("scan", 7, None), "scan: still running, last progress "),
    (("sample", 100, 100), "sample: done; the next step has been running for "),
]


@pytest.mark.parametrize(("reported", "said"), STAGES, ids=lambda value: str(value and value[0])[:12])
def test_lines_come_while_the_work_reports_nothing(monkeypatch, reported, said):
    """At a fiftieth of the time that users wait: at most SECONDS_OF_SILENCE and a look between two lines."""
    monkeypatch.setattr(Progress, "SECONDS_OF_SILENCE", Progress.SECONDS_OF_SILENCE / 50)
    monkeypatch.setattr(Progress, "SECONDS_BETWEEN_LOOKS", Progress.SECONDS_BETWEEN_LOOKS / 50)
    stream = io.StringIO()
    with Progress(stream) as progress:
        if reported:
            progress(*reported)
        deadline = time.monotonic() + 60
        while stream.getvalue().count(said) < 3:
            assert time.monotonic() < deadline, stream.getvalue()
            time.sleep(0.02)
    lines = stream.getvalue().splitlines()
    assert all(line.startswith(said) for line in lines[1 if reported else 0 :]), lines
    length = len(stream.getvalue())
    time.sleep(0.5)
    assert len(stream.getvalue()) == length, "it ends with the command"


def test_the_limits_keep_a_line_every_twenty_seconds():
    assert Progress.SECONDS_OF_SILENCE + Progress.SECONDS_BETWEEN_LOOKS < 20 > Progress.SECONDS_BETWEEN_LINES


def test_work_that_reports_is_not_interrupted(monkeypatch):
    """Lines of the work itself put the next one off."""
    monkeypatch.setattr(Progress, "SECONDS_OF_SILENCE", 30.0)
    monkeypatch.setattr(Progress, "SECONDS_BETWEEN_LOOKS", 0.01)
    stream = io.StringIO()
    with Progress(stream) as progress:
        progress._last_shown -= 29
        progress("sample", 1, 100)
        time.sleep(1.5)
    assert stream.getvalue() == "sample: 1 of 100 tokens\n"


def test_a_bar_without_a_total_rests_when_the_next_stage_begins(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    with Progress(stream) as progress:
        progress("load teacher", 0, None)
        progress("sample", 0, 100)
        finished = {task.description: task.finished for task in progress._bars.tasks}
    assert finished == {"load teacher": True, "sample": False}
    assert re.search(r"\d:\d\d:\d\d", stream.getvalue()), "the time that has passed shows that it is alive"
