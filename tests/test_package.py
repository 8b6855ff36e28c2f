"""What is installed: a wheel with recipes and teacher in it, no tests, and a command that runs from anywhere."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The project's wheel, built from a copy of the checkout without a network."""
    pytest.importorskip("setuptools", reason="building a wheel without a network needs setuptools installed")
    source, built = tmp_path_factory.mktemp("source") / "mlsm", tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns(".*", "runs", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=ignored)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*pip, "-w", built, source], check=True, capture_output=True)
    return next(built.glob("*.whl"))


def test_the_wheel_holds_data_and_no_tests(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    packages = ("common", "evaluation", "mlsm", "pipeline", "recipes", "shards", "student", "terminal")
    modules = {path.relative_to(ROOT).as_posix() for package in packages for path in (ROOT / package).rglob("*.py")}
    assert modules | {"cli.py", "mlsm/py.typed"} <= names
    recipes = {f"recipes/{path.name}" for path in (ROOT / "recipes").glob("*.yaml")}
    teacher = {f"pipeline/bundled_teacher/{path.name}" for path in (ROOT / "pipeline/bundled_teacher").iterdir()}
    templates = {path.relative_to(ROOT).as_posix() for path in (ROOT / "evaluation").rglob("templates/*")}
    assert templates and templates <= names
    assert len(recipes) >= 3 and len(teacher) >= 4 and recipes | teacher <= names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]


def test_an_installed_wheel_runs_away_from_the_checkout(wheel, tmp_path):
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    environment = os.environ | {"PYTHONPATH": str(site), "HF_HUB_OFFLINE": "1"}
    code = (
        "import cli, pipeline.corpus.docstrings as docstrings, pipeline.teacher as teacher\n"
        f"assert cli.__file__.startswith({str(site)!r}), cli.__file__\n"
        "assert 'torch' in docstrings.required_packages() and 'pytest' not in docstrings.required_packages()\n"
        "assert teacher.load_tokenizer('bundled').mask_token_id is not None\n"
        "cli.main(['encode-lsp', '--print-config'])\n"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "max_tokens: 2000000" in run.stdout
