"""Numba's CUDA simulator with threads of a block that run one at a time, in an order of our choice.

Between two barriers the threads of a block may run in any order, so a kernel without races gives the same
bits whatever that order is. The simulator's own scheduler polls, and so neither chooses an order nor is quick.
This one also fails if threads wait at different barriers, which a GPU would not survive, hands out shared memory
whose bits are all set (NaN, or -1), and adds the instructions with which the 32 threads of a warp exchange values.
`watch` shows every access of a kernel to memory and every barrier to somebody else: races.py looks for races there.
Works by replacing parts of numba.cuda.simulator (numba-cuda 0.30), so `install` comes before the kernels are imported.
"""

import functools
import sys
import threading
from contextlib import contextmanager
from types import FunctionType
from weakref import WeakSet

import numpy as np
from numba import cuda
from numba.cuda.simulator import kernel as simulator
from numba.cuda.simulator import kernelapi

WARP = 32  # threads
BLOCK, OF_WARP, EXCHANGE = "syncthreads", "syncwarp", "exchange"  # what threads wait for together


class Thread(simulator.BlockThread):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.turn, self.waits, self.ended = threading.Lock(), None, False
        self.lines, self.lengths, self.passes = {}, {}, {}  # for replay.py
        self.turn.acquire()

    def run(self):
        self.turn.acquire()
        if self._manager.error:
            return
        super().run()
        self.ended = True
        if self.exception:
            self._manager.error = self.exception[0].with_traceback(self.exception[1])
        self._manager.next_turn()

    def meet(self, kind, members):
        """Wait for the other threads of `members`, which must come to the same line by the same calls."""
        self.waits = (kind, members, _lines(sys._getframe(2)))
        self._manager.next_turn()
        self.turn.acquire()
        if self._manager.error:
            sys.exit()  # this thread

    def syncthreads(self):
        self.meet(BLOCK, range(len(self._manager.threads)))

    def of_warp(self, mask):
        """Numbers of this warp's threads that the mask names."""
        first = self.thread_id // WARP * WARP
        last = min(first + WARP, len(self._manager.threads))
        members = [number for number in range(first, last) if mask >> (number - first) & 1]
        assert self.thread_id in members, f"thread {self.thread_id} is not in the mask {mask:#x} that it gives"
        return members

    def exchange(self, mask, value):
        """What the threads of the mask give, by their place in the warp. Orders no other memory."""
        self.sent = value
        self.meet(EXCHANGE, self.of_warp(mask))
        return self.received


def _lines(frame):
    """Line numbers of the calls that led to a barrier."""
    lines = []
    while frame is not None and frame.f_code is not Thread.run.__code__:
        lines.append(frame.f_lineno)
        frame = frame.f_back
    return lines


class Watcher:
    """Who is told of every block of a launch; see `watch`."""

    def begin(self, block, function, arguments):
        """A block starts. Returns the arguments that the kernel gets, instead of numbers and NumPy arrays."""
        return arguments

    def watch_shared(self, array):
        """A kernel asks for shared memory. Returns what it gets."""
        return array

    def barrier(self, kind, threads):
        """Threads have met at a syncthreads or a syncwarp."""

    def end(self, block):
        """A block has ended."""


class Block(simulator.BlockManager):
    order = staticmethod(list)  # of the threads, drawn anew whenever some may go on
    watcher = None

    def run(self, grid_point, *arguments):
        self.number, self.size, self.error = tuple(grid_point), int(np.prod(self._block_dim)), None
        self.finished = threading.Lock()
        self.finished.acquire()
        _spoil(simulator._get_kernel_context().shared)
        if self.watcher:
            arrays = [a._item._ary if isinstance(a, simulator.FakeWithinKernelCUDAArray) else a for a in arguments]
            arguments = self.watcher.begin(self, self._f, arrays)
        self.threads = [
            Thread(lambda: self._f(*arguments), self, grid_point, place, self._debug)
            for place in np.ndindex(*self._block_dim)
        ]
        self.ready = iter(type(self).order(self.threads))
        for thread in self.threads:
            thread.start()
        self.next_turn()
        self.finished.acquire()
        for thread in self.threads:
            if self.error:
                thread.turn.release()  # to end
            thread.join()
        if self.error:
            raise self.error
        if self.watcher:
            self.watcher.end(self)

    def next_turn(self):
        """Let the next thread run, or whoever started the block, if all have ended or one has failed."""
        thread = None
        if not self.error:
            thread = next(self.ready, None) or self._next_of_those_that_met()
        if thread is not None:
            thread.turn.release()
        else:
            self.finished.release()

    def _next_of_those_that_met(self):
        threads = self.threads
        waiting = [thread for thread in threads if not thread.ended]
        if not waiting:
            return None
        met = {}
        for thread in waiting:
            kind, members, lines = thread.waits
            if members[0] not in met and all(
                not threads[i].ended and threads[i].waits == thread.waits for i in members
            ):
                met[members[0]] = [threads[i] for i in members]
                self._meet(kind, met[members[0]])
        if not met:
            ended = [thread.thread_id for thread in threads if thread.ended]
            places = sorted({f"{kind} at line {lines[0]}" for kind, _, lines in (thread.waits for thread in waiting)})
            self.error = AssertionError(
                f"threads wait for others that do not come: at {', '.join(places)}"
                + (f"; some have ended: {ended}" if ended else "")
            )
            return None
        self.ready = iter(type(self).order([thread for group in met.values() for thread in group]))
        return next(self.ready)

    def _meet(self, kind, group):
        if kind is EXCHANGE:
            values = {thread.thread_id % WARP: thread.sent for thread in group}
            for thread in group:
                thread.received = values
        elif self.watcher:
            self.watcher.barrier(kind, group)


