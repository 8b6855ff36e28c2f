"""One command from its words to its exit code: settle the settings, run it, print the result."""

import json
import os
import sys
import warnings
from typing import Any

from mlsm.cli.flags import take_flag, take_value
from mlsm.cli.settings import as_yaml, parse
from mlsm.commands import Command
from mlsm.commands._newest import choose_newest
from mlsm.common.text import printable, printable_values, redacted
from mlsm.results import report_of
from mlsm.terminal.process import is_follower, one_line, passing_on_notes, quiet_libraries, warn
from mlsm.terminal.progress import Progress

WHOLE = {"store", "run", "export", "commands"}  # not escaped: paths, which views open, and text of several lines


def run_command(command: Command, argv: list[str]) -> int:
    """Run a command and print its result. Returns the exit code; raises what the command raises."""
    recipe = take_value(argv, "--recipe") if command.recipes else None
    print_config = take_flag(argv, "--print-config")
    as_json = take_flag(argv, "--json")
    quiet_libraries(command.downloads)
    is_silent = command.trains and is_follower()
    if is_silent:
        warnings.simplefilter("ignore")
    parsed = parse(command, argv, recipe)
    if print_config:
        print(redacted(as_yaml(command, parsed)), end="")
        return 0
    settings, choice = (parsed.settings, parsed.choice) if parsed.choice else choose_newest(command, parsed.settings)
    with Progress(open(os.devnull, "w") if is_silent else sys.stderr) as progress:
        if command.recipes:
            progress.note(f"{command.name}, {parsed.why}" if parsed.why else command.name)
        if choice is not None and as_json:  # next to the result
            progress.note(choice)
        elif choice is not None and not is_silent:
            print(printable(redacted(choice)), flush=True)
        if command.trains:
            progress("load torch and transformers", 0, None)
        with passing_on_notes(progress):
            report = report_of(command.run(settings, progress))
    if not is_silent:
        show(command, report, settings, as_json)
    return command.exit_code(report) if command.exit_code else 0


def show(command: Command, report: Any, settings: object, as_json: bool) -> None:
    """Print a result.

    Text that comes from others is escaped: it cannot control the terminal or fake lines of this program.

    If showing the result fails after the work is done, that is a warning, not an error.
    """
    if as_json:
        print(json.dumps(report, indent=1, default=_plain))
        return
    try:
        print(printable(redacted(command.show(printable_values(report, WHOLE), settings))))
    except Exception as error:
        if not command.recipes:
            raise
        warn(f"the work is finished, but its summary cannot be shown: {one_line(error)}")


def _plain(value):
    """Convert what JSON has no type for: a typed comparison, paths, and NumPy's numbers."""
    if hasattr(value, "as_report"):
        return value.as_report()
    return value.item() if hasattr(value, "item") else str(value)
