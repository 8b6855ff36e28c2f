"""The pages: hostile text stays text, a real browser opens them from disk, and they replace only their like."""

import errno
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lsp_pages import HOSTILE, LspPage, records, unpack

from mlsm.common import disk
from mlsm.common.disk import file_sha256
from mlsm.common.errors import InspectionError
from mlsm.evaluation.inspection.lsps import pages, text_pages
from mlsm.evaluation.inspection.lsps.labels import shorten
from mlsm.evaluation.inspection.lsps.view import StoreView
from shards import clean

pytestmark = pytest.mark.promise("43 text of others …")

NUMBERS = ("tokens", "weight", "clarity", "information", "nats", "positional")
HOSTILE_SEARCHES = ("<script>", "__proto__", "{{7*7}}", "&lt;", "constructor")
OCCURRING = set(HOSTILE.values()) - {"\"'><b>"}  # the made-up language has no sentence with that one


@pytest.fixture(scope="module")
def written(hostile_view, tmp_path_factory):
    directory = tmp_path_factory.mktemp("pages") / "a <b>view & more"
    report = text_pages.write(hostile_view, directory)
    return directory, report


@given(st.lists(st.integers(0, 10**7)))
def test_packed_numbers_are_ascii_without_quotes(numbers):
    assert unpack(pages.pack(numbers)) == numbers
    assert json.dumps(pages.pack(numbers)) == f'"{pages.pack(numbers)}"'


def test_data_hold_what_the_view_says(written, hostile_view):
    _same_as_the_view(LspPage(written[0]), hostile_view)


def test_places_are_right_where_a_token_of_the_text_is_no_sample(hostile_store, tmp_path):
    """A mask token of the text is left out of the sample: contexts continue after it, places count it."""
    view = StoreView(hostile_store, 1_000_000)
    view.sample = replace(view.sample, position_N=view.sample.position_N + 2 * (view.sample.position_N > 6))
    text_pages.write(view, tmp_path / "lsps")
    page = LspPage(tmp_path / "lsps")
    assert any(size % 2 for size in unpack(page.data["runs"])[::3])
    _same_as_the_view(page, view)


def _same_as_the_view(page, view):
    contexts = 0
    for lsp in range(view.sample.k):
        expected, found = view.lsp(lsp), page.lsp(lsp)
        columns = {name: page.lsps[name][lsp] for name in NUMBERS}
        assert columns == {
            "tokens": expected["tokens"],
            "weight": pytest.approx(expected["mean_weight"], abs=6e-5),
            "clarity": pytest.approx(expected["clarity"], abs=6e-7),
            "information": pytest.approx(expected["information"], abs=6e-7),
            "nats": pytest.approx(expected["position_nats"], abs=6e-4),
            "positional": expected["positional"],
        }
        assert found["profile"] == [round(100 * part / max(expected["profile"])) for part in expected["profile"]]
        assert found["typical"] == [[text, round(1000 * share)] for text, share in expected["typical"]]
        assert found["co_firing"] == [
            [other["lsp"], pytest.approx(other["npmi"], abs=6e-3), other["support"]] for other in expected["co_firing"]
        ]
        assert found["nearest"] == [
            [other["lsp"], pytest.approx(other["cosine"], abs=6e-3)] for other in expected["nearest"]
        ]
        assert found["top"] == [_as_shown(context) for context in expected["top"]]
        assert found["quantiles"] == [
            [round(1000 * tenth[end]) for end in ("from", "to")] + [[_as_shown(one) for one in tenth["samples"]]]
            for tenth in expected["quantiles"]
        ]
        contexts += len(found["top"])
    assert contexts > view.sample.k


def _as_shown(context):
    """A context of contexts.py as LspPage says it."""
    return {
        "place": (context["window"], context["position"]),
        "weight": pytest.approx(1000 * context["weight"], abs=0.56),
        "text": "".join(text for text, _ in context["text"]),
        "marked": [(text, pytest.approx(1000 * weight, abs=0.56)) for text, weight in context["text"] if weight],
    }


