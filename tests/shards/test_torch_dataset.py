"""The torch dataset: content against the plain path, exact resume, any ranks and workers, and what is refused."""

import json
import pickle
from copy import deepcopy
from itertools import islice
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import webdataset as wds
from hypothesis import given, settings
from hypothesis import strategies as st
from make_store import make_store
from preloaded import run_python
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from mlsm.common.errors import ShardError, StoreError
from shards.codec import block_windows
from shards.reader import Store
from shards.torch_dataset import LspDataset

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:'set_vital' is deprecated")

TRAIN = 3 * 37
"""windows of the store's training split"""


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    files, *_ = make_store(tmp_path_factory.mktemp("torch") / "lsp", blocks=1, units=("train",) * 3 + ("held_out",))
    return Store.open(files.path)


def window_ids(items):
    """Window numbers of samples or batches, end to end."""
    ids = [item["window_ids" if "window_ids" in item else "window_id"] for item in items]
    return [int(window) for part in ids for window in part.reshape(-1)]


def samples_of(store, window_ids):
    """Samples of these windows, in their order."""
    samples = list(LspDataset(store, shuffle=False))
    return [samples[int(window)] for window in window_ids]


def dense(item, k):
    """Its distributions with all k entries."""
    return torch.zeros(*item["lsp_weights"].shape[:-1], k).scatter_add_(-1, item["lsp_indices"], item["lsp_weights"])


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def delivered(dataset, workers, items=None):
    """What a DataLoader with batch_size=None yields: its workers asked in turn, as long as they have something."""
    iterators = []
    for worker in range(workers):
        iterators.append(as_worker(pickle.loads(pickle.dumps(dataset)), worker, workers))
    while iterators and items != 0:
        try:
            yield next(iterators[0])
            iterators.append(iterators.pop(0))
            items = None if items is None else items - 1
        except StopIteration:
            iterators.pop(0)


def as_worker(dataset, worker, workers):
    with mock.patch("shards.torch_dataset.get_worker_info", lambda: SimpleNamespace(id=worker, num_workers=workers)):
        return iter(dataset)


# -- content ---------------------------------------------------------------------------------------------------


def test_samples_equal_the_plain_webdataset_path(store):
    plain = wds.WebDataset(store.urls("train"), shardshuffle=False).compose(block_windows)
    for number, (sample, window) in enumerate(zip(LspDataset(store, shuffle=False), plain, strict=True)):
        assert sample["window_id"] == number and sample["attention_mask"].all()
        assert sample["input_ids"].tolist() == window["ids"].tolist()
        assert sample["document_ids"].tolist() == window["documents"].tolist()
        filled = np.arange(max(window["nnz"])) < window["nnz"][:, None]
        for name, stored in [("lsp_indices", "atoms"), ("lsp_weights", "weights")]:
            assert np.array_equal(sample[name].numpy()[filled], window[stored]), "row by row, the stored entries"
            assert sample[name].shape == filled.shape and not sample[name][~filled].any(), "then zeros"
        assert np.array_equal(sample["lsp_tail"].numpy(), window["tail"])


def test_collated_samples_equal_the_batch_and_rows_are_those_of_its_tokens(store):
    samples, dataset = LspDataset(store, seed=3), LspDataset(store, seed=3, batch_size=8)
    loader = DataLoader(samples, batch_size=8, collate_fn=samples.collate)
    batches = list(dataset)
    assert len(batches) == len(loader) == len(dataset) == 14
    assert all(same(one, other) for one, other in zip(batches, loader, strict=True))
    batch = next(batch for batch in batches if not batch["attention_mask"].all())
    (count, length), padding = batch["input_ids"].shape, batch["attention_mask"] == 0
    assert (batch["input_ids"][padding] == 0).all() and (batch["document_ids"][padding] == -1).all()
    assert all(len(tensor) == count for tensor in batch.values()), "accelerate cuts batches along this dimension"
    rows = dense(batch, store.k)
    expected = torch.zeros(count, length, store.k)
    for row, sample in enumerate(samples_of(store, batch["window_ids"])):
        expected[row, : len(sample["input_ids"])] = dense(sample, store.k)
    assert torch.equal(rows, expected) and rows.any(2).any() and not rows[padding].any()
    assert torch.allclose(rows.sum(2), rows.any(2).float(), atol=1e-5)


