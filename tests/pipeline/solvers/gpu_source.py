"""The source of the CUDA kernels as a GPU runs it, for Numba's simulator, where it can also be changed.

In the simulator cuda_block.py gives other, plainer functions than on a GPU (SIMULATED is true), and smaller blocks.
`loaded` takes those of a GPU, which lockstep.py can run, and lets a caller change every module before it is compiled.
"""

import ast
import importlib.machinery
import importlib.util
import sys
from contextlib import contextmanager
from pathlib import Path

import pipeline.solvers

PACKAGE = Path(pipeline.solvers.__file__).parent
SOURCES = sorted(PACKAGE.glob("cuda_*.py"))  # of the kernels


class OnAGpu(ast.NodeTransformer):
    """Source of the kernels as it is where SIMULATED is false."""

    def visit_Name(self, node):
        if node.id == "SIMULATED" and isinstance(node.ctx, ast.Load):
            return ast.copy_location(ast.Constant(False), node)
        return node

    def visit_If(self, node):
        self.generic_visit(node)
        return node.orelse if isinstance(node.test, ast.Constant) and not node.test.value else node


def as_on_a_gpu(path):
    """The tree of a module of the kernels."""
    tree = ast.parse(path.read_text())
    return OnAGpu().visit(tree) if path.stem == "cuda_block" else tree


class Loader(importlib.machinery.SourceFileLoader):
    change = None  # of a module's name and tree

    def get_code(self, name):
        path = Path(self.get_filename(name))
        tree = as_on_a_gpu(path)
        tree = type(self).change(path.stem, tree)
        return compile(ast.fix_missing_locations(tree), str(path), "exec")


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        source = PACKAGE / f"{name.rpartition('.')[2]}.py"
        if name.startswith("pipeline.solvers.") and source in SOURCES:
            return importlib.util.spec_from_file_location(name, source, loader=Loader(name, str(source)))


@contextmanager
def loaded(change=lambda module, tree: tree):
    """The modules of the GPU solver loaded anew, those of the kernels as on a GPU and changed, for a while."""
    before = _take_away()
    Loader.change = staticmethod(change)
    sys.meta_path.insert(0, Finder)
    try:
        yield
    finally:
        sys.meta_path.remove(Finder)
        _take_away()
        for name, module in before.items():
            sys.modules[f"pipeline.solvers.{name}"] = module
            setattr(pipeline.solvers, name, module)


def _take_away():
    """Forget the modules of the GPU solver. Returns them by name."""
    names = [name for name in vars(pipeline.solvers) if "cuda" in name]
    for name in names:
        delattr(pipeline.solvers, name)
    return {name: sys.modules.pop(f"pipeline.solvers.{name}") for name in names}
