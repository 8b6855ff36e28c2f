import time

import numpy as np
import pytest
import torch

from student.batches import Loader, read_ahead
from student.masks.masking import Masking
from student.objectives.mlm import Mlm
from student.objectives.mlsm import Mlsm

pytestmark = pytest.mark.promise("22 no non-zero code …")


def loader(store, objective, micro_batch=4, **masks):
    split = store.split("train")
    masking = Masking(store.special_ids, store.vocab_size, 0.15, **masks)
    return Loader(split, masking, objective.read_targets, micro_batch=micro_batch)


def test_the_stream_is_one_epoch_after_the_other(ids_store):
    windows = ids_store.split("train")
    ids, epochs = windows.stream(5, 140, 310)
    assert np.array_equal(epochs, [0] * 10 + [1] * 150 + [2] * 10)
    assert sorted(ids[10:160]) == list(range(150))
    expected = [windows.order(5, 0, 140, 150), windows.order(5, 1, 0, 150), windows.order(5, 2, 0, 10)]
    assert np.array_equal(ids, np.concatenate(expected))


def test_a_batch_hides_what_it_asks_for(ids_store):
    reader = loader(ids_store, Mlm(ids_store))
    batch = reader.step(seed=1, step=3, batch_windows=10)
    window_ids, _ = reader.windows.stream(1, 30, 40)
    truth = reader.windows.read(window_ids)
    assert [len(micro.input_WL) for micro in batch.micro] == [4, 4, 2]
    assert batch.tokens == truth.lengths.sum()
    assert batch.counts[0] == sum(len(micro.where_M) for micro in batch.micro) > 0
    for start, micro in zip((0, 4, 8), batch.micro, strict=True):
        shown = micro.input_WL.numpy().copy().reshape(-1)
        assert (shown[micro.where_M] == ids_store.special_ids["mask"]).all()
        shown[micro.where_M] = micro.targets.labels_M
        assert np.array_equal(shown, truth.ids[start : start + 4].reshape(-1))


def test_targets_belong_to_the_masked_tokens(lsp_store):
    reader = loader(lsp_store, Mlsm(lsp_store))
    batch = reader.step(seed=1, step=0, batch_windows=10)
    originals = loader(lsp_store, Mlm(lsp_store)).step(seed=1, step=0, batch_windows=10)
    assert batch.digest == originals.digest
    for micro, original in zip(batch.micro, originals.micro, strict=True):
        row, atom = np.divmod(micro.targets.entries_E.numpy(), lsp_store.k)
        for number, token in enumerate(original.targets.labels_M.tolist()):
            coded = token % 7 != 0
            expected = {token % 24, token * 5 % 24, token * 11 % 24} if coded else set()
            assert set(atom[row == number]) == expected
            assert micro.targets.coded_M[number] == coded


def test_the_digest_tells_batches_apart(ids_store):
    reader = loader(ids_store, Mlm(ids_store))
    digests = {reader.step(seed, step, 10).digest for seed in (1, 2) for step in range(5)}
    assert len(digests) == 10
    assert loader(ids_store, Mlm(ids_store), micro_batch=3).step(1, 0, 10).digest in digests


def test_the_digests_of_shares_add_up_to_that_of_the_batch(ids_store):
    reader = loader(ids_store, Mlm(ids_store))
    shares = [reader.step(1, 2, 10, share).digest for share in ((0, 3), (3, 5), (5, 10))]
    assert sum(shares) % 2**64 == reader.step(1, 2, 10).digest


@pytest.mark.parametrize("unit", ["token", "span"])
def test_the_micro_batch_changes_neither_mask_nor_input(ids_store, unit):
    settings = {"rate_end": 0.6, "max_steps": 5, "corruption": "80-10-10", "unit": unit}
    whole, split = (loader(ids_store, Mlm(ids_store), size, **settings).step(1, 3, 14) for size in (14, 3))
    assert len(whole.micro) == 1 and len(split.micro) == 5 and whole.digest == split.digest
    assert torch.equal(torch.cat([micro.input_WL for micro in split.micro]), whole.micro[0].input_WL)
    first = [3 * index * ids_store.max_length for index in range(5)]
    where = [start + micro.where_M for start, micro in zip(first, split.micro, strict=True)]
    assert torch.equal(torch.cat(where), whole.micro[0].where_M)


def test_the_rate_follows_the_step(ids_store):
    reader = loader(ids_store, Mlm(ids_store), rate_end=0.6, max_steps=11)
    for step, rate in ((0, 0.15), (5, 0.375), (10, 0.6)):
        batch = reader.step(2, step, 12)
        truth = reader.windows.read(reader.windows.stream(2, 12 * step, 12 * step + 12)[0])
        assert batch.counts[0] == sum(round(rate * (length - 2)) for length in truth.lengths)  # [CLS] and [SEP]


def test_the_digest_tells_corruptions_apart(ids_store):
    names = ("mask", "80-10-10")
    one, other = (loader(ids_store, Mlm(ids_store), corruption=name).step(1, 0, 10).digest for name in names)
    assert one != other


def test_reading_ahead_gives_every_step_once_in_order():
    read = read_ahead(lambda step: step * 10, 3, 6)
    assert [(step, batch) for step, batch, waited in read] == [(3, 30), (4, 40), (5, 50)]
    assert list(read_ahead(lambda step: step, 6, 6)) == []


def test_a_step_that_waits_is_read_after_the_step_before_and_others_ahead_of_it():
    finished, ahead = [], {}

    def load(step):
        ahead[step] = step - len(finished)  # how many steps before it are not finished yet
        return step

    for step, _, _ in read_ahead(load, 0, 7, lambda step: step % 3 == 0):
        deadline = time.monotonic() + 60
        while step + 1 not in ahead and step not in (2, 5, 6):  # the next one is being read while this one is worked on
            assert time.monotonic() < deadline
        finished.append(step)
    assert ahead == {0: 0, 1: 1, 2: 1, 3: 0, 4: 1, 5: 1, 6: 0}


@pytest.mark.promise("25 the writer's thread …")
def test_an_error_while_reading_ahead_appears_at_its_step():
    def load(step):
        if step == 2:
            raise OSError("disk gone")
        return step

    seen = []
    with pytest.raises(OSError, match="disk gone"):
        for step, _, _ in read_ahead(load, 0, 5):
            seen.append(step)
    assert seen == [0, 1]
