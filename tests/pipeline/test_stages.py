"""Stages in threads behave as plain iterators do, stop at once and leave nothing running."""

import signal
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.overlap import Stages, Stopped

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def nothing_left_running():
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def doubled(items):
    for item in items:
        yield 2 * item


def failing_after(count, error):
    yield from range(count)
    raise error


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers()), st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_items_and_order_are_those_of_the_plain_iterators(items, depths):
    with Stages() as stages:
        chain = iter(items)
        for depth in depths:
            chain = stages.ahead(doubled(chain), depth)
        assert list(chain) == [item * 2 ** len(depths) for item in items]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 9), st.lists(st.integers(0, 3), min_size=1, max_size=3), st.integers(0, 12))
def test_an_error_comes_in_its_place(count, depths, wanted):
    error, seen, caught = OSError(28, "No space left on device"), [], None
    with Stages() as stages:
        chain = failing_after(count, error)
        for depth in depths:
            chain = stages.ahead(doubled(chain), depth)
        try:
            for item in chain:
                if len(seen) == wanted:
                    break
                seen.append(item)
        except OSError as found:
            caught = found
        if caught:
            assert next(chain, "the end") == "the end", "as of a generator that has failed"
    assert seen == [item * 2 ** len(depths) for item in range(min(count, wanted))]
    assert (caught is error) == (wanted >= count)


def test_the_traceback_names_the_line_that_failed():
    with Stages() as stages, pytest.raises(RuntimeError) as caught:
        list(stages.ahead(doubled(stages.ahead(failing_after(1, RuntimeError("here")), 1)), 1))
    assert {"failing_after", "doubled"} <= {frame.name for frame in traceback.extract_tb(caught.value.__traceback__)}


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 5), st.lists(st.booleans(), max_size=12))
def test_never_more_than_depth_items_ahead(depth, pauses):
    made, taken, worst = 0, 0, 0

    def items():
        nonlocal made, worst
        for _ in pauses:
            made += 1
            worst = max(worst, made - taken)
            yield made

    with Stages() as stages:
        for item, pause in zip(stages.ahead(items(), depth), pauses, strict=True):
            if pause:
                time.sleep(0.002)
            taken = item
    # `taken` lags by the item in the loop's hands and one that has just been popped
    assert worst <= depth + 1


def test_it_does_run_ahead_as_far_as_depth():
    made = []
    with Stages() as stages:
        stages.ahead((made.append(n) for n in range(100)), depth=3)
        wait_until(lambda: len(made) == 3)
        time.sleep(0.05)
        assert len(made) == 3


def test_a_waiting_consumer_gets_the_error_at_once():
    release = threading.Event()

    def items():
        release.wait(5)
        raise ValueError("late")
        yield

    threading.Timer(0.1, release.set).start()
    clock = time.monotonic()
    with Stages() as stages, pytest.raises(ValueError, match="late"):
        next(stages.ahead(doubled(stages.ahead(items(), 2)), 2))
    assert time.monotonic() - clock < 4, "not after the five seconds"


@pytest.mark.parametrize("depths", [(1,), (2, 2), (1, 3, 2)])
@pytest.mark.parametrize("ending", [None, KeyError("the consumer's own"), KeyboardInterrupt()])
def test_leaving_stops_and_closes_every_stage(depths, ending):
    closed = []

    def stage(items, number):
        try:
            yield from items
        finally:
            closed.append((number, threading.current_thread()))

    def endless():
        while True:
            yield 1

    caught = None
    try:
        with Stages() as stages:
            chain = endless()
            for number, depth in enumerate(depths):
                chain = stages.ahead(stage(chain, number), depth)
            next(chain)
            if ending is not None:
                raise ending
    except BaseException as error:
        caught = error
    assert caught is ending
    assert {number for number, _ in closed} == set(range(len(depths)))
    assert threading.current_thread() not in {thread for _, thread in closed}


def test_leaving_does_not_wait_for_an_item_that_never_comes():
    """The last stage waits for the first, which waits for the world: only the first may keep us waiting."""
    world = threading.Event()
    with Stages() as stages:
        stages.ahead(doubled(stages.ahead((world.wait(5) for _ in range(1)), 1)), 1)
        time.sleep(0.02)
        threading.Timer(0.1, world.set).start()
        clock = time.monotonic()
    assert time.monotonic() - clock < 4, "not after the five seconds"


def test_a_handler_of_errors_does_not_keep_a_stage_alive():
    def stubborn(items):
        while True:
            with suppress(Exception):
                yield next(items)

    with Stages() as stages:
        chain = stages.ahead(stubborn(stages.ahead(iter(lambda: 1, 2), 1)), 1)
        next(chain)


def closing_badly(error):
    try:
        while True:
            yield 1
    finally:
        raise error


def test_an_error_in_closing_is_raised_when_there_is_no_other():
    error = OSError("close")
    with pytest.raises(OSError, match="close") as caught, Stages() as stages:
        next(stages.ahead(closing_badly(error), 1))
    assert caught.value is error


def test_an_error_in_closing_does_not_hide_the_consumers():
    with pytest.raises(KeyError, match="first"), Stages() as stages:
        next(stages.ahead(closing_badly(OSError("close")), 1))
        raise KeyError("first")


def test_an_error_that_nobody_asked_for_stays_unseen():
    """As with a plain iterator: who takes two items of three never meets the third's error."""
    with Stages() as stages:
        chain = stages.ahead(failing_after(2, ValueError("third")), 5)
        assert [next(chain), next(chain)] == [0, 1]


def test_after_the_block_a_stage_says_that_it_was_stopped():
    with Stages() as stages:
        chain = stages.ahead(iter(range(9)), 2)
    with pytest.raises(Stopped):
        next(chain)


def test_ctrl_c_ends_a_consumer_that_waits():
    code = (
        "import time\nfrom pipeline.overlap import Stages\n"
        "def slow():\n    while True:\n        time.sleep(0.1)\n        yield 1\n"
        "def never(items):\n    for _ in items:\n        pass\n    yield\n"
        "with Stages() as stages:\n"
        "    chain = stages.ahead(never(stages.ahead(slow(), 2)), 2)\n    print('waits', flush=True)\n    next(chain)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "waits\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT and errors.rstrip().endswith("KeyboardInterrupt")


def wait_until(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)
