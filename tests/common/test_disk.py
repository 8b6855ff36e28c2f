"""Files are opened and closed once, whenever a signal comes."""

import sys
from itertools import count

import pytest

from mlsm.common import disk


class Stopped(BaseException):
    pass


def stop_after(calls):
    """Raise Stopped once so many calls of functions in C have returned, as the handler of a signal would."""
    left = iter(range(calls))

    def watch(frame, event, function):
        if event == "c_return" and next(left, None) is None:
            sys.setprofile(None)
            raise Stopped

    sys.setprofile(watch)


def enter(place):
    with disk.directory(place, root=place.parent.parent):
        pass


@pytest.mark.parametrize(
    "work", [enter, lambda place: disk.append(place / "file"), lambda place: disk.open_to_read(place / "file")]
)
def test_a_signal_after_any_call_closes_nothing_twice(tmp_path, work):
    """A number that is closed twice may be another file's by then; at best it is an OSError, which hides the signal."""
    place = tmp_path / "a" / "b"
    place.mkdir(parents=True)
    (place / "file").touch()
    for calls in count():
        try:
            stop_after(calls)
            work(place)
        except Stopped:
            continue
        finally:
            sys.setprofile(None)
        break
    assert calls > 5
