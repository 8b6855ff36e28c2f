"""Make a store with a smaller n from a store of LSPs or logits, without teacher, dictionary or solver.

    report = derive("runs/stores/lsp-...", top_n=8)

The n largest entries of every row are kept, among equal codes the lower atom. (Encoding compares the exact weights, so
a few per cent of its rows may keep another one of such atoms.) The 8-bit codes do not change, because they are relative
to the row's maximum, which is always kept. A stored row sums to 1 - tail; the mass of dropped entries is added to the
tail:

    tail' = tail + (1 - tail) x (share of the dropped entries in the stored row)

so only the tail is rounded twice. A stored tail of 1 was rounded up, as its row has entries; it is treated as slightly
less than 1. Units, blocks, windows and plan stay the same, so the new store pairs with all stores of the plan. Finished
units are skipped, and equal input gives equal bytes, as in encoding. A unit's record names its source's shard
(`source_sha256`). If the source unit has since been encoded again to other bytes, the unit is derived again.

Shapes: T tokens, E entries.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from mlsm.common import disk
from mlsm.common.durable import publish_directory, replace_json
from mlsm.common.errors import RequestError, StoreError
from mlsm.common.invocation import program
from mlsm.common.progress import silent
from mlsm.common.text import shell_quote
from shards import codec, copies
from shards.config import DeriveConfig, store_of
from shards.files import StoreFiles, refuse_foreign_output
from shards.manifest import fingerprint, with_checksum
from shards.reader import Store, is_url
from shards.schema import MAX_ENTRIES, TAIL_STEPS_PER_OCTAVE, ShardMeta
from shards.shard_file import blocks, naming
from shards.writer import UnitWriter

_LARGEST_TAIL = 2 ** (-1 / (4 * TAIL_STEPS_PER_OCTAVE))  # the middle, in octaves, of the tails that are rounded to 1


def derive_shards(settings: DeriveConfig, progress: Callable[..., None] = silent) -> list[dict]:
    """Make a store with a smaller n. Returns a list with its report, like an encoding command; raises derive's
    errors."""
    return [derive(store_of(settings), settings.top_n, settings.output, progress)]


def derive(
    path: str | Path, top_n: int, output: str | Path | None = None, progress: Callable[..., None] = silent
) -> dict:
    """Write the store, or its missing units.

    output    directory whose `stores` gets the new store; default: next to the source, which then must not be remote
    progress  called with ("derive", tokens done, tokens in all)
    Returns   report dict as encoding commands give
    Raises    StoreError when the source is unfinished (RequestError when it holds only ids or keeps at most top_n
              entries per token), when its tokenizer or dictionary is not the one of its target, or a unit is removed
              while it is read
              ShardError when it is damaged
    """
    started = time.perf_counter()
    source = Store.open(path)
    target = _target(source, top_n)
    copied = {"tokenizer": source.read_tokenizer(), "dictionary": copies.read_dictionary(source.files)}
    files = StoreFiles(_directory(source, target, output))
    files.create(target)
    for name, contents in copied.items():
        _put(files, name, contents)
    files.publish_plan(source.plan)
    if source.command:
        kept = with_checksum(source.command)  # defaults for training on the store
        replace_json(files.plans / f"{source.plan_id}.yaml", kept)
    missing, total, wanted = [], 0, 0
    for record in source.iter_records():
        total += record.tokens
        derived = files.record(record.unit)  # derive it if missing, or if the source unit is newer
        if derived is None or derived.lacking > record.lacking or _is_of_other_bytes(derived, record):
            missing.append(record.unit)
            wanted += record.tokens
        else:
            files.check_size(derived)
    done = total - wanted
    for unit_id in missing:
        for tokens in _derive_unit(source, files, target, source.record(unit_id), top_n):
            done += tokens
            progress("derive", done, total)
    made = Store.open(files.path, source.plan_id)
    return {
        "store": str(files.path),
        "plan": source.plan_id,
        "source": str(source.path),
        "finished_before": not missing,
        "new_units": len(missing),
        "new_tokens": wanted,
        "seconds": time.perf_counter() - started,
        "quarantined": sum(len(record.quarantined) for record in made.iter_records()),
        **made.report(),
    }


def _is_of_other_bytes(derived, record):
    """Whether a unit was derived from another shard than the source's record names now.

    Records of older units do not name their source's shard; these units are treated as up to date.
    """
    return derived.environment.get("source_sha256", record.sha256) != record.sha256


def _target(source, top_n):
    old = source.files.target()
    kept = old["settings"].get("top_n", MAX_ENTRIES)
    if source.kind == "hidden":
        raise RequestError(
            f"{source.path} contains hidden states, which have no entries to cut. For fewer bytes per token:  "
            f"{program()} encode-hidden --hidden {shell_quote(source.path)} --quantise pq --bytes 64"
        )
    if not source.k:
        raise RequestError(
            f"{source.path} contains only token ids, so there is nothing to cut. Pass a store of LSPs or logits."
        )
    if kept == 1:
        raise RequestError(f"{source.path} keeps one entry per token, so there is nothing to cut.")
    if kept != "all" and top_n >= kept:
        raise RequestError(
            f"{source.path} keeps {kept} entries per token; --top-n {top_n} cannot be derived from it, only fewer "
            f"than {kept}. To get more, repeat the encode-{source.kind} command that made it, with a larger --top-n."
        )
    settings = old["settings"] | {"top_n": top_n, "derived_from": old["target"]}
    return old | {"settings": settings, "target": fingerprint(settings)}


def _directory(source, target, output):
    """The path of the new store: its name is the source's with n, and the digits of its own target."""
    if output is None and is_url(source.path):
        raise RequestError(f"{source.path} is remote: choose with --output where to put the new store.")
    if output is not None:
        refuse_foreign_output(output)
    path = Path(source.path)
    path = path if path.name.strip(".") else path.resolve()
    disk.follow_no_links_below(path.parent if output is None else output)
    parent = path.parent if output is None else Path(output) / "stores"
    stem = path.name.removesuffix(f"-{source.target_id[:12]}")
    digits = target["target"][:12]
    name = f"{stem}-n{target['settings']['top_n']}-{digits}"
    return next(iter(sorted(parent.glob(f"*-{digits}"))), parent / name)


