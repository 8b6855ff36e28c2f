"""Write a store as Parquet files with a dataset card, for programs that cannot read our format.

    report = export("runs/stores/lsp-...", "runs/exports/lsp-...-parquet")

    README.md                                 dataset card: how to read it, what made it, which split has which files
    lineage.json                              the store's target.json, its plan, and a digest of each split's shards
    tokenizer/                                the store's copy
    data/train-00000-of-00002.parquet         a shard of the split in plan order; a row is a window
    data/held_out-00000-of-00001.parquet

`datasets.load_dataset` recognises file names of this form even without a card, for any split name. Splits are separate
files and not a column, because then load_dataset returns them by name, and users do not train on held-out windows by
mistake. Values of tokens are lists of lists: datasets, pandas and DuckDB index them as `column[t][i]` (DuckDB counts
from 1), whereas offsets into a flat list would need code in each of them.

The directory appears whole (mlsm/common/durable.py); an export that was interrupted starts from scratch. A row group is
a block, or a part of one if hidden states are wide, and one of them is in memory at a time. Not handled here: pushing
to the Hub.

Shapes: W windows, T tokens, d hidden width.
"""

import hashlib
import io
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlsm.common import disk
from mlsm.common.durable import make_directories, publish_directory, replace_bytes, replace_json
from mlsm.common.errors import RequestError, ShardError
from mlsm.common.json_checks import parse_json
from mlsm.common.paths import utf8
from mlsm.common.progress import silent
from mlsm.common.text import code_span, without_directories
from shards import codec, copies
from shards.manifest import UnitRecord
from shards.reader import Store
from shards.schema import ShardMeta
from shards.shard_file import blocks, naming

if TYPE_CHECKING:
    import pyarrow

EXPORTS = Path("runs/exports")
LINEAGE_FILE = "lineage.json"
_MOST_VALUES = 1 << 23  # most float32 values of hidden states in a row group: 32 MB
_SHOWN = ("teacher_name", "tokenizer_name", "layer", "k", "lam", "top_n", "width", "quantise", "derived_from")


def export(
    path: str | Path, output: str | Path | None = None, progress: Callable[..., None] = silent
) -> dict[str, Any]:
    """Write a store as Parquet files, unless that is done already.

    output    directory to write; runs/exports/<store>-parquet by default
    progress  called with ("export", tokens done, tokens in all)
    Returns   report: output, store, kind, plan, target, bytes, seconds, finished_before, and for each of `splits`
              files, windows, tokens and quarantined windows
    Raises    RequestError if the output holds anything but this export, ImportError if pyarrow is not installed
              StoreError if the store is unfinished, ShardError if it is damaged, OSError if writing fails
    """
    import pyarrow.parquet  # noqa: F401  before any work, whether it is installed

    started = time.perf_counter()
    store = Store.open(path)
    if output is None:
        name = Path(store.path).resolve().name if Path(store.path).is_dir() else str(store.path).rstrip("/")
        output = EXPORTS / f"{name.rpartition('/')[2]}-parquet"
    output = Path(output)
    splits, digests = _facts(store)
    target = without_directories(store.files.target())  # the files may be published
    lineage = {"target": target, "plan": store.plan_id, "shards": digests}
    finished_before = _is_there(output, lineage)
    if not finished_before:
        tokenizer = store.read_tokenizer()

        def fill(directory):
            _write_data(store, directory / "data", splits, progress)
            disk.mkdir(directory / "tokenizer")
            copies.write_files(directory / "tokenizer", tokenizer)
            replace_json(directory / LINEAGE_FILE, lineage | {"files": _sizes(directory)})
            replace_bytes(directory / "README.md", utf8(_card(store, splits)))

        publish_directory(output.resolve(), fill, replace=False)  # beside what a link leads to
        _is_there(output, lineage)  # raises if another command was first
    return {
        "output": str(output),
        "store": str(store.path),
        "kind": store.kind,
        "plan": store.plan_id,
        "target": store.target_id,
        "splits": splits,
        "bytes": sum(file.stat().st_size for file in (output / "data").glob("*.parquet")),
        "seconds": time.perf_counter() - started,
        "finished_before": finished_before,
    }


def _facts(store):
    """Counts of every split, and a digest of its shards."""
    splits: dict[str, dict[str, int]] = {}
    digests: dict[str, Any] = {}
    for unit in store.plan.units:
        record = store.record(unit.id)
        counts = splits.setdefault(unit.split, dict.fromkeys(("files", "windows", "tokens", "quarantined"), 0))
        for name, more in zip(counts, (1, record.windows, record.tokens, record.lacking), strict=True):
            counts[name] += more
        digests.setdefault(unit.split, hashlib.sha256()).update(bytes.fromhex(record.sha256))
    return splits, {split: digest.hexdigest() for split, digest in digests.items()}