NUMBAS = simulator.BlockManager


# -- shared memory, and what a warp does together ----------------------------------------------------------------


def shared_array(shared, shape, dtype, alignment=None):
    """An array of its own for every place in the source; of shape 0: the memory whose size the launch gives."""
    dtype = np.dtype(kernelapi.numpy_support.as_dtype(dtype) if isinstance(dtype, kernelapi.types.Type) else dtype)
    if shape == 0:
        array = shared._dynshared[: shared._dynshared_size // dtype.itemsize * dtype.itemsize].view(dtype)
    else:
        caller = sys._getframe(1)
        place = (caller.f_code, caller.f_lasti)
        if place not in shared._allocations:
            array = np.empty(shape, dtype)
            array.view(np.uint8)[:] = 0xFF
            shared._allocations.setdefault(place, array)
        array = shared._allocations[place]
    return Block.watcher.watch_shared(array) if Block.watcher else array


def _spoil(shared):
    """Bits all set: a kernel that reads before it writes gives itself away."""
    for array in [*shared._allocations.values(), shared._dynshared]:
        array.view(np.uint8)[:] = 0xFF


def _exchange(mask, value):
    thread = threading.current_thread()
    return thread.thread_id % WARP, thread.exchange(mask, value)


def shfl_sync(module, mask, value, source):
    return _exchange(mask, value)[1][source]


def shfl_xor_sync(module, mask, value, distance):
    lane, values = _exchange(mask, value)
    return values[lane ^ distance]


def shfl_up_sync(module, mask, value, distance):
    lane, values = _exchange(mask, value)
    return values[lane - distance] if lane >= distance else value


def shfl_down_sync(module, mask, value, distance):
    lane, values = _exchange(mask, value)
    return values[lane + distance] if lane + distance < WARP else value


def ballot_sync(module, mask, flag):
    """An int32, like Numba's."""
    votes = sum(1 << lane for lane, vote in _exchange(mask, bool(flag))[1].items() if vote)
    return votes - (votes >> 31 << 32)


def all_sync(module, mask, flag):
    return all(_exchange(mask, bool(flag))[1].values())


def any_sync(module, mask, flag):
    return any(_exchange(mask, bool(flag))[1].values())


def syncwarp(module, mask=0xFFFFFFFF):
    thread = threading.current_thread()
    members = thread.of_warp(mask)
    assert len(members) == len(thread.of_warp(0xFFFFFFFF)), "a barrier of part of a warp: not simulated"
    thread.meet(OF_WARP, members)


WARP_INSTRUCTIONS = (
    shfl_sync,
    shfl_xor_sync,
    shfl_up_sync,
    shfl_down_sync,
    ballot_sync,
    all_sync,
    any_sync,
    syncwarp,
)


# -- at work or not ---------------------------------------------------------------------------------------------


def shuffled(seed):
    rng = np.random.default_rng(seed)
    return lambda threads: [threads[i] for i in rng.permutation(len(threads))]


ORDERS = {"ascending": list, "descending": lambda threads: threads[::-1], "shuffled": shuffled(0)}


class InPlace(simulator.ArgHint):
    """Arrays are used where they lie, as on a GPU: two may share memory."""

    def to_device(self, retr, stream=0):
        return simulator.FakeCUDAArray(self.value)


DEVICE_FUNCTIONS = WeakSet()  # of all kernels


def jit(function=None, device=False, **_):
    """Takes all options of the real one, most of which mean nothing here. A device function stays as it is."""
    if function is None:
        return functools.partial(jit, device=device)
    if device:
        DEVICE_FUNCTIONS.add(function)
        return function
    return simulator.FakeCUDAKernel(function, device=False)


@contextmanager
def stand_in(kernel, fake):
    """For a launch, `cuda` is the simulator's in the modules of the kernel and of all device functions it may call.

    The simulator itself does this at each call of a device function, which takes longer than most of them.
    """
    modules, todo = {}, [kernel]
    while todo:
        names = todo.pop().__globals__
        if id(names) not in modules:
            modules[id(names)] = names
            todo += [value for value in names.values() if type(value) is FunctionType and value in DEVICE_FUNCTIONS]
    replaced = [(names, name) for names in modules.values() for name, value in names.items() if value is cuda]
    for names, name in replaced:
        names[name] = fake
    try:
        yield
    finally:
        for names, name in replaced:
            names[name] = cuda


def install(order="ascending"):
    simulator.BlockManager, simulator.InOut, cuda.jit = Block, InPlace, jit
    simulator.swapped_cuda_module = stand_in
    kernelapi.FakeCUDAShared.array = shared_array
    for instruction in WARP_INSTRUCTIONS:
        setattr(kernelapi.FakeCUDAModule, instruction.__name__, instruction)
    Block.order = staticmethod(ORDERS[order])


def shrink_kernels():
    """Give blocks of four threads working sets and parts of a gradient for some forty atoms: most time goes by them."""
    from pipeline.solvers import cuda_kernels, cuda_working_set

    cuda_kernels.PARTS = 4
    vars(cuda_working_set).update(SMALL=16, MEDIUM=24, EACH_SMALL=4, EACH_MEDIUM=6)


@contextmanager
def watch(watcher):
    """Tell `watcher` of all launches for a while."""
    Block.watcher = watcher
    try:
        yield watcher
    finally:
        Block.watcher = None


@contextmanager
def uninstalled():
    """Numba's own scheduler for a while; its polling is slow unless threads change often."""
    ours, interval = simulator.BlockManager, sys.getswitchinterval()
    simulator.BlockManager = NUMBAS
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        simulator.BlockManager = ours
        sys.setswitchinterval(interval)
