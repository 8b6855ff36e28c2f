import os
import signal
import time

import pytest

import student.signals
from student.signals import StopSignals


def test_signals_at_once_are_one_request_and_a_later_one_acts(monkeypatch):
    """A scheduler and the launcher it started both signal a process."""
    before = signal.getsignal(signal.SIGINT)
    with StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.requested is signal.SIGINT
        monkeypatch.setattr(student.signals, "SAME_REQUEST_SECONDS", 0.0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_keys_that_are_held_down_are_one_request(monkeypatch):
    monkeypatch.setattr(student.signals, "SAME_REQUEST_SECONDS", 0.2)
    with StopSignals() as signals:
        for _ in range(20):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.02)
        assert signals.requested is signal.SIGINT
        time.sleep(0.3)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


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
