"""Bytes of a stored token, and what they lose: ours against the published formats of other distillation caches.

    python -m benchmarks.rivals_targets

Two kinds of distributions, n = 50 and 128 entries: the bundled teacher's over its 30,522 words at 8,192 tokens of the
bundled text, and the LSP codes of the bench states (3,072 atoms, lambda 0.05), left out without the bench data. Each
format is really written, from the same rows:

- ours          the project's own writer, blocks of 65,536 tokens (the rows again and again): indices of 12, 16 or 32
                bits, an 8-bit weight; a token's id, count and tail
- DistillKit    Parquet of two columns of bytes: indices of as many bits as the vocabulary needs; the first
                log-probabilities as bfloat16, the others as a polynomial of the rank, fitted for each token. Of its
                README the setting recommended, k = 128, and the "budget pick", k = 50. arcee-ai/DistillKit:
                distillkit/compression/config.py at 897bd134 (total_bits), distillkit/sample_common.py at 40198e11 (the
                schema), README.md at 43f6e1be; the fit follows distillkit/compression/monotonic_logprobs.py
- Megatron-LM   a tar of torch.save under zstd (level 3): float16 log-probability, uint16 and a bool byte, five bytes an
                entry before zstd. NVIDIA/Megatron-LM: megatron/training/distillation/logits_saver.py at 0e099c76,
                utils_logits.py at 059030bd

`payload` is what a format's rule counts for n entries of a token, without headers, ids and compression.
`bytes_per_token` is what the files take; sums of a unit of ours are spread over a million tokens. Ids: ours has them in
two bytes, DistillKit in Parquet as uint64, Megatron not (its data set has them). `kl` is KL(kept || stored) in nats,
both divided by their sums: what quantising alone loses.

A row of DistillKit has exactly n entries, a code fewer: of LSPs its payload is given, and nothing is written. Left out:
time (benchmarks.pack and shard_reader have ours). Prints a table in Markdown, and JSON as its last line.

Shapes: T tokens, n entries, by falling weight; an entry that is none has weight 0 and index -1.
"""

import io
import json
import lzma
import math
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.data import conditions, has_bench_data, require
from benchmarks.shard_bytes import divergence, read_rows, size_of_columns
from benchmarks.stores import MAX_LENGTH, K, real_codes, row_columns, window_columns, write_store
from pipeline.corpus import BUNDLED_TEXT
from pipeline.targets.distributions import Distributions, distributions
from pipeline.targets.logits import most_probable
from pipeline.teacher import load_tokenizer, special_ids
from pipeline.teacher.masked_lm import HEAD_ROWS, MaskedLm
from shards.reader import Store
from shards.schema import BLOCK_TOKENS, index_bits

WINDOWS, ENTRIES = 64, (50, 128)
MICRO_BATCH, ABSENT, LEVEL = 8, -1e4, 3  # of Megatron: windows, log-probability where there is no entry, level of zstd
NAMES = {"ours": "ours", "distillkit": "DistillKit", "megatron": "Megatron-LM"}


class Polynomial(NamedTuple):
    """A setting of DistillKit's compressor: entries, how many of them are exact, and the terms fitted to the others."""

    k: int
    exact: int
    terms: tuple


DISTILLKIT = {50: Polynomial(50, 1, (0, 1, 0.5)), 128: Polynomial(128, 16, (0, 1, 2, 3, 4, 0.5))}


def main():
    require("pyarrow", "pyarrow")
    teacher, ids_T = MaskedLm.load("bundled"), text_ids(WINDOWS)
    rows = [measure("logits", n, teacher.vocabulary, teacher_rows(teacher, ids_T, n), ids_T) for n in ENTRIES]
    if has_bench_data():
        codes = real_codes()
        rows += [measure("lsp", n, K, distributions(codes, n)) for n in ENTRIES]
    else:
        print("LSP codes are left out: set MLSM_DATA to the directory that contains bench/")
    result = {"benchmark": "rivals_targets", "rows": rows}
    print(markdown(result))
    print(json.dumps(result | conditions("pyarrow")))


