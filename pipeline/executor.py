"""Apply a function to items, in this process or in others, and keep objects there from one item to the next.

    with open_executor(job, teacher) as executor:        # in job.py
        for item, result in executor.map(function, items): ...

A function takes a Context and an iterator over items, and yields one result per item, in order. The executor decides
whether the function gets all items or one at a time: with all, it can start the next item before it has finished the
current one; one at a time, items can go to several processes. A function must be defined in a module, or be a `partial`
of such a function, so that it can be pickled by name. Not handled here: Dask's processes (dask_workers.py), what the
functions do (encode.py, sample.py).
"""

from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Self, TypeAlias, TypeVar

import numpy as np

from mlsm.common import disk
from mlsm.common.progress import silent

KILLED = object()  # result of an item at which every process died
PART = ".part-"  # in names of files with arrays from other processes

Function: TypeAlias = Callable[["Context", Iterator[Any]], Generator[Any, None, None]]
Results: TypeAlias = Generator[tuple[Any, Any], None, None]  # pairs (item, result)
_Kept = TypeVar("_Kept")


class Context:
    """A job in one process, with the objects that functions keep there between items: teacher and coder.

    job      the Job
    teacher  the teacher, if this process has loaded it already
    report   functions call it with their progress on an item
    """

    def __init__(self, job: Any, teacher: Any = None):
        self.job = job
        self.report: Callable[..., None] = silent
        self._kept: dict[str, tuple[Hashable, Any]] = {} if teacher is None else {"teacher": (None, teacher)}

    def keep(self, name: str, make: Callable[[], _Kept], key: Hashable = None) -> _Kept:
        """The result of make(), cached under this name for this key. A result for another key is dropped first."""
        if name not in self._kept or self._kept[name][0] != key:
            self._kept.pop(name, None)
            self._kept[name] = key, make()
        return self._kept[name][1]

    def check_wanted(self) -> None:
        """End the current item by an exception when its result is no longer needed."""

    def windows(self, unit: Any) -> Iterator[Any]:
        """The windows of a planned unit. Iteration ends with an error when the result is no longer needed."""
        for window in self.job.windows(unit):
            self.check_wanted()
            yield window

    def pack(self, array: np.ndarray, place: Path) -> np.ndarray | Path:
        """Pack an array into a result; `unpack` restores it. From another process it is passed as a file in `place`."""
        return array


def unpack(packed: np.ndarray | Path) -> np.ndarray:
    """The array that `Context.pack` was given; its file is removed."""
    if not isinstance(packed, Path):
        return packed
    array = np.load(packed)
    disk.unlink(packed)
    return array


class Executor:
    """Applies functions to items, for one job, inside a `with` block.

    job              the Job
    batches_at_once  how many batches to join into one item, so that sending it is worth while
    """

    batches_at_once = 1

    def __init__(self, job: Any):
        self.job = job

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def map(
        self,
        function: Function,
        items: Iterable[Any],
        *,
        trials: int = 2,
        report: Callable[..., None] = silent,
    ) -> Results:
        """Pairs (item, result) as results arrive; the result is KILLED for an item at which `trials` processes died.

        items   the next one is taken when there is room for it
        report  called in this process with what the function reports
        Raises  what the function raises; ConnectionError when the scheduler is lost, ChildProcessError when no worker
                is left
        """
        raise NotImplementedError

    def apply(self, function: Function, item: Any, trials: int = 2) -> Any:
        """The result of one item; KILLED if `trials` processes died at it."""
        ((_, result),) = self.map(function, [item], trials=trials)
        return result

    def map_or_rescue(
        self,
        function: Function,
        items: Iterable[Any],
        rescue: Callable[[Any], Any],
        report: Callable[..., None] = silent,
    ) -> Results:
        """As `map`, but after all others, an item at which processes died has the result of rescue(item)."""
        killed = []
        with closing(self.map(function, items, report=report)) as results:
            for item, result in results:
                if result is KILLED:
                    killed.append(item)
                else:
                    yield item, result
        for item in killed:
            yield item, rescue(item)


class Inline(Executor):
    """Applies functions in the caller's thread. No result is KILLED, as a death ends the caller's process too."""

    def __init__(self, job: Any, teacher: Any = None):
        super().__init__(job)
        self._context = Context(job, teacher)

    def map(
        self, function: Function, items: Iterable[Any], *, trials: int = 2, report: Callable[..., None] = silent
    ) -> Results:
        """See Executor; results come in the order of the items."""
        taken: deque[Any] = deque()

        def take():
            for item in items:
                taken.append(item)
                yield item

        self._context.report = report
        with closing(function(self._context, take())) as results:
            for result in results:
                yield taken.popleft(), result
