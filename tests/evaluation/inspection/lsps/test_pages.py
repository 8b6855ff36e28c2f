"""The pages: hostile text stays text, a real browser opens them from disk, and they replace only their like."""

import errno
import html
import json
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mlsm.common import disk
from mlsm.common.disk import file_sha256
from mlsm.common.errors import InspectionError
from mlsm.evaluation.inspection.lsps import pages
from shards import clean

pytestmark = pytest.mark.promise("43 text of others …")

HOSTILE_SEARCHES = ("<script>", "__proto__", "{{7*7}}", "&lt;", "constructor")


@pytest.fixture(scope="module")
def written(hostile_view, tmp_path_factory):
    directory = tmp_path_factory.mktemp("pages") / "a <b>view & more"
    report = pages.write(hostile_view, directory)
    return directory, report


class Elements(HTMLParser):
    """Names and attributes of all elements, and the text."""

    def __init__(self, source):
        super().__init__()
        self.names, self.addresses, self.text = set(), [], ""
        self.feed(source)

    def handle_starttag(self, name, attributes):
        self.names.add(name)
        self.addresses += [value for key, value in attributes if key in ("href", "src", "action")]
        assert not any(key.startswith("on") for key, _ in attributes)

    def handle_data(self, data):
        self.text += data


def test_text_of_the_corpus_is_never_markup(written):
    directory, report = written
    forbidden = {"script", "img", "iframe", "object", "embed", "style", "svg", "i"}
    text = ""
    for lsp in range(24):
        found = Elements((directory / "lsp" / f"{lsp}.html").read_text(encoding="utf-8"))
        assert not found.names & forbidden and {"mark", "section"} <= found.names
        text += found.text
    for hostile in ("<script>window.hacked=1</script>", "{{7*7}}", "<img/src=x/onerror=window.hacked=1>", "&lt;"):
        assert hostile in text
    for name in ("lsps", "words"):
        script = (directory / "data" / f"{name}.js").read_text(encoding="ascii")
        json.loads(re.fullmatch(r"window\.[A-Z]+ = (.*);\n", script)[1])


def test_sentences_of_the_head_are_apart(hostile_view):
    """Jinja takes the line's end after a block, and with it the only space between two sentences."""
    facts = hostile_view.facts() | {"dead": 2, "labelled": False, "probe": "a probe"}
    text = Elements(pages.templates().get_template("index.html").render(name="n", teacher="t", facts=facts)).text
    assert "do not occur there." in text and "No word-sense labels" in text and "Each page shows" in text
    assert not re.findall(r"[a-z]\.[A-Z]\w+ ", text)


def test_the_search_has_every_word_that_a_page_lists(written):
    """Typical words beyond those of an LSP's name, rare ones too, and the lemmas of its senses."""
    directory, _ = written
    script = (directory / "data" / "lsps.js").read_text(encoding="ascii")
    rows = json.loads(re.fullmatch(r"window\.[A-Z]+ = (.*);\n", script)[1])["rows"]
    longer = 0
    for lsp, (_, _, name, _, _, searched) in enumerate(rows):
        page = (directory / "lsp" / f"{lsp}.html").read_text(encoding="utf-8")
        typical = re.search(r'<dd class="words">(.*?)</dd>', page, re.DOTALL)
        words = [html.unescape(word) for word in re.findall(r"<span>(.*?) <small>", typical[1])] if typical else []
        senses = map(html.unescape, re.findall(r'<li><b>([^<]*)</b> <span class="name">[^<]*·', page))
        assert {*words, *(lemma for lemmas in senses for lemma in lemmas.split(", "))} <= set(searched)
        longer += len(words) > len(name.split(", "))
    assert longer and "depository" in rows[3][5]
    assert "rows[lsp][5]" in (directory / "view.js").read_text()


def test_the_files_and_where_they_point(written, hostile_store):
    directory, report = written
    assert report["k"] == 24 and report["labelled"] and report["files"] == 24 + 6
    sources = {path: Elements(path.read_text(encoding="utf-8")) for path in directory.rglob("*.html")}
    for path, found in sources.items():
        for address in found.addresses:
            assert "://" not in address and (path.parent / address).is_file(), address
    assert "://" not in (directory / "view.js").read_text() + (directory / "style.css").read_text()
    assert hostile_store.path.name in sources[directory / "index.html"].text
    assert "depository, bank" in sources[directory / "lsp" / "3.html"].text


