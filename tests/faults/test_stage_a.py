"""Stage A with changed order, retries, edited corpora, odd texts and failing writers.

One random 3-layer teacher and one dictionary; the oracle is an undisturbed run, or the text itself.
"""

import gzip
import json
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from preloaded import run_command
from stored import shards
from test_commit import temporaries
from test_interruption import start
from tiny_teacher import lsp_settings

from mlsm.common.errors import CorpusError, StoreError
from pipeline import encode as encoding
from pipeline.commands import encode_ids, encode_lsp
from pipeline.config import EncodeIdsConfig
from pipeline.dictionary import Dictionary
from shards.derive import derive
from shards.reader import Store
from shards.writer import UnitWriter

pytestmark = [
    pytest.mark.promise(
        "changed λ, layer, n, tolerance, dictionary, teacher, tokenizer: another store; an edited file: only it is new",
        cases="5, 2, 2",
    ),
    pytest.mark.promise("a line of 50 MB: bounded memory", cases="1; 6 in four kinds of file"),
]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def place(tmp_path_factory, english_text, teacher_directory):
    directory = tmp_path_factory.mktemp("stage-a")
    return lsp_settings(
        directory, teacher_directory, english_text, directory / "whole", max_tokens=40_000, unit_tokens=5_000
    )


@pytest.fixture(scope="module")
def whole(place):
    return encode_lsp(place)[0]


def ids_of(text, place, output, **settings):
    """An ids store of one text; returns its report."""
    given = {"tokenizer": place.teacher, "max_length": 32, "output": output, **settings}
    return encode_ids(EncodeIdsConfig(corpus=(str(text),), **given))[0]


@pytest.mark.promise(
    "bytes do not depend on the order of units nor on retries",
    cases="4 orders, writes failing at random",
)
@pytest.mark.parametrize("seed", range(4))
def test_bytes_do_not_depend_on_the_order_of_units_nor_on_retries(place, whole, tmp_path, monkeypatch, seed):
    dice = random.Random(seed)
    write = UnitWriter.write_block

    def fails_at_times(writer, **columns):
        if dice.random() < 0.2:
            raise OSError(5, "Input/output error")
        return write(writer, **columns)

    monkeypatch.setattr(UnitWriter, "write_block", fails_at_times)
    monkeypatch.setattr(encoding, "encode_missing", in_shuffled_order(encoding.encode_missing, dice))
    attempts = 0
    while True:
        attempts += 1
        try:
            report = encode_lsp(replace(place, output=tmp_path))[0]
            break
        except OSError:
            assert attempts < 100
    assert shards(report["store"]) == shards(whole["store"])


def in_shuffled_order(encode_missing, dice):
    """encode_missing, which takes missing units in another order than the plan's."""

    def shuffled(executor, tasks, *rest):
        return encode_missing(executor, dice.sample(tasks, len(tasks)), *rest)

    return shuffled


@pytest.mark.promise("writers of one plan …")
@pytest.mark.promise("15 two writers at …")
def test_two_commands_at_once(place, whole, tmp_path):
    """Real processes on one plan: each ends well, one shard a unit, the bytes of one run alone."""
    flags = [
        *("encode-lsp", "--teacher", place.teacher, "--layer", 2, "--corpus", *place.corpus),
        *("--dictionary", place.dictionary, "--lam", 0.1, "--top-n", 8, "--max-length", 32),
        *("--max-tokens", 40_000, "--unit-tokens", 5_000, "--batch-tokens", 2048, "--output", tmp_path),
    ]
    both = [start(flags), start(flags)]
    for process in both:
        _, said = process.communicate(timeout=200)
        assert process.returncode == 0, said
    assert shards(next(tmp_path.glob("stores/*"))) == shards(whole["store"]) and not temporaries(tmp_path)


@pytest.mark.promise("44 derive during verify --repair")
def test_encode_repair_clean_and_derive_at_once(place, whole, tmp_path):
    """Real processes on one damaged store: each ends well or with a line; together they lose nothing."""
    store = tmp_path / "stores" / Path(whole["store"]).name
    shutil.copytree(whole["store"], store)
    shard = max(store.glob("units/*.tar"))
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    shard.chmod(0o644)
    shard.write_bytes(raw)
    encode = [
        *("encode-lsp", "--teacher", place.teacher, "--layer", 2, "--corpus", *place.corpus),
        *("--dictionary", place.dictionary, "--lam", 0.1, "--top-n", 8, "--max-length", 32),
        *("--max-tokens", 40_000, "--unit-tokens", 5_000, "--batch-tokens", 2048, "--output", tmp_path),
    ]
    smaller = ["derive-shards", store, "--top-n", 4]
    others = [["verify-shards", store, "--repair"], ["clean", tmp_path, "--all"], smaller]
    for process in [start(flags) for flags in (*others, encode)]:
        _, said = process.communicate(timeout=200)
        assert process.returncode in (0, 1, 3) and "Traceback" not in said, said
    for flags in (encode, smaller):
        process = start(flags)
        _, said = process.communicate(timeout=200)
        assert process.returncode == 0, said
    assert shards(store) == shards(whole["store"]) and not temporaries(tmp_path)
    assert {*shards(next(tmp_path.glob("stores/*-n4-*"))).values()} == {
        *shards(derive(whole["store"], 4, tmp_path / "alone")["store"]).values()
    }


