"""Reads JSON files that anybody may have written: parsed within limits, and every field checked for its kind.

    values = parse_json(raw, path)
    require(values, RECORD, path)                # ShardError: path, field, what was expected, what was found

A checksum only says that a file is as somebody wrote it. So the readers of plans, records, targets, dictionaries,
checkpoints and evaluation records compare each field with a table before anything is computed or allocated from it.
The tables of what the shards package reads are here; other packages keep their own beside their readers and use
`parse_json` and `find_problem`. Left out: checksums and fingerprints (manifest.py), how files relate (verify.py).
"""

import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from common.errors import ShardError
from shards.schema import BLOCK_TOKENS, MAX_OCTAVES

MAX_DEPTH = 64  # brackets inside one another; the files of this project have fewer than ten
MAX_WIDTH = 1 << 24  # of a vocabulary, or LSPs: ten times the largest that there are; arrays are made of this size
MOST_WIDTH = 1 << 16  # of a hidden state: a row of a block, for which readers make arrays
_LARGEST = 2**63 - 1  # what an int64 holds
_SHOWN = 60  # characters of a wrong value


class Kind(NamedTuple):
    """What a field may hold."""

    holds: Callable
    """called with the value; whether it is of this kind"""
    expected: str
    """the same in words"""
    required: bool = True
    """whether the field must be there"""
    fields: dict | None = None
    """of an object, or of each object of a list: the table for what is inside"""


def parse_json(raw: str | bytes | bytearray | memoryview, where: object) -> Any:
    """The value of a JSON text.

    raw     bytes or text
    where   the file, for the error
    Raises  ShardError when it is not JSON, and when it holds NaN, infinities, numbers of thousands of digits, lone
            surrogates (except those by which Python carries the bytes of a file name that is not UTF-8) or brackets
            nested more than MAX_DEPTH deep
    """
    try:
        text = raw if isinstance(raw, str) else str(raw, "utf-8")
        value = _decoder.decode(text)
        if text.count("[") + text.count("{") > MAX_DEPTH and _is_deep(value):
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogateescape")  # refuses other lone surrogates
    except RecursionError:
        problem = f"it is nested more than {MAX_DEPTH} deep"
    except ValueError as error:
        problem = str(error)
    else:
        return value
    raise ShardError(f"{where}: not readable as JSON ({problem})")


def require(values: object, fields: Mapping[str, Kind], where: object) -> None:
    """Raise ShardError, naming file and field, unless `values` is an object that the table describes."""
    problem = find_problem(values, fields)
    if problem is not None:
        raise ShardError(f"{where}: {problem}")


def find_problem(values: Any, fields: Mapping[str, Kind], place: str = "") -> str | None:
    """What is wrong with an object, in words that name the field; None when it is as the table says.

    Fields that the table does not name are not looked at.
    """
    if type(values) is not dict:
        return _problem(place.rstrip("."), "an object", values)
    for name, kind in fields.items():
        if name not in values:
            if kind.required:
                return f"field {place}{name} is missing, expected {kind.expected}"
            continue
        value = values[name]
        if not kind.holds(value):
            return _problem(place + name, kind.expected, value)
        if value is not None and kind.fields is not None and not (kind.fields is _GROUP and _are_groups(value)):
            for number, item in enumerate(value if type(value) is list else [value]):
                at = f"[{number}]" if type(value) is list else ""
                if problem := find_problem(item, kind.fields, f"{place}{name}{at}."):
                    return problem
    return None


def _problem(field, expected, found):
    shown = repr(found)
    shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."
    return f"{'field ' + field + ': ' if field else ''}expected {expected}, found {shown}"


def _finite(text):
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:_SHOWN]} is too large")
    return value


def _refuse_constant(name):
    raise ValueError(f"{name} is not a number in JSON")


_decoder = json.JSONDecoder(parse_float=_finite, parse_constant=_refuse_constant)


def _is_deep(value):
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [outer for outer in level if type(outer) in (dict, list)]
        if not level:
            return False
        level = [inner for outer in level for inner in (outer.values() if type(outer) is dict else outer)]
    return True


# -- kinds ------------------------------------------------------------------------------------------------


