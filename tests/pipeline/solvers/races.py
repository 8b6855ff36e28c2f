"""Races in the CUDA kernels: every access to memory, by address, thread and the barriers before it.

    NUMBA_ENABLE_CUDASIM=1 python tests/pipeline/solvers/races.py      the kernels, then the same without each barrier

Two accesses to one address race if different threads make them, at least one writes, not both are atomic, and CUDA
orders them by nothing. What orders them: `syncthreads` those of a block, `syncwarp` those of a warp, and nothing those
of different blocks of a launch. Shuffles and votes order no memory. As threads run one at a time (lockstep.py), a race
is found whether or not it does harm, whatever the order; but only on the addresses and branches that a problem uses.
The modules of the kernels are loaded as for a GPU, where SIMULATED is false: with warps of 32 threads.

Left out: fences and flags by which blocks wait for one another (they would be reported), other launches of a stream,
which are ordered, and of other streams (fake_device.py), accesses of less than four bytes that overlap in part, and
what a compiler makes of the source. Prints as its last line a JSON object: the name of each check and barrier, and
null or the race.
"""

import ast
import importlib
import json
import linecache
import sys
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import gpu_source
import lockstep
import numpy as np
from numba.cuda.simulator import kernel as simulator
from numba.cuda.simulator import kernelapi
from numba.cuda.simulator.cudadrv.devicearray import FakeShape

import pipeline.solvers

PACKAGE = Path(pipeline.solvers.__file__).parent
SOURCES = sorted(gpu_source.PACKAGE.glob("cuda_*.py"))  # of the kernels
NOT_OURS = (__file__, simulator.__file__, kernelapi.__file__)  # between a kernel's functions, and its arrays
BARRIERS = ("cuda.syncthreads", "cuda.syncwarp")


class Race(AssertionError):
    pass


# -- every access ------------------------------------------------------------------------------------------------


class Moment:
    """What a thread does between two barriers."""

    def __init__(self, block, thread, of_block=0, of_warp=0):
        self.block, self.thread, self.warp = block, thread, thread // lockstep.WARP
        self.of_block, self.of_warp = of_block, of_warp  # barriers that came before

    def before(self, other):
        """Whether the other sees what was done then."""
        if self.block != other.block:
            return False
        return (
            self.thread == other.thread
            or self.of_block < other.of_block
            or (self.warp == other.warp and self.of_warp < other.of_warp)
        )


class Watcher(lockstep.Watcher):
    """What lockstep.watch tells of every launch; raises Race in the thread that comes second."""

    def __init__(self):
        self.atomic = False

    def begin(self, block, function, arguments):
        """A block starts. Returns the arguments, arrays as watched ones."""
        if not any(block.number):  # the launch starts
            self.of_launch = {}  # address -> (writes, reads) by thread, of those that may still race
        self.of_block, self.moments = {}, [Moment(block.number, thread) for thread in range(block.size)]
        return [
            Watched(argument, self, self.of_launch, (name, argument)) if isinstance(argument, np.ndarray) else argument
            for name, argument in zip(function.__code__.co_varnames, arguments, strict=False)
        ]

    def watch_shared(self, array):
        return Watched(array, self, self.of_block, ("shared memory", array))

    def barrier(self, kind, group):
        """Threads have met at a syncthreads or a syncwarp."""
        for thread in group:
            now = self.moments[thread.thread_id]
            step = (1, 0) if kind is lockstep.BLOCK else (0, 1)
            self.moments[thread.thread_id] = Moment(
                now.block, now.thread, now.of_block + step[0], now.of_warp + step[1]
            )

    def access(self, watched, address, writes):
        frame = sys._getframe(2)
        while frame.f_code.co_filename in NOT_OURS:
            frame = frame.f_back
        caller = frame.f_back
        while caller.f_code.co_filename in NOT_OURS:
            caller = caller.f_back
        now = self.moments[threading.current_thread().thread_id]
        access = (now, self.atomic, frame.f_code, frame.f_lineno, caller.f_code, caller.f_lineno)
        for cell in range(address, address + watched.array.itemsize, 4):
            written, read = watched.cells.setdefault(cell, ({}, {}))
            for did, earlier in [("wrote", written), *([("read", read)] if writes else [])]:
                for other in earlier.values():
                    if not (other[0].before(now) or (other[1] and self.atomic)):
                        does = "writes" if writes else "reads"
                        place = _place(watched, address, frame)
                        raise Race(f"{place}: {_who(access, does)} what {_who(other, did)}, and nothing orders the two")
            if writes and not self.atomic:
                written.clear()
                read.clear()
            (written if writes else read)[now.block, now.thread] = access


