"""Workers that really die: in the middle of a unit, between commit and answer, at a text that kills each of them.

The workers are two processes of a cluster that all tests share; its nannies start a new one for each that dies.
"""

import gc
import os
import re
import shutil
import signal
import subprocess
import time
import weakref
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Thread, current_thread
from types import SimpleNamespace

import psutil
import pytest
from distributed import Client
from faulty_disk import forked, recorded, watched
from hypothesis import given
from hypothesis import strategies as st
from planted_workers import AfterCommit, AtWindows, Slow
from preloaded import Preloaded
from test_commit import temporaries, visible_units_are_whole, write
from test_interruption import CODES, SECONDS_TO_EXIT, start
from test_quarantine import plant, rows_of, shards
from tiny_teacher import lsp_settings

from mlsm.common.errors import EncodeError
from mlsm.common.progress import silent
from pipeline.commands import encode_lsp
from pipeline.dask_workers import Work, event_loop, local_cluster, quiet
from pipeline.failures import REASON, find_killers
from pipeline.stores import QUARANTINE_LEAST, QUARANTINE_SHARE
from shards.reader import Store

pytestmark = pytest.mark.promise("9 a worker killed, Dask's among them")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def client(forked_workers):
    """A client of two workers."""
    with (
        pytest.MonkeyPatch.context() as patch,
        quiet(),
        event_loop() as loop,
    ):
        patch.setenv("OMP_NUM_THREADS", "1")
        with (
            local_cluster(2, "cpu", loop) as cluster,
            Client(cluster.scheduler_address, loop=loop, set_as_default=False) as client,
        ):
            yield client


@pytest.fixture(scope="module")
def alone(tmp_path_factory, english_text, teacher_directory):
    """Settings of a single process."""
    directory = tmp_path_factory.mktemp("workers")
    return lsp_settings(
        directory,
        teacher_directory,
        english_text,
        directory / "one",
        max_tokens=20_000,
        unit_tokens=3_000,
        batch_tokens=1024,
    )


@pytest.fixture(scope="module")
def place(alone, client):
    """The same with the cluster's workers."""
    return replace(alone, scheduler=client.scheduler.address)


@pytest.fixture(scope="module")
def one(alone):
    """The store of a single process."""
    return Store.open(encode_lsp(alone)[0]["store"])


@contextmanager
def planted(client, fault):
    client.register_plugin(fault, name="fault")
    try:
        yield
    finally:
        client.unregister_worker_plugin("fault")


def is_whole(report, one):
    """The store is the single process's, with one shard and one record a unit and nothing else."""
    store = Store.open(report["store"])
    assert shards(store.path) == shards(one.path)
    assert visible_units_are_whole(store.path) == len(store.plan.units) == len(list(store.files.units.iterdir())) // 2


@pytest.mark.promise(
    "a worker killed in the middle of a unit, or between its commit and its answer: another takes it up, one "
    "shard and one record each, the bytes of one process",
    cases="2 real kills",
)
def test_killed_in_the_middle(client, place, one, tmp_path):
    killed = []

    def kill_one(stage, done, *_, **figures):
        if stage == "encode" and done and not killed:
            killed.append(next(iter(client.run(os.getpid).values())))
            time.sleep(0.05)
            os.kill(killed[0], signal.SIGKILL)

    with planted(client, Slow()):
        report = encode_lsp(replace(place, output=tmp_path), kill_one)[0]
    assert killed and report["quarantined"] == 0 and report["new_tokens"] == report["tokens"]
    for path in temporaries(tmp_path):  # SIGKILL leaves its own
        path.unlink()
    is_whole(report, one)


@pytest.mark.promise("a worker killed in …")
def test_killed_between_commit_and_answer(client, place, one, tmp_path):
    with planted(client, AfterCommit(tmp_path / "mark")):
        report = encode_lsp(replace(place, output=tmp_path / "runs"))[0]
    unit = (tmp_path / "mark").read_text()
    assert unit in {planned.id for planned in one.plan.units} and report["new_tokens"] == report["tokens"]
    is_whole(report, one)


