"""The site of docs/: built strictly, every command and public name on a page, and nothing from elsewhere."""

import base64
import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import mlsm
from mlsm.commands import load_all

ROOT = Path(__file__).resolve().parent.parent
FETCHED = re.compile(r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?https?:|<link\b[^>]*\bhref=["']?https?:""")


def pages_of(navigation):
    """The files that a navigation names."""
    if isinstance(navigation, str):
        return [navigation]
    parts = navigation.values() if isinstance(navigation, dict) else navigation
    return [page for part in parts for page in pages_of(part)]


def test_the_navigation_has_every_page_once():
    navigation = pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])
    docs = ROOT / "docs"
    pages = [*docs.glob("*.md"), *docs.glob("studies/*.md"), *docs.glob("studies/*/*.md")]
    assert sorted(navigation) == sorted(path.relative_to(docs).as_posix() for path in pages), "mkdocs.yml, nav"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site. --strict makes an error of every warning: broken links and anchors, unlisted pages."""
    pytest.importorskip("mkdocs", reason='the site needs mkdocs: pip install "mlsm-pretrain[docs]"')
    pytest.importorskip("material", reason='the site needs mkdocs-material: pip install "mlsm-pretrain[docs]"')
    pytest.importorskip(
        "mkdocstrings_handlers.python", reason='the site needs mkdocstrings: pip install "mlsm-pretrain[docs]"'
    )
    built = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", built]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    return built


def test_every_command_has_its_flags_on_a_page(site):
    for name, command in load_all().items():
        page = html.unescape((site / "reference" / f"{name}.html").read_text(encoding="utf-8"))
        assert command.summary in page and "--json" in page
    page = (site / "reference" / "encode-lsp.html").read_text(encoding="utf-8")
    assert 'id="layer"' in page and "each gets its own dictionary and results" in page
    assert "hf://datasets/&lt;owner&gt;" in page, "placeholders are text and not HTML"
    assert 'href="reference/encode-lsp.html"' in (site / "commands.html").read_text(encoding="utf-8")


def test_links_of_the_readme_lead_to_headings(site):
    """README is not a page of the site, so the build does not check its links. Anchors are those that GitHub makes."""
    links = re.findall(r"\]\(docs/([\w/-]+)\.md#([^)]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert links
    for page, anchor in links:
        assert f'id="{anchor}"' in (site / f"{page}.html").read_text(encoding="utf-8"), (page, anchor)


def test_every_public_name_is_described(site):
    page = (site / "reference" / "python.html").read_text(encoding="utf-8")
    for name in mlsm.__all__:
        home = mlsm.HOME.get(name, "mlsm")
        assert f'id="{home}.{name}"' in page, name


def test_formats_are_those_that_the_code_states(site):
    page = (site / "reference" / "formats.html").read_text(encoding="utf-8")
    assert all(word in page for word in ("run_starts", "__end__/end.json", "mlsm-record-2", "dictionary.json"))


def test_every_notebook_is_a_page_to_which_links_lead(site):
    """The file itself is only for those who come from its page."""
    for path in (ROOT / "docs" / "tutorials").glob("*.ipynb"):
        page = (site / "tutorials" / f"{path.stem}.html").read_text(encoding="utf-8")
        assert re.findall(r'href="([^"]*\.ipynb)"', page) == [path.name] and "encode_lsp" in page
        assert (site / "tutorials" / path.name).is_file()
    assert ".ipynb" not in (site / "index.html").read_text(encoding="utf-8")


def test_outputs_of_notebooks_are_on_their_pages(site):
    """As far as they are stored: what cells print, and their figures as files."""
    for path in (ROOT / "docs" / "tutorials").glob("*.ipynb"):
        page = html.unescape((site / "tutorials" / f"{path.stem}.html").read_text(encoding="utf-8"))
        words = " ".join(page.split())  # the page expands tabs
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        outputs = [output for cell in cells for output in cell.get("outputs", ())]
        assert all(" ".join(line.split()) in words for output in outputs for line in output.get("text", ()))
        figures = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", ())]
        shown = [site / "tutorials" / name for name in re.findall(r'<img [^>]*src="([^"]*)"', page)]
        assert [base64.b64encode(file.read_bytes()).decode() for file in shown] == figures


def test_lines_of_code_are_seen_whole(site, browser):
    """Those of 120 characters, too, on a laptop, without scrolling."""
    hidden = "return [...document.querySelectorAll('pre, pre > code')]."
    hidden += "filter((one) => one.scrollWidth > one.clientWidth).length"
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    )
    for page in ("reference/formats", "reference/encode-lsp", "tutorials/own-corpus", "training"):
        browser.get((site / f"{page}.html").as_uri())
        assert browser.execute_script("return document.querySelectorAll('pre > code').length") > 1
        assert browser.execute_script(hidden) == 0, page
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_nothing_is_fetched_from_elsewhere(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 50
    assert not [page.name for page in pages if FETCHED.search(page.read_text(encoding="utf-8"))]
    styles = [path.read_text(encoding="utf-8") for path in site.rglob("*.css")]
    assert not [found for text in styles for found in re.findall(r"(?:@import|url\()\s*[\"']?https?:[^)]*", text)]
