"""Small files: the text, its documents and its windows are those of one file that holds them all."""

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kinds import KINDS, documents, write
from tiny_teacher import lsp_settings

from mlsm.common.errors import CorpusError, ShardError
from mlsm.evaluation.inspection.stores import document_tokens
from pipeline.commands import encode_ids, encode_lsp
from pipeline.config import EncodeIdsConfig
from pipeline.corpus import TextFile, join_small_files, open_corpus
from pipeline.corpus.small_files import SMALL, SmallFiles
from pipeline.teacher import Teacher
from shards.manifest import Plan
from shards.reader import Store
from shards.shard_file import blocks
from shards.verify import verify

UNIT_BYTES = 4000


def articles(directory, count, kind="txt", seed=0, of_each=lambda random: 1):
    """Files of a few documents of their own; returns the documents of each."""
    source = random.Random(seed)
    directory.mkdir(exist_ok=True)
    texts = [
        [" ".join(f"word{source.randrange(50_000)}" for _ in range(30)) for _ in range(of_each(source))]
        for _ in range(count)
    ]
    for number, found in enumerate(texts):
        write(directory, f"{number:04}.{kind}", found)
    return texts


def joined(directory, **settings):
    return join_small_files(open_corpus((str(directory),)), **{"unit_bytes": UNIT_BYTES, **settings})


def ids_settings(corpus, teacher, output, **settings):
    return EncodeIdsConfig(corpus=(str(corpus),), tokenizer=str(teacher), output=output, max_length=32, **settings)


def ids_of(report):
    store = Store.open(report["store"])
    return [columns["ids"].tolist() for record in store.records("train") for _, columns in blocks(store.files, record)]


@pytest.mark.parametrize("kind", [name.removeprefix("a.") for name in KINDS])
def test_documents_are_those_of_the_files_one_after_the_other(tmp_path, kind):
    texts = articles(tmp_path / "texts", 9, kind, of_each=lambda random: random.choice([1, 3]))
    write(tmp_path / "texts", f"0004.{kind}", [])
    texts[4] = []
    (source,) = joined(tmp_path / "texts", unit_bytes=2**63)
    assert isinstance(source, SmallFiles) and len(source.files) == 9
    expected = [text for found in texts for text in found]
    assert [text.strip() for text in documents(source).values()] == expected
    assert list(source.first_records) == [sum(map(len, texts[:n])) for n in range(9)]
    file_of = [n for n, found in enumerate(texts) for _ in found]
    for first in range(len(expected)):
        for fresh in (source, SmallFiles(source.members)):  # which has not been read
            pieces = list(fresh.pieces(first, file_of[first]))
            assert min(piece.record for piece in pieces) == first
            assert all(fresh.file_at(p.offset).name.endswith(f"{file_of[p.record]:04}.{kind}") for p in pieces)


def test_reading_on_opens_no_file_in_between(tmp_path, monkeypatch):
    articles(tmp_path / "texts", 40)
    (source,) = joined(tmp_path / "texts", unit_bytes=2**63)
    assert list(source.first_records) == list(range(40))
    opened, pieces = [], TextFile.pieces
    monkeypatch.setattr(
        TextFile, "pieces", lambda file, *given: opened.append(file.name[-8:-4]) or pieces(file, *given)
    )
    for start, stop in ((0, 3), (3, 6), (30, 33)):
        assert [piece.record for piece in source.between(start, stop, start, "reader")] == list(range(start, stop))
    assert opened == [f"{n:04}" for n in (*range(7), *range(30, 34))]


