"""GPUs that are not there: tensors say cuda:0 or cuda:1, to torch's C++ code too, and their numbers are on the host.

    with fake_gpus():       # in a process that has preloaded two_gpus.cpp, as test_gpu_path.py starts one
        train(StudentConfig(device="cuda:1", ...))
    print(MIXED, WAITS, EVENTS)

MIXED counts operations that mix devices; they also raise RuntimeError, as on a GPU. WAITS counts where the host waits
for a GPU: it reads numbers, the size of a result follows from values, or a copy is blocking or from memory that is not
pinned. EVENTS counts the events that it waits for, by the device on whose stream they were recorded. The current device
of a thread is cuda:0 except inside a stream of cuda:1, so work on cuda:1 shows code that does not name its device.

Operations happen at once, on the CPU. So this cannot show wrong results: neither those of a missing wait (for these see
tests/pipeline/solvers/fake_device.py) nor those of CUDA's kernels and arithmetic. It also does not show memory, time,
torch.compile, CUDA graphs, several processes, and what torch's CUDA code waits for beyond ANSWERS.
"""

import threading
import traceback
import weakref
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

ROOT = Path(__file__).resolve().parents[2]
WAITS: Counter = Counter()  # "thread: what is waited for, at file:line function" -> how often
MIXED: Counter = Counter()  # "operation: its devices, at file:line function" -> how often
EVENTS: Counter = Counter()  # device -> how often
ANSWERS = {  # the host waits for their values, or for the size of their result
    *("_local_scalar_dense", "_unique2", "bincount", "equal", "is_nonzero", "masked_select", "nonzero"),
    *("repeat_interleave", "unique_consecutive", "unique_dim"),  # the first without `output_size`
}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
torch.inference_mode = torch.no_grad  # these tensors cannot be inference tensors


def note_wait(what):
    WAITS[f"{threading.current_thread().name}: {what}, at {_place()}"] += 1


