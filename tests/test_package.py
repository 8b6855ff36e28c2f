"""What is installed: a wheel with recipes, teacher, text and pages, no tests, and a command that runs from anywhere."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def copy_checkout(place):
    """Copy what a build reads: ./runs of a checkout is left out, the package student/runs is not."""
    patterns = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__")

    def ignored(directory, names):
        return {*patterns(directory, names), *({"runs"} if Path(directory) == ROOT else ())}

    shutil.copytree(ROOT, place, symlinks=True, ignore=ignored)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The project's wheel, built from a copy of the checkout without a network."""
    pytest.importorskip("setuptools", reason="building a wheel without a network needs setuptools installed")
    source, built = tmp_path_factory.mktemp("source") / "mlsm", tmp_path_factory.mktemp("wheel")
    copy_checkout(source)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*pip, "-w", built, source], check=True, capture_output=True)
    return next(built.glob("*.whl"))


def test_the_wheel_holds_data_and_no_tests(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    packages = ("mlsm", "pipeline", "shards", "student")
    modules = {path.relative_to(ROOT).as_posix() for package in packages for path in (ROOT / package).rglob("*.py")}
    assert modules | {f"{package}/py.typed" for package in packages} <= names
    assert "cli.py" not in names, "which may be the name of a module of the user's"
    recipes = {f"mlsm/recipes/{path.name}" for path in (ROOT / "mlsm" / "recipes").glob("*.yaml")}
    teacher = {f"pipeline/bundled_teacher/{path.name}" for path in (ROOT / "pipeline/bundled_teacher").iterdir()}
    text = {f"pipeline/bundled_text/{path.name}" for path in (ROOT / "pipeline/bundled_text").glob("*.*")}
    assert len(text) == 3 and text <= names
    report = {path.relative_to(ROOT).as_posix() for path in (ROOT / "mlsm" / "evaluation").rglob("templates/*")}
    lsps = {path.relative_to(ROOT).as_posix() for path in (ROOT / "mlsm" / "evaluation").rglob("static/*")}
    assert report and lsps and report | lsps <= names
    pages = {f"mlsm/pages/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    tutorials = {f"mlsm/pages/tutorials/{path.name}" for path in (ROOT / "docs" / "tutorials").glob("*.ipynb")}
    assert tutorials and pages | tutorials | {"mlsm/pages/figures/lsp-mother.png"} <= names
    assert len(recipes) >= 3 and len(teacher) >= 4 and recipes | teacher <= names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]


def test_an_installed_wheel_runs_away_from_the_checkout(wheel, tmp_path):
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    environment = os.environ | {"PYTHONPATH": str(site), "HF_HUB_OFFLINE": "1"}
    code = (
        "import pipeline.config as config, pipeline.corpus as corpus, pipeline.teacher as teacher\n"
        "from mlsm import __main__ as cli\n"
        f"assert cli.__file__.startswith({str(site)!r}), cli.__file__\n"
        "(text,) = corpus.open_sources(config.CorpusConfig())\n"
        f"assert text.name.startswith({str(site)!r}) and max(piece.record for piece in text.pieces()) == 2699\n"
        "assert teacher.load_tokenizer('bundled').mask_token_id is not None\n"
        "assert cli.run(['docs', 'corpora']) == 0\n"
        "cli.main(['encode-lsp', '--print-config'])\n"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("# Corpora\n") and "max_tokens: 2000000" in run.stdout


def test_the_source_distribution_holds_the_docs(tmp_path):
    copy_checkout(tmp_path / "mlsm")
    code = "import setuptools.build_meta as backend; print(backend.build_sdist('dist'))"
    command = [sys.executable, "-c", code]
    subprocess.run(command, cwd=tmp_path / "mlsm", check=True, capture_output=True)
    (archive,) = (tmp_path / "mlsm" / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    docs = {f"docs/{path.relative_to(ROOT / 'docs').as_posix()}" for path in (ROOT / "docs").rglob("*.*")}
    docs = {name for name in docs if "__pycache__" not in name and not name.endswith(".npy")}
    assert docs | {"Makefile", "constraints.txt", "mkdocs.yml", "mlsm/pages/corpora.md"} <= names
    assert not any(name.endswith(".npy") for name in names)  # the studies' dictionaries, 57 MB
