"""Look into a store: its statistics, a document or window with its targets, differences to another store's settings.

    figures = statistics(Store.open(path))
    view = document_tokens(store, "train", 7, top=5)

Functions return dicts that JSON can hold; mlsm/commands/show_shards.py makes them readable. Statistics come from the
records and from the sums at the end of every shard, so blocks are not read. Not handled here: whether the store is
whole (shards/verify.py).

Shapes: T tokens, K atoms.
"""

import json
from typing import Any

import numpy as np

from mlsm.common.disk import read_file
from mlsm.common.errors import RequestError, ShardError
from shards import codec
from shards.config import ShowConfig, store_of
from shards.copies import foreign_errors, parse_dictionary
from shards.reader import Store
from shards.schema import ShardMeta
from shards.shard_file import blocks, naming
from shards.windows import Split
from student.masks.words import token_names

TOP_ATOMS = 10
_DICTIONARY_FIGURES = ("objective", "explained_variance", "nnz", "dead_atoms", "largest_cosine", "epoch")


def show_shards(settings: ShowConfig) -> dict:
    """The view that the settings ask for: a difference, a window, a document, or the statistics.

    Raises  RequestError if the store does not hold it
    """
    store = Store.open(store_of(settings))
    if settings.against is not None:
        return difference(store, Store.open(settings.against))
    if settings.window is not None:
        return window_tokens(store, settings.split, settings.window, settings.top_n)
    if settings.document is not None:
        return document_tokens(store, settings.split, settings.document, settings.top_n, settings.max_tokens)
    return statistics(store)


# -- the whole store --------------------------------------------------------------------------------------


def statistics(store: Store) -> dict:
    """Counts, sizes, settings and, if the store has distributions, statistics of them."""
    names = sorted({unit.split for unit in store.plan.units}, reverse=True)
    splits = {name: dict.fromkeys(("windows", "tokens", "units", "documents"), 0) for name in names}
    environments: dict[str, dict] = {}
    coded, histogram = dict.fromkeys(names, 0), np.zeros(256, np.int64)
    # One by one: all block tables would fill the memory.
    for unit, record in zip(store.plan.units, store.iter_records(), strict=True):
        of_split = {"windows": record.windows, "tokens": record.tokens, "units": 1}
        for name, count in (of_split | {"documents": record.statistics["documents"]}).items():
            splits[unit.split][name] += count
        _count_environment(environments, record.environment)
        if store.k:
            coded[unit.split] += record.statistics["coded_tokens"]
            histogram += record.statistics["nnz_histogram"]
    report = store.report()
    figures = {"store": str(store.path), "plan": store.plan_id, "splits": splits, **report}
    figures |= {"settings": store.settings, "environments": list(environments.values())}
    if store.k:
        figures |= {"nnz_histogram": histogram.tolist(), **_distribution(store, coded, report["mass_kept"])}
    if store.files.dictionary.is_dir():
        figures["dictionary"] = _dictionary(store.files.dictionary)
    return figures


def _count_environment(counted, environment):
    """Count a unit among the distinct devices and library versions that made the units."""
    own = {name for name in environment if name.endswith("_seconds") or name == "source_sha256"}
    facts = {name: value for name, value in environment.items() if name not in own}
    counted.setdefault(json.dumps(facts, sort_keys=True), {"units": 0, **facts})["units"] += 1


def _distribution(store, coded, mass_kept):
    """Statistics of the sum of all stored distributions. `coded` has the coded tokens of each split."""
    means = [tokens * store.split(name).mean_distribution() for name, tokens in coded.items() if tokens]
    mass_K = sum(means, start=np.zeros(store.k))
    mean_K = mass_K / max(mass_K.sum(), np.finfo(float).tiny)
    used = np.argsort(-mean_K, kind="stable")[:TOP_ATOMS]
    some = mean_K[mean_K > 0]
    return {
        "dead_words" if store.kind == "logits" else "dead_atoms": int((mean_K == 0).sum()),
        "mean_entropy_nats": float(-(some * np.log(some)).sum()),
        "tail_mass": 1 - mass_kept,
        "most_used": [[label, float(mean_K[atom])] for label, atom in zip(_labels(store, used), used, strict=True)],
    }


def _labels(store, entries):
    """The names of a row's entries: numbers of LSPs, or words of the vocabulary."""
    return token_texts(store, entries) if store.kind == "logits" else entries.tolist()


def _dictionary(directory):
    """The results in dictionary.json from the evaluation that chose these atoms."""
    try:
        kept = parse_dictionary(read_file(directory / "dictionary.json"), "dictionary.json")
        best: dict = min(kept["history"], key=lambda entry: entry["objective"], default={})
        return {name: best[name] for name in _DICTIONARY_FIGURES if name in best} | {"settings": kept["settings"]}
    except (OSError, ShardError) as error:
        return {"problem": f"dictionary.json cannot be read ({error})"}


def difference(store: Store, other: Store) -> dict:
    """Which settings differ between two stores, and whether they have the same windows: equal plans do."""
    ours, theirs = _flatten(store.settings), _flatten(other.settings)
    names = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    return {
        "stores": [str(store.path), str(other.path)],
        "same_target": store.target_id == other.target_id,
        "same_plan": store.plan_id == other.plan_id,
        "differing": {name: [ours.get(name), theirs.get(name)] for name in names},
        "counts": [{name: s.report()[name] for name in ("windows", "tokens", "bytes")} for s in (store, other)],
    }


