"""Standard output and error as a display: it may be slow, closed, full or of any encoding, and never ends the work.

    guard_standard_streams()

Long work writes to a terminal that is closed over night, to a `tee` that dies, to a disk that fills. From then on the
stream swallows what it is given, and the work continues. What its encoding cannot express is written as an escape. A
stream that was closed before the start gets /dev/null, or else the next file that is opened, a shard say, would have
its number, and receive what libraries complain of. Not handled here: what is shown (mlsm/cli/, mlsm/commands/,
mlsm/terminal/).
"""

import errno
import io
import os
import select
import sys
from contextlib import suppress

_GONE = {errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO, errno.ECONNRESET}  # nobody is there who could miss it


def guard_standard_streams() -> None:
    """Replace sys.stdout and sys.stderr by streams that never raise, unless something else (a test) has replaced
    them."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if is_closed := _is_closed(number):
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            os.set_inheritable(number, True)  # workers need one, too
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
    """A file descriptor that takes everything. After its first error nothing is written any more; `error` has it."""

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
            except BlockingIOError:  # somebody made a shared terminal or pipe non-blocking
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
