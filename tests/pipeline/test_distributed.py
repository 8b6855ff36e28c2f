"""What is made does not depend on who makes it: two worker processes, or one, or other threads, give the same files.

The workers belong to a cluster that all tests share. Workers that die are in tests/faults/test_workers.py.
"""

import logging
import os
import shutil
import subprocess
import sys
import textwrap
import warnings
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numba
import pytest
import torch
from distributed import Client, LocalCluster, process
from distributed.comm import CommClosedError
from minilm import minilm_dir
from preloaded import ROOT
from threadpoolctl import threadpool_limits
from tiny_teacher import random_dictionary

import pipeline.teacher.cut
from mlsm.common.errors import CorpusError, EncodeError, exit_code
from mlsm.common.progress import silent
from pipeline.commands import encode_ids, encode_lsp
from pipeline.config import EncodeConfig, EncodeIdsConfig, LearnConfig
from pipeline.dask_workers import THREADS, Work, WorkerPool, event_loop, gpu_of, local_cluster, quiet, visible_gpus
from pipeline.dictionary import Dictionary
from pipeline.job import check_same_teacher, load_teacher, teacher_job
from pipeline.learn import learn_dictionary
from shards.reader import Store

pytestmark = [
    pytest.mark.promise("SIGTERM, SIGHUP and Ctrl-C with …"),
    pytest.mark.promise("9 a worker killed …"),
]

CORES = len(os.sched_getaffinity(0))


@pytest.fixture(scope="module")
def client():
    """A client of two workers, on a machine that says it has two GPUs, 3 and 5."""
    with pytest.MonkeyPatch.context() as patch, quiet(), event_loop() as loop:
        patch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
        for name in THREADS:
            patch.delenv(name, raising=False)
        with (
            local_cluster(2, "auto", loop) as cluster,
            Client(cluster.scheduler_address, loop=loop, set_as_default=False) as client,
        ):
            yield client


@pytest.fixture(scope="module")
def alone(tmp_path_factory, english_text, teacher_directory):
    """Settings for this process alone."""
    return EncodeConfig(
        teacher=str(teacher_directory),
        layer=(1, 2),
        corpus=(str(english_text),),
        k=(48, 64),
        lam=0.1,
        top_n=8,
        max_length=32,
        max_tokens=25_000,
        unit_tokens=4_000,
        dictionary_tokens=5_000,
        dictionary_epochs=1,
        batch_tokens=512,
        device="cpu",
        output=tmp_path_factory.mktemp("distributed") / "one",
    )


@pytest.fixture(scope="module")
def reports(alone):
    return encode_lsp(alone)


@pytest.fixture(scope="module")
def spread(alone, client):
    """The same settings for the workers."""
    return replace(alone, scheduler=client.scheduler.address, output=alone.output.with_name("two"))


def test_workers_take_the_library_of_each_product_from_the_command(spread, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline.teacher.cut, "measure_libraries", lambda shapes, operations: {"all": "torch"})
    (report, *_) = encode_lsp(replace(spread, max_tokens=8_000, output=tmp_path))
    records = Store.open(report["store"]).records("train")
    assert records and all(record.environment["products"] == {"all": "torch"} for record in records)


def files(output):
    """Everything that does not say when, where or with how many threads it was made."""
    named = {path.relative_to(output): path for path in Path(output).rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in named.items() if path.suffix in (".tar", ".npy", ".safetensors")}


def test_dictionaries_and_stores_are_the_same(alone, reports, spread):
    stages = {}
    found = encode_lsp(spread, lambda stage, done, *_, **figures: stages.setdefault(stage, []).append(done))
    assert files(spread.output) == files(alone.output) and len(found) == 4
    assert not [path for path in spread.output.rglob("*") if path.name.startswith(".")]
    for one, two in zip(reports, found, strict=True):
        same = ("new_units", "new_tokens", "tokens", "documents", "nnz_per_token", "mass_kept", "plan", "layer")
        assert {name: one[name] for name in same} == {name: two[name] for name in same}
        assert Dictionary.load(one["dictionary"]).fingerprint == Dictionary.load(two["dictionary"]).fingerprint
    assert len(stages["choose"]) > 1 and stages["encode"] == sorted(stages["encode"])
    assert stages["encode"][-1] == found[0]["tokens"]
    assert len(stages["encode"]) > found[0]["units"] + 1  # workers report blocks


