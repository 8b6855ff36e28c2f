"""Stage A end to end on real English with a tiny random teacher, against slow independent computations."""

import errno
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
from preloaded import run_python

from mlsm.commands import load
from mlsm.common import disk
from mlsm.common.errors import (
    CorpusError,
    DeviceError,
    DictionaryError,
    EncodeError,
    ShardError,
    StoreError,
    TeacherError,
    WriteError,
)
from mlsm.common.progress import silent
from pipeline import encode as encoding
from pipeline import plan as planning
from pipeline.commands import encode_ids, encode_lsp
from pipeline.config import EncodeConfig, EncodeIdsConfig
from pipeline.dictionary import Dictionary
from pipeline.encode import encode_missing
from pipeline.executor import KILLED, Executor
from pipeline.job import named_by_content
from pipeline.teacher import Teacher
from shards.manifest import Plan, PlannedUnit
from shards.reader import Store, finished_stores

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def place(tmp_path_factory, english_text, teacher_directory):
    """Settings that name the text, the teacher and an output directory."""
    directory = tmp_path_factory.mktemp("encode")
    return EncodeConfig(
        teacher=str(teacher_directory),
        layer=(2,),
        corpus=(str(english_text),),
        k=48,
        lam=0.1,
        top_n=8,
        max_length=32,
        max_tokens=40_000,
        unit_tokens=10_000,
        dictionary_tokens=5_000,
        batch_tokens=2048,
        device="cpu",
        output=directory / "runs",
    )


@pytest.fixture(scope="module")
def report(place):
    return encode_lsp(place)[0]


def test_a_disk_without_hard_links_is_refused_before_a_dictionary_is_learned(place, tmp_path, monkeypatch):
    def no_links(old, new):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(disk, "link", no_links)
    with pytest.raises(WriteError, match="this disk does not support hard links"):
        encode_lsp(replace(place, output=tmp_path / "runs"))
    assert [path.name for path in tmp_path.rglob("*")] == ["runs"]


def test_the_report_says_what_was_made(report):
    assert not report["finished_before"] and report["units"] == report["new_units"] >= 4
    assert 40_000 <= report["tokens"] < 40_100 and report["new_tokens"] == report["tokens"]
    assert 1 < report["nnz_per_token"] <= 8 and 0.3 < report["mass_kept"] < 1
    assert report["teacher_seconds"] > 0 and report["solver_seconds"] > 0
    for record in Store.open(report["store"]).records():
        made = record.environment
        assert made["device"] == "cpu" and made["tokenizers"] == tokenizers.__version__


@pytest.mark.promise(
    "certified targets: each stored code meets the optimality conditions to within the tolerance",
    cases="2; 450 nasty problems",
)
def test_a_tighter_tolerance_is_kept_and_makes_another_store(place, report):
    other = encode_lsp(replace(place, tolerance=1e-5))[0]
    assert other["store"] != report["store"] and other["max_kkt"] <= 1e-5 < report["max_kkt"] <= 1e-4


def test_a_new_store_beside_one_of_another_tolerance_says_so(place, report, tmp_path, caplog):
    assert EncodeConfig.tolerance == 1e-4
    given = replace(place, output=tmp_path, dictionary=Store.open(report["store"]).path / "dictionary")
    before = encode_lsp(replace(given, tolerance=1e-3))[0]["store"]
    (tmp_path / "stores" / "damaged").mkdir()
    (tmp_path / "stores" / "damaged" / "target.json").write_text("{")
    with caplog.at_level("INFO", "pipeline.announcement"):
        first = encode_lsp(given)[0]["store"]
        again = encode_lsp(given)[0]["store"]
    lines = [record.getMessage() for record in caplog.records if record.name == "pipeline.announcement"]
    (line,) = [line for line in lines if "differs only" in line]
    assert first == again != before and f"{before} differs only" in line
    assert "0.001 instead of 0.0001; --tolerance 0.001 would add to it" in line