def test_words_and_labels_are_those_of_the_view(written, hostile_view):
    page = LspPage(written[0])
    texts = page.data["texts"]
    for text, count, lsps in records(page.data["words"], 2, 2):
        word = hostile_view.words.texts.index(texts[text])
        tokens = np.flatnonzero(hostile_view.words.word_N == word)
        expected = [
            [row["lsp"], pytest.approx(1000 * row["weight"], abs=0.51)]
            for row in hostile_view._lsps_of(tokens)[: text_pages.WORD_LSPS]
            if row["weight"] >= text_pages.LEAST_WEIGHT
        ]
        assert count == hostile_view.words.counts_U[word] and lsps == expected
    assert {texts[text] for text, *_ in records(page.data["words"], 2, 2)} >= OCCURRING
    assert page.data["labels"] == [shorten(hostile_view.label(lsp)) for lsp in range(24)]
    assert page.data["senses"][3] == [
        [[["depository", "bank"], "depository.n.01", "noun.group", 0.41]],
        [["noun.act", 0.6], ["noun.group", 0.4]],
    ]


def test_the_files_and_where_they_point(written, hostile_store):
    directory, report = written
    files = {path.name: path.read_text(encoding="utf-8") for path in directory.iterdir()}
    assert set(files) == {"index.html", "style.css", "view.js", "data.js", "view.json"}
    assert report["k"] == 24 and report["labelled"] and report["files"] == len(files)
    assert report["bytes"] == sum(path.stat().st_size for path in directory.iterdir())
    assert set(re.findall(r'(?:src|href)="(.*?)"', files["index.html"])) == {"style.css", "data.js", "view.js"}
    assert not [name for name in ("index.html", "style.css", "view.js") if "://" in files[name]]
    ways_to_markup = "innerHTML|outerHTML|insertAdjacentHTML|document.write|DOMParser|eval|createContextualFragment"
    assert not re.findall(ways_to_markup, files["view.js"])
    page = LspPage(directory)
    assert page.data["name"] == hostile_store.path.name and str(hostile_store.path.parent) not in files["data.js"]


def test_only_a_view_is_replaced_and_only_by_a_whole_one(hostile_view, tmp_path, monkeypatch):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(InspectionError, match="was not written by this version of show-lsp"):
        text_pages.write(hostile_view, mine)
    assert (mine / "thesis.txt").is_file()
    place = tmp_path / "view"
    text_pages.write(hostile_view, place)
    (place / "old").touch()

    def interrupted(stage, done, total, **_):
        if stage == "pages" and done == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(hostile_view, "progress", interrupted)
    with pytest.raises(KeyboardInterrupt):
        text_pages.write(hostile_view, place)
    assert (place / "old").is_file() and (place / "data.js").is_file()
    with pytest.raises(KeyboardInterrupt):
        text_pages.write(hostile_view, tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "view"]
    monkeypatch.undo()
    text_pages.write(hostile_view, place)
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
    text_pages.write(hostile_view, place)
    fresh = everything(place)
    (place / "pictures").mkdir()
    (place / "pictures" / "4000.jpg").write_bytes(b"of a larger view, changed since")
    (place / "notes" / "empty").mkdir(parents=True)
    (place / "notes" / "thesis.tex").write_text("years of work")
    (place / "pictures" / "mine.png").write_bytes(b"mine")
    (place / "lsp").mkdir()
    (place / "lsp" / "annotated.html").write_text("mine")
    (place / "link").symlink_to("nowhere")
    mine = {name: content for name, content in everything(place).items() if name not in fresh}
    # A file of ours that the new view lacks goes; that view.json claims the user's files makes none of them ours.
    (place / "pictures" / "24.jpg").write_bytes(b"ours")
    mark = json.loads((place / "view.json").read_text())
    mark["files"] |= {
        "pictures/24.jpg": file_sha256(place / "pictures" / "24.jpg"),
        "pictures/4000.jpg": "0" * 64,
        "notes/none": None,
        "notes/thesis.tex": file_sha256(place / "notes" / "thesis.tex"),
    }
    (place / "view.json").write_text(json.dumps(mark))
    report = text_pages.write(hostile_view, place)
    assert everything(place) == fresh | mine and (place / "notes" / "empty").is_dir()
    assert report["files"] == len(fresh) and report["bytes"] == sum(map(len, fresh.values()))
    # One that comes while the pages are written.
    monkeypatch.setattr(hostile_view, "progress", lambda *_, **__: (place / "late").write_text("mine, too"))
    text_pages.write(hostile_view, place)
    assert everything(place) == fresh | mine | {"late": b"mine, too"}
    assert [path.name for path in tmp_path.iterdir()] == ["view"]


