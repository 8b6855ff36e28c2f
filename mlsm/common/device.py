"""Choose the device to compute on, as --device names it (the CPU or a GPU that torch sees), and seed its randomness."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mlsm.common.errors import DeviceError


def choose_device(name: str | torch.device) -> torch.device:
    """The device of a name such as "cpu", "cuda" or "cuda:1"; "auto" is the first GPU if there is one, else the CPU.

    A GPU's device always carries its number.

    Raises  DeviceError if there is no such device here
    """
    if str(name) == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DeviceError(f"device {name}: there is no such device. Use cpu, cuda or auto.") from None
    if device.type == "cpu":
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
    return torch.device("cuda", index)


@contextmanager
def own_randomness(device: torch.device) -> Iterator[None]:
    """Restore the state of torch's global random generators after the block."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
