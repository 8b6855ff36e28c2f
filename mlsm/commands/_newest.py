"""Choose what a command works on if nothing is named: the newest store, student or run that fits.

    choose_newest(command, settings)  # (settings with a store, "store runs/stores/lsp-... (the newest ...)")

There is one function for each kind of thing to choose; a command's file assigns the one it needs to `newest`. Such a
function takes the settings and returns the candidates, newest first. It raises StoreError or RunError if there are
none.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlsm.commands import Command
from mlsm.common.settings import revise

if TYPE_CHECKING:
    from shards.reader import Store
    from student.config import StudentConfig


def choose_newest(command: Command, settings: Any) -> tuple[Any, str | None]:
    """Fill in the store, student or run to work on. Returns the settings, and a line on what was chosen, or None."""
    if command.newest is None or getattr(settings, command.works_on) is not None:
        return settings, None
    found = command.newest(settings)
    which = "one" if command.works_on == "run" else "finished one"  # a run may be exported before it ends
    takes_all = command.newest in (stores, runs)  # the other commands pass over some that are finished
    why = (
        f"the only {which}{'' if takes_all else ' that fits'}"
        if len(found) == 1
        else f"the newest {which} of {len(found)}{'' if takes_all else ' that fit'}; name another one to use it instead"
    )
    # The field's annotation says whether the setting is a path or a string; check() converts it.
    return revise(settings, **{command.works_on: found[0]}), f"{command.works_on} {found[0]} ({why})"


def stores(settings: object) -> list[Path]:
    """List the finished stores of any kind."""
    return _stores()


def lsp_stores(settings: object) -> list[Path]:
    """List the finished stores of LSPs."""
    return _stores("lsp")


def stores_with_entries(settings: object) -> list[Path]:
    """List the finished stores that have several entries per token: LSPs, or the teacher's words."""
    return _stores("lsp", "logits")


def stores_for_the_objective(settings: "StudentConfig") -> list[Path]:
    """List the finished stores of the kinds that the objective learns from."""
    from student.objectives import OBJECTIVES

    return _stores(*OBJECTIVES[settings.objective].kinds)


def _stores(*kinds: str) -> list[Path]:
    from shards.reader import finished_stores

    return finished_stores(kinds=kinds)


def students(settings: object) -> list[Path]:
    """List the finished students that predict LSPs."""
    from student.runs.probed import finished_students

    return finished_students()


def runs(settings: object) -> list[Path]:
    """List the runs that have saved a checkpoint."""
    from student.runs.export_run import runs_with_checkpoints

    return runs_with_checkpoints()


def store_to_train_on(command: Command, settings: Any) -> "tuple[Store | None, str | None]":
    """Open the store that training would read. Returns it, and a line that says which, if the user did not name it.

    Returns (None, None) if no store can be read: the command itself then says why.
    """
    from mlsm.common.errors import ShardError, StoreError
    from shards.reader import Store

    choice = None
    try:
        if command.complete is not None:
            settings = command.complete(settings)
        else:
            settings, choice = choose_newest(command, settings)
        return Store.open(settings.stores[0]), choice
    except (StoreError, ShardError, ValueError, OSError):
        return None, None
