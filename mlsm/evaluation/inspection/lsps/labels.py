"""Names of LSPs (WordNet synsets and lexicographer files) from a word-sense diagnostic, if one has run.

    labels = find_labels(dictionary fingerprint, None, near=Path("runs"))

choose-layer writes <output>/diagnostics/*/layer-*-k*/labels.json: {"dictionary": fingerprint, "layer", "k", "lsps": [{
"synsets": [{"synset", "lemmas", "lexname", "npmi", "mass"}, …], "lexnames": [[name, share], …]}, …]}. Labels belong to
one dictionary: those of another would name other LSPs, so the fingerprint decides. Not handled here: making them.
"""

import json
from pathlib import Path

from mlsm.common.disk import read_file
from mlsm.common.errors import InspectionError
from mlsm.common.invocation import program

PATTERNS = ("labels.json", "layer-*-k*/labels.json", "*/layer-*-k*/labels.json", "diagnostics/*/layer-*-k*/labels.json")


def find_labels(fingerprint: str | None, diagnostic: Path | None, near: Path) -> list[dict] | None:
    """The labels of a dictionary's LSPs, None when there are none.

    diagnostic  directory that the user named, which must have labels: a diagnostic, one of its layers, or the directory
                that `diagnostics` is in
    near        the directory to look into instead, if none was named
    Returns     list with one entry an LSP, from the file that was written last
    Raises      InspectionError if the directory that was named has none for this dictionary
    """
    found = []
    for path in {path for pattern in PATTERNS for path in (diagnostic or near).glob(pattern)}:
        kept = _read(path)
        if kept and kept["dictionary"] == fingerprint:
            found.append((path.stat().st_mtime_ns, str(path), kept["lsps"]))
    if diagnostic is not None and not found:
        raise InspectionError(
            f"--diagnostic {diagnostic} has no labels.json of this dictionary "
            f"({(fingerprint or 'unknown')[:12]}). Run the diagnostic with it:  {program()} choose-layer --help"
        )
    return max(found)[2] if found else None


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
