"""How often a warp runs every line of the CUDA kernels on rows of the bench data, for instruction_budget.py.

    NUMBA_ENABLE_CUDASIM=1 python tests/pipeline/solvers/replay.py --tokens 4 --width 768

Runs the solver in lockstep.py's simulator with warps of 32 threads at real sizes, a few seconds a token. The bench
data is 384 wide; rows and atoms are filled up with zeros to --width, which leaves Gram matrix, codes and rounds as they
are. A warp runs a line as often as the thread that runs it the most: what threads do in turn counts once.

Prints as its last line a JSON object: the tokens, and for every kernel the types of its arguments, its blocks, how
often its lines ran ({"module:line": times}), and the lengths of its loops ({"module:line": {"length": times}}).
"""

import argparse
import ast
import json
import os
import sys
import threading
from collections import Counter, defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import gpu_source
import lockstep
import numpy as np

from pipeline.solvers import nonneg_lasso

LAM = 0.05
SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr)
TOGETHER = defaultdict(list)  # keys of the statements that run whenever another one has run, by that one's


class Counting(ast.NodeTransformer):
    """Functions that count their statements, and the length of every loop.

    Of statements that follow one another, with no branch between them, the first is counted for all.
    """

    def __init__(self, module):
        self.module = module

    def visit_FunctionDef(self, node):
        docstring = ast.get_docstring(node) is not None
        node.body = [*node.body[:docstring], *self._count(node.body[docstring:])]
        return node

    def _count(self, statements):
        counted, first = [], None
        for statement in statements:
            key = ast.Constant(f"{self.module}:{statement.lineno}")
            if first is None:
                first = key.value
                counted.append(ast.copy_location(ast.Expr(_call("count_line", key)), statement))
            else:
                TOGETHER[first].append(key.value)
            first = first if isinstance(statement, SIMPLE) else None
            for name in ("body", "orelse"):
                if getattr(statement, name, None):
                    setattr(statement, name, self._count(getattr(statement, name)))
            if isinstance(statement, ast.For):
                statement.iter = ast.copy_location(_call("count_loop", key, statement.iter), statement.iter)
            if isinstance(statement, ast.While):  # which ends by its test, as all of ours do
                statement.test = ast.copy_location(_call("count_pass", key, statement.test), statement.test)
            counted.append(statement)
        return counted


def _call(name, *arguments):
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])


def add_counts(module, tree):
    tree = Counting(module).visit(tree)
    counters = ast.parse("from replay import count_line, count_loop, count_pass").body[0]
    tree.body.insert(1, counters)  # after the docstring
    return tree


def count_line(key):
    thread = threading.current_thread()
    if isinstance(thread, lockstep.Thread):
        thread.lines[key] = thread.lines.get(key, 0) + 1


def count_loop(key, values):
    length = 0
    try:
        for value in values:
            length += 1
            yield value
    finally:
        thread = threading.current_thread()
        thread.lengths.setdefault(key, []).append(length)


def count_pass(key, goes_on):
    thread = threading.current_thread()
    thread.passes[key] = thread.passes.get(key, 0) + 1
    if not goes_on:
        thread.lengths.setdefault(key, []).append(thread.passes.pop(key) - 1)
    return goes_on


class Counts(lockstep.Watcher):
    """The counts of all launches, by kernel."""

    def __init__(self):
        self.kernels = {}

    def begin(self, block, function, arguments):
        types = [_type(argument) for argument in arguments]
        half = " of float16" if any("float16" in name for name in types) else ""  # a kernel may be there for both
        name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}{half}"
        nothing = {"types": types, "blocks": 0, "lines": Counter(), "lengths": defaultdict(Counter)}
        self.kernel = self.kernels.setdefault(name, nothing)
        self.kernel["blocks"] += 1
        return arguments

    def end(self, block):
        for first in range(0, block.size, lockstep.WARP):
            threads = block.threads[first : first + lockstep.WARP]
            for key in {key for thread in threads for key in thread.lines}:
                times = max(thread.lines.get(key, 0) for thread in threads)
                self.kernel["lines"].update(dict.fromkeys((key, *TOGETHER[key]), times))
            for key in {key for thread in threads for key in thread.lengths}:
                longest = max((thread.lengths.get(key, []) for thread in threads), key=sum)
                self.kernel["lengths"][key].update(map(str, longest))


def _type(argument):
    """As in numba.cuda.types: float32[:, ::1] for an array of rows in order."""
    if isinstance(argument, np.ndarray):
        return f"{argument.dtype}[{', '.join([':'] * (argument.ndim - 1) + ['::1'])}]"
    return {int: "int64", float: "float64"}.get(type(argument)) or argument.dtype.name


def bench_rows(tokens, width):
    """Rows spread over the bench data's, and the atoms, with zeros up to the width; None without the data."""
    root = Path(__file__).resolve().parents[3]
    places = [Path(os.environ.get("MLSM_DATA", "/nowhere")), root / "shared", root.parent / "shared"]
    bench = next((place / "bench" for place in places if (place / "bench" / "reference.json").is_file()), None)
    if bench is None:
        return None
    hidden = np.load(bench / "hidden_test_8192x384_f16.npy", mmap_mode="r")
    hidden = np.asarray(hidden[:: len(hidden) // tokens][:tokens], np.float32)
    hidden /= np.linalg.norm(hidden, axis=1, keepdims=True)
    atoms = np.load(bench / "spams_atoms_3072x384_f32.npy")
    return [np.pad(array, ((0, 0), (0, width - array.shape[1]))) for array in (hidden, atoms)]


def replay(tokens, width, tol):
    if (rows := bench_rows(tokens, width)) is None:
        sys.exit("no bench data: expected shared/bench, or its parent in MLSM_DATA")
    hidden, atoms = rows
    lockstep.install()
    with gpu_source.loaded(add_counts), lockstep.watch(Counts()) as counts:
        codes = nonneg_lasso(hidden, atoms, LAM, tol=tol, backend="cuda")
    return {
        "tokens": tokens,
        "width": width,
        "atoms": len(atoms),
        "tol": tol,
        "nonzeros_per_token": len(codes.values) / tokens,
        "kernels": counts.kernels,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4, help="rows of the bench data (%(default)s)")
    parser.add_argument("--width", type=int, default=768, help="of rows and atoms, from 384 on (%(default)s)")
    parser.add_argument("--tol", type=float, default=1e-3, help="largest KKT violation (%(default)s)")
    args = parser.parse_args()
    print(json.dumps(replay(args.tokens, args.width, args.tol)))


if __name__ == "__main__":
    sys.modules["replay"] = sys.modules[__name__]  # what the kernels import is this
    main()
