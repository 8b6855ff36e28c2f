import json
import os

import pytest
import torch
from torch import nn

from student.checkpoint import Checkpoints, publish_directory, remove_leftovers, restore


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)


def trained(steps=2):
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(steps):
        model.layer(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


def export(directory):
    (directory / "config.json").write_text("exported")


def saved(tmp_path, *steps, kept=(2,)):
    checkpoints = Checkpoints(tmp_path, kept)
    for step in steps:
        checkpoints.save(step, *trained(), {"tokens": 10 * step}, export)
    return checkpoints


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_round_trip(tmp_path):
    model, optimizer = trained()
    checkpoints = Checkpoints(tmp_path, [])
    checkpoints.save(7, model, optimizer, {"tokens": 3}, export)
    path, state = checkpoints.newest_whole()
    assert (state["step"], state["tokens"]) == (7, 3)
    other, its_optimizer = trained(steps=1)
    restore(path, other, its_optimizer)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    for ours, theirs in zip(optimizer.state.values(), its_optimizer.state.values(), strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in ("exp_avg", "exp_avg_sq", "step"))


def test_kept_checkpoints_stay_and_the_last_one_to_resume_from(tmp_path):
    saved(tmp_path, 1, 2, 3, 4)
    assert names(tmp_path) == ["step-00000002", "step-00000004"]
    assert (tmp_path / "step-00000002" / "config.json").exists()
    assert not (tmp_path / "step-00000004" / "config.json").exists()


def test_checkpoints_kept_by_earlier_settings_stay(tmp_path):
    saved(tmp_path, 1, 2, kept=(1,))
    saved(tmp_path, 3, 4, kept=(4,))
    assert names(tmp_path) == ["step-00000001", "step-00000004"]


def damage_cut(path):
    path.write_bytes(path.read_bytes()[:-2])


def damage_flip(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(bytes(raw))


def damage_remove(path):
    path.unlink()


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
    checkpoints.save(3, *trained(), {"tokens": 30}, export)
    assert checkpoints.newest_whole()[1]["step"] == 3
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


def test_a_failed_save_leaves_everything_as_it_was(tmp_path):
    checkpoints = saved(tmp_path, 2)

    def full_disk(directory):
        raise OSError("no space left on device")

    checkpoints.kept_steps.add(4)
    with pytest.raises(OSError, match="no space"):
        checkpoints.save(4, *trained(), {}, full_disk)
    assert names(tmp_path) == ["step-00000002"]


def test_files_are_on_disk_before_the_name_appears(tmp_path, monkeypatch):
    calls = []
    real_fsync, real_rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda descriptor: (calls.append("fsync"), real_fsync(descriptor)))

    monkeypatch.setattr(os, "rename", lambda *names: (calls.append("rename"), real_rename(*names)))
    publish_directory(tmp_path / "final", export)
    assert calls == ["fsync", "fsync", "rename", "fsync"]    # file, its directory, ..., the parent


def test_leftovers_of_a_killed_process_are_removed(tmp_path):
    (tmp_path / ".step-1.99.abc.tmp").mkdir()
    (tmp_path / ".log.99.abc.tmp").write_text("x")
    (tmp_path / "step-00000002").mkdir()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == ["step-00000002"]
