"""A store as Parquet: equal to what the store's reader and the writer's truth say, by whoever reads it."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from http_store import serving
from make_store import make_store, random_block, truth_windows
from preloaded import Preloaded, run_command, run_python
from tiny_store import write_store, write_tokenizer

from mlsm.common.disk import writer_of_temporary
from mlsm.common.errors import RequestError, ShardError
from shards import export as export_module
from shards.clean import clean
from shards.export import export
from shards.reader import Store
from shards.schema import ShardMeta
from shards.torch_dataset import LspDataset
from shards.writer import UnitWriter

pytest.importorskip("pyarrow", reason='Parquet files need pyarrow: pip install "mlsm-pretrain[corpora]"')
SPLITS = ("train", "held_out")
ROOT = Path(__file__).resolve().parent.parent.parent


def store_of(path, **arguments):
    """A store of several units and blocks, with a tokenizer. Returns it and {split: blocks' columns}."""
    files, _, truth = make_store(path, **arguments)
    write_tokenizer(files.tokenizer, 60)
    return Store.open(path), truth


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """(store, truth, directory of the export) of LSPs."""
    place = tmp_path_factory.mktemp("export")
    store, truth = store_of(place / "lsp")
    export(store.path, place / "parquet")
    return store, truth, place / "parquet"


def loaded(directory, split, monkeypatch, tmp_path):
    """The rows of a split, by the library datasets."""
    datasets = pytest.importorskip(
        "datasets", reason='load_dataset needs datasets: pip install "mlsm-pretrain[corpora]"'
    )
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return datasets.load_dataset(os.fspath(directory), cache_dir=os.fspath(tmp_path / "cache"))[split]


def by_pandas(directory, split):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    files = sorted((directory / "data").glob(f"{split}-*.parquet"))
    return pandas.concat([pandas.read_parquet(file) for file in files]).to_dict("records")


def by_duckdb(directory, split):
    duckdb = pytest.importorskip("duckdb", reason="DuckDB is not installed")
    found = duckdb.sql(f"SELECT * FROM '{directory}/data/{split}-*.parquet' ORDER BY window_id")
    return [dict(zip(found.columns, row, strict=True)) for row in found.fetchall()]


def expect_reader(rows, store, split):
    """Every window, bit for bit, against the store's reader."""
    windows = store.split(split)
    batch = windows.read(np.arange(len(windows)))
    assert len(rows) == len(windows) > 0
    for number, row in enumerate(rows):
        length = batch.lengths[number]
        assert row["window_id"] == number and not row["quarantined"]
        assert np.array_equal(row["input_ids"], batch.ids[number, :length])
        assert np.array_equal(row["document_ids"], batch.documents[number, :length])
        if store.k:
            stored = windows.targets(batch, np.full(length, number), np.arange(length))
            assert [len(entries) for entries in row["lsp_indices"]] == np.diff(stored.indptr).tolist()
            assert np.array_equal(np.concatenate(list(row["lsp_indices"])), stored.indices)
            assert np.array_equal(np.float32(np.concatenate(list(row["lsp_weights"]))), stored.weights)
            assert np.array_equal(np.float32(row["lsp_tail"]), stored.tail)
        if store.hidden:
            stored = windows.hidden(batch, np.full(length, number), np.arange(length))
            assert [len(state) > 0 for state in row["hidden"]] == stored.coded_M.tolist()
            states = [state for state in row["hidden"] if len(state)]
            assert np.array_equal(np.float32(states), stored.rows_Md[stored.coded_M])


def test_datasets_reads_the_parquet_files_and_not_the_shards_as_docs_say(exported, monkeypatch, tmp_path):
    """docs/python.md and shards/schema.py quote the refusal. Where datasets reads shards one day, change them."""
    datasets = pytest.importorskip(
        "datasets", reason='load_dataset needs datasets: pip install "mlsm-pretrain[corpora]"'
    )
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    store, _, directory = exported
    with pytest.raises(ValueError, match="don't share the same prefix or the same types"):
        datasets.load_dataset("webdataset", data_files=store.urls("train"), cache_dir=str(tmp_path / "cache"))
    files = {split: f"{directory}/data/{split}-*.parquet" for split in SPLITS}
    for streaming in (False, True):
        found = datasets.load_dataset(
            "parquet", data_files=files, cache_dir=str(tmp_path / "cache"), streaming=streaming
        )
        for split in SPLITS:
            expect_reader(list(found[split]), store, split)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("read", [by_pandas, by_duckdb])
def test_pandas_and_duckdb_read_what_the_store_holds(exported, read, split):
    store, _, directory = exported
    expect_reader(read(directory, split), store, split)


@pytest.mark.parametrize("split", SPLITS)
def test_load_dataset_reads_what_was_written(exported, split, monkeypatch, tmp_path):
    """Against the store's reader, and against the columns that the writer was given."""
    store, truth, directory = exported
    rows = loaded(directory, split, monkeypatch, tmp_path)
    expect_reader(rows, store, split)
    for row, (ids, targets) in zip(rows, truth_windows(truth[split]), strict=True):
        assert row["input_ids"] == ids.tolist()
        for token, (indices, weights, _) in enumerate(targets):
            assert row["lsp_indices"][token] == indices.tolist()
            if len(indices):
                assert sum(row["lsp_weights"][token]) == pytest.approx(1, abs=1e-5)
                large = weights > weights.max() / 100  # the smallest are stored as the least that a code stands for
                large = weights > weights.max() / 100  # the smallest are stored as the least that a code stands for
                ratios = np.array(row["lsp_weights"][token])[large] / (weights / weights.sum())[large]
                assert np.abs(ratios - 1).max() < 0.04, "8-bit logarithmic codes"


@pytest.mark.parametrize(
    "arguments",
    [{"k": 0}, {"k": 70_000}, {"quantise": "int8"}, {"quantise": "pq"}, {"units": ("train",)}],
    ids=["ids", "wide", "int8", "pq", "no-held-out"],
)
def test_every_kind_of_store(arguments, monkeypatch, tmp_path):
    monkeypatch.setattr(export_module, "_MOST_VALUES", 24 * 32 * 5)  # 5 windows of hidden states in a row group
    store, _ = store_of(tmp_path / "store", **{"units": ("train", "held_out"), "blocks": 1} | arguments)
    report = export(store.path, tmp_path / "parquet")
    for split in report["splits"]:
        expect_reader(loaded(tmp_path / "parquet", split, monkeypatch, tmp_path), store, split)
    if store.hidden:
        from pyarrow.parquet import read_metadata

        groups = read_metadata(next((tmp_path / "parquet" / "data").glob("train-*")))
        assert max(groups.row_group(n).num_rows for n in range(groups.num_row_groups)) == 5


def test_logits_and_the_dataset_of_torch(monkeypatch, tmp_path):
    store = write_store(tmp_path / "logits", k=70, kind="logits")
    export(store.path, tmp_path / "parquet")
    rows = loaded(tmp_path / "parquet", "train", monkeypatch, tmp_path)
    expect_reader(rows, store, "train")
    for sample in LspDataset(store, seed=3):
        row = rows[int(sample["window_id"])]
        assert row["input_ids"] == sample["input_ids"].tolist()
        assert row["document_ids"] == sample["document_ids"].tolist()
        for stored, indices, weights in zip(
            row["lsp_indices"], sample["lsp_indices"], sample["lsp_weights"], strict=True
        ):
            assert stored == indices[weights > 0].tolist()
    assert "vocabulary ids" in (tmp_path / "parquet" / "README.md").read_text()


def test_a_row_group_is_a_block(exported):
    """So that no more than a block is in memory, here or in a program that reads row by row."""
    from pyarrow.parquet import read_metadata

    store, _, directory = exported
    for split in SPLITS:
        files = sorted((directory / "data").glob(f"{split}-*"))
        for file, record in zip(files, store.records(split), strict=True):
            found = read_metadata(file)
            rows = [found.row_group(number).num_rows for number in range(found.num_row_groups)]
            assert rows == [block["windows"] for block in record.blocks] and len(rows) == 2


def test_the_names_alone_tell_the_splits(exported, monkeypatch, tmp_path):
    """Without the card, as where somebody copies data/ only."""
    _, _, directory = exported
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "data").symlink_to(directory / "data")
    for split in SPLITS:
        assert loaded(copy, split, monkeypatch, tmp_path).num_rows > 0


