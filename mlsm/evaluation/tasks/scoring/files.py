"""Files of sentences and of minimal pairs, as lists.

    material = read(Path("reviews.csv.gz"), text_field="review")        # material.rows: [("A fine film.",), ...]
    material = read(Path("crows_pairs_anonymized.csv"), pairs=True)     # material.rows: [(sent_more, sent_less), ...]

A row is a sentence, or a pair whose first sentence should score higher. Blank lines and white space around sentences
are ignored. Anything else that is not a sentence is an error with file and line. Not supported: Parquet, directories,
and files that do not fit in memory.
"""

import csv
import hashlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mlsm.common.errors import ScoringError
from mlsm.evaluation.tasks.scoring.config import TEXT_FIELD
from pipeline.corpus.source import JSON_LINES, how_to_read, reading, suffix_of

PAIR_COLUMNS = (("good", "bad"), ("sentence_good", "sentence_bad"), ("sent_more", "sent_less"))


class Material(NamedTuple):
    """The content of a file."""

    rows: list[tuple[str, ...]]
    """(sentence,), or (good, bad)"""
    columns: tuple[str, ...]
    """the file's column names; for plain text, the default names"""
    digest: str
    """hex SHA-256 of the rows"""


def read(path: Path, text_field: str = TEXT_FIELD, pairs: bool = False) -> Material:
    """Read a file of sentences, or of minimal pairs.

    path    CSV (.csv), JSON lines (.jsonl, .json, .ndjson) or text with one sentence on each line (any other name,
            except .tsv)
    Raises  ScoringError, which names file, line and what was expected; CorpusError if the file cannot be read
    """
    with reading(path) as file:
        raw = file.read()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ScoringError(f"{path}, line {line}: not UTF-8. {how_to_read(raw)}") from None
    kind = suffix_of(path)
    if kind not in (".csv", *JSON_LINES) and (kind == ".tsv" or text_field != TEXT_FIELD):
        instead = "rename it to .txt" if kind == ".tsv" else "omit --text-field"
        raise ScoringError(
            f"{path}: columns are read from CSV and JSON lines (.csv, .jsonl), and other files as one sentence on each "
            f"line. Convert it to CSV, or {instead} if its lines are sentences."
        )
    if kind == ".csv":
        records = _csv_records(path, text)
    elif kind in JSON_LINES:
        records = _json_records(path, text)
    elif pairs:
        raise ScoringError(
            f"{path}: --pairs takes CSV or JSON lines, recognised by the file extension: pairs.csv or pairs.jsonl."
        )
    else:
        records = ((number, {text_field: line}) for number, line in enumerate(text.split("\n"), 1) if line.strip())
    choices: tuple[tuple[str, ...], ...] = PAIR_COLUMNS if pairs else ((text_field,),)
    columns: tuple[str, ...] = ()
    rows = []
    for number, record in records:
        columns = columns or next((names for names in choices if all(name in record for name in names)), ())
        row = tuple(record.get(name) for name in columns)
        if not row or not all(isinstance(sentence, str) and sentence.strip() for sentence in row):
            expected = " or ".join(" and ".join(names) for names in ([columns] if columns else choices))
            names_it = "" if pairs else " Name the column of sentences with --text-field."
            if columns and all(isinstance(sentence, str) for sentence in row):
                names_it = " It is empty there: remove the row."
            raise ScoringError(
                f"{path}, line {number}: expected sentences in {expected}, found"
                f" {json.dumps(record, ensure_ascii=False):.120}.{names_it}"
            )
        rows.append(tuple(sentence.strip() for sentence in row if isinstance(sentence, str)))
    if not rows:
        raise ScoringError(f"{path} has no {'pairs' if pairs else 'sentences'}. Pass another file.")
    return Material(rows, columns, hashlib.sha256(json.dumps(rows).encode()).hexdigest())


def _csv_records(path: Path, text: str) -> Iterator[tuple[int, dict]]:
    """Line numbers and records of a CSV file with a header."""
    lines = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        for record in lines:
            if any(behind := record.pop(None, ())):
                raise ScoringError(
                    f"{path}, line {lines.line_num}: expected as many fields as in the header, found "
                    f"{json.dumps(behind, ensure_ascii=False):.120} after them. Put a sentence that contains a comma "
                    "into quotation marks."
                )
            yield lines.line_num, {name: value for name, value in record.items() if name}
    except csv.Error as error:
        place = f"{path}, after line {lines.line_num}"
        raise ScoringError(f"{place}: expected CSV: {error}. Save the file again.") from None


def _json_records(path: Path, text: str) -> Iterator[tuple[int, dict]]:
    """Line numbers and records of JSON lines."""
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            json.dumps(record, ensure_ascii=False).encode()  # ValueError on a lone surrogate, which JSON can contain
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise ScoringError(
                f"{path}, line {number}: expected a JSON object of whole characters on each line, found {line[:60]!r}."
            )
        yield number, record