@pytest.mark.promise(
    "a text that kills every worker that codes it: found by ranges, quarantined, the rest as if it had raised; "
    "`--retry-quarantine`",
    cases="5 real deaths; 100 sets",
)
def test_a_text_that_kills_workers(client, place, one, tmp_path):
    """Its window is found; the rest is as if it had raised; once it is harmless, the bytes are a clean run's."""
    windows = [rows_of(one)[40][0]]
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, windows, "teacher")
        expected = encode_lsp(replace(place, output=tmp_path / "raises", scheduler=None))[0]
    with planted(client, AtWindows(windows, kills=True)):
        report = encode_lsp(replace(place, output=tmp_path / "kills"))[0]
    assert shards(report["store"]) == shards(expected["store"]) != shards(one.path)
    found, raised = (
        [record.quarantined for record in Store.open(each["store"]).records()] for each in (report, expected)
    )
    assert report["quarantined"] == expected["quarantined"] >= 1
    assert [[{**entry, "reason": REASON} for entry in entries] for entries in raised] == [list(e) for e in found]
    tried = encode_lsp(replace(place, output=tmp_path / "kills", retry_quarantine=True))[0]
    assert (tried["new_units"], tried["quarantined"]) == (1, 0)
    assert shards(tried["store"]) == shards(one.path)


@pytest.mark.promise("SIGTERM, SIGHUP and Ctrl-C with …")
def test_too_many_documents_whoever_meets_them(client, place, one, tmp_path):
    rows = [row[0] for row in rows_of(one)[::20]]
    with planted(client, AtWindows(rows, kills=False)), pytest.raises(EncodeError, match="could not be coded") as said:
        encode_lsp(replace(place, output=tmp_path))
    share = 4 * place.max_tokens / one.plan.corpus["bytes"]  # of the documents that were scanned
    allowed = max(QUARANTINE_LEAST, int(QUARANTINE_SHARE * share * one.plan.corpus["documents"]))
    assert f"more than the {allowed} that" in str(said.value) and "chokes on this" in str(said.value)
    deadline = time.monotonic() + 30
    while temporaries(tmp_path):  # a worker of a cluster, which stays, hears that it is no longer needed
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.promise("a text that kills …")
@given(st.sets(st.integers(0, 999), max_size=5), st.integers(0, 1000))
def test_killers_are_found_wherever_they_are(killers, count):
    def survives(first, stop, trials):
        return not killers & set(range(first, stop))

    assert find_killers(survives, count, silent) == sorted(k for k in killers if k < count)


def test_the_search_ends_when_it_is_no_texts_fault():
    deaths = []
    with pytest.raises(EncodeError, match="workers crash before they encode any text. Do they have too little memory"):
        find_killers(lambda *tried: deaths.append(tried), 8192, silent)
    assert deaths == [(0, 0, 2)]
    with pytest.raises(EncodeError, match="more than 32 windows, so the windows are probably not the cause"):
        find_killers(lambda *tried: deaths.append(tried) or tried[0] == tried[1], 8192, silent)
    assert len(deaths) < 100


def test_two_commands_from_two_directories_on_one_cluster(client, place, one, tmp_path):
    """Relative paths are those of each command's directory, though the same worker processes serve both."""
    flags = [
        *("encode-lsp", "--teacher", place.teacher, "--layer", 2, "--corpus", "text.txt", "--device", "cpu"),
        *("--dictionary", place.dictionary, "--lam", "0.1", "--top-n", 8, "--max-length", 32, "--batch-tokens", 1024),
        *("--max-tokens", 20_000, "--unit-tokens", 3_000, "--scheduler", client.scheduler.address),
    ]
    commands = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        shutil.copy(place.corpus[0], tmp_path / name / "text.txt")
        command = [ROOT / "cli.py", *flags]
        commands.append(Preloaded(command, cwd=tmp_path / name, stderr=subprocess.PIPE, text=True))
    for name, command in zip(("here", "there"), commands, strict=True):
        _, said = command.communicate(timeout=120)
        assert command.returncode == 0, said
        (store,) = (tmp_path / name).glob("runs/stores/lsp-*")
        assert shards(store) == shards(one.path)


