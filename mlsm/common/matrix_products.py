"""Choose the faster library for the float32 matrix products of linear layers on this machine's CPU.

torch contains two: its default (MKL) and oneDNN (onednn.py). Which is faster depends on the processor, the operation
and the shape. On one AMD EPYC (Zen 5) oneDNN took half of MKL's time; on another it was a tenth faster in the forward
pass, but for the gradients of wide layers it took up to twice MKL's time, since it transposes their large factors. So
each operation is timed once per machine for each class of shapes, and the result is stored in the user's cache. The
timing uses one thread, so that results do not depend on a command's number of threads.

    libraries = measure_libraries([(4096, 256, 1024)])        # {"weight_gradient 4096 256 1024": "torch"}
    multiply = find_way("weight_gradient", (4096, 256, 1024), libraries)

The dict `libraries` lists only the products that do not use the first function in `WAYS`, which is oneDNN's. Its keys
name the operation and a class of N, d and K; or the key is "all", if torch computes everything (`TORCH`). The functions
differ in the last bits, so code that must repeat a computation stores the dict (student/encoders/, the records of
units). Not handled here: the layers themselves (student/encoders/linear.py, pipeline/teacher/cut.py).

Shapes: N rows, d inputs, K outputs.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from mlsm.common.machine import processor, read_cache, write_cache
from mlsm.common.onednn import available, multiply

_FILE = "products.json"  # in the user's cache
logger = logging.getLogger(__name__)

Shape = tuple[int, int, int]  # N, d, K
WAYS: dict[str, dict[str, Callable[..., Tensor]]] = {
    "forward": {  # rows (N, d), weight (K, d), bias (K) or None
        "onednn": multiply,
        "torch": F.linear,
    },
    "input_gradient": {  # gradient (N, K), weight (K, d)
        "onednn": lambda gradient_NK, weight_Kd: multiply(gradient_NK, weight_Kd.t()),
        "torch": torch.mm,
    },
    "weight_gradient": {  # gradient (N, K), rows (N, d)
        "onednn": lambda gradient_NK, rows_Nd: multiply(gradient_NK.t(), rows_Nd.t()),
        # a gradient with non-contiguous rows, such as a slice of the outputs, would be multiplied without vector
        # instructions
        "onednn_transposed": lambda gradient_NK, rows_Nd: multiply(rows_Nd.t(), gradient_NK.contiguous().t()).t(),
        "torch": lambda gradient_NK, rows_Nd: gradient_NK.t() @ rows_Nd,
    },
}
USUAL: Mapping[str, str] = {}  # everything by oneDNN; a plain dict, since models that hold it are copied
TORCH: Mapping[str, str] = {"all": "torch"}
WORTH_MEASURING = 2**24  # multiply-adds; in smaller products the overhead of the call dominates
GAIN = 0.95  # another function must take at most this share of the usual one's time
SECONDS, ROUNDS = 0.1, 3  # time spent per product, and number of calls per function, unless they take ten times as long
MOST_OUTPUTS, MOST_WORK = 2**15, 2**32  # outputs and multiply-adds of a timed product; larger ones are scaled down
_ROW_CLASSES = (64, 256, 1024, 4096)  # classes of N: the smallest that is not below N, else the last


def find_way(operation: str, shape: Shape, libraries: Mapping[str, str]) -> Callable[..., Tensor]:
    """The function that computes an operation of WAYS for a shape.

    libraries  as `measure_libraries` returns them, or TORCH; a name that is not in WAYS means the usual function
    """
    ways = WAYS[operation]
    if not available():
        return ways["torch"]
    way = libraries.get(_name(operation, *shape)) or libraries.get("all", "onednn")
    return ways.get(way, ways["onednn"])


def measure_libraries(shapes: Iterable[Shape], operations: Iterable[str] = tuple(WAYS)) -> dict[str, str]:
    """The fastest library of each operation for each shape, if it is not the usual one.

    Earlier measurements on this machine with these libraries are reused. Measuring takes a tenth of a second per
    product, longer for products that take that long themselves.
    """
    if not available():
        return {}
    wanted = {
        _name(operation, *shape): (operation, _row_class(shape[0]), *shape[1:])
        for shape in shapes
        for operation in operations
        if _row_class(shape[0]) * shape[1] * shape[2] >= WORTH_MEASURING
    }
    known, machine = _read_cache(), _machine()
    found = {name: way for name, way in known.get(machine, {}).items() if name in wanted}
    if missing := wanted.keys() - found.keys():
        logger.info(
            "timing %d matrix products, once on this machine, to compute each by the faster library", len(missing)
        )
        with _one_thread():
            found |= {name: _fastest(*wanted[name]) for name in sorted(missing)}
        _write_cache(known | {machine: known.get(machine, {}) | found})
    return {name: way for name, way in sorted(found.items()) if way != "onednn"}


def _name(operation, rows, inputs, outputs) -> str:
    return f"{operation} {_row_class(rows)} {inputs} {outputs}"


def _row_class(rows: int) -> int:
    return next((bound for bound in _ROW_CLASSES if rows <= bound), _ROW_CLASSES[-1])


def _fastest(operation: str, rows: int, inputs: int, outputs: int) -> str:
    """The fastest function, by its best round, since other work on the machine only adds time."""
    generator = torch.Generator().manual_seed(0)
    outputs = min(outputs, MOST_OUTPUTS)
    rows = min(rows, max(_ROW_CLASSES[1], MOST_WORK // (inputs * outputs)))
    sizes = {"forward": (inputs, outputs), "input_gradient": (outputs, inputs), "weight_gradient": (outputs, inputs)}
    first, second = sizes[operation]
    factors = [torch.randn(rows, first, generator=generator)]
    if operation == "weight_gradient":
        factors.append(torch.randn(rows, second, generator=generator))
    else:
        factors.append(torch.randn(outputs, inputs, generator=generator))
    if operation == "forward":
        factors.append(torch.randn(outputs, generator=generator))
    best = dict.fromkeys(WAYS[operation], float("inf"))
    with torch.inference_mode():
        begun = None
        for turn in range(1000):
            for name, compute in WAYS[operation].items():
                start = time.perf_counter()
                compute(*factors).contiguous()  # because only a contiguous tensor can be added to a gradient
                if turn > 0:
                    best[name] = min(best[name], time.perf_counter() - start)
            begun = begun or time.perf_counter()  # after the first call, which allocates memory
            seconds = time.perf_counter() - begun
            if (turn >= ROUNDS and seconds > SECONDS) or (turn > 0 and seconds > 10 * SECONDS):
                break
    fastest = min(best, key=lambda name: best[name])
    return fastest if best[fastest] <= GAIN * best["onednn"] else "onednn"


@contextmanager
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# -- the cache -------------------------------------------------------------------------------------------------


def _machine() -> str:
    """The facts that the times depend on, as one key."""
    capability, rounding = torch.backends.cpu.get_cpu_capability(), torch.backends.mkldnn.matmul.fp32_precision
    # torch.get_float32_matmul_precision() fails if a caller has set the newer torch.backends.fp32_precision
    precision = {"bf16": "medium", "tf32": "high"}.get(rounding, "highest")
    return f"{processor()}, {capability}, torch {torch.__version__}, precision {precision}"


def _read_cache() -> dict[str, dict[str, str]]:
    return {
        machine: {
            name: way
            for name, way in ways.items()
            if isinstance(way, str) and way in WAYS.get(name.partition(" ")[0], ())
        }
        for machine, ways in read_cache(_FILE).items()
        if isinstance(ways, dict)
    }


def _write_cache(known: dict) -> None:
    """Save the measurements; if they cannot be written, they are made again next time."""
    try:
        write_cache(_FILE, known)
    except (OSError, RuntimeError) as error:
        logger.debug("the measurements cannot be saved: %s", error)
