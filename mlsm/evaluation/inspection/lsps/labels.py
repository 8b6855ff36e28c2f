"""Names of LSPs (WordNet synsets and lexicographer files) from a word-sense diagnostic, if one has run.

    labels = find_labels(dictionary fingerprint, place)

choose-layer writes <place>/diagnostics/*/layer-*-k*/labels.json: {"dictionary": fingerprint, "layer", "k", "lsps": [{
"synsets": [{"synset", "lemmas", "lexname", "npmi", "mass"}, …], "lexnames": [[name, share], …]}, …]}. Labels belong to
one dictionary: those of another would name other LSPs, so the fingerprint decides. Not handled here: making them.
"""

import json
from pathlib import Path

from mlsm.common.disk import read_file
from mlsm.common.errors import InspectionError
from mlsm.common.invocation import program

PATTERNS = ("labels.json", "layer-*-k*/labels.json", "*/layer-*-k*/labels.json", "diagnostics/*/layer-*-k*/labels.json")


def find_labels(fingerprint: str | None, place: Path) -> list[dict] | None:
    """The labels of a dictionary's LSPs under a directory, None when there are none.

    place    a diagnostic, one of its layers, or the directory that `diagnostics` is in
    Returns  list with one entry an LSP, from the file that was written last
    """
    found = []
    for path in {path for pattern in PATTERNS for path in place.glob(pattern)}:
        kept = _read(path)
        if kept and kept["dictionary"] == fingerprint:
            found.append((path.stat().st_mtime_ns, str(path), kept["lsps"]))
    return max(found)[2] if found else None


def require_labels(fingerprint: str | None, directory: Path) -> list[dict]:
    """Labels from a directory that the user named. Raises InspectionError if it has none for this dictionary."""
    labels = find_labels(fingerprint, directory)
    if labels is None:
        raise InspectionError(
            f"--diagnostic {directory} has no labels.json of this dictionary "
            f"({(fingerprint or 'unknown')[:12]}). Run the diagnostic with it:  {program()} choose-layer --help"
        )
    return labels


def _read(path):
    try:
        kept = json.loads(read_file(path))
        return kept if isinstance(kept["lsps"], list) and "dictionary" in kept else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # of another version, or half copied: labels are a help, not a condition


def shorten(label: dict | None) -> str:
    """A label in a few words: the first synset's lemmas and lexicographer file, else the first file; "" without any."""
    if not label:
        return ""
    for synset in label.get("synsets", [])[:1]:
        return f"{', '.join(synset['lemmas'][:3])} · {synset['lexname']}"
    return "".join(name for name, _ in label.get("lexnames", [])[:1])
