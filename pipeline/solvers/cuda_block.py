"""What the threads of a block do together in the kernels of cuda_kernels.py: sums, largest values, places.

On a GPU they use a warp's registers, in Numba's simulator, which has no warp instructions, shared memory: all that
differs between the two is here.
"""

import numpy as np
from numba import config

try:
    from numba import cuda, float32
except ImportError as error:
    raise ImportError('sparse coding on a GPU needs numba-cuda: pip install "mlsm[gpu]"') from error

SIMULATED = bool(config.ENABLE_CUDASIM)
LANES = 4 if SIMULATED else 32  # threads of a block
RESIDENT = 32  # blocks that should fit a multiprocessor: at most 64 registers a thread
LOWEST = np.float32(-3e38)  # fast math knows no infinity
ZERO, ONE = np.float32(0), np.float32(1)  # a plain literal would mean float64
WARP = 0xFFFFFFFF  # all 32 threads

if SIMULATED:
    kernel, inlined = cuda.jit, cuda.jit(device=True)
else:
    kernel = cuda.jit(fastmath=True, launch_bounds=(LANES, RESIDENT))
    inlined = cuda.jit(device=True, fastmath=True, forceinline=True)


@inlined
def wait() -> None:
    cuda.syncthreads()


@inlined
def warp_sum(value: np.float32) -> np.float32:
    for distance in (16, 8, 4, 2, 1):  # all threads add the same pairs, so all get the same bits
        value += cuda.shfl_xor_sync(WARP, value, distance)
    return value


@inlined
def warp_max(value: np.float32) -> np.float32:
    for distance in (16, 8, 4, 2, 1):
        value = max(value, cuda.shfl_xor_sync(WARP, value, distance))
    return value


@inlined
def warp_places(flag: bool) -> tuple[int, int]:
    """How many threads before this one have the flag, and how many in all."""
    votes = cuda.ballot_sync(WARP, flag) & WARP
    return cuda.popc(votes & ((1 << cuda.threadIdx.x) - 1)), cuda.popc(votes)


@inlined
def _gather(value):
    """What every thread has, for all of them."""
    values = cuda.shared.array(LANES, float32)
    cuda.syncthreads()
    values[cuda.threadIdx.x] = value
    cuda.syncthreads()
    return values


@inlined
def shared_sum(value: np.float32) -> np.float32:
    values, total = _gather(value), ZERO
    for lane in range(LANES):
        total += values[lane]
    return total


@inlined
def shared_max(value: np.float32) -> np.float32:
    values, largest = _gather(value), LOWEST
    for lane in range(LANES):
        largest = max(largest, values[lane])
    return largest


@inlined
def shared_places(flag: bool) -> tuple[int, int]:
    values, before, together = _gather(ONE if flag else ZERO), 0, 0
    for lane in range(LANES):
        before += int(values[lane]) if lane < cuda.threadIdx.x else 0
        together += int(values[lane])
    return before, together


if SIMULATED:
    block_sum, block_max, block_places = shared_sum, shared_max, shared_places
else:
    block_sum, block_max, block_places = warp_sum, warp_max, warp_places