def test_a_finished_store_needs_no_workers(spread, reports):
    nobody = replace(spread, scheduler="tcp://127.0.0.1:9", output=Path(reports[0]["store"]).parents[1])
    assert all(report["finished_before"] for report in encode_lsp(nobody))


def test_learning_alone_and_ids(alone, spread, tmp_path):
    same = ("teacher", "corpus", "lam", "max_length", "max_tokens", "dictionary_tokens", "dictionary_epochs")
    given = {name: getattr(spread, name) for name in same}
    learning = LearnConfig(layer=2, k=48, batch_tokens=512, device="cpu", output=tmp_path / "one", **given)
    one = learn_dictionary(learning)[0]
    two = learn_dictionary(replace(learning, scheduler=spread.scheduler, output=tmp_path / "two"))[0]
    assert files(tmp_path / "one") == files(tmp_path / "two") and one["vectors"] == two["vectors"]
    same = {name: given[name] for name in ("corpus", "max_length", "max_tokens")}
    ids = EncodeIdsConfig(tokenizer=alone.teacher, unit_tokens=4_000, output=tmp_path / "a", **same)
    encode_ids(ids)
    encode_ids(replace(ids, scheduler=spread.scheduler, output=tmp_path / "b"))
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_special_tokens_in_a_text_are_text_for_workers_too(alone, spread, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(
        "\n\n".join(f"A [MASK] in text {number} [SEP] is no mask, [PAD] or [UNK]." for number in range(400))
    )
    ids = EncodeIdsConfig(tokenizer=alone.teacher, corpus=(str(text),), max_length=32, output=tmp_path / "a")
    (report,) = encode_ids(ids)
    encode_ids(replace(ids, scheduler=spread.scheduler, output=tmp_path / "b"))
    assert files(tmp_path / "a") == files(tmp_path / "b")
    store = Store.open(report["store"])
    found = set(store.split("train").read(range(8)).ids.ravel().tolist())
    assert store.special_ids["mask"] not in found and store.special_ids["cls"] in found


def test_relative_paths_are_the_drivers(alone, spread, reports, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_bytes(Path(alone.corpus[0]).read_bytes())
    dictionary = Path(reports[0]["dictionary"])
    given = replace(spread, layer=1, k=48, dictionary=dictionary, corpus=("text.txt",), output=Path("runs"))
    assert files(reports[0]["store"]) == files(encode_lsp(given)[0]["store"])


def test_a_source_that_changes_is_the_drivers_error(alone, spread, reports, tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(Path(alone.corpus[0]).read_bytes())
    given = replace(
        spread,
        corpus=(str(text),),
        layer=1,
        k=48,
        dictionary=Path(reports[0]["dictionary"]),
        unit_tokens=1_000,
        output=tmp_path / "runs",
    )

    def change(stage, *_, **figures):
        if stage == "encode":
            text.write_text("Something else.\n")

    with pytest.raises(CorpusError, match=f"^{text} (changed while it was read|: )"):
        encode_lsp(given, change)
    assert len(list(tmp_path.glob("runs/stores/*/units/*.json"))) < 20


def test_what_workers_log_warn_of_and_raise_is_the_drivers(spread, tmp_path, caplog):
    def chatty(context, items):
        for item in items:
            logging.getLogger("pipeline.encode").warning("a batch of %s", len(context.job.plan.units))
            warnings.warn("workers warn of this", stacklevel=1)
            yield f"{item} is well"

    job = teacher_job(spread, silent)
    with caplog.at_level("INFO"), WorkerPool(job) as pool, pytest.warns(UserWarning, match="workers warn of this"):
        assert list(pool.map(chatty, ["one"])) == [("one", "one is well")]
    assert f"a batch of {len(job.plan.units)}" in caplog.messages
    with pytest.raises(EncodeError, match="leaves every one of the first"):
        encode_lsp(replace(spread, lam=0.999, tolerance=0.9, output=tmp_path))


def test_workers_that_end_late_are_not_listed_on_the_terminal(monkeypatch, caplog):
    """When Python exits, after the command's summary, Dask would name each worker process that has not ended yet."""
    said = []
    monkeypatch.setattr(process.logger, "handle", said.append)
    with caplog.at_level(logging.INFO, logger="distributed"):  # as Dask sets it
        with quiet():
            pass
        process.logger.info("reaping stray process")
    assert not said


def test_the_next_command_without_an_error_gives_hidden_loggers_back(caplog):
    with caplog.at_level(logging.WARNING, logger="asyncio"):
        with pytest.raises(KeyboardInterrupt), quiet():
            raise KeyboardInterrupt
        assert logging.getLogger("asyncio").level == logging.CRITICAL
        with quiet():
            pass
        assert logging.getLogger("asyncio").level == logging.WARNING


def test_workers_write_with_the_umask_of_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    work = Work(SimpleNamespace(config=SimpleNamespace(scheduler="tcp://host", output=tmp_path)), "topic")
    usual = os.umask(0o077)
    try:
        work._go_to_directory()
        assert os.umask(usual) == usual
    finally:
        os.umask(usual)


def test_a_scheduler_that_has_lost_all_workers_is_waited_for_with_one_line(monkeypatch, caplog):
    monkeypatch.setattr("pipeline.dask_workers.SECONDS_BETWEEN_COUNTS", -1)
    pool, looks = object.__new__(WorkerPool), iter([False] * 4 + [True])
    pool._cluster, pool._reports = None, SimpleNamespace(empty=lambda: True)
    pool._client = SimpleNamespace(nthreads=dict)

    class Ended:
        def has_ready(self):
            return next(looks)

        def __next__(self):
            return "the future"

    assert pool._next(Ended(), None) == "the future"
    assert caplog.text.count("no worker is connected to the scheduler any more") == 1


def test_a_worker_with_another_teacher_refuses(alone, tmp_path):
    teacher = load_teacher(teacher_job(replace(alone, output=tmp_path), silent))
    check_same_teacher(teacher, teacher.fingerprint, "float32")
    with pytest.raises(EncodeError, match="computes in float32, not bfloat16"):
        check_same_teacher(teacher, teacher.fingerprint, "bfloat16")
    with pytest.raises(EncodeError, match="finds other files at"):
        check_same_teacher(teacher, "another", "float32")


def test_workers_share_cores_and_gpus(client):
    threads = str(max(1, CORES // 2))
    found = client.run(lambda: {name: os.environ.get(name) for name in (*THREADS, "CUDA_VISIBLE_DEVICES")})
    assert sorted(each.pop("CUDA_VISIBLE_DEVICES") for each in found.values()) == ["3", "5"]
    assert list(found.values()) == 2 * [dict.fromkeys(THREADS, threads)]


def test_gpus_are_given_in_turn(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, GPU-b")
    gpus = visible_gpus("auto")
    assert [gpu_of(number, gpus)["CUDA_VISIBLE_DEVICES"] for number in range(3)] == ["GPU-a", "GPU-b", "GPU-a"]
    assert visible_gpus("cpu") == [] and gpu_of(0, []) == {}


def test_bytes_do_not_depend_on_the_number_of_threads(english_text, tmp_path, monkeypatch):
    """Of a teacher wide enough that its work is divided among threads; on this CPU, with these libraries."""
    random_dictionary(768, 384).save(tmp_path / "dictionary")
    given = EncodeConfig(
        teacher=str(minilm_dir()),
        layer=2,
        corpus=(str(english_text),),
        max_tokens=6_000,
        dictionary=tmp_path / "dictionary",
        device="cpu",
    )
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            monkeypatch.setattr(numba.config, "NUMBA_NUM_THREADS", threads)
            with threadpool_limits(threads):
                encode_lsp(replace(given, output=tmp_path / str(threads)))
    finally:
        torch.set_num_threads(before)
    assert files(tmp_path / "1") == files(tmp_path / "2")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workers": 0}, "--workers must be at least 1, found 0"),
        ({"workers": 2, "scheduler": "tcp://a:1"}, "Pass only one of them"),
        ({"scheduler": "localhost"}, "is not an address"),
        ({"workers": 2, "device": "cuda:1"}, "every worker has its own"),
    ],
)
def test_settings_refuse_contradictions(change, message):
    with pytest.raises(ValueError, match=message):
        EncodeConfig(**change)


def test_a_scheduler_that_goes(spread, tmp_path, monkeypatch):
    def gone():
        raise CommClosedError("connection reset by peer")

    with WorkerPool(teacher_job(replace(spread, output=tmp_path), silent)) as pool:
        pool._start()
        monkeypatch.setattr(pool._client, "nthreads", gone)
        with pytest.raises(ConnectionError, match="the scheduler has stopped; finished units are kept"):
            list(pool.map(print, [()]))


def test_no_scheduler_there(spread, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.dask_workers.SECONDS_TO_ANSWER", 0.5)
    with pytest.raises(EncodeError, match="no scheduler answers there"):
        encode_lsp(replace(spread, scheduler="tcp://127.0.0.1:9", output=tmp_path))


def test_a_worker_that_dies_while_it_starts(alone, tmp_path, monkeypatch):
    def dies(**_):
        raise RuntimeError("Nanny failed to start.")  # SpecCluster's own

    monkeypatch.setattr("pipeline.dask_workers.SpecCluster", dies)
    with pytest.raises(ChildProcessError, match="the workers could not be started .*Nanny failed.*Use fewer") as caught:
        encode_lsp(replace(alone, workers=2, output=tmp_path))
    assert exit_code(caught.value) == 74


# -- workers that do not fit ---------------------------------------------------------------------------------


WORKER = """
    import asyncio, sys
    from distributed import Worker

    async def work():
        async with Worker(sys.argv[1], nthreads=1, dashboard=False) as worker:
            await worker.finished()

    sys.modules.update(dict.fromkeys(sys.argv[2:]))  # these cannot be imported: as if they were not installed
    asyncio.run(work())
"""


@contextmanager
def joined_by(scheduler, lacking, python_path, cwd, late):
    """A cluster that a worker of another environment has joined or, if `late`, joins after a second or two."""
    environment = {**os.environ, "PYTHONPATH": str(python_path)}
    command = [sys.executable, "-P", "-c", textwrap.dedent(WORKER), scheduler, *lacking]
    process = subprocess.Popen(command, env=environment, cwd=cwd, stderr=subprocess.DEVNULL)
    try:
        if not late:
            with Client(scheduler, set_as_default=False) as client:
                client.wait_for_workers(1, timeout=120)
        yield
    finally:
        process.kill()
        process.wait()


def copy_of_packages(place, change):
    """Our packages as a worker of another version has them."""
    for name in ("mlsm", "pipeline", "shards", "student"):
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__", "bundled_*", "pages"))
    shutil.copy(ROOT / "cli.py", place)
    with open(place / "pipeline" / "encode.py", "a") as file:
        file.write(change)
    return place


@pytest.fixture
def empty_scheduler():
    with quiet(), LocalCluster(n_workers=0, dashboard_address=":0", silence_logs=logging.CRITICAL) as cluster:
        yield cluster.scheduler_address


def no_tasks(*_):
    pytest.fail("a task was sent to a worker that does not fit")


NONE = ("mlsm", "pipeline", "shards")
DOES_NOT_HAVE = r"The worker tcp://\S+ on \S+ does not have mlsm\. Install .*mlsm.* there"


@pytest.mark.parametrize(
    ("lacking", "late", "message"),
    [
        (NONE, False, DOES_NOT_HAVE),
        (NONE, True, DOES_NOT_HAVE),
        ((), False, r"The worker tcp://\S+ on \S+ has another version of mlsm than this command\. Install"),
    ],
)
def test_a_worker_without_the_package_or_with_another_version_is_named_at_once(
    alone, empty_scheduler, lacking, late, message, tmp_path, monkeypatch
):
    (tmp_path / "site").mkdir()
    if not lacking:
        copy_of_packages(tmp_path / "site", "\n# changed\n")
    monkeypatch.setattr("pipeline.dask_workers.perform", no_tasks)
    given = replace(alone, scheduler=empty_scheduler, output=tmp_path / "runs")
    there = joined_by(empty_scheduler, lacking, tmp_path / "site", tmp_path, late)
    with there, pytest.raises(EncodeError, match=message):
        list(WorkerPool(teacher_job(given, silent)).__enter__().map(print, [()]))
    assert not list((tmp_path / "runs").rglob(".*.tmp"))


def test_a_worker_that_does_not_see_the_output_is_named_at_once(spread, tmp_path, monkeypatch):
    """As if on another machine: the file that the driver writes for the workers is written elsewhere."""
    away = tmp_path / "away"
    away.mkdir()
    monkeypatch.setattr("mlsm.common.disk.temporary_name", lambda directory, stem: away / stem)
    monkeypatch.setattr("pathlib.Path.write_text", lambda path, text: None)
    with pytest.raises(EncodeError, match=r"The worker tcp://\S+ on \S+ does not see .*runs.*by the same names"):
        list(WorkerPool(teacher_job(replace(spread, output=tmp_path / "runs"), silent)).__enter__().map(print, [()]))
