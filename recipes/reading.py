"""Recipes read: a YAML file of settings, by command, to the values of a settings class.

    values = recipe_settings("paper", "encode-lsp", EncodeConfig)

A recipe is one of this directory, by its name, or any YAML file. Left out: flags, and which recipe applies (cli.py).
"""

import dataclasses
from contextlib import suppress
from pathlib import Path
from types import NoneType, UnionType
from typing import Literal, Union, get_args, get_origin


def recipe_settings(recipe, verb, settings_class, is_asked_for):
    """The values that a recipe gives the settings of a command, by field.

    recipe        name of a recipe of this directory, or path of a YAML file
    is_asked_for  whether the recipe was named; then it must speak of the command
    Raises        ValueError on a recipe that is not there or not readable, on settings and types that do not fit
    """
    import yaml  # not at import: --help shall answer at once

    path = _recipe_file(recipe)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"recipe {path}: not readable as YAML: {' '.join(str(error).split())}") from None
    known = names_of(settings_class)
    sections = values if isinstance(values, dict) else {None: values}
    if not all(isinstance(section, dict | None) for section in sections.values()):
        raise ValueError(f"recipe {path}: expected a mapping of settings under each command, such as encode-lsp:")
    if is_asked_for and verb not in sections and not (verb == "learn-dictionary" and "encode-lsp" in sections):
        raise ValueError(f"recipe {path} says nothing of {verb}. It has sections for: {', '.join(map(str, sections))}")
    section = sections.get(verb) or {}
    if verb == "learn-dictionary":  # the part of encode-lsp that it does
        shared = sections.get("encode-lsp") or {}
        section = {key: value for key, value in shared.items() if _field(key) in known} | section
    unknown = sorted(key for key in section if _field(key) not in known)
    if unknown:
        raise ValueError(
            f"recipe {path}: {verb} has no setting {', '.join(unknown)}. It has: {', '.join(sorted(known))}"
        )
    try:
        return {_field(key): _typed(settings_class, _field(key), value) for key, value in section.items()}
    except ValueError as error:
        raise ValueError(f"recipe {path}, {verb}: {error}") from None


def _field(key):
    return key.replace("-", "_")


def _typed(settings_class, name, value):
    """YAML's types to the dataclass's: lists become tuples, strings become paths where a path is meant."""
    hint = next(field.type for field in dataclasses.fields(settings_class) if field.name == name)
    try:
        return _converted(hint, value)
    except (ValueError, OverflowError):
        raise ValueError(f"{name} is {_described(hint)}, found {value!r}") from None


def _converted(hint, value):
    """The value as one of a type; ValueError where it is none."""
    kinds = get_args(hint)
    if get_origin(hint) is tuple:
        return tuple(_converted(kinds[0], one) for one in (value if isinstance(value, list) else [value]))
    if get_origin(hint) in (Union, UnionType):
        for kind in sorted(kinds, key=(str, Path).__contains__):    # a text is the last that a string can be
            with suppress(ValueError):
                return _converted(kind, value)
    elif get_origin(hint) is Literal:
        if isinstance(value, str) and value in kinds:
            return value
    elif hint in (int, float) and isinstance(value, int | float | str) and not isinstance(value, bool):
        number = float(value)    # YAML: 1e5, without a dot, is a string
        if hint is float:
            return number
        if number.is_integer():
            return value if isinstance(value, int) else int(number)
    elif hint is Path and isinstance(value, str):
        return Path(value)
    elif hint in (bool, str, NoneType) and isinstance(value, hint):
        return value
    raise ValueError


def _described(hint):
    kinds = get_args(hint)
    if get_origin(hint) is tuple:
        return f"a list, each {_described(kinds[0])}"
    if get_origin(hint) is Literal:
        return f"one of {', '.join(kinds)}"
    if kinds:
        return " or ".join(map(_described, kinds))
    return {int: "a whole number", float: "a number", bool: "a switch, true or false", str: "a text (quoted, maybe)",
            Path: "a path", NoneType: "null"}[hint]  # fmt: skip


def _recipe_file(recipe):
    if recipe.endswith((".yaml", ".yml")) or "/" in recipe:
        return Path(recipe)
    from importlib.resources import files

    directory = files("recipes")
    path = Path(str(directory / f"{recipe.replace('-', '_')}.yaml"))
    if not path.is_file():
        known = sorted(
            entry.name[:-5].replace("_", "-") for entry in directory.iterdir() if entry.name.endswith(".yaml")
        )
        raise ValueError(f"no recipe {recipe!r}. There are: {', '.join(known)}; or give a YAML file")
    return path


def names_of(settings):
    """Names of what can be set; the other fields are fixed."""
    return [field.name for field in dataclasses.fields(settings) if field.init]
