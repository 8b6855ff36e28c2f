"""Whether the checks that count instructions and model streams need to run: only if what they check has changed.

    pytestmark = kernels_changed.only_if_changed("streams")     # in a file of tests
    grep ^SKIPPED LOG | python tests/pipeline/solvers/kernels_changed.py     # in `make gpu-checks`, once they passed

gpu_checked.json holds the hash of the files for which each check passed last. `make gpu-checks` always runs them, and
then writes it.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
RECORD = Path(__file__).with_name("gpu_checked.json")
CHECKERS = "tests/pipeline/solvers"
FILES = {  # patterns of the files on which a check depends, its tests last
    "budgets": (
        *("pipeline/solvers/cuda_*.py", "pipeline/solvers/cd_cuda.py"),
        *(f"{CHECKERS}/{name}.py" for name in ("instruction_budget", "sass", "replay", "lockstep", "compile_kernels")),
        f"{CHECKERS}/test_instruction_budgets.py",
    ),
    "streams": (
        *("pipeline/solvers/*.py", "pipeline/overlap.py", "student/batches.py"),
        *(f"{CHECKERS}/{name}.py" for name in ("stream_checks", "fake_device", "lockstep")),
        f"{CHECKERS}/test_streams.py",
    ),
}


def digest(check: str, root: Path = ROOT) -> str:
    """The hash of the names and contents of the files that a check depends on."""
    found = hashlib.sha256()
    for file in sorted(file for pattern in FILES[check] for file in root.glob(pattern)):
        found.update(f"{file.relative_to(root)} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest()


def only_if_changed(check: str) -> pytest.MarkDecorator:
    """A mark that skips tests whose files are those with which they passed last."""
    unchanged = json.loads(RECORD.read_text()).get(check) == digest(check)
    return pytest.mark.skipif(
        unchanged and not os.environ.get("MLSM_GPU_CHECKS"),
        reason="the kernels have not changed since this passed; make gpu-checks",
    )


def record(skipped: str) -> None:
    """Note that the checks have passed, except those whose files of tests are named as skipped."""
    noted = json.loads(RECORD.read_text())
    passed = {check: digest(check) for check in FILES if Path(FILES[check][-1]).name not in skipped}
    RECORD.write_text(json.dumps(noted | passed, indent=1) + "\n")


if __name__ == "__main__":
    record(sys.stdin.read())
