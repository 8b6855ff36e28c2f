"""The CUDA kernels compiled for the CPU, as blocks of one thread: their arithmetic at real sizes, in seconds.

    python tests/pipeline/solvers/kernels_on_cpu.py                          the small checks of cuda_checks.py
    python tests/pipeline/solvers/kernels_on_cpu.py few_of_real_size real_data

Numba's simulator interprets, and so is limited to toy problems. Here the source of cuda_kernels.py is rewritten:
the thread's number becomes 0, the block's an argument, and what the threads of a block do together disappears.
Says nothing about races or a GPU's instructions; those are the simulator's part.
"""

import ast
import sys
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numba
import numpy as np

import pipeline.solvers

SOURCE = Path(pipeline.solvers.__file__).with_name("cuda_kernels.py")
KERNELS = ("select", "minimise_in_shared", "minimise_in_global", "subtract", "pack")


class OneThread(ast.NodeTransformer):
    def visit_Attribute(self, node):
        replaced = {"cuda.threadIdx.x": "0", "cuda.blockIdx.x": "block"}.get(ast.unparse(node))
        return ast.parse(replaced, mode="eval").body if replaced else self.generic_visit(node)

    def visit_Call(self, node):
        if ast.unparse(node.func) == "cuda.shared.array":
            return ast.parse("np.empty(1 << 14, np.float32)", mode="eval").body
        return self.generic_visit(node)

    def visit_FunctionDef(self, node):
        if node.name in KERNELS:
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


def block_of_one_thread():
    """A module to take the place of cuda_block: what one thread does together with no other."""
    compiled = numba.njit(fastmath=True, error_model="numpy")
    module = types.ModuleType("pipeline.solvers.cuda_block")
    vars(module).update(
        cuda=None,
        float32=numba.float32,
        SIMULATED=True,
        LANES=1,
        LOWEST=np.float32(-3e38),
        ZERO=np.float32(0),
        ONE=np.float32(1),
        kernel=compiled,
        inlined=compiled,
        wait=numba.njit(lambda: None),
        block_sum=numba.njit(lambda value: value),
        block_max=numba.njit(lambda value: value),
        block_places=numba.njit(lambda flag: (0, int(flag))),
    )
    return module


def kernels_on_cpu(block):
    """A module to take the place of cuda_kernels, over that of `block_of_one_thread`."""
    tree = ast.parse(SOURCE.read_text())
    tree.body = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)]
    module = types.ModuleType("pipeline.solvers.cuda_kernels")
    public = {name: value for name, value in vars(block).items() if not name.startswith("__")}
    vars(module).update(np=np, **public)
    exec(compile(ast.fix_missing_locations(OneThread().visit(tree)), SOURCE.name, "exec"), vars(module))
    for name in KERNELS:
        setattr(module, name, Launcher(getattr(module, name)))
    return module


if __name__ == "__main__":
    block = block_of_one_thread()
    pipeline.solvers.cuda_block = sys.modules["pipeline.solvers.cuda_block"] = block
    pipeline.solvers.cuda_kernels = sys.modules["pipeline.solvers.cuda_kernels"] = kernels_on_cpu(block)
    import cuda_checks

    cuda_checks.main(sys.argv[1:] or list(cuda_checks.CHECKS))
