"""A GPU that is as late as it may be: what the host queues on streams happens only when somebody waits for it.

Tensors on it say that they lie on cuda:0, their numbers lie in the memory of the host. An operation on them returns at
once; its result holds NaN (or the smallest integer) until the operation happens. Streams, events, pinned memory and
Numba's kernels (in the simulator) are those of CUDA as far as our code uses them; what CUDA orders happens in order.
Two courses of events, `hurry`: False, a stream does nothing before the host waits for it, and then what others owe it;
True, all other streams go as far as they can before it. Memory that is let go is overwritten, which may happen once
the stream that it was allocated on has come to that point, and those told to `record_stream`.

So the results are wrong where a stream does not wait for another, where memory goes back too early, where the host
reads what was copied without waiting, or changes what is still to be copied. Left out: CUDA graphs, several devices,
gradients, threads, how long anything takes, and the freeing of pinned memory, of which torch takes care.
"""

import weakref
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import numpy as np
import torch
from numba.cuda.simulator import kernel as simulator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

DEVICE = torch.device("cuda", 0)
aten = torch.ops.aten
ON_A_CPU = {  # which multiplies without changing the type
    aten.mm.dtype: lambda left, right, dtype: torch.mm(left.to(dtype), right.to(dtype)),
    aten.mm.dtype_out: lambda left, right, dtype, *, out: torch.mm(left.to(dtype), right.to(dtype), out=out),
}
ANSWERS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default}  # the host waits for these


# -- streams -----------------------------------------------------------------------------------------------------


class Stream:
    """Work in order: functions, and events to wait for."""

    all, hurry = [], False
    cuda_stream = 0

    def __init__(self, device=None):
        self.queue, self.done = [], 0
        Stream.all.append(self)

    def add(self, work):
        self.queue.append(work)

    def wait_event(self, event):
        self.add(event)

    def wait_stream(self, stream):
        self.add(Event().record(stream))

    def record_event(self, event=None):
        return (event or Event()).record(self)

    def synchronize(self):
        """What the host waits for."""
        if Stream.hurry:
            for stream in list(Stream.all):
                if stream is not self:
                    stream.advance(len(stream.queue))
        self.advance(len(self.queue))

    def advance(self, until):
        while self.done < until:
            work = self.queue[self.done]
            self.queue[self.done] = None
            self.done += 1
            work() if callable(work) else work.stream.advance(work.place)


class Event:
    def __init__(self, **_):
        self.stream = None

    def record(self, stream=None):
        self.stream = stream or Current.stream
        self.place = len(self.stream.queue)
        return self

    def wait(self, stream=None):
        (stream or Current.stream).wait_event(self)

    def synchronize(self):
        if Stream.hurry:
            for stream in list(Stream.all):
                if stream is not self.stream:
                    stream.advance(len(stream.queue))
        self.stream.advance(self.place)

    def elapsed_time(self, other):
        return 1.0


class Current:
    stream = None


@contextmanager
def on_stream(stream):
    before, Current.stream = Current.stream, stream
    try:
        yield
    finally:
        Current.stream = before


# -- memory ------------------------------------------------------------------------------------------------------


def poison(tensor):
    if tensor.is_floating_point():
        return tensor.fill_(float("nan"))
    return tensor.fill_(True if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).min)


class Memory:
    """What a tensor and its views lie in."""

    def __init__(self, tensor):
        self.users = set()
        weakref.finalize(self, _let_go, tensor, Current.stream, self.users)


def _let_go(tensor, stream, users):
    """Overwrite memory as soon as the streams have come to this point."""
    freeing = Stream()
    for other in (stream, *users):
        freeing.add(other.record_event())
    freeing.add(lambda: poison(tensor))


class OnDevice(torch.Tensor):
    """A tensor whose numbers are in `inner` once the work that makes them has happened.

    To torch's C++ code it lies on the CPU, since a build without CUDA cannot make another device the current one.
    """

    device, is_cuda = DEVICE, True

    @staticmethod
    def __new__(cls, inner, memory):
        strides, offset = inner.stride(), inner.storage_offset()
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=strides, storage_offset=offset, dtype=inner.dtype
        )

    def __init__(self, inner, memory):
        self.inner, self.memory = inner, memory

    def record_stream(self, stream):
        self.memory.users.add(stream)

    def to(self, *arguments, **options):
        device, dtype, late, _ = torch._C._nn._parse_to(*arguments, **options)
        if (device is None or device.type == "cuda") and dtype in (None, self.dtype):
            return self
        return aten._to_copy(self, device=device, dtype=dtype, non_blocking=late)

    def cpu(self):
        return self.to("cpu")

    def tolist(self):
        return self.cpu().tolist()

    def numpy(self):
        """An array for a kernel, as of as_cuda_array: it holds the memory, for as long as the host has it."""
        array = self.inner.numpy().view(HeldArray)
        array.plain, array.memory = self.inner.numpy(), self.memory
        return array

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), options=None):
        return queue(function, arguments, options or {})


class HeldArray(np.ndarray):
    pass


