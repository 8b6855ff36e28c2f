"""Which of the signals that end a process are requests of their own.

Times are those at which Python handles a signal, which may be later than it came.
"""

import math
import time

SAME_REQUEST_SECONDS = 1.0
"""One request may come twice: from a scheduler and its launcher, or from kernel and shell when a terminal closes."""
REPEAT_SECONDS = 0.25
"""Keys that are held down repeat more often than this; a person presses them more slowly."""


class Requests:
    """Tells new requests from repeats of the last one.

    There is one for a process, `requests`: what training has counted is not new to the command around it.
    """

    def __init__(self):
        self._began = self._last = -math.inf

    def is_new(self, quiet: float | None = None) -> bool:
        """Whether a signal that comes now is a new request.

        quiet  seconds without a signal before it; by default REPEAT_SECONDS
        """
        now, last = time.monotonic(), self._last
        self._last = now
        quiet = REPEAT_SECONDS if quiet is None else quiet
        if now - self._began < SAME_REQUEST_SECONDS or now - last < quiet:
            return False
        self._began = now
        return True

    def forget(self) -> None:
        """Let the next signal be new."""
        self._began = self._last = -math.inf


requests = Requests()