def is_number(value: Any) -> bool:
    """Whether a value is a finite number that a float can hold. true and false do not count as numbers."""
    return type(value) in _NUMBERS and abs(value) <= sys.float_info.max  # of NaN this is not true


def is_count(value: Any) -> bool:
    """Whether a value is a whole number from 0 that 64 bits hold."""
    return type(value) is int and 0 <= value <= _LARGEST


def within(least: int, most: int) -> Kind:
    """The kind of whole numbers in a range."""
    return Kind(lambda value: type(value) is int and least <= value <= most, f"a whole number from {least} to {most:,}")


def optional(kind: Kind) -> Kind:
    """The same kind, for a field that may be absent."""
    return kind._replace(required=False)


def or_null(kind: Kind) -> Kind:
    """The same kind, or null."""
    return kind._replace(holds=lambda value: value is None or kind.holds(value), expected=f"{kind.expected} or null")


def objects(fields: dict[str, Kind], expected: str) -> Kind:
    """The kind of lists of objects that a table describes."""
    return Kind(lambda value: type(value) is list, expected, fields=fields)


def _matching(pattern):
    matches = re.compile(pattern).fullmatch
    return lambda value: type(value) is str and matches(value) is not None


COUNT = Kind(is_count, "a whole number from 0")
NUMBER = Kind(is_number, "a finite number")
TEXT = Kind(lambda value: type(value) is str, "text")
OBJECT = Kind(lambda value: type(value) is dict, "an object")
COUNTS = Kind(lambda value: type(value) is list and all(map(is_count, value)), "a list of whole numbers from 0")
NAME = Kind(_matching(r"\w[\w.-]{0,199}"), "a plain name (letters, digits, '._-'), nothing outside its own directory")
DIGEST = Kind(_matching("[0-9a-f]{64}"), "64 hexadecimal digits")
FINGERPRINT = Kind(_matching("[0-9a-f]{32}"), "32 hexadecimal digits")


# -- tables -----------------------------------------------------------------------------------------------

_NUMBERS = {int, float}
_HEXADECIMAL = re.compile("[0-9a-f]*").fullmatch


def _are_statistics(value):
    if type(value) is not dict or not is_count(value.get("documents")):
        return False
    histogram = value.get("nnz_histogram")
    if histogram is not None:
        if type(histogram) is not list or len(histogram) != 256 or set(map(type, histogram)) != {int}:
            return False
        if not 0 <= min(histogram) <= max(histogram) <= _LARGEST:
            return False
    return all(is_number(entry) for name, entry in value.items() if name != "nnz_histogram")


_WINDOWING = {
    "tokenizer": optional(TEXT),
    "packing": optional(TEXT),
    "max_length": optional(COUNT),
}
_QUANTISE = {
    "name": Kind(lambda value: value in ("int8", "pq"), "int8 or pq"),
    "bytes": optional(within(1, 255)),
    "codebook": optional(DIGEST),
}
SETTINGS = {
    "kind": optional(Kind(lambda value: value in ("ids", "lsp", "logits", "hidden"), "ids, lsp, logits or hidden")),
    "format": optional(COUNT),
    "windowing": optional(OBJECT._replace(fields=_WINDOWING)),
    "teacher": optional(TEXT),
    "layer": optional(COUNT),
    "dictionary": optional(TEXT),
    "k": optional(COUNT),
    "lam": optional(NUMBER),
    "tolerance": optional(NUMBER),
    "solver": optional(OBJECT._replace(fields={"name": TEXT, "steps": optional(COUNT)})),
    "masked_passes": optional(COUNT),
    "dtype": optional(TEXT),
    "top_n": optional(Kind(lambda value: value == "all" or is_count(value), "a whole number or 'all'")),
    "derived_from": optional(FINGERPRINT),
    "width": optional(within(1, MOST_WIDTH)),
    "quantise": optional(OBJECT._replace(fields=_QUANTISE)),
    "hidden": optional(OBJECT._replace(fields={"target": FINGERPRINT, "quantise": OBJECT._replace(fields=_QUANTISE)})),
}
_SPECIAL_IDS = dict.fromkeys(("cls", "sep", "mask", "pad"), COUNT) | {"all": COUNTS}
TARGET = {
    "target": FINGERPRINT,
    "settings": OBJECT._replace(fields=SETTINGS),
    "lineage": OBJECT,
    "k": within(0, MAX_WIDTH),
    "vocab_size": within(1, MAX_WIDTH),
    "max_length": within(1, 65_535),
    "weight_octaves": within(1, MAX_OCTAVES),
    "special_ids": OBJECT._replace(fields=_SPECIAL_IDS),
}
PLAN = {
    "plan": FINGERPRINT,
    "windowing": OBJECT._replace(fields=_WINDOWING),
    "corpus": OBJECT,
    "units": objects(
        {
            "id": NAME,
            "split": NAME,
            "source": TEXT,
            "start": COUNT,
            "stop": COUNT,
            "offset": optional(COUNT),
            "max_windows": optional(or_null(COUNT)),
            "dropped": optional(TEXT),
        },
        "a list of units",
    ),
}
_BLOCK_COUNT = within(0, BLOCK_TOKENS)
_GROUP = {
    "name": NAME,
    "offset": COUNT,
    "length": COUNT,
    "sha256": DIGEST,
    "windows": optional(_BLOCK_COUNT),
    "tokens": optional(_BLOCK_COUNT),
}