def _place():
    """The innermost place in our code."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT) and "site-packages" not in path.parts and path != Path(__file__):
            return f"{path.relative_to(ROOT)}:{frame.lineno} {frame.name}"
    return "outside of this project"


# -- tensors -----------------------------------------------------------------------------------------------------


class OnGpu(torch.Tensor):
    """A tensor that says it is on `device`, with the numbers of `inner`, which is on the host."""

    @staticmethod
    def __new__(cls, inner, device):
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=device, **layout)

    def __init__(self, inner, device):
        self.inner = inner

    def tolist(self):
        note_wait("tolist")
        return self.inner.tolist()

    def record_stream(self, stream):
        pass

    def untyped_storage(self):
        """Known by its address where weights are saved."""
        return self.inner.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        return operate(function, arguments, options or {})


class Operations(TorchDispatchMode):
    """Sees what makes tensors on a device from none."""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        return operate(function, arguments, options or {})


def operate(function, arguments, options):
    """Do an operation on the numbers, and put its result on the device where it belongs."""
    name = function._schema.name.removeprefix("aten::")
    if name == "_to_copy":
        return _copy_new(*arguments, **options)
    if name == "copy_":
        return _copy_into(*arguments, **options)
    tensors = [leaf for leaf in tree_iter((arguments, options)) if isinstance(leaf, torch.Tensor)]
    device = next((tensor.device for tensor in tensors if isinstance(tensor, OnGpu)), torch.device("cpu"))
    if name in INDEXING:
        indices = [index for index in arguments[1] if index is not None]
        if device.type == "cuda" and any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            note_wait(f"{name} with a mask")
        if isinstance(arguments[0], OnGpu) and not all(isinstance(index, OnGpu) for index in indices):
            note_wait(f"{name} with indices of the host")  # torch copies them
            tensors = [tensor for tensor in tensors if not any(tensor is index for index in indices)]
    if strangers := [tensor for tensor in tensors if tensor.device != device and tensor.dim()]:
        mixed = f"{name}: tensors on {device} and {strangers[0].device}, at {_place()}"
        MIXED[mixed] += 1
        raise RuntimeError(mixed)
    if device.type == "cuda" and name in ANSWERS and options.get("output_size") is None:
        note_wait(name)
    if options.get("device") is not None:
        device, options = _numbered(options["device"]), options | {"device": "cpu"}
    if is_pinned := options.get("pin_memory"):
        options = options | {"pin_memory": False}
    result = function(*_inner(arguments), **_inner(options))
    if is_pinned:
        _pinned.add(result.untyped_storage())
    if function._schema.is_mutable:
        written = function._schema.returns and function._schema.returns[0].alias_info
        return options.get("out", arguments[0]) if written else None
    return _put(result, device)


def _copy_new(source, *, dtype=None, device=None, non_blocking=False, memory_format=None, **_):
    target = source.device if device is None else _numbered(device)
    _note_copy(source, target, non_blocking)
    layout = memory_format or torch.preserve_format
    return _put(_inner(source).to(dtype or source.dtype, copy=True, memory_format=layout), target)


def _copy_into(target, source, non_blocking=False):
    _note_copy(source, target.device, non_blocking)
    _inner(target).copy_(_inner(source))
    return target


def _note_copy(source, target, non_blocking):
    if source.device.type == "cuda" and target.type == "cpu" and not non_blocking:
        note_wait("copy to the host")
    if source.device.type == "cpu" and target.type == "cuda":
        if source.untyped_storage() not in _pinned:
            note_wait("copy from memory that is not pinned")
        elif not non_blocking:
            note_wait("copy from the host")


def _inner(tree):
    return tree_map(lambda leaf: leaf.inner if isinstance(leaf, OnGpu) else leaf, tree)


def _put(tree, device):
    if device.type == "cpu":
        return tree
    return tree_map(lambda leaf: OnGpu(leaf, device) if isinstance(leaf, torch.Tensor) else leaf, tree)


def _numbered(device):
    device = torch.device(device)
    return torch.device("cuda", _current.index) if device.type == "cuda" and device.index is None else device


_pinned: weakref.WeakSet = weakref.WeakSet()


def _pin(tensor):
    copy = tensor.clone()
    _pinned.add(copy.untyped_storage())
    return copy


# -- torch.cuda --------------------------------------------------------------------------------------------------


class _Current(threading.local):
    index = 0  # of the thread's device


_current = _Current()


class Stream:
    def __init__(self, device=None):
        self.device = torch.device("cuda", _current.index) if device is None else _numbered(device)

    def wait_event(self, event):
        pass

    def synchronize(self):
        note_wait("stream")


class Event:
    def __init__(self, enable_timing=False):
        pass

    def record(self, stream=None):
        self.device = (stream or Stream()).device

    def synchronize(self):
        EVENTS[str(self.device)] += 1

    def elapsed_time(self, end):
        return 1.0


@contextmanager
def _enter(stream):
    before, _current.index = _current.index, stream.device.index
    try:
        yield
    finally:
        _current.index = before


def _run_thread(thread, run=threading.Thread.run):
    with Operations():
        run(thread)


CUDA = {
    "_lazy_init": lambda: None,
    "is_available": lambda: True,
    "device_count": lambda: 2,
    "default_generators": (torch.default_generator, torch.default_generator),  # the CPU draws the numbers
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    "get_arch_list": lambda: ["sm_90"],
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_name": lambda device=None: "a GPU that is not there",
    "is_bf16_supported": lambda including_emulation=True: True,
    "max_memory_allocated": lambda device=None: 1 << 30,
    "Stream": Stream,
    "Event": Event,
    "stream": _enter,
    "current_stream": Stream,
    "synchronize": lambda device=None: note_wait("device"),
}


@contextmanager
def fake_gpus():
    """torch.cuda has two GPUs for a while, in this thread and those that it starts."""
    with (
        patch.multiple(torch.cuda, **CUDA),
        patch.object(torch.Tensor, "pin_memory", _pin),
        patch.object(torch, "_has_compatible_shallow_copy_type", lambda tensor, other: False),  # else `to` sets data
        patch.object(threading.Thread, "run", _run_thread),
        Operations(),
    ):
        yield
