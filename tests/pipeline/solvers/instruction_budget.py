"""What the CUDA kernels cost, without a GPU: machine instructions a token, and the time to issue them.

    pip install nvidia-cuda-nvcc nvidia-cuda-nvdisasm        # or a CUDA toolkit
    python tests/pipeline/solvers/instruction_budget.py --capability 9.0 10.0 --tokens 8 --loops

Compiles every kernel that the solver launches (sass.py), finds the loops of its machine code and, by the lines that
the compiler notes, the loops of the source that they come from; how often these run is counted on rows of the bench
data (replay.py). A loop that the compiler has unrolled passes through several of the source's at once: as many as its
arithmetic and accesses occur more often in it than where they occur the least.

Time is instructions over those that an H200 issues, whatever the capability: 132 multiprocessors, four schedulers each,
1.755 GHz, and 62 % of the slots used, an assumption. An H200 took three to four times as long (docs/log.md,
2026-11-27), since code also waits. Left out: matrix products and everything on the host; waiting for memory, or for
units that take several cycles (shuffles, division); blocks that only fill up a grid.

Prints tables, and as its last line a JSON object. Its `stores` are evidence that the loops were recognised: for lines
that write to memory, how often such instructions run by this account, and how often the line ran when counted.
"""

import argparse
import ast
import functools
import importlib
import json
import math
import os
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2]))

import numba.cuda.types  # noqa: E402
import sass  # noqa: E402

ISSUED_PER_NS = 132 * 4 * 1.755 * 0.62  # warp instructions
ANCHORS = ("LD", "ST", "F", "MUFU", "SHFL")  # opcodes that stand for something in the source: accesses, arithmetic


# -- the source --------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """A statement: one of the calls that led to an instruction, or what it computes."""

    module: str
    function: int  # line of its first statement
    loops: tuple[int, ...]  # lines of the loops around it in its function, and its own if it is the head of one
    line: int
    is_head: bool  # of a loop


@functools.cache
def places(file):
    """Every line of a file to its Place."""
    found = {}
    module = Path(file).stem

    def enter(statements, function, loops):
        for statement in statements:
            head = isinstance(statement, ast.For | ast.While)
            inner = (*loops, statement.lineno) if head else loops
            for line in range(statement.lineno, statement.end_lineno + 1):
                found[line] = Place(module, function, inner, statement.lineno, head)
            for name in ("body", "orelse"):
                enter(getattr(statement, name, []), function, inner)

    for node in ast.walk(ast.parse(Path(file).read_text())):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            enter(body, body[0].lineno, ())
    return found


@functools.cache
def first_of(file, loop):
    """Line of the first statement in a loop of the source."""
    nodes = (node for node in ast.walk(ast.parse(Path(file).read_text())) if isinstance(node, ast.For | ast.While))
    return next(node.body[0].lineno for node in nodes if node.lineno == loop)


class Level(NamedTuple):
    """One loop of the source around an instruction: by which calls, and where."""

    calls: tuple[int, ...]  # lines, from the kernel's on
    file: str
    loop: int


@functools.cache
def stack(source):
    """The loops of the source around an instruction that comes from there, from the outermost to the innermost."""
    levels, calls = [], ()
    for file, line in source:
        place = places(file).get(line)
        if place is None:  # a `def`, or no statement of ours
            continue
        levels += [Level(calls, file, loop) for loop in place.loops]
        calls = (*calls, line)
    return levels


# -- how often instructions run ----------------------------------------------------------------------------------