def _sizes(directory):
    """Bytes of each data file."""
    return {file.name: file.stat().st_size for file in sorted((directory / "data").glob("*.parquet"))}


def _is_there(output, lineage):
    """Whether the output already is this export. Raises RequestError if it holds anything else."""
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return False
    try:
        found = parse_json(disk.read_file(output / LINEAGE_FILE), output / LINEAGE_FILE)
    except (OSError, ShardError):
        found = None
    sizes = found.pop("files", None) if isinstance(found, dict) else None
    if found == lineage and sizes != _sizes(output):
        raise RequestError(f"{output} is this export, but some of its data files are missing or cut. Remove it first.")
    if found != lineage:
        what = "the export of another store, or of this one before it changed" if found else "no export of a store"
        raise RequestError(
            f"{output} exists and contains {what}. Nothing was changed. Choose another --output, or remove it."
        )
    return True


def _write_data(store, directory, splits, progress):
    from pyarrow.parquet import ParquetWriter

    make_directories(directory)
    done, total = 0, sum(counts["tokens"] for counts in splits.values())
    for split, counts in splits.items():
        first_window = 0
        for number, record in enumerate(store.iter_records(split)):
            schema = _schema(store, record)
            name = f"{split}-{number:05}-of-{counts['files']:05}.parquet"
            with (
                io.BufferedWriter(disk.create(directory / name)) as file,
                ParquetWriter(file, schema, compression="zstd") as writer,
            ):
                for table, tokens in _tables(store, record, first_window, schema):
                    writer.write_table(table, row_group_size=max(1, len(table)))
                    done += tokens
                    progress("export", done, total)
            first_window += record.windows


def _schema(store, record):
    import pyarrow as pa

    per_token: dict[str, pa.DataType] = {"input_ids": pa.int32(), "document_ids": pa.int32()}
    if store.k:
        entry = pa.uint16() if store.k <= 65_536 else pa.uint32()
        per_token |= {"lsp_indices": pa.list_(entry), "lsp_weights": pa.list_(pa.float32()), "lsp_tail": pa.float32()}
    if store.hidden:
        per_token["hidden"] = pa.list_(pa.float32())
    fields = {"window_id": pa.int64(), **{name: pa.list_(kind) for name, kind in per_token.items()}}
    made = {"target": store.target_id, "plan": store.plan_id, "unit": record.unit}
    return pa.schema(fields | {"quarantined": pa.bool_()}, {"mlsm": json.dumps(made)})


def _tables(store: Store, record: UnitRecord, number: int, schema: Any) -> Iterator[tuple["pyarrow.Table", int]]:
    """For each row group of a unit: its table and number of tokens. `number` is the first window's in the split."""
    import pyarrow as pa

    meta = ShardMeta.of_unit(store.files.target(), record.unit)
    lacking = [window for entry in record.quarantined for window in entry["windows"]]
    quarantined = np.isin(np.arange(record.windows), lacking)
    most = max(1, _MOST_VALUES // (store.max_length * store.hidden.width)) if store.hidden else record.windows
    unit_window = 0
    for group, columns in blocks(store.files, record):
        starts = np.concatenate(([0], np.cumsum(columns["lengths"], dtype=np.int64)))
        run_T = columns["run_starts"].searchsorted(np.arange(starts[-1]), side="right") - 1
        for first in range(0, group["windows"], most):
            last = min(first + most, group["windows"])
            token_M = np.arange(starts[first], starts[last])
            window = starts[first : last + 1] - starts[first]
            document_M = run_T[token_M] - np.repeat(run_T[starts[first:last]], np.diff(window))
            with naming(store.files, record, group["name"]):
                rows = _rows(store, meta, columns, token_M)
            rows |= {"input_ids": columns["ids"][token_M], "document_ids": document_M}
            table = {name: _lists(window, values, schema.field(name).type) for name, values in rows.items()}
            numbers = np.arange(last - first) + unit_window
            table |= {"window_id": pa.array(number + numbers), "quarantined": pa.array(quarantined[numbers])}
            unit_window += last - first
            yield pa.table(table, schema), len(token_M)


def _rows(store, meta, columns, token_M):
    """Columns of a block's tokens other than ids: name to values, or to (offset of each token, values)."""
    if store.k:
        first_T = np.concatenate(([0], np.cumsum(columns["nnz"], dtype=np.int64)))
        rows = codec.gather_rows(meta, columns, first_T, token_M)
        return {
            "lsp_indices": (rows.indptr, rows.indices),
            "lsp_weights": (rows.indptr, rows.weights),
            "lsp_tail": rows.tail,
        }
    if store.hidden:
        states = codec.gather_hidden_of_blocks(store.hidden, [(columns, token_M, slice(None))], store.codebook)
        first_M = np.concatenate(([0], np.cumsum(states.coded_M * np.int64(store.hidden.width))))
        return {"hidden": (first_M, states.rows_Md[states.coded_M].ravel())}
    return {}


def _lists(offsets, values, kind):
    """Values as an Arrow array of consecutive lists; if values are (offsets, values), of lists of lists."""
    import pyarrow as pa

    if isinstance(values, tuple):
        inner = _lists(values[0], values[1], kind.value_type)
    else:
        inner = pa.array(values.astype(kind.value_type.to_pandas_dtype()), kind.value_type)
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), inner, type=kind)


