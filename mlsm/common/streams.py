"""Make standard output and error safe: if they are slow, closed, full or in any encoding, the work continues.

    guard_standard_streams()

While a command runs for hours, its terminal may be closed, its `tee` may die or the disk may fill up. From then on the
stream discards what is written to it, and the work continues. Characters outside the stream's encoding are written as
escapes. A stream that was closed before the start is replaced by /dev/null. Otherwise the next opened file, such as a
shard, would get its number, and libraries would print warnings into it. What is shown is decided elsewhere (mlsm/cli/,
mlsm/commands/, mlsm/terminal/).
"""

import errno
import io
import os
import select
import sys
from contextlib import suppress

_GONE = {errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO, errno.ECONNRESET}  # of a stream that nobody reads any more


def guard_standard_streams() -> None:
    """Replace sys.stdout and sys.stderr by streams that never raise, unless something else (a test) has replaced
    them."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if is_closed := _is_closed(number):
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is `number`
            os.set_inheritable(number, True)  # workers also need it
        stream, original = getattr(sys, name), getattr(sys, f"__{name}__")
        if number == 0 or stream is not original:
            continue
        if stream is not None:
            with suppress(OSError, ValueError):
                stream.flush()
        encoding = "utf-8" if stream is None else stream.encoding
        guarded = _text(number, encoding, line_buffering=number == 2 or (not is_closed and os.isatty(number)))
        setattr(sys, name, guarded)
        setattr(sys, f"__{name}__", guarded)


def loss(stream: object) -> OSError | None:
    """Why a guarded stream lost some of its output; None if nothing was lost or if it has no reader."""
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    error = raw.error if isinstance(raw, _Display) else None
    return None if error is None or error.errno in _GONE else error


class _Display(io.RawIOBase):
    """A file descriptor whose writes never raise. After its first error, kept in `error`, it writes nothing."""

    def __init__(self, number):
        super().__init__()
        self.number, self.error = number, None

    def writable(self):
        return True

    def fileno(self):
        return self.number

    def isatty(self):
        return self.error is None and os.isatty(self.number)

    def write(self, raw):
        while self.error is None:
            try:
                return os.write(self.number, raw)
            except BlockingIOError:  # another process made the shared terminal or pipe non-blocking
                select.select([], [self.number], [], 1.0)
            except OSError as error:
                self.error = error
        return len(raw)


def _text(number, encoding, line_buffering):
    buffer = io.BufferedWriter(_Display(number))
    return io.TextIOWrapper(buffer, encoding, errors="backslashreplace", line_buffering=line_buffering)


def _is_closed(number):
    try:
        os.fstat(number)
    except OSError:
        return True
    return False
