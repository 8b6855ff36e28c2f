"""Messages name the program as it was called."""

import re
import shutil
from pathlib import Path

import pytest

from mlsm.common.invocation import program

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("called", "on_the_path", "said"),
    [
        ("cli.py", None, "python cli.py"),
        ("/a b/cli.py", "/usr/bin/mlsm", "python '/a b/cli.py'"),
        ("/usr/bin/mlsm", "/usr/bin/mlsm", "mlsm"),
        (".venv/bin/mlsm", None, ".venv/bin/mlsm"),
        ("/site-packages/mlsm/__main__.py", "/usr/bin/mlsm", "python -m mlsm"),
        ("", None, "mlsm"),
        ("my_script.py", None, "mlsm"),
    ],
)
def test_it_is_what_the_user_typed(called, on_the_path, said, monkeypatch):
    monkeypatch.setattr("sys.argv", [called, "show-lsp"])
    monkeypatch.setattr(shutil, "which", lambda name: on_the_path)
    assert program() == said


def test_no_message_says_it_otherwise():
    """Outside of docstrings, comments and usage lines, commands are never spelled out."""
    packages = ("mlsm", "pipeline", "shards", "student")
    pattern = re.compile(
        r"""["' (](mlsm|python cli\.py) +"""
        r"(?:[a-z]+-(?:lsp|shards|student|layer|dictionary|probe|ids|logits|flops|blimp)|finetune|compare|clean|study)\b"
    )
    found = []
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if pattern.search(line) and "`mlsm" not in line and "made_by" not in line:
                    found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert [line for line in found if not line.startswith(("mlsm/common/invocation.py", "mlsm/__main__.py:"))] == []