def test_stored_rows_equal_the_full_model_and_scikit_learn(place, report):
    import torch
    from sklearn.linear_model import Lasso
    from transformers import AutoModel

    store = Store.open(report["store"])
    windows = store.split("train")
    batch = windows.read(np.arange(0, len(windows), 50)[:8])
    full = AutoModel.from_pretrained(place.teacher, dtype=torch.float32).eval()
    with torch.no_grad():
        attention = torch.from_numpy(batch.documents >= 0).long()
        hidden = full(torch.from_numpy(batch.ids).long(), attention, output_hidden_states=True).hidden_states[2].numpy()
    atoms = Dictionary.load(store.files.dictionary).atoms_Kd
    checked = 0
    for window, position in [(w, p) for w in range(8) for p in (1, 9, 17, 25)]:
        if batch.documents[window, position] < 0 or batch.ids[window, position] in store.special_ids["all"]:
            continue
        h = hidden[window, position] / np.linalg.norm(hidden[window, position])
        lasso = Lasso(alpha=place.lam / len(h), positive=True, fit_intercept=False, tol=1e-10, max_iter=100_000)
        code = lasso.fit(atoms.T.astype(np.float64), h.astype(np.float64)).coef_
        expected = code / code.sum()
        kept = np.sort(np.argsort(-expected)[: min(8, (expected > 0).sum())])
        row = windows.targets(batch, np.array([window]), np.array([position]))
        if 0 < np.sort(expected)[-8] - np.sort(expected)[-9] <= 0.01:
            continue  # nearly equal: either may be the last that is kept
        assert row.weights[expected[row.indices] == 0].max(initial=0) < 0.01, "as much as the tolerance lets stand"
        dense = np.zeros(len(atoms))
        dense[row.indices] = row.weights * (1 - row.tail[0])
        assert np.abs(dense[kept] - expected[kept]).max() < 0.03
        assert row.tail[0] == pytest.approx(1 - expected[kept].sum(), abs=0.03)
        checked += 1
    assert checked >= 12


def test_special_tokens_have_no_rows_and_all_others_are_coded(report):
    store = Store.open(report["store"])
    windows = store.split("train")
    batch = windows.read(np.arange(50))
    window_M, position_M = np.nonzero(batch.documents >= 0)
    nnz = np.diff(windows.targets(batch, window_M, position_M).indptr)
    special = np.isin(batch.ids[window_M, position_M], store.special_ids["all"])
    assert np.all(nnz[special] == 0) and np.all(nnz[~special] > 0)


def test_running_again_finds_it_finished(place, report):
    again = encode_lsp(place)[0]
    assert again["finished_before"] and again["store"] == report["store"] and again["new_tokens"] == 0


@pytest.mark.parametrize("length", [None, 4096])
def test_a_store_with_a_lost_or_cut_shard_is_not_finished(place, report, tmp_path, length):
    shutil.copytree(place.output, tmp_path / "runs")
    store = Store.open(tmp_path / "runs" / "stores" / Path(report["store"]).name)
    shard = store.files.units / next(iter(store.iter_records())).file
    if length is None:
        shard.unlink()
    else:
        os.truncate(shard, length)
    with pytest.raises(ShardError, match=rf"{shard.name} (is missing|has 4,096 bytes); its record says .* --repair"):
        encode_lsp(replace(place, output=tmp_path / "runs"))


def test_ids_store_of_the_same_corpus_has_the_same_plan_and_windows(place, report):
    fields = ("corpus", "max_length", "max_tokens", "unit_tokens", "output")
    ids = encode_ids(EncodeIdsConfig(tokenizer=place.teacher, **{name: getattr(place, name) for name in fields}))[0]
    assert ids["plan"] == report["plan"]
    one, other = (Store.open(r["store"]).split("train") for r in (ids, report))
    order = one.order(1, 0, 0, 100)
    assert np.array_equal(order, other.order(1, 0, 0, 100))
    assert np.array_equal(one.read(order).ids, other.read(order).ids)


