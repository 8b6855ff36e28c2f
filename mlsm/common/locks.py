"""Locks on files, for processes on one machine, or on several if the file system shares locks.

A lock is released when its process ends, however it ends.
"""

import fcntl
from typing import Protocol


class _Open(Protocol):
    """An open file."""

    def fileno(self) -> int: ...


def acquire(file: _Open | int, *, shared: bool = False, wait: bool = False) -> bool:
    """Lock an open file, or a descriptor. Returns False if another process holds a lock that excludes this one.

    shared  whether others may also hold a shared lock
    wait    whether to wait for the others instead of returning False
    Raises  OSError if the file system has no locks
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def release(file: _Open) -> None:
    """Release a lock now. Otherwise it would last until all processes that inherited the open file close it."""
    fcntl.flock(file, fcntl.LOCK_UN)
