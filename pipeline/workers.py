"""Choose who does the work: only this process, or Dask workers (dask_workers.py).

with open_executor(job, teacher) as executor:
    for item, result in executor.map(function, items): ...
"""

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from typing import Any

from mlsm.common.progress import silent
from pipeline.executor import Context, Executor, Function, Results


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


def open_executor(job: Any, teacher: Any = None) -> Executor:
    """The executor that the settings require, as a context manager.

    teacher  the job's teacher, if it is loaded already: workers use its libraries of matrix products
    Raises   ImportError if the work is for several processes and Dask is not installed
    """
    if teacher is not None:
        job = replace(job, libraries=teacher.libraries)
    if job.config.workers == 1 and job.config.scheduler is None:
        return Inline(job, teacher)
    from pipeline.dask_workers import WorkerPool  # takes half a second to import

    return WorkerPool(job)