def test_adding_a_file_encodes_only_what_is_new(place, report, tmp_path):
    more = tmp_path / "more.txt"
    more.write_text("\n\n".join(f"A new document, number {n}, about the same things." for n in range(300)))
    given = replace(place, dictionary=Path(report["dictionary"]), max_tokens=None, output=tmp_path / "runs")
    first = encode_lsp(given)[0]
    grown = encode_lsp(replace(given, corpus=(*place.corpus, str(more))))[0]
    assert grown["store"] == first["store"] and grown["plan"] != first["plan"]
    assert 0 < grown["new_units"] <= 2 and grown["units"] == first["units"] + grown["new_units"]


DIES = """
import os, signal, sys
from mlsm import __main__ as cli
from shards.writer import UnitWriter
writes = UnitWriter.write_block
def dies(writer, **columns):
    writes(writer, **columns)
    if list(writer.files.units.glob("*.json")):
        os.kill(os.getpid(), signal.SIGKILL)
UnitWriter.write_block = dies
cli.main(sys.argv[1:])
"""


@pytest.mark.promise("2 kill -9 of the driver")
def test_kill_and_resume_gives_the_bytes_of_an_unbroken_run(place, report, tmp_path):
    output = tmp_path / "runs"
    flags = [
        *("--teacher", place.teacher, "--layer", "2", "--corpus", *place.corpus, "--dictionary", report["dictionary"]),
        *("--k", "48", "--lam", "0.1", "--top-n", "8", "--max-length", "32", "--max-tokens", "40000"),
        *("--unit-tokens", "10000", "--batch-tokens", "2048", "--device", "cpu", "--output", str(output)),
    ]
    command = [ROOT / "cli.py", "encode-lsp", *flags]
    run = run_python(["-c", DIES, *command[1:]])
    assert run.returncode == -signal.SIGKILL, run.stderr
    units = next(iter(output.glob("stores/*/units")))
    assert 0 < len(list(units.glob("*.json"))) < report["units"]
    done = {path.name: path.stat().st_mtime_ns for path in units.glob("*.json")}
    assert run_python(command).returncode == 0
    whole = Path(report["store"]) / "units"
    assert {p.name: p.read_bytes() for p in units.glob("*.tar")} == {
        p.name: p.read_bytes() for p in whole.glob("*.tar")
    }
    assert all((units / name).stat().st_mtime_ns == time_ns for name, time_ns in done.items())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"layer": (9,)}, TeacherError, "3"),
        ({"corpus": ("/nowhere/*.txt",)}, CorpusError, "matches no file"),
        ({"k": 20_000}, EncodeError, "--k 20000 atoms need at least 20,000 vectors to learn from, .* only"),
        ({"lam": 0.999}, EncodeError, "every one of the first"),
        ({"teacher": "/nowhere/teacher"}, TeacherError, "/nowhere/teacher"),
    ],
)
def test_bad_input(place, report, tmp_path, change, error, message):
    known = {} if "k" in change else {"dictionary": Path(report["dictionary"])}
    with pytest.raises(error, match=message):
        encode_lsp(replace(place, **{"output": tmp_path, **known, **change}))
    assert not list(tmp_path.glob("stores/*/units/*")), "nothing half-made is left"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_length": 512}, "--max-length 512, but .* reads at most 128 tokens. Use --max-length 128"),
        ({"device": "cuda:99"}, "device cuda"),
        ({"dictionary": Path("/nowhere")}, "/nowhere"),
    ],
)
def test_what_cannot_be_done_is_refused_before_the_corpus_is_read(place, tmp_path, change, message):
    given = replace(place, corpus=("/nowhere",), output=tmp_path, **change)
    with pytest.raises((EncodeError, DeviceError, DictionaryError), match=message):
        encode_lsp(given)


