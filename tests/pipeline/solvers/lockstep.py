"""Numba's CUDA simulator with threads of a block that run one at a time, in an order of our choice.

Between two barriers the threads of a block may run in any order, so a kernel without races gives the same
bits whatever that order is. The simulator's own scheduler polls, and so neither chooses an order nor is quick.
This one also fails if threads of a block wait at different barriers, which a GPU would not survive, hands out
shared memory full of NaN, and adds the warp instructions that we use, for blocks of 32 threads.
Works by replacing classes of numba.cuda.simulator.kernel (numba-cuda 0.30).
"""

import sys
import threading
from contextlib import contextmanager

import numpy as np
from numba.cuda.simulator import kernel as simulator


class Thread(simulator.BlockThread):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.turn, self.barrier, self.ended = threading.Semaphore(0), None, False

    def run(self):
        self.turn.acquire()
        super().run()
        self.ended = True
        self._manager.turn_over.release()

    def syncthreads(self):
        self.barrier = _lines(sys._getframe(2))
        self._manager.turn_over.release()
        self.turn.acquire()


def _spoil(shared):
    """Shared memory starts as NaN: a kernel that reads before it writes gives itself away."""
    for array in shared._allocations.values():
        array[:] = np.nan
    shared._dynshared[:] = -1  # bytes: all bits set, a NaN


def _lines(frame):
    """Line numbers of the calls that led to a barrier."""
    lines = []
    while frame is not None and frame.f_code is not Thread.run.__code__:
        lines.append(frame.f_lineno)
        frame = frame.f_back
    return lines


class Block(simulator.BlockManager):
    order = staticmethod(list)  # of the threads, drawn anew after every barrier

    def run(self, grid_point, *arguments):
        self.turn_over = threading.Semaphore(0)
        _spoil(simulator._get_kernel_context().shared)
        self.threads = threads = [
            Thread(lambda: self._f(*arguments), self, grid_point, place, self._debug)
            for place in np.ndindex(*self._block_dim)
        ]
        for thread in threads:
            thread.start()
        while not threads[0].ended:
            for thread in type(self).order(threads):
                thread.turn.release()
                self.turn_over.acquire()
                if thread.exception:
                    raise thread.exception[0].with_traceback(thread.exception[1])
            assert len({thread.ended for thread in threads}) == 1, "some threads ended, others wait at a barrier"
            assert all(thread.barrier == threads[0].barrier for thread in threads), "different barriers"


NUMBAS = simulator.BlockManager


def _exchange(value):
    """The values of all threads of a block, as a warp exchanges them."""
    thread = threading.current_thread()
    thread.sent = value
    thread.syncthreads()
    values = [other.sent for other in thread._manager.threads]
    thread.syncthreads()
    return values


def shfl_xor_sync(module, mask, value, distance):
    return _exchange(value)[threading.current_thread().thread_id ^ distance]


def ballot_sync(module, mask, flag):
    """An int32, like Numba's."""
    return int(np.packbits(_exchange(bool(flag)), bitorder="little").view(np.int32)[0])


def shuffled(seed):
    rng = np.random.default_rng(seed)
    return lambda threads: [threads[i] for i in rng.permutation(len(threads))]


ORDERS = {"ascending": list, "descending": lambda threads: threads[::-1], "shuffled": shuffled(0)}


def install(order="ascending"):
    simulator.BlockManager = Block
    simulator.FakeCUDAModule.shfl_xor_sync = shfl_xor_sync
    simulator.FakeCUDAModule.ballot_sync = ballot_sync
    Block.order = staticmethod(ORDERS[order])


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
