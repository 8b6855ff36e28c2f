"""Try code on a GPU in a child process before it is used, and store the results in the user's cache.

    key = key_of(device, "kernels 1a2b3c", "d <= 1024, k <= 4096")

    def prove():
        child = run_child("pipeline.solvers.trial", {"lam": 0.05}, 120, hidden_Nd=hidden_Nd)
        keep(key, {...})

    answer = known_or_proven(lambda: recall(key), prove)    # prove() in turn, if not stored

If a child crashes, hangs or brings the driver down, its caller loses at most the time limit. The child writes each
result as a line into a file, so that results before a crash are kept. What is tried, and what follows from it, is
decided elsewhere (pipeline/solvers/proof.py, student/proof.py).
"""

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from mlsm.common import disk, locks
from mlsm.common.errors import describe
from mlsm.common.json_lines import read_json_lines
from mlsm.common.machine import cache_directory, cpu_model, make_cache, read_cache, write_cache
from mlsm.common.paths import utf8

_FILE = "gpu-proofs.json"  # in the cache
TASK, ARRAYS = "task.json", "task.npz"  # files in a child's directory: what it is to try
REPORT, SAID = "report.jsonl", "said.txt"  # its results, its output
LIBRARIES = (  # besides torch
    "mlsm-pretrain",
    "numba",
    "llvmlite",
    "numpy",
    "numba-cuda",
    "cuda-bindings",
    "cuda-core",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-nvrtc-cu12",
    "nvidia-cuda-nvcc-cu12",
    "nvidia-nvvm",
    "triton",
)
GRACE = 10.0  # seconds to wait for a killed child to end; one that waits for a driver may never end
# The child has its parent's import path and ends when its parent does: on Linux by PR_SET_PDEATHSIG, elsewhere by an
# alarm.
_START = (
    "import ctypes, json, runpy, signal, sys; "
    "sys.platform == 'linux' and ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0); "
    "signal.alarm(int(sys.argv.pop(1))); sys.path[:] = json.loads(sys.argv.pop(1)); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__')"
)
logger = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")


class Child(NamedTuple):
    """The results that a child process left.

    found    name -> facts, as the child reported them; {} for a trial that it started but did not finish
    trouble  how it ended, if it did not end normally
    passing  whether a full or busy machine may be the cause: it ran out of time, or was killed from outside
    """

    found: dict[str, dict]
    trouble: str | None
    passing: bool = False


def run_child(module: str, task: Mapping[str, Any], seconds: float, **arrays: Any) -> Child:
    """Run a module as `python -m MODULE DIRECTORY` in its own process, which is killed after some seconds.

    task, arrays  what the child finds in its directory, as task.json and task.npz
    """
    with tempfile.TemporaryDirectory(prefix="mlsm-proof-") as place:
        directory = Path(place)
        (directory / TASK).write_text(json.dumps(task))
        if arrays:
            np.savez(directory / ARRAYS, **arrays)
        return _run_in(directory, module, seconds)


def _run_in(directory, module, seconds):
    passing = False
    start = [sys.executable, "-c", _START, str(int(seconds + GRACE)), json.dumps(sys.path), module, str(directory)]
    with open(directory / SAID, "wb") as streams:
        process = subprocess.Popen(
            start, stdin=subprocess.DEVNULL, stdout=streams, stderr=streams, start_new_session=True
        )
        try:
            code = process.wait(seconds)
            trouble = None if code == 0 else f"it ended with {_name_of(code)}: {_reason(directory / SAID)}"
            passing = code == -signal.SIGKILL  # as Linux does when memory runs out
        except subprocess.TimeoutExpired:
            passing, trouble = True, f"it had not ended after {seconds:.0f} seconds"
        finally:
            with suppress(ProcessLookupError):  # none of its processes is running
                os.killpg(process.pid, signal.SIGKILL)  # and all processes it started
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
    return Child(_read_report(directory / REPORT), trouble, passing)


def report(directory: Path, name: str, facts: dict) -> None:
    """In a child process: report what was found under a name or, with {}, that its trial starts."""
    with disk.append(directory / REPORT) as file:
        disk.write(file, utf8(json.dumps({"name": name, "facts": facts}) + "\n"))