def test_a_store_of_ids_has_no_rows(tmp_path):
    files, *_ = make_store(tmp_path / "ids", k=0, blocks=1, units=("train",))
    dataset = LspDataset(files.path)
    assert set(next(iter(dataset))) == {"input_ids", "attention_mask", "document_ids", "window_id"}
    assert "lsp_indices" not in dataset.collate(list(islice(dataset, 3)))


# -- order -----------------------------------------------------------------------------------------------------


def test_an_epoch_is_the_counted_order_and_set_epoch_changes_it(store):
    dataset = LspDataset(store, seed=5)
    order = [store.split("train").order(5, epoch, 0, TRAIN).tolist() for epoch in range(2)]
    assert window_ids(dataset) == order[0] == window_ids(dataset)
    dataset.set_epoch(1)
    assert window_ids(dataset) == order[1]
    endless = LspDataset(store, seed=5, endless=True, batch_size=50)
    assert window_ids(islice(endless, 4)) == (order[0] + order[1])[:200]
    with pytest.raises(TypeError, match="no length"):
        len(endless)


shapes = st.tuples(st.integers(1, 4), st.integers(1, 4), st.sampled_from([None, 1, 7, 40]))


@pytest.mark.promise("16 other numbers of workers or ranks on resume")
@settings(max_examples=40, deadline=None)
@given(first=shapes, then=shapes, stop=st.integers(0, 40), endless=st.booleans())
def test_any_ranks_workers_and_batches_continue_one_global_order(store, first, then, stop, endless):
    """Run until every rank has had `stop` items, save, go on with other numbers: one order, every window once."""
    seen, state = run(store, first, None, stop, endless)
    assert len(seen) == state["epoch"] * TRAIN + state["position"]
    ranks, _, batch = then
    left = TRAIN if endless else TRAIN - len(seen)
    more, end = run(store, then, state, -(-left // (ranks * (batch or 1))), endless)
    everything = seen + more
    assert everything == store.split("train").stream(1, 0, len(everything))[0].tolist()
    assert len(everything) >= TRAIN if endless else (len(everything), end["position"]) == (TRAIN, TRAIN)


def run(store, shape, state, items, endless):
    """Global order that all ranks together deliver, and the state that each of them would save."""
    ranks, workers, batch = shape
    by_rank, states = [], []
    for rank in range(ranks):
        dataset = LspDataset(store, seed=1, batch_size=batch, endless=endless, rank=rank, world_size=ranks)
        if state:
            dataset.load_state_dict(state)
        by_rank.append(list(delivered(dataset, workers, items)))
        states.append(json.loads(json.dumps(dataset.state_after(items))))
    assert all(state == states[0] for state in states)
    in_order = [had[n] for n in range(items) for had in by_rank if n < len(had)]
    return window_ids(in_order), states[0]


@pytest.mark.promise("24 no documents …")
def test_more_workers_than_windows(tmp_path):
    files, *_ = make_store(tmp_path / "s", k=0, blocks=1, units=("train",))
    dataset = LspDataset(files.path, batch_size=30)
    assert sorted(window_ids(DataLoader(dataset, batch_size=None, num_workers=4, timeout=60))) == list(range(37))
    ranks = [LspDataset(files.path, batch_size=30, rank=rank, world_size=3) for rank in range(3)]
    assert [len(rank) for rank in ranks] == [len(list(rank)) for rank in ranks] == [1, 1, 0]


@pytest.mark.promise("24 no documents …")
def test_a_split_without_windows_is_an_empty_epoch(tmp_path):
    files, *_ = make_store(tmp_path / "s", k=0, blocks=0, units=("train",))
    dataset = LspDataset(files.path)
    assert list(dataset) == [] and len(dataset) == 0
    assert list(DataLoader(dataset, batch_size=None, num_workers=2, timeout=60)) == []
    dataset.load_state_dict(dataset.state_dict())
    with pytest.raises(StoreError, match="no window"):
        LspDataset(files.path, endless=True)
    with pytest.raises(StoreError, match="no held_out windows"):
        LspDataset(files.path, split="held_out")


def test_rank_comes_from_torch_distributed_and_travels_to_spawned_workers(store):
    distributed = "torch.distributed."
    earlier = pickle.dumps([LspDataset(store, shuffle=False), LspDataset(store, shuffle=False, rank=0, world_size=2)])
    with (
        mock.patch(distributed + "is_initialized", lambda: True),
        mock.patch(distributed + "get_rank", lambda: 1),
        mock.patch(distributed + "get_world_size", lambda: 3),
    ):
        asks, knows = pickle.loads(earlier)  # as torch.multiprocessing.spawn does before the group exists
        assert window_ids(asks) == list(range(1, TRAIN, 3))
        assert window_ids(pickle.loads(pickle.dumps(knows))) == list(range(0, TRAIN, 2))
        dataset = LspDataset(store, shuffle=False)
        sent = pickle.dumps(dataset)
        assert window_ids(dataset) == list(range(1, TRAIN, 3))
    assert window_ids(pickle.loads(sent)) == list(range(1, TRAIN, 3))
    with pytest.raises(ValueError, match="rank 2 of 2"):
        LspDataset(store, rank=2, world_size=2)
    with pytest.raises(ValueError, match="both rank and world_size"):
        LspDataset(store, rank=2)


# -- loaders ---------------------------------------------------------------------------------------------------


@pytest.mark.promise("17 trainer killed …")
@pytest.mark.parametrize("workers", [0, 2, 3])
@pytest.mark.parametrize("batch_size", [None, 8])
def test_a_stateful_loader_resumes_in_mid_epoch(store, workers, batch_size):
    def loader():
        dataset = LspDataset(store, seed=2, batch_size=batch_size)
        mine = {"batch_size": 8, "collate_fn": dataset.collate} if batch_size is None else {"batch_size": None}
        return StatefulDataLoader(dataset, num_workers=workers, **mine)

    whole = list(loader())
    assert sorted(window_ids(whole)) == list(range(TRAIN))
    first = loader()
    batches = iter(first)
    begun = [next(batches) for _ in range(5)]
    state = first.state_dict()
    second = loader()
    second.load_state_dict(state)
    rest = list(second)
    assert all(same(one, other) for one, other in zip(whole, begun + rest, strict=True))
    assert sorted(window_ids(second)) == list(range(TRAIN))  # and the next iteration is whole again


@pytest.mark.promise("16 other numbers …")
@pytest.mark.parametrize(("workers", "then"), [(2, 0), (0, 3), (3, 2)])
def test_another_number_of_workers_takes_a_loaders_state(store, workers, then):
    expected = store.split("train").order(2, 0, 0, TRAIN).tolist()
    loader = StatefulDataLoader(LspDataset(store, seed=2, batch_size=8), batch_size=None, num_workers=workers)
    begun = list(islice(loader, 5))
    dataset = LspDataset(store, seed=2, batch_size=4)
    dataset.load_state_dict(loader.state_dict())
    rest = StatefulDataLoader(dataset, batch_size=None, num_workers=then)
    assert window_ids(begun) + window_ids(rest) == expected


def test_a_plain_loader_with_workers_counts_what_was_used(store):
    dataset = LspDataset(store, seed=2, batch_size=8)
    begun = list(islice(DataLoader(dataset, batch_size=None, num_workers=2), 3))
    again = LspDataset(store, seed=2, batch_size=8)
    again.load_state_dict(dataset.state_after(len(begun)))
    again.set_epoch(0)  # as training loops do: it does not lose the place
    assert window_ids(begun) + window_ids(again) == store.split("train").order(2, 0, 0, TRAIN).tolist()


@pytest.mark.promise("25 the writer's thread …")
@pytest.mark.parametrize("loader", ["torch.utils.data.DataLoader", "torchdata.stateful_dataloader.StatefulDataLoader"])
def test_a_killed_worker_is_an_error(store, loader):
    """In a process of its own: torch raises from a signal handler, wherever the process happens to be.

    A RuntimeError that names the worker, or a broken connection when one of its tensors was still to be fetched.
    """
    module, name = loader.rsplit(".", 1)
    script = (
        f"import os, signal\nfrom {module} import {name} as Loader\n"
        "from shards.torch_dataset import LspDataset\n"
        f"dataset = LspDataset({str(store.path)!r}, endless=True, batch_size=4)\n"
        "batches = iter(Loader(dataset, batch_size=None, num_workers=2))\n"
        "next(batches)\n"
        "try:\n"
        "    os.kill(batches._workers[0].pid, signal.SIGKILL)\n"
        "    for _ in range(50): next(batches)\n"
        "    print('went on')\n"
        "except (RuntimeError, OSError, EOFError) as error:\n"
        "    print('raised', repr(error), flush=True)\n"
        "for worker in batches._workers: worker.kill()\n"  # they may wait for a lock that the dead one held
        "os._exit(0)\n"
    )
    run = run_python(["-c", script], timeout=100)
    # the signal may also come while the broken connection is handled
    raised = run.stdout.startswith("raised") or "is killed by signal" in run.stderr
    assert raised and "went on" not in run.stdout, run.stdout + run.stderr


def test_damage_names_the_shard(tmp_path):
    files, *_ = make_store(tmp_path / "s", k=0, blocks=1, units=("train",))
    shard = next(files.units.glob("*.tar"))
    with open(shard, "r+b") as file:
        file.seek(3000)
        file.write(b"\xff")
    with pytest.raises(ShardError, match=shard.name):
        list(LspDataset(files.path))


# -- epochs of workers that stay ---------------------------------------------------------------------------------


LOADERS = {"plain": DataLoader, "stateful": StatefulDataLoader}


def persistent(dataset, loader="plain", method="fork"):
    mine = {"batch_size": None, "num_workers": 2, "persistent_workers": True, "multiprocessing_context": method}
    return LOADERS[loader](dataset, timeout=60, **mine)


def epoch_order(store, epoch, seed=5):
    return store.split("train").order(seed, epoch, 0, TRAIN).tolist()


def pickled(dataset):
    return pickle.loads(pickle.dumps(dataset))


@pytest.mark.promise("17 trainer killed …")
@pytest.mark.parametrize("copied", [lambda dataset: dataset, pickled, deepcopy], ids=["itself", "pickled", "copied"])
@pytest.mark.parametrize("loader", LOADERS)
def test_persistent_workers_follow_set_epoch(store, loader, copied):
    dataset = copied(LspDataset(store, seed=5, batch_size=8))
    batches = persistent(dataset, loader)
    for epoch in (0, 1, 1, 5, 2):
        dataset.set_epoch(epoch)
        assert window_ids(batches) == epoch_order(store, epoch)
    assert window_ids(batches) == epoch_order(store, 2)  # not told otherwise


@pytest.mark.parametrize("loader", LOADERS)
def test_spawned_workers_follow_set_epoch(store, loader):
    dataset = LspDataset(store, seed=5, batch_size=8)
    dataset.set_epoch(3)
    batches = persistent(dataset, loader, "spawn")
    for epoch in (3, 4, 0):
        dataset.set_epoch(epoch)
        assert window_ids(batches) == epoch_order(store, epoch)


def test_samples_of_persistent_workers_come_once_an_epoch(store):
    dataset = LspDataset(store, seed=5)
    loader = DataLoader(dataset, batch_size=8, collate_fn=dataset.collate, num_workers=2, persistent_workers=True)
    seen = []
    for epoch in range(3):
        dataset.set_epoch(epoch)
        seen.append(window_ids(loader))
        assert sorted(seen[-1]) == list(range(TRAIN))
    assert seen[0] != seen[1] != seen[2]


@pytest.mark.promise("17 trainer killed …")
def test_persistent_workers_follow_a_loaded_state(store):
    """Before they start and while they run; the epoch after it is whole again."""
    earlier = LspDataset(store, seed=5, batch_size=8)
    earlier.set_epoch(4)
    state = earlier.state_after(5)
    dataset = LspDataset(store, seed=5, batch_size=8)
    dataset.load_state_dict(state)
    batches = persistent(dataset)
    for epoch in (4, 7):
        dataset.set_epoch(epoch)
        assert window_ids(batches) == epoch_order(store, epoch)[40 if epoch == 4 else 0 :]
    dataset.load_state_dict(state)
    assert window_ids(batches) == epoch_order(store, 4)[40:]
    assert window_ids(batches) == epoch_order(store, 4)


def test_an_iteration_that_has_begun_keeps_its_epoch(store):
    dataset = LspDataset(store, seed=5, batch_size=8)
    batches = persistent(dataset)
    iterator = iter(batches)
    dataset.set_epoch(1)
    assert window_ids(iterator) == epoch_order(store, 0)
    assert window_ids(batches) == epoch_order(store, 1)


def test_a_broken_off_epoch_does_not_leak_into_the_next(store):
    dataset = LspDataset(store, seed=5, batch_size=8)
    batches = persistent(dataset)
    for epoch in range(3):
        dataset.set_epoch(epoch)
        assert window_ids(islice(batches, 3)) == epoch_order(store, epoch)[:24]


def test_ranks_forked_from_one_process_ask_their_own_workers(store):
    """The memory of the dataset is then common to all ranks; here one process plays two of them."""
    rank = mock.Mock(return_value=1)
    distributed = "torch.distributed."
    with (
        mock.patch(distributed + "is_initialized", lambda: True),
        mock.patch(distributed + "get_rank", rank),
        mock.patch(distributed + "get_world_size", lambda: 2),
    ):
        dataset = LspDataset(store, seed=5, batch_size=1)
        batches = persistent(dataset)
        assert window_ids(batches) == epoch_order(store, 0)[1::2]
        dataset.set_epoch(1)
        rank.return_value = 0
        dataset.set_epoch(2)  # the other rank is ahead
        assert window_ids(batches) == epoch_order(store, 1)[1::2]


@pytest.mark.parametrize(("workers", "stay"), [(0, False), (2, False), (2, True)])
def test_a_loaders_state_of_a_finished_epoch_does_not_repeat_it(store, workers, stay):
    def loader():
        dataset = LspDataset(store, seed=5, batch_size=8)
        options = {"batch_size": None, "num_workers": workers, "persistent_workers": stay}
        return dataset, StatefulDataLoader(dataset, **options)

    dataset, first = loader()
    dataset.set_epoch(3)
    assert window_ids(first) == epoch_order(store, 3)
    again, second = loader()
    second.load_state_dict(first.state_dict())
    for epoch in (4, 5):
        again.set_epoch(epoch)
        assert window_ids(second) == epoch_order(store, epoch)


# -- refusals --------------------------------------------------------------------------------------------------


@pytest.mark.promise("18 reader state of another store")
def test_a_state_of_other_data_is_refused_by_what_differs(store, tmp_path):
    state = json.loads(json.dumps(LspDataset(store, seed=1).state_dict()))
    files, *_ = make_store(tmp_path / "other", k=0, blocks=1, units=("train",))
    for dataset, message in [
        (LspDataset(files.path, seed=1), "settings k is 300, not 0, kind is 'lsp', not 'ids'"),
        (LspDataset(store, seed=2), "seed is 1, not 2"),
        (LspDataset(store, seed=1, shuffle=False), "shuffle is True, not False"),
        (LspDataset(store, seed=1, split="held_out"), "split is 'train', not 'held_out'"),
    ]:
        with pytest.raises(StoreError, match=message):
            dataset.load_state_dict(state)
    grown, *_ = make_store(tmp_path / "grown", blocks=1, units=("train", "held_out"))
    with pytest.raises(StoreError, match="plan is .*older plan"):
        LspDataset(grown.path, seed=1).load_state_dict(state)


@pytest.mark.promise("18 reader state of …")
@pytest.mark.parametrize("state", [None, {}, 7, {"format": "mlsm-position-0"}, {"step": 3}])
def test_what_is_no_state_is_refused(store, state):
    with pytest.raises(StoreError, match="not a state"):
        LspDataset(store).load_state_dict(state)


def test_samples_that_a_loader_batched_in_workers_are_no_single_position(store):
    dataset = LspDataset(store, seed=2)
    loader = StatefulDataLoader(dataset, batch_size=8, collate_fn=dataset.collate, num_workers=2)
    list(islice(loader, 3))
    with pytest.raises(StoreError, match="did not deliver item by item in turn"):
        dataset.load_state_dict(loader.state_dict())


@pytest.mark.promise("18 reader state of …")
def test_a_worker_state_fits_no_other_worker(store):
    dataset = LspDataset(store, seed=2, batch_size=8)
    list(islice(as_worker(dataset, 1, 2), 2))
    with mock.patch("shards.torch_dataset.get_worker_info", lambda: SimpleNamespace(id=1, num_workers=2)):
        state = json.loads(json.dumps(dataset.state_dict()))
        dataset.load_state_dict(state)
        with pytest.raises(StoreError, match="width is 8, not 4"):
            LspDataset(store, seed=2, batch_size=4).load_state_dict(state)
    with pytest.raises(StoreError, match="id is 1, not 0, workers is 2, not 1"):
        dataset.load_state_dict(state)