@pytest.mark.promise("`show-lsp --html` …")
@pytest.mark.parametrize("name", ["index.html", "data.js", "pictures"])
def test_a_file_of_the_user_with_the_name_of_a_page_is_refused_before_anything_is_done(hostile_view, tmp_path, name):
    place = tmp_path / "view"
    text_pages.write(hostile_view, place)
    if name == "pictures":
        (tmp_path / "elsewhere").mkdir()
        (place / name).symlink_to(tmp_path / "elsewhere")
    else:
        (place / name).write_text("my own page")
    before = everything(place)
    with pytest.raises(
        InspectionError, match=rf"{name} was not written by show-lsp or has changed.*Nothing was changed"
    ):
        text_pages.write(hostile_view, place)
    assert everything(place) == before


@pytest.mark.parametrize("mark", [{"format": 2}, {"files": None}, {"made_by": "another program"}])
def test_what_another_version_or_program_wrote_is_not_replaced(hostile_view, tmp_path, mark):
    place = tmp_path / "view"
    text_pages.write(hostile_view, place)
    (place / "view.json").write_text(json.dumps(json.loads((place / "view.json").read_text()) | mark))
    before = everything(place)
    with pytest.raises(InspectionError, match="was not written by this version of show-lsp. Choose another directory"):
        text_pages.write(hostile_view, place)
    assert everything(place) == before


def test_the_older_view_comes_back_when_the_new_one_cannot_take_its_place(hostile_view, tmp_path, monkeypatch):
    place, rename = tmp_path / "view", disk.rename
    text_pages.write(hostile_view, place)
    (place / "old").touch()
    failing = iter([OSError(errno.ENOTEMPTY, "taken"), None, OSError("no space left"), None])

    def failing_rename(old, new):
        if error := next(failing):
            raise error
        rename(old, new)

    monkeypatch.setattr(disk, "rename", failing_rename)
    with pytest.raises(OSError, match="no space"):
        text_pages.write(hostile_view, place)
    assert (place / "old").is_file() and [path.name for path in tmp_path.iterdir()] == ["view"]


def test_what_a_kill_leaves_is_known_to_clean_except_the_users_files(hostile_view, tmp_path, monkeypatch):
    place, rename, left = tmp_path / "view", disk.rename, []

    def looking(old, new):
        rename(old, new)
        left.append([path.name for path in tmp_path.iterdir() if path != place and not clean._recognise(path)])

    text_pages.write(hostile_view, place)
    monkeypatch.setattr(disk, "rename", looking)
    text_pages.write(hostile_view, place)
    # after the older view has gone, after the new one has come, and once the older one is of no more use
    assert left == [[".view.replaced"], [".view.replaced"], []]


