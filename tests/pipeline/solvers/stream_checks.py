"""Streams and lifetimes of memory on a GPU that is as late as it may be (fake_device.py).

    NUMBA_ENABLE_CUDASIM=1 python tests/pipeline/solvers/stream_checks.py

Every check runs under both courses of events; then again with something taken away that it cannot do without, whose
result must be wrong under one of them. Prints as its last line a JSON object: the name of each check and of what was
taken away, and null or what went wrong.
"""

import gc
import json
import sys
import traceback
from collections import namedtuple
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import fake_device
import lockstep
import numpy as np
import torch
from fake_device import DEVICE, OnDevice, Stream

lockstep.install()  # before kernels are made

from pipeline.overlap import open_stream  # noqa: E402
from pipeline.solvers import (  # noqa: E402
    cd_cuda,
    cuda_products,
    nonneg_lasso,
    prepare,
)
from pipeline.solvers.problem import kkt_violation  # noqa: E402
from student.batches import to_device  # noqa: E402

CHECKS, TAKEN_AWAY = {}, {}


def check(function):
    CHECKS[function.__name__] = function
    return function


def without(function, **changes):
    """Something that a function cannot do without, and the change that takes it away."""
    for name, change in changes.items():
        TAKEN_AWAY[name] = (function, change)


def numbers(*shape, seed=0):
    return torch.as_tensor(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


# -- checks ------------------------------------------------------------------------------------------------------


@check
def lanes_hand_tensors_over():
    """One lane makes tensors and lets them go while another still has to read them."""
    first, second = open_stream(DEVICE), open_stream(DEVICE)
    results, inputs = [], [numbers(3, 4, seed=seed) for seed in range(3)]
    for value in inputs:
        with first:
            assert not torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction  # whatever other lanes do
            made = value.to(DEVICE) * 2 + 1
            mark = first.mark()
        with second:
            second.after(mark, made)
            results.append(made.sum(1))
            del made
            gc.collect()
    with second:
        for value, result in zip(inputs, results, strict=True):
            torch.testing.assert_close(result.cpu(), (value * 2 + 1).sum(1))


@check
def the_solver_in_a_lane():
    """Coded in one lane from rows of another, as the coder does; the dictionary was prepared before all lanes."""
    hidden, atoms = (torch.nn.functional.normalize(numbers(rows, 12, seed=rows), dim=1) for rows in (3, 40))
    atoms_there = atoms.to(DEVICE)
    prepared = prepare(atoms_there)
    torch.cuda.synchronize(DEVICE)
    teacher, solver = open_stream(DEVICE), open_stream(DEVICE)
    with teacher:
        rows = hidden.to(DEVICE) * 1.0
        mark = teacher.mark()
    with solver:
        solver.after(mark, rows)
        with patch.object(cuda_products, "prepare", None), patch.object(cd_cuda, "prepare", None):  # but once, above
            codes = nonneg_lasso(rows, atoms_there, 0.05, gram_KK=prepared, backend="cuda")
        del rows
        gc.collect()
        codes = codes.to_host()
    true = kkt_violation(hidden, atoms, codes, 0.05)
    assert len(true) == 3 and (true <= codes.kkt + 1e-6).all() and codes.kkt.max() <= 1e-3


Micro = namedtuple("Micro", "ids weights name")


@check
def batches_travel():
    """The trainer's copies from pinned memory, of batches that the host lets go at once."""
    sums = []
    for seed in range(3):
        values = numbers(4, 4, seed=seed)
        micro = to_device(Micro(values.pin_memory(), (values * 2).pin_memory(), "a"), DEVICE)
        sums.append((micro.ids + micro.weights).sum())
        del micro
    expected = [float((numbers(4, 4, seed=seed) * 3).sum()) for seed in range(3)]
    np.testing.assert_allclose([float(value) for value in sums], expected, rtol=1e-5)


def reading_what_is_still_copied():
    result = (numbers(3).to(DEVICE) * 2).to("cpu", non_blocking=True)
    torch.testing.assert_close(result, numbers(3) * 2)


def changing_what_is_still_copied():
    source = numbers(3).pin_memory()
    copy = source.to(DEVICE, non_blocking=True)
    source.zero_()
    torch.testing.assert_close(copy.cpu(), numbers(3))


NOTHING = lambda *_: None  # noqa: E731
without(
    lanes_hand_tensors_over,
    waiting_for_a_lane=lambda: patch.object(Stream, "wait_event", NOTHING),
    recording_a_stream=lambda: patch.object(OnDevice, "record_stream", NOTHING),
)
without(
    the_solver_in_a_lane,
    waiting_for_rows=lambda: patch.object(Stream, "wait_event", NOTHING),
    launching_on_the_current_stream=lambda: patch.object(fake_device, "stream_of_launch", lambda: Stream.all[0]),
)
without(reading_what_is_still_copied, synchronising=nullcontext)
without(changing_what_is_still_copied, keeping_pinned_memory=nullcontext)


# -- all of them -------------------------------------------------------------------------------------------------


def failure(function, change=nullcontext):
    """What goes wrong under one of the two courses of events, or None."""
    for hurry in (False, True):
        with fake_device.fake_device(hurry), change():
            try:
                function()
            except Exception:
                return traceback.format_exc()
    return None


def main():
    lockstep.shrink_kernels()
    results = {name: failure(function) for name, function in CHECKS.items()}
    taken = {name: failure(*pair) for name, pair in TAKEN_AWAY.items()}
    print(json.dumps({"checks": results, "taken away": taken}))


if __name__ == "__main__":
    main()
