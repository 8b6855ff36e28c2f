"""Odd documents in every kind of source, up to the finished store (faults.md, rows 19 to 21 and 24)."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from kinds import KINDS, LINES_AS_RECORDS, write

from mlsm.common.errors import CorpusError
from pipeline.commands import encode_ids
from pipeline.config import EncodeIdsConfig
from shards.reader import Store

pytestmark = [
    pytest.mark.promise("a line of 50 MB …"),
    pytest.mark.promise(
        "odd, blank and no documents, text that is not UTF-8 under each policy, counted by file; the same tokens "
        "from every kind of source, from several units and in any order",
        cases="9 kinds",
    ),
]

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [f"Document {n} says\na few plain words." for n in range(400)]


def encoded(path, teacher, output, **settings):
    given = {"tokenizer": str(teacher), "max_length": 32, "output": output, **settings}
    return encode_ids(EncodeIdsConfig(corpus=(str(path),), **given))[0]


def stored_tokens(report):
    """The tokens of training and of held-out text in their order, [CLS] and [SEP] apart: units may end elsewhere."""
    store = Store.open(report["store"], report["plan"])
    batches = [split.read(np.arange(len(split))) for split in map(store.split, ("train", "held_out"))]
    found = [batch.ids[batch.documents >= 0] for batch in batches]
    return [ids[~np.isin(ids, store.special_ids["all"])].tolist() for ids in found]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_holds_the_same_tokens_in_several_units(teacher_directory, tmp_path, kind):
    plain = encoded(write(tmp_path, "plain.txt", TEXTS), teacher_directory, tmp_path / "plain", unit_tokens=1000)
    other = encoded(write(tmp_path, kind, TEXTS), teacher_directory, tmp_path / "other", unit_tokens=1000)
    assert other["units"] > 3 and other["documents"] == plain["documents"] == len(TEXTS)
    assert stored_tokens(other) == stored_tokens(plain) != [[], []]
    again = encoded(tmp_path / kind, teacher_directory, tmp_path / "other", unit_tokens=1000)
    assert again["finished_before"] and again["plan"] == other["plan"]


@pytest.mark.parametrize("packing", ["packed", "pairs"])
@pytest.mark.parametrize("kind", KINDS)
def test_odd_documents_are_counted_and_keep_their_numbers(teacher_directory, tmp_path, kind, packing):
    """Special tokens only, characters that a tokenizer drops, and, where they have numbers, blank documents."""
    odd = ["[SEP] [CLS] [PAD]\n[MASK] [SEP] [SEP]", "\0\0\0\0\0\0\n\0\0\0\0\0\0", "\ufffd\ufffd\n\u200b", "\x85 \x1f"]
    blank = ["", "   ", " \n "] if kind in LINES_AS_RECORDS else []
    report = encoded(
        write(tmp_path, kind, [*blank, *odd, *TEXTS]), teacher_directory, tmp_path / "runs", packing=packing
    )
    store = Store.open(report["store"])
    plan = store.plan
    assert plan.corpus["blank"] == len(blank) + (kind in LINES_AS_RECORDS)  # a next line and a separator are space too
    assert plan.corpus["documents"] == len(TEXTS) + 3
    assert sum(map(len, stored_tokens(report))) > 3 * len(TEXTS)
    split = store.split("train")
    assert all(len(split.read(np.array([n])).ids) == 1 for n in range(len(split)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("texts", [[], ["", "  "]])
def test_a_file_without_documents_among_others(teacher_directory, tmp_path, kind, texts):
    path = write(tmp_path, kind, texts)
    with pytest.raises(CorpusError, match="no training text: 1 files, 0 documents"):
        encoded(path, teacher_directory, tmp_path / "runs")
    write(tmp_path, "z.txt", TEXTS)
    report = encoded(tmp_path, teacher_directory, tmp_path / "runs")
    assert report["documents"] == len(TEXTS)
    files = Store.open(report["store"]).plan.corpus["files"]
    assert {Path(name).name for name, found in files.items() if found["documents"]} == {"z.txt"}


@pytest.mark.parametrize("kind", KINDS)
def test_one_document_alone_is_a_store(teacher_directory, tmp_path, kind):
    """One unit, one partial block; a training document, so nothing is held out."""
    report = encoded(write(tmp_path, kind, ["only a few words"]), teacher_directory, tmp_path / "runs")
    assert (report["units"], report["documents"]) == (1, 1) and report["windows"] == 1


@pytest.mark.parametrize("kind", ["a.txt", "a.jsonl", "a.parquet"])
def test_the_plan_counts_what_was_not_utf8_in_each_file(teacher_directory, tmp_path, kind):
    if kind == "a.parquet":
        write(tmp_path, kind, [*(text.encode() for text in TEXTS), b"caf\xe9 au lait"])
    else:
        path = write(tmp_path, kind, TEXTS)
        bad = {"a.txt": b"\n\ncaf\xe9 au lait\n", "a.jsonl": b'{"text": "caf\xe9 au lait"}\n'}[kind]
        path.write_bytes(path.read_bytes() + bad)
    write(tmp_path, "b.txt.gz", TEXTS[:3] + ["another"])
    with pytest.raises(CorpusError, match=f"{kind}.*not UTF-8"):
        encoded(tmp_path, teacher_directory, tmp_path.parent / f"{tmp_path.name}-strict")
    plans = {}
    for policy, taken in (("skip", len(TEXTS) + 1), ("replace", len(TEXTS) + 2)):
        output = tmp_path.parent / f"{tmp_path.name}-{policy}"
        report = encoded(tmp_path, teacher_directory, output, invalid_utf8=policy)
        assert report["documents"] == taken
        counts = Store.open(report["store"]).plan.corpus
        assert counts["invalid"] == 1 and counts["duplicates"] == 3
        files = {Path(name).name: found for name, found in counts["files"].items()}
        assert files[kind]["invalid"] == 1 and files[kind]["documents"] == taken - 1
        expected = {"documents": 1, "held_out_documents": 0, "blank": 0, "invalid": 0, "too_short": 0, "duplicates": 3}
        assert files["b.txt.gz"].items() >= expected.items() and files["b.txt.gz"]["bytes"] > 0
        plans[policy] = report["plan"]
    assert plans["skip"] != plans["replace"]


ENCODE = """
import json, resource, sys
from pathlib import Path
from pipeline.config import EncodeIdsConfig
from pipeline.commands import encode_ids
import pipeline.teacher, pyarrow.parquet
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
corpus, tokenizer, output = sys.argv[1:]
report = encode_ids(EncodeIdsConfig(corpus=(corpus,), tokenizer=tokenizer, max_length=128, max_tokens=300_000,
                                 output=Path(output)))[0]
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps([report["tokens"], grown // 1024]))
"""


@pytest.mark.parametrize("kind", ["a.jsonl", "a.parquet"])
def test_a_document_of_50_mb_on_one_line_is_encoded_in_bounded_memory(teacher_directory, tmp_path, kind):
    path = write(tmp_path, kind, ["a the of an a the of an " * (50_000_000 // 24)])
    run = subprocess.run(
        [sys.executable, "-c", ENCODE, path, teacher_directory, tmp_path / "runs"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    tokens, grown = json.loads(run.stdout)
    assert tokens >= 297_000 and grown < 500
