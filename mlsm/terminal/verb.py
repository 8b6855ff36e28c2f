"""One command: where its settings, its function and its view are, and how it runs.

The table of all commands is mlsm.__main__.VERBS; `run_verb` takes one of them from the command line to the exit code.
"""

import os
import sys
from typing import NamedTuple

from mlsm.common.text import redacted
from mlsm.recipes.reading import names_of
from mlsm.terminal.choice import choose, load
from mlsm.terminal.flags import take_flag, take_value
from mlsm.terminal.process import is_follower, passing_on_notes, quiet_libraries
from mlsm.terminal.progress import Progress
from mlsm.terminal.results import announce, show
from mlsm.terminal.settings import as_yaml, parse


class Verb(NamedTuple):
    """One command. References are written module:name and imported when they are needed."""

    summary: str
    settings: str
    """the dataclass of its settings"""
    function: str
    """what does the work: (settings, progress) -> result; of a training also origins=, where settings come from"""
    show: str
    """(result, settings) -> the text that people read"""
    recipes: bool = True
    """whether its settings come from recipes, too"""
    exit_code: str | None = None
    """result -> exit code; None: always 0"""
    chooses: str | None = None
    """settings -> what it could work on, the newest first, where nothing is named (mlsm/terminal/choice.py)"""
    works_on: str = "store"
    """the setting that names it"""
    training: bool = False
    """whether open settings follow from the store that is trained on"""
    completes: str | None = None
    """of a training: settings -> settings that name its store"""
    downloads: bool = True
    """whether it may fetch a model, whose progress bar is wanted"""


def run_verb(name: str, verb: Verb, argv: list[str]) -> int:
    """Run a command and print its result. Returns the exit code; raises what the command raises."""
    recipe = take_value(argv, "--recipe") if verb.recipes else None
    print_config = take_flag(argv, "--print-config")
    as_json = "json" not in names_of(load(verb.settings)) and take_flag(argv, "--json")
    quiet_libraries(verb.downloads)
    parsed = parse(name, verb, argv, recipe)
    if print_config:
        print(redacted(as_yaml(name, verb, parsed)), end="")
        return 0
    settings, choice = (parsed.settings, parsed.choice) if parsed.choice else choose(verb, parsed.settings)
    as_json = as_json or getattr(settings, "json", False)
    with Progress(open(os.devnull, "w") if is_follower() else sys.stderr) as progress:
        if verb.recipes:
            progress.note(f"{name}, {parsed.why}" if parsed.why else name)
        if choice is not None:
            announce(choice, progress, as_json)
        if verb.training:
            progress("prepare training", 0, None)
        with passing_on_notes(progress):
            more = {"origins": parsed.origins} if verb.training else {}
            result = load(verb.function)(settings, progress, **more)
    if not is_follower():
        show(verb, result, settings, as_json)
    return load(verb.exit_code)(result) if verb.exit_code else 0
