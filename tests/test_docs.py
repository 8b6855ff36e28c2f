"""What README, docs and notebooks show: commands that exist with flags that exist, names that `import mlsm` has, links
that lead somewhere."""

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import promises
import pytest

import mlsm
from mlsm.cli.flags import read_flags, take_flag, take_value
from mlsm.commands import load, names
from mlsm.evaluation.comparison.models import OBJECTIVES as LABELS
from mlsm.evaluation.inspection.pages import text_of
from student.objectives import OBJECTIVES

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("*.md", "studies/*.md", "tutorials/*.ipynb")
PAGES = sorted([ROOT / "README.md", *(page for kind in KINDS for page in (ROOT / "docs").glob(kind))])
TABLES = ("objectives.md", "commands.md")
ROOMS = {"pipeline", "shards", "student"}


def markdown(page):
    return text_of(f"tutorials/{page.stem}") if page.suffix == ".ipynb" else page.read_text(encoding="utf-8")


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", markdown(page), re.DOTALL)


def test_every_command_is_described_once():
    """A merge may leave two rows behind."""
    described = re.findall(r"^\| `([a-z-]+)", (ROOT / "docs" / "commands.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(described) == sorted(names())


def test_the_files_that_the_architecture_names_are_there():
    """Those of the tree are named below the folder that they lie in."""
    tree = re.search(r"```\n(cli\.py.*?)```", (ROOT / "docs" / "ARCHITECTURE.md").read_text(), re.DOTALL)[1]
    folder, named = "", []
    for line in tree.splitlines():
        if heading := re.match(r"([\w/]+/) ", line):
            folder = heading[1]
        named += [folder + name for name in re.findall(r"[\w/]+\.py\b", line) if folder or name == "cli.py"]
    assert len(named) > 60 and [name for name in named if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#\s]+)", markdown(page))
    assert not [link for link in links if "://" not in link and not (page.parent / link).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_goes_through_the_public_door(page):
    for code in blocks(page, "python"):
        tree = ast.parse(code)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
                assert not ROOMS & {name.split(".")[0] for name in names}, code
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "mlsm":
                assert node.attr in mlsm.__all__, code


def commands(page):
    """The command lines of a page, as words behind the program."""
    for code in blocks(page, "sh"):
        for line in code.replace("\\\n", " ").splitlines():
            found = re.search(r"(?:python cli\.py|cli\.py|mlsm) +([a-z]+(?:-[a-z]+)* .*|[a-z]+-[a-z]+)$", line)
            if found:
                yield [word for word in shlex.split(found[1], comments=True) if word not in ("...", "…")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_flags_exist(page):
    for name, *words in commands(page):
        command = load(name)
        settings = command.settings
        for flag in ("--print-config", "--json", "--debug"):
            take_flag(words, flag)
        if command.recipes:
            take_value(words, "--recipe")
        try:
            read_flags(settings, words)
        except ValueError as error:
            found = re.search(r" takes .*found '?([^']*)", str(error))  # --lsp N, --lr <rate>, --seed $seed
            is_placeholder = found is not None and not re.search(r"[a-z]", re.sub(r"<.*?>|\$\w+", "", found[1]))
            assert is_placeholder or "needs a value" in str(error), f"{name} {words}: {error}"


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_objectives_are_in_the_tables(objective):
    rows = {page: re.findall(r"^\|.*$", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.M) for page in TABLES}
    assert any(row.startswith(f"| `{objective}`") for row in rows["objectives.md"])
    assert any(row.startswith("| `train-student`") and f"`{objective}`" in row for row in rows["commands.md"])
    assert objective in LABELS


def test_pictures_are_small():
    """They are in every wheel and in every clone: 150 kB each, 600 kB in all."""
    sizes = {path.name: path.stat().st_size for path in (ROOT / "docs" / "figures").glob("*.png")}
    assert len(sizes) > 4 and max(sizes.values()) <= 150_000 and sum(sizes.values()) <= 600_000, sizes


def test_screenshots_are_what_the_browser_shows(tmp_path):
    """A stand-in for the browser draws the address that it was given in its window."""
    image = pytest.importorskip("PIL.Image", reason='pictures need Pillow: pip install "mlsm-pretrain[vision]"')
    browser, page = tmp_path / "browser", tmp_path / "a page.html"
    browser.write_text(
        f"""#!{sys.executable}
import sys
from PIL import Image
flags = dict(flag[2:].partition("=")[::2] for flag in sys.argv[1:-1])
width, height = map(int, flags["window-size"].split(","))
colour = (200, 0, 0) if sys.argv[-1] == {page.as_uri()!r} else (0, 0, 0)
Image.new("RGBA", (width, height), colour).save(flags["screenshot"])
"""
    )
    browser.chmod(0o755)
    page.touch()
    script = [sys.executable, ROOT / "docs" / "screenshots.py", "report", "--report", page, "--figures", tmp_path]
    subprocess.run(script, check=True, env=os.environ | {"MLSM_BROWSER": str(browser)}, stdout=subprocess.DEVNULL)
    with image.open(tmp_path / "report.png") as shot:
        assert shot.mode == "P" and shot.size[0] == 1120 and shot.convert("RGB").getpixel((5, 5)) == (200, 0, 0)
    failed = subprocess.run(script, env=os.environ | {"MLSM_BROWSER": "/bin/false"}, capture_output=True)
    assert failed.returncode != 0 and b"/bin/false" in failed.stderr


@pytest.mark.parametrize("page", promises.TABLES, ids=lambda page: page.name)
def test_promises_are_those_of_the_tests(page):
    text = page.read_text(encoding="utf-8")
    assert promises.make_page(page) == text, "generate the tables again:  python tests/promises.py"
