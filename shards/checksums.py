"""Fingerprints of settings, and the checksums that small JSON files carry.

Left out: reading the files (manifest.py), whether their fields are of the right kind (checked_json.py).
"""

import hashlib
import json
from collections.abc import Collection, Mapping

from common.paths import utf8

_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode


def canonical_json(value: object) -> str:
    """The one JSON text of a value: sorted keys, no spaces, so that equal settings have equal hashes."""
    return _canonical(value)


def fingerprint(value: object) -> str:
    """SHA-256 of the canonical JSON, as 32 hexadecimal digits."""
    return hashlib.sha256(utf8(canonical_json(value))).hexdigest()[:32]


def with_checksum(values: Mapping) -> dict:
    """A dict with a checksum over all the rest of it."""
    rest = {name: value for name, value in values.items() if name != "checksum"}
    return rest | {"checksum": fingerprint(rest)}


def fits_checksum(values: Mapping, fields: Collection[str]) -> bool:
    """Whether the checksum fits. Files that were written before there were checksums have exactly the `fields`."""
    rest = {name: value for name, value in values.items() if name != "checksum"}
    return values.keys() == fields if "checksum" not in values else values["checksum"] == fingerprint(rest)
