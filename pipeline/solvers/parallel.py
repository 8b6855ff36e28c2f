"""How kernels are compiled, and how they share the cores.

Threads are Python's, around Numba kernels that release the GIL: there is no threading layer to choose,
nothing that a fork breaks, and compilation is several times quicker than with Numba's own parallel loops.
"""

import functools
import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

import numba
from threadpoolctl import ThreadpoolController

from mlsm.common.machine import available_cores

# no NaN or infinity gets here, and sums may be reordered: both are needed to vectorise reductions
OPTIONS = {"nogil": True, "error_model": "numpy", "fastmath": {"reassoc", "contract", "arcp", "nsz", "nnan", "ninf"}}
# into its caller, always: else code fresh from the compiler and code from the cache could round differently
inlined = numba.njit(forceinline=True, **OPTIONS)
_here = Path(__file__)
_sources = (_here, _here.with_name("vectors.py"), _here.with_name("working_set.py"))
_inlined_sources = hashlib.sha256(b"".join(path.read_bytes() for path in _sources)).hexdigest()[:12]


def kernel(function: Callable) -> Callable:
    """Compile a function that Python calls, cached on disk if some directory for that can be written.

    Numba compares the time and size of the function's own file, and writes its index before the machine code. So if the
    disk is full or the process is killed in between, a new index names the code of an old version. The name under which
    a function is cached therefore says what its file contains, and what this file, vectors.py and working_set.py
    contain, which are compiled into it, and whether bounds are checked.
    """
    own = hashlib.sha256(Path(function.__code__.co_filename).read_bytes()).hexdigest()[:12]
    function.__qualname__ += f"-{own}-{_inlined_sources}{'-checked' if numba.config.BOUNDSCHECK else ''}"
    try:
        return numba.njit(cache=True, **OPTIONS)(function)
    except RuntimeError:  # "no locator available": neither the package nor the user's cache is writable
        return numba.njit(**OPTIONS)(function)


def thread_count() -> int:
    """Threads to use: NUMBA_NUM_THREADS, by default the cores that affinity and quota leave to this process."""
    threads: int = numba.config.NUMBA_NUM_THREADS
    return threads if "NUMBA_NUM_THREADS" in os.environ else min(threads, available_cores())


_blas_lock = threading.Lock()
_blas = functools.cache(ThreadpoolController)


def run_in_threads(work: Callable[[Iterator], object], items: Iterable, threads: int) -> None:
    """Call work(iterator) in each of some threads; together the iterators give every item once.

    After an exception in any thread, or Ctrl-C, the iterators end, so that the others stop at their next item;
    then the exception is raised.
    """
    shared, stopped = iter(list(items)), threading.Event()

    def remaining():
        while not stopped.is_set():
            try:
                yield next(shared)
            except StopIteration:
                return

    with ThreadPoolExecutor(max(1, threads)) as pool:
        try:
            for future in as_completed([pool.submit(work, remaining()) for _ in range(threads)]):
                future.result()
        except BaseException:
            stopped.set()
            raise


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Let NumPy's matrix products run in the thread that calls them; one user at a time.

    BLAS threads beside our own would fight them for the cores: OpenBLAS's spin for milliseconds after every
    product, and small products wait for a sleeping thread. On two busy cores they made the update of a
    dictionary's atoms 23 times slower, and coding 1.3 times.
    """
    with _blas_lock, _blas().limit(limits=1, user_api="blas"):
        yield