def _flatten(settings, prefix=""):
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


# -- one window, one document -----------------------------------------------------------------------------


def window_tokens(store: Store, split: Split, number: int, top: int) -> dict:
    """A window's tokens with their largest LSPs, or their teacher's most probable words."""
    reader = store.split(split)
    if not 0 <= number < len(reader):
        raise RequestError(f"{store.path} has {len(reader):,} {split} windows, counted from 0; there is no {number}")
    batch = reader.read(np.array([number]))
    length = int(batch.lengths[0])
    rows = None
    if store.k:
        rows = reader.targets(batch, np.zeros(length, np.int64), np.arange(length))
    heading = f"window {number} of {len(reader):,} in {split}, {length} tokens"
    return _view(store, heading, batch.ids[0, :length], rows, top)


def document_tokens(store: Store, split: Split, number: int, top: int, limit: int = 512) -> dict:
    """A document's tokens with the same, over all its windows; special tokens are omitted.

    limit  most tokens to show
    """
    units = [unit for unit in store.plan.units if unit.split == split]
    ends = np.cumsum([record.statistics["documents"] for record in store.iter_records(split)], dtype=np.int64)
    if not 0 <= number < (ends[-1] if len(ends) else 0):
        count = int(ends[-1]) if len(ends) else 0
        raise RequestError(f"{store.path} has {count:,} {split} documents, counted from 0; there is no {number}")
    at = int(np.searchsorted(ends, number, side="right"))
    unit, nth = units[at], int(number - (ends[at - 1] if at else 0))
    record = store.record(unit.id)
    row_of_source, ids, rows = _tokens_of_document(store, record, nth)
    file, row_of_file = store.plan.place(unit, unit.start + row_of_source)
    heading = (
        f"document {number} of {int(ends[-1]):,} in {split}: record {row_of_file} of {file}, "
        f"{len(ids)} tokens" + (f", the first {limit}" if len(ids) > limit else "")
    )
    return _view(store, heading, ids[:limit], rows, top)


def _tokens_of_document(store, record, nth):
    """Record number in the unit, ids and SparseRows of the unit's nth document."""
    wanted, last, before, ids, parts = None, -1, 0, [], []
    special = store.special_ids["all"]
    for group, columns in blocks(store.files, record):
        records = columns["run_records"].astype(np.int64)
        if wanted is None:
            fresh = np.unique(records[records > last])  # the writer counts documents in the same way
            if nth >= before + len(fresh):
                last, before = max([last, *fresh.tolist()]), before + len(fresh)
                continue
            wanted = int(fresh[nth - before])
        elif wanted not in records:
            break
        run_T = np.searchsorted(columns["run_starts"], np.arange(len(columns["ids"])), side="right") - 1
        chosen = np.flatnonzero((records[run_T] == wanted) & ~np.isin(columns["ids"], special))
        ids.append(columns["ids"][chosen].astype(np.int32))
        if store.k:
            meta = ShardMeta.of_unit(store.files.target(), record.unit)
            first_entry = np.concatenate(([0], np.cumsum(columns["nnz"], dtype=np.int64)))
            with naming(store.files, record, group["name"]):
                parts.append(codec.gather_rows(meta, columns, first_entry, chosen))
    if not ids:
        raise ShardError(
            f"{store.files.record_file(record.unit)}: field statistics.documents: the shard has fewer than {nth + 1:,} "
            f"documents. {store.files.repair_hint()}"
        )
    return wanted, np.concatenate(ids), _join_rows(parts) if parts else None


def _join_rows(parts):
    nnz = np.concatenate([np.diff(part.indptr) for part in parts])
    columns = [np.concatenate([getattr(part, name) for part in parts]) for name in ("indices", "weights", "tail")]
    return codec.SparseRows(np.concatenate(([0], np.cumsum(nnz))), *columns)


def _view(store, heading, ids, rows, top):
    """Tokens with their rows; `rows` may be longer than `ids`; it is None if the store has no distributions."""
    texts, name = token_texts(store, ids), {"logits": "words"}.get(store.kind, "lsps")
    labels_E = [] if rows is None else _labels(store, rows.indices[: rows.indptr[len(ids)]])
    tokens = []
    for t, (token_id, text) in enumerate(zip(ids.tolist(), texts, strict=True)):
        token = {"id": token_id, "text": text}
        if rows is not None:
            entries = slice(rows.indptr[t], rows.indptr[t + 1])
            labels, weights = labels_E[entries], rows.weights[entries]
            largest = np.argsort(-weights, kind="stable")[:top]
            token |= {
                "nnz": len(labels),
                "tail": float(rows.tail[t]),
                name: [[labels[i], float(weights[i])] for i in largest],
            }
        tokens.append(token)
    return {"store": str(store.path), "heading": heading, "tokens": tokens}


def token_texts(store: Store, ids: np.ndarray) -> list[str]:
    """The tokens as text (student/masks/words.py), by the store's own tokenizer; their numbers when it has none."""
    files = store.read_tokenizer()
    if "tokenizer.json" in files:
        from tokenizers import Tokenizer

        with foreign_errors(store.files):
            return token_names(Tokenizer.from_buffer(files["tokenizer.json"]), [int(number) for number in ids])
    return token_names(store.load_tokenizer(), ids.tolist()) if files else [f"#{number}" for number in ids]
