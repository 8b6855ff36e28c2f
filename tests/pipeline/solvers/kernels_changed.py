"""Whether the checks that depend on the solvers alone need to run: only if what they check has changed.

    pytestmark = kernels_changed.only_if_changed("streams")     # in a file of tests
    grep ^SKIPPED LOG | python tests/pipeline/solvers/kernels_changed.py     # in `make gpu-checks`, once they passed

gpu_checked.json holds the hash of the files, and of the versions of libraries that compile or simulate them, for which
each check passed last. `make gpu-checks` always runs them, and then writes it.
"""

import hashlib
import json
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
RECORD = Path(__file__).with_name("gpu_checked.json")
CHECKERS = "tests/pipeline/solvers"
SOLVERS = ("pipeline/solvers/*.py", "mlsm/common/onednn.py")
LIBRARIES = ("numba", "numba-cuda", "numpy", "torch")
FILES = {  # patterns of the files on which a check depends, its tests last
    "budgets": (
        *SOLVERS,
        *(f"{CHECKERS}/{name}.py" for name in ("instruction_budget", "sass", "replay", "gpu_source", "lockstep")),
        f"{CHECKERS}/test_instruction_budgets.py",
    ),
    "streams": (
        *(*SOLVERS, "pipeline/overlap.py", "student/batches.py"),
        *(f"{CHECKERS}/{name}.py" for name in ("stream_checks", "fake_device", "lockstep")),
        f"{CHECKERS}/test_streams.py",
    ),
    "simulator": (
        *SOLVERS,
        *(f"{CHECKERS}/{name}.py" for name in ("cuda_checks", "lockstep", "kernels_on_cpu", "compile_kernels", "sass")),
        f"{CHECKERS}/test_cd_cuda.py",
    ),
    "races": (
        *SOLVERS,
        *(f"{CHECKERS}/{name}.py" for name in ("races", "race_cases", "lockstep", "gpu_source")),
        f"{CHECKERS}/test_races.py",
    ),
    "compiled": (*SOLVERS, "tests/lasso.py", f"{CHECKERS}/test_compiled.py"),
}


def digest(check: str, root: Path = ROOT) -> str:
    """The hash of the versions of Python and libraries, and of the names and contents of a check's files."""
    versions = [*sys.version_info[:2], *map(_version, LIBRARIES)]
    found = hashlib.sha256(str(versions).encode())
    for file in sorted(file for pattern in FILES[check] for file in root.glob(pattern)):
        found.update(f"{file.relative_to(root)} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest()


def _version(library):
    try:
        return version(library).split("+")[0]  # +cpu, +cu130
    except PackageNotFoundError:
        return "none"


def only_if_changed(check: str) -> pytest.MarkDecorator:
    """A mark that skips tests whose files are those with which they passed last."""
    unchanged = json.loads(RECORD.read_text()).get(check) == digest(check)
    return pytest.mark.skipif(
        unchanged and not os.environ.get("MLSM_GPU_CHECKS"),
        reason="the solvers have not changed since this passed; make gpu-checks",
    )


def record(skipped: str) -> None:
    """Note that the checks have passed, except those whose files of tests are named as skipped, if not for a GPU."""
    skipped = "\n".join(line for line in skipped.splitlines() if "needs a GPU" not in line)
    noted = json.loads(RECORD.read_text())
    passed = {check: digest(check) for check in FILES if Path(FILES[check][-1]).name not in skipped}
    RECORD.write_text(json.dumps(noted | passed, indent=1) + "\n")


if __name__ == "__main__":
    record(sys.stdin.read())
