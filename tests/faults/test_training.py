"""The trainer in real processes: SIGTERM, SIGHUP, Ctrl-C, SIGKILL at any time; another store; and the dataset, killed.

The oracle is an unbroken run: batches (order and masks), losses and weights of every step must be its own.
"""

import json
import os
import random
import shutil
import signal
import time

import pytest
import torch
from faulty_disk import forked
from safetensors.torch import load_file
from test_commit import temporaries
from test_interruption import interrupted, start
from tiny_store import log_of, write_store
from torchdata.stateful_dataloader import StatefulDataLoader

from mlsm.cli.settings import parse
from mlsm.commands import load
from mlsm.common.errors import RunError
from shards.reader import Store
from shards.torch_dataset import LspDataset
from student.train import train

SETTINGS = {
    "encoder": "bert-1x32",
    "max_steps": 150,
    "batch_windows": 24,
    "micro_batch": 8,
    "seed": 1,
    "eval_windows": 8,
    "save_every": 7,
    "eval_every": 0,
    "device": "cpu",
}
pytestmark = [
    pytest.mark.usefixtures("one_thread"),  # as the processes have: the order of sums is part of the result
    pytest.mark.promise("17 trainer killed in mid-epoch"),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """150 windows: an epoch is six steps and a quarter."""
    return write_store(tmp_path_factory.mktemp("training") / "store", k=24)


def flags_of(store, output):
    given = SETTINGS | {"store": store.path, "run-dir": output}
    return ["train-student", *(part for name, value in given.items() for part in (f"--{name}", str(value)))]


def config_of(store, output):
    """What the command line makes of these flags and its recipe."""
    verb, *flags = flags_of(store, output)
    return parse(load(verb), flags)[0]


@pytest.fixture(scope="module")
def unbroken(store, tmp_path_factory):
    config = config_of(store, tmp_path_factory.mktemp("unbroken") / "run")
    train(config)
    return config.run_dir


@pytest.fixture
def flags(store, tmp_path):
    return flags_of(store, tmp_path / "run")


def steps_logged(run):
    log = run / "log.jsonl"
    return len(log.read_text().splitlines()) if log.exists() else 0


def checkpoint_steps(run):
    return sorted(int(path.name.split("-")[1]) for path in run.glob("checkpoints/step-*"))


def assert_same_run(run, unbroken):
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, SETTINGS["max_steps"] + 1))
    ours, theirs = log_of(run), log_of(unbroken)
    for name in ("batch", "loss", "grad_norm", "lr", "tokens"):
        assert [ours[step][name] for step in ours] == [theirs[step][name] for step in ours], name
    ours, theirs = (load_file(path / "export" / "model.safetensors") for path in (run, unbroken))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert not temporaries(run)


@pytest.mark.promise(
    "SIGTERM, SIGHUP and Ctrl-C while a student is trained: a checkpoint of the very last step, and the rest of the "
    "run as if unbroken",
    cases="3 signals",
)
@pytest.mark.promise("30 SIGTERM, Ctrl-C")
@pytest.mark.promise("39 SIGHUP; a display …")
def test_signals_save_a_checkpoint_and_have_their_own_exit_codes(store, flags, unbroken, tmp_path):
    run = tmp_path / "run"
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        before = steps_logged(run)
        said = interrupted(
            flags,
            lambda before=before: steps_logged(run) > before + 5,
            number,
            then="The same command continues",
            OMP_NUM_THREADS="1",
        )
        last = max(log_of(run))
        assert checkpoint_steps(run)[-1] == last < SETTINGS["max_steps"] and f"stopped after step {last} of" in said
        assert not temporaries(run)
    train(config_of(store, run))
    assert_same_run(run, unbroken)


