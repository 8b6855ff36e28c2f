"""Run stages at the same time: each in its own thread, with its own stream of the device.

A stage is an iterator that runs ahead in a thread, by at most `depth` items.

    with Stages() as stages:
        batches = stages.ahead(read(), depth=4)
        states = stages.ahead(teach(batches), depth=2)      # teach is a generator over batches
        for state in states:
            ...

The loop gets what it would get without threads: the same items in the same order and, after the items before it, the
same exception with its traceback. So an error is raised at most `depth` items late, and finished work is not lost. In
the other direction nothing waits: whatever ends the `with` block (an exception, an early exit, Ctrl-C) stops every
stage at its next item, closes its iterator in its own thread, and leaves no thread running.

On a GPU every stage has a CUDA stream, so that teacher, solver and copies overlap. Events order the streams, and memory
that another stream reads is not reused before that stream is done. How torch sums products of float16 is a setting of
the process. All streams have the solver's setting; otherwise the last bits of a teacher's states would depend on
whether the solver is running at the same time. On a CPU a call returns when its work is done, and a stream only reads
the clock. Not handled here: what the stages do (encode.py); items that finish out of order.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterable

import torch

from pipeline.solvers.cuda_products import sums_in_float32


class Stopped(BaseException):
    """Ends a stage whose consumer has stopped. Not a subclass of Exception, so that no error handler catches it."""


class Stages:
    """The threads of one chain of stages, stopped together.

    They share one lock. This is no bottleneck, as an item is a whole batch or block.
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
            del error  # the traceback refers to this frame; the cycle would keep arrays alive

    def raise_closing_error(self):
        """Raise the error from closing the iterator, if there was one."""
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
        """Wait until another item may be made; an unfinished item counts towards `depth`. False when stopped."""
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
    """A stream of a CPU: a call returns when its work is done, so nothing needs ordering."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def mark(self) -> float:
        """A point in the stream's work, for `after` and `seconds`."""
        return time.perf_counter()

    def after(self, mark: float, *tensors: torch.Tensor) -> None:
        """Let this stream's next work wait for a mark of another stream, whose tensors it then uses."""

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
        self._entered.enter_context(torch.cuda.stream(self._stream))  # also sets the thread's device
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
