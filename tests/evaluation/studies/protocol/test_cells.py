"""A part of a study is the work of one commit, and its state is what its files and its lock say."""

import subprocess
import sys

import pytest
from preloaded import ROOT

from common.errors import StudyError
from evaluation.studies.protocol.cells import State, at_work, state_of, this_commit

HOLD = """
import sys, time
from pathlib import Path
from evaluation.studies.protocol.cells import at_work
with at_work(Path(sys.argv[1]), "train-student/mlm-seed0", "one"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_part_goes_from_missing_to_done(tmp_path):
    part = "train-student/mlm-seed0"
    assert state_of(tmp_path, part, False) == State("missing", None)
    with at_work(tmp_path, part, "one"):
        pass
    assert state_of(tmp_path, part, False) == State("begun", "one")
    assert state_of(tmp_path, part, True) == State("done", "one")


def test_another_commit_is_refused_and_the_first_goes_on(tmp_path):
    with at_work(tmp_path, "a", "one"):
        pass
    with pytest.raises(StudyError, match="a was begun by the code of one, this is two"), at_work(tmp_path, "a", "two"):
        pass
    with at_work(tmp_path, "a", "one"):
        pass


def test_a_process_that_is_at_work_is_seen_and_its_death_as_well(tmp_path):
    part = "train-student/mlm-seed0"
    other = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout.readline() == "held\n"
        assert state_of(tmp_path, part, False) == State("running", "one")
        with pytest.raises(StudyError, match="another process is at work"), at_work(tmp_path, part, "one"):
            pass
    finally:
        other.kill()
        other.wait()
        other.stdout.close()
    assert state_of(tmp_path, part, False) == State("begun", "one")


def test_half_a_line_of_a_killed_process_is_no_commit(tmp_path):
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells/a").write_bytes(b"half of a com")
    with at_work(tmp_path, "a", "one"):
        pass
    assert state_of(tmp_path, "a", False) == State("begun", "one")


def test_the_commit_is_that_of_the_checkout():
    git = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True)
    if git.returncode:
        assert this_commit().startswith("version ")
    else:
        assert this_commit().removesuffix("-dirty") == git.stdout.strip()