@pytest.mark.promise(
    "SIGKILL in mid-epoch of training, three times, resumed each time: batches, masks, losses and weights of "
    "an unbroken run, no step twice in the log",
    cases="3 real kills",
)
def test_killed_at_random_times_the_curve_is_that_of_an_unbroken_run(store, flags, unbroken, tmp_path):
    """SIGKILL in mid-epoch, again and again; a checkpoint is written every seven steps, so several are in between."""
    run, dice, at = tmp_path / "run", random.Random(0), 0
    for _ in range(3):
        at += dice.randrange(20, 40)
        process = start(flags, OMP_NUM_THREADS="1")
        while steps_logged(run) < at:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.001)
        time.sleep(dice.uniform(0, 0.05))
        process.kill()
        assert process.wait() == -signal.SIGKILL
        process.stderr.close()
        done = max(log_of(run))
        assert done - 7 <= checkpoint_steps(run)[-1] < SETTINGS["max_steps"]
        at = done
    train(config_of(store, run))
    assert_same_run(run, unbroken)


@pytest.mark.promise(
    "a run resumed on a store that was replaced under its name (other tokenizer, other plan): refused, naming "
    "it, nothing touched",
    cases="2",
)
@pytest.mark.promise("13 teacher or tokenizer …")
@pytest.mark.parametrize("change", [{"words": 50}, {"train_windows": 160}], ids=["tokenizer", "plan"])
def test_a_store_that_was_replaced_under_its_name_is_refused(store, tmp_path, change):
    """The run to be resumed belongs to the store that lay there before."""
    path = tmp_path / "store"
    shutil.copytree(store.path, path)
    config = config_of(Store.open(path), tmp_path / "run")

    def stop(*args, step, **figures):
        if step == 8:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="step 8"):
        train(config, stop)
    shutil.rmtree(path)
    write_store(path, k=24, **change)
    before = {file: file.read_bytes() for file in config.run_dir.rglob("*") if file.is_file()}
    with pytest.raises(RunError, match=r"another run, which differs in .*store plan .*Nothing was changed") as refused:
        train(config)
    assert ("store target" in str(refused.value)) == ("words" in change)
    assert {file: file.read_bytes() for file in config.run_dir.rglob("*") if file.is_file()} == before


@pytest.mark.promise(
    "a loop over the dataset, SIGKILL in mid-epoch twice, resumed on other numbers of loader workers (0 to 4): "
    "every batch in its place",
    cases="3 × 2 real kills",
)
@pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("workers", [(0, 0, 0), (0, 4, 2), (3, 0, 1)])
def test_a_loop_over_the_dataset_killed_in_mid_epoch(store, tmp_path, workers):
    """Saved, killed, resumed with another number of loader workers, twice: every batch in its place."""
    for number, count in enumerate(workers):
        dies_after = 9 + number if number < 2 else None
        ended = forked(lambda count=count, after=dies_after: use_batches(store.path, tmp_path, count, after))
        assert ended == (0 if dies_after is None else -signal.SIGKILL)
    windows = store.split("train")
    order = [windows.order(1, epoch, 0, len(windows)).tolist() for epoch in range(3)]
    assert json.loads((tmp_path / "state.json").read_text())["used"] == [
        {"epoch": epoch, "windows": order[epoch][begin : begin + 8]} for epoch in range(3) for begin in range(0, 150, 8)
    ]


def use_batches(path, directory, workers, dies_after):
    """Three epochs of batches, saved together with the loader's place after every fourth; dies after so many."""
    file = directory / "state.json"
    saved = json.loads(file.read_text()) if file.exists() else {"epoch": 0, "used": [], "loader": None}
    dataset = LspDataset(path, seed=1, batch_size=8)
    if saved["loader"]:
        dataset.load_state_dict(saved["loader"])
    alive = 0
    for epoch in range(saved["epoch"], 3):
        dataset.set_epoch(epoch)
        forked = {"multiprocessing_context": "fork"} if workers else {}  # a forked process cannot use a fork server
        loader = StatefulDataLoader(dataset, batch_size=None, num_workers=workers, **forked)
        for batch in loader:
            saved["used"].append({"epoch": epoch, "windows": batch["window_ids"].tolist()})
            if len(saved["used"]) % 4 == 0:
                saved |= {"epoch": epoch, "loader": loader.state_dict()}
                (directory / "new").write_text(json.dumps(saved))
                os.replace(directory / "new", file)
            if (alive := alive + 1) == dies_after:
                os.kill(os.getpid(), signal.SIGKILL)
    file.write_text(json.dumps(saved))
