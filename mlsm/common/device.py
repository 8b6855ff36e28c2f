"""Choose the device to compute on, as --device names it (the CPU or a GPU that torch sees), and seed its randomness."""

import logging
import os
import platform
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache

import torch

from mlsm.common.errors import DeviceError, RunError
from mlsm.common.machine import available_cores

_RANDOMNESS = threading.RLock()
DRAWS = threading.RLock()  # held from setting torch's global generator to the last draw, and while its state is kept
for _lock in (_RANDOMNESS, DRAWS):
    os.register_at_fork(after_in_child=_lock._at_fork_reinit)  # type: ignore[attr-defined]  # a child has its own
logger = logging.getLogger(__name__)


def device_name(device: torch.device | str) -> str:
    """The model of a GPU, or "cpu": what records say."""
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "cpu"


def environment(device: torch.device | str) -> dict[str, str | int]:
    """Versions, device and threads with which something was computed: what records say."""
    import transformers  # only here: it takes a second

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": device_name(device),
        "threads": torch.get_num_threads(),  # another number adds up in another order
    }


def _keep_to_quota():
    """Let torch have no more threads than a quota leaves cores (a container's, say), unless OMP_NUM_THREADS says so."""
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > (cores := available_cores()):
        torch.set_num_threads(cores)


def choose_device(name: str | torch.device) -> torch.device:
    """The device of a name such as "cpu", "cuda" or "cuda:1"; "auto" is the first GPU if there is one, else the CPU.

    A GPU's device always carries its number.

    Raises  DeviceError if there is no such device here, or torch has no code for it
    """
    if str(name) == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
        if name == "cuda" and (lack := lack_of_code(0)):
            _tell_of_the_cpu(lack)
            name = "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DeviceError(f"device {name}: there is no such device. Use cpu, cuda or auto.") from None
    if device.type == "cpu":
        _keep_to_quota()
        return device
    if device.type != "cuda":
        raise DeviceError(f"device {name}: only CPUs and CUDA GPUs are supported. Use cpu, cuda or auto.")
    index = device.index or 0
    if not torch.cuda.is_available():
        raise DeviceError(f"device {name}: torch finds no GPU here. Use --device cpu or auto.")
    if index >= torch.cuda.device_count():
        raise DeviceError(
            f"device {name}: there is no GPU {index}; torch finds {torch.cuda.device_count()} here, counted from 0."
        )
    if lack := lack_of_code(index):
        raise DeviceError(f"device {name}: {lack}.")
    return torch.device("cuda", index)


@cache  # once per process
def _tell_of_the_cpu(lack):
    logger.warning("%s. The CPU is used", lack)


def lack_of_code(index: int) -> str:
    """Why this torch cannot compute on a GPU that it sees; "" if it can.

    Code for a compute capability runs on GPUs of the same major and no lower minor version; PTX runs on all later ones.
    """
    names = torch.cuda.get_arch_list()  # such as sm_90, sm_90a and compute_90
    if torch.version.hip or not names:
        return ""
    capability = torch.cuda.get_device_capability(index)
    for name in names:
        major, minor = divmod(int(re.sub("[^0-9]", "", name)), 10)
        is_ptx = name.startswith("compute")
        if (is_ptx and (major, minor) <= capability) or (major == capability[0] and minor <= capability[1]):
            return ""
    gpu = f"the {torch.cuda.get_device_name(index)}, of compute capability {capability[0]}.{capability[1]}"
    return (
        f"torch {torch.__version__} has code for {', '.join(names)}, and none for {gpu}; pytorch.org/get-started has "
        "builds for older GPUs"
    )


@contextmanager
def own_randomness(device: torch.device) -> Iterator[None]:
    """Restore the state of torch's global random generators after the block.

    Hold DRAWS in the block wherever you seed or draw: between two of these another thread may load a model.

    Raises  RunError if another thread is in such a block: both would draw from the same generators
    """
    if not _RANDOMNESS.acquire(blocking=False):
        raise RunError(
            "another thread of this process is training, and torch's random numbers are one sequence for all threads. "
            "Train one after the other, or start a process for each."
        )
    kept = ExitStack()
    try:
        with DRAWS:
            kept.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        try:
            yield
        finally:
            with DRAWS:
                kept.close()
    finally:
        _RANDOMNESS.release()


@contextmanager
def spare_randomness() -> Iterator[None]:
    """Restore the state of torch's generator for the CPU after the block, in which no other thread draws from it.

    For short blocks, such as making a model: a training in another thread waits for their end, and they for its step.
    """
    with DRAWS, torch.random.fork_rng(devices=[]):
        yield