def measure(kind, n, vocabulary, rows, ids_T=None):
    """Bytes and loss of the same rows in every format; without ids they are made up."""
    figures = {name: {"payload": payload(name, n, vocabulary)} for name in NAMES}
    figures["ours"] |= measure_ours(rows, {} if ids_T is None else {"ids": ids_T}, kind=kind, k=vocabulary, top_n=n)
    weights_Tn, indices_Tn = by_rank(rows, n)
    with np.errstate(divide="ignore"):
        log_Tn = torch.from_numpy(np.where(weights_Tn > 0, np.log(weights_Tn), ABSENT)).half()
    files = {"megatron": (megatron_file(log_Tn, indices_Tn), log_Tn.double().exp().numpy())}
    if kind == "logits":
        values_Tb, stored_Tn = fit(weights_Tn, DISTILLKIT[n])
        packed_Tb = pack_bits(indices_Tn, math.ceil(math.log2(vocabulary)))
        files["distillkit"] = distillkit_file(values_Tb, packed_Tb, ids_T), stored_Tn
    for name, (file, stored_Tn) in files.items():
        figures[name] |= {"bytes_per_token": len(file) / len(rows), "kl": lost(weights_Tn, stored_Tn)}
    shape = {"kind": kind, "n": n, "vocabulary": vocabulary, "tokens": len(rows)}
    return shape | {"entries": float(np.diff(rows.indptr).mean()), "mass_kept": float(1 - rows.tail.mean())} | figures


def payload(name, n, vocabulary):
    """Bytes of n entries of a token by a format's rule."""
    if name == "ours":
        return math.ceil(n * index_bits(vocabulary) / 8) + n + 2  # weights; count and tail
    if name == "megatron":
        return 5 * n
    setting = DISTILLKIT[n]
    return 2 * setting.exact + 4 * len(setting.terms) + math.ceil(n * math.ceil(math.log2(vocabulary)) / 8)


# -- rows ------------------------------------------------------------------------------------------------


def text_ids(windows):
    """Token ids of so many windows of the bundled text."""
    tokenizer = load_tokenizer("bundled")
    special, inner = special_ids(tokenizer), MAX_LENGTH - 2
    with lzma.open(BUNDLED_TEXT, "rt", encoding="utf-8") as file:
        text = file.read(12 * MAX_LENGTH * windows)  # more than enough characters
    ids_WL = np.array(tokenizer.encode(text, add_special_tokens=False, verbose=False)[: inner * windows]).reshape(
        windows, inner
    )
    return np.pad(ids_WL, ((0, 0), (1, 1)), constant_values=((0, 0), (special["cls"], special["sep"]))).ravel()


@torch.inference_mode()
def teacher_rows(teacher, ids_T, n):
    """The n most probable words at every token, special tokens included: the rows alone are measured."""
    hidden_Td = teacher(torch.from_numpy(ids_T).view(-1, MAX_LENGTH)).reshape(len(ids_T), -1)
    parts = [most_probable(teacher.logits(rows), n)[:3] for rows in hidden_Td.split(HEAD_ROWS)]
    indices_Tn, weights_Tn, tail_T = (torch.cat(part).numpy() for part in zip(*parts, strict=True))
    kept_Tn = weights_Tn > 0
    indptr = np.concatenate([np.zeros(1, np.int64), kept_Tn.sum(1)]).cumsum()
    return Distributions(indptr, indices_Tn[kept_Tn].astype(np.int32), weights_Tn[kept_Tn], tail_T, 0)


def by_rank(rows, n):
    """Weights and indices of every token, the heaviest first; where there is no entry, 0 and -1."""
    row_E, place_E = np.repeat(np.arange(len(rows)), np.diff(rows.indptr)), np.arange(rows.indptr[-1])
    place_E -= rows.indptr[row_E]
    weights_Tn, indices_Tn = np.zeros((len(rows), n), np.float32), np.full((len(rows), n), -1, np.int64)
    weights_Tn[row_E, place_E], indices_Tn[row_E, place_E] = rows.weights, rows.indices
    order_Tn = np.argsort(-weights_Tn, axis=1, kind="stable")
    return np.take_along_axis(weights_Tn, order_Tn, 1), np.take_along_axis(indices_Tn, order_Tn, 1)


def lost(weights_Tn, stored_Tn):
    """Mean KL(kept || stored) in nats, of rows that are divided by their sums."""
    p_Tn, q_Tn = (each / each.sum(1, keepdims=True) for each in (weights_Tn.astype(float), stored_Tn.astype(float)))
    is_kept = p_Tn > 0
    return float((p_Tn[is_kept] * np.log(p_Tn[is_kept] / q_Tn[is_kept])).sum() / len(p_Tn))


# -- formats ---------------------------------------------------------------------------------------------


