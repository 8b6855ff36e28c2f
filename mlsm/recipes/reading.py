"""Read recipes: convert a YAML file of settings by command to the values of a settings class.

    values = recipe_settings("paper", "encode-lsp", EncodeConfig)
    recipe = recipe_of_store(store, "train-student")    # "paper", if that made the store

A recipe is a file in this directory, given by its name, or any YAML file. A store records the name of the recipe that
made it, and training on the store uses that recipe. Not handled here: flags, and which recipe applies without a store
(mlsm/cli/settings.py).
"""

import logging
from pathlib import Path
from typing import Any

from mlsm.common.disk import read_file
from mlsm.common.settings import convert_field, settable

logger = logging.getLogger(__name__)

DEMONSTRATION = "quickstart"
OWN_MATERIAL = {"corpus", "teacher", "tokenizer", "hidden", "dictionary"}
"""settings of encoding: if one is passed, the demonstration's recipe does not apply"""
NOT_OF_STORES = {"scheduler", "workers", "output", "run_dir"}
"""settings that a store never decides: to which processes its user's machine connects, and where is written"""
NAME = "recipe"  # in a store's plans/<plan>.yaml: the recipe that made it, or null


def recipe_settings(recipe: str, verb: str, settings_class: type, is_asked_for: bool) -> dict[str, Any]:
    """A recipe's values for the settings of a command, by field.

    recipe        name of a recipe of this directory, or path of a YAML file
    is_asked_for  whether the user named the recipe; if so, it must have a section for the command
    Raises        ValueError if the recipe is missing or not readable, or a setting or its type is wrong
    """
    path, sections = read_recipe(recipe)
    if is_asked_for and verb not in sections and not (verb == "learn-dictionary" and "encode-lsp" in sections):
        others = f"has sections for: {', '.join(map(str, sections))}" if sections else "is empty"
        raise ValueError(f"recipe {path} has no section for {verb}. It {others}")
    section = sections.get(verb) or {}
    if not is_asked_for:  # a store's recipe must not decide where its user's files are written
        section = {key: value for key, value in section.items() if _field(key) not in ("output", "run_dir")}
    if verb == "learn-dictionary":  # uses the section of encode-lsp
        known = settable(settings_class)
        shared = sections.get("encode-lsp") or {}
        section = {key: value for key, value in shared.items() if _field(key) in known} | section
    if path.parent.name == "plans":  # a store's settings: they may have one that the command does not have
        taken = settable(settings_class).keys() - NOT_OF_STORES
        section = {key: value for key, value in section.items() if _field(key) in taken}
    return convert_section(section, verb, settings_class, path)


def read_recipe(recipe: str) -> tuple[Path, dict[str, Any]]:
    """The file of a recipe, and its unconverted sections: settings by command.

    Raises  ValueError if there is no such recipe, or it is not readable
    """
    path = _recipe_file(recipe)
    return path, _sections(path)


def convert_section(section: dict[str, Any], verb: str, settings_class: type, path: Path) -> dict[str, Any]:
    """Convert a command's section of a recipe: settings by field, with the fields' types.

    path    the recipe, for errors
    Raises  ValueError for an unknown setting or an invalid value
    """
    known = settable(settings_class)
    unknown = sorted(str(key) for key in section if _field(key) not in known)
    if unknown:
        raise ValueError(
            f"recipe {path}: {verb} has no setting {', '.join(unknown)}. It has: {', '.join(sorted(known))}"
        )
    if twice := [key for key in section if "-" in str(key) and _field(key) in section]:
        raise ValueError(f"recipe {path}, {verb}: {twice[0]} is given twice, also as {_field(twice[0])}. Remove one")
    try:
        return {_field(key): convert_field(known[_field(key)], value, text=True) for key, value in section.items()}
    except ValueError as error:
        raise ValueError(f"recipe {path}, {verb}: {error}") from None


def recipe_of_store(store: Any, verb: str) -> str | None:
    """The recipe that a command on a store uses: the one that made the store, if it has a section for the command.

    A store without a recipe's name counts as made by the demonstration's recipe if it was made from the bundled text
    with the bundled teacher or tokenizer. Stores made by studies or from Python have no recipe's name.

    Only the name of a recipe in this directory counts: a path would let the author of the store choose the settings.

    store    an open Store
    Returns  a recipe's name; if None, the settings follow from the size of the store
    """
    recipe = store.command.get(NAME)
    if recipe is None and asks_for_the_demonstration(store.command):
        recipe = DEMONSTRATION
    if not isinstance(recipe, str):  # a store from someone else may contain anything
        return None
    if _is_file_name(recipe):
        logger.warning(
            "the store was made with the recipe file %s, but recipe files are not reused: the settings of %s follow "
            "from the store's size. To use a recipe file of your own, pass --recipe FILE",
            recipe,
            verb,
        )
        return None
    try:
        return recipe if verb in _sections(_recipe_file(recipe)) else None
    except ValueError:
        logger.warning(
            "the store's recipe %s is not readable now; the settings of %s follow from the store's size",
            recipe,
            verb,
        )
        return None


