"""The command docs: pages found by the names that messages use, and messages that cite pages which are there."""

import ast
import json
import re
from pathlib import Path

import pytest

import mlsm
from mlsm import __main__ as cli
from mlsm.commands import docs as view
from mlsm.evaluation.inspection.pages import DocsConfig

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("mlsm", "pipeline", "shards", "student")
MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
NAMES = [entry["page"] for entry in mlsm.docs()["pages"]]


def test_every_page_is_listed(capsys):
    assert cli.run(["docs"]) == 0
    listed = capsys.readouterr().out
    for file in (ROOT / "docs").glob("*.md"):
        heading = file.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        assert re.search(rf"^  {file.stem} +{re.escape(heading)}$", listed, re.MULTILINE)


@pytest.mark.parametrize("name", ["corpora", "Corpora.md", "docs/corpora.md"])
def test_a_page_goes_to_a_pipe_as_it_is(name, capsys):
    assert cli.run(["docs", name]) == 0
    assert capsys.readouterr().out == (ROOT / "docs" / "corpora.md").read_text(encoding="utf-8")


def test_a_terminal_gets_it_laid_out(monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    shown = view.show(mlsm.docs(page="remote").report, DocsConfig(page="remote"))
    assert "```" not in shown and "\x1b" not in shown and max(map(len, shown.splitlines())) <= 60
    assert "(small-encoder.md)" in view.show(mlsm.docs(page="index").report, DocsConfig(page="index"))


def test_a_notebook_reads_like_a_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("mlsm.evaluation.inspection.pages.PAGES", tmp_path)
    (tmp_path / "tutorials").mkdir()
    cells = [{"cell_type": "markdown", "source": ["# Own\n", "text"]}, {"cell_type": "code", "source": ["import mlsm"]}]
    (tmp_path / "tutorials" / "own.ipynb").write_text(json.dumps({"cells": cells}))
    assert cli.run(["docs", "own"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("# Own\ntext\n\n```python\nimport mlsm\n```\n") and f"{tmp_path}/tutorials/own.ipynb" in said


def test_a_name_that_is_no_page(capsys):
    with pytest.raises(ValueError, match="no page 'corpra'. Did you mean corpora\\? There are: ARCHITECTURE, "):
        mlsm.docs(page="corpra")


def test_messages_cite_pages_that_the_command_prints():
    """A message or a flag's help says `docs PAGE`; files of a checkout are for comments and modules' docstrings."""
    cited = []
    for path in MODULES:
        source = path.read_text(encoding="utf-8")
        cited += re.findall(r"(?:mlsm|\{program\(\)\}) docs ([a-z][\w-]+)", source)
        tree = ast.parse(source)
        headings = {
            ast.get_docstring(node, clean=False)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.FunctionDef)
        }
        texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and type(node.value) is str]
        assert not [text for text in texts if text not in headings and re.search(r"docs/[\w-]+\.md", text)], path
    assert len(cited) > 5 and set(cited) <= set(NAMES)