def test_what_the_teacher_reads_follows_the_text_of_small_units(place, report, tmp_path, monkeypatch):
    """One short file per unit would otherwise cost a whole batch."""
    read, run = [], Teacher.__call__

    def count(self, ids_WL, *arguments, **options):
        read.append(len(ids_WL))
        return run(self, ids_WL, *arguments, **options)

    monkeypatch.setattr(Teacher, "__call__", count)
    documents = Path(place.corpus[0]).read_text().split("\n\n")[:10]
    for number, text in enumerate(documents):
        (tmp_path / f"{number}.txt").write_text(text)
    given = replace(place, corpus=(str(tmp_path / "*.txt"),), dictionary=Path(report["dictionary"]), max_tokens=None)
    given = replace(given, unit_tokens=10)
    made = encode_lsp(replace(given, output=tmp_path / "runs"))[0]
    assert made["new_units"] == 10 and made["windows"] <= sum(read) < 2 * made["windows"]


def test_a_dictionary_of_another_width_is_refused(place, tmp_path):
    Dictionary(np.eye(7, dtype=np.float32), [], "test", {}).save(tmp_path / "d")
    with pytest.raises(EncodeError, match="atoms of width 7, but .* width 32"):
        encode_lsp(replace(place, dictionary=tmp_path / "d", output=tmp_path / "runs"))


