"""Every kind of source: the same documents, ranges of them, damage, text that is none (faults.md, rows 19 to 21)."""

import glob
import gzip
import json
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from kinds import COMPRESS, KINDS, LINES_AS_RECORDS, documents, joined, opened, write, write_bytes
from pyarrow import parquet

from mlsm.common.errors import CorpusError
from pipeline import corpus
from pipeline.corpus import JsonLines, Parquet, TextFile, open_corpus
from pipeline.corpus import source as source_module

pytestmark = [
    pytest.mark.promise("a line of 50 MB …"),
    pytest.mark.promise("odd, blank and no …"),
    pytest.mark.promise("21 odd bytes in a …"),
]

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [f"document {n} ünï\nits second line" for n in range(100)]
ASKED = {"a.txt": TextFile, "a.json": JsonLines, "a.parquet": Parquet}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_the_same_documents_also_from_the_middle(tmp_path, kind):
    source = opened(write(tmp_path, kind, TEXTS))
    whole = documents(source)
    assert [text.strip() for text in whole.values()] == TEXTS and list(whole) == list(range(100))
    offsets = {piece.record: piece.offset for piece in source.pieces()}
    for first in (0, 1, 60, 99):
        assert documents(source, first_record=first, offset=offsets[first]) == {n: whole[n] for n in range(first, 100)}


@pytest.mark.parametrize("kind", KINDS)
def test_ranges_in_their_order_open_a_file_once_for_each_reader(tmp_path, kind, monkeypatch):
    source = opened(write(tmp_path, kind, TEXTS, rows=40))
    whole = documents(source)
    offsets = {piece.record: piece.offset for piece in source.pieces()}
    opens = count_opens(monkeypatch, source)
    for start in range(0, 100, 7):
        stop = min(start + 5, 100)  # a gap of two, as other documents leave one
        expected = {n: whole[n] for n in range(start, stop)}
        assert joined(source.between(start, stop, offsets[start], "train")) == expected
        if start % 3 == 0:
            assert joined(source.between(start, stop, offsets[start], "held_out")) == expected
    assert len(opens) == 2
    assert joined(source.between(3, 5, offsets[3], "train")) == {3: whole[3], 4: whole[4]}, "back again"
    assert len(opens) == 3
    assert joined(pickle.loads(pickle.dumps(source)).between(5, 6, offsets[5], "train")) == {5: whole[5]}, "a copy"


def count_opens(monkeypatch, source):
    opens = []
    for module in {source_module, sys.modules[type(source).__module__]}:
        for name in {"reading", "stored"} & set(vars(module)):
            real = getattr(module, name)
            if module is not source_module:
                monkeypatch.setattr(module, name, lambda *a, real=real: opens.append(a) or real(*a))
    return opens


def test_a_range_that_is_left_in_the_middle_is_begun_anew(tmp_path):
    source = opened(write(tmp_path, "a.txt.gz", TEXTS))
    pieces = source.between(0, 50, 0, "train")
    next(pieces)
    pieces.close()
    assert joined(source.between(0, 50, 0, "train")) == {n: documents(source)[n] for n in range(50)}


def test_files_do_not_stay_open(tmp_path):
    """Ranges that end before their file does, of more files than a process may have open."""
    for n in range(50):
        write(tmp_path, f"{n}.txt.gz", TEXTS[:5])
    for n in range(50):
        assert len(joined(opened(tmp_path / f"{n}.txt.gz").between(0, 3, 0, "train"))) == 3
    assert len([name for name in Path("/proc/self/fd").iterdir() if str(tmp_path) in str(name.resolve())]) <= 1


