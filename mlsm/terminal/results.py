"""The result of a command: printed for people or as JSON, and the exit code that it ends with.

The views of single commands are the other modules of terminal/; cli.VERBS names the one of each.
"""

import json
from typing import TYPE_CHECKING, Any

from mlsm.common.errors import EXIT_QUARANTINE, EXIT_STORE
from mlsm.common.text import printable, printable_values, redacted
from mlsm.terminal.choice import load
from mlsm.terminal.process import complain, is_follower, one_line, warn
from mlsm.terminal.progress import Progress

if TYPE_CHECKING:
    from mlsm.terminal.verb import Verb

WHOLE = {"store", "run", "export", "commands"}  # in results: paths, which views open, and text of several lines


def announce(choice: str, progress: Progress, as_json: bool) -> None:
    """Say what was chosen: on standard output, with the result, but beside it where that is JSON."""
    if as_json:
        progress.note(choice)
    elif not is_follower():
        print(printable(redacted(choice)), flush=True)


def show(verb: "Verb", result: Any, settings: object, as_json: bool) -> None:
    """Print a result. Foreign text in it cannot control the terminal, nor add lines that look like ours.

    Where the summary fails after the work is done, that is a warning and not an error.
    """
    if as_json:
        print(json.dumps(result, indent=1, default=_plain))
        return
    try:
        print(printable(redacted(load(verb.show)(printable_values(result, WHOLE), settings))))
    except Exception as error:
        if not verb.recipes:
            raise
        warn(f"the work is finished, but its summary cannot be shown: {one_line(error)}")


def _plain(value):
    """Convert what JSON has no type for: typed results, paths, and NumPy's numbers."""
    if hasattr(value, "as_report"):
        return value.as_report()
    return value.item() if hasattr(value, "item") else str(value)


# -- exit codes: of a result, with a line that says why ------------------------------------------------------


def code_of_damage(report: dict) -> int:
    """Return the exit code of verify-shards: 3 where the store is damaged, which the view says."""
    return EXIT_STORE if report["damaged"] else 0


def code_of_encoding(reports: list[dict]) -> int:
    """Return the exit code of an encoding: 5, after a line that says so, where documents could not be coded."""
    return _code_of_quarantine(reports, "Run the same command with --retry-quarantine to try them again")


def code_of_sweep(result: dict) -> int:
    """Return the exit code of a sweep, as of an encoding of its stores."""
    advice = "encode-lsp with these settings and --retry-quarantine tries them again"
    return _code_of_quarantine(result.get("rows", []), advice)


def _code_of_quarantine(reports, advice):
    count = sum(report.get("quarantined", 0) for report in reports)  # an estimate has none
    if not count:
        return 0
    stores = ", ".join(report["store"] for report in reports if report["quarantined"])
    return complain(
        f"finished, but {count} documents could not be coded and carry no targets; the records in {stores}/units name "
        f"them and why. {advice}",
        EXIT_QUARANTINE,
    )
