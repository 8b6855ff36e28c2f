"""--dry-run against what the encoding then makes; the warning of a small disk."""

import errno
import os
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from mlsm.common import disk
from mlsm.common.errors import CorpusError, EncodeError
from mlsm.common.progress import silent
from mlsm.terminal.encoding import encoding, show_estimate
from pipeline import estimate
from pipeline.commands import encode_ids, encode_logits, encode_lsp
from pipeline.config import EncodeConfig, EncodeIdsConfig, EncodeLogitsConfig
from pipeline.dictionary.cpu import CpuLearner
from pipeline.encode import Coder
from pipeline.job import scan_corpus
from pipeline.teacher import load_tokenizer


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


def test_the_time_of_learning_is_measured_with_the_real_k_and_minibatches(common, teacher_directory, monkeypatch):
    """Each step of a learner takes 1,000 seconds more, on a clock of the test's own."""
    passed, clock, steps = [0], estimate.time.perf_counter, []
    step = CpuLearner.step

    def slow_step(self, hidden_nd):
        passed[0] += 1_000
        steps.append(len(hidden_nd))
        step(self, hidden_nd)

    monkeypatch.setattr(CpuLearner, "step", slow_step)
    monkeypatch.setattr(estimate.time, "perf_counter", lambda: clock() + passed[0])
    layers = {"layer": (1,), "k": 48, "dictionary_tokens": 4_000, "max_tokens": 40_000, "device": "cpu"}
    config = EncodeConfig(teacher=str(teacher_directory), lam=0.1, dry_run=True, **layers, **common)
    (once,), (twice,) = (encode_lsp(replace(config, dictionary_epochs=epochs)) for epochs in (1, 2))
    steps.clear()
    encode_lsp(replace(config, dry_run=False))
    assert twice["learning_seconds"] == pytest.approx(1_000 * len(steps), rel=0.25)
    assert twice["learning_seconds"] == pytest.approx(2 * once["learning_seconds"], rel=0.01)


def test_many_atoms_for_little_text(common, teacher_directory):
    """More atoms than four minibatches have vectors."""
    config = EncodeConfig(
        teacher=str(teacher_directory), layer=(1,), k=2_000, lam=0.3, device="cpu", max_tokens=4_000, **common
    )
    assert encode_lsp(replace(config, dry_run=True))[0]["learning_seconds"] > 0


def test_a_store_of_ids(common, teacher_directory):
    check(encode_ids, EncodeIdsConfig(tokenizer=str(teacher_directory), **common), 0.1)


def test_text_without_a_window_is_said(common, teacher_directory, tmp_path):
    """Pairs are of sentences of one document, and each document here is a line."""
    (tmp_path / "lines.txt").write_text("\n\n".join(f"Line {number} stands alone" for number in range(50)))
    common = common | {"corpus": (str(tmp_path / "lines.txt"),), "packing": "pairs"}
    for encode, config in (
        (encode_ids, EncodeIdsConfig(tokenizer=str(teacher_directory), **common)),
        (encode_lsp, EncodeConfig(teacher=str(teacher_directory), layer=(1,), k=48, device="cpu", **common)),
    ):
        for dry_run in (True, False):
            with pytest.raises(CorpusError, match=r"no window can be cut from .*lines.txt. A pair needs"):
                encode(replace(config, dry_run=dry_run))


def test_a_store_of_logits(common):
    config = EncodeLogitsConfig(teacher="bundled", device="cpu", batch_tokens=2048, max_tokens=10_000, **common)
    check(encode_logits, config, 0.1)


