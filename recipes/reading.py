"""Recipes read: a YAML file of settings, by command, to the values of a settings class.

    values = recipe_settings("paper", "encode-lsp", EncodeConfig)

A recipe is one of this directory, by its name, or any YAML file. Left out: flags, and which recipe applies (cli.py).
"""

import dataclasses
from pathlib import Path


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
    hint = str(next(field.type for field in dataclasses.fields(settings_class) if field.name == name))
    if "tuple" in hint and value is not None:
        values = value if isinstance(value, list) else [value]
        return tuple(map(float, values)) if "float" in hint else tuple(values)
    if isinstance(value, bool) != (hint == "<class 'bool'>"):
        raise ValueError(f"{name} is {'a switch, true or false' if 'bool' in hint else 'no switch'}, found {value!r}")
    if hint == "<class 'int'>" and isinstance(value, str) and float(value).is_integer():  # YAML: 1e5 is a string
        return int(float(value))
    if "Path" in hint and isinstance(value, str):
        return Path(value)
    if hint in ("<class 'float'>", "float | None") and isinstance(value, str):  # YAML: 1e-4, without a dot
        return float(value)
    return value


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
