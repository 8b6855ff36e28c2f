"""Launch a kernel with little work of the host.

At each launch Numba finds the type of every argument and splits every array into its numbers. For the ten arrays of our
kernels that takes the host a tenth of a millisecond and more, longer than most of them run (seen on an H200). Here an
array is split when it is made, and Numba is asked for a kernel only when it meets new types.

In Numba's simulator, and with a numba-cuda that is built differently inside, Numba launches.
"""

import ctypes
import functools
from typing import Any, NamedTuple

import numpy as np
import torch

from pipeline.solvers.cuda_block import LANES, SIMULATED, cuda
from pipeline.solvers.cuda_memory import as_array

try:
    from cuda.core import LaunchConfig, Stream
    from cuda.core import launch as core_launch
except ImportError:
    LaunchConfig = None


class Argument(NamedTuple):
    """A contiguous tensor, and the numbers by which Numba passes it to a kernel."""

    tensor: torch.Tensor
    numbers: tuple[int, ...]
    """no owner, no parent, size, bytes of an element, address, shape, strides in bytes"""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Argument":
        size, element = tensor.numel(), tensor.element_size()
        strides = (stride * element for stride in tensor.stride())
        return cls(tensor, (0, 0, size, element, tensor.data_ptr(), *tensor.shape, *strides))


class Launcher:
    """Launches kernels on one stream of the current device."""

    def __init__(self, handle: int):
        self._numbas = cuda.external_stream(handle) if not SIMULATED else 0
        self._stream = Stream.from_handle(handle) if LaunchConfig is not None and not SIMULATED else None
        self._compiled: dict[tuple, Any] = {}

    def __call__(self, kernel: Any, blocks: int, *arguments: Argument | np.float32, shared_bytes: int = 0) -> None:
        """Run a kernel with blocks of LANES threads."""
        key = kernel, tuple((a.tensor.dtype, a.tensor.ndim) if isinstance(a, Argument) else type(a) for a in arguments)
        compiled = self._compiled.get(key)
        if compiled is None:
            arrays = [as_array(a.tensor) if isinstance(a, Argument) else a for a in arguments]
            kernel[blocks, LANES, self._numbas, shared_bytes](*arrays)
            if self._stream is not None and key not in self._compiled:
                self._compiled[key] = _find_compiled(kernel, arrays)
            return
        numbers: list = []
        for argument in arguments:
            if isinstance(argument, Argument):
                numbers.extend(argument.numbers)
            else:
                numbers.append(ctypes.c_float(float(argument)))
        core_launch(self._stream, _configuration(blocks, shared_bytes), compiled, *numbers)


def _find_compiled(kernel, arrays):
    """The kernel that Numba has compiled for these arguments, as cuda.core launches it; None if it is not found."""
    try:
        overload = kernel.overloads[tuple(kernel.typeof_pyval(array) for array in arrays)]
        return overload._codelibrary.get_cufunc().kernel
    except (AttributeError, KeyError):
        return None


@functools.lru_cache(1024)
def _configuration(blocks, shared_bytes):
    return LaunchConfig(grid=(blocks, 1, 1), block=(LANES, 1, 1), shmem_size=shared_bytes)


@functools.cache
def launcher(device: int, handle: int) -> Launcher:
    """The launcher for a stream of the current device, whose number is `device`."""
    return Launcher(handle)