def _put(files, name, contents):
    """Write the source's copy of a tokenizer or dictionary, unless the new store has it."""
    directory = getattr(files, name)
    with suppress(StoreError):
        if copies.READERS[name](files) == contents:
            return
    publish_directory(directory, lambda path: copies.write_files(path, contents), replace=os.path.lexists(directory))


def _derive_unit(source, files, target, record, top_n):
    """Write one unit; yields the tokens of each block once it is written."""
    meta = ShardMeta.of_unit(target, record.unit)
    derived = files.record(record.unit)
    outdated = derived.sha256 if derived and _is_of_other_bytes(derived, record) else None
    # Keep the facts about how the codes were made, add the source shard, and drop the seconds, which are the source's.
    environment = {name: value for name, value in record.environment.items() if not name.endswith("_seconds")}
    environment["source_sha256"] = record.sha256
    with UnitWriter(files, meta, environment, retry=True, replaces=outdated) as writer:
        writer.quarantined.extend(record.quarantined)
        truncated = 0
        for group, columns in blocks(source.files, record):
            truncated += int((columns["nnz"] > top_n).sum())
            with naming(source.files, record, group["name"]):
                rows = cut(meta, columns, top_n)
            writer.write_block(
                ids=columns["ids"],
                lengths=columns["lengths"],
                run_starts=columns["run_starts"],
                run_records=columns["run_records"].astype(np.int64),
                nnz=np.diff(rows.indptr),
                indices=rows.indices,
                weights=rows.weights,
                tail=rows.tail,
            )
            yield group["tokens"]
        kept = ("empty_codes", "max_kkt", "dtype_tokens", "dtype_tv", "dtype_hidden")
        known = {name: record.statistics[name] for name in kept if name in record.statistics}
        writer.statistics |= known | {"truncated_tokens": truncated}


def cut(meta: ShardMeta, columns: codec.Columns, top_n: int) -> codec.SparseRows:
    """The rows of a block with their top_n largest entries; weights sum to 1 - tail, as a writer expects.

    columns  of the block, as stored
    Returns  SparseRows
    """
    nnz_T = columns["nnz"].astype(np.int64)
    first_T = np.concatenate(([0], np.cumsum(nnz_T)))
    rows = codec.gather_rows(meta, columns, first_T, slice(0, len(nnz_T)))
    is_kept_E = _largest(columns["weights"], nnz_T, top_n)
    kept, dropped = np.flatnonzero(is_kept_E), np.flatnonzero(~is_kept_E)
    kept_T = np.minimum(nnz_T, top_n)
    dropped_T = np.bincount(np.repeat(np.arange(len(nnz_T)), nnz_T - kept_T), rows.weights[dropped], len(nnz_T))
    tail_T = np.minimum(rows.tail, _LARGEST_TAIL, dtype=np.float64)
    whole_T = 1 - tail_T
    indptr = np.concatenate(([0], np.cumsum(kept_T)))
    weights = rows.weights[kept] * np.repeat(whole_T, kept_T)
    return codec.SparseRows(indptr, rows.indices[kept], weights, tail_T + whole_T * dropped_T)


def _largest(codes, nnz_T, top_n):
    """Whether each entry is among the top_n of its row, bool (E); small codes mean large weights.

    Code and place in the row are combined into one number, distinct in its row; the rows are padded to the longest.
    """
    places = np.arange(nnz_T.max(initial=0), dtype=np.uint16)
    if top_n >= len(places):
        return np.ones(len(codes), bool)
    filled = places < nnz_T[:, None]
    keys = np.full(filled.shape, 0xFFFF, np.uint16)
    keys[filled] = codes.astype(np.uint16) << 8 | np.broadcast_to(places, filled.shape)[filled]
    return (keys <= np.partition(keys, top_n - 1, axis=1)[:, top_n - 1 : top_n])[filled]
