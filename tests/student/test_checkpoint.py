import errno
import json
import os
import signal

import pytest
import torch
from faulty_disk import killed_at, raising_at, recorded
from safetensors import SafetensorError
from tiny_store import CHECKPOINT_STATE
from torch import nn

from mlsm.common import disk
from mlsm.common.errors import RunError, WriteError
from student.runs.checkpoint import Checkpoints, publish_directory, restore


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)


def trained(steps=2):
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for weight in model.parameters():  # by hand: a build for CUDA refuses autograd in a child forked from a user of it
        weight.grad = torch.ones_like(weight)
    for _ in range(steps):
        optimizer.step()
    return model, optimizer


def export(directory):
    (directory / "config.json").write_text("exported")


def saved(tmp_path, *steps, kept=(2,), keep_last=1):
    checkpoints = Checkpoints(tmp_path, kept, keep_last)
    for step in steps:
        checkpoints.save(step, *trained(), CHECKPOINT_STATE | {"tokens": 10 * step}, export)
    return checkpoints


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_round_trip(tmp_path):
    model, optimizer = trained()
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(7, model, optimizer, CHECKPOINT_STATE | {"tokens": 3}, export)
    path, state = checkpoints.newest_whole()
    assert (state["step"], state["tokens"]) == (7, 3)
    other, its_optimizer = trained(steps=1)
    restore(path, other, its_optimizer)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    for ours, theirs in zip(optimizer.state.values(), its_optimizer.state.values(), strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ("exp_avg", "exp_avg_sq", "step"))


def test_an_optimiser_without_a_state_after_a_step_does_not_fit(tmp_path):
    model, _ = trained()
    Checkpoints(tmp_path).save(7, model, torch.optim.AdamW(model.parameters()), CHECKPOINT_STATE, export)
    with pytest.raises(RunError, match="as it was written, but does not fit this run .*optimiser's state is empty"):
        restore(tmp_path / "step-00000007", *trained(steps=1))


def test_kept_checkpoints_stay_and_the_last_one_to_resume_from(tmp_path):
    saved(tmp_path, 1, 2, 3, 4)
    assert names(tmp_path) == ["step-00000002", "step-00000004"]
    assert (tmp_path / "step-00000002" / "config.json").exists()
    assert not (tmp_path / "step-00000004" / "config.json").exists()


def test_checkpoints_kept_by_earlier_settings_stay(tmp_path):
    saved(tmp_path, 1, 2, kept=(1,))
    saved(tmp_path, 3, 4, kept=(4,))
    assert names(tmp_path) == ["step-00000001", "step-00000004"]


@pytest.mark.parametrize(("keep_last", "stay"), [(1, [2, 8]), (2, [2, 6, 8]), (3, [2, 4, 6, 8]), (9, [2, 3, 4, 6, 8])])
def test_so_many_of_the_newest_stay_beside_the_kept_ones(tmp_path, keep_last, stay):
    saved(tmp_path, 2, 3, 4, 6, 8, keep_last=keep_last)
    assert names(tmp_path) == [f"step-{step:08d}" for step in stay]


def test_a_damaged_later_one_does_not_count_among_the_newest(tmp_path):
    """It was passed over on resume; the steps up to it are done again."""
    checkpoints = saved(tmp_path, 3, 4, 9, keep_last=2, kept=())
    damage_cut(tmp_path / "step-00000009" / "state.json")
    assert checkpoints.newest_whole()[1]["step"] == 4
    checkpoints.save(5, *trained(), CHECKPOINT_STATE, export)
    assert names(tmp_path) == ["step-00000004", "step-00000005"]


def test_a_later_one_that_was_not_seen_to_be_damaged_stays(tmp_path):
    saved(tmp_path, 9, kept=())
    saved(tmp_path, 4, 5, kept=())
    assert names(tmp_path) == ["step-00000005", "step-00000009"]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.ESTALE, errno.EIO, errno.EACCES])
def test_a_read_error_that_may_pass_is_no_damage(tmp_path, monkeypatch, number):
    """Otherwise the run would start again from an older checkpoint, and later remove this one."""
    checkpoints = saved(tmp_path, 2, 3)

    def fail(path):
        raise OSError(number, os.strerror(number), str(path))

    for name in ("open_to_read", "read_file"):
        with monkeypatch.context() as patched:
            patched.setattr(disk, name, fail)
            for find in (checkpoints.newest_whole, lambda: checkpoints.whole(3)):
                with pytest.raises(RunError, match="step-00000003 cannot be read.*Nothing was changed"):
                    find()
    assert checkpoints.newest_whole()[1]["step"] == 3


def damage_cut(path):
    path.write_bytes(path.read_bytes()[:-2])


