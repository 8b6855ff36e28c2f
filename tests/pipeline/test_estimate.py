"""--dry-run against what the encoding then makes; the warning of a small disk."""

import warnings
from dataclasses import replace

import pytest

from pipeline import estimate
from pipeline.config import EncodeConfig, EncodeIdsConfig, EncodeLogitsConfig
from pipeline.encode import encode_ids, encode_logits, encode_lsp
from terminal.encoding import encoding, show_estimate


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(estimate, "SECONDS", 0.05)


@pytest.fixture
def common(english_text, tmp_path):
    return {"corpus": (str(english_text),), "max_length": 32, "unit_tokens": 30_000, "output": tmp_path / "runs"}


def check(encode, config, tolerance):
    (guess,) = encode(replace(config, dry_run=True))
    assert not list(config.output.rglob("*.tar")) and not list(config.output.glob("stores/*"))
    assert not list(config.output.rglob(".*")) and guess["seconds"] > 0 and guess["disk_free"] > 0
    reports = encode(config)
    tokens = reports[0]["tokens"]
    assert guess["tokens"] == pytest.approx(tokens, rel=0.15)
    assert guess["bytes"] / guess["tokens"] == pytest.approx(sum(r["bytes"] for r in reports) / tokens, rel=tolerance)
    return guess


@pytest.mark.parametrize("given", [False, True], ids=["to be learned", "there"])
def test_stores_of_lsps(common, teacher_directory, given):
    config = EncodeConfig(
        teacher=str(teacher_directory),
        layer=(1, 3),
        k=48,
        lam=0.1,
        top_n=8,
        dictionary_tokens=4_000,
        batch_tokens=2048,
        device="cpu",
        max_tokens=40_000,
        **common,
    )
    if given:
        dictionary = encode_lsp(replace(config, layer=(3,), output=config.output / "other"))[0]["dictionary"]
        config = replace(config, layer=(3,), dictionary=dictionary, output=config.output / "mine")
    guess = check(encode_lsp, config, 0.2)
    assert guess["lacking"] == (0 if given else 2) and (guess["learning_seconds"] > 0) == (not given)


def test_a_store_of_ids(common, teacher_directory):
    check(encode_ids, EncodeIdsConfig(tokenizer=str(teacher_directory), **common), 0.1)


def test_a_store_of_logits(common):
    config = EncodeLogitsConfig(teacher="bundled", device="cpu", batch_tokens=2048, max_tokens=10_000, **common)
    check(encode_logits, config, 0.1)


def test_a_small_disk_is_said_before_the_encoding(common, teacher_directory, monkeypatch):
    config = EncodeIdsConfig(tokenizer=str(teacher_directory), **common)
    monkeypatch.setattr(estimate, "free_bytes", lambda path: 1000)
    with pytest.warns(UserWarning, match=r"about 0\.\d GB are to be written under .*/runs, where 0\.0 GB are free"):
        encode_ids(config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert encode_ids(config)[0]["finished_before"], "nothing is left to be written"


def test_the_text_is_counted_by_file(common, teacher_directory, tmp_path):
    """In the dry run and in the summary; of many files the largest are named."""
    books = tmp_path / "books"
    books.mkdir()
    for book in range(9):
        paragraphs = [f"Chapter {number} of book {book}." for number in range(60 + book)] + ["The end."]
        (books / f"{book}.txt").write_text("\n\n".join(paragraphs))
    config = EncodeIdsConfig(tokenizer=str(teacher_directory), **common | {"corpus": (str(books),)})
    dry, done = (encode_ids(replace(config, dry_run=run))[0] for run in (True, False))
    assert dry["corpus"] == done["corpus"] and len(done["corpus"]["files_listed"]) == 5
    for text in (show_estimate(dry), encoding([done], config)):
        total, first, *rest = text.partition("\nThe text")[2].splitlines()
        assert ": 9 files: 577 documents, " in total and total.endswith(" held out, 8 duplicates left out")
        assert first.split()[:3] == [f"{books}/8.txt", "68", "documents,"] and "1 duplicate left out" in first
        assert rest[4].split()[:4] == ["4", "others", "247", "documents,"]
        assert "a text file has 64 of them on average" in rest[5] and "--document-boundary file" in rest[5]
    whole = encode_ids(replace(config, document_boundary="file", held_out_by="file", dry_run=True))[0]["corpus"]
    assert (whole["documents"], whole["held_out_documents"], whole["paragraphs"]) == (9, 1, None)
    assert [entry["held_out_documents"] for entry in whole["files_listed"]] == [1, 0, 0, 0, 0], "the held-out one first"