def test_a_joined_source_has_about_the_bytes_of_a_unit_and_files_of_one_kind(tmp_path):
    articles(tmp_path / "texts", 600)
    articles(tmp_path / "texts", 100, "jsonl", seed=1)
    (tmp_path / "texts" / "0300-large.txt").write_text("large " * 1000)
    found = joined(tmp_path / "texts")
    kinds = [{type(file) for file in source.files} for source in found]
    assert all(len(kind) == 1 for kind in kinds) and sum(len(source.files) for source in found) == 701
    alone = [source for source in found if len(source.files) == 1 and source.files[0].stamp()[0] > UNIT_BYTES * SMALL]
    assert [Path(source.name).name for source in alone] == ["0300-large.txt"]
    sizes = [sum(file.stamp()[0] for file in source.files) for source in found if source not in alone]
    assert 0.5 < np.mean(sizes) / UNIT_BYTES < 2


@pytest.mark.parametrize("change", ["add", "edit", "remove"])
def test_a_change_of_one_file_leaves_all_but_two_joined_sources_as_they_were(tmp_path, change):
    articles(tmp_path / "texts", 400)
    before = Counter(source.content_hash for source in joined(tmp_path / "texts"))
    assert len(before) > 10
    for number in range(0, 400, 23):
        file = tmp_path / "texts" / f"{number:04}.txt"
        text = file.read_text()
        if change == "add":
            file.with_name(f"{number:04}-new.txt").write_text("new " * 60)
        elif change == "edit":
            file.write_text(f"other {text}")
        else:
            file.unlink()
        after = Counter(source.content_hash for source in joined(tmp_path / "texts"))
        assert (before - after).total() <= 2 and before != after
        file.with_name(f"{number:04}-new.txt").unlink(missing_ok=True)
        file.write_text(text)


def test_windows_are_those_of_one_file(tmp_path, teacher_directory):
    texts = articles(tmp_path / "texts", 40, "jsonl", of_each=lambda random: random.randrange(1, 4))
    lines = [json.dumps({"text": text}) + "\n" for found in texts for text in found]
    (tmp_path / "one.jsonl").write_text("".join(lines))
    made = [
        encode_ids(ids_settings(tmp_path / name, teacher_directory, tmp_path / "runs", **settings))[0]
        for name in ("texts", "one.jsonl")
        for settings in ({}, {"max_tokens": 2000})
    ]
    assert ids_of(made[0]) == ids_of(made[2]) and made[0]["units"] == made[2]["units"] == 1
    assert ids_of(made[1]) == ids_of(made[3]) and 1980 <= made[1]["tokens"] < 2032
    assert made[0]["corpus"]["files"] == 40 and made[0]["documents"] == len(lines)


def test_all_files_that_are_not_utf8_are_named(tmp_path, teacher_directory):
    articles(tmp_path / "texts", 9)
    for number in (3, 7):
        (tmp_path / "texts" / f"{number:04}.txt").write_bytes(b"caf\xe9 %d" % number)
    with pytest.raises(CorpusError, match=r"^2 files: .*0003\.txt: not UTF-8 at byte 3; .*0007\.txt: not UTF-8"):
        encode_ids(ids_settings(tmp_path / "texts", teacher_directory, tmp_path / "runs"))


def test_a_repeated_file_is_used_once_even_if_duplicates_are_kept(tmp_path, teacher_directory):
    texts = articles(tmp_path / "texts", 9)
    write(tmp_path / "texts", "0004-again.txt", texts[4])
    settings = ids_settings(tmp_path / "texts", teacher_directory, tmp_path / "runs", keep_duplicates=True)
    made = encode_ids(settings)[0]
    assert made["documents"] == 9 and Store.open(made["store"]).plan.corpus["repeated_sources"] == 1


def test_a_file_that_changes_during_the_run_is_named_and_nothing_is_committed(tmp_path, teacher_directory):
    articles(tmp_path / "texts", 9)

    def change(stage, *_, **__):
        if stage == "encode":
            (tmp_path / "texts" / "0005.txt").write_text("something else")

    with pytest.raises(CorpusError, match=r"0005\.txt changed while it was read"):
        encode_ids(ids_settings(tmp_path / "texts", teacher_directory, tmp_path / "runs"), change)
    assert not list(tmp_path.glob("runs/stores/*/units/*"))