def damage_flip(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(bytes(raw))


def damage_remove(path):
    path.unlink()


@pytest.mark.promise("31 damaged checkpoints")
@pytest.mark.parametrize("damage", [damage_cut, damage_flip, damage_remove])
@pytest.mark.parametrize("name", ["state.json", "resume/optimizer.pt", "resume/student.safetensors"])
def test_any_damage_falls_back_to_the_one_before_and_says_so(tmp_path, caplog, damage, name):
    checkpoints = saved(tmp_path, 2, 3)
    damage(tmp_path / "step-00000003" / name)
    path, state = checkpoints.newest_whole()
    assert path.name == "step-00000002" and state["step"] == 2
    assert "step-00000003 is damaged" in caplog.text


def test_a_changed_state_is_noticed(tmp_path):
    checkpoints = saved(tmp_path, 2)
    file = tmp_path / "step-00000002" / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokens": 21}))
    assert checkpoints.newest_whole() is None


def test_saving_over_a_damaged_one_replaces_it(tmp_path):
    checkpoints = saved(tmp_path, 2, 3)
    damage_cut(tmp_path / "step-00000003" / "state.json")
    checkpoints.save(3, *trained(), CHECKPOINT_STATE | {"tokens": 30}, export)
    assert checkpoints.newest_whole()[1]["step"] == 3
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


def test_a_failed_save_leaves_everything_as_it_was(tmp_path):
    checkpoints = saved(tmp_path, 2)

    def full_disk(directory):
        raise OSError("no space left on device")

    checkpoints.kept_steps.add(4)
    with pytest.raises(OSError, match="no space"):
        checkpoints.save(4, *trained(), CHECKPOINT_STATE, full_disk)
    assert names(tmp_path) == ["step-00000002"]


def save_second(directory):
    saved(directory, 3, keep_last=1)


def calls_of_a_save(directory):
    saved(directory, 1)
    return recorded(lambda: save_second(directory))


@pytest.mark.promise("31 damaged checkpoints")
def test_killed_at_every_call_of_a_save_the_newest_whole_one_is_the_old_or_the_new(tmp_path):
    """SIGKILL ahead of each call, and of some writes, half done: what is found is whole, and saving again works."""
    calls = calls_of_a_save(tmp_path / "recorded")
    assert sum(name == "write" for name, _ in calls) > 5 and sum(name == "rename" for name, _ in calls) == 1
    found = set()
    writes = [number for number, (name, _) in enumerate(calls) if name == "write"]
    for number in sorted(set(range(len(calls))) - set(writes) | set(writes[::5])):
        directory = tmp_path / str(number)
        saved(directory, 1)
        assert killed_at(number, lambda directory=directory: save_second(directory)) == -signal.SIGKILL
        path, state = Checkpoints(directory).newest_whole()
        restore(path, *trained(steps=1))
        assert state["tokens"] == 10 * state["step"]
        found.add(state["step"])
        disk.remove_leftovers(directory)
        assert not list(directory.glob(".*"))
        save_second(directory)
        assert names(directory) == ["step-00000003"]
    assert found == {1, 3}


@pytest.mark.promise("7 full disk, file …")
def test_a_disk_that_is_full_at_any_call_leaves_the_last_one_and_no_trace(tmp_path):
    """Half of the write that fails is done. Until the rename: after it, the new one is there."""
    calls = [name for name, _ in calls_of_a_save(tmp_path / "recorded")]
    for number in range(0, calls.index("rename"), 2):
        directory = tmp_path / str(number)
        checkpoints = saved(directory, 1)
        with raising_at(number, errno.ENOSPC), pytest.raises(WriteError, match="No space left.*Make room") as caught:
            save_second(directory)
        assert "\n" not in str(caught.value) and "step-00000003 could not be written" in str(caught.value)
        assert names(directory) == ["step-00000001"]
        assert checkpoints.newest_whole()[1]["step"] == 1


@pytest.mark.promise("7 full disk, file …")
def test_a_disk_that_is_full_while_the_model_is_exported_is_no_other_error(tmp_path):
    """safetensors has an error class of its own for it."""

    def full(directory):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    checkpoints = saved(tmp_path, 1)
    with pytest.raises(WriteError, match="No space left"):
        checkpoints.save(2, *trained(), CHECKPOINT_STATE, full)
    assert names(tmp_path) == ["step-00000001"]


def test_files_are_on_disk_before_the_name_appears(tmp_path, monkeypatch):
    calls = []
    real_fsync, real_rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda descriptor: (calls.append("fsync"), real_fsync(descriptor)))

    monkeypatch.setattr(os, "rename", lambda *names, **at: (calls.append("rename"), real_rename(*names, **at)))
    publish_directory(tmp_path / "final", export)
    assert calls == ["fsync", "fsync", "rename", "fsync"]  # file, its directory, ..., the parent


def test_leftovers_of_a_killed_process_are_removed(tmp_path):
    disk.temporary_name(tmp_path, "step-1").mkdir()
    disk.temporary_name(tmp_path, "log").write_text("x")
    (tmp_path / "step-00000002").mkdir()
    (tmp_path / ".mine.tmp").mkdir()  # the user's
    disk.remove_leftovers(tmp_path)
    assert names(tmp_path) == [".mine.tmp", "step-00000002"]