def test_a_far_range_of_a_plain_file_is_sought(tmp_path, monkeypatch):
    """Reading on would cost the bytes between; in a compressed file there is no other way."""
    seen = []
    monkeypatch.setattr(TextFile, "decode", lambda self, raw, *_: seen.append(len(raw)) or (raw.decode(), False))
    texts = [f"{n} " + "x" * 9000 for n in range(400)]
    for kind, most in (("a.txt", 400_000), ("a.txt.gz", 10**9)):
        source = opened(write(tmp_path, kind, texts))
        offsets = {piece.record: piece.offset for piece in source.pieces()}
        list(source.between(0, 1, 0, "train"))
        seen.clear()
        assert list(joined(source.between(399, 400, offsets[399], "train"))) == [399]
        assert sum(seen) < most and (kind == "a.txt" or sum(seen) > 3_000_000)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_files_of_several_compressed_parts(tmp_path, suffix):
    half = "\n\n".join(TEXTS[:50]) + "\n\n", "\n\n".join(TEXTS[50:])
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(b"".join(COMPRESS[suffix](part.encode()) for part in half))
    assert [text.strip() for text in documents(opened(path)).values()] == TEXTS


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2"])
def test_nothing_behind_padding_or_a_damaged_header_is_lost_in_silence(tmp_path, suffix):
    """Python's lzma.open and bz2.open take everything behind either for garbage and end the text there."""
    first, second = (COMPRESS[suffix](text) for text in (b"one\n\n", b"two\n\n"))
    path = tmp_path / f"a.txt{suffix}"
    for padding in (b"\0" * 4, b"\0" * (1 << 20)):
        path.write_bytes(first + padding + second + padding)
        assert documents(opened(path)) == {0: "one\n", 1: "two\n"}
    for damaged in (b"?" + second[1:], second[:2] + b"?" + second[3:], second[:5]):
        path.write_bytes(first + damaged)
        with pytest.raises(CorpusError, match=rf"a\.txt\{suffix}: cannot be read"):
            documents(opened(path))


