"""Resolving a corpus, pieces and windows, against plain readings of the same text (test_sources.py: of every kind)."""

import gzip
import hashlib
import json
import lzma
import os
import re
import runpy
import tracemalloc
from pathlib import Path

import pytest
from data import data_path
from hypothesis import given
from hypothesis import strategies as st
from kinds import documents
from preloaded import Python, run_python

from mlsm.common.errors import CorpusError
from pipeline import plan as planning
from pipeline.config import CorpusConfig, with_absolute_paths
from pipeline.corpus import BUNDLED_TEXT, JsonLines, TextFile, join_windows, open_corpus, open_sources
from pipeline.corpus.source import PIECE_CHARACTERS
from pipeline.corpus.windows import Window, packed_windows
from pipeline.teacher import load_tokenizer

ROOT = Path(__file__).resolve().parents[2]


def test_blank_lines_end_documents(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("\n\none\nstill one\n\n\n  \ntwo\n\nthree", encoding="utf-8")
    assert documents(TextFile(path)) == {0: "one\nstill one\n", 1: "two\n", 2: "three"}
    assert documents(TextFile(path, "file")) == {0: path.read_text().lstrip()}


@pytest.mark.promise("20 50 MB on one line")
@pytest.mark.parametrize("space", [" ", "\t"])
def test_a_long_line_is_cut_at_spaces_only_and_in_bounded_memory(tmp_path, space):
    path = tmp_path / "long.txt"
    words = 400_000
    with open(path, "w") as file:
        for n in range(words):
            file.write(f"{n}{space}")
        file.write("\n\nnext\n")
    tracemalloc.start()
    begun, total, rest = [], 0, ""
    for piece in TextFile(path).pieces():
        assert len(piece.text) <= PIECE_CHARACTERS
        begun.append(piece.record)
        numbers = (rest + piece.text).split() if piece.record == 0 else []
        assert all(int(number) == total + i for i, number in enumerate(numbers))
        total += len(numbers)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == words and set(begun) == {0, 1} and peak < 2e6


def test_a_long_word_is_cut_between_characters(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("€" * 100_000, encoding="utf-8")
    assert documents(TextFile(path)) == {0: "€" * 100_000}


def test_json_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"body": text, "id": 1}) + "\n" for text in ("one\n\nstill", "", "x" * 70_000)))
    (source,) = open_corpus((str(path),), text_field="body")
    assert documents(source) == {0: "one\n\nstill", 1: "", 2: "x" * 70_000}
    offset = {piece.record: piece.offset for piece in source.pieces()}[2]
    assert documents(source, first_record=2, offset=offset) == {2: "x" * 70_000}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{bad", "line 1: not JSON"),
        ('{"a": 1}', r"no text under 'text' \(found \['a'\]\).*--text-field"),
        ("[1]", "line 1: an array. Expected one object per line"),
        ("1", "found a number"),
        (r'{"text": "bad \ud800 here"}', "line 1: .* lone surrogate"),
    ],
)
def test_bad_json_names_the_line(tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    path.write_text(content + "\n")
    with pytest.raises(CorpusError, match=message):
        list(JsonLines(path).pieces())


def test_unreadable_corpora(tmp_path):
    with pytest.raises(CorpusError, match="no corpus given. Name files with --corpus"):
        open_sources(CorpusConfig(corpus=()))
    with pytest.raises(CorpusError, match="'http://host/a.txt' matches no file"):
        open_corpus(("http://me:hunter2@host/a.txt",))
    with pytest.raises(CorpusError, match="matches no file"):
        open_corpus((str(tmp_path / "none-*.txt"),))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.md").write_text("text")
    with pytest.raises(
        CorpusError, match=r"notes has no file that ends in .*\.txt.*glob in quotes, such as '.*notes/\*.md'"
    ):
        open_corpus((str(tmp_path / "notes"),))
    latin = tmp_path / "latin.txt"
    latin.write_bytes("first line\nd\xe9j\xe0\n".encode("latin1"))
    with pytest.raises(CorpusError, match="latin.txt: not UTF-8 at byte 12"):
        list(TextFile(latin).pieces())
    for content, remedy in (("text".encode("utf-16"), "iconv -f utf-16 -t utf-8"), (b"%PDF-1.4 \xe2\xe3", "pdftotext")):
        latin.write_bytes(content)
        with pytest.raises(CorpusError, match=remedy):
            list(TextFile(latin).pieces())
    broken = tmp_path / "a.txt.gz"
    broken.write_bytes(b"not gzip")
    with pytest.raises(CorpusError, match="a.txt.gz"):
        list(TextFile(broken).pieces())


def test_words_of_a_long_json_document_stay_whole(tmp_path):
    path = tmp_path / "a.jsonl"
    words = [f"internationalization{n}" for n in range(20_000)]
    path.write_text(json.dumps({"text": " ".join(words)}) + "\n")
    pieces = [piece.text for piece in JsonLines(path).pieces()]
    assert len(pieces) > 5 and all(len(piece) <= PIECE_CHARACTERS for piece in pieces)
    assert [word for piece in pieces for word in piece.split()] == words


def test_one_file_under_two_names_is_read_once_and_hidden_files_never(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "b.txt").write_bytes(b"\xff")
    monkeypatch.chdir(tmp_path)
    assert len(open_corpus(("a.txt", str(tmp_path / "a.txt"), str(tmp_path)))) == 1


def test_damaged_compression_is_one_clear_error(tmp_path):
    whole = gzip.compress(b"some text of a document\n" * 500)
    path = tmp_path / "a.txt.gz"
    found = 0
    for position in range(10, len(whole), 3):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0xFF]) + whole[position + 1 :])
        try:
            list(TextFile(path).pieces())
        except CorpusError:
            found += 1
    assert found > 20


