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
TOGETHER = ("_wait", "_gather", "_warp_sum", "_warp_max", "_warp_places", "_shared_sum", "_shared_max",
            "_shared_places")


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


def kernels_on_cpu():
    """A module to take the place of cuda_kernels."""
    tree = ast.parse(SOURCE.read_text())
    tree.body = [node for node in tree.body
                 if not isinstance(node, ast.Import | ast.ImportFrom | ast.Try | ast.If)
                 and not (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("SIMULATED", "LANES"))
                 and not (isinstance(node, ast.FunctionDef) and node.name in TOGETHER)]
    compiled = numba.njit(fastmath=True, error_model="numpy")
    module = types.ModuleType("pipeline.solvers.cuda_kernels")
    vars(module).update(np=np, cuda=None, SIMULATED=True, LANES=1, _kernel=compiled, _inlined=compiled,
                        _wait=numba.njit(lambda: None), _sum=numba.njit(lambda value: value),
                        _max=numba.njit(lambda value: value), _places=numba.njit(lambda flag: (0, int(flag))))
    exec(compile(ast.fix_missing_locations(OneThread().visit(tree)), SOURCE.name, "exec"), vars(module))
    for name in KERNELS:
        setattr(module, name, Launcher(getattr(module, name)))
    return module


if __name__ == "__main__":
    pipeline.solvers.cuda_kernels = sys.modules["pipeline.solvers.cuda_kernels"] = kernels_on_cpu()
    import cuda_checks
    cuda_checks.main(sys.argv[1:] or list(cuda_checks.CHECKS))
