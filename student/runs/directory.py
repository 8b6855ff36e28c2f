"""The directory of one run: what belongs to it, its log, and whether it is finished.

    config.json    settings, fingerprints of the store, the encoder's config (export-student builds the encoder
                   from it), the libraries of its matrix products (encoders/libraries.py); written first, never changed
    log.jsonl      one line per step. When a run resumes, lines of steps that it will do again are removed, so the log
                   reads like that of an uninterrupted run
    checkpoints/   checkpoint.py
    export/        export.py
    result.json    the summary; its presence means finished
    log.damaged    lines of the log that could not be read when the run was resumed
    mask_weights.npz    a copy of the run's table of mask weights, if it has one (table.py). A run with several tables
                   has mask_weights-1.npz, mask_weights-2.npz and so on. A finished run with adaptive masks has its last
                   table, which can be passed to another run

As long as the checkpoints are whole, the same command restores what else is lost or damaged. It removes the log's
damaged lines, takes the summary from the last checkpoint, writes the export again if its whole directory is gone,
copies the table again if its source still exists, and rewrites config.json if the checkpoints have the same settings.
Not handled here: which commands belong to the same run (identity.py), what is trained (train.py).
"""

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from mlsm.common import disk, locks
from mlsm.common.durable import appearing_whole, make_directories, publish_json, remedy_for, replace_bytes, replace_json
from mlsm.common.errors import RunError, WriteError
from mlsm.common.json_checks import Count, find_problem, object_of, optional
from mlsm.common.json_lines import damage, stream_json_lines
from mlsm.common.matrix_products import USUAL
from mlsm.common.text import redacted
from shards.manifest import fingerprint
from shards.reader import Store
from student.config import StudentConfig
from student.encoders.libraries import libraries_record, recorded_libraries
from student.masks.table import MaskTable, holds_table, write_table
from student.runs.checkpoint import Checkpoints, are_figures
from student.runs.identity import (
    check_same_run,
    differing_settings,
    directory_of,
    find_description,
    read_or_none,
    run_identity,
    warn_of_older_plan,
)

MARGINALS, RESULT_FILE = ".marginals", "result.json"  # beside runs; in a run that is finished
logger = logging.getLogger(__name__)


