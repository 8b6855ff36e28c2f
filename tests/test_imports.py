"""Which package may import which, and that light modules stay light (DESIGN.md, import directions)."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = {"cli", "common", "pipeline", "student", "shards", "evaluation", "benchmarks", "recipes"}
ALLOWED = {
    "common": {"common"},
    "recipes": {"recipes", "common"},
    "shards": {"shards", "common"},
    "student": {"student", "shards", "recipes", "common"},    # recipes: which one made the store that is trained on
    "pipeline": {"pipeline", "shards", "common"},
    "evaluation": OURS - {"cli", "benchmarks"},
}
SHARDS_USERS = {"encode", "estimate", "job", "learn", "plan", "worker"}  # who writes, names or plans shards
SHARDS_USERS |= {"coder"}  # which tells the teacher a pair's segments, as shards derives them from the ids
SHARDS_USERS |= {"centering", "dictionary", "teacher"}  # of what stores keep copies, and compare with fingerprints
SOLVER_LIBRARIES = {"numpy", "numba", "llvmlite", "threadpoolctl", "torch", "pipeline"} | set(sys.stdlib_module_names)
SOLVER_LIBRARIES |= {"common"}  # oneDNN


def imported(path):
    """Full names of the modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def python_files(package):
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", [name for name in ALLOWED if (ROOT / name).is_dir()])
def test_packages_import_only_what_they_may(package):
    files = python_files(package)
    assert files
    wrong = [
        (str(path.relative_to(ROOT)), name)
        for path in files
        for name in imported(path)
        if name.split(".")[0] in OURS - ALLOWED[package]
    ]
    assert not wrong


def test_only_some_of_the_pipeline_knows_shards():
    users = {
        path.stem for path in python_files("pipeline") for name in imported(path) if name.split(".")[0] == "shards"
    }
    assert users <= SHARDS_USERS


def test_solvers_know_arrays_only():
    wrong = [
        (path.name, name)
        for path in python_files("pipeline/solvers")
        for name in imported(path)
        if name.split(".")[0] not in SOLVER_LIBRARIES or (name.startswith("pipeline") and "solvers" not in name)
    ]
    assert not wrong


def test_shards_need_torch_in_one_file_at_most():
    users = {path.name for path in python_files("shards") for name in imported(path) if name.split(".")[0] == "torch"}
    assert users <= {"torch_dataset.py"}


@pytest.mark.parametrize("module", ["cli", "pipeline.config", "student.config"])
def test_light_modules_import_nothing_heavy(module):
    heavy = {"torch", "transformers", "numba", "numpy", "webdataset", "tyro", "dask", "distributed"}
    code = f"import sys, {module}; print(sorted(set(sys.modules) & {heavy}))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
