"""The identity of a run: the settings, store and encoder that define it, and how two runs differ.

    identity = run_identity(config, store, encoder_config)
    directory_of(config, identity, encoder_config)        # where this run is, or would be started

A run's config.json holds its identity. Not handled here: what else a run's directory holds (directory.py).
"""

import glob
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path

from mlsm.common import disk
from mlsm.common.disk import file_sha256
from mlsm.common.errors import RunError
from mlsm.common.json_checks import find_problem, object_of, optional
from shards.manifest import fingerprint
from shards.reader import Store, is_url
from student.config import StudentConfig

logger = logging.getLogger(__name__)

_PLACES = object_of(
    dict.fromkeys(("store", "student", "continued_from"), optional(str | None)) | {"other_stores": optional(list[str])}
)
DESCRIPTION = object_of(  # the parts of a run's config.json that are read
    {"settings": dict, "store": dict, "operational": _PLACES, "architecture": dict}
)


def run_identity(config: StudentConfig, store: Store, encoder_config: dict, settings: dict | None = None) -> dict:
    """The facts that two commands must share to be the same run."""
    encoder_config = {name: value for name, value in encoder_config.items() if name != "transformers_version"}
    settings = dict(config.identity() if settings is None else settings)
    if config.initial_weights is not None:  # identified by content, not path
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
    """The content of a run's config.json; None if there is none, or if it is damaged or not a run's."""
    return read_or_none(directory / "config.json", lambda values: find_problem(values, DESCRIPTION) is None)


def read_or_none(path: Path, is_whole: Callable) -> dict | None:
    """The content of a JSON file; None if there is none, or it does not pass the check `is_whole`."""
    try:
        values = json.loads(disk.read_file(path))
    except (OSError, ValueError, RecursionError):
        return None
    return values if is_whole(values) else None


def check_same_run(directory: Path, kept: dict, identity: dict, encoder_config: dict, store: Store) -> None:
    found, expected = _flat(kept), _flat(identity)
    if names := differing_settings(kept, identity, encoder_config):
        values = {name: (found.get(name, "not set"), expected.get(name, "not set")) for name in names}
        differing = [f"{name} (there {there}, now {now})" for name, (there, now) in values.items()]
        raise RunError(
            f"{directory} holds another run, which differs in {', '.join(differing)}. "
            f"Nothing was changed. Give another --run-dir (in a study: another --output), or repeat the settings in "
            f"{directory}/config.json."
            f"{_older_plan(found, expected, store)}"
        )


def differing_settings(kept: dict, identity: dict, encoder_config: dict) -> list[str]:
    """The settings in which a run's config.json differs from an identity.

    A dropout that is set to the encoder's own value equals one that is unset. A pooler's dropout is ignored, because
    our encoders have no pooler.
    """
    found, expected = _flat(kept), _flat(identity)
    names = [name for name in {**expected, **found} if found.get(name) != expected.get(name)]
    left_open = None in (found.get("dropout"), expected.get("dropout"))
    if left_open and _without_pooler(kept["architecture"]) == _without_pooler(encoder_config):
        return [name for name in names if name not in ("dropout", "encoder config")]
    return names


def _without_pooler(encoder_config: dict) -> dict:
    unused = ("pooler_dropout", "transformers_version")
    return {name: value for name, value in encoder_config.items() if name not in unused}


def directory_of(config: StudentConfig, identity: dict, encoder_config: dict) -> Path:
    """The directory of a run. By default a run that was started with its dropout set or unset is found either way."""
    if config.run_dir is not None:
        return config.run_dir
    usual = Path(config.root) / default_name(config, identity)
    if not usual.exists():
        for directory, found in _runs_like(usual):
            if not differing_settings(found, identity, encoder_config):
                return directory
    return usual


def warn_of_older_plan(new: Path, identity: dict, encoder_config: dict, store: Store) -> None:
    """Name unfinished runs beside a new one that differ only in the plan of the store, and in steps that follow."""
    for directory, found in _runs_like(new):
        older = _older_plan(_flat(found), _flat(identity), store)
        alike = set(differing_settings(found, identity, encoder_config)) <= {"store plan", "max_steps"}
        if older and alike and not (directory / "result.json").exists():
            logger.warning("%s is unfinished; this command starts another run.%s", directory, older)


def _runs_like(directory):
    """Pairs (directory, description) of the runs whose default names differ at most in the last part."""
    for file in sorted(directory.parent.glob(f"{glob.escape(directory.name.rpartition('-')[0])}-*/config.json")):
        if (found := find_description(file.parent)) is not None:
            yield file.parent, found


def _older_plan(found: dict, expected: dict, store) -> str:
    """How to continue a run that read another plan of the store, perhaps before it grew; empty for other runs."""
    plan = f"{store.path}/plans/{found.get('store plan')}.json"
    changed = {name for name in ("store target", "store plan") if found.get(name) != expected[name]}
    grown = changed == {"store plan"} and (is_url(plan) or Path(plan).is_file())
    return f" It read another plan of this store, and continues with --store {plan}" if grown else ""


def _flat(identity: dict) -> dict:
    store = {f"store {name}": value for name, value in identity["store"].items()}
    return identity["settings"] | store | {"encoder config": identity.get("encoder")}
