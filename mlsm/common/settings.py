"""One check for settings, wherever they come from: a YAML file, flags, or Python.

    class EncodeConfig:
        def __post_init__(self):
            check(self)                  # types and choices, by the annotations of the fields

    convert(tuple[int, ...], "1e1", text=True)    # (10,): a value as a YAML file has it

A mistake raises a ValueError of one sentence that starts with the flag's name, wherever the value came from. Each
settings class checks the ranges of its numbers itself, with `require`. Flags are read in mlsm/cli/flags.py, recipes in
mlsm/recipes/reading.py.
"""

import dataclasses
import difflib
import numbers
import os
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from operator import is_
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from mlsm.common.disk import follow_no_links_below

_Value = TypeVar("_Value")
WORD = "a word of the command line, not a flag"
Positional = Annotated[_Value, WORD]  # store: Positional[str | None] is STORE on the command line, not --store


def check(settings: Any) -> None:
    """Check the types and choices of a settings dataclass, and convert each field to its annotated type.

    If the annotation is a tuple, a single value becomes a tuple of one; if it is a Path, a string becomes a Path.
    Numbers are not changed, because their JSON is part of the names of stores and runs. Fields with init=False are
    skipped. From then on, this process follows no link when it writes below the directory in the field `output` or
    `run_dir` (mlsm/common/disk.py).

    Raises  ValueError naming the flag, what it takes and what was found
    """
    for field in settable(settings).values():
        value = getattr(settings, field.name)
        converted = convert_field(field, value)
        if converted is not value:
            object.__setattr__(settings, field.name, converted)
    for name in ("output", "run_dir"):
        if (place := getattr(settings, name, None)) is not None:
            follow_no_links_below(place)


def settable(settings: Any) -> dict[str, dataclasses.Field]:
    """The fields of a settings dataclass that can be set, by name. Some of a probe's are fixed."""
    return {field.name: field for field in dataclasses.fields(settings) if field.init}


def revise(settings: _Value, **values: Any) -> _Value:
    """As `dataclasses.replace`, but the recipe and the origins, which are no settings, are kept."""
    revised = dataclasses.replace(settings, **values)  # type: ignore[type-var]
    for name in vars(settings).keys() & {"recipe", "origins"}:
        object.__setattr__(revised, name, getattr(settings, name))
    return revised


def convert_field(field: dataclasses.Field, value: object, text: bool = False) -> Any:
    """Convert a value to the type of a dataclass field. See `convert` for arguments; errors name the flag."""
    value = _as_list(value)
    parts: list | tuple = value if isinstance(value, list | tuple) else (value,)
    if any("\0" in str(part) for part in parts if isinstance(part, str | os.PathLike)):
        raise ValueError(f"{flag_of(field)} must not contain a NUL character, found {value!r}")
    try:
        return convert(field.type, value, text)
    except (ValueError, OverflowError):
        hint = plain_hint(field.type)
        raise ValueError(
            f"{flag_of(field)} takes {type_in_words(hint)}, found {value!r}{_advice(hint, value)}"
        ) from None


def _as_list(value):
    """A column, range, array or generator as a list; anything else as it is."""
    if isinstance(value, str | bytes | list | tuple | Mapping | Set | os.PathLike) or not hasattr(value, "__iter__"):
        return value
    return value.tolist() if hasattr(value, "tolist") else list(value)


def require(settings: Any, name: str, holds: Callable[[Any], bool], rule: str) -> None:
    """Raise ValueError, with the flag's name, if a setting is not None and violates a rule."""
    value = getattr(settings, name)
    if value is not None and not holds(value):
        found = ", ".join(map(str, value)) if isinstance(value, tuple) else value
        raise ValueError(f"--{name.replace('_', '-')} must be {rule}, found {found}")


def require_at_least(settings: Any, least: int, *names: str) -> None:
    """Raise ValueError if one of these settings is not None and below a number."""
    for name in names:
        require(settings, name, lambda value: value >= least, f"at least {least}")


def require_utf8(settings: Any, *names: str) -> None:
    """Raise ValueError if one of these texts came from the terminal in another encoding: tokenizers refuse it."""

    def is_utf8(value):
        return not any("\ud800" <= character <= "\udfff" for character in "".join(value))

    for name in names:
        require(settings, name, is_utf8, "text in UTF-8")