def test_the_card_says_what_it_is(exported):
    import yaml

    store, truth, directory = exported
    card = (directory / "README.md").read_text(encoding="utf-8")
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["license"] == "unknown"
    assert [entry["split"] for entry in front["configs"][0]["data_files"]] == list(SPLITS)
    assert store.target_id in card and store.plan_id in card
    for split in SPLITS:
        windows = sum(len(block["lengths"]) for block in truth[split])
        tokens = sum(len(block["ids"]) for block in truth[split])
        assert f"| {split} | {windows:,} | {tokens:,} |" in card
    names = set(re.findall(r"^\| `(\w+)` \|", card, re.MULTILINE))
    from pyarrow.parquet import read_schema

    assert names == set(read_schema(next((directory / "data").glob("train-*"))).names)
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(directory / "tokenizer").convert_ids_to_tokens(5) == "w0"


def test_windows_of_quarantined_documents_are_marked(monkeypatch, tmp_path):
    """In a second unit, whose windows have other numbers in the split than in the unit."""
    files, plan, _ = make_store(tmp_path / "store", units=("train", "train"), blocks=1)
    write_tokenizer(files.tokenizer, 60)
    unit = plan.units[1].id
    rng = np.random.default_rng(9)
    block = random_block(rng, windows=37, max_length=32, vocab_size=1000, k=0)
    block |= {"nnz": np.zeros(len(block["ids"]), int), "indices": np.zeros(0, int), "weights": np.zeros(0)}
    files.record_file(unit).unlink()
    with UnitWriter(files, ShardMeta.of_unit(files.target(), unit)) as writer:
        writer.write_block(**block, tail=np.zeros(len(block["ids"])))
        writer.quarantined.append({"record": 0, "source": "a", "windows": [3, 4], "reason": "NaN"})
    report = export(tmp_path / "store", tmp_path / "parquet")
    rows = loaded(tmp_path / "parquet", "train", monkeypatch, tmp_path)
    first = len(Store.open(tmp_path / "store").split("train")) - 37
    marked = [row["window_id"] for row in rows if row["quarantined"]]
    assert marked == [first + 3, first + 4] and report["splits"]["train"]["quarantined"] == 2
    assert not any(any(row["lsp_indices"]) for row in rows if row["quarantined"])


