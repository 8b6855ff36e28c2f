"""The executor without other processes: the function gets all items at once, so that it can overlap them."""

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any

from common.progress import silent
from pipeline.executors.base import Context, Executor, Function, Results


class Inline(Executor):
    """Applies functions in the caller's thread. A process that dies here is the caller's: nothing is ever KILLED."""

    def __init__(self, job: Any, teacher: Any = None):
        super().__init__(job)
        self._context = Context(job, teacher)

    def map(
        self, function: Function, items: Iterable[Any], *, trials: int = 2, report: Callable[..., None] = silent
    ) -> Results:
        """As of Executor, in the order of the items."""
        taken: deque[Any] = deque()

        def take():
            for item in items:
                taken.append(item)
                yield item

        self._context.report = report
        with closing(function(self._context, take())) as results:
            for result in results:
                yield taken.popleft(), result