class Run:
    """Create the directory of a run, or open it again after checking that it is the same run.

    architecture  what determines the model in addition to the settings (task.py)
    settings      those that decide what is trained (task.py); by default the configuration's
    tables        of mask weights, in the order in which the run uses them; the run keeps copies
    create        whether to create it: only the first of several processes does
    choose_libraries    called to choose the libraries of matrix products for a new run; a resumed one keeps its own
    Raises        RunError, which names the settings that differ, if the directory holds another run
    """

    def __init__(
        self,
        config: StudentConfig,
        store: Store,
        architecture: dict,
        settings: dict | None = None,
        tables: Sequence[MaskTable | None] = (None,),
        create: bool = True,
        choose_libraries: Callable[[], Mapping[str, str]] = lambda: USUAL,
    ):
        self.tables = tables
        self.identity = identity = run_identity(config, store, architecture, settings)
        self.directory = directory_of(config, identity, architecture)
        disk.follow_no_links_below(config.run_dir or config.root)
        self.config_file = self.directory / "config.json"
        self.log_file = self.directory / "log.jsonl"
        self.result_file = self.directory / RESULT_FILE
        self.table_file = self.directory / "mask_weights.npz"  # if the run has one table
        turns = [self.directory / f"mask_weights-{turn + 1}.npz" for turn in range(len(tables))]
        files = turns if len(tables) > 1 else [self.table_file]
        own_tables = [(file, table) for file, table in zip(files, tables, strict=True) if table is not None]
        self.checkpoint_directory = self.directory / "checkpoints"
        self.export_directory = self.directory / "export"
        self.marginals_directory = config.shared_directory / MARGINALS  # see position_marginals.py
        found, is_new = find_description(self.directory), False
        if found is not None and not differing_settings(found, identity, architecture):
            # From config.json: its spelling of the settings, and the libraries that the run was started with.
            self.identity = {name: found.get(name, value) for name, value in identity.items()}
            self.libraries = recorded_libraries(found)
            for file, table in own_tables:
                if create and not holds_table(file, table.name):
                    logger.warning("%s was damaged or lost: written again", file)
                    self.keep_table(file, table)
            return
        whole = Checkpoints(self.checkpoint_directory).newest_whole() if create else None
        newest = None if whole is None else whole[1]  # the state of the newest whole checkpoint
        if newest is not None and newest.get("run") == fingerprint(identity):
            logger.warning(
                "%s was damaged or lost: written again, as the checkpoints are of these settings", self.config_file
            )
            self.libraries = recorded_libraries(newest)
        elif found is not None:
            check_same_run(self.directory, found, identity, architecture, store)
        elif newest is not None or self.config_file.exists():
            raise RunError(_unknown_run(self.directory, self.config_file))
        elif not create:
            raise RunError(
                f"{self.directory} is not seen by every process. Give a --run-dir on a file system that the machines"
                f" share."
            )
        else:
            _check_unused(self.directory)
            if config.run_dir is None:
                warn_of_older_plan(self.directory, identity, architecture, store)
            self.libraries, is_new = choose_libraries(), True
            make_directories(self.directory)
        kept = {"operational": _operational(config), "architecture": architecture}
        for file, table in own_tables:
            self.keep_table(file, table)
        description = identity | kept | libraries_record(self.libraries)
        with _replacing(self.config_file):
            if not is_new:
                replace_json(self.config_file, description, allow_nan=True)
            elif not publish_json(self.config_file, description, allow_nan=True):
                raise RunError(
                    f"another process has just begun {self.directory}. Wait for it, stop it, or give another --run-dir."
                )

    def keep_table(self, file: Path, table: MaskTable) -> None:
        """Write a table of mask weights into the run's directory."""
        with _replacing(file):
            write_table(file, table)

    def check_place(self) -> None:
        """Raises RunError if checkpoints would be written, and older ones removed, in another place."""
        if self.checkpoint_directory.is_symlink():
            raise RunError(
                f"{self.checkpoint_directory} is a link, and checkpoints are written and removed in the run's own"
                f" directory only. Replace the link by the directory that it leads to."
            )

    def places(self) -> dict:
        """The directories of the run and of its export, for the user."""
        return {"run": str(self.directory), "export": str(self.export_directory)}

    def check_checkpoint(self, path: Path, state: dict) -> None:
        """Raises RunError if a checkpoint says that it belongs to another run."""
        theirs = [state["run"], state["plan"], state["target"]]
        ours = [fingerprint(self.identity), self.identity["store"]["plan"], self.identity["store"]["target"]]
        if theirs != ours:
            raise RunError(
                f"{path} is a checkpoint of another run: other settings, store or encoder. Nothing was changed. Move it"
                f" elsewhere, or give another --run-dir."
            )
        if recorded_libraries(state) != self.libraries:
            raise RunError(
                f"{self.config_file}: field products is not what {path} was trained with: it is damaged. Nothing was"
                f" changed. Move config.json elsewhere: the same command writes it again."
            )

    def result(self) -> dict | None:
        """The summary of a finished run; None if it is not finished, the summary cannot be read, or the export is gone
        and the last checkpoint can make it again.
        """
        result = read_or_none(self.result_file, _is_result)
        if result is None and self.result_file.exists():
            logger.warning("%s is damaged; it is written again from the last checkpoint", self.result_file)
        if result is None or self.export_directory.is_dir():
            return result
        if Checkpoints(self.checkpoint_directory).whole(result["steps"]) is None:
            return result
        logger.warning("%s is gone; it is written again from the last checkpoint", self.export_directory)
        return None

    def finish(self, result: dict) -> None:
        """Write the summary: from now on the run is finished."""
        with _replacing(self.result_file):
            replace_json(self.result_file, result, allow_nan=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the run so that no other process trains it. Raises RunError if one does.

        Only warns if the file system has no locks: then other processes are not kept out.
        """
        with self._open_lock() as file:
            try:
                if not locks.acquire(file):
                    raise RunError(
                        f"another process is training {self.directory}. Wait for it, stop it, or give another"
                        " --run-dir."
                    )
            except OSError as error:
                logger.warning("%s cannot be locked (%s); start no second process of this run", self.directory, error)
            yield

    def _open_lock(self):
        """Open the lock file. Raises RunError at once if it is not a file, such as a pipe."""
        path = self.directory / "lock"
        try:
            return disk.append(path)
        except (OSError, ValueError) as error:
            raise RunError(f"{path} cannot be opened: {error}. Remove it; the same command makes it again.") from None

    def clean(self) -> None:
        """Remove temporaries of a killed process."""
        for directory in (self.directory, self.checkpoint_directory):
            disk.remove_leftovers(directory)

    def log(self, line: dict) -> None:
        """Append a line to the log."""
        try:
            with disk.append(self.log_file) as file:
                disk.write(file, (json.dumps(line) + "\n").encode())
        except OSError as error:
            raise WriteError(
                f"{self.log_file} could not be written: {error}. Checkpoints were not touched. {remedy_for(error)}, and"
                " run the same command: it continues from the newest."
            ) from error

    def drop_log_after(self, step: int) -> None:
        """Remove log lines of later steps, which will be done again, and a line cut off by a kill.

        Damaged lines are moved to log.damaged, so that any program can read the log.
        """
        if not os.path.lexists(self.log_file):
            return
        damaged: dict[int, bytes] = {}
        with _replacing(self.log_file), appearing_whole(self.log_file) as file:
            for line in self._read_log(damaged):
                if line["step"] <= step:
                    file.write((json.dumps(line) + "\n").encode())
            if damaged:
                self._set_aside(damaged)

    def _read_log(self, damaged: dict[int, bytes]) -> Iterator[dict]:
        try:
            yield from stream_json_lines(self.log_file, damaged)
        except OSError as error:
            raise RunError(
                f"{self.log_file} cannot be read: {error}. Checkpoints were not touched. Move it elsewhere: the same"
                f" command continues with a new log."
            ) from None

    def _set_aside(self, damaged: dict[int, bytes]) -> None:
        """Add damaged lines of the log to log.damaged."""
        aside = self.directory / "log.damaged"
        logger.warning("%s; they are kept in %s", damage(self.log_file, damaged), aside)
        lost = b"".join(line + b"\n" for line in damaged.values())
        with _replacing(aside):
            before = disk.read_file(aside) if aside.is_file() and not aside.is_symlink() else b""
            replace_bytes(aside, before + lost)


@contextmanager
def _replacing(path: Path):
    try:
        yield
    except WriteError:  # it says what to do
        raise
    except OSError as error:
        raise WriteError(
            f"{path} could not be written: {error}. {remedy_for(error)}, and run the same command."
        ) from error


def _operational(config: StudentConfig) -> dict:
    settings = {name: value for name, value in config.to_json().items() if name not in config.identity()}

    def place(where: str | None) -> str | None:
        """An absolute path, valid from any directory. A URL without its password, or a Hub name as it is."""
        if where is None:
            return None
        where = os.path.expanduser(where)
        return os.path.abspath(where) if os.path.exists(where) else redacted(where)

    first, *others = map(place, config.stores or [None])
    settings |= {"store": first} | ({"other_stores": others} if others else {})
    if config.continue_from is not None:  # the run's identity holds only a hash of these weights, not their path
        settings["continued_from"] = str(config.continue_from.absolute())
    return settings | ({"student": place(settings["student"])} if "student" in settings else {})


def _check_unused(directory: Path) -> None:
    if not directory.exists():
        return
    table = re.compile(r"mask_weights(-\d+)?\.npz")  # as temporaries, of a process killed before it wrote config.json
    if not directory.is_dir() or not all(
        table.fullmatch(path.name) or disk.writer_of_temporary(path.name) is not None for path in directory.iterdir()
    ):
        raise RunError(
            f"{directory} is in use and holds no student run (it has no config.json). Nothing was changed. "
            f"Give another --run-dir (in a study: another --output)."
        )


RESULT = object_of(  # the fields of result.json that are shown, or that other commands take; a figure may be NaN
    {
        "objective": str,
        "encoder": str,
        "parameters": Count,
        "steps": Count,
        "tokens": Count,
        "tokens_per_second": float,
        "seconds_to_first_step": float | None,
        "held_out": dict[str, float],
        "baseline": dict[str, float],
        "flops": optional(float),
        "held_out_loss": optional(float | None),
        "baseline_loss": optional(float | None),
        "improvement": float | None,
    }
)


def _is_result(values) -> bool:
    if find_problem(values, RESULT) is not None:
        return False
    held_out, baseline = values["held_out"], values["baseline"]
    return are_figures(held_out) and are_figures(baseline) and bool(held_out) <= bool(baseline)


def _unknown_run(directory: Path, file: Path) -> str:
    """The message if config.json is damaged and no checkpoint shows whether the command belongs to the same run."""
    return (
        f"{file} is damaged or lost, so we cannot tell whether {directory} is a run with these settings: its newest"
        f" whole checkpoint, if there is one, has other settings. Nothing was changed. Put back a copy of config.json,"
        f" or repeat the run's own settings; the weights of a kept checkpoint can be trained further with"
        f" --continue-from <it> and another --run-dir."
    )
