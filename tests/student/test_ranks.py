"""Several processes, by torchrun and `accelerate launch`, over gloo. The oracle is one process, or an unbroken run.

Where the launcher has no part in what is tested, the processes are started without one.
"""

import json
import os
import signal
import subprocess
import textwrap
import time
from pathlib import Path

import pytest
import torch
from preloaded import Preloaded, start_ranks
from safetensors.torch import load_file
from tiny_store import log_of

from mlsm.common.errors import Interrupted
from student.config import StudentConfig
from student.ranks import Ranks
from student.train import train

pytestmark = pytest.mark.promise("17 trainer killed …")

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {
    "encoder": "bert-2x32",
    "max_steps": 12,
    "batch_windows": 13,
    "micro_batch": 3,
    "lr": 1e-3,
    "seed": 1,
    "eval_windows": 8,
    "save_every": 3,
    "eval_every": 4,
    "device": "cpu",
}
ADAPTIVE = {"mask_weights": "adaptive", "mask_update_steps": 2, "max_steps": 7}
DROPOUT = {"dropout": 0.3, "batch_windows": 12, "max_steps": 4}  # so that processes share whole micro-batches
EXACT = ("loss", "grad_norm", "lr", "tokens", "batch", "held_out")


LAUNCH = """
    import runpy, sys
    sys.path.insert(1, "tests")
    import preloaded
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    preloaded.serve_from_here()
    subprocess_handler.Popen = lambda args, **options: preloaded.Preloaded(args[2:], **options)  # without python -u
    sys.argv.pop(0)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
TORCHRUN = ("torch.distributed.run", "--nproc-per-node", "2")
ACCELERATE = ("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1")


def launch(*command, launcher=TORCHRUN):
    """Start a launcher, which forks two processes with one thread each instead of starting Python anew."""
    settings = {"PYTHONPATH": str(ROOT), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "10", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return start(["-c", textwrap.dedent(LAUNCH), *launcher, *command], settings)


def start(command, settings):
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | settings
    return Preloaded(command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def write_jobs(directory, jobs):
    """The arguments of a process that trains them."""
    (directory / "jobs.json").write_text(json.dumps(jobs, default=str))
    return ROOT / "tests" / "student" / "several.py", directory / "jobs.json"


def outcomes_of(directory, jobs, said):
    """What came of each, by job and rank."""
    outcomes = [[directory / f"job-{number}-rank-{rank}.json" for rank in (0, 1)] for number in range(len(jobs))]
    assert outcomes[0][0].exists(), said
    return [[json.loads(file.read_text()) if file.exists() else None for file in files] for files in outcomes]


def job(store, output, changes=(), **happens):
    return {"settings": SETTINGS | {"store": store.path, "run_dir": output} | dict(changes)} | happens


def alone(store, output, changes=()):
    train(StudentConfig(**job(store, output, changes)["settings"]))
    return output


TWO = """
    import signal
    import torch
    from student.ranks import join

    with join(torch.device("cpu")) as ranks:
        me = ranks.rank
        flags = [ranks.any(torch.tensor(float(me == number))).item() for number in range(3)]
        numbers = ranks.sum([1.5, me]) + ranks.sum_exactly(torch.tensor([2**60 + me])).tolist()
        signals = [ranks.agree(signal.SIGTERM if me == number else None) for number in (0, 1, 2)]
        heard = [ranks.gather(me), ranks.tell(("from", me)), ranks.ask_first(lambda: me)]
    print(flags, numbers, [number and number.name for number in signals], heard)
