"""A name that may not survive a power cut is withdrawn, unless another file has it by then."""

import errno
import json
import os

import pytest

from mlsm.common import disk
from mlsm.common.durable import publish_json


@pytest.mark.parametrize(
    ("withdraw", "replaced", "left"),
    [(True, False, None), (True, True, "theirs"), (False, False, "ours"), (False, True, "theirs")],
)
def test_only_our_own_file_is_withdrawn(tmp_path, monkeypatch, withdraw, replaced, left):
    """The directory cannot be made durable after our link, and somebody may have replaced the file by then."""
    final = tmp_path / "unit.json"
    (tmp_path / "other").write_text('"theirs"')

    def fail(path):
        assert path == tmp_path and json.loads(final.read_text()) == "ours"
        if replaced:
            os.replace(tmp_path / "other", final)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(disk, "fsync_path", fail)
    with pytest.raises(OSError, match="Input/output error"):
        publish_json(final, "ours", withdraw=withdraw)
    assert (json.loads(final.read_text()) if final.exists() else None) == left
    assert not list(tmp_path.glob(".*")), "no temporary"


def test_a_name_of_another_is_neither_replaced_nor_withdrawn(tmp_path, monkeypatch):
    final = tmp_path / "unit.json"
    final.write_text('"theirs"')
    assert publish_json(final, "ours", withdraw=True) is False
    monkeypatch.setattr(disk, "fsync_path", lambda path: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
    with pytest.raises(OSError, match="broken"):
        publish_json(final, "ours", withdraw=True)
    assert json.loads(final.read_text()) == "theirs"