def flag_of(field: dataclasses.Field) -> str:
    """A field's name on the command line: --max-length, --from for the field from_, or STORE if it is positional."""
    return field.name.upper() if is_word(field) else f"--{field.name.rstrip('_').replace('_', '-')}"


def is_word(field: dataclasses.Field) -> bool:
    """Whether a setting is a positional argument on the command line, annotated as Positional."""
    return WORD in getattr(field.type, "__metadata__", ())


def convert(hint: Any, value: object, text: bool = False) -> Any:
    """Convert a value to a type: int, float, bool, str, Path, None, a Literal, a tuple of these, or a union.

    text    whether the value is from a YAML file, which reads 1e5 as a string: then numbers may be written as text, and
            are converted to exactly the annotated type
    Raises  ValueError, without a message, if it is not of that type
    """
    hint = plain_hint(hint)
    kinds = get_args(hint)
    if get_origin(hint) is tuple:
        values = value if isinstance(value, list | tuple) else [value]
        converted = tuple(convert(kinds[0], one, text) for one in values)
        return value if isinstance(value, tuple) and all(map(is_, value, converted)) else converted
    if get_origin(hint) in (Union, UnionType):
        # str is tried last, because every value in a YAML file can be a string.
        for kind in sorted(kinds, key=(str, Path).__contains__):
            with suppress(ValueError, OverflowError):
                return convert(kind, value, text)
    elif get_origin(hint) is Literal:
        if isinstance(value, str) and value in kinds:
            return value
    elif hint in (int, float):
        return _number(hint, value, text)
    elif hint is Path and isinstance(value, str | os.PathLike):
        return Path(os.path.expanduser(value))
    elif hint is str and isinstance(value, os.PathLike) and not text:
        return os.fspath(value)
    elif hint in (bool, str, NoneType) and isinstance(value, hint):
        return value
    raise ValueError


def _number(hint, value, text):
    if isinstance(value, bool) or not isinstance(value, (int, float, str) if text else numbers.Real):
        raise ValueError
    if not isinstance(value, int | float | str):  # NumPy's numbers, which JSON cannot hold
        value = int(value) if isinstance(value, numbers.Integral) else float(value)
    if hint is float:
        return float(value) if text else value
    if isinstance(value, int):
        return value
    if not float(value).is_integer():
        raise ValueError
    return int(float(value))


def plain_hint(hint: Any) -> Any:
    """The annotation without Positional."""
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    return hint


def type_in_words(hint: Any) -> str:
    """The values that a type accepts, in words."""
    hint = plain_hint(hint)
    kinds = get_args(hint)
    if get_origin(hint) is tuple:
        return f"a list, each {type_in_words(kinds[0])}"
    if get_origin(hint) is Literal:
        return f"one of {', '.join(kinds)}" if len(kinds) > 1 else kinds[0]
    if kinds:
        return " or ".join(map(type_in_words, kinds))
    return {
        int: "a whole number",
        float: "a number",
        bool: "a switch, true or false",
        str: "a text (quoted, maybe)",
        Path: "a path",
        NoneType: "null",
    }[hint]


def _advice(hint, value) -> str:
    """Guess what the user meant, as the end of an error message."""
    if isinstance(value, list | tuple) and len(value) == 1:
        with suppress(ValueError, OverflowError):
            convert(hint, value[0])
            return ". Pass the only entry of this list instead."
    choices = _choices(hint)
    for one in value if isinstance(value, list | tuple) else [value]:
        close = difflib.get_close_matches(one, choices, n=1, cutoff=0.4) if isinstance(one, str) else []
        if close and one not in choices:
            return f". Did you mean {close[0]}?"
    with suppress(ValueError, OverflowError):
        if isinstance(value, str):
            convert(hint, value, text=True)
            return ", a text. Omit the quotation marks."
    return ""


def _choices(hint):
    hint = plain_hint(hint)
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [choice for kind in get_args(hint) if kind is not Ellipsis for choice in _choices(kind)]


def plain(settings: Any) -> dict:
    """A settings dataclass as a dict that JSON and YAML can hold."""
    return {
        key: list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value
        for key, value in dataclasses.asdict(settings).items()
    }