class Kernel:
    """Machine code of a kernel and the counts of a replay."""

    def __init__(self, code, counts):
        self.code, self.lines, self.lengths, self.blocks = code, counts["lines"], counts["lengths"], counts["blocks"]
        self.own = defaultdict(list)  # instructions of a loop that are in none within it
        for block, loop in code.loop_of.items():
            self.own[loop] += code.blocks[block]
        self.level = {None: None}  # of the loops of the machine code
        for loop in sorted(filter(None, self.own), key=lambda loop: -len(loop.blocks)):
            self.level[loop] = self._level(loop)
        self.fewest = self._fewest()
        self.unrolled = {loop: self._unrolled(loop) for loop in self.level}
        self.passes, self.share = functools.cache(self.passes), functools.cache(self.share)  # asked of each instruction

    def _level(self, loop):
        """The loop of the source: the outermost one below that of the loop around, of which most instructions are.

        Of a loop without others in it that one may be gone: then it is the one within it whose head is left.
        """
        around, alone = self._around(loop), self._holds_no_other(loop)
        votes, heads = Counter(), set()
        for instruction in self.own[loop]:
            levels = stack(instruction.source)
            if around in levels:
                levels = levels[levels.index(around) + 1 :]
            elif around is not None:
                continue
            votes.update(levels if alone else levels[:1])
            heads |= {level for level in levels if level.loop == instruction.source[-1].number}
        ranked = sorted(votes, key=lambda level: -votes[level])  # the outer one first of two in as many
        return next((level for level in ranked if level in heads), ranked[0] if ranked else None)

    def _holds_no_other(self, loop):
        return all(other is None or other.parent is not loop for other in self.own)

    def _around(self, loop):
        """The loop of the source of the nearest loop around that has one."""
        loop = loop.parent
        while loop is not None and self.level[loop] is None:
            loop = loop.parent
        return self.level[loop]

    def _fewest(self):
        """For every line, by its calls, and opcode: the number of which its numbers in all blocks are multiples."""
        fewest = Counter()
        for block in self.code.blocks.values():
            for what, times in Counter(map(_anchor, block)).items():
                fewest[what] = math.gcd(fewest[what], times)
        return fewest

    def _unrolled(self, loop):
        """How many passes of the source's loop are one of the machine code's."""
        if (level := self.level[loop]) is None:
            return 1
        own = list(filter(_anchor, self.own[loop]))
        if direct := [i for i in own if _innermost(i.source) == (level.file, level.loop)]:
            ratios = [times // self.fewest[what] for what, times in Counter(map(_anchor, direct)).items()]
        elif not self._holds_no_other(loop):
            return 1
        else:  # all of it lies in loops of the source within it, of which the machine code has copies and no loops
            times = [Counter(map(_anchor, instructions)) for instructions in self.own.values()]
            ratios = [n // math.gcd(*(copy[what] for copy in times)) for what, n in Counter(map(_anchor, own)).items()]
        return max(1, statistics.median_low(ratios)) if ratios else 1

    def passes(self, loop):
        """How often the body of a loop of the machine code runs in all."""
        if loop is None:
            return self.blocks
        level, times = self.level[loop], self.passes(loop.parent)
        if level is None:
            return times
        chain = next(i.source for i in self.own[loop] if level in stack(i.source))
        depth = len(level.calls)
        entries = self.share((*chain[:depth], sass.Line(level.file, level.loop)), loop.parent, entering=True)
        return times * entries * self._mean_passes(level, self.unrolled[loop])

    def _mean_passes(self, level, unrolled):
        """Passes each time that the loop is entered, if longer unrolled ones of the same source come first."""
        larger = sorted((u for u in self._siblings(level) if u > unrolled), reverse=True)

        def passes(length):
            for other in larger:
                length %= other
            return length // unrolled

        return self._mean(level, passes)

    def _siblings(self, level):
        return {self.unrolled[loop] for loop, other in self.level.items() if other and other[1:] == level[1:]}

    def _mean(self, level, function):
        """Mean of a function of the loop's length, over the times that it was entered."""
        key = f"{Path(level.file).stem}:{level.loop}"
        if lengths := self.lengths.get(key):
            return sum(function(int(length)) * n for length, n in lengths.items()) / sum(lengths.values())
        return function(
            self._ran(level.file, first_of(level.file, level.loop)) / max(1, self._ran(level.file, level.loop))
        )

    def _ran(self, file, line):
        return self.lines.get(f"{Path(file).stem}:{line}", 0)

    def share(self, source, loop, entering=False):
        """How often an instruction runs in one pass of the innermost loop of the machine code around it.

        The product, over the calls and loops of the source between the two, of how often one leads to the next. What
        the compiler has moved out of its loop, or merged from several lines, runs in every pass. With `entering`, the
        source ends with the head of a loop that is about to start.
        """
        around = self.level[loop]
        levels = stack(source)
        if around is not None and around not in levels:
            inner = _innermost(source)  # of which the calls may be lost
            copied = inner and self.level[loop][1:] != inner and len(self._siblings(Level((), *inner))) > 0
            return self._left_over(Level((), *inner)) if copied else 1.0
        share, base, calls = 1.0, (self.blocks if around is None else None), ()
        for number, (file, line) in enumerate(source):
            place = places(file).get(line)
            if place is None:
                continue
            if base is None and around.calls == calls and around.file == file and around.loop in place.loops:
                base = self._ran(file, first_of(file, around.loop))
                loops = place.loops[place.loops.index(around.loop) + 1 :]
            elif base is None:
                calls = (*calls, line)
                continue
            else:
                base = base if number == 0 and around is None else self._ran(file, place.function)
                loops = place.loops
            last = number == len(source) - 1
            for inner in loops[:-1] if entering and last else loops:
                share *= min(1.0, self._ran(file, inner) / max(1, base)) * self._left_over(Level(calls, file, inner))
                base = self._ran(file, first_of(file, inner))
            if not (place.is_head and place.loops and not (entering and last)):
                share *= min(1.0, self._ran(file, place.line) / max(1, base))
            calls = (*calls, line)
        return share

    def _left_over(self, level):
        """Of the copies of a loop's body that follow an unrolled loop, or replace it: which part runs."""
        unrolled = max(self._siblings(level), default=1)
        if unrolled > 1:
            return self._mean(level, lambda length: length % unrolled) / (unrolled - 1)
        lengths = self.lengths.get(f"{Path(level.file).stem}:{level.loop}")
        return self._mean(level, lambda length: length) / max(1, *map(int, lengths)) if lengths else 1.0

    def stores(self):
        """For every line that writes to memory: how often such instructions run, and how often it ran when counted."""
        times = Counter()
        for loop, own in self.own.items():
            for i in own:
                if i.opcode.startswith(("STG", "STS")):
                    times[i.source[-1]] += self.passes(loop) * self.share(i.source, loop)
        statements = {source: places(source.file)[source.number].line for source in times}
        return {
            f"{Path(source.file).stem}:{statements[source]}": [round(n), self._ran(source.file, statements[source])]
            for source, n in times.items()
        }

    def instructions(self):
        """How many instructions a warp runs in all, by loop of the machine code."""
        return {
            loop: self.passes(loop) * sum(self.share(i.source, loop) for i in own) for loop, own in self.own.items()
        }


def _anchor(instruction):
    """The lines and opcode of an access or of arithmetic, else None."""
    opcode = instruction.opcode.split(".")[0]
    return (instruction.source, opcode) if opcode.startswith(ANCHORS) else None


def _innermost(source):
    """The innermost loop of the source, as file and line, whatever the calls."""
    place = places(source[-1].file).get(source[-1].number) if source else None
    return (source[-1].file, place.loops[-1]) if place and place.loops else None


# -- all together ------------------------------------------------------------------------------------------------


@functools.cache
def replay(*arguments):
    run = subprocess.run(
        [sys.executable, HERE / "replay.py", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "OMP_NUM_THREADS": "1"},
    )
    if run.returncode:
        raise RuntimeError(run.stderr)
    return json.loads(run.stdout.splitlines()[-1])


@functools.cache
def machine_code(name, types, capability):
    """Code of a kernel, as module.function, for the types of its arguments and a compute capability."""
    with_lines()
    module, function = name.split(" ")[0].split(".")
    kernel = getattr(importlib.import_module(f"pipeline.solvers.{module}"), function)
    signature = tuple(eval(text, vars(numba.cuda.types)) for text in types)
    return sass.parse(sass.compile_kernel(kernel, signature, capability))


@functools.cache
def with_lines():
    """From here on kernels are made with line numbers, in functions that are inlined as well."""
    cuda = numba.cuda
    cuda.jit = functools.partial(cuda.jit, lineinfo=True)


def budget(counts, capability):
    """For every kernel its instructions a token and the time to issue them, and the same of its loops."""
    result = {}
    for name, times in counts["kernels"].items():
        kernel = Kernel(machine_code(name, tuple(times["types"]), capability), times)
        by_loop = kernel.instructions()
        total = sum(by_loop.values()) / counts["tokens"]
        result[name] = {
            "instructions_per_token": round(total),
            "ns_per_token": round(total / ISSUED_PER_NS, 2),
            "size": sum(map(len, kernel.code.blocks.values())),
            "stores": kernel.stores(),
            "loops": [
                {
                    "calls": list(level.calls),
                    "line": level.loop,
                    "unrolled": kernel.unrolled[loop],
                    "passes_per_token": round(kernel.passes(loop) / counts["tokens"], 2),
                    "instructions_per_token": round(times / counts["tokens"]),
                }
                for loop, times in by_loop.items()
                if (level := kernel.level[loop]) is not None
            ],
        }
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--capability", nargs="+", default=["9.0"], help="8.0 (A100), 9.0 (H100, H200), 10.0 (B200)")
    parser.add_argument("--tokens", default="8", help="rows of the bench data (%(default)s)")
    parser.add_argument("--width", default="768", help="of the rows (%(default)s)")
    parser.add_argument("--tol", default="1e-3", help="largest KKT violation (%(default)s)")
    parser.add_argument("--loops", action="store_true", help="show every loop of the machine code")
    args = parser.parse_args()
    counts = replay("--tokens", args.tokens, "--width", args.width, "--tol", args.tol)
    result = {name: counts[name] for name in ("tokens", "width", "atoms", "tol", "nonzeros_per_token")}
    for capability in args.capability:
        kernels = budget(counts, tuple(map(int, capability.split("."))))
        show(capability, kernels, args.loops)
        result[capability] = {"ns_per_token": round(sum(k["ns_per_token"] for k in kernels.values()), 1), **kernels}
    print(json.dumps(result))


def show(capability, kernels, with_loops):
    total = sum(kernel["ns_per_token"] for kernel in kernels.values())
    print(f"compute capability {capability:29} {total:>31,.1f} ns a token")
    for name, kernel in kernels.items():
        print(f"{name:34} {kernel['instructions_per_token']:>12,} instructions {kernel['ns_per_token']:>18,.1f}")
        for loop in kernel["loops"] if with_loops else ():
            place = " > ".join(map(str, [*loop["calls"], loop["line"]]))
            print(
                f"    {place:36} {loop['unrolled']:>2} at once {loop['passes_per_token']:>10,} passes "
                f"{loop['instructions_per_token']:>9,} instructions"
            )


if __name__ == "__main__":
    main()
