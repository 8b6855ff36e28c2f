"""The directory of one run: what belongs to it, its log, and whether it is finished.

    config.json    settings, fingerprints of the store, the encoder's config (export-student builds the encoder
                   from it), how the gradient's norm is summed; written first, never changed
    log.jsonl      one line per step; a resumed run drops the lines of steps that it will do again, so that
                   the log reads like that of an unbroken run
    checkpoints/   checkpoint.py
    export/        export.py
    result.json    the summary; its presence means finished
    log.damaged    lines of the log that could not be read when the run was resumed

What is lost or damaged while the checkpoints are whole is made anew by the same command: the log without its damaged
lines, the summary from the last checkpoint, config.json if the checkpoints are of the same settings. Left out: what
is trained (trainer.py).
"""

import fcntl
import glob
import json
import logging
import os
import re
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

from common.errors import RunError, WriteError
from common.json_lines import damage, read_json_lines
from common.paths import utf8
from common.text import redacted
from shards import disk
from shards.manifest import file_sha256, fingerprint
from student.checkpoint import Checkpoints, remove_leftovers
from student.config import StudentConfig

logger = logging.getLogger(__name__)

# What runs do by default since they have these keys in their settings, and the flag that does without, as runs of
# earlier versions did.
_LATER_DEFAULTS = {
    "tied": ("ties the vocabulary's rows of the output matrix to the token embedding", "--untied"),
    "segments": ("tells the encoder which sentence of a pair a token belongs to", "--segments never"),
}


