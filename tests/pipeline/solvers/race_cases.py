"""Small kernels with and without races, for races.py: what orders two accesses, and what does not.

    NUMBA_ENABLE_CUDASIM=1 python tests/pipeline/solvers/race_cases.py

Prints as its last line a JSON object: the name of each kernel, and null or what was found.
"""

import json

import lockstep
import numpy as np
import races
from numba import cuda, float32, int32

lockstep.install()  # before kernels are made: it takes the place of cuda.jit
WARP = 0xFFFFFFFF
CASES = {}


def case(threads, blocks=1):
    def enter(function):
        CASES[function.__name__] = cuda.jit(function), blocks, threads
        return function

    return enter


# -- ordered -----------------------------------------------------------------------------------------------------


@case(threads=64)
def barrier_of_the_block(out):
    shared = cuda.shared.array(64, float32)
    shared[cuda.threadIdx.x] = cuda.threadIdx.x
    cuda.syncthreads()
    out[cuda.threadIdx.x] = shared[63 - cuda.threadIdx.x]


@case(threads=64)
def barrier_of_the_warp_within_it(out):
    shared = cuda.shared.array(64, float32)
    shared[cuda.threadIdx.x] = cuda.threadIdx.x
    cuda.syncwarp()
    out[cuda.threadIdx.x] = shared[cuda.threadIdx.x ^ 1]


@case(threads=4, blocks=3)
def atomic_sums(out):
    cuda.atomic.add(out, 0, 1)


@case(threads=4)
def own_memory_of_threads(out):
    own = cuda.local.array(2, float32)
    for i in range(2):
        own[i] = cuda.threadIdx.x
    out[cuda.threadIdx.x] = own[1]


@case(threads=4)
def reading_together(out):
    out[4 + cuda.threadIdx.x] = out[0]


@case(threads=32)
def instructions_of_a_warp(out):
    lane = cuda.threadIdx.x
    sent = cuda.shfl_sync(WARP, lane, 3) + cuda.shfl_xor_sync(WARP, lane, 1) + cuda.shfl_up_sync(WARP, lane, 2)
    sent += cuda.shfl_down_sync(WARP, lane, 2) + cuda.popc(cuda.ballot_sync(WARP, lane < 5) & WARP)
    if lane < 8:
        sent += cuda.shfl_xor_sync(0xFF, lane, 4)
    out[lane] = sent + cuda.any_sync(WARP, lane == 7) + 2 * cuda.all_sync(WARP, lane < 32)


# -- not ordered -------------------------------------------------------------------------------------------------


@case(threads=4)
def no_barrier(out):
    shared = cuda.shared.array(4, float32)
    shared[cuda.threadIdx.x] = cuda.threadIdx.x
    out[cuda.threadIdx.x] = shared[3 - cuda.threadIdx.x]


@case(threads=4)
def writing_again_too_early(out):
    shared = cuda.shared.array(4, float32)
    for i in range(2):
        shared[cuda.threadIdx.x] = i
        cuda.syncthreads()
        out[cuda.threadIdx.x] = shared[3 - cuda.threadIdx.x]


@case(threads=64)
def barrier_of_the_warp_across_warps(out):
    shared = cuda.shared.array(64, float32)
    shared[cuda.threadIdx.x] = cuda.threadIdx.x
    cuda.syncwarp()
    out[cuda.threadIdx.x] = shared[63 - cuda.threadIdx.x]


@case(threads=32)
def shuffles_order_no_memory(out):
    shared = cuda.shared.array(32, float32)
    shared[cuda.threadIdx.x] = cuda.threadIdx.x
    cuda.shfl_xor_sync(WARP, 0, 1)
    cuda.ballot_sync(WARP, True)
    out[cuda.threadIdx.x] = shared[cuda.threadIdx.x ^ 1]


@case(threads=1, blocks=2)
def blocks_of_a_launch(out):
    cuda.syncthreads()
    out[0] = cuda.blockIdx.x


@case(threads=4)
def writing_the_same(out):
    out[0] = 1


@case(threads=4)
def atomic_and_plain(out):
    cuda.atomic.add(out, 0, 1)
    out[1 + cuda.threadIdx.x] = out[0]


@case(threads=2)
def types_that_overlap(out):
    if cuda.threadIdx.x == 0:
        cuda.shared.array(0, int32)[1] = 5
    else:
        cuda.shared.array(0, np.float64)[0] = 5


@case(threads=2)
def slices(out):
    part = out[2:6]
    if cuda.threadIdx.x == 0:
        part[0:3] = (1, 2, 3)
    else:
        out[0] = part[2:4].astype(np.float32)[0]


@case(threads=4)
def indices_below_zero(out):
    out[cuda.threadIdx.x - 1] = 1


@case(threads=4)
def different_barriers(out):
    if cuda.threadIdx.x < 2:
        cuda.syncthreads()
    else:
        out[cuda.threadIdx.x] = 0


def run(kernel, blocks, threads):
    out = np.zeros(128, np.float32)
    with races.watching():
        try:
            kernel[blocks, threads, 0, 64](out)
        except (AssertionError, IndexError) as error:
            return str(error)
    if kernel.fn.__name__ == "instructions_of_a_warp":
        lane = np.arange(32)
        expected = 3 + (lane ^ 1) + np.where(lane >= 2, lane - 2, lane) + np.where(lane < 30, lane + 2, lane)
        expected += 5 + np.where(lane < 8, lane ^ 4, 0) + 1 + 2
        np.testing.assert_array_equal(out[:32], expected)


if __name__ == "__main__":
    print(json.dumps({name: run(*launch) for name, launch in CASES.items()}))
