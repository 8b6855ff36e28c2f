"""The directory of one run: what belongs to it, its log, and whether it is finished.

    config.json    settings, fingerprints of the store, the encoder's config (export-student builds the encoder
                   from it); written first, never changed
    log.jsonl      one line per step; a resumed run drops the lines of steps that it will do again, so that
                   the log reads like that of an unbroken run
    checkpoints/   checkpoint.py
    export/        export.py
    result.json    the summary; its presence means finished

Left out: what is trained (trainer.py).
"""

import fcntl
import json
import logging
import os
import re
from contextlib import contextmanager
from pathlib import Path

from shards import disk
from shards.manifest import file_sha256, fingerprint
from student.checkpoint import remove_leftovers
from student.config import StudentConfig
from student.errors import RunError, WriteError

logger = logging.getLogger(__name__)


class Run:
    """Create the directory of a run, or open it again after checking that it is the same run.

    create  whether to create it; of several processes the first has done so
    Raises RunError, naming the settings that differ, where the directory holds another run.
    """

    def __init__(self, config: StudentConfig, store, encoder_config: dict, create: bool = True):
        identity = run_identity(config, store, encoder_config)
        self.directory = Path(config.output or Path(config.root) / default_name(config, identity))
        self.config_file = self.directory / "config.json"
        self.log_file = self.directory / "log.jsonl"
        self.result_file = self.directory / "result.json"
        self.checkpoint_directory = self.directory / "checkpoints"
        self.export_directory = self.directory / "export"
        if self.config_file.exists():
            _check_same_run(self.directory, read_json(self.config_file), identity, store)
        elif not create:
            raise RunError(
                f"{self.directory} is not seen by every process. Give an --output on a file system that the machines"
                f" share."
            )
        else:
            _check_unused(self.directory)
            self.directory.mkdir(parents=True, exist_ok=True)
            kept = {"operational": _operational(config), "architecture": encoder_config}
            replace_json(self.config_file, identity | kept)

    def places(self) -> dict:
        """Where a person finds the run and what it exported."""
        return {"run": str(self.directory), "export": str(self.export_directory)}

    def result(self) -> dict | None:
        """The summary of a finished run; None while it is not finished."""
        return read_json(self.result_file) if self.result_file.exists() else None

    def finish(self, result: dict) -> None:
        """Write the summary: from now on the run is finished."""
        replace_json(self.result_file, result)

    @contextmanager
    def locked(self):
        """Keep other processes from training this run meanwhile. RunError where one does.

        Warns where the file system has no locks; then nothing keeps them.
        """
        with open(self.directory / "lock", "a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(
                    f"another process is training {self.directory}. Wait for it, stop it, or give another --output."
                ) from None
            except OSError as error:
                logger.warning("%s cannot be locked (%s); start no second process of this run", self.directory, error)
            yield

    def clean(self) -> None:
        """Remove temporaries of a killed process."""
        for directory in (self.directory, self.checkpoint_directory):
            remove_leftovers(directory)

    def log(self, line: dict) -> None:
        """Append a line to the log."""
        try:
            with open(self.log_file, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise WriteError(
                f"{self.log_file} could not be written: {error}. Checkpoints were not touched. Make room, and run the"
                f" same command: it continues from the newest."
            ) from error

    def drop_log_after(self, step: int) -> None:
        """Forget log lines of later steps, which will be done again, and a line cut by a kill."""
        if not self.log_file.exists():
            return
        lines = self.log_file.read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if _step_of(line) <= step]
        _replace_text(self.log_file, "".join(line + "\n" for line in kept))


def run_identity(config: StudentConfig, store, encoder_config: dict) -> dict:
    """What two commands must share to be the same run."""
    encoder_config = {name: value for name, value in encoder_config.items() if name != "transformers_version"}
    settings = config.identity()
    if config.continue_from is not None:    # its content counts, not its place
        weights = sorted(config.initial_weights.glob("*.safetensors"))
        settings["continue_from"] = fingerprint([file_sha256(path) for path in weights])
    return {
        "settings": settings,
        "store": {"target": store.target_id, "plan": store.plan_id, "kind": store.kind, "k": store.k},
        "encoder": fingerprint(encoder_config),
    }


def default_name(config: StudentConfig, identity: dict) -> str:
    """<objective, or a probe's input>-<encoder>-seed<seed>-<8 hexadecimal digits of settings and store>."""
    path = Path(config.encoder_source)
    encoder = re.sub(r"[^A-Za-z0-9.]+", "-", (path.parent if path.name == "config.json" else path).name)
    return f"{config.kind}-{encoder}-seed{config.seed}-{fingerprint(identity)[:8]}"


def read_json(path: Path) -> dict:
    """Read one of a run's JSON files; RunError when it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"{path} is not JSON ({error}). Give another --output, or delete {path.parent}.") from None


def replace_json(path: Path, value: dict) -> None:
    """Write a JSON file that appears whole."""
    _replace_text(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def _replace_text(path: Path, text: str) -> None:
    temporary = disk.temporary_name(path.parent, path.name)
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        disk.rename(temporary, path)
    except OSError as error:
        raise WriteError(f"{path} could not be written: {error}. Make room, and run the same command.") from error
    finally:
        disk.discard(temporary)
    disk.fsync_path(path.parent)


def _operational(config: StudentConfig) -> dict:
    settings = {name: value for name, value in config.to_json().items() if name not in config.identity()}
    for name in ("store", "student"):    # found again from another directory; a URL or a name on the Hub stays
        if settings.get(name) is not None and os.path.isdir(settings[name]):
            settings[name] = os.path.abspath(settings[name])
    return settings


def _check_same_run(directory: Path, found: dict, expected: dict, store) -> None:
    found, expected = _flat(found), _flat(expected)
    differing = [
        f"{name} (there {found.get(name)}, now {value})"
        for name, value in expected.items()
        if found.get(name) != value
    ]
    if differing:
        raise RunError(
            f"{directory} holds another run, which differs in {', '.join(differing)}. "
            f"Nothing was changed. Give another --output, or repeat the settings in {directory}/config.json."
            f"{_older_plan(found, expected, store)}"
        )


def _older_plan(found: dict, expected: dict, store) -> str:
    """Where the plan of the run is when the store has grown since."""
    plan = f"{store.path}/plans/{found.get('store plan')}.json"
    changed = {name for name in ("store target", "store plan") if found.get(name) != expected[name]}
    grown = changed == {"store plan"} and Path(plan).is_file()
    return f" The store has grown since: the run goes on with --store {plan}" if grown else ""


def _check_unused(directory: Path) -> None:
    if not directory.exists():
        return
    leftover = re.compile(r"\..*\.tmp")    # of a process killed before it wrote config.json
    if not directory.is_dir() or not all(leftover.fullmatch(path.name) for path in directory.iterdir()):
        raise RunError(
            f"{directory} is in use and holds no student run (it has no config.json). Nothing was changed. "
            f"Give another --output."
        )


def _flat(identity: dict) -> dict:
    store = {f"store {name}": value for name, value in identity.get("store", {}).items()}
    return identity.get("settings", {}) | store | {"encoder config": identity.get("encoder")}


def _step_of(line: str) -> float:
    try:
        return json.loads(line).get("step", 0)
    except ValueError:
        return float("inf")