def test_a_file_that_changes_during_the_run_is_not_committed(place, report, tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(Path(place.corpus[0]).read_bytes())
    given = replace(place, corpus=(str(text),), dictionary=Path(report["dictionary"]), output=tmp_path / "runs")

    def change_once_encoding(stage, *_, **figures):
        if stage == "encode":
            text.write_text("Something else.\n")

    with pytest.raises(CorpusError, match="changed while it was read"):
        encode_lsp(given, change_once_encoding)
    assert not list(tmp_path.glob("runs/stores/*/units/*"))


def test_progress_counts_each_token_once(place, report, tmp_path, monkeypatch):
    """Also if a report of a block comes late, or again, as from workers that died."""

    def report_late(executor, tasks, paths, kind, note_block):
        for unit, records, figures in encode_missing(executor, tasks, paths, kind, note_block):
            for number in records:
                note_block(unit.id, number, 1, figures)
            yield unit, records, figures
            for number, record in records.items():
                note_block(unit.id, number, record.tokens, figures)

    monkeypatch.setattr(encoding, "encode_missing", report_late)
    given, shown = replace(place, dictionary=Path(report["dictionary"]), output=tmp_path), []
    found = encode_lsp(given, lambda stage, done, *_, **__: stage == "encode" and shown.append(done))[0]
    assert shown == sorted(shown) and shown[0] == 0 and shown[-1] == found["tokens"]
    assert len(shown) > found["units"] + 1  # blocks are shown as they are written


def test_the_same_teacher_elsewhere_finds_the_same_store(place, report, tmp_path):
    moved = tmp_path / "renamed-teacher"
    shutil.copytree(place.teacher, moved)
    again = encode_lsp(replace(place, teacher=str(moved)))[0]
    assert again["finished_before"]
    assert (again["store"], again["dictionary"]) == (report["store"], report["dictionary"])


class Deadly(Executor):
    """Whose processes die at every item."""

    def map(self, function, items, **_):
        return ((item, KILLED) for item in items)


def test_a_text_that_no_process_can_read_is_named():
    unit = PlannedUnit("0" * 32, "train", "wiki.txt", 5, 9)
    job = SimpleNamespace(plan=Plan({}, (unit,)), progress=silent)
    with pytest.raises(EncodeError, match="workers crash when they read records 5 to 8 of wiki.txt, so none of it"):
        list(encode_missing(Deadly(job), [(unit, [0])], [], None))


def test_the_bundled_teacher_reads_the_quickstart_windows():
    from mlsm.cli.settings import parse
    from pipeline.teacher import BUNDLED, Teacher

    settings, recipe = parse(load("encode-lsp"), [])[:2]
    assert recipe == "quickstart" and settings.layer == (10,)
    teacher = Teacher.load("bundled", 10)
    assert teacher.num_layers == 12 and settings.max_length <= teacher.max_positions
    assert (BUNDLED / "README.md").is_file()


def test_output_that_is_a_store_is_refused(place, report):
    with pytest.raises(StoreError, match="is a store itself"):
        encode_lsp(replace(place, output=Path(report["store"])))


def test_a_penalty_that_empties_most_codes_warns_with_the_share(place, tmp_path):
    atoms = np.random.default_rng(0).normal(size=(20, 32)).astype(np.float32)
    atoms /= np.linalg.norm(atoms, axis=1, keepdims=True)
    Dictionary(atoms, [], "test", {}).save(tmp_path / "random")
    with pytest.warns(UserWarning, match=r"\d+\.\d% of the tokens have an empty code at --lam 0\.45"):
        encode_lsp(replace(place, lam=0.45, k=20, dictionary=tmp_path / "random", output=tmp_path / "runs"))


def test_settings_refuse_contradictions():
    for change, message in [
        ({"top_n": 256}, "between 1 and 255"),
        ({"lam": 1.5}, "above 0 and below 1"),
        ({"max_length": 4}, "--max-length must be from 8"),
        ({"tolerance": 0.05}, "between 0 and --lam 0.05"),
        ({"layer": ()}, "--layer needs at least one number"),
        ({"batch_tokens": 64}, "less than one window"),
        ({"layer": (1, 2), "dictionary": Path("x")}, "fits one layer"),
    ]:
        with pytest.raises(ValueError, match=message):
            EncodeConfig(**change)


def test_a_batch_holds_a_window_where_nothing_is_given():
    config = EncodeConfig(max_length=16_384)
    assert config.tokens_at_once() == 16_384 and config.tokens_at_once("cuda") == 65_536


def test_two_stores_of_one_corpus_scan_it_once_and_a_changed_one_again(
    english_text, teacher_directory, tmp_path, monkeypatch
):
    text = tmp_path / "text.txt"
    text.write_bytes(english_text.read_bytes()[:100_000])
    config = EncodeIdsConfig(
        tokenizer=str(teacher_directory), corpus=(str(text),), max_length=32, output=tmp_path / "a"
    )
    scans, scan = [], planning.scan
    monkeypatch.setattr(planning, "scan", lambda *given, **options: scans.append(1) or scan(*given, **options))
    first, second = encode_ids(config)[0], encode_ids(replace(config, output=tmp_path / "b"))[0]
    assert len(scans) == 1 and Store.open(first["store"]).plan.id == Store.open(second["store"]).plan.id
    encode_ids(replace(config, max_length=64))
    assert len(scans) == 2, "other windows are another plan"
    with text.open("a") as file:
        file.write("\n\nOne more document.\n")
    other = encode_ids(replace(config, output=tmp_path / "c"))[0]
    assert len(scans) == 3 and Store.open(other["store"]).plan.id != Store.open(first["store"]).plan.id


def test_the_text_of_the_last_command_is_the_newest_also_if_it_was_encoded_before(
    english_text, teacher_directory, tmp_path
):
    whole = EncodeIdsConfig(
        tokenizer=str(teacher_directory), corpus=(str(english_text),), max_length=32, output=tmp_path, max_tokens=4000
    )
    trial = replace(whole, max_tokens=500)
    kept = {}
    for config in (whole, trial, whole):
        (report,) = encode_ids(config)
        kept[config.max_tokens] = report["plan"]
        assert Store.open(report["store"]).plan.id == report["plan"]
        assert finished_stores(tmp_path / "stores")[0] == Path(report["store"])
    assert len(set(kept.values())) == 2 and report["finished_before"]


def test_a_copy_beside_a_store_does_not_get_its_units(tmp_path):
    content = "0123456789abcdef"
    (tmp_path / "renamed-0123456789ab").mkdir()
    assert named_by_content(tmp_path, "lsp", content).name == "renamed-0123456789ab"
    (tmp_path / "lsp-0123456789ab").mkdir()
    assert named_by_content(tmp_path, "lsp", content).name == "lsp-0123456789ab"
