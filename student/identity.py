"""Which commands belong to the same run: the settings, store and encoder that make one, and how two runs differ.

    identity = run_identity(config, store, encoder_config)
    default_directory(config, identity, encoder_config)        # where such a run lies, or would be begun

A run's config.json holds its identity. Runs that earlier versions began lack what was added later; they are recognised
nevertheless. Left out: what else a run's directory holds (run.py).
"""

import glob
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import disk
from common.disk import file_sha256
from common.errors import RunError
from common.json_checks import find_problem, object_of, optional
from shards.manifest import fingerprint
from shards.reader import Store
from student.config import StudentConfig

logger = logging.getLogger(__name__)

_PLACES = object_of(
    dict.fromkeys(("store", "student", "continued_from"), optional(str | None)) | {"other_stores": optional(list[str])}
)
DESCRIPTION = object_of(  # a run's config.json, as far as it is read; the earliest runs lack the last two
    {"settings": dict, "store": dict, "operational": optional(_PLACES), "architecture": optional(dict)}
)

# Settings that were added later, with a new default: what a run with that key does, and the flag for the behaviour of
# earlier versions.
_LATER_DEFAULTS = {
    "tied": ("ties the vocabulary's rows of the output matrix to the token embedding", "--untied"),
    "segments": ("tells the encoder which sentence of a pair a token belongs to", "--segments never"),
}


def run_identity(config: StudentConfig, store: Store, encoder_config: dict, settings: dict | None = None) -> dict:
    """What two commands must share to be the same run."""
    encoder_config = {name: value for name, value in encoder_config.items() if name != "transformers_version"}
    settings = dict(config.identity() if settings is None else settings)
    if config.initial_weights is not None:  # their content counts, not their place
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
    """The content of a run's config.json; None where there is none, where it is damaged or not a run's."""
    return read_or_none(directory / "config.json", is_description)


def read_json(path: Path) -> dict:
    """Read a run's config.json; RunError when it is damaged."""
    description = read_or_none(path, is_description)
    if description is None:
        raise RunError(
            f"{path} is damaged; the checkpoints beside it were not touched. Run the command that trains this run once"
            f" more: it writes the file anew."
        )
    return description


def read_or_none(path: Path, is_whole: Callable) -> dict | None:
    """The content of a JSON file; None where there is none, or it does not pass the check `is_whole`."""
    try:
        values = json.loads(disk.read_file(path))
    except (OSError, ValueError, RecursionError):
        return None
    return values if is_whole(values) else None


def is_description(values: Any) -> bool:
    """Whether this is what a run's config.json holds."""
    return find_problem(values, DESCRIPTION) is None


def check_same_run(directory: Path, kept: dict, identity: dict, encoder_config: dict, store: Store) -> None:
    found, expected = _flat(kept), _flat(identity)
    if names := differing_settings(kept, identity, encoder_config):
        values = {name: (found.get(name, "not set"), expected.get(name, "not set")) for name in names}
        differing = [f"{name} (there {there}, now {now})" for name, (there, now) in values.items()]
        raise RunError(
            f"{directory} holds another run, which differs in {', '.join(differing)}. "
            f"Nothing was changed. Give another --output, or repeat the settings in {directory}/config.json."
            f"{_older_plan(found, expected, store)}{_older_defaults(names, found)}"
        )


def differing_settings(kept: dict, identity: dict, encoder_config: dict) -> list[str]:
    """The settings in which a run's config.json differs from an identity.

    A given dropout that equals the encoder's own is the same as one that was left open. A pooler's dropout does not
    count, because our encoders have no pooler.
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


def default_directory(config: StudentConfig, identity: dict, encoder_config: dict) -> Path:
    """The directory of a run that is given none: the one it was begun in, with its dropout given or left open."""
    root, name = Path(config.root), default_name(config, identity)
    if not (root / name).exists():
        for file in sorted(root.glob(f"{glob.escape(name.rpartition('-')[0])}-*/config.json")):
            found = read_or_none(file, is_description)
            if found is not None and not differing_settings(found, identity, encoder_config):
                return file.parent
    return root / name


def _older_plan(found: dict, expected: dict, store) -> str:
    """How to go on with a run whose store has grown since: the flag for its plan; empty for other runs."""
    plan = f"{store.path}/plans/{found.get('store plan')}.json"
    changed = {name for name in ("store target", "store plan") if found.get(name) != expected[name]}
    grown = changed == {"store plan"} and Path(plan).is_file()
    return f" The store has grown since: the run goes on with --store {plan}" if grown else ""


def _older_defaults(differing: list, found: dict) -> str:
    """How to go on with a run that differs only in defaults that were added later; empty for other runs."""
    if any(name not in _LATER_DEFAULTS or name in found for name in differing):
        return ""
    flags = " ".join(_LATER_DEFAULTS[name][1] for name in differing)
    return f" An earlier version began that run: it goes on with {flags}"


def check_earlier_version(config: StudentConfig, identity: dict) -> None:
    """RunError where an unfinished run of an earlier version has the name that this command had then.

    A finished one is only mentioned in a warning: it is not trained again, but another run is.
    """
    later = [name for name in _LATER_DEFAULTS if name in identity["settings"]]
    settings = {name: value for name, value in identity["settings"].items() if name not in later}
    earlier = Path(config.root) / default_name(config, identity | {"settings": settings})
    if config.output is not None or not later or not (earlier / "config.json").is_file():
        return
    found = read_or_none(earlier / "config.json", is_description)
    if found is None or "segments" in found.get("operational", {}):  # damaged, or begun by this version
        return
    what = " and ".join(_LATER_DEFAULTS[name][0] for name in later)
    flags = " ".join(_LATER_DEFAULTS[name][1] for name in later)
    if (earlier / "result.json").is_file():
        logger.warning(
            "%s was trained by an earlier version; this is another run, which %s (without: %s)", earlier, what, flags
        )
        return
    raise RunError(
        f"{earlier} was begun by an earlier version and is unfinished. It goes on with {flags}. This command would"
        f" begin another run, which {what}: to do that, give an --output."
    )


def _flat(identity: dict) -> dict:
    store = {f"store {name}": value for name, value in identity.get("store", {}).items()}
    return identity.get("settings", {}) | store | {"encoder config": identity.get("encoder")}