def recipe_to_keep(recipe: str | None) -> str | None:
    """The recipe as a store records it: its name, the absolute path of a file, or None.

    A store's recorded settings can be passed as a recipe to repair the store. Then the recipe that they name is
    recorded.
    """
    if recipe is None:
        return None
    path = _recipe_file(recipe)
    if path.parent.name != "plans":
        return str(path.absolute()) if _is_file_name(recipe) else recipe
    kept = _read(path)
    if NAME in kept:
        return kept[NAME]
    return DEMONSTRATION if asks_for_the_demonstration(_sections(path)) else None


def asks_for_the_demonstration(command: dict[str, Any]) -> bool:
    """Whether {verb: settings} names the bundled text and the bundled teacher or tokenizer."""
    made = next(iter(command.values()), None)
    if not isinstance(made, dict):
        return False
    return "bundled" in (made.get("teacher"), made.get("tokenizer")) and made.get("corpus") == ["bundled"]


def _sections(path):
    """The settings of a recipe by command."""
    values = _read(path)
    sections = {name: section for name, section in values.items() if name not in (NAME, "checksum")}
    if not all(isinstance(section, dict | None) for section in sections.values()):
        raise ValueError(f"recipe {path}: expected a mapping of settings under each command, such as encode-lsp:")
    return sections


def _read(path):
    import yaml  # here, so that --help is fast

    class Loader(yaml.SafeLoader):
        """Refuses one key twice in a mapping, of which YAML would take the last without a word, and aliases of values
        that contain aliases, by which a few lines become millions of values.
        """

        anchored = 0  # anchored values around the node

        def compose_node(self, parent, index):
            event = self.peek_event()
            is_alias = isinstance(event, yaml.AliasEvent)
            if is_alias and self.anchored:
                place = f"*{event.anchor} in line {event.start_mark.line + 1}"
                raise yaml.YAMLError(f"{place} is an alias within an anchored value. Write out what it stands for")
            is_anchor = not is_alias and event.anchor is not None
            self.anchored += is_anchor
            node = super().compose_node(parent, index)
            self.anchored -= is_anchor
            return node

        def construct_mapping(self, node, deep=False):
            seen = set()
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                if key.value in seen:
                    line = key.start_mark.line + 1
                    raise yaml.YAMLError(f"{key.value} is given twice, again in line {line}. Remove one")
                seen.add(key.value)
            return super().construct_mapping(node, deep)

    try:
        values = yaml.load(read_file(path).decode("utf-8"), Loader) or {}
    except RecursionError:
        raise ValueError(
            f"recipe {path}: nested too deep. A recipe has settings under the name of a command."
        ) from None
    except UnicodeDecodeError as error:
        remedy = "Save the file as UTF-8, for example with: iconv -f latin1 -t utf-8"
        raise ValueError(f"recipe {path}: not UTF-8 ({error.reason} at byte {error.start:,}). {remedy}") from None
    except OSError as error:
        raise ValueError(f"recipe {path} cannot be read: {error.strerror or error}") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # ValueError: an impossible date
        raise ValueError(f"recipe {path}: not readable as YAML: {' '.join(str(error).split())}") from None
    return values if isinstance(values, dict) else {None: values}


def _field(key):
    return str(key).replace("-", "_")


def _is_file_name(recipe):
    return recipe.endswith((".yaml", ".yml")) or "/" in recipe


def _recipe_file(recipe):
    if _is_file_name(recipe):
        return Path(recipe)
    from importlib.resources import files

    directory = files("mlsm.recipes")
    path = Path(str(directory / f"{recipe.replace('-', '_')}.yaml"))
    if not path.is_file():
        known = sorted(
            entry.name[:-5].replace("_", "-") for entry in directory.iterdir() if entry.name.endswith(".yaml")
        )
        raise ValueError(f"no recipe {recipe!r}. There are: {', '.join(known)}; or give a YAML file")
    return path