@pytest.mark.promise("a compressed file or Parquet file that was cut", cases="7 kinds × 4")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if Path(kind).suffix in (*COMPRESS, ".parquet")])
def test_a_file_that_was_cut_is_one_clear_error(tmp_path, kind):
    dice = random.Random(0)
    path = write(tmp_path, kind, [f"{dice.random()} " * 50 for _ in range(300)])
    whole = path.read_bytes()
    for length in (0, 5, len(whole) // 2, len(whole) - 9):
        path.write_bytes(whole[:length])
        with pytest.raises(CorpusError, match=r"a\.\w+(\.\w+)?: cannot be read"):
            documents(opened(path))


def test_dolma_and_datatrove_files(tmp_path):
    dolma = {"id": "1", "text": "one\n\nstill one", "source": "x", "metadata": {"a": [1]}, "added": "2024"}
    write_bytes(tmp_path / "falcon-0000.json.gz", (json.dumps(dolma) + "\n").encode())
    trove = {"text": "two", "id": "<urn:uuid:1>", "metadata": {"url": "u", "token_count": 3}}
    write_bytes(tmp_path / "00000.jsonl.gz", (json.dumps(trove) + "\n").encode())
    table = pyarrow.Table.from_pylist([{"text": "three", "id": "3", "url": "u"}])
    parquet.write_table(table, tmp_path / "00001.parquet")
    found = [documents(opened(tmp_path / name)) for name in ("falcon-0000.json.gz", "00000.jsonl.gz", "00001.parquet")]
    assert found == [{0: "one\n\nstill one"}, {0: "two"}, {0: "three"}]


# -- Parquet ---------------------------------------------------------------------------------------------


def test_parquet_of_other_types_and_columns(tmp_path):
    for kind in ("string", "large_string", "dictionary"):
        column = pyarrow.array(["one", None, "  ", "two"])
        column = column.dictionary_encode() if kind == "dictionary" else column.cast(kind)
        parquet.write_table(pyarrow.table({"body": column, "n": [1, 2, 3, 4]}), tmp_path / "a.parquet")
        assert documents(opened(tmp_path / "a.parquet", text_field="body")) == {0: "one", 1: "", 2: "", 3: "two"}
    with pytest.raises(CorpusError, match=r"no column 'text' \(found body, n\).*--text-field"):
        documents(opened(tmp_path / "a.parquet"))
    with pytest.raises(CorpusError, match="column 'n' holds int64, not text"):
        documents(opened(tmp_path / "a.parquet", text_field="n"))


def test_parquet_begins_at_a_row_group(tmp_path):
    source = opened(write(tmp_path, "a.parquet", TEXTS, rows=10))
    assert {piece.record: piece.offset for piece in source.pieces()} == {n: n // 10 for n in range(100)}
    no_groups = parquet.ParquetWriter(tmp_path / "none.parquet", pyarrow.schema([("text", pyarrow.string())]))
    no_groups.close()
    assert documents(opened(tmp_path / "none.parquet")) == {}


def test_parquet_inside_another_compression_is_refused(tmp_path):
    (tmp_path / "a.parquet.gz").write_bytes(gzip.compress(b""))
    with pytest.raises(CorpusError, match="Unpack it"):
        opened(tmp_path / "a.parquet.gz")


def test_the_content_of_a_parquet_file_is_its_bytes_and_column(tmp_path):
    path = write(tmp_path, "a.parquet", TEXTS)
    first = opened(path).content_hash
    assert opened(path).content_hash == first != opened(path, text_field="n").content_hash
    assert opened(write(tmp_path, "a.parquet", TEXTS[1:])).content_hash != first


# -- text that is none -----------------------------------------------------------------------------------

NOT_UTF8 = {
    "a.txt": (b"fine here\n\ncaf\xe9 au lait\nmore\n\nlast\n", "a.txt: not UTF-8 at byte 14"),
    "a.txt.gz": (b"fine here\n\ncaf\xe9 au lait\nmore\n\nlast\n", "a.txt.gz: not UTF-8 at byte 14"),
    "a.jsonl": (b'{"text": "fine"}\n{"text": "caf\xe9"}\n{"text": "last"}\n', "a.jsonl: not UTF-8 at byte 30"),
    "surrogate.jsonl": (
        b'{"text": "fine"}\n{"text": "caf\\ud800 \\ud83d\\ude00"}\n{"text": "last"}\n',
        "surrogate.jsonl, line 2: the text holds a lone surrogate",
    ),
    "a.parquet": ([b"fine", b"caf\xe9", b"last"], "a.parquet, row 2: not UTF-8 at byte 3"),
}


@pytest.mark.parametrize("kind", NOT_UTF8)
def test_text_that_is_not_utf8(tmp_path, kind):
    content, message = NOT_UTF8[kind]
    path = write(tmp_path, kind, content) if kind == "a.parquet" else write_bytes(tmp_path / kind, content)
    with pytest.raises(CorpusError, match=f"{message}.*--invalid-utf8 replace or skip"):
        documents(opened(path))
    for policy in ("replace", "skip"):  # skip: it is the scan that leaves the document out
        source = opened(path, invalid_utf8=policy)
        texts = documents(source)
        assert texts[1].startswith("caf\ufffd") and list(texts) == [0, 1, 2]
        assert {piece.record for piece in source.pieces() if piece.invalid} == {1}
    if kind == "surrogate.jsonl":
        assert texts[1] == "caf\ufffd \U0001f600", "a pair of surrogates is one character"


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz", "a.TGZ", "a.tar.xz", "a.zip", "a.zip.zst", "a.7z"])
def test_archives_are_not_read_as_text(tmp_path, name):
    (tmp_path / name).write_bytes(b"a.txt\0\0\0 plain text in a tar\n")
    with pytest.raises(CorpusError, match=f"{name}: an archive, not a text. Unpack it"):
        open_corpus((str(tmp_path / name),))


BINARY = {
    "a.pdf": (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\n", "A PDF: .*pdftotext"),
    "b.pdf.gz": (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\n", "A PDF: .*pdftotext"),
    "a.docx": (b"PK\x03\x04\x14\0\x06\0\n\n\x08\0\xe2\xe3", "A zip archive.*: extract its text"),
    "gzip.txt": (gzip.compress(b"text"), r"Compressed with gzip: its name must end in \.gz"),
    "xz.txt": (COMPRESS[".xz"](b"text"), r"Compressed with xz: its name must end in \.xz"),
    "parquet.txt": (b"PAR1\x15\0\n\x15\xe2\xe3", r"A Parquet file: its name must end in \.parquet"),
    "latin.txt": (b"PARis\n\ncaf\xe9\n", "iconv -f latin1"),
}


@pytest.mark.parametrize("name", BINARY)
def test_files_of_other_formats_are_recognised_wherever_their_first_bad_byte_is(tmp_path, name):
    content, remedy = BINARY[name]
    with pytest.raises(CorpusError, match=f"{name}: not UTF-8 at byte .*{remedy}"):
        documents(opened(write_bytes(tmp_path / name, content)))


@pytest.mark.parametrize("indent", [None, 1])
def test_a_json_array_is_not_json_lines(tmp_path, indent):
    (tmp_path / "a.json").write_text(json.dumps([{"text": "one"}, {"text": "two"}], indent=indent))
    with pytest.raises(CorpusError, match=r"a\.json, line 1: .*one object per line.*jq -c '\.\[\]'") as caught:
        documents(opened(tmp_path / "a.json"))
    assert "--text-field" not in str(caught.value)


@pytest.mark.parametrize("kind", LINES_AS_RECORDS)
def test_blank_records_keep_their_number(tmp_path, kind):
    texts = documents(opened(write(tmp_path, kind, ["one", "", " \n ", "two", None, "three"])))
    assert texts == {0: "one", 1: "", 2: "", 3: "two", 4: "", 5: "three"}


@pytest.mark.parametrize("kind", KINDS)
def test_characters_inside_a_text_stay(tmp_path, kind):
    odd = "nul \0 tab \t unit \x1f next line \x85 separator \u2028 bom \ufeff end"
    assert [text.rstrip("\n") for text in documents(opened(write(tmp_path, kind, [odd, "next"]))).values()] == [
        odd,
        "next",
    ]


def test_byte_order_mark_and_crlf(tmp_path):
    mark = b"\xef\xbb\xbf"
    for kind in ("a.txt", "a.txt.zst"):
        path = write_bytes(tmp_path / kind, mark + b"one\r\nstill\r one\r\n\r\ntwo\r\n")
        assert documents(opened(path)) == {0: "one\nstill\r one\n", 1: "two\n"}
    path = write_bytes(tmp_path / "a.jsonl", mark + b'{"text": "one\\r\\n"}\r\n\r\n{"text": "two"}\r\n')
    assert documents(opened(path)) == {0: "one\r\n", 1: "", 2: "two"}


# -- size ------------------------------------------------------------------------------------------------

SCAN = """
import json, resource, sys
from pipeline import plan
from pipeline.corpus import open_corpus
import pyarrow.parquet
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = plan.scan(open_corpus((sys.argv[1],)), None, None, plan.windowing("t", 128), unit_tokens=1 << 20)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps([found.corpus["bytes"], grown // 1024]))
"""


MOST = [("a.txt", 20), ("a.txt.zst", 40), ("a.jsonl", 300), ("a.parquet", 350)]


@pytest.mark.parametrize(("kind", "megabytes"), MOST)
def test_a_document_of_50_mb_on_one_line(tmp_path, kind, megabytes):
    """A JSON line and a Parquet value are whole at some time; text never is."""
    path = write(tmp_path, kind, ["word after word " * (50_000_000 // 16), "a plain one", "another one"] + TEXTS)
    run = subprocess.run([sys.executable, "-c", SCAN, path], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    size, grown = json.loads(run.stdout)
    assert size > 50_000_000 and grown < megabytes


def test_a_large_row_group_is_read_in_bounded_memory(tmp_path):
    dice = random.Random(0)
    texts = [dice.randbytes(5000).hex() for _ in range(15_000)]  # 150 MB in one row group
    path = write(tmp_path, "a.parquet", texts, rows=len(texts))
    run = subprocess.run([sys.executable, "-c", SCAN, path], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0 and json.loads(run.stdout)[1] < 80, run


def test_zstandard_frames_of_unknown_size(tmp_path):
    """Programs that compress a stream do not know its size when they write the frame's header."""
    path = tmp_path / "a.txt.zst"
    with pyarrow.CompressedOutputStream(str(path), "zstd") as file:
        file.write("\n\n".join(TEXTS).encode())
    assert [text.strip() for text in documents(opened(path)).values()] == TEXTS


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_thousands_of_ranges_on_one_reader(tmp_path, suffix):
    """Each goes on where the one before ended, without growing a chain of generators."""
    path = tmp_path / f"many.txt{suffix}"
    opener = gzip.open if suffix else open
    with opener(path, "wb") as file:
        file.write(b"".join(b"document %d\n\n" % number for number in range(3000)))
    source = TextFile(path)
    offsets = [piece.offset for piece in source.pieces()]
    for number in range(3000):
        (piece,) = source.between(number, number + 1, offsets[number], "reader")
        assert piece.text == f"document {number}\n"


def test_the_last_word_of_a_file_without_a_last_newline_is_whole(tmp_path):
    for text in (b"Hello", b"title\n\nBratislava", "題\n\n漢字漢字".encode()):
        (tmp_path / "a.txt").write_bytes(text)
        assert "".join(piece.text for piece in TextFile(tmp_path / "a.txt").pieces()).split() == text.decode().split()
        assert [piece.text for piece in TextFile(tmp_path / "a.txt").pieces()][-1] == text.decode().split("\n")[-1]


def test_an_indented_line_longer_than_a_piece_does_not_split_its_document(tmp_path):
    (tmp_path / "a.txt").write_text("chapter one\n  " + "漢字" * 20_000 + "\nmore\n", encoding="utf-8")
    pieces = list(TextFile(tmp_path / "a.txt").pieces())
    assert {piece.record for piece in pieces} == {0} and len(pieces) > 3
    assert "".join(piece.text for piece in pieces).count("漢") == 20_000


def test_long_rows_of_parquet_come_few_at_a_time(tmp_path):
    rng = np.random.default_rng(0)
    texts = ["".join(map(chr, rng.integers(97, 123, 1 << 20))) for _ in range(40)]
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "long.parquet", row_group_size=40)
    source = Parquet(tmp_path / "long.parquet")
    with source._open() as file:
        assert source._rows(file, 0) <= 20
    assert sum(len(piece.text) for piece in source.pieces()) == 40 << 20


@pytest.mark.parametrize("how", [{}, {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}}])
def test_a_small_parquet_file_does_not_grow_to_hundreds_of_its_longest_text(tmp_path, how):
    text = "word " * 200_000
    parquet.write_table(pyarrow.table({"text": [text] * 300}), tmp_path / "a.parquet", compression="zstd", **how)
    assert (tmp_path / "a.parquet").stat().st_size < 10_000
    before, pieces = pyarrow.total_allocated_bytes(), Parquet(tmp_path / "a.parquet").pieces()
    assert text.startswith(next(pieces).text)
    assert pyarrow.total_allocated_bytes() - before < 32 * len(text)
    assert sum(len(piece.text) for piece in pieces) > 299 * len(text)


@pytest.mark.parametrize("name", ["a.ndjson", "a.JSONL", "a.jsonlines", "a.json.gz"])
def test_json_lines_by_their_names(tmp_path, name):
    opener = gzip.open if name.endswith(".gz") else open
    with opener(tmp_path / name, "wb") as file:
        file.write(b'{"text": "one", "n": ' + b"9" * 5000 + b"}\n")
    (source,) = open_corpus((str(tmp_path / name),))
    assert [piece.text for piece in source.pieces()] == ["one"]


def test_a_directory_gives_its_texts_and_not_its_readme(tmp_path):
    for name in ("b.txt", "a.jsonl", "README.md", "LICENSE"):
        (tmp_path / name).write_text('{"text": "x"}\n')
    assert [Path(source.name).name for source in open_corpus((str(tmp_path),))] == ["a.jsonl", "b.txt"]
    (tmp_path / "extracted").mkdir()
    (tmp_path / "extracted" / "wiki_00").write_text("An article.\n")  # as WikiExtractor names them
    assert [Path(source.name).name for source in open_corpus((str(tmp_path / "extracted"),))] == ["wiki_00"]


def test_linked_directories_are_read_and_a_link_to_one_above_ends(tmp_path):
    for name in ("texts/a.txt", "elsewhere/b.TXT.GZ"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(gzip.compress(b"x") if name.endswith("GZ") else b"x")
    (tmp_path / "texts" / "linked").symlink_to("../elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to("../texts")
    sources = open_corpus((str(tmp_path / "texts"),))
    assert [Path(source.name).name for source in sources] == ["a.txt", "b.TXT.GZ"]
    assert [piece.text for source in sources for piece in source.pieces()] == ["x", "x"]


@pytest.mark.parametrize("pattern", ["", "**", "**/*.txt", "**/**/a.txt", "**/n*/**", "*/**/*"])
def test_links_from_directory_to_directory_lead_to_each_once(tmp_path, pattern):
    """Two links in each of 20 directories make a million paths to the last."""
    for number in range(20):
        (tmp_path / f"n{number}").mkdir()
        for link in ("l", "m"):
            (tmp_path / f"n{number}" / link).symlink_to(f"../n{number + 1}")
    (tmp_path / "n20").mkdir()
    (tmp_path / "n20" / "a.txt").write_text("x")
    (source,) = open_corpus((str(tmp_path / pattern),))
    assert source.name == str(tmp_path / "n0" / "/".join(["l"] * 20) / "a.txt"), "the first of its names, as ever"


@pytest.mark.parametrize("pattern", ["**", "**/*", "**/*.txt", "*/**/[ab].txt", "[[]x]/**/*", "./**/y/*", "**/.h/**"])
def test_two_asterisks_match_what_they_match_in_the_standard_library(tmp_path, monkeypatch, pattern):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "[x]/a.txt", "[x]/y/b.txt", "[x]/y/c.md", ".h/a.txt", "[x]/.h/d.txt", "z/[b]/b.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("x")
    (tmp_path / "z" / "linked").symlink_to("../.h")
    (tmp_path / "z" / "gone.txt").symlink_to("nothing")
    found = glob.glob(pattern, recursive=True)
    expected = {os.path.normpath(name) for name in found if not (pattern.endswith("**") and os.path.isdir(name))}
    assert expected and {str(path) for path in corpus._glob(Path(pattern))} == expected


def test_a_link_to_nothing_is_not_passed_over(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.txt").symlink_to("gone.txt")
    for pattern in (tmp_path, tmp_path / "*.txt"):
        with pytest.raises(CorpusError, match=r"b.txt: a link to gone.txt, which does not exist"):
            open_corpus((str(pattern),))
    (tmp_path / "b.txt").rename(tmp_path / "b.jpg")  # no text
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "store.txt").symlink_to("/unmounted/store.txt")  # a result
    found = open_corpus((str(tmp_path),), output=tmp_path / "runs")
    assert [Path(source.name).name for source in found] == ["a.txt"]


def test_results_below_the_corpus_are_not_read(tmp_path, monkeypatch):
    for name in ("a.txt", "runs/stores/x/target.json", "runs/b.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    monkeypatch.chdir(tmp_path)
    for pattern in (".", "*", "**/*", str(tmp_path)):
        found = open_corpus((pattern,), output=Path("runs"))
        assert [Path(source.name).name for source in found] == ["a.txt"], pattern
    for pattern, output in (("runs/*.txt", "runs"), ("runs/b.txt", "runs"), ("runs/*.txt", ".")):
        found = open_corpus((pattern,), output=Path(output))
        assert [Path(source.name).name for source in found] == ["b.txt"], pattern


def test_json_that_nests_too_deep_or_holds_no_text(tmp_path):
    for line, message in (("[" * 100_000, "not JSON"), ('{"text": [1]}', "found list"), ('{"a": 1}', r"found \['a'\]")):
        (tmp_path / "a.jsonl").write_text(line)
        with pytest.raises(CorpusError, match=message):
            list(open_corpus((str(tmp_path / "a.jsonl"),))[0].pieces())
