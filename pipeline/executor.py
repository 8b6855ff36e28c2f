"""The interface of executors, and the objects that their worker processes keep.

    for item, result in executor.map(function, items): ...

An executor applies a function to items, in this process or in others, and knows nothing else. A function takes a
Context and an iterator over items, and yields one result for each of them, in order. Whether it gets all items or one
at a time is the executor's choice: with all, it can begin the next item before it has finished the current one; one at
a time, the items can go to several processes. A function is one of a module, or a `partial` of one, so that it can be
pickled by name. Not handled here: which processes there are (workers.py, dask_workers.py), what the functions do
(encode.py, sample.py).
"""

from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self, TypeAlias, TypeVar

import numpy as np

from mlsm.common import disk
from mlsm.common.progress import silent

KILLED = object()  # instead of a result: every process that tried the item died
PART = ".part-"  # in the names of the files in which arrays come from other processes

Function: TypeAlias = Callable[["Context", Iterator[Any]], Generator[Any, None, None]]
Results: TypeAlias = Generator[tuple[Any, Any], None, None]  # pairs (item, result)
_Kept = TypeVar("_Kept")


class Context:
    """A job in one process, with what the functions keep there from item to item: teacher, coder, windows.

    job      the Job
    teacher  the teacher, where this process has loaded it already
    report   functions call it with what they have done of an item so far; heard only in the command's own process
    """

    def __init__(self, job: Any, teacher: Any = None):
        self.job = job
        self.report: Callable[..., None] = silent
        self._kept: dict[str, tuple[Hashable, Any]] = {} if teacher is None else {"teacher": (None, teacher)}

    def keep(self, name: str, make: Callable[[], _Kept], key: Hashable = None) -> _Kept:
        """The result of make() stored under this name for this key; a result for another key is dropped first."""
        if name not in self._kept or self._kept[name][0] != key:
            self._kept.pop(name, None)
            self._kept[name] = key, make()
        return self._kept[name][1]

    def check_wanted(self) -> None:
        """End the current item by an exception when its result is no longer needed."""

    def windows(self, unit: Any) -> Iterator[Any]:
        """The windows of a planned unit, as long as somebody waits for what becomes of them."""
        for window in self.job.windows(unit):
            self.check_wanted()
            yield window

    def pack(self, array: np.ndarray, place: Path) -> np.ndarray | Path:
        """An array as part of a result; `unpack` gives it back. From another process it comes in a file in `place`."""
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
    batches_at_once  how many small pieces of work make an item that is worth sending
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
        """Pairs (item, result) as results come; KILLED for an item at which `trials` processes died.

        items   taken one by one, when there is room for one more
        report  called with what the function reports on its way, if it runs in this process
        Raises  what the function raises; ConnectionError when the scheduler is gone, ChildProcessError when no worker
                is left
        """
        raise NotImplementedError

    def survives(self, function: Function, item: Any, trials: int) -> bool:
        """Whether a process can apply the function to the item without dying. The result is dropped."""
        ((_, result),) = self.map(function, [item], trials=trials)
        return result is not KILLED
