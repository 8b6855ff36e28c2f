"""What the kernels of the GPU solver are written in: what a block's threads do together, and memory in wide pieces.

On a GPU a block is one warp: its threads exchange values by registers. Numba's simulator has no warp instructions;
there they use shared memory. All that differs between the two is here, and in cuda_memory.py, which reads eight numbers
of float16 or float32 with one or two instructions.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numba import config

try:
    from numba import cuda, float32
except ImportError as error:
    raise ImportError('sparse coding on a GPU needs numba-cuda: pip install "mlsm-pretrain[gpu]"') from error

SIMULATED = bool(config.ENABLE_CUDASIM)
LANES = 4 if SIMULATED else 32  # threads of a block
RESIDENT = 16  # blocks that should fit a multiprocessor: at most 128 registers a thread
LOWEST = np.float32(-3e38)  # fast math knows no infinity
ZERO, ONE = np.float32(0), np.float32(1)  # a plain literal would mean float64
WARP, WARP_LANES = 0xFFFFFFFF, 32  # all threads of a warp, and how many they are
index = np.uint32  # 32 bits without a sign: with one, Numba asks of every index whether it counts from the end

_sources = sorted(Path(__file__).parent.glob("cuda_*.py"))
_inlined_sources = hashlib.sha256(b"".join(path.read_bytes() for path in _sources)).hexdigest()[:12]

if SIMULATED:
    kernel, inlined = cuda.jit, cuda.jit(device=True)
else:
    inlined = cuda.jit(device=True, fastmath=True, forceinline=True)

    def kernel(function: Callable) -> Callable:
        """Compile a function that is launched, cached on disk as in parallel.py: its name says what is compiled in."""
        options = {"fastmath": True, "launch_bounds": (LANES, RESIDENT)}
        function.__qualname__ += f"-{_inlined_sources}"
        try:
            return cuda.jit(cache=True, **options)(function)
        except RuntimeError:  # "no locator available": neither the package nor the user's cache is writable
            return cuda.jit(**options)(function)


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
def warp_any(flag: bool) -> bool:
    """Whether any thread has the flag."""
    return cuda.ballot_sync(WARP, flag) != 0


@inlined
def warp_first(flag: bool, start: int) -> int:
    """The first thread from number `start` (below LANES) on that has the flag; LANES or more if none has."""
    votes = cuda.ballot_sync(WARP, flag) & (WARP << start) & WARP
    return (cuda.ffs(votes) - 1) & (2 * WARP_LANES - 1)


@inlined
def warp_value(value: np.float32, thread: int) -> np.float32:
    """What one thread has, for all of them."""
    return cuda.shfl_xor_sync(WARP, value, cuda.threadIdx.x ^ thread)


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


@inlined
def shared_any(flag: bool) -> bool:
    return shared_max(ONE if flag else ZERO) > ZERO


@inlined
def shared_first(flag: bool, start: int) -> int:
    values = _gather(ONE if flag else ZERO)
    while start < LANES and values[start] == ZERO:
        start += 1
    return start


@inlined
def shared_value(value: np.float32, thread: int) -> np.float32:
    return _gather(value)[thread]


if SIMULATED:
    block_sum, block_max, block_places = shared_sum, shared_max, shared_places
    block_any, block_first, block_value = shared_any, shared_first, shared_value
else:
    block_sum, block_max, block_places = warp_sum, warp_max, warp_places
    block_any, block_first, block_value = warp_any, warp_first, warp_value