def failure(error: Exception) -> dict:
    """In a child process: the report for a trial that raised an error."""
    return {"error": describe(error)} | ({"lacks_memory": True} if lacks_memory(error) else {})


def lacks_memory(error: Exception) -> bool:
    """Whether torch, a driver or a library reports that memory is full; a later attempt may then succeed."""
    words = str(error).lower().replace("_", " ")  # as in CUBLAS_STATUS_ALLOC_FAILED
    full = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return full or "out of memory" in words or "alloc failed" in words


def _read_report(path):
    if not path.exists():
        return {}
    lines, _ = read_json_lines(path, needed=())  # the last one may have been cut
    return {line["name"]: line["facts"] for line in lines}


def _name_of(code):
    return f"signal {signal.Signals(-code).name}" if -code in set(signal.Signals) else f"code {code}"


def _reason(path):
    """The last error in what a child printed, else its last line: libraries may print more when the process ends."""
    lines = path.read_text(errors="replace").strip().splitlines() or ["it printed nothing"]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (errors or lines)[-1][:300]


# -- what answers depend on ----------------------------------------------------------------------------------


def key_of(device: torch.device, *facts: str) -> str:
    """A key for `recall`: GPU, driver, libraries, and the other facts that the caller's answer depends on."""
    return ", ".join([*(f"{name} {value}" for name, value in device_facts(device).items()), *facts])


def device_facts(device: torch.device) -> dict[str, str]:
    """GPU, driver, the C compiler of torch.compile, and the versions of libraries that compile or compute for it."""
    on_gpu = device.type == "cuda"
    found = {
        "device": torch.cuda.get_device_name(device) if on_gpu else cpu_model(),
        "driver": driver_version() if on_gpu else "none",
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda or torch.version.hip),
    }
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "none"
    compilers = filter(shutil.which, ("gcc", "clang"))
    return found | {"C compiler": os.environ.get("CC") or next(compilers, "none")}


def driver_version() -> str:
    """The version of NVIDIA's driver, as the kernel or nvidia-smi reports it; else "unknown"."""
    with suppress(OSError, IndexError):
        line = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
        return next((word for word in line.split() if word[0].isdigit() and "." in word), "unknown")
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    if shutil.which(command[0]):  # for WSL, which has no such file
        with suppress(OSError, subprocess.SubprocessError, IndexError):
            said = subprocess.run(command, capture_output=True, text=True, timeout=GRACE)
            return said.stdout.split()[0]
    return "unknown"


# -- answers, kept --------------------------------------------------------------------------------------------


@contextmanager
def alone() -> Iterator[None]:
    """Let only one process of this user run a trial at a time, if the cache can be written and locked."""
    with ExitStack() as held:
        try:
            make_cache()
            file = held.enter_context(disk.append(cache_directory() / "gpu-proofs.lock"))
            locks.acquire(file, wait=True)
        except (OSError, ValueError, RuntimeError) as error:
            logger.debug("other processes may run the same trial at the same time: %s", error)
        yield


def known_or_proven(
    find: Callable[[], _Answer | None], prove: Callable[[], _Answer], *, fresh: bool = False
) -> _Answer:
    """The result of `find`; if there is none, of `prove`, which only one process of this user runs at a time.

    fresh  run `prove` even if a result is stored
    """
    if not fresh and (known := find()) is not None:
        return known  # at once, without waiting for another process's trial
    with alone():
        known = None if fresh else find()  # another process may just have stored it
        return prove() if known is None else known


def recall(key: str) -> dict | None:
    """The result stored under a key; None if there is none or if it cannot be read."""
    found = read_cache(_FILE).get(key)
    return found if isinstance(found, dict) else None


def keep(key: str, answer: dict) -> None:
    """Store a result; if it cannot be written, it is computed again next time."""
    try:
        write_cache(_FILE, read_cache(_FILE) | {key: answer})
    except (OSError, RuntimeError) as error:
        logger.debug("the results of the trial cannot be saved: %s", error)


def forget(device: torch.device) -> None:
    """Delete every result for this GPU with its present driver and libraries."""
    known, of_device = read_cache(_FILE), f"{key_of(device)}, "
    others = {key: answer for key, answer in known.items() if not key.startswith(of_device)}
    if len(others) < len(known):
        write_cache(_FILE, others)
