"""TensorBoard, Weights & Biases and trackio as mirrors of a run's log, through accelerate's trackers.

    with start_trackers(names, run, settings, step) as trackers:
        trackers.log(line)

log.jsonl is the authoritative record; a tracker gets its figures by step. When a tracker starts for a resumed run, or
for a run that was not tracked before, it gets only the lines that it lacks. So its curves have every step once. If a
tracker fails during training, it is dropped with a warning and the run continues. Only the packages of the trackers in
use are imported. Not handled here: who calls this (the first process of a run, train.py).
"""

import json
import logging
import os
import re
import stat
import sys
import time
import uuid
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path

from mlsm.common import disk
from mlsm.common.durable import make_directories, replace_bytes
from mlsm.common.errors import RunError
from mlsm.common.json_lines import stream_json_lines
from student.runs.directory import Run

logger = logging.getLogger(__name__)

PROJECT = "mlsm"
_WANDB_LINKS = ("latest-run", "debug.log", "debug-internal.log", "debug-core.log")  # the last one by wandb 0.31


def check_trackers(names: tuple[str, ...]) -> None:
    """Raises RunError if the package of a tracker is not installed."""
    for name in names:
        missing = [package for package in ("accelerate", name) if find_spec(package) is None]
        if missing:
            raise RunError(
                f"--track {name} needs {' and '.join(missing)}, not installed here. Run:"
                f'  pip install {" ".join(missing)}   (or "mlsm-pretrain[track]"), or leave it out.'
            )


def start_trackers(names: tuple[str, ...], run: Run, settings: dict, step: int) -> "Trackers":
    """Start the trackers of a run and pass them all lines of its log up to `step` that they lack.

    run       its log has no lines after `step`
    settings  JSON values, shown with the run
    Raises    RunError if one cannot be started: no login, no network, no room on the disk
    """
    if not names:
        return Trackers([])
    directory = run.directory / "tracking"
    make_directories(directory)
    _check_place(directory)
    trackers = Trackers([_start(name, run.directory.resolve().name, directory, settings, step) for name in names])
    if run.log_file.exists():
        for line in stream_json_lines(run.log_file, {}):
            trackers.log(line)
    return trackers


def _check_place(directory):
    """Raise RunError if a link leads trackers, which follow links, away, or settings files are in the way.

    The links that wandb makes for convenience are removed; wandb makes them again.
    """
    for path in sorted(directory.rglob("*")):
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode) and path.name in _WANDB_LINKS and directory / "wandb" in path.parents:
            disk.unlink(path)
        elif not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)) or path == directory / "wandb" / "settings":
            what = "settings of wandb" if stat.S_ISREG(mode) else disk.kind_of_file(path.lstat())
            raise RunError(
                f"--track: {path} is {what}, which our trackers never make, so nothing is written there. Remove it, or"
                f" leave --track out."
            )


class Trackers:
    """The trackers that were started: pairs of an accelerate tracker and the first step that it lacks."""

    def __init__(self, started: list):
        self.started = started

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for tracker, _ in self.started:
            with redirect_stdout(sys.stderr):
                self._try(tracker, tracker.finish)

    def log(self, line: dict) -> None:
        """Pass on the figures of one line of log.jsonl."""
        figures = figures_of(line)
        for tracker, first in list(self.started):
            if figures and line["step"] >= first:
                self._try(tracker, lambda tracker=tracker: tracker.log(figures, step=line["step"]))

    def _try(self, tracker, action) -> None:
        try:
            action()
        except Exception as error:  # any error of its service or the network
            logger.warning("%s fails (%s: %s); training continues", tracker.name, type(error).__name__, error)
            self.started = [other for other in self.started if other[0] is not tracker]


def figures_of(line: dict) -> dict[str, float]:
    """The numbers in the line of a training step, nested ones as outer/inner; empty for any other line."""
    if "loss" not in line:
        return {}
    flat = {name: value for name, value in line.items() if not isinstance(value, dict)}
    for outer, values in line.items():
        if isinstance(values, dict):
            flat |= {f"{outer}/{inner}": value for inner, value in values.items()}
    numbers = {name: value for name, value in flat.items() if isinstance(value, int | float)}
    return {name: value for name, value in numbers.items() if name != "step"}


def _start(name: str, title: str, directory: Path, settings: dict, step: int):
    start = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}[name]
    try:
        from accelerate import PartialState

        PartialState()  # accelerate's loggers require it
        with redirect_stdout(sys.stderr):  # what they print is no part of our output
            return start(title, directory, settings, step)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        hint = " Log in, or set WANDB_MODE=offline." if name == "wandb" else ""
        raise RunError(f"--track {name}: {type(error).__name__}: {reason}.{hint} Or leave it out.") from None


def _tensorboard(title, directory, settings, step):
    """Event files under tracking/tensorboard. A new file makes TensorBoard drop the steps that are done again."""
    from accelerate.tracking import TensorBoardTracker

    newest = directory / "tensorboard.step"  # last step in the event files; after a kill maybe an earlier one
    noted = disk.read_file(newest) if newest.exists() else b""
    known = min(step, int(noted)) if noted.isdigit() else 0  # if damaged, TensorBoard gets everything again
    first = known + 1 if known else 0
    # TensorBoard reads event files by name, which has whole seconds: the new file has to sort after the others.
    seconds = [int(file.name.split(".")[3]) for file in (directory / "tensorboard").glob("events.out.tfevents.*")]
    time.sleep(min(1.0, max(0.0, max(seconds, default=0) + 1 - time.time())))

    class Board(TensorBoardTracker):
        def log(self, values, step, **kwargs):
            super().log(values, step=step, **kwargs)  # and flushes
            replace_bytes(newest, str(step).encode(), sync=False)

    tracker = Board("tensorboard", directory, purge_step=first)
    tracker.main_process_only = False
    tracker.start()
    if not known:
        tracker.log({"settings": json.dumps(settings, indent=1)}, step=0)
    return tracker, first


def _wandb(title, directory, settings, step):
    """A run that continues under its id. Offline, every start writes a whole run with that id; the last is valid."""
    import wandb
    from accelerate.tracking import WandBTracker

    tracker = WandBTracker(
        os.environ.get("WANDB_PROJECT", PROJECT),
        name=title,
        id=_id(directory),
        resume="allow",
        dir=directory,
        config=settings,
        settings=wandb.Settings(console="off"),
    )
    tracker.start()
    return tracker, tracker.run.step


def _trackio(title, directory, settings, step):
    """A run that continues under its name: trackio identifies runs only by name."""
    from accelerate.tracking import TrackioTracker

    tracker = TrackioTracker(PROJECT, name=f"{title}-{_id(directory)}", resume="allow", embed=False, config=settings)
    tracker.start()
    return tracker, getattr(tracker.run, "_next_step", 0)  # the one after the last that it has stored


def _id(directory: Path) -> str:
    """Eight hexadecimal digits that are fixed for this run's directory."""
    file = directory / "id"
    if not file.exists() or not re.fullmatch(rb"[0-9a-f]{8}", disk.read_file(file)):
        replace_bytes(file, uuid.uuid4().hex[:8].encode())
    return disk.read_file(file).decode()
