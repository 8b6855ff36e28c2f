"""A document at which teacher or solver fails is found and named; everything else is encoded as if it were not there.

The failure is planted by the content of a window, so it follows the text through every batch that holds it.
"""

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from preloaded import run_command, run_python
from stored import shards
from tiny_teacher import lsp_settings

from mlsm.common.errors import EncodeError
from pipeline import stores
from pipeline.commands import encode_ids, encode_lsp
from pipeline.config import EncodeIdsConfig, LearnConfig
from pipeline.encode import LAYOUTS
from pipeline.failures import isolate
from pipeline.learn import learn_dictionary
from pipeline.targets import lsp
from pipeline.teacher import Teacher
from shards.reader import Store

pytestmark = [
    pytest.mark.promise(
        "a document at which the teacher gives NaN or raises, or the solver raises, keeps its windows without "
        "LSPs; all else is as without it; window numbers of an ids store still fit",
        cases="3 ways × 2 × 2 layouts",
    ),
    pytest.mark.promise("10 a document that fails again and again"),
    pytest.mark.promise("22 no non-zero code …"),
]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def place(tmp_path_factory, english_text, teacher_directory):
    directory = tmp_path_factory.mktemp("quarantine")
    return lsp_settings(
        directory, teacher_directory, english_text, directory / "clean", max_tokens=30_000, unit_tokens=8_000
    )


@pytest.fixture(scope="module")
def clean(place):
    return Store.open(encode_lsp(place)[0]["store"])