def test_a_link_to_a_view_stays_a_link(hostile_view, tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    text_pages.write(hostile_view, tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "index.html").is_file()
    monkeypatch.chdir(tmp_path / "real")
    assert text_pages.write(hostile_view, Path("."))["files"] == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


def test_a_space_has_a_sign_and_what_a_terminal_would_act_on_is_escaped(hostile_store, tmp_path):
    view = StoreView(hostile_store, 1_000_000)
    number = view.words.texts.index(view.typical(3)[0][0])
    for text, shown in (("", "␣"), ("over\u202eride\x1b", "over\\u202eride\\x1b")):
        view.words.texts[number] = text
        view._typical.clear()
        text_pages.write(view, tmp_path / "lsps")
        data = (tmp_path / "lsps" / "data.js").read_text().removeprefix("window.LSPS = ").rstrip(";\n")
        assert shown in json.loads(data)["texts"] and not {"\x1b", "\u202e"} & {*"".join(json.loads(data)["texts"])}


# -- in a browser -----------------------------------------------------------------------------------------


@pytest.fixture
def opened(browser, written):
    """A function that opens an address of the page from disk; it may not complain or run a text of the corpus."""
    base = Path(written[0]).as_uri()

    def open_page(address=""):
        browser.get("about:blank")  # the same page with another hash would not be loaded again
        browser.get(f"{base}/index.html{address}")
        _title(browser)
        return browser

    yield open_page
    assert browser.get_log("browser") == []
    assert browser.execute_script("return window.hacked") is None


def test_text_of_the_corpus_is_never_markup(opened, hostile_view):
    browser = opened()
    forbidden = "script, img, iframe, object, embed, style, svg, i"
    text = ""
    for lsp in range(24):
        _go(browser, f"#lsp-{lsp}")
        assert browser.find_elements("css selector", f"body :is({forbidden})") == []
        assert _find(browser, "mark") and _find(browser, "section")
        text += browser.title + _find(browser, "body").get_property("textContent")
    assert all(hostile in text for hostile in OCCURRING)


def test_the_page_of_an_lsp_shows_what_the_view_says(opened, hostile_view):
    for lsp in (3, 5, 23):
        browser, expected = opened(f"#lsp-{lsp}"), hostile_view.lsp(lsp)
        contexts = [*expected["top"], *(one for tenth in expected["quantiles"] for one in tenth["samples"])]
        assert _texts(browser, ".contexts p") == ["".join(text for text, _ in one["text"]) for one in contexts]
        assert _texts(browser, ".contexts .place") == [f"{one['window']}:{one['position']}" for one in contexts]
        weights = [float(text) for text in _texts(browser, ".contexts .weight")]
        assert weights == pytest.approx([one["weight"] for one in contexts], abs=6e-4)
        marked = [one["text"][one["at"]][0] for one in contexts]
        assert _texts(browser, ".contexts mark.at") == marked
        tints = browser.find_elements("css selector", ".contexts mark")
        pieces = [piece for one in contexts for piece in one["text"] if piece[1]]
        assert [tint.get_property("textContent") for tint in tints] == [text for text, _ in pieces]
        titles = [float(tint.get_attribute("title")) for tint in tints]
        assert titles == pytest.approx([weight for _, weight in pieces], abs=6e-4)
        words = [text.rsplit(" ", 2)[0] for text in _texts(browser, ".words > span")]
        assert words == [text for text, _ in expected["typical"]]
        related = [other for name in ("co_firing", "nearest") for other in expected[name]]
        assert _texts(browser, ".related a") == [f"{other['lsp']} {other['words']}" for other in related]
        assert len(browser.find_elements("css selector", ".profile span")) == len(expected["profile"])
        page = _find(browser, "body").text
        assert f"{100 * expected['density']:.2f} %" in page and f"{expected['mean_weight']:.3f}" in page
        assert f"{expected['clarity']:.3f}" in page and f"{expected['information']:.4f}" in page
        assert f"{expected['position_nats']:.3f} nats" in page
    senses = _texts(opened("#lsp-3"), ".senses li")
    assert senses == ["depository, bank depository.n.01 · noun.group NPMI 0.41"]
    assert "Lexicographer files: noun.act 60 %, noun.group 40 %" in _texts(browser, ".note")


def test_an_lsp_whose_weights_are_equal_is_heaviest_nowhere(browser, hostile_store, tmp_path):
    view = StoreView(hostile_store, 1_000_000)
    equal = np.where(view.sample.lsps_E == 3, np.float32(0.5), view.sample.weights_E)
    view.sample = replace(view.sample, weights_E=equal)
    text_pages.write(view, tmp_path / "lsps")
    browser.get((tmp_path / "lsps" / "index.html").as_uri() + "#lsp-3")
    heads = _texts(browser, "h2")
    assert "All its weights are equal. Some of its tokens, at random" in heads
    assert len(_texts(browser, ".contexts p")) == len(view.lsp(3)["top"]) > 3
    _go(browser, "#lsp-5")
    others = _texts(browser, "h2")
    assert "Where it is heaviest" in others and "From every tenth of its weights" in others
    assert len(others) == len(heads) + 1 and browser.get_log("browser") == []


def test_addresses_go_back_and_forth(opened):
    browser = opened("?from=elsewhere#lsp-17")
    assert _title(browser) == "LSP 17"
    _find(browser, "a[rel=next]").click()
    assert _title(browser) == "LSP 18" and browser.current_url.endswith("?from=elsewhere#lsp-18")
    _find(browser, "a[rel=prev]").click()
    assert _title(browser) == "LSP 17"
    browser.back()
    assert _title(browser) == "LSP 18"
    browser.forward()
    assert _title(browser) == "LSP 17"
    _find(browser, ".related a").click()
    assert _title(browser) == f"LSP {browser.current_url.rpartition('-')[2]}" != "LSP 17"
    browser.refresh()
    assert _title(browser) == f"LSP {browser.current_url.rpartition('-')[2]}"
    browser.find_element("link text", "All LSPs").click()
    assert _title(browser) == "Latent semantic properties"
    for unknown in ("#lsp-24", "#lsp--1", "#lsp-", "#elsewhere", "#q=%E0%A4%A", "#"):
        _go(browser, unknown)
        assert _title(browser) == "Latent semantic properties"
    assert not _all(opened("#lsp-0"), "a[rel=prev]") and not _all(opened("#lsp-23"), "a[rel=next]")


def test_the_way_back_to_the_list_keeps_its_search_and_place(opened):
    browser = opened()
    browser.execute_script("scrollTo(0, 200)")
    _find(browser, "tbody tr:nth-child(9) a").click()
    assert _title(browser).startswith("LSP ") and browser.execute_script("return scrollY") == 0
    assert browser.switch_to.active_element.tag_name == "h1"  # so that it is announced
    followed = browser.current_url
    browser.back()
    assert browser.switch_to.active_element.get_property("href") == followed
    assert _title(browser) == "Latent semantic properties" and browser.execute_script("return scrollY") == 200
    _search(browser, "w3")
    found = _column(browser, 0)
    assert browser.current_url.endswith("#q=w3") and 0 < len(found) < 24
    _find(browser, "tbody a").click()
    assert _title(browser) == f"LSP {found[0]}"
    browser.back()
    assert _column(browser, 0) == found and _find(browser, "input").get_property("value") == "w3"
    assert _column(opened("#q=w3"), 0) == found  # the address alone says it


def test_more_rows_are_added_to_those_that_are_there(browser, written, tmp_path):
    shutil.copytree(written[0], tmp_path / "lsps")
    script = tmp_path / "lsps" / "view.js"
    script.write_text(script.read_text().replace("const PAGE = 100", "const PAGE = 4"))
    browser.get((tmp_path / "lsps" / "index.html").as_uri())
    _title(browser)
    first = _find(browser, "tbody tr")
    for rows in (4, 20, 24):
        assert len(_all(browser, "tbody tr")) == rows and _find(browser, "#more").is_displayed() == (rows < 24)
        if rows < 24:
            _find(browser, "#more").click()
    assert len({*_column(browser, 0)}) == 24 and first.text == _find(browser, "tbody tr").text  # not stale


def test_sentences_of_the_head_are_apart(browser, hostile_store, tmp_path):
    view = StoreView(hostile_store, 1_000_000)
    view.labels = None
    entries = dict.fromkeys(("probe", "factor"), 3) | {"lsps": [[] for _ in range(24)]}
    text_pages.write(view, tmp_path / "lsps", entries | {"probe": "a <b>probe"})
    script = (tmp_path / "lsps" / "data.js").read_text().replace('"dead":0', '"dead":2')
    (tmp_path / "lsps" / "data.js").write_text(script)
    browser.get((tmp_path / "lsps" / "index.html").as_uri())
    text = _find(browser, ".facts").text
    assert "do not occur there. No word-sense labels" in text and "dictionary. Each page shows which words" in text
    assert "the probe a <b>probe predicts" in text and not re.findall(r"[a-z]\.[A-Z]\w+ ", text)


def test_the_list_is_sorted_and_searched(opened, hostile_view):
    browser = opened()
    by_clarity = sorted(range(24), key=lambda lsp: -round(hostile_view.clarity[lsp], 6))
    assert _column(browser, 0) == list(map(str, by_clarity))
    assert "starts with the LSPs that are easiest to recognise" in _find(browser, "main > .note").text
    _find(browser, "th button").click()
    assert _column(browser, 0) == [str(lsp) for lsp in range(24)]
    _find(browser, "th button").click()
    assert _column(browser, 0) == [str(lsp) for lsp in range(23, -1, -1)]
    _find(browser, "th:nth-child(2) button").click()
    shares = [float(text.split()[0]) for text in _column(browser, 1)]
    assert shares == sorted(shares, reverse=True)
    _search(browser, "bank")  # a label
    assert _column(browser, 0) == ["3"] and "depository" in _find(browser, "td .sense").text
    assert _find(browser, "#count").text.startswith("1 LSP whose number")
    _search(browser, "17")
    assert _column(browser, 0)[0] == "17"
    _find(browser, "tbody a").click()
    assert _title(browser) == "LSP 17"


def test_the_search_has_every_word_that_a_page_lists(opened, hostile_view):
    """Typical words beyond those of an LSP's name, rare ones too, and the lemmas of its senses."""
    browser = opened()
    for lsp in (3, 5, 11):
        senses = hostile_view.label(lsp)["synsets"]
        words = [text for text, _ in hostile_view.typical(lsp)] + [one for sense in senses for one in sense["lemmas"]]
        assert len(words) > 3
        for word in words:
            _search(browser, word)
            assert str(lsp) in _column(browser, 0), word


def test_a_word_is_found_with_its_lsps(opened, hostile_view):
    browser = opened()
    _search(browser, "w31")
    assert _find(browser, "#words b").text == "w31"
    expected = {row["lsp"] for row in hostile_view.word("w31")["lsps"]}
    chips = _all(browser, "#words li:first-child .chips a")
    assert {int(chip.text.split()[0]) for chip in chips} == expected != set()
    names = {lsp: hostile_view.typical(lsp)[0][0] for lsp in expected}
    assert all(chip.text.split()[1] == names[int(chip.text.split()[0])] for chip in chips)
    lsp = int(chips[0].text.split()[0])
    chips[0].click()
    assert _title(browser) == f"LSP {lsp}"
    search = _find(browser, "input[type=search]")
    search.send_keys("w40")
    search.submit()
    assert _find(browser, "#words b").text == "w40" and browser.current_url.endswith("#q=w40")


@pytest.mark.parametrize("query", HOSTILE_SEARCHES)
def test_hostile_words_are_found_as_words(opened, query):
    browser = opened()
    _search(browser, query)
    title, found = _find(browser, "#words h2").text, _all(browser, "#words b")
    assert any(query in word.text for word in found) or title.startswith("No word with")
    assert (title == "Words") == (query != "constructor")
    browser.refresh()
    assert _find(browser, "input").get_property("value") == query and _find(browser, "#words h2").text == title


@pytest.mark.parametrize("width", [375, 1280])
def test_no_page_is_wider_than_the_screen_and_heads_stay_in_a_line(opened, browser, width):
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 812, "deviceScaleFactor": 1, "mobile": width < 500},
    )
    for address in ("", "#q=script", "#lsp-3", "#lsp-5"):
        opened(address)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        assert browser.execute_script("return innerWidth") == width
        heads = _all(browser, "#lsps th:not(:last-child) button")
        assert all(head.size["height"] < 30 for head in heads if head.is_displayed())
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_pages_are_dark_where_the_reader_wants_it(opened):
    browser = opened("#lsp-3")
    colours = []
    for scheme in ("light", "dark"):
        feature = {"name": "prefers-color-scheme", "value": scheme}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        colours.append(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
    light, dark = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours)
    assert light > 600 and dark < 150


def test_a_page_without_its_data_says_what_is_missing(browser, written, tmp_path):
    shutil.copytree(written[0], tmp_path / "lsps", ignore=shutil.ignore_patterns("data.js"))
    browser.get((tmp_path / "lsps" / "index.html").as_uri())
    assert "data.js" in _find(browser, "body").text


def _find(browser, selector):
    return browser.find_element("css selector", selector)


def _all(browser, selector):
    return browser.find_elements("css selector", selector)


def _texts(browser, selector):
    return [found.get_property("textContent") for found in _all(browser, selector)]


def _title(browser):
    """The heading, once the page follows its address: hashes are acted upon a moment after they change."""
    browser.execute_async_script("const done = arguments[0]; setTimeout(() => requestAnimationFrame(() => done()), 50)")
    return _find(browser, "h1").text


def _go(browser, address):
    browser.execute_script("location.hash = arguments[0]", address)
    _title(browser)


def _search(browser, query):
    field = _find(browser, "input")
    field.clear()
    field.send_keys(query)


def _column(browser, number):
    return [cell.text for cell in _all(browser, f"tbody td:nth-child({number + 1})")]