@pytest.mark.promise("12 changed λ, layer, n, dictionary")
def test_changed_settings_are_another_store(place, whole, tmp_path):
    seen, plans = {whole["store"]}, set()
    other = tmp_path / "other"
    atoms = np.eye(40, 32, dtype=np.float32)
    Dictionary(atoms / np.maximum(np.linalg.norm(atoms, axis=1, keepdims=True), 1e-9), [], "x", {}).save(other)
    for change in ({"lam": 0.12}, {"layer": (1,)}, {"top_n": 4}, {"tolerance": 5e-4}, {"dictionary": other}):
        found = encode_lsp(replace(place, max_tokens=8000, **change))[0]
        assert found["store"] not in seen, change
        seen.add(found["store"])
        plans.add(found["plan"])
    assert len(plans) == 1


@pytest.mark.promise("13 teacher or tokenizer changed under its name")
def test_a_changed_teacher_or_tokenizer_under_the_same_name(place, tmp_path):
    teacher = tmp_path / "teacher"
    shutil.copytree(place.teacher, teacher)
    given = replace(place, teacher=str(teacher), max_tokens=8000, output=tmp_path / "runs")
    first = encode_lsp(given)[0]
    from safetensors.numpy import load_file, save_file

    weights = load_file(teacher / "model.safetensors")
    name = next(name for name in weights if "layer.0" in name and name.endswith("weight"))
    weights[name] = weights[name] + np.float32(1e-3)
    save_file(weights, teacher / "model.safetensors", metadata={"format": "pt"})
    second = encode_lsp(given)[0]
    tokenizer = json.loads((teacher / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    one, two = sorted(vocabulary, key=vocabulary.get)[-2:]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    (teacher / "tokenizer.json").write_text(json.dumps(tokenizer))
    third = encode_lsp(given)[0]
    assert len({report["store"] for report in (first, second, third)}) == 3
    assert first["plan"] == second["plan"] != third["plan"]


@pytest.mark.promise("14 an edited corpus file")
def test_an_edited_file_is_encoded_anew_and_only_it(place, tmp_path):
    texts = [tmp_path / f"{n}.txt" for n in range(2)]
    for n, text in enumerate(texts):
        text.write_text("\n\n".join(f"Document {i} of file {n} says a few plain words." for i in range(150)))
    given = replace(place, corpus=tuple(map(str, texts)), max_tokens=None, output=tmp_path / "runs")
    first = encode_lsp(given)[0]
    before = shards(first["store"])
    content = texts[1].read_text()
    stamp = texts[1].stat()
    texts[1].write_text(content.replace("plain", "other"))
    import os

    os.utime(texts[1], ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # same size, same time, other content
    second = encode_lsp(given)[0]
    assert second["plan"] != first["plan"] and 0 < second["new_units"] < second["units"]
    assert before.items() <= shards(second["store"]).items()
    texts[1].write_text(content)
    again = encode_lsp(given)[0]
    assert again["finished_before"] and again["plan"] == first["plan"]


@pytest.mark.promise(
    "empty, blank, special-only documents, NUL, byte order mark, CRLF are encoded; bytes that are not UTF-8, "
    "lone surrogates, broken JSON, a cut .gz, no text are refused with their place",
    cases="6",
)
@pytest.mark.promise("19 empty, blank, special-only documents")
def test_odd_documents_are_counted_and_keep_their_numbers(place, tmp_path):
    """Empty, blank, of special tokens only, NUL, a byte order mark, CRLF: no NaN, no missing document number."""
    lines = ["first words here", "", "   ", "[SEP] [CLS] [PAD]", "nul \0 inside", "last words here"] * 40
    text = tmp_path / "odd.jsonl"
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    report = encode_lsp(replace(place, corpus=(str(text),), max_tokens=None, output=tmp_path / "runs"))[0]
    assert 0 < report["mass_kept"] <= 1 and np.isfinite(report["entropy_nats"])
    plain, marked = tmp_path / "plain.txt", tmp_path / "marked.txt"
    plain.write_bytes(b"one two\n\nthree four\n" * 100)
    marked.write_bytes(b"\xef\xbb\xbf" + b"one two\r\n\r\nthree four\r\n" * 100)
    one, other = (ids_of(path, place, tmp_path / path.stem) for path in (plain, marked))
    assert one["documents"] == other["documents"] and one["tokens"] == other["tokens"]


@pytest.mark.promise("empty, blank, special-only …")
@pytest.mark.promise("21 odd bytes in a text")
@pytest.mark.promise("24 no documents; few shards; last partial block")
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("latin.txt", "caf\xe9 ".encode("latin1") * 50, "not UTF-8 at byte 3"),
        ("surrogate.jsonl", b'{"text": "a \\ud800 b"}\n', "lone surrogate"),
        ("broken.jsonl", b'{"text": "a"}\n{"text": \n', "line 2: not JSON"),
        ("cut.txt.gz", gzip.compress(random.Random(0).randbytes(9000).hex().encode())[:-2000], "cannot be read"),
        ("nothing.txt", b"", "no training text"),
        ("blank.txt", b" \n\n \n", "no training text"),
    ],
)
def test_text_that_is_refused_says_where(place, tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        ids_of(tmp_path / name, place, tmp_path / "runs")
    assert not list(tmp_path.glob("runs/stores/*/units/*"))


@pytest.mark.promise("20 50 MB on one line")
def test_a_document_of_50_mb_on_one_line_takes_bounded_memory(place, tmp_path):
    text = tmp_path / "long.txt"
    text.write_text("word after word " * (50_000_000 // 16))
    code = (
        "import resource, sys\nfrom pathlib import Path\nfrom pipeline.config import EncodeIdsConfig\n"
        "from pipeline.commands import encode_ids\nimport pipeline.teacher\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"report = encode_ids(EncodeIdsConfig(corpus=({str(text)!r},), tokenizer={place.teacher!r}, max_length=128, "
        f"max_tokens=300_000, output=Path({str(tmp_path / 'runs')!r})))[0]\n"
        "grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before\n"
        "assert report['tokens'] >= 297_000, report\nassert grown < 400_000, grown"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.promise("26 an exception inside the writer's `with`")
def test_a_writer_that_fails_inside_its_with(place, tmp_path, monkeypatch):
    def fails(writer, **columns):
        raise RuntimeError("the writer fails")

    monkeypatch.setattr(UnitWriter, "write_block", fails)
    with pytest.raises(RuntimeError, match="the writer fails"):
        encode_lsp(replace(place, output=tmp_path))
    assert not list(tmp_path.glob("stores/*/units/*")) and not temporaries(tmp_path)
    with pytest.raises(StoreError, match="unfinished"):
        Store.open(next(tmp_path.glob("stores/*")))


@pytest.mark.promise("a full disk, a file …")
def test_a_disk_that_is_full_before_the_tokenizer_is_copied_has_the_same_exit_code(place, tmp_path):
    flags = ["encode-ids", "--tokenizer", place.teacher, "--corpus", *place.corpus, "--output", tmp_path]
    size = (Path(place.teacher) / "tokenizer.json").stat().st_size
    run = run_command(flags, largest_file=size // 2)
    assert run.returncode == 74 and run.stderr.count("mlsm: error:") == 1, run
    assert "File too large" in run.stderr and "tokenizer" in run.stderr, run
    assert not temporaries(tmp_path) and not list(tmp_path.glob("stores/*/tokenizer"))
    assert run_command(flags).returncode == 0


@pytest.mark.promise("a full disk, a file …")
@pytest.mark.promise("7 full disk, file …")
def test_a_full_disk_has_its_own_exit_code_and_can_be_resumed(place, whole, tmp_path):
    """The file size limit hits the shards of the real command."""
    limit = max(path.stat().st_size for path in Path(whole["store"]).glob("units/*.tar")) - 5000
    flags = [
        *("encode-lsp", "--teacher", place.teacher, "--layer", "2", "--corpus", *place.corpus),
        *("--dictionary", place.dictionary, "--lam", "0.1", "--top-n", "8", "--max-length", "32"),
        *("--max-tokens", "40000", "--unit-tokens", "5000", "--batch-tokens", "2048", "--output", tmp_path),
    ]

    run = run_command(flags, largest_file=limit)
    assert run.returncode == 74 and run.stderr.count("mlsm: error:") == 1 and "File too large" in run.stderr, run
    assert not temporaries(tmp_path)
    kept = shards(next(tmp_path.glob("stores/*")))
    assert kept.items() < shards(whole["store"]).items()
    report = encode_lsp(replace(place, output=tmp_path))[0]
    assert shards(report["store"]) == shards(whole["store"])
