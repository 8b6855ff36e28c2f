"""Files of sentences and of pairs: every format gives the same rows, and what is malformed is named."""

import bz2
import gzip
import json
import lzma

import pytest

from mlsm.common.errors import CorpusError, ScoringError
from mlsm.evaluation.tasks.scoring.files import read

SENTENCES = ["Cats sleep.", 'He said, "no".', "Zürich\u2028is one line."]
WRITERS = {
    "a.txt": lambda: "\n\n  Cats sleep.\t\r\n" + "\n".join(SENTENCES[1:]),
    "a.csv": lambda: '\ufeffid,text\n1,Cats sleep.\n2,"He said, ""no""."\n\n3,Zürich\u2028is one line.\n',
    "a.jsonl": lambda: "\n".join(json.dumps({"text": text, "n": 1}, ensure_ascii=False) for text in SENTENCES) + "\n\n",
}
COMPRESSORS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}


@pytest.mark.parametrize("suffix", COMPRESSORS)
@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_sentences(name, suffix, tmp_path):
    path = tmp_path / f"{name}{suffix}"
    path.write_bytes(COMPRESSORS[suffix](WRITERS[name]().encode()))
    found = read(path)
    assert found.rows == [(text,) for text in SENTENCES]
    assert found.columns == ("text",)
    plain = tmp_path / "plain"
    plain.write_text("\n".join(SENTENCES), encoding="utf-8")
    assert found.digest == read(plain).digest
    plain.write_text("\n".join(SENTENCES[::-1]), encoding="utf-8")
    assert found.digest != read(plain).digest


@pytest.mark.parametrize("names", [("good", "bad"), ("sentence_good", "sentence_bad"), ("sent_more", "sent_less")])
def test_pairs_are_known_by_their_columns(names, tmp_path):
    (tmp_path / "p.csv").write_text(f"n,{names[1]},{names[0]}\n1,She ran.,He ran.\n2,Dogs bark.,Cats bark.\n")
    (tmp_path / "p.jsonl").write_text(
        json.dumps({names[0]: "He ran.", names[1]: "She ran."})
        + "\n"
        + json.dumps({names[0]: "Cats bark.", names[1]: "Dogs bark."})
    )
    tables = [read(tmp_path / name, pairs=True) for name in ("p.csv", "p.jsonl")]
    assert tables[0] == tables[1]
    assert tables[0].columns == names and tables[0].rows == [("He ran.", "She ran."), ("Cats bark.", "Dogs bark.")]


@pytest.mark.parametrize(
    ("name", "content", "pairs", "message"),
    [
        ("a.csv", "id,sentence\n1,Cats sleep.\n", False, r"a.csv, line 2: expected sentences in text, .*--text-field"),
        ("a.csv", "text,id\nCats sleep.,1\n ,2\n", False, "a.csv, line 3: expected sentences in text"),
        ("a.csv", "id,text\n1,Cats sleep.\n2\n", False, "a.csv, line 3: expected sentences in text"),
        ("a.csv", "text\nFine.\nHe came, she went.\n", False, 'a.csv, line 3: .* found \\[" she went."\\] after them'),
        ("a.csv", 'text\n"Cats sleep.\n', False, "a.csv, after line 1: expected CSV: unexpected end"),
        ("a.jsonl", '{"text": "a"}\n["a"]\n', False, "a.jsonl, line 2: expected a JSON object"),
        ("a.jsonl", '{"text": "a"}\n{"text": 1}\n', False, "a.jsonl, line 2: expected sentences in text"),
        ("a.jsonl", '{"text": "\\ud800"}', False, "a.jsonl, line 1: expected a JSON object of whole characters"),
        ("a.jsonl", "{", False, "a.jsonl, line 1: expected a JSON object"),
        ("p.csv", "good,worse\na,b\n", True, "p.csv, line 2: expected sentences in good and bad or sentence_good"),
        ("p.jsonl", '{"good": "a", "bad": "b"}\n{"good": "a"}\n', True, "line 2: expected sentences in good and bad,"),
        ("a.tsv", "text\tlabel\nFine.\t1\n", False, "a.tsv: columns are read from CSV and JSON lines"),
        ("a.csv", 'text,stars\n"",1\n', False, "a.csv, line 2: expected .* It is empty there: remove the row"),
        ("p.txt", "a\tb\n", True, "--pairs takes CSV or JSON lines"),
        ("a.txt", "\n \n", False, "a.txt has no sentences"),
        ("p.csv", "good,bad\n", True, "p.csv has no pairs"),
    ],
)
def test_what_holds_no_sentences_is_named(name, content, pairs, message, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(ScoringError, match=message):
        read(tmp_path / name, pairs=pairs)


def test_another_column_can_be_named(tmp_path):
    (tmp_path / "a.csv").write_text("id,review\n1,Fine.\n")
    assert read(tmp_path / "a.csv", text_field="review").rows == [("Fine.",)]


def test_bytes_that_are_no_text_and_missing_files_are_named(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"Cats sleep.\nZ\xfcrich\n")
    with pytest.raises(ScoringError, match="a.txt, line 2: not UTF-8"):
        read(tmp_path / "a.txt")
    (tmp_path / "a.txt").write_text("Cats sleep.", encoding="utf-16")
    with pytest.raises(ScoringError, match="iconv -f utf-16"):
        read(tmp_path / "a.txt")
    (tmp_path / "c.txt").write_text("Cats sleep.")
    with pytest.raises(ScoringError, match="omit --text-field"):
        read(tmp_path / "c.txt", text_field="review")
    with pytest.raises(CorpusError, match="b.txt: cannot be read"):
        read(tmp_path / "b.txt")
