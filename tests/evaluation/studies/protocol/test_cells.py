"""A part of a study is the work of one commit; its state follows from its files and its lock."""

import subprocess
import sys
import threading

import pytest
from preloaded import ROOT

from mlsm.commands.study import _short
from mlsm.common import locks
from mlsm.common.errors import StudyError
from mlsm.evaluation.studies.protocol import cells
from mlsm.evaluation.studies.protocol.cells import State, at_work, state_of, this_commit

HOLD = """
import sys, time
from pathlib import Path
from mlsm.evaluation.studies.protocol.cells import at_work
with at_work(Path(sys.argv[1]), "train-student/mlm-seed0", "one"):
    print("held", flush=True)
    time.sleep(60)
"""


FORK = """
import os, signal, sys, time
from pathlib import Path
from mlsm.evaluation.studies.protocol.cells import at_work, state_of
with at_work(Path(sys.argv[1]), "a", "one"):
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
print(state_of(Path(sys.argv[1]), "a", False).name)
os.kill(child, signal.SIGKILL)
"""


def test_a_part_goes_from_missing_to_done(tmp_path):
    part = "train-student/mlm-seed0"
    assert state_of(tmp_path, part, False) == State("missing", None)
    with at_work(tmp_path, part, "one"):
        pass
    assert state_of(tmp_path, part, False) == State("started", "one")
    assert state_of(tmp_path, part, True) == State("done", "one")


def test_without_locks_a_part_is_worked_on_with_a_warning(tmp_path, monkeypatch, caplog):
    def refuse(*_, **__):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(locks.fcntl, "flock", refuse)
    with at_work(tmp_path, "a", "one"):
        assert state_of(tmp_path, "a", False) == State("started", "one")
    assert "cannot be locked" in caplog.text and "No locks available" in caplog.text


def test_another_commit_is_refused_and_the_first_goes_on(tmp_path):
    with at_work(tmp_path, "a", "one"):
        pass
    with (
        pytest.raises(StudyError, match="a was started by the code of one, this is two"),
        at_work(tmp_path, "a", "two"),
    ):
        pass
    with at_work(tmp_path, "a", "one"):
        pass


def test_a_process_that_is_at_work_is_seen_and_its_death_as_well(tmp_path):
    part = "train-student/mlm-seed0"
    other = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "held\n"
        assert state_of(tmp_path, part, False) == State("running", "one")
        with pytest.raises(StudyError, match="another process is working"), at_work(tmp_path, part, "one"):
            pass
    finally:
        other.kill()
        other.wait()
        other.stdout.close()
    assert state_of(tmp_path, part, False) == State("started", "one")


def test_a_part_starts_while_its_state_is_looked_at(tmp_path):
    with at_work(tmp_path, "a", "one"):
        pass
    with (tmp_path / "cells/a").open() as looked_at:
        assert locks.acquire(looked_at, shared=True)
        later = threading.Timer(0.3, lambda: locks.release(looked_at))
        later.start()
        with at_work(tmp_path, "a", "one"):
            pass
        later.join()


def test_half_a_line_of_a_killed_process_is_no_commit(tmp_path):
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells/a").write_bytes(b"half of a com")
    with at_work(tmp_path, "a", "one"):
        pass
    assert state_of(tmp_path, "a", False) == State("started", "one")


def test_the_commit_is_that_of_the_checkout():
    git = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True)
    if git.returncode:
        assert this_commit().startswith("version ")
    else:
        assert this_commit().split("-dirty")[0] == git.stdout.strip()


def test_a_part_that_ended_is_not_running_though_a_process_that_it_began_lives_on(tmp_path):
    found = subprocess.run([sys.executable, "-c", FORK, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout == "started\n"


def test_two_states_of_a_changed_checkout_are_two_commits(tmp_path, monkeypatch):
    file = tmp_path / "mlsm/evaluation/studies/protocol/cells.py"
    file.parent.mkdir(parents=True)
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b.invalid"]
    file.write_text("one\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(cells, "__file__", str(file))
    clean = this_commit()
    found = []
    for text in ("two\n", "three\n", "two\n"):
        file.write_text(text)
        found.append(this_commit())
    assert len(clean) == 40 and all(one.startswith(f"{clean}-dirty-") for one in found)
    assert found[0] == found[2] != found[1]
    file.write_text("one\n")
    assert this_commit() == clean


def test_the_table_says_of_a_commit_that_files_differed():
    digits = "0123456789abcdef" * 2 + "01234567"
    assert _short(digits) == digits[:12] and _short(f"{digits}-dirty-00aa") == f"{digits[:12]}-dirty"
    assert _short("version 0.10.12") == "version 0.10.12" and _short("") == ""
