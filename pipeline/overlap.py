"""What runs at the same time: stages in threads of their own, and the streams of a device that their work is queued in.

A stage is an iterator that runs ahead in a thread, at most so many items.

    with Stages() as stages:
        batches = stages.ahead(read(), depth=4)
        states = stages.ahead(teach(batches), depth=2)      # teach is a generator over batches
        for state in states:
            ...

What the loop sees is what it would see without threads: the same items in the same order and, after the
items before it, the same exception with its traceback. So an error waits for at most `depth` items, and
work that was finished before it is not lost. In the other direction nothing waits: whatever ends the `with`
block, an exception, an early exit or Ctrl-C, stops every stage at its next item, closes its iterator in its
own thread and leaves no thread behind.

On a GPU every stage has a CUDA stream, so that teacher, solver and copies overlap; order between them is by
events, and memory that crosses over is not used again before its reader is done. How torch sums products of float16 is
a setting of the process: all streams have the solver's, or the last bits of a teacher's states would depend on whether
the solver works at the same time. On a CPU a call returns when its work is done, and a stream only reads the clock. Not
run on a GPU yet. Not handled here: what the stages do (encode.py); items that finish out of order.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterable

import torch

from pipeline.solvers.cuda_products import sums_in_float32


class Stopped(BaseException):
    """Ends a stage whose consumer has left. Not an Exception, so that no handler of errors swallows it."""


class Stages:
    """The threads of one chain of stages, stopped together.

    They share a lock, which they hold for moments: an item is a batch or a block, not a token.
    """

    def __init__(self):
        self._changed = threading.Condition()
        self._stages, self._stopped = [], False

    def ahead(self, items: Iterable, depth: int) -> Iterable:
        """Iterate over `items` in a thread that keeps at most `depth` of them ready; with 0, `items` itself."""
        if depth == 0:
            return items
        stage = _Stage(iter(items), depth, self._changed, lambda: self._stopped)
        self._stages.append(stage)
        stage.thread.start()
        return stage

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for stage in self._stages:
            stage.thread.join()
        if kind is None:
            for stage in self._stages:
                stage.raise_closing_error()


class _Stage:
    """One iterator in its thread; itself an iterator over the same items, for one consumer."""

    def __init__(self, items, depth, changed, stopped):
        self._items, self._depth = items, depth
        self._changed, self._stopped = changed, stopped
        self._ready: deque = deque()
        self._ended = False
        self._error: BaseException | None = None
        self._closing_error: BaseException | None = None
        name = getattr(items, "__name__", type(items).__name__)
        self.thread = threading.Thread(target=self._run, name=f"stage {name}", daemon=True)

    def __iter__(self):
        return self

    def __next__(self):
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended or self._stopped())
            if self._stopped():
                raise Stopped
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
            error, self._error = self._error, None
        if error is None:
            raise StopIteration
        try:
            raise error
        finally:
            del error  # the traceback refers to this frame: a cycle would keep the stage's arrays alive

    def raise_closing_error(self):
        """Raise what the iterator raised when it was closed, if anything."""
        if self._closing_error is not None:
            raise self._closing_error

    def _run(self):
        try:
            while self._has_room():
                self._add(next(self._items))
        except (StopIteration, Stopped):
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._close()
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _has_room(self):
        """Wait until an item may be made, so that the one in the making counts; False when stopped."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._ready) < self._depth or self._stopped())
            return not self._stopped()

    def _add(self, item):
        with self._changed:
            self._ready.append(item)
            self._changed.notify_all()

    def _close(self):
        try:
            getattr(self._items, "close", lambda: None)()
        except Stopped:
            pass
        except BaseException as error:
            self._closing_error = error
        finally:
            self._items = None


# -- streams -----------------------------------------------------------------------------------------------


def open_stream(device: torch.device) -> "GpuStream | HostStream":
    """A new stream of the device; use it as `with stream:` around the calls that queue work."""
    return GpuStream(device) if device.type == "cuda" else HostStream()


class HostStream:
    """Work is done when the call returns: nothing to order."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def mark(self) -> float:
        """A point in the stream's work, for `after` and `seconds`."""
        return time.perf_counter()

    def after(self, mark: float, *tensors: torch.Tensor) -> None:
        """Let this stream's next work wait for a mark of another stream, from which it takes over tensors."""

    @staticmethod
    def seconds(begin: float, end: float) -> float:
        """Time between two marks of one stream; waits until the second is reached."""
        return end - begin


class GpuStream:
    """A CUDA stream, for the thread of one stage."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)
        self._entered = contextlib.ExitStack()

    def __enter__(self):
        self._entered.enter_context(torch.cuda.stream(self._stream))  # the device as well: both belong to the thread
        self._entered.enter_context(sums_in_float32())
        return self

    def __exit__(self, *_):
        self._entered.close()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event

    def after(self, mark: torch.cuda.Event, *tensors: torch.Tensor) -> None:
        self._stream.wait_event(mark)
        for tensor in tensors:
            tensor.record_stream(self._stream)  # else freed memory would go back to the other stream at once

    @staticmethod
    def seconds(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return begin.elapsed_time(end) / 1000
