"""Overlapping stages: the same bytes and the same errors as one after the other, and nothing left behind.

`GPU_LAYOUT` puts every stage in a thread of its own, as on a GPU, here on the CPU. Streams and events are
stood in for by lanes that check who waits for whom; that they work on a GPU is not tested here.
"""

import _thread
import os
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from stored import shards
from tiny_teacher import lsp_settings

from mlsm.common.errors import CorpusError, EncodeError, ShardError, TeacherError
from pipeline import commands as encoding
from pipeline import encode as coding
from pipeline.batch import centred_rows, hidden_rows, make_batch
from pipeline.commands import encode_lsp
from pipeline.corpus import Window
from pipeline.dictionary import Dictionary
from pipeline.encode import LAYOUTS, Coder
from pipeline.job import Job, teacher_job
from pipeline.overlap import HostStream
from pipeline.solvers import Codes
from pipeline.stores import TargetStore
from pipeline.targets import lsp
from pipeline.targets.distributions import distributions
from pipeline.teacher import Teacher, load_tokenizer, special_ids
from shards.reader import Store
from shards.writer import UnitWriter

ALONE = dict.fromkeys(LAYOUTS["cpu"], 0)
GPU_LAYOUT = LAYOUTS["cuda"]
WINDOWS = 32  # in a batch
TIGHT = dict.fromkeys(LAYOUTS["cpu"], 1)


@pytest.fixture(scope="module")
def place(tmp_path_factory, english_text, teacher_directory):
    """Settings with a random dictionary: seven units or so, of four batches."""
    directory = tmp_path_factory.mktemp("overlap")
    return lsp_settings(
        directory,
        teacher_directory,
        english_text,
        directory / "alone",
        max_tokens=30_000,
        unit_tokens=4_000,
        batch_tokens=32 * WINDOWS,
    )


