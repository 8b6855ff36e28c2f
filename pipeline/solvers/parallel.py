"""How kernels are compiled, and how they share the cores.

Threads are Python's, around Numba kernels that release the GIL: there is no threading layer to choose,
nothing that a fork breaks, and compilation is several times quicker than with Numba's own parallel loops.
"""

import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numba
from threadpoolctl import ThreadpoolController

# no NaN or infinity gets here, and sums may be reordered: both are needed to vectorise reductions
OPTIONS = {"nogil": True, "error_model": "numpy",
           "fastmath": {"reassoc", "contract", "arcp", "nsz", "nnan", "ninf"}}
# into its caller, always: else code fresh from the compiler and code from the cache could round differently
inlined = numba.njit(forceinline=True, **OPTIONS)


def kernel(function):
    """Compile a function that Python calls, cached on disk if some directory for that can be written."""
    try:
        return numba.njit(cache=True, **OPTIONS)(function)
    except RuntimeError:        # "no locator available": neither the package nor the user's cache is writable
        return numba.njit(**OPTIONS)(function)


def thread_count():
    """Threads to use: NUMBA_NUM_THREADS, by default the cores that this process may use."""
    return numba.config.NUMBA_NUM_THREADS


_blas_lock = threading.Lock()
_blas = functools.cache(ThreadpoolController)


def run_in_threads(work, threads):
    """Call work() in each of some threads; the first exception of any is raised."""
    with ThreadPoolExecutor(max(1, threads)) as pool:
        for future in [pool.submit(work) for _ in range(threads)]:
            future.result()


@contextmanager
def one_blas_thread():
    """Let NumPy's matrix products run in the thread that calls them; one user at a time.

    BLAS threads beside our own would fight them for the cores: OpenBLAS's spin for milliseconds after every
    product, and small products wait for a sleeping thread. On two busy cores they made the update of a
    dictionary's atoms 23 times slower, and coding 1.3 times.
    """
    with _blas_lock, _blas().limit(limits=1, user_api="blas"):
        yield
