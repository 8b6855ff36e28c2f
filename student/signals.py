"""Stopping on request: SIGINT, SIGTERM and SIGHUP let the step under way end.

SIGHUP comes when the terminal is closed. Under nohup it is ignored, and stays so. Not handled here: what is saved
then (train.py).
"""

import logging
import signal
import threading

from mlsm.common.signals import SAME_REQUEST_SECONDS, requests

logger = logging.getLogger(__name__)


class StopSignals:
    """Notes the first of the signals, so that the step under way ends; a second request acts at once."""

    def __init__(self):
        self.requested: signal.Signals | None = None
        self._before: dict = {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number != signal.SIGTERM and signal.getsignal(number) == signal.SIG_IGN:
                    continue  # in the background of a shell, or under nohup
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error):
        while self._before:
            signal.signal(*self._before.popitem())

    def _note(self, number, frame):
        is_new = requests.is_new(quiet=SAME_REQUEST_SECONDS)  # in a step, signals may be handled late
        if self.requested is None:
            self.requested = signal.Signals(number)
            logger.info(
                "%s: training ends after the step that is running, with a checkpoint; another signal, after "
                "a quiet second, stops it at once",
                self.requested.name,
            )
        elif is_new:
            self.__exit__()
            requests.forget()
            signal.raise_signal(number)
