import os
import signal

import pytest

from mlsm.common import signals as signals_of
from student.signals import StopSignals


def test_signals_at_once_are_one_request_and_a_later_one_acts(monkeypatch):
    """A scheduler and the launcher it started both signal a process."""
    before = signal.getsignal(signal.SIGINT)
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.requested is signal.SIGINT
        monkeypatch.setattr(signals_of, "SAME_REQUEST_SECONDS", 0.0)
        monkeypatch.setattr("student.signals.SAME_REQUEST_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_keys_that_are_held_down_are_one_request(monkeypatch):
    """And presses that follow each other more slowly are not."""
    clock = [100.0]
    monkeypatch.setattr(signals_of.time, "monotonic", lambda: clock[0])
    requests = signals_of.Requests()
    for gap, is_new in [(0, True), (0.5, False), *[(0.03, False)] * 200, (0.3, True), (0.3, False), (0.8, True)]:
        clock[0] += gap
        assert requests.is_new() == is_new


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_an_ignored_signal_stays_ignored(number):
    """In the background of a shell, and under nohup."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), number)
            assert signals.requested is None
    finally:
        signal.signal(number, before)


def test_what_is_finished_first_is_said_at_once(caplog):
    """Before the step ends, which may take a minute."""
    with caplog.at_level("INFO"), StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.requested is signal.SIGTERM
        assert "SIGTERM: training ends after the step that is running, with a checkpoint" in caplog.text