def test_a_killed_export_leaves_nothing_that_looks_whole(exported, tmp_path):
    """Killed at the first, the second, ... row group, it leaves a temporary, which `clean` knows; then it is made."""
    store, _, whole = exported
    code = """
import os, signal, sys
from shards.export import export
calls = []
def progress(*arguments):
    calls.append(1)
    if len(calls) == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
export(sys.argv[1], sys.argv[2], progress)
"""
    output = tmp_path / "parquet"
    row_groups = sum(len(record.blocks) for record in store.records())
    for number in range(1, row_groups + 1):
        killed = Preloaded(["-c", code, store.path, output, number], env=os.environ | {"PYTHONPATH": str(ROOT)})
        assert killed.wait() == -signal.SIGKILL
        assert not output.exists()
        (left,) = tmp_path.iterdir()
        assert writer_of_temporary(left.name) == killed.pid
        assert clean(tmp_path, everything=True)["removed"] and not any(tmp_path.iterdir())
    assert not export(store.path, output)["finished_before"]
    files = [path.relative_to(whole) for path in sorted(whole.rglob("*")) if path.is_file()]
    assert [path.relative_to(output) for path in sorted(output.rglob("*")) if path.is_file()] == files
    assert all((output / name).read_bytes() == (whole / name).read_bytes() for name in files), "equal bytes"


def test_damage_is_an_error_and_leaves_nothing(tmp_path):
    store, _ = store_of(tmp_path / "store")
    shard = sorted((tmp_path / "store" / "units").glob("*.tar"))[1]
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(ShardError, match="does not match its hash"):
        export(store.path, tmp_path / "out" / "parquet")
    assert not any((tmp_path / "out").iterdir())


