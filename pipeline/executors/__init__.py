"""Who does the work: this process alone (inline.py), or Dask workers (dask.py, cluster.py, worker.py).

    with open_executor(job, teacher) as executor:
        for item, result in executor.map(function, items): ...

base.py says what an executor is; killers.py finds the text at which workers die.
"""

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from common.errors import EncodeError
from pipeline.executors.base import Executor
from pipeline.executors.inline import Inline


def open_executor(job: Any, teacher: Any = None) -> Executor:
    """The executor that the settings ask for, as a context manager.

    teacher  the teacher of the job, where it is loaded already: workers take the library of each product from it
    Raises   EncodeError if the work is for several processes and Dask is not installed
    """
    if teacher is not None:
        job = replace(job, products=teacher.products)
    if job.config.workers == 1 and job.config.scheduler is None:
        return Inline(job, teacher)
    if find_spec("distributed") is None:
        raise EncodeError('--workers and --scheduler need Dask. Run:  pip install "mlsm[cluster]"')
    from pipeline.executors.dask import WorkerPool  # takes half a second to import

    return WorkerPool(job)
