"""A GPU's memory is too small for a batch (faults.md, row 11): halves are coded, the result is the same in tolerance.

Played on the CPU: the teacher, or the solver, refuses batches that are too large, as torch and the driver do.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from stored import shards
from test_quarantine import clean, place, plant, rows_of  # noqa: F401  (fixtures)

from pipeline.commands import encode_lsp
from pipeline.encode import LAYOUTS
from pipeline.targets import lsp
from pipeline.teacher import Teacher
from shards.reader import Store

pytestmark = [
    pytest.mark.promise(
        "a GPU without memory for a batch: halves, the same result within tolerance, counted in the record (played "
        "on the CPU)",
        cases="2 × 2 layouts",
    ),
    pytest.mark.promise("11 a GPU's memory is full"),
]

MOST = 20  # windows of 32 tokens


def teacher_refuses(patch):
    works = Teacher.__call__

    def teaches(teacher, ids_WL, *rest, **options):
        if len(ids_WL) > MOST:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return works(teacher, ids_WL, *rest, **options)

    patch.setattr(Teacher, "__call__", teaches)


def solver_refuses(patch):
    solves = lsp.nonneg_lasso

    def solver(hidden_Nd, *arguments, **options):
        if len(hidden_Nd) > MOST * 32:
            raise RuntimeError("[CUresult.CUDA_ERROR_OUT_OF_MEMORY] Call to cuMemAlloc results in an error")
        return solves(hidden_Nd, *arguments, **options)

    patch.setattr(lsp, "nonneg_lasso", solver)


@pytest.mark.parametrize("layout", ["alone", "cuda"])
@pytest.mark.parametrize("refuses", [teacher_refuses, solver_refuses])
def test_halves_are_coded_and_counted(place, clean, tmp_path, monkeypatch, caplog, refuses, layout):  # noqa: F811
    monkeypatch.setitem(LAYOUTS, "cpu", dict.fromkeys(LAYOUTS["cpu"], 0) if layout == "alone" else LAYOUTS["cuda"])
    refuses(monkeypatch)
    report = encode_lsp(replace(place, output=tmp_path))[0]
    store = Store.open(report["store"])
    assert report["quarantined"] == 0 and report["tokens"] == clean.report()["tokens"]
    for split in ("train", "held_out"):
        for row, expected in zip(rows_of(store, split), rows_of(clean, split), strict=True):
            assert np.array_equal(row[0], expected[0]) and np.abs(row[1] - expected[1]).max() <= 2
    counted = [record.statistics.get("out_of_memory", 0) for record in store.records()]
    assert 1 <= sum(counted) <= 12 and counted[-1] == 0, "the batches to come are smaller from the start"
    assert "continuing with 16" in caplog.text
    assert report["fidelity"]["kl"] == pytest.approx(clean.report()["fidelity"]["kl"], rel=0.05)


def test_the_copies_that_fill_up_a_short_batch_count(place, clean, tmp_path, monkeypatch):  # noqa: F811
    """One window of text in a batch of 64: there is nothing to divide in it but its copies."""
    given = replace(place, max_tokens=32, output=tmp_path)
    teacher_refuses(monkeypatch)
    report = encode_lsp(given)[0]
    assert report["windows"] <= 2 and report["quarantined"] == 0 and report["coded_tokens"] >= 20


def test_a_failing_window_is_still_found_in_a_half(place, clean, tmp_path, monkeypatch):  # noqa: F811
    plant(monkeypatch, [rows_of(clean)[5][0]], "nan")
    teacher_refuses(monkeypatch)
    report = encode_lsp(replace(place, output=tmp_path))[0]
    assert report["quarantined"] >= 1
    lost = [number for number, row in enumerate(rows_of(Store.open(report["store"]))) if not row[1].any()]
    assert lost == [5] and shards(report["store"]).keys() != shards(clean.path).keys()