def plant(patch, windows, how):
    """Let these windows (rows of ids) fail, wherever they turn up."""
    keys = {np.ascontiguousarray(row, np.int64).tobytes() for row in windows}
    works, solves = Teacher.__call__, lsp.nonneg_lasso

    def teaches(teacher, ids_WL, real_WL, tokens_N):
        hidden = works(teacher, ids_WL, real_WL, tokens_N)
        bad = np.array([row.tobytes() in keys for row in ids_WL.numpy()])
        hit = torch.from_numpy(bad[tokens_N.numpy() // ids_WL.shape[1]])
        if how == "teacher" and hit.any():
            raise RuntimeError("the teacher chokes on this")
        if isinstance(how, BaseException) and hit.any():
            raise how
        hidden = hidden.clone()
        if how == "nan":
            hidden[hit] = torch.nan
        if how == "solver":
            hidden[hit] = 1.0
        return hidden

    def solver(hidden_Nd, *arguments, **options):
        if how == "solver" and (hidden_Nd == hidden_Nd[:, :1]).all(1).any():
            raise ValueError("the solver chokes on this")
        return solves(hidden_Nd, *arguments, **options)

    patch.setattr(Teacher, "__call__", teaches)
    patch.setattr(lsp, "nonneg_lasso", solver)


def rows_of(store, split="train"):
    """Per window: ids and its stored rows."""
    windows = store.split(split)
    batch = windows.read(np.arange(len(windows)))
    rows = windows.targets(batch, *np.nonzero(np.arange(store.max_length) < batch.lengths[:, None]))
    found, ends = [], np.cumsum(batch.lengths)
    for ids, first, end in zip(batch.ids, ends - batch.lengths, ends, strict=True):
        entries = slice(rows.indptr[first], rows.indptr[end])
        counts = np.diff(rows.indptr[first : end + 1])
        found.append((ids, counts, rows.indices[entries], rows.weights[entries], rows.tail[first:end]))
    return found


@pytest.mark.parametrize("how", ["nan", "teacher", "solver"])
@pytest.mark.parametrize("seed", [1, 2])
def test_failing_windows_lose_their_lsps_and_nothing_else_changes(place, clean, tmp_path, monkeypatch, how, seed):
    expected = rows_of(clean)
    chosen = sorted(random.Random(seed).sample(range(len(expected)), 3))
    bytes_of = {}
    for name, layout in {"alone": dict.fromkeys(LAYOUTS["cpu"], 0), "gpu": LAYOUTS["cuda"]}.items():
        with monkeypatch.context() as patch:
            patch.setitem(LAYOUTS, "cpu", layout)
            plant(patch, [expected[number][0] for number in chosen], how)
            report = encode_lsp(replace(place, output=tmp_path / name))[0]
        store = Store.open(report["store"])
        bytes_of[name] = shards(store.path)
        found = rows_of(store)
        assert len(found) == len(expected) and store.plan_id == clean.plan_id
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert np.array_equal(one[0], other[0]), "window numbers and ids stay"
            if number in chosen:
                assert not one[1].any() and other[1].any()
            else:
                assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
        check_records(store, chosen, report, how)
    assert bytes_of["alone"] == bytes_of["gpu"]


def check_records(store, chosen, report, how):
    """The entries name exactly the documents in the chosen windows."""
    named, first = set(), 0
    for unit, record in zip(store.plan.units, store.records(), strict=True):
        if unit.split != "train":
            assert not record.quarantined
            continue
        for entry in record.quarantined:
            named |= {first + window for window in entry["windows"]}
            assert unit.start <= entry["record"] < unit.stop and entry["source"] == unit.source
            assert {"nan": "not finite", "teacher": "chokes", "solver": "chokes"}[how] in entry["reason"]
        assert len({entry["record"] for entry in record.quarantined}) == len(record.quarantined)
        first += record.windows
    assert named == set(chosen)
    assert report["quarantined"] == sum(len(record.quarantined) for record in store.records()) >= 1


@pytest.mark.promise(
    "`--retry-quarantine`; exit code 5 and one line; a passing fault is tried again",
    cases="1 each",
)
def test_retry_gives_the_bytes_of_a_clean_run(place, clean, tmp_path):
    expected = rows_of(clean)
    given = replace(place, output=tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, [expected[5][0], expected[300][0]], "teacher")
        first = encode_lsp(given)[0]
    assert first["quarantined"] and shards(first["store"]) != shards(clean.path)
    again = encode_lsp(given)[0]
    assert again["finished_before"] and again["quarantined"] == first["quarantined"]
    tried = encode_lsp(replace(given, retry_quarantine=True))[0]
    assert 1 <= tried["new_units"] <= 2 and tried["quarantined"] == 0
    assert shards(tried["store"]) == shards(clean.path)
    assert encode_lsp(replace(given, retry_quarantine=True))[0]["finished_before"]


def test_an_ids_store_still_pairs(place, clean, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, [rows_of(clean)[7][0]], "nan")
        lsp = Store.open(encode_lsp(replace(place, output=tmp_path))[0]["store"])
    fields = ("corpus", "max_length", "max_tokens", "unit_tokens")
    same = {name: getattr(place, name) for name in fields}
    ids = Store.open(encode_ids(EncodeIdsConfig(tokenizer=place.teacher, output=tmp_path, **same))[0]["store"])
    assert ids.plan_id == lsp.plan_id
    one, other = ids.split("train"), lsp.split("train")
    order = one.order(3, 0, 0, len(one))
    assert np.array_equal(order, other.order(3, 0, 0, len(other)))
    assert np.array_equal(one.read(order).ids, other.read(order).ids)


@pytest.mark.promise("`--retry-quarantine`; exit …")
def test_what_fails_once_is_tried_again(place, clean, tmp_path, monkeypatch):
    works, calls = Teacher.__call__, []

    def fails_once(*arguments):
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("a passing trouble")
        return works(*arguments)

    monkeypatch.setattr(Teacher, "__call__", fails_once)
    report = encode_lsp(replace(place, output=tmp_path))[0]
    assert report["quarantined"] == 0 and shards(report["store"]) == shards(clean.path)


@pytest.mark.promise(
    "disk, memory, most of a batch, too many documents: aborted, not blamed on documents",
    cases="3, 1, 1",
)
@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), MemoryError("full"), torch.OutOfMemoryError("x")])
def test_what_is_no_documents_fault_is_raised(place, clean, tmp_path, monkeypatch, error):
    plant(monkeypatch, [rows_of(clean)[5][0]], error)
    with pytest.raises(type(error)) as caught:
        encode_lsp(replace(place, output=tmp_path))
    assert caught.value is error
    assert not list(tmp_path.glob("stores/*/units/.*"))


@pytest.mark.promise("disk, memory, most …")
def test_most_of_a_batch_is_no_documents_fault(place, clean, tmp_path, monkeypatch):
    plant(monkeypatch, [row[0] for row in rows_of(clean)[:40]], "nan")
    with pytest.raises(EncodeError, match="hidden states are not finite"):
        encode_lsp(replace(place, output=tmp_path))
    assert not list(tmp_path.glob("stores/*/units/*"))


@pytest.mark.promise("disk, memory, most …")
def test_too_many_documents_are_no_documents_fault(place, clean, tmp_path, monkeypatch):
    """Here and there over the first units; the count goes on over a resume."""
    plant(monkeypatch, [row[0] for row in rows_of(clean)[::30]], "teacher")
    monkeypatch.setattr(stores, "QUARANTINE_SHARE", 0)
    kept = []
    for _ in range(2):
        with pytest.raises(EncodeError, match=r"documents could not be coded, more than the 10 .* chokes on this"):
            encode_lsp(replace(place, output=tmp_path))
        kept.append(sorted(path.name for path in tmp_path.glob("stores/*/units/*")))
    assert kept[0] == kept[1]


