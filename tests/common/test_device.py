"""The device that is chosen if torch sees a GPU. Stand-ins play the GPU."""

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch

from mlsm.common import device
from mlsm.common.device import choose_device, device_name, own_randomness
from mlsm.common.errors import DeviceError, RunError

WHEELS = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]  # of torch for CUDA 13


@pytest.fixture
def gpu(monkeypatch):
    """Function of a capability and of what torch was built for: plays that GPU."""
    device._tell_of_the_cpu.cache_clear()

    def play(capability, built, hip=None):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Played GPU")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built)
        monkeypatch.setattr(torch.version, "hip", hip)

    return play


def test_records_name_the_gpu(gpu):
    gpu((9, 0), WHEELS)
    assert device_name("cuda:0") == device_name(torch.device("cuda")) == "Played GPU" and device_name("cpu") == "cpu"


def test_two_threads_do_not_draw_from_one_generator():
    def enter():
        with own_randomness(torch.device("cpu")):
            pass

    told = pytest.raises(RunError, match="another thread of this process is training.*start a process for each")
    with ThreadPoolExecutor(1) as pool, own_randomness(torch.device("cpu")), told:
        enter()  # in the same thread
        child = os.fork()
        if not child:
            with suppress(BaseException):
                ThreadPoolExecutor(1).submit(enter).result()  # no other thread of the child's is in such a block
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        pool.submit(enter).result()
    enter()


@pytest.mark.parametrize(
    ("capability", "built"),
    [
        ((9, 0), WHEELS),
        ((8, 9), WHEELS),  # code for 8.0 and 8.6 runs on it
        ((7, 5), WHEELS),
        ((10, 3), WHEELS),
        ((13, 0), WHEELS),  # PTX
        ((9, 0), ["sm_80", "sm_90a"]),
        ((7, 0), ["sm_60", "sm_70"]),
        ((7, 0), []),  # a build that does not say
    ],
)
def test_a_gpu_that_torch_has_code_for(gpu, capability, built):
    gpu(capability, built)
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda", 0)


@pytest.mark.parametrize(("capability", "built"), [((7, 0), WHEELS), ((6, 1), WHEELS), ((8, 0), ["sm_86", "sm_90"])])
def test_a_gpu_that_it_has_none_for(gpu, capability, built, caplog):
    gpu(capability, built)
    with caplog.at_level(logging.WARNING, "mlsm"):
        assert choose_device("auto") == choose_device("auto") == torch.device("cpu")
    (said,) = caplog.messages
    assert f"none for the Played GPU, of compute capability {capability[0]}.{capability[1]}" in said
    with pytest.raises(DeviceError, match=r"device cuda: torch .* pytorch.org/get-started"):
        choose_device("cuda")


def test_names_of_amd_are_not_compared(gpu):
    gpu((9, 4), ["gfx90a", "gfx942"], hip="6.4")
    assert choose_device("auto") == torch.device("cuda", 0)
