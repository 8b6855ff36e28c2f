"""Stopping on request: SIGINT, SIGTERM and SIGHUP let the step under way end.

SIGHUP comes when the terminal is closed. Under nohup it is ignored, and stays so. Not handled here: what is saved
then (train.py).
"""

import logging
import signal
import threading
import time

logger = logging.getLogger(__name__)
SAME_REQUEST_SECONDS = 1.0  # a process may get one request twice: from the scheduler and from its launcher


class StopSignals:
    """Notes the first of the signals, so that the step under way ends; a second request acts at once."""

    def __init__(self):
        self.requested: signal.Signals | None = None
        self._before: dict = {}
        self._noted = 0.0

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
        now = time.monotonic()
        before, self._noted = self._noted, now  # keys that are held down repeat
        if self.requested is None:
            self.requested = signal.Signals(number)
            logger.info(
                "%s: training ends after the step that is running, with a checkpoint; another signal, after "
                "a pause of a second, stops it at once",
                self.requested.name,
            )
        elif now - before >= SAME_REQUEST_SECONDS:
            self.__exit__()
            signal.raise_signal(number)
