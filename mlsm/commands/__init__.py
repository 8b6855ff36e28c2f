"""The commands, one file each: its settings, what runs it, and what it prints.

    command = load("encode-lsp")                 # the file encode_lsp.py
    result = command.run(command.settings(layer=10), progress)
    print(command.show(report_of(result), settings))

A file defines `Settings`, `run(settings, progress)` and `show(report, settings)`. `Settings` is a dataclass, often
imported from the package that does the work. The docstring of `run` is also that of the Python function. `show` returns
the text to print. `mlsm --help` shows the first line of the file. The help of the command shows the docstring of
`Settings` above the flags, without its first paragraph. Heavy imports are inside `run`. A file may also define the
constants explained in Command. Files whose names start with an underscore are not commands.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple


class Command(NamedTuple):
    """One command, read from its file."""

    name: str
    summary: str
    settings: type
    run: Callable[..., Any]
    """(settings, progress) -> result"""
    show: Callable[[Any, Any], str]
    recipes: bool
    """RECIPES: whether its settings also come from recipes"""
    downloads: bool
    """DOWNLOADS: whether it may download a model and should show a progress bar for it; True unless the file says
    False"""
    trains: bool
    """TRAINS: whether unset settings follow from the store that is trained on"""
    works_on: str
    """WORKS_ON: the setting for which `newest` has candidates"""
    by_position: tuple[str, ...]
    """BY_POSITION: settings that the Python function takes by position, regardless of the command line"""
    newest: Callable[[Any], list[Path]] | None
    """settings -> candidates to work on if the user names none, newest first (_newest.py)"""
    complete: Callable[[Any], Any] | None
    """for a command that trains: settings -> settings that name its store"""
    exit_code: Callable[[Any], int] | None
    """report -> exit code; without this function it is always 0"""

    @property
    def python_name(self) -> str:
        """The name of the function in `mlsm`."""
        return self.name.replace("-", "_")


def names() -> list[str]:
    """List the commands: those of the two stages first, the others by name."""
    found = (path.stem.replace("_", "-") for path in Path(__file__).parent.glob("[!_]*.py"))
    return sorted(found, key=lambda name: (name not in STAGES, STAGES.index(name) if name in STAGES else 0, name))


STAGES = ("encode-lsp", "train-student")


def load(name: str) -> Command:
    """Read a command's file. Raises ModuleNotFoundError if there is none."""
    module = import_module(f"mlsm.commands.{name.replace('-', '_')}")
    held = vars(module)
    return Command(
        name,
        (module.__doc__ or "").partition("\n")[0].removesuffix("."),
        held["Settings"],
        held["run"],
        held["show"],
        recipes=held.get("RECIPES", False),
        downloads=held.get("DOWNLOADS", True),
        trains=held.get("TRAINS", False),
        works_on=held.get("WORKS_ON", "store"),
        by_position=held.get("BY_POSITION", ()),
        newest=held.get("newest"),
        complete=held.get("complete"),
        exit_code=held.get("exit_code"),
    )


def load_all() -> dict[str, Command]:
    """Read all commands, by name. If pipeline/ is not installed, only those that do not need it, such as training."""
    found = {}
    for name in names():
        try:
            found[name] = load(name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "pipeline":
                raise
    return found
