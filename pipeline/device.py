"""Which device to compute on, as --device names it: the CPU or one of the GPUs that torch sees."""

import torch

from common.errors import DeviceError


def choose_device(name):
    """The torch.device of a name such as "cpu", "cuda", "cuda:1", or "auto": the GPU if there is one.

    Raises  DeviceError
    """
    if str(name) == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise DeviceError(f"no such device: {name!r}. Use cpu, cuda or auto.") from error
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(f"device {name} is not one that we compute on. Use cpu, cuda or auto.")
    if device.type == "cuda":
        _check_gpu(device)
    return device


def _check_gpu(device):
    if not torch.cuda.is_available():
        raise DeviceError("device cuda asked for, but torch finds no GPU here. Use --device cpu or auto.")
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise DeviceError(f"no GPU {device.index}: torch finds {torch.cuda.device_count()} here, counted from 0.")