def allocate(like):
    """Memory on the device for what is like a tensor without content, not written yet."""
    inner = poison(torch.empty_strided(like.shape, like.stride(), dtype=like.dtype))
    return OnDevice(inner, Memory(inner))


# -- operations --------------------------------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """Sees what makes tensors on the device from none."""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        options = options or {}
        device = options.get("device")
        if device is not None and torch.device(device).type == "cuda" or OnDevice in types:
            return queue(function, arguments, options)
        return function(*arguments, **options)


def queue(function, arguments, options):
    """Have an operation happen on the current stream. Returns its result, to be."""
    stream = Current.stream
    if function in (aten._to_copy.default, aten.copy_.default):
        return _copy(function, arguments, options, stream)
    if function in ANSWERS:
        stream.synchronize()
        result = function(*_inner(arguments), **_inner(options))
        return OnDevice(result, Memory(result)) if torch.is_tensor(result) else result
    returns = function._schema.returns
    if returns and returns[0].alias_info is not None and not returns[0].alias_info.is_write:  # a view
        base = arguments[0]
        return tree_map(lambda part: OnDevice(part, base.memory), function(*_inner(arguments), **_inner(options)))
    mutable, function = function._schema.is_mutable, ON_A_CPU.get(function, function)
    options = {**options, "device": "cpu"} if "device" in options else options
    inner = _inner(arguments), _inner(options)
    if mutable:
        stream.add(lambda: function(*inner[0], **inner[1]))
        return options["out"] if "out" in options else arguments[0]
    meta = tree_map(lambda x: x.to("meta") if torch.is_tensor(x) else x, inner)
    if "device" in options:
        meta[1]["device"] = "meta"
    results = tree_map(lambda x: allocate(x) if torch.is_tensor(x) else x, function(*meta[0], **meta[1]))
    outputs = tree_map(lambda x: x.inner if isinstance(x, OnDevice) else x, results)

    def happen():
        tree_map(
            lambda out, value: out.copy_(value) if torch.is_tensor(out) else out,
            outputs,
            function(*inner[0], **inner[1]),
        )

    stream.add(happen)
    return results


def _copy(function, arguments, options, stream):
    """Between host and device, or to another type. Only what is pinned, or `non_blocking`, is not waited for."""
    source = arguments[-1] if function is aten.copy_.default and torch.is_tensor(arguments[-1]) else arguments[0]
    if function is aten.copy_.default:
        target, source = arguments[:2]
        late = arguments[2] if len(arguments) > 2 else options.get("non_blocking", False)
    else:
        device, dtype = options.get("device") or source.device, options.get("dtype") or source.dtype
        late = options.get("non_blocking", False)
        target = torch.empty_strided(source.shape, source.stride(), dtype=dtype, device="meta")
        target = (
            allocate(target) if torch.device(device).type == "cuda" else poison(torch.empty_like(target, device="cpu"))
        )
    to_host, from_host = not isinstance(target, OnDevice), not isinstance(source, OnDevice)
    if from_host and not (late and _is_pinned(source)):
        source = source.clone()
    inner = _inner((target, source))
    stream.add(lambda: inner[0].copy_(inner[1]))
    if to_host and not late:
        stream.synchronize()
    return target


def _inner(tree):
    return tree_map(lambda x: x.inner if isinstance(x, OnDevice) else x, tree)


_pinned = weakref.WeakSet()


def _pin(tensor):
    copy = tensor.clone()
    _pinned.add(copy.untyped_storage())
    return copy


def _is_pinned(tensor):
    return tensor.untyped_storage() in _pinned


# -- kernels, and all of it in place -----------------------------------------------------------------------------

NUMBAS_CALL = simulator.FakeCUDAKernel.__call__


def launch(kernel, *arguments):
    if kernel._device or simulator._get_kernel_context():
        return NUMBAS_CALL(kernel, *arguments)
    configuration = kernel.grid_dim, kernel.block_dim, 0, kernel.dynshared_size
    plain = [argument.plain if isinstance(argument, HeldArray) else argument for argument in arguments]
    stream_of_launch().add(lambda: NUMBAS_CALL(kernel[configuration], *plain))


def stream_of_launch():
    """In the simulator a launch names no stream; the solver promises that it is torch's current one."""
    return Current.stream


@contextmanager
def fake_device(hurry):
    """torch.cuda and the simulator's kernels are those of a late GPU for a while."""
    Stream.all, Stream.hurry = [], hurry
    default = Stream()

    def synchronize(device=None):
        for stream in list(Stream.all):
            stream.advance(len(stream.queue))

    cuda = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "device": lambda device: ExitStack(),
        "get_device_capability": lambda device=None: (9, 0),
        "Stream": Stream,
        "Event": Event,
        "stream": on_stream,
        "current_stream": lambda device=None: Current.stream,
        "synchronize": synchronize,
    }
    with (
        patch.multiple(torch.cuda, **cuda),
        patch.object(torch.Tensor, "pin_memory", _pin),
        patch.object(simulator.FakeCUDAKernel, "__call__", launch),
        on_stream(default),
        Operations(),
    ):
        yield default