@pytest.fixture(scope="module")
def alone(place):
    """The store that is made one stage after the other, in one thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(LAYOUTS, "cpu", ALONE)
        return Store.open(encode_lsp(place)[0]["store"])


@pytest.fixture(params=["alone", "cpu", "gpu", "tight"])
def layout(request, monkeypatch):
    chosen = {"alone": ALONE, "cpu": LAYOUTS["cpu"], "gpu": GPU_LAYOUT, "tight": TIGHT}[request.param]
    monkeypatch.setitem(LAYOUTS, "cpu", chosen)
    return chosen


@pytest.fixture(autouse=True)
def nothing_left_running():
    def stages():
        return [thread for thread in threading.enumerate() if thread.name.startswith("stage ")]

    yield
    assert not stages()


def test_the_same_bytes_and_figures_whatever_overlaps(place, alone, layout, tmp_path):
    report = encode_lsp(replace(place, output=tmp_path))[0]
    assert shards(report["store"]) == shards(alone.path) and len(shards(alone.path)) >= 5
    store = Store.open(report["store"])
    assert [r.statistics for r in store.records()] == [r.statistics for r in alone.records()]
    assert all(r.statistics["max_kkt"] > 0 and r.environment["teacher_seconds"] > 0 for r in store.records())
    assert report["solver_seconds"] > 0


def test_several_blocks_and_a_unit_without_windows(place, tmp_path, monkeypatch):
    """Blocks of four windows: the last of a unit is short, and one unit has none at all."""
    monkeypatch.setattr(coding, "windows_per_block", lambda max_length: 100)
    windows = Job.windows
    bytes_of = {}
    for name, layout in {"alone": ALONE, "gpu": GPU_LAYOUT, "cpu": LAYOUTS["cpu"]}.items():
        monkeypatch.setitem(LAYOUTS, "cpu", layout)
        third = []

        def with_a_gap(job, unit, third=third):
            third.append(unit.id)
            return iter(()) if len(third) == 3 else windows(job, unit)

        monkeypatch.setattr(Job, "windows", with_a_gap)
        report = encode_lsp(replace(place, output=tmp_path / name))[0]
        bytes_of[name] = shards(report["store"])
        assert sorted(r.windows for r in Store.open(report["store"]).records())[0] == 0
    assert bytes_of["alone"] == bytes_of["gpu"] == bytes_of["cpu"]


# ---- failures


def fail_in(patch, stage, error, at):
    """Let a stage raise `error` at its call number `at`; returns a list that will hold the time of it.

    Teacher and solver fail from then on: what fails once only is tried again (test_quarantine.py)
    """
    calls, times = [], []
    place, name = {
        "read": (Window, "_replace"),
        "teach": (Teacher, "__call__"),
        "solve": (lsp, "nonneg_lasso"),
        "finish": (lsp, "distributions"),
        "write": (UnitWriter, "write_block"),
        "commit": (UnitWriter, "_commit"),
    }[stage]
    works = getattr(place, name)

    def fails(*args, **kwargs):
        calls.append(1)
        if len(calls) == at or (stage in ("teach", "solve") and len(calls) > at):
            times.append(time.monotonic())
            raise error
        return works(*args, **kwargs)

    patch.setattr(place, name, fails)
    return times


def in_the_third_unit(plan, store, stage):
    """The number of a stage's call in the middle of the third unit."""
    windows = [store.files.record(unit.id).windows for unit in plan.units[:3]]
    if stage == "read":
        return sum(windows[:2]) + windows[2] // 2
    return sum(-(-n // WINDOWS) for n in windows[:2]) + 2 if stage in ("teach", "solve", "finish") else 3


@pytest.mark.promise("25 the writer's thread raises")
@pytest.mark.parametrize(
    ("stage", "error"),
    [
        ("read", CorpusError("not UTF-8 at byte 3")),
        ("teach", TeacherError("a teacher")),
        ("solve", ValueError("a solver")),
        ("finish", MemoryError("no room for the codes")),
        ("write", OSError(28, "No space left on device")),
        ("commit", ShardError("a shard")),
    ],
)
def test_an_error_of_any_stage_is_the_callers(place, alone, layout, tmp_path, monkeypatch, stage, error):
    given = replace(place, output=tmp_path)
    with monkeypatch.context() as patch:
        job = teacher_job(given, lambda *_, **__: None)  # the scan reads windows, too: before it fails
        times = fail_in(patch, stage, error, in_the_third_unit(job.plan, alone, stage))
        patch.setattr(encoding, "open_job", lambda *_: job)
        with pytest.raises(type(error)) as caught:
            encode_lsp(given)
        assert caught.value is error and time.monotonic() - times[0] < 60
    names = [frame.name for frame in caught.traceback]
    assert names[-1] == "fails" and "write_units" in names
    directory = next(tmp_path.glob("stores/*/units"))
    kept = shards(directory.parent)
    assert len(kept) == len(list(directory.iterdir())) / 2 == 2, "two finished units with their records, no temporary"
    assert kept.items() <= shards(alone.path).items()
    assert shards(encode_lsp(given)[0]["store"]) == shards(alone.path)


def test_hidden_states_that_are_not_finite(place, layout, tmp_path, monkeypatch):
    works = Teacher.__call__

    def overflows(teacher, *args):
        hidden = works(teacher, *args).clone()
        hidden[3, 0] = np.inf
        return hidden

    monkeypatch.setattr(Teacher, "__call__", overflows)
    with pytest.raises(EncodeError, match="layer 2: 1 hidden states are not finite. Try --dtype float32"):
        encode_lsp(replace(place, output=tmp_path))
    assert not list(tmp_path.glob("stores/*/units/*"))


def test_ctrl_c_while_the_caller_waits(place, alone, layout, tmp_path, monkeypatch):
    works, calls, begun = Teacher.__call__, [], []

    def interrupts(*args):
        calls.append(1)
        if len(calls) == 13:
            begun.append(time.monotonic())
            _thread.interrupt_main()
            time.sleep(0.2)
        return works(*args)

    monkeypatch.setattr(Teacher, "__call__", interrupts)
    with pytest.raises(KeyboardInterrupt):
        encode_lsp(replace(place, output=tmp_path))
    assert time.monotonic() - begun[0] < 60
    directory = next(tmp_path.glob("stores/*/units"))
    kept = shards(directory.parent)
    assert len(kept) <= 2 and not list(directory.glob(".*")) and kept.items() <= shards(alone.path).items()


@pytest.mark.promise("7 full disk, file …")
def test_a_full_disk_at_the_last_moment(place, layout, tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    job = teacher_job(replace(place, output=tmp_path), lambda *_, **__: None)
    teacher = Teacher.load(place.teacher, 2)
    target = lsp.Lsp(place, teacher, 2, Dictionary.load(place.dictionary))
    coder = Coder(teacher, [target], place, job.special_ids)
    store = TargetStore(job, target, {})
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        list(
            coding.write_units(
                [(unit, [0]) for unit in job.plan.units],
                job.windows,
                coder,
                place.max_length,
                lambda unit, output: store.writer(unit, {}),
            )
        )
    assert not list(store.files.units.iterdir())


# ---- what waits for what


def test_every_stage_waits_for_the_one_before(place, alone, tmp_path, monkeypatch):
    """The solver's lane waits for the teacher's last mark, that of the distributions for the solver's, and each is told
    of all the arrays that it takes over. Distributions are made of tensors, as on a GPU, and the shards are the same.
    """
    lanes = []

    class Watched(HostStream):
        def __init__(self):
            self.ends, self.waits, self.inside = [], [], False
            lanes.append(self)

        def __enter__(self):
            self.inside = True
            return self

        def __exit__(self, *_):
            self.inside = False

        def mark(self):
            assert self.inside
            self.ends.append(super().mark())
            return self.ends[-1]

        def after(self, mark, *arrays):
            assert self.inside
            self.waits.append((mark, len(arrays)))

    fetched = []
    monkeypatch.setattr(coding, "open_stream", lambda device: Watched())

    def of_tensors(codes, top_n):
        fetched.append(lanes[-1].inside)
        members = (codes.indptr, codes.indices, codes.values, codes.kkt)
        rows = distributions(Codes(*map(torch.from_numpy, members)), top_n)
        assert len(rows.lsp_codes) == len(rows.weights)
        return rows

    monkeypatch.setattr(lsp, "distributions", of_tensors)
    monkeypatch.setattr(coding, "make_batch", lambda *args: make_batch(*args[:5], False, *args[6:]))  # no pinning here
    monkeypatch.setitem(LAYOUTS, "cpu", GPU_LAYOUT)
    works = Coder.__init__

    def as_on_a_gpu(coder, *args):
        works(coder, *args)
        coder._on_gpu = True

    monkeypatch.setattr(Coder, "__init__", as_on_a_gpu)
    report = encode_lsp(replace(place, output=tmp_path))[0]
    assert shards(report["store"]) == shards(alone.path)
    teach, solve, finish = lanes
    assert all(fetched) and len(fetched) == len(finish.waits) > 20
    assert not teach.waits
    assert solve.waits == [(mark, 2) for mark in teach.ends[1::2]]
    assert finish.waits == [(mark, 4) for mark in solve.ends[1::2]]


def test_device_memory_is_bounded_by_the_layout(place, tmp_path, monkeypatch):
    """Batches that hold hidden states: as many as the layout says, ready or in the making, and the solver's."""
    held, most = set(), []
    teach, solve = Coder._teach, Coder._code

    def watched_teach(coder, batches):
        held.update(map(id, batches))
        most.append(len(held))
        teach(coder, batches)

    def watched_solve(coder, batch):
        time.sleep(0.005)
        solve(coder, batch)
        held.remove(id(batch))
        assert batch.hidden is None
        return batch

    monkeypatch.setattr(Coder, "_teach", watched_teach)
    monkeypatch.setattr(Coder, "_code", watched_solve)
    monkeypatch.setitem(LAYOUTS, "cpu", GPU_LAYOUT)
    encode_lsp(replace(place, output=tmp_path))
    assert max(most) <= GPU_LAYOUT["teach"] + 1


# ---- hidden states


@pytest.fixture(scope="module")
def reading(place):
    teacher, tokenizer = Teacher.load(place.teacher, 2), load_tokenizer(place.teacher)
    special = special_ids(tokenizer)
    rng = np.random.default_rng(1)
    ids = [[special["cls"], *map(int, rng.integers(5, 600, n)), special["sep"]] for n in (30, 29, 3, 30, 12)]
    ids[1][4] = special["sep"]
    return teacher, [Window(row, [0], [0]) for row in ids], special


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hidden_rows_are_the_teachers_at_unit_length(place, reading, dtype):
    _, windows, special = reading
    teacher = Teacher.load(place.teacher, 2, dtype=dtype)
    (hidden,) = hidden_rows(teacher, windows, 8, 32, special, (2,))
    ids = np.concatenate([window.ids for window in windows])
    coded = ~np.isin(ids, special["all"])
    assert hidden.dtype == np.float32 and hidden.flags.writeable and len(hidden) == coded.sum() == 103
    batch = make_batch(ids, np.array([len(w.ids) for w in windows]), 8, 32, special)
    assert batch.real_WL is not None and batch.ids_WL[7].equal(batch.ids_WL[0])
    whole = teacher(batch.ids_WL, batch.real_WL).numpy().astype(np.float64)
    rows = np.concatenate([whole[w, : len(window.ids)] for w, window in enumerate(windows)])[coded]
    np.testing.assert_allclose(hidden, rows / np.linalg.norm(rows, axis=1, keepdims=True), rtol=0, atol=3e-7)


def test_full_windows_need_no_mask(reading):
    teacher, windows, special = reading
    full = [windows[0], windows[3]]
    ids = np.concatenate([window.ids for window in full])
    batch = make_batch(ids, np.array([32, 32]), 4, 32, special)
    assert batch.real_WL is None and centred_rows(teacher, batch, [(2, None)])[0].rows_Nd.shape == (60, 32)


def test_a_hidden_state_of_zeros_stays_zero(reading):
    teacher, windows, special = reading
    batch = make_batch(np.array(windows[0].ids), np.array([32]), 1, 32, special)

    def zeros(ids, mask, tokens, layers):
        return [torch.zeros(len(tokens), 32) for _ in layers]

    zeros.layer = 3
    hidden = centred_rows(zeros, batch, [(2, None)])[0]
    hidden.check(teacher)
    assert not hidden.rows_Nd.any()
