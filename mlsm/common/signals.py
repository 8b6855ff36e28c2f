"""Which of the signals that end a process are requests of their own."""

import math
import time

SAME_REQUEST_SECONDS = 1.0
"""One request may come twice: from a scheduler and its launcher, or from kernel and shell when a terminal closes."""
REPEAT_SECONDS = 0.1
"""Keys that are held down repeat more often than this, and nobody presses them so fast."""


class Requests:
    """Tells new requests from repeats of the last one."""

    def __init__(self):
        self._began = self._last = -math.inf

    def is_new(self) -> bool:
        """Whether a signal that comes now is a new request."""
        now, last = time.monotonic(), self._last
        self._last = now
        if now - self._began < SAME_REQUEST_SECONDS or now - last < REPEAT_SECONDS:
            return False
        self._began = now
        return True