"""


def test_what_two_processes_add_up_and_agree_on():
    for process in start_ranks(["-c", textwrap.dedent(TWO)]):
        said, _ = process.communicate(timeout=60)
        wanted = f"[1.0, 1.0, 0.0] [3.0, 1.0, {2**61 + 1}] ['SIGTERM', 'SIGTERM', None] [[0, 1], ('from', 0), 0]"
        assert said.splitlines()[-1] == wanted and process.returncode == 0, said


@pytest.fixture(scope="module")
def finished(lsp_store, tmp_path_factory):
    """Outcomes and directory of the runs that two processes can do one after the other."""
    runs = tmp_path_factory.mktemp("runs")
    begin_alone(lsp_store, runs / "from-one")
    jobs = [
        job(lsp_store, runs / "two", {"dropout": 0.0}),
        job(lsp_store, runs / "mtl", {"dropout": 0.0, "objective": "mtl", "max_steps": 3}),
        job(lsp_store, runs / "again", {"dropout": 0.0}),
        job(lsp_store, runs / "unbroken", {"max_steps": 60, "dropout": 0.1}),
        job(lsp_store, runs / "from-one", {"dropout": 0.0}),
        job(lsp_store, runs / "to-one", {"dropout": 0.0}, signal=[1, 5], slow_save=1),
        job(lsp_store, runs / "poisoned", poison=[1, 3]),
        job(lsp_store, runs / "small", {"batch_windows": 1}),
        job(lsp_store, runs / "two", {"dropout": 0.0, "lr": 0.5}),
        job(lsp_store, runs / "two", {"dropout": 0.0}),
        job(lsp_store, runs / "failed", fail=[1, 4]),
    ]
    unlike = job(lsp_store, runs / "unlike", differs={"micro_batch": 2, "eval_every": 2})
    jobs[-1:-1] = [job(lsp_store, runs / "dropout", DROPOUT), unlike]
    adaptive = {"dropout": 0.0} | ADAPTIVE
    stopped = job(lsp_store, runs / "adaptive-again", adaptive, signal=[1, 5])  # between two updates
    jobs[:0] = [job(lsp_store, runs / "adaptive", adaptive), stopped, job(lsp_store, runs / "adaptive-again", adaptive)]
    both = start_ranks(write_jobs(runs, jobs))
    said = [process.communicate(timeout=300)[0] for process in both]
    return runs, outcomes_of(runs, jobs, said)[3:]


def begin_alone(store, output):
    def stop(*args, step, **figures):
        if step == 5:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted, match="step 5"):
        train(StudentConfig(**job(store, output, {"dropout": 0.0})["settings"]), stop)


def assert_same_curve(ours, theirs):
    """Order and masks equal; losses, norms and weights within what another order of sums may change."""
    one, other = log_of(theirs), log_of(ours)
    assert sorted(one) == sorted(other)
    for step, line in one.items():
        assert all(other[step][name] == line[name] for name in ("batch", "tokens", "lr"))
        assert other[step]["loss"] == pytest.approx(line["loss"], rel=1e-5)
        assert other[step]["grad_norm"] == pytest.approx(line["grad_norm"], rel=1e-4)
        assert other[step].get("held_out", {}) == pytest.approx(line.get("held_out", {}), rel=1e-5)
    ours, theirs = (load_file(run / "export" / "model.safetensors") for run in (ours, theirs))
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-3, atol=2e-5)


def assert_identical(ours, theirs):
    one, other = log_of(theirs), log_of(ours)
    assert sorted(one) == sorted(other)
    for name in EXACT:
        assert [line.get(name) for line in one.values()] == [line.get(name) for line in other.values()], name
    ours, theirs = (load_file(run / "export" / "model.safetensors") for run in (ours, theirs))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("two", {}),
        ("mtl", {"objective": "mtl", "max_steps": 3}),
        ("adaptive", ADAPTIVE),
        ("dropout", DROPOUT),  # which follows from the micro-batch, whichever process computes it
    ],
)
def test_two_processes_equal_one(finished, lsp_store, tmp_path, name, changes):
    runs, _ = finished
    assert_same_curve(runs / name, alone(lsp_store, tmp_path / "one", {"dropout": 0.0} | changes))


def test_the_same_number_of_processes_is_bit_for_bit_the_same(finished):
    runs, _ = finished
    assert_identical(runs / "again", runs / "two")


@pytest.mark.promise("training with adaptive masks …")
def test_losses_by_token_are_added_up_exactly_and_survive_an_interruption(finished):
    runs, _ = finished
    assert_identical(runs / "adaptive-again", runs / "adaptive")


@pytest.mark.promise("16 other numbers …")
def test_a_run_goes_on_with_another_number_of_processes(finished, lsp_store):
    runs, outcomes = finished
    assert outcomes[4] == [{"steps": 12, "seconds": pytest.approx(0, abs=60)}] * 2
    assert_same_curve(runs / "from-one", runs / "two")
    assert {outcome["error"] for outcome in outcomes[5]} == {"Interrupted"}
    assert max(log_of(runs / "to-one")) == 5, "a signal to any process stops all at the same step"
    for outcome in outcomes[5]:  # an other process that ended sooner would make the launcher end the first in its save
        assert "step-00000005" in outcome["checkpoints"]
    alone(lsp_store, runs / "to-one", {"dropout": 0.0})
    assert_same_curve(runs / "to-one", runs / "two")


def test_an_error_that_all_meet_is_told_once(finished):
    _, outcomes = finished
    poisoned, small, changed, done = outcomes[6:10]
    assert poisoned[0]["error"] == "TrainingError" and "step 3: loss nan" in poisoned[0]["message"]
    assert small[0]["error"] == "RunError" and "Raise --batch-windows, or start fewer" in small[0]["message"]
    assert changed[0]["error"] == "RunError" and "lr (there 0.001, now 0.5)" in changed[0]["message"]
    assert [outcome[1]["error"] for outcome in (poisoned, small, changed)] == ["PeerError"] * 3
    assert [outcome["steps"] for outcome in done] == [12, 12]


def test_processes_that_would_not_meet_are_refused(finished):
    """Otherwise a held-out loss is added up of other windows, or the processes wait for each other for half an hour."""
    runs, outcomes = finished
    first, second = outcomes[-2]
    assert first["error"] == "RunError" and second["error"] == "PeerError"
    assert "process 1 differs from the first in micro_batch (3, there 2), eval_every (4, there 2)." in first["message"]
    assert not (runs / "unlike" / "log.jsonl").exists()


def test_a_process_that_ends_ends_the_others(finished):
    runs, outcomes = finished
    assert_peer_is_missed(outcomes[-1][0], runs / "failed")


def test_nobody_waits_for_ever_for_a_process_that_hangs(lsp_store, tmp_path):
    jobs = [job(lsp_store, tmp_path / "run", hang=[1, 4], timeout=2)]
    first, second = start_ranks(write_jobs(tmp_path, jobs))
    said, _ = first.communicate(timeout=100)
    second.kill()
    second.communicate()
    [[first, _]] = outcomes_of(tmp_path, jobs, said)
    assert_peer_is_missed(first, tmp_path / "run")
    assert first["seconds"] > 2


def assert_peer_is_missed(outcome, run):
    assert outcome["error"] == "PeerError" and "If it wrote a message, that says why" in outcome["message"]
    assert outcome["seconds"] < 40
    assert max(log_of(run)) == 3


def test_a_signal_and_a_kill_of_all_and_then_as_if_unbroken(finished, lsp_store, tmp_path):
    runs, _ = finished
    flags = SETTINGS | {"store": lsp_store.path, "run_dir": tmp_path / "run", "max_steps": 60, "dropout": 0.1}
    (tmp_path / "plain.yaml").write_text("train-student: {}")
    flags = [part for name, value in flags.items() for part in (f"--{name}", value)]
    flags = ["train-student", "--recipe", tmp_path / "plain.yaml", *flags]
    process = launch("cli.py", *flags)
    wait_for_step(process, tmp_path / "run", 5)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    stopped = max(log_of(tmp_path / "run"))
    assert said.count("mlsm: error:") == 1 and f"stopped after step {stopped} of 60" in said
    assert (tmp_path / "run" / "checkpoints" / f"step-{stopped:08d}").is_dir()

    both = start_ranks([ROOT / "cli.py", *flags])
    wait_for_step(both[0], tmp_path / "run", stopped + 8)
    for process in both:
        process.kill()
        process.communicate()

    process = launch("cli.py", *flags, launcher=ACCELERATE)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and said.count("student exported to") == 1 and "warning:" not in said, said
    assert_identical(tmp_path / "run", runs / "unbroken")


def wait_for_step(process, run, step):
    deadline = time.monotonic() + 120
    while not (run / "log.jsonl").exists() or (run / "log.jsonl").read_text().count("grad_norm") < step:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.002)


DAMAGED = """
    import os, sys
    from mlsm.__main__ import main
    from mlsm.common.errors import ShardError
    from shards.windows import WindowReader

    def read(self, window_ids):
        raise ShardError("block 3 does not match its hash")

    if os.environ["RANK"] == "1":
        WindowReader.read = read
    main(sys.argv[1:])
"""


def test_damage_that_only_another_process_meets_is_named(lsp_store, tmp_path):
    flags = SETTINGS | {"store": lsp_store.path, "run_dir": tmp_path / "run"}
    flags = [part for name, value in flags.items() for part in (f"--{name}", value)]
    both = start_ranks(["-c", textwrap.dedent(DAMAGED), "train-student", *flags])
    first, second = (process.communicate(timeout=120)[0] for process in both)
    assert "mlsm: error: block 3 does not match its hash" in second and both[1].returncode == 3
    assert "another process of this run ended" in first


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("windows", [5, 12, 13])
def test_shares_are_a_partition_and_micro_batches_are_counted_through(size, windows):
    ranks = [Ranks(rank, size) for rank in range(size)]
    shares = [one.share(windows) for one in ranks]
    assert [window for first, last in shares for window in range(first, last)] == list(range(windows))
    taken = [-(-(last - first) // 2) for first, last in shares]
    assert [one.micro_batches_before(windows, 2) for one in ranks] == [sum(taken[:rank]) for rank in range(size)]