def measure_ours(rows, ids, **target):
    """Bytes in a full block, where headers weigh what they weigh in a store."""
    with tempfile.TemporaryDirectory() as directory:
        copies = BLOCK_TOKENS // len(rows)
        once, often = (write_ours(Path(directory) / str(n), rows, ids, n, target) for n in (1, copies))
        size = size_of_columns(often) / (copies * len(rows))
        return {"bytes_per_token": size, "kl": divergence(rows, read_rows(once))}


def write_ours(path, rows, ids, copies, target):
    columns = window_columns(copies * len(rows)) | row_columns(rows, copies)
    columns |= {name: np.tile(column, copies) for name, column in ids.items()}
    return Store.open(write_store(path, columns, units=1, blocks=1, **target).path)


def distillkit_file(values_Tb, packed_Tb, ids_T):
    """One Parquet file, a row a window."""
    import pyarrow
    import pyarrow.parquet

    windows = np.arange(0, len(ids_T) + 1, MAX_LENGTH, dtype=np.int32)
    columns = {"input_ids": pyarrow.ListArray.from_arrays(windows, ids_T.astype(np.uint64))}
    for name, bytes_Tb in (("compressed_logprobs", values_Tb), ("bytepacked_indices", packed_Tb)):
        tokens = np.arange(0, bytes_Tb.size + 1, bytes_Tb.shape[1], dtype=np.int32)
        of_tokens = pyarrow.ListArray.from_arrays(tokens, bytes_Tb.ravel())
        columns[name] = pyarrow.ListArray.from_arrays(windows, of_tokens)
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


def fit(weights_Tn, setting):
    """The bytes of every token's weights, and the weights that a reader makes of them."""
    log_Tn = np.log(np.maximum(weights_Tn, np.finfo(np.float32).tiny))
    exact = torch.from_numpy(log_Tn[:, : setting.exact]).bfloat16()
    rank_m = np.arange(setting.k - setting.exact, dtype=np.float64)
    terms_mp = np.stack([rank_m**power for power in setting.terms], 1)
    found_pT = np.linalg.lstsq(terms_mp, log_Tn[:, setting.exact :].T.astype(np.float64), rcond=None)[0]
    found_Tp = np.ascontiguousarray(found_pT.T, np.float32)
    bytes_Tb = np.hstack([exact.view(torch.uint8).numpy(), found_Tp.view(np.uint8)])
    return bytes_Tb, np.exp(np.hstack([exact.double().numpy(), found_Tp @ terms_mp.T]))


def pack_bits(indices_Tn, bits):
    """Every token's indices, one after the other without gaps, in whole bytes."""
    bits_Tnb = indices_Tn[:, :, None] >> np.arange(bits) & 1
    return np.packbits(bits_Tnb.reshape(len(indices_Tn), -1).astype(bool), axis=1)


def megatron_file(log_Tn, indices_Tn):
    """One tar: a member for each micro-batch, of tensors (length, windows, n)."""
    import pyarrow

    codec, file = pyarrow.Codec("zstd", compression_level=LEVEL), io.BytesIO()
    low_Tn, high_Tn = torch.from_numpy(indices_Tn & 0xFFFF).to(torch.uint16), torch.from_numpy(indices_Tn >> 16 & 1 > 0)
    tables = {"values": log_Tn, "indices_low": low_Tn, "bit_17": high_Tn}
    with tarfile.open(fileobj=file, mode="w") as tar:
        for first in range(0, len(log_Tn), MICRO_BATCH * MAX_LENGTH):
            saved = io.BytesIO()
            batch = {name: table[first : first + MICRO_BATCH * MAX_LENGTH] for name, table in tables.items()}
            shape = -1, MAX_LENGTH, log_Tn.shape[1]
            torch.save({name: [part.view(shape).transpose(0, 1).contiguous()] for name, part in batch.items()}, saved)
            data = codec.compress(saved.getvalue(), asbytes=True)
            member = tarfile.TarInfo(f"{first // (MICRO_BATCH * MAX_LENGTH)}.pt.zst")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return file.getvalue()


def markdown(result):
    """The table of a result, for docs/benchmarks.md."""
    lines = ["| stored | entries found | " + " | ".join(NAMES.values()) + " |", "|---|---|---|---|---|"]
    for row in result["rows"]:
        cells = [f"{row['n']} of {row['vocabulary']:,} {'words' if row['kind'] == 'logits' else 'LSPs'}"]
        cells.append(f"{row['entries']:.1f}")
        for found in (row[name] for name in NAMES):
            sizes = f"{found['bytes_per_token']:.1f}, {found['kl']:.0e}" if "kl" in found else "not written"
            cells.append(f"{sizes} ({found['payload']})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