def _are_groups(groups):
    """Whether a list is of what _GROUP says, looked at as a whole, because a record has twenty of them, and opening a
    store reads thousands of records. When it is not, the table tells why."""
    try:
        sizes = [group["offset"] for group in groups] + [group["length"] for group in groups]
        counts = [group.get("windows", 0) for group in groups] + [group.get("tokens", 0) for group in groups]
        names, hashes = [group["name"] for group in groups], [group["sha256"] for group in groups]
        return (
            set(map(type, sizes)) | set(map(type, counts)) <= {int}
            and 0 <= min(sizes) <= max(sizes) <= _LARGEST
            and 0 <= min(counts) <= max(counts) <= BLOCK_TOKENS
            and set(map(len, hashes)) == {64}
            and _HEXADECIMAL("".join(hashes)) is not None
            and all(map(NAME.holds, names))
        )
    except (KeyError, TypeError, AttributeError, ValueError):
        return False


RECORD = {
    "unit": NAME,
    "target": TEXT,
    "file": TEXT,
    "bytes": COUNT,
    "sha256": DIGEST,
    "windows": COUNT,
    "tokens": COUNT,
    "groups": objects(_GROUP, "a list of member groups"),
    "statistics": Kind(_are_statistics, "an object of numbers with 'documents'"),
    "environment": Kind(
        lambda value: type(value) is dict and all(is_number(value[key]) for key in value if key.endswith("_seconds")),
        "an object whose '..._seconds' are numbers",
    ),
    "quarantined": optional(
        objects({"record": COUNT, "source": TEXT, "windows": COUNTS, "reason": TEXT}, "a list of documents")
    ),
}
DICTIONARY = {
    "format": COUNT,
    "fingerprint": DIGEST,
    "shape": Kind(
        lambda value: type(value) is list and len(value) == 2 and all(type(n) is int and n > 0 for n in value),
        "the number and width of the atoms",
    ),
    "stopped": TEXT,
    "settings": OBJECT,
    "history": objects({"objective": NUMBER}, "a list of evaluations"),
}


def check_groups(record: Mapping, where: object) -> None:
    """Raise ShardError unless the member groups in a record lie inside the shard. The record must fit its table.

    A block's windows and tokens are bounded by its bytes, because a reader allocates memory for as many.
    """
    groups = record["groups"]
    ends = [group["name"] for group in groups if "windows" not in group]
    if ends != ["__meta__", "__stats__"] or (groups[0]["name"], groups[-1]["name"]) != ("__meta__", "__stats__"):
        raise ShardError(f"{where}: field groups: expected __meta__, then blocks, then __stats__")
    for group in groups:
        name, length, windows, tokens = group["name"], group["length"], group.get("windows", 0), group.get("tokens", 0)
        if group["offset"] + length > record["bytes"]:
            raise ShardError(f"{where}: field groups: {name} lies beyond the {record['bytes']:,} bytes of the shard")
        if ("windows" in group) != ("tokens" in group) or windows > tokens or 2 * (windows + tokens) > length:
            raise ShardError(
                f"{where}: field groups: {name} of {length:,} bytes cannot hold {windows} windows of {tokens} tokens"
            )
