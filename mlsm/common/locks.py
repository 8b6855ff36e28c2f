"""Locks on files, by which the processes of a machine (of several, if the file system shares locks) wait for one
another or keep out of one another's way. A lock ends with the process that holds it, however that ends.
"""

import fcntl
from typing import Protocol


class _Open(Protocol):
    """An open file."""

    def fileno(self) -> int: ...


def acquire(file: _Open, *, shared: bool = False, wait: bool = False) -> bool:
    """Lock an open file. False if another process holds a lock on it that does not go with this one.

    shared  whether others may hold a shared lock too
    wait    whether to wait for the others instead of answering False
    Raises  OSError if the file system has no locks
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def release(file: _Open) -> None:
    """Give a lock back now, not when every process that has inherited the open file has closed it."""
    fcntl.flock(file, fcntl.LOCK_UN)
