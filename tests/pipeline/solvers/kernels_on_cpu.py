"""The CUDA kernels compiled for the CPU, as blocks of one thread: their arithmetic at real sizes, in seconds.

    python tests/pipeline/solvers/kernels_on_cpu.py                          the small checks of cuda_checks.py
    python tests/pipeline/solvers/kernels_on_cpu.py few_of_real_size real_data

Numba's simulator interprets, and so is limited to toy problems. Here the source of the kernels is rewritten: the
thread's number becomes 0, the block's an argument, and what the threads of a block do together disappears. Numbers of
float16 are read and written as their bits, since Numba computes with none on a CPU.
Says nothing about races or a GPU's instructions; those are the simulator's part.
"""

import ast
import importlib
import sys
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numba
import numpy as np
import torch
from numba.extending import overload

import pipeline.solvers

MODULES = ("cuda_kernels", "cuda_working_set", "cuda_large")
ANYWHERE = numba.njit(fastmath=True, error_model="numpy")


class OneThread(ast.NodeTransformer):
    def visit_Attribute(self, node):
        replaced = {"cuda.threadIdx.x": "0", "cuda.blockIdx.x": "block"}.get(ast.unparse(node))
        return ast.parse(replaced, mode="eval").body if replaced else self.generic_visit(node)

    def visit_Call(self, node):
        if ast.unparse(node.func) == "cuda.shared.array":
            return ast.parse("np.empty(1 << 14, np.float32)", mode="eval").body
        if ast.unparse(node.func) == "cuda.local.array":
            shape, dtype = map(ast.unparse, node.args)
            return ast.parse(f"np.empty({shape}, np.{dtype})", mode="eval").body
        return self.generic_visit(node)

    def visit_FunctionDef(self, node):
        if any(ast.unparse(decorator) == "kernel" for decorator in node.decorator_list):
            node.args.args.insert(0, ast.arg("block"))
        return self.generic_visit(node)


class Launcher:
    """kernel[blocks, ...](arguments), one block after the other."""

    def __init__(self, function):
        self.function = function

    def __getitem__(self, configuration):
        def run(*arguments):
            for block in range(configuration[0]):
                self.function(block, *arguments)

        return run


def kernel(function):
    return Launcher(ANYWHERE(function))


def block_of_one_thread():
    """A module to take the place of cuda_block: what one thread does together with no other."""
    module = types.ModuleType("pipeline.solvers.cuda_block")
    vars(module).update(
        cuda=None,
        float32=numba.float32,
        SIMULATED=True,
        LANES=1,
        LOWEST=np.float32(-3e38),
        ZERO=np.float32(0),
        ONE=np.float32(1),
        index=np.uint32,
        kernel=kernel,
        inlined=ANYWHERE,
        wait=numba.njit(lambda: None),
        block_sum=numba.njit(lambda value: value),
        block_max=numba.njit(lambda value: value),
        block_places=numba.njit(lambda flag: (0, int(flag))),
        block_any=numba.njit(lambda flag: flag),
        block_first=numba.njit(lambda flag, start: 0 if flag else 1),
        block_value=numba.njit(lambda value, thread: value),
    )
    return module


# -- in place of cuda_memory: rows of float16 are rows of int16 ----------------------------------------------


def as_array(tensor):
    return (tensor.view(torch.int16) if tensor.dtype == torch.float16 else tensor).numpy()


@ANYWHERE
def from_half(bits):
    value = np.int32((np.int32(bits) & 0x7FFF) << 13).view(np.float32) * np.float32(2.0**112)
    return -value if bits < 0 else value


@ANYWHERE
def to_half(value):
    """To nearest, ties to even."""
    scaled = np.float32(abs(value) * np.float32(2.0**-112)).view(np.int32)
    bits = (scaled + 0xFFF + ((scaled >> 13) & 1)) >> 13
    return np.int16(bits - 0x8000 if value < 0 else bits)


def get(row, place):
    """One number."""


def put(row, place, value):
    """Write one number."""


@overload(get)
def get_of_type(row, place):
    if row.dtype == numba.int16:
        return lambda row, place: from_half(row[place])
    return lambda row, place: row[place]


@overload(put)
def put_of_type(row, place, value):
    if row.dtype == numba.int16:

        def write(row, place, value):
            row[place] = to_half(value)
    else:

        def write(row, place, value):
            row[place] = value

    return write


@ANYWHERE
def get_four(row, place):
    return (get(row, place), get(row, place + 1)) + (get(row, place + 2), get(row, place + 3))


@ANYWHERE
def get_eight(row, place):
    return get_four(row, place) + get_four(row, place + 4)


@ANYWHERE
def put_eight(row, place, values):
    for i in range(8):
        put(row, place + i, values[i])


def round_eight(row, values):
    """As the row would hold them."""


@overload(round_eight)
def round_eight_of_type(row, values):
    if row.dtype != numba.int16:
        return lambda row, values: values

    def of_half(row, values):
        a, b, c, d, e, f, g, h = values
        first, second = (from_half(to_half(a)), from_half(to_half(b))), (from_half(to_half(c)), from_half(to_half(d)))
        third, fourth = (from_half(to_half(e)), from_half(to_half(f))), (from_half(to_half(g)), from_half(to_half(h)))
        return first + second + third + fourth

    return of_half


def memory_on_cpu():
    module = types.ModuleType("pipeline.solvers.cuda_memory")
    here = {
        name: globals()[name]
        for name in ("as_array", "get", "put", "get_four", "get_eight", "put_eight", "round_eight")
    }
    vars(module).update(Eight=tuple, **here)
    return module


def install():
    """Put modules for one thread in the place of those of the kernels, before anything imports these."""
    parts = {"cuda_block": block_of_one_thread(), "cuda_memory": memory_on_cpu()}
    for name in (*parts, *MODULES):
        module = parts[name] if name in parts else types.ModuleType(f"pipeline.solvers.{name}")
        sys.modules[f"pipeline.solvers.{name}"] = module
        setattr(pipeline.solvers, name, module)
        if name not in parts:
            source = Path(pipeline.solvers.__file__).with_name(f"{name}.py")
            tree = ast.fix_missing_locations(OneThread().visit(ast.parse(source.read_text())))
            exec(compile(tree, source.name, "exec"), vars(module))


if __name__ == "__main__":
    install()
    cuda_checks = importlib.import_module("cuda_checks")
    cuda_checks.main(sys.argv[1:] or list(cuda_checks.CHECKS))
