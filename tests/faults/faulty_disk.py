"""Stand-ins for mlsm.common.disk: record its calls, fail at the i-th, die at the i-th. And forks that die."""

import os
import signal
from contextlib import contextmanager

from mlsm.common import disk


class Died(BaseException):
    """The process ends here, as far as the test can tell."""


@contextmanager
def watched(before):
    """Call before(number, name, arguments) ahead of every call of the protocol, counted from 0."""
    original = {name: getattr(disk, name) for name in disk.CALLS}
    count = iter(range(10**9))

    def stand_in(name, call):
        def watched_call(*arguments):
            before(next(count), name, arguments)
            return call(*arguments)

        return watched_call

    try:
        for name, call in original.items():
            setattr(disk, name, stand_in(name, call))
        yield
    finally:
        for name, call in original.items():
            setattr(disk, name, call)


def recorded(work):
    """Run it; returns the calls as (name, arguments)."""
    calls = []
    with watched(lambda number, name, arguments: calls.append((name, arguments))):
        work()
    return calls


def raising_at(chosen, error_number, partly=True):
    """Let call number `chosen` fail; a write has then written half of it, as on a disk that is full."""

    def before(number, name, arguments):
        if number == chosen:
            if name == "write" and partly:
                arguments[0].write(arguments[1][: len(arguments[1]) // 2])
            raise OSError(error_number, os.strerror(error_number))

    return watched(before)


def forked(work):
    """Run work() in a child process; returns its exit code, negative for a signal."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def killed_at(chosen, work):
    """Run work() in a child that is killed ahead of call number `chosen`, which in half of them is half done."""

    def before(number, name, arguments):
        if number == chosen:
            if name == "write" and number % 2:
                arguments[0].write(arguments[1][: len(arguments[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)

    def dies():
        with watched(before):
            work()

    return forked(dies)
