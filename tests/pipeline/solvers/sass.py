"""Machine code (SASS) of CUDA kernels without a GPU: compiled, disassembled, and its loops found.

Numba compiles a kernel to PTX for a given compute capability, ptxas to machine code, and nvdisasm prints that with
the source line of every instruction and the calls that were inlined. `tool` finds ptxas and nvdisasm beside the Python
packages (nvidia-cuda-nvcc, nvidia-cuda-nvdisasm) or in a CUDA toolkit.
Left out: functions that are called rather than inlined, indirect branches.
"""

import dataclasses
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import patch

import numba.cuda.dispatcher
from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib
from numba import cuda
from numba.cuda import cuda_paths
from numba.cuda.cudadrv import nvrtc


def tool(name):
    """Path of a program of the CUDA toolkit, or None."""
    beside = (path for entry in sys.path for path in Path(entry).glob(f"nvidia/*/bin/{name}"))
    installed = Path("/usr/local/cuda/bin") / name
    return next(beside, None) or shutil.which(name) or (installed if installed.exists() else None)


def missing():
    """What is not there of the programs and libraries that compile and disassemble a kernel, or None."""
    try:
        load_nvidia_dynamic_lib("nvvm")
    except DynamicLibNotFoundError:
        return "NVVM"
    return next((name for name in ("ptxas", "nvdisasm") if tool(name) is None), None)


class Line(NamedTuple):
    file: str
    number: int


class Instruction(NamedTuple):
    opcode: str  # with its modifiers
    conditional: bool
    target: str | None  # label of a branch
    source: tuple[Line, ...]  # from the kernel's line, by the calls that were inlined, to the innermost one


@dataclasses.dataclass(eq=False)
class Loop:
    """A loop of the machine code: the blocks that it runs through again and again."""

    blocks: frozenset[int]
    parent: "Loop | None" = None


@dataclasses.dataclass
class Code:
    """A kernel's basic blocks, and for each the innermost loop around it, or None; unreachable blocks left out."""

    blocks: dict[int, list[Instruction]]
    loop_of: dict[int, Loop | None]


def compile_kernel(kernel, signature, capability):
    """Machine code, as nvdisasm prints it, of a Numba kernel for argument types and a compute capability (9, 0)."""
    options = {
        name: kernel.targetoptions[name] for name in ("fastmath", "launch_bounds") if name in kernel.targetoptions
    }
    with device(capability):
        ptx = cuda.compile_ptx(kernel.py_func, signature, cc=capability, lineinfo=True, **options)[0]
    with tempfile.TemporaryDirectory() as place:
        source, binary = Path(place) / "kernel.ptx", Path(place) / "kernel.cubin"
        source.write_text(ptx)
        arch = "-arch=sm_{}{}".format(*capability)
        subprocess.run([tool("ptxas"), "-lineinfo", arch, "-o", binary, source], check=True)
        run = subprocess.run([tool("nvdisasm"), "-c", "-gi", binary], check=True, capture_output=True, text=True)
    return run.stdout


@contextmanager
def device(capability):
    """Numba asks which device is there when it meets a device function, and NVRTC, which may be missing, about it."""
    with (
        patch.object(
            numba.cuda.dispatcher, "get_current_device", lambda: SimpleNamespace(compute_capability=capability)
        ),
        patch.object(nvrtc, "get_supported_ccs", lambda: (capability,)),
        patch.object(cuda_paths, "_get_nvrtc_path", lambda: None),
        patch.object(cuda_paths.get_cuda_paths, "_cached_result", None, create=True),
    ):
        del cuda_paths.get_cuda_paths._cached_result
        yield
        if not hasattr(cuda_paths.get_cuda_paths, "_cached_result"):
            cuda_paths.get_cuda_paths._cached_result = None  # for `patch` to take away


# -- what nvdisasm prints ----------------------------------------------------------------------------------------

LABEL = re.compile(r"^(\.L\w*):")
SOURCE = re.compile(r'^\s*//## File "([^"]*)", line (\d+)')
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(@!?\w+\s+)?([A-Z][\w.]*)([^;]*);")
TARGET = re.compile(r"`\((\.L\w*)\)")
ENDS = ("EXIT", "RET", "BRX", "JMX")
JUMPS = ("BRA", "CALL.REL.NOINC")  # the latter to a label of the kernel is a branch that may be far


def parse(text):
    """Code of the one kernel in what nvdisasm printed."""
    instructions, labels, chain, fresh = [], {}, (), True
    for line in text.splitlines():
        if match := LABEL.match(line):
            labels[match[1]] = len(instructions)
        elif match := SOURCE.match(line):  # innermost first
            chain, fresh = ((Line(match[1], int(match[2])), *(() if fresh else chain)), False)
        elif match := INSTRUCTION.match(line):
            target = match[2].startswith(JUMPS) and TARGET.search(match[3])
            conditional = bool(match[1] or re.search(r"\bU?P\d", match[3].split("`")[0]))
            instructions.append(Instruction(match[2], conditional, target[1] if target else None, chain))
            fresh = True
    return _code(instructions, labels)


def _code(instructions, labels):
    starts = {0, *(labels[i.target] for i in instructions if i.target)}
    starts |= {number + 1 for number, i in enumerate(instructions) if i.target or i.opcode.startswith(ENDS)}
    starts = sorted(start for start in starts if start < len(instructions))
    blocks = {
        start: instructions[start:end] for start, end in zip(starts, [*starts[1:], len(instructions)], strict=True)
    }
    after = dict(zip(starts, starts[1:], strict=False))
    following = {start: _following(blocks[start][-1], labels, after.get(start)) for start in starts}
    reached, todo = {0}, [0]
    while todo:
        new = following[todo.pop()] - reached
        reached |= new
        todo += new
    following = {start: following[start] for start in sorted(reached)}
    return Code({start: blocks[start] for start in following}, _innermost(_loops(following), following))


def _following(last, labels, after):
    """Starts of the blocks that may come next. Nothing diverges in a warp, so BRA.DIV does not branch."""
    targets = {labels[last.target]} if last.target and not last.opcode.startswith("BRA.DIV") else set()
    ends = (last.target and targets) or last.opcode.startswith(ENDS)
    return targets if ends and not last.conditional else targets | {after} - {None}


# -- loops -------------------------------------------------------------------------------------------------------


def _loops(following):
    """Natural loops: of every block that one of those which it dominates goes back to."""
    before = defaultdict(set)
    for block, others in following.items():
        for other in others:
            before[other].add(block)
    dominators = _dominators(following, before)
    bodies = defaultdict(set)
    for block, others in following.items():
        for head in others & dominators[block]:
            bodies[head] |= {head}
            todo = [block]
            while todo:
                if (new := todo.pop()) not in bodies[head]:
                    bodies[head].add(new)
                    todo += before[new]
    loops = sorted((Loop(frozenset(body)) for body in bodies.values()), key=lambda loop: len(loop.blocks))
    for number, loop in enumerate(loops):
        loop.parent = next((other for other in loops[number + 1 :] if loop.blocks < other.blocks), None)
    return loops


def _dominators(following, before):
    """For every block, those through which every way to it leads."""
    dominators = {block: set(following) for block in following} | {0: {0}}
    changed = True
    while changed:
        changed = False
        for block in list(following)[1:]:
            new = {block} | set.intersection(*(dominators[other] for other in before[block]))
            changed |= new != dominators[block]
            dominators[block] = new
    return dominators


def _innermost(loops, following):
    return {block: next((loop for loop in loops if block in loop.blocks), None) for block in following}