def _place(watched, address, frame):
    """An element by the names of the kernel's argument and of the variable, as in `code_nW[0, 7] (code)`."""
    name, whole = watched.origin
    offset = (address - whole.__array_interface__["data"][0]) // whole.itemsize
    place = np.unravel_index(offset, whole.shape) if whole.flags.c_contiguous else (offset,)
    locals_ = [local for local, value in frame.f_locals.items() if value is watched and local != name]
    return f"{name}[{', '.join(map(str, place))}]" + (f" ({locals_[0]})" if locals_ else "")


def _who(access, does):
    moment, atomic, code, line, caller, called_at = access
    text = linecache.getline(code.co_filename, line).strip()
    how = " atomically" if atomic else ""
    called = (
        f", called at {Path(caller.co_filename).name}:{called_at}" if caller.co_filename != lockstep.__file__ else ""
    )
    return (
        f"thread {moment.thread} of block {moment.block[0]} {does}{how} at {Path(code.co_filename).name}:{line} "
        f"in {code.co_name} (`{text}`{called})"
    )


class Watched:
    """An array in a kernel: whoever reads or writes an element is noted. Slices and views are of the same kind."""

    __slots__ = ("array", "watcher", "cells", "origin", "address")

    def __init__(self, array, watcher, cells, origin):
        self.array, self.watcher, self.cells, self.origin = array, watcher, cells, origin
        self.address = array.__array_interface__["data"][0]

    def __len__(self):
        return len(self.array)

    @property
    def shape(self):
        return FakeShape(self.array.shape)

    @property
    def dtype(self):
        return self.array.dtype

    def view(self, dtype):
        return self._watch(self.array.view(dtype))

    def astype(self, dtype):
        self._access_all(writes=False)
        return self.array.astype(dtype)

    def __getitem__(self, index):
        value = self.array[index]
        if isinstance(value, np.ndarray):
            return self._watch(value)
        self._access(index, writes=False)
        return value

    def __setitem__(self, index, value):
        part = self.array[index]
        if isinstance(part, np.ndarray):
            self._watch(part)._access_all(writes=True)
        else:
            self._access(index, writes=True)
        self.array[index] = value

    def _watch(self, part):
        return Watched(part, self.watcher, self.cells, self.origin)

    def _access_all(self, writes):
        for index in np.ndindex(self.array.shape):
            self._access(index, writes)

    def _access(self, index, writes):
        address = self.address
        for i, stride in zip(index if isinstance(index, tuple) else (index,), self.array.strides, strict=True):
            if i < 0:
                raise IndexError(f"index {i} of {self.origin[0]}: a GPU that takes indices as unsigned reads elsewhere")
            address += int(i) * stride
        self.watcher.access(self, address, writes)


class Atomics:
    """In place of the simulator's atomic operations, each of which reads and writes."""

    def __init__(self, watcher, operations):
        self.watcher, self.operations = watcher, operations

    def __getattr__(self, name):
        def run(*arguments):
            self.watcher.atomic = True
            try:
                return getattr(self.operations, name)(*arguments)
            finally:
                self.watcher.atomic = False

        return run


@contextmanager
def watching():
    """Every launch of a kernel is watched; yields the watcher."""
    watcher, operations = Watcher(), kernelapi.FakeCUDAModule.atomic
    atomics = Atomics(watcher, kernelapi.FakeCUDAAtomic())
    kernelapi.FakeCUDAModule.atomic = atomics
    try:
        with lockstep.watch(watcher):
            yield watcher
    finally:
        kernelapi.FakeCUDAModule.atomic = operations


# -- the kernels, whole and without a barrier ---------------------------------------------------------------------


class Barrier(NamedTuple):
    module: str
    function: str
    number: int  # among those of the function, from 1 on
    line: int

    @property
    def name(self):
        return f"{self.module}.{self.function} #{self.number}"