def test_globs_and_directories_are_sorted_without_repeats(tmp_path):
    for name in ("b.txt", "a.jsonl", "sub/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    sources = open_corpus((str(tmp_path), str(tmp_path / "*.txt")))
    assert [source.name.removeprefix(str(tmp_path) + "/") for source in sources] == [
        "a.jsonl",
        "b.txt",
        "sub/c.txt",
    ]
    assert [type(source) for source in sources] == [JsonLines, TextFile, TextFile]


def test_a_glob_reads_the_directories_that_it_matches_as_the_shell_would_pass_them(tmp_path, monkeypatch):
    for name in ("AA/wiki_00", "AA/wiki_01", "AB/wiki_00", "c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{name}\n")
    monkeypatch.chdir(tmp_path)
    by_the_shell = [source.name for source in open_corpus(("AA", "AB", "c.txt"))]
    for pattern in ("*", "**", "[Ac]*"):
        assert [source.name for source in open_corpus((pattern,))] == by_the_shell, pattern
    assert [source.name for source in open_corpus(("A*",))] == ["AA/wiki_00", "AA/wiki_01", "AB/wiki_00"]


def test_an_empty_name_is_not_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("x")
    monkeypatch.chdir(tmp_path)
    for corpus in (("",), ("a.txt", "")):
        with pytest.raises(CorpusError, match="--corpus: one of its names is empty"):
            open_corpus(corpus)
    assert len(open_corpus((".",))) == 1


def test_the_order_does_not_depend_on_how_paths_are_written(tmp_path, monkeypatch):
    paths = [tmp_path / "alpha" / "x.txt", tmp_path / "zeta" / "a.txt"]
    for path in paths:
        path.parent.mkdir()
        path.write_text("x")
    monkeypatch.chdir(tmp_path / "zeta")
    for corpus in (map(str, paths), ("../alpha/x.txt", "a.txt"), (str(paths[1]), "../alpha")):
        assert [Path(source.name).resolve() for source in open_corpus(tuple(corpus))] == paths
    nested = [tmp_path / "a" / "1.txt", tmp_path / "a-b" / "1.txt", tmp_path / "a.old" / "1.txt"]
    for path in nested:
        path.parent.mkdir()
        path.write_text("x")
    assert [Path(source.name) for source in open_corpus(tuple(map(str, reversed(nested))))] == nested


@given(st.lists(st.lists(st.integers(10, 99), max_size=30), max_size=12), st.integers(3, 12))
def test_packed_windows_hold_every_token_once_in_order(texts, max_length):
    cls, sep = 1, 2
    pairs = [(record, part) for record, ids in enumerate(texts) for part in (ids[:7], ids[7:])]
    windows = list(packed_windows(pairs, max_length, cls, sep))
    tokens = {record: [] for record in range(len(texts))}
    for window in windows:
        assert window.ids[0] == cls and window.ids[-1] == sep and len(window.ids) <= max_length
        assert window.run_starts[0] == 0 and len(window.run_starts) == len(window.run_records)
        inner = window.ids[1:-1]
        assert sep not in (inner[0], inner[-1])
        ends = window.run_starts[1:] + [len(window.ids)]
        for start, end, record in zip(window.run_starts, ends, window.run_records, strict=True):
            run = window.ids[start:end]
            assert run[-1] == sep
            tokens[record] += [token for token in run if token >= 10]
    assert tokens == dict(enumerate(texts))
    assert all(len(window.ids) >= max_length - 1 for window in windows[:-1])


def test_join_windows():
    joined = join_windows([Window([1, 5, 2], [0], [3]), Window([1, 6, 2, 7, 2], [0, 3], [3, 4])])
    assert joined["ids"].tolist() == [1, 5, 2, 1, 6, 2, 7, 2] and joined["lengths"].tolist() == [3, 5]
    assert joined["run_starts"].tolist() == [0, 3, 6] and joined["run_records"].tolist() == [3, 3, 4]


# -- the bundled text ------------------------------------------------------------------------------------

MAKE = ROOT / "pipeline" / "bundled_text" / "make.py"


@pytest.fixture(scope="module")
def bundled_text():
    return lzma.decompress(BUNDLED_TEXT.read_bytes()).decode()


def test_the_bundled_text_is_what_its_readme_states(bundled_text):
    readme = (BUNDLED_TEXT.parent / "README.md").read_text(encoding="utf-8")
    articles = bundled_text.removesuffix("\n").split("\n\n")
    tokens = sum(len(ids) for ids in load_tokenizer("bundled")(articles, add_special_tokens=False)["input_ids"])
    figures = {
        "articles": len(set(articles)),
        "paragraphs": len(bundled_text.split("\n")) - len(articles),
        "words": len(bundled_text.split()),
        "bytes": len(bundled_text.encode()),
        "bytes compressed": BUNDLED_TEXT.stat().st_size,
    }
    for name, count in figures.items():
        assert f"| {name} | {count:,} |" in readme
    assert hashlib.sha256(bundled_text.encode()).hexdigest() in readme
    assert BUNDLED_TEXT.stat().st_size <= 3_000_000 and 2_050_000 <= tokens <= 2_200_000, "quickstart takes two million"


def test_bundled_names_the_bundled_text_even_next_to_a_file_of_that_name(bundled_text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bundled").write_text("Something else.\n")
    Path("own.txt").write_text("Own text.\n")
    found = {source.name: list(documents(source).values()) for source in open_sources(CorpusConfig())}
    assert found == {str(BUNDLED_TEXT): [f"{text}\n" for text in bundled_text.removesuffix("\n").split("\n\n")]}
    both = open_sources(CorpusConfig(corpus=("own.txt", "bundled")))
    assert {source.name for source in both} == {str(BUNDLED_TEXT), "own.txt"}
    assert with_absolute_paths({"corpus": ["bundled"], "teacher": "bundled"})["corpus"] == ["bundled"]


def test_a_stored_glob_finds_its_files_below_a_directory_with_brackets(tmp_path, monkeypatch):
    (tmp_path / "data [v2]").mkdir()
    monkeypatch.chdir(tmp_path / "data [v2]")
    Path("a[1].txt").write_text("x")
    for pattern in ("*.txt", "a[1].txt"):
        (stored,) = with_absolute_paths({"corpus": [pattern]})["corpus"]
        assert os.path.isabs(stored) and [Path(source.name).name for source in open_corpus((stored,))] == ["a[1].txt"]


def test_one_article_in_a_hundred_of_the_bundled_text_is_held_out():
    plan = planning.scan(open_sources(CorpusConfig()), None, None, planning.windowing(None, 128), unit_tokens=262_144)
    assert plan.corpus["documents"] == 2700 and plan.corpus["duplicates"] == plan.corpus["invalid"] == 0
    assert 10 <= plan.corpus["held_out_documents"] <= 40


def test_a_missing_bundled_text_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.corpus.BUNDLED_TEXT", tmp_path / "gone.xz")
    with pytest.raises(CorpusError, match="the bundled text is missing: .*gone.xz.*Reinstall this package"):
        open_sources(CorpusConfig())


def test_the_sample_does_not_depend_on_how_articles_are_distributed_over_files():
    sample = runpy.run_path(str(MAKE))["sample"]
    articles = [f"Article {n}.\nIts second paragraph." for n in range(500)]
    chosen = sample(["\n\n".join(articles) + "\n"], 100)
    assert chosen == sample(["\n\n".join(articles[300:] + articles[:9]), "\n\n".join(articles[:300]) + "\n\n"], 100)
    found = chosen.removesuffix("\n").split("\n\n")
    assert len(set(found) & set(articles)) == len(found) == 100
    assert sample(["\n\n".join(articles)], 50) == "\n\n".join(found[:50]) + "\n", "the beginning is a sample too"
    assert found[:50] != sorted(found[:50], key=articles.index)


def test_the_bundled_text_is_made_again_from_its_source(bundled_text):
    """From the files that it names, and it shares no article with the files that are left for evaluation."""
    source = data_path("text/wiki_en_2014")
    made = runpy.run_path(str(MAKE))
    parts = [lzma.decompress((source / name).read_bytes()).decode() for name in made["PARTS"]]
    assert made["sample"](parts) == bundled_text
    chosen = set(bundled_text.removesuffix("\n").split("\n\n"))
    for name in ("heldout", "small"):
        text = lzma.decompress((source / f"wiki_en_2014_{name}.txt.xz").read_bytes()).decode()
        articles = {article.strip() for article in re.split(r"\n\s*\n", text)}
        assert len(articles) > 1000 and not articles & chosen


# -- recipes ---------------------------------------------------------------------------------------------

NO_TEACHER = "google-bert/bert-base-cased.*hf download google-bert/bert-base-cased"
NO_WIKIPEDIA = "hf://datasets/wikimedia/wikipedia/20231101.en/.*cannot be reached.*pass them with --corpus"
NO_DOLMA = "'dolma-v1_7/falcon-refinedweb-filtered/.*' matches no file.*docs corpora"


WITHOUT_MATERIAL = [
    (["--recipe", "paper"], NO_TEACHER),
    (["--recipe", "scaled-up"], NO_TEACHER),
    (["--recipe", "paper", "--teacher", "bundled"], NO_WIKIPEDIA),
    (["--recipe", "scaled-up", "--teacher", "bundled", "--max-length", "128"], NO_DOLMA),
]
ENCODE_EACH = """
import json, os, sys
import pipeline.commands
from mlsm import __main__ as cli

for number, arguments in enumerate(json.loads(sys.argv[1])):
    if not os.fork():
        sys.argv[1:] = ["encode-lsp", *arguments]
        os.dup2(os.open(f"{number}.txt", os.O_WRONLY | os.O_CREAT), 2)
        sys.exit(cli.main())
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def test_a_recipe_without_its_material_is_one_line_that_names_it(tmp_path):
    """In forks of one process, which has imported with a cache in which there is nothing."""
    nowhere = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    commands = json.dumps([arguments for arguments, _ in WITHOUT_MATERIAL])
    run = run_python(["-c", ENCODE_EACH, commands], Python, cwd=tmp_path, env=os.environ | nowhere)
    assert run.stdout.split() == ["2"] * len(WITHOUT_MATERIAL), run.stderr
    for number, (_, message) in enumerate(WITHOUT_MATERIAL):
        printed = (tmp_path / f"{number}.txt").read_text()
        errors = [line for line in printed.splitlines() if line.startswith("mlsm: error:")]
        assert len(errors) == 1 and re.search(message, errors[0]) and "Traceback" not in printed, printed
    assert not list(tmp_path.glob("runs/stores/*"))