class Run:
    """Create the directory of a run, or open it again after checking that it is the same run.

    settings  those that decide what is trained (task.py); by default the configuration's
    create    whether to create it; of several processes the first has done so
    Raises RunError, naming the settings that differ, where the directory holds another run; or where an earlier version
    has begun a run of the same command, without a default that was added since, and it is unfinished.
    """

    def __init__(self, config: StudentConfig, store, encoder_config: dict, settings: dict | None = None,
                 create: bool = True):  # fmt: skip
        self.identity = identity = run_identity(config, store, encoder_config, settings)
        self.directory = Path(config.output or _default_directory(config, identity, encoder_config))
        self.config_file = self.directory / "config.json"
        self.log_file = self.directory / "log.jsonl"
        self.result_file = self.directory / "result.json"
        self.checkpoint_directory = self.directory / "checkpoints"
        self.export_directory = self.directory / "export"
        place = Path(config.root) if config.output is None else self.directory
        self.marginals_directory = place.parent / ".marginals"    # shared by runs: see position_marginals.py
        self.norm_in_blocks = True
        found = _read_or_none(self.config_file, _is_description)
        if found is not None and not _differing(found, identity, encoder_config):
            self._go_on(found)
            return
        newest = self._newest_checkpoint() if create else None
        if newest is not None and newest.get("run") == fingerprint(identity):
            logger.warning("%s was damaged or lost: written anew, as the checkpoints are of these settings",
                           self.config_file)
            self.norm_in_blocks = newest.get("gradient_norm") == "blocks"
        elif found is not None:
            _check_same_run(self.directory, found, identity, encoder_config, store)
        elif newest is not None or self.config_file.exists():
            raise RunError(_unknown_run(self.directory, self.config_file))
        elif not create:
            raise RunError(
                f"{self.directory} is not seen by every process. Give an --output on a file system that the machines"
                f" share."
            )
        else:
            _check_unused(self.directory)
            _check_earlier_version(config, identity)
            self.directory.mkdir(parents=True, exist_ok=True)
        kept = {"operational": _operational(config), "architecture": encoder_config}
        replace_json(self.config_file, identity | kept | self.arithmetic())

    def _go_on(self, found: dict) -> None:
        """Continue as config.json says: with its spelling of the settings, and with the norm that it was begun with."""
        self.identity = {name: found[name] for name in self.identity}
        self.norm_in_blocks = found.get("gradient_norm") == "blocks"

    def arithmetic(self) -> dict:
        """How the gradient's norm is summed; empty in runs that were begun when one float32 sum gave it.

        Such a run ends with that sum, so that clipping never changes within a run.
        """
        return {"gradient_norm": "blocks"} if self.norm_in_blocks else {}

    def places(self) -> dict:
        """Where a person finds the run and what it exported."""
        return {"run": str(self.directory), "export": str(self.export_directory)}

    def _newest_checkpoint(self) -> dict | None:
        """The state of the newest whole checkpoint; None where there is none."""
        found = Checkpoints(self.checkpoint_directory, []).newest_whole()
        return None if found is None else found[1]

    def check_checkpoint(self, path: Path, state: dict) -> None:
        """RunError where a checkpoint says that it is another run's. Those of earlier versions do not say."""
        theirs = [state.get("run", fingerprint(self.identity)), state.get("plan"), state.get("target")]
        ours = [fingerprint(self.identity), self.identity["store"]["plan"], self.identity["store"]["target"]]
        if theirs != ours:
            raise RunError(
                f"{path} is a checkpoint of another run: other settings, store or encoder. Nothing was changed. Move it"
                f" elsewhere, or give another --output."
            )
        if "run" in state and state.get("gradient_norm") != self.arithmetic().get("gradient_norm"):
            raise RunError(
                f"{self.config_file}: field gradient_norm is not what {path} was trained with: it is damaged. Nothing"
                f" was changed. Move config.json elsewhere: the same command writes it anew."
            )

    def result(self) -> dict | None:
        """The summary of a finished run; None while it is not finished, or where the summary cannot be read."""
        result = _read_or_none(self.result_file, _is_result)
        if result is None and self.result_file.exists():
            logger.warning("%s is damaged; it is written anew from the last checkpoint", self.result_file)
        return result

    def finish(self, result: dict) -> None:
        """Write the summary: from now on the run is finished."""
        replace_json(self.result_file, result)

    @contextmanager
    def locked(self):
        """Keep other processes from training this run meanwhile. RunError where one does.

        Warns where the file system has no locks; then nothing keeps them.
        """
        with self._open_lock() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(
                    f"another process is training {self.directory}. Wait for it, stop it, or give another --output."
                ) from None
            except OSError as error:
                logger.warning("%s cannot be locked (%s); start no second process of this run", self.directory, error)
            yield

    def _open_lock(self):
        """The lock, opened; RunError where something that is no file has its name, which is not waited for."""
        path, flags = self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            return open(os.open(path, flags, 0o666), "a")
        except (OSError, ValueError) as error:
            raise RunError(f"{path} cannot be opened: {error}. Remove it; the same command makes it anew.") from None

    def clean(self) -> None:
        """Remove temporaries of a killed process."""
        for directory in (self.directory, self.checkpoint_directory):
            remove_leftovers(directory)

    def log(self, line: dict) -> None:
        """Append a line to the log."""
        with _writing(self.log_file), open(self.log_file, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def drop_log_after(self, step: int) -> None:
        """Forget log lines of later steps, which will be done again, and a line cut by a kill.

        Damaged lines go into log.damaged, so that any program can read the log.
        """
        if not os.path.lexists(self.log_file):
            return
        try:
            lines, damaged = read_json_lines(self.log_file)
        except OSError as error:
            raise RunError(
                f"{self.log_file} cannot be read: {error}. Checkpoints were not touched. Move it elsewhere: the same"
                f" command goes on with a new log."
            ) from None
        if damaged:
            aside = self.directory / "log.damaged"
            logger.warning("%s; they are kept in %s", damage(self.log_file, damaged), aside)
            with _writing(aside), open(aside, "ab") as file:
                file.writelines(line + b"\n" for line in damaged.values())
        _replace_text(self.log_file, "".join(json.dumps(line) + "\n" for line in lines if line["step"] <= step))


def run_identity(config: StudentConfig, store, encoder_config: dict, settings: dict | None = None) -> dict:
    """What two commands must share to be the same run."""
    encoder_config = {name: value for name, value in encoder_config.items() if name != "transformers_version"}
    settings = dict(config.identity() if settings is None else settings)
    if config.continue_from is not None:    # its content counts, not its place
        weights = sorted(config.initial_weights.glob("*.safetensors"))
        try:
            settings["continue_from"] = fingerprint([file_sha256(path) for path in weights])
        except OSError as error:
            raise RunError(
                f"--continue-from: {error.filename} cannot be read: {error.strerror}. Export it again."
            ) from None
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


def find_description(directory: Path) -> dict | None:
    """What a run's config.json says; None where the directory has none, or one that is not a run's, or is damaged."""
    return _read_or_none(directory / "config.json", _is_description)


def read_json(path: Path) -> dict:
    """Read a run's config.json; RunError when it is damaged."""
    description = _read_or_none(path, _is_description)
    if description is None:
        raise RunError(
            f"{path} is damaged; the checkpoints beside it were not touched. Run the command that trains this run once"
            f" more: it writes the file anew."
        )
    return description


def replace_json(path: Path, value: dict) -> None:
    """Write a JSON file that appears whole."""
    _replace_text(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


def _replace_text(path: Path, text: str) -> None:
    temporary = disk.temporary_name(path.parent, path.name)
    try:
        with open(temporary, "wb") as file:
            file.write(utf8(text))
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
        elif isinstance(settings.get(name), str):    # what is written down has no password
            settings[name] = redacted(settings[name])
    return settings


def _check_same_run(directory: Path, kept: dict, identity: dict, encoder_config: dict, store) -> None:
    found, expected = _flat(kept), _flat(identity)
    if names := _differing(kept, identity, encoder_config):
        values = {name: (found.get(name, "not set"), expected.get(name, "not set")) for name in names}
        differing = [f"{name} (there {there}, now {now})" for name, (there, now) in values.items()]
        raise RunError(
            f"{directory} holds another run, which differs in {', '.join(differing)}. "
            f"Nothing was changed. Give another --output, or repeat the settings in {directory}/config.json."
            f"{_older_plan(found, expected, store)}{_older_defaults(names, found)}"
        )


def _differing(kept: dict, identity: dict, encoder_config: dict) -> list[str]:
    """The settings in which a run's config.json differs from an identity.

    A dropout that was given and is the encoder's own is the same as one that was left open. A pooler's counts for
    nothing: our encoders have none.
    """
    found, expected = _flat(kept), _flat(identity)
    names = [name for name in {**expected, **found} if found.get(name) != expected.get(name)]
    left_open = None in (found.get("dropout"), expected.get("dropout"))
    if left_open and _without_pooler(kept.get("architecture", {})) == _without_pooler(encoder_config):
        return [name for name in names if name not in ("dropout", "encoder config")]
    return names


def _without_pooler(encoder_config: dict) -> dict:
    unused = ("pooler_dropout", "transformers_version")
    return {name: value for name, value in encoder_config.items() if name not in unused}


def _default_directory(config: StudentConfig, identity: dict, encoder_config: dict) -> Path:
    """Where a run lies that is given no directory: where it was begun, with its dropout given or left open."""
    root, name = Path(config.root), default_name(config, identity)
    if not (root / name).exists():
        for file in sorted(root.glob(f"{glob.escape(name.rpartition('-')[0])}-*/config.json")):
            found = _read_or_none(file, _is_description)
            if found is not None and not _differing(found, identity, encoder_config):
                return file.parent
    return root / name


def _older_plan(found: dict, expected: dict, store) -> str:
    """Where the plan of the run is when the store has grown since."""
    plan = f"{store.path}/plans/{found.get('store plan')}.json"
    changed = {name for name in ("store target", "store plan") if found.get(name) != expected[name]}
    grown = changed == {"store plan"} and Path(plan).is_file()
    return f" The store has grown since: the run goes on with --store {plan}" if grown else ""


def _older_defaults(differing: list, found: dict) -> str:
    """With which flags a run goes on that differs only in defaults that were added after it was begun."""
    if any(name not in _LATER_DEFAULTS or name in found for name in differing):
        return ""
    flags = " ".join(_LATER_DEFAULTS[name][1] for name in differing)
    return f" An earlier version began that run: it goes on with {flags}"


def _check_earlier_version(config: StudentConfig, identity: dict) -> None:
    """RunError where an unfinished run of an earlier version has the name that this command had then.

    A finished one is told of: it is not trained again, another run is.
    """
    later = [name for name in _LATER_DEFAULTS if name in identity["settings"]]
    settings = {name: value for name, value in identity["settings"].items() if name not in later}
    earlier = Path(config.root) / default_name(config, identity | {"settings": settings})
    if config.output is not None or not later or not (earlier / "config.json").is_file():
        return
    found = _read_or_none(earlier / "config.json", _is_description)
    if found is None or "segments" in found.get("operational", {}):    # damaged, or begun since and asked for
        return
    what = " and ".join(_LATER_DEFAULTS[name][0] for name in later)
    flags = " ".join(_LATER_DEFAULTS[name][1] for name in later)
    if (earlier / "result.json").is_file():
        logger.warning("%s was trained by an earlier version; this is another run, which %s (without: %s)",
                       earlier, what, flags)  # fmt: skip
        return
    raise RunError(
        f"{earlier} was begun by an earlier version and is unfinished. It goes on with {flags}. This command would"
        f" begin another run, which {what}: to do that, give an --output."
    )


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


def _read_or_none(path: Path, is_whole: Callable) -> dict | None:
    """A JSON file; None where there is none, or it is not what it should be."""
    try:
        values = json.loads(disk.read_file(path))
    except (OSError, ValueError, RecursionError):
        return None
    return values if is_whole(values) else None


def _is_description(values) -> bool:
    parts = {"settings": None, "store": None, "operational": {}, "architecture": {}}    # the earliest runs lack two
    return isinstance(values, dict) and all(isinstance(values.get(*part), dict) for part in parts.items())


def _is_result(values) -> bool:
    figures = {"parameters": int, "steps": int, "tokens": int, "tokens_per_second": float, "held_out": dict}
    figures |= {"baseline": dict, "objective": str, "encoder": str}
    known = isinstance(values, dict) and {"seconds_to_first_step", "improvement"} <= values.keys()
    return known and all(isinstance(values.get(name), kind) for name, kind in figures.items())


def _unknown_run(directory: Path, file: Path) -> str:
    """What to say where config.json is damaged, and no checkpoint tells whether the command is of the same run."""
    return (
        f"{file} is damaged or lost, and whether {directory} is a run of these settings cannot be told: its newest"
        f" whole checkpoint, if there is one, is of other settings or was saved by an earlier version. Nothing was"
        f" changed. Put back a copy of config.json, or repeat the run's own settings; the weights of a kept"
        f" checkpoint can be trained further with --continue-from <it> and another --output."
    )


@contextmanager
def _writing(file: Path):
    try:
        yield
    except OSError as error:
        raise WriteError(
            f"{file} could not be written: {error}. Checkpoints were not touched. Make room, and run the"
            f" same command: it continues from the newest."
        ) from error