def test_a_file_that_cannot_be_written_ends_with_74_and_leaves_nothing(exported, tmp_path):
    """A real limit of the size of files, reached in the data."""
    store, _, _ = exported
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); "
    code += "from mlsm import __main__ as cli; cli.main()"
    words = ["export-store", store.path, "--output", tmp_path / "out" / "parquet"]
    run = run_python(["-c", code, *words], env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert run.returncode == 74 and "File too large" in run.stderr and "Traceback" not in run.stderr, run.stderr
    assert not any((tmp_path / "out").iterdir())


def test_a_store_behind_a_url(monkeypatch, tmp_path):
    monkeypatch.setenv("MLSM_CACHE", str(tmp_path / "cache"))
    store, _ = store_of(tmp_path / "served" / "lsp", blocks=1)
    export(store.path, tmp_path / "from-disk")
    with serving(tmp_path / "served") as web:
        export(f"{web.url}/lsp", tmp_path / "from-web")
    for path in (tmp_path / "from-disk").rglob("*.*"):
        assert (tmp_path / "from-web" / path.relative_to(tmp_path / "from-disk")).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:1000])])
def test_an_export_that_lacks_data_is_not_called_finished(exported, tmp_path, spoil):
    store, _, directory = exported
    copy = shutil.copytree(directory, tmp_path / "copy")
    spoil(next((copy / "data").glob("held_out-*")))
    with pytest.raises(RequestError, match="data files are missing or cut"):
        export(store.path, copy)


def test_what_is_there_is_found_or_left_alone(exported, tmp_path):
    store, _, directory = exported
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    assert export(store.path, directory)["finished_before"]
    other, _ = store_of(tmp_path / "other", seed=1)
    with pytest.raises(RequestError, match=r"export of another store.*Choose another --output"):
        export(other.path, directory)
    assert before == {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(RequestError, match="no export of a store"):
        export(other.path, tmp_path / "mine")
    (tmp_path / "disk" / "empty").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "empty")
    assert not export(other.path, tmp_path / "link")["finished_before"]
    assert export(other.path, tmp_path / "disk" / "empty")["finished_before"] and (tmp_path / "link").is_symlink()


def test_of_two_exports_to_one_place_the_second_fails(exported, tmp_path):
    store, _, _ = exported
    other, _ = store_of(tmp_path / "other", seed=1)

    def meanwhile(*_):
        if not (tmp_path / "out").exists():
            export(other.path, tmp_path / "out")

    with pytest.raises(RequestError, match="export of another store"):
        export(store.path, tmp_path / "out", meanwhile)
    assert export(other.path, tmp_path / "out")["finished_before"]


def test_a_unit_without_windows(monkeypatch, tmp_path):
    files, plan, _ = make_store(tmp_path / "store", units=("train", "train", "train"), blocks=1)
    write_tokenizer(files.tokenizer, 60)
    files.record_file(plan.units[0].id).unlink()
    with UnitWriter(files, ShardMeta.of_unit(files.target(), plan.units[0].id)):
        pass
    store = Store.open(tmp_path / "store")
    export(store.path, tmp_path / "parquet")
    expect_reader(loaded(tmp_path / "parquet", "train", monkeypatch, tmp_path), store, "train")
    expect_reader(by_pandas(tmp_path / "parquet", "train"), store, "train")


def test_the_command(tmp_path):
    write_store(tmp_path / "runs" / "stores" / "lsp-tiny", k=24)
    run = run_command(["export-store"], cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    said = "datasets.load_dataset('runs/exports/lsp-tiny-parquet')"
    assert said in run.stdout and "The export is finished" in run.stdout and "150 windows in 1 file" in run.stdout
    run = run_command(["export-store", "runs/stores/lsp-tiny", "--json"], cwd=tmp_path)
    report = json.loads(run.stdout)
    assert report["finished_before"] and report["splits"]["held_out"]["windows"] == 20
    (tmp_path / "here").write_text("a file")
    run = run_command(["export-store", "--output", "here"], cwd=tmp_path)
    assert run.returncode == 2 and "here exists and contains no export" in run.stderr and "Traceback" not in run.stderr