# -- the card ---------------------------------------------------------------------------------------------

_COLUMNS = {
    "window_id": "number of the window in its split, as in the store; stores of one plan have the same windows",
    "input_ids": "token ids, special tokens included",
    "document_ids": "for each token, which document of the window it is from, counted from 0",
    "lsp_indices": "for each token, the {entries}, in increasing order; empty for a token without any",
    "lsp_weights": "for each token, their weights, which sum to 1",
    "lsp_tail": "for each token, the share of its distribution that was dropped before the rest was normalised",
    "hidden": "for each token, its hidden state of {width} values as the store has it, quantised; empty without one",
    "quarantined": "whether a document of the window could not be coded and therefore lacks targets",
}


def _card(store, splits):
    """The README.md of the directory. A store may come from somebody else, so its texts are quoted."""
    facts = [(name, store.settings[name]) for name in _SHOWN if name in store.settings]
    facts += [("target", store.target_id), ("plan", store.plan_id)]
    names = _schema(store, store.record(store.plan.units[0].id)).names
    entries = (
        "vocabulary ids with the highest probability under the teacher" if store.kind == "logits" else "LSPs (atoms)"
    )
    width = store.hidden.width if store.hidden else 0
    lines = ["---", "license: unknown", "tags:", "- mlsm", "configs:", "- config_name: default", "  data_files:"]
    for split in splits:
        lines += [f"  - split: {split}", f"    path: data/{split}-*.parquet"]
    lines += [
        "---",
        "",
        f"# {_title(store)}",
        "",
        "Exported with `mlsm export-store`. A row is a window of text. The licence is unknown: it depends on the text",
        "and on the teacher. Fill it in before you publish this dataset.",
        "",
        "| split | windows | tokens | files | windows with quarantined documents |",
        "|---|---|---|---|---|",
    ]
    for split, counts in splits.items():
        figures = (counts[name] for name in ("windows", "tokens", "files", "quarantined"))
        lines.append(f"| {split} | {' | '.join(f'{figure:,}' for figure in figures)} |")
    lines += ["", "| column | content |", "|---|---|"]
    lines += [f"| `{name}` | {_COLUMNS[name].format(entries=entries, width=width)} |" for name in names]
    first = next(iter(splits))
    lines += [
        "",
        "```python",
        "from datasets import load_dataset",
        "from transformers import AutoTokenizer",
        "",
        f'windows = load_dataset("path/of/this/directory", split="{first}")  # streaming=True reads it piece by piece',
        'tokenizer = AutoTokenizer.from_pretrained("path/of/this/directory/tokenizer")',
        'tokenizer.convert_ids_to_tokens(windows[0]["input_ids"])',
        "```",
        "",
        "To read one file with pandas, or all files of a split with DuckDB:",
        "",
        "```python",
        f'pandas.read_parquet("data/{first}-00000-of-{splits[first]["files"]:05}.parquet")',
        f"""duckdb.sql("SELECT * FROM 'data/{first}-*.parquet'")""",
        "```",
        "",
        "| what made it | |",
        "|---|---|",
        *(f"| {name.replace('_', ' ')} | {code_span(without_directories(value))} |" for name, value in facts),
        "",
        f"All settings are in `{LINEAGE_FILE}`.",
        "",
    ]
    return "\n".join(lines)


def _title(store):
    names = {"lsp": "LSP distributions", "logits": "teacher distributions", "hidden": "hidden states"}
    return f"Windows of text with {names[store.kind]}" if store.kind in names else "Windows of text as token ids"
