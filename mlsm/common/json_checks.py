"""Parse JSON from untrusted sources within limits, and check its types before it is used.

    values = parse_json(raw, path)
    plan = parse_as(values, Plan, path)        # ShardError: path, field, what was expected, what was found
    problem = find_problem(values, State)     # the same in words, for callers with errors of their own

A type is anything that msgspec converts to: a Struct, a TypedDict, or one of the annotated types here. A correct
checksum does not make a file's content valid. So plans, records, targets, dictionaries, checkpoints and evaluation
records are all checked here when they are read. Numbers must be finite and fit into 64 bits; true and false do not
count as numbers. Not handled here: rules between fields, which the readers check after this.
"""

import json
import math
import re
import sys
from collections.abc import Mapping
from typing import Annotated, Any, NotRequired, TypedDict, TypeVar

import msgspec
from msgspec import Meta

from mlsm.common.errors import ShardError

T = TypeVar("T")
MAX_DEPTH = 64  # of nested brackets; this project's files have fewer than ten
LARGEST = 2**63 - 1  # the largest int64
_NOT_UNICODE = "expected texts of Unicode, found half of a surrogate pair"
_SHOWN = 60  # of the characters of a wrong value
_PLAIN_NAME, _DIGITS_64, _DIGITS_32 = r"\A\w[\w.-]{0,199}\Z", r"\A[0-9a-f]{64}\Z", r"\A[0-9a-f]{32}\Z"

Count = Annotated[int, Meta(ge=0, le=LARGEST)]
Number = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Text = Annotated[str, Meta(min_length=1)]
Name = Annotated[str, Meta(pattern=_PLAIN_NAME)]
Digest = Annotated[str, Meta(pattern=_DIGITS_64)]
Fingerprint = Annotated[str, Meta(pattern=_DIGITS_32)]

_WORDS = {  # msgspec's words -> ours
    f"`str` matching regex {_PLAIN_NAME!r}": "a plain name (letters, digits, '._-'), nothing outside its own directory",
    f"`str` matching regex {_DIGITS_64!r}": "64 hexadecimal digits",
    f"`str` matching regex {_DIGITS_32!r}": "32 hexadecimal digits",
    "`str` of length >= 1": "text",
    "`array` of length >= 1": "a list with something in it",
    "`int` >= 0": "a whole number from 0",
    "`int` <= 9223372036854775807": "a whole number of 64 bits",
    f"`float` >= {-sys.float_info.max!r}": "a finite number",
    f"`float` <= {sys.float_info.max!r}": "a finite number",
}
_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "object": "an object",
    "array": "a list",
    "null": "null",
}


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


def parse_as(values: object, kind: type[T], where: object) -> T:
    """The values as an object of a type. Raises ShardError, which names file and field, if they do not fit the type."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise ShardError(f"{where}: {_describe(str(error), values)}") from None
    except UnicodeEncodeError:
        raise ShardError(f"{where}: {_NOT_UNICODE}") from None


def find_problem(values: object, kind: Any, place: str = "") -> str | None:
    """Describe what is wrong with some values, naming the field; None if they fit the type.

    Fields that a TypedDict does not name are not checked.
    """
    try:
        msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        return _describe(str(error), values, place)
    except UnicodeEncodeError:
        return _NOT_UNICODE
    return None


def object_of(fields: Mapping[str, Any]) -> Any:
    """The type of objects with these fields, name to type; `NotRequired[...]` for one that may be absent."""
    return TypedDict("Fields", dict(fields))  # type: ignore[operator]


def within(least: int, most: int) -> Any:
    """The type of whole numbers in a range."""
    return Annotated[int, Meta(ge=least, le=most)]


def one_of(*values: str) -> Any:
    """The type of texts that are one of these words."""
    return Annotated[str, Meta(pattern=rf"\A({'|'.join(values)})\Z")]


def optional(kind: Any) -> Any:
    """The same type, for a field that may be absent."""
    return NotRequired[kind]


def is_number(value: Any) -> bool:
    """Whether a value is a finite number that a float can hold. true and false do not count as numbers."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # false for NaN


def is_count(value: Any) -> bool:
    """Whether a value is a whole number from 0 that 64 bits hold."""
    return type(value) is int and 0 <= value <= LARGEST


def _describe(message, values, place=""):
    """Rewrite a message of msgspec as one line in our words: "<what was wrong> - at `$.units[3].start`"."""
    text, _, path = message.partition(" - at ")
    found, field = values, place.removesuffix(".")
    for name, index in re.findall(r"\.([^.\[\]`]+)|\[(\d+|\.\.\.)\]", path):
        if index == "...":  # some key of an object that allows any keys
            found = next((value for value in _values(found) if not is_number(value)), found)
            continue
        found = found[name] if name else found[int(index)]
        field += (f".{name}" if field else name) if name else f"[{index}]"
    if match := re.fullmatch(r"Object (missing required|contains unknown) field `(.*)`", text):
        inner = f"{field}.{match[2]}" if field else match[2]
        known = "is missing, expected a value" if match[1].startswith("missing") else "is not known here"
        return f"field {inner} {known}"
    expected = text.removeprefix("Expected ").partition(", got ")[0]
    if text == "Number out of range":
        expected = "a finite number"
    elif match := re.search(r"regex '.*A\((.*)\).*Z'$", expected):
        expected = " or ".join(match[1].split("|"))
    expected = _WORDS.get(expected) or re.sub(r"`([^`]*)`", _in_words, expected)
    return f"{f'field {field}: ' if field else ''}expected {expected}, found {_shown(found)}"


def _in_words(match):
    return " or ".join(_TYPES.get(name, name) for name in match[1].split(" | "))


def _values(found):
    return found.values() if isinstance(found, dict) else ()


def _shown(found):
    shown = repr(found)
    return shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."


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