def test_a_small_disk_is_said_before_the_encoding(common, teacher_directory, monkeypatch):
    config = EncodeIdsConfig(tokenizer=str(teacher_directory), **common)
    monkeypatch.setattr("pipeline.stores.free_bytes", lambda path: 1000)
    with pytest.warns(UserWarning, match=r"about 0\.\d GB will be written under .*/runs, where 0\.0 GB are free"):
        encode_ids(config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert encode_ids(config)[0]["finished_before"], "nothing is left to be written"


def test_a_finished_store_on_a_read_only_disk_is_said_to_be_finished(common, teacher_directory, monkeypatch):
    config = EncodeIdsConfig(tokenizer=str(teacher_directory), **common)
    (made,) = encode_ids(config)

    def refuse(path, *_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    for call in ("create", "append", "link", "rename", "mkdir"):
        monkeypatch.setattr(disk, call, refuse)
    (again,) = encode_ids(config)
    assert again["finished_before"] and again["store"] == made["store"]
    next(Path(made["store"]).glob("units/*.json")).unlink()
    with pytest.raises(OSError, match=rf"Read-only file system: '{made['store']}/units/"):
        encode_ids(config)


@pytest.mark.parametrize("words", [8, 150], ids=["short lines", "lines that are cut"])
@pytest.mark.parametrize("lines", [3, 20_000], ids=["short documents", "one long document"])
def test_pairs_of_sentences(common, teacher_directory, english_text, tmp_path, words, lines):
    """They are cut at the end of a window, and a document's third line is dropped."""
    found = english_text.read_text().split()
    cut = [" ".join(found[start : start + words]) for start in range(0, len(found), words)]
    documents = ["\n".join(cut[start : start + lines]) for start in range(0, len(cut), lines)]
    (tmp_path / "pairs.txt").write_text("\n\n".join(documents))
    common["corpus"] = (str(tmp_path / "pairs.txt"),)
    config = EncodeIdsConfig(tokenizer=str(teacher_directory), packing="pairs", **common)
    guess, made = (encode_ids(replace(config, dry_run=run))[0] for run in (True, False))
    assert guess["tokens"] == pytest.approx(made["tokens"], rel=0.15)


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
    assert "A small one: --recipe small-encoder --lr 0.004" in encoding([done], config)
    (advice,) = dry["corpus"]["advice"]
    assert "a text file has 64 documents on average" in advice and "--document-boundary file" in advice
    whole = encode_ids(replace(config, document_boundary="file", held_out_by="file", dry_run=True))[0]["corpus"]
    assert (whole["documents"], whole["held_out_documents"], whole["advice"]) == (9, 1, [])
    assert [entry["held_out_documents"] for entry in whole["files_listed"]] == [1, 0, 0, 0, 0], "the held-out one first"


def test_tokens_are_expected_from_a_sample_of_the_text(common, teacher_directory, tmp_path):
    """Four bytes per token, as in English, would be far off: each Chinese character is a token of three bytes."""
    text = tmp_path / "chinese.txt"
    text.write_text("\n\n".join(f"{'语言模型学习' * 40} {number}" for number in range(60)))
    config = EncodeIdsConfig(tokenizer=str(teacher_directory), **common | {"corpus": (str(text),)})
    job = scan_corpus(config, load_tokenizer(str(teacher_directory)), silent)
    (report,) = encode_ids(config)
    assert job.expected_tokens == pytest.approx(report["tokens"], rel=0.05)
    assert abs(job.planned_tokens / report["tokens"] - 1) > 0.2
    cut = scan_corpus(replace(config, max_tokens=500), load_tokenizer(str(teacher_directory)), silent)
    assert cut.expected_tokens == 500 and 1 <= cut.planned_documents < 20 and job.planned_documents == 60


def test_a_scan_begins_at_nothing(common, teacher_directory, tmp_path):
    """The first report is the only line of a short scan that is printed; a number there looks like the whole."""
    (tmp_path / "some.txt").write_text("\n\n".join(f"Some text of its own, {number}." for number in range(90)))
    config = EncodeIdsConfig(tokenizer=str(teacher_directory), **common | {"corpus": (str(tmp_path / "some.txt"),)})
    reports = []
    scan_corpus(config, load_tokenizer(str(teacher_directory)), lambda *report, **_: reports.append(report))
    assert reports[0] == ("scan", 0, None) and reports[-1][1] > 0


def test_a_dry_run_refuses_too_few_vectors_as_the_encoding_does(common, teacher_directory):
    config = EncodeConfig(
        teacher=str(teacher_directory), layer=(1,), k=(48,), dictionary_tokens=50, device="cpu", **common
    )
    for run in (True, False):
        with pytest.raises(EncodeError, match="the sample's 50 only 45 are left after 5 are set aside"):
            encode_lsp(replace(config, dry_run=run))


def test_a_dry_run_refuses_more_atoms_than_fit_into_memory(common, teacher_directory, monkeypatch):
    monkeypatch.setattr("pipeline.learn.available_memory", lambda: 30_000)
    config = EncodeConfig(teacher=str(teacher_directory), layer=(1,), k=(48,), device="cpu", dry_run=True, **common)
    with pytest.raises(EncodeError, match="--k 48: .* enough for at most --k 45"):
        encode_lsp(config)


def test_the_speed_is_that_of_the_whole_corpus(common, teacher_directory, monkeypatch):
    """A corpus whose text becomes slower: the time of its first windows says little about the rest.

    Time passes on a clock of the test's own, as if each token took one microsecond in the first unit and three in the
    others; only so is the result the same on a busy machine.
    """
    passed = [0.0]
    monkeypatch.setattr(estimate.time, "perf_counter", lambda: passed[0])
    job_windows = estimate.Job.windows

    def windows(self, unit):
        slow = 1 if unit.start == 0 else 3
        for window in job_windows(self, unit):
            passed[0] += slow * 1e-6 * len(window.ids)
            yield window

    monkeypatch.setattr(estimate.Job, "windows", windows)
    config = EncodeIdsConfig(tokenizer=str(teacher_directory), **common)
    (guess,) = encode_ids(replace(config, dry_run=True))
    begun = passed[0]
    (report,) = encode_ids(config)
    achieved = report["tokens"] / (passed[0] - begun)
    assert guess["units"] > 5, "the first unit is a small part"
    assert guess["tokens_per_second"] == pytest.approx(achieved, rel=0.15)
    assert guess["slowest"] < guess["tokens_per_second"] < guess["fastest"]


def test_the_measurement_reads_no_window_twice(common, teacher_directory, monkeypatch):
    """What was read before is in caches; but for the windows of the warm-up, which are left out of the measurement."""
    read, job_windows = [], estimate.Job.windows

    def windows(self, unit):
        for number, window in enumerate(job_windows(self, unit)):
            read.append((unit.id, number))
            yield window

    monkeypatch.setattr(estimate.Job, "windows", windows)
    monkeypatch.setattr(estimate, "SECONDS", 1e9)
    (guess,) = encode_ids(EncodeIdsConfig(tokenizer=str(teacher_directory), dry_run=True, **common))
    assert len({unit for unit, _ in read}) == estimate.PLACES
    assert len(read) <= len(set(read)) + 2 * estimate.FEWEST_WINDOWS and guess["measured_tokens"] > 10_000


@pytest.mark.parametrize("unit_tokens", [2_500, 20_000])
def test_forward_passes_that_are_not_full_count(common, teacher_directory, monkeypatch, unit_tokens):
    """They take as long as full ones, and every unit ends with one: small units and held-out ones cost more a token.

    Time passes on a clock of the test's own: a millisecond for each window that a pass has room for.
    """
    passed = [0.0]
    monkeypatch.setattr(estimate.time, "perf_counter", lambda: passed[0])
    states = Coder.states

    def read(self, teacher, batch, numbers):
        passed[0] += 1e-3 * len(batch.ids_WL)
        return states(self, teacher, batch, numbers)

    monkeypatch.setattr(Coder, "states", read)
    config = EncodeConfig(
        teacher=str(teacher_directory), layer=(2,), k=(48,), lam=0.1, dictionary_tokens=4_000, batch_tokens=2048,
        device="cpu", max_tokens=40_000, **common | {"unit_tokens": unit_tokens},
    )  # fmt: skip
    dictionary = encode_lsp(replace(config, output=config.output / "other"))[0]["dictionary"]
    config = replace(config, dictionary=dictionary)
    (guess,) = encode_lsp(replace(config, dry_run=True))
    (report,) = encode_lsp(config)
    assert guess["tokens_per_second"] == pytest.approx(report["new_tokens"] / report["seconds"], rel=0.15)
    assert guess["seconds"] == pytest.approx(report["seconds"], rel=0.25)