def test_an_empty_file_has_no_document(tmp_path, teacher_directory):
    """By the text of their names it comes after the file whose documents have the same numbers."""
    for name, texts in (("a/0.jsonl", ["one"]), ("a/9.jsonl", []), ("a-b/0.jsonl", ["two", "three"])):
        (tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path / "texts", name, texts)
    made = encode_ids(ids_settings(tmp_path / "texts", teacher_directory, tmp_path / "runs"))[0]
    plan = Store.open(made["store"]).plan
    places = [plan.place(unit, record) for unit in plan.units for record in range(unit.start, unit.stop)]
    assert [(name.removeprefix(f"{tmp_path}/texts/"), record) for name, record in places] == [
        ("a/0.jsonl", 0), ("a-b/0.jsonl", 0), ("a-b/0.jsonl", 1)
    ]  # fmt: skip
    assert (
        plan.text_of(plan.units[0])
        == f"record 0 of {tmp_path}/texts/a/0.jsonl to record 1 of {tmp_path}/texts/a-b/0.jsonl"
    )


@pytest.mark.parametrize("files", [[], {"a.txt": 1}, {"a.txt": {"source": "a.txt and 1 more", "first_record": "0"}}])
def test_a_plan_with_other_counts_of_files_is_refused(files):
    plan = Plan({}, (), {"files": files})
    with pytest.raises(ShardError, match=r"corpus\.files"):
        Plan.parse(json.dumps(plan.as_dict()).encode(), f"{plan.id}.json")


def test_with_held_out_files_each_file_has_its_own_units(tmp_path, teacher_directory):
    articles(tmp_path / "texts", 9)
    settings = ids_settings(tmp_path / "texts", teacher_directory, tmp_path / "runs", held_out_by="file")
    assert encode_ids(settings)[0]["units"] == 9


def test_a_document_is_named_by_its_file(tmp_path, teacher_directory, monkeypatch):
    """In the record of its failure, in what inspection shows, and in the command that repairs a store."""
    texts = articles(tmp_path / "texts", 9, of_each=lambda random: 2)
    write(tmp_path / "texts", "0005-empty.txt", [])
    settings = lsp_settings(tmp_path, teacher_directory, tmp_path / "texts", tmp_path / "runs")
    whole = Store.open(encode_lsp(settings)[0]["store"])
    expected = f"record 1 of {tmp_path}/texts/0003.txt,"
    shown = [document_tokens(whole, "train", n, top=1) for n in range(18)]
    (found,) = [number for number, one in enumerate(shown) if expected in one["heading"]]
    assert "".join(token["text"].strip(" #") for token in shown[found]["tokens"]).startswith(texts[3][1].split()[0])

    bad = [token["id"] for token in shown[found]["tokens"][:8]]
    works = Teacher.__call__

    def fails(teacher, ids_WL, *given, **options):
        if any(row[at : at + 8] == bad for row in ids_WL.tolist() for at in range(len(row))):
            raise RuntimeError("the teacher chokes on this")
        return works(teacher, ids_WL, *given, **options)

    monkeypatch.setattr(Teacher, "__call__", fails)
    store = Store.open(encode_lsp(replace(settings, output=tmp_path / "failing"))[0]["store"])
    entries = [entry for record in store.records() for entry in record.quarantined]
    assert (f"{tmp_path}/texts/0003.txt", 1) in [(entry["source"], entry["record"]) for entry in entries]
    assert {entry["source"] for entry in entries} < {str(file) for file in tmp_path.glob("texts/*")}

    for file in [*whole.path.glob("units/*"), *whole.path.glob("plans/*.yaml")]:
        file.unlink()
    found = verify(whole.path)
    assert all(" more" not in entry["text"] and " more" in entry["source"] for entry in found["missing"])
    assert {tuple(entry["records"]) for entry in found["missing"]} == {(u.start, u.stop) for u in whole.plan.units}
    (command,) = found["commands"]
    assert all(str(file) in command for file in tmp_path.glob("texts/*")) and " more" not in command