@pytest.mark.promise("`--retry-quarantine`; exit …")
def test_exit_code_and_line(place, clean, tmp_path):
    """Code 5 and one line that says what to do; 0 once it is done."""
    window = rows_of(clean)[3][0].tolist()
    code = (
        "import sys, numpy as np, pytest; sys.path[:0] = ['tests', 'tests/faults']\n"
        "from test_quarantine import plant\nfrom mlsm import __main__ as cli\n"
        f"plant(pytest.MonkeyPatch(), [np.array({window})], 'nan')\ncli.main(sys.argv[1:])"
    )
    flags = [
        *("encode-lsp", "--teacher", place.teacher, "--layer", "2", "--corpus", *place.corpus),
        *("--dictionary", place.dictionary, "--lam", "0.1", "--top-n", "8", "--max-length", "32"),
        *("--max-tokens", "30000", "--unit-tokens", "8000", "--batch-tokens", "2048", "--output", tmp_path),
    ]
    run = run_python(["-c", code, *flags])
    assert run.returncode == 5 and run.stderr.count("mlsm: error:") == 1 and "--retry-quarantine" in run.stderr, run
    run = run_command([*flags, "--retry-quarantine"])
    assert run.returncode == 0, run.stderr
    assert shards(next(tmp_path.glob("stores/*"))) == shards(clean.path)


@pytest.fixture
def learning(place, tmp_path):
    same = ("teacher", "layer", "corpus", "lam", "max_length", "max_tokens", "batch_tokens", "device")
    given = {name: getattr(place, name) for name in same}
    return LearnConfig(k=48, dictionary_tokens=30_000, dictionary_epochs=1, output=tmp_path / "learning", **given)


@pytest.mark.promise("the dictionary's sample leaves out what fails", cases="2")
def test_the_dictionarys_sample_leaves_out_what_fails(learning, clean, tmp_path, monkeypatch):
    whole = learn_dictionary(replace(learning, output=tmp_path / "clean"))[0]
    plant(monkeypatch, [rows_of(clean)[number][0] for number in (2, 9, 300)], "nan")
    found = learn_dictionary(learning)[0]
    assert 0 < whole["vectors"] - found["vectors"] <= 3 * 30 and np.isfinite(found["objective"])


def test_a_teacher_that_always_fails_gives_no_sample(learning, monkeypatch):
    def fails(*_):
        raise RuntimeError("the teacher chokes on everything")

    monkeypatch.setattr(Teacher, "__call__", fails)
    with pytest.raises(EncodeError, match="fails at most of a batch"):
        learn_dictionary(learning)
    assert not list(learning.output.rglob(".*"))


@pytest.mark.parametrize("error", [OSError("disk full"), torch.OutOfMemoryError("full")])
def test_an_error_of_the_machine_is_no_texts_fault(error):
    tried = []

    def attempt(windows):
        tried.append(len(windows))
        raise error

    with pytest.raises(type(error), match=str(error)):
        list(isolate(range(8), attempt))
    assert tried == [8]


def test_documents_that_another_process_has_healed_meanwhile_do_not_count(monkeypatch):
    """Records are read when the first document fails, and once more before too many are told."""
    records = {"old": SimpleNamespace(unit="old", quarantined=[{}] * 8)}
    units = {name: SimpleNamespace(id=name) for name in ("old", "first", "second", "third")}
    job = SimpleNamespace(plan=SimpleNamespace(units=units.values()), planned_documents=100)
    files = SimpleNamespace(path=Path("store"), record=records.get, target=dict)
    monkeypatch.setattr(stores, "StoreFiles", lambda path: files)
    store = stores.OpenStore(job, "store")

    def commit(unit, count):
        store.check_quarantine(units[unit], [{"reason": "odd"}] * count)
        records[unit] = SimpleNamespace(unit=unit, quarantined=[{}] * count)

    commit("first", 1)
    records["old"] = SimpleNamespace(unit="old", quarantined=[])  # by another process, with --retry-quarantine
    commit("second", 3)
    commit("first", 0)
    commit("third", 7)
    with pytest.raises(EncodeError, match="^store: 11 documents could not be coded, more than the 10 .*: odd$"):
        commit("old", 1)
