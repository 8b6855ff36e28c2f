"""The command line: `main` runs one of the commands (mlsm/commands/) and exits with its code.

    python cli.py encode-lsp --layer 10
    python cli.py train-student

A recipe sets the defaults of a command's settings, and flags override them (mlsm/cli/). Exit codes: 0 done or already
finished, 1 a bug in this program, 2 bad input or usage, 3 a store or shard that is damaged or unfinished, 4 training
stopped by itself, 5 encoded except for documents in quarantine, 74 a file could not be written or worker processes
died, 129 its terminal was closed (SIGHUP), 130 interrupted (Ctrl-C), 143 terminated (SIGTERM). Losing the terminal or
pipe that shows the output does not change the exit code (mlsm/common/streams.py). The printed texts are in
mlsm/terminal/.
"""

import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from mlsm.cli.flags import take_flag
from mlsm.cli.help import greeting, overview, unknown_command
from mlsm.cli.run import run_command
from mlsm.commands import load, load_all, names
from mlsm.common.errors import EXIT_INPUT, EXIT_WRITE, exit_code
from mlsm.common.extras import name_extras
from mlsm.common.streams import guard_standard_streams, loss
from mlsm.common.text import printable, redacted
from mlsm.common.version import VERSION
from mlsm.terminal.process import (
    complain,
    end_on_signals,
    ending,
    is_follower,
    is_reported_by_another,
    one_line,
    wait_without_spinning,
)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its code."""
    guard_standard_streams()
    end_on_signals()
    wait_without_spinning()
    argv = list(sys.argv[1:] if argv is None else argv)
    debug = take_flag(argv, "--debug")
    try:
        code = run(argv)
    except KeyboardInterrupt as stop:
        with ending():
            kept = "interrupted. Run the same command again: finished units and checkpoints, if any, are kept."
            code = 128 + getattr(stop, "number", signal.SIGINT)  # as a shell counts them
            if not (is_follower() and _trains(argv)):
                complain(str(stop) or kept, code)
    except Exception as error:
        if debug:
            sys.stderr.write(printable(redacted(traceback.format_exc())))
        code = exit_code(error)
        if not (is_reported_by_another(error, code) and _trains(argv)):
            complain(one_line(error), code)
    sys.stdout.flush()
    if lost := loss(sys.stdout):
        message = f"standard output could not be written ({lost.strerror}): what was printed is not whole"
        is_all = argv[:1] == ["docs"] or not {"--json", "--print-config"}.isdisjoint(argv)  # what the command makes
        code = complain(message, EXIT_WRITE if code == 0 and is_all else code)
    sys.exit(code)


def _trains(argv):
    """Whether this is a command that a launcher may start as several processes."""
    with suppress(ImportError):  # it may be the error that is reported
        return bool(argv) and argv[0] in names() and load(argv[0]).trains
    return False


def run(argv: list[str]) -> int:
    """Parse, run, show. Returns the exit code; raises what the command raises."""
    if argv[:1] == ["help"] and len(argv) > 1:  # mlsm help COMMAND
        argv = [*argv[1:], "--help-all"]
    if not argv:
        print(greeting())
        return 0
    if argv[0] in ("-h", "--help", "help"):
        print(overview(load_all()))
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"mlsm {VERSION}")
        return 0
    name, rest = argv[0], argv[1:]
    if name.startswith("-"):
        return complain(f"{name} stands before the command. Write the command first, then its options", EXIT_INPUT)
    if name not in names():
        return complain(unknown_command(name, names()), EXIT_INPUT)
    with name_extras(name):
        return run_command(load(name), rest)


if __name__ == "__main__":
    main()
