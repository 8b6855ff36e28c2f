"""The same documents as every kind of source, and how to read them back."""

import bz2
import gzip
import json
import lzma

import pyarrow
from pyarrow import parquet

from pipeline.corpus import open_corpus

KINDS = [
    *("a.txt", "a.txt.gz", "a.txt.xz", "a.txt.bz2", "a.txt.zst"),
    *("a.jsonl", "a.json.gz", "a.jsonl.zst", "a.parquet"),
]
LINES_AS_RECORDS = [kind for kind in KINDS if ".txt" not in kind]


def zstd(data):
    return pyarrow.compress(data, "zstd", asbytes=True)


COMPRESS = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress, ".zst": zstd}


def write(directory, kind, texts, rows=10):
    """A file of the kind with these texts, str or, for Parquet, bytes as well; returns its path."""
    path = directory / kind
    if kind.endswith(".parquet"):
        text = pyarrow.array([value.encode() if isinstance(value, str) else value for value in texts], pyarrow.binary())
        table = pyarrow.table({"n": range(len(texts)), "text": text.view("string")})
        parquet.write_table(table, path, row_group_size=rows)
        return path
    if ".json" in kind:
        data = "".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(texts))
    else:
        data = "\n\n".join(texts) + "\n"
    return write_bytes(path, data.encode())


def write_bytes(path, data):
    """The bytes under that name, compressed as it says."""
    path.write_bytes(COMPRESS.get(path.suffix, bytes)(data))
    return path


def opened(path, **settings):
    (source,) = open_corpus((str(path),), **settings)
    return source


def documents(source, **where):
    """Whole documents by record number."""
    return joined(source.pieces(**where))


def joined(pieces):
    whole = {}
    for piece in pieces:
        whole.setdefault(piece.record, []).append(piece.text)
    return {record: "".join(texts) for record, texts in whole.items()}