def test_only_a_view_is_replaced_and_only_by_a_whole_one(hostile_view, tmp_path, monkeypatch):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(InspectionError, match="is no view of show-lsp"):
        pages.write(hostile_view, mine)
    assert (mine / "thesis.txt").is_file()
    place = tmp_path / "view"
    pages.write(hostile_view, place)
    (place / "old").touch()

    def interrupted(stage, done, total, **_):
        if stage == "pages" and done == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(hostile_view, "progress", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pages.write(hostile_view, place)
    assert (place / "old").is_file() and (place / "lsp" / "23.html").is_file()
    with pytest.raises(KeyboardInterrupt):
        pages.write(hostile_view, tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "view"]
    monkeypatch.undo()
    pages.write(hostile_view, place)
    assert (place / "old").is_file() and sorted(path.name for path in tmp_path.iterdir()) == ["mine", "view"]


def everything(directory):
    """Every file below a directory: bytes, or where a link points."""
    return {
        path.relative_to(directory).as_posix(): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in directory.rglob("*")
        if path.is_symlink() or path.is_file()
    }


@pytest.mark.promise(
    "`show-lsp --html` over an earlier view: files of the user stay, one with the name of a page is refused "
    "before anything is done",
    cases="1, 3",
)
def test_files_of_the_user_in_a_view_stay(hostile_view, tmp_path, monkeypatch):
    place = tmp_path / "view"
    pages.write(hostile_view, place)
    fresh = everything(place)
    (place / "lsp" / "23.html").rename(place / "lsp" / "4000.html")  # a page of a larger view, changed since
    with open(place / "lsp" / "4000.html", "a") as file:
        file.write("<!-- mine -->")
    (place / "notes" / "empty").mkdir(parents=True)
    (place / "notes" / "thesis.tex").write_text("years of work")
    (place / "lsp" / "annotated.html").write_text("mine")
    (place / "link").symlink_to("nowhere")
    mine = {name: content for name, content in everything(place).items() if name not in fresh}
    # A page of ours that the new view lacks goes; that view.json claims the user's files makes none of them ours.
    (place / "lsp" / "24.html").write_text("ours")
    mark = json.loads((place / "view.json").read_text())
    mark["files"] |= {
        "lsp/24.html": file_sha256(place / "lsp" / "24.html"),
        "notes/none": None,
        "notes/thesis.tex": file_sha256(place / "notes" / "thesis.tex"),
    }
    (place / "view.json").write_text(json.dumps(mark))
    report = pages.write(hostile_view, place)
    assert everything(place) == fresh | mine and (place / "notes" / "empty").is_dir()
    assert report["files"] == len(fresh) and report["bytes"] == sum(map(len, fresh.values()))
    # One that comes while the pages are written.
    monkeypatch.setattr(hostile_view, "progress", lambda *_, **__: (place / "late").write_text("mine, too"))
    pages.write(hostile_view, place)
    assert everything(place) == fresh | mine | {"late": b"mine, too"}
    assert [path.name for path in tmp_path.iterdir()] == ["view"]


@pytest.mark.promise("`show-lsp --html` …")
@pytest.mark.parametrize("name", ["index.html", "lsp/3.html", "data"])
def test_a_file_of_the_user_with_the_name_of_a_page_is_refused_before_anything_is_done(hostile_view, tmp_path, name):
    place = tmp_path / "view"
    pages.write(hostile_view, place)
    if (place / name).is_dir():
        shutil.move(place / name, tmp_path / "elsewhere")
        (place / name).symlink_to(tmp_path / "elsewhere")
    else:
        (place / name).write_text("my own page")
    before = everything(place)
    with pytest.raises(InspectionError, match=rf"{name} is not as show-lsp wrote it.*Nothing was changed"):
        pages.write(hostile_view, place)
    assert everything(place) == before


def test_a_view_of_an_earlier_version_is_replaced_but_for_what_has_no_name_of_ours(hostile_view, tmp_path):
    place = tmp_path / "view"
    pages.write(hostile_view, place)
    fresh = everything(place)
    (place / "view.json").write_text('{"made_by": "mlsm show-lsp", "format": 1}')
    (place / "index.html").write_text("an older page")
    (place / "thesis.tex").write_text("years of work")
    pages.write(hostile_view, place)
    assert everything(place) == fresh | {"thesis.tex": b"years of work"}


def test_the_older_view_comes_back_when_the_new_one_cannot_take_its_place(hostile_view, tmp_path, monkeypatch):
    place, rename = tmp_path / "view", disk.rename
    pages.write(hostile_view, place)
    (place / "old").touch()
    failing = iter([OSError(errno.ENOTEMPTY, "taken"), None, OSError("no space left"), None])

    def failing_rename(old, new):
        if error := next(failing):
            raise error
        rename(old, new)

    monkeypatch.setattr(disk, "rename", failing_rename)
    with pytest.raises(OSError, match="no space"):
        pages.write(hostile_view, place)
    assert (place / "old").is_file() and [path.name for path in tmp_path.iterdir()] == ["view"]


def test_whatever_a_kill_leaves_is_known_to_clean(hostile_view, tmp_path, monkeypatch):
    place, rename, left = tmp_path / "view", disk.rename, []

    def looking(old, new):
        rename(old, new)
        left.append([path for path in tmp_path.iterdir() if path != place and not clean._recognise(path)])

    pages.write(hostile_view, place)
    monkeypatch.setattr(disk, "rename", looking)
    pages.write(hostile_view, place)
    assert left == [[], []]  # after the older view has gone, and after the new one has come


def test_a_link_to_a_view_stays_a_link(hostile_view, tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    pages.write(hostile_view, tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "index.html").is_file()
    monkeypatch.chdir(tmp_path / "real")
    assert pages.write(hostile_view, Path("."))["files"] == 24 + 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


# -- in a browser -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    webdriver = pytest.importorskip("selenium.webdriver")
    from selenium.webdriver.chrome.service import Service

    programs = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in programs:
        pytest.skip("no chromium and chromedriver are installed")
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1200,900"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(programs[1]))
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser, written):
    """A function that opens a page of the view from disk; no page may complain or run a text of the corpus."""
    base = Path(written[0])

    def open_page(name, query=""):
        browser.get((base / name).as_uri() + query)
        return browser

    yield open_page
    assert browser.get_log("browser") == []
    assert browser.execute_script("return window.hacked") is None


def test_the_list_is_sorted_and_searched(opened):
    browser = opened("index.html")
    assert _column(browser, 0) != sorted(_column(browser, 0), key=int) and len(_column(browser, 0)) == 24
    _find(browser, "th button").click()
    assert _column(browser, 0) == [str(lsp) for lsp in range(24)]
    _find(browser, "th button").click()
    assert _column(browser, 0) == [str(lsp) for lsp in range(23, -1, -1)]
    _search(browser, "bank")  # a label
    assert _column(browser, 0) == ["3"] and "depository" in _find(browser, "td .sense").text
    _search(browser, "17")
    assert _column(browser, 0)[0] == "17"
    _follow(browser, _find(browser, "tbody a"))
    assert _find(browser, "h1").text == "LSP 17"


def test_a_word_is_found_with_its_lsps(opened, hostile_view):
    browser = opened("index.html")
    _search(browser, "w31")
    _wait(browser, "#words li")
    assert _find(browser, "#words b").text == "w31"
    expected = {row["lsp"] for row in hostile_view.word("w31")["lsps"]}
    chips = browser.find_elements("css selector", "#words li:first-child .chips a")
    assert {int(chip.text.split()[0]) for chip in chips} == expected != set()
    address = chips[0].get_attribute("href")
    _follow(browser, chips[0])
    assert browser.current_url == address
    search = _find(browser, "input[type=search]")
    search.send_keys("w40")
    search.submit()
    _wait(browser, "#words li")
    assert _find(browser, "#words b").text == "w40" and "index.html" in browser.current_url


@pytest.mark.parametrize("query", HOSTILE_SEARCHES)
def test_hostile_words_are_found_as_words(opened, query):
    browser = opened("index.html")
    _search(browser, query)
    _wait(browser, "#words h2")
    title, found = _find(browser, "#words h2").text, browser.find_elements("css selector", "#words b")
    assert any(query in word.text for word in found) or title.startswith("No word with")
    assert (title == "Words") == (query != "constructor")


@pytest.mark.parametrize("width", [375, 1200])
def test_no_page_is_wider_than_the_screen(opened, width):
    browser = opened("index.html")
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 812, "deviceScaleFactor": 1, "mobile": width < 500},
    )
    for page, query in (("index.html", ""), ("index.html", "?q=script"), ("lsp/3.html", ""), ("lsp/5.html", "")):
        opened(page, query)
        if query:
            _wait(browser, "#words li")
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        assert browser.execute_script("return innerWidth") == width
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_pages_are_dark_where_the_reader_wants_it(opened):
    browser = opened("lsp/3.html")
    colours = []
    for scheme in ("light", "dark"):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        colours.append(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
    light, dark = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours)
    assert light > 600 and dark < 150


def _find(browser, selector):
    return browser.find_element("css selector", selector)


def _wait(browser, selector):
    from selenium.webdriver.support.wait import WebDriverWait

    WebDriverWait(browser, 10).until(lambda driver: driver.find_elements("css selector", selector))


def _follow(browser, link):
    """Click a link and wait for the page that it leads to."""
    from selenium.webdriver.support.wait import WebDriverWait

    address = link.get_attribute("href")
    link.click()
    WebDriverWait(browser, 10).until(lambda driver: driver.current_url == address)
    WebDriverWait(browser, 10).until(lambda driver: driver.find_elements("css selector", "h1"))


def _search(browser, query):
    field = _find(browser, "#query")
    field.clear()
    field.send_keys(query)


def _column(browser, number):
    return [cell.text for cell in browser.find_elements("css selector", f"tbody td:nth-child({number + 1})")]