@pytest.mark.promise(
    "SIGTERM, SIGHUP and Ctrl-C with two workers: as with one process, workers gone as well; errors, warnings "
    "and limits of workers are the driver's",
    cases="3, 1, 6",
)
@pytest.mark.promise("39 SIGHUP; a display …")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_the_driver_is_stopped(alone, tmp_path, number):
    """Out within seconds, workers as well; finished units stay, nothing else. Ctrl-C reaches all processes at once.

    It is tried with workers that start as a user's do, the others with forked ones, which block the same signals.
    """
    flags = [
        *("encode-lsp", "--teacher", alone.teacher, "--layer", 2, "--corpus", *alone.corpus, "--workers", 2),
        *("--dictionary", alone.dictionary, "--lam", 0.1, "--top-n", 8, "--max-length", 32, "--unit-tokens", 3_000),
        *("--batch-tokens", 1024, "--device", "cpu", "--output", tmp_path),
    ]
    forked = {} if number == signal.SIGINT else {"MLSM_TEST_FORKED_WORKERS": "1"}
    process = start(flags, start_new_session=True, **forked)
    units = lambda: {path.name for path in tmp_path.glob("stores/*/units/*.json")}  # noqa: E731
    while len(units()) < 3:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.005)
    workers = [worker.pid for worker in psutil.Process(process.pid).children(recursive=True)]
    os.kill(process.pid, number) if number == signal.SIGTERM else os.killpg(process.pid, number)
    began = time.monotonic()
    _, said = process.communicate(timeout=60)
    assert process.returncode == CODES[number], said
    limit = SECONDS_TO_EXIT * max(1, os.getloadavg()[0] / os.cpu_count())  # others may take most of the machine
    assert time.monotonic() - began < limit
    assert len(workers) >= 2
    while any(is_running(worker) for worker in workers):
        assert time.monotonic() - began < 2 * limit
        time.sleep(0.05)
    assert not temporaries(tmp_path)
    assert visible_units_are_whole(next(tmp_path.glob("stores/*"))) == len(units())
    lines = said.splitlines()
    assert lines[0] == "encode-lsp" and lines[-1].startswith("mlsm: error: interrupted")
    name = signal.Signals(number).name
    known = (
        "scan",
        "load teacher",
        "encode-lsp:",
        "  ",
        "workers at tcp://",
        "encode: ",
        f"{name}: the command stops; ",
    )
    assert all(line.startswith(known) for line in lines[1:-1]) and f"\n{name}: " in said, said
    assert re.search(r"^workers at tcp://\S+, dashboard http://\S+/status$", said, re.MULTILINE)


@pytest.mark.promise("SIGTERM, SIGHUP and Ctrl-C with …")
@pytest.mark.parametrize("during", [False, True])
def test_a_worker_that_is_dismissed_at_any_call_leaves_nothing_to_a_kill_at_any_later_one(tmp_path, during):
    """The thread of its event loop dismisses it before the call of the one that writes, or while a file is made."""
    calls = recorded(lambda: write(tmp_path / "whole"))
    for chosen, (name, _) in enumerate(calls):
        if not during or name == "create":
            assert forked(lambda chosen=chosen: dismissed(tmp_path / str(chosen), chosen, during)) == 0, calls[chosen]


def dismissed(path, chosen, during):
    work, left, opens = Work(SimpleNamespace(config=SimpleNamespace(scheduler=None)), "topic"), [], os.open
    work.setup(None)
    dismissing = Thread(target=work.teardown, args=(None,))

    def dismiss(seconds=None):
        dismissing.start()
        dismissing.join(seconds)

    def slow_open(place, flags, *mode, **directory):
        if flags & os.O_EXCL and not dismissing.ident:
            dismiss(0.1)
        return opens(place, flags, *mode, **directory)

    def before(number, *_):
        if number == chosen and during:
            os.open = slow_open
        elif number == chosen:
            dismiss()
        elif number > chosen and current_thread() is not dismissing:
            dismissing.join()
            left.extend(temporaries(path))

    with watched(before), suppress(OSError):
        write(path)
    assert dismissing.ident and not left and not temporaries(path)


def is_running(process):
    """Whether a process is there and not only its number, which nobody has asked for."""
    try:
        return bool(Path(f"/proc/{process}/cmdline").read_bytes())
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_the_workers_of_a_scheduler_drop_the_teacher_when_the_command_ends():
    """Python's collector may come hours later, and the next command's teacher needs the memory."""
    work = Work(SimpleNamespace(config=SimpleNamespace(scheduler="tcp://somewhere")), "topic")
    gc.disable()
    try:
        work.setup(SimpleNamespace(log_event=lambda topic, report: None))
        context = weakref.ref(work._context)
        work.teardown(None)
        del work
        assert context() is None
    finally:
        gc.enable()
