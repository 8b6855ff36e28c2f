"""The first cases of the fuzzer: a fixed number of a fixed seed, so that the suite gives the same answer every time."""

import json
from pathlib import Path

import pytest
from preloaded import run_python

pytestmark = pytest.mark.promise(
    "whole stores (LSPs, ids, logits), runs, finished and tracked runs, outputs, dictionaries, exports, probes, masked "
    "language models, teachers, recipes, vectors, evaluation records and servers, spoilt in one to three ways, with "
    "links, pipes and devices among them, and used by every command that reads or writes them: the unspoilt "
    "result, or a typed error that names a file; 20 s and 400 MB a use; nothing outside changed, leaked or executed; "
    "what verify --full calls whole can be read",
    cases="24 in the suite; docs/log.md says how many since",
)

FUZZ = Path(__file__).with_name("fuzz.py")


def test_the_first_cases_have_no_finding():
    done = run_python([FUZZ, "--seed", "0", "--cases", "24"])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["cases"] == 24 and counts["findings"] == 0
    assert counts["uses"]["refused"] > 10 and counts["uses"]["done"] > 40  # not everything is spoilt beyond use