def barriers():
    """Every statement of the kernels that is a barrier: of CUDA, or a call of a function that does nothing else."""
    functions = {
        (path.stem, node.name): node for path in gpu_source.SOURCES for node in _functions(gpu_source.as_on_a_gpu(path))
    }
    alone = {name for (_, name), node in functions.items() if all(map(_is_barrier, _statements(node)))}
    used = _used({name: node for (_, name), node in functions.items()})
    found = []
    for (module, name), node in functions.items():
        if name in used - alone:
            statements = [part for part in ast.walk(node) if isinstance(part, ast.Expr) and _is_barrier(part, alone)]
            lines = sorted(statement.lineno for statement in statements)
            found += [Barrier(module, name, number, line) for number, line in enumerate(lines, start=1)]
    return found


def _functions(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def _statements(function):
    """Its body but for a docstring."""
    return function.body[1:] if ast.get_docstring(function) else function.body


def _is_barrier(statement, alone=()):
    called = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) and statement.value.func
    return bool(called) and ast.unparse(called) in (*BARRIERS, *alone)


def _used(functions):
    """Names of the functions that a launch may reach, from what the other modules of the package name."""
    others = [ast.parse(path.read_text()) for path in gpu_source.PACKAGE.glob("*.py") if path not in gpu_source.SOURCES]
    outside = [
        node
        for path in gpu_source.SOURCES
        for node in gpu_source.as_on_a_gpu(path).body
        if not isinstance(node, ast.FunctionDef)
    ]
    names, used = {name for tree in [*others, *outside] for name in _names(tree)}, set()
    while new := (names & functions.keys()) - used:
        used |= new
        names = {name for function in new for name in _names(functions[function])}
    return used


def _names(tree):
    """Every name that is read in a tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.id if isinstance(node, ast.Name) else node.attr


class Without(ast.NodeTransformer):
    """Leaves out the statement at a line."""

    def __init__(self, line):
        self.line = line

    def visit_Expr(self, node):
        return ast.copy_location(ast.Pass(), node) if node.lineno == self.line else node


# -- problems ----------------------------------------------------------------------------------------------------


class Problem(NamedTuple):
    """Constants of the solver's modules that lead to other code, and the length of the first atom."""

    settings: dict
    first_atom: float = 1.0


PROBLEMS = (
    Problem({}),
    Problem({"cuda_kernels.LEAST_ROOM": 60}),  # working sets outgrow their memory
    Problem({"cuda_working_set.MEDIUM": 4}, first_atom=1e-3),  # too short for float16: in main memory, and they grow
)


def solve(problem):
    """Two tokens, and more atoms than a warp has threads."""
    rng = np.random.default_rng(0)
    hidden, atoms = (rng.normal(size=(rows, 12)).astype(np.float32) for rows in (2, 70))
    hidden, atoms = (array / np.linalg.norm(array, axis=1, keepdims=True) for array in (hidden, atoms))
    atoms[0] *= problem.first_atom
    with changed(problem.settings):
        assert pipeline.solvers.nonneg_lasso(hidden, atoms, 0.1, backend="cuda").kkt.max() <= 1e-3


@contextmanager
def changed(settings):
    """Constants of the solver's modules changed for a while."""
    with ExitStack() as stack:
        for place, value in settings.items():
            module, name = place.split(".")
            module = importlib.import_module(f"pipeline.solvers.{module}")
            stack.enter_context(patch.object(module, name, value))
        yield


def first_race(without=None):
    """The first race of the kernels on the problems, or None."""

    def change(module, tree):
        return Without(without.line).visit(tree) if without and without.module == module else tree

    large = without is not None and without.module == "cuda_large"  # which only the last problem runs: it comes first
    with gpu_source.loaded(change), watching():
        for problem in reversed(PROBLEMS) if large else PROBLEMS:
            try:
                solve(problem)
            except Race as error:
                return str(error).partition(": ")[2]  # without the simulator's "tid=[..] ctaid=[..]"
            except AssertionError:
                if without is None:
                    raise  # else a consequence of the race, which another problem may show


def main():
    lockstep.install()
    print(json.dumps({"whole": first_race(), **{barrier.name: first_race(barrier) for barrier in barriers()}}))


if __name__ == "__main__":
    main()
