"""Make a command's settings from a recipe and flags; flags override the recipe.

    parsed = parse(load("train-student"), ["--lr", "3e-4"])
    parsed.settings.lr, parsed.settings.origins["lr"]    # 0.0003, "flag"
    parsed.why                                           # "recipe paper, that of the store"

A recipe that the user names applies. Otherwise training uses the recipe that made its store. Encoding uses the
demonstration's recipe, `quickstart`, unless --corpus, --teacher, --tokenizer, --dictionary or --hidden is passed: the
user's own text must not be cut to the demonstration's two million tokens. The functions of `mlsm` (mlsm/api.py) make
their settings here, too, by `take_recipe` and `make_settings`. Not handled here: reading the flags (flags.py) and
recipes (mlsm/recipes/reading.py), and the checks of values (mlsm/common/settings.py).
"""

import dataclasses
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from mlsm.cli.flags import read_flags
from mlsm.cli.help import flags_of
from mlsm.commands import Command
from mlsm.commands._newest import store_to_train_on
from mlsm.common.invocation import program
from mlsm.common.settings import plain, settable
from mlsm.common.text import redacted_settings
from mlsm.recipes.reading import DEMONSTRATION, OWN_MATERIAL, recipe_settings, recipe_to_keep

if TYPE_CHECKING:
    from shards.reader import Store

HELP = {"-h", "--help", "--help-all"}  # the last one also describes the advanced flags


class Parsed(NamedTuple):
    """A parsed command line."""

    settings: Any
    recipe: str | None
    """the recipe that has a section for the command"""
    why: str
    """that recipe and the reason why it applies, for people; empty without a recipe"""
    store: "Store | None" = None
    """the open store that is trained on, if it was found"""
    choice: str | None = None
    """a line for the user if the user did not name that store"""


def parse(command: Command, argv: list[str], recipe: str | None = None) -> Parsed:
    """Settle the settings of one command.

    argv    its flags and words; --help among them prints what the command takes, and exits
    recipe  the recipe that the user named
    Raises  ValueError of one sentence on bad flags, recipes and values
    """
    settings_class = command.settings
    wants_help = not HELP.isdisjoint(argv)
    try:
        common = ["json", "debug", *(["recipe", "print_config"] if command.recipes else [])]
        given = read_flags(settings_class, [word for word in argv if word not in HELP], common)
    except ValueError as error:
        if not wants_help:
            sentence = str(error) if str(error).endswith((".", "?")) else f"{error}."
            raise ValueError(f"{sentence} All flags:  {program()} {command.name} --help") from None
        given = {}
    is_asked_for, store, choice, why = recipe is not None, None, None, ""
    chosen = {}
    if is_asked_for:
        why = f"recipe {recipe}"
    elif command.trains:
        asked = settings_class(**given)
        store, choice = store_to_train_on(command, asked)
        chosen = {"store": str(store.path)} if store is not None and choice else {}
        if store is not None:
            from student.resolve import recipe_for

            recipe = recipe_for(asked, store)
        elif {"store", "student", "continue_from"}.isdisjoint(given):
            recipe = DEMONSTRATION
        why = f"recipe {recipe}" + (", that of the store" if store else " (the demonstration's settings)")
    elif command.recipes and OWN_MATERIAL.isdisjoint(given):
        recipe = DEMONSTRATION
        why = f"recipe {recipe} (the demonstration's settings; --recipe NAME|FILE for others)"
    kind = None if store is None or is_asked_for else store.kind
    values, given = take_recipe(command, given, recipe, is_asked_for, kind)
    if not (values or is_asked_for):
        recipe, why = None, ""
    if wants_help:
        print(flags_of(command, values, why, brief="--help-all" not in argv).format_help(), end="")
        sys.exit(0)
    origins = dict.fromkeys(values, why if command.trains else f"recipe {recipe}") | dict.fromkeys(given, "flag")
    settings = make_settings(command, values | given | chosen, recipe, origins)
    return Parsed(settings, recipe, why, store, choice)


def take_recipe(
    command: Command, given: dict, recipe: str | None, is_asked_for: bool = True, kind: str | None = None
) -> tuple[dict, dict]:
    """The values of a recipe that apply next to the values that are given, and the latter; both by setting.

    is_asked_for  whether the user named the recipe
    kind          of the store that is trained on, if its recipe applies
    """
    values = recipe_settings(recipe, command.name, command.settings, is_asked_for) if recipe is not None else {}
    if given.get("dictionary") is not None:
        values.pop("k", None)  # a recipe's k is for a dictionary that is still to be learned
    if command.trains:
        from student.resolve import given_values, without_rivals

        given = given_values(given)
        values = without_rivals(values, given, kind)
    return values, given


def make_settings(command: Command, values: dict, recipe: str | None, origins: dict[str, str]) -> Any:
    """The settings object of a command, which keeps its recipe and where each value comes from."""
    settings = command.settings(**values)
    if command.recipes and hasattr(settings, "recipe"):
        object.__setattr__(settings, "recipe", recipe_to_keep(recipe))
    if hasattr(settings, "origins"):
        object.__setattr__(settings, "origins", origins)
    return settings


def as_yaml(command: Command, parsed: Parsed) -> str:
    """Write the settings as --print-config shows them; for training, with the values that follow from the store."""
    import yaml

    settings = _settle(command, parsed)
    values = plain(settings)
    shown = {key: values[key] for key in values if key in settable(settings)}
    return yaml.safe_dump({command.name: redacted_settings(shown)}, sort_keys=False)


def _settle(command: Command, parsed: Parsed) -> Any:
    settings = parsed.settings
    store = (parsed.store or store_to_train_on(command, settings)[0]) if command.trains else None
    if store is None:
        return settings
    from student.encoders.build import own_dropout, unfitted_config
    from student.resolve import resolve

    settings = resolve(settings, store).config
    if "dropout" in settable(settings) and settings.dropout is None:
        settings = dataclasses.replace(settings, dropout=own_dropout(unfitted_config(settings, store)))
    return settings
