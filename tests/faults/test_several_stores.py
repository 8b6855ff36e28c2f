"""Several stores written in one run, killed or on a full disk at any call: the rerun's bytes are an unbroken run's."""

import json
import os

import pytest
from preloaded import Preloaded
from test_commit import run_script

pytestmark = pytest.mark.promise(
    "several stores of one run, killed or on a full disk between their commits: the rerun's bytes",
    cases="4; 40 at 1,000 cases",
)

CASES = max(4, int(os.environ.get("MLSM_FAULT_CASES", 0)) // 25)


def test_kills_and_full_disks_between_the_commits_of_several_stores(tmp_path):
    run = run_script("kill_several_stores.py", tmp_path, CASES, process=Preloaded)
    assert run.returncode == 0, run.stderr
    outcome = json.loads(run.stdout.splitlines()[-1])
    assert outcome["kills"] + outcome["full disks"] == CASES and outcome["with stores apart"] >= 1
